"""The step of low-rank weights of which each device of a worker holds some rows or some columns.

    rows      QᵀX adds up over the devices: (r, n) numbers of every weight; moments are then the same on all of them
    columns   every device has all it needs, except for one mean over the whole of D

The sums of many weights travel together. Which do depends on whole shapes alone: every device makes the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lordo.lowrank import canonical_shape
from lordo.optim.lowrank_step import LowRankStep
from lordo.optim.stacks import Part
from lordo.shards import Side

# Numbers (r, n) of the weights that step together. Six times as many are alive at once (sums, direction, denominator and what they are
# made from), which is to stay below one whole matrix; but a small batch costs a collective without saving memory that would be missed.
SMALLEST_BATCH, LARGEST_BATCH = 1 << 16, 1 << 20
ALIVE_AT_ONCE = 6

Sum = Callable[[Sequence[Tensor]], None]


def shared_steps_(parts: Sequence[Part], options: dict[str, Any], *, side: Side, sum_: Sum) -> None:
    """The step of `lowrank_step_` for weights that are cut along one side.

    Args:
        parts: rows or columns of weight, gradient and state of each. options: the parameter group of all of them.
        side: which side is cut. sum_: replaces tensors by their sums over the devices of the worker.
    """
    steps = [LowRankStep(*part, options) for part in parts]
    found = [step.coordinates() for step in steps]
    if side == "rows":
        sum_(found)
    for step, coordinates in zip(steps, found, strict=True):
        step.learn_(coordinates)
    scaled = [step for step in steps if step.scale is not None]
    if side == "columns" and options["fullrank_denominator"] == "mean" and scaled:
        totals = [torch.stack([step.D.sum(), torch.full_like(step.D.sum(), step.D.numel())]) for step in scaled]
        sum_(totals)
        for step, (total, count) in zip(scaled, totals, strict=True):
            step.scale = (count / total).view(1, 1)
    for step in steps:
        step.apply_()


def batches(weights: Sequence[Tensor], *, rank: int) -> Iterator[slice]:
    """Runs of whole weights whose coordinates together are as many numbers as a batch may have; at least one weight each."""
    largest = max((weight.numel() for weight in weights), default=0)
    capacity = min(max(largest // ALIVE_AT_ONCE, SMALLEST_BATCH), LARGEST_BATCH)
    start = held = 0
    for i, weight in enumerate(weights):
        numel = rank * canonical_shape(weight.shape)[1]
        if held and held + numel > capacity:
            yield slice(start, i)
            start, held = i, 0
        held += numel
    if held:
        yield slice(start, len(weights))
