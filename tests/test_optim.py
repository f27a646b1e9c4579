"""LoRDO on one worker as a torch optimizer: what it equals, what it leaves alone, what it holds, what it refuses."""

import copy
import inspect
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lordo
from common import assert_same_bits, everything, give_gradients, parameters, randn, reloaded, scaled_step, train
from lordo.optim import fullrank_step
from lordo.optim.local import MAX_SKIPPED_IN_A_ROW

pytestmark = pytest.mark.usefixtures("rng_untouched")

SHAPES = ((6, 9), (9, 6), (7, 7), (5,), (), (4, 3, 2), (2, 3, 2, 2), (2, 40))  # the first three are low-rank at rank 2
OPTIONS = {"lr": 0.01, "rank": 2, "sync_every": 3, "weight_decay": 0.1}
SIGNALS = ["gradient", "gradient+error"]


# -- equal to AdamW ----------------------------------------------------------------------------------------------------------


def adamw_twin(shapes, *, dtype=torch.float32, scale=0.1, **options):
    """LoRDO with everything full-rank and AdamW, on parameters of the same values."""
    ours, theirs = parameters(*shapes, dtype=dtype, scale=scale), parameters(*shapes, dtype=dtype, scale=scale)
    both = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1} | options
    return (ours, lordo.LoRDO(ours, rank=None, omega=1.0, **copy.deepcopy(both))), (theirs, torch.optim.AdamW(theirs, **both))


def assert_twins_agree(ours, theirs, *, atol, steps=100):
    schedulers = [lr_scheduler.CosineAnnealingLR(optimizer, T_max=40) for _, optimizer in (ours, theirs)]
    for step in range(1, steps + 1):
        for (params, optimizer), scheduler in zip((ours, theirs), schedulers, strict=True):
            give_gradients(params, step=step)
            optimizer.step()
            scheduler.step()
        for mine, yours in zip(ours[0], theirs[0], strict=True):
            torch.testing.assert_close(mine, yours, rtol=0, atol=atol)


def test_without_rank_and_with_omega_one_it_is_adamw():
    assert_twins_agree(*adamw_twin((*SHAPES, (0, 3))), atol=1e-7)


def test_it_is_adamw_in_float64_too():
    assert_twins_agree(*adamw_twin(SHAPES, dtype=torch.float64, scale=1.0, lr=0.01), atol=1e-13)


@pytest.mark.parametrize("chunk", [1, 7, 54])
def test_it_is_adamw_however_weights_are_cut(chunk, monkeypatch):
    monkeypatch.setattr(fullrank_step, "CHUNK_ELEMENTS", chunk)
    assert_twins_agree(*adamw_twin(SHAPES), atol=1e-7, steps=20)


def test_it_is_adamw_for_weights_that_are_not_contiguous(monkeypatch):
    monkeypatch.setattr(fullrank_step, "CHUNK_ELEMENTS", 16)
    ours, theirs = adamw_twin([(6, 9)])
    for p in (*ours[0], *theirs[0]):
        p.data = p.data.mT.contiguous().mT
    assert_twins_agree(ours, theirs, atol=1e-7, steps=20)


@pytest.mark.parametrize("omega", [0.0, 0.5])
def test_full_rank_weights_mix_gradient_and_momentum(omega):
    """d = ((1−ω) G + ω û) / D, the second step by hand from the first two gradients."""
    (p,) = parameters((3, 4), dtype=torch.float64)
    start, optimizer = p.detach().clone(), lordo.LoRDO([p], lr=0.1, rank=None, omega=omega, betas=(0.5, 0.75), eps=0.0)
    G = [randn(3, 4, seed=s, dtype=torch.float64) for s in (1, 2)]
    for gradient in G:
        p.grad = gradient
        optimizer.step()
    u_hat, v_hat = (0.25 * G[0] + 0.5 * G[1]) / 0.75, (0.1875 * G[0] ** 2 + 0.25 * G[1] ** 2) / 0.4375
    first, second = G[0].sign(), ((1 - omega) * G[1] + omega * u_hat) / v_hat.sqrt()
    torch.testing.assert_close(p.detach(), start - 0.1 * first - 0.1 * second)


# -- laws of the low-rank step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("over", ["mean", "channel"])
def test_a_tall_weight_trains_as_its_transpose(signal, error_feedback, over):
    options = OPTIONS | {"error_feedback": error_feedback, "fullrank_signal": signal, "fullrank_denominator": over, "omega": 0.7}
    tall, wide = parameters((9, 5), dtype=torch.float64), parameters((9, 5), dtype=torch.float64)
    wide[0].data = wide[0].data.mT.contiguous()
    first, second = lordo.LoRDO(tall, **options), lordo.LoRDO(wide, **options)
    for step in range(1, 8):
        give_gradients(tall, step=step)
        wide[0].grad = tall[0].grad.mT.contiguous()
        first.step()
        second.step()
    torch.testing.assert_close(tall[0], wide[0].mT)
    torch.testing.assert_close(first.state[tall[0]]["basis"].abs(), second.state[wide[0]]["basis"].abs())


def test_a_weight_that_is_not_contiguous_trains_like_one_that_is():
    plain, strided = parameters((6, 9), (9, 6)), parameters((6, 9), (9, 6))
    for p in strided:
        p.data = p.data.mT.contiguous().mT
    train(lordo.LoRDO(plain, **OPTIONS), plain, 7)
    train(lordo.LoRDO(strided, **OPTIONS), strided, 7)
    for p, q in zip(plain, strided, strict=True):
        assert not q.is_contiguous()
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20])
def test_without_eps_the_size_of_the_gradient_does_not_matter(scale):
    """Adam's step has no unit of the gradient in it; nor has the full-rank term, F / μ(D)."""
    plain, scaled = parameters(*SHAPES, dtype=torch.float64), parameters(*SHAPES, dtype=torch.float64)
    options = OPTIONS | {"eps": 0.0, "omega": 0.8}
    first, second = lordo.LoRDO(plain, **options), lordo.LoRDO(scaled, **options)
    for step in range(1, 8):
        give_gradients(plain, step=step)
        for p, q in zip(plain, scaled, strict=True):
            q.grad = p.grad * scale
        first.step()
        second.step()
    torch.testing.assert_close(plain, scaled)


def test_between_refreshes_the_error_lies_outside_the_subspace_and_adds_up():
    """QᵀE = 0, and E is the sum of what projection dropped from the gradients so far."""
    (p,) = parameters((6, 9), dtype=torch.float64)
    optimizer = lordo.LoRDO([p], **OPTIONS | {"sync_every": 100})
    dropped = torch.zeros(6, 9, dtype=torch.float64)
    for step in range(1, 6):
        train(optimizer, [p], range(step, step + 1))
        Q, E = optimizer.state[p]["basis"], optimizer.error_of(p)
        dropped += p.grad - Q @ (Q.mT @ p.grad)
        torch.testing.assert_close(E, dropped)
        torch.testing.assert_close(Q.mT @ E, torch.zeros(2, 9, dtype=torch.float64))


def test_without_the_full_rank_term_a_round_moves_the_weight_inside_the_subspace_only():
    (p,) = parameters((6, 9), dtype=torch.float64)
    optimizer = lordo.LoRDO([p], **OPTIONS | {"omega": 1.0, "weight_decay": 0.0, "sync_every": 100})
    start = p.detach().clone()
    train(optimizer, [p], 5)
    Q, moved = optimizer.state[p]["basis"], p.detach() - start
    torch.testing.assert_close(Q @ (Q.mT @ moved), moved)


def test_weight_decay_alone_shrinks_the_weights_by_the_displayed_rate():
    """A zero gradient moves nothing but decay: W (1 − lr·wd)ᵗ with the lr of the group."""
    params = parameters((6, 9), (5,), dtype=torch.float64)
    start = [p.detach().clone() for p in params]
    optimizer = lordo.LoRDO(params, **OPTIONS)
    for lr in (0.1, 0.2):
        optimizer.param_groups[0]["lr"] = lr
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for p, before in zip(params, start, strict=True):
        torch.testing.assert_close(p.detach(), before * (1 - 0.1 * 0.1) * (1 - 0.2 * 0.1))


@pytest.mark.parametrize("sync_every", [1, 2])
def test_every_period_works_alone(sync_every):
    params = parameters(*SHAPES)
    optimizer = lordo.LoRDO(params, **OPTIONS | {"sync_every": sync_every})
    train(optimizer, params, 5)
    assert all(tensor.isfinite().all() for tensor in everything(optimizer).values())
    assert optimizer.report.step == 5 // sync_every * sync_every
    assert optimizer.workers.bytes_sent() == 0


# -- what a step leaves alone ------------------------------------------------------------------------------------------------


def test_gradients_are_read_only():
    params = parameters(*SHAPES)
    optimizer = lordo.LoRDO(params, **OPTIONS)
    for step in range(1, 8):
        give_gradients(params, step=step)
        before = [(p.grad, p.grad.clone(), p.grad.data_ptr(), p.grad._version) for p in params]
        optimizer.step()
        for p, (gradient, value, pointer, version) in zip(params, before, strict=True):
            assert p.grad is gradient
            assert torch.equal(gradient, value)
            assert (gradient.data_ptr(), gradient._version) == (pointer, version)


def test_weights_and_state_stay_where_they_are():
    params = parameters(*SHAPES)
    optimizer = lordo.LoRDO(params, **OPTIONS)

    def places():
        return [p.data_ptr() for p in params] + [t.data_ptr() for p in params for t in optimizer.state[p].values()]

    before = places()
    train(optimizer, params, 7)
    assert places() == before


@pytest.mark.parametrize("basis", ["svd", "subspace"])
def test_torchs_global_generator_is_not_advanced(basis):
    params = parameters((30, 50))
    optimizer = lordo.LoRDO(params, **OPTIONS | {"basis": basis})
    before = torch.get_rng_state()
    train(optimizer, params, 7)
    assert torch.equal(before, torch.get_rng_state())


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest storage that an operation returned and that none of its arguments had."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in given:
                self.num_bytes = max(self.num_bytes, t.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("shape", [(96, 200), (200, 96)], ids=["wide", "tall"])
@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("over", ["mean", "channel"])
def test_a_local_step_allocates_nothing_larger_than_the_moments(shape, signal, error_feedback, over):
    """The projected gradient, D and the direction are (r, n) = (4, 200); no temporary has the size of the weight."""
    params = parameters(shape)
    options = {"error_feedback": error_feedback, "fullrank_signal": signal, "fullrank_denominator": over}
    optimizer = lordo.LoRDO(params, lr=0.01, rank=4, sync_every=100, omega=0.9, weight_decay=0.1, **options)
    train(optimizer, params, 1)  # the first step takes the first basis from a copy of the gradient
    give_gradients(params, step=2)
    with LargestAllocation() as largest:
        optimizer.step()
    assert 0 < largest.num_bytes <= 4 * 200 * 4


def test_a_local_step_of_a_large_full_rank_weight_allocates_no_more_than_a_chunk():
    params = parameters((3, fullrank_step.CHUNK_ELEMENTS // 2))
    optimizer = lordo.LoRDO(params, rank=None, sync_every=100)
    give_gradients(params, step=1)
    with LargestAllocation() as largest:
        optimizer.step()
    assert largest.num_bytes <= fullrank_step.CHUNK_ELEMENTS * 4


def test_the_warning_count_of_a_quiet_run_is_zero():
    params = parameters(*SHAPES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = lordo.LoRDO(params, **OPTIONS)
        train(optimizer, params, 7)
        copy.deepcopy(optimizer).load_state_dict(optimizer.state_dict())


# -- what is held ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("error_feedback", [False, True])
def test_state_of_each_parameter(dtype, error_feedback):
    params = parameters(*SHAPES, dtype=dtype)
    optimizer = lordo.LoRDO(params, **OPTIONS | {"error_feedback": error_feedback})
    held = torch.promote_types(dtype, torch.float32)
    for when in ("built", "stepped"):
        for p, shape in zip(params, SHAPES, strict=True):
            state = optimizer.state[p]
            expected = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
            if dtype in (torch.bfloat16, torch.float16):
                expected["anchor"] = shape  # what such a weight is the rounding of
            if shape in SHAPES[:3]:
                m, n = min(shape), max(shape)
                expected = {"step": (), "exp_avg": (2, n), "exp_avg_sq": (2, n), "basis": (m, 2), "anchor": shape}
                expected |= {"error": shape, "error_projection": (2, n)} if error_feedback else {}
            assert {key: tuple(t.shape) for key, t in state.items()} == expected, (when, shape)
            assert {t.dtype for key, t in state.items() if key != "step"} == {held}
            assert state["step"].dtype == torch.float32
        train(optimizer, params, 4)
    assert all(p.dtype == dtype for p in params)
    assert all(tensor.isfinite().all() for tensor in everything(optimizer).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype):
    halves, singles = parameters((6, 9), (5,), dtype=dtype), parameters((6, 9), (5,))
    for half, single in zip(halves, singles, strict=True):
        single.data.copy_(half.data)
    first, second = lordo.LoRDO(halves, **OPTIONS), lordo.LoRDO(singles, **OPTIONS)
    give_gradients(halves, step=1)
    for half, single in zip(halves, singles, strict=True):
        single.grad = half.grad.float()
    first.step()
    second.step()
    for half, single in zip(halves, singles, strict=True):
        assert torch.equal(half, single.to(dtype))
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(first.state[half][key], second.state[single][key])


def test_one_group_may_mix_dtypes():
    """Each parameter trains as in an optimizer of its own."""
    kinds = [(dtype, shape) for dtype in (torch.float32, torch.bfloat16, torch.float64) for shape in ((6, 9), (5,))]
    mixed, alone = ([parameters(shape, dtype=dtype)[0] for dtype, shape in kinds] for _ in range(2))
    optimizer, others = lordo.LoRDO(mixed, **OPTIONS), [lordo.LoRDO([p], **OPTIONS) for p in alone]
    for step in range(1, 5):
        give_gradients(mixed, step=step)
        give_gradients(alone, step=step)
        for o in (optimizer, *others):
            o.step()
    for p, q in zip(mixed, alone, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("rank", [6, 7, 1000])
def test_a_rank_of_at_least_the_smaller_side_makes_a_matrix_full_rank(rank):
    first, second = parameters((6, 9)), parameters((6, 9))
    train(lordo.LoRDO(first, **OPTIONS | {"rank": rank}), first, 4)
    train(lordo.LoRDO(second, **OPTIONS | {"rank": None}), second, 4)
    assert torch.equal(first[0], second[0])


def test_empty_parameters_are_carried_along():
    params = parameters((0, 5), (0,), (6, 9), (3, 0))
    optimizer = lordo.LoRDO(params, **OPTIONS)
    train(optimizer, params, 4)
    assert int(optimizer.state[params[0]]["step"]) == 4
    only_empty = parameters((0, 5), (0,))
    train(lordo.LoRDO(only_empty, **OPTIONS), only_empty, 4)


def test_frozen_parameters_have_no_state_and_do_not_move():
    params = parameters((6, 9), (9, 6), (5,))
    params[1].requires_grad_(False)
    before = params[1].detach().clone()
    optimizer = lordo.LoRDO(params, **OPTIONS)
    for step in range(1, 5):
        give_gradients([params[0], params[2]], step=step)
        optimizer.step()
    assert params[1] not in optimizer.state
    assert torch.equal(params[1], before)


def test_a_parameter_unfrozen_later_is_refused_rather_than_ignored():
    params = parameters((6, 9), (5,))
    params[0].requires_grad_(False)
    optimizer = lordo.LoRDO(params, **OPTIONS)
    params[0].requires_grad_(True)
    give_gradients(params, step=1)
    with pytest.raises(ValueError, match="frozen when the optimizer was built: add it by add_param_group"):
        optimizer.step()


def test_parameters_that_were_all_unfrozen_later_are_refused_too():
    (p,) = parameters((6, 9))
    optimizer = lordo.LoRDO([p.requires_grad_(False)], **OPTIONS)
    give_gradients([p.requires_grad_(True)], step=1)
    with pytest.raises(ValueError, match="frozen when the optimizer was built: add it by add_param_group"):
        optimizer.step()


def test_a_missing_gradient_leaves_a_parameter_and_its_step_alone():
    """t counts a parameter's own steps: one whose first gradient comes late starts at 1 then."""
    late, fresh = parameters((6, 9), (5,)), parameters((6, 9), (5,))
    optimizer = lordo.LoRDO(late, **OPTIONS | {"sync_every": 100, "weight_decay": 0.5})
    before = late[1].detach().clone()
    for step in (1, 2):
        give_gradients(late[:1], step=step)
        optimizer.step()
    assert torch.equal(late[1], before)
    assert int(optimizer.state[late[1]]["step"]) == 0
    other = lordo.LoRDO(fresh, **OPTIONS | {"sync_every": 100, "weight_decay": 0.5})
    give_gradients(late, step=3)
    fresh[1].grad = late[1].grad.clone()
    optimizer.step()
    other.step()
    assert torch.equal(late[1], fresh[1])
    assert int(optimizer.state[late[1]]["step"]) == 1


def test_a_step_without_any_gradient_is_counted_and_changes_nothing_else():
    params = parameters((6, 9), (5,))
    optimizer = lordo.LoRDO(params, **OPTIONS)
    before = everything(optimizer)
    optimizer.step()
    assert optimizer.steps_taken == 1
    assert optimizer.num_skipped_steps == 0
    assert_same_bits(everything(optimizer), before)


@pytest.mark.parametrize("first", ["zero", "missing"])
def test_a_first_gradient_of_nothing_leaves_the_axes_until_the_first_refresh(first):
    """A layer behind a zero-initialised one has a zero gradient at step 1. To wait for a better one would make what is sent depend on the
    data; the first r axes serve for one round, and the full-rank term leads out of them at the first refresh."""
    (p,) = parameters((6, 9))
    optimizer = lordo.LoRDO([p], **OPTIONS | {"omega": 0.9, "weight_decay": 0.0, "sync_every": 4})
    axes = torch.eye(6, 2)
    p.grad = torch.zeros_like(p) if first == "zero" else None
    optimizer.step()
    assert torch.equal(optimizer.state[p]["basis"], axes)
    train(optimizer, [p], range(2, 5))
    assert lordo.lowrank.overlap(optimizer.state[p]["basis"], axes) < 0.999


# -- groups ------------------------------------------------------------------------------------------------------------------


def test_settings_of_a_group_go_before_those_of_the_optimizer():
    """Two groups in one optimizer train like two optimizers."""
    overrides = {"lr": 0.03, "rank": 3, "betas": (0.5, 0.7), "omega": 0.5, "error_feedback": False, "sync_every": 2, "weight_decay": 0.0}
    shapes = ((6, 9), (9, 6))
    together, apart = parameters(*shapes), parameters(*shapes)
    optimizer = lordo.LoRDO([{"params": together[:1]}, {"params": together[1:], **overrides}], **OPTIONS)
    others = [lordo.LoRDO(apart[:1], **OPTIONS), lordo.LoRDO(apart[1:], **OPTIONS | overrides)]
    for step in range(1, 8):
        give_gradients(together, step=step)
        give_gradients(apart, step=step)
        for o in (optimizer, *others):
            o.step()
    for p, q in zip(together, apart, strict=True):
        assert torch.equal(p, q)
    assert optimizer.state[together[1]]["basis"].shape == (6, 3)


def test_a_group_may_have_a_rank_where_the_optimizer_has_none():
    params = parameters((6, 9), (9, 6))
    optimizer = lordo.LoRDO([{"params": params[:1], "rank": 2}, {"params": params[1:], "rank": None}])
    assert "basis" in optimizer.state[params[0]]
    assert "basis" not in optimizer.state[params[1]]


def test_groups_can_be_used_for_a_second_optimizer():
    """A notebook cell run twice: the second optimizer starts anew, with its own settings, and does not touch the first."""
    model = nn.ParameterList(parameters((6, 9), (5,)))
    groups = lordo.param_groups(model, rank=2)
    first = lordo.LoRDO(groups, lr=0.01, sync_every=3)
    train(first, list(model), 4)
    second = lordo.LoRDO(groups, lr=0.02, sync_every=5)
    assert second.steps_taken == 0
    assert [group["lr"] for group in second.param_groups] == [0.02, 0.02]
    assert [group["lr"] for group in first.param_groups] == [0.01, 0.01]
    train(second, list(model), 1)
    assert first.steps_taken == 4


def test_a_group_added_before_the_first_step_is_as_if_it_had_been_there():
    first, second = parameters((6, 9), (9, 6)), parameters((6, 9), (9, 6))
    added = lordo.LoRDO(first[:1], **OPTIONS)
    added.add_param_group({"params": first[1:]})
    train(added, first, 7)
    at_once = lordo.LoRDO([{"params": second[:1]}, {"params": second[1:]}], **OPTIONS)
    train(at_once, second, 7)
    assert_same_bits(everything(added), everything(at_once))


def test_a_group_added_later_starts_with_a_basis_from_its_first_gradient_and_joins_the_schedule():
    params = parameters((6, 9), (9, 6))
    optimizer = lordo.LoRDO(params[:1], **OPTIONS)
    train(optimizer, params[:1], 2)
    basis = optimizer.state[params[0]]["basis"].clone()
    with torch.no_grad():
        params[1].add_(1)  # the weights may be loaded between building the optimizer and the next step
    optimizer.add_param_group({"params": params[1:], "rank": 3})
    assert optimizer.steps_taken == 2
    with torch.no_grad():
        params[1].add_(1)
    start = params[1].detach().clone()
    give_gradients(params, step=3)
    left = torch.linalg.svd(params[1].grad.mT)[0][:, :3]
    optimizer.param_groups[0]["sync_every"] = 100
    optimizer.param_groups[1]["sync_every"] = 100
    optimizer.step()
    assert torch.equal(optimizer.state[params[0]]["basis"], basis), "a group that is under way took another first basis"
    state = optimizer.state[params[1]]
    assert lordo.lowrank.overlap(state["basis"], left) == pytest.approx(1, abs=1e-4)
    assert torch.equal(state["anchor"], start)
    assert int(state["step"]) == 1
    assert all(group["steps_taken"] == 3 for group in optimizer.param_groups)


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    params = parameters((6, 9), (9, 6))
    optimizer = lordo.LoRDO(params[:1], **OPTIONS)
    bad = (
        {"params": params[1:], "rank": 0},
        {"params": params[1:], "omega": 2.0},
        {"params": [torch.ones(3, dtype=torch.int64)]},
        {"params": params[1:], "sync_every": 0},
        {"params": params[1:], "wieght_decay": 0.1},
    )
    for group in bad:
        with pytest.raises((ValueError, TypeError)):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.state) == 1
    optimizer.add_param_group({"params": params[1:]})
    train(optimizer, params, 4)


def test_names_are_kept_and_wrappers_prefixes_are_not():
    params = parameters((6, 9), (5,))
    named = [("_orig_mod.b", params[0]), ("a", params[1])]
    optimizer = lordo.LoRDO(named, **OPTIONS)
    assert [name for name, _, _ in optimizer.named_members()] == ["a", "b"]
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["_orig_mod.b", "a"]


def test_the_one_liner_works():
    with torch.random.fork_rng():
        model = nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 3))
    optimizer = lordo.LoRDO(model.parameters(), rank=2)
    for step in range(3):
        model(randn(4, 9, seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert optimizer.steps_taken == 3


# -- as a torch optimizer ----------------------------------------------------------------------------------------------------


def test_closure_runs_once_with_gradients_enabled_and_its_loss_is_returned():
    (p,) = parameters((6, 9))
    twin = parameters((6, 9))
    optimizer, other = lordo.LoRDO([p], **OPTIONS), lordo.LoRDO(twin, **OPTIONS)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (p**4).sum()
        loss.backward()
        return loss

    for _ in range(4):
        expected = (twin[0] ** 4).sum()
        other.zero_grad()
        expected.backward()
        other.step()
        assert optimizer.step(closure).item() == expected.item()
    assert calls == [True] * 4
    assert torch.equal(p, twin[0])
    assert optimizer.step() is None


def test_step_hooks_run_around_the_step():
    params = parameters((6, 9))
    optimizer = lordo.LoRDO(params, **OPTIONS)
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("before", o.steps_taken)))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("after", o.steps_taken)))
    train(optimizer, params, 2)
    assert seen == [("before", 0), ("after", 1), ("before", 1), ("after", 2)]


def test_gradients_from_a_backward_hook_are_the_steps_gradients():
    """Accumulating four micro-batches is one step: K counts optimizer steps."""
    once, often = parameters((6, 9)), parameters((6, 9))
    first, second = lordo.LoRDO(once, **OPTIONS), lordo.LoRDO(often, **OPTIONS)
    for step in range(4):
        batches = [randn(9, 3, seed=10 * step + i) for i in range(4)]
        (sum((once[0] @ x).square().mean() for x in batches) / 4).backward()
        for x in batches:
            ((often[0] @ x).square().mean() / 4).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    assert second.steps_taken == 4
    torch.testing.assert_close(once[0], often[0])


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=1e-3, max_lr=1e-2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)]),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)], milestones=[3]),
}


def test_every_scheduler_of_torch_is_tried():
    classes = {name for name, c in vars(lr_scheduler).items() if inspect.isclass(c) and issubclass(c, lr_scheduler.LRScheduler)}
    assert {name for name in classes if not name.startswith("_")} - {"LRScheduler"} == SCHEDULERS.keys()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
def test_schedulers_change_the_rate_as_they_do_adamws(name, as_tensor):
    """With everything full-rank the weights follow AdamW's under the same schedule; low-rank weights move too."""
    lr = torch.tensor(0.01, dtype=torch.float64) if as_tensor else 0.01
    (ours, optimizer), (theirs, adamw) = adamw_twin([(6, 9), (5,)], dtype=torch.float64, lr=lr)
    (p,) = parameters((6, 9), dtype=torch.float64)
    optimizer.add_param_group({"params": [p], "rank": 2})
    adamw.add_param_group({"params": parameters((6, 9), dtype=torch.float64)})
    schedulers = [SCHEDULERS[name](o) for o in (optimizer, adamw)]
    for step in range(1, 9):
        give_gradients([*ours, p], step=step)
        give_gradients([q for group in adamw.param_groups for q in group["params"]], step=step)
        for o, scheduler in zip((optimizer, adamw), schedulers, strict=True):
            o.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        assert [float(g["lr"]) for g in optimizer.param_groups] == [float(g["lr"]) for g in adamw.param_groups]
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours, rtol=0, atol=1e-12)
    assert p.isfinite().all()


def test_a_tensor_for_learning_rate_equals_the_number():
    first, second = parameters(*SHAPES), parameters(*SHAPES)
    train(lordo.LoRDO(first, **OPTIONS), first, 7)
    optimizer = lordo.LoRDO(second, **OPTIONS | {"lr": torch.tensor(0.01, dtype=torch.float64)})
    train(optimizer, second, 7)
    for p, q in zip(first, second, strict=True):
        assert torch.equal(p, q)


def test_autocast_around_a_step_changes_nothing():
    """QR and SVD do not exist for bfloat16, and moments are not to be formed in it."""
    first, second = parameters(*SHAPES), parameters(*SHAPES)
    plain, cast = lordo.LoRDO(first, **OPTIONS), lordo.LoRDO(second, **OPTIONS)
    train(plain, first, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train(cast, second, 7)
    assert_same_bits(everything(plain), everything(cast))


def test_a_default_dtype_changes_nothing():
    def trained():
        params = parameters(*SHAPES)
        optimizer = lordo.LoRDO(params, **OPTIONS | {"basis": "subspace"})
        train(optimizer, params, 4)
        return everything(optimizer)

    plain = trained()
    torch.set_default_dtype(torch.float64)
    try:
        other = trained()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_bits(plain, other)


# -- gradients that are not finite, and scaled ones --------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 3], ids=["low-rank", "full-rank"])
def test_a_gradient_that_is_not_finite_skips_the_whole_step(bad, where):
    """Weights, moments, error and every parameter's own step stay; the schedule goes on; the parameter is named."""
    params = parameters(*SHAPES)
    optimizer = lordo.LoRDO([(f"layer{i}", p) for i, p in enumerate(params)], **OPTIONS)
    train(optimizer, params, 1)
    before = everything(optimizer)
    give_gradients(params, step=2)
    params[where].grad.view(-1)[-1] = bad
    with pytest.warns(RuntimeWarning, match=rf"step 2 skipped on this worker: the gradient of 'layer{where}' is not finite \(1 skipped"):
        optimizer.step()
    assert_same_bits(everything(optimizer), before)
    assert (optimizer.steps_taken, optimizer.num_skipped_steps) == (2, 1)
    train(optimizer, params, range(3, 4))
    assert optimizer.report.step == 3, "the schedule shifted"
    assert int(optimizer.state[params[0]]["step"]) == 2


def test_many_skipped_steps_in_a_row_are_an_error():
    params = parameters((6, 9), (5,))
    optimizer = lordo.LoRDO(params, **OPTIONS)

    def bad_step(step):
        give_gradients(params, step=step)
        params[1].grad[0] = math.nan
        with pytest.warns(RuntimeWarning, match="not finite"):
            optimizer.step()

    for step in range(1, MAX_SKIPPED_IN_A_ROW):
        bad_step(step)
    train(optimizer, params, range(MAX_SKIPPED_IN_A_ROW, MAX_SKIPPED_IN_A_ROW + 1))  # a good one: the count starts anew
    for step in range(1, MAX_SKIPPED_IN_A_ROW):
        bad_step(step)
    params[1].grad[0] = math.nan
    with pytest.raises(FloatingPointError, match="'parameter 000001' is not finite, and so were the 19 before it"):
        optimizer.step()
    assert MAX_SKIPPED_IN_A_ROW == 20


def test_the_check_finds_a_bad_entry_wherever_it_stands():
    (p,) = parameters((7, 37))
    optimizer = lordo.LoRDO([p], **OPTIONS)
    for position in range(p.numel()):
        p.grad = torch.zeros_like(p)
        p.grad.view(-1)[position] = (math.nan, math.inf, -math.inf)[position % 3]
        assert optimizer._nonfinite_gradient() is not None


def test_large_finite_gradients_are_finite():
    """1e39 is beyond float32, not beyond float64."""
    (p,) = parameters((6, 9), dtype=torch.float64)
    optimizer = lordo.LoRDO([p], **OPTIONS)
    give_gradients([p], step=1)
    p.grad *= 1e39
    optimizer.step()
    assert optimizer.num_skipped_steps == 0


def test_gradients_of_all_zeros_are_no_trouble():
    params = parameters(*SHAPES)
    optimizer = lordo.LoRDO(params, **OPTIONS | {"weight_decay": 0.0})
    before = [p.detach().clone() for p in params]
    for _ in range(7):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for p, q in zip(params, before, strict=True):
        assert torch.equal(p, q)


def test_a_grad_scaler_changes_nothing_but_the_scale():
    params, plain = parameters(*SHAPES, dtype=torch.float64), parameters(*SHAPES, dtype=torch.float64)
    optimizer, other = lordo.LoRDO(params, **OPTIONS), lordo.LoRDO(plain, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(1, 8):
        scaled_step(scaler, optimizer, params, step=step)
    train(other, plain, 7)
    torch.testing.assert_close(params, plain)
    assert params[0].grad.abs().max() > 100, "p.grad is still scaled: it was not written"


def test_a_grad_scaler_that_unscales_first_is_not_unscaled_twice():
    params, plain = parameters(*SHAPES, dtype=torch.float64), parameters(*SHAPES, dtype=torch.float64)
    optimizer, other = lordo.LoRDO(params, **OPTIONS), lordo.LoRDO(plain, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(1, 4):
        optimizer.zero_grad()
        G = [randn(*p.shape, seed=10_000 * step + i, dtype=p.dtype) for i, p in enumerate(params)]
        scaler.scale(sum((p * g).sum() for p, g in zip(params, G, strict=True))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 1e9)
        scaler.step(optimizer)
        scaler.update()
    train(other, plain, 3)
    torch.testing.assert_close(params, plain)


def test_a_grad_scaler_backs_off_after_an_infinity():
    params = parameters((6, 9))
    optimizer = lordo.LoRDO(params, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = params[0].detach().clone()
    with pytest.warns(RuntimeWarning, match="not finite"):
        scaled_step(scaler, optimizer, params, step=1, inf=True)
    assert torch.equal(params[0], before)
    assert scaler.get_scale() == 2.0**9
    assert (optimizer.steps_taken, optimizer.num_skipped_steps) == (1, 1)


# -- copies, saving, loading -------------------------------------------------------------------------------------------------


def copies():
    return {"deepcopy": copy.deepcopy, "pickle": lambda o: pickle.loads(pickle.dumps(o))}


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("taken", [0, 2, 3])
def test_a_copy_continues_like_the_original(how, taken):
    params = parameters(*SHAPES)
    optimizer = lordo.LoRDO(params, **OPTIONS)
    train(optimizer, params, taken)
    twin = copies()[how](optimizer)
    twin_params = [p for group in twin.param_groups for p in group["params"]]
    assert all(p is not q for p, q in zip(params, twin_params, strict=True))
    train(twin, twin_params, range(taken + 1, 9))
    train(optimizer, params, range(taken + 1, 9))
    assert_same_bits(everything(optimizer), everything(twin))
    assert twin.steps_taken == 8


def resumed(optimizer, params, shapes, *, dtype=torch.float32, **options):
    """A new optimizer on equal weights with the loaded state."""
    new = parameters(*shapes, seed=77, dtype=dtype)
    with torch.no_grad():
        for p, q in zip(new, params, strict=True):
            p.copy_(q)
    other = lordo.LoRDO(new, **options)
    other.load_state_dict(reloaded(optimizer.state_dict()))
    return other, new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("taken", [0, 1, 2, 3, 5])
def test_resumed_is_uninterrupted(taken, dtype):
    """Also in the middle of a round (K = 3), also moments that are more precise than the weights."""
    params = parameters(*SHAPES, dtype=dtype)
    optimizer = lordo.LoRDO(params, **OPTIONS)
    train(optimizer, params, taken)
    other, new = resumed(optimizer, params, SHAPES, dtype=dtype, **OPTIONS)
    assert_same_bits(everything(optimizer), everything(other))
    for o, ps in ((optimizer, params), (other, new)):
        train(o, ps, range(taken + 1, 10))
    assert_same_bits(everything(optimizer), everything(other))
    assert other.steps_taken == 9
    assert other.report == optimizer.report


def test_the_state_dict_holds_tensors_only_and_the_settings_plain_values():
    params = parameters(*SHAPES)
    optimizer = lordo.LoRDO(params, **OPTIONS)
    train(optimizer, params, 4)
    state_dict = optimizer.state_dict()
    assert all(isinstance(t, torch.Tensor) for state in state_dict["state"].values() for t in state.values())
    plain = (int, float, str, bool, type(None))
    for group in state_dict["param_groups"]:
        for value in group.values():
            assert isinstance(value, plain) or all(isinstance(v, plain) for v in value)


def test_loading_copies():
    params = parameters((6, 9))
    optimizer = lordo.LoRDO(params, **OPTIONS)
    train(optimizer, params, 2)
    saved = optimizer.state_dict()
    other_params = parameters((6, 9))
    other = lordo.LoRDO(other_params, **OPTIONS)
    other.load_state_dict(saved)
    train(other, other_params, 2)
    for key, tensor in optimizer.state[params[0]].items():
        assert tensor.data_ptr() != other.state[other_params[0]][key].data_ptr(), key


def test_loading_into_an_optimizer_with_other_groups_says_so():
    optimizer = lordo.LoRDO(parameters((6, 9), (5,)), **OPTIONS)
    with pytest.raises(ValueError, match="group"):
        lordo.LoRDO(parameters((6, 9)), **OPTIONS).load_state_dict(optimizer.state_dict())


def test_loading_the_state_of_other_shapes_is_refused():
    optimizer = lordo.LoRDO(parameters((6, 9)), **OPTIONS)
    with pytest.raises(ValueError, match="shape"):
        lordo.LoRDO(parameters((6, 10)), **OPTIONS).load_state_dict(optimizer.state_dict())


def test_loading_the_state_of_another_optimizer_is_refused():
    """AdamW's state has no basis: every weight would silently be trained full-rank."""
    params = parameters((6, 9))
    adamw = torch.optim.AdamW(params)
    train(adamw, params, 1)
    with pytest.raises((ValueError, KeyError)):
        lordo.LoRDO(parameters((6, 9)), **OPTIONS).load_state_dict(adamw.state_dict())


def named_groups(*groups, rank=2):
    """Groups of named parameters: equal names have equal shapes, and values of their own."""
    shapes = {"a": (6, 9), "b": (9, 6), "c": (5,), "d": (7, 7)}
    made = {name: parameters(shapes[name], seed=ord(name))[0] for names in groups for name in names}
    return made, [{"params": [(name, made[name]) for name in names], "rank": rank + i % 2} for i, names in enumerate(groups)]


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module."])
def test_a_state_is_loaded_by_name_whatever_the_order_of_groups(prefix):
    """Groups turned round, parameters turned round inside them, one model compiled or wrapped and the other not."""
    saved, groups = named_groups(("a", "b"), ("c", "d"))
    optimizer = lordo.LoRDO(groups, **OPTIONS | {"rank": 2})
    train(optimizer, list(saved.values()), 4)

    own, turned = named_groups(("d", "c"), ("b", "a"))
    ranks = {"d": 3, "a": 2}
    for group in turned:
        group["rank"] = ranks[group["params"][0 if group["params"][0][0] == "d" else 1][0]]
        group["params"] = [(prefix + name, p) for name, p in group["params"]]
    other = lordo.LoRDO(turned, **OPTIONS | {"rank": 2})
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(saved[name])
    other.load_state_dict(reloaded(optimizer.state_dict()))

    for step in range(5, 9):
        for params, o in ((saved, optimizer), (own, other)):
            for i, name in enumerate("abcd"):
                params[name].grad = randn(*params[name].shape, seed=100 * step + i)
            o.step()
    for name in "abcd":
        assert torch.equal(saved[name], own[name]), name
        assert_same_bits(optimizer.state[saved[name]], other.state[own[name]])
    assert [group["rank"] for group in other.param_groups] == [3, 2]


def test_a_state_of_other_names_or_groups_is_refused():
    _, groups = named_groups(("a", "b"), ("c", "d"))
    state = lordo.LoRDO(groups, **OPTIONS).state_dict()
    _, fewer = named_groups(("a", "b"), ("c",))
    with pytest.raises(ValueError, match="parameter 'd' is in the loaded state but not in this optimizer"):
        lordo.LoRDO(fewer, **OPTIONS).load_state_dict(state)
    _, mixed = named_groups(("a", "c"), ("b", "d"))
    with pytest.raises(ValueError, match=r"parameter group 0 holds parameters of the groups \[0, 1\] of the loaded state"):
        lordo.LoRDO(mixed, **OPTIONS).load_state_dict(state)


def test_state_dict_hooks_are_honoured():
    params = parameters((6, 9))
    optimizer = lordo.LoRDO(params, **OPTIONS)
    train(optimizer, params, 2)
    other = lordo.LoRDO(parameters((6, 9)), **OPTIONS)

    def halve(_, state_dict):
        state = {k: {key: t / 2 if key == "exp_avg" else t for key, t in s.items()} for k, s in state_dict["state"].items()}
        return {**state_dict, "state": state}

    other.register_load_state_dict_pre_hook(halve)
    other.load_state_dict(optimizer.state_dict())
    (p,) = other.param_groups[0]["params"]
    assert torch.equal(other.state[p]["exp_avg"], optimizer.state[params[0]]["exp_avg"] / 2)


def small_model(seed: int) -> nn.Module:
    """An embedding, a tied head, a norm, a matrix, a frozen one."""

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 6)
            self.norm = nn.LayerNorm(6)
            self.up, self.frozen = nn.Linear(6, 9), nn.Linear(9, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight
            self.frozen.requires_grad_(False)

        def forward(self, tokens):
            return self.head(self.norm(self.frozen(self.up(self.embedding(tokens)).relu())))

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Small()


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_passes_through_distributed_checkpoint_by_name(flatten, dtype):
    """Moments of bfloat16 weights stay float32; groups may come in another order."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def step(model, optimizer, number):
        tokens = torch.randint(11, (5, 8), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
        optimizer.step()

    def build(seed):
        model = small_model(seed).to(dtype)
        groups = lordo.param_groups(model, rank=2)
        return model, lordo.LoRDO(groups[::-1] if seed and not flatten else groups, lr=0.01, rank=None, sync_every=3)

    model, optimizer = build(0)
    for number in range(4):
        step(model, optimizer, number)
    saved = reloaded(get_optimizer_state_dict(model, optimizer, options=options))
    if not flatten:
        assert saved["state"].keys() == {name for name, p in model.named_parameters() if p.requires_grad}

    other, resumed_optimizer = build(1)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    set_optimizer_state_dict(other, resumed_optimizer, saved, options=options)
    for number in range(4, 9):
        step(model, optimizer, number)
        step(other, resumed_optimizer, number)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        if p.requires_grad:
            assert_same_bits(optimizer.state[p], resumed_optimizer.state[q])


# -- what is refused ---------------------------------------------------------------------------------------------------------

WRONG_SETTINGS = [
    ({"rank": 0}, ValueError, "rank must be at least 1, or None for full-rank; got 0"),
    ({"rank": -3}, ValueError, "rank must be at least 1, or None for full-rank; got -3"),
    ({"rank": 2.0}, TypeError, "rank must be a whole number of at least 1, or None for full-rank; got 2.0"),
    ({"rank": True}, TypeError, "rank must be a whole number"),
    ({"rank": "4"}, TypeError, "rank must be a whole number of at least 1, or None for full-rank; got '4'"),
    ({"omega": 1.01}, ValueError, r"omega must be in \[0, 1\]; got 1.01"),
    ({"omega": -0.1}, ValueError, r"omega must be in \[0, 1\]; got -0.1"),
    ({"omega": math.nan}, ValueError, r"omega must be in \[0, 1\]; got nan"),
    ({"omega": "0.9"}, TypeError, "omega must be a number; got '0.9'"),
    ({"sync_every": 0}, ValueError, "sync_every must be at least 1; got 0"),
    ({"sync_every": 1.5}, TypeError, "sync_every must be a whole number of at least 1; got 1.5"),
    ({"sync_every": None}, TypeError, "sync_every must be a whole number of at least 1; got None"),
    ({"sync_exp_avg_every": 0}, ValueError, "sync_exp_avg_every must be at least 1; got 0"),
    ({"sync_exp_avg_sq_every": -1}, ValueError, "sync_exp_avg_sq_every must be at least 1; got -1"),
    ({"sync_error_every": 0}, ValueError, "sync_error_every must be at least 1; got 0"),
    ({"lr": -1.0}, ValueError, "lr must be in"),
    ({"lr": math.nan}, ValueError, "lr must be in"),
    ({"lr": math.inf}, ValueError, "lr must be"),
    ({"lr": "1e-3"}, TypeError, "lr must be a number"),
    ({"lr": None}, TypeError, "lr must be a number"),
    ({"lr": torch.ones(2)}, (ValueError, TypeError), "lr must be"),
    ({"eps": -1e-8}, ValueError, "eps must be in"),
    ({"weight_decay": -0.1}, ValueError, "weight_decay must be in"),
    ({"betas": (1.0, 0.99)}, ValueError, r"betas\[0\] must be in \[0, 1\); got 1.0"),
    ({"betas": (0.9, -0.1)}, ValueError, r"betas\[1\] must be in \[0, 1\); got -0.1"),
    ({"betas": (0.9,)}, (ValueError, TypeError), "betas must be"),
    ({"betas": (0.9, 0.99, 0.999)}, (ValueError, TypeError), "betas must be"),
    ({"betas": 0.9}, TypeError, "betas must be"),
    ({"error_feedback": "no"}, TypeError, "error_feedback must be"),
    ({"fullrank_signal": "grad"}, ValueError, "fullrank_signal must be one of 'gradient', 'gradient\\+error'"),
    ({"fullrank_denominator": "row"}, ValueError, "fullrank_denominator must be one of 'mean', 'channel'; got 'row'"),
    ({"basis": "qr"}, ValueError, "basis must be one of 'auto', 'svd', 'subspace'; got 'qr'"),
    ({"workers": 4}, TypeError, "workers must be None, a torch.distributed process group .* got int"),
]


@pytest.mark.parametrize(("setting", "error", "sentence"), WRONG_SETTINGS, ids=lambda case: str(case)[:40])
def test_a_wrong_setting_is_named(setting, error, sentence):
    with pytest.raises(error, match=sentence):
        lordo.LoRDO(parameters((6, 9)), **OPTIONS | setting)


@pytest.mark.parametrize(("setting", "error", "sentence"), WRONG_SETTINGS[:-1], ids=lambda case: str(case)[:40])
def test_a_wrong_setting_of_a_group_is_named(setting, error, sentence):
    with pytest.raises(error, match=sentence):
        lordo.LoRDO([{"params": parameters((6, 9)), **setting}], **OPTIONS)


@pytest.mark.parametrize(
    ("key", "meant"), [("rnk", "rank"), ("weightdecay", "weight_decay"), ("Omega", "omega"), ("beta", "betas"), ("sync_evry", "sync_every")]
)
def test_a_misspelt_key_of_a_group_is_named(key, meant):
    with pytest.raises(ValueError, match=f"parameter group: unknown setting '{key}'; did you mean '{meant}'"):
        lordo.LoRDO([{"params": parameters((6, 9)), key: 1}], **OPTIONS)


def test_a_key_of_a_group_that_is_like_no_setting_is_kept_as_torch_does():
    optimizer = lordo.LoRDO([{"params": parameters((6, 9)), "name": "body", "use": "decoder"}], **OPTIONS)
    assert optimizer.param_groups[0]["name"] == "body"


@pytest.mark.parametrize("key", ["initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"])
def test_keys_of_torchs_schedulers_are_no_misspelling(key):
    """OneCycleLR and others put these into the groups, and a run that goes on hands them in again (`last_epoch`)."""
    optimizer = lordo.LoRDO([{"params": parameters((6, 9)), key: 0.5}], **OPTIONS)
    assert optimizer.param_groups[0][key] == 0.5


@pytest.mark.parametrize("key", ["scale", "rotate_moments", "basis_from", "basis_every"])
def test_a_group_cannot_change_what_makes_the_method(key):
    """These belong to the row of the table, not to the user; taking or dropping them in silence would be another method."""
    value = {"scale": 0.25, "rotate_moments": False, "basis_from": "momentum", "basis_every": 5}[key]
    with pytest.raises(ValueError, match=key):
        lordo.LoRDO([{"params": parameters((6, 9)), key: value}], **OPTIONS)


def test_a_group_cannot_have_a_setting_of_another_method():
    with pytest.raises(ValueError, match="sync_every"):
        lordo.DistributedOptimizer([{"params": parameters((6, 9)), "sync_every": 4}], "ddp-adamw")


def test_a_missing_rank_is_asked_for():
    with pytest.raises(ValueError, match=r"rank is missing: give rank=…, or use lordo\.param_groups"):
        lordo.LoRDO(parameters((6, 9)))
    with pytest.raises(ValueError, match="rank is missing"):
        lordo.LoRDO([{"params": parameters((6, 9)), "rank": 2}, {"params": parameters((5,))}])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str)
def test_parameters_that_are_not_real_numbers_are_refused(dtype):
    p = nn.Parameter(torch.zeros(6, 9).to(dtype), requires_grad=dtype.is_floating_point or dtype.is_complex)
    with pytest.raises(TypeError, match=f"floating-point parameters; got a parameter of {dtype}, shape \\(6, 9\\)"):
        lordo.LoRDO([p], **OPTIONS)


@pytest.mark.parametrize("rank", [2, None])
def test_sparse_parameters_are_refused(rank):
    with pytest.raises(TypeError, match=r"dense|sparse"):
        lordo.LoRDO([nn.Parameter(torch.eye(6).to_sparse())], **OPTIONS | {"rank": rank})


def test_sparse_gradients_are_refused():
    with torch.random.fork_rng():
        embedding = nn.Embedding(11, 6, sparse=True)
    optimizer = lordo.LoRDO(embedding.named_parameters(), **OPTIONS)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match=r"the gradient of 'weight' is torch\.sparse_coo; LoRDO needs dense gradients"):
        optimizer.step()


def test_an_unknown_setting_or_method_is_named_with_the_nearest():
    with pytest.raises(ValueError, match="method 'ddp-adamw': unknown setting 'weightdecay'; did you mean 'weight_decay'"):
        lordo.DistributedOptimizer(parameters((6, 9)), "ddp-adamw", weightdecay=0.1)
    with pytest.raises(ValueError, match="unknown method 'lordoo'; did you mean 'lordo'"):
        lordo.DistributedOptimizer(parameters((6, 9)), "lordoo")


def test_a_method_without_low_rank_weights_refuses_a_rank():
    with pytest.raises(ValueError, match="rank"):
        lordo.DistributedOptimizer([{"params": parameters((6, 9)), "rank": 2}], "local-adamw")
    with pytest.raises(ValueError, match="rank"):
        lordo.DistributedOptimizer(parameters((6, 9)), "local-adamw", rank=2)


def test_the_signature_of_lordo_and_the_settings_of_its_row_are_the_same():
    given = set(inspect.signature(lordo.LoRDO).parameters) - {"params", "workers"}
    settings = set(lordo.METHODS["lordo"].settings)
    assert given <= settings
    assert {name for name in settings - given if not name.startswith("outer")} == set()


def test_the_defaults_are_those_of_the_paper_map():
    optimizer = lordo.LoRDO(parameters((6, 9)), rank=2)
    (group,) = optimizer.param_groups
    expected = {"error_feedback": True, "fullrank_signal": "gradient+error", "fullrank_denominator": "channel", "betas": (0.9, 0.99)}
    assert {key: group[key] for key in expected} == expected
    assert optimizer.resolved(group)["omega"] == 1 - 1 / 32
