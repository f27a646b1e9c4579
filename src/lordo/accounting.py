"""What a method costs, from shapes alone: bytes sent, bytes held. No tensor, no network, no run.

A run counts the same quantities as they happen; the two must agree to the byte (`tests/test_accounting.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from lordo.methods import Method, averages_plainly
from lordo.optim import is_lowrank
from lordo.optim.options import keeps_sums, moment_dtype
from lordo.optim.rounding import packed_rows
from lordo.shards import span
from lordo.sync.dtensors import place_of
from lordo.sync.formats import find_format, format_names
from lordo.sync.fragments import assign_fragments
from lordo.sync.schedule import is_due, num_due
from lordo.sync.split import rest_is_zero
from lordo.sync.wire import CHECKSUM_BYTES, NOTE_BYTES, all_reduce_moves, broadcast_moves, reduce_moves, sent_bytes, wire_bytes, wire_dtype

HOST = "anchor (host)"  # held in host memory, not on the device that trains
# Everything a method may hold for a parameter, in the order in which it is told.
STATE_KINDS = (
    *("exp_avg", "exp_avg_sq", "basis", "error", "error_scale", "error_projection", "anchor", "outer_momentum", "residual"),
    *("sent_parameters", "sent_exp_avg", "sent_exp_avg_sq", "sent_error", "sent_step", "step", HOST),
)
STEP_BYTES = 4  # the step counter of a parameter, one float32
RESIDUAL_BYTES = 2  # an element of what encoding dropped, bfloat16


@dataclass(frozen=True)
class Weight:
    """A trainable parameter as the accounts see it, and which part of it a device has.

    shape: its own. rank: r asked for (the weight is low-rank only if that is below its smaller side). dtype: its own.
    shards, part, dim: devices among which it is cut, the number of this one, and along which side.
    """

    shape: tuple[int, ...]
    rank: int | None = None
    dtype: torch.dtype = torch.float32
    shards: int = 1
    part: int = 0
    dim: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of what this device has of it."""
        if self.shards == 1:
            return self.shape
        start, end = span(self.shape[self.dim], self.shards, self.part)
        return (*self.shape[: self.dim], end - start, *self.shape[self.dim + 1 :])

    @property
    def part_numel(self) -> int:
        """Number of elements of what this device has of it."""
        return prod(self.part_shape)

    @property
    def part_sides(self) -> tuple[int, int]:
        """Sides (m, n) of this device's part of a matrix, in the canonical orientation of the whole."""
        rows, columns = self.part_shape
        return (columns, rows) if self.shape[0] > self.shape[1] else (rows, columns)

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
                weights.append(Weight(tuple(p.shape), group.get("rank"), p.dtype, *place_of(p)))
    return weights


def parts_of(weights: Sequence[Weight], shards: int) -> list[Weight]:
    """What the first of so many devices has of a worker's whole weights; its parts are the largest."""
    return [replace(weight, shards=shards) for weight in weights]


def moment_numel(weight: Weight) -> int:
    """Elements of one moment on a device: r·n for a low-rank weight, all of them for any other."""
    if not weight.is_lowrank:
        return weight.part_numel
    assert weight.rank is not None
    return weight.rank * weight.part_sides[1]


def basis_numel(weight: Weight) -> int:
    """Elements of the basis on a device: m·r, or none."""
    return weight.part_sides[0] * (weight.rank or 0) if weight.is_lowrank else 0


def on_device(held: Mapping[str, int]) -> int:
    """Bytes held on the device that trains: everything but what lies in host memory."""
    return sum(size for kind, size in held.items() if kind != HOST)


def state_bytes(method: Method, weights: Sequence[Weight], settings: Mapping[str, Any], *, device: str = "cpu") -> Counter[str]:
    """Bytes of optimizer state held by one worker, per kind of state; of several devices, by the one whose parts `weights` are.

    Args:
        method: a row of the table. weights: all trainable parameters. settings: resolved (`method.resolve(…)`), the same for all
            groups; of what a group may set for itself, only the rank is taken into account.
        device: type of the device that trains; on another one than "cpu", anchors may lie in host memory.
    """
    held: Counter[str] = Counter()
    anchor = HOST if settings["anchor_device"] == "cpu" and device != "cpu" else "anchor"
    outer, shared_basis = settings["outer"] == "nesterov", method.basis_from == "sync"
    encoded = bool(method.averages) and format_names(settings)["parameters"] != "float32"
    for weight in weights:
        itemsize = wire_dtype(weight.dtype).itemsize
        held["step"] += STEP_BYTES
        for moment in ("exp_avg", "exp_avg_sq"):
            held[moment] += moment_dtype(settings, weight.dtype).itemsize * moment_numel(weight)
        held["basis"] += itemsize * basis_numel(weight)
        if weight.is_lowrank and settings["error_feedback"]:
            rows, columns = weight.part_sides
            rounded = {"bfloat16": 2 * weight.part_numel, "int8": weight.part_numel, "int6": 3 * packed_rows(rows) * columns}
            held["error"] += rounded.get(settings["error_dtype"], itemsize * weight.part_numel)
            if settings["error_dtype"] in ("int8", "int6"):
                held["error_scale"] += 4 * columns
            if keeps_sums(settings):
                held["error_projection"] += itemsize * moment_numel(weight)
        rounds = "parameters" in method.averages and weight.dtype != wire_dtype(weight.dtype)
        if outer or rounds or encoded or (shared_basis and weight.is_lowrank):
            held[anchor] += itemsize * weight.part_numel
        if outer:
            held["outer_momentum"] += itemsize * weight.part_numel
        if encoded and not (weight.is_lowrank and settings["sync_split"] and rest_is_zero(settings)):
            held["residual"] += RESIDUAL_BYTES * weight.part_numel
        if method.averages and settings["sync_overlap"]:
            held.update(_copies_of_sent(method, weight, settings))
    return +held


def _copies_of_sent(method: Method, weight: Weight, settings: Mapping[str, Any]) -> Counter[str]:
    """Bytes of what overlap keeps of a weight: a copy of all that is on its way, and when that was sent."""
    held = Counter({"sent_step": STEP_BYTES * (len(method.averages) + 1)})
    for what in averaged(method, weight, settings):
        numel = moment_numel(weight) if what in ("exp_avg", "exp_avg_sq") else weight.part_numel
        if what != "error" or settings["sync_error_every"]:
            held[f"sent_{what}"] += wire_dtype(weight.dtype).itemsize * numel
    return held


def adamw_state_bytes(weights: Sequence[Weight]) -> int:
    """Bytes that torch.optim.AdamW holds for the same weights: two moments in the dtype of each weight, and a step counter."""
    return sum(STEP_BYTES + 2 * weight.part_numel * weight.dtype.itemsize for weight in weights)


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
    if num_workers == 1:
        return moved
    for weight, fragment in zip(weights, fragments_of(weights, settings), strict=True):
        if method.averages_gradients:
            moved["gradients"] += steps * all_reduce_moves(wire_bytes(weight.part_numel, weight.dtype))
        for what in averaged(method, weight, settings):
            times = num_due(settings, what, steps, fragment)
            if what == "parameters" and final_average and not _is_averaged_at(settings, steps, fragment):
                times += 1
            for tag, payload in payloads(weight, what, settings).items():
                moved[tag] += times * all_reduce_moves(payload)
        if method.basis_from == "sync" and weight.is_lowrank:
            basis = find_format(format_names(settings)["basis"], weight.dtype, what="basis")
            moved["first gradient"] += reduce_moves(basis.payload_bytes(weight.part_numel))
            refreshes = 1 + _num_refreshes(settings, steps, fragment, final_average=final_average)
            moved["basis"] += refreshes * broadcast_moves(basis.payload_bytes(basis_numel(weight)))
    if method.averages:
        moved["envelope"] += _envelope_moves(method, weights, settings, steps=steps, num_workers=num_workers, final_average=final_average)
    return Counter({tag: sent_bytes(amount, num_workers) for tag, amount in moved.items() if amount})


def inside_step_bytes(weights: Sequence[Weight]) -> int:
    """Bytes that each device sends to the others of its worker at a step, on average: the sums of QᵀX where rows are cut."""
    moved = {1: 0}
    for weight in weights:
        if weight.is_lowrank and (weight.dim == 0) != (weight.shape[0] > weight.shape[1]):
            payload = wire_bytes(moment_numel(weight), weight.dtype)
            moved[weight.shards] = moved.get(weight.shards, 0) + all_reduce_moves(payload)
    return sum(sent_bytes(amount, shards) for shards, amount in moved.items())


def averaged(method: Method, weight: Weight, settings: Mapping[str, Any]) -> list[str]:
    """What of a weight is averaged at all."""
    error = ["error"] if method.averages and weight.is_lowrank and settings["error_feedback"] else []
    return [*method.averages, *error]


def payloads(weight: Weight, what: str, settings: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of one average of a weight's `what` on the wire, by the tags under which they are counted."""
    dtype = weight.dtype
    if what in ("exp_avg", "exp_avg_sq"):
        dtype = moment_dtype(settings, dtype)
    elif what == "error" and settings["error_dtype"] != "float32":
        dtype = torch.float32  # a rounded error is averaged in float32
    wire = find_format(format_names(settings)[what], dtype, what=what)
    if what == "parameters" and settings["sync_split"] and weight.is_lowrank:
        inside = {"coordinates": wire_bytes(moment_numel(weight), weight.dtype)}
        return inside if rest_is_zero(settings) else {**inside, "parameters": wire.payload_bytes(weight.part_numel)}
    payload = wire.payload_bytes(moment_numel(weight) if what in ("exp_avg", "exp_avg_sq") else weight.part_numel)
    return {what: payload, "step": STEP_BYTES} if what == "exp_avg" else {what: payload}


def fragments_of(weights: Sequence[Weight], settings: Mapping[str, Any]) -> list[int]:
    """The fragment of each weight, up to an exchange of weights that are alike."""
    sizes = [(w.numel, w.shape, str(w.dtype), w.rank or 0 if w.is_lowrank else 0) for w in weights]
    return assign_fragments(sizes, settings["sync_fragments"])


def _is_averaged_at(settings: Mapping[str, Any], step: int, fragment: int) -> bool:
    """Whether the weights of a fragment are equal on all workers after step t."""
    return settings["sync_overlap"] == 0 and is_due(settings, "parameters", step, fragment)


def _num_refreshes(settings: Mapping[str, Any], steps: int, fragment: int, *, final_average: bool) -> int:
    """New bases after the first: one for each average of the parameters that has been taken in."""
    taken_in = steps if final_average else max(steps - settings["sync_overlap"], 0)
    return num_due(settings, "parameters", taken_in, fragment)


def _envelope_moves(
    method: Method, weights: Sequence[Weight], settings: Mapping[str, Any], *, steps: int, num_workers: int, final_average: bool
) -> int:
    """What notes and checksums move: to each worker and back in an exchange, and from each owner of bases."""
    fragments = fragments_of(weights, settings)
    exchanges, moved = 0, 0
    if not averages_plainly(settings):
        kinds = {(what, f) for w, f in zip(weights, fragments, strict=True) for what in averaged(method, w, settings)}
        exchanges = sum(any(is_due(settings, what, t, f) for what, f in kinds) for t in range(1, steps + 1))
        exchanges += final_average and not all(_is_averaged_at(settings, steps, f) for f in fragments)
        moved += exchanges * broadcast_moves(num_workers * (NOTE_BYTES + 2 * CHECKSUM_BYTES))
    lowrank = [f for w, f in zip(weights, fragments, strict=True) if w.is_lowrank]
    if method.basis_from == "sync" and lowrank and format_names(settings)["basis"] != "float32":
        moved += broadcast_moves((num_workers + min(num_workers, len(lowrank))) * CHECKSUM_BYTES)
        for fragment in set(lowrank):
            owners = min(num_workers, lowrank.count(fragment))
            moved += _num_refreshes(settings, steps, fragment, final_average=final_average) * broadcast_moves(owners * CHECKSUM_BYTES)
    return moved


def measured_state_bytes(optimizer: torch.optim.Optimizer) -> Counter[str]:
    """Bytes that an optimizer's state tensors really hold, per kind of state."""
    held: Counter[str] = Counter()
    for p, state in optimizer.state.items():
        for key, value in state.items():
            held[HOST if key == "anchor" and value.device != p.device else key] += value.numel() * value.element_size()
    return held
