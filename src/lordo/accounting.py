"""What a method costs, from shapes alone: bytes sent, bytes held. No tensor, no network, no run.

A run counts the same quantities as they happen; the two must agree to the byte (`tests/test_accounting.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from lordo.lowrank import canonical_shape
from lordo.methods import Method
from lordo.optim import is_lowrank
from lordo.optim.options import keeps_sums, moment_dtype
from lordo.optim.rounding import packed_rows
from lordo.sync.schedule import num_due
from lordo.sync.wire import all_reduce_moves, broadcast_moves, reduce_moves, sent_bytes, wire_bytes, wire_dtype

HOST = "anchor (host)"  # held in host memory, not on the device that trains
# Everything a method may hold for a parameter, in the order in which it is told.
STATE_KINDS = ("exp_avg", "exp_avg_sq", "basis", "error", "error_scale", "error_projection", "anchor", "outer_momentum", "step", HOST)
STEP_BYTES = 4  # the step counter of a parameter, one float32


@dataclass(frozen=True)
class Weight:
    """A trainable parameter as the accounts see it.

    shape: its own. rank: r asked for (the weight is low-rank only if that is below its smaller side). dtype: its own.
    """

    shape: tuple[int, ...]
    rank: int | None = None
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_lowrank(self) -> bool:
        """Whether its optimizer state is low-rank."""
        return is_lowrank(self.shape, self.rank)


def weights_of(param_groups: Iterable[Mapping[str, Any]]) -> list[Weight]:
    """The trainable parameters of an optimizer's groups (or of `lordo.param_groups(…)`)."""
    weights = []
    for group in param_groups:
        for member in group["params"]:
            p: Tensor = member[1] if isinstance(member, tuple) else member
            if p.requires_grad:
                weights.append(Weight(tuple(p.shape), group.get("rank"), p.dtype))
    return weights


def moment_numel(weight: Weight) -> int:
    """Elements of one moment: r·n for a low-rank weight, all of them for any other."""
    if not weight.is_lowrank:
        return weight.numel
    assert weight.rank is not None
    return weight.rank * canonical_shape(weight.shape)[1]


def basis_numel(weight: Weight) -> int:
    """Elements of the basis: m·r, or none."""
    return canonical_shape(weight.shape)[0] * (weight.rank or 0) if weight.is_lowrank else 0


def on_device(held: Mapping[str, int]) -> int:
    """Bytes held on the device that trains: everything but what lies in host memory."""
    return sum(size for kind, size in held.items() if kind != HOST)


def state_bytes(method: Method, weights: Sequence[Weight], settings: Mapping[str, Any], *, device: str = "cpu") -> Counter[str]:
    """Bytes of optimizer state held by one worker, per kind of state.

    Args:
        method: a row of the table. weights: all trainable parameters. settings: resolved (`method.resolve(…)`), the same for all
            groups; of what a group may set for itself, only the rank is taken into account.
        device: type of the device that trains; on another one than "cpu", anchors may lie in host memory.
    """
    held: Counter[str] = Counter()
    anchor = HOST if settings["anchor_device"] == "cpu" and device != "cpu" else "anchor"
    outer, shared_basis = settings["outer"] == "nesterov", method.basis_from == "sync"
    for weight in weights:
        itemsize = wire_dtype(weight.dtype).itemsize
        held["step"] += STEP_BYTES
        for moment in ("exp_avg", "exp_avg_sq"):
            held[moment] += moment_dtype(settings, weight.dtype).itemsize * moment_numel(weight)
        held["basis"] += itemsize * basis_numel(weight)
        if weight.is_lowrank and settings["error_feedback"]:
            rows, columns = canonical_shape(weight.shape)
            rounded = {"bfloat16": 2 * weight.numel, "int8": weight.numel, "int6": 3 * packed_rows(rows) * columns}
            held["error"] += rounded.get(settings["error_dtype"], itemsize * weight.numel)
            if settings["error_dtype"] in ("int8", "int6"):
                held["error_scale"] += 4 * columns
            if keeps_sums(settings):
                held["error_projection"] += itemsize * moment_numel(weight)
        rounds = "parameters" in method.averages and weight.dtype != wire_dtype(weight.dtype)
        if outer or rounds or (shared_basis and weight.is_lowrank):
            held[anchor] += itemsize * weight.numel
        if outer:
            held["outer_momentum"] += itemsize * weight.numel
    return +held


def adamw_state_bytes(weights: Sequence[Weight]) -> int:
    """Bytes that torch.optim.AdamW holds for the same weights: two moments in the dtype of each weight, and a step counter."""
    return sum(STEP_BYTES + 2 * weight.numel * weight.dtype.itemsize for weight in weights)


def traffic(
    method: Method, weights: Sequence[Weight], settings: Mapping[str, Any], *, steps: int, num_workers: int, final_average: bool = False
) -> Counter[str]:
    """Bytes each worker sends in a run of `steps` steps, on average over the workers, per kind; formulas in `sync.wire`.

    Args:
        method, weights, settings: see `state_bytes`.
        steps: optimizer steps T. num_workers: M.
        final_average: whether the run ends with an average of the parameters, should the last step not have brought one.
    """
    moved: Counter[str] = Counter()
    for weight in weights if num_workers > 1 else ():
        if method.averages_gradients:
            moved["gradients"] += steps * all_reduce_moves(wire_bytes(weight.numel, weight.dtype))
        sizes = {"parameters": weight.numel, "exp_avg": moment_numel(weight), "exp_avg_sq": moment_numel(weight)}
        for what in method.averages:
            times = num_due(settings, what, steps)
            if what == "parameters" and final_average and steps % settings["sync_every"]:
                times += 1
            dtype = weight.dtype if what == "parameters" else moment_dtype(settings, weight.dtype)
            moved[what] += times * all_reduce_moves(wire_bytes(sizes[what], dtype))
        if "exp_avg" in method.averages:
            moved["step"] += num_due(settings, "exp_avg", steps) * all_reduce_moves(STEP_BYTES)
        if method.basis_from == "sync" and weight.is_lowrank:
            moved["first gradient"] += reduce_moves(wire_bytes(weight.numel, weight.dtype))
            refreshes = 1 + num_due(settings, "parameters", steps)
            moved["basis"] += refreshes * broadcast_moves(wire_bytes(basis_numel(weight), weight.dtype))
        if method.averages and weight.is_lowrank and settings["error_feedback"]:
            dtype = weight.dtype if settings["error_dtype"] == "float32" else torch.float32  # a rounded error is averaged in float32
            moved["error"] += num_due(settings, "error", steps) * all_reduce_moves(wire_bytes(weight.numel, dtype))
    return Counter({tag: sent_bytes(amount, num_workers) for tag, amount in moved.items() if amount})


def measured_state_bytes(optimizer: torch.optim.Optimizer) -> Counter[str]:
    """Bytes that an optimizer's state tensors really hold, per kind of state."""
    held: Counter[str] = Counter()
    for p, state in optimizer.state.items():
        for key, value in state.items():
            held[HOST if key == "anchor" and value.device != p.device else key] += value.numel() * value.element_size()
    return held
