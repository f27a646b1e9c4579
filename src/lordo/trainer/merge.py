"""One worker's share of a checkpoint that another number of workers wrote.

All that workers average at a synchronisation is averaged here too, once, over all that saved: who leaves hands its part over, who is
new starts from the mean. The error of feedback is averaged as well: its mean is what the average of the weights will see of it, and that
stays. Two things have no mean: what lives in bases that differ between workers (moments and error of lordo-local), and an error kept in
whole numbers. Of these worker j takes what worker j modulo the number that saved had. What all workers hold alike stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lordo.trainer.checkpoint import STATE, WEIGHTS, Part

_WITH_THE_BASIS = ("basis", "exp_avg", "exp_avg_sq", "step", "error", "error_projection")


def merged_weights(parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
    """The mean of the workers' weights, one after another, each with its name."""
    return ((name, mean([part.tensor(WEIGHTS, name) for part in parts])) for name in parts[0].names(WEIGHTS))


def merged_state(parts: Sequence[Part], worker: int) -> Iterator[tuple[str, Tensor]]:
    """Optimizer state for one worker, one tensor after another, each with its name, "parameter.key"."""
    own = parts[worker % len(parts)]
    names = [name for name in own.names(STATE) if name.startswith("optimizer/")]
    copied = _without_mean(parts, names)
    return ((name, own.tensor(STATE, name) if name in copied else mean([part.tensor(STATE, name) for part in parts])) for name in names)


def _without_mean(parts: Sequence[Part], names: Sequence[str]) -> set[str]:
    """Names of the tensors that are taken from one worker."""
    copied: set[str] = set()
    for name in names:
        parameter, _, key = name.rpartition(".")
        first = parts[0].tensor(STATE, name)
        if not first.is_floating_point():
            copied |= {other for other in names if other.startswith(name)}  # its scales too
        elif key == "basis" and any(not torch.equal(first, part.tensor(STATE, name)) for part in parts[1:]):
            copied |= {f"{parameter}.{other}" for other in _WITH_THE_BASIS} & set(names)
    return copied


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean, formed in float32 or better; the very tensor where all are equal."""
    first = tensors[0]
    if all(torch.equal(first, other) for other in tensors[1:]):
        return first
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for other in tensors[1:]:
        total += other
    return (total / len(tensors)).to(first.dtype)
