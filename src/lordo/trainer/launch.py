"""Starting a run's workers: as threads of this process, or as the processes that torchrun started."""

from __future__ import annotations

import gc
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout

from lordo.sync import Comm, Group, WorkerError, simulate
from lordo.trainer.alike import check_same_devices, on_first, prepare_alike
from lordo.trainer.checkpoint import Share, checkpoints, clear, complete
from lordo.trainer.config import RunConfig
from lordo.trainer.devices import Joined, check_in_one_process, joined, put_together
from lordo.trainer.folder import RunFolder
from lordo.trainer.going_on import folder_to_resume, is_restart, usable, usable_by_all
from lordo.trainer.loop import Outcome, train
from lordo.trainer.models import drops_out
from lordo.trainer.prepared import Prepared, pick_device, prepare
from lordo.trainer.resume import share_of
from lordo.trainer.saving import Keeping
from lordo.trainer.settings import UsageError
from lordo.trainer.stopping import Interrupted, StopPoint, signals_stop
from lordo.trainer.summary import Summary, summarize
from lordo.trainer.terminal import print_prepared, print_summary, report
from lordo.trainer.trackers import check_installed, observed
from lordo.trainer.watch import Watch
from lordo.trainer.writer import settle_writers

JOIN_TIMEOUT = timedelta(minutes=10)
EXCHANGE_TIMEOUT = timedelta(days=1)  # of no account: the watch ends a process long before
Made = TypeVar("Made")


def run(config: RunConfig, console: Console, *, resume: bool | Path = False) -> Summary | None:
    """Train as the settings say, with the workers this process has or belongs to.

    Args:
        config: the run. console: where it is told. resume: go on with the last run of these settings, or with the one in a folder.

    Returns:
        The summary; None on the processes that are not worker 0.

    Raises:
        UsageError: what was asked for cannot work.
        Interrupted: by SIGINT or SIGTERM; a checkpoint was left.
    """
    return _run_processes(config, console, resume or is_restart()) if under_torchrun() else _run_threads(config, console, resume)


def under_torchrun() -> bool:
    """Whether torchrun (or another launcher of that kind) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _run_threads(config: RunConfig, console: Console, resume: bool | Path) -> Summary:
    check_in_one_process(config)
    prepared = checked(lambda: prepare(config))
    path = folder_to_resume(config, resume)
    steps = usable(checkpoints(path), [Share(worker, config.workers) for worker in range(config.workers)]) if path else []
    folder = _begin(prepared, console, path, steps)
    stop = StopPoint()
    with signals_stop(stop, patient=False):
        summary = run_in_threads(prepared, folder, console, from_step=steps[-1] if steps else None, stop=stop)
    if summary is None:
        raise _interrupted(stop, folder.path)
    _tell_end(summary, folder, console)
    return summary


def run_in_threads(
    prepared: Prepared,
    folder: RunFolder,
    console: Console,
    *,
    keep_model: bool = True,
    from_step: int | None = None,
    stop: StopPoint | None = None,
) -> Summary | None:
    """Train with all workers in this process, and leave the result in the folder; None if it was asked to stop."""
    comms: list[Comm] = []
    at_once = workers_at_once(prepared)
    threads = prepared.config.train.threads or max(1, available_cores() // at_once)
    keeping = Keeping(checkpoints(folder.path), from_step, report)

    def work(workers: Comm) -> Outcome | None:
        comms.append(workers)
        torch.set_num_threads(threads)
        return train(prepared, workers, observer if workers.rank == 0 else None, keeping=keeping, stop=stop)

    with observed(console, folder, prepared.config) as observer, telling_where(folder.path):
        outcomes = simulate(work, prepared.config.workers, at_once=at_once)
    if outcomes[0] is None:
        return None
    comm = min(comms, key=lambda workers: workers.rank)
    summary = summarize(prepared, outcomes[0], comm, at_once=at_once)
    folder.finish(summary, outcomes[0].model if keep_model else None)
    return summary


def workers_at_once(prepared: Prepared) -> int:
    """How many workers compute at the same time in one process.

    As many as there are cores, each with one thread, unless the recipe asks for more threads: that is what keeps cores busy with models
    small enough for one process. One at a time on a GPU, and where the model drops out: dropout draws from a generator that all share.
    """
    config = prepared.config
    on_cpu = pick_device(config.train.device).type == "cpu"
    if not on_cpu or drops_out(config.model):
        return 1
    return max(1, min(config.workers, available_cores() // (config.train.threads or 1)))


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_processes(config: RunConfig, console: Console, resume: bool | Path) -> Summary | None:
    world = int(os.environ["WORLD_SIZE"])
    devices = config.parallel.devices
    if world != config.workers * devices:
        of_devices = "" if devices == 1 else f" of {devices} devices each (parallel)"
        fitting = "" if world % devices else f", or add --workers {world // devices}"
        raise UsageError(
            f"torchrun started {world} processes in all, but the recipe says workers = {config.workers}{of_devices}: "
            f"start {config.workers * devices}{fitting}"
        )
    device = checked(lambda: pick_device(config.train.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = _join("nccl" if device.type == "cuda" else "gloo")
    try:
        return _watched(config, console, resume, store)
    finally:
        # gloo aborts at exit if anything still refers to a group
        dist.destroy_process_group()
        gc.collect()


def _join(backend: str) -> Store:
    """Join the group of all processes; returns a connection of its own to the store by which they found each other."""
    store, rank, size = next(rendezvous("env://"))
    # torchrun's store outlives its processes: the addresses of an earlier start are still in it
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=JOIN_TIMEOUT)
    _set_pg_timeout(EXCHANGE_TIMEOUT)
    clone: Store = store.clone()
    return clone


def _watched(config: RunConfig, console: Console, resume: bool | Path, store: Store) -> Summary | None:
    """Work as one of several processes that watch each other."""
    places: list[Path] = []  # the run's folder, as soon as there is one

    def last_words() -> str | None:
        settle_writers()
        return how_to_go_on(places[0]) if places else None

    assert dist.group.WORLD is not None
    processes = Group(dist.group.WORLD)
    check_same_devices(config, processes)
    all_of_us = joined(processes, config, pick_device(config.train.device).type, EXCHANGE_TIMEOUT)
    name = processes.gather(uuid.uuid4().hex)[0]  # not that of a watch before a restart
    watch = Watch(PrefixStore(f"watch {name}", store), all_of_us, config, last_words)
    failure: str | None = "an error of its own"
    try:
        with signals_stop(watch.stop_point, patient=True):
            summary = _work_as_process(config, console, resume, all_of_us, watch.stop_point, places)
        failure = None
        return summary
    except Interrupted:
        failure = None
        raise
    except RuntimeError as error:  # of a collective; of fully_shard's own, too, to which torch has no other name
        failure = None if isinstance(error, torch.OutOfMemoryError) else watch.blame()
        if failure is None and not isinstance(error, WorkerError):
            failure = str(error)
            raise
        told = WorkerError(f"{failure or error}; {watch.own_name} was in step {watch.stop_point.step}, {watch.phase}")
        if hint := last_words():
            told.add_note(hint)
        raise told from error
    except Exception as error:
        failure = str(error)
        raise
    finally:
        settle_writers()
        watch.close(failure)


def _work_as_process(
    config: RunConfig, console: Console, resume: bool | Path, all_of_us: Joined, stop: StopPoint, places: list[Path]
) -> Summary | None:
    processes, workers, mesh = all_of_us.processes, all_of_us.workers, all_of_us.mesh
    prepared = prepare_alike(config, processes)
    path = on_first(processes, lambda: folder_to_resume(config, resume))
    steps = usable_by_all(path, processes, share_of(workers)) if path else []
    folder = on_first(processes, lambda: _begin(prepared, console, path, steps), keep=True)
    place = on_first(processes, lambda: folder.path if folder else None)
    assert place is not None
    places.append(place)
    keeping = Keeping(checkpoints(place), steps[-1] if steps else None, report)
    with ExitStack() as stack:
        observer = stack.enter_context(observed(console, folder, config)) if folder else None
        stack.enter_context(telling_where(place))
        outcome = train(prepared, workers, observer, keeping=keeping, stop=stop, mesh=mesh)
    if outcome is None:
        raise _interrupted(stop, place)
    model = outcome.model if mesh is None or workers.rank != 0 else put_together(outcome.model, config)
    if folder is None:
        return None
    summary = summarize(prepared, outcome, workers, at_once=None)
    folder.finish(summary, model)
    _tell_end(summary, folder, console)
    return summary


def checked(make: Callable[[], Made]) -> Made:
    """What a function makes; its complaint about what was asked for as a UsageError."""
    try:
        return make()
    except ValueError as error:
        raise UsageError(str(error)) from error


def _begin(prepared: Prepared, console: Console, path: Path | None, steps: list[int]) -> RunFolder:
    """Make the run's folder, or open it again to go on from the last of some checkpoints."""
    checked(lambda: check_installed(prepared.config.train.trackers))
    print_prepared(prepared, console)
    from_step = steps[-1] if steps else 0
    folder = checked(lambda: RunFolder(prepared.config, path=path, from_step=from_step))
    if path is not None:
        clear(checkpoints(path), from_step)
        console.print(f"going on in {path}/ after step {from_step}\n", highlight=False, soft_wrap=True)
    return folder


def _interrupted(stop: StopPoint, path: Path) -> Interrupted:
    assert stop.number is not None
    name = signal.Signals(stop.number).name
    return Interrupted(f"interrupted by {name} after step {stop.last_step}; go on with: lordo train {path} --resume", stop.number)


@contextmanager
def telling_where(path: Path) -> Iterator[None]:
    """Add to an error from which checkpoint the run can go on."""
    try:
        yield
    except (FloatingPointError, OSError) as error:
        settle_writers()
        if hint := how_to_go_on(path):
            error.add_note(hint)
        raise


def how_to_go_on(path: Path) -> str | None:
    """From which checkpoint the run in a folder can go on; None if there is none."""
    found = complete(checkpoints(path))
    return f"the last checkpoint is that of step {found[-1]}, go on with: lordo train {path} --resume" if found else None


def _tell_end(summary: Summary, folder: RunFolder, console: Console) -> None:
    print_summary(summary, console)
    console.print(f"everything is in {folder.path}/", highlight=False, soft_wrap=True)
