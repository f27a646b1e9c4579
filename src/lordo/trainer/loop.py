"""One worker's training, from the first step to the final average. The same code for every method and every kind of worker."""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from lordo.lowrank import common_share
from lordo.optimizer import DistributedOptimizer
from lordo.shards import cut_side
from lordo.sync import Comm
from lordo.sync.dtensors import whole
from lordo.trainer.data import spread
from lordo.trainer.eras import Era, bytes_sent, sent_since, stretches
from lordo.trainer.evaluate import Evaluation, evaluate
from lordo.trainer.measure import Measure
from lordo.trainer.mix import Mix
from lordo.trainer.phases import changes_at
from lordo.trainer.prepared import Prepared, build, pick_device
from lordo.trainer.records import Observer, Progress
from lordo.trainer.resume import Place
from lordo.trainer.saving import Keeping, Saver
from lordo.trainer.spikes import MAX_TIMES_BACK, is_spike
from lordo.trainer.stopping import StopPoint


@dataclass
class Outcome:
    """What a worker has at the end."""

    model: PreTrainedModel
    optimizer: DistributedOptimizer
    evaluation: Evaluation
    seconds: float
    skipped_steps: int
    left_out: int
    spikes: int
    eras: tuple[Era, ...]


def train(
    prepared: Prepared,
    workers: Comm,
    observer: Observer | None = None,
    *,
    keeping: Keeping,
    stop: StopPoint | None = None,
    mesh: DeviceMesh | None = None,
) -> Outcome | None:
    """Train as one worker, or as one device of a worker.

    Args:
        prepared: the run. workers: this worker's connection to the others. observer: told of the progress, on worker 0.
        keeping: where its checkpoints go, and from which it goes on. stop: asked before each step whether to go on.
        mesh: the devices of this worker, if there are several.

    Returns:
        What it has at the end; None if it was asked to stop, and has left a checkpoint.
    """
    config = prepared.config
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    device = pick_device(config.train.device)
    model, _, optimizer = build(config, prepared.method, workers, device, mesh)
    saver = Saver(keeping, config, model, optimizer)
    place = saver.restore()
    optimizer.start()
    return Loop(prepared, workers, model, optimizer, observer, saver, place).run(stop or StopPoint())


def lower_precision(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Inside, matrix products are computed in bfloat16 if the precision says so.

    Without autocast's cache of cast weights: it belongs to the process, so that workers in threads would empty it for one another,
    and a weight that is used twice would then have its gradient rounded in one run and not in the next.
    """
    if precision == "bfloat16-autocast":
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
    return nullcontext()


class Loop:
    """The state of one worker's training loop."""

    def __init__(
        self,
        prepared: Prepared,
        workers: Comm,
        model: PreTrainedModel,
        optimizer: DistributedOptimizer,
        observer: Observer | None,
        saver: Saver,
        place: Place,
    ) -> None:
        """A worker's loop, standing at `place`; `saver`: of its checkpoints."""
        self.prepared, self.config = prepared, prepared.config
        self.workers, self.model, self.optimizer = workers, model, optimizer
        self.observer, self.saver = observer, saver
        self.device = next(model.parameters()).device
        self.sequences = self.config.sequences_per_worker
        self.validation = spread(prepared.splits.validation, self.config.train.eval_sequences)
        self.lowrank = [p for _, p, _ in optimizer.named_members() if "basis" in optimizer.state[p]]
        self.measure = Measure(optimizer, self.is_told, going_on=place.round)
        self.spiked_at: int | None = None  # the first step of the round that this worker left out for its loss
        self.times_back: Counter[int] = Counter()  # how often the run went back to the checkpoint of a step
        self.stand_at(place)

    def stand_at(self, place: Place) -> None:
        """Go on from a place, with the workers there are now."""
        self.place = place
        self.loss, self.norm = torch.tensor(place.loss), torch.tensor(place.gradient_norm)
        earlier = stretches(place.eras)
        self.read_before = earlier.pop()[1] if earlier and earlier[-1][0] == self.workers.size else 0
        self.text = Mix(self.prepared.splits.train, self.workers.rank, self.workers.size, self.config.seed, earlier=earlier)
        read = sum(era.used * era.workers for era in place.eras) + place.ahead * self.workers.size
        self.tokens_before = read * self.config.data.sequence_length
        self.logged_at, self.logged_step = time.perf_counter(), place.step
        self.began = self.logged_at - place.seconds

    def run(self, stop: StopPoint) -> Outcome | None:
        """All steps, then the final average and evaluation; None if it was asked to stop."""
        while self.place.step < self.config.train.steps:
            step = self.place.step + 1
            if not stop.begin(step):
                self.leave()
                return None
            self.optimizer.change_settings(**changes_at(step, self.config))
            self.loss, self.norm = self.step(step)  # tensors: reading them would make a GPU wait
            self.stepped()
        return self.finish()

    def stepped(self) -> None:
        """After a step: what is told, evaluated and saved of it."""
        step = self.place.step = self.optimizer.steps_taken
        self.measure.stepped(step)
        if step == 1:
            self.place.first_bases = tuple(basis.clone() for basis in self.bases())
        if self.goes_back():
            return
        if step < self.config.train.steps and self.is_told(step):
            self.log(self.evaluate() if self.is_evaluated(step) else None)
        if self.saver.is_due(step):
            self.saver.save(self.reached())

    def leave(self) -> None:
        """Asked to stop: leave a checkpoint."""
        self.saver.finish(self.reached())

    def finish(self) -> Outcome:
        """The final average and evaluation."""
        self.optimizer.average_parameters()  # after the last checkpoint: a run may be trained on
        evaluation = self.evaluate()
        self.log(evaluation)
        self.saver.finish()
        seconds = time.perf_counter() - self.began
        skipped, left_out, spikes = map(sum, zip(*self.workers.gather(self.lost()), strict=True))
        return Outcome(self.model, self.optimizer, evaluation, seconds, skipped, left_out, spikes, (*self.place.eras, self.era()))

    def reached(self) -> Place:
        """Where the run stands, for a checkpoint."""
        place = self.place
        place.loss, place.gradient_norm, place.seconds = float(self.loss), float(self.norm), time.perf_counter() - self.began
        place.round = self.measure.round()
        return place

    def era(self) -> Era:
        """The present stretch with this number of workers."""
        sent = sent_since(self.workers, self.place.moved)
        shards = self.workers.inside.size
        return Era(self.workers.size, self.place.start, self.place.step, self.sequences, sent, self.place.ahead, shards=shards)

    def is_evaluated(self, step: int) -> bool:
        """Whether the averaged model is evaluated after a step."""
        every = self.config.train.eval_every
        return step == self.config.train.steps or (every is not None and step % every == 0)

    def is_told(self, step: int) -> bool:
        """Whether a step has a line in the log."""
        return step == 1 or step % self.config.train.log_every == 0 or self.is_evaluated(step)

    def lost(self) -> tuple[int, int, int]:
        """Steps that this worker skipped, averages that left it out, both for numbers not finite; steps left out for their loss."""
        return self.optimizer.num_skipped_steps, self.optimizer.num_left_out, self.place.spikes

    def step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Optimizer step number t on the next batch: its loss, and the gradient's norm before clipping."""
        own, inside = self.config.sequences_per_device, self.workers.inside
        position = self.read_before + self.place.position(step, self.sequences) + inside.device * own
        tokens = self.text.batch(position, own).to(self.device)
        loss = inside.mean(self.gradients(tokens))
        factor = self.config.train.spike_factor
        if factor is not None and is_spike(float(loss), self.place.losses, factor):
            self.leave_out(step, float(loss))
        self.optimizer.average_gradients()
        clip = self.config.train.clip
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), math.inf if clip is None else clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, whole(norm)

    def leave_out(self, step: int, loss: float) -> None:
        """Take this worker's gradients out of a step: it is counted, weights and moments stay, and a synchronisation has its share."""
        self.optimizer.zero_grad()
        self.place.spikes += 1
        self.spiked_at = self.spiked_at or step
        usual = median(self.place.losses)
        if self.workers.inside.device == 0:
            self.saver.keeping.report(f"worker {self.workers.rank} leaves step {step} out: its loss was {loss:.3f}, {usual:.3f} is usual")

    def goes_back(self) -> bool:
        """At the end of a round: whether all went back to a checkpoint, since the loss of one of them was out of proportion in it.

        Raises:
            FloatingPointError: on all workers, if that was tried too often.
        """
        place = self.place
        if self.config.train.spike_action != "rollback" or place.step % self.optimizer.round_steps:
            return False
        seen = [(step, worker) for worker, step in enumerate(self.workers.gather(self.spiked_at)) if step is not None]
        self.spiked_at = None
        if not seen:
            return False
        (step, worker), tell = min(seen), self.workers.is_first
        target = self.saver.last_before(step, from_step=place.start)
        if target is None:
            if tell:
                self.saver.keeping.report(f"there is no checkpoint before step {step} to go back to, with these workers: the run goes on")
            return False
        self.times_back[target] += 1
        if self.times_back[target] > MAX_TIMES_BACK:
            raise FloatingPointError(
                f"the loss of worker {worker} is out of proportion in step {step}, though the run went back to step {target} "
                f"{MAX_TIMES_BACK} times: lower the learning rate, or go on from an earlier checkpoint"
            )
        if tell:
            self.saver.keeping.report(f"all go back to the checkpoint of step {target}, for the loss of worker {worker} in step {step}")
        self.optimizer.average_parameters()  # waits for what is on its way
        back = self.saver.go_back(target)
        back.ahead = place.position(place.step + 1, self.sequences) - (back.step - back.start) * self.sequences
        back.spikes, back.seconds = place.spikes, time.perf_counter() - self.began
        self.measure.go_back(back.round)
        self.stand_at(back)
        return True

    def gradients(self, tokens: torch.Tensor) -> torch.Tensor:
        """Leave the gradient of the mean loss over (sequences, sequence_length) tokens in the parameters; returns that loss.

        The parts of `batch.accumulate` are of one size, so the mean of their losses is the loss of the whole.
        """
        parts = tokens.chunk(self.config.batch.accumulate)
        total = torch.zeros((), device=self.device)
        for part in parts:
            with lower_precision(self.config.train.precision, self.device):
                loss = self.model(input_ids=part, labels=part, use_cache=False).loss / len(parts)
            loss.backward()
            total += loss.detach()
        return total

    def evaluate(self) -> Evaluation:
        """Evaluate the averaged model, in the precision it is trained in."""
        with lower_precision(self.config.train.precision, self.device):
            return evaluate(self.model, self.optimizer, self.validation)

    def bases(self) -> list[torch.Tensor]:
        """Bases of all low-rank weights, sorted by name."""
        return [self.optimizer.state[p]["basis"] for p in self.lowrank]

    def log(self, evaluation: Evaluation | None) -> None:
        """Gather the workers' losses, and tell the observer."""
        notes = self.workers.gather((float(self.loss), *self.lost()))
        now, step = time.perf_counter(), self.place.step
        bases = self.about_bases() if self.workers.rank == 0 else {}
        sent = bytes_sent((*self.place.eras, self.era()))
        tokens_per_step = self.workers.size * self.sequences * self.config.data.sequence_length
        if self.observer is not None:
            losses = [each for each, *_ in notes]
            self.observer.progressed(
                Progress(
                    step=step,
                    workers=self.workers.size,
                    loss=sum(losses) / len(losses),
                    loss_min=min(losses),
                    loss_max=max(losses),
                    lr=changes_at(step, self.config)["lr"],
                    tokens=self.tokens_before + (step - self.place.start) * tokens_per_step,
                    bytes_sent=sent.total() - sent["evaluation"],
                    seconds=now - self.began,
                    tokens_per_second=(step - self.logged_step) * tokens_per_step / max(now - self.logged_at, 1e-9),
                    steps_to_next_sync=self.optimizer.steps_to_next_sync,
                    gradient_norm=float(self.norm),
                    skipped_steps=sum(skipped for _, skipped, *_ in notes),
                    left_out=sum(left_out for *_, left_out, _ in notes),
                    spikes=sum(spikes for *_, spikes in notes),
                    validation_loss=evaluation.loss if evaluation else None,
                    perplexity=evaluation.perplexity if evaluation else None,
                    sync=self.measure.take(),
                    **bases,
                )
            )
        self.logged_at, self.logged_step = now, step

    def about_bases(self) -> dict[str, Any]:
        """How far the bases have moved; all devices of a worker together."""
        report = self.optimizer.report
        changes = [first.mT @ basis for first, basis in zip(self.place.first_bases, self.bases(), strict=True)]
        self.optimizer.sum_inside([change for change, p in zip(changes, self.lowrank, strict=True) if cut_side(p) == "rows"])
        now = [common_share(change) for change in changes]
        return {
            "overlap": report.overlap,
            "overlap_with_first": sum(now) / len(now) if now else None,
            "kept_bases": list(report.kept_bases),
        }
