"""Structure of a worker's change between two refreshes: D = W − anchor = Q c + rest, with c = Qᵀ D of shape (r, n).

What momentum moves lies in the span of the basis Q, which all workers share; only the full-rank term and weight decay leave it. So the
r×n coordinates can travel in full precision, and a coarse format is left for the rest, or nothing where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lordo.lowrank import project

_BASIS_BITS, _COORDINATE_BITS = 20, 24


def rest_is_zero(settings: Mapping[str, Any]) -> bool:
    """Whether a change of a low-rank weight never leaves its basis.

    Not with overlap: the steps taken while an average was on its way were made in the basis before.
    """
    return bool(settings["omega"] == 1 and settings["weight_decay"] == 0 and settings["sync_overlap"] == 0)


def coordinates(basis: Tensor, change: Tensor) -> Tensor:
    """c = Qᵀ D, (m, r), (m, n) -> (r, n); of some rows, what these add to it."""
    return project(basis, change)


def lift_exactly(basis: Tensor, coordinates: Tensor) -> Tensor:
    """Q c with the same bits on every machine: (m, r), (r, n) -> (m, n), float32.

    A matrix product adds up in an order that depends on machine and threads. Here both factors are first rounded to whole numbers, of 20
    and 24 bits; rows of Q are no longer than about 1, so every partial sum is a whole number below 2^53, which float64 holds exactly,
    in any order.
    """
    _, exponent = torch.frexp(coordinates.abs().amax().double()) if coordinates.numel() else (None, torch.zeros(()))
    unit = torch.ldexp(torch.ones((), dtype=torch.float64, device=basis.device), exponent - _COORDINATE_BITS)
    whole = (coordinates.double() / unit).round_()
    product = (basis.double() * 2**_BASIS_BITS).round_() @ whole
    lifted: Tensor = (product * (unit / 2**_BASIS_BITS)).float()
    return lifted
