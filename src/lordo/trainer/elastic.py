"""Workers that come and go: a Comm on the Manager of torchft, whose members may change at every synchronisation and at no other time.

Each synchronisation begins with a meeting: a lighthouse tells who is alive, those are joined in a new group if they are not the same as
before, and who has just come is handed all that one of the others has. What follows is undone and done again, with those who are left,
if somebody is lost in the middle of it. It counts when everybody has said that it is through.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

os.environ.setdefault("RUST_LOG", "error")  # torchft's own, which would fill the terminal; read when it is imported

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from lordo.sync import Group, WorkerError
from lordo.sync.comm import Comm
from lordo.trainer.checkpoint import Part, Snapshot
from lordo.trainer.handover import Handover
from lordo.trainer.resume import Place
from lordo.trainer.settings import UsageError
from lordo.trainer.terminal import report

# Waiting for the others in a meeting, and in one exchange, unless the settings say otherwise.
MEETING_SECONDS, EXCHANGE_SECONDS = 600.0, 300.0
# Meetings in a row that may fail, and tries of one synchronisation.
TRIES = 5


class Member(Protocol):
    """What a meeting needs of the worker that comes to it."""

    def state(self) -> Snapshot:
        """All that a newcomer needs."""

    def take(self, handed: Part) -> None:
        """Become a copy of the worker that handed this."""

    def closed(self) -> Place:
        """Where the run stands, the stretch with the workers there have been so far at its end."""

    def stand_at(self, place: Place) -> None:
        """Go on from there with the workers there are now."""

    def hold(self) -> Callable[[], None]:
        """Keep what a synchronisation changes; returns what puts it back."""

    def is_boundary(self) -> bool:
        """Whether the step just taken ends a round."""


class _Gloo(ProcessGroupGloo):  # type: ignore[misc]
    """torchft's group, which notes this worker's number and how many there are when it is made anew."""

    made: tuple[int, int] | None = None

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *rest: Any) -> None:
        """Join those who are there now."""
        super().configure(store_addr, replica_id, rank, world_size, *rest)
        self.made = rank, world_size


class Elastic(Group):
    """One of several workers that come and go.

    Args:
        lighthouse: its address, such as "http://10.0.0.1:29510".
        timeout_seconds: how long an exchange may take, and the others may be waited for; None: five and ten minutes.

    Attributes:
        member: what is trained; to be set before the first meeting.
        midway: whether the others are in the middle of a synchronisation when somebody takes over a copy.

    Raises:
        UsageError: the lighthouse cannot be reached.
    """

    member: Member
    midway = False

    def __init__(self, lighthouse: str, *, timeout_seconds: float | None) -> None:
        """Nobody has been met yet."""
        Comm.__init__(self, 0, 1)
        logging.getLogger("torchft").setLevel(logging.CRITICAL)  # what goes wrong is told from here, in a sentence
        self.lighthouse = lighthouse
        self._handed: Part | None = None
        self._pg = _Gloo(timeout=timedelta(seconds=timeout_seconds or EXCHANGE_SECONDS))
        host = own_address(lighthouse)
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=self._pg,
            load_state_dict=self._receive,
            state_dict=lambda: self.member.state(),
            min_replica_size=1,
            use_async_quorum=False,
            timeout=timedelta(seconds=timeout_seconds or EXCHANGE_SECONDS),
            quorum_timeout=timedelta(seconds=timeout_seconds or MEETING_SECONDS),
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"{time.time_ns():020d}-worker",  # they are numbered in this order: who came first stays the first
            hostname=host,
            init_sync=False,
            checkpoint_transport=Handover(self._pg),
        )

    @property
    def _group(self) -> dist.ProcessGroup:
        if self._pg._pg is None:
            raise WorkerError(f"worker {self.rank} has left the group")
        group: dist.ProcessGroup = self._pg.parent
        return group

    def close(self) -> None:
        """Leave; the others go on."""
        self._pg.shutdown()
        self._manager.shutdown(wait=False)

    # -- meetings --------------------------------------------------------------------------------------------------------

    def begin_at(self, num_synchronisations: int) -> None:
        """How many synchronisations this worker has behind it: who has fewer than another takes over from that one."""
        self._manager.load_state_dict({"step": num_synchronisations, "batches_committed": 0})

    def commit(self) -> None:
        """Count a synchronisation that all are through with."""
        self._manager.should_commit()

    def meet(self, *, patient: bool = False) -> None:
        """Come together with all who are there, waiting for those who are on their way.

        Args:
            patient: wait for as long as it takes: of a run in progress, nobody knows how long its rounds are.

        Raises:
            WorkerError: the lighthouse is gone, the others do not come, or no group comes about.
        """
        for _ in range(TRIES):
            self._come(patient)
            problem = self._manager.errored()
            if problem is None:
                break
            self.break_off()
        else:
            raise WorkerError(f"worker {self.rank}: no group came about in {TRIES} meetings: {problem.original_exception}")
        handed, self._handed = self._handed, None
        made, self._pg.made = self._pg.made, None
        closed = self.member.closed()
        self.rank, self.size = made or (self.rank, self.size)
        if handed is not None:
            self.newcomer = True
            self.member.take(handed)
        elif made is not None:
            self.member.stand_at(closed)

    def _come(self, patient: bool) -> None:
        while True:
            try:
                self._manager.start_quorum()
                return
            except (RuntimeError, TimeoutError) as error:
                told = re.search(r'message: "([^"]*)"', str(error))
                reason = told[1] if told else str(error).splitlines()[0]
                if not patient or "timeout" not in reason.lower():
                    raise WorkerError(f"worker {self.rank}: the meeting at the lighthouse {self.lighthouse} failed: {reason}") from error
            own_address(self.lighthouse)  # it is still there
            report(f"still waiting at the lighthouse {self.lighthouse} for the others to come to a synchronisation")

    def _receive(self, handed: Part) -> None:
        self._handed = handed

    def break_off(self) -> None:
        """Leave the group, so that nobody waits for this worker in it; the next meeting makes another one."""
        self._manager.report_error(WorkerError("another worker was lost"))
        self._pg.shutdown()
        gc.collect()  # of a failed exchange, frames of the stack may still hold the group, and with it the connections open
        self._manager.should_commit()

    # -- synchronising ---------------------------------------------------------------------------------------------------

    def attempt(self, synchronise: Callable[[], None]) -> None:
        """At the end of a round: meet, and synchronise with those who are there until it succeeds. Within a round nothing is due."""
        if self.member.is_boundary():
            self.midway = True
            self.meet()
            self.synchronise_with_all(synchronise)

    def synchronise_with_all(self, synchronise: Callable[[], None]) -> None:
        """After a meeting: synchronise, again from the same state with those who are left if somebody is lost in it."""
        for _ in range(TRIES):
            if not self.midway:  # taken over from somebody who has it behind him
                self.newcomer = False
                return
            put_back = self.member.hold()
            problem = None
            try:
                synchronise()
                self.gather(None)  # all are through
            except WorkerError as error:
                problem = str(error)
            if problem is None:
                self.commit()
                self.midway = self.newcomer = False
                return
            put_back()
            del put_back
            report(f"{problem.splitlines()[0]}; once more with those who are left")
            self.break_off()
            self.meet()
        raise WorkerError(f"worker {self.rank}: a synchronisation failed {TRIES} times")

    @contextmanager
    def tolerating(self) -> Iterator[None]:
        """Inside, the loss of another worker costs what was to be told, and nothing else."""
        problem = None
        try:
            yield
        except WorkerError as error:
            problem = str(error)
        if problem is not None:
            report(f"{problem.splitlines()[0]}; the others are met at the next synchronisation")
            self.break_off()


def own_address(lighthouse: str) -> str:
    """The address under which this machine is seen from the lighthouse.

    Raises:
        UsageError: it cannot be reached.
    """
    parts = urlsplit(lighthouse)
    try:
        if parts.scheme not in ("http", "https") or parts.hostname is None or parts.port is None:
            raise ValueError("an address has the form http://host:port")
        with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
            address: str = connection.getsockname()[0]
            return address
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the lighthouse {lighthouse} cannot be reached ({error}): start one with `torchft_lighthouse --min_replicas 1 --bind "
            "[::]:29510`, and give --elastic its address"
        ) from error
