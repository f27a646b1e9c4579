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
INT8_LEVELS, INT6_LEVELS = 127, 31  # steps on either side of zero


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


def store_scaled_(target: Tensor, scale: Tensor, value: Tensor, place: int) -> None:
    """Write (m, n) numbers in whole steps of (1, n) `scale`, a fraction of each column's largest; overwrites `value`.

    Args:
        target: int8 (m, n), 127 steps on either side of zero; or uint8 (3, ceil(m/4), n), 31 steps, packed by `pack6`.
        scale, value, place: of the columns, their numbers, and a number that picks the random ones.
    """
    packed = target.dtype == torch.uint8
    levels = INT6_LEVELS if packed else INT8_LEVELS
    low, high = value.amin(dim=-2, keepdim=True), value.amax(dim=-2, keepdim=True)
    torch.div(torch.maximum(-low, high), levels, out=scale)
    value.div_(scale.clamp(min=torch.finfo(torch.float32).tiny)).add_(_dither(value, place)).floor_().clamp_(-levels, levels)
    target.copy_(pack6(value.add_(levels).to(torch.uint8)) if packed else value)


def load_scaled(held: Tensor, scale: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """What `store_scaled_` wrote, (m, n): a new tensor."""
    if held.dtype == torch.uint8:
        return unpack6(held, num_rows).to(dtype).sub_(INT6_LEVELS).mul_(scale)
    return held.to(dtype).mul_(scale)


def pack6(numbers: Tensor) -> Tensor:
    """Numbers below 64, uint8 (m, n), four in three bytes: (3, ceil(m/4), n). The last quarter of the rows fills the upper bits."""
    m, n = numbers.shape
    quarter = packed_rows(m)
    quarters = torch.cat([numbers, numbers.new_zeros(4 * quarter - m, n)]).view(4, quarter, n)
    last = quarters[3]
    return quarters[:3] | (torch.stack([last & 3, (last >> 2) & 3, last >> 4]) << 6)


def unpack6(packed: Tensor, num_rows: int) -> Tensor:
    """The counterpart of `pack6`: uint8 (m, n)."""
    upper = packed >> 6
    last = upper[0] | (upper[1] << 2) | (upper[2] << 4)
    return torch.cat([(packed & 63).flatten(0, 1), last])[:num_rows]


def packed_rows(num_rows: int) -> int:
    """ceil(m/4): rows of each of the three bytes that hold four numbers."""
    return -(-num_rows // 4)
