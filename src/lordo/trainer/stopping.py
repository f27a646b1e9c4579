"""Stopping in good order: all workers after the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """A run was asked to stop, and has; the message says where it can go on.

    Attributes:
        number: of the signal.
    """

    def __init__(self, message: str, number: int) -> None:
        """See the class."""
        super().__init__(message)
        self.number = number


class StopPoint:
    """Where workers of one process agree on their last step: the latest that any of them has begun when the signal comes."""

    def __init__(self) -> None:
        """Nobody has begun, nobody was asked to stop."""
        self.number: int | None = None
        self.last_step: int | None = None
        self._begun = 0
        self._changed = threading.Condition(threading.RLock())  # a signal may come while its own thread holds it

    @property
    def step(self) -> int:
        """The latest step that any worker here has begun."""
        return self._begun

    def begin(self, step: int) -> bool:
        """Whether a worker may begin a step."""
        with self._changed:
            if self.last_step is not None and step > self.last_step:
                return False
            self._begun = max(self._begun, step)
            return True

    def request(self, number: int) -> None:
        """Ask all to stop, because of a signal."""
        with self._changed:
            self.number = number
            if self.last_step is None:
                self.last_step = self._begun


@contextmanager
def signals_stop(point: StopPoint, *, patient: bool) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM ask to stop after the present step.

    Args:
        point: whom they ask. patient: a second signal asks again, as torchrun passes on what the terminal has sent already; otherwise
            it interrupts at once.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if point.number is not None and not patient:
            raise KeyboardInterrupt
        point.request(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
