"""Before processes train together: can each of them, and do all have the same? Machines may hold other recipes, options or texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lordo.sync import Comm
from lordo.trainer.config import ParallelConfig, RunConfig
from lordo.trainer.devices import process_name
from lordo.trainer.prepared import Prepared, prepare
from lordo.trainer.recipe import flat
from lordo.trainer.settings import UsageError

Made = TypeVar("Made")


def prepare_alike(config: RunConfig, processes: Comm) -> Prepared:
    """Prepare on every process, and make sure that all have the same.

    Args:
        config: this process's settings. processes: all of them.

    Raises:
        UsageError: on every process alike, what one of them could not do, or in what two of them differ.
    """
    prepared, complaint = None, None
    try:
        prepared = prepare(config)
    except ValueError as error:
        complaint = str(error)
    _raise_what_any(processes, complaint, config.parallel)
    assert prepared is not None
    check_alike(processes.gather(settings_and_text(prepared)), config.parallel)
    return prepared


def on_first(processes: Comm, make: Callable[[], Made], *, keep: bool = False) -> Made | None:
    """What the first process makes; on the others it is a copy, or nothing if that one keeps it.

    Raises:
        UsageError: on every process alike, if the first could not make it.
    """
    made, complaint = None, None
    try:
        made = make() if processes.rank == 0 else None
    except ValueError as error:
        complaint = str(error)
    complaint, first = processes.gather((complaint, None if keep else made))[0]
    if complaint is not None:
        raise UsageError(complaint)
    return made if keep else first


def _raise_what_any(processes: Comm, complaint: str | None, parallel: ParallelConfig) -> None:
    """Raise the first complaint of any process on all of them, so that none waits for one that has left."""
    complaints = {number: each for number, each in enumerate(processes.gather(complaint)) if each is not None}
    if complaints:
        number, first = next(iter(complaints.items()))
        raise UsageError(first if number == 0 or len(complaints) == processes.size else f"{process_name(number, parallel)}: {first}")


def check_same_devices(config: RunConfig, processes: Comm) -> None:
    """Before processes join those of their worker: all must mean the same by it, or some wait for ever for others.

    Raises:
        UsageError: on every process alike, naming the setting.
    """
    check_alike(processes.gather({"workers": config.workers, **flat({"parallel": config.parallel.model_dump()})}), config.parallel)


def settings_and_text(prepared: Prepared) -> dict[str, Any]:
    """What must be equal on all processes: every setting, and a fingerprint of the text."""
    text = [(part.name, part.fingerprint, len(part.blocks)) for part in prepared.splits.train]
    return {**flat(prepared.config.model_dump()), "the training text": text}


def check_alike(notes: list[dict[str, Any]], parallel: ParallelConfig) -> None:
    """Refuse settings that differ between processes.

    Raises:
        UsageError: naming the setting.
    """
    for number, theirs in enumerate(notes[1:], start=1):
        for name in sorted(notes[0].keys() | theirs.keys()):
            if notes[0].get(name) != theirs.get(name):
                raise UsageError(
                    f"{name} is {notes[0].get(name)} on worker 0 but {theirs.get(name)} on {process_name(number, parallel)}: "
                    "start every worker with the same recipe, options and files"
                )
