"""Before processes train together: can each of them, and do all have the same? Machines may hold other recipes, options or texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lordo.sync import Comm
from lordo.trainer.config import RunConfig, UsageError
from lordo.trainer.folder import RunFolder
from lordo.trainer.loop import Prepared, prepare


def prepare_alike(config: RunConfig, workers: Comm, begin: Callable[[Prepared], RunFolder]) -> tuple[Prepared, RunFolder | None]:
    """Prepare on every process, make the run's folder on worker 0, and make sure that all have the same.

    Args:
        config: this process's settings. workers: all of them. begin: makes the folder; called on worker 0 alone.

    Returns:
        What is prepared, and on worker 0 the folder.

    Raises:
        UsageError: on every process alike, what one of them could not do, or in what two of them differ.
    """
    prepared, complaint = None, None
    try:
        prepared = prepare(config)
    except ValueError as error:
        complaint = str(error)
    _raise_what_any(workers, complaint)
    assert prepared is not None
    _compare(workers.gather(_settings(prepared)))
    folder, complaint = None, None
    try:
        folder = begin(prepared) if workers.rank == 0 else None
    except ValueError as error:
        complaint = str(error)
    _raise_what_any(workers, complaint)
    return prepared, folder


def _raise_what_any(workers: Comm, complaint: str | None) -> None:
    """Raise the first complaint of any process on all of them, so that none waits for one that has left."""
    complaints = {worker: each for worker, each in enumerate(workers.gather(complaint)) if each is not None}
    if complaints:
        worker, first = next(iter(complaints.items()))
        raise UsageError(first if worker == 0 or len(complaints) == workers.size else f"worker {worker}: {first}")


def _settings(prepared: Prepared) -> dict[str, Any]:
    """What must be equal on all processes: every setting, and a fingerprint of the text."""
    text = [(part.name, part.fingerprint, len(part.blocks)) for part in prepared.splits.train]
    return {**_flat(prepared.config.model_dump()), "the training text": text}


def _compare(notes: list[dict[str, Any]]) -> None:
    """Refuse settings that differ between processes."""
    for worker, theirs in enumerate(notes[1:], start=1):
        for name in sorted(notes[0].keys() | theirs.keys()):
            if notes[0].get(name) != theirs.get(name):
                raise UsageError(
                    f"{name} is {notes[0].get(name)} on worker 0 but {theirs.get(name)} on worker {worker}: "
                    "start every worker with the same recipe, options and files"
                )


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
