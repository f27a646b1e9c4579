"""Settings of the local step, their defaults, and what they may be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lordo.lowrank import BasisMethod
from lordo.optim.error import ERROR_DTYPES
from lordo.updates import FullrankDenominator, FullrankSignal

MomentDtype = Literal["float32", "bfloat16"]

# What a row of the method table may set and a user may override per parameter group.
LOCAL_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "rank": None,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "omega": 1.0,
    "error_feedback": False,
    "error_dtype": "float32",
    "moment_dtype": "float32",
    "fullrank_signal": "gradient+error",
    "fullrank_denominator": "channel",
    "basis": "auto",
    # Where the basis comes from: "sync" (set from outside), "gradient" (this worker's own gradient, every `basis_every`
    # steps; None follows the synchronisation), "momentum" (LDAdam: every step, one power iteration on momentum and gradient).
    "basis_from": "sync",
    "basis_every": None,
    "basis_offset": 0,
    "basis_interpolation": 0.908,
    "rotate_moments": True,
    "scale": 1.0,
}

_CHOICES: dict[str, tuple[str, ...]] = {
    "fullrank_signal": (*get_args(FullrankSignal), "projected"),
    "fullrank_denominator": get_args(FullrankDenominator),
    "basis": get_args(BasisMethod),
    "basis_from": ("sync", "gradient", "momentum"),
    "error_dtype": ERROR_DTYPES,
    "moment_dtype": get_args(MomentDtype),
}


def check_options(group: dict[str, Any]) -> None:
    """Check the settings of one parameter group.

    Raises:
        ValueError, TypeError: naming the setting, what was given and what is allowed.
    """
    for name, choices in _CHOICES.items():
        if group[name] not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {group[name]!r}")
    rank = group["rank"]
    if rank is not None:
        check_whole("rank", rank, hint=", or None for full-rank")
    if group["basis_every"] is not None:
        check_whole("basis_every", group["basis_every"])
    check_range("scale", group["scale"], 0, math.inf)
    check_range("basis_interpolation", group["basis_interpolation"], 0, 1)
    betas = group["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise (ValueError if isinstance(betas, Sequence) else TypeError)(f"betas must be two numbers; got {betas!r}")
    if not isinstance(group["error_feedback"], bool):
        raise TypeError(f"error_feedback must be True or False; got {group['error_feedback']!r}")
    for i, beta in enumerate(betas):
        check_range(f"betas[{i}]", beta, 0, 1, high_included=False)
    if group["omega"] is not None:
        check_range("omega", group["omega"], 0, 1)
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        check_range(name, number, 0, math.inf, high_included=False)


def check_whole(name: str, value: Any, *, hint: str = "") -> None:
    """A whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number of at least 1{hint}; got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1{hint}; got {value}")


def check_range(name: str, value: Any, low: float, high: float, *, high_included: bool = True) -> None:
    """A number in [low, high], or in [low, high) if the upper end is not included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number; got {value!r}")
    if not (low <= value <= high) or (value == high and not high_included):
        end = "]" if high_included and math.isfinite(high) else ")"
        raise ValueError(f"{name} must be in [{low}, {high}{end}; got {value}")


def moment_dtype(group: Mapping[str, Any], weight_dtype: torch.dtype) -> torch.dtype:
    """Type in which moments are held; "float32" is float64 for a float64 weight."""
    return torch.bfloat16 if group["moment_dtype"] == "bfloat16" else torch.promote_types(weight_dtype, torch.float32)


def keeps_sums(group: Mapping[str, Any]) -> bool:
    """Whether the error keeps S and h apart (`error.py`): its basis stays for many steps, and nothing is rounded."""
    return bool(group["error_feedback"] and group["basis_from"] == "sync" and group["error_dtype"] == "float32")
