"""Workers together: what is equal after a synchronisation, what travels, what a bad worker does to the others, what is refused."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lordo
from common import assert_same_bits, everything, give_gradients, parameters, randn, reloaded, run_workers, scaled_step, train
from lordo.lowrank import overlap
from lordo.sync.refresh import spread
from lordo.sync.rules import nesterov_
from lordo.sync.schedule import is_due, num_due, steps_to_next

pytestmark = pytest.mark.usefixtures("rng_untouched")

SHAPES = ((6, 9), (9, 6), (7, 7), (5,), (), (4, 3, 2))  # the first three are low-rank at rank 2
OPTIONS = {"lr": 0.01, "rank": 2, "sync_every": 3, "weight_decay": 0.1}
AVERAGED = ("exp_avg", "exp_avg_sq", "anchor", "basis")


# -- the schedule ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 9) | st.none(), st.integers(1, 9) | st.none(), st.integers(0, 40))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_what_is_due_is_counted_by_the_closed_form(every, moments_every, error_every, steps):
    group = {"sync_every": every, "sync_exp_avg_every": moments_every, "sync_exp_avg_sq_every": None, "sync_error_every": error_every}
    group["sync_fragments"] = 1
    for what, period in {"parameters": every, "exp_avg": moments_every or every, "exp_avg_sq": every, "error": error_every}.items():
        due = [t for t in range(1, steps + 1) if is_due(group, what, t)]
        assert due == ([t for t in range(1, steps + 1) if t % period == 0] if period else [])
        assert num_due(group, what, steps) == len(due)
    distance = steps_to_next(group, steps)
    assert 1 <= distance <= every
    assert is_due(group, "parameters", steps + distance)
    assert not any(is_due(group, "parameters", t) for t in range(steps + 1, steps + distance))


@given(st.lists(st.floats(1, 1000), max_size=20), st.integers(1, 6))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_work_is_spread_so_that_nobody_has_more_than_another_by_more_than_one_task(costs, num_workers):
    owners = spread(costs, num_workers)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == w) for w in range(num_workers)]
    assert set(owners) <= set(range(num_workers))
    assert max(loads) - min(loads) <= max(costs, default=0) * (1 + 1e-9)


# -- equalities --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("basis", ["svd", "subspace"])
def test_workers_with_equal_gradients_are_one_worker(num_workers, basis):
    """A mean of 2 or 4 equal numbers is exact: not a bit differs from training alone."""

    def one_worker(workers):
        params = parameters(*SHAPES)
        optimizer = lordo.LoRDO(params, workers=workers, **OPTIONS | {"basis": basis})
        train(optimizer, params, 8)
        return everything(optimizer)

    alone = parameters(*SHAPES)
    solo = lordo.LoRDO(alone, **OPTIONS | {"basis": basis})
    train(solo, alone, 8)
    for worker in lordo.simulate(one_worker, num_workers):
        assert_same_bits(worker, everything(solo))


@pytest.mark.parametrize("method", ["ddp-adamw", "local-adamw"])
def test_baselines_with_equal_gradients_are_torchs_adamw(method):
    theirs = parameters(*SHAPES)
    train(torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1), theirs, 8)

    def one_worker(workers):
        params = parameters(*SHAPES)
        train(lordo.DistributedOptimizer(params, method, lr=0.01, weight_decay=0.1, workers=workers), params, 8)
        return params

    for params in lordo.simulate(one_worker, 2):
        for p, q in zip(params, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_averaged_gradients_are_one_large_batch():
    """ddp-adamw on workers' gradients is AdamW on their mean; also when `average_gradients` was called before (to clip), once only."""
    theirs = parameters(*SHAPES, dtype=torch.float64)
    adamw = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(1, 6):
        for i, p in enumerate(theirs):
            G = [randn(*p.shape, seed=10_000 * step + 100 * worker + i, dtype=p.dtype) for worker in range(3)]
            p.grad = sum(G) / 3
        adamw.step()

    def one_worker(workers):
        params = parameters(*SHAPES, dtype=torch.float64)
        optimizer = lordo.DistributedOptimizer(params, "ddp-adamw", lr=0.01, weight_decay=0.1, workers=workers)
        for step in range(1, 6):
            give_gradients(params, step=step, worker=workers.rank)
            if step % 2:
                optimizer.average_gradients()
            optimizer.step()
        assert workers.moved["gradients"] == 5 * 2 * 8 * sum(p.numel() for p in params)
        return params

    for params in lordo.simulate(one_worker, 3):
        torch.testing.assert_close(params, theirs)


def test_local_steps_are_those_of_a_worker_alone():
    """Before the first synchronisation a worker differs from one alone by the common first basis only: none when all is full-rank."""
    workers = run_workers(SHAPES, num_workers=3, steps=2, **OPTIONS | {"rank": None})
    for i, optimizer in enumerate(workers):
        alone = parameters(*SHAPES)
        solo = lordo.LoRDO(alone, **OPTIONS | {"rank": None})
        train(solo, alone, 2, worker=i)
        assert_same_bits(everything(optimizer), everything(solo))


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("sync_every", [1, 3])
@pytest.mark.parametrize("basis", ["svd", "subspace"])
def test_after_a_synchronisation_workers_agree_to_the_bit(num_workers, sync_every, basis):
    """Weights, moments, anchors, bases are one; errors are each worker's own. In between bases still are, weights are not."""

    def one_worker(workers):
        params = parameters(*SHAPES)
        optimizer = lordo.LoRDO(params, workers=workers, **OPTIONS | {"sync_every": sync_every, "basis": basis})
        snapshots = []
        for step in range(1, 3 * sync_every + 2):
            train(optimizer, params, range(step, step + 1), worker=workers.rank)
            snapshots.append(everything(optimizer))
        return snapshots

    results = lordo.simulate(one_worker, num_workers)
    for step, snapshots in enumerate(zip(*results, strict=True), start=1):
        for other in snapshots[1:]:
            for name, tensor in snapshots[0].items():
                same = torch.equal(tensor, other[name])
                if name.endswith(("basis", "anchor", "step")):
                    assert same, (step, name)
                elif name.endswith("error"):
                    assert not same, (step, name)
                elif step % sync_every == 0:
                    assert same, (step, name)
                elif tensor.ndim == 2:  # a first step is the sign of the gradient, and a few signs may be alike
                    assert not same, (step, name)


def test_the_error_is_averaged_only_when_asked():
    for asked, same in ((None, False), (3, True)):
        first, second = run_workers(((6, 9),), num_workers=2, steps=3, **OPTIONS, sync_error_every=asked)
        (p,), (q,) = (o.param_groups[0]["params"] for o in (first, second))
        assert torch.equal(first.error_of(p), second.error_of(q)) is same
        assert ("error" in first.report.averaged) is same


@pytest.mark.parametrize("basis", ["svd", "subspace"])
def test_bases_are_bit_identical_whatever_the_number_of_threads(basis):
    """A decomposition on one thread differs in its last bits from one on two: it is computed once and sent."""

    def one_worker(workers):
        torch.set_num_threads(1 + workers.rank)
        params = parameters((200, 300), (300, 150))
        optimizer = lordo.LoRDO(params, workers=workers, rank=12, lr=0.01, sync_every=2, basis=basis)
        bases = []
        for step in range(1, 6):
            torch.set_num_threads(1 + workers.rank)
            train(optimizer, params, range(step, step + 1), worker=workers.rank)
            bases += [optimizer.state[p]["basis"].clone() for p in params]
        return bases

    first, *others = lordo.simulate(one_worker, 3)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0], first[4]), "no refresh happened"


def test_refreshes_are_spread_over_the_workers(monkeypatch):
    """Each basis is computed by one worker, and every worker has some to compute."""
    computed = []
    original = lordo.sync.shared_basis.leading_subspace

    def counted(matrix, basis, *, seed, **options):
        computed.append((seed[2], seed[1]))
        return original(matrix, basis, seed=seed, **options)

    monkeypatch.setattr(lordo.sync.shared_basis, "leading_subspace", counted)
    run_workers(SHAPES[:3], num_workers=3, steps=4, **OPTIONS)
    names = [f"parameter {i:06d}" for i in range(3)]
    assert sorted(computed) == [(step, name) for step in (1, 3) for name in names]


@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("basis", ["svd", "subspace"])
def test_without_the_full_rank_term_the_subspace_never_changes(error_feedback, basis):
    """The paper's first claim: with ω = 1 Δ never leaves span(Q), every refresh returns it; with ω < 1 it moves."""

    def overlap_of_first_and_last(omega):
        options = {"lr": 0.02, "rank": 3, "sync_every": 4, "omega": omega, "error_feedback": error_feedback, "basis": basis}
        first, last = (run_workers(((10, 14),), num_workers=3, steps=steps, **options)[0] for steps in (1, 40))
        bases = [next(iter(o.state.values()))["basis"] for o in (first, last)]
        return overlap(*bases)

    assert overlap_of_first_and_last(1.0) == pytest.approx(1, abs=1e-4)
    assert overlap_of_first_and_last(0.5) < 0.9


def test_the_report_says_what_the_synchronisation_did():
    (optimizer, *_) = run_workers(SHAPES, num_workers=2, steps=2, **OPTIONS)
    assert optimizer.report == lordo.sync.rules.SyncReport(step=0)
    (optimizer, *_) = run_workers(SHAPES, num_workers=2, steps=4, **OPTIONS, sync_exp_avg_every=4, sync_exp_avg_sq_every=100)
    assert (optimizer.report.step, optimizer.report.averaged) == (4, ("exp_avg",))
    (optimizer, *_) = run_workers(SHAPES, num_workers=2, steps=5, **OPTIONS)
    assert (optimizer.report.step, optimizer.report.averaged) == (3, ("exp_avg", "exp_avg_sq", "parameters"))
    assert 0 < optimizer.report.overlap <= 1 + 1e-5
    assert optimizer.report.kept_bases == ()
    assert optimizer.steps_to_next_sync == 1


def test_a_zero_pseudo_gradient_keeps_the_bases_and_is_reported():
    for optimizer in run_workers(SHAPES, num_workers=2, steps=3, **OPTIONS | {"lr": 0.0}):
        assert optimizer.report.kept_bases == tuple(f"parameter {i:06d}" for i in range(3))
        assert optimizer.report.overlap == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_pseudo_gradient_that_is_not_finite_keeps_that_basis_and_is_reported(bad):
    """A weight is ruined on every worker between two synchronisations; the other weights are refreshed."""

    def one_worker(workers):
        params = parameters((6, 9), (9, 6))
        optimizer = lordo.LoRDO([("ruined", params[0]), ("sound", params[1])], workers=workers, **OPTIONS)
        train(optimizer, params, 2, worker=workers.rank)
        bases = [optimizer.state[p]["basis"].clone() for p in params]
        with torch.no_grad():
            params[0][2, 3] = bad
        train(optimizer, params, range(3, 4), worker=workers.rank)
        kept = [torch.equal(basis, optimizer.state[p]["basis"]) for basis, p in zip(bases, params, strict=True)]
        return kept, optimizer.report.kept_bases, [optimizer.state[p]["exp_avg"].isfinite().all().item() for p in params]

    assert lordo.simulate(one_worker, 2) == [([True, False], ("ruined",), [True, True])] * 2


def with_one_ruined(workers, *, ruin, steps=3, options=OPTIONS):
    """Train to the third step, the synchronisation, before which `ruin(params, optimizer, rank)` does harm."""
    params = parameters((6, 9), (5,))
    optimizer = lordo.LoRDO([("matrix", params[0]), ("vector", params[1])], workers=workers, **options)
    train(optimizer, params, 2, worker=workers.rank)
    with torch.no_grad():
        ruin(params, optimizer, workers.rank)
    train(optimizer, params, range(3, steps + 1), worker=workers.rank)
    return params, optimizer


def ruin_weights(bad):
    def ruin(params, optimizer, rank):
        if rank == 1:
            params[0][2, 3] = bad

    return ruin


@pytest.mark.filterwarnings("ignore:after step 3 an average leaves out")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_a_ruined_worker_does_not_ruin_the_others(num_workers, bad):
    """At a synchronisation every worker joins, with weight 0 if its part is not finite (design: hazards, collectives): the mean is that of
    the others, and the ruined worker takes it too."""

    def one_worker(workers):
        finals = []

        def ruin(params, optimizer, rank):
            ruin_weights(bad)(params, optimizer, rank)
            give_gradients(params, step=3, worker=rank)
            mine = [p.detach().clone() for p in params]  # what this worker would have after a third step of its own
            alone = copy.deepcopy(optimizer)
            alone._attach(lordo.sync.Solo())
            train(alone, (ps := [p for g in alone.param_groups for p in g["params"]]), range(3, 4), worker=rank)
            finals.extend(ps if rank != 1 else mine)

        params, optimizer = with_one_ruined(workers, ruin=ruin)
        return [p.detach().clone() for p in params], finals, optimizer

    results = lordo.simulate(one_worker, num_workers)
    for i in range(2):
        expected = torch.stack([finals[i].detach() for rank, (_, finals, _) in enumerate(results) if rank != 1]).mean(0)
        for params, _, _ in results:
            assert params[i].isfinite().all()
            assert torch.equal(params[i], results[0][0][i])
            torch.testing.assert_close(params[i], expected)
    for rank, (_, _, optimizer) in enumerate(results):
        assert optimizer.num_left_out == (rank == 1)
        assert [(each.worker, each.tensor, each.in_a_row) for each in optimizer.report.left_out] == [(1, "matrix", 1)]
        assert optimizer.state_dict()["param_groups"][0]["left_out"] == (rank == 1)


def ruined_at(workers, *, at, every, steps, heals):
    """Worker 1's weights become NaN after a step, and so do its gradients for as long as they are (`heals`), or for ever."""
    (p,) = params = parameters((6, 9))
    optimizer = lordo.LoRDO([("matrix", p)], lr=0.01, rank=2, sync_every=every, workers=workers)
    for step in range(1, steps + 1):
        give_gradients(params, step=step, worker=workers.rank)
        if workers.rank == 1 and step > at and (not heals or not bool(p.isfinite().all())):
            p.grad.fill_(math.nan)
        optimizer.step()
        if step == at and workers.rank == 1:
            p.detach()[0, 0] = math.nan
    return p.detach().clone(), optimizer


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_more_than_twenty_skipped_steps_are_no_error_if_a_synchronisation_heals_before_it_is_too_late():
    """A round may be longer than twenty steps: whoever is ruined in it skips until its end, and takes sound weights there."""
    results = lordo.simulate(lambda workers: ruined_at(workers, at=3, every=30, steps=60, heals=True), 2)
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][0].isfinite().all()
    assert [optimizer.num_skipped_steps for _, optimizer in results] == [0, 27]
    assert [optimizer.num_left_out for _, optimizer in results] == [0, 1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_who_skips_for_a_round_and_twenty_steps_is_beyond_help():
    with pytest.raises(FloatingPointError, match=r"step 33 skipped on this worker.* and so were the 29 before it"):
        lordo.simulate(lambda workers: ruined_at(workers, at=3, every=10, steps=60, heals=False), 2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_if_all_are_ruined_there_is_nobody_to_take_weights_from():
    def one_worker(workers):
        return with_one_ruined(workers, ruin=lambda params, optimizer, rank: params[0].fill_(math.nan), steps=30)

    with pytest.raises(FloatingPointError, match=r"after step 15 an average leaves out nobody, for all have such numbers.* as 4 before it"):
        lordo.simulate(one_worker, 2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("method", [name for name, row in lordo.METHODS.items() if row.averages_gradients])
def test_a_bad_gradient_of_one_worker_is_a_step_that_all_skip_where_gradients_are_averaged(method):
    def one_worker(workers):
        params = parameters((6, 9), (5,))
        rank = {"rank": 2} if "rank" in lordo.METHODS[method].settings else {}
        optimizer = lordo.optimizer.DistributedOptimizer(params, method, lr=0.01, workers=workers, **rank)
        for step in range(1, 4):
            give_gradients(params, step=step, worker=workers.rank)
            if step == 2 and workers.rank == 1:
                params[1].grad[0] = math.nan
                before = [p.detach().clone() for p in params]
            optimizer.step()
            if step == 2 and workers.rank == 1:
                assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
        return [p.detach().clone() for p in params], optimizer

    (first, one), (second, two) = lordo.simulate(one_worker, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(p.isfinite().all() for p in first)
    assert one.num_skipped_steps == two.num_skipped_steps == 1


def test_who_is_left_out_is_named_and_it_trains_on():
    def one_worker(workers):
        return with_one_ruined(workers, ruin=ruin_weights(math.nan), steps=9)

    with pytest.warns(RuntimeWarning, match=r"after step 3 an average leaves out worker 1 \('matrix' is not finite\)"):
        results = lordo.simulate(one_worker, 3)
    for params, optimizer in results:
        assert optimizer.report.left_out == ()
        assert optimizer.left_out_in_a_row == 0
        assert all(torch.equal(p, q) for p, q in zip(params, results[0][0], strict=True))


@pytest.mark.filterwarnings("ignore:after step")
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "error"])
def test_state_that_is_not_finite_on_one_worker_starts_anew_there(key):
    """Moments are left out of the average; the error is the worker's own, and NaN in it would make its next step NaN."""

    def ruin(params, optimizer, rank):
        if rank == 0:
            optimizer.state[params[0]][key].view(-1)[3] = math.nan

    results = lordo.simulate(lambda workers: with_one_ruined(workers, ruin=ruin, steps=8), 2)
    for params, optimizer in results:
        for p in params:
            assert all(t.isfinite().all() for t in (p, *optimizer.state[p].values()))


@pytest.mark.filterwarnings("ignore:after step", "ignore:step .* skipped")
def test_a_worker_that_is_left_out_again_and_again_ends_the_run_on_all():
    sentences = []

    def one_worker(workers):
        params = parameters((6, 9))
        optimizer = lordo.LoRDO([("matrix", params[0])], workers=workers, **OPTIONS)
        try:
            for step in range(1, 40):
                if workers.rank == 2 and step > 1:
                    with torch.no_grad():
                        params[0][0, 0] = math.nan
                train(optimizer, params, range(step, step + 1), worker=workers.rank)
        except FloatingPointError as error:
            sentences.append((step, str(error)))
            if len(sentences) == 3:
                raise

    with pytest.raises(FloatingPointError, match=r"after step 15 an average leaves out worker 2 .*, as 4 before it: look at that machine"):
        lordo.simulate(one_worker, 3)
    assert len(set(sentences)) == 1


@pytest.mark.filterwarnings("ignore:after step")
def test_an_average_outside_the_schedule_leaves_out_a_ruined_worker_too():
    def one_worker(workers):
        params = parameters((6, 9), (5,))
        optimizer = lordo.LoRDO(params, workers=workers, **OPTIONS)
        train(optimizer, params, 2, worker=workers.rank)
        if workers.rank == 1:
            with torch.no_grad():
                params[1][0] = math.inf
        optimizer.average_parameters()
        return params

    for p, q in zip(*lordo.simulate(one_worker, 2), strict=True):
        assert p.isfinite().all()
        assert torch.equal(p, q)


# -- a worker whose parameter has fewer steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 9), (5,)], ids=["low-rank", "full-rank"])
def test_workers_agree_after_a_synchronisation_though_one_had_no_gradient(shape):
    """An expert without tokens on one worker: its t is 0, the averaged moments are not. They are rotated there too, or moments of
    different bases would be averaged the next time."""

    def one_worker(workers):
        params = parameters(shape, (5,))
        optimizer = lordo.LoRDO(params, workers=workers, **OPTIONS)
        for step in range(1, 4):
            give_gradients(params, step=step, worker=workers.rank)
            if workers.rank == 1:
                params[0].grad = None
            optimizer.step()
        return {key: optimizer.state[params[0]][key].clone() for key in AVERAGED if key in optimizer.state[params[0]]}

    first, second = lordo.simulate(one_worker, 2)
    assert first["exp_avg"].abs().max() > 0
    for name in first:
        torch.testing.assert_close(first[name], second[name], msg=lambda m, name=name: f"{name}: {m}")


def test_a_first_own_step_after_a_synchronisation_is_no_larger_than_a_first_step():
    """Moments received by averaging count more steps than the worker's own: û = u / (1 − β1¹) would be far too large."""

    def one_worker(workers):
        (p,) = params = parameters((5,))
        optimizer = lordo.LoRDO(params, workers=workers, lr=0.01, rank=None, omega=1.0, betas=(0.999, 0.999), sync_every=64)
        for step in range(1, 66):
            p.grad = torch.ones_like(p) if workers.rank == 0 or step == 65 else None
            before = p.detach().clone()
            optimizer.step()
        return float((p.detach() - before).abs().max())

    for moved in lordo.simulate(one_worker, 2):
        assert moved <= 0.01 * 1.5


# -- bytes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "periods",
    [
        {"sync_every": 1},
        {"sync_every": 4},
        {"sync_every": 3, "sync_exp_avg_every": 2, "sync_exp_avg_sq_every": 5},
        {"sync_every": 2, "sync_error_every": 4},
        {"sync_every": 100},
    ],
    ids=str,
)
def test_bytes_are_those_of_the_closed_form(num_workers, dtype, periods):
    """s L + 2 r L numbers an average, s r a basis, s L once for the first one; of N bytes, 2 (M−1)/M N where all get the result,
    (M−1)/M N where one worker sends or gets."""
    steps, r, size = 12, 2, 8 if dtype == torch.float64 else 4
    lowrank, full = [(6, 9), (9, 6), (7, 7), (3, 40)], [(5,), (), (4, 3, 2), (2, 30), (0, 4)]
    sides = [(min(shape), max(shape)) for shape in lowrank]
    num_full = sum(torch.Size(shape).numel() for shape in full)
    num_matrix, num_moment = sum(s * L for s, L in sides), sum(r * L for _, L in sides) + num_full
    K = periods["sync_every"]

    def times(name):
        return steps // (periods.get(name) or K)

    all_reduced = {
        "parameters": (num_matrix + num_full) * times("sync_every"),
        "exp_avg": num_moment * times("sync_exp_avg_every"),
        "exp_avg_sq": num_moment * times("sync_exp_avg_sq_every"),
        "error": num_matrix * times("sync_error_every") if "sync_error_every" in periods else 0,
    }
    broadcast = {"basis": sum(s * r for s, _ in sides) * (1 + times("sync_every")), "first gradient": num_matrix}

    for optimizer in run_workers(lowrank + full, num_workers=num_workers, steps=steps, dtype=dtype, lr=0.01, rank=r, **periods):
        workers = optimizer.workers
        for tag, numbers in all_reduced.items():
            assert workers.bytes_sent(tag) == 2 * numbers * size * (num_workers - 1) // num_workers, tag
        for tag, numbers in broadcast.items():
            assert workers.bytes_sent(tag) == numbers * size * (num_workers - 1) // num_workers, tag
        if num_workers > 1:
            moved = {tag: 2 * n * size for tag, n in all_reduced.items()} | {tag: n * size for tag, n in broadcast.items()}
            moved["step"] = 2 * 4 * len(lowrank + full) * times("sync_exp_avg_every")  # how many steps each parameter took, float32
            assert dict(workers.moved) == {tag: n for tag, n in moved.items() if n}, "something travels that the closed form lacks"
        assert workers.bytes_sent() == sum(workers.bytes_sent(tag) for tag in workers.moved)


def test_averaging_outside_the_schedule_sends_once_and_only_what_differs():
    def one_worker(workers):
        params = parameters(*SHAPES)
        optimizer = lordo.LoRDO(params, workers=workers, **OPTIONS)
        numbers = sum(p.numel() for p in params)
        sent = []
        optimizer.average_parameters()  # nothing was trained yet
        sent.append(workers.moved["parameters"])
        for step in range(1, 5):
            train(optimizer, params, range(step, step + 1), worker=workers.rank)
            optimizer.average_parameters()
            sent.append(workers.moved["parameters"])
        return [s / (2 * 4 * numbers) for s in sent], [p.detach().clone() for p in params]

    (sent, first), (_, second) = lordo.simulate(one_worker, 2)
    assert sent == [0, 1, 2, 3, 4], "at step 3 the schedule averages, and nothing more is sent"
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


# -- the outer step ----------------------------------------------------------------------------------------------------------


def test_nesterov_by_hand():
    """Anchor 1, Δ = 2, b = 4, μ = 0.5, η = 0.5: b' = 0.5·4 + 2 = 4, W = 1 + 0.5 (2 + 0.5·4) = 3."""
    weight, momentum = torch.tensor([3.0]), torch.tensor([4.0])
    nesterov_(weight, torch.tensor([2.0]), momentum, {"outer_lr": 0.5, "outer_momentum": 0.5})
    assert (weight.item(), momentum.item()) == (3.0, 4.0)


@pytest.mark.parametrize("method", ["lordo", "local-adamw"])
def test_an_outer_step_of_rate_one_without_momentum_is_plain_averaging(method):
    def one_worker(workers, **outer):
        params = parameters(*SHAPES, dtype=torch.float64)
        settings = {"lr": 0.01, "sync_every": 3} | ({"rank": 2} if method == "lordo" else {})
        optimizer = lordo.DistributedOptimizer(params, method, workers=workers, **settings, **outer)
        train(optimizer, params, 8, worker=workers.rank)
        return params

    plain = lordo.simulate(one_worker, 2)
    outer = lordo.simulate(lambda workers: one_worker(workers, outer="nesterov", outer_lr=1.0, outer_momentum=0.0), 2)
    torch.testing.assert_close(plain, outer)


def test_an_outer_step_of_rate_zero_goes_back_to_the_anchor():
    def one_worker(workers):
        params = parameters(*SHAPES, dtype=torch.float64)
        start = [p.detach().clone() for p in params]
        settings = {"outer": "nesterov", "outer_lr": 0.0, "lr": 0.1, "sync_every": 3}
        train(lordo.DistributedOptimizer(params, "local-adamw", workers=workers, **settings), params, 6, worker=workers.rank)
        torch.testing.assert_close([p.detach() for p in params], start)

    lordo.simulate(one_worker, 2)


@pytest.mark.parametrize("value", ["nesterov", "none"])
def test_a_group_cannot_have_an_outer_step_of_its_own(value):
    """Rules are built once for the optimizer: a group's own choice would be ignored without a word."""
    with pytest.raises(ValueError, match="outer"):
        lordo.DistributedOptimizer([{"params": parameters((5,)), "outer": value}], "local-adamw")


# -- weights of low precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lordo", "local-adamw", "lordo-local", "diloco", "desloc"])
def test_bf16_weights_are_their_float32_anchors_rounded_and_alike_on_all_workers(name):
    settings = {key: value for key, value in OPTIONS.items() if key in lordo.METHODS[name].settings} | {"sync_every": 3}

    def one_worker(workers):
        params = parameters((6, 9), (5,), dtype=torch.bfloat16)
        optimizer = lordo.DistributedOptimizer(params, name, workers=workers, **settings)
        train(optimizer, params, 3, worker=workers.rank)
        return [(p.detach(), optimizer.state[p]["anchor"]) for p in params]

    first, second = lordo.simulate(one_worker, 2)
    for (p, anchor), (other_p, other_anchor) in zip(first, second, strict=True):
        assert anchor.dtype == torch.float32
        assert not torch.equal(anchor, p.float())  # it knows more than the weight
        assert torch.equal(anchor.bfloat16(), p)
        assert torch.equal(p, other_p)
        assert torch.equal(anchor, other_anchor)


def test_changes_below_the_last_bit_of_a_bf16_weight_add_up():
    """One worker of four moves 1 up by its last bit, 2⁻⁷, in each round: a mean of 2⁻⁹, which 1 in bfloat16 cannot hold."""

    def one_worker(workers):
        p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = lordo.DistributedOptimizer([p], "local-adamw", workers=workers, sync_every=1, lr=0.0)
        optimizer.start()
        seen = []
        for _ in range(4):
            p.data += 2**-7 if workers.rank == 2 else 0.0
            p.grad = torch.ones_like(p)
            optimizer.step()
            seen.append((p[0].item(), optimizer.state[p]["anchor"][0].item()))
        return seen

    for seen in lordo.simulate(one_worker, 4):
        assert [anchor for _, anchor in seen] == [1 + 2**-9, 1 + 2 * 2**-9, 1 + 3 * 2**-9, 1 + 2**-7]
        assert [p for p, _ in seen] == [1.0, 1.0, 1 + 2**-7, 1 + 2**-7]  # rounded to even at the tie


@pytest.mark.parametrize("name", ["lordo", "diloco"])
def test_bf16_rounds_take_their_pseudo_gradient_from_the_float32_anchor(name):
    """By hand, at the second round: A' = A + outer step of the mean of W − bfloat16(A)."""
    own = {"rank": None} if name == "lordo" else {"outer_lr": 0.5, "outer_momentum": 0.0}

    def one_worker(workers):
        params = parameters((6, 9), dtype=torch.bfloat16)
        optimizer = lordo.DistributedOptimizer(params, name, workers=workers, lr=0.01, sync_every=2, **own)
        (p,) = params
        train(optimizer, params, 3, worker=workers.rank)
        anchor, before = optimizer.state[p]["anchor"].clone(), p.detach().clone()
        alone = lordo.DistributedOptimizer([q := torch.nn.Parameter(before)], name, lr=0.01, sync_every=2, **own)
        alone.load_state_dict(optimizer.state_dict())
        alone.method, alone.after = optimizer.method, []
        train(alone, [q], range(4, 5), worker=workers.rank)
        train(optimizer, params, range(4, 5), worker=workers.rank)
        return anchor, q.detach(), optimizer.state[p]["anchor"]

    first, second = lordo.simulate(one_worker, 2)
    start = first[0]
    delta = sum(q.float() - start.bfloat16().float() for _, q, _ in (first, second)) / 2
    expected = start + delta * (0.5 if name == "diloco" else 1.0)
    torch.testing.assert_close(first[2], expected, rtol=0, atol=1e-7)


# -- groups and parameters added later -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [0, 2, 3])
def test_all_workers_may_add_a_group_at_any_step(when):
    """Also in the middle of a round, when the older weights differ between workers as they should."""

    def one_worker(workers):
        params = parameters((6, 9), (9, 6), (5,))
        optimizer = lordo.LoRDO(params[:1], workers=workers, **OPTIONS)
        train(optimizer, params[:1], when, worker=workers.rank)
        optimizer.add_param_group({"params": params[1:]})
        train(optimizer, params, range(when + 1, 7), worker=workers.rank)
        return everything(optimizer)

    first, second = lordo.simulate(one_worker, 2)
    for name in first:
        assert torch.equal(first[name], second[name]) or name.endswith("error"), name


def test_added_weights_that_differ_between_workers_are_refused():
    def one_worker(workers):
        params = parameters((6, 9), (9, 6))
        optimizer = lordo.LoRDO([("old", params[0])], workers=workers, **OPTIONS)
        train(optimizer, params[:1], 2)
        optimizer.add_param_group({"params": [("new", nn.Parameter(randn(9, 6, seed=workers.rank)))]})
        optimizer.step()

    with pytest.raises(ValueError, match=r"worker 1 starts from other weights than worker 0 .*'new'"):
        lordo.simulate(one_worker, 2)


def test_groups_may_have_periods_of_their_own():
    def one_worker(workers):
        params = parameters((6, 9), (9, 6))
        groups = [{"params": params[:1], "sync_every": 2}, {"params": params[1:], "sync_every": 3}]
        optimizer = lordo.LoRDO(groups, workers=workers, **OPTIONS | {"sync_every": 5})
        snapshots = []
        for step in range(1, 7):
            train(optimizer, params, range(step, step + 1), worker=workers.rank)
            snapshots.append([p.detach().clone() for p in params])
        return snapshots

    first, second = lordo.simulate(one_worker, 2)
    same = [[torch.equal(p, q) for p, q in zip(a, b, strict=True)] for a, b in zip(first, second, strict=True)]
    assert same == [[step % 2 == 0, step % 3 == 0] for step in range(1, 7)]


@pytest.mark.parametrize("order", ["reversed on one worker"])
def test_the_order_of_named_parameters_within_a_group_does_not_matter(order):
    """Collectives go by name: one worker whose module lists its parameters in another order neither hangs nor mixes them up."""

    def one_worker(workers, turn):
        params = dict(zip(("a", "b", "c"), parameters((6, 9), (9, 6), (5,)), strict=True))
        names = list(params)[::-1] if turn and workers.rank == 1 else list(params)
        optimizer = lordo.LoRDO([(name, params[name]) for name in names], workers=workers, **OPTIONS)
        train(optimizer, list(params.values()), 6, worker=workers.rank)
        return [params[name].detach().clone() for name in ("a", "b", "c")]

    straight = lordo.simulate(lambda workers: one_worker(workers, False), 2)
    turned = lordo.simulate(lambda workers: one_worker(workers, True), 2)
    for a, b in zip(straight, turned, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


# -- resuming ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("taken", [0, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_workers_are_uninterrupted_ones(num_workers, taken, dtype):
    """Each worker's own state, in the middle of a round too, also loaded into an optimizer that has already stepped."""

    def one_worker(workers):
        params = parameters(*SHAPES, dtype=dtype)
        optimizer = lordo.LoRDO(params, workers=workers, **OPTIONS)
        train(optimizer, params, taken, worker=workers.rank)
        saved, weights = reloaded(optimizer.state_dict()), [p.detach().clone() for p in params]
        train(optimizer, params, range(taken + 1, 9), worker=workers.rank)
        straight = everything(optimizer)

        for fresh in (True, False):
            if fresh:
                params = parameters(*SHAPES, seed=50, dtype=dtype)
                optimizer = lordo.LoRDO(params, workers=workers, **OPTIONS)
            with torch.no_grad():
                for p, w in zip(params, weights, strict=True):
                    p.copy_(w)
            optimizer.load_state_dict(saved)
            train(optimizer, params, range(taken + 1, 9), worker=workers.rank)
            assert_same_bits(everything(optimizer), straight)
            assert optimizer.workers is workers
        return True

    assert lordo.simulate(one_worker, num_workers) == [True] * num_workers


def test_loading_forgets_that_weights_were_averaged():
    """`average_parameters` sends nothing if it was just called at this step; loaded weights of the same step are others."""

    def one_worker(workers):
        params = parameters(*SHAPES)
        optimizer = lordo.LoRDO(params, workers=workers, **OPTIONS)
        train(optimizer, params, 2, worker=workers.rank)
        saved, weights = reloaded(optimizer.state_dict()), [p.detach().clone() for p in params]
        optimizer.average_parameters()
        with torch.no_grad():
            for p, w in zip(params, weights, strict=True):
                p.copy_(w)
        optimizer.load_state_dict(saved)
        optimizer.average_parameters()
        return params

    for p, q in zip(*lordo.simulate(one_worker, 2), strict=True):
        assert torch.equal(p, q)


def test_loading_on_workers_at_different_steps_is_refused():
    def one_worker(workers):
        params = parameters((6, 9))
        optimizer = lordo.LoRDO(params, workers=workers, **OPTIONS)
        train(optimizer, params, 3, worker=workers.rank)
        state = optimizer.state_dict()
        if workers.rank == 1:
            state["param_groups"][0]["steps_taken"] = 2
        optimizer.load_state_dict(state)
        train(optimizer, params, 1)

    with pytest.raises(ValueError, match="steps_taken is 3 on worker 0 but 2 on worker 1"):
        lordo.simulate(one_worker, 2)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_workers_optimizer_refuses_to_step(how):
    def one_worker(workers):
        params = parameters((6, 9))
        optimizer = lordo.LoRDO(params, workers=workers, **OPTIONS)
        train(optimizer, params, 2, worker=workers.rank)
        twin = how(optimizer)
        with pytest.raises(RuntimeError, match=r"copy of one that had 2 workers.*build it anew with workers=… and load the state_dict"):
            train(twin, twin.param_groups[0]["params"], 1)
        train(optimizer, params, range(3, 5), worker=workers.rank)  # the original goes on
        again = lordo.LoRDO(parameters((6, 9)), workers=workers, **OPTIONS)
        again.load_state_dict(twin.state_dict())
        assert again.steps_taken == 2
        return everything(twin).keys() == everything(optimizer).keys()

    assert lordo.simulate(one_worker, 2) == [True, True]


# -- gradients that are not finite, on one worker --------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_worker_that_skips_a_step_keeps_the_schedule_and_joins_the_next_synchronisation(at):
    def one_worker(workers):
        params = parameters(*SHAPES)
        optimizer = lordo.LoRDO([(f"layer{i}", p) for i, p in enumerate(params)], workers=workers, **OPTIONS)
        for step in range(1, 5):
            give_gradients(params, step=step, worker=workers.rank)
            if step == at and workers.rank == 1:
                params[4].grad.fill_(math.nan)
                before = everything(optimizer)
                with pytest.warns(RuntimeWarning, match=f"step {at} skipped on this worker: the gradient of 'layer4' is not finite"):
                    optimizer.step()
                if at == 2:
                    assert_same_bits(everything(optimizer), before)
                if at < 3:
                    assert [int(optimizer.state[p]["step"]) for p in params] == [at - 1] * 6
            else:
                optimizer.step()
            if step == 3:
                averaged = [p.detach().clone() for p in params]
        bases = [optimizer.state[p]["basis"].clone() for p in params[:3]]
        return optimizer.report.step, optimizer.num_skipped_steps, averaged, bases

    first, second = lordo.simulate(one_worker, 2)
    assert first[:2] == (3, 0)
    assert second[:2] == (3, 1)
    for mine, yours in zip(first[2] + first[3], second[2] + second[3], strict=True):
        assert torch.equal(mine, yours)
        assert mine.isfinite().all()


def test_workers_that_skip_every_step_end_with_an_error_that_names_the_parameter():
    def one_worker(workers):
        params = parameters((6, 9), (5,))
        optimizer = lordo.LoRDO([("body", params[0]), ("bias", params[1])], workers=workers, **OPTIONS)
        for step in range(1, 40):
            give_gradients(params, step=step)
            if workers.rank == 1:
                params[1].grad[0] = math.inf
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(FloatingPointError, match=r"step 23 skipped on this worker: the gradient of 'bias'"):
            lordo.simulate(one_worker, 2)


def test_first_basis_is_from_the_workers_whose_gradient_is_usable():
    def one_worker(workers):
        (p,) = parameters((6, 9))
        optimizer = lordo.LoRDO([p], workers=workers, **OPTIONS)
        give_gradients([p], step=1, worker=workers.rank)
        if workers.rank == 1:
            p.grad[0, 0] = math.nan
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            optimizer.step()
        return optimizer.state[p]["basis"].clone()

    usable = (randn(6, 9, seed=10_000) + randn(6, 9, seed=10_200)) / 3
    expected = torch.linalg.svd(usable)[0][:, :2]
    for basis in lordo.simulate(one_worker, 3):
        assert overlap(basis, expected) == pytest.approx(1, abs=1e-4)


def test_a_grad_scaler_with_an_infinity_on_one_worker_neither_hangs_nor_shifts():
    def one_worker(workers):
        params = parameters(*SHAPES)
        optimizer = lordo.LoRDO(params, workers=workers, **OPTIONS)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for step in range(1, 7):
                scaled_step(scaler, optimizer, params, step=step, worker=workers.rank, inf=step == 2 and workers.rank == 1)
        assert optimizer.report.step == 6
        return scaler.get_scale(), optimizer.num_skipped_steps, [p.detach().clone() for p in params]

    first, second = lordo.simulate(one_worker, 2)
    assert first[:2] == (2.0**10, 0)
    assert second[:2] == (2.0**9, 1)
    assert all(torch.equal(p, q) for p, q in zip(first[2], second[2], strict=True))


@pytest.mark.parametrize("early", [False, True], ids=["in the step", "by average_gradients"])
def test_grad_scalers_of_averaged_gradients_stay_right_after_an_infinity_on_one_worker(early):
    """ddp-adamw: the mean of gradients with different scales is no gradient. All stay equal to AdamW without the bad step."""
    steps, bad = range(1, 6), 2
    theirs = parameters((6, 9), (5,), dtype=torch.float64)
    adamw = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.99), weight_decay=0.0)
    for step in steps:
        for i, p in enumerate(theirs):
            p.grad = sum(randn(*p.shape, seed=10_000 * step + 100 * worker + i, dtype=p.dtype) for worker in range(2)) / 2
        if step != bad:
            adamw.step()

    def one_worker(workers):
        params = parameters((6, 9), (5,), dtype=torch.float64)
        optimizer = lordo.DistributedOptimizer(params, "ddp-adamw", lr=0.01, workers=workers)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for step in steps:
                optimizer.zero_grad()
                G = [randn(*p.shape, seed=10_000 * step + 100 * workers.rank + i, dtype=p.dtype) for i, p in enumerate(params)]
                scaler.scale(sum((p * g).sum() for p, g in zip(params, G, strict=True))).backward()
                if step == bad and workers.rank == 1:
                    params[0].grad[0, 0] = math.inf
                if early:
                    optimizer.average_gradients()
                scaler.step(optimizer)
                scaler.update()
        return params

    first, second = lordo.simulate(one_worker, 2)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first, theirs)


# -- workers that differ -------------------------------------------------------------------------------------------------------


def build(*, names=("a", "b"), shapes=((6, 9), (5,)), dtype=torch.float32, seed=0, groups=1, **settings):
    """What a worker builds; the tests below change it on one worker."""
    params = parameters(*shapes, seed=seed, dtype=dtype)
    named = list(zip(names, params, strict=True))
    given = [{"params": named}] if groups == 1 else [{"params": [pair]} for pair in named]
    return params, given, OPTIONS | settings


DIFFERENCES = [
    ({"names": ("a", "c")}, "worker 0 has a parameter 'b' that worker 1 lacks: build the same model on every worker"),
    (
        {"names": ("a", "b", "c"), "shapes": ((6, 9), (5,), (5,))},
        "worker 1 has a parameter 'c' that worker 0 lacks: build the same model on every worker",
    ),
    (
        {"shapes": ((6, 8), (5,))},
        r"parameter 'a' is \(6, 9\) of torch.float32 on worker 0 but \(6, 8\) of torch.float32 on worker 1: build the same model",
    ),
    ({"dtype": torch.bfloat16}, r"parameter 'a' is \(6, 9\) of torch.float32 on worker 0 but \(6, 9\) of torch.bfloat16 on worker 1"),
    ({"lr": 0.02}, "lr is 0.01 on worker 0 but 0.02 on worker 1: give every worker the same settings"),
    ({"rank": 3}, "rank is 2 on worker 0 but 3 on worker 1: give every worker the same settings"),
    ({"rank": None}, "rank is 2 on worker 0 but None on worker 1"),
    ({"sync_every": 4}, "sync_every is 3 on worker 0 but 4 on worker 1: give every worker the same settings"),
    ({"sync_error_every": 4}, "sync_error_every is None on worker 0 but 4 on worker 1"),
    ({"betas": (0.9, 0.95)}, r"betas is \(0.9, 0.99\) on worker 0 but \(0.9, 0.95\) on worker 1"),
    ({"omega": 0.5}, "omega is None on worker 0 but 0.5 on worker 1"),
    ({"error_feedback": False}, "error_feedback is True on worker 0 but False on worker 1"),
    ({"basis": "svd"}, "basis is 'auto' on worker 0 but 'svd' on worker 1"),
    ({"weight_decay": 0.0}, "weight_decay is 0.1 on worker 0 but 0.0 on worker 1"),
    ({"groups": 2}, "workers 0 and 1 have 1 and 2 parameter groups: group the parameters alike on every worker"),
    (
        {"seed": 1},
        r"worker 1 starts from other weights than worker 0 \(first difference in 'a'\): build the model from the same seed",
    ),
]


@pytest.mark.parametrize(("difference", "sentence"), DIFFERENCES, ids=lambda case: str(case)[:40])
def test_workers_that_differ_are_told_in_what(difference, sentence):
    """At the first step, the same sentence on every worker."""
    sentences = []

    def one_worker(workers):
        params, groups, options = build(**difference if workers.rank == 1 else {})
        optimizer = lordo.LoRDO(groups, workers=workers, **options)
        give_gradients(params, step=1)
        try:
            optimizer.step()
        except ValueError as error:
            sentences.append(str(error))
            if len(sentences) == 2:
                raise

    with pytest.raises(ValueError, match=sentence):
        lordo.simulate(one_worker, 2)
    assert len(set(sentences)) == 1


@pytest.mark.parametrize("change", ["one number", "the sign of a zero", "two rows swapped", "two numbers swapped"])
def test_the_smallest_difference_in_initial_weights_is_found(change):
    def one_worker(workers):
        (p,) = parameters((6, 9))
        with torch.no_grad():
            p[5, 8] = 0.0
            if workers.rank == 2:
                if change == "one number":
                    p[3, 3] = torch.nextafter(p[3, 3], torch.tensor(9.0))
                elif change == "the sign of a zero":
                    p[5, 8] = -0.0
                elif change == "two rows swapped":
                    p.copy_(p[[1, 0, 2, 3, 4, 5]])
                else:
                    p[0, :2] = p[0, :2].flip(0)
        optimizer = lordo.LoRDO([("w", p)], workers=workers, **OPTIONS)
        train(optimizer, [p], 1)

    with pytest.raises(ValueError, match=r"worker 2 starts from other weights than worker 0 .*'w'"):
        lordo.simulate(one_worker, 3)


def test_methods_that_differ_are_told():
    def one_worker(workers):
        params = parameters((5,))
        optimizer = lordo.DistributedOptimizer(params, ("local-adamw", "ddp-adamw")[workers.rank], workers=workers)
        train(optimizer, params, 1)

    with pytest.raises(ValueError, match="method is 'local-adamw' on worker 0 but 'ddp-adamw' on worker 1"):
        lordo.simulate(one_worker, 2)


def test_a_tensor_for_learning_rate_is_compared_by_value():
    def one_worker(workers):
        params = parameters((6, 9))
        lr = torch.tensor(0.01, dtype=torch.float64) if workers.rank else 0.01
        train(lordo.LoRDO(params, workers=workers, **OPTIONS | {"lr": lr}), params, 4, worker=workers.rank)
        return True

    assert lordo.simulate(one_worker, 2) == [True, True]


def test_loaded_weights_become_the_anchor():
    """The weights may be loaded between building the optimizer and the first step."""

    def one_worker(workers):
        (p,) = parameters((6, 9))
        optimizer = lordo.LoRDO([p], workers=workers, **OPTIONS)
        loaded = randn(6, 9, seed=5)
        with torch.no_grad():
            p.copy_(loaded)
        train(optimizer, [p], 1, worker=workers.rank)
        assert torch.equal(optimizer.state[p]["anchor"], loaded)
        return True

    assert lordo.simulate(one_worker, 2) == [True, True]
