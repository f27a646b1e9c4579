"""`lordo check`, and what is refused before anything runs: a rank too high, a model that does not fit."""

import pytest
import torch

import lordo.cli
import lordo.trainer.memory
from lordo.accounting import measured_state_bytes
from lordo.sync import Solo
from lordo.trainer.config import ParallelConfig
from lordo.trainer.memory import Need, need, needed_here
from lordo.trainer.prepared import build, outline, prepare
from lordo.trainer.recipe import load, override
from test_train import micro_recipe


@pytest.fixture
def recipe(tmp_path):
    return micro_recipe(tmp_path)


def check(*arguments: object) -> int:
    return lordo.cli.main(["check", *map(str, arguments)])


def test_memory_is_told_of_a_device_where_a_worker_has_several(recipe, capsys):
    assert check(recipe, "--parallel.shards", 2) == 0
    assert "memory of a device: " in capsys.readouterr().out


def test_a_sound_recipe(recipe, capsys):
    assert check(recipe) == 0
    printed = capsys.readouterr()
    assert "nothing found that would stop it" in printed.out
    assert "memory of a worker: " in printed.out
    assert printed.err == ""
    assert not (recipe.parent / "runs").exists()


def test_several_findings_are_all_told(recipe, capsys):
    assert check(recipe, "--method.rank", "40", "--data.source", '["nowhere.txt"]') == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert told[0].startswith(
        "lordo: method.rank = 40 is not below the smaller side of any matrix in the layers (the largest has a smaller side of"
    )
    assert told[1].startswith("lordo: data.source: 'nowhere.txt' does not exist")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--train.eval_sequences", "100000"], "cannot take 100000 of"),
        (["--method.omgea", "1"], "did you mean 'omega'"),
        (["--model.config.vocab_size", "100"], "vocab_size = 100 is less than the 256 tokens of the data"),
        (
            ["--data.source", "none", "--data.corpus", "c", "--data.mix", "[{source = 'no/such'}]"],
            "cannot be read from the Hugging Face hub",
        ),
        (["--workers", "5000"], "are too few for 5000 workers"),
    ],
)
def test_a_finding(recipe, capsys, options, sentence):
    assert check(recipe, *options) == 2
    errors = capsys.readouterr().err
    assert sentence in errors
    assert errors.count("\n") == 1


def test_a_mixture_that_is_not_prepared_yet_is_no_mistake(recipe, tmp_path, capsys):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("some text")
    mix = ["--data.source", "none", "--data.corpus", str(tmp_path / "corpus"), "--data.mix", f"[{{source = '{texts}'}}]"]
    assert check(recipe, *mix) == 0
    assert "is not there yet: lordo prepare comes before lordo train" in capsys.readouterr().out


# ---- memory


def test_the_need_is_that_of_the_real_tensors(recipe):
    config = load(recipe)
    shapes = outline(config)
    model, _, optimizer = build(config, shapes.method, Solo(), "cpu")
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    needed = need(shapes.method, shapes.weights, shapes.settings, config, torch.device("cpu"))
    assert (needed.weights, needed.gradients) == (size, size)
    assert needed.state == measured_state_bytes(optimizer).total()
    assert needed.logits == 2 * 4 * 2 * 32 * 256  # float32 and its gradient, 2 sequences of 32 tokens, 256 tokens to choose from
    halved = need(shapes.method, shapes.weights, shapes.settings, override(config, {"batch.accumulate": 2}), torch.device("cpu"))
    assert halved.logits == needed.logits // 2


def test_a_model_that_does_not_fit_is_refused_before_it_is_built(recipe, monkeypatch):
    monkeypatch.setattr(lordo.trainer.memory, "available_bytes", lambda device: 10_000_000)
    config = override(load(recipe), {"model.preset": "16m", "model.config": None})
    sentence = r"4 workers on one machine need [\d.]+ GB at least \(each: weights 0.064 GB, .*but 0.01 GB of memory are free: take"
    with pytest.raises(ValueError, match=sentence):
        prepare(config)
    monkeypatch.setattr(lordo.trainer.memory, "available_bytes", lambda device: None)
    lordo.trainer.memory.check_memory(need(*_parts(config)), config, torch.device("cpu"))  # nobody tells: nothing is refused


def test_processes_compute_at_once_and_workers_of_one_process_may_take_turns(recipe, monkeypatch):
    config, cpu = load(recipe), torch.device("cpu")
    needed = Need(weights=100, gradients=20, state=7, logits=3)
    assert needed_here(needed, config, cpu) == (4, 4 * 107 + 23)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert needed_here(needed, config, cpu) == (2, 2 * 130)
    assert needed_here(needed, config, torch.device("cuda")) == (1, 130)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    cut = config.model_copy(update={"parallel": ParallelConfig(shards=2)})
    assert needed_here(needed, cut, torch.device("cuda")) == (1, 130)  # whose devices are never in one process


def _parts(config):
    shapes = outline(config)
    return shapes.method, shapes.weights, shapes.settings, config, torch.device("cpu")


def test_an_anchor_in_host_memory_takes_none_of_the_device(recipe):
    config = override(load(recipe), {"method.anchor_device": "cpu"})
    method, weights, settings, _, _ = _parts(config)
    here, there = (need(method, weights, settings, config, torch.device(kind)) for kind in ("cpu", "cuda"))
    assert there.host == sum(w.numel * 4 for w in weights if w.is_lowrank) > 0
    assert here.host == 0
    assert here.state == there.state + there.host
    assert "in host memory besides" in str(there)
