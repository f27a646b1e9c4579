"""Workers that come and go, over real processes and a real lighthouse: lost, frozen, back again; and what is refused."""

import os
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchft")

import lordo.cli
from lordo.sync.rules import PseudoGradient
from lordo.trainer.checkpoint import checkpoints, complete
from lordo.trainer.elastic_launch import check_elastic
from lordo.trainer.elastic_loop import ElasticLoop
from lordo.trainer.mix import Mix
from lordo.trainer.prepared import outline
from test_checkpoint import settings_for
from test_train import lines, micro_recipe, summary, train, wait_until

from torchft.coordination import LighthouseServer  # isort: skip  (after elastic, which keeps it quiet)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="starts its workers by fork, since importing takes them seconds")

K, WORKERS = 4, 3
OPTIONS = ("--train.schedule", "constant", "--train.eval_every", "none", "--workers", str(WORKERS))


class Member:
    """One process: a worker that can be killed and frozen, or the lighthouse."""

    def __init__(self, work, said: Path):
        self.said, self.code = said, None
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                file = os.open(said, os.O_CREAT | os.O_WRONLY)
                os.dup2(file, 1)
                os.dup2(file, 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)  # not pytest's
                torch.set_num_threads(1)
                code = work()
            except BaseException:
                traceback.print_exc()
            os._exit(code)

    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def end(self) -> None:
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class Team:
    """A lighthouse, and workers that each write down which blocks they read and what weights they end with."""

    def __init__(self, recipe: Path, *options: str, silent_seconds: int = 4):
        self.recipe, self.options, self.members = recipe, options, []
        self.folder = recipe.parent / "runs" / "micro"
        address = recipe.parent / f"address{time.monotonic_ns()}"

        def shine() -> int:
            limits = {"join_timeout_ms": 60_000, "quorum_tick_ms": 20, "heartbeat_timeout_ms": 1000 * silent_seconds}
            server = LighthouseServer(bind="[::]:0", min_replicas=1, **limits)
            (recipe.parent / "beside").write_text(f"http://127.0.0.1:{server.address().rpartition(':')[2]}")
            (recipe.parent / "beside").rename(address)
            while True:
                time.sleep(60)

        self.lighthouse = Member(shine, recipe.parent / "lighthouse")
        assert wait_until(address.exists, seconds=60)
        self.address = address.read_text()

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *exception: object) -> None:
        for member in (*self.members, self.lighthouse):
            member.end()

    def start(self, name: str, within=lambda loop, step: None, *options: str) -> Member:
        """Start one worker; `within` is called before each of its steps."""

        def work() -> int:
            step, batch, finish = ElasticLoop.step, Mix.batch, ElasticLoop.finish

            def watched(loop, number):
                within(loop, number)
                return step(loop, number)

            def noted(mix, position, size):
                rows = [mix.shards[0]._row(used) for used in range(position, position + size)]
                with (self.recipe.parent / f"{name}.rows").open("a") as file:
                    print(*rows, file=file)
                return batch(mix, position, size)

            def kept(loop):
                outcome = finish(loop)
                state = {key: t for _, p, _ in loop.optimizer.named_members() for key, t in loop.optimizer.state[p].items()}
                alike = [t for key, t in state.items() if key in ("basis", "exp_avg", "exp_avg_sq", "anchor", "step")]
                torch.save([loop.optimizer.steps_taken, *loop.model.state_dict().values(), *alike], self.recipe.parent / f"{name}.pt")
                return outcome

            ElasticLoop.step, Mix.batch, ElasticLoop.finish = watched, noted, kept
            given = ["train", str(self.recipe), "--elastic", self.address, *OPTIONS, *self.options, *options]
            return lordo.cli.main(given)

        self.members.append(Member(work, self.recipe.parent / f"{name}.said"))
        return self.members[-1]

    def said(self) -> str:
        return "\n".join(f"-- {m.said.name}\n{m.said.read_text()}" for m in self.members)

    def codes(self, *members: Member, seconds: float = 150) -> list[int | None]:
        assert wait_until(lambda: all(member.ended() for member in members), seconds), self.said()
        return [member.code for member in members]

    def rows(self) -> list[int]:
        """Every block that any worker has read."""
        return [int(row) for file in self.recipe.parent.glob("*.rows") for row in file.read_text().split()]

    def ends(self, *names: str) -> list[list]:
        return [torch.load(self.recipe.parent / f"{name}.pt") for name in names]


def check_alike(team: Team, steps: int, *names: str) -> None:
    """The workers end with the same bits; steps were counted, told and fed once."""
    first, *others = team.ends(*names)
    assert first[0] == steps
    for other in others:
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(first, other, strict=True))
    assert [line["step"] for line in lines(team.folder)] == list(range(K, steps + 1, K))
    rows = team.rows()
    assert len(set(rows)) == len(rows), "a block was read twice"
    assert summary(team.folder)["bytes_sent"] == summary(team.folder)["bytes_predicted"]


def file_wait(path: Path, seconds: float = 120) -> None:
    assert wait_until(path.exists, seconds), path


@pytest.mark.slow
def test_a_worker_is_lost_and_comes_back(tmp_path):
    """Killed in the middle of a round; the two that are left go on; started again it takes over from one of them. Against a run that was
    never disturbed: the same number of steps, about the same loss; and that one, under a lighthouse, is the ordinary run."""
    recipe, steps, back = micro_recipe(tmp_path), 60, tmp_path / "back"

    def falls(loop, step):
        if step == 10:
            os.kill(os.getpid(), signal.SIGKILL)

    def waits(loop, step):
        if step == 21:  # in the middle of a round
            file_wait(back)
        if step > 21 and loop.workers.size < WORKERS:
            time.sleep(0.25)

    def comes(loop, step):
        assert loop.workers.size == WORKERS
        assert step > 24

    with Team(recipe, "--train.steps", str(steps)) as team:
        a, b, c = team.start("a", waits), team.start("b", waits), team.start("c", falls)
        assert team.codes(c) == [-signal.SIGKILL]
        wait_until(lambda: team.folder.exists() and any(line["workers"] == 2 for line in lines(team.folder)), 120)
        again = team.start("again", comes)
        time.sleep(0.5)
        back.touch()
        assert team.codes(a, b, again) == [0, 0, 0], team.said()
        check_alike(team, steps, "a", "b", "again")
        took_part = [line["workers"] for line in lines(team.folder)]
        assert (took_part[0], min(took_part), took_part[-1]) == (3, 2, 3)
        assert "2 of 3 workers" in team.said()
        disturbed = summary(team.folder)

    other = tmp_path / "undisturbed"
    other.mkdir()
    with Team(micro_recipe(other), "--train.steps", str(steps), silent_seconds=120) as team:
        members = [team.start(name) for name in "abc"]
        assert team.codes(*members) == [0, 0, 0], team.said()
        check_alike(team, steps, *"abc")
        calm = summary(team.folder)
        told = lines(team.folder)
    assert disturbed["validation_loss"] == pytest.approx(calm["validation_loss"], rel=0.03)
    assert disturbed["steps"] == calm["steps"]
    ordinary = train(micro_recipe(tmp_path), *OPTIONS, "--train.steps", str(steps), "--output", str(tmp_path / "ordinary"))
    assert calm["bytes_sent"] == ordinary.summary["bytes_sent"]
    for line in told:
        same = ordinary.lines[line["step"] - 1]
        assert line["loss"] == pytest.approx(same["loss"], rel=1e-4)
        assert (line["tokens"], line["bytes_sent"]) == (same["tokens"], same["bytes_sent"])
    assert calm["validation_loss"] == pytest.approx(ordinary.summary["validation_loss"], rel=1e-4)


@pytest.mark.slow
def test_lost_in_the_middle_of_a_synchronisation(tmp_path):
    """Some averages are done and the worker that owns a basis is gone: who is left puts everything back and averages among themselves. A
    second one, which keeps the run's folder, is frozen for some rounds: another one goes on with the folder, it wakes, takes over what it
    missed, and goes on with the folder in turn."""
    recipe, steps = micro_recipe(tmp_path), 40
    thaw, frozen, awake = (tmp_path / name for name in ("thaw", "frozen", "awake"))
    synchronise = PseudoGradient.__call__

    def falls(loop, step):
        def falling(rule, optimizer, comm, number):
            if number == 12:
                os.kill(os.getpid(), signal.SIGKILL)
            synchronise(rule, optimizer, comm, number)

        PseudoGradient.__call__ = falling

    def freezes(loop, step):
        if step == 18 and loop.workers.rank == 0 and not frozen.exists():  # the one that keeps the run's folder
            (tmp_path / "pid").write_text(str(os.getpid()))
            (tmp_path / "pid").rename(frozen)
            os.kill(os.getpid(), signal.SIGSTOP)
            awake.touch()
        if step == 30:
            thaw.touch()
        if step > 30 and loop.workers.size == 1:  # time for the other one to come to the lighthouse
            wait_until(awake.exists, seconds=60)
            time.sleep(1)

    with Team(recipe, "--train.steps", str(steps), "--train.checkpoint_every", "4") as team:
        a, b, c = team.start("a", freezes), team.start("b", freezes), team.start("c", falls)
        assert team.codes(c) == [-signal.SIGKILL]
        file_wait(thaw)
        os.kill(int(frozen.read_text()), signal.SIGCONT)
        assert team.codes(a, b) == [0, 0], team.said()
        check_alike(team, steps, "a", "b")
        assert "once more with those who are left" in team.said()
        took_part = [line["workers"] for line in lines(team.folder)]
        assert (took_part[0], took_part[4], took_part[-1]) == (3, 1, 2)
        assert complete(checkpoints(team.folder)) == [steps - 4, steps]


@pytest.mark.slow
def test_all_are_lost_and_go_on_from_a_checkpoint(tmp_path):
    """The checkpoint is an ordinary one, from which one process goes on too. Who comes with other settings is sent away."""
    recipe = micro_recipe(tmp_path)
    often, sent_away = ("--train.checkpoint_every", "5"), tmp_path / "sent away"

    def falls(loop, step):
        if step == 19:
            os.kill(os.getpid(), signal.SIGKILL)

    def waits(loop, step):
        if step == 18:  # they have begun
            (tmp_path / "begun").touch()
        if step > 18 and not sent_away.exists():
            time.sleep(0.5)

    with Team(recipe, "--train.steps", "60", *often) as team:
        members = [team.start(name, falls) for name in "abc"]
        assert team.codes(*members) == [-signal.SIGKILL] * 3
        last = max(complete(checkpoints(team.folder)))
        assert last in (8, 12, 16)  # that of 16 may have been on its way
        members = [team.start(name, waits, "--resume") for name in "def"]
        file_wait(tmp_path / "begun")
        other = team.start("other", lambda loop, step: None, "--method.rank", "8")
        assert team.codes(other) == [2], team.said()
        assert "method.rank is" in other.said.read_text()
        sent_away.touch()
        assert team.codes(*members) == [0, 0, 0], team.said()
        assert f"after step {last}" in team.said()
        assert [line["step"] for line in lines(team.folder)] == list(range(4, 61, 4))
        assert summary(team.folder)["bytes_sent"] == summary(team.folder)["bytes_predicted"]
    train(recipe, "--resume", *OPTIONS, *often, "--train.steps", "64", "--workers", "2")  # and to one process
    assert [line["step"] for line in lines(team.folder)][-4:] == [61, 62, 63, 64]


REFUSED = [
    ({"method.name": "ddp-adamw"}, "needs all workers at every step"),
    ({"method.sync_overlap": 2}, "leave sync_overlap"),
    ({"method.sync_wire": "int8"}, "whole and in full precision"),
    ({"method.sync_exp_avg_every": 6}, "sync_exp_avg_every = 6 is not a multiple of sync_every = 4"),
    ({"train.spike_factor": 3.0, "train.spike_action": "rollback"}, r"does not go back for a loss"),
    ({"train.steps": 10}, r"train.steps = 10 is not a multiple of sync_every = 4, which --elastic needs: take 8 or 12"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED)
def test_what_cannot_work_is_refused_before_anything_starts(changes, sentence, tmp_path):
    config = settings_for(tmp_path, changes.get("method.name", "lordo"), **{"train.steps": 12, **changes})
    with pytest.raises(ValueError, match=sentence):
        check_elastic(outline(config))


@pytest.mark.parametrize("options", [("--elastic", "http://127.0.0.1:1"), ("--elastic=nonsense",), ("--elastic",)])
def test_a_lighthouse_that_is_not_there_is_told(options, tmp_path, capsys):
    assert lordo.cli.main(["train", str(micro_recipe(tmp_path)), *options, "--train.steps", "8"]) == 2
    told = capsys.readouterr().err
    assert "lighthouse" in told
    assert "http://" in told
    assert not (tmp_path / "runs").exists()


def test_torchrun_and_elastic_exclude_each_other(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert lordo.cli.main(["train", str(micro_recipe(tmp_path)), "--elastic", "http://127.0.0.1:1"]) == 2
    assert "exclude each other" in capsys.readouterr().err
