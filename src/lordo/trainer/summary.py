"""The result of a run: what it reached, sent, held and took, and what is needed to repeat it."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lordo.accounting import Weight, adamw_state_bytes, measured_state_bytes, on_device, parts_of, state_bytes, traffic
from lordo.methods import METHODS, Method
from lordo.sync import Comm
from lordo.trainer.eras import Era, bytes_sent
from lordo.trainer.loop import Outcome
from lordo.trainer.prepared import Prepared

SHARED_WORK = ("basis refresh", "encoding", "communication", "evaluation")  # what is timed beside compute


@dataclass(frozen=True)
class Summary:
    """The result of a run: everything in its table, and what is needed to repeat it.

    Attributes:
        validation_loss: nats per token of the averaged model. perplexity: e to that. bits_per_token: in bits.
        bytes_sent: per worker and kind, as counted, evaluation left out. bytes_predicted: the same from shapes alone.
        ddp_bytes: what DDP with AdamW sends for the same steps. state_bytes: optimizer state per worker and kind, measured.
        state_predicted: the same from shapes alone. adamw_bytes: what torch's AdamW holds for the same weights.
        seconds: of the training, split into compute, basis refresh, communication, evaluation.
        at_once: how many workers computed at a time where all shared one process (seconds are then of all of them together); None
            where each had its own.
        devices: of which a worker consists; bytes are those of the first device of a worker then.
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
    at_once: int | None
    skipped_steps: int
    left_out: int
    spikes: int
    environment: dict[str, str]
    devices: int = 1

    @property
    def sent(self) -> int:
        """Bytes sent per worker in all."""
        return sum(self.bytes_sent.values())

    @property
    def held(self) -> int:
        """Bytes of optimizer state per worker on the device that trains."""
        return on_device(self.state_bytes)


def summarize(prepared: Prepared, outcome: Outcome, workers: Comm, *, at_once: int | None) -> Summary:
    """The summary of a finished run, as worker 0 sees it."""
    config, settings, weights = prepared.config, prepared.settings, prepared.weights
    own = parts_of(weights, config.parallel.shards)
    steps, num_workers = config.train.steps, workers.size
    sent = {tag: size for tag, size in sorted(bytes_sent(outcome.eras).items()) if tag != "evaluation" and size}
    predicted = predicted_bytes(prepared.method, weights, settings, outcome.eras)
    ddp = METHODS["ddp-adamw"]
    # workers in one process refresh and evaluate side by side, and their seconds add up; they meet one at a time
    others = {kind: workers.seconds[kind] / (1 if kind == "communication" else at_once or 1) for kind in SHARED_WORK}
    return Summary(
        name=config.name,
        method=prepared.method.name,
        workers=num_workers,
        steps=steps,
        tokens=sum(era.used * era.workers for era in outcome.eras) * config.data.sequence_length,
        num_parameters=sum(w.numel for w in weights),
        validation_loss=outcome.evaluation.loss,
        perplexity=outcome.evaluation.perplexity,
        bits_per_token=outcome.evaluation.bits_per_token,
        bytes_sent=sent,
        bytes_predicted=dict(sorted(predicted.items())),
        ddp_bytes=predicted_bytes(ddp, weights, ddp.resolve({}), outcome.eras).total(),
        state_bytes=dict(measured_state_bytes(outcome.optimizer)),
        state_predicted=dict(state_bytes(prepared.method, own, settings, device=outcome.model.device.type)),
        adamw_bytes=adamw_state_bytes(own),
        seconds={"compute": max(outcome.seconds - sum(others.values()), 0.0), **others},
        at_once=at_once,
        skipped_steps=outcome.skipped_steps,
        left_out=outcome.left_out,
        spikes=outcome.spikes,
        environment=environment(),
        devices=config.parallel.devices,
    )


def predicted_bytes(method: Method, weights: Sequence[Weight], settings: Mapping[str, Any], eras: Sequence[Era]) -> Counter[str]:
    """Bytes each worker sends in a run, by kind, from shapes alone.

    Args:
        method, weights, settings: see `accounting.traffic`. eras: the run's stretches with one number of workers each.
    """
    total: Counter[str] = Counter()
    before = 0
    for number, era in enumerate(eras, start=1):
        own = parts_of(weights, era.shards)
        last, synced = number == len(eras), era.end if era.synced is None else era.synced
        total += traffic(method, own, settings, steps=synced, num_workers=era.workers, final_average=last)
        if before:
            total -= traffic(method, own, settings, steps=before, num_workers=era.workers)
        before = synced
    return total


def environment() -> dict[str, str]:
    """Versions, machine and commit, so that a result can be placed."""
    found = {"python": platform.python_version(), "machine": f"{_processor()}, {os.cpu_count()} cores"}
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


def _processor() -> str:
    """The processor's name as Linux tells it, or its kind."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    """What git says in the folder of this package; empty where it is no checkout."""
    folder = Path(__file__).resolve().parents[3]
    if not (folder / ".git").exists():
        return ""
    try:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
