"""What a run shows: tables, and numbers in words."""

from __future__ import annotations

import shutil
import sys
from typing import IO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lordo.accounting import on_device, parts_of, state_bytes
from lordo.trainer.config import RunConfig
from lordo.trainer.prepared import Prepared, pick_device
from lordo.trainer.splits import Splits
from lordo.trainer.summary import Summary

WIDTH = 200  # of tables: a narrower terminal wraps their lines, but nothing is cut off


def wide_console(file: IO[str] | None = None) -> Console:
    """A console on which wide tables keep their columns whole."""
    return Console(file=file, width=max(WIDTH, shutil.get_terminal_size().columns))


def report(sentence: str) -> None:
    """Tell at once, on standard error, what went wrong though the run goes on."""
    print(f"lordo: {sentence}", file=sys.stderr, flush=True)


def plain_table(*columns: str, title: str | None = None) -> Table:
    """A table without frames; the first column is a name, the others are numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table


def print_prepared(prepared: Prepared, console: Console) -> None:
    """Before the run: what is trained on what, what is low-rank, what will be held."""
    config, splits = prepared.config, prepared.splits
    numel = sum(w.numel for w in prepared.weights)
    console.print(
        f"{prepared.method.name}: {prepared.method.summary}\n"
        f"{batch_derivation(config)}; {config.train.steps} steps\n"
        f"text: {human_bytes(splits.train_bytes)} in {splits.num_train_documents:,} documents to train on, "
        f"{human_bytes(splits.validation_bytes)} in {splits.num_validation_documents:,} documents to validate on\n"
        f"model: {numel:,} parameters, {config.train.precision}",
        highlight=False,
    )
    if config.data.mix:
        console.print(mix_table(config, splits))
    for phase in config.phase:
        told = ", ".join(f"{name} = {value}" for name, value in phase.settings().items())
        console.print(f"from step {phase.from_step}: {told}", highlight=False)
    console.print(prepared.groups.table(), highlight=False, soft_wrap=True)
    weights = parts_of(prepared.weights, config.parallel.shards)
    held = state_bytes(prepared.method, weights, prepared.settings, device=pick_device(prepared.config.train.device).type)
    parts = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in held.items() if kind != "step")
    console.print(
        f"optimizer state per {config.parallel.unit}: {human_bytes(on_device(held))} ({parts})\n",
        highlight=False,
    )


def mix_table(config: RunConfig, splits: Splits) -> Table:
    """The sources of a mixture, and how often the run reads each of them."""
    total = sum(part.weight for part in splits.train)
    table = plain_table("source", "share", "tokens", "epochs in this run")
    for part in splits.train:
        read = config.train.steps * config.tokens_per_step * part.weight / total
        table.add_row(part.name, f"{part.weight / total:.1%}", f"{part.blocks.numel():,}", f"{read / part.blocks.numel():.3g}")
    return table


def batch_derivation(config: RunConfig) -> str:
    """How the tokens of a step of all workers and the sequences of each worker follow from one another."""
    workers, sequences, length = config.workers, config.sequences_per_worker, config.data.sequence_length
    tokens = f"{config.tokens_per_step:,} tokens per step of all workers"
    if config.batch.global_tokens is None:
        text = f"{workers} workers × {sequences} sequences × {length} tokens = {tokens}"
    else:
        text = f"{tokens} / ({workers} workers × {length} tokens) = {sequences} sequences each"
    accumulate, devices = config.batch.accumulate, config.parallel.devices
    if devices > 1:
        text = f"{text}, {config.sequences_per_device} of them on each of a worker's {devices} devices"
    return text if accumulate == 1 else f"{text}, computed {config.sequences_per_device // accumulate} at a time"


def print_summary(summary: Summary, console: Console) -> None:
    """The table at the end of a run."""
    workers = f"{summary.workers} workers" + (f" of {summary.devices} devices" if summary.devices > 1 else "")
    table = plain_table("what", "value", title=f"{summary.name}: {summary.method}, {workers}, {summary.steps} steps")
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
        (
            "bytes sent per worker" if summary.devices == 1 else "bytes sent per device, to other workers",
            human_bytes(summary.sent),
            ddp if summary.sent else "one worker sends nothing",
        ),
        ("", "", parts),
        ("optimizer bytes on device", human_bytes(summary.held), adamw),
        ("of which moments and basis", human_bytes(moments), f"{times(summary.adamw_bytes, moments)} than AdamW"),
        ("", "", kept),
        ("seconds", f"{total:.1f}", f"{summary.tokens / max(total, 1e-9):,.0f} tokens/s of all workers"),
    ]
    rows += [(f"  {kind}", f"{seconds:.2f}", f"{seconds / max(total, 1e-9):.1%}") for kind, seconds in summary.seconds.items() if seconds]
    if summary.skipped_steps:
        rows.append(("skipped steps", str(summary.skipped_steps), "gradient not finite; summed over workers"))
    if summary.spikes:
        rows.append(("steps left out", str(summary.spikes), "loss out of proportion (train.spike_factor); summed over workers"))
    if summary.left_out:
        rows.append(("shares left out", str(summary.left_out), "of averages, weights or moments not finite; summed over workers"))
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
