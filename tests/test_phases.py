"""Settings that change on the way: pure functions of the step, the same on every worker, unharmed by a resume."""

import pytest
import torch

import lordo
from common import assert_same_bits, everything, parameters, reloaded, train
from lordo.trainer.phases import changes_at, settings_at
from lordo.trainer.prepared import outline, prepare
from lordo.trainer.recipe import load, override
from test_train import micro_recipe, train_worker

OPTIONS = {"lr": 0.01, "rank": 2, "sync_every": 3}
LATER = {"betas": (0.8, 0.999), "omega": 0.5, "eps": 1e-6}


@pytest.fixture
def config(tmp_path):
    return override(load(micro_recipe(tmp_path)), {"train.steps": 8, "train.warmup_steps": 0, "train.schedule": "constant"})


# ---- the core


def test_a_change_acts_from_the_next_step_on_as_if_the_new_moments_had_been_the_old_ones_corrected():
    """û and v̂ stay as they are at the change: by hand for one number with gradient 1 then 3, β1 0.9 then 0.5, β2 0.99 then 0.9."""
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = lordo.DistributedOptimizer([p], "ddp-adamw", lr=1.0, betas=(0.9, 0.99), eps=0.0)
    p.grad = torch.ones(1)
    optimizer.step()
    assert p.item() == pytest.approx(-1)

    optimizer.change_settings(betas=(0.5, 0.9), lr=0.1)
    p.grad = torch.full((1,), 3.0)
    optimizer.step()

    u, v = 0.5 * (1 - 0.5) + 0.5 * 3, 0.9 * (1 - 0.9) + 0.1 * 9  # after the change: û = v̂ = 1 at t = 1
    assert p.item() == pytest.approx(-1 - 0.1 * (u / (1 - 0.5**2)) / (v / (1 - 0.9**2)) ** 0.5, rel=1e-5)


def test_a_change_to_the_same_values_changes_nothing():
    def trained(**change):
        params = parameters((6, 9), (5,))
        optimizer = lordo.LoRDO(params, betas=(0.9, 0.99), omega=0.7, **OPTIONS)
        train(optimizer, params, 4)
        optimizer.change_settings(**change)
        train(optimizer, params, range(5, 9))
        return everything(optimizer)

    assert_same_bits(trained(betas=(0.9, 0.99), omega=0.7, lr=0.01), trained())


@pytest.mark.parametrize("taken", [2, 4, 5, 6])
def test_a_resume_before_at_or_after_a_change_is_the_uninterrupted_run(taken):
    """Settings are given at every step, as the trainer does, and change at step 5."""

    def steps(optimizer, params, numbers):
        for step in numbers:
            optimizer.change_settings(**(LATER if step >= 5 else {}))
            train(optimizer, params, range(step, step + 1))

    def fresh():
        params = parameters((6, 9), (5,), (4, 4))
        return params, lordo.LoRDO(params, **OPTIONS)

    params, optimizer = fresh()
    steps(optimizer, params, range(1, taken + 1))
    saved, weights = reloaded(optimizer.state_dict()), [p.detach().clone() for p in params]
    steps(optimizer, params, range(taken + 1, 9))

    again, resumed = fresh()
    with torch.no_grad():
        for p, w in zip(again, weights, strict=True):
            p.copy_(w)
    resumed.load_state_dict(saved)
    steps(resumed, again, range(taken + 1, 9))
    assert_same_bits(everything(resumed), everything(optimizer))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rank": 3}, "rank decides what is kept or sent, and cannot change while training goes on"),
        ({"sync_every": 3}, "sync_every decides what is kept or sent"),
        ({"omgea": 1.0}, "method 'lordo': unknown setting 'omgea'; did you mean 'omega'"),
        ({"omega": 1.5}, r"omega must be in \[0, 1\]; got 1.5"),
    ],
)
def test_a_change_that_cannot_be(settings, sentence):
    optimizer = lordo.LoRDO(parameters((6, 9)), **OPTIONS)
    before = dict(optimizer.param_groups[0])
    with pytest.raises(ValueError, match=sentence):
        optimizer.change_settings(**{"lr": 0.5, **settings})
    assert optimizer.param_groups[0] == before


# ---- the recipe


def test_settings_of_a_step(config):
    phases = [{"from_step": 3, "omega": 0.5, "lr": 1e-3}, {"from_step": 6, "betas": (0.8, 0.9), "omega": 0.6}]
    config = override(config, {"phase": phases, "train.warmup_steps": 4, "method.omega": 0.9})
    assert [changes_at(step, config) for step in (2, 3, 5, 6, 8)] == [
        {"lr": pytest.approx(3e-3), "omega": 0.9},
        {"lr": pytest.approx(0.75e-3), "omega": 0.5},
        {"lr": 1e-3, "omega": 0.5},
        {"lr": 1e-3, "omega": 0.6, "betas": (0.8, 0.9)},
        {"lr": 1e-3, "omega": 0.6, "betas": (0.8, 0.9)},
    ]
    assert settings_at(8, config) == {"lr": 1e-3, "omega": 0.6, "betas": (0.8, 0.9), "rank": 4, "sync_every": 4}


def test_every_worker_changes_at_the_same_step(config, tmp_path):
    """A run with a phase is, step by step, the run without one up to it; after it every group of every worker has the new settings."""
    changed = override(config, {"phase": [{"from_step": 5, **LATER}]})

    def recorded(config):
        prepared, lines = prepare(config), []

        class Observer:
            def progressed(self, progress):
                lines.append(progress.loss)

        def one(workers):
            optimizer = train_worker(prepared, workers, tmp_path, Observer() if workers.rank == 0 else None).optimizer
            return [[group[name] for name in LATER] for group in optimizer.param_groups]

        return lines, lordo.simulate(one, config.workers)

    (plain, _), (losses, groups) = recorded(config), recorded(changed)
    assert losses[:5] == plain[:5]  # the loss of a step is taken before its weights change
    assert losses[5] != plain[5]
    assert groups == [[list(LATER.values())] * 2] * config.workers


@pytest.mark.parametrize(
    ("phase", "sentence"),
    [
        ({"scale": 0.5}, "method 'lordo': unknown setting 'scale'"),
        ({"lr": float("1e300")}, None),
    ],
)
def test_a_phase_is_checked_before_the_run(config, phase, sentence):
    config = override(config, {"phase": [{"from_step": 5, **phase}]})
    if sentence is None:
        assert outline(config).config == config
        return
    with pytest.raises(ValueError, match=sentence):
        outline(config)
