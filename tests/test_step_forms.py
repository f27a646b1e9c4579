"""The forms in which state is held: what is exact equals the plain equations, what is rounded is right on average."""

import copy
import re

import pytest
import torch

import lordo
from common import assert_same_bits, everything, give_gradients, parameters, randn, reloaded, train
from lordo.lowrank import canonical
from lordo.optim import blocks, stacks
from lordo.optim.error import canonical_state, error_of, give_error_, new_error, take_error_
from lordo.optim.lowrank_step import lowrank_step_
from lordo.optim.options import LOCAL_DEFAULTS
from lordo.optim.rounding import pack6, unpack6

pytestmark = pytest.mark.usefixtures("rng_untouched")

SHAPES = [(6, 9), (9, 6), (7, 7)]
OPTIONS = {"lr": 0.01, "rank": 2, "sync_every": 4, "weight_decay": 0.1}
SIGNALS = ["gradient", "gradient+error"]
MEANS = ["mean", "channel"]
ROUNDED = ["bfloat16", "int8", "int6"]


# -- S and h ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("over", MEANS)
def test_sums_kept_apart_equal_the_error_itself(shape, signal, over):
    """The fast path (S, h) against the plain one (E) over two rounds with different bases."""
    options = LOCAL_DEFAULTS | {"omega": 0.7, "fullrank_signal": signal, "fullrank_denominator": over, "weight_decay": 0.1}
    weights, states = {}, {}
    for apart in (False, True):
        (w,) = parameters(shape, dtype=torch.float64)
        m, n, tall = min(shape), max(shape), shape[0] > shape[1]
        zeros = {key: torch.zeros(2, n, dtype=torch.float64) for key in ("exp_avg", "exp_avg_sq")}
        state = {"step": torch.zeros(()), **zeros, **new_error(w, tall=tall, rank=2, error_dtype="float32", apart=apart)}
        for step in range(1, 9):
            if step in (1, 5):
                take_error_(canonical_state(state, tall=tall), w) if step == 5 else None
                state["basis"] = torch.linalg.qr(randn(m, 2, seed=step, dtype=torch.float64))[0]
            gradient = randn(*shape, seed=100 + step, dtype=torch.float64)
            state["error"].add_(gradient)
            state["step"] += 1
            lowrank_step_(canonical(w.data), canonical(gradient), canonical_state(state, tall=tall), options)
        weights[apart], states[apart] = w.detach(), state
    torch.testing.assert_close(weights[True], weights[False], rtol=0, atol=1e-12)
    assert states[True].keys() - states[False].keys() == {"error_projection"}
    sums = take_error_(canonical_state(states[True], tall=tall), w)
    torch.testing.assert_close(sums, canonical(states[False]["error"]), rtol=0, atol=1e-12)


def test_looking_at_the_error_changes_nothing():
    params = parameters(*SHAPES)
    optimizer = lordo.LoRDO(params, **OPTIONS)
    train(optimizer, params, 6)
    before = everything(optimizer)
    errors = [optimizer.error_of(p) for p in params]
    assert_same_bits(before, everything(optimizer))
    for p, error in zip(params, errors, strict=True):
        inside = optimizer.state[p]["basis"].mT @ canonical(error)
        assert float(inside.abs().max()) < 1e-5 * float(error.abs().max())
        torch.testing.assert_close(optimizer.take_error(p), error)


def test_a_long_round_settles_by_itself(monkeypatch):
    """Sums that grow for ever would lose the gradient's last bits."""
    from lordo.optim import local

    results = []
    for every in (3, 1000):
        monkeypatch.setattr(local, "SETTLE_EVERY", every)
        params = parameters((6, 9), dtype=torch.float64)
        optimizer = lordo.LoRDO(params, **OPTIONS | {"sync_every": 100})
        train(optimizer, params, 10)
        results.append((params[0].detach(), float(optimizer.state[params[0]]["error_projection"].abs().max())))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-12)
    assert results[0][1] < results[1][1]


# -- stacks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [{"error_feedback": False}, {}, {"error_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("over", MEANS)
def test_a_stack_of_weights_equals_one_after_the_other(error, signal, over, monkeypatch):
    options = OPTIONS | {"fullrank_signal": signal, "fullrank_denominator": over, "omega": 0.8} | error
    results = []
    for small in (0, 1000):
        monkeypatch.setattr(stacks, "SMALL_ELEMENTS", small)
        params = parameters(*SHAPES, *SHAPES, (6, 9), (20, 30))
        optimizer = lordo.LoRDO(params, **options)
        train(optimizer, params, 6)
        results.append([p.detach() for p in params])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_weights_with_another_number_of_steps_are_not_stacked_together():
    params, alone = parameters((6, 9), (6, 9)), parameters((6, 9), (6, 9))
    optimizer = lordo.LoRDO(params, **OPTIONS | {"sync_every": 100})
    apart = [lordo.LoRDO([p], **OPTIONS | {"sync_every": 100}) for p in alone]
    for step in range(1, 5):
        give_gradients(params, step=step)
        give_gradients(alone, step=step)
        if step == 2:
            params[1].grad = alone[1].grad = None
        optimizer.step()
        for single in apart:
            single.step()
    torch.testing.assert_close(params, alone)


# -- rounded state ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int6"])
def test_rounding_is_right_on_average(kind):
    """The mean over many roundings comes closer to the number than one rounding step, by far."""
    exact = canonical(randn(18, 8, seed=1) * torch.logspace(-6, 3, 8))
    state = new_error(exact, tall=False, rank=1, error_dtype=kind, apart=False) | {"basis": torch.zeros(8, 1), "step": torch.zeros(())}
    step = {"bfloat16": exact.abs() / 128, "int8": exact.abs().amax(0, True) / 127, "int6": exact.abs().amax(0, True) / 31}[kind]
    total = torch.zeros(8, 18, dtype=torch.float64)
    for place in range(400):
        state["step"].fill_(place)
        give_error_(state, exact.clone())
        held = error_of(state, exact)
        assert bool((held - exact).abs().le(1.01 * step).all())
        total += held.double()
    assert bool((total / 400 - exact).abs().le(0.15 * step).all())


@pytest.mark.parametrize("kind", ["int8", "int6"])
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e38], ids=str)
def test_scaled_forms_hold_zero_and_extremes(kind, value):
    exact = torch.full((3, 5), value)
    state = new_error(exact, tall=False, rank=1, error_dtype=kind, apart=False) | {"basis": torch.zeros(3, 1), "step": torch.ones(())}
    give_error_(state, exact.clone())
    held = error_of(state, exact)
    assert bool(held.isfinite().all())
    assert bool((held - value).abs().le(max(value / 30, 1e-43)).all())


@pytest.mark.parametrize("rows", range(1, 10))
def test_six_bits_four_in_three_bytes(rows):
    numbers = (torch.arange(rows * 7) * 11 % 64).to(torch.uint8).view(rows, 7)
    packed = pack6(numbers)
    assert packed.shape == (3, (rows + 3) // 4, 7)
    assert torch.equal(unpack6(packed, rows), numbers)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options", [{"error_dtype": "int8"}, {"error_dtype": "int6"}, {"error_dtype": "bfloat16"}, {"moment_dtype": "bfloat16"}], ids=str
)
def test_rounded_state_trains_almost_alike(options, weight_dtype):
    """Twelve steps with three refreshes: weights stay within a few hundredths of the way they went."""
    if weight_dtype == torch.bfloat16 and "moment_dtype" in options:
        options = options | {"error_dtype": "int8"}
    params, exact = (parameters((40, 60), (60, 40), (5,), dtype=weight_dtype) for _ in range(2))
    start = [p.detach().clone() for p in params]
    rounded = lordo.LoRDO(params, **OPTIONS | {"rank": 4} | options)
    plain = lordo.LoRDO(exact, **OPTIONS | {"rank": 4})
    train(rounded, params, 12)
    train(plain, exact, 12)
    for p, q, before in zip(params, exact, start, strict=True):
        assert float((p - q).detach().norm()) < 0.2 * float((q - before).detach().norm())
        assert p.dtype == weight_dtype
    assert all(t.isfinite().all() for t in everything(rounded).values())


@pytest.mark.parametrize(
    "options",
    [{"error_dtype": "int8", "moment_dtype": "bfloat16"}, {"error_dtype": "int6"}, {"error_dtype": "bfloat16", "anchor_device": "cpu"}],
    ids=str,
)
def test_rounded_state_resumes_to_the_bit(options):
    params = parameters(*SHAPES, (5,))
    optimizer = lordo.LoRDO(params, **OPTIONS | options)
    train(optimizer, params, 5)
    saved, weights = reloaded(optimizer.state_dict()), [p.detach().clone() for p in params]
    train(optimizer, params, range(6, 11))
    again = [torch.nn.Parameter(w) for w in weights]
    resumed = lordo.LoRDO(again, **OPTIONS | options)
    resumed.load_state_dict(saved)
    train(resumed, again, range(6, 11))
    assert_same_bits(everything(optimizer), everything(resumed))


@pytest.mark.parametrize("over", MEANS)
def test_a_rounded_step_allocates_no_more_than_a_block(over, monkeypatch):
    from test_optim import LargestAllocation

    monkeypatch.setattr(blocks, "CPU_ELEMENTS", 96 * 10)
    params = parameters((96, 200), dtype=torch.bfloat16)
    optimizer = lordo.LoRDO(params, lr=0.01, rank=4, sync_every=100, error_dtype="int8", fullrank_denominator=over)
    train(optimizer, params, 2)
    give_gradients(params, step=3)
    with LargestAllocation() as largest:
        optimizer.step()
    assert largest.num_bytes <= max(4 * 96 * 10, 4 * 4 * 200)


def test_an_average_of_rounded_errors_is_their_mean():
    options = OPTIONS | {"rank": 4, "error_dtype": "int8", "sync_error_every": 3, "sync_every": 100}

    def work(workers):
        params = parameters((40, 60))
        optimizer = lordo.LoRDO(params, workers=workers, **options)
        train(optimizer, params, 2, worker=workers.rank)
        plain = copy.deepcopy(optimizer)
        plain.after = []  # the third step without the average
        plain._copied_from = 1
        for each in (optimizer, plain):
            each_params = [p for group in each.param_groups for p in group["params"]]
            give_gradients(each_params, step=3, worker=workers.rank)
            each.step()
        return optimizer.error_of(params[0]), plain.error_of(plain.param_groups[0]["params"][0])

    results = lordo.simulate(work, 3)
    mean = torch.stack([own for _, own in results]).mean(0)
    step = mean.abs().amax() / 127
    for averaged, _ in results:
        assert float((averaged - mean).abs().max()) <= 1.01 * float(step)


# -- the anchor ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", ["none", "nesterov"])
def test_an_anchor_in_host_memory_changes_nothing(outer):
    def final(anchor_device):
        def work(workers):
            params = parameters(*SHAPES, (5,))
            optimizer = lordo.DistributedOptimizer(params, "lordo", workers=workers, anchor_device=anchor_device, outer=outer, **OPTIONS)
            train(optimizer, params, 9, worker=workers.rank)
            return everything(optimizer)

        return lordo.simulate(work, 2)[0]

    assert_same_bits(final("same"), final("cpu"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"error_dtype": "int4"}, "error_dtype must be one of 'float32', 'bfloat16', 'int8', 'int6'; got 'int4'"),
        ({"moment_dtype": torch.bfloat16}, "moment_dtype must be one of 'float32', 'bfloat16'; got torch.bfloat16"),
        ({"anchor_device": "gpu"}, "anchor_device must be 'same' (as the weight) or 'cpu'; got 'gpu'"),
    ],
)
def test_unknown_forms_are_refused(options, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        lordo.LoRDO(parameters((6, 9)), **OPTIONS | options)
