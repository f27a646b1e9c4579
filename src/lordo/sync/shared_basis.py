"""New bases of matrices Δ that the devices of a worker share: of as many at once as there are devices, each computed by one of them.

Power iteration asks for nothing but products with ΔΔᵀ, and these are sums over the parts of Δ: no device gets all of a matrix. What a
device has whole are blocks Q (m, k) of the basis that it computes, of a few more than r columns. An exact decomposition needs the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lordo.lowrank import ITERATIONS, BasisMethod, canonical, checked, is_exact, leading_subspace, num_columns, subspace_basis
from lordo.shards import canonical_part, cut_side
from lordo.sync.inside import Inside


@dataclass(frozen=True)
class Task:
    """A basis that is wanted.

    Attributes:
        weight: whose. part: this device's part of Δ, in the weight's own shape. largest: absolute value of all of Δ's entries; not zero.
        basis: this device's part of the present one, (m, r).
        method, seed, fresh: see `lowrank.leading_subspace`.
    """

    weight: Tensor
    part: Tensor
    largest: float
    basis: Tensor
    method: BasisMethod
    seed: tuple[int, str, int]
    fresh: int

    @property
    def is_exact(self) -> bool:
        """Whether it comes from an exact decomposition."""
        return is_exact(self.method, min(self.weight.shape))

    @property
    def num_columns(self) -> int:
        """Columns k of a block."""
        return num_columns(min(self.weight.shape), self.basis.shape[1], self.fresh)


def basis_from_whole(tasks: Sequence[Task], inside: Inside) -> Tensor | None:
    """The basis (m, r) of the task that has this device's number, from all of the matrix; None without a task, or where the basis stays.

    Every device of the first copy makes the same calls.
    """
    wholes = [inside.collect(task.part, task.weight, target=i) for i, task in enumerate(tasks)]
    olds = _present_bases(tasks, inside)
    for task, whole, old in zip(tasks, wholes, olds, strict=True):
        if whole is not None and old is not None:
            return leading_subspace(canonical(whole), old, method=task.method, seed=task.seed, fresh=task.fresh)
    return None


def basis_from_parts(tasks: Sequence[Task], inside: Inside) -> Tensor | None:
    """As `basis_from_whole`, by power iteration with matrices that stay where they are."""
    olds, gram = _present_bases(tasks, inside), SharedGram(tasks, inside)
    for task, old in zip(tasks, olds, strict=True):
        if old is not None:
            return checked(partial(subspace_basis, gram, old, seed=task.seed, fresh=task.fresh), old)
    gram.help(ITERATIONS)
    return None


def _present_bases(tasks: Sequence[Task], inside: Inside) -> list[Tensor | None]:
    return [inside.collect_rows(task.basis, task.weight, target=i) for i, task in enumerate(tasks)]


class SharedGram:
    """ΔΔᵀ of the task that has this device's number, from the parts of Δ; a `lowrank.Gram`.

    A product takes all devices, each of which asks for one with its own task's matrix: they all make the same calls, those without a task
    by `help`.
    """

    def __init__(self, tasks: Sequence[Task], inside: Inside) -> None:
        """The tasks, no more than there are devices."""
        self.tasks, self.inside = tasks, inside

    def times(self, block: Tensor) -> Tensor:
        """ΔΔᵀ Q of this device's task."""
        return _own(self._for_each(self._times, block))

    def within(self, block: Tensor) -> Tensor:
        """QᵀΔΔᵀ Q of this device's task."""
        return _own(self._for_each(self._within, block))

    def help(self, iterations: int) -> None:
        """Take part in as many `times` and one `within` for the tasks of other devices."""
        for _ in range(iterations):
            self._for_each(self._times, None)
        self._for_each(self._within, None)

    def _for_each(self, product: Callable[[Task, Tensor, int], Tensor | None], block: Tensor | None) -> Tensor | None:
        """The products of all tasks, one after another; the result of this device's own."""
        own = None
        for target, task in enumerate(self.tasks):
            here = target == self.inside.rank
            received = task.part.new_empty(canonical_part(task.part, task.weight).shape[0], task.num_columns)
            self.inside.hand_out_(received, block if here else None, task.weight, source=target)
            with torch.autocast(received.device.type, enabled=False):
                result = product(task, received, target)
            own = result if here else own
        return own

    def _times(self, task: Task, block: Tensor, target: int) -> Tensor | None:
        part, rows_are_cut = canonical_part(task.part, task.weight), cut_side(task.weight) == "rows"
        coordinates = (part.mT @ block).div_(task.largest)
        if rows_are_cut:
            self.inside.total_([("basis", coordinates)])
        product = (part @ coordinates).div_(task.largest)
        del coordinates  # the largest of all blocks
        if rows_are_cut:
            return self.inside.collect_rows(product, task.weight, target=target)
        self.inside.total_at_(product, target=target)
        return product

    def _within(self, task: Task, block: Tensor, target: int) -> Tensor | None:
        coordinates = (canonical_part(task.part, task.weight).mT @ block).div_(task.largest)
        if cut_side(task.weight) == "rows":
            self.inside.total_at_(coordinates, target=target)
            return coordinates.mT @ coordinates if target == self.inside.rank else None
        product = coordinates.mT @ coordinates
        self.inside.total_at_(product, target=target)
        return product


def _own(product: Tensor | None) -> Tensor:
    assert product is not None
    return product
