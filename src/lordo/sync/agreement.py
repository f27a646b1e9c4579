"""Before the first exchange: do all workers train the same model in the same way?"""

from __future__ import annotations

import os
import uuid
from typing import Any

import torch
from torch import Tensor

from lordo.shards import local
from lordo.sync.comm import Comm
from lordo.sync.inside import Inside
from lordo.sync.refresh import Member


class DisagreementError(ValueError):
    """Workers do not train the same model in the same way; the message is one sentence, the same on all of them."""


_PROCESS = uuid.uuid4().hex  # with the process number: tells memory of this process from that of any other, on any machine

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_agreement(members: list[Member], settings: list[dict[str, Any]], comm: Comm, *, weights: list[Member]) -> None:
    """Compare names, shapes, dtypes and settings of all workers and of the devices in each, and at the very start the weights.

    Args:
        members: named parameters. settings: of each group, plain values only. comm: the workers.
        weights: the parameters that must hold the same values: those that have not been trained yet.

    Raises:
        DisagreementError: the same sentence on every worker, naming the first difference and the worker that has it.
    """
    if comm.size * comm.inside.num_devices == 1:
        return
    note = {
        "memory": (_PROCESS, os.getpid(), next((local(p.detach()).data_ptr() for _, p, _ in members if p.numel()), 0)),
        "layout": {name: (tuple(p.shape), str(p.dtype)) for name, p, _ in members},
        "settings": settings,
        "weights": {name: _fingerprint(local(p.detach())) for name, p, _ in weights},
    }
    found = _difference_inside(note, comm.inside)
    if members:
        found = comm.inside.first(found, device=members[0][1].device)
    notes = comm.gather(note | {"found": found})
    found = next((each["found"] for each in notes if each["found"] is not None), None) or _first_difference(notes, "worker")
    if members:
        found = comm.inside.first(found, device=members[0][1].device)
    if found is not None:
        raise DisagreementError(found)


def _difference_inside(note: dict[str, Any], inside: Inside) -> str | None:
    """In what the devices of one worker differ: parts of one copy have weights of their own, copies have the same."""
    axes = ((inside.shards, note | {"weights": {}}), (inside.replicas, note))
    found = [_first_difference(axis.gather(mine), "device") for axis, mine in axes if axis is not None]
    return next((each for each in found if each is not None), None)


def _first_difference(notes: list[dict[str, Any]], kind: str) -> str | None:
    """The first thing in which one of several workers (or devices of a worker) differs from the first of them."""
    found = (_difference(notes[0], other, number, kind) for number, other in enumerate(notes[1:], start=1))
    return next((each for each in found if each is not None), None)


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


def _difference(first: dict[str, Any], other: dict[str, Any], number: int, kind: str) -> str | None:
    """The first thing in which a worker (or device) differs from number 0, as a sentence."""
    if other["memory"] == first["memory"] and other["memory"][-1]:
        return f"{kind}s 0 and {number} share one model: build one for each, inside the function it runs"
    same_model, alike = f"build the same model on every {kind}", f"give every {kind} the same settings"
    for name in sorted(first["layout"].keys() ^ other["layout"].keys()):
        has, lacks = (0, number) if name in first["layout"] else (number, 0)
        return f"{kind} {has} has a parameter '{name}' that {kind} {lacks} lacks: {same_model}"
    for name, (shape, dtype) in first["layout"].items():
        if (shape, dtype) != other["layout"][name]:
            theirs = "{} of {}".format(*other["layout"][name])
            return f"parameter '{name}' is {shape} of {dtype} on {kind} 0 but {theirs} on {kind} {number}: {same_model}"
    if len(first["settings"]) != len(other["settings"]):
        numbers = f"{len(first['settings'])} and {len(other['settings'])}"
        return f"{kind}s 0 and {number} have {numbers} parameter groups: group the parameters alike on every {kind}"
    for ours, theirs in zip(first["settings"], other["settings"], strict=True):
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                return f"{key} is {ours.get(key)!r} on {kind} 0 but {theirs.get(key)!r} on {kind} {number}: {alike}"
    for name, fingerprint in first["weights"].items():
        if fingerprint != other["weights"][name]:
            return (
                f"{kind} {number} starts from other weights than {kind} 0 (first difference in '{name}'): "
                f"build the model from the same seed or the same checkpoint on every {kind}"
            )
    return None
