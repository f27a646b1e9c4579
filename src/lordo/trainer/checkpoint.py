"""Checkpoints on disk: `checkpoints/step-00000020/worker-0/` holds one worker's weights, state and facts.

Where several devices share a worker's weights each writes what it has of them: `worker-0-shard-1-of-4/`. A part is written beside
(`.worker-0.partial`), synced and renamed, by its own process alone: a kill at any instant leaves the earlier ones as they were.
A checkpoint is complete when all parts are there. Tensors are in safetensors files, which
`torch.distributed.checkpoint` reads (HuggingFaceStorageReader); facts are JSON. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

WEIGHTS, STATE, FACTS = "weights.safetensors", "state.safetensors", "facts.json"


@dataclass(frozen=True)
class Share:
    """Whose part of a checkpoint: worker number so and so of how many, and of the devices that share its weights which of how many."""

    worker: int
    workers: int
    shard: int = 0
    shards: int = 1

    def __str__(self) -> str:
        """The name of its folder."""
        return f"worker-{self.worker}" if self.shards == 1 else f"worker-{self.worker}-shard-{self.shard}-of-{self.shards}"

    def of(self, worker: int) -> list[Share]:
        """All parts of a worker, where the checkpoint has this one."""
        return [replace(self, worker=worker, shard=shard) for shard in range(self.shards)]


@dataclass(frozen=True)
class Snapshot:
    """What one device saves.

    step: the step after which it was taken. share: whose it is. weights: of the model, by name. state: everything else that is a tensor,
    by name. facts: plain values. cut: along which side the devices of a worker share a tensor, of those they do share.
    """

    step: int
    share: Share
    weights: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    cut: Mapping[str, int]

    @property
    def all_facts(self) -> dict[str, Any]:
        """The plain values, and what it is a snapshot of."""
        return {**self.facts, "step": self.step, **asdict(self.share), "cut": dict(self.cut)}


class DamagedError(ValueError):
    """A checkpoint that was complete once can no longer be read; the message says which file."""


class Part:
    """What a checkpoint has of one device, or of all devices of a worker put together; tensors are read one by one, from mapped memory.

    Attributes:
        facts: those of the (first) device.
    """

    def __init__(self, path: Path, *others: Path) -> None:
        """Check that every file is as it was written.

        Args:
            path: the folder. others: those of the worker's other devices, in order.

        Raises:
            DamagedError: it is not.
        """
        self.facts, files = _opened(path)
        self._files = [files, *(_opened(other)[1] for other in others)]

    def names(self, file: str) -> list[str]:
        """Names of the tensors in WEIGHTS or STATE."""
        return list(self._files[0][file].keys())

    def tensor(self, file: str, name: str) -> Tensor:
        """One of them."""
        parts: list[Tensor] = [files[file].get_tensor(name) for files in self._files]
        dim = self.facts["cut"].get(name) if len(parts) > 1 else None
        return parts[0] if dim is None else torch.cat(parts, dim=dim)


def _opened(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts and the opened files in a part's folder."""
    try:
        facts: dict[str, Any] = json.loads((path / FACTS).read_text(encoding="utf-8"))
        for name, (size, checksum) in facts["files"].items():
            if (path / name).stat().st_size != size or _checksum(path / name) != checksum:
                raise DamagedError(f"{path / name} is not what was written")
        return facts, {name: safe_open(path / name, framework="pt") for name in (WEIGHTS, STATE)}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def write(folder: Path, snapshot: Snapshot) -> None:
    """Write one part, so that it is either whole on disk or not there at all.

    Raises:
        OSError: the disk is full, the folder cannot be written; nothing is left behind then.
    """
    at = step_path(folder, snapshot.step)
    partial, final = at / f".{snapshot.share}.partial", at / f"{snapshot.share}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, tensors in ((WEIGHTS, snapshot.weights), (STATE, snapshot.state)):
            _save(tensors, partial / name)
        files = {name: ((partial / name).stat().st_size, _checksum(partial / name)) for name in (WEIGHTS, STATE)}
        facts = {**snapshot.all_facts, "files": files}
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


def first_share(folder: Path, step: int) -> Share | None:
    """Whose the first readable part of a step's checkpoint is, and so of how many workers and devices; None if there is none."""
    for path in sorted(step_path(folder, step).glob("worker-*")):
        with suppress(OSError, ValueError, KeyError):
            facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
            return Share(*(int(facts[name]) for name in ("worker", "workers", "shard", "shards")))
    return None


def remove(folder: Path, step: int, part: str) -> None:
    """Remove a part by its name, and the checkpoint's folder with the last of them."""
    at = step_path(folder, step)
    # renamed first: a part that is half removed must not look whole
    doomed = at / f".{part}.removed"
    with suppress(OSError):
        (at / part).rename(doomed)
    for path in (doomed, at / f".{part}.partial"):
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        at.rmdir()


def parts_in(folder: Path, step: int) -> dict[str, tuple[int, int]]:
    """The parts, whole or not, in the checkpoint of a step: the numbers of worker and shard, by name."""
    names: list[str] = []
    with suppress(FileNotFoundError):
        names = os.listdir(step_path(folder, step))
    found = [re.fullmatch(r"\.?(worker-(\d+)(?:-shard-(\d+)-of-\d+)?)(?:\.\w+)?", name) for name in names]
    return {part[1]: (int(part[2]), int(part[3] or 0)) for part in found if part}


def complete(folder: Path) -> list[int]:
    """Steps of the checkpoints of which every part is here, oldest first."""
    return [step for step in steps(folder) if _is_complete(folder, step)]


def _is_complete(folder: Path, step: int) -> bool:
    first = first_share(folder, step)
    return first is not None and all((step_path(folder, step) / str(each)).is_dir() for w in range(first.workers) for each in first.of(w))


def parts(folder: Path, step: int, share: Share) -> list[Part]:
    """What a device needs of a checkpoint: its own part; all of its worker, if other devices shared it; or that of all workers.

    The last if another number of workers saved it.

    Raises:
        DamagedError: a part is missing or not as it was written.
    """
    at, saved = step_path(folder, step), first_share(folder, step)
    if saved is None:
        raise DamagedError(f"{at} has no whole part")
    if (saved.workers, saved.shards) == (share.workers, share.shards):
        return [Part(at / str(share))]
    workers = [share.worker] if saved.workers == share.workers else range(saved.workers)
    return [Part(*(at / str(each) for each in saved.of(worker))) for worker in workers]


def clear(folder: Path, kept: int) -> None:
    """Remove what is newer than the checkpoint of a step: it is incomplete or damaged, and the run will come there again."""
    for step in steps(folder):
        if step > kept:
            for part in parts_in(folder, step):
                remove(folder, step, part)


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
