"""`lordo train` with workers of several devices: the same training, its checkpoints, its refusals, a device that is lost."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import lordo.cli
import lordo.trainer.devices
import lordo.trainer.loop
from lordo.trainer.checkpoint import STATE, WEIGHTS, Share, checkpoints, complete, parts, parts_in
from lordo.trainer.config import ParallelConfig
from lordo.trainer.devices import blocks_of, cut_over, process_name
from lordo.trainer.model_config import ModelConfig
from lordo.trainer.models import build_model
from lordo.trainer.recipe import dump, load
from test_checkpoint import told
from test_faults import ENDLESS, OPTIONS, Team
from test_train import lines, micro_recipe, summary

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="starts its processes by fork, since importing takes them seconds"),
]

BATCH = ("--batch.per_worker_sequences", "4")
SHORT, LONG = ("--train.steps", "10"), ("--train.steps", "16")
LAYOUTS = {  # workers, shards, replicate
    "two workers of two devices": (2, 2, 1),
    "one worker of four": (1, 4, 1),
    "one worker of two copies of two": (1, 2, 2),
    "two workers of two copies": (2, 1, 2),
    "two workers of three": (2, 3, 1),
}


def devices(shards: int, replicate: int = 1) -> tuple[str, ...]:
    return ("--parallel.shards", str(shards), "--parallel.replicate", str(replicate))


def in_one_process(folder: Path, workers: int, *options: str) -> Path:
    recipe = micro_recipe(folder)
    assert lordo.cli.main(["train", str(recipe), "--workers", str(workers), *OPTIONS, *options]) == 0
    return folder / "runs" / "micro"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs in one process, by workers and options, each run once."""
    made: dict[tuple, Path] = {}

    def run(workers: int, *options: str) -> Path:
        key = (workers, *options)
        if key not in made:
            made[key] = in_one_process(tmp_path_factory.mktemp("whole"), workers, *options)
        return made[key]

    return run


def check_same_training(folder: Path, expected: Path, *, since: int = 1, rel: float = 1e-4) -> None:
    """Everything that does not depend on who holds what, from a step on; bytes are the predicted ones."""
    assert len(lines(folder)) == len(lines(expected))
    for line, other in list(zip(lines(folder), lines(expected), strict=True))[since - 1 :]:
        for name in ("step", "tokens", "lr", "loss", "loss_min", "loss_max", "gradient_norm", "overlap", "overlap_with_first"):
            assert line[name] == (None if other[name] is None else pytest.approx(other[name], rel=rel)), (name, line["step"])
        if other["validation_loss"] is not None:
            assert line["validation_loss"] == pytest.approx(other["validation_loss"], rel=rel)
        if other["sync"] is not None:
            for name in ("gradient_share", "error_norm"):
                assert line["sync"][name] == pytest.approx(other["sync"][name], rel=rel), name
            if line["sync"]["spread"] is not None:  # over other samples of the weights
                assert line["sync"]["spread"] == pytest.approx(other["sync"]["spread"], rel=0.3)
    total = summary(folder)
    assert total["bytes_sent"] == pytest.approx(total["bytes_predicted"], abs=1)
    assert total["state_bytes"] == total["state_predicted"]
    assert total["tokens"] == summary(expected)["tokens"]
    models = [AutoModelForCausalLM.from_pretrained(path / "model") for path in (folder, expected)]
    for (name, mine), (_, theirs) in zip(*(model.state_dict().items() for model in models), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("case", LAYOUTS)
def test_it_is_the_training_of_whole_workers(case, whole, tmp_path):
    workers, shards, replicate = LAYOUTS[case]
    batch = ("--train.steps", "10", "--batch.per_worker_sequences", str(12 if shards == 3 else 4))
    with Team(micro_recipe(tmp_path), workers * shards * replicate, *batch, *devices(shards, replicate), workers=workers) as team:
        assert set(team.codes()) == {0}, team.workers[0].errors
        check_same_training(team.folder, whole(workers, *batch))
        assert f"{workers} workers of {shards * replicate} devices" in team.workers[0].errors
    parts = {name for step in complete(checkpoints(team.folder)) for name in parts_in(checkpoints(team.folder), step)}
    assert len(parts) == workers * shards  # of several copies, one is written


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """Two workers of two devices, ten steps with checkpoints."""
    folder = tmp_path_factory.mktemp("cut")
    with Team(micro_recipe(folder), 4, *SHORT, *BATCH, *devices(2), workers=2) as team:
        assert set(team.codes()) == {0}, team.workers[0].errors
    return folder


def gone_on(cut: Path, folder: Path, workers: int, shards: int, replicate: int = 1) -> Path:
    """The run that was cut, in a copy of its folder, some steps longer with other devices."""
    shutil.copytree(cut / "runs", folder / "runs")
    path, options = folder / "runs" / "micro", (*LONG, "--output", str(folder / "runs"), *devices(shards, replicate))
    if workers * shards * replicate == 1:
        assert lordo.cli.main(["train", str(path), "--workers", "1", "--resume", *options]) == 0
        return path
    with Team(path, workers * shards * replicate, *options, workers=workers, resume=True) as team:
        assert set(team.codes()) == {0}, team.workers[0].errors
    return path


def test_a_run_that_was_cut_is_the_run_that_was_not_to_the_bit(cut, tmp_path):
    path = gone_on(cut, tmp_path, 2, 2)
    with Team(micro_recipe(tmp_path), 4, *LONG, *BATCH, *devices(2), workers=2) as team:
        assert set(team.codes()) == {0}, team.workers[0].errors
    assert told(path) == told(team.folder)
    step = max(complete(checkpoints(path)))
    for worker in range(2):
        for shard in range(2):
            mine, theirs = (parts(checkpoints(each), step, Share(worker, 2, shard, 2))[0] for each in (path, team.folder))
            for file in (WEIGHTS, STATE):
                for name in mine.names(file):
                    assert torch.equal(mine.tensor(file, name), theirs.tensor(file, name)), name


@pytest.mark.parametrize(("shards", "replicate"), [(1, 1), (1, 2), (4, 1)])
def test_other_devices_go_on_with_the_same_training(shards, replicate, cut, whole, tmp_path):
    path = gone_on(cut, tmp_path, 2, shards, replicate)
    check_same_training(path, whole(2, *LONG, *BATCH), since=11)


@pytest.mark.parametrize(("workers", "shards"), [(1, 1), (1, 4), (4, 1), (3, 1)])
def test_another_number_of_workers_and_devices_goes_on(workers, shards, cut, tmp_path):
    check_went_on(gone_on(cut, tmp_path, workers, shards), workers)


def check_went_on(path: Path, workers: int) -> None:
    told, total = lines(path), summary(path)
    assert [line["step"] for line in told] == list(range(1, 17))
    assert [line["tokens"] for line in told] == [4 * 32 * (2 * min(t, 10) + workers * max(t - 10, 0)) for t in range(1, 17)]
    assert total["bytes_sent"] == pytest.approx(total["bytes_predicted"], abs=1)
    assert total["state_bytes"] == total["state_predicted"]
    assert told[-1]["validation_loss"] < told[9]["validation_loss"]


# ---- bad input, and worse


def sentence(folder: Path, capfd, *arguments: str) -> str:
    """What is said of arguments that cannot work."""
    assert lordo.cli.main([arguments[0], str(micro_recipe(folder)), *arguments[1:]]) == 2
    told = capfd.readouterr().err.strip()
    assert told.count("\n") == 0
    return told


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("train", *devices(2)), "start all 4 by torchrun --nproc-per-node 8 -m lordo train"),
        (("compare", *devices(2)), "start all 4 by torchrun"),
        (("train", *devices(3)), "the 2 sequences of a worker cannot be dealt out to its 3 devices (parallel.shards × parallel.replicate)"),
        (("check", *devices(2), "--batch.accumulate", "2"), "batch.accumulate = 2 does not divide the 1 sequences of a device"),
        (("check", *devices(2), "--method.name", "galore", "--method.sync_every", "none"), "method 'galore' takes bases from its own grad"),
        (("check", *devices(2), "--method.error_dtype", "int8"), "error_dtype='int8' has one scale for each whole column"),
        (("train", *devices(2), "--elastic", "http://localhost:1"), "--elastic knows workers of one device only"),
        (("train", *devices(0)), "parallel.shards"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(arguments, expected, tmp_path, capfd):
    assert expected in sentence(tmp_path, capfd, *arguments)
    assert not (tmp_path / "runs").exists()


def test_processes_that_mean_other_devices_by_a_worker_are_told_so(tmp_path):
    """Before any waits for those of its worker."""

    def mistaken(rank: int) -> None:
        main = lordo.cli.main
        if rank == 1:
            lordo.cli.main = lambda arguments: main([*arguments, "--workers", "1", *devices(1, 2)])

    with Team(micro_recipe(tmp_path), 2, *devices(1), workers=2, within=mistaken) as team:
        assert team.codes() == [2, 2]
        told = team.workers[0].errors
    assert "parallel.replicate is 1 on worker 0 but 2 on worker 1: start every worker with the same recipe" in told
    assert not (tmp_path / "runs").exists()


def test_too_many_or_too_few_processes_are_told_how_many_there_should_be(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "6")
    told = sentence(tmp_path, capfd, "train", *devices(2))
    assert "6 processes in all, but the recipe says workers = 4 of 2 devices each (parallel): start 8, or add --workers 3" in told


def test_a_device_that_is_killed_is_named_by_the_others(tmp_path):
    """Those of its own worker are in a collective of fully_shard then, those of the other worker in one of lordo."""
    with Team(micro_recipe(tmp_path), 4, *ENDLESS, *devices(2), "--train.timeout_seconds", "4", workers=2) as team:
        team.until_checkpoint(5)
        os.kill(team.workers[1].pid, signal.SIGKILL)
        assert team.codes(0, 2, 3) == [1, 1, 1]
        told = [team.workers[rank].errors for rank in (0, 2, 3)]
    assert any("worker 0 (device 1) has not been heard of" in each for each in told), told
    assert all("go on with: lordo train" in each for each in told), told


def test_with_everything_that_saves_memory_or_time_it_is_still_that_training(whole, tmp_path):
    """Precision, recomputed activations, accumulated gradients; an average on its way, in four bits."""
    precise = ("--train.precision", "bfloat16-autocast", "--model.gradient_checkpointing", "true")
    sent = ("--method.sync_wire", "int4", "--method.sync_overlap", "1", "--method.sync_fragments", "2")
    options = (*SHORT, *BATCH, "--batch.accumulate", "2", *precise, *sent)
    with Team(micro_recipe(tmp_path), 4, *options, *devices(2), workers=2) as team:
        assert set(team.codes()) == {0}, team.workers[0].errors
    ends = [summary(path)["validation_loss"] for path in (team.folder, whole(2, *options))]
    assert ends[0] == pytest.approx(ends[1], rel=2e-2)
    total = summary(team.folder)
    assert total["bytes_sent"] == pytest.approx(total["bytes_predicted"], abs=1)


OWN_MODELS = {
    "blocks that are named within blocks": {"model_type": "mamba", "hidden_size": 32, "state_size": 4},
    "a tied embedding that is named as a block": {
        "model_type": "roberta",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "is_decoder": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "no blocks": {"model_type": "openai-gpt", "n_embd": 32, "n_head": 2, "n_positions": 32},
}


def own_model(case: str) -> dict:
    layers = {"n_layer" if case == "no blocks" else "num_hidden_layers": 2}
    return {"vocab_size": 256, **layers, **OWN_MODELS[case]}


@pytest.mark.parametrize("case", ["blocks that are named within blocks", "a tied embedding that is named as a block"])
def test_models_whose_blocks_are_no_plain_list_are_cut_all_the_same(case, tmp_path):
    runs = []
    for number, size in enumerate((2, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        recipe = load(micro_recipe(folder))
        recipe = recipe.model_copy(update={"model": ModelConfig(config=own_model(case))})
        dump(recipe, folder / "micro.toml")
        with Team(folder / "micro.toml", size, "--train.steps", "5", *devices(size), workers=1) as team:
            assert set(team.codes()) == {0}, team.workers[0].errors
        runs.append(team.folder)
    check_same_training(*runs)


def test_compiled_blocks_train_as_others_do(whole, tmp_path):
    small = ("--train.steps", "6", "--model.config.num_hidden_layers", "1")
    with Team(micro_recipe(tmp_path), 2, *small, "--model.compile", "eager", *devices(2), workers=1) as team:
        assert set(team.codes()) == {0}, team.workers[0].errors
    check_same_training(team.folder, whole(1, *small))


def test_a_loss_out_of_proportion_is_that_of_the_whole_worker(tmp_path):
    """All its devices leave the step out, and say so once; then all go back."""

    def jumping(rank: int) -> None:
        gradients = lordo.trainer.loop.Loop.gradients

        def jumps(self, tokens):
            loss = gradients(self, tokens)
            return loss * 20 if rank == 3 and self.place.step + 1 == 10 and not self.times_back else loss

        lordo.trainer.loop.Loop.gradients = jumps

    spikes = ("--train.spike_factor", "3.0", "--train.spike_action", "rollback")
    with Team(micro_recipe(tmp_path), 4, *LONG, *devices(2), *spikes, within=jumping, workers=2) as team:
        assert set(team.codes()) == {0}, team.workers[0].errors
        told = "".join(worker.errors for worker in team.workers)
    assert told.count("worker 1 leaves step 10 out") == 1
    assert told.count("all go back to the checkpoint of step 5") == 1
    assert summary(team.folder)["spikes"] == 1


# ---- how a model is cut


def test_processes_are_named_by_worker_and_device():
    assert process_name(5, ParallelConfig()) == "worker 5"
    assert process_name(5, ParallelConfig(shards=2)) == "worker 2 (device 1)"
    assert process_name(5, ParallelConfig(shards=2, replicate=2)) == "worker 1 (device 1)"


def test_blocks_are_those_that_transformers_names(tmp_path):
    model = build_model(load(micro_recipe(tmp_path)).model, seed=0)
    assert [type(block).__name__ for block in blocks_of(model)] == ["LlamaDecoderLayer"] * 2


@pytest.mark.parametrize(
    ("case", "expected"),
    list(zip(OWN_MODELS, (["MambaBlock"] * 2, ["RobertaLayer"] * 2, []), strict=True)),
)
def test_no_block_is_within_another_or_shares_a_weight_with_the_rest(case, expected):
    model = build_model(ModelConfig(config=own_model(case)), seed=0)
    assert [type(block).__name__ for block in blocks_of(model)] == expected


def test_a_model_without_blocks_is_compiled_as_one(monkeypatch):
    cut: list[torch.nn.Module] = []
    monkeypatch.setattr(lordo.trainer.devices, "fully_shard", lambda module, mesh: cut.append(module))
    model = build_model(ModelConfig(config=own_model("no blocks")), seed=0)
    cut_over(model, None, backend="eager")
    assert cut == [model]
    assert model._compiled_call_impl is not None
