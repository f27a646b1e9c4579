"""Where the documents of a mixture come from: files, folders, datasets on the hub; read as streams, from any place in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import pyarrow.parquet

from lordo.suggest import listed
from lordo.trainer.data import SUFFIXES, TextFile, check_is_text, stable_hash, walk
from lordo.trainer.data_config import MixConfig

Kind = Literal["text", "json", "parquet", "hub"]
KINDS: dict[Kind, tuple[str, ...]] = {
    "parquet": (".parquet",),
    "json": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json"),
    "text": SUFFIXES,
}


@dataclass(frozen=True)
class Position:
    """A place in a stream of documents: what `datasets` keeps of it (None at the beginning), and documents to skip from there."""

    state: dict[str, Any] | None = None
    skip: int = 0


@dataclass(frozen=True)
class Source:
    """One entry of the mixture.

    place: the setting, for messages. name: its folder in the corpus. kind: how it is read. files: none for a dataset on the hub.
    """

    place: str
    name: str
    entry: MixConfig
    kind: Kind
    files: tuple[TextFile, ...] = ()

    def documents(self, start: Position) -> Iterator[tuple[str, Position]]:
        """Give each document that is not empty, and the position behind it.

        Raises:
            ValueError: it cannot be reached or read, or lacks the column, or what that holds is not text.
        """
        column = self.column
        with self._told():
            stream = self._stream()
            columns = stream.column_names or list(next(iter(stream.take(1)), {column: ""}))
        if column not in columns:
            raise ValueError(f"{self.place}: there is no column {column!r}; text_column may be one of: {listed(columns)}")
        with self._told():
            stream = stream.select_columns([column])
            if start.state is not None:
                stream.load_state_dict(start.state)
            documents = iter(stream)
        state, used, to_skip = start.state, 0, start.skip
        while True:
            with self._told():
                document = next(documents, None)
            if document is None:
                return
            used += 1
            if used == CHECKPOINT_DOCUMENTS:
                state, used = stream.state_dict(), 0
            if to_skip:
                to_skip -= 1
                continue
            text = document[column]
            if not isinstance(text, str | None):
                raise ValueError(f"{self.place}: the column {column!r} holds {type(text).__name__}, not text: choose another text_column")
            if text:
                yield text, Position(state, used)

    @property
    def column(self) -> str:
        """Which column holds the text."""
        return "text" if self.kind == "text" else self.entry.text_column

    def text_bytes(self) -> int | None:
        """About how many bytes of text it has, from the files' sizes; None where they do not tell."""
        if self.kind == "text":
            return sum(file.num_bytes for file in self.files)
        if self.kind == "parquet":
            return sum(_column_bytes(file.path, self.column) for file in self.files)
        if self.kind == "json" and not any(file.name.endswith((".gz", ".zst")) for file in self.files):
            return sum(file.num_bytes for file in self.files)
        return None

    def identity(self) -> dict[str, Any]:
        """What decides its documents, as plain values: a corpus made from something else must not be added to."""
        entry, files = self.entry, [f"{file.name} {file.num_bytes}" for file in self.files]
        if not files:
            return {"hub": entry.source, "subset": entry.subset, "split": entry.split, "column": self.column}
        return {"kind": self.kind, "num_files": len(files), "files": f"{stable_hash(*files):016x}", "column": self.column}

    def _stream(self) -> datasets.IterableDataset:
        if self.kind == "hub":
            return datasets.load_dataset(self.entry.source, self.entry.subset, split=self.entry.split, streaming=True)
        own = {"sample_by": "document", "encoding_errors": "replace"} if self.kind == "text" else {}
        files = [str(file.path.absolute()) for file in self.files]
        return datasets.load_dataset(self.kind, data_files=files, split="train", streaming=True, **own)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turn whatever a damaged file or a lost connection sets off into one sentence."""
        try:
            yield
        except Exception as error:
            reason = " ".join(str(error.__cause__ or error).split())
            reason = reason if len(reason) < 200 else f"{reason[:200]}…"
            if self.kind == "hub":
                what = f"the dataset {self.entry.source!r} cannot be read from the Hugging Face hub ({reason})"
                raise ValueError(f"{self.place}: {what}; check name, subset, split and connection, or give files") from error
            files = self.files[0].path if len(self.files) == 1 else f"one of {len(self.files)} files of {self.entry.source}"
            raise ValueError(f"{self.place}: {files} cannot be read as {self.kind} ({reason}); mend it or leave it out") from error


CHECKPOINT_DOCUMENTS = 1000
"""Documents between two places that `datasets` is asked for; in between they are counted."""


def open_sources(mix: Sequence[MixConfig]) -> list[Source]:
    """Find the files of every entry; nothing is read but their names and sizes (and text files once, for zero bytes).

    Raises:
        ValueError: a file or folder is missing, empty, binary, or of several kinds; two entries have one name.
    """
    sources: list[Source] = []
    for number, entry in enumerate(mix):
        source = _open(entry, f"data.mix[{number}]")
        twin = next((each for each in sources if each.name == source.name), None)
        if twin is not None:
            raise ValueError(f"{source.place} is called {source.name!r}, as {twin.place} is: give one of them a name of its own")
        sources.append(source)
    return sources


def source_name(entry: MixConfig) -> str:
    """What a source is called, and its folder in the corpus: its own name, or the end of its path and its subset."""
    tail = entry.source.rstrip("/").rsplit("/", 1)[-1]
    made = re.sub(r"[^\w.-]+", "-", "-".join([tail, *([entry.subset] if entry.subset else [])])).strip(".-")
    return entry.name or made or "text"


def _open(entry: MixConfig, place: str) -> Source:
    path = Path(entry.source).expanduser()
    name = source_name(entry)
    if not path.exists():
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", entry.source) and not entry.source.endswith(sum(KINDS.values(), ())):
            return Source(place, name, entry, "hub")
        raise ValueError(
            f"{place}: {entry.source!r} does not exist; give a file or folder, as seen from {Path.cwd()}, or a dataset's name on the hub"
        )
    if entry.subset is not None or entry.split != "train":
        raise ValueError(f"{place}: subset and split are for datasets on the hub, but {entry.source!r} is here: leave them out")
    files, kind = _files(path, place)
    for file in files if kind == "text" else ():
        check_is_text(file, place)
    if kind == "text" and entry.text_column != "text":
        raise ValueError(f"{place}: text files have no column {entry.text_column!r}: leave text_column out")
    return Source(place, name, entry, kind, files)


def _files(path: Path, place: str) -> tuple[tuple[TextFile, ...], Kind]:
    """The files of a path, and of which kind they are."""
    if path.is_file():
        if path.stat().st_size == 0:
            raise ValueError(f"{place}: the file {str(path)!r} is empty; leave it out")
        kind: Kind = next((kind for kind, suffixes in KINDS.items() if path.name.lower().endswith(suffixes)), "text")
        return (TextFile(path, path.name, path.stat().st_size),), kind
    found = {kind: tuple(sorted(walk(path, suffixes=suffixes), key=lambda file: file.name)) for kind, suffixes in KINDS.items()}
    there = [kind for kind, files in found.items() if files]
    if not there:
        kinds = ", ".join(sum(KINDS.values(), ()))
        raise ValueError(f"{place}: the folder {str(path)!r} has no text; it needs non-empty files in one of {kinds}")
    if len(there) > 1:
        raise ValueError(f"{place}: the folder {str(path)!r} has files of several kinds ({', '.join(there)}): make an entry for each")
    return found[there[0]], there[0]


def _column_bytes(path: Path, column: str) -> int:
    """Bytes of one column of a parquet file before its compression; 0 if it has no such column or cannot be read."""
    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except (OSError, ValueError):
        return 0
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    return sum(each.total_uncompressed_size for each in columns if each.path_in_schema == column)
