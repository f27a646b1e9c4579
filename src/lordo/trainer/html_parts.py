"""Pieces of a page: one HTML file that needs nothing else, pictures inside it."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
figure { margin: 2rem 0 }
figcaption { font-weight: 600 }
img { max-width: 100% }
pre { background: #f6f6f6; padding: 1rem; overflow: auto }
.failed { color: #a00 }
"""


def page(title: str, body: str) -> str:
    """A whole page around its body."""
    head = f"<meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en>{head}\n<h1>{html.escape(title)}</h1>\n{body}</html>\n"


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table; its cells are text."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>" for cells in body)
    return f"<table><tr>{head}</tr>{lines}</table>"


def pictures(figures: Mapping[str, Path]) -> str:
    """PNG files, each under its caption."""
    return "\n".join(
        f"<figure><figcaption>{html.escape(caption)}</figcaption>"
        f'<img alt="{html.escape(caption)}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"></figure>'
        for caption, path in figures.items()
    )
