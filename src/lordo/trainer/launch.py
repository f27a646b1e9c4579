"""Starting a run's workers: as threads of this process, or as the processes that torchrun started."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from rich.console import Console

from lordo.sync import Comm, as_comm, simulate
from lordo.trainer.alike import prepare_alike
from lordo.trainer.config import RunConfig, UsageError
from lordo.trainer.folder import RunFolder
from lordo.trainer.loop import Outcome, Prepared, pick_device, prepare, train
from lordo.trainer.models import drops_out
from lordo.trainer.summary import Summary, summarize
from lordo.trainer.terminal import print_prepared, print_summary
from lordo.trainer.trackers import check_installed, observed

TIMEOUT = timedelta(minutes=10)
Made = TypeVar("Made")


def run(config: RunConfig, console: Console) -> Summary | None:
    """Train as the settings say, with the workers this process has or belongs to.

    Returns:
        The summary; None on the processes that are not worker 0.

    Raises:
        UsageError: what was asked for cannot work.
    """
    return _run_processes(config, console) if under_torchrun() else _run_threads(config, console)


def under_torchrun() -> bool:
    """Whether torchrun (or another launcher of that kind) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _run_threads(config: RunConfig, console: Console) -> Summary:
    prepared = _checked(lambda: prepare(config))
    folder = _begin(prepared, console)
    summary = run_in_threads(prepared, folder, console)
    _tell_end(summary, folder, console)
    return summary


def run_in_threads(prepared: Prepared, folder: RunFolder, console: Console, *, keep_model: bool = True) -> Summary:
    """Train with all workers in this process, and leave the result in the folder."""
    comms: list[Comm] = []
    at_once = workers_at_once(prepared)
    threads = prepared.config.train.threads or max(1, available_cores() // at_once)

    def work(workers: Comm) -> Outcome:
        comms.append(workers)
        torch.set_num_threads(threads)
        return train(prepared, workers, observer if workers.rank == 0 else None)

    with observed(console, folder, prepared.config) as observer:
        outcomes = simulate(work, prepared.config.workers, at_once=at_once)
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


def _run_processes(config: RunConfig, console: Console) -> Summary | None:
    world = int(os.environ["WORLD_SIZE"])
    if world != config.workers:
        raise UsageError(
            f"torchrun started {world} processes in all, but the recipe says workers = {config.workers}: "
            f"start as many as there are workers, or add --workers {world}"
        )
    device = _checked(lambda: pick_device(config.train.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        return _work_as_process(config, console)
    finally:
        # gloo aborts at exit if anything still refers to a group
        dist.destroy_process_group()
        gc.collect()


def _work_as_process(config: RunConfig, console: Console) -> Summary | None:
    assert dist.group.WORLD is not None
    workers = as_comm(dist.group.WORLD)
    prepared, folder = prepare_alike(config, workers, lambda prepared: _begin(prepared, console))
    if folder is None:
        train(prepared, workers)
        return None
    with observed(console, folder, config) as observer:
        outcome = train(prepared, workers, observer)
    summary = summarize(prepared, outcome, workers, at_once=None)
    folder.finish(summary, outcome.model)
    _tell_end(summary, folder, console)
    return summary


def _checked(make: Callable[[], Made]) -> Made:
    """What a function makes; its complaint about what was asked for as a UsageError."""
    try:
        return make()
    except ValueError as error:
        raise UsageError(str(error)) from error


def _begin(prepared: Prepared, console: Console) -> RunFolder:
    _checked(lambda: check_installed(prepared.config.train.trackers))
    print_prepared(prepared, console)
    return _checked(lambda: RunFolder(prepared.config))


def _tell_end(summary: Summary, folder: RunFolder, console: Console) -> None:
    print_summary(summary, console)
    console.print(f"everything is in {folder.path}/", highlight=False, soft_wrap=True)
