"""The contract between workers, and the worker that is alone."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from lordo.sync.inside import Inside
from lordo.sync.wire import (
    BUCKET_ELEMENTS,
    Piece,
    all_reduce_moves,
    broadcast_moves,
    buckets,
    reduce_moves,
    sent_bytes,
    travels_alone,
    wire_bytes,
    wire_dtype,
)

Tagged = Sequence[tuple[str, Tensor]]


class WorkerError(RuntimeError):
    """Another worker failed or left while this one waited for it."""


class Comm(ABC):
    """What a worker can do with the others: average, send from one to all, compare notes. Counts bytes and seconds per tag.

    Every worker makes the same calls in the same order.

    Attributes:
        rank: number of this worker, 0 … size − 1.
        size: number of workers M.
        inside: the devices that make up this worker: one, unless an optimizer finds its weights to be shared among several.
        phase: what this worker is doing: "compute", or the tag of what is being timed.
        moved: per tag, what collectives moved; `bytes_sent` turns it into bytes.
        seconds: per tag, seconds spent (waiting included, except where workers share one process and take turns).
        at_once: workers that compute at the same time in this process, and whose seconds add up.
        newcomer: whether this worker holds a copy of another's state, which must not count twice in the next average.
    """

    rank: int
    size: int
    at_once: int = 1
    newcomer: bool = False

    def __init__(self, rank: int, size: int) -> None:
        """Worker `rank` of `size`, nothing sent yet."""
        self.rank, self.size = rank, size
        self.inside = Inside()
        self.phase = "compute"
        self.moved: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @property
    def is_first(self) -> bool:
        """Whether this is the first device of the first worker, who speaks for all."""
        return self.rank == 0 and self.inside.device == 0

    def gather_all(self, note: Any) -> list[Any]:
        """Small objects of all devices of all workers, in the same order on all of them."""
        return self.inside.gather_each(self.gather(note))

    def bytes_sent(self, tag: str | None = None) -> int:
        """Bytes each worker sent so far, on average, under one tag or (None) in all; see `wire.sent_bytes`."""
        if tag is None:
            return sum(sent_bytes(moved, self.size) for moved in self.moved.values())
        return sent_bytes(self.moved[tag], self.size)

    def mean_(self, tagged: Tagged, *, num_shares: int | None = None) -> None:
        """Replace every tensor by its mean over the workers: the same bits on all of them.

        Args:
            tagged: (tag, tensor) pairs, floating-point, of equal shapes and order on every worker. The mean is formed in float32
                (float64 for float64). Small tensors travel together.
            num_shares: how many workers' tensors count, if not all: the others hold zeros.
        """
        divisor = self.size if num_shares is None else num_shares
        for summed in self._summed(tagged):
            summed.div_(divisor)

    def total_(self, tagged: Tagged) -> None:
        """Replace every tensor by its sum over the workers, as `mean_` by their mean."""
        for _ in self._summed(tagged):
            pass

    def _summed(self, tagged: Tagged) -> Iterator[Tensor]:
        """The sums of tensors over the workers, some of them together in one buffer: what is done to it is done to them."""
        for tag, t in tagged:
            if not t.is_floating_point() or t.element_size() < 2:
                raise TypeError(f"only floating-point tensors have a mean here; got {t.dtype} under '{tag}'")
        tagged = [(tag, t) for tag, t in tagged if t.numel()]
        if self.size == 1:
            return
        for tag, t in tagged:
            self.moved[tag] += all_reduce_moves(wire_bytes(t.numel(), t.dtype))
        with self.transfer():
            for _, t in tagged:
                if travels_alone(t):
                    self.sum_(t)
                    yield t
            together: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for _, t in tagged:
                if not travels_alone(t):
                    together.setdefault((wire_dtype(t.dtype), t.device), []).append(t)
            for (dtype, device), tensors in together.items():
                for used in self._together_(tensors, dtype, device):
                    self.sum_(used)
                    yield used

    def _together_(self, tensors: list[Tensor], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        """Tensors laid into one buffer after another: whatever is done to a buffer is done to what lies in it."""
        flat = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        for bucket, used in self._buckets([t.numel() for t in tensors], dtype, device):
            for part, place in _places(bucket, flat, used):
                place.copy_(part)
            yield used
            for part, place in _places(bucket, flat, used):
                part.copy_(place)
        for t, f in zip(tensors, flat, strict=True):
            if t is not f:
                t.copy_(f)

    def _buckets(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Iterator[tuple[list[Piece], Tensor]]:
        """Tensors of these sizes laid into one buffer after another; its memory is kept from call to call."""
        wanted = min(sum(sizes), BUCKET_ELEMENTS)
        if self._buffers.get((dtype, device), torch.empty(0)).numel() < wanted:
            self._buffers[dtype, device] = torch.empty(wanted, dtype=dtype, device=device)
        for bucket in buckets(sizes, capacity=BUCKET_ELEMENTS):
            yield bucket, self._buffers[dtype, device][: sum(piece.length for piece in bucket)]

    def mean_at_(self, tensor: Tensor, *, target: int, tag: str) -> None:
        """Replace a tensor on worker `target` by its mean over the workers; on the others it is left with numbers of no use.

        Half of what `mean_` sends, for what only one worker needs.
        """
        if self.size == 1 or not tensor.numel():
            return
        self.moved[tag] += reduce_moves(wire_bytes(tensor.numel(), tensor.dtype))
        with self.transfer():
            self.sum_at_(tensor, target=target)
            tensor.div_(self.size)

    def send_(self, tensors: Sequence[Tensor], *, source: int, tag: str) -> None:
        """Overwrite tensors by those of worker `source`, many in one message."""
        tensors = [t for t in tensors if t.numel()]
        if self.size == 1:
            return
        self.moved[tag] += sum(broadcast_moves(t.numel() * t.element_size()) for t in tensors)
        with self.transfer():
            together: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for t in tensors:
                together.setdefault((t.dtype, t.device), []).append(t)
            for (dtype, device), group in together.items():
                for used in self._together_(group, dtype, device):
                    self.broadcast_(used, source=source)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, bytes are not counted: what is sent again, because a run goes on from a checkpoint, was counted before."""
        moved = Counter(self.moved)
        try:
            yield
        finally:
            self.moved = moved

    def transfer(self) -> AbstractContextManager[None]:
        """Times what is spent in collectives."""
        return self.timed("communication")

    @contextmanager
    def timed(self, tag: str) -> Iterator[None]:
        """Add the seconds of a block of code to `seconds[tag]`."""
        start, before = time.perf_counter(), self.phase
        self.phase = tag
        try:
            yield
        finally:
            self.phase = before
            self.add_seconds(tag, time.perf_counter() - start)

    def add_seconds(self, tag: str, seconds: float) -> None:
        """Add to `seconds[tag]`."""
        self.seconds[tag] += seconds

    def attempt(self, synchronise: Callable[[], None]) -> None:
        """Do what follows a local step, any part of which may wait for other workers.

        Where workers come and go, it is undone and done again with those who are left if one of them was lost in it.
        """
        synchronise()

    @abstractmethod
    def sum_(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by its sum over the workers."""

    @abstractmethod
    def sum_at_(self, tensor: Tensor, *, target: int) -> None:
        """Replace a contiguous tensor on worker `target` by its sum over the workers."""

    @abstractmethod
    def broadcast_(self, tensor: Tensor, *, source: int) -> None:
        """Overwrite a contiguous tensor by that of worker `source`."""

    @abstractmethod
    def exchange(self, messages: Sequence[Tensor], sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Start sending one message to each worker, itself included; other collectives may be called before they have arrived.

        Args:
            messages: bytes (uint8, one-dimensional), the j-th for worker j. sizes: bytes that worker j has for this one.

        Returns:
            A function that waits for all messages to this worker and returns them, the j-th from worker j.
        """

    @abstractmethod
    def gather(self, note: Any) -> list[Any]:
        """Small objects (settings, numbers) of all workers, in order of rank. Not counted as traffic."""


def _places(bucket: list[Piece], flat: list[Tensor], buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each piece of a bucket, and its place in the buffer."""
    offset = 0
    for piece in bucket:
        yield (
            flat[piece.index].view(-1)[piece.start : piece.start + piece.length],
            buffer[offset : offset + piece.length],
        )
        offset += piece.length


class Solo(Comm):
    """One worker alone: everything is already averaged, nothing is sent, nobody is waited for."""

    def __init__(self) -> None:
        """The only worker."""
        super().__init__(0, 1)

    def sum_(self, tensor: Tensor) -> None:
        """The sum over one worker."""

    def sum_at_(self, tensor: Tensor, *, target: int) -> None:
        """The sum over one worker."""

    def broadcast_(self, tensor: Tensor, *, source: int) -> None:
        """Already here."""

    def exchange(self, messages: Sequence[Tensor], sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Its own message."""
        return lambda: list(messages)

    def gather(self, note: Any) -> list[Any]:
        """Its own note."""
        return [note]
