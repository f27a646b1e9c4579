"""Averages in a wire format, in fragments, split, or while training goes on: what they reduce to, and what stays exact."""

import io

import pytest
import torch
import torch.distributed as dist

import lordo
from common import assert_same_bits, everything, parameters, randn, train
from lordo.accounting import Weight, fragments_of, weights_of
from lordo.methods import METHODS
from lordo.sync.exchange import Exchange
from lordo.sync.fragments import assign_fragments
from lordo.sync.rules import Average, PseudoGradient
from lordo.sync.schedule import is_due, last_due, num_due
from test_processes import in_processes

SHAPES = ((6, 9), (9, 6), (7, 7), (5,), (), (130,), (4, 3, 2))
OPTIONS = {"lr": 0.01, "rank": 2, "sync_every": 4, "weight_decay": 0.1}
WIRES = ["bfloat16", "int8", "int4"]
EVERYTHING = {"sync_wire": "int4", "sync_overlap": 3, "sync_fragments": 2, "sync_split": True}
LOCAL_UPDATE = [name for name, row in METHODS.items() if "sync_wire" in row.settings]


def build(workers, name="lordo", shapes=SHAPES, dtype=torch.float32, **more):
    params = parameters(*shapes, dtype=dtype)
    known = {key: value for key, value in {**OPTIONS, **more}.items() if key in METHODS[name].settings}
    return params, lordo.DistributedOptimizer(params, name, workers=workers, **known)


def trained(workers, name="lordo", steps=14, **more):
    """A trained worker's optimizer."""
    params, optimizer = build(workers, name, **more)
    train(optimizer, params, steps, worker=workers.rank)
    return optimizer


def replaced(optimizer, **settings):
    """The same optimizer with the rule of this module where it would take the plain ones."""
    settings = {**optimizer.defaults, **settings}
    plain, follow = optimizer.after
    assert isinstance(plain, Average)
    assert isinstance(follow, PseudoGradient)
    optimizer.after = [Exchange(*plain.what, settings=settings, then=follow)]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_without_any_of_it_it_is_the_plain_synchronisation_to_the_bit(num_workers):
    """Wire float32, overlap 0, one fragment: what makes the plain rules exchangeable for this one."""

    def work(workers, exchanged):
        params, optimizer = build(workers)
        if exchanged:
            replaced(optimizer)
        train(optimizer, params, 14, worker=workers.rank)
        return everything(optimizer)

    for plain, other in zip(*(lordo.simulate(lambda w, e=e: work(w, e), num_workers) for e in (False, True)), strict=True):
        assert_same_bits(plain, other)


@pytest.mark.parametrize("name", LOCAL_UPDATE)
def test_off_means_the_plain_rules(name):
    optimizer = build(None, name)[1]
    given = build(None, name, sync_wire="float32", sync_overlap=0, sync_fragments=1)[1]
    assert [type(rule) for rule in optimizer.after] == [type(rule) for rule in given.after]
    assert not any(isinstance(rule, Exchange) for rule in optimizer.after)


@pytest.mark.parametrize("more", [{"sync_wire": wire} for wire in WIRES] + [{"sync_wire": "int4", "sync_split": True}])
@pytest.mark.parametrize("name", LOCAL_UPDATE)
def test_workers_are_equal_to_the_bit_after_a_sync(name, more):
    def work(workers):
        optimizer = trained(workers, name, steps=12, **more)
        keys = {"", "anchor", "outer_momentum", "exp_avg", "exp_avg_sq", "step"} - ({"exp_avg_sq"} if name == "desloc" else set())
        if "exp_avg" not in optimizer.method.averages:
            keys -= {"exp_avg", "exp_avg_sq"}
        if optimizer.method.basis_from == "sync":
            keys |= {"basis"}
        return {key: t for key, t in everything(optimizer).items() if key.partition(".")[2] in keys}

    first, *others = lordo.simulate(work, 3)
    assert len(first) > 2 * len(SHAPES) - 1
    for other in others:
        assert_same_bits(first, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("wire", WIRES)
def test_a_wire_format_stays_near_full_precision(wire, dtype):
    """What the average moves differs by a step of the format of what the workers moved, not of the weights."""

    def work(workers, wire):
        params, optimizer = build(workers, "diloco", shapes=((40, 50),), dtype=dtype, outer="none", weight_decay=0.0, sync_wire=wire)
        start = params[0].detach().clone().double()
        train(optimizer, params, 4, worker=workers.rank)
        return params[0].detach().double() - start

    exact, coarse = (lordo.simulate(lambda w, f=f: work(w, f), 3)[0] for f in ("float32", wire))
    step = {"bfloat16": 2**-7, "int8": 1 / 127, "int4": 1 / 7}[wire]
    last_bit = torch.finfo(dtype).eps * 0.5  # of the weights
    assert (coarse - exact).abs().max() <= step * 0.05 + last_bit


def test_small_changes_survive_next_to_large_weights():
    """Sent as they are, int8 weights would move in steps of 1/127 of the largest."""

    def work(workers):
        w = torch.nn.Parameter(torch.linspace(-100, 100, 64).reshape(8, 8))
        start = w.detach().clone()
        optimizer = lordo.LoRDO([w], rank=None, omega=1.0, lr=1e-4, sync_every=1, workers=workers, sync_wire="int8")
        w.grad = torch.ones_like(w)
        optimizer.step()
        return w.detach() - start

    assert torch.allclose(lordo.simulate(work, 2)[0], torch.full((8, 8), -1e-4), atol=2e-5)


# ---- overlap


def reference_of_overlap(num_workers, steps, every, overlap, lr):
    """Plain averaging of a weight and its first moment, τ steps late, in one slow loop over SGD with momentum 0.9 (float64)."""
    W = [randn(5, 4, seed=1, dtype=torch.float64) for _ in range(num_workers)]
    sent = None
    for t in range(1, steps + 1):
        for m in range(num_workers):
            W[m] = W[m] - lr * randn(5, 4, seed=1000 * t + m, dtype=torch.float64).sign()
        if sent is not None and t == sent[0] + overlap:
            mean = sum(sent[1]) / num_workers
            W = [mean + (w - then) for w, then in zip(W, sent[1], strict=True)]
        if t % every == 0:
            sent = (t, list(W))
    return W


@pytest.mark.parametrize("overlap", [1, 2, 4])
def test_overlap_is_averaging_with_the_steps_since_put_on_top(overlap):
    def work(workers):
        w = torch.nn.Parameter(randn(5, 4, seed=1, dtype=torch.float64))
        optimizer = lordo.DistributedOptimizer(
            [w], "diloco", workers=workers, outer="none", lr=0.01, betas=(0.0, 0.0), eps=0.0, sync_every=5, sync_overlap=overlap
        )  # with β = 0 Adam's step is the sign of the gradient
        for t in range(1, 14):
            w.grad = randn(5, 4, seed=1000 * t + workers.rank, dtype=torch.float64)
            optimizer.step()
        return w.detach()

    for ours, theirs in zip(lordo.simulate(work, 3), reference_of_overlap(3, 13, 5, overlap, 0.01), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("overlap", [1, 3])
def test_moments_and_error_are_as_if_averaged_at_once_when_the_same_gradients_follow(overlap):
    """They are linear in what they were (the error as long as the basis stays): correcting them τ steps later is exact."""

    def work(workers, overlap):
        more = {"sync_every": 6, "sync_error_every": 6, "sync_overlap": overlap}
        params, optimizer = build(workers, shapes=((6, 9), (9, 6), (5,)), dtype=torch.float64, **more)
        train(optimizer, params, 1, worker=workers.rank)
        optimizer.set_basis = lambda p, basis: torch.eye(2)  # the refresh that follows is not the matter here
        train(optimizer, params, range(2, 10), worker=workers.rank)
        moments = {key: t for key, t in everything(optimizer).items() if key.partition(".")[2] in ("exp_avg", "exp_avg_sq", "step")}
        return moments | {f"{i}.error": optimizer.error_of(p) for i, p in enumerate(params[:2])}

    late, at_once = (lordo.simulate(lambda w, o=o: work(w, o), 3) for o in (overlap, 0))
    for one, other in zip(late, at_once, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.allclose(one[key], other[key], rtol=0, atol=1e-13) for key in one)


@pytest.mark.parametrize("more", [{"sync_overlap": 2}, {"sync_overlap": 3, "sync_wire": "int4"}, EVERYTHING])
def test_anchors_bases_and_what_follows_are_the_same_bits_with_overlap(more):
    def work(workers):
        optimizer = trained(workers, steps=15, **more)
        kept = {"basis", "anchor"} if more.get("sync_wire") else {"basis"}
        state = {key: t for key, t in everything(optimizer).items() if key.partition(".")[2] in kept}
        optimizer.average_parameters()
        return {**state, **{name: p.detach().clone() for name, p, _ in optimizer.named_members()}}

    first, *others = lordo.simulate(work, 3)
    for other in others:
        assert_same_bits(first, other)


# ---- fragments


def test_fragments_take_turns_and_cover_everything_once_a_period():
    settings = {"sync_every": 8, "sync_fragments": 4, "sync_exp_avg_every": None}
    due = {f: [t for t in range(1, 25) if is_due(settings, "parameters", t, f)] for f in range(4)}
    assert due == {0: [8, 16, 24], 1: [6, 14, 22], 2: [4, 12, 20], 3: [2, 10, 18]}
    for f, steps in due.items():
        assert [num_due(settings, "exp_avg", t, f) for t in range(25)] == [sum(s <= t for s in steps) for t in range(25)]
        assert all(last_due(settings, "parameters", t, f) == max(s for s in steps if s <= t) for t in range(8, 25))


def test_fragments_are_even_and_do_not_depend_on_names():
    sizes = [(s[0] * s[1], s, "float32", 0) for s in [(16, 16)] * 8 + [(16, 48)] * 6 + [(16, 1)] * 3]
    fragments = assign_fragments(sizes, 4)
    loads = [sum(size[0] for size, f in zip(sizes, fragments, strict=True) if f == fragment) for fragment in range(4)]
    assert max(loads) <= 1.15 * sum(loads) / 4
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = assign_fragments([sizes[i] for i in order], 4)
    assert sorted(zip([sizes[i] for i in order], shuffled, strict=True)) == sorted(zip(sizes, fragments, strict=True))


def test_the_peak_of_a_step_falls_with_the_number_of_fragments():
    def peak(num_fragments):
        def work(workers):
            params, optimizer = build(workers, shapes=((16, 24),) * 8, sync_every=8, sync_fragments=num_fragments)
            sent = []
            for t in range(1, 17):
                before = workers.bytes_sent("parameters")
                train(optimizer, params, range(t, t + 1), worker=workers.rank)
                sent.append(workers.bytes_sent("parameters") - before)
            return max(sent), sum(sent)

        return lordo.simulate(work, 2)[0]

    whole, quarter = peak(1), peak(4)
    assert quarter[0] * 4 == whole[0]
    assert quarter[1] == whole[1]


def test_accounts_and_optimizer_agree_on_the_fragments():
    params, optimizer = build(None, sync_fragments=3)
    ours = [optimizer.fragment_of(p) for p in params]
    theirs = fragments_of(weights_of(optimizer.param_groups), optimizer.defaults)
    assert sorted(zip(map(tuple, (p.shape for p in params)), ours, strict=True)) == sorted(zip(SHAPES, theirs, strict=True))


# ---- split


def test_split_sends_r_by_n_where_a_change_never_leaves_its_basis():
    """ω = 1 and no weight decay: exactly Q·(r×n), for a tenth of the bytes at r = m/10; the same training but for rounding."""

    def work(workers, split):
        params, optimizer = build(
            workers, "lordo-global-no-fullrank", shapes=((20, 30), (30, 20)), weight_decay=0.0, dtype=torch.float64, sync_split=split
        )
        train(optimizer, params, 12, worker=workers.rank)
        return params, workers

    (whole, plainly), (parts, split) = lordo.simulate(lambda w: work(w, False), 2)[0], lordo.simulate(lambda w: work(w, True), 2)[0]
    for a, b in zip(whole, parts, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-6)
    assert split.bytes_sent("parameters") == 0
    assert split.bytes_sent("coordinates") * 10 == plainly.bytes_sent("parameters")


def test_split_and_quantised_is_nearer_than_quantised():
    def work(workers, **more):
        params, optimizer = build(workers, shapes=((20, 30),), **more)
        train(optimizer, params, 4, worker=workers.rank)
        return params[0].detach()

    exact, coarse, split = (
        lordo.simulate(lambda w, m=m: work(w, **m), 2)[0]
        for m in ({"omega": 0.99}, {"omega": 0.99, "sync_wire": "int4"}, {"omega": 0.99, "sync_wire": "int4", "sync_split": True})
    )
    assert (split - exact).norm() < 0.3 * (coarse - exact).norm()


# ---- repeats, resumes, processes


@pytest.mark.parametrize("more", [{"sync_wire": "int8"}, {"sync_overlap": 3}, {**EVERYTHING, "sync_exp_avg_every": 5}])
@pytest.mark.parametrize("stop", [5, 6, 8])
def test_resumes_to_the_bit_with_averages_on_their_way(more, stop):
    """After step 4 something is sent, half of it is back after step 6: all of it is in the state, and is sent again."""

    def straight(workers):
        return everything(trained(workers, steps=14, **more))

    def interrupted(workers):
        params, optimizer = build(workers, **more)
        train(optimizer, params, stop, worker=workers.rank)
        file = io.BytesIO()
        torch.save({"weights": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        params, optimizer = build(workers, **more)
        with torch.no_grad():
            for p, weights in zip(params, saved["weights"], strict=True):
                p.copy_(weights)
        optimizer.load_state_dict(saved["optimizer"])
        train(optimizer, params, range(stop + 1, 15), worker=workers.rank)
        return everything(optimizer)

    for one, other in zip(lordo.simulate(straight, 3), lordo.simulate(interrupted, 3), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("name", LOCAL_UPDATE)
def test_all_of_it_together_repeats_to_the_bit(name):
    first, second = (lordo.simulate(lambda w: everything(trained(w, name, **EVERYTHING)), 3) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert_same_bits(one, other)


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo")
@pytest.mark.parametrize("more", [{"sync_wire": "int4"}, EVERYTHING])
def test_processes_are_threads(tmp_path, more):
    def in_process(rank, size):
        optimizer = trained(dist.group.WORLD and lordo.sync.as_comm(dist.group.WORLD), **more)
        return {"state": everything(optimizer), "moved": dict(optimizer.workers.moved)}

    processes = in_processes(in_process, 3, tmp_path)
    threads = lordo.simulate(lambda w: (everything(trained(w, **more)), dict(w.moved)), 3)
    for process, (state, moved) in zip(processes, threads, strict=True):
        assert process["moved"] == moved
        assert_same_bits(process["state"], state)


def test_a_ruined_worker_is_replaced_when_the_average_arrives():
    def work(workers):
        params, optimizer = build(workers, shapes=((6, 9), (5,)), sync_overlap=2, sync_wire="int8")
        for t in range(1, 9):
            if t == 4 and workers.rank == 1:
                with torch.no_grad():
                    params[0][0, 0] = float("nan")
            train(optimizer, params, range(t, t + 1), worker=workers.rank)
        return all(bool(t.isfinite().all()) for t in everything(optimizer).values()), optimizer.num_left_out

    with pytest.warns(RuntimeWarning, match="leaves out worker 1"):
        assert lordo.simulate(work, 3) == [(True, 0), (True, 1), (True, 0)]


# ---- what is refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sync_wire": "int2"}, "sync_wire must be one of 'float32', 'bfloat16', 'int8', 'int4'; got 'int2'"),
        ({"sync_wire": None}, "sync_wire must be one of .*; got None"),
        ({"sync_wire_moments": "fp8"}, "sync_wire_moments must be one of .*; got 'fp8'"),
        ({"sync_split": 1}, "sync_split must be True or False; got 1"),
        ({"sync_overlap": 4}, "sync_overlap must be below the shortest period, sync_every=4, .*; got 4"),
        ({"sync_overlap": 2, "sync_exp_avg_every": 2}, "sync_exp_avg_every=2"),
        ({"sync_overlap": -1}, "sync_overlap must be at least 1, or 0 to wait for every average; got -1"),
        ({"sync_overlap": 1.5}, "sync_overlap must be a whole number"),
        ({"sync_fragments": 0}, "sync_fragments must be at least 1"),
        ({"sync_fragments": 5}, "sync_fragments must be at most the shortest period, sync_every=4, .*; got 5"),
    ],
)
def test_refuses_what_cannot_work(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build(None, **given)


def test_a_state_kept_under_other_rules_is_refused():
    saved = build(None, sync_wire="int8")[1].state_dict()
    with pytest.raises(ValueError, match="saved with sync_wire='int8', where this optimizer has 'int4'"):
        build(None, sync_wire="int4")[1].load_state_dict(saved)


def test_workers_with_other_wires_are_told():
    with pytest.raises(lordo.sync.DisagreementError, match="sync_wire is 'int8' on worker 0 but 'int4' on worker 1"):
        lordo.simulate(lambda w: trained(w, sync_wire=["int8", "int4"][w.rank]), 2)


def test_accounts_of_int4_are_150_times_below_ddp_at_k_32():
    """The shapes of a Llama with rank a tenth of the width; a synchronisation every 32 steps, the first gradient included."""
    weights = [Weight((160, 160), 16)] * 12 + [Weight((480, 160), 16)] * 9 + [Weight((256, 160))] + [Weight((160,))] * 7
    sent = {}
    for name, given in (("lordo", {"rank": 16, "sync_every": 32, "sync_wire": "int4"}), ("ddp-adamw", {})):
        method = METHODS[name]
        sent[name] = lordo.accounting.traffic(method, weights, method.resolve(given), steps=400, num_workers=4, final_average=True).total()
    assert sent["ddp-adamw"] / sent["lordo"] >= 150
