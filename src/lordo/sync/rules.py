"""What is done around a local step, rule by rule. A method is a list of these.

A rule sees an optimizer as `Synchronised` describes it: named parameters, their state, their settings, and `set_basis`. All rules
run on every worker in the same order; which collectives they call depends on the step and the settings alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lordo.lowrank import canonical, common_share, leading_subspace, rounding_noise
from lordo.shards import local
from lordo.sync.comm import Comm
from lordo.sync.compressed import means_at_owners, share_encoded_
from lordo.sync.formats import WireFormat
from lordo.sync.schedule import is_due
from lordo.sync.shares import LeftOut, average_, heal_
from lordo.sync.wire import wire_dtype

AnchorDevice = Literal["same", "cpu"]
Member = tuple[str, Tensor, dict[str, Any]]  # name, parameter, settings of its group


@dataclass
class SyncReport:
    """What the last step's synchronisation did.

    Attributes:
        step: t, the step after which it ran; 0 if there was none yet.
        averaged: what was averaged.
        overlap: mean overlap of the old and the new bases; None without a refresh.
        kept_bases: names of the weights that kept their basis because the pseudo-gradient was zero or not finite.
        left_out: workers whose share had weight 0 because it was not finite.
    """

    step: int
    averaged: tuple[str, ...] = ()
    overlap: float | None = None
    kept_bases: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


class Synchronised(Protocol):
    """What a rule sees of an optimizer."""

    state: Any
    report: SyncReport

    @property
    def left_out_in_a_row(self) -> int:
        """How often this worker's share was just left out of an average."""

    def named_members(self) -> list[Member]:
        """Trainable parameters, sorted by name."""

    def fragment_of(self, p: Tensor) -> int:
        """Number of the fragment with which a parameter is averaged."""

    def set_basis(self, p: Tensor, basis: Tensor) -> Tensor:
        """Install a basis, carrying the moments over; returns Q_newᵀ Q_old."""

    def take_error(self, p: Tensor) -> Tensor:
        """The error of a low-rank weight, in the shape of this device's part of it, to be changed in place and given back."""

    def give_error(self, p: Tensor, error: Tensor) -> None:
        """Write an error that came from `take_error`."""


class Rule(Protocol):
    """Something that happens before or after the local step number t = 1, 2, …"""

    def __call__(self, optimizer: Synchronised, comm: Comm, step: int) -> None:
        """Do it if it is due at this step."""

    def new_state(self, p: Tensor, state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
        """What this rule needs to keep for a parameter (this device's part of it), besides the state of the local step."""


class Stateless:
    """A rule that keeps nothing."""

    def new_state(self, p: Tensor, state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
        """Nothing."""
        return {}


class AverageGradients(Stateless):
    """Average the gradients of all workers before every step, as DistributedDataParallel does."""

    def __call__(self, optimizer: Synchronised, comm: Comm, step: int) -> None:
        """Write the mean into every `p.grad`; a worker without a gradient for a parameter contributes zero."""
        if comm.size == 1:
            return
        for _, p, _ in optimizer.named_members():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        comm.mean_([("gradients", local(p.grad)) for _, p, _ in optimizer.named_members() if p.grad is not None])


class FirstBasis(Stateless):
    """Before the first step: the basis of every low-rank weight from the mean over workers of the first gradient."""

    def __init__(self, *, wire: WireFormat = "float32") -> None:
        """`wire`: the format in which gradients and bases travel."""
        self.wire = wire

    def __call__(self, optimizer: Synchronised, comm: Comm, step: int) -> None:
        """Run for the parameters of groups that have not started (the caller sets `started`), one matrix in memory at a time."""
        members = [m for m in optimizer.named_members() if "basis" in optimizer.state[m[1]] and not m[2]["started"]]
        if not members:
            return
        refresh = Refresh(optimizer, comm, members, step, wire=self.wire)
        if self.wire == "float32":
            for i, (_, p, _) in enumerate(members):
                gradient = _usable_gradient(p, comm)
                comm.mean_at_(gradient, target=refresh.owners[i], tag="first gradient")
                refresh.compute(i, gradient, first=True)
        else:
            parameters = [p for _, p, _ in members]
            read = partial(_usable_gradient, comm=comm)
            for i, mean in means_at_owners(comm, parameters, read, refresh.owners, self.wire, tag="first gradient"):
                refresh.compute(i, mean, first=True)
        refresh.install()


class Average(Stateless):
    """Average parameters, moments or error over the workers, each when its own period says so, in one go."""

    def __init__(self, *what: str) -> None:
        """Any of "parameters", "exp_avg", "exp_avg_sq", "error"."""
        self.what = what

    def __call__(self, optimizer: Synchronised, comm: Comm, step: int) -> None:
        """Average what is due after step t."""
        due: list[tuple[str, str, Tensor]] = []
        counted: list[Member] = []
        errors: list[tuple[Tensor, Tensor]] = []
        for member in optimizer.named_members():
            name, p, settings = member
            for what in self.what:
                tensor = local(p.detach()) if what == "parameters" else optimizer.state[p].get(what)
                if tensor is None or not is_due(settings, what, step):
                    continue
                counted += [member] if what == "exp_avg" else []
                if what == "parameters" and is_low_precision(p):
                    tensor = optimizer.state[p]["moved"] = _moved(tensor, optimizer.state[p]["anchor"])
                if what == "error":
                    tensor = optimizer.take_error(p)
                    errors.append((p, tensor))
                due.append((what, name if what == "parameters" else f"{name}.{what}", tensor))
        if not due:
            return
        counts = _step_counts(optimizer, counted)
        left_out = average_([*due, ("step", "step", counts)], comm, in_a_row=optimizer.left_out_in_a_row)
        for (_, p, _), count in zip(counted, counts.tolist(), strict=True):
            optimizer.state[p]["step"].fill_(count)
        for p, error in errors:
            optimizer.give_error(p, error)
        if any(each.worker == comm.rank for each in left_out):
            heal_([optimizer.state[p] for _, p, _ in optimizer.named_members()], comm)
        averaged = tuple(what for what in self.what if any(what == tag for tag, _, _ in due))
        optimizer.report = SyncReport(step, averaged, left_out=left_out)


def _step_counts(optimizer: Synchronised, members: Sequence[Member]) -> Tensor:
    """Each parameter's own steps t, (number of members,).

    They are averaged together with the first moment: a worker that had no gradient for a weight (an expert without tokens, a skipped
    step) would otherwise correct the bias of moments that it mostly received by its own, smaller t.
    """
    device = members[0][1].device if members else torch.device("cpu")
    return torch.tensor([float(optimizer.state[p]["step"]) for _, p, _ in members], dtype=torch.float32, device=device)


def is_low_precision(p: Tensor) -> bool:
    """Whether a parameter is of lower precision than its averages (bfloat16, float16)."""
    return p.dtype != wire_dtype(p.dtype)


def _moved(p: Tensor, anchor: Tensor) -> Tensor:
    """How far a rounded weight has come from its anchor as all workers started from it, rounded too; in the anchor's type."""
    return p.detach().to(anchor.dtype) - anchor.to(p.device, p.dtype)


class PseudoGradient:
    """After the parameters were averaged: Δ = W − anchor, and what follows from it.

    The Nesterov outer step (DiLoCo, arXiv 2311.08105) moves W on from the anchor, the refresh takes the leading subspace of Δ as the
    new basis of every low-rank weight. Δ is formed in the anchor's own memory (in the weight's, one at a time, where the anchor lies in
    host memory), and only where it is needed; at the end the anchor is W again.

    A bfloat16 weight is the rounded anchor: what is averaged is how far each worker has come from there, in float32 (`moved`), and the
    anchor takes the mean up unrounded. Changes below the weight's last bit thus add up from one synchronisation to the next.
    """

    def __init__(
        self,
        *,
        refresh: bool,
        outer: bool,
        anchored: bool = False,
        anchor_device: AnchorDevice = "same",
        basis_wire: WireFormat = "float32",
    ) -> None:
        """`refresh`: take new bases from Δ, and send them as `basis_wire`. `outer`: take a Nesterov step along Δ.

        `anchored`: keep the anchor of every parameter. `anchor_device`: "same" as the weight, or "cpu".
        """
        self.refresh, self.outer, self.basis_wire = refresh, outer, basis_wire
        self.anchored, self.anchor_device = anchored, anchor_device

    def new_state(self, p: Tensor, state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
        """The anchor, where Δ is needed or the weight itself too coarse, in float32 or better; the outer momentum."""
        if not (self.outer or self.anchored or (self.refresh and "basis" in state) or is_low_precision(p)):
            return {}
        device = p.device if self.anchor_device == "same" or p.is_meta else torch.device("cpu")
        pinned = p.is_cuda and device.type == "cpu"  # page-locked: copies from and to a GPU run at full speed
        anchor = torch.empty(p.shape, dtype=wire_dtype(p.dtype), device=device, pin_memory=pinned).copy_(p.detach())
        if not self.outer:
            return {"anchor": anchor}
        return {"anchor": anchor, "outer_momentum": torch.zeros_like(p, dtype=anchor.dtype)}

    def __call__(self, optimizer: Synchronised, comm: Comm, step: int) -> None:
        """Run for the parameters that were averaged after step t."""
        members = [
            (name, p, settings)
            for name, p, settings in optimizer.named_members()
            if "anchor" in optimizer.state[p] and is_due(settings, "parameters", step)
        ]
        moved = {p: optimizer.state[p].pop("moved") for _, p, _ in members if is_low_precision(p)}
        self.follow(optimizer, comm, members, moved, step)

    def follow(
        self,
        optimizer: Synchronised,
        comm: Comm,
        members: Sequence[Member],
        moved: Mapping[Tensor, Tensor],
        step: int,
        *,
        onto: bool = False,
    ) -> None:
        """Run for members that have an anchor.

        Args:
            moved: Δ of those whose anchor takes the mean up, and the weight follows. Of the others the weight holds the average.
            onto: those weights hold what later steps did, and the average goes onto that.
        """
        lowrank = [m for m in members if "basis" in optimizer.state[m[1]]] if self.refresh else []
        refresh = Refresh(optimizer, comm, lowrank, step, wire=self.basis_wire)
        mine = {p: i for i, (_, p, _) in enumerate(lowrank) if refresh.owners[i] == comm.rank}
        for _, p, settings in members:
            state, weight = optimizer.state[p], local(p.detach())
            anchor, averaged = state["anchor"], weight
            delta = moved.get(p)
            if delta is not None:
                averaged = anchor.to(p.device).add_(delta)  # unrounded
            elif self.outer or p in mine:
                delta = _change(weight, anchor)
            if delta is not None and self.outer:
                nesterov_(averaged, delta, state["outer_momentum"], settings)
            if delta is not None and p in mine:
                refresh.compute(mine[p], delta)
            weight.add_(averaged) if onto and p in moved else weight.copy_(averaged)
            anchor.copy_(averaged)
        if lowrank:
            optimizer.report.overlap, optimizer.report.kept_bases = refresh.install()


def _change(p: Tensor, anchor: Tensor) -> Tensor:
    """Δ = W − anchor in the anchor's memory, or in new memory where the anchor lies on another device."""
    if anchor.device == p.device:
        return torch.sub(p, anchor, out=anchor)
    return anchor.to(p.device).neg_().add_(p)


def nesterov_(weight: Tensor, delta: Tensor, momentum: Tensor, settings: dict[str, Any]) -> None:
    """W = anchor + η (Δ + μ b), b = μ b + Δ, where W holds anchor + Δ: all of the weight's shape, in place."""
    rate, mu = settings["outer_lr"], settings["outer_momentum"]
    momentum.mul_(mu).add_(delta)
    weight.add_(delta, alpha=rate - 1).add_(momentum, alpha=rate * mu)


@dataclass(frozen=True)
class _Collected:
    """A weight whose new basis is computed by this worker: its number; on the device that computes, all of matrix and old basis."""

    i: int
    whole: Tensor | None
    old: Tensor | None
    noise: float
    first: bool


# What the owner of a weight sends in place of a basis when the present one stays.
KEEP = math.nan


class Refresh:
    """New bases for some low-rank weights: each computed by one worker, sent to all, installed by all.

    A decomposition that every worker repeats differs in signs and last bits between machines and thread counts; moments averaged
    later would then live in different bases. Hence one owner for each matrix, the work spread evenly.

    Where a worker is several devices, those of the owner collect as many matrices as they are, each device one, and compute at once.
    """

    def __init__(self, optimizer: Synchronised, comm: Comm, members: Sequence[Member], step: int, *, wire: WireFormat = "float32") -> None:
        """The weights, in the same order on every worker, the step t after which this happens, and in which format bases travel."""
        self.optimizer, self.comm, self.members, self.step, self.wire = optimizer, comm, members, step, wire
        self.old = [optimizer.state[p]["basis"] for _, p, _ in members]
        self.new = [torch.empty_like(basis) for basis in self.old]
        self.owners = spread([float(p.numel() * Q.shape[1]) for (_, p, _), Q in zip(members, self.old, strict=True)], comm.size)
        self.collected: list[_Collected] = []

    def compute(self, i: int, matrix: Tensor, *, first: bool = False) -> None:
        """If this worker owns weight number i: its new basis from a matrix of the weight's own shape, which only this worker needs.

        Args:
            matrix: this device's part of it; it may be overwritten afterwards. first: there was no basis before.
        """
        if self.owners[i] != self.comm.rank:
            return
        p, inside = self.members[i][1], self.comm.inside
        with self.comm.timed("basis refresh"):
            # a worker alone averages nothing, so that nothing is rounded
            noise = 0.0 if first or self.comm.size == 1 else rounding_noise(local(p.detach()), self.old[i].dtype)
            noise = inside.highest(noise, device=p.device)
            old = inside.collect_basis(self.old[i], p, target=len(self.collected))
            whole = inside.collect(matrix, p, target=len(self.collected))
            self.collected.append(_Collected(i, whole, old, noise, first))
            if len(self.collected) == inside.size:
                self._decompose()

    def _decompose(self) -> None:
        """New bases from the matrices that were collected: each device of this worker computes that of its own."""
        inside, computed = self.comm.inside, {}
        for each in self.collected:
            name, _, settings = self.members[each.i]
            if each.whole is not None and each.old is not None:
                more: dict[str, int] = {"fresh": each.old.shape[1]} if each.first else {}
                new = leading_subspace(
                    canonical(each.whole), each.old, method=settings["basis"], seed=(0, name, self.step), noise=each.noise, **more
                )
                computed[each.i] = torch.full_like(each.old, KEEP) if new is None else new
        for source, each in enumerate(self.collected):
            inside.hand_out_(self.new[each.i], computed.get(each.i), self.members[each.i][1], source=source)
        self.collected = []

    def install(self) -> tuple[float, tuple[str, ...]]:
        """Send, rotate and install; returns the mean overlap with the old bases and the names of the bases that stayed."""
        if self.collected:
            with self.comm.timed("basis refresh"):
                self._decompose()
        if self.wire == "float32":
            for worker in range(self.comm.size):
                self.comm.send_(
                    [new for new, owner in zip(self.new, self.owners, strict=True) if owner == worker], source=worker, tag="basis"
                )
        else:
            share_encoded_(self.comm, self.new, self.owners, self.wire, tag="basis")
        with self.comm.timed("basis refresh"):
            overlaps, kept = [], []
            stays = self.comm.inside.any(torch.stack([new[:1, :1].isnan().any() for new in self.new]))  # a device may have no rows
            for (name, p, _), new, keep in zip(self.members, self.new, stays.tolist(), strict=True):
                if keep:
                    kept.append(name)
                else:
                    overlaps.append(common_share(self.optimizer.set_basis(p, new)))
        return sum(overlaps) / len(overlaps) if overlaps else 1.0, tuple(kept)


def spread(costs: Sequence[float], num_workers: int) -> list[int]:
    """An owner for each task so that the workers' sums of costs come out about even: the dearest first, to whoever has least."""
    loads = [0.0] * num_workers
    owners = [0] * len(costs)
    for task in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner = loads.index(min(loads))
        owners[task] = owner
        loads[owner] += costs[task]
    return owners


def _usable_gradient(p: Tensor, comm: Comm) -> Tensor:
    """A copy of the gradient in the type of the average; zero where it is missing or not finite on any device of this worker."""
    if p.grad is None:
        return torch.zeros_like(local(p.detach()), dtype=wire_dtype(p.dtype))
    gradient = local(p.grad).to(wire_dtype(p.dtype), copy=True)
    return gradient.zero_() if bool(comm.inside.any(~gradient.isfinite().all())) else gradient
