"""Text files to fixed blocks of byte tokens, split by file, and each worker's endless stream of them.

    list_files -> limit -> split -> tokens (through `datasets`) -> blocks: (num_blocks, sequence_length) uint8

Nothing here depends on the order of a directory, on Python's `hash` or on torch's global generator: the same files
and the same seed give the same bits on every worker.
"""

import glob
import os
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import datasets
import numpy as np
import torch
from torch import Tensor

from lordo.trainer.data_config import DataConfig
from lordo.trainer.splits import Part, Splits

VOCABULARY = 256
"""A token is a byte of UTF-8 text."""
SEPARATOR = b"\0"
"""Ends each document; a file that holds this byte is refused, so it never occurs inside one."""
SUFFIXES = (".md", ".py", ".txt")
"""The files taken from a folder."""
NOT_LIBRARY = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
"""Folders under the standard library that are not library code."""
BUILT = ("_sysconfigdata", "config-")
"""Beginnings of the names in the standard library that are written when Python is built: they differ per machine."""


@dataclass(frozen=True)
class TextFile:
    """One document.

    path: where it is.
    name: its path inside its source, the same on every machine: decides the order and the side of the split.
    num_bytes: its size, more than 0.
    """

    path: Path
    name: str
    num_bytes: int


def load_blocks(config: DataConfig, seed: int, cache_dir: str | os.PathLike[str] | None = None) -> Splits:
    """Read the text, split it by file, and cut each side into blocks.

    Args:
        config: what to read (`source`), how much of it, and how to cut and split it.
        seed: decides which files are validation files.
        cache_dir: where `datasets` keeps its Arrow copy of the text for the next run; None keeps it for this call only.

    Raises:
        ValueError: a source is missing, holds no text, or is not text; or there is too little text for a split or for
            one block of each side.
    """
    assert config.source is not None
    sides = split(limit(list_files(config.source), config.max_bytes), fraction=config.validation_fraction, seed=seed)
    for file in (file for side in sides for file in side):
        check_is_text(file, "data.source")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        train, validation = tokens(sides, Path(cache_dir or temporary))
    train_blocks = blocks(train, config.sequence_length, side="train")
    return Splits(
        train=(Part("data.source", 1.0, train_blocks, int(train_blocks.sum(dtype=torch.int64))),),
        validation=blocks(validation, config.sequence_length, side="validation"),
        vocabulary=VOCABULARY,
        num_train_documents=len(sides[0]),
        num_validation_documents=len(sides[1]),
        train_bytes=len(train) - len(sides[0]),
        validation_bytes=len(validation) - len(sides[1]),
    )


# ---- which files


def list_files(source: str | Sequence[str]) -> list[TextFile]:
    """List the documents of a source, sorted by name, each file once.

    Args:
        source: "stdlib", or files and folders. A file is taken whatever its name; a folder gives all non-empty .md,
            .py and .txt files below it that are not hidden.

    Raises:
        ValueError: a file or folder does not exist, a file is empty, or a folder has no such file.
    """
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        found = list(walk(root, suffixes=(".py",), skip=NOT_LIBRARY, skip_beginnings=BUILT))
    else:
        found = [file for item in source for file in _listed(item)]
    once: dict[Path, TextFile] = {}
    for file in found:
        once.setdefault(file.path.resolve(), file)
    return sorted(once.values(), key=lambda file: file.name)


def _listed(item: str) -> list[TextFile]:
    path = Path(item).expanduser()
    if path.is_file():
        size = path.stat().st_size
        if size == 0:
            raise ValueError(f"data.source: the file {item!r} is empty; leave it out")
        return [TextFile(path, path.name, size)]
    if not path.is_dir():
        raise ValueError(f"data.source: {item!r} does not exist; give a file or folder, as seen from {Path.cwd()}")
    found = list(walk(path, suffixes=SUFFIXES))
    if not found:
        kinds = ", ".join(SUFFIXES)
        raise ValueError(f"data.source: the folder {item!r} has no text; it needs a non-empty file in one of {kinds}")
    return found


def walk(root: Path, *, suffixes: tuple[str, ...], skip: Sequence[str] = (), skip_beginnings: tuple[str, ...] = ()) -> Iterator[TextFile]:
    """Give the non-empty files below a folder; hidden files and folders, links to folders and `skip` are left out."""
    left_out = (".", *skip_beginnings)
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(left_out)]
        for path in (Path(folder, name) for name in names if not name.startswith(left_out)):
            if path.name.lower().endswith(suffixes) and path.is_file() and path.stat().st_size:
                yield TextFile(path, path.relative_to(root).as_posix(), path.stat().st_size)


def limit(files: Sequence[TextFile], max_bytes: int | None) -> list[TextFile]:
    """Take whole files, in the order of a hash of their names, as long as they fit in `max_bytes`.

    The hash makes the choice a mixture of the whole source, and the same one for every seed.
    """
    if max_bytes is None:
        return list(files)
    taken, left = set(), max_bytes
    for file in sorted(files, key=lambda file: (stable_hash("limit", file.name), file.name)):
        if file.num_bytes <= left:
            taken.add(file)
            left -= file.num_bytes
    if not taken:
        smallest = min(files, key=lambda file: file.num_bytes)
        raise ValueError(
            f"data.max_bytes = {max_bytes} is less than the smallest file has ({smallest.num_bytes} bytes, {smallest.path}); raise it"
        )
    return [file for file in files if file in taken]


def split(files: Sequence[TextFile], *, fraction: float, seed: int) -> tuple[list[TextFile], list[TextFile]]:
    """Split files into train and validation files by a hash of seed and name.

    About `fraction` of them are validation files, and each side has at least one. Files that join or leave the source
    do not change the side of the others, unless a side would be empty.

    Raises:
        ValueError: there are fewer than two files.
    """
    if len(files) < 2:
        raise ValueError(
            f"data.source gives one file ({files[0].path}), but train and validation text come from different files; "
            "give at least two, for instance by cutting it in two"
        )

    def height(file: TextFile) -> float:
        return stable_hash("split", seed, file.name) / 2**64

    lowest, highest = min(files, key=height), max(reversed(files), key=height)
    kept = {file for file in files if file is lowest or (file is not highest and height(file) < fraction)}
    return [file for file in files if file not in kept], [file for file in files if file in kept]


def check_is_text(file: TextFile, place: str) -> None:
    """Refuse a file with a zero byte, as binary files and UTF-16 have; `place` is the setting that named it."""
    with file.path.open("rb") as stream:
        if any(SEPARATOR in chunk for chunk in iter(lambda: stream.read(1 << 20), b"")):
            raise ValueError(f"{place}: {file.path} is not text, for it has a zero byte; leave it out or save it as UTF-8")


# ---- text to tokens


def tokens(sides: tuple[Sequence[TextFile], Sequence[TextFile]], cache_dir: Path) -> tuple[Tensor, Tensor]:
    """Read both sides as two streams of byte tokens, (num_tokens,) uint8: every document, then a separator."""
    names = ("train", "validation")
    paths = {name: [glob.escape(str(f.path.absolute())) for f in side] for name, side in zip(names, sides, strict=True)}
    with _no_progress_bars():
        text = datasets.load_dataset("text", data_files=paths, sample_by="document", encoding_errors="replace", cache_dir=str(cache_dir))
        features = datasets.Features({"tokens": datasets.List(datasets.Value("uint8"))})
        encoded = text.map(_encode, batched=True, batch_size=64, remove_columns="text", features=features, keep_in_memory=True)
    for name, side in zip(names, sides, strict=True):
        assert len(encoded[name]) == len(side), f"{name}: {len(encoded[name])} documents from {len(side)} files"
    return _stream(encoded["train"]), _stream(encoded["validation"])


def _encode(batch: dict[str, list[str]]) -> dict[str, list[np.ndarray]]:
    """Turn documents into their bytes in UTF-8, each with the separator behind it."""
    return {"tokens": [np.frombuffer(text.encode() + SEPARATOR, dtype=np.uint8) for text in batch["text"]]}


def _stream(documents: datasets.Dataset) -> Tensor:
    """Join the tokens of all documents, (num_tokens,) uint8."""
    chunks = documents.data.column("tokens").chunks
    return torch.from_numpy(np.concatenate([chunk.flatten().to_numpy() for chunk in chunks]))


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


# ---- tokens to blocks, and blocks to workers


def blocks(stream: Tensor, sequence_length: int, *, side: str) -> Tensor:
    """Cut a stream into (num_blocks, sequence_length); the last tokens, too few for a block, are left out.

    Raises:
        ValueError: the stream is shorter than one block.
    """
    num_blocks = len(stream) // sequence_length
    if not num_blocks:
        raise ValueError(
            f"the {side} text has {len(stream)} tokens, fewer than one block of data.sequence_length = "
            f"{sequence_length}; lower that or give more text"
        )
    return stream[: num_blocks * sequence_length].view(num_blocks, sequence_length)


def spread(blocks: Tensor, num: int | None) -> Tensor:
    """Take `num` blocks at even distances, (num, sequence_length); all of them if None.

    Raises:
        ValueError: `num` is less than 1 or more than there are.
    """
    if num is None:
        return blocks
    if not 1 <= num <= len(blocks):
        raise ValueError(f"cannot take {num} of {len(blocks)} blocks; ask for at most as many as there are, or for None, all of them")
    return blocks[torch.arange(num) * len(blocks) // num]


def stable_hash(*parts: str | int) -> int:
    """Give 64 bits decided by `parts`, the same in every process and on every machine."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")
