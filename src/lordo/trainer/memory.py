"""Does a run fit into memory? A lower bound, from shapes alone, before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lordo.accounting import Weight, on_device, parts_of, state_bytes
from lordo.methods import Method
from lordo.trainer.config import RunConfig

LOGITS_COPIES = 2
"""The logits in float32 and their gradient are there at the same time."""


@dataclass(frozen=True)
class Need:
    """Bytes one worker needs at the least, or one of its devices.

    weights, gradients, state: what is there all the time. logits: of one part of the batch; the layers' activations come on top.
    host: beside these, in the memory of the machine whose GPU trains.
    """

    weights: int
    gradients: int
    state: int
    logits: int
    host: int = 0

    @property
    def total(self) -> int:
        """Of one worker, on the device that trains."""
        return self.weights + self.gradients + self.state + self.logits

    def __str__(self) -> str:
        """As part of a sentence."""
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer state": self.state, "logits": self.logits}
        parts |= {"in host memory besides": self.host} if self.host else {}
        return ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items())


def gigabytes(size: int) -> str:
    """Bytes in the unit of memories."""
    return f"{size / 1e9:.3g} GB"


def need(method: Method, weights: Sequence[Weight], settings: Mapping[str, Any], config: RunConfig, device: torch.device) -> Need:
    """What one worker of a run needs on a device, or one of its devices; layers that are gathered for a moment come on top then."""
    weights = parts_of(weights, config.parallel.shards)
    size = sum(weight.part_numel * weight.dtype.itemsize for weight in weights)
    vocabulary = max((max(weight.shape) for weight in weights if len(weight.shape) == 2), default=1)  # the embedding is the longest matrix
    tokens = config.sequences_per_device // config.batch.accumulate * config.data.sequence_length
    held = state_bytes(method, weights, settings, device=device.type)
    state = on_device(held)
    return Need(size, size, state, LOGITS_COPIES * 4 * tokens * vocabulary, host=held.total() - state)


def check_memory(needed: Need, config: RunConfig, device: torch.device) -> None:
    """Refuse a run that needs more than this machine has.

    Raises:
        ValueError: how much is needed and how much there is.
    """
    there = available_bytes(device)
    workers, together = needed_here(needed, config, device)
    if there is not None and together > there:
        place = "GPU" if device.type == "cuda" else "machine"
        what = "workers" if config.parallel.devices == 1 else "devices of workers"
        raise ValueError(
            f"{workers} {what} on one {place} need {gigabytes(together)} at least (each: {needed}), but "
            f"{gigabytes(there)} of memory are free: take a smaller model, a larger batch.accumulate, or workers on several machines"
        )


def needed_here(needed: Need, config: RunConfig, device: torch.device) -> tuple[int, int]:
    """How many workers share this memory, and what they need at the least.

    Processes have a GPU each, or compute on one machine at the same time. Workers of one process may take turns: of what is needed
    while computing only one worker's is counted.
    """
    if "LOCAL_WORLD_SIZE" in os.environ or config.parallel.devices > 1:  # torchrun, which alone starts workers of several devices
        workers = 1 if device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return workers, workers * needed.total
    lasting = needed.weights + needed.state
    return config.workers, config.workers * lasting + needed.gradients + needed.logits


def available_bytes(device: torch.device) -> int | None:
    """Memory that is free on a device; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
