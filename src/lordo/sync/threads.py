"""Workers that are threads of one process, taking turns.

A turn passes on when a worker has to wait for the others. With one worker at a time (the default) a simulation repeats to the bit,
random numbers included: each worker has its own state of torch's global generator. With as many at once as there are cores, and one
torch thread each, small models train faster; results still repeat to the bit as long as nothing draws from the global generator.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from lordo.sync.comm import Comm, WorkerError

Result = TypeVar("Result")


class _Stopped(SystemExit):
    """Unwinds a worker's thread after another one failed; never seen by the caller (threads end silently on SystemExit)."""


class _Room:
    """Where the workers of one simulation meet. One condition variable guards everything in it."""

    def __init__(self, num_workers: int, at_once: int) -> None:
        self.size, self.at_once = num_workers, at_once
        self.changed = threading.Condition()
        self.running = set(range(min(at_once, num_workers)))
        self.posted: dict[int, tuple[str, Any]] = {}
        self.left: set[int] = set()
        self.meetings = 0
        self.outcome: Any = None
        self.failure: BaseException | None = None
        self.failed_rank: int | None = None
        self.over = threading.Event()  # all have ended, or one has failed
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def fail(self, error: BaseException, rank: int | None = None) -> None:
        """End the simulation with an error, of a worker or (None) from outside."""
        with self.changed:
            if self.failure is None:
                self.failure, self.failed_rank = error, rank
            self.changed.notify_all()
            self.over.set()

    def wait_for_turn(self, rank: int) -> None:
        """Block until it is this worker's turn (the lock is held)."""
        self.changed.wait_for(lambda: rank in self.running or self.failure is not None)
        if self.failure is not None:
            raise _Stopped

    def pass_turn(self, rank: int) -> None:
        """Let the next worker on that has something to do (the lock is held)."""
        self.running.discard(rank)
        for worker in ((rank + i) % self.size for i in range(1, self.size + 1)):
            if len(self.running) < self.at_once and worker not in self.posted and worker not in self.left:
                self.running.add(worker)
        self.changed.notify_all()

    def meet(self, rank: int, call: str, contribution: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Wait for all workers; the last one to come combines what they brought, and all get the outcome."""
        with self.changed:
            meeting = self.meetings
            self.posted[rank] = (call, contribution)
            self._check(rank)
            if len(self.posted) == self.size:
                start = time.perf_counter()
                self.outcome = combine([self.posted[w][1] for w in range(self.size)])
                self.seconds["communication"] += time.perf_counter() - start
                self.posted.clear()
                self.meetings += 1
            assert self.meetings > meeting or rank in self.posted
            saved = torch.get_rng_state() if self.at_once == 1 else None
            self.pass_turn(rank)
            self.wait_for_turn(rank)  # nobody who waits in a meeting gets a turn before it is over
            if saved is not None:
                torch.set_rng_state(saved)
            return self.outcome

    def _check(self, rank: int) -> None:
        """Refuse a meeting that cannot succeed: another worker has ended, or makes another call."""
        call = self.posted[rank][0]
        if self.left:
            raise WorkerError(f"worker {rank} waits in {call}, but worker {min(self.left)} has already ended")
        for other, (other_call, _) in self.posted.items():
            if other_call != call:
                raise WorkerError(f"workers do not agree on what comes next: worker {rank} calls {call}, worker {other} {other_call}")


class _Thread(Comm):
    """One worker of a simulation. Its `seconds` are shared by all, since they share the process's time."""

    def __init__(self, rank: int, room: _Room) -> None:
        super().__init__(rank, room.size)
        self._room = room
        self.seconds = room.seconds
        self.at_once = min(room.at_once, room.size)

    def transfer(self) -> AbstractContextManager[None]:
        """Nothing to time: communication is counted where the workers meet, without the waiting for a turn."""
        return nullcontext()

    def add_seconds(self, tag: str, seconds: float) -> None:
        """Add to the seconds of all workers, some of which may do so at the same time."""
        with self._room.changed:
            self.seconds[tag] += seconds

    def sum_(self, tensor: Tensor) -> None:
        """Sum in order of rank, so that the result repeats to the bit."""

        def combine(tensors: list[Tensor]) -> None:
            total = tensors[0]
            for t in tensors[1:]:
                total.add_(t)
            for t in tensors[1:]:
                t.copy_(total)

        self._room.meet(self.rank, f"sum of {_kind(tensor)}", tensor, combine)

    def sum_at_(self, tensor: Tensor, *, target: int) -> None:
        """Sum in order of rank, into the target's tensor."""

        def combine(tensors: list[Tensor]) -> None:
            total = tensors[0].clone()
            for t in tensors[1:]:
                total.add_(t)
            tensors[target].copy_(total)

        self._room.meet(self.rank, f"sum of {_kind(tensor)} for {target}", tensor, combine)

    def broadcast_(self, tensor: Tensor, *, source: int) -> None:
        """Copy from the source."""

        def combine(tensors: list[Tensor]) -> None:
            for t in tensors:
                if t is not tensors[source]:
                    t.copy_(tensors[source])

        self._room.meet(self.rank, f"broadcast of {_kind(tensor)} from {source}", tensor, combine)

    def exchange(self, messages: Sequence[Tensor], sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Hand the messages over at once."""
        sent = self._room.meet(self.rank, "exchange", list(messages), list)
        received = [from_one[self.rank] for from_one in sent]
        assert [message.numel() for message in received] == list(sizes)
        return lambda: received

    def gather(self, note: Any) -> list[Any]:
        """Notes in order of rank."""
        return list(self._room.meet(self.rank, "gather", note, list))


def _kind(tensor: Tensor) -> str:
    return f"{tensor.numel()} numbers of {tensor.dtype}"


def simulate(fn: Callable[[Comm], Result], num_workers: int = 4, *, at_once: int = 1) -> list[Result]:
    """Run `fn(workers)` once for each of several workers, in threads of this process.

    The workers take turns, in order of rank, switching where one waits for the others; a simulation repeats to the bit. Each worker
    starts from the caller's state of torch's global generator and has its own from then on; the caller's is left as it was.

    Args:
        fn: what a worker does; its argument goes to `LoRDO(..., workers=workers)`.
        num_workers: M.
        at_once: how many workers compute at the same time. Above 1 they share the global generator, so that a model with dropout does
            not repeat to the bit; give each `torch.set_num_threads(1)` then, or their threads get into each other's way.

    Returns:
        What each worker returned, in order of rank.

    Raises:
        ValueError: num_workers or at_once below 1.
        Exception: the first error of any worker; the others are stopped.
        KeyboardInterrupt: after all workers are stopped.
    """
    for name, number in (("num_workers", num_workers), ("at_once", at_once)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a whole number of at least 1; got {number!r}")
    room = _Room(num_workers, at_once)
    results: dict[int, Result] = {}
    start = torch.get_rng_state()
    threads = [
        threading.Thread(target=_work, args=(fn, rank, room, results, start), name=f"worker {rank}", daemon=True)
        for rank in range(num_workers)
    ]
    try:
        for thread in threads:
            thread.start()
        # Not by Thread.join: when interrupted it marks a thread that still runs as ended (CPython issue 90882), and the interpreter
        # aborts at exit.
        while not room.over.wait(timeout=0.05):
            pass
    except BaseException as error:
        room.fail(error)
    try:
        _stop(threads, room)
    finally:
        torch.set_rng_state(start)
    if room.failure is not None:
        raise room.failure
    return [results[rank] for rank in range(num_workers)]


def _work(fn: Callable[[Comm], Result], rank: int, room: _Room, results: dict[int, Result], rng_state: Tensor) -> None:
    """The life of one worker's thread."""
    try:
        with room.changed:
            room.wait_for_turn(rank)
            if room.at_once == 1:
                torch.set_rng_state(rng_state)
        results[rank] = fn(_Thread(rank, room))
        with room.changed:
            room.left.add(rank)
            if room.posted:
                waiting = min(room.posted)
                raise WorkerError(f"worker {waiting} waits in {room.posted[waiting][0]}, but worker {rank} has already ended")
            room.pass_turn(rank)
            if len(room.left) == room.size:
                room.over.set()
    except _Stopped:
        pass
    except BaseException as error:
        room.fail(error, rank)


def _stop(threads: list[threading.Thread], room: _Room) -> None:
    """After a failure, interrupt the workers that are computing (the others wake by themselves); then wait for all of them."""
    if room.failure is not None:
        for rank in room.running - {room.failed_rank}:
            if (ident := threads[rank].ident) is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
    for thread in threads:
        if thread.ident is not None:
            thread.join()
