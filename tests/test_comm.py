"""The contract between workers: the mean, sending, counting. Workers here are threads; test_processes.py holds processes to the same."""

import time

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lordo
from common import randn
from lordo.sync import Solo, WorkerError, as_comm, comm, wire
from lordo.sync.wire import (
    ALONE_ELEMENTS,
    BUCKET_ELEMENTS,
    Piece,
    all_reduce_moves,
    broadcast_moves,
    buckets,
    sent_bytes,
    travels_alone,
    wire_bytes,
)

pytestmark = pytest.mark.usefixtures("rng_untouched")


# -- how tensors share a collective ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 40))
@example([6, 6], 10)  # the second of these was dropped by a well-known library
@example([10, 10], 10)
@example([], 5)
@example([0, 0], 5)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_buckets_hold_every_element_exactly_once(sizes, capacity):
    laid = list(buckets(sizes, capacity=capacity))
    elements = [(p.index, p.start + i) for bucket in laid for p in bucket for i in range(p.length)]
    assert elements == [(index, i) for index, size in enumerate(sizes) for i in range(size)], "lost, doubled or out of order"
    assert all(p.length > 0 for bucket in laid for p in bucket)
    lengths = [sum(p.length for p in bucket) for bucket in laid]
    assert all(length == capacity for length in lengths[:-1]), "only the last one may be short"
    assert all(0 < length <= capacity for length in lengths)


def test_buckets_by_hand():
    assert list(buckets([6, 6], capacity=10)) == [[Piece(0, 0, 6), Piece(1, 0, 4)], [Piece(1, 4, 2)]]


@pytest.mark.parametrize(
    ("make", "alone"),
    [
        (lambda: torch.empty(ALONE_ELEMENTS), True),
        (lambda: torch.empty(ALONE_ELEMENTS - 1), False),
        (lambda: torch.empty(ALONE_ELEMENTS, dtype=torch.bfloat16), False),
        (lambda: torch.empty(ALONE_ELEMENTS, dtype=torch.float64), True),
        (lambda: torch.empty(ALONE_ELEMENTS // 4, 4).mT, False),
        (lambda: torch.empty(0), False),
    ],
)
def test_only_large_tensors_of_the_type_that_is_sent_are_reduced_where_they_lie(make, alone):
    assert travels_alone(make()) is alone


# -- bytes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 4), (torch.float16, 4), (torch.float32, 4), (torch.float64, 8)])
def test_averages_travel_in_float32_or_better(dtype, size):
    assert wire_bytes(10, dtype) == 10 * size


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_the_closed_form_of_a_ring(workers):
    """A ring all-reduce of N bytes sends 2 (M−1)/M · N from each worker; a broadcast crosses M − 1 links in all."""
    N = 840  # divisible by all of them
    assert sent_bytes(all_reduce_moves(N), workers) == 2 * (workers - 1) * N // workers
    assert sent_bytes(broadcast_moves(N), workers) * workers == (workers - 1) * N


# -- the mean ----------------------------------------------------------------------------------------------------------------

Spec = tuple[tuple[int, ...], torch.dtype, str]  # shape, dtype, how it lies in memory


def make(spec: Spec, worker: int, seed: int) -> torch.Tensor:
    shape, dtype, layout = spec
    values = randn(*shape, seed=1000 * seed + worker, dtype=dtype)
    if layout == "transposed" and len(shape) >= 2:
        return values.mT.contiguous().mT
    if layout == "strided" and len(shape) >= 1:
        wide = torch.full((*shape[:-1], 2 * shape[-1]), 7, dtype=dtype)
        wide[..., ::2] = values
        return wide[..., ::2]
    return values


def averaged(specs: list[Spec], num_workers: int):
    """What each worker holds after mean_, and what the workers counted."""

    def one_worker(workers):
        tensors = [make(spec, workers.rank, i) for i, spec in enumerate(specs)]
        places = [t.data_ptr() for t in tensors]
        workers.mean_([(f"tag{i % 2}", t) for i, t in enumerate(tensors)])
        assert [t.data_ptr() for t in tensors] == places
        return tensors, workers

    return lordo.simulate(one_worker, num_workers)


def check_mean(specs: list[Spec], num_workers: int) -> None:
    results = averaged(specs, num_workers)
    for i, spec in enumerate(specs):
        exact = torch.stack([make(spec, worker, i).double() for worker in range(num_workers)]).mean(0)
        first = results[0][0][i]
        ulp = torch.finfo(spec[1]).eps * (1 if spec[1].itemsize < 4 else 4)  # half precision: rounded once
        torch.testing.assert_close(first.double(), exact, rtol=ulp, atol=ulp)
        for tensors, _ in results:
            assert torch.equal(tensors[i], first), "workers hold different bits"
            assert tensors[i].dtype == spec[1]
    for _, workers in results:
        for tag in (0, 1):
            numbers = [torch.Size(shape).numel() * max(dtype.itemsize, 4) for shape, dtype, _ in specs[tag::2]]
            assert workers.moved[f"tag{tag}"] == (2 * sum(numbers) if num_workers > 1 else 0)


specs = st.lists(
    st.tuples(
        st.one_of(st.just(()), st.tuples(st.integers(0, 9)), st.tuples(st.integers(0, 5), st.integers(1, 6)), st.just((2, 3, 2))),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
        st.sampled_from(["contiguous", "transposed", "strided"]),
    ),
    max_size=8,
)


@given(specs, st.integers(1, 4), st.sampled_from([1, 7, 16]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_mean_is_the_mean_whatever_is_averaged_together(specs, num_workers, capacity):
    """Mixed shapes and dtypes, empty and 0-d tensors, tensors that are not contiguous, buffers that cut tensors anywhere."""
    original = (comm.BUCKET_ELEMENTS, wire.ALONE_ELEMENTS, buckets.__kwdefaults__["capacity"])
    comm.BUCKET_ELEMENTS, wire.ALONE_ELEMENTS, buckets.__kwdefaults__["capacity"] = capacity, 16, capacity
    try:
        check_mean(specs, num_workers)
    finally:
        comm.BUCKET_ELEMENTS, wire.ALONE_ELEMENTS, buckets.__kwdefaults__["capacity"] = original


@pytest.mark.parametrize("size", [ALONE_ELEMENTS - 1, ALONE_ELEMENTS, ALONE_ELEMENTS + 1])
def test_mean_at_the_size_from_which_a_tensor_travels_alone(size):
    check_mean([((3,), torch.float32, "contiguous"), ((size,), torch.float32, "contiguous")], 2)


@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_mean_at_the_size_of_a_bucket(excess):
    sizes = [ALONE_ELEMENTS - 1] * 4 + [BUCKET_ELEMENTS - 4 * (ALONE_ELEMENTS - 1) + excess]
    check_mean([((size,), torch.float32, "contiguous") for size in sizes], 2)


def test_mean_of_numbers_that_are_equal_everywhere_is_that_number():
    """For 1, 2 and 4 workers exactly: an average must not move what all agree on."""

    def one_worker(workers):
        tensor = randn(100)
        workers.mean_([("x", tensor)])
        return tensor

    for num_workers in (1, 2, 4):
        for tensor in lordo.simulate(one_worker, num_workers):
            assert torch.equal(tensor, randn(100))


def test_mean_of_one_worker_or_of_nothing_sends_nothing():
    tensor = randn(5)
    solo = Solo()
    solo.mean_([("x", tensor)])
    assert torch.equal(tensor, randn(5))
    assert solo.bytes_sent("x") == solo.bytes_sent() == 0
    results = averaged([], 3)
    assert all(workers.bytes_sent() == 0 for _, workers in results)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_mean_of_what_has_no_mean_here_is_refused_before_anything_is_sent(dtype, num_workers):
    """Integers would be truncated without a word; some types break a gloo group for all later calls."""

    def one_worker(workers):
        with pytest.raises(TypeError, match="floating"):
            workers.mean_([("x", torch.zeros(3)), ("y", torch.zeros(3).to(dtype))])
        assert workers.bytes_sent() == 0
        return True

    assert lordo.simulate(one_worker, num_workers) == [True] * num_workers


def test_bf16_means_are_formed_in_float32():
    """256 + 1 + 1 + 1 in bfloat16 is 256: the ones would be lost one by one."""

    def one_worker(workers):
        tensor = torch.tensor([256.0 if workers.rank == 0 else 1.0], dtype=torch.bfloat16)
        workers.mean_([("x", tensor)])
        return tensor.item()

    assert lordo.simulate(one_worker, 4) == [torch.tensor(259 / 4).bfloat16().item()] * 4


# -- sending, comparing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [0, 1, 2])
def test_send_copies_bits_from_the_source(source):
    kinds = [
        (torch.float32, (3, 4)),
        (torch.bfloat16, (2,)),
        (torch.float32, ()),
        (torch.float64, (0,)),
        (torch.float64, (5,)),
        (torch.int64, (2, 2)),
    ]

    def tensors_of(worker):
        made = [(10 * randn(*shape, seed=10 * worker + i)).to(dtype) for i, (dtype, shape) in enumerate(kinds)]
        made[0] = made[0].mT.contiguous().mT
        made[0][0, 0] = float("nan") if worker == source else 0.0
        return made

    def one_worker(workers):
        tensors = tensors_of(workers.rank)
        workers.send_(tensors, source=source, tag="basis")
        return tensors, workers

    for tensors, workers in lordo.simulate(one_worker, 3):
        for t, expected in zip(tensors, tensors_of(source), strict=True):
            assert torch.equal(t.nan_to_num(-1), expected.nan_to_num(-1))
        payload = 12 * 4 + 2 * 2 + 4 + 5 * 8 + 4 * 8
        assert workers.moved["basis"] == payload
        assert workers.bytes_sent("basis") == 2 * payload // 3


def test_gather_is_in_order_of_rank():
    assert lordo.simulate(lambda workers: workers.gather({"rank": workers.rank}), 3) == [[{"rank": r} for r in range(3)]] * 3
    assert Solo().gather("note") == ["note"]


def test_seconds_are_counted_under_a_tag():
    solo = Solo()
    with solo.timed("basis refresh"):
        time.sleep(0.02)
    assert 0.02 <= solo.seconds["basis refresh"] < 5


# -- what the user passes as workers -----------------------------------------------------------------------------------------


def test_as_comm_takes_nothing_or_a_comm():
    assert isinstance(as_comm(None), Solo)
    solo = Solo()
    assert as_comm(solo) is solo


@pytest.mark.parametrize("wrong", [4, "world", [0, 1], torch.zeros(1)], ids=str)
def test_as_comm_refuses_anything_else_and_says_what_to_pass(wrong):
    with pytest.raises(TypeError, match=f"process group .*DeviceMesh .* lordo.simulate hands out; got {type(wrong).__name__}"):
        as_comm(wrong)


def test_a_worker_error_is_a_runtime_error():
    assert issubclass(WorkerError, RuntimeError)


def test_a_synchronisation_allocates_no_buffer_twice():
    """In steady state the memory in which tensors travel together is the memory of the last time."""

    def work(workers):
        tensors = [torch.ones(30, 5), torch.ones(7), torch.ones(3, dtype=torch.float64)]
        places = []
        for _ in range(3):
            workers.mean_([("x", t) for t in tensors])
            workers.send_(tensors, source=1, tag="y")
            places.append([buffer.data_ptr() for buffer in workers._buffers.values()])
        return places

    for places in lordo.simulate(work, 2):
        assert places[0] == places[1] == places[2]
        assert len(places[0]) == 2


def test_sent_tensors_arrive_whole_however_they_are_cut(monkeypatch):
    """Every element exactly once: contiguous or not, across the borders of a buffer."""
    monkeypatch.setattr(comm, "BUCKET_ELEMENTS", 10)

    def work(workers):
        base = torch.arange(66.0).view(6, 11) * (workers.rank + 1)
        tensors = [base.clone(), base.mT.clone(memory_format=torch.preserve_format), base[0, :6].clone(), base[:, 0].clone()]
        workers.send_(tensors, source=1, tag="y")
        return tensors

    first, second = lordo.simulate(work, 2)
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(first[0], torch.arange(66.0).view(6, 11) * 2)
