"""Filling a corpus: documents of every source to tokens on disk, in order, resumable at any document."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Protocol

from lordo.trainer.corpus import Record, SourceFolder, read_record, start_corpus
from lordo.trainer.data import stable_hash
from lordo.trainer.data_config import DataConfig
from lordo.trainer.sources import Position, Source
from lordo.trainer.terminal import human_bytes
from lordo.trainer.tokenizer import Encoder

CHUNK_BYTES = 4 << 20
"""Text handed to the tokenizer at once."""
SAVE_SECONDS = 5.0
"""Between two records of how far a source is: as much work as an interruption may lose."""
SAMPLE_BYTES = 1 << 20
"""Text of each source tokenized beforehand, to estimate sizes."""
TOKENIZER_BYTES = 256 << 20
"""Text that a new tokenizer is trained on, at most."""


class Watcher(Protocol):
    """Somebody who is told how the work goes."""

    def advanced(self, source: Source, record: Record) -> None:
        """Some documents are done."""


@dataclass(frozen=True)
class Estimate:
    """What is to be done for one source.

    text_bytes: about how much text it has, None if nobody knows. tokens: about how many will be there in the end, None if nobody knows.
    done: how many are there. budget: how many are wanted, None for all.
    """

    source: Source
    text_bytes: int | None
    tokens: int | None
    done: int
    budget: int | None


def budgets(sources: Sequence[Source], max_tokens: int | None) -> list[int | None]:
    """Tokens wanted of each source: its share of `max_tokens`, rounded up; None: all there are."""
    if max_tokens is None:
        return [None] * len(sources)
    total = sum(source.entry.weight for source in sources)
    return [-int(-max_tokens * source.entry.weight // total) for source in sources]


def estimate(source: Source, encoder: Encoder, corpus: Path, budget: int | None) -> Estimate:
    """Read the beginning of a source, and tell from that how much there will be to do.

    Raises:
        ValueError: the source cannot be reached or read.
    """
    sample = list(islice(_chunks(source, Position(), SAMPLE_BYTES), 1))
    texts = [text for text, _ in sample[0]] if sample else []
    if not texts:
        raise ValueError(f"{source.place}: {source.entry.source!r} has no text")
    sample_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
    sample_tokens = sum(map(len, encoder.encode(texts)))
    text_bytes = source.text_bytes()
    tokens = None if text_bytes is None else text_bytes * sample_tokens // max(sample_bytes, 1)
    if budget is not None:
        tokens = budget if tokens is None else min(tokens, budget)
    record = read_record(corpus / source.name)
    return Estimate(source, text_bytes, tokens, record.tokens if record else 0, budget)


def check_room(estimates: Sequence[Estimate], encoder: Encoder, corpus: Path) -> int | None:
    """Bytes of disk that are still needed, None if nobody knows.

    Raises:
        ValueError: there is less room.
    """
    missing = [None if each.tokens is None else max(each.tokens - each.done, 0) for each in estimates]
    needed = None if None in missing else sum(filter(None, missing)) * encoder.dtype.itemsize
    place = next(folder for folder in (corpus, *corpus.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if needed is not None and needed > free:
        raise ValueError(
            f"data.corpus = '{corpus}' needs about {human_bytes(needed)}, but {human_bytes(free)} are free there: "
            "choose another folder, or limit it by --max-tokens"
        )
    return needed


def fill(config: DataConfig, encoder: Encoder, estimates: Sequence[Estimate], watcher: Watcher) -> list[Record]:
    """Bring every source to its budget, going on where each one is.

    Raises:
        ValueError: a source cannot be read, or the corpus was made with other settings.
    """
    corpus = start_corpus(config, encoder)
    return [_fill_source(each.source, each.budget, config, encoder, corpus, watcher) for each in estimates]


def _fill_source(source: Source, budget: int | None, config: DataConfig, encoder: Encoder, corpus: Path, watcher: Watcher) -> Record:
    folder = SourceFolder(corpus / source.name, source.identity(), encoder.dtype)
    record, saved = folder.record, 0.0
    record.complete = record.is_enough(budget)
    try:
        for chunk in _chunks(source, record.position, CHUNK_BYTES) if not record.complete else ():
            if time.monotonic() - saved > SAVE_SECONDS:
                folder.save()
                saved = time.monotonic()
            _add(chunk, folder, encoder, budget, config.validation_fraction)
            watcher.advanced(source, record)
            if record.is_enough(budget):
                break
        record.exhausted = not record.is_enough(budget) or record.exhausted
        record.complete = True
        folder.save()
    finally:  # what was not saved is dropped when the folder is opened again: an interruption may fall between two lines of `add`
        folder.close()
    return record


def _add(chunk: list[tuple[str, Position]], folder: SourceFolder, encoder: Encoder, budget: int | None, fraction: float) -> None:
    """Add documents until the budget is used up."""
    for (text, position), tokens in zip(chunk, encoder.encode([text for text, _ in chunk]), strict=True):
        if folder.record.is_enough(budget):
            return
        side = "validation" if _is_validation(text, folder.record, fraction) else "train"
        folder.add(side, tokens, len(text.encode("utf-8", "replace")), position)


def _is_validation(text: str, record: Record, fraction: float) -> bool:
    """The first document, and about a fraction of the others by a hash of their text: equal documents are on one side, mostly."""
    first = not (record.train.documents or record.validation.documents)
    return first or stable_hash("validation", text) < fraction * 2**64


def _chunks(source: Source, start: Position, size: int) -> Iterator[list[tuple[str, Position]]]:
    """Documents with the positions behind them, gathered to about `size` bytes."""
    chunk, held = [], 0
    for text, position in source.documents(start):
        chunk.append((text, position))
        held += len(text)
        if held >= size:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def sample_texts(sources: Sequence[Source]) -> Iterator[str]:
    """Text of all sources by their weights, from the beginning of each, for a new tokenizer."""
    total = sum(source.entry.weight for source in sources)
    return chain.from_iterable(_first_bytes(source, int(TOKENIZER_BYTES * source.entry.weight / total)) for source in sources)


def _first_bytes(source: Source, size: int) -> Iterator[str]:
    for text, _ in source.documents(Position()):
        yield text
        size -= len(text)
        if size <= 0:
            return
