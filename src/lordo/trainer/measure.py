"""What a synchronisation did, measured where it is told: some numbers of each worker, gathered once; nothing at other steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor

from lordo.lowrank import project
from lordo.optimizer import DistributedOptimizer
from lordo.shards import canonical_part, cut_side, local
from lordo.sync.wire import sent_bytes, wire_dtype

# Weights whose values are compared between workers: enough to know a distance to about one percent.
SAMPLED_WEIGHTS = 4096
# What is timed beside compute; in one process all but communication runs side by side, and its seconds add up.
TIMED = ("basis refresh", "encoding", "communication", "evaluation")


@dataclass
class SyncMeasures:
    """One synchronisation, and the round of steps that it ends; the field `sync` of a line of `metrics.jsonl`.

    Attributes:
        step: t, the step after which it ran.
        seconds: of the round, by phase: compute, basis refresh, encoding, communication, evaluation.
        bytes_sent: in the round, per worker and kind.
        gradient_share: ‖QᵀG‖² / ‖G‖² over all low-rank weights and workers: how much of the gradient the basis held.
        error_norm: ‖E‖ over all low-rank weights, root mean square over workers: what projection has dropped and kept so far.
        spread: how far the workers' weights were from their mean (root mean square), as a share of how far the mean had moved in
            the round; over a sample of weights. 0 where all move alike.
    """

    step: int
    seconds: dict[str, float]
    bytes_sent: dict[str, int]
    gradient_share: float | None
    error_norm: float | None
    spread: float | None


@dataclass
class Round:
    """What is known of a round that has not ended, so that a run that goes on in the middle of it tells the same of it.

    Attributes:
        start: the sampled weights at its start; none of them where its end is not told.
        moved: what collectives had moved then, per tag. latest: a synchronisation not told yet.
    """

    start: Tensor
    moved: dict[str, int]
    latest: SyncMeasures | None


@dataclass
class _Note:
    """What a worker has seen between its local step and the synchronisation; the weights: of one device, the rest of all of them."""

    inside: float
    whole: float
    error: float | None
    weights: Tensor


class Measure:
    """Looks at a worker's optimizer between the local step and the synchronisation, at those synchronisations that are told.

    Args:
        optimizer: of this worker. is_told: whether a step has a line in the log; the same on every worker.
        going_on: the round that a run goes on with; None begins one.
    """

    def __init__(self, optimizer: DistributedOptimizer, is_told: Callable[[int], bool], *, going_on: Round | None = None) -> None:
        """Note where weights and counters stand."""
        self.optimizer, self.is_told = optimizer, is_told
        self.latest: SyncMeasures | None = None
        self._members = [p for _, p, _ in optimizer.named_members()]
        sizes = [local(p.detach()).numel() for p in self._members]
        total = max(1, sum(sizes))
        self._places = [_places(i, size, total) for i, size in enumerate(sizes)]
        self._note: _Note | None = None
        optimizer.local_step_hooks.append(self._look)
        self.go_back(going_on)

    def go_back(self, going_on: Round | None) -> None:
        """Stand in the middle of a round that is known, or (None) of one that is not, unless it begins here."""
        self._note = self.latest = None
        self._begin_round()
        if self.optimizer.steps_taken % self.optimizer.round_steps:
            self._start = torch.empty(0)
        if going_on is not None:
            self._start, self._moved, self.latest = going_on.start, Counter(going_on.moved), going_on.latest

    def round(self) -> Round:
        """The present round, to go on with it later."""
        return Round(self._start, dict(self._moved), self.latest)

    def begin_again(self) -> None:
        """Others are there than before, between the local step and its synchronisation: the round counts from here."""
        self._note = self.latest = None
        self._begin_round()
        self._look()

    def _begin_round(self) -> None:
        self._start = self._sample()
        self._count_from_here()

    def _count_from_here(self) -> None:
        self._moved = Counter(self.optimizer.workers.moved)
        self._seconds = {kind: self._seconds_of(kind) for kind in TIMED}
        self._began = time.perf_counter()

    def _seconds_of(self, kind: str) -> float:
        workers = self.optimizer.workers
        return workers.seconds[kind] / (1 if kind == "communication" else workers.at_once)

    def _sample(self) -> Tensor:
        """The sampled weights, (about SAMPLED_WEIGHTS,) float32 on the CPU."""
        return torch.cat(
            [local(p.detach()).reshape(-1)[places.to(p.device)].float() for p, places in zip(self._members, self._places, strict=True)]
        ).cpu()

    def _is_due(self, step: int) -> bool:
        """Whether this step synchronises, and is the last to do so before the next line of the log."""
        every = self.optimizer.round_steps
        return step % every == 0 and any(self.is_told(later) for later in range(step, step + every))

    @torch.no_grad()
    def _look(self) -> None:
        if not self._is_due(self.optimizer.steps_taken):
            return
        squares = torch.zeros(3, dtype=torch.float64)  # of what the basis holds of the gradients, of the gradients, of the errors
        has_errors = False
        for p in self._members:
            state = self.optimizer.state[p]
            if "basis" not in state or p.grad is None:
                continue
            gradient = canonical_part(p.grad, p).to(wire_dtype(p.dtype))
            squares[0] += self._held(p, gradient, state["basis"].to(gradient.dtype)).cpu()
            squares[1] += gradient.square().sum().cpu()
            if "error" in state:
                squares[2] += self.optimizer.error_of(p).square().sum().cpu()
                has_errors = True
        held, whole, error = self._over_devices(squares)
        self._note = _Note(held, whole, error if has_errors else None, self._sample())

    def _held(self, p: Tensor, gradient: Tensor, basis: Tensor) -> Tensor:
        """‖QᵀG‖² of a weight; where devices share it, this device's part of that."""
        projected = project(basis, gradient)
        if cut_side(p) != "rows":
            return projected.square().sum()
        self.optimizer.sum_inside([projected])  # and now each of them has all of it
        return projected.square().sum() / self.optimizer.workers.inside.size

    def _over_devices(self, numbers: Tensor) -> list[float]:
        """Sums over the devices that share this worker's weights."""
        device = self._members[0].device
        on_device = numbers.to(device)
        self.optimizer.sum_inside([on_device])
        return [float(number) for number in on_device.cpu()]

    def stepped(self, step: int) -> None:
        """After optimizer step t: gather what the workers saw, if it is told; and begin a new round, if this step ended one."""
        if self._note is not None:
            notes: list[_Note] = self.optimizer.workers.gather(self._note)
            self._note = None
            self.latest = self._measures(step, notes)
        every = self.optimizer.round_steps
        if step % every == 0:
            # only what will be told is worth a look at the weights, for which a GPU must wait
            self._start = self._sample() if self._is_due(step + every) else torch.empty(0)
            self._count_from_here()

    def _measures(self, step: int, notes: list[_Note]) -> SyncMeasures:
        workers = self.optimizer.workers
        seconds = {kind: self._seconds_of(kind) - self._seconds[kind] for kind in TIMED}
        compute = time.perf_counter() - self._began - sum(seconds.values())
        moved = {tag: amount - self._moved[tag] for tag, amount in workers.moved.items() if tag != "evaluation"}
        whole = sum(note.whole for note in notes)
        errors = [note.error for note in notes if note.error is not None]
        return SyncMeasures(
            step=step,
            seconds={"compute": max(compute, 0.0), **seconds},
            bytes_sent={tag: sent_bytes(amount, workers.size) for tag, amount in sorted(moved.items()) if amount},
            gradient_share=sum(note.inside for note in notes) / whole if whole else None,
            error_norm=mean(errors) ** 0.5 if errors else None,
            spread=self._spread([note.weights for note in notes]),
        )

    def _spread(self, weights: list[Tensor]) -> float | None:
        """See `SyncMeasures.spread`; None for a worker alone, where nothing moved, or where the start is not known."""
        if len(weights) == 1 or self._start.shape != weights[0].shape:
            return None
        stacked = torch.stack(weights).double()
        center = stacked.mean(dim=0)
        apart = (stacked - center).square().sum(dim=1).mean()
        moved = (center - self._start.double()).square().sum()
        apart_squared, moved_squared = self._over_devices(torch.stack([apart, moved]))
        return (apart_squared / moved_squared) ** 0.5 if moved_squared else None

    def take(self) -> SyncMeasures | None:
        """The synchronisation since the last call, if there was one."""
        latest, self.latest = self.latest, None
        return latest


def _places(number: int, numel: int, total: int) -> Tensor:
    """Places of the sampled elements of parameter `number`, the same on every worker: its share of the sample, at least one."""
    count = min(numel, max(1, SAMPLED_WEIGHTS * numel // total))
    if count == numel:
        return torch.arange(numel)
    return torch.randint(numel, (count,), generator=torch.Generator().manual_seed(number))
