"""What is done around a local step, rule by rule. A method is a list of these.

A rule sees an optimizer as `Synchronised` describes it: named parameters, their state, their settings, and `set_basis`. All rules
run on every worker in the same order; which collectives they call depends on the step and the settings alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lordo.finite import first_nonfinite
from lordo.shards import local
from lordo.sync.comm import Comm
from lordo.sync.compressed import means_at_owners
from lordo.sync.formats import WireFormat
from lordo.sync.refresh import Member, Refresh, runs
from lordo.sync.schedule import is_due
from lordo.sync.shares import LeftOut, average_, heal_
from lordo.sync.wire import wire_dtype

AnchorDevice = Literal["same", "cpu"]


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
        for run in runs(optimizer, members, comm, self.wire):
            refresh = Refresh(optimizer, comm, run, step, wire=self.wire)
            if self.wire == "float32":
                for i, (_, p, _) in enumerate(run):
                    refresh.compute(i, _mean_gradient(p, comm, target=refresh.owners[i]), first=True)
            else:
                read = partial(_usable_gradient, comm=comm)
                for i, mean in means_at_owners(comm, [p for _, p, _ in run], read, refresh.owners, self.wire, tag="first gradient"):
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
        overlaps, kept = [], []
        for run in runs(optimizer, members, comm, self.basis_wire):
            lowrank = [m for m in run if "basis" in optimizer.state[m[1]]] if self.refresh else []
            refresh = Refresh(optimizer, comm, lowrank, step, wire=self.basis_wire)
            self._follow(optimizer, run, moved, refresh, onto=onto)
            found = refresh.install()
            overlaps += found[0]
            kept += found[1]
        if overlaps or kept:
            optimizer.report.overlap = sum(overlaps) / len(overlaps) if overlaps else 1.0
            optimizer.report.kept_bases = tuple(kept)

    def _follow(
        self, optimizer: Synchronised, members: Sequence[Member], moved: Mapping[Tensor, Tensor], refresh: Refresh, *, onto: bool
    ) -> None:
        """`follow` for some of the members, up to the bases of `refresh`, which are not installed yet."""
        mine = refresh.own_weights()
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
            finish = partial(_take_over, weight, anchor, averaged, onto=onto and p in moved)
            if delta is not None and p in mine:
                refresh.compute(mine[p], delta, then=finish)  # Δ may lie in the anchor's memory
            else:
                finish()


def _take_over(weight: Tensor, anchor: Tensor, averaged: Tensor, *, onto: bool) -> None:
    """Make weight (or, `onto`, what was added to it since) and anchor those of an average."""
    weight.add_(averaged) if onto else weight.copy_(averaged)
    anchor.copy_(averaged)


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


def _mean_gradient(p: Tensor, comm: Comm, *, target: int) -> Tensor:
    """The mean of a gradient over the workers, of use to worker `target` alone."""
    gradient = _usable_gradient(p, comm)
    comm.mean_at_(gradient, target=target, tag="first gradient")
    return gradient


def _usable_gradient(p: Tensor, comm: Comm) -> Tensor:
    """A copy of the gradient in the type of the average; zero where it is missing or not finite on any device of this worker."""
    if p.grad is None:
        return torch.zeros_like(local(p.detach()), dtype=wire_dtype(p.dtype))
    gradient = local(p.grad).to(wire_dtype(p.dtype), copy=True)
    ruined = torch.tensor([first_nonfinite([("", gradient)]) is not None], device=p.device)
    return gradient.zero_() if bool(comm.inside.any(ruined)) else gradient
