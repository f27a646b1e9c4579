"""The report of a comparison: its table on the terminal, and one self-contained HTML file."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from lordo.trainer.compare import Row, modelled_seconds
from lordo.trainer.config import RunConfig
from lordo.trainer.folder import finite_or_none
from lordo.trainer.html_parts import page, pictures
from lordo.trainer.html_parts import table as html_table
from lordo.trainer.recipe import dumps
from lordo.trainer.summary import Summary
from lordo.trainer.terminal import human_bytes, plain_table
from lordo.trainer.units import bandwidth

NOTES = """\
Perplexity is that of the averaged model on validation files, mean ± standard deviation over seeds; every method starts from the
same weights and reads the same text. Bytes sent are counted per worker: a ring all-reduce of N bytes sends 2 (M−1)/M · N, a
broadcast (M−1)/M · N on average. Modelled seconds are one worker's compute as measured here plus its bytes over the link; latency
and overlap are left out.
* at a learning rate: it lies on the edge of those tried, so a better one may lie beyond."""


def table_cells(rows: Sequence[Row], links: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the comparison's table."""
    header = ["method", "lr", "perplexity", "sent/worker", "× less", "optimizer", "× less", "seconds here"]
    return header + [f"s at {link}" for link in links], [_cells(row, links) for row in rows]


def _cells(row: Row, links: Sequence[str]) -> list[str]:
    if not row.finished:
        return [row.label, f"{row.best_lr:g}", "failed", *["–"] * (5 + len(links))]
    summary = row.finished[0]
    spread = f" ± {row.spread:.3f}" if len(row.finished) > 1 else ""
    lost = len(row.results) - len(row.finished)
    return [
        row.label,
        f"{row.best_lr:g}{'*' if row.on_edge else ''}",
        f"{row.perplexity:.3f}{spread}" + (f" ({lost} failed)" if lost else ""),
        human_bytes(summary.sent),
        _ratio(summary.ddp_bytes, summary.sent),
        human_bytes(summary.held),
        _ratio(summary.adamw_bytes, summary.held),
        f"{sum(summary.seconds.values()):.0f}",
        *(f"{modelled_seconds(summary, bandwidth(link)):.1f}" for link in links),
    ]


def _ratio(reference: float, value: float) -> str:
    return f"{reference / value:.2f}" if value else "–"


def print_table(rows: Sequence[Row], links: Sequence[str], console: Console) -> None:
    """The table, what failed and why, and how to read it."""
    header, body = table_cells(rows, links)
    table = plain_table(*header)
    for cells in body:
        table.add_row(*cells)
    console.print(table)
    for line in failures(rows):
        console.print(line, highlight=False, soft_wrap=True, style="red")
    console.print(NOTES, highlight=False, soft_wrap=True)


def failures(rows: Sequence[Row]) -> list[str]:
    """A line for each member that failed."""
    return [f"failed: {row.label}, {reason}" for row in rows for reason in row.failures]


def write_page(rows: Sequence[Row], links: Sequence[str], figures: Mapping[str, Path], config: RunConfig, file: Path) -> None:
    """One HTML file that needs nothing else: table, figures, every learning rate tried, settings, machine."""
    header, cells = table_cells(rows, links)
    failed = "".join(f'<p class="failed">{html.escape(line)}</p>' for line in failures(rows))
    body = (
        f"{_intro(rows)}\n{html_table(header, cells)}\n{failed}<p>{html.escape(NOTES)}</p>\n"
        f"{pictures(figures)}\n<h2>Learning rates tried</h2>\n{html_table(['method', 'lr: perplexity at the first seed'], _tried(rows))}\n"
        f"<h2>Settings of the recipe</h2><pre>{html.escape(dumps(config))}</pre>\n{_environment(rows)}"
    )
    file.write_text(page(config.name, body), encoding="utf-8")


def _intro(rows: Sequence[Row]) -> str:
    summary = _first(rows)
    if summary is None:
        return "<p>No member finished.</p>"
    return (
        f"<p>{summary.num_parameters:,} parameters, {summary.workers} workers, {summary.steps} steps, {summary.tokens:,} tokens. "
        f"DDP with AdamW sends {human_bytes(summary.ddp_bytes)} per worker and holds {human_bytes(summary.adamw_bytes)}.</p>"
    )


def _first(rows: Sequence[Row]) -> Summary | None:
    return next((summary for row in rows for summary in row.finished), None)


def _tried(rows: Sequence[Row]) -> list[list[str]]:
    return [[row.label, ", ".join(f"{lr:g}: {perplexity:.3f}" for lr, perplexity in sorted(row.tried.items()))] for row in rows]


def _environment(rows: Sequence[Row]) -> str:
    summary = _first(rows)
    lines = [] if summary is None else [f"{name}: {value}" for name, value in summary.environment.items()]
    return f"<h2>Machine</h2><pre>{html.escape(chr(10).join(lines))}</pre>"


def write_results(rows: Sequence[Row], file: Path) -> None:
    """The table's numbers as JSON, with every learning rate tried and every seed."""
    results = [
        {
            "label": row.label,
            "method": row.method,
            "variant": dict(row.variant),
            "lr": row.best_lr,
            "lr_on_edge": row.on_edge,
            "perplexity": finite_or_none(row.perplexity),
            "spread": row.spread,
            "perplexity_per_seed": [finite_or_none(result.perplexity) for result in row.results],
            "tried": {f"{lr:g}": finite_or_none(perplexity) for lr, perplexity in row.tried.items()},
            "bytes_sent": row.finished[0].sent if row.finished else None,
            "state_bytes": row.finished[0].held if row.finished else None,
            "failures": row.failures,
        }
        for row in rows
    ]
    first = _first(rows)
    file.write_text(json.dumps({"rows": results, "environment": first.environment if first else {}}, indent=2) + "\n", encoding="utf-8")
