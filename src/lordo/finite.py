"""Which tensors hold a NaN or an infinity."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def first_nonfinite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the first tensor with an entry that is not finite; None if there is none. Reads the device once, copies nothing."""
    filled = [(name, tensor) for name, tensor in named if tensor.numel()]
    if not filled:
        return None
    peaks = torch._foreach_norm([tensor for _, tensor in filled], ord=math.inf)
    finite = torch.stack([peak.isfinite().to(peaks[0].device) for peak in peaks])
    return None if bool(finite.all()) else filled[int(finite.logical_not().nonzero()[0])][0]
