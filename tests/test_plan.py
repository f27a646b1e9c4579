"""`lordo plan`: numbers from shapes alone, equal to what a run counts."""

import re

import pytest

import lordo.cli
from lordo.accounting import measured_state_bytes
from lordo.methods import METHODS, find
from lordo.sync import simulate
from lordo.trainer.compare import member_config
from lordo.trainer.loop import prepare, train
from lordo.trainer.plan import plan, step_seconds
from lordo.trainer.recipe import load, override
from lordo.trainer.units import bandwidth
from test_train import micro_recipe


@pytest.fixture
def recipe(tmp_path):
    return micro_recipe(tmp_path)


@pytest.mark.parametrize("name", ["lordo", "ddp-adamw", "diloco", "desloc", "lordo-local", "ddp-lowrank"])
def test_plan_equals_what_a_run_counts(recipe, name):
    config = override(load(recipe), {"train.steps": 7})
    planned = plan(config, find(name), bits_per_second=1e6, flops=1e9)
    prepared = prepare(member_config(config, find(name), (), lr=1e-3, seed=0))

    def one(workers):
        optimizer = train(prepared, workers).optimizer
        return workers.bytes_sent() - workers.bytes_sent("evaluation"), measured_state_bytes(optimizer).total()

    for sent, held in simulate(one, config.workers):
        assert (sent, held) == (planned.sent, planned.state)
    assert planned.link_seconds == planned.sent * 8 / 1e6


def test_prints_every_method_and_its_assumptions(recipe, capsys):
    assert lordo.cli.main(["plan", str(recipe), "--workers", "3", "--bandwidth", "100Mbps,10Gbps", "--tflops", "50"]) == 0
    printed = capsys.readouterr().out
    for name in METHODS:
        assert printed.count(f"\n {name} ") == 2, name
    assert "3 workers" in printed
    assert "at 100Mbps per worker" in printed
    assert "2 (M−1)/M" in printed
    assert "50 · 10¹²" in printed


def test_the_papers_largest_model_needs_no_gpu_and_little_memory(capsys):
    assert lordo.cli.main(["plan", "recipes/720m.toml", "--workers", "4", "--bandwidth", "10Gbps", "--methods", "lordo,ddp-adamw"]) == 0
    printed = capsys.readouterr().out
    assert "717,277,184 parameters" in printed
    assert re.search(r"ddp-adamw .* 1\.00 ", printed)


def test_compute_is_six_operations_per_parameter_and_token():
    from lordo.accounting import Weight

    assert step_seconds([Weight((10, 20)), Weight((5,))], tokens=7, flops=3.0) == 6 * 205 * 7 / 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--bandwidth", "10Gps"], "unknown unit 'Gps'; did you mean 'Gbps'"),
        (["--bandwidth", "fast"], "is not a number with a unit"),
        (["--bandwidth", "0Mbps"], "must be above zero"),
        (["--methods", "lordoo"], "unknown method 'lordoo'; did you mean 'lordo'"),
        (["--tflops", "-1"], "--tflops must be above zero"),
        (["--train.stpes", "3"], "did you mean 'steps'"),
    ],
)
def test_refuses_in_one_sentence(recipe, capsys, arguments, sentence):
    assert lordo.cli.main(["plan", str(recipe), *arguments]) == 2
    errors = capsys.readouterr().err
    assert sentence in errors
    assert errors.count("\n") == 1


def test_bandwidths():
    assert bandwidth("100Mbps") == 1e8
    assert bandwidth("1.5 Gbps") == 1.5e9
    assert bandwidth("1e2kbps") == 1e5
