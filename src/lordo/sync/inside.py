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
from lordo.sync.wire import broadcast_moves, gather_moves, reduce_moves

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

    def sum_at_(self, tensor: Tensor, *, target: int) -> None:
        """Replace a contiguous tensor on device `target` by its sum."""

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

    def highest(self, numbers: list[float], *, device: torch.device) -> list[float]:
        """The largest of all devices' numbers, each for itself; NaN where any of them is."""
        for axis in self.axes:
            table = torch.zeros(axis.size, len(numbers), dtype=torch.float64, device=device)
            table[axis.rank] = torch.tensor(numbers, dtype=torch.float64)
            axis.sum_(table)
            numbers = table.amax(0).tolist()
        return numbers

    # -- for a new basis, among the devices of one copy ------------------------------------------------------------------

    def total_at_(self, tensor: Tensor, *, target: int) -> None:
        """Replace a tensor on device `target` by its sum over the parts; on the others it is left with numbers of no use."""
        if self.shards is not None:
            self._count(reduce_moves(_bytes(tensor)))
            self.shards.sum_at_(tensor, target=target)

    def collect(self, part: Tensor, weight: Tensor, *, target: int) -> Tensor | None:
        """All of a matrix on device `target`, from the parts; None on the others.

        Args:
            part: this device's part of it. weight: of the matrix's shape, cut as it is.
        """
        if self.shards is None:
            return part
        dim = cut_dim(weight)
        assert dim is not None
        shapes = [_part_shape(weight.shape, dim, self.size, each) for each in range(self.size)]
        pieces = self._pieces(part, [shape.numel() for shape in shapes], target=target)
        if pieces is None:
            return None
        if dim == 0:
            return pieces.view(weight.shape)
        each_piece = torch.split(pieces, [shape.numel() for shape in shapes])
        return torch.cat([piece.view(shape) for piece, shape in zip(each_piece, shapes, strict=True)], dim=dim)

    def collect_rows(self, part: Tensor, weight: Tensor, *, target: int) -> Tensor | None:
        """All of a matrix (m, …) on device `target`, of which each has the rows that go with its part of a weight; None on the others."""
        if self.shards is None or cut_side(weight) != "rows":
            return part if target == self.rank else None
        pieces = self._pieces(part, [rows * part.shape[1] for rows in self._rows(weight)], target=target)
        return None if pieces is None else pieces.view(-1, part.shape[1])

    def _pieces(self, piece: Tensor, sizes: list[int], *, target: int) -> Tensor | None:
        """Pieces of these sizes one after another on device `target`."""
        assert self.shards is not None
        here = target == self.rank
        self._count(gather_moves(sum(sizes) * piece.element_size(), self.size))
        pieces = piece.new_empty(sum(sizes) if here else 0)
        leaving = [piece.numel() if each == target else 0 for each in range(self.size)]
        self.shards.route_(pieces, piece.reshape(-1), sizes if here else [0] * self.size, leaving)
        return pieces if here else None

    def _rows(self, weight: Tensor) -> list[int]:
        """How many of the m rows each device has."""
        spans = (span(min(weight.shape), self.size, each) for each in range(self.size))
        return [end - start for start, end in spans]

    def hand_out_(self, part: Tensor, whole: Tensor | None, weight: Tensor, *, source: int) -> None:
        """The counterpart of `collect_rows`: write this device's part of a matrix (m, …), from all of it on device `source`.

        Args:
            part: overwritten. whole: on the source. weight: the weight it belongs to.
        """
        if self.shards is None or cut_side(weight) != "rows":
            if whole is not None:
                part.copy_(whole)
            if self.shards is not None:
                self._count(broadcast_moves(_bytes(part)))
                self.shards.broadcast_(part, source=source)
            return
        self._count(gather_moves(min(weight.shape) * part.shape[1] * part.element_size(), self.size))
        sizes = [rows * part.shape[1] if whole is not None else 0 for rows in self._rows(weight)]
        flat = part.new_empty(0) if whole is None else whole.contiguous().view(-1)
        arriving = [part.numel() if each == source else 0 for each in range(self.size)]
        self.shards.route_(part.view(-1), flat, arriving, sizes)

    def _count(self, moves: int) -> None:
        """Count what moves for a new basis."""
        assert self.shards is not None
        self.shards.moved["basis"] += moves

    def repeat_(self, tensor: Tensor) -> None:
        """Overwrite a tensor by that of the first copy."""
        if self.replicas is not None:
            self.replicas.broadcast_(tensor, source=0)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _part_shape(shape: Sequence[int], dim: int, num_parts: int, part: int) -> torch.Size:
    start, end = span(shape[dim], num_parts, part)
    return torch.Size([*shape[:dim], end - start, *shape[dim + 1 :]])


def own_rows(matrix: Tensor, weight: Tensor, inside: Inside) -> Tensor:
    """The rows of an (m, …) matrix that go with this device's rows of a weight."""
    start, end = span(matrix.shape[0], inside.size, inside.rank)
    assert end - start == canonical_part(weight.detach(), weight).shape[0]
    return matrix[start:end].clone()
