"""`lordo report`: figures and one HTML page of any runs, from what they have recorded so far."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lordo.trainer.config import RunConfig
from lordo.trainer.finished import run_config
from lordo.trainer.folder import load_summary
from lordo.trainer.html_parts import page, pictures
from lordo.trainer.html_parts import table as html_table
from lordo.trainer.options import Parser
from lordo.trainer.recipe import dumps
from lordo.trainer.report_figures import curve, draw_runs
from lordo.trainer.settings import UsageError
from lordo.trainer.summary import Summary
from lordo.trainer.terminal import human_bytes, plain_table, wide_console

HEADER = [
    "run",
    "method",
    "workers",
    "step",
    "tokens",
    "training loss",
    "perplexity",
    "bits/byte",
    "sent/worker",
    "× less",
    "tokens/s",
    "time",
]
NOTES = """\
Training loss: the last one recorded, mean over workers. Perplexity: of the averaged model on the run's validation text, the last one
recorded. Bits per byte: by lordo eval on validation text, where that was run. × less: than DDP with AdamW sends, when the run is over.
Where a worker is several devices, bytes are those that one of them sends to other workers."""


@dataclass(frozen=True)
class RecordedRun:
    """What a run has left so far: settings, records; its summary once it is finished; what `lordo eval` found."""

    label: str
    config: RunConfig
    records: list[dict[str, Any]]
    summary: Summary | None
    evaluations: dict[str, dict[str, Any]]


def main(arguments: list[str]) -> int:
    """Write the report and print its table.

    Raises:
        UsageError, ConfigError: what was asked for cannot work.
    """
    asked = parser().parse_args(arguments)
    paths = [Path(run) for run in asked.runs]
    names = [path.resolve().name for path in paths]
    labels = names if len(set(names)) == len(names) else [str(path) for path in paths]
    runs = [read(path, label) for path, label in dict(zip(paths, labels, strict=True)).items()]
    folder = Path(asked.output) if asked.output else paths[0] / "report"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figures = draw_runs({run.label: run.records for run in runs}, folder)
        (folder / "report.html").write_text(page(", ".join(run.label for run in runs), body(runs, figures)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the report cannot be written into {folder}: {error.strerror}") from error
    console = wide_console()
    table = plain_table(*HEADER)
    for run in runs:
        table.add_row(*cells(run))
    console.print(table)
    console.print(f"report: {folder / 'report.html'}", highlight=False, soft_wrap=True)
    return 0


def read(path: Path, label: str) -> RecordedRun:
    """Read the folder of a run, finished or not.

    Raises:
        UsageError: it is no run's folder, or a file in it is damaged.
    """
    config = run_config(path)
    try:
        lines = (path / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
        records = [json.loads(line) for line in lines[:-1]]  # what comes after the last line break is still being written
        evaluations = path / "evaluations.json"
        evaluated = json.loads(evaluations.read_text(encoding="utf-8")) if evaluations.exists() else {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: its records cannot be read: {error}") from error
    return RecordedRun(label, config, records, load_summary(path), evaluated)


def cells(run: RecordedRun) -> list[str]:
    """A run as a line of the table."""
    last = run.records[-1] if run.records else None
    validation = curve(run.records, "step", "perplexity")[1]
    bits = run.evaluations.get("validation", {}).get("bits_per_byte")
    summary = run.summary
    return [
        run.label,
        run.config.method.name,
        str(run.config.workers) if run.config.parallel.devices == 1 else f"{run.config.workers} of {run.config.parallel.devices} devices",
        f"{last['step'] if last else 0}/{run.config.train.steps}",
        f"{last['tokens']:,}" if last else "–",
        f"{last['loss']:.4f}" if last and last["loss"] is not None else "–",
        f"{validation[-1]:.4f}" if validation else "–",
        f"{bits:.4f}" if bits is not None else "–",
        human_bytes(last["bytes_sent"]) if last else "–",
        f"{summary.ddp_bytes / summary.sent:.1f}" if summary and summary.sent else "–",
        f"{last['tokens'] / max(last['seconds'], 1e-9):,.0f}" if last else "–",
        f"{last['seconds']:.0f} s" if last else "–",
    ]


def body(runs: list[RecordedRun], figures: dict[str, Path]) -> str:
    """The page: table, tasks, figures, settings of each run, machines."""
    unfinished = ", ".join(run.label for run in runs if run.summary is None)
    parts = [html_table(HEADER, [cells(run) for run in runs]), f"<p>{html.escape(NOTES)}</p>"]
    if unfinished:
        parts.append(f"<p>Not finished when this was written: {html.escape(unfinished)}.</p>")
    if scores := evaluation_rows(runs):
        parts += ["<h2>Evaluations</h2>", html_table(["run", "on", "result"], scores)]
    parts.append(pictures(figures))
    for run in runs:
        parts.append(f"<h2>Settings of {html.escape(run.label)}</h2><pre>{html.escape(dumps(run.config))}</pre>")
        if run.summary:
            machine = "\n".join(f"{name}: {value}" for name, value in run.summary.environment.items())
            parts.append(f"<pre>{html.escape(machine)}</pre>")
    return "\n".join(parts)


def evaluation_rows(runs: list[RecordedRun]) -> list[list[str]]:
    """What `lordo eval` found on texts and tasks."""
    rows = []
    for run in runs:
        for name, result in run.evaluations.items():
            numbers = result.get("metrics") or {key: result[key] for key in ("perplexity", "bits_per_byte")}
            told = ", ".join(f"{key} {'–' if value is None else f'{value:.4f}'}" for key, value in numbers.items())
            rows.append([run.label, name, told])
    return rows


def parser() -> Parser:
    """The arguments of `report`."""
    p = Parser(prog="lordo report", description="Figures and one HTML page of some runs, finished or going on, from what they recorded.")
    p.add_argument("runs", metavar="RUN", nargs="+", help="folders of runs, such as runs/tiny runs/tiny-2")
    p.add_argument("--output", metavar="FOLDER", help="where to write (default: the folder report in that of the first run)")
    return p
