"""Writing checkpoints in the background, while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from lordo.sync import Comm
from lordo.trainer.checkpoint import Snapshot, parts_in, remove, steps, write

# Threads of this process that write, so that it can let them finish before it ends because of something else.
_writing: set[threading.Thread] = set()
SETTLE_SECONDS = 20.0


def settle_writers() -> None:
    """Wait, for a while, until every checkpoint that this process has begun to write is on disk."""
    until = time.monotonic() + SETTLE_SECONDS
    for thread in list(_writing):
        thread.join(max(0.0, until - time.monotonic()))


class Writer:
    """One worker's writer: at most one part is being written at a time.

    Args:
        folder: of the checkpoints. workers: this worker's connection to the others. keep_last: complete checkpoints that stay.
        report: told in a sentence what could not be written.
    """

    def __init__(self, folder: Path, workers: Comm, keep_last: int, report: Callable[[str], None]) -> None:
        """Nothing is written yet."""
        self.folder, self.workers, self.keep_last, self.report = folder, workers, keep_last, report
        self.written: list[int] = []  # steps whose part of this worker is on disk
        self.complete: int | None = None  # the newest step of which all workers' parts are
        self._thread: threading.Thread | None = None

    def write(self, snapshot: Snapshot) -> None:
        """Start to write, after the part before is done, and remove what is no longer needed. All workers at the same step.

        Of several copies of a worker's weights one is written.
        """
        self.settle()
        if not self.workers.inside.in_first_copy:
            self.written.append(snapshot.step)
            return
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name=f"checkpoint {snapshot.step}", daemon=True)
        _writing.add(self._thread)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()
            _writing.discard(self._thread)

    def settle(self) -> None:
        """Wait, compare with the other workers what is on disk, and keep the newest complete checkpoints. All workers together."""
        self.wait()
        notes = self.workers.gather_all(self.written)
        complete = sorted(set.intersection(*map(set, notes)))
        self.complete = complete[-1] if complete else None
        for step in complete[: -self.keep_last]:
            self.remove(step)
        for step in self.written[:]:  # somebody else's part could not be written
            if self.complete is not None and step < self.complete and step not in complete:
                self.remove(step)

    def remove(self, step: int) -> None:
        """Remove this device's part of a checkpoint; of parts that more workers or devices left, those that fall to it."""
        inside = self.workers.inside
        for part, (worker, shard) in parts_in(self.folder, step).items():
            if inside.in_first_copy and worker % self.workers.size == self.workers.rank and shard % inside.size == inside.rank:
                remove(self.folder, step, part)
        self.written.remove(step)

    def found(self, step: int) -> None:
        """After a resume: the checkpoints up to this step are there already."""
        self.written = [each for each in steps(self.folder) if each <= step]
        self.complete = step

    def _write(self, snapshot: Snapshot) -> None:
        try:
            write(self.folder, snapshot)
            self.written.append(snapshot.step)
        except OSError as error:
            last = f"the one of step {self.complete} stays" if self.complete is not None else "there is none yet"
            self.report(
                f"the checkpoint of step {snapshot.step} could not be written by worker {snapshot.share.worker} ({error.strerror}: "
                f"{error.filename or self.folder}); training goes on, {last}"
            )
