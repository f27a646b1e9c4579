"""What travels, in how many bytes: the closed form of each collective, and how tensors share a collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A tensor below this travels together with others in one buffer; a larger one is reduced where it lies, without a copy.
ALONE_ELEMENTS = 1 << 18
# Elements of one shared buffer.
BUCKET_ELEMENTS = 1 << 20
# What a message in a wire format has besides its numbers: a checksum, and on the way to the average a note whether they are finite.
CHECKSUM_BYTES = 8
NOTE_BYTES = 8


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type in which an average is formed and sent: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def wire_bytes(num_elements: int, dtype: torch.dtype) -> int:
    """Payload bytes of a tensor on the wire."""
    return num_elements * wire_dtype(dtype).itemsize


def all_reduce_moves(payload_bytes: int) -> int:
    """Bytes that a ring all-reduce moves, in units that `sent_bytes` turns into bytes per worker: reduce-scatter, then all-gather."""
    return 2 * payload_bytes


def reduce_moves(payload_bytes: int) -> int:
    """Bytes that a sum for one worker alone moves, in the same units: the reverse of a broadcast."""
    return payload_bytes


def broadcast_moves(payload_bytes: int) -> int:
    """Bytes that a broadcast (or the all-gather of parts that make up the payload) moves, in the same units."""
    return payload_bytes


def gather_moves(payload_bytes: int, num_workers: int) -> int:
    """Bytes that bringing parts of one size together at one worker moves, or handing them out from it, in the same units.

    Every part but one crosses a link, once: (M−1)/M of the payload in all, where a broadcast sends that from each worker.
    """
    return payload_bytes // num_workers


def sent_bytes(moved: int, num_workers: int) -> int:
    """Bytes that each of M workers sends, on average: (M−1)/M of what a collective moves.

    A ring all-reduce of N bytes sends 2 (M−1)/M · N from each worker. A broadcast of N bytes crosses the links (M−1) times
    whatever its tree, hence (M−1)/M · N per worker on average.
    """
    return moved * (num_workers - 1) // num_workers


@dataclass(frozen=True)
class Piece:
    """A run of elements of one tensor: tensor number, first element, number of elements."""

    index: int
    start: int
    length: int


def buckets(sizes: Sequence[int], *, capacity: int = BUCKET_ELEMENTS) -> Iterator[list[Piece]]:
    """Lay tensors of the given sizes one after another into buffers of `capacity` elements; every element exactly once."""
    bucket: list[Piece] = []
    room = capacity
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            length = min(size - start, room)
            bucket.append(Piece(index, start, length))
            start, room = start + length, room - length
            if room == 0:
                yield bucket
                bucket, room = [], capacity
    if bucket:
        yield bucket


def travels_alone(tensor: Tensor) -> bool:
    """Whether a tensor is reduced where it lies: large, contiguous, and already of the type it is sent in."""
    return tensor.numel() >= ALONE_ELEMENTS and tensor.is_contiguous() and tensor.dtype == wire_dtype(tensor.dtype)
