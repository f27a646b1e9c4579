"""Which tensors hold a NaN or an infinity."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def first_nonfinite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the first tensor with an entry that is not finite; None if there is none. Copies nothing.

    A sum is finite only if every entry is, and it is by far the cheapest thing to read off a tensor; only where a sum is not finite (it
    may have overflowed) are the entries looked at.
    """
    found = list(named)
    if not found:
        return None
    sums = [tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)) for _, tensor in found]
    if bool(torch.stack([total.to(sums[0].device, torch.float32) for total in sums]).isfinite().all()):
        return None
    return next((name for name, tensor in found if not bool(tensor.isfinite().all())), None)
