"""A worker's checkpoints, as the training loop sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from lordo.finite import first_nonfinite
from lordo.optimizer import DistributedOptimizer
from lordo.shards import local
from lordo.trainer.checkpoint import parts
from lordo.trainer.config import RunConfig
from lordo.trainer.resume import Place, restore, share_of, snapshot
from lordo.trainer.writer import Writer


@dataclass(frozen=True)
class Keeping:
    """Where checkpoints of a run go, and from which it goes on.

    folder: of the checkpoints. from_step: the checkpoint to go on from; None begins. report: told what could not be written.
    """

    folder: Path
    from_step: int | None
    report: Callable[[str], None]


class Saver:
    """One worker's checkpoints: restores it from one, writes the next ones in the background.

    Args:
        keeping: where. config: how often. model, optimizer: of this worker.
    """

    def __init__(self, keeping: Keeping, config: RunConfig, model: PreTrainedModel, optimizer: DistributedOptimizer) -> None:
        """Nothing is read or written yet."""
        self.keeping, self.model, self.optimizer = keeping, model, optimizer
        self.every, self.sequences = config.train.checkpoint_every, config.sequences_per_worker
        self.writer = Writer(keeping.folder, optimizer.workers, config.train.keep_last, keeping.report)
        self.saved_step = keeping.from_step or 0

    def restore(self) -> Place:
        """Where the run stands: at its beginning, or, the worker being put back, at the checkpoint to go on from."""
        step, share = self.keeping.from_step, share_of(self.optimizer.workers)
        if step is None:
            return Place()
        place = restore(parts(self.keeping.folder, step, share), self.model, self.optimizer)
        self.writer.found(step)
        return place

    def last_before(self, step: int, *, from_step: int) -> int | None:
        """The last checkpoint from `from_step` on, before a step, of which all parts are on disk. All workers together."""
        self.writer.settle()
        notes = self.optimizer.workers.gather_all(self.writer.written)
        return max((each for each in set.intersection(*map(set, notes)) if from_step <= each < step), default=None)

    def go_back(self, step: int) -> Place:
        """Put the worker back to a checkpoint, and remove its later ones."""
        place = restore(parts(self.writer.folder, step, share_of(self.optimizer.workers)), self.model, self.optimizer)
        for later in [each for each in self.writer.written if each > step]:
            self.writer.remove(later)
        self.writer.complete = self.saved_step = step
        return place

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is written after this step."""
        return self.every is not None and step % self.every == 0

    def save(self, place: Place) -> None:
        """Begin to write a checkpoint. All workers at the same step; nothing is written if the weights of one are ruined."""
        with self.optimizer.workers.timed("checkpoint"):
            self._save(place)

    def _save(self, place: Place) -> None:
        workers = self.optimizer.workers
        ruined = first_nonfinite((name, local(p.detach())) for name, p, _ in self.optimizer.named_members())
        for worker, name in workers.gather_all((workers.rank, ruined)):
            if name is not None:
                if workers.is_first:
                    self.keeping.report(f"no checkpoint of step {place.step}: '{name}' of worker {worker} is not finite")
                return
        self.writer.write(snapshot(place, self.model, self.optimizer, sequences=self.sequences))
        self.saved_step = place.step

    def finish(self, place: Place | None = None) -> None:
        """Write a last checkpoint if a place is given that was not saved, and wait until all is on disk."""
        if place is not None and place.step > self.saved_step:
            self.save(place)
        self.writer.settle()
