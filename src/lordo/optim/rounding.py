"""State held in fewer bits than it is computed in, rounded at random so that what is lost averages out.

Rounding to the nearest loses every change smaller than half a step, at each step again; rounding up with the probability of the
remainder is right on average. The random numbers come from one fixed table, entered at a place that depends on the step: no generator
is advanced, a resumed run repeats to the bit, and a number costs one read.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

TABLE_ELEMENTS = 1 << 20
LEVELS = 127  # of int8, on either side of zero


@cache
def _table(device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1), the same on every device."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(TABLE_ELEMENTS, generator=generator, dtype=torch.float32, device="cpu").to(device)


def _dither(like: Tensor, place: int) -> Tensor:
    """Uniform numbers in [0, 1) in the shape of a tensor; another place, other numbers."""
    table, num = _table(like.device), like.numel()
    if num > TABLE_ELEMENTS // 2:
        table = table.repeat(2 * num // TABLE_ELEMENTS + 1)
    start = place * 40503 % (table.numel() - num + 1)  # an odd factor near the golden ratio of 2¹⁶: neighbours fall far apart
    return table[start : start + num].view(like.shape)


def store_(target: Tensor, value: Tensor, place: int) -> None:
    """Write a float32 (float64) tensor into one of equal shape and any float dtype, bfloat16 rounded at random; overwrites `value`."""
    if target.dtype == torch.bfloat16 and value.dtype == torch.float32:  # its upper 16 bits: what the lower ones say is the probability
        noise = (_dither(value, place) * 65536).to(torch.int32)
        value.view(torch.int32).add_(noise).bitwise_and_(-65536)
    target.copy_(value)


def store_int8_(target: Tensor, scale: Tensor, value: Tensor, place: int) -> None:
    """Write (m, n) numbers into int8 in steps of (1, n) `scale`, a 127th of each column's largest; overwrites `value`."""
    peak = torch.linalg.vector_norm(value, ord=float("inf"), dim=-2, keepdim=True)
    torch.div(peak, LEVELS, out=scale)
    value.div_(scale.clamp(min=torch.finfo(torch.float32).tiny)).add_(_dither(value, place)).floor_().clamp_(-LEVELS, LEVELS)
    target.copy_(value)
