"""Whose share goes into an average: a worker with a NaN or an infinity joins every collective, but with weight 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lordo.finite import first_nonfinite
from lordo.sync.comm import Comm

# Synchronisations in a row from which one worker may be left out before it is an error.
MAX_LEFT_OUT_IN_A_ROW = 5


@dataclass(frozen=True)
class LeftOut:
    """A worker whose share was left out of an average.

    worker: its number. tensor: the first of its tensors that was not finite. in_a_row: how often it was left out without a break.
    """

    worker: int
    tensor: str
    in_a_row: int

    def __str__(self) -> str:
        """As part of a sentence."""
        return f"worker {self.worker} ('{self.tensor}' is not finite)"


@torch.no_grad()
def average_(named: Sequence[tuple[str, str, Tensor]], comm: Comm, *, in_a_row: int = 0) -> tuple[LeftOut, ...]:
    """Replace tensors by their mean over the workers whose own are finite, all of them; the same bits on every worker.

    Who that is goes round in a small note first: which collectives follow does not depend on it, and every worker comes to know it. If
    nobody's are finite, everybody's are averaged: what is ruined everywhere stays so, and what is sound stays sound. A newcomer, who has
    a copy of another worker's, is given the mean and adds nothing to it.

    Args:
        named: (tag, name, tensor), in the same order on every worker. comm: the workers.
        in_a_row: how often this worker was left out just before.

    Returns:
        Who was left out.
    """
    if comm.size == 1 or not named:
        return ()
    unusable = first_nonfinite((name, tensor) for _, name, tensor in named)
    notes = comm.gather((comm.inside.first(unusable, device=named[0][2].device), in_a_row, comm.newcomer))
    left_out = tuple(LeftOut(worker, name, before + 1) for worker, (name, before, _) in enumerate(notes) if name is not None)
    counted = [worker for worker, (name, _, newcomer) in enumerate(notes) if name is None and not newcomer]
    num_shares = len(counted) or comm.size
    if counted and comm.rank not in counted:
        for _, _, tensor in named:
            tensor.zero_()
    comm.mean_([(tag, tensor) for tag, _, tensor in named], num_shares=num_shares)
    return left_out


def heal_(states: Sequence[dict[str, Any]], comm: Comm) -> None:
    """After a worker was left out: what an average did not replace and is not finite, on any of its devices, starts anew.

    Args:
        states: of all parameters. A moment that is not finite takes the other one and the count of steps with it, an error its other parts.
        comm: the workers; every device of this one makes the call.
    """
    numbers = ((i, key, t) for i, state in enumerate(states) for key, t in state.items() if t.is_floating_point())
    found = [(i, key) for i, key, t in numbers if first_nonfinite([(key, t)])]
    bad = {each for device in comm.inside.gather(found) for each in device}
    for i, state in enumerate(states):
        keys = {key for number, key in bad if number == i}
        if keys & {"exp_avg", "exp_avg_sq"}:
            keys |= {"exp_avg", "exp_avg_sq", "step"}
        if any(key.startswith("error") for key in keys):
            keys |= {key for key in state if key.startswith("error")}
        for key in keys:
            state[key].zero_()
