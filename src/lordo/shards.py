"""A weight of which each device of a worker holds a part (a DTensor): this device's part, and how the whole is cut.

Nothing here knows DTensor by name: a plain tensor is whole, and its own part.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Side = Literal["rows", "columns"]


def local(tensor: Tensor) -> Tensor:
    """This device's part of a tensor, sharing its memory; call it without gradients being recorded."""
    to_local = getattr(tensor, "to_local", None)
    part: Tensor = tensor if to_local is None else to_local()
    return part


def layout_of(tensor: Tensor) -> tuple[object, ...]:
    """How a tensor is laid out over devices, one word for each axis of their mesh; empty for a plain tensor."""
    return tuple(getattr(tensor, "placements", ()))


def cut_dim(tensor: Tensor) -> int | None:
    """Along which dimension the devices of a worker share a tensor; None: each has all of it."""
    return next((int(placement.dim) for placement in getattr(tensor, "placements", ()) if placement.is_shard()), None)


def is_tall(matrix: Tensor) -> bool:
    """Whether the whole matrix has more rows than columns: its transpose is the canonical orientation then."""
    return matrix.shape[-2] > matrix.shape[-1]


def cut_side(weight: Tensor) -> Side | None:
    """Which side of a low-rank weight (m, n), m <= n, is cut: m "rows", or n "columns"."""
    dim = cut_dim(weight)
    if dim is None:
        return None
    return "columns" if (dim == 0) == is_tall(weight) else "rows"


def canonical_part(tensor: Tensor, weight: Tensor) -> Tensor:
    """View of this device's part of a tensor of the weight's shape, in the canonical orientation of the whole weight."""
    part = local(tensor)
    return part.mT if is_tall(weight) else part


def span(length: int, num_parts: int, part: int) -> tuple[int, int]:
    """First element of a part of a side, and the one after its last, as torch.chunk cuts: the last parts may have less, or nothing."""
    size = -(-length // num_parts)
    return min(part * size, length), min((part + 1) * size, length)


def state_cut(key: str, weight: Tensor, *, lowrank: bool) -> int | None:
    """Along which dimension the devices of a worker share a tensor of a weight's optimizer state; None: each has all of it."""
    if cut_dim(weight) is None or key in ("step", "sent_step"):
        return None
    if not lowrank or not key.endswith(("basis", "exp_avg", "exp_avg_sq", "error_projection")):
        return cut_dim(weight)
    if key == "basis":
        return 0 if cut_side(weight) == "rows" else None
    return 1 if cut_side(weight) == "columns" else None
