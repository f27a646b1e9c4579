"""The public optimizer held against the worked examples of `vectors/` and against `reference.run` on random cases."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import lordo
import reference
from reference import canonical

VECTORS = sorted((Path(__file__).parent / "vectors").glob("*.json"))


@dataclass
class Trained:
    """What one worker's optimizer leaves behind."""

    weights: list[list[Tensor]]  # [step][parameter]
    state: list[dict[str, Tensor]]  # [parameter]


def train(initial: list[Tensor], gradients: list[list[list[Tensor]]], *, names=None, **options) -> list[Trained]:
    """Run the optimizer on as many workers as `gradients` [step][worker][parameter] has, with bases by exact SVD."""

    def one_worker(workers) -> Trained:
        parameters = [torch.nn.Parameter(W.clone()) for W in initial]
        named = parameters if names is None else list(zip(names, parameters, strict=True))
        optimizer = lordo.LoRDO(named, basis="svd", workers=workers, **options)
        weights = []
        for by_worker in gradients:
            for p, G in zip(parameters, by_worker[workers.rank], strict=True):
                p.grad = G.clone()
            optimizer.step()
            for p, G in zip(parameters, by_worker[workers.rank], strict=True):
                assert torch.equal(p.grad, G), "the optimizer changed p.grad"
            weights.append([p.detach().clone() for p in parameters])
        return Trained(weights, [state_of(optimizer, p) for p in parameters])

    return lordo.simulate(one_worker, num_workers=len(gradients[0]))


def state_of(optimizer, p) -> dict[str, Tensor]:
    """State of a parameter, its error as such and not in the form in which it is held."""
    state = dict(optimizer.state[p])
    return state | ({"error": optimizer.error_of(p)} if "error" in state else {})


def tensor(numbers) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def random(*shape: int, seed: int, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def random_gradients(shapes, *, steps: int, workers: int, seed: int = 0, dtype=torch.float64):
    """Gaussian, all different: [step][worker][parameter]."""
    generator = torch.Generator().manual_seed(seed)

    def of_one_worker() -> list[Tensor]:
        return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]

    return [[of_one_worker() for _ in range(workers)] for _ in range(steps)]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_worked_example(path):
    example = json.loads(path.read_text())
    options = {k: v for k, v in example["config"].items() if k not in ("workers", "steps", "basis")}
    gradients = [[[tensor(G) for G in of_worker] for of_worker in step] for step in example["gradients"]]

    trained = train([tensor(W) for W in example["initial"]], gradients, names=example["names"], **options)

    for i, (worker, expected_state) in enumerate(zip(trained, example["final_state"], strict=True)):
        for of_step, expected_of_step in zip(worker.weights, example["weights_after_step"], strict=True):
            for W, expected in zip(of_step, expected_of_step[i], strict=True):
                close(W, tensor(expected))
        for name, state in zip(example["names"], worker.state, strict=True):
            expected = expected_state[name]
            assert ("basis" in state) == expected["low_rank"]
            assert ("error" in state) == ("error" in expected)
            assert int(state["step"]) == example["config"]["steps"]
            close(state["exp_avg_sq"], tensor(expected["exp_avg_sq"]))
            if "basis" in state:  # a column of the basis has no sign of its own: neither has a row of exp_avg
                close(state["basis"] @ state["basis"].mT, tensor(expected["projector"]))
                close(state["basis"] @ state["exp_avg"], tensor(expected["lifted_exp_avg"]))
            else:
                close(state["exp_avg"], tensor(expected["exp_avg"]))
            if "error" in state:
                close(canonical(state["error"]), tensor(expected["error"]))


@st.composite
def cases(draw):
    """Initial weights, gradients and options: a low-rank matrix, wide or tall, and up to two others of any kind."""
    rank = draw(st.integers(1, 4))
    m = draw(st.integers(rank + 1, 8))
    n = draw(st.integers(m, 9))
    side = st.integers(1, 8)
    others = st.lists(st.one_of(st.tuples(side, side), st.tuples(side), st.just(())), max_size=2)
    shapes = [draw(st.sampled_from([(m, n), (n, m)])), *draw(others)]
    sync_every = draw(st.integers(1, 4))
    steps = draw(st.integers(1, 4 * sync_every + 1))  # few refreshes: at rank 1 each can make rounding ten times larger
    workers, seed = draw(st.integers(1, 4)), draw(st.integers(0, 10**6))
    gradients = random_gradients(shapes, steps=steps, workers=workers, seed=seed)
    initial = [random(*shape, seed=p) for p, shape in enumerate(shapes)]
    period = st.none() | st.integers(1, 4)
    options = {
        "lr": draw(st.sampled_from([0.003, 0.02])),
        "rank": rank,
        "betas": draw(st.sampled_from([(0.9, 0.99), (0.95, 0.999), (0.0, 0.9)])),
        "eps": draw(st.sampled_from([1e-8, 1e-2])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "omega": draw(st.sampled_from([None, 0.0, 0.5, 0.95, 1.0])),
        "error_feedback": draw(st.booleans()),
        "fullrank_signal": draw(st.sampled_from(["gradient", "gradient+error"])),
        "fullrank_denominator": draw(st.sampled_from(["mean", "channel"])),
        "sync_every": sync_every,
        "sync_exp_avg_every": draw(period),
        "sync_exp_avg_sq_every": draw(period),
        "sync_error_every": draw(period),
    }
    return initial, gradients, options


def spelled_out(options: dict) -> dict:
    """The options with the public defaults filled in, as `reference.run` wants them."""
    K = options["sync_every"]
    defaults = {"omega": max(0.9, 1 - 1 / K), "sync_exp_avg_every": K, "sync_exp_avg_sq_every": K}
    return options | {k: v for k, v in defaults.items() if options[k] is None}


def check(trained: list[Trained], expected: reference.Result, initial: list[Tensor], sync_every: int) -> None:
    """Hold every worker against the reference: the weights after every step and the state after the last."""
    last_sync = len(expected.weights) // sync_every * sync_every
    anchors = expected.weights[last_sync - 1][0] if last_sync else initial
    for i, worker in enumerate(trained):
        for of_step, expected_of_step in zip(worker.weights, expected.weights, strict=True):
            for W, expected_W in zip(of_step, expected_of_step[i], strict=True):
                close(W, expected_W)
        for p, (state, expected_state) in enumerate(zip(worker.state, expected.state[i], strict=True)):
            assert ("basis" in state) == expected_state.low_rank
            assert ("error" in state) == (expected_state.error is not None)
            assert int(state["step"]) == len(expected.weights)
            close(canonical(state["exp_avg_sq"]), expected_state.exp_avg_sq)
            if expected_state.low_rank:
                Q, expected_Q = state["basis"], expected_state.basis
                assert torch.equal(Q, trained[0].state[p]["basis"]), "workers hold different bits of one basis"
                close(Q @ Q.mT, expected_Q @ expected_Q.mT)
                close(Q @ state["exp_avg"], expected_Q @ expected_state.exp_avg)
                close(state["anchor"], anchors[p])
            else:
                close(canonical(state["exp_avg"]), expected_state.exp_avg)
            if "error" in state:
                close(canonical(state["error"]), expected_state.error)


@given(cases())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_random_case(case):
    initial, gradients, options = case
    expected = reference.run(initial, gradients, **spelled_out(options))
    assume(expected.separation > 1e-3)  # tied singular values leave the algorithm undefined, see reference.Result

    check(train(initial, gradients, **options), expected, initial, options["sync_every"])


ONE_MATRIX = {
    "lr": 0.02,
    "rank": 2,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "omega": 0.9,
    "error_feedback": True,
    "fullrank_signal": "gradient+error",
    "fullrank_denominator": "channel",
    "sync_every": 2,
    "sync_exp_avg_every": 2,
    "sync_exp_avg_sq_every": 2,
}


def test_zero_pseudo_gradient_keeps_basis_and_moments():
    """Two workers: the mean of two equal weights is exact, so with lr = 0 the pseudo-gradient is zero to the bit."""
    initial, gradients = [random(7, 4, seed=0)], random_gradients([(7, 4)], steps=6, workers=2)
    options = ONE_MATRIX | {"lr": 0.0}

    trained = train(initial, gradients, **options)

    check(trained, reference.run(initial, gradients, **options), initial, options["sync_every"])
    assert torch.equal(trained[0].state[0]["basis"], train(initial, gradients[:1], **options)[0].state[0]["basis"])


def test_non_finite_pseudo_gradient_keeps_basis_and_moments():
    """An infinite entry of a weight stays infinite, and ∞ − ∞ makes that entry of every Δ a NaN; all else trains on."""
    initial, gradients = [random(4, 7, seed=0)], random_gradients([(4, 7)], steps=6, workers=3)
    initial[0][1, 3] = float("inf")

    trained = train(initial, gradients, **ONE_MATRIX)

    check(trained, reference.run(initial, gradients, **ONE_MATRIX), initial, ONE_MATRIX["sync_every"])
    assert torch.equal(trained[0].state[0]["basis"], train(initial, gradients[:1], **ONE_MATRIX)[0].state[0]["basis"])


def test_a_refresh_that_returns_the_basis_to_the_bit_is_a_refresh():
    """Gradients along e1 alone: every Δ gives Q = e1. The rotation by C = 1 still lifts v where û² has outgrown v̂."""
    initial = [torch.zeros(2, 3, dtype=torch.float64)]
    along_e1 = tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    gradients = [[[size * along_e1]] for size in [0.1] * 30 + [1.0] * 10]
    options = ONE_MATRIX | {"rank": 1, "omega": 1.0}
    options |= {"sync_every": 40, "sync_exp_avg_every": 40, "sync_exp_avg_sq_every": 40}

    check(train(initial, gradients, **options), reference.run(initial, gradients, **options), initial, 40)


@pytest.mark.parametrize("error_feedback", [False, True])
def test_without_fullrank_term_the_subspace_never_changes(error_feedback):
    """The paper's first claim: with ω = 1, Δ never leaves span(Q), so every refresh returns it. With ω < 1 it moves."""
    initial = [random(8, 12, seed=0, dtype=torch.float32)]
    gradients = random_gradients([(8, 12)], steps=20, workers=4, dtype=torch.float32)

    def basis_after(steps: int, omega: float) -> Tensor:
        options = ONE_MATRIX | {"omega": omega, "error_feedback": error_feedback, "rank": 3, "sync_every": 4}
        return train(initial, gradients[:steps], **options)[0].state[0]["basis"]

    def overlap(omega: float) -> float:
        """‖Q1ᵀ Q2‖²_F / r of the first basis and the one after five refreshes."""
        return ((basis_after(1, omega).mT @ basis_after(20, omega)).square().sum() / 3).item()

    assert overlap(1.0) == pytest.approx(1, abs=1e-4)
    assert overlap(0.5) < 0.9
