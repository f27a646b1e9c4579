"""The training loop of a worker whose fellow workers come and go.

All that needs the others, lines of the log, evaluations and checkpoints too, is done at the end of a round, where they have just met.
Each change of who is there ends a stretch (`eras.py`): the blocks that are not read yet are dealt out again to those who are there
then. What a lost worker had taken of them in its last round counts as read, so that no block is read twice.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lordo.finite import first_nonfinite
from lordo.optimizer import DistributedOptimizer
from lordo.sync import Solo, WorkerError
from lordo.trainer.alike import check_alike, settings_and_text
from lordo.trainer.checkpoint import Part, Snapshot, checkpoints, clear, complete
from lordo.trainer.config import RunConfig
from lordo.trainer.elastic import Elastic
from lordo.trainer.folder import RunFolder
from lordo.trainer.loop import Loop, Outcome
from lordo.trainer.records import Observer, Progress
from lordo.trainer.resume import Place, restore, snapshot
from lordo.trainer.saving import Saver
from lordo.trainer.stopping import StopPoint, signals_stop
from lordo.trainer.terminal import report
from lordo.trainer.trackers import observed
from lordo.trainer.writer import Writer

# Until all who are to begin have come: so long between two meetings.
PAUSE_SECONDS = 0.5


class Record:
    """What is told of a run, by the worker that is the first of those who are there; another one takes the folder over from it.

    Args:
        console, config: see `trackers.observed`. workers: this worker's connection to the others.
    """

    def __init__(self, console: Console, config: RunConfig, workers: Elastic) -> None:
        """Nothing is told yet."""
        self.console, self.config, self.workers = console, config, workers
        self.path: Path | None = None
        self.folder: RunFolder | None = None
        self._observer: Observer | None = None
        self._open = ExitStack()

    def begin(self, from_step: int) -> None:
        """Make the folder, or open it again."""
        self.folder = RunFolder(self.config, path=self.path, from_step=from_step)
        self.path = self.folder.path
        self._observer = self._open.enter_context(observed(self.console, self.folder, self.config))

    def progressed(self, progress: Progress) -> None:
        """Tell and record, if this worker is the first."""
        if self.workers.rank != 0:
            return
        if self._observer is None:
            self.begin(progress.step - 1)
        assert self._observer is not None
        self._observer.progressed(progress)

    def close(self) -> None:
        """Take the live line away; what is told later opens the folder again, which another worker may have gone on with meanwhile."""
        self._open.close()
        self._observer = None


class ElasticSaver(Saver):
    """Checkpoints of workers that are alike when one is written, at the end of a round: the first writes it for all of them.

    Only the errors of the others are not in it; who goes on from it, each of however many, starts with that of the first.
    """

    leads = False  # this worker is the one that writes

    def begin_in(self, folder: Path) -> None:
        """Where they go, as soon as that is known."""
        self.leads = False
        self.writer = Writer(folder, Solo(), self.writer.keep_last, self.keeping.report)

    def is_due(self, step: int) -> bool:
        """Whether a round ends here, in which a checkpoint was due."""
        every, now = self.optimizer.round_steps, self.every
        return now is not None and step % every == 0 and step // now > (step - every) // now

    def _save(self, place: Place) -> None:
        if self.optimizer.workers.rank != 0:
            return
        ruined = first_nonfinite((name, p.detach()) for name, p, _ in self.optimizer.named_members())
        if ruined is not None:
            self.keeping.report(f"no checkpoint of step {place.step}: '{ruined}' is not finite")
            return
        if not self.leads:
            self.leads, self.writer.written = True, complete(self.writer.folder)
        self.writer.write(snapshot(place, self.model, self.optimizer, sequences=self.sequences, for_all=True))


class ElasticLoop(Loop):
    """One worker's loop; a `Member` of its meetings."""

    workers: Elastic
    observer: Record
    saver: ElasticSaver
    begun = False  # all who are to begin have come
    taken_at_end = False  # this worker has just become a copy of one that has the synchronisation behind it

    # -- the run ---------------------------------------------------------------------------------------------------------

    def run(self, stop: StopPoint) -> Outcome | None:
        """Come together with the others, at the beginning or in the middle of their run; then all steps."""
        self.come()
        with signals_stop(stop, patient=False):
            return super().run(stop)

    def come(self) -> None:
        """Wait for all workers to begin with, or take over from those who are training.

        Raises:
            UsageError: another worker has other settings.
        """
        workers = self.workers
        workers.begin_at(self.place.step // self.optimizer.round_steps)
        workers.meet(patient=True)
        while not self.begun and workers.size < self.config.workers:
            time.sleep(PAUSE_SECONDS)
            workers.meet(patient=True)
        if self.begun:
            workers.synchronise_with_all(self.optimizer.synchronise)
            self.stepped()
            return
        workers.newcomer = False
        check_alike(workers.gather(self.settings()), self.config.parallel)
        self.optimizer.start()
        if workers.rank == 0:
            if self.observer.path is not None:
                clear(checkpoints(self.observer.path), self.place.step)
            self.observer.begin(self.place.step)
        self.observer.path = workers.gather(self.observer.path)[0]
        self.begun = True
        workers.commit()
        self.begin_to_save()

    def stepped(self) -> None:
        """After a step; what is told and saved is lost if a worker is lost meanwhile."""
        self.place.step = self.optimizer.steps_taken
        if self.taken_at_end:  # the others have told it already
            self.taken_at_end = False
            return
        with self.workers.tolerating():
            super().stepped()

    def finish(self) -> Outcome:
        """The final evaluation, once more with those who are left if a worker is lost in it."""
        while True:
            try:
                return super().finish()
            except WorkerError:
                pass
            self.workers.break_off()
            self.workers.meet()

    def leave(self) -> None:
        """Asked to stop: nothing is left behind, the others have it all."""
        self.saver.finish()

    # -- what is told and saved, and when ----------------------------------------------------------------------------------

    def is_told(self, step: int) -> bool:
        """Whether a round ends here, in which something was to be told."""
        return self._in_round(step, super().is_told)

    def is_evaluated(self, step: int) -> bool:
        """Whether a round ends here, in which an evaluation was due."""
        return self._in_round(step, super().is_evaluated)

    def _in_round(self, step: int, is_due: Callable[[int], bool]) -> bool:
        every = self.optimizer.round_steps
        return step % every == 0 and any(is_due(earlier) for earlier in range(step - every + 1, step + 1))

    def reached(self) -> Place:
        """For a checkpoint from which others go on: the stretch is at its end."""
        return self.closed()

    def begin_to_save(self) -> None:
        """As soon as it is known where."""
        assert self.observer.path is not None
        self.saver.begin_in(checkpoints(self.observer.path))

    # -- who is there ------------------------------------------------------------------------------------------------------

    def is_boundary(self) -> bool:
        """Whether the step just taken ends a round."""
        return self.optimizer.steps_taken % self.optimizer.round_steps == 0

    def closed(self) -> Place:
        """Where the run stands, the present stretch at its end; of the synchronisation after it, if that is due, nothing is done yet."""
        place, now = self.place, self.optimizer.steps_taken
        eras = place.eras
        if now > place.start:
            eras = (*eras, replace(self.era(), end=now, synced=now - 1 if self.workers.midway else None))
        seconds, moved = time.perf_counter() - self.began, dict(self.workers.moved)
        reached = replace(place, step=now, start=now, moved=moved, ahead=0, eras=eras, round=None, seconds=seconds)
        return replace(reached, loss=float(self.loss), gradient_norm=float(self.norm))

    def stand_at(self, place: Place) -> None:
        """Go on from a place, with the workers there are now."""
        super().stand_at(place)
        if self.workers.midway:
            self.measure.begin_again()
        if self.begun:
            report(f"{self.workers.size} workers go on after step {place.step}")

    def settings(self) -> dict[str, Any]:
        """What must be equal on all workers, as it is after it has travelled."""
        values: dict[str, Any] = json.loads(json.dumps(settings_and_text(self.prepared)))
        return values

    def state(self) -> Snapshot:
        """All that a newcomer needs to become a copy of this worker."""
        whole = snapshot(self.closed(), self.model, self.optimizer, sequences=self.sequences, for_all=True)
        path = None if self.observer.path is None else str(self.observer.path)
        more = {"begun": self.begun, "midway": self.workers.midway, "folder": path, "settings": self.settings()}
        return replace(whole, facts={**whole.facts, **more})

    def take(self, handed: Part) -> None:
        """Become a copy of the worker that handed this.

        Raises:
            UsageError: it trains with other settings.
        """
        facts = handed.facts
        check_alike([facts["settings"], self.settings()], self.config.parallel)
        place = restore([handed], self.model, self.optimizer)
        self.begun, self.workers.midway = facts["begun"], facts["midway"]
        self.stand_at(place)
        if self.begun:
            self.optimizer.skip_agreement()
            self.taken_at_end = not self.workers.midway
            self.observer.close()
            self.observer.path = Path(facts["folder"])
            self.begin_to_save()

    def hold(self) -> Callable[[], None]:
        """Keep weights, state and counters of this worker; returns what puts them back."""
        return held(self.optimizer)


def held(optimizer: DistributedOptimizer) -> Callable[[], None]:
    """Keep a copy of all that a synchronisation changes; returns what puts it back."""
    workers, report_before = optimizer.workers, replace(optimizer.report)
    moved = Counter(workers.moved)
    states = {p: dict(optimizer.state[p]) for _, p, _ in optimizer.named_members()}
    kept = [(t, t.detach().clone()) for p, state in states.items() for t in (p.detach(), *state.values())]

    def put_back() -> None:
        for tensor, copy in kept:
            tensor.copy_(copy)
        for p, state in states.items():
            optimizer.state[p] = state
        optimizer.report, workers.moved = report_before, moved

    return put_back
