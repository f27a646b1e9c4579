"""Going on with a run: in which folder, whether the settings allow it, from which checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from lordo.sync import Comm
from lordo.trainer.checkpoint import DamagedError, Share, checkpoints, complete, parts, steps
from lordo.trainer.config import RunConfig
from lordo.trainer.recipe import flat, load
from lordo.trainer.settings import UsageError
from lordo.trainer.terminal import report

# What may change while a run goes on: it decides how long and on what a run trains, and what is told; not what is learnt at a step.
_OF_TRAIN = r"steps|eval_\w+|log_every|threads|device|checkpoint_every|keep_last|timeout_seconds|spike_\w+"
MAY_CHANGE = re.compile(rf"name|workers|output|parallel\.\w+|train\.({_OF_TRAIN})|compare\..*")


def is_restart() -> bool:
    """Whether torchrun has started this process again after a failure (`--max-restarts`): the run then goes on by itself."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def newest_folder(config: RunConfig) -> Path | None:
    """The folder that the last run of these settings made; None if there is none."""
    pattern = re.compile(rf"{re.escape(config.name)}(?:-(\d+))?")
    found = {}
    for path in Path(config.output).glob("*/config.toml"):
        if name := pattern.fullmatch(path.parent.name):
            found[int(name[1] or 1)] = path.parent
    return found[max(found)] if found else None


def check_may_go_on(config: RunConfig, folder: Path) -> None:
    """Refuse to go on with other settings than a run began with, or with one that is over.

    Raises:
        UsageError: naming the setting, or what to do.
    """
    before, now = flat(load(folder / "config.toml").model_dump()), flat(config.model_dump())
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name) and not MAY_CHANGE.fullmatch(name):
            raise UsageError(
                f"{name} was {before.get(name)} in {folder} and is {now.get(name)} now: a run goes on with the settings it began with; "
                "leave --resume out to begin another one"
            )
    if (folder / "summary.json").exists() and config.train.steps <= before["train.steps"]:
        raise UsageError(f"{folder} is finished: raise train.steps to train on, or leave --resume out to begin another run")


def usable(folder: Path, shares: Iterable[Share]) -> list[int]:
    """Steps of the checkpoints from which some of the workers can go on, oldest first.

    Args:
        folder: of the checkpoints. shares: what those workers take up. What is damaged is told.
    """
    found = []
    for step in steps(folder):
        try:
            for share in shares:
                parts(folder, step, share)
        except DamagedError as error:
            if step in complete(folder):
                report(f"the checkpoint of step {step} is damaged ({error}): it is left aside")
            continue
        found.append(step)
    return found


def folder_to_resume(config: RunConfig, resume: bool | Path) -> Path | None:
    """The folder in which a run goes on; None to begin in a new one.

    Args:
        config: the settings. resume: whether to go on, or the very folder; with nothing to go on from, a run begins.

    Raises:
        UsageError: the settings do not allow it.
    """
    if resume is False:
        return None
    path = newest_folder(config) if resume is True else resume
    if path is not None:
        check_may_go_on(config, path)
    return path


def usable_by_all(path: Path, processes: Comm, share: Share) -> list[int]:
    """Steps of the checkpoints in a run's folder from which every process can go on, oldest first; the same on all of them.

    Args:
        path: the folder. processes: all of them. share: what this one takes up.

    Raises:
        UsageError: worker 0 could go on, but another one does not find what it needs on its machine.
    """
    workers, found_by = zip(*processes.gather((share.worker, usable(checkpoints(path), [share]))), strict=True)
    common = sorted(set.intersection(*map(set, found_by)))
    if found_by[0] and not common:
        lacking = next(worker for worker, found in zip(workers, found_by, strict=True) if not found)
        raise UsageError(
            f"worker {lacking} does not find its part of the checkpoint of step {found_by[0][-1]} in {checkpoints(path).absolute()}: "
            "start it on the machine that wrote it; with another number of workers every machine needs all parts"
        )
    return common
