"""New bases for low-rank weights: each computed by one worker, sent to all, installed by all.

A decomposition that every worker repeats differs in signs and last bits between machines and thread counts; moments averaged
later would then live in different bases. Hence one owner for each matrix, the work spread evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lordo.lowrank import FRESH_COLUMNS, common_share, peak, rounding_noise
from lordo.shards import cut_side, local
from lordo.sync.comm import Comm
from lordo.sync.compressed import share_encoded_
from lordo.sync.formats import WireFormat
from lordo.sync.inside import Inside
from lordo.sync.shared_basis import Task, basis_from_parts, basis_from_whole

Member = tuple[str, Tensor, dict[str, Any]]  # name, parameter, settings of its group

# New bases are installed before more are computed when a device has as many numbers of them as a quarter of the largest matrix. A run of
# fewer than this costs messages without saving memory that would be missed.
SMALLEST_RUN = 1 << 21
# What the owner of a weight sends in place of a basis when the present one stays.
KEEP = math.nan


class HasBases(Protocol):
    """What a refresh sees of an optimizer."""

    state: Any

    def set_basis(self, p: Tensor, basis: Tensor) -> Tensor:
        """Install a basis, carrying the moments over; returns Q_newᵀ Q_old."""


@dataclass(frozen=True)
class _Collected:
    """A weight whose new basis is computed by this worker: its number, and what to call when Δ is not needed any more."""

    i: int
    task: Task
    then: Callable[[], None]


class Refresh:
    """New bases for some low-rank weights.

    Where a worker is several devices, as many bases as these are computed at once, each by one of them.
    """

    def __init__(self, optimizer: HasBases, comm: Comm, members: Sequence[Member], step: int, *, wire: WireFormat = "float32") -> None:
        """The weights, in the same order on every worker, the step t after which this happens, and in which format bases travel."""
        self.optimizer, self.comm, self.members, self.step, self.wire = optimizer, comm, members, step, wire
        self.old = [optimizer.state[p]["basis"] for _, p, _ in members]
        self.new = [torch.empty_like(basis) for basis in self.old]
        self.owners = spread([float(p.numel() * Q.shape[1]) for (_, p, _), Q in zip(members, self.old, strict=True)], comm.size)
        self.collected: list[_Collected] = []

    def own_weights(self) -> dict[Tensor, int]:
        """The weights that this worker owns, and their numbers."""
        return {p: i for i, (_, p, _) in enumerate(self.members) if self.owners[i] == self.comm.rank}

    def compute(self, i: int, matrix: Tensor, *, first: bool = False, then: Callable[[], None] = lambda: None) -> None:
        """If this worker owns weight number i: its new basis from a matrix of the weight's own shape, which only this worker needs.

        Args:
            matrix: this device's part of it. first: there was no basis before.
            then: called when the matrix is not needed any more, at the latest by `install`.
        """
        if self.owners[i] != self.comm.rank:
            then()
            return
        (name, p, settings), old, inside = self.members[i], self.old[i], self.comm.inside
        with self.comm.timed("basis refresh"):
            # a worker alone averages nothing, so that nothing is rounded
            noise = 0.0 if first or self.comm.size == 1 else rounding_noise(local(p.detach()), old.dtype)
            largest = float(peak(matrix)) if matrix.numel() else 0.0
            largest, noise = inside.highest([largest, noise], device=p.device)
            if noise < largest < math.inf:
                fresh = old.shape[1] if first else FRESH_COLUMNS
                task = Task(p, matrix, largest, old, settings["basis"], (0, name, self.step), fresh)
                self.collected.append(_Collected(i, task, then))
            else:
                self.new[i].fill_(KEEP)
                then()
            if first or len(self.collected) == inside.size:  # a first gradient is a copy: one of them is enough to hold
                self._decompose()

    def _decompose(self) -> None:
        """New bases from the matrices that were collected."""
        collected, self.collected = self.collected, []
        alone = self.comm.inside.size == 1
        self._compute([each for each in collected if alone or each.task.is_exact], basis_from_whole)
        self._compute([each for each in collected if not (alone or each.task.is_exact)], basis_from_parts)

    def _compute(self, batch: Sequence[_Collected], own_basis: Callable[[Sequence[Task], Inside], Tensor | None]) -> None:
        """New bases, each computed by another device, and handed out: the parts inside the first copy, then to the other copies."""
        inside = self.comm.inside
        own = own_basis([each.task for each in batch], inside) if batch and inside.in_first_copy else None
        for source, each in enumerate(batch):
            new, p = self.new[each.i], each.task.weight
            if inside.in_first_copy:
                computed = new.new_full((min(p.shape), new.shape[1]), KEEP) if own is None else own
                inside.hand_out_(new, computed if source == inside.rank else None, p, source=source)
            inside.repeat_(new)
            each.then()

    def install(self) -> tuple[list[float], list[str]]:
        """Send, rotate and install; returns the overlaps with the old bases and the names of the bases that stayed."""
        if self.collected:
            with self.comm.timed("basis refresh"):
                self._decompose()
        if not self.members:
            return [], []
        if self.wire == "float32":
            for worker in range(self.comm.size):
                self.comm.send_(
                    [new for new, owner in zip(self.new, self.owners, strict=True) if owner == worker], source=worker, tag="basis"
                )
        else:
            share_encoded_(self.comm, self.new, self.owners, self.wire, tag="basis")
        with self.comm.timed("basis refresh"):
            overlaps, kept = [], []
            stays = self.comm.inside.any(torch.stack([new[:1, :1].isnan().any() for new in self.new]))  # a device may have no rows
            for (name, p, _), new, keep in zip(self.members, self.new, stays.tolist(), strict=True):
                if keep:
                    kept.append(name)
                else:
                    overlaps.append(common_share(self.optimizer.set_basis(p, new)))
        return overlaps, kept


def runs(optimizer: HasBases, members: Sequence[Member], comm: Comm, wire: WireFormat) -> Iterator[Sequence[Member]]:
    """Weights one after another, in runs whose new bases are computed, sent and installed before those of the next.

    Which run a weight is in depends on whole shapes alone. In a wire format all bases travel in one exchange, and there is one run.
    """
    largest = max((p.numel() for _, p, _ in members if "basis" in optimizer.state[p]), default=0)
    limit = math.inf if wire != "float32" else max(largest // 4, SMALLEST_RUN)
    run: list[Member] = []
    total = 0
    for member in members:
        basis = optimizer.state[member[1]].get("basis")
        numel = 0 if basis is None else _largest_part(member[1], basis.shape[1], comm.inside.size)
        if run and total + numel > limit:
            yield run
            run, total = [], 0
        run.append(member)
        total += numel
    if run:
        yield run


def _largest_part(p: Tensor, rank: int, num_parts: int) -> int:
    """Numbers of the basis on the device that has most of them."""
    rows = min(p.shape)
    return rank * (-(-rows // num_parts) if cut_side(p) == "rows" else rows)


def spread(costs: Sequence[float], num_workers: int) -> list[int]:
    """An owner for each task so that the workers' sums of costs come out about even: the dearest first, to whoever has least."""
    loads = [0.0] * num_workers
    owners = [0] * len(costs)
    for task in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner = loads.index(min(loads))
        owners[task] = owner
        loads[owner] += costs[task]
    return owners
