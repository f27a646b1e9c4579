"""The figures of a report on runs, drawn with matplotlib from what they recorded so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt

from lordo.trainer.figures import SIZE, line_style, save

Curve = tuple[list[float], list[float]]
Runs = Mapping[str, Sequence[dict[str, Any]]]  # the records of each run, by its label

# Of a synchronisation: what is drawn, and what it is.
SYNC_PANELS = {
    "gradient_share": "share of the gradient in the basis",
    "error_norm": "norm of the error",
    "spread": "spread of the workers / movement of their mean",
}


def draw_runs(runs: Runs, folder: Path) -> dict[str, Path]:
    """Draw every figure that there is data for; returns caption -> file, in the order they are to be read."""
    drawn: dict[str, Path] = {}
    for axis, label in (("step", "step"), ("bytes_sent", "bytes sent per worker"), ("seconds", "seconds")):
        if any(curve(records, axis, "loss")[0] for records in runs.values()):
            drawn[f"Loss against {label}"] = _losses(runs, folder / f"loss-{axis.replace('_', '-')}.png", axis, label)
    if any(curve(records, "step", "overlap_with_first")[0] for records in runs.values()):
        drawn["Overlap of the bases with the first ones"] = _overlaps(runs, folder / "overlap.png")
    if any(rounds(records) for records in runs.values()):
        drawn["Synchronisations"] = _panels(runs, folder / "synchronisations.png")
        drawn["Seconds of a round, by phase"] = _bars(runs, folder / "round-seconds.png", "seconds", "seconds of a round (median)", 1)
        drawn["Bytes sent in a round, by kind"] = _bars(
            runs, folder / "round-bytes.png", "bytes_sent", "MB per worker and round (median)", 1e6
        )
    return drawn


def curve(records: Sequence[dict[str, Any]], axis: str, name: str) -> Curve:
    """The places and values at which a quantity was recorded."""
    seen = [(record[axis], record[name]) for record in records if record.get(name) is not None and record.get(axis) is not None]
    return [place for place, _ in seen], [value for _, value in seen]


def rounds(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was recorded of synchronisations."""
    return [record["sync"] for record in records if record.get("sync")]


def _losses(runs: Runs, file: Path, axis: str, label: str) -> Path:
    """Training loss as thin lines, validation loss as marks on lines of the same colour."""
    figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
    for i, (name, records) in enumerate(runs.items()):
        style = line_style(i)
        axes.plot(*curve(records, axis, "loss"), color=style["color"], alpha=0.35, linewidth=1)
        axes.plot(*curve(records, axis, "validation_loss"), label=name, **style)
    if axis == "bytes_sent" and all(min(curve(records, axis, "loss")[0], default=0) > 0 for records in runs.values()):
        axes.set_xscale("log")
    axes.set(xlabel=label, ylabel="loss (nats per token); thin: training")
    return _finish(figure, [axes], file)


def _overlaps(runs: Runs, file: Path) -> Path:
    figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
    for i, (name, records) in enumerate(runs.items()):
        axes.plot(*curve(records, "step", "overlap_with_first"), label=name, **line_style(i))
    axes.set(xlabel="step", ylabel="overlap with the first basis", ylim=(0, 1.05))
    return _finish(figure, [axes], file)


def _panels(runs: Runs, file: Path) -> Path:
    """One panel for each quantity of a synchronisation."""
    figure, panels = plt.subplots(len(SYNC_PANELS), figsize=(SIZE[0], 2.4 * len(SYNC_PANELS)), layout="constrained", sharex=True)
    for axes, (quantity, title) in zip(panels, SYNC_PANELS.items(), strict=True):
        for i, (name, records) in enumerate(runs.items()):
            axes.plot(*curve(rounds(records), "step", quantity), label=name, **line_style(i))
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("step")
    return _finish(figure, panels, file)


def _bars(runs: Runs, file: Path, quantity: str, label: str, unit: float) -> Path:
    """One bar a run, stacked by kind: the middle of what its rounds took."""
    figure, axes = plt.subplots(figsize=(SIZE[0], 1.2 + 0.4 * len(runs)), layout="constrained")
    parts = {name: [round[quantity] for round in rounds(records)] for name, records in runs.items()}
    left = dict.fromkeys(runs, 0.0)
    for kind in dict.fromkeys(kind for each in parts.values() for round in each for kind in round):
        widths = {name: median([round.get(kind, 0) for round in each]) / unit for name, each in parts.items()}
        axes.barh(list(runs), list(widths.values()), left=list(left.values()), label=kind)
        left = {name: left[name] + width for name, width in widths.items()}
    axes.invert_yaxis()
    axes.set_xlabel(label)
    return _finish(figure, [], file, legend_of=axes)


def _finish(figure: Any, panels: Sequence[Any], file: Path, legend_of: Any = None) -> Path:
    for axes in panels:
        axes.grid(alpha=0.3)
    handles, labels = (legend_of or panels[0]).get_legend_handles_labels()
    figure.legend(handles, labels, fontsize="small", loc="outside right upper")
    return save(figure, file)
