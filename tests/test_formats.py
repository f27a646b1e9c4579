"""Wire formats: error bounds on awkward tensors, and means that every worker decodes from the same bytes."""

import math

import pytest
import torch

import lordo
from common import parameters, randn
from lordo.sync.compressed import CompressedMean, DamagedPayloadError, Part, checksum, share_encoded_
from lordo.sync.formats import BLOCK_ELEMENTS, find_format
from lordo.sync.split import lift_exactly

WIRES = ["float32", "bfloat16", "int8", "int4"]
LEVELS = {"int8": 127, "int4": 7}
CPU = torch.device("cpu")


def awkward() -> dict[str, torch.Tensor]:
    """Shapes and values that break careless quantisers."""
    outlier = randn(300)
    outlier[100] = 1e6
    return {
        "0-d": randn(),
        "empty": randn(0, 4),
        "one element": randn(1),
        "prime": randn(7, 13),
        "one over a block": randn(BLOCK_ELEMENTS + 1),
        "not contiguous": randn(9, 14).mT[1::2],
        "4-D": randn(2, 3, 5, 7),
        "huge range": randn(500) * torch.logspace(-38, 38, 500),
        "largest": torch.full((3,), 3e38),
        "denormal": torch.full((70,), 1e-41),
        "zeros": torch.zeros(5, 100),
        "one outlier": outlier,
        "negative": -randn(130).abs(),
        "float64": randn(33, dtype=torch.float64),
        "bfloat16": randn(33, dtype=torch.bfloat16),
    }


def through(wire: str, t: torch.Tensor, what: str = "parameters") -> torch.Tensor:
    """A tensor after encoding and decoding."""
    format = find_format(wire, t.dtype, what=what)
    payload = format.encode(format.blocks(t))
    assert payload.dtype == torch.uint8
    assert payload.numel() == format.payload_bytes(t.numel())
    return format.decode(payload).view(-1)[: t.numel()].view(t.shape)


def block_peaks(t: torch.Tensor) -> torch.Tensor:
    """For every element, the largest magnitude in its block."""
    flat = t.reshape(-1).double().abs()
    return (
        torch.cat([block.amax().expand_as(block) for block in flat.split(BLOCK_ELEMENTS)]).view(t.shape)
        if t.numel()
        else flat.view(t.shape)
    )


@pytest.mark.parametrize("kind", awkward())
@pytest.mark.parametrize("wire", WIRES)
def test_error_is_bounded_by_half_a_step_of_the_block(wire, kind):
    t = awkward()[kind]
    error = (through(wire, t).double() - t.double()).abs()
    if wire == "float32":
        assert torch.equal(error, torch.zeros_like(error))
    elif wire == "bfloat16":
        assert (error <= t.double().abs() * 2**-8 + 1e-40).all()
    else:
        step = block_peaks(t) / LEVELS[wire]
        assert (error <= step * 0.5 * (1 + 2**-6) + 1e-38).all()  # the step itself is rounded to bfloat16
    if kind == "zeros":
        assert not through(wire, t).any()


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_an_outlier_costs_its_own_block_only(wire):
    t = awkward()["one outlier"]
    error = (through(wire, t) - t).abs()
    others = torch.cat([error[:BLOCK_ELEMENTS], error[2 * BLOCK_ELEMENTS :]])
    assert others.max() < 0.5 * 4 / LEVELS[wire]


@pytest.mark.parametrize("kind", [kind for kind in awkward() if kind != "negative"])
@pytest.mark.parametrize("wire", WIRES)
def test_second_moments_keep_their_roots_and_never_become_zero(wire, kind):
    v = awkward()[kind].abs()
    decoded = through(wire, v, "exp_avg_sq").double()
    assert (decoded >= 0).all()
    steps = {"int8": 256, "int4": 16}
    if wire in steps:
        error = (decoded.sqrt() - v.double().sqrt()).abs()
        assert (error <= block_peaks(v).sqrt() / steps[wire] * 0.5 * (1 + 2**-6) + 1e-22).all()
        large = block_peaks(v) > 1e-30  # a root below float32's own range is nothing to divide by
        assert (decoded[large] > 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_what_is_not_finite_stays_visible_in_its_block_and_touches_no_other(wire, bad):
    t = randn(3 * BLOCK_ELEMENTS)
    t[70] = bad
    decoded = through(wire, t)
    assert decoded[BLOCK_ELEMENTS : 2 * BLOCK_ELEMENTS].isnan().all()
    assert decoded[:BLOCK_ELEMENTS].isfinite().all()
    assert decoded[2 * BLOCK_ELEMENTS :].isfinite().all()


def test_int4_takes_an_eighth_of_float32_and_a_seventeenth_for_scales():
    assert find_format("int4", torch.float32, what="parameters").payload_bytes(6400) == 6400 // 2 + 100 * 2
    assert find_format("int8", torch.float32, what="parameters").payload_bytes(6400) == 6400 + 100 * 2
    assert find_format("float32", torch.float64, what="parameters").payload_bytes(10) == 80


# ---- the mean


def mean_of(comm, tensors, wire, residuals=None, what="parameters"):
    """The quantised mean of a worker's tensors; residuals are changed."""
    results = [torch.empty(0)] * len(tensors)

    def part(i, t):
        residual = None if residuals is None else residuals[i]
        read = (lambda: t) if residual is None else (lambda: t + residual)
        write = lambda mean: results.__setitem__(i, mean.view(t.shape).clone())  # noqa: E731
        return Part(what, str(i), find_format(wire, t.dtype, what=what), t.numel(), read, write, residual)

    mean = CompressedMean(comm, [part(i, t) for i, t in enumerate(tensors)], CPU)
    mean.scatter()
    mean.gather()
    mean.finish()
    return results, mean


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("wire", WIRES)
def test_the_mean_is_the_same_bits_everywhere_and_within_one_step(wire, num_workers):
    kinds = [kind for kind in awkward() if kind not in ("largest", "huge range")]  # whose sums leave float32

    def work(comm):
        return mean_of(comm, [awkward()[kind] * (1 + comm.rank) for kind in kinds], wire)[0]

    first, *others = lordo.simulate(work, num_workers)
    for i, kind in enumerate(kinds):
        assert all(torch.equal(first[i], other[i]) for other in others)
        exact = sum((awkward()[kind] * (1 + worker)).double() for worker in range(num_workers)) / num_workers
        allowed = {"float32": 1e-6, "bfloat16": 2**-7}.get(wire) or (1 + 2**-6) / LEVELS[wire]
        largest = block_peaks(awkward()[kind]) * num_workers
        assert ((first[i].double() - exact).abs() <= allowed * largest + 1e-38).all(), kind


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_the_mean_of_equal_inputs_is_off_by_one_step_at_most(wire):
    t = randn(1000)
    result = lordo.simulate(lambda comm: mean_of(comm, [t], wire)[0][0], 4)[0]
    assert ((result - t).abs() <= block_peaks(t).float() / LEVELS[wire] * (1 + 2**-6)).all()


@pytest.mark.parametrize("wire", ["bfloat16", "int8", "int4"])
def test_nothing_is_lost_contributions_less_residuals_are_m_times_the_mean(wire):
    """The law of the module: Σ (contributed − residual) = M · mean, with float32 residuals but for rounding."""
    shapes = [(7, 11), (300,), ()]

    def work(comm):
        tensors = [randn(*shape, seed=10 * comm.rank + i) for i, shape in enumerate(shapes)]
        residuals = [torch.zeros(shape) for shape in shapes]
        means, _ = mean_of(comm, tensors, wire, residuals)
        return tensors, residuals, means

    results = lordo.simulate(work, 3)
    for i in range(len(shapes)):
        kept = sum(tensors[i].double() - residuals[i].double() for tensors, residuals, _ in results)
        assert torch.allclose(kept, 3 * results[0][2][i].double(), rtol=0, atol=2e-5)


def test_residuals_make_a_constant_arrive_in_the_long_run():
    """Quantised to zero each time, a small number next to a large one would never arrive."""
    t = torch.full((BLOCK_ELEMENTS,), 1e-3)
    t[0] = 1.0

    def work(comm, feed_back):
        residual = torch.zeros_like(t, dtype=torch.bfloat16)
        return sum(mean_of(comm, [t], "int4", [residual] if feed_back else None)[0][0] for _ in range(500)) / 500

    with_residual, without = (lordo.simulate(lambda comm, f=f: work(comm, f), 2)[0] for f in (True, False))
    assert torch.allclose(with_residual, t, atol=4e-4)
    assert not without[1:].any()


def test_a_worker_that_is_not_finite_is_left_out_by_all():
    def work(comm):
        t = torch.full((100,), math.nan if comm.rank == 1 else float(comm.rank))
        results, mean = mean_of(comm, [randn(5), t], "int8")
        return results[1], [(each.worker, each.tensor) for each in mean.left_out], mean.is_ruined

    for rank, (mean, left_out, is_ruined) in enumerate(lordo.simulate(work, 3)):
        assert torch.allclose(mean, torch.ones(100), atol=0.02)  # of workers 0 and 2
        assert left_out == [(1, "1")]
        assert is_ruined == (rank == 1)


# ---- damage


class Damaging:
    """Flips one bit of what a worker sends another in its exchange number `at` of sealed messages (verdicts are shorter)."""

    def __init__(self, comm, at):
        self.comm, self.at, self.exchange = comm, at, comm.exchange
        comm.exchange = self

    def __call__(self, messages, sizes):
        self.at -= messages[0].numel() > 20
        if self.at == 0:
            self.at = -1
            messages = [m.clone() for m in messages]
            messages[0][-20] ^= 4
        return self.exchange(messages, sizes)


@pytest.mark.parametrize("stage", [1, 2])
def test_damage_stops_all_workers_with_one_sentence_and_nothing_written(stage):
    def work(comm):
        if comm.rank == 2:
            Damaging(comm, stage)
        with pytest.raises(DamagedPayloadError, match="what worker 2 sent arrived damaged") as caught:
            mean_of(comm, [randn(500)], "int4")
        return str(caught.value)

    assert len(set(lordo.simulate(work, 3))) == 1


def test_training_stops_at_a_damaged_payload_and_keeps_its_weights():
    def work(comm):
        (w,) = parameters((20, 30))
        optimizer = lordo.LoRDO([w], rank=4, sync_every=2, workers=comm, sync_wire="int8")
        if comm.rank == 1:
            Damaging(comm, 3)  # the first gradient's, and the first of the first average, pass
        for step in range(1, 3):
            before = w.detach().clone()
            w.grad = randn(20, 30, seed=step + 10 * comm.rank)
            if step == 2:
                with pytest.raises(DamagedPayloadError):
                    optimizer.step()
            else:
                optimizer.step()
        return not torch.equal(w, before)  # the local step was taken, the average was not

    assert all(lordo.simulate(work, 2))


def test_flipped_bits_swapped_words_and_another_length_change_the_checksum():
    body = torch.randint(0, 256, (1003,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def flipped(*bits):
        changed = body.clone()
        for bit in bits:
            changed[bit // 8] ^= 1 << bit % 8
        return changed

    one = [flipped(bit) for bit in range(0, 8024, 5)]
    two = [flipped(31, bit) for bit in range(63, 8024, 32)]  # the highest bits of two words
    others = [torch.cat([body[8:16], body[:8], body[16:]]), body[:-1], torch.cat([body, body.new_zeros(1)])]
    assert not any(torch.equal(checksum(changed), checksum(body)) for changed in (*one, *two, *others))


# ---- split


def test_lifting_has_the_same_bits_in_any_order_of_summation():
    Q = torch.linalg.qr(randn(40, 16, dtype=torch.float64))[0].float()
    for scale in (1e-30, 1.0, 1e20):
        c = randn(16, 50) * scale
        order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
        lifted = lift_exactly(Q, c)
        assert torch.equal(lifted, lift_exactly(Q[:, order], c[order]))
        assert torch.allclose(lifted.double(), Q.double() @ c.double(), rtol=0, atol=1e-5 * scale)
    assert not lift_exactly(Q, torch.zeros(16, 5)).any()


def test_tensors_of_several_owners_are_shared_in_two_exchanges_and_alike():
    """The messages and the verdict, however many owners: over a link with latency each exchange in a row costs its time."""

    def work(comm):
        calls, exchange = [], comm.exchange
        comm.exchange = lambda *arguments: calls.append(1) or exchange(*arguments)
        comm.broadcast_ = comm.sum_ = None
        tensors = [randn(6, 4, seed=10 * comm.rank + i) for i in range(4)]
        share_encoded_(comm, tensors, [0, 2, 0, 3], "bfloat16", tag="basis")
        return tensors, len(calls)

    for tensors, num_calls in lordo.simulate(work, 4):
        assert num_calls == 2
        for i, owner in enumerate([0, 2, 0, 3]):
            assert torch.equal(tensors[i], randn(6, 4, seed=10 * owner + i).bfloat16().float())
