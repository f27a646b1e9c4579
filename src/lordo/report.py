"""What a run tells and leaves behind: the live line, the folder, the table at the end."""

from __future__ import annotations

import json
import math
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from lordo.accounting import adamw_state_bytes, measured_state_bytes, state_bytes, traffic
from lordo.config import RunConfig, dump
from lordo.loop import Outcome, Prepared, Progress
from lordo.methods import METHODS
from lordo.sync import Comm


@dataclass(frozen=True)
class Summary:
    """The result of a run: everything in its table, and what is needed to repeat it.

    Attributes:
        validation_loss: nats per token of the averaged model. perplexity: e to that. bits_per_token: in bits.
        bytes_sent: per worker and kind, as counted, evaluation left out. bytes_predicted: the same from shapes alone.
        ddp_bytes: what DDP with AdamW sends for the same steps. state_bytes: optimizer state per worker and kind, measured.
        state_predicted: the same from shapes alone. adamw_bytes: what torch's AdamW holds for the same weights.
        seconds: of the training, split into compute, basis refresh, communication, evaluation.
        took_turns: whether the workers shared this process: seconds are then of all of them together.
    """

    name: str
    method: str
    workers: int
    steps: int
    tokens: int
    num_parameters: int
    validation_loss: float
    perplexity: float
    bits_per_token: float
    bytes_sent: dict[str, int]
    bytes_predicted: dict[str, int]
    ddp_bytes: int
    state_bytes: dict[str, int]
    state_predicted: dict[str, int]
    adamw_bytes: int
    seconds: dict[str, float]
    took_turns: bool
    skipped_steps: int
    environment: dict[str, str]

    @property
    def sent(self) -> int:
        """Bytes sent per worker in all."""
        return sum(self.bytes_sent.values())

    @property
    def held(self) -> int:
        """Bytes of optimizer state per worker in all."""
        return sum(self.state_bytes.values())


def summarize(prepared: Prepared, outcome: Outcome, workers: Comm, *, took_turns: bool) -> Summary:
    """The summary of a finished run, as worker 0 sees it."""
    config, settings, weights = prepared.config, prepared.settings, prepared.weights
    steps, num_workers = config.train.steps, workers.size
    sent = {tag: workers.bytes_sent(tag) for tag in sorted(workers.moved) if tag != "evaluation" and workers.moved[tag]}
    predicted = traffic(prepared.method, weights, settings, steps=steps, num_workers=num_workers, final_average=True)
    ddp = METHODS["ddp-adamw"]
    others = {kind: workers.seconds[kind] for kind in ("basis refresh", "communication", "evaluation")}
    return Summary(
        name=config.name,
        method=prepared.method.name,
        workers=num_workers,
        steps=steps,
        tokens=steps * config.batch.per_worker_sequences * config.data.sequence_length * num_workers,
        num_parameters=sum(w.numel for w in weights),
        validation_loss=outcome.evaluation.loss,
        perplexity=outcome.evaluation.perplexity,
        bits_per_token=outcome.evaluation.bits_per_token,
        bytes_sent=sent,
        bytes_predicted=dict(sorted(predicted.items())),
        ddp_bytes=traffic(ddp, weights, ddp.resolve({}), steps=steps, num_workers=num_workers).total(),
        state_bytes=dict(measured_state_bytes(outcome.optimizer)),
        state_predicted=dict(state_bytes(prepared.method, weights, settings)),
        adamw_bytes=adamw_state_bytes(weights),
        seconds={"compute": max(outcome.seconds - sum(others.values()), 0.0), **others},
        took_turns=took_turns,
        skipped_steps=outcome.skipped_steps,
        environment=environment(),
    )


def environment() -> dict[str, str]:
    """Versions, machine and commit, so that a result can be placed."""
    found = {"python": platform.python_version(), "machine": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    for package in ("lordo", "torch", "transformers", "datasets"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    commit = _git("rev-parse", "--short", "HEAD")
    if commit:
        found["commit"] = commit + (" with local changes" if _git("status", "--porcelain", "-uno") else "")
    return found


def _git(*arguments: str) -> str:
    """What git says in the folder of this package; empty where it is no checkout."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return ""
    try:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


# ---- the folder


class RunFolder:
    """`<output>/<name>/`, or `<name>-2`, … where that exists: nothing of an earlier run is overwritten."""

    def __init__(self, config: RunConfig, *, path: Path | None = None) -> None:
        """Make the folder (at `path` if that is given) and write the resolved settings into it.

        Raises:
            ValueError: it cannot be made.
        """
        self.path = _new_folder(Path(config.output), config.name) if path is None else path
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            dump(config, self.path / "config.toml")
            self._metrics = (self.path / "metrics.jsonl").open("w", encoding="utf-8")
        except OSError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            raise ValueError(f"the run's folder {self.path} cannot be written: {error.strerror}") from error

    def record(self, progress: Progress) -> None:
        """Append one line to `metrics.jsonl`, on disk at once, so that a run can be watched; what JSON lacks (NaN) as null."""
        line = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in asdict(progress).items()}
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()

    def finish(self, summary: Summary, model: PreTrainedModel | None) -> None:
        """Write the model as `from_pretrained` reads it, the table as text and, last, as JSON: a folder that has that is finished."""
        self._metrics.close()
        if model is not None:
            with no_progress_bars():
                model.save_pretrained(self.path / "model")
        with (self.path / "summary.txt").open("w", encoding="utf-8") as file:
            print_summary(summary, wide_console(file))
        (self.path / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")


def load_summary(path: Path) -> Summary | None:
    """The summary of a finished run's folder; None of any other."""
    try:
        return Summary(**json.loads((path / "summary.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars over the terminal."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _new_folder(output: Path, name: str) -> Path:
    for number in range(1, 10_000):
        path = output / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not output.is_dir():
                raise ValueError(f"output = '{output}' is a file: runs need a folder to go into") from None
            continue
        except OSError as error:
            raise ValueError(f"the run's folder {path} cannot be made: {error.strerror}") from error
        return path
    raise ValueError(f"there are thousands of runs named '{name}' in {output}: choose another name")


# ---- the terminal


class Terminal:
    """Shows the progress: one line that changes where there is a terminal, a line for each record where there is none."""

    def __init__(self, console: Console, folder: RunFolder, config: RunConfig) -> None:
        """Show on a console, and record into a folder."""
        self.console, self.folder, self.config = console, folder, config
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Terminal:
        """Start the live line."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Take the live line away."""
        if self._live is not None:
            self._live.stop()

    def progressed(self, progress: Progress) -> None:
        """Show and record."""
        self.folder.record(progress)
        line = progress_line(progress, self.config.train.steps)
        if self._live is None or progress.validation_loss is not None:
            self.console.print(line, highlight=False, soft_wrap=True)
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)


WIDTH = 150  # of tables: a narrower terminal wraps their lines, but nothing is cut off


def wide_console(file: IO[str] | None = None) -> Console:
    """A console on which wide tables keep their columns whole."""
    return Console(file=file, width=max(WIDTH, shutil.get_terminal_size().columns))


def plain_table(*columns: str, title: str | None = None) -> Table:
    """A table without frames; the first column is a name, the others are numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table


def progress_line(progress: Progress, steps: int) -> str:
    """Step, loss with its spread over workers, speed, traffic, steps to the next synchronisation."""
    parts = [
        f"step {progress.step:>{len(str(steps))}}/{steps}",
        f"loss {progress.loss:.4f} ({progress.loss_min:.3f} to {progress.loss_max:.3f})",
        f"{progress.tokens_per_second:,.0f} tokens/s",
        f"sent {human_bytes(progress.bytes_sent)} per worker",
        f"next sync in {progress.steps_to_next_sync}",
    ]
    if progress.validation_loss is not None:
        parts.append(f"validation loss {progress.validation_loss:.4f}")
    if progress.skipped_steps:
        parts.append(f"{progress.skipped_steps} steps skipped (gradient not finite)")
    return "  ".join(parts)


def print_prepared(prepared: Prepared, console: Console) -> None:
    """Before the run: what is trained on what, what is low-rank, what will be held."""
    config, splits = prepared.config, prepared.splits
    numel = sum(w.numel for w in prepared.weights)
    per_step = config.batch.per_worker_sequences * config.data.sequence_length
    console.print(
        f"{prepared.method.name}: {prepared.method.summary}\n"
        f"{config.workers} workers × {config.batch.per_worker_sequences} sequences × {config.data.sequence_length} tokens = "
        f"{config.workers * per_step:,} tokens per step of all workers; {config.train.steps} steps\n"
        f"text: {human_bytes(splits.train_bytes)} in {splits.num_train_files} files to train on, "
        f"{human_bytes(splits.validation_bytes)} in {splits.num_validation_files} files to validate on\n"
        f"model: {numel:,} parameters",
        highlight=False,
    )
    console.print(prepared.groups.table(), highlight=False, soft_wrap=True)
    held = state_bytes(prepared.method, prepared.weights, prepared.settings)
    parts = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in held.items() if kind != "step")
    console.print(f"optimizer state per worker: {human_bytes(held.total())} ({parts})\n", highlight=False)


def print_summary(summary: Summary, console: Console) -> None:
    """The table at the end of a run."""
    table = plain_table("what", "value", title=f"{summary.name}: {summary.method}, {summary.workers} workers, {summary.steps} steps")
    table.add_column("against")
    for row in summary_rows(summary):
        table.add_row(*row)
    console.print(table)
    if summary.bytes_sent != summary.bytes_predicted or summary.state_bytes != summary.state_predicted:
        console.print("warning: what was counted differs from what the closed form predicts; see summary.json", style="bold")


def summary_rows(summary: Summary) -> list[tuple[str, str, str]]:
    """What, value, and what it is to be held against."""
    total = sum(summary.seconds.values())
    ddp = f"{times(summary.ddp_bytes, summary.sent)} than DDP AdamW ({human_bytes(summary.ddp_bytes)})"
    adamw = f"{times(summary.adamw_bytes, summary.held)} than AdamW ({human_bytes(summary.adamw_bytes)})"
    parts = ", ".join(f"{tag} {human_bytes(size)}" for tag, size in summary.bytes_sent.items() if size)
    moments = sum(summary.state_bytes.get(kind, 0) for kind in ("exp_avg", "exp_avg_sq", "basis", "step"))
    kept = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in summary.state_bytes.items() if kind not in ("step",))
    rows = [
        ("validation perplexity", f"{summary.perplexity:.4f}", f"averaged model; {summary.bits_per_token:.4f} bits per token"),
        ("bytes sent per worker", human_bytes(summary.sent), ddp if summary.sent else "one worker sends nothing"),
        ("", "", parts),
        ("optimizer bytes on device", human_bytes(summary.held), adamw),
        ("of which moments and basis", human_bytes(moments), f"{times(summary.adamw_bytes, moments)} than AdamW"),
        ("", "", kept),
        ("seconds", f"{total:.1f}", f"{summary.tokens / max(total, 1e-9):,.0f} tokens/s of all workers"),
    ]
    rows += [(f"  {kind}", f"{seconds:.2f}", f"{seconds / max(total, 1e-9):.1%}") for kind, seconds in summary.seconds.items()]
    if summary.skipped_steps:
        rows.append(("skipped steps", str(summary.skipped_steps), "gradient not finite; summed over workers"))
    return [row for row in rows if any(row[1:])]


def times(reference: float, value: float) -> str:
    """How many times less (or more) than a reference."""
    if not value:
        return "nothing; all less"
    return f"{reference / value:.1f} × less" if value <= reference else f"{value / reference:.1f} × more"


def human_bytes(size: float) -> str:
    """Bytes in powers of 1000, three significant digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 999.5 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError
