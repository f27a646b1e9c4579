"""What is told of a synchronisation: the numbers worked out by hand, where it is told only, and without a trace in the training."""

import math

import pytest
import torch

import lordo
from common import assert_same_bits, everything, give_gradients, parameters, train
from lordo.lowrank import canonical
from lordo.trainer.measure import SAMPLED_WEIGHTS, Measure
from test_train import Run, micro_recipe
from test_train import train as run_train

SHAPES = ((6, 9), (9, 6), (7,))
OPTIONS = {"lr": 0.01, "rank": 2, "sync_every": 3}


def test_numbers_are_those_worked_out_by_hand():
    def work(workers):
        params = parameters(*SHAPES)
        optimizer = lordo.LoRDO(params, workers=workers, **OPTIONS)
        measure = Measure(optimizer, lambda step: step == 6)
        train(optimizer, params, 3, worker=workers.rank)
        for step in (1, 2, 3):
            measure.stepped(step)
        start = [p.detach().clone() for p in params]
        train(optimizer, params, range(4, 6), worker=workers.rank)
        give_gradients(params, step=6, worker=workers.rank)
        bases = [optimizer.state[p]["basis"].clone() for p in params[:2]]
        seen = {}

        def look():
            seen["weights"] = [p.detach().clone() for p in params]
            seen["error"] = sum(float(optimizer.error_of(p).square().sum()) for p in params[:2])

        optimizer.local_step_hooks.append(look)
        optimizer.step()
        measure.stepped(6)
        gradients = [canonical(p.grad) for p in params[:2]]
        inside = sum(float((Q.mT @ G).square().sum()) for Q, G in zip(bases, gradients, strict=True))
        whole = sum(float(G.square().sum()) for G in gradients)
        return measure.take(), start, seen, inside, whole, measure.take()

    results = lordo.simulate(work, 3)
    told = results[0][0]
    assert told.spread == results[1][0].spread  # all workers come to the same
    assert told.step == 6
    assert told.gradient_share == pytest.approx(sum(r[3] for r in results) / sum(r[4] for r in results), rel=1e-5)
    assert told.error_norm == pytest.approx(math.sqrt(sum(r[2]["error"] for r in results) / 3), rel=1e-5)
    weights = torch.stack([torch.cat([w.flatten() for w in r[2]["weights"]]) for r in results]).double()
    moved = weights.mean(0) - torch.cat([w.flatten() for w in results[0][1]]).double()
    assert told.spread == pytest.approx(float((weights - weights.mean(0)).square().sum(1).mean().sqrt() / moved.norm()), rel=1e-5)
    assert [r[5] for r in results] == [None] * 3  # it is told once


def test_a_sample_of_a_large_model_comes_near():
    def work(workers):
        params = parameters((300, 400), (7,))
        optimizer = lordo.LoRDO(params, workers=workers, **{**OPTIONS, "rank": 8})
        measure = Measure(optimizer, lambda step: True)
        own = {}
        optimizer.local_step_hooks.append(lambda: own.update(weights=torch.cat([p.detach().flatten() for p in params])))
        start = torch.cat([p.detach().flatten() for p in params])
        train(optimizer, params, 3, worker=workers.rank)
        measure.stepped(3)
        return measure.take(), own["weights"].double(), start.double()

    results = lordo.simulate(work, 2)
    weights = torch.stack([r[1] for r in results])
    exact = float((weights - weights.mean(0)).square().sum(1).mean().sqrt() / (weights.mean(0) - results[0][2]).norm())
    assert weights.shape[1] > 20 * SAMPLED_WEIGHTS
    assert results[0][0].spread == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("told", [True, False])
def test_measuring_leaves_no_trace_in_the_training_and_gathers_only_where_it_is_told(told):
    gathered = {True: [], False: []}

    def work(workers, measured):
        params = parameters(*SHAPES)
        optimizer = lordo.LoRDO(params, workers=workers, **OPTIONS)
        measure = Measure(optimizer, lambda step: told) if measured else None
        optimizer.start()
        gather = workers.gather
        workers.gather = lambda note: gathered[measured].append(optimizer.steps_taken) or gather(note)
        for step in range(1, 8):
            train(optimizer, params, range(step, step + 1), worker=workers.rank)
            if measure is not None:
                measure.stepped(step)
        return everything(optimizer), dict(workers.moved)

    plain = lordo.simulate(lambda workers: work(workers, False), 2)
    measured = lordo.simulate(lambda workers: work(workers, True), 2)
    for (state, moved), (own_state, own_moved) in zip(plain, measured, strict=True):
        assert_same_bits(state, own_state)
        assert moved == own_moved
    assert sorted(gathered[True]) == sorted([*gathered[False], *([3, 3, 6, 6] if told else [])])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return run_train(micro_recipe(tmp_path_factory.mktemp("measured")), "--train.steps", "20", "--train.log_every", "3")


def test_each_line_tells_of_the_last_synchronisation_before_it(run):
    """K = 4 and a line at 1, 3, 6, …: the synchronisation after step 4 is told at step 6, the one after 8 at 9, and so on."""
    told = {line["step"]: line["sync"]["step"] for line in run.lines if line["sync"]}
    assert told == {6: 4, 9: 8, 12: 12, 18: 16, 20: 20}


def test_the_bytes_of_the_rounds_are_the_bytes_of_the_run(run):
    rounds = [line["sync"]["bytes_sent"] for line in run.lines if line["sync"]]
    for kind, sent in run.summary["bytes_sent"].items():
        assert sum(each.get(kind, 0) for each in rounds) == pytest.approx(sent, abs=len(rounds))  # each is rounded down
    for line in (line["sync"] for line in run.lines if line["sync"]):
        assert 0 < line["gradient_share"] <= 1
        assert line["error_norm"] > 0
        assert line["spread"] > 0
        assert set(line["seconds"]) == {"compute", "basis refresh", "encoding", "communication", "evaluation"}


@pytest.mark.parametrize("name", ["ddp-adamw", "ddp-lowrank", "diloco"])
def test_other_methods_tell_what_they_have(name, tmp_path):
    recipe = micro_recipe(tmp_path)
    lacking = [f"--method.{setting}=none" for setting in ("rank", "sync_every") if setting not in lordo.METHODS[name].settings]
    run = run_train(recipe, "--method.name", name, "--train.steps", "8", "--train.log_every", "4", *lacking)
    last = run.lines[-1]["sync"]
    assert last["step"] == 8
    assert (last["gradient_share"] is None) == ("rank" not in lordo.METHODS[name].settings)
    assert last["spread"] == 0 if lordo.METHODS[name].averages_gradients else last["spread"] > 0


def test_the_weights_are_looked_at_in_rounds_that_are_told_only(monkeypatch):
    """With K = 1 every step ends a round: a look at all weights after each of them would make a GPU wait."""
    looks = []
    sample = Measure._sample
    monkeypatch.setattr(Measure, "_sample", lambda self: looks.append(self.optimizer.steps_taken) or sample(self))
    params = parameters(*SHAPES)
    optimizer = lordo.DistributedOptimizer(params, "ddp-adamw", lr=0.01)
    measure = Measure(optimizer, lambda step: step == 5)
    for step in range(1, 9):
        train(optimizer, params, range(step, step + 1))
        measure.stepped(step)
    assert looks == [0, 4, 5]  # at the start; before and after the step that is told
