"""What a step costs, counted: products with the basis, and reads and writes of the size of the weight. No clock is read."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lordo
from common import give_gradients, parameters, train

M, N, R = 96, 200, 4
PRODUCT = 2 * M * N * R  # operations of one product with Q


class Costs(TorchDispatchMode):
    """Operations in matrix products (torch's own counter passes over those that add in place), calls, and full-size reads and writes."""

    def __init__(self):
        super().__init__()
        self.operations = 0
        self.calls = Counter()
        self.passes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        if func.is_view or name == "alias":
            return result  # moves nothing
        self.calls[name] += 1
        factors = {"mm": args[:2], "bmm": args[:2], "addmm": args[1:3], "baddbmm": args[1:3]}.get(name)
        if factors:
            self.operations += 2 * factors[0].numel() * factors[1].shape[-1]
        self.passes["read"] += sum(a.numel() == M * N for a in args if isinstance(a, torch.Tensor))
        self.passes["written"] += isinstance(result, torch.Tensor) and result.numel() == M * N
        return result


def costs(optimizer):
    with Costs() as counted:
        optimizer.step()
    return counted


def prepared(method="lordo", shape=(M, N), **options):
    """A weight with a gradient, in the middle of a round."""
    params = parameters(shape)
    optimizer = lordo.DistributedOptimizer(params, method, lr=0.01, rank=R, **options)
    train(optimizer, params, 2)
    give_gradients(params, step=3)
    return optimizer


@pytest.mark.parametrize("shape", [(M, N), (N, M)], ids=["wide", "tall"])
@pytest.mark.parametrize(
    ("options", "products", "read", "written"),
    [
        # read: is G finite; QᵀG; W and G for the full-rank term; W for the lift
        ({"error_feedback": False}, 2, 5, 2),
        # besides: S and G for S + G
        ({"error_feedback": True}, 2, 7, 3),
        ({"error_feedback": True, "fullrank_denominator": "mean"}, 2, 7, 3),
        ({"error_feedback": False, "omega": 1.0}, 2, 3, 1),
    ],
    ids=["without error", "with error", "with one mean", "without full-rank term"],
)
def test_a_step_of_lordo_takes_two_products(shape, options, products, read, written):
    counted = costs(prepared(shape=shape, sync_every=100, **options))
    assert counted.operations == products * PRODUCT
    assert counted.passes == {"read": read, "written": written}


def test_lordo_needs_far_fewer_operations_than_ldadam():
    lordo_step, ldadam_step = costs(prepared("lordo", sync_every=100)), costs(prepared("ldadam"))
    assert lordo_step.operations <= ldadam_step.operations / 3
    assert lordo_step.passes.total() <= ldadam_step.passes.total() / 2


def test_small_weights_of_one_shape_take_hardly_more_calls_than_one():
    """But for three calls a weight (is it finite, S + G, and the copies) they step as one."""
    calls = {}
    for num in (1, 6):
        params = parameters(*[(12, 20)] * num)
        optimizer = lordo.LoRDO(params, lr=0.01, rank=R, sync_every=100)
        train(optimizer, params, 2)
        give_gradients(params, step=3)
        calls[num] = costs(optimizer).calls
    assert [calls[1][name] for name in ("mm", "addmm", "bmm", "baddbmm")] == [1, 1, 0, 0]
    assert [calls[6][name] for name in ("mm", "addmm", "bmm", "baddbmm")] == [0, 0, 1, 1]
    assert calls[6]["lerp"] == calls[1]["lerp"] == 1


def test_a_changing_learning_rate_changes_no_operation():
    optimizer = prepared(sync_every=100)
    counted = []
    for lr in (0.01, 0.02):
        optimizer.param_groups[0]["lr"] = lr
        counted.append(costs(optimizer).calls)
    assert counted[0] == counted[1]
