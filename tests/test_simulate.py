"""Workers as threads that take turns: repeatable to the bit, and no failure hangs."""

import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from torch import nn

import lordo
from common import assert_same_bits, everything, parameters, randn, train
from lordo.sync import WorkerError

pytestmark = pytest.mark.usefixtures("rng_untouched")


def with_dropout(workers):
    """Some training with random numbers of torch's global generator."""
    torch.manual_seed(workers.rank)
    params = parameters((6, 9), (5,))
    optimizer = lordo.LoRDO(params, rank=2, lr=0.01, sync_every=2, workers=workers)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        hidden = nn.functional.dropout(params[0] @ randn(9, 4, seed=step), 0.5)
        loss = hidden.square().mean() + (params[1] * torch.rand(5)).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, everything(optimizer)


def test_results_come_in_order_of_rank():
    assert lordo.simulate(lambda workers: (workers.rank, workers.size), 4) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert lordo.simulate(lambda workers: workers.rank) == [0, 1, 2, 3]
    assert lordo.simulate(lambda workers: (workers.rank, workers.size), 1) == [(0, 1)]


def test_it_repeats_to_the_bit_random_numbers_included():
    first, again = lordo.simulate(with_dropout, 3), lordo.simulate(with_dropout, 3)
    for (losses, state), (losses_again, state_again) in zip(first, again, strict=True):
        assert losses == losses_again
        assert all(torch.equal(state[name], state_again[name]) for name in state)


def test_a_worker_draws_the_numbers_it_would_draw_alone():
    """Its stream is its own: neither the other workers nor the waiting for them take numbers from it."""

    def draws(workers):
        torch.manual_seed(100 + workers.rank)
        drawn = []
        for _ in range(4):
            drawn.append(torch.rand(2))
            workers.mean_([("x", torch.zeros(3))])
            if workers.rank == 1:
                torch.rand(17)  # one worker draws more than the others
        return torch.cat(drawn)

    together = lordo.simulate(draws, 3)
    for rank in (0, 2):
        generator = torch.Generator().manual_seed(100 + rank)
        assert torch.equal(together[rank], torch.cat([torch.rand(2, generator=generator) for _ in range(4)]))


def test_workers_start_from_the_callers_state_and_leave_it_as_it_was():
    with torch.random.fork_rng():
        torch.manual_seed(7)
        before = torch.get_rng_state()
        drawn = lordo.simulate(lambda workers: torch.rand(3), 3)
        assert torch.equal(torch.get_rng_state(), before)
        expected = torch.rand(3)
        assert all(torch.equal(numbers, expected) for numbers in drawn)


def test_the_callers_state_is_kept_when_a_worker_fails():
    before = torch.get_rng_state()

    def fails(workers):
        torch.rand(5)
        raise KeyError("x")

    with pytest.raises(KeyError):
        lordo.simulate(fails, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_take_turns_in_order():
    """One computes at a time; the turn passes on where a worker waits."""
    order = []

    def one_worker(workers):
        for round_number in range(3):
            order.append((round_number, workers.rank))
            time.sleep(0.001 * random.Random(workers.rank + 3 * round_number).random())
            order.append((round_number, workers.rank))
            workers.gather(None)

    lordo.simulate(one_worker, 3)
    assert sorted(order) == sorted([(r, w) for r in range(3) for w in range(3)] * 2)
    assert all(order[i] == order[i + 1] for i in range(0, len(order), 2)), "two workers computed at once"


def test_it_can_run_inside_itself():
    def outer(workers):
        return workers.rank, lordo.simulate(lambda inner: inner.gather(10 * workers.rank + inner.rank), 2)[0]

    assert lordo.simulate(outer, 2) == [(0, [0, 1]), (1, [10, 11])]


def test_gradients_are_recorded_in_workers_whatever_the_callers_thread_does():
    def one_worker(workers):
        x = torch.ones(3, requires_grad=True)
        (x * 2).sum().backward()
        return x.grad.tolist()

    with torch.no_grad():
        assert lordo.simulate(one_worker, 2) == [[2.0] * 3] * 2


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "2", None], ids=repr)
def test_a_wrong_number_of_workers_is_named(wrong):
    with pytest.raises((ValueError, TypeError), match="num_workers must be a whole number of at least 1; got"):
        lordo.simulate(lambda workers: None, wrong)


# -- failures --------------------------------------------------------------------------------------------------------------------


def no_threads_left() -> bool:
    deadline = time.monotonic() + 60
    while any(thread.name.startswith("worker ") for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("rounds", [0, 2])
def test_the_first_error_is_raised_with_its_traceback_and_the_others_stop(culprit, rounds):
    done = []

    def one_worker(workers):
        for _ in range(rounds):
            workers.gather(None)
        if workers.rank == culprit:
            raise ZeroDivisionError(f"worker {workers.rank}")
        workers.gather(None)
        done.append(workers.rank)

    with pytest.raises(ZeroDivisionError, match=f"worker {culprit}") as caught:
        lordo.simulate(one_worker, 3)
    assert "one_worker" in [entry.name for entry in caught.traceback]
    assert done == []
    assert no_threads_left()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration(), GeneratorExit()], ids=repr)
def test_errors_that_end_threads_silently_are_raised_too(error):
    def one_worker(workers):
        workers.gather(None)
        if workers.rank == 1:
            raise error
        workers.gather(None)

    with pytest.raises(type(error)):
        lordo.simulate(one_worker, 3)
    assert no_threads_left()


def test_failures_do_not_hang_however_threads_are_scheduled():
    """Many failures with the interpreter switching threads as often as it can: none leaves a lock held or a thread behind."""
    script = """
        import sys, torch, lordo
        torch.set_num_threads(1)
        sys.setswitchinterval(1e-6)

        def one_worker(workers):
            for _ in range(workers.rank % 2):
                pass
            workers.gather(None)
            if workers.rank == 1:
                raise ZeroDivisionError
            workers.gather(None)

        for _ in range(150):
            try:
                lordo.simulate(one_worker, 4)
            except ZeroDivisionError:
                continue
            sys.exit("no error")
        print("done")
    """
    finished = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert finished.stdout == "done\n", finished.stderr
    assert finished.stderr == ""


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_worker_that_ends_early_while_others_wait_is_an_error(leaver):
    def one_worker(workers):
        workers.gather(None)
        if workers.rank != leaver:
            workers.mean_([("x", torch.zeros(3))])

    with pytest.raises(WorkerError, match=rf"worker \d waits in sum of 3 numbers of torch.float32, but worker {leaver} has already ended"):
        lordo.simulate(one_worker, 3)
    assert no_threads_left()


def test_workers_may_end_at_different_times():
    def one_worker(workers):
        workers.gather(None)
        time.sleep(0.01 * workers.rank)
        return workers.rank

    assert lordo.simulate(one_worker, 3) == [0, 1, 2]


MISMATCHES = {
    "sizes": (lambda w: w.mean_([("x", torch.zeros(3 + w.rank))]), "sum of 4 numbers of torch.float32, worker 0 sum of 3 numbers"),
    "dtypes": (
        lambda w: w.mean_([("x", torch.zeros(3, dtype=(torch.float32, torch.float64)[w.rank]))]),
        "sum of 3 numbers of torch.float64",
    ),
    "calls": (
        lambda w: w.gather(0) if w.rank else w.mean_([("x", torch.zeros(3))]),
        "worker 1 calls gather, worker 0 sum of 3 numbers of torch.float32",
    ),
    "sources": (
        lambda w: w.send_([torch.zeros(3)], source=w.rank, tag="x"),
        "from 1, worker 0 broadcast of 3 numbers of torch.float32 from 0",
    ),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_workers_that_call_different_things_are_told_which(kind):
    call, sentence = MISMATCHES[kind]
    with pytest.raises(WorkerError, match=f"workers do not agree on what comes next: .*{sentence}"):
        lordo.simulate(call, 2)
    assert no_threads_left()


def test_workers_with_one_model_between_them_are_told():
    """A model built outside of the workers: all of them would train the same tensors, and sum them into themselves."""
    params = parameters((6, 9), (5,))

    def one_worker(workers):
        optimizer = lordo.LoRDO(params, rank=2, lr=0.01, sync_every=2, workers=workers)
        train(optimizer, params, 2, worker=workers.rank)

    with pytest.raises((ValueError, WorkerError), match="share"):
        lordo.simulate(one_worker, 2)


# -- Ctrl+C ------------------------------------------------------------------------------------------------------------------------

BUSY = {
    "python": "while True:\n                try: [i for i in range(1000)]\n                except Exception: pass",
    "waiting": "workers.gather(None)\n            while workers.rank == 0: pass\n            workers.gather(None)",
    "torch": "x = torch.ones(200, 200)\n            while True: x = x @ x",
    "training": "while True: step(workers)",
}


@pytest.mark.parametrize("kind", BUSY)
def test_ctrl_c_ends_a_simulation_within_about_a_second(kind):
    script = f"""
        import sys, torch, lordo
        torch.set_num_threads(1)

        def step(workers, made={{}}):
            if workers.rank not in made:
                p = torch.nn.Parameter(torch.ones(20, 30))
                made[workers.rank] = p, lordo.LoRDO([p], rank=2, sync_every=2, workers=workers)
            p, optimizer = made[workers.rank]
            p.grad = torch.randn(20, 30)
            optimizer.step()

        def one_worker(workers):
            if workers.rank == 0:
                print("started", flush=True)
            {BUSY[kind]}

        lordo.simulate(one_worker, 3)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "started\n", process.stderr.read()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=90)  # about a second, on a machine that is not busy
    finally:
        process.kill()
    assert process.returncode in (-signal.SIGINT, 130), errors
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert "Exception in thread" not in errors


# -- several at once ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [2, 3, 4, 9])
def test_several_at_once_give_the_same_bits(at_once):
    """Sums are formed in order of rank, whoever came first."""

    def one_worker(workers):
        torch.set_num_threads(1)
        params = parameters((6, 9), (12, 5), (4,))
        optimizer = lordo.LoRDO(params, rank=2, lr=0.01, sync_every=3, workers=workers)
        train(optimizer, params, 9, worker=workers.rank)
        return everything(optimizer)

    plain = lordo.simulate(one_worker, 4)
    for one, other in zip(plain, lordo.simulate(one_worker, 4, at_once=at_once), strict=True):
        assert_same_bits(one, other)


def test_no_more_than_asked_for_compute_at_once():
    computing, most, lock = set(), [0], threading.Lock()

    def one_worker(workers):
        for _ in range(20):
            with lock:
                computing.add(workers.rank)
                most[0] = max(most[0], len(computing))
            time.sleep(0.001)
            with lock:
                computing.discard(workers.rank)
            workers.gather(None)

    lordo.simulate(one_worker, 4, at_once=2)
    assert most[0] == 2


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_the_first_error_stops_all_that_compute(at_once):
    def one_worker(workers):
        if workers.rank == 0:
            raise KeyError("the first")
        while True:
            sum(range(100))

    start = time.monotonic()
    with pytest.raises(KeyError, match="the first"):
        lordo.simulate(one_worker, 4, at_once=at_once)
    assert time.monotonic() - start < 90  # it would be for ever


@pytest.mark.parametrize("at_once", [0, -1, 1.5, True])
def test_at_once_is_a_whole_number_of_at_least_one(at_once):
    with pytest.raises(ValueError, match="at_once must be a whole number of at least 1"):
        lordo.simulate(lambda workers: None, 2, at_once=at_once)
