"""Checkpoints on disk: `checkpoints/step-00000020/worker-0/` holds one worker's weights, state and facts.

A part is written beside (`.worker-0.partial`), synced and renamed, by its own worker alone: a kill at any instant leaves the earlier ones
as they were. A checkpoint is complete when every worker's part is there. Tensors are in safetensors files, which
`torch.distributed.checkpoint` reads (HuggingFaceStorageReader); facts are JSON. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

WEIGHTS, STATE, FACTS = "weights.safetensors", "state.safetensors", "facts.json"


@dataclass(frozen=True)
class Snapshot:
    """What one worker saves.

    step: the step after which it was taken. worker, workers: its number, and of how many. weights: of the model, by name.
    state: everything else that is a tensor, by name. facts: plain values.
    """

    step: int
    worker: int
    workers: int
    weights: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    facts: Mapping[str, Any]


class DamagedError(ValueError):
    """A checkpoint that was complete once can no longer be read; the message says which file."""


class Part:
    """One worker's part of a checkpoint, its tensors read one by one, from mapped memory."""

    def __init__(self, path: Path) -> None:
        """Check that every file is as it was written.

        Raises:
            DamagedError: it is not.
        """
        self.path = path
        try:
            self.facts: dict[str, Any] = json.loads((path / FACTS).read_text(encoding="utf-8"))
            for name, (size, checksum) in self.facts["files"].items():
                if (path / name).stat().st_size != size or _checksum(path / name) != checksum:
                    raise DamagedError(f"{path / name} is not what was written")
            self._files = {name: safe_open(path / name, framework="pt") for name in (WEIGHTS, STATE)}
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            if isinstance(error, DamagedError):
                raise
            raise DamagedError(f"{path} cannot be read: {type(error).__name__}: {error}") from error

    def names(self, file: str) -> list[str]:
        """Names of the tensors in WEIGHTS or STATE."""
        return list(self._files[file].keys())  # type: ignore[no-untyped-call]

    def tensor(self, file: str, name: str) -> Tensor:
        """One of them."""
        tensor: Tensor = self._files[file].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor


def write(folder: Path, snapshot: Snapshot) -> None:
    """Write one worker's part, so that it is either whole on disk or not there at all.

    Raises:
        OSError: the disk is full, the folder cannot be written; nothing is left behind then.
    """
    at = step_path(folder, snapshot.step)
    partial, final = at / f".worker-{snapshot.worker}.partial", at / f"worker-{snapshot.worker}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, tensors in ((WEIGHTS, snapshot.weights), (STATE, snapshot.state)):
            _save(tensors, partial / name)
        files = {name: ((partial / name).stat().st_size, _checksum(partial / name)) for name in (WEIGHTS, STATE)}
        facts = {**snapshot.facts, "step": snapshot.step, "worker": snapshot.worker, "workers": snapshot.workers, "files": files}
        (partial / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            _sync(path)
        partial.rename(final)
        for path in (at, folder):
            _sync(path)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            at.rmdir()  # if nobody else's part is in it
        raise


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:  # wraps what the system said, such as "No space left on device (os error 28)"
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else 0
        raise OSError(code, os.strerror(code) if code else str(error), str(path)) from error


def checkpoints(folder: Path) -> Path:
    """Where a run's folder has its checkpoints."""
    return folder / "checkpoints"


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def steps(folder: Path) -> list[int]:
    """Steps of which there is any part, oldest first."""
    names = [re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*")]
    return sorted(int(name[1]) for name in names if name)


def num_workers(folder: Path, step: int) -> int | None:
    """How many workers the checkpoint of a step has, as its first readable part says; None if there is none."""
    for path in sorted(step_path(folder, step).glob("worker-*")):
        with suppress(OSError, ValueError, KeyError):
            return int(json.loads((path / FACTS).read_text(encoding="utf-8"))["workers"])
    return None


def remove(folder: Path, step: int, worker: int) -> None:
    """Remove one worker's part, and the checkpoint's folder with the last of them."""
    at = step_path(folder, step)
    # renamed first: a part that is half removed must not look whole
    doomed = at / f".worker-{worker}.removed"
    with suppress(OSError):
        (at / f"worker-{worker}").rename(doomed)
    for path in (doomed, at / f".worker-{worker}.partial"):
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        at.rmdir()


def workers_in(folder: Path, step: int) -> Iterator[int]:
    """Numbers of the workers that have a part, whole or not, in the checkpoint of a step."""
    found = {re.fullmatch(r"\.?worker-(\d+)(\.\w+)?", path.name) for path in step_path(folder, step).iterdir()}
    yield from sorted({int(name[1]) for name in found if name})


def complete(folder: Path) -> list[int]:
    """Steps of the checkpoints of which every worker's part is here, oldest first."""
    return [step for step in steps(folder) if set(range(num_workers(folder, step) or 1)) <= set(whole_parts(folder, step))]


def whole_parts(folder: Path, step: int) -> list[int]:
    """Numbers of the workers whose part is whole."""
    return [worker for worker in workers_in(folder, step) if (step_path(folder, step) / f"worker-{worker}").is_dir()]


def parts(folder: Path, step: int, rank: int, size: int) -> list[Part]:
    """What one of `size` workers needs of a checkpoint: its own part, or all of them if another number of workers saved it.

    Raises:
        DamagedError: a part is missing or not as it was written.
    """
    saved = num_workers(folder, step)
    if saved is None:
        raise DamagedError(f"{step_path(folder, step)} has no whole part")
    return [Part(step_path(folder, step) / f"worker-{worker}") for worker in ([rank] if saved == size else range(saved))]


def clear(folder: Path, kept: int) -> None:
    """Remove what is newer than the checkpoint of a step: it is incomplete or damaged, and the run will come there again."""
    for step in steps(folder):
        if step > kept:
            for worker in list(workers_in(folder, step)):
                remove(folder, step, worker)


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _sync(path: Path) -> None:
    """Make sure that a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
