"""Workers that are processes: one is killed, frozen or fails, all are asked to stop: in bounded time, with a sentence and a checkpoint."""

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import stat
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import lordo.cli
import lordo.trainer.loop
from lordo.sync.inside import Inside
from lordo.trainer.checkpoint import Share, checkpoints, complete, parts
from lordo.trainer.devices import Joined
from lordo.trainer.recipe import load
from lordo.trainer.watch import Watch
from test_checkpoint import told
from test_train import lines, micro_recipe, processes, survivors, torchrun, wait_until

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="starts its workers by fork, since importing takes them seconds"),
]

OPTIONS = ("--train.checkpoint_every", "5", "--train.schedule", "constant", "--train.eval_every", "none")


@dataclass
class Worker:
    """One process, and what it says."""

    pid: int
    said: Path
    code: int | None = None

    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    @property
    def errors(self) -> str:
        return self.said.read_text()


class Team:
    """Processes that train together, as a launcher would start them."""

    def __init__(
        self,
        recipe: Path,
        size: int,
        *options: str,
        within: Callable[[int], object] = lambda rank: None,
        workers: int | None = None,
        resume: bool = False,
    ):
        """`size` processes; as many workers, unless `workers` says that each is several devices."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.folder = recipe.parent / "runs" / "micro"
        self.workers = []
        for rank in range(size):
            said = recipe.parent / f"said{rank}-{time.monotonic_ns()}"
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            pid = os.fork()
            if pid == 0:
                try:
                    file = os.open(said, os.O_CREAT | os.O_WRONLY)
                    os.dup2(file, 1)
                    os.dup2(file, 2)
                    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)  # not pytest's
                    os.environ.update({key: str(value) for key, value in environment.items()})
                    torch.set_num_threads(1)
                    within(rank)
                    going_on = ("--resume",) if resume else OPTIONS
                    code = lordo.cli.main(["train", str(recipe), "--workers", str(workers or size), *going_on, *options])
                except BaseException:
                    traceback.print_exc()
                    code = 99
                os._exit(code)
            self.workers.append(Worker(pid, said))

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self.workers:
            if not worker.ended():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)

    def until_checkpoint(self, step: int) -> None:
        """Wait until the checkpoint of a step, or a later one, is complete."""
        reached = wait_until(lambda: max(complete(checkpoints(self.folder)), default=0) >= step, seconds=60)
        assert reached, [worker.errors for worker in self.workers]

    def codes(self, *ranks: int, seconds: float = 90) -> list[int | None]:
        """Exit codes of some workers (or of all), that must end within so long."""
        waited = [self.workers[rank] for rank in ranks or range(len(self.workers))]
        assert wait_until(lambda: all(worker.ended() for worker in waited), seconds), [worker.errors for worker in waited]
        return [worker.code for worker in waited]


ENDLESS = ("--train.steps", "1000000")


def loadable(folder: Path, size: int) -> int:
    """The newest complete checkpoint, every part of which can be read; its step."""
    step = max(complete(checkpoints(folder)))
    for rank in range(size):
        parts(checkpoints(folder), step, Share(rank, size))
    return step


def test_a_killed_worker_is_named_by_the_others(tmp_path):
    recipe = micro_recipe(tmp_path)
    with Team(recipe, 3, *ENDLESS) as team:
        team.until_checkpoint(5)
        os.kill(team.workers[2].pid, signal.SIGKILL)
        assert team.codes(0, 1) == [1, 1]
        for worker in team.workers[:2]:
            assert "Traceback" not in worker.errors
        told = "".join(worker.errors for worker in team.workers[:2])
        assert "worker 2 has not been heard of for" in told
        assert "it was in step" in told
        assert f"go on with: lordo train {team.folder} --resume" in told
        step = loadable(team.folder, 3)
    with Team(recipe, 3, "--train.steps", str(step + 3), "--resume") as team:
        assert team.codes() == [0, 0, 0]
        assert [line["step"] for line in lines(team.folder)] == list(range(1, step + 4))


def names_the_silent(worker: int, told: str) -> bool:
    """Its silence and the exchange that waits for it reach the same limit at about the same time: either is told, with step and phase.

    Who was heard of last in the very exchange that fails is not told from those who wait for it.
    """
    silent = rf"worker {worker} has not been heard of for \d+ seconds \(killed, frozen or cut off\); it was in step \d+, \w+"
    waited_for = rf"has taken \d+ seconds; (worker {worker} is|all wait in it; worker \d+ was) in step \d+, \w+"
    return re.search(f"{silent}|{waited_for}", told) is not None


def test_a_frozen_worker_is_given_up(tmp_path):
    """SIGSTOP: nothing closes a connection, and a collective would wait for hours."""
    with Team(micro_recipe(tmp_path), 3, *ENDLESS, "--train.timeout_seconds", "4") as team:
        team.until_checkpoint(5)
        os.kill(team.workers[1].pid, signal.SIGSTOP)
        began = time.monotonic()
        assert team.codes(0, 2) == [1, 1]
        assert time.monotonic() - began < 120  # without a watch, for hours
        told = team.workers[0].errors + team.workers[2].errors
        assert names_the_silent(1, told), told
        loadable(team.folder, 3)


def until_saved(loop) -> None:
    """Wait until the checkpoint of step 5 is complete, however slow the disk is."""
    assert wait_until(lambda: 5 in complete(loop.saver.keeping.folder), seconds=60)


def stuck(rank: int) -> None:
    """Worker 1 computes for ever at its seventh step: it lives, and is waited for."""
    step = lordo.trainer.loop.Loop.step

    def slow(self, number):
        if rank == 1 and number == 7:
            until_saved(self)
            time.sleep(1000)
        return step(self, number)

    lordo.trainer.loop.Loop.step = slow


def test_a_worker_that_is_stuck_is_named_with_its_step_and_phase(tmp_path):
    with Team(micro_recipe(tmp_path), 2, *ENDLESS, "--train.timeout_seconds", "4", within=stuck) as team:
        assert team.codes(0) == [1]
        assert "has taken 4 seconds; worker 1 is in step 7, compute" in team.workers[0].errors
        assert loadable(team.folder, 2) == 5


def pass_nothing() -> None:
    """Nothing arrives at this process any more, on none of its connections, and none is closed: the kernel drops every packet."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # a packet filter of one instruction: return 0 bytes of it
    given = struct.pack("@HP", 1, ctypes.addressof(program))
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    connection.setsockopt(socket.SOL_SOCKET, 26, given)  # SO_ATTACH_FILTER


def cut_off(rank: int) -> None:
    """Worker 1's network is gone from its seventh step on."""
    step = lordo.trainer.loop.Loop.step

    def cut(self, number):
        if rank == 1 and number == 7:
            until_saved(self)
            pass_nothing()
        return step(self, number)

    lordo.trainer.loop.Loop.step = cut


@pytest.mark.skipif(sys.platform != "linux", reason="cuts a process off by a packet filter of Linux")
def test_a_worker_that_is_cut_off_is_given_up_and_ends_too(tmp_path):
    with Team(micro_recipe(tmp_path), 3, *ENDLESS, "--train.timeout_seconds", "4", within=cut_off) as team:
        assert team.codes(0, 2) == [1, 1]
        told = team.workers[0].errors + team.workers[2].errors
        assert names_the_silent(1, told), told
        assert team.codes(1) == [1]
        # to the one that is cut off, the others are silent, and it cannot reach them: both at about the same time
        assert re.search(r"worker 1 cannot reach the others any more|worker \d has not been heard of for", team.workers[1].errors)
        assert loadable(team.folder, 3) == 5


def test_a_process_that_was_stopped_for_a_while_does_not_blame_the_others_for_it(tmp_path):
    """A laptop that sleeps: all are stopped at once, and nobody was silent in that time."""
    workers = SimpleNamespace(rank=0, size=2, waiting=None, phase="compute", longest_gap=None, inside=Inside())
    watch = Watch(
        dist.HashStore(), Joined(workers, workers, None), load(micro_recipe(tmp_path), {"train.timeout_seconds": 4.0}), lambda: None
    )
    watch.close()
    long_ago, sign = time.monotonic() - 100, json.dumps({"step": 3, "phase": "compute", "waits": False, "over": None})
    watch._reached, watch._seen = long_ago, {1: (sign, long_ago)}
    assert "worker 0 cannot reach the others any more" in watch._trouble()
    watch._reached = time.monotonic()
    assert "worker 1 has not been heard of for 100 seconds" in watch._trouble()
    watch._reached, workers.waiting = long_ago, ("a sum", long_ago)
    watch._forgive(late=99.9)
    assert watch._trouble() is None


def failing(rank: int) -> None:
    """Worker 1 fails by itself at its seventh step."""
    step = lordo.trainer.loop.Loop.step

    def fails(self, number):
        if rank == 1 and number == 7:
            until_saved(self)
            raise FloatingPointError("this machine is on fire")
        return step(self, number)

    lordo.trainer.loop.Loop.step = fails


def test_the_reason_of_a_worker_that_fails_is_told_by_the_others_too(tmp_path):
    with Team(micro_recipe(tmp_path), 2, *ENDLESS, within=failing) as team:
        assert team.codes() == [1, 1]
        assert "lordo: this machine is on fire; the last checkpoint is that of step 5" in team.workers[1].errors
        assert "worker 1 failed: this machine is on fire" in team.workers[0].errors


@pytest.mark.parametrize(("number", "whom"), [(signal.SIGTERM, (1,)), (signal.SIGINT, (0, 1, 2))])
def test_asked_to_stop_all_finish_the_same_step_and_go_on_to_the_bit(number, whom, tmp_path):
    """One signal to one worker is enough; and several to all of them, as torchrun and a terminal send them, are no more than one."""
    recipe = micro_recipe(tmp_path)
    with Team(recipe, 3, *ENDLESS) as team:
        team.until_checkpoint(5)
        for rank in whom:
            os.kill(team.workers[rank].pid, number)
            os.kill(team.workers[rank].pid, number)
        assert team.codes() == [128 + number] * 3
        step = loadable(team.folder, 3)
        assert lines(team.folder)[-1]["step"] == step
        assert f"lordo: interrupted by {number.name} after step {step}; go on with: lordo train" in team.workers[0].errors
    last = str(step + 3)
    with Team(recipe, 3, "--train.steps", last, "--resume") as team:
        assert team.codes() == [0, 0, 0]
    with Team(recipe, 3, "--train.steps", last, "--train.checkpoint_every", "none") as team:  # the same without a break
        assert team.codes() == [0, 0, 0]
    assert told(tmp_path / "runs" / "micro") == told(tmp_path / "runs" / "micro-2")


def test_from_one_process_to_several_and_back(tmp_path):
    """A checkpoint does not tell the one from the other; the order of a sum may differ in its last bit."""
    recipe = micro_recipe(tmp_path)

    def alone(steps: int, *options: str) -> None:
        assert lordo.cli.main(["train", str(recipe), "--workers", "2", *OPTIONS, "--train.steps", str(steps), *options]) == 0

    alone(5)
    with Team(recipe, 2, "--train.steps", "10", "--resume") as team:
        assert team.codes() == [0, 0]
    alone(15, "--resume")
    alone(15, "--name", "whole")
    for line, expected in zip(lines(tmp_path / "runs/micro"), lines(tmp_path / "runs/whole"), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["tokens"] == expected["tokens"]
    sent = [lines(tmp_path / "runs" / name)[-1]["bytes_sent"] for name in ("micro", "whole")]
    assert sent[0] == sent[1]


FALLS = """
import os, signal, time
import lordo.cli, lordo.trainer.loop
from lordo.trainer.checkpoint import complete

step = lordo.trainer.loop.Loop.step

def falls(loop, number):
    if number == 12 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        while max(complete(loop.saver.keeping.folder), default=0) < 5:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return step(loop, number)

lordo.trainer.loop.Loop.step = falls
lordo.cli.entry()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")
def test_torchrun_brings_a_killed_worker_back_and_the_run_goes_on_by_itself(tmp_path):
    recipe, script = micro_recipe(tmp_path), tmp_path / "falls.py"
    script.write_text(FALLS)
    mark = f"restart{os.getpid()}"
    command = [*torchrun(2)[:-2], "--max-restarts", "1", str(script), "train", str(recipe), "--workers", "2", *OPTIONS]
    run = processes(*command, "--train.steps", "20", "--train.log_every", "10", mark=mark)
    try:
        printed, errors = run.communicate(timeout=280)
    finally:
        for pid in survivors(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert run.returncode == 0, errors
    assert "going on in" in printed
    assert os.listdir(tmp_path / "runs") == ["micro"]
    assert [line["step"] for line in lines(tmp_path / "runs" / "micro")] == [1, 10, 20]
