"""Checkpoints: a run that was cut is the run that was not, to the bit; another number of workers; what a kill or a full disk leaves."""

import contextlib
import errno
import io
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

import lordo
import lordo.cli
from lordo.trainer.checkpoint import STATE, WEIGHTS, DamagedError, Part, Share, Snapshot, checkpoints, clear, complete, parts, steps, write
from lordo.trainer.folder import RunFolder
from lordo.trainer.launch import run_in_threads
from lordo.trainer.merge import mean, merged_state, merged_weights
from lordo.trainer.mix import Mix
from lordo.trainer.prepared import prepare
from lordo.trainer.recipe import load, override
from lordo.trainer.shard import Shard
from lordo.trainer.splits import Part as TextPart
from lordo.trainer.stopping import StopPoint
from lordo.trainer.text import load_text
from test_train import lines, micro_recipe, train

STEPS = 10


def settings_for(folder: Path, method: str = "lordo", **changes) -> lordo.trainer.config.RunConfig:
    """The micro recipe, for a method, with a checkpoint after every step."""
    row = lordo.METHODS[method]
    own = {name: value for name, value in {"rank": 4, "sync_every": 4, "basis_every": 3}.items() if name in row.settings}
    cleared = {f"method.{name}": None for name in ("rank", "sync_every")}
    schedule = {"train.steps": STEPS, "train.warmup_steps": 2, "train.eval_every": 5, "train.checkpoint_every": 1, "train.keep_last": 99}
    chosen = {"method.name": method, "workers": 3, **cleared, **{f"method.{name}": value for name, value in own.items()}, **schedule}
    return override(load(micro_recipe(folder)), {**chosen, **changes})


_texts: dict = {}


def once(data, seed):
    """The text, read once for all runs of this file."""
    key = (data.model_dump_json(), seed)
    if key not in _texts:
        _texts[key] = load_text(data, seed)
    return _texts[key]


def go(config, path: Path, *, from_step: int | None = None, until: int | None = None):
    """Train in the folder, from a checkpoint of it, stopped after a step as a signal does; the summary, or None if it was stopped."""
    stop = StopPoint()
    if until is not None:
        stop.number, stop.last_step = signal.SIGINT, until
    folder = RunFolder(config, path=path, from_step=from_step or 0)
    console = Console(file=io.StringIO())
    return run_in_threads(prepare(config, load=once), folder, console, keep_model=True, from_step=from_step, stop=stop)


TIMED = ("seconds", "tokens_per_second")


def told(path: Path) -> list[dict]:
    return [{key: without_times(value) for key, value in line.items() if key not in TIMED} for line in lines(path)]


def without_times(value):
    return {key: each for key, each in value.items() if key not in TIMED} if isinstance(value, dict) else value


def same_result(first: Path, second: Path) -> None:
    """Metrics, the model, and every worker's state at the last step are the same to the bit."""
    assert told(first) == told(second)
    assert (first / "model/model.safetensors").read_bytes() == (second / "model/model.safetensors").read_bytes()
    last = complete(checkpoints(first))[-1]
    for worker in checkpoints(first).glob(f"step-{last:08d}/worker-*"):
        other = checkpoints(second) / worker.relative_to(checkpoints(first))
        for file in (WEIGHTS, STATE):
            mine, yours = load_file(worker / file), load_file(other / file)
            assert mine.keys() == yours.keys()
            for name in mine:
                assert mine[name].dtype == yours[name].dtype
                assert torch.equal(mine[name], yours[name]), (worker.name, name)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Makes, and keeps, an uninterrupted run of a method."""
    made = {}

    def run(method: str) -> tuple:
        if method not in made:
            folder = tmp_path_factory.mktemp(method)
            config = settings_for(folder, method)
            go(config, folder / "straight")
            made[method] = config, folder / "straight"
        return made[method]

    return run


# ---- exact


@pytest.mark.parametrize("method", [name for name in lordo.METHODS if name not in ("ldadam", "lordo-paper")])
def test_cut_twice_in_a_row_a_run_of_every_method_is_the_straight_run(method, straight, tmp_path):
    """In the middle of a round (K = 4, steps 3 and 7; galore's basis has a period of 3), with warm-up, evaluations and metrics."""
    config, whole = straight(method)
    cut = tmp_path / "cut"
    assert go(config, cut, until=3) is None
    assert complete(checkpoints(cut)) == [1, 2, 3]
    assert go(config, cut, from_step=3, until=7) is None
    summary = go(config, cut, from_step=7)
    same_result(whole, cut)
    assert summary.bytes_sent == summary.bytes_predicted
    assert summary.tokens == STEPS * config.workers * 2 * 32


def test_errors_and_moments_of_few_bits_and_phases_go_on_too(tmp_path):
    """Rounding that draws lots draws the same ones; a phase that changes betas has rescaled the moments once, not again."""
    few = {"method.error_dtype": "int8", "method.moment_dtype": "bfloat16", "method.anchor_device": "cpu"}
    config = settings_for(tmp_path, **few, phase=[{"from_step": 4, "betas": [0.95, 0.995]}, {"from_step": 8, "lr": 1e-3}])
    go(config, tmp_path / "whole")
    assert go(config, tmp_path / "cut", until=3) is None
    assert go(config, tmp_path / "cut", from_step=3, until=7) is None
    go(config, tmp_path / "cut", from_step=7)
    same_result(tmp_path / "whole", tmp_path / "cut")
    go(override(config, {"workers": 2}), tmp_path / "cut", from_step=7)


@pytest.mark.parametrize("more", [{"sync_overlap": 2}, {"sync_overlap": 3, "sync_wire": "int8", "sync_fragments": 2, "sync_split": True}])
def test_a_run_goes_on_in_the_middle_of_an_exchange(more, tmp_path):
    """What was on its way is sent again, and is the same; its bytes are counted once."""
    changes = {f"method.{name}": value for name, value in more.items()}
    config = settings_for(tmp_path, **changes)
    whole = go(config, tmp_path / "whole")
    for cuts in ((4, 5), (6, 9)):  # just sent, half-way; nearly there, and the next one
        path = tmp_path / str(cuts)
        assert go(config, path, until=cuts[0]) is None
        assert go(config, path, from_step=cuts[0], until=cuts[1]) is None
        summary = go(config, path, from_step=cuts[1])
        same_result(tmp_path / "whole", path)
        assert summary.bytes_sent == whole.bytes_sent == summary.bytes_predicted
    fewer = go(override(config, {"workers": 2}), tmp_path / "(4, 5)", from_step=5)
    assert fewer.bytes_sent == fewer.bytes_predicted


def test_a_run_goes_on_from_every_kind_of_step(straight, tmp_path):
    """The first, those around a synchronisation, one with an evaluation, and the last."""
    config, whole = straight("lordo")
    for step in (1, 4, 5, 8, STEPS):
        again = tmp_path / str(step)
        shutil.copytree(whole, again, ignore=shutil.ignore_patterns("model"))
        for later in range(step + 1, STEPS + 1):
            shutil.rmtree(checkpoints(again) / f"step-{later:08d}")
        go(config, again, from_step=step)
        same_result(whole, again)


def test_a_model_that_drops_out_goes_on_with_the_same_random_numbers(tmp_path):
    """Dropout draws from torch's generator, of which every worker of a simulation has its own state."""
    model = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": 256, "n_positions": 32}
    config = override(settings_for(tmp_path, **{"workers": 2}), {"model.config": model})
    go(config, tmp_path / "whole")
    assert go(config, tmp_path / "cut", until=5) is None
    torch.manual_seed(1234)  # another process has another state
    go(config, tmp_path / "cut", from_step=5)
    same_result(tmp_path / "whole", tmp_path / "cut")


def test_a_finished_run_trains_on_as_if_it_had_been_longer(tmp_path):
    """The average at the end of a run comes after its last checkpoint, and is not part of it."""
    longer = settings_for(tmp_path, **{"train.schedule": "constant", "train.eval_every": None})
    assert go(override(longer, {"train.steps": 6}), tmp_path / "short") is not None
    go(longer, tmp_path / "short", from_step=6)
    go(longer, tmp_path / "long")
    assert (tmp_path / "long/model/model.safetensors").read_bytes() == (tmp_path / "short/model/model.safetensors").read_bytes()


def jumping(monkeypatch, at: int) -> None:
    """The loss of worker 1 is ten times as large at one step."""
    gradients = lordo.trainer.loop.Loop.gradients

    def jumps(self, tokens):
        loss = gradients(self, tokens)
        return loss * 10 if self.workers.rank == 1 and self.place.step + 1 == at else loss

    monkeypatch.setattr(lordo.trainer.loop.Loop, "gradients", jumps)


def test_a_step_whose_loss_is_out_of_proportion_is_left_out_on_that_worker(monkeypatch, tmp_path, capfd):
    """Counted, named, weights and moments left alone; the same when the run is cut before it."""
    jumping(monkeypatch, at=10)
    config = settings_for(tmp_path, **{"train.spike_factor": 3.0, "train.steps": 11})
    summary = go(config, tmp_path / "whole")
    assert summary.spikes == 1
    assert [line["spikes"] for line in lines(tmp_path / "whole")] == [0] * 9 + [1, 1]
    assert capfd.readouterr().err.count("lordo: worker 1 leaves step 10 out: its loss was") == 1
    kept = [parts(checkpoints(tmp_path / "whole"), step, Share(1, 3))[0] for step in (9, 10)]
    for name in kept[0].names(WEIGHTS):
        assert torch.equal(kept[0].tensor(WEIGHTS, name), kept[1].tensor(WEIGHTS, name))
    assert go(config, tmp_path / "cut", until=7) is None
    go(config, tmp_path / "cut", from_step=7)
    same_result(tmp_path / "whole", tmp_path / "cut")
    go(override(config, {"train.spike_factor": None}), tmp_path / "off")
    assert [line["spikes"] for line in lines(tmp_path / "off")] == [0] * 11


@pytest.mark.parametrize("method", ["lordo", "ddp-adamw"])
def test_after_such_a_loss_all_can_go_back_and_read_on(method, monkeypatch, tmp_path, capfd):
    """It is the run that was stopped at that checkpoint and went on with the text that comes after what was thrown away."""
    spike, end = (10, 12) if method == "lordo" else (10, 10)  # noticed at the end of the round
    guard = {"train.spike_factor": 3.0, "train.spike_action": "rollback", "train.steps": 14, "train.eval_every": None}
    config = settings_for(tmp_path, method, **guard)
    gradients, batch, jumps = lordo.trainer.loop.Loop.gradients, Mix.batch, []

    def jumping_once(self, tokens):
        loss = gradients(self, tokens)
        if self.workers.rank == 1 and self.place.step + 1 == spike and not jumps:
            jumps.append(loss)
            return loss * 10
        return loss

    with monkeypatch.context() as patched:
        patched.setattr(lordo.trainer.loop.Loop, "gradients", jumping_once)
        summary = go(config, tmp_path / "back")
    assert "all go back to the checkpoint of step 9, for the loss of worker 1 in step 10" in capfd.readouterr().err
    assert (summary.spikes, summary.bytes_sent) == (1, summary.bytes_predicted)
    assert summary.tokens == (14 + end - 9) * 3 * 2 * 32
    assert go(config, tmp_path / "by hand", until=9) is None
    monkeypatch.setattr(Mix, "batch", lambda mix, position, size: batch(mix, position + (end - 9) * 2, size))
    go(config, tmp_path / "by hand", from_step=9)
    first, second = (told(tmp_path / name) for name in ("back", "by hand"))
    assert [line["step"] for line in first] == list(range(1, 15))
    counts = ("spikes", "tokens")
    assert [{k: v for k, v in line.items() if k not in counts} for line in first] == [
        {k: v for k, v in line.items() if k not in counts} for line in second
    ]
    assert (tmp_path / "back/model/model.safetensors").read_bytes() == (tmp_path / "by hand/model/model.safetensors").read_bytes()
    monkeypatch.setattr(Mix, "batch", batch)  # and from a later checkpoint, the place in the text is known
    shutil.copytree(tmp_path / "back", tmp_path / "cut", ignore=shutil.ignore_patterns("model", "step-00000014"))
    go(config, tmp_path / "cut", from_step=13)
    same_result(tmp_path / "back", tmp_path / "cut")


def test_a_run_does_not_go_back_for_ever(monkeypatch, tmp_path):
    jumping(monkeypatch, at=10)
    config = settings_for(tmp_path, **{"train.spike_factor": 3.0, "train.spike_action": "rollback", "train.steps": 14})
    with pytest.raises(FloatingPointError, match="worker 1 is out of proportion in step 10, though the run went back to step 9 3 times"):
        go(config, tmp_path / "run")


# ---- the command


def test_the_command_goes_on_with_the_last_run_of_a_recipe_and_with_a_folder(tmp_path, capsys):
    recipe = micro_recipe(tmp_path)
    options = ["--train.checkpoint_every", "4", "--train.steps", "9", "--train.schedule", "constant", "--train.keep_last", "1"]
    whole = train(recipe, *options)
    assert complete(checkpoints(whole.folder)) == [8]
    cut = train(recipe, *options)
    (cut.folder / "summary.json").unlink()  # as if it had been killed after step 8
    with (cut.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "lo')
    again = train(recipe, *options, "--resume")
    assert again.folder == cut.folder
    assert "going on in" in again.printed
    assert told(whole.folder) == told(cut.folder)

    capsys.readouterr()
    assert lordo.cli.main(["train", str(cut.folder), "--resume"]) == 2
    assert "is finished: raise train.steps to train on" in capsys.readouterr().err
    assert lordo.cli.main(["train", str(cut.folder), "--resume", "--train.steps", "12"]) == 0
    assert [line["step"] for line in lines(cut.folder)] == [1, *range(2, 13)]


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (("--method.rank", "8"), "method.rank was 4 in"),
        (("--seed", "3"), "seed was 0 in"),
        (("--data.sequence_length", "16"), "data.sequence_length was 32 in"),
        (("--model.config.hidden_size", "64"), "model.config.hidden_size was 32 in"),
    ],
)
def test_other_settings_than_it_began_with_are_refused(option, sentence, straight, tmp_path, capsys):
    _, whole = straight("lordo")
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    before = {path: path.read_bytes() for path in again.rglob("*") if path.is_file()}
    assert lordo.cli.main(["train", str(again), "--resume", *option]) == 2
    assert sentence in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in again.rglob("*") if path.is_file()}


def test_a_folder_without_resume_and_nothing_to_go_on_with(tmp_path, capsys):
    recipe = micro_recipe(tmp_path)
    run = train(recipe, "--train.steps", "5", "--train.warmup_steps", "1", "--resume")  # nothing there: it begins
    assert run.folder == tmp_path / "runs" / "micro"
    assert lordo.cli.main(["train", str(run.folder)]) == 2
    assert "add --resume to go on with it" in capsys.readouterr().err
    assert lordo.cli.main(["train", str(tmp_path), "--resume"]) == 2


# ---- another number of workers

PAIRS = [(before, after) for before in (1, 2, 3, 4) for after in (1, 2, 3, 4) if before != after]


def cut_at_three(method: str, workers: int, folder: Path):
    """A run stopped at step 3, in the middle of a round, and its parts."""
    config = settings_for(folder, method, **{"workers": workers, "train.steps": 6})
    go(config, folder / "run", until=3)
    return config, folder / "run", [parts(checkpoints(folder / "run"), 3, Share(worker, workers))[0] for worker in range(workers)]


@pytest.mark.parametrize(("method", "before", "after"), [("lordo", *pair) for pair in PAIRS] + [("diloco", 3, 2), ("galore", 2, 3)])
def test_another_number_of_workers_goes_on(method, before, after, tmp_path):
    """Over the next synchronisation and a checkpoint: steps and tokens are counted once, bytes are the predicted ones, workers agree."""
    config, path, _ = cut_at_three(method, before, tmp_path)
    summary = go(override(config, {"workers": after}), path, from_step=3)

    assert [line["step"] for line in lines(path)] == list(range(1, 7))
    assert [line["tokens"] for line in lines(path)] == [64 * (min(t, 3) * before + max(t - 3, 0) * after) for t in range(1, 7)]
    sent = [line["bytes_sent"] for line in lines(path)]
    assert sent == sorted(sent)
    assert summary.bytes_sent == pytest.approx(summary.bytes_predicted, abs=1)
    ends = [parts(checkpoints(path), 6, Share(worker, after))[0] for worker in range(after)]
    for name in ends[0].names(STATE):
        if name.endswith((".basis", ".anchor", ".outer_momentum")):
            assert all(torch.equal(ends[0].tensor(STATE, name), end.tensor(STATE, name)) for end in ends), name
    assert lines(path)[-1]["loss"] < lines(path)[0]["loss"]


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (3, 2), (2, 3)])
def test_who_goes_on_starts_from_the_average_and_the_mean_of_the_errors_stays(before, after, tmp_path):
    _, _, saved = cut_at_three("lordo", before, tmp_path)
    weights, states = dict(merged_weights(saved)), [dict(merged_state(saved, worker)) for worker in range(after)]
    for name in saved[0].names(WEIGHTS):
        assert torch.equal(weights[name], mean([part.tensor(WEIGHTS, name) for part in saved]))
        torch.testing.assert_close(weights[name], torch.stack([part.tensor(WEIGHTS, name) for part in saved]).mean(0))
    for name in states[0]:
        each = torch.stack([part.tensor(STATE, name) for part in saved])
        torch.testing.assert_close(torch.stack([state[name] for state in states]).mean(0), each.mean(0), msg=name)
        if name.endswith((".basis", ".anchor", ".step")):  # equal on all before, and the same bits now
            assert all(torch.equal(state[name], each[0]) for state in states), name


def test_moments_in_unlike_bases_are_never_averaged(tmp_path):
    """lordo-local has a basis of its own on every worker: a new worker takes one with its moments."""
    _, _, saved = cut_at_three("lordo-local", 2, tmp_path)
    name = next(name.removesuffix(".basis") for name in saved[0].names(STATE) if name.endswith(".basis"))
    assert not torch.equal(saved[0].tensor(STATE, f"{name}.basis"), saved[1].tensor(STATE, f"{name}.basis"))
    for worker in range(3):
        state = dict(merged_state(saved, worker))
        for key in ("basis", "exp_avg", "exp_avg_sq"):
            assert torch.equal(state[f"{name}.{key}"], saved[worker % 2].tensor(STATE, f"{name}.{key}"))


def test_what_all_workers_hold_alike_stays_to_the_bit(tmp_path):
    _, _, saved = cut_at_three("ddp-adamw", 3, tmp_path)
    for name, tensor in (*merged_weights(saved), *merged_state(saved, 1)):
        file = STATE if name.startswith("optimizer/") else WEIGHTS
        assert torch.equal(tensor, saved[0].tensor(file, name)), name


@given(
    st.integers(12, 60),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 99),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_each_block_is_read_once_in_an_epoch_that_several_numbers_of_workers_share(num, eras, last, seed):
    blocks = torch.arange(num, dtype=torch.int32)[:, None].expand(num, 2)
    read, left, earlier = [], num, []
    for workers, used in eras:
        shards = [Shard(blocks, worker, workers, seed, earlier=earlier) for worker in range(workers)]
        used = min(used, min(len(shard.first) if earlier else len(shard) for shard in shards))
        read += [int(shard.batch(i, 1)[0, 0]) for shard in shards for i in range(used)]
        left -= workers * used
        if used:
            earlier = [*earlier, (workers, used)]
    rest = [Shard(blocks, worker, last, seed, earlier=earlier) for worker in range(last)]
    if earlier:
        read += [int(shard.batch(i, 1)[0, 0]) for shard in rest for i in range(len(shard.first))]
        assert sum(len(shard.first) for shard in rest) == left
        assert sorted(read) == list(range(num))
    assert sorted(int(shard.batch(len(shard.first), len(shard))[i, 0]) for shard in rest for i in range(len(shard))) == list(range(num))


def test_each_source_of_a_mixture_is_dealt_out_again_by_itself():
    parts_of_mix = [
        TextPart(f"s{i}", weight, torch.arange(num)[:, None].expand(num, 2), 0) for i, (weight, num) in enumerate([(3, 40), (1, 30)])
    ]
    used = 6
    before = [Mix(parts_of_mix, worker, 2, 5) for worker in range(2)]
    counts = before[0].used_of_each(used)
    assert sum(counts) == used
    assert counts == [[mix.place(i)[0] for i in range(used)].count(source) for mix in before[:1] for source in range(2)]
    after = [Mix(parts_of_mix, worker, 3, 5, earlier=[(2, used)]) for worker in range(3)]
    for source, part in enumerate(parts_of_mix):
        read = [int(mix.shards[source].batch(i, 1)[0, 0]) for mix in before for i in range(counts[source])]
        rest = [int(row) for mix in after for row in mix.shards[source].first]
        assert sorted(read + rest) == list(range(len(part.blocks)))


# ---- random sequences


@pytest.mark.slow
@given(st.data())
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate))
def test_any_sequence_of_cuts_and_changes_of_workers(data):
    """Train n steps, be killed, lose what came after the last checkpoint, go on with so many workers: steps count once, workers agree, and
    without a change of workers it is the undisturbed run."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(_temporary()))
        every = data.draw(st.integers(1, 3))
        config = settings_for(folder, **{"train.checkpoint_every": every, "workers": 2, "train.schedule": "constant"})
        path, step, changed = folder / "run", 0, False
        while step < STEPS:
            workers = data.draw(st.sampled_from([2, 2, 2, 1, 3]))
            changed |= workers != 2
            until = data.draw(st.integers(step + 1, STEPS))
            go(override(config, {"workers": workers}), path, from_step=step or None, until=until)
            killed = data.draw(st.booleans())  # then there is no checkpoint written because it was asked to stop
            if killed and until % every:
                shutil.rmtree(checkpoints(path) / f"step-{until:08d}", ignore_errors=True)
            step = max(complete(checkpoints(path)), default=0)
            if until == STEPS:
                break
        assert [line["step"] for line in lines(path)] == list(range(1, STEPS + 1))
        check_invariants(config, path)
        if not changed:
            go(config, folder / "whole")
            assert told(folder / "whole") == told(path)
            assert (folder / "whole/model/model.safetensors").read_bytes() == (path / "model/model.safetensors").read_bytes()


def check_invariants(config, path: Path) -> None:
    """Of the last checkpoint: stretches follow on each other, no block was read twice in them, and all workers have the same bases."""
    last = max(complete(checkpoints(path)))
    saved = [Part(worker) for worker in sorted((checkpoints(path) / f"step-{last:08d}").glob("worker-*"))]
    facts = saved[0].facts
    now = {"workers": facts["workers"], "start": facts["start"], "end": last, "sequences": facts["sequences"]}
    eras = [*facts["eras"], now]
    assert [era["start"] for era in eras] == [0, *(era["end"] for era in eras[:-1])]
    text, read, earlier = load_text(config.data, config.seed).train, [], []
    for era in eras:
        used = (era["end"] - era["start"]) * era["sequences"]
        for worker in range(era["workers"]):
            mix = Mix(text, worker, era["workers"], config.seed, earlier=earlier)
            read += [mix.shards[0]._row(i) for i in range(used)]
        earlier.append((era["workers"], used))
    assert len(read) < len(text[0].blocks), "more than an epoch"
    assert len(set(read)) == len(read)
    for name in (name for name in saved[0].names(STATE) if name.endswith("basis")):
        assert all(torch.equal(saved[0].tensor(STATE, name), other.tensor(STATE, name)) for other in saved[1:])


def _temporary():
    return tempfile.TemporaryDirectory()


# ---- what is on disk


def small(step: int, worker: int = 0, workers: int = 1, *, size: int = 1000) -> Snapshot:
    """A snapshot whose every number is its step."""
    tensors = {name: torch.full((size,), float(step)) for name in "abc"}
    return Snapshot(step, Share(worker, workers), tensors, {"s": torch.tensor(float(step))}, {"note": step}, {})


def test_files_are_read_by_distributed_checkpoint_too_and_hold_no_pickle(straight, tmp_path):
    _, path = straight("lordo")
    part = checkpoints(path) / "step-00000003" / "worker-1"
    assert sorted(file.name for file in part.iterdir()) == ["facts.json", "state.safetensors", "weights.safetensors"]
    json.loads((part / "facts.json").read_text())
    for file in (WEIGHTS, STATE):
        expected = load_file(part / file)
        alone = tmp_path / file
        alone.mkdir()
        shutil.copy(part / file, alone)
        loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(alone)), no_dist=True)
        for name, tensor in expected.items():
            assert torch.equal(loaded[name], tensor), name


def test_only_the_last_ones_are_kept(straight, tmp_path):
    config, _ = straight("lordo")
    go(override(config, {"train.keep_last": 2, "train.checkpoint_every": 2}), tmp_path / "run")
    assert steps(checkpoints(tmp_path / "run")) == [8, 10]
    assert steps(checkpoints(tmp_path / "run")) == complete(checkpoints(tmp_path / "run"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_instant_leaves_a_loadable_checkpoint(tmp_path):
    """kill -9, 50 times, at random moments of a process that does nothing but write; the newest checkpoint is whole each time, and newer
    than the one before unless nothing was finished in between."""
    chance, step = random.Random(0), 0
    write(tmp_path, small(0))
    killed_while_writing = 0
    for _ in range(50):
        child = os.fork()
        if child == 0:
            for number in range(step + 1, step + 100_000):
                write(tmp_path, small(number, size=20_000))
            os._exit(0)
        time.sleep(chance.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = complete(tmp_path)
        part = Part(tmp_path / f"step-{found[-1]:08d}" / "worker-0")
        assert all(bool((part.tensor(WEIGHTS, name) == found[-1]).all()) for name in "abc")
        assert part.tensor(STATE, "s") == part.facts["note"] == found[-1] >= step
        killed_while_writing += bool(list(tmp_path.glob("*/.*.partial")))
        step = found[-1]
        for other in found[:-1]:
            shutil.rmtree(tmp_path / f"step-{other:08d}")
        clear(tmp_path, step)
    assert step > 0
    assert killed_while_writing > 10


def test_a_checkpoint_is_complete_when_all_parts_are_there(tmp_path):
    write(tmp_path, small(4, 0, 2))
    write(tmp_path, small(4, 1, 2))
    write(tmp_path, small(8, 1, 2))
    assert complete(tmp_path) == [4]
    clear(tmp_path, 4)
    assert steps(tmp_path) == [4]


@pytest.mark.parametrize("harm", ["cut off", "one bit", "gone", "no json"])
def test_a_damaged_checkpoint_is_left_aside_and_named(harm, straight, tmp_path, capfd):
    _, whole = straight("lordo")
    again = tmp_path / "again"
    shutil.copytree(whole, again, ignore=shutil.ignore_patterns("summary.json"))
    part = checkpoints(again) / f"step-{STEPS:08d}" / "worker-1"
    file = part / (STATE if harm != "no json" else "facts.json")
    content = bytearray(file.read_bytes())
    if harm == "gone":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes({"cut off": content[:-5], "one bit": content, "no json": b"{"}[harm])
    with pytest.raises(DamagedError, match="worker-1"):
        parts(checkpoints(again), STEPS, Share(1, 3))
    assert lordo.cli.main(["train", str(again), "--resume"]) == 0
    printed, errors = capfd.readouterr()
    assert f"the checkpoint of step {STEPS} is damaged" in errors
    assert f"after step {STEPS - 1}" in printed
    same_result(whole, again)


def full_disk(folder: Path) -> str:
    """Write more than this process may, as on a disk that is full; what was raised."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    try:
        write(folder, small(2, size=100_000))
    except OSError as error:
        return error.strerror
    return "nothing"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(tmp_path):
    write(tmp_path, small(1))
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # the limit holds for a whole process
        os.write(write_end, full_disk(tmp_path).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 1000).decode() == os.strerror(errno.EFBIG)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    Part(tmp_path / "step-00000001" / "worker-0")


def test_training_goes_on_where_no_checkpoint_can_be_written_and_says_so(straight, tmp_path, capfd):
    config, whole = straight("lordo")
    path = tmp_path / "run"
    path.mkdir()
    (path / "checkpoints").write_text("a file where the folder should be")
    assert go(config, path) is not None
    errors = capfd.readouterr().err
    assert errors.count("could not be written by worker") == STEPS * config.workers
    assert "training goes on, there is none yet" in errors
    assert told(path) == told(whole)
