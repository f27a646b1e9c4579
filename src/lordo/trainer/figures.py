"""The figures of a comparison, drawn with matplotlib from what its members recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window, whatever the machine has

import matplotlib.pyplot as plt

from lordo.accounting import STATE_KINDS
from lordo.trainer.compare import Row, mean_at, mean_curve, modelled_seconds
from lordo.trainer.units import bandwidth

SIZE = (8.5, 4.3)  # inches
DPI = 130


def draw(rows: Sequence[Row], links: Sequence[str], folder: Path) -> dict[str, Path]:
    """Draw every figure that the rows have data for; returns caption -> file, in the order they are to be read."""
    good = [row for row in rows if row.finished]
    drawn: dict[str, Path] = {}
    if not good:
        return drawn
    drawn["Validation loss against steps"] = _curves(good, folder / "loss-steps.png", "step", lambda row, steps: steps, log=False)
    drawn["Validation loss against bytes sent per worker"] = _curves(
        good, folder / "loss-bytes.png", "bytes sent per worker", lambda row, steps: mean_at(row, "bytes_sent", steps), log=True
    )
    for link in links:
        file = folder / f"loss-seconds-{link.replace(' ', '')}.png"
        drawn[f"Validation loss against modelled seconds at {link}"] = _curves(
            good, file, f"modelled seconds at {link}", lambda row, steps, link=link: _seconds(row, steps, link), log=True
        )
    if any(mean_curve(row, "overlap_with_first")[0] for row in good):
        drawn["Overlap of the bases with the first ones"] = _overlap(good, folder / "overlap.png")
    drawn["Optimizer memory per worker"] = _memory(good, folder / "memory.png")
    if any(row.variant for row in good):
        drawn["Perplexity against what is varied"] = _varied(good, folder / "varied.png")
    return drawn


def _curves(rows: Sequence[Row], file: Path, xlabel: str, place: Any, *, log: bool) -> Path:
    """Validation loss of every row against something, given as a function of the row and the steps."""
    figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
    for i, row in enumerate(rows):
        steps, losses = mean_curve(row, "validation_loss")
        axes.plot(place(row, steps), losses, label=row.label, **line_style(i))
    if log and all(row.finished[0].sent for row in rows):
        axes.set_xscale("log")
    axes.set(xlabel=xlabel, ylabel="validation loss (nats per token)")
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside right upper")
    return save(figure, file)


def _seconds(row: Row, steps: Sequence[int], link: str) -> list[float]:
    """Modelled seconds after each of the steps."""
    summary = row.finished[0]
    compute = modelled_seconds(summary, float("inf")) / summary.steps
    sent = mean_at(row, "bytes_sent", steps)
    return [step * compute + 8 * each / bandwidth(link) for step, each in zip(steps, sent, strict=True)]


def _overlap(rows: Sequence[Row], file: Path) -> Path:
    figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
    for i, row in enumerate(rows):
        steps, overlaps = mean_curve(row, "overlap_with_first")
        if steps:
            axes.plot(steps, overlaps, label=row.label, **line_style(i))
    axes.set(xlabel="step", ylabel="overlap with the first basis", ylim=(0, 1.05))
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside right upper")
    return save(figure, file)


def _memory(rows: Sequence[Row], file: Path) -> Path:
    figure, axes = plt.subplots(figsize=(SIZE[0], 1.2 + 0.4 * len(rows)), layout="constrained")
    names = [row.label for row in rows]
    left = [0.0] * len(rows)
    for kind in STATE_KINDS:
        widths = [row.finished[0].state_bytes.get(kind, 0) / 1e6 for row in rows]
        if any(widths):
            axes.barh(names, widths, left=left, label=kind)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.axvline(rows[0].finished[0].adamw_bytes / 1e6, color="black", linestyle="--", linewidth=1, label="AdamW")
    axes.invert_yaxis()
    axes.set(xlabel="MB of optimizer state per worker")
    figure.legend(fontsize="small", loc="outside right upper")
    return save(figure, file)


def _varied(rows: Sequence[Row], file: Path) -> Path:
    """Perplexity against the first varied setting, one line a method."""
    figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
    for i, method in enumerate(dict.fromkeys(row.method for row in rows)):
        own = [row for row in rows if row.method == method and row.variant]
        values = [str(row.variant[0][1]) for row in own]
        axes.errorbar(values, [row.perplexity for row in own], [row.spread for row in own], label=method, capsize=3, **line_style(i))
    names = ", ".join(name for name, _ in next(row.variant for row in rows if row.variant))
    axes.set(xlabel=names, ylabel="validation perplexity")
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside right upper")
    return save(figure, file)


def line_style(i: int) -> dict[str, Any]:
    """Colour, marker and dash of line number i: told apart without colour too."""
    return {"color": f"C{i % 10}", "marker": "osD^vP*Xph"[i % 10], "linestyle": ("-", "--")[i // 10 % 2], "markersize": 4}


def save(figure: Any, file: Path) -> Path:
    """Write a figure, and let go of it."""
    figure.savefig(file, dpi=DPI)
    plt.close(figure)
    return file
