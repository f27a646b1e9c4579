"""The rule of methods whose averages travel in a wire format, split, in fragments, or while training goes on.

A parameter travels as its difference to the anchor (the weights that all workers agreed on last), plus what encoding dropped the last
time: a change far smaller than the weight keeps its digits.

Overlap by τ steps: at step t every worker keeps a copy x(t) of what it sends, and trains on. At step t+τ the mean is taken in,

    x(t+τ) ← x(t+τ) + decay · (mean − x(t)),

which is what averaging at once would have given, had the same τ gradients followed: weights and error add up what happens to them
(decay 1), a moment forgets its past by β a step (decay β to the number of steps). Which collectives run depends on the step alone, and
all that a restart needs is in the optimizer's state: what was on its way is then sent again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lordo.shards import cut_side, is_tall, local
from lordo.sync.comm import Comm
from lordo.sync.compressed import CompressedMean, Part
from lordo.sync.formats import find_format, format_names
from lordo.sync.refresh import Member
from lordo.sync.rules import PseudoGradient, Synchronised, SyncReport, is_low_precision
from lordo.sync.schedule import is_due, last_due
from lordo.sync.shares import LeftOut, heal_
from lordo.sync.split import coordinates, lift_exactly, rest_is_zero
from lordo.sync.wire import wire_dtype

_LANDED = -1.0  # in the state, in place of the step at which something was sent: it has been taken in


@dataclass
class Landing:
    """What is known when a mean is taken in, and not when it was sent.

    Attributes:
        overlapped: whether steps were taken since. steps_since: each parameter's own ones, by name.
        is_ruined: whether this worker's numbers are to be replaced.
        moved: the mean change of parameters whose anchor takes it up (see `PseudoGradient.follow`).
    """

    overlapped: bool
    steps_since: dict[str, float] = field(default_factory=dict)
    is_ruined: bool = False
    moved: dict[Tensor, Tensor] = field(default_factory=dict)


@dataclass
class Flight:
    """What was sent after one step and has not been taken in yet.

    Attributes:
        step: t. due: what was sent, of which parameters. mean: the exchange.
        gathered: whether the second stage of the exchange has begun.
    """

    step: int
    due: list[tuple[str, Member]]
    mean: CompressedMean
    landing: Landing
    gathered: bool = False


class Exchange:
    """Average parameters, moments or error over the workers, each at its own period, and what follows from averaged parameters."""

    def __init__(self, *what: str, settings: Mapping[str, Any], then: PseudoGradient) -> None:
        """`what`: any of "parameters", "exp_avg", "exp_avg_sq", "error". `settings`: of the whole optimizer. `then`: what follows."""
        self.what, self.then = what, then
        self.overlap: int = settings["sync_overlap"]
        self.split: bool = settings["sync_split"]
        self.formats = format_names(settings)
        self.flights: list[Flight] | None = None  # None: to be read from the state

    # -- state ---------------------------------------------------------------------------------------------------------

    def new_state(self, p: Tensor, state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
        """What follows keeps; what encoding dropped (bfloat16); with overlap a copy of everything that is sent."""
        kept = self.then.new_state(p, state, settings)
        dtype, lowrank = wire_dtype(p.dtype), "basis" in state
        if self.formats["parameters"] != "float32" and not (lowrank and self.split and rest_is_zero(settings)):
            kept["residual"] = torch.zeros_like(p, dtype=torch.bfloat16)
        if self.overlap:
            for what in self.what:
                if what != "error":
                    kept[f"sent_{what}"] = torch.zeros_like(p if what == "parameters" else state[what], dtype=dtype)
                elif lowrank and settings["error_feedback"] and settings["sync_error_every"]:
                    kept["sent_error"] = torch.zeros_like(p, dtype=dtype)
            kept["sent_step"] = torch.full((len(self.what),), _LANDED, dtype=torch.float32)
        return kept

    # -- the schedule --------------------------------------------------------------------------------------------------

    def __call__(self, optimizer: Synchronised, comm: Comm, step: int) -> None:
        """Take in what was sent τ steps ago, and send what is due after step t."""
        if self.flights is None:
            self.flights = self._sent_before(optimizer, comm, step)
        for flight in self.flights:
            if not flight.gathered and step >= flight.step + (self.overlap + 1) // 2:
                self._gather(flight)
        while self.flights and step >= self.flights[0].step + self.overlap:
            self._land(optimizer, comm, self.flights.pop(0), step)
        due = [
            (what, member)
            for member in optimizer.named_members()
            for what in self.what
            if what in ("parameters", *optimizer.state[member[1]]) and is_due(member[2], what, step, optimizer.fragment_of(member[1]))
        ]
        if not due:
            return
        if self.overlap:
            self._keep_copies(optimizer, due)
        flight = self._launch(optimizer, comm, due, step)
        if self.overlap:
            self.flights.append(flight)
        else:
            self._gather(flight)
            self._land(optimizer, comm, flight, step)

    def average_parameters(self, optimizer: Synchronised, comm: Comm, members: Sequence[Member], step: int) -> tuple[LeftOut, ...]:
        """Outside the schedule: take in all that is on its way, then average the parameters of `members`; tells who was left out."""
        for flight in self.flights if self.flights is not None else self._sent_before(optimizer, comm, step + 1):
            if not flight.gathered:
                self._gather(flight)
            self._land(optimizer, comm, flight, step)
        self.flights = []
        if not members:
            return ()
        landing = Landing(overlapped=False)
        mean = CompressedMean(comm, self._parts_of_parameters(optimizer, comm, members, landing), members[0][1].device)
        mean.scatter(in_a_row=optimizer.left_out_in_a_row)
        mean.gather()
        mean.finish()
        for p, moved in landing.moved.items():
            local(p.detach()).copy_(optimizer.state[p]["anchor"].to(p.device) + moved)
        return mean.left_out

    def _sent_before(self, optimizer: Synchronised, comm: Comm, step: int) -> list[Flight]:
        """Send again what the loaded state says was on its way before step t."""
        if not self.overlap:
            return []
        sent: dict[int, list[tuple[str, Member]]] = {}
        for member in optimizer.named_members():
            _, p, settings = member
            for what, at in zip(self.what, optimizer.state[p]["sent_step"].tolist(), strict=True):
                if at != _LANDED:
                    sent.setdefault(last_due(settings, what, step - 1, optimizer.fragment_of(p)), []).append((what, member))
        with comm.uncounted():
            return [self._launch(optimizer, comm, due, t) for t, due in sorted(sent.items())]

    # -- one exchange --------------------------------------------------------------------------------------------------

    def _keep_copies(self, optimizer: Synchronised, due: Sequence[tuple[str, Member]]) -> None:
        for what, (_, p, _) in due:
            state = optimizer.state[p]
            state[f"sent_{what}"].copy_(local(p.detach()) if what == "parameters" else _take(optimizer, what, p))
            state["sent_step"][self.what.index(what)] = float(state["step"])

    def _launch(self, optimizer: Synchronised, comm: Comm, due: list[tuple[str, Member]], step: int) -> Flight:
        landing = Landing(self.overlap > 0)
        members = [member for what, member in due if what == "parameters"]
        parts = self._parts_of_parameters(optimizer, comm, members, landing)
        parts += [self._part(optimizer, comm, what, member, landing) for what, member in due if what != "parameters"]
        counted = [member for what, member in due if what == "exp_avg"]
        if counted:
            parts.append(_step_counts(optimizer, counted, landing, self.what.index("exp_avg") if self.overlap else None))
        mean = CompressedMean(comm, parts, due[0][1][1].device)
        mean.scatter(in_a_row=optimizer.left_out_in_a_row)
        return Flight(step, due, mean, landing)

    def _gather(self, flight: Flight) -> None:
        flight.mean.gather()
        flight.gathered = True

    def _land(self, optimizer: Synchronised, comm: Comm, flight: Flight, step: int) -> None:
        """Take the means in, then do what follows from averaged parameters."""
        for what, (name, p, _) in flight.due:
            state = optimizer.state[p]
            sent = float(state["sent_step"][self.what.index(what)]) if self.overlap else float(state["step"])
            flight.landing.steps_since[name] = float(state["step"]) - sent
        flight.landing.is_ruined = flight.mean.is_ruined
        flight.mean.finish()
        averaged = tuple(what for what in self.what if any(what == tag for tag, _ in flight.due))
        optimizer.report = SyncReport(step, averaged, left_out=flight.mean.left_out)
        members = [member for what, member in flight.due if what == "parameters" and "anchor" in optimizer.state[member[1]]]
        self.then.follow(optimizer, comm, members, flight.landing.moved, step, onto=self.overlap > 0)
        if self.overlap:
            for what, (_, p, _) in flight.due:
                optimizer.state[p]["sent_step"][self.what.index(what)] = _LANDED
        if flight.landing.is_ruined:
            heal_([optimizer.state[p] for _, p, _ in optimizer.named_members()], comm)

    # -- what travels, and what is done with its mean ------------------------------------------------------------------

    def _part(self, optimizer: Synchronised, comm: Comm, what: str, member: Member, landing: Landing) -> Part:
        """A moment or the error."""
        name, p, settings = member
        state = optimizer.state[p]
        shape = local(p.detach()).shape if what == "error" else state[what].shape
        sent = state[f"sent_{what}"] if self.overlap else _take(optimizer, what, p)
        beta = {"exp_avg": settings["betas"][0], "exp_avg_sq": settings["betas"][1]}.get(what, 1.0)

        def write(mean: Tensor) -> None:
            own = _take(optimizer, what, p)
            if self.overlap and not landing.is_ruined:
                own.add_(mean.view(shape) - sent, alpha=beta ** landing.steps_since[name])
                if what == "exp_avg_sq":
                    own.clamp_(min=0)  # rounding
            else:
                own.copy_(mean.view(shape))
            if what == "error":
                optimizer.give_error(p, own)

        wire = find_format(self._format(what, comm), torch.promote_types(state[what].dtype, torch.float32), what=what)
        return Part(what, f"{name}.{what}", wire, shape.numel(), lambda: sent, write)

    def _parts_of_parameters(self, optimizer: Synchronised, comm: Comm, members: Sequence[Member], landing: Landing) -> list[Part]:
        """Coordinates first: the rest is written with them."""
        split, whole = [], []
        for member in members:
            p = member[1]
            if self.split and comm.size > 1 and "basis" in optimizer.state[p]:
                split.append(_SplitChange(self, optimizer, comm, member, landing))
            elif self._format("parameters", comm) == "float32" and not is_low_precision(p):
                whole.append(_Values(self, optimizer, comm, member, landing).part())
            else:
                whole.append(_Change(self, optimizer, comm, member, landing).part())
        _add_up_coordinates(split, comm)
        return [*(change.coordinates() for change in split), *(change.part() for change in split if not change.complete), *whole]

    def _format(self, what: str, comm: Comm) -> Any:
        """A worker that is alone rounds nothing."""
        return self.formats[what] if comm.size > 1 else "float32"


def _take(optimizer: Synchronised, what: str, p: Tensor) -> Tensor:
    """A moment, or the error to be given back if it is changed."""
    taken: Tensor = optimizer.take_error(p) if what == "error" else optimizer.state[p][what]
    return taken


def _step_counts(optimizer: Synchronised, members: Sequence[Member], landing: Landing, sent: int | None) -> Part:
    """Each parameter's own steps when it was sent (`sent`: its place in "sent_step", None for now); see `rules.step_counts`."""
    counts = [optimizer.state[p]["step"] if sent is None else optimizer.state[p]["sent_step"][sent] for _, p, _ in members]
    counted = torch.stack(counts).clone()

    def write(mean: Tensor) -> None:
        for (name, p, _), count in zip(members, mean.tolist(), strict=True):
            optimizer.state[p]["step"].fill_(count + landing.steps_since[name])

    return Part("step", "step", find_format("float32", torch.float32, what="step"), len(members), lambda: counted, write)


class _Values:
    """A parameter that travels as it is."""

    def __init__(self, rule: Exchange, optimizer: Synchronised, comm: Comm, member: Member, landing: Landing) -> None:
        self.name, self.key, self.settings = member
        self.p = local(self.key.detach())
        self.state, self.landing = optimizer.state[self.key], landing
        self.sent = self.state["sent_parameters"] if landing.overlapped else self.p
        self.format = find_format(rule._format("parameters", comm), self.p.dtype, what="parameters")

    def part(self) -> Part:
        return Part("parameters", self.name, self.format, self.p.numel(), self.read, self.write, self.state.get("residual"))

    @property
    def anchor(self) -> Tensor:
        anchor: Tensor = self.state["anchor"].to(self.p.device)  # it may lie in host memory
        return anchor

    def read(self) -> Tensor:
        return self.sent

    def write(self, mean: Tensor) -> None:
        average = mean.view_as(self.p)
        if not self.landing.overlapped:
            self.p.copy_(average)
        elif "anchor" in self.state:
            self.leave_behind(average - self.anchor)
        else:
            self.take_off()
            self.p.add_(average)

    def take_off(self) -> None:
        """Leave of the weight what the steps since then did; nothing of a ruined one."""
        self.p.zero_() if self.landing.is_ruined else self.p.sub_(self.sent)

    def leave_behind(self, change: Tensor) -> None:
        """The mean change where the copy of what was sent was: the anchor takes it up, and the weight follows."""
        self.take_off()
        self.sent.copy_(change)
        self.landing.moved[self.key] = self.sent


class _Change(_Values):
    """A parameter that travels as its difference to the anchor, with what was dropped the last time."""

    def change(self) -> Tensor:
        """From the anchor as all workers started from it: rounded, if the weight is."""
        change: Tensor = self.sent.to(self.anchor.dtype) - self.anchor.to(self.p.dtype)
        return change

    def read(self) -> Tensor:
        return self.change().add_(self.state["residual"]) if "residual" in self.state else self.change()

    def write(self, mean: Tensor) -> None:
        change = mean.view_as(self.p)
        if self.landing.overlapped:
            self.leave_behind(change)
        elif is_low_precision(self.p):
            self.landing.moved[self.key] = change
        else:
            self.p.copy_(self.anchor + change)


class _SplitChange(_Change):
    """A low-rank weight whose difference travels as coordinates in the basis and, unless that is all, the rest."""

    def __init__(self, rule: Exchange, optimizer: Synchronised, comm: Comm, member: Member, landing: Landing) -> None:
        super().__init__(rule, optimizer, comm, member, landing)
        self.basis, self.complete = self.state["basis"], rest_is_zero(self.settings)
        self.added_up: Tensor | None = None

    def canonical(self, matrix: Tensor) -> Tensor:
        """A view of this device's part in the canonical orientation of the whole weight."""
        return matrix.mT if is_tall(self.key) else matrix

    def own_coordinates(self) -> Tensor:
        """c of this worker, (r, n)."""
        return coordinates(self.basis, self.canonical(self.change())) if self.added_up is None else self.added_up

    def coordinates(self) -> Part:
        numel = self.basis.shape[1] * self.canonical(self.p).shape[1]
        plain = find_format("float32", self.basis.dtype, what="coordinates")
        return Part("coordinates", self.name, plain, numel, self.own_coordinates, self.write_coordinates)

    def write_coordinates(self, mean: Tensor) -> None:
        self.lifted = lift_exactly(self.basis, mean.view(self.basis.shape[1], -1))
        if self.complete:
            self.write(torch.zeros_like(self.p, dtype=mean.dtype))

    def read(self) -> Tensor:
        rest = self.change()
        self.canonical(rest).sub_(lift_exactly(self.basis, self.own_coordinates()))
        return rest.add_(self.state["residual"]) if "residual" in self.state else rest

    def write(self, mean: Tensor) -> None:
        change = mean.view_as(self.p).clone()
        self.canonical(change).add_(self.lifted)
        super().write(change)


def _add_up_coordinates(changes: Sequence[_SplitChange], comm: Comm) -> None:
    """Where the rows of a weight are cut, each device has a part of the sum c = Qᵀ D: add them up once, before any of it is read."""
    cut = [change for change in changes if cut_side(change.key) == "rows"]
    for change in cut:
        change.added_up = change.own_coordinates()
    comm.inside.total_([("inside", change.added_up) for change in cut if change.added_up is not None])
