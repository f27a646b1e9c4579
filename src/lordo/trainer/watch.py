"""Workers that are processes keep an eye on each other, through the store by which they found each other.

A thread of each worker leaves a sign of life there twice a second: its step and what it is doing. So the others can tell who has been
killed, frozen or cut off, and what it was at, even where a collective only says that a connection was closed, or says nothing. The same
thread agrees with the others after which step to stop, so that training itself needs no exchange for it. A second thread looks at the
clock, since the first one may wait for ever for an answer of a store that cannot be reached any more.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from lordo.sync import Group
from lordo.trainer.config import RunConfig
from lordo.trainer.devices import Joined, process_name
from lordo.trainer.stopping import StopPoint
from lordo.trainer.terminal import report

BEAT_SECONDS = 0.5
# A worker that is silent for so long, unless the settings say otherwise.
SILENCE_SECONDS = 60.0
# Waiting in one exchange: so many times the longest time that has passed between two, and before that is known, so many seconds.
ROUNDS, FIRST_ROUND_SECONDS = 5.0, 600.0
# Who has not said within so long which step it is at is not asked any more when all are to stop.
AGREE_SECONDS = 5.0
# After a failed exchange: so long until a worker that was killed has been silent for longer than one that lives ever is.
BLAME_SECONDS = 4.0
# A thread that wakes so much later than it should was stopped with the whole process, and has missed what was said meanwhile.
LATE_SECONDS = 2.0


class SharedStopPoint(StopPoint):
    """Where the workers of several processes agree on their last step."""

    def __init__(self) -> None:
        """See StopPoint."""
        super().__init__()
        self.asked = False  # this worker's step is published: it must not begin another one before all have agreed

    def begin(self, step: int) -> bool:
        """Whether this worker may begin a step; waits, if need be, until the workers have agreed."""
        with self._changed:
            self._changed.wait_for(lambda: not self.asked or self.last_step is not None)
            return super().begin(step)

    def request(self, number: int) -> None:
        """Ask all to stop, because of a signal; the watch passes it on."""
        self.number = number

    def publish(self, number: int) -> int:
        """The step this worker is at; it will not begin another one before `agree`."""
        with self._changed:
            self.asked, self.number = True, number
            return self._begun

    def agree(self, last_step: int) -> None:
        """All workers stop after this step."""
        with self._changed:
            self.last_step = last_step
            self._changed.notify_all()


class Watch:
    """One worker's watch over the others.

    Args:
        store: a connection of its own to the common store. joined: the processes. config: `train.timeout_seconds` says how long another one
            may be silent or be waited for; None takes a minute of silence, and five times the longest round so far.
        last_words: called before this process is ended from here, to let a checkpoint be finished; says how to go on.
    """

    def __init__(self, store: Store, joined: Joined, config: RunConfig, last_words: Callable[[], str | None]) -> None:
        """Nobody is watched yet."""
        self.store, self.processes, self.workers, self.last_words = store, joined.processes, joined.workers, last_words
        self.timeout_seconds, self.parallel = config.train.timeout_seconds, config.parallel
        self.own_name = process_name(self.processes.rank, config.parallel)
        self.stop_point = SharedStopPoint()
        self.others = [rank for rank in range(self.processes.size) if rank != self.processes.rank]
        self._seen: dict[int, tuple[str, float]] = {}  # each other worker's last sign, and when it came
        self._reached = self._resumed = time.monotonic()
        self._published_at: float | None = None
        self._over = threading.Event()
        self._beats = 0
        self._beat()
        self._problem = "no answer"  # of the store, the last time it could not be reached
        self._talking = threading.Thread(target=self._talk, name="signs of life", daemon=True)
        self._talking.start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def close(self, failure: str | None = None) -> None:
        """Stop watching; the others are told that this worker has finished, or why it leaves."""
        self._over.set()
        self._talking.join(self.silence_limit)
        if self._talking.is_alive():
            return  # it waits for an answer that does not come
        try:
            self._beat(over=failure or "finished")
        except DistError:
            return  # the store is gone with the worker or launcher that held it

    # -- signs of life ---------------------------------------------------------------------------------------------------

    def _beat(self, *, over: str | None = None) -> None:
        self._beats += 1
        waits = self._waiting is not None
        sign = {"beat": self._beats, "step": self.stop_point.step, "phase": self.phase, "waits": waits, "over": over}
        self.store.set(f"sign/{self.processes.rank}", json.dumps(sign))

    @property
    def _groups(self) -> list[Group]:
        """All in whose calls this process may wait."""
        inside = (axis for axis in self.workers.inside.axes if isinstance(axis, Group))
        return [self.processes, self.workers, *inside]

    @property
    def _waiting(self) -> tuple[str, float] | None:
        """In which call this process is, and since when."""
        return next((group.waiting for group in self._groups if group.waiting is not None), None)

    @property
    def phase(self) -> str:
        """What this worker is doing: computing, in which exchange, …"""
        waiting = self._waiting
        return waiting[0] if waiting else self.workers.phase

    def _look(self) -> None:
        for rank in self.others:
            if not self.store.check([f"sign/{rank}"]):
                continue
            sign = self.store.get(f"sign/{rank}").decode()
            if rank not in self._seen or self._seen[rank][0] != sign:
                self._seen[rank] = sign, time.monotonic()

    def _talk(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                self._beat()
                self._look()
                self._agree()
                self._reached = time.monotonic()
            except DistError as error:
                self._problem = str(error).splitlines()[0]

    def _watch(self) -> None:
        woke = time.monotonic()
        while not self._over.wait(BEAT_SECONDS):
            self._forgive(late=time.monotonic() - woke - BEAT_SECONDS)
            woke = time.monotonic()
            trouble = self._trouble()
            if trouble is not None:
                self._end(trouble)

    # -- trouble ---------------------------------------------------------------------------------------------------------

    @property
    def silence_limit(self) -> float:
        """Seconds after which a silent worker is given up."""
        return self.timeout_seconds or SILENCE_SECONDS

    @property
    def wait_limit(self) -> float:
        """Seconds that one exchange may take."""
        if self.timeout_seconds is not None:
            return self.timeout_seconds
        gap = self.workers.longest_gap
        return FIRST_ROUND_SECONDS if gap is None else max(SILENCE_SECONDS, ROUNDS * gap)

    def _forgive(self, *, late: float) -> None:
        """After this process was stopped for a while: nobody was silent in that time."""
        if late > LATE_SECONDS:
            self._resumed = time.monotonic()
            self._reached += late
            self._seen = {rank: (sign, at + late) for rank, (sign, at) in self._seen.items()}

    def _trouble(self) -> str | None:
        """What is wrong with another worker, or with the way to them, if anything."""
        if time.monotonic() - self._reached > self.silence_limit:
            return f"{self.own_name} cannot reach the others any more: {self._problem}"
        silent = self._silent(longer_than=self.silence_limit)
        if silent:
            return silent
        waiting = self._waiting
        if waiting is None or time.monotonic() - max(waiting[1], self._resumed) < self.wait_limit:
            return None
        behind = [self._described(rank) for rank, sign in self._signs() if not sign["waits"] and sign["over"] is None]
        return f"{waiting[0]} has taken {time.monotonic() - waiting[1]:.0f} seconds; " + ("; ".join(behind) or "all wait in it")

    def _signs(self) -> list[tuple[int, dict[str, Any]]]:
        return [(rank, json.loads(sign)) for rank, (sign, _) in sorted(self._seen.items())]

    def _described(self, rank: int) -> str:
        sign = json.loads(self._seen[rank][0])
        return f"{self._name(rank)} is in step {sign['step']}, {sign['phase']}"

    def _name(self, rank: int) -> str:
        return process_name(rank, self.parallel)

    def _silent(self, *, longer_than: float) -> str | None:
        for rank, sign in self._signs():
            seconds = time.monotonic() - self._seen[rank][1]
            if sign["over"] is None and seconds > longer_than:
                was = f"in step {sign['step']}, {sign['phase']}"
                return f"{self._name(rank)} has not been heard of for {seconds:.0f} seconds (killed, frozen or cut off); it was {was}"
        return None

    def blame(self) -> str | None:
        """After an exchange failed: whom and what that was due to, as far as can be told within some seconds."""
        until = time.monotonic() + BLAME_SECONDS
        while time.monotonic() < until:
            for rank, sign in self._signs():
                if sign["over"] not in (None, "finished"):
                    return f"{self._name(rank)} failed: {sign['over']}"
            time.sleep(BEAT_SECONDS)
        return self._silent(longer_than=4 * BEAT_SECONDS)

    def _end(self, trouble: str) -> None:
        """End this process: its main thread may be in a collective that never returns."""
        hint = self.last_words()
        own = f"{self.own_name} was in step {self.stop_point.step}, {self.phase}, and gives up"
        report("; ".join([trouble, own, *([hint] if hint else [])]))
        os._exit(1)

    # -- stopping --------------------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """Let all stop after one step: the latest that any of them has begun."""
        point, rank = self.stop_point, self.processes.rank
        if point.last_step is not None:
            return
        if not point.asked:
            if point.number is not None:
                self.store.set("stop", str(int(point.number)))
            if not self.store.check(["stop"]):
                return
            self.store.set(f"stop/{rank}", str(point.publish(int(self.store.get("stop")))))
            self._published_at = time.monotonic()
        keys = [f"stop/{each}" for each in range(self.processes.size)]
        assert self._published_at is not None
        if self.store.check(keys):
            point.agree(max(int(value) for value in self.store.multi_get(keys)))
        elif time.monotonic() - self._published_at > AGREE_SECONDS:
            point.agree(int(self.store.get(f"stop/{rank}")))
