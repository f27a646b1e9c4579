"""The devices that make up one worker: what they add up, what they agree on, and how one of them gets all of a matrix.

Their parts of the weights are DTensors of `fully_shard`; a worker that is one device needs none of this, and nothing is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lordo.shards import canonical_part, cut_dim, cut_side, span
from lordo.sync.wire import broadcast_moves

Note = TypeVar("Note")


class Axis(Protocol):
    """What is needed of the devices along one axis: what a `Group` can do."""

    rank: int
    size: int
    moved: Counter[str]

    def sum_(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by its sum."""

    def total_(self, tagged: Sequence[tuple[str, Tensor]]) -> None:
        """Replace tensors by their sums."""

    def broadcast_(self, tensor: Tensor, *, source: int) -> None:
        """Overwrite a contiguous tensor by that of device `source`."""

    def route_(self, out: Tensor, tensor: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> None:
        """Send each device its own piece, and take in one from each."""

    def gather(self, note: Any) -> list[Any]:
        """Small objects of all."""


class Inside:
    """The devices of one worker.

    Every device makes the same calls in the same order.

    Attributes:
        shards: those that hold the parts of one copy of the weights. replicas: those that hold the same part of other copies (HSDP). None:
            there is one.
    """

    def __init__(self, shards: Axis | None = None, replicas: Axis | None = None) -> None:
        """The two axes."""
        self.shards, self.replicas = shards, replicas

    @property
    def size(self) -> int:
        """Parts into which a weight is cut."""
        return 1 if self.shards is None else self.shards.size

    @property
    def rank(self) -> int:
        """Number of this device's part."""
        return 0 if self.shards is None else self.shards.rank

    @property
    def num_devices(self) -> int:
        """Devices of the worker."""
        return self.size * (1 if self.replicas is None else self.replicas.size)

    @property
    def device(self) -> int:
        """Number of this device among those of the worker."""
        return self.rank if self.replicas is None else self.replicas.rank * self.size + self.rank

    @property
    def in_first_copy(self) -> bool:
        """Whether this device's part belongs to the copy that computes for all."""
        return self.replicas is None or self.replicas.rank == 0

    @property
    def axes(self) -> list[Axis]:
        """Those along which there is more than this device."""
        return [axis for axis in (self.shards, self.replicas) if axis is not None]

    def total_(self, tagged: Sequence[tuple[str, Tensor]]) -> None:
        """Replace tensors by their sums over the parts of one copy, many in one message: (tag, tensor) pairs, as in `Comm.mean_`."""
        if self.shards is not None:
            self.shards.total_(tagged)

    def any(self, flags: Tensor) -> Tensor:
        """Which flags are set on any device: the same on all of them."""
        raised = flags.float()
        for axis in self.axes:
            axis.sum_(raised)
        return raised > 0

    def mean(self, number: Tensor) -> Tensor:
        """The mean of a number, (), over all devices: the same bits on all of them."""
        total = number.detach().clone()
        for axis in self.axes:
            axis.sum_(total)
        return total / self.num_devices

    def first(self, note: Note | None, *, device: torch.device) -> Note | None:
        """A note of one of the devices that have one, the same on all of them; None if none has. `device`: where messages are made."""
        if not self.axes or not bool(self.any(torch.tensor([note is not None], device=device))):
            return note
        return next(each for each in self.gather(note) if each is not None)

    def gather(self, note: Note) -> list[Note]:
        """Small objects of all devices, in the same order on all of them."""
        return self.gather_each([note])

    def gather_each(self, notes: list[Note]) -> list[Note]:
        """Some small objects of each device, of all of them in one list."""
        for axis in self.axes:
            notes = [each for some in axis.gather(notes) for each in some]
        return notes

    def highest(self, number: float, *, device: torch.device) -> float:
        """The largest of the parts' numbers."""
        if self.shards is None:
            return number
        numbers = torch.zeros(self.size, dtype=torch.float64, device=device)
        numbers[self.rank] = number
        self.shards.sum_(numbers)
        return float(numbers.max())

    # -- one matrix at a time --------------------------------------------------------------------------------------------

    def collect(self, part: Tensor, weight: Tensor, *, target: int) -> Tensor | None:
        """All of a matrix on device `target` of the first copy, from the parts; None on the others.

        Args:
            part: this device's part of it. weight: of the matrix's shape, cut as it is.
        """
        if not self.in_first_copy:
            return None
        if self.shards is None:
            return part
        dim, here = cut_dim(weight), target == self.rank
        assert dim is not None
        shapes = [_part_shape(weight.shape, dim, self.size, each) for each in range(self.size)]
        sizes = [shape.numel() if here else 0 for shape in shapes]
        whole = part.new_empty(sum(sizes))
        self.shards.moved["gathered for a basis"] += broadcast_moves(weight.numel() * part.element_size())
        self.shards.route_(whole, part.reshape(-1), sizes, [part.numel() if each == target else 0 for each in range(self.size)])
        if not here:
            return None
        if dim == 0:
            return whole.view(weight.shape)
        return torch.cat([piece.view(shape) for piece, shape in zip(torch.split(whole, sizes), shapes, strict=True)], dim=dim)

    def collect_basis(self, part: Tensor, weight: Tensor, *, target: int) -> Tensor | None:
        """All of a basis (m, r) on device `target` of the first copy."""
        if not self.in_first_copy:
            return None
        if self.shards is None or cut_side(weight) != "rows":
            return part if target == self.rank else None
        sizes = [rows * part.shape[1] if target == self.rank else 0 for rows in self._rows(weight)]
        whole = part.new_empty(sum(sizes))
        self.shards.route_(whole, part.view(-1), sizes, [part.numel() if each == target else 0 for each in range(self.size)])
        return whole.view(-1, part.shape[1]) if target == self.rank else None

    def _rows(self, weight: Tensor) -> list[int]:
        """How many of the m rows each device has."""
        spans = (span(min(weight.shape), self.size, each) for each in range(self.size))
        return [end - start for start, end in spans]

    def hand_out_(self, basis: Tensor, whole: Tensor | None, weight: Tensor, *, source: int) -> None:
        """Write this device's part of a basis, from all of it on device `source` of the first copy.

        Args:
            basis: the part, overwritten. whole: (m, r) on the source. weight: the weight it belongs to.
        """
        if self.in_first_copy:
            if self.shards is None or cut_side(weight) != "rows":
                if whole is not None:
                    basis.copy_(whole)
                if self.shards is not None:
                    self.shards.broadcast_(basis, source=source)
            else:
                sizes = [rows * basis.shape[1] if whole is not None else 0 for rows in self._rows(weight)]
                flat = basis.new_empty(0) if whole is None else whole.contiguous().view(-1)
                arriving = [basis.numel() if each == source else 0 for each in range(self.size)]
                self.shards.route_(basis.view(-1), flat, arriving, sizes)
        if self.replicas is not None:
            self.replicas.broadcast_(basis, source=0)


def _part_shape(shape: Sequence[int], dim: int, num_parts: int, part: int) -> torch.Size:
    start, end = span(shape[dim], num_parts, part)
    return torch.Size([*shape[:dim], end - start, *shape[dim + 1 :]])


def own_rows(matrix: Tensor, weight: Tensor, inside: Inside) -> Tensor:
    """The rows of an (m, …) matrix that go with this device's rows of a weight."""
    start, end = span(matrix.shape[0], inside.size, inside.rank)
    assert end - start == canonical_part(weight.detach(), weight).shape[0]
    return matrix[start:end].clone()
