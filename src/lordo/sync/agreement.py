"""Before the first exchange: do all workers train the same model in the same way?"""

from __future__ import annotations

import os
import uuid
from typing import Any

import torch
from torch import Tensor

from lordo.shards import local
from lordo.sync.comm import Comm
from lordo.sync.rules import Member


class DisagreementError(ValueError):
    """Workers do not train the same model in the same way; the message is one sentence, the same on all of them."""


_PROCESS = uuid.uuid4().hex  # with the process number: tells memory of this process from that of any other, on any machine

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_agreement(members: list[Member], settings: list[dict[str, Any]], comm: Comm, *, weights: list[Member]) -> None:
    """Compare names, shapes, dtypes and settings of all workers, and at the very start the weights.

    Args:
        members: named parameters. settings: of each group, plain values only. comm: the workers.
        weights: the parameters that must hold the same values: those that have not been trained yet.

    Raises:
        DisagreementError: the same sentence on every worker, naming the first difference and the worker that has it.
    """
    if comm.size == 1:
        return
    note = {
        "memory": (_PROCESS, os.getpid(), next((local(p.detach()).data_ptr() for _, p, _ in members if p.numel()), 0)),
        "layout": {name: (tuple(p.shape), str(p.dtype)) for name, p, _ in members},
        "settings": settings,
        "weights": {name: _fingerprint(local(p.detach())) for name, p, _ in weights},
    }
    notes = comm.gather(note)
    found = (_difference(notes[0], other, worker) for worker, other in enumerate(notes[1:], start=1))
    difference = next((each for each in found if each is not None), None)
    difference = comm.inside.first(difference, device=members[0][1].device) if members else difference
    if difference is not None:
        raise DisagreementError(difference)


def _fingerprint(p: Tensor) -> int:
    """Sum of the bit patterns, each times an odd number that goes with its place: whole numbers, the same with any number of threads."""
    if not p.numel():
        return 0
    total = 0
    bits = p.detach().contiguous().view(-1).view(_INTEGERS[p.element_size()])
    for i, chunk in enumerate(torch.split(bits, 1 << 20)):
        places = torch.arange(1, 2 * len(chunk), 2, device=p.device)
        total += (2 * i + 1) * int((chunk * places).sum())
    return total


def _difference(first: dict[str, Any], other: dict[str, Any], worker: int) -> str | None:
    """The first thing in which a worker differs from worker 0, as a sentence."""
    if other["memory"] == first["memory"] and other["memory"][-1]:
        return f"workers 0 and {worker} share one model: build one for each, inside the function it runs"
    same_model, alike = "build the same model on every worker", "give every worker the same settings"
    for name in sorted(first["layout"].keys() ^ other["layout"].keys()):
        has, lacks = (0, worker) if name in first["layout"] else (worker, 0)
        return f"worker {has} has a parameter '{name}' that worker {lacks} lacks: {same_model}"
    for name, (shape, dtype) in first["layout"].items():
        if (shape, dtype) != other["layout"][name]:
            theirs = "{} of {}".format(*other["layout"][name])
            return f"parameter '{name}' is {shape} of {dtype} on worker 0 but {theirs} on worker {worker}: {same_model}"
    if len(first["settings"]) != len(other["settings"]):
        numbers = f"{len(first['settings'])} and {len(other['settings'])}"
        return f"workers 0 and {worker} have {numbers} parameter groups: group the parameters alike on every worker"
    for ours, theirs in zip(first["settings"], other["settings"], strict=True):
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                return f"{key} is {ours.get(key)!r} on worker 0 but {theirs.get(key)!r} on worker {worker}: {alike}"
    for name, fingerprint in first["weights"].items():
        if fingerprint != other["weights"][name]:
            return (
                f"worker {worker} starts from other weights than worker 0 (first difference in '{name}'): "
                "build the model from the same seed or the same checkpoint on every worker"
            )
    return None
