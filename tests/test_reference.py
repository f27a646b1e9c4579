"""The oracle itself, held against the worked examples of `vectors/` and against what can be checked by hand."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import reference

VECTORS = sorted((Path(__file__).parent / "vectors").glob("*.json"))
PLAIN = {
    "lr": 0.02,
    "rank": 2,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "omega": 0.9,
    "error_feedback": True,
    "fullrank_signal": "gradient+error",
    "fullrank_denominator": "channel",
    "sync_every": 3,
    "sync_exp_avg_every": 3,
    "sync_exp_avg_sq_every": 3,
}


def tensor(numbers) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_gradients(*shape: int, steps: int, workers: int) -> list[list[list[Tensor]]]:
    return [[[random(*shape, seed=100 * t + i)] for i in range(workers)] for t in range(1, steps + 1)]


def test_vectors_are_there():
    assert len(VECTORS) >= 4


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_worked_example(path):
    example = json.loads(path.read_text())
    config = {k: v for k, v in example["config"].items() if k not in ("workers", "steps", "basis")}
    gradients = [[[tensor(G) for G in of_worker] for of_worker in step] for step in example["gradients"]]

    result = reference.run([tensor(W) for W in example["initial"]], gradients, **config)

    assert len(result.weights) == example["config"]["steps"] == len(example["weights_after_step"])
    for step, expected_step in zip(result.weights, example["weights_after_step"], strict=True):
        for of_worker, expected_of_worker in zip(step, expected_step, strict=True):
            for W, expected in zip(of_worker, expected_of_worker, strict=True):
                close(W, tensor(expected))
    for of_worker, expected_of_worker in zip(result.state, example["final_state"], strict=True):
        for name, state in zip(example["names"], of_worker, strict=True):
            expected = expected_of_worker[name]
            assert state.low_rank == expected["low_rank"]
            assert (state.error is not None) == ("error" in expected)
            close(state.exp_avg_sq, tensor(expected["exp_avg_sq"]))
            if state.low_rank:  # a column of Q has no sign of its own: neither has a row of u; v is a square
                close(state.basis @ state.basis.mT, tensor(expected["projector"]))
                close(state.basis @ state.exp_avg, tensor(expected["lifted_exp_avg"]))
            else:
                close(state.exp_avg, tensor(expected["exp_avg"]))
            if state.error is not None:
                close(state.error, tensor(expected["error"]))


@pytest.mark.parametrize("shape", [(), (5,), (2, 6)], ids=str)
def test_one_full_rank_worker_without_quasi_hyperbolic_term_is_adamw(shape):
    gradients = random_gradients(*shape, steps=7, workers=1)
    theirs = torch.nn.Parameter(random(*shape, seed=0))
    adamw = torch.optim.AdamW([theirs], lr=0.02, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)

    ours = reference.run([theirs.detach().clone()], gradients, **PLAIN | {"omega": 1.0})

    for step, of_step in zip(gradients, ours.weights, strict=True):
        theirs.grad = step[0][0].clone()
        adamw.step()
        close(of_step[0][0], theirs.detach())


def test_a_tall_weight_is_its_transpose():
    initial, gradients = random(9, 5, seed=0), random_gradients(9, 5, steps=7, workers=2)
    transposed = [[[G.mT for G in of_worker] for of_worker in step] for step in gradients]

    tall, wide = reference.run([initial], gradients, **PLAIN), reference.run([initial.mT], transposed, **PLAIN)

    assert torch.equal(tall.weights[-1][1][0], wide.weights[-1][1][0].mT)
    assert torch.equal(tall.state[1][0].error, wide.state[1][0].error)


def test_first_step_by_hand():
    """G = diag(3, 2, 1), r = 1, ε = 1, ω = ½: Q = e1, û = g = (3, 0, 0), D = (4, 1, 1), μ = 2; d = ½ G/2 + ½ e1 û/D."""
    options = {"lr": 1.0, "rank": 1, "eps": 1.0, "weight_decay": 0.0, "omega": 0.5, "fullrank_denominator": "mean"}
    result = reference.run([torch.zeros(3, 3)], [[[torch.diag(tensor([3.0, 2.0, 1.0]))]]], **PLAIN | options)

    close(result.weights[0][0][0], -torch.diag(tensor([3 / 4 + 3 / 8, 2 / 4, 1 / 4])))
    close(result.state[0][0].error, torch.diag(tensor([0.0, 2.0, 1.0])))


def test_error_is_averaged_only_when_asked():
    initial, gradients = [random(4, 6, seed=0)], random_gradients(4, 6, steps=4, workers=2)

    def errors(**options):
        return [of_worker[0].error for of_worker in reference.run(initial, gradients, **PLAIN | options).state]

    own, common = errors(), errors(sync_error_every=4)
    assert not torch.allclose(own[0], own[1])
    assert torch.equal(common[0], common[1])
    close(common[0], (own[0] + own[1]) / 2)


def test_zero_pseudo_gradient_keeps_the_basis():
    gradients = random_gradients(4, 6, steps=3, workers=2)
    result = reference.run([random(4, 6, seed=0)], gradients, **PLAIN | {"lr": 0.0})

    first, _ = reference.leading(reference.mean([gradients[0][i][0] for i in range(2)]), 2)
    assert torch.equal(result.state[0][0].basis, first)


def test_non_finite_pseudo_gradient_keeps_the_basis():
    gradients = random_gradients(4, 6, steps=3, workers=2)
    gradients[1][1][0][2, 3] = float("nan")
    result = reference.run([random(4, 6, seed=0)], gradients, **PLAIN)

    first, _ = reference.leading(reference.mean([gradients[0][i][0] for i in range(2)]), 2)
    assert torch.equal(result.state[0][0].basis, first)
