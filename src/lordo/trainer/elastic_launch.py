"""`lordo train … --elastic`: each worker is started by itself, training goes on when one is lost, and takes it in again."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console

from lordo.methods import averages_plainly
from lordo.sync import WorkerError
from lordo.sync.schedule import PERIODS, period
from lordo.trainer.checkpoint import Share, checkpoints
from lordo.trainer.config import RunConfig
from lordo.trainer.going_on import folder_to_resume, usable
from lordo.trainer.launch import checked, how_to_go_on, under_torchrun
from lordo.trainer.prepared import Outline, build, outline, pick_device, prepare
from lordo.trainer.saving import Keeping
from lordo.trainer.settings import UsageError
from lordo.trainer.stopping import Interrupted, StopPoint
from lordo.trainer.summary import Summary, summarize
from lordo.trainer.terminal import print_prepared, print_summary, report
from lordo.trainer.trackers import check_installed


def run_elastic(config: RunConfig, console: Console, *, lighthouse: str, resume: bool | Path = False) -> Summary | None:
    """Train as one worker of those who meet at a lighthouse.

    Args:
        config, console, resume: see `launch.run`. lighthouse: its address, such as "http://10.0.0.1:29510".

    Returns:
        The summary; None on the workers that are not the first.

    Raises:
        UsageError: what was asked for cannot work.
        WorkerError: the lighthouse is gone, or those who are left come to no agreement.
        Interrupted: by SIGINT or SIGTERM.
    """
    if find_spec("torchft") is None:
        raise UsageError("--elastic needs torchft: pip install 'lordo[torchft]'")
    if under_torchrun():
        raise UsageError("--elastic and torchrun exclude each other, for torchrun ends all workers with the first: start each by itself")
    checked(lambda: check_elastic(outline(config)))
    checked(lambda: check_installed(config.train.trackers))
    prepared = checked(lambda: prepare(config))
    path = folder_to_resume(config, resume)
    steps = usable(checkpoints(path), [Share(0, 1)]) if path else []
    print_prepared(prepared, console)

    from lordo.trainer.elastic import Elastic
    from lordo.trainer.elastic_loop import ElasticLoop, ElasticSaver, Record

    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    workers = Elastic(lighthouse, timeout_seconds=config.train.timeout_seconds)
    model, _, optimizer = build(config, prepared.method, workers, pick_device(config.train.device))
    keeping = Keeping(checkpoints(path) if path else Path(), steps[-1] if steps else None, report)
    saver = ElasticSaver(keeping, config, model, optimizer)
    place = saver.restore()
    if path is not None:
        console.print(f"going on in {path}/ after step {place.step}\n", highlight=False, soft_wrap=True)
    record = Record(console, config, workers)
    record.path = path
    loop = workers.member = ElasticLoop(prepared, workers, model, optimizer, record, saver, place)
    stop = StopPoint()
    try:
        outcome = loop.run(stop)
    except (WorkerError, FloatingPointError, OSError) as error:
        if record.path is not None and (hint := how_to_go_on(record.path)):
            error.add_note(hint)
        raise
    finally:
        record.close()
        workers.close()
    if outcome is None:
        assert stop.number is not None
        assert record.path is not None
        told = f"interrupted by {signal.Signals(stop.number).name} after step {stop.last_step}"
        alone = how_to_go_on(record.path) or "nothing was saved, for train.checkpoint_every is not set"
        others = "the others go on without this worker, and take it in again when it is started again"
        raise Interrupted(f"{told}; {others if workers.size > 1 else alone}", stop.number)
    if workers.rank != 0:
        return None
    assert record.folder is not None
    summary = summarize(prepared, outcome, workers, at_once=None)
    record.folder.finish(summary, outcome.model)
    print_summary(summary, console)
    console.print(f"everything is in {record.folder.path}/", highlight=False, soft_wrap=True)
    return summary


def check_elastic(run: Outline) -> None:
    """Refuse what cannot work when workers come and go.

    Raises:
        UsageError: naming the setting, and what to do.
    """
    config, settings, method = run.config, run.settings, run.method
    if not method.averages:
        raise UsageError(
            f"method '{method.name}' needs all workers at every step, and with --elastic they come and go at synchronisations only: take "
            "one that averages rarely (lordo methods), or leave --elastic out"
        )
    if not averages_plainly(settings):
        raise UsageError(
            "--elastic averages everything at once, whole and in full precision: leave sync_overlap, sync_fragments, sync_split, sync_wire "
            "and sync_wire_moments out"
        )
    if config.parallel.devices > 1:
        raise UsageError("--elastic knows workers of one device only: leave parallel.shards and parallel.replicate out")
    if config.train.spike_action == "rollback":
        raise UsageError('--elastic does not go back for a loss: take train.spike_action = "skip"')
    every = settings["sync_every"]
    for what, name in PERIODS.items():
        own = period(settings, what)
        if own is not None and own % every:
            raise UsageError(
                f"method.{name} = {own} is not a multiple of sync_every = {every}, which --elastic needs: workers meet then only"
            )
    if config.train.steps % every:
        near = max(config.train.steps // every, 1) * every
        raise UsageError(
            f"train.steps = {config.train.steps} is not a multiple of sync_every = {every}, which --elastic needs: take {near} or "
            f"{near + every}"
        )
    if pick_device(config.train.device).type != "cpu":
        raise UsageError('--elastic has been tried on CPUs only: take train.device = "cpu"')
