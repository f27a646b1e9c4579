"""The closed forms held against what is counted, to the byte, for every row of the table; and against hand-checkable numbers."""

from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lordo
from lordo.accounting import Weight, adamw_state_bytes, measured_state_bytes, moment_numel, state_bytes, traffic, weights_of
from lordo.sync.schedule import PERIODS

# The values a setting may have; a setting that no row had before needs a line here.
VALUES = {
    "lr": st.just(1e-3),
    "betas": st.just((0.9, 0.99)),
    "eps": st.just(1e-8),
    "weight_decay": st.just(0.1),
    "rank": st.integers(1, 6),
    "basis": st.sampled_from(["auto", "svd", "subspace"]),
    "basis_every": st.integers(1, 4),
    "basis_interpolation": st.just(0.9),
    "scale": st.just(0.25),
    "sync_every": st.integers(1, 5),
    "sync_exp_avg_every": st.none() | st.integers(1, 5),
    "sync_exp_avg_sq_every": st.none() | st.integers(1, 5),
    "sync_error_every": st.none() | st.integers(1, 5),
    "sync_wire": st.sampled_from(["float32", "bfloat16", "int8", "int4"]),
    "sync_wire_moments": st.sampled_from([None, "float32", "int8"]),
    "sync_wire_basis": st.sampled_from([None, "float32", "int8"]),
    "sync_split": st.booleans(),
    "sync_overlap": st.integers(0, 3),
    "sync_fragments": st.integers(1, 3),
    "outer": st.sampled_from(["none", "nesterov"]),
    "outer_lr": st.just(0.7),
    "outer_momentum": st.just(0.9),
    "omega": st.sampled_from([None, 0.5, 1.0]),
    "error_feedback": st.booleans(),
    "error_dtype": st.sampled_from(["float32", "bfloat16", "int8", "int6"]),
    "moment_dtype": st.sampled_from(["float32", "bfloat16"]),
    "anchor_device": st.sampled_from(["same", "cpu"]),
    "fullrank_signal": st.sampled_from(["gradient", "gradient+error"]),
    "fullrank_denominator": st.sampled_from(["mean", "channel"]),
}
SHAPES = [(8, 12), (12, 8), (7, 7), (3, 9), (1, 5), (6,), (), (2, 3, 4), (0, 4)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@st.composite
def runs(draw, method: lordo.methods.Method):
    """Settings of a method, parameters (shape, dtype, whether it ever has a gradient), workers, steps, final average."""
    given_settings = draw(st.fixed_dictionaries({}, optional={name: VALUES[name] for name in method.settings}))
    if "rank" in method.settings:
        given_settings.setdefault("rank", 3)
    if "sync_every" in method.settings:
        given_settings.setdefault("sync_every", 4)
    shortest = min((every for every in map(given_settings.get, PERIODS.values()) if every is not None), default=1)
    for name, most in (("sync_overlap", shortest - 1), ("sync_fragments", shortest)):  # what would be refused
        if name in given_settings:
            given_settings[name] = min(given_settings[name], most)
    parameter = st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.sampled_from([True, True, True, False]))
    parameters = [((8, 12), draw(st.sampled_from(DTYPES)), True), *draw(st.lists(parameter, max_size=4))]
    return given_settings, parameters, draw(st.integers(1, 4)), draw(st.integers(1, 11)), draw(st.booleans())


@pytest.mark.filterwarnings("ignore:step .* skipped on this worker")
@pytest.mark.parametrize("name", lordo.METHODS)
def test_predicted_bytes_are_the_counted_bytes(name):
    method = lordo.METHODS[name]

    @given(runs(method))
    @settings(max_examples=40, deadline=None, derandomize=True)
    def holds(run):
        given_settings, parameters, num_workers, steps, final_average = run

        def work(workers):
            draw = torch.Generator().manual_seed(workers.rank)
            weights = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype, _ in parameters]
            frozen = torch.nn.Parameter(torch.ones(9, 9), requires_grad=False)
            optimizer = lordo.DistributedOptimizer([*weights, frozen], method, workers=workers, **given_settings)
            for step in range(steps):
                for p, (shape, dtype, has_gradient) in zip(weights, parameters, strict=True):
                    if has_gradient:
                        p.grad = torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
                        if step == 2 and workers.rank == 1:
                            p.grad.fill_(float("nan"))  # a step that is skipped sends what any other sends
                optimizer.step()
            if final_average:
                optimizer.average_parameters()
                optimizer.average_parameters()  # the second time nothing is left to average
            sent = Counter({tag: workers.bytes_sent(tag) for tag in workers.moved})
            return sent, workers.bytes_sent(), measured_state_bytes(optimizer), weights_of(optimizer.param_groups)

        for sent, total, held, weights in lordo.simulate(work, num_workers):
            resolved = method.resolve(given_settings)
            predicted = traffic(method, weights, resolved, steps=steps, num_workers=num_workers, final_average=final_average)
            assert +sent == +predicted
            assert total == predicted.total()
            assert +held == state_bytes(method, weights, resolved)
            assert len(weights) == len(parameters)  # the frozen one costs nothing

    holds()


def test_one_worker_sends_nothing():
    for method in lordo.METHODS.values():
        resolved = method.resolve({})
        assert traffic(method, [Weight((8, 8))], resolved, steps=100, num_workers=1, final_average=True).total() == 0


@given(st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_adamw_state_is_what_torch_holds(parameters):
    weights = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in parameters]
    optimizer = torch.optim.AdamW(weights, foreach=False)
    for p in weights:
        p.grad = torch.ones_like(p)
    optimizer.step()

    held = measured_state_bytes(optimizer)
    assert set(held) == {"step", "exp_avg", "exp_avg_sq"}
    assert adamw_state_bytes(weights_of(optimizer.param_groups)) == held.total()


# ---- the numbers of the paper ("What it costs" in algorithm.md)

LORDO, DDP = lordo.METHODS["lordo"], lordo.METHODS["ddp-adamw"]
ROUNDS = 192  # 6144 steps of K = 32, as in the paper


def matrices(width: int, mlp: int, rank: int, layers: int = 12) -> list[Weight]:
    """The low-rank weights of a Llama: q, k, v, o; gate, up, down."""
    shapes = [(width, width)] * 4 + [(mlp, width)] * 2 + [(width, mlp)]
    return [Weight(shape, rank) for shape in shapes * layers]


def sent(method: lordo.methods.Method, weights: list[Weight], *, steps: int, **given_settings: int) -> Counter[str]:
    """Bytes sent by each of four workers."""
    return traffic(method, weights, method.resolve(given_settings), steps=steps, num_workers=4)


def test_paper_25_6_times_less_is_sent():
    """K = 32, r/s = 1/8: s L against (s L + 2 r L)/K, "25.6 times less than DDP"; the basis, once per K, comes on top."""
    weights = matrices(width=768, mlp=2048, rank=96)
    lordo_sent = sent(LORDO, weights, steps=32 * ROUNDS, rank=96, sync_every=32)
    ddp_sent = sent(DDP, weights, steps=32 * ROUNDS).total()

    averaged = sum(lordo_sent[tag] for tag in ("parameters", "exp_avg", "exp_avg_sq"))
    assert Fraction(ddp_sent, averaged) == Fraction(256, 10)
    assert 24.5 < ddp_sent / lordo_sent.total() < 25.6
    assert set(lordo_sent) == {"parameters", "exp_avg", "exp_avg_sq", "step", "basis", "first gradient"}


@pytest.mark.parametrize(("side", "rank", "times"), [(2048, 256, 8), (768, 64, 12)])
def test_paper_moments_shrink_by_side_over_rank(side, rank, times):
    """Moments shrink by s/r: 8 at 256 of 2048, 12 at 64 of 768; a matrix of any length, tall or wide."""
    for shape in [(side, side), (side, 3 * side), (3 * side, side)]:
        full, low = Weight(shape), Weight(shape, rank)
        assert Fraction(moment_numel(full), moment_numel(low)) == times


def test_one_matrix_by_hand():
    """W (4, 6), r = 2, K = 5, M = 2, float32, 12 steps: numbers that a pencil gives."""
    weights = [Weight((4, 6), 2)]
    resolved = LORDO.resolve({"rank": 2, "sync_every": 5})

    held = {"step": 4, "exp_avg": 4 * 2 * 6, "exp_avg_sq": 4 * 2 * 6, "basis": 4 * 4 * 2, "error": 4 * 24, "anchor": 4 * 24}
    held["error_projection"] = 4 * 2 * 6
    assert state_bytes(LORDO, weights, resolved) == held
    # an all-reduce of N bytes sends 2 (M−1)/M N = N from each of two workers, a broadcast (M−1)/M N = N/2 on average
    bytes_sent = {
        "parameters": 2 * 96 + 96,  # after steps 5 and 10, and at the end
        "exp_avg": 2 * 48,
        "exp_avg_sq": 2 * 48,
        "step": 2 * 4,  # one float32, with the first moment
        "first gradient": 96 // 2,  # a sum for one worker
        "basis": 3 * 32 // 2,  # the first one, and after steps 5 and 10
    }
    assert traffic(LORDO, weights, resolved, steps=12, num_workers=2, final_average=True) == bytes_sent
