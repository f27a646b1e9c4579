"""`lordo plan`: numbers from shapes alone, equal to what a run counts."""

import re

import pytest

import lordo.cli
from lordo.accounting import measured_state_bytes
from lordo.methods import METHODS, find
from lordo.sync import simulate
from lordo.trainer.compare import member_config
from lordo.trainer.loop import train
from lordo.trainer.plan import plan, step_seconds
from lordo.trainer.prepared import outline, prepare
from lordo.trainer.recipe import load, override
from lordo.trainer.saving import Keeping
from lordo.trainer.units import bandwidth
from test_train import micro_recipe


@pytest.fixture
def recipe(tmp_path):
    return micro_recipe(tmp_path)


@pytest.mark.parametrize("name", ["lordo", "ddp-adamw", "diloco", "desloc", "lordo-local", "ddp-lowrank"])
def test_plan_equals_what_a_run_counts(recipe, name, tmp_path):
    config = override(load(recipe), {"train.steps": 7})
    planned = plan(config, find(name), bits_per_second=1e6, flops=1e9)
    prepared = prepare(member_config(config, find(name), (), lr=1e-3, seed=0))

    def one(workers):
        optimizer = train(prepared, workers, keeping=Keeping(tmp_path / "checkpoints", None, print)).optimizer
        return workers.bytes_sent() - workers.bytes_sent("evaluation"), measured_state_bytes(optimizer).total()

    for sent, held in simulate(one, config.workers):
        assert (sent, held) == (planned.sent, planned.state)
    assert planned.link_seconds == planned.sent * 8 / 1e6


OVERLAPPED = {"method.sync_every": 4, "method.sync_wire": "int4", "method.sync_overlap": 3, "method.sync_fragments": 2}


def test_plan_of_overlapped_int4_equals_what_a_run_counts(recipe, tmp_path):
    config = override(load(recipe), {"train.steps": 7, **OVERLAPPED})
    planned = plan(config, find("lordo"), bits_per_second=1e6, flops=1e9)
    prepared = prepare(member_config(config, find("lordo"), (), lr=1e-3, seed=0))

    def one(workers):
        optimizer = train(prepared, workers, keeping=Keeping(tmp_path / "checkpoints", None, print)).optimizer
        return workers.bytes_sent() - workers.bytes_sent("evaluation"), measured_state_bytes(optimizer).total()

    assert set(simulate(one, config.workers)) == {(planned.sent, planned.state)}


def test_an_overlapped_run_takes_the_larger_of_computing_and_sending(recipe):
    config = override(load(recipe), {"train.steps": 400, **OVERLAPPED})
    slow, fast = (plan(config, find("lordo"), bits_per_second=speed, flops=1e12) for speed in (1e3, 1e15))
    at_once = slow.load.waited_for * 8 / 1e3  # bases and the average at the end
    sending = slow.load.on_the_way * 8 / 1e3
    assert slow.load.waited_for + slow.load.on_the_way == slow.sent
    assert slow.seconds - at_once == pytest.approx(max(slow.compute_seconds, sending), rel=1e-9)  # two fragments of three steps cover K = 4
    assert fast.seconds == pytest.approx(fast.compute_seconds, rel=1e-6)


def test_break_even_is_bytes_saved_over_seconds_of_encoding(recipe, capsys):
    assert lordo.cli.main(["plan", str(recipe), "--methods", "lordo", "--break-even"]) == 0
    rows = re.findall(r"^ (bfloat16|int8|int4) .* ([\d,]+) Mbps", capsys.readouterr().out, flags=re.MULTILINE)
    assert [wire for wire, _ in rows] == ["bfloat16", "int8", "int4"]
    assert all(int(speed.replace(",", "")) > 0 for _, speed in rows)


def test_prints_every_method_and_its_assumptions(recipe, capsys):
    assert lordo.cli.main(["plan", str(recipe), "--workers", "3", "--bandwidth", "100Mbps,10Gbps", "--tflops", "50"]) == 0
    printed = capsys.readouterr().out
    for name in METHODS:
        assert printed.count(f"\n {name} ") == 2, name
    assert "3 workers" in printed
    assert "at 100Mbps per worker" in printed
    assert "2 (M−1)/M" in printed
    assert "50 · 10¹²" in printed


def test_shards_divide_what_a_device_holds_and_sends(recipe, capsys):
    """To the byte on every device: `test_sharded_world.py`. Here: a quarter of everything but basis, moments and counts that are whole."""
    config = load(recipe)
    one, four = (plan(config, find("ddp-adamw"), bits_per_second=1e6, flops=1e9, shards=shards) for shards in (1, 4))
    num_counts = len(outline(config).weights)
    assert one.state - 4 * num_counts == 4 * (four.state - 4 * num_counts)  # every side of this model is divisible by 4
    assert one.sent == 4 * four.sent
    assert lordo.cli.main(["plan", str(recipe), "--shards", "4"]) == 0
    printed = capsys.readouterr().out
    assert "workers of 4 devices" in printed
    assert "inside/step" in printed
    assert "\n lordo " in printed
    assert "\n galore " not in printed


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
        (["--break-even", "--workers", "1"], "--break-even needs a method that averages rarely, and more than one worker"),
        (["--methods", "lordoo"], "unknown method 'lordoo'; did you mean 'lordo'"),
        (["--tflops", "-1"], "--tflops must be above zero"),
        (["--shards", "0"], "--shards must be at least 1"),
        (["--shards", "2", "--methods", "galore"], "method 'galore' takes bases from its own gradients"),
        (["--shards", "2", "--method.error_dtype", "int8"], "error_dtype='int8' has one scale for each whole column"),
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


def test_devices_of_the_recipe_are_planned_as_those_of_the_option(recipe, capsys):
    """Each of two devices holds and sends its part; methods that cannot train in parts are not in the table then."""
    told = []
    for options in (("--parallel.shards", "2"), ("--shards", "2")):
        assert lordo.cli.main(["plan", str(recipe), *options]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert "4 workers of 2 devices" in told[0]
    assert "at 1Gbps per device" in told[0]
    assert "galore" not in told[0]
