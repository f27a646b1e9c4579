"""What projection dropped so far, E (m, n), held in one of several forms.

Which one is told by the keys and dtypes of a parameter's state:

    error, in the dtype of the computation   E itself
    error, and error_projection (r, n)       S = E + Q h, and h: see below
    error in bfloat16                        E, rounded
    error in int8, and error_scale (1, n)    E, in 127 steps on either side of zero, their size one for each column
    error in uint8, and error_scale (1, n)   the same in 31 steps, four numbers in three bytes: (3, ceil(m/4), n)

While a basis Q stays, QᵀE = 0: E is the sum of the gradients less its projection. Keeping the sum S and its coordinates h = QᵀS apart
saves, at every step, the product with Q that takes the projection out; E = S − Q h is formed when somebody needs it.

Functions here take a state in canonical orientation (`canonical_state`): (m, n) with m <= n, or of such a matrix some rows or columns.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from lordo.optim.blocks import column_blocks
from lordo.optim.rounding import load_scaled, packed_rows, store_, store_scaled_

ErrorDtype = Literal["float32", "bfloat16", "int8", "int6"]
ERROR_DTYPES: tuple[str, ...] = get_args(ErrorDtype)

State = dict[str, Tensor]


def new_error(p: Tensor, *, tall: bool, rank: int, error_dtype: str, apart: bool) -> State:
    """State of an error that is zero.

    Args:
        p: the weight, or a part of it. tall: whether its transpose is the canonical orientation. rank: r.
        error_dtype: "float32" (float64 for a float64 weight), "bfloat16", "int8" or "int6".
        apart: keep S and h, for a basis that stays for many steps; only where nothing is rounded.
    """
    rows, columns = p.mT.shape if tall else p.shape
    if error_dtype in ("int8", "int6"):
        scale = torch.zeros(1, columns, dtype=torch.float32, device=p.device)
        packed = torch.zeros(3, packed_rows(rows), columns, dtype=torch.uint8, device=p.device)
        return {"error": torch.zeros_like(p, dtype=torch.int8) if error_dtype == "int8" else packed, "error_scale": scale}
    if error_dtype == "bfloat16":
        return {"error": torch.zeros_like(p, dtype=torch.bfloat16)}
    work = torch.promote_types(p.dtype, torch.float32)
    state = {"error": torch.zeros_like(p, dtype=work)}
    if apart:
        state["error_projection"] = torch.zeros(rank, columns, dtype=work, device=p.device)
    return state


def canonical_state(state: State, *, tall: bool) -> State:
    """The same tensors, the error seen in the canonical orientation: (m, n), whatever the weight's own shape."""
    if not tall or "error" not in state or state["error"].dtype == torch.uint8:  # what is packed lies so already
        return state
    return {**state, "error": state["error"].mT}


def is_rounded(state: State) -> bool:
    """Whether E is held in fewer bits than it is computed in."""
    return "error" in state and state["error"].dtype in (torch.bfloat16, torch.int8, torch.uint8)


def decode(state: State, columns: slice, dtype: torch.dtype) -> Tensor:
    """Some columns of a rounded E, (m, c): a new tensor."""
    held = state["error"][..., columns]
    if "error_scale" not in state:
        return held.to(dtype)
    return load_scaled(held, state["error_scale"][..., columns], state["basis"].shape[-2], dtype)


def encode_(state: State, columns: slice, error: Tensor) -> None:
    """Write some columns of a rounded E; `error` (m, c) is overwritten."""
    target, place = state["error"][..., columns], int(state["step"]) + (columns.start or 0)
    if "error_scale" in state:
        store_scaled_(target, state["error_scale"][..., columns], error, place)
    else:
        store_(target, error, place)


def settle_(state: State) -> None:
    """E = S − Q h and h = 0: from here to the next step `error` is E itself."""
    if "error_projection" in state:
        state["error"].addmm_(state["basis"], state["error_projection"], alpha=-1)
        state["error_projection"].zero_()


def error_of(state: State, weight: Tensor) -> Tensor:
    """A copy of E in the layout of the (m, n) view of the weight, whatever its form; the state stays as it is, to the bit."""
    if not is_rounded(state):
        whole = state["error"].clone()
        if "error_projection" in state:
            whole.addmm_(state["basis"], state["error_projection"], alpha=-1)
        return whole
    whole = torch.empty_like(weight, dtype=torch.float32)
    for columns in column_blocks(whole):
        whole[:, columns].copy_(decode(state, columns, torch.float32))
    return whole


def take_error_(state: State, weight: Tensor) -> Tensor:
    """E, (m, n), to be changed and given back: the state's own memory where nothing is rounded, else a copy."""
    settle_(state)
    return error_of(state, weight) if is_rounded(state) else state["error"]


def give_error_(state: State, error: Tensor) -> None:
    """Write an E that came from `take_error_`; it is overwritten where E is rounded."""
    if not is_rounded(state):
        return
    for columns in column_blocks(error):
        encode_(state, columns, error[:, columns])
