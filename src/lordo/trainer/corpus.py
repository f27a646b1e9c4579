"""The tokens of a mixture on disk: written once by `lordo prepare`, mapped into memory by training.

corpus.json                     what all sources share
tokenizer/                      as transformers saves it
<source>/source.json            how far that source is
<source>/train.bin              its tokens, one document after another, each with the end-of-text token behind it
<source>/validation.bin         the documents kept for validation
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lordo.trainer.data import spread
from lordo.trainer.data_config import DataConfig
from lordo.trainer.sources import Position, source_name
from lordo.trainer.splits import Part, Splits
from lordo.trainer.tokenizer import Encoder, Tokens

SIDES = ("train", "validation")


@dataclass(frozen=True)
class Header:
    """What all sources of a corpus share.

    tokenizer: the setting. fingerprint: of the tokenizer itself. vocabulary, dtype: of the tokens. validation_fraction: the setting.
    """

    tokenizer: str
    fingerprint: str
    vocabulary: int
    dtype: str
    validation_fraction: float


@dataclass
class SideCount:
    """What one side of a source has: whole documents, their tokens (separators included), their bytes of text; a checksum of the tokens."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    checksum: int = 0


@dataclass
class Record:
    """How far a source is.

    identity: what decides its documents. position: in its stream, behind the last document written. exhausted: whether that was the
    last one. complete: whether all that was asked for is there.
    """

    identity: dict[str, Any]
    train: SideCount = field(default_factory=SideCount)
    validation: SideCount = field(default_factory=SideCount)
    position: Position = field(default_factory=Position)
    exhausted: bool = False
    complete: bool = False

    @property
    def tokens(self) -> int:
        """Of both sides."""
        return self.train.tokens + self.validation.tokens

    def is_enough(self, budget: int | None) -> bool:
        """Whether a budget of tokens (None: everything) is used up."""
        return self.exhausted or (budget is not None and self.tokens >= budget)


class SourceFolder:
    """The folder of one source, open for adding documents; what `save` has not recorded is dropped when it is opened again."""

    def __init__(self, path: Path, identity: dict[str, Any], dtype: np.dtype[Any]) -> None:
        """Open or make it.

        Raises:
            ValueError: it holds tokens of something else, or fewer than it says.
        """
        self.path, self.dtype = path, dtype
        path.mkdir(parents=True, exist_ok=True)
        self.record = read_record(path) or Record(identity)
        if self.record.identity != identity:
            raise ValueError(f"{path} was made from other files than the recipe names now: remove it, or choose another data.corpus")
        self.files = {side: (path / f"{side}.bin").open("ab") for side in SIDES}
        for side, file in self.files.items():
            recorded = getattr(self.record, side).tokens * dtype.itemsize
            if file.tell() < recorded:
                raise ValueError(f"{path / side}.bin has {file.tell()} bytes, fewer than the {recorded} it once had: remove {path}")
            file.truncate(recorded)

    def add(self, side: str, tokens: Tokens, num_bytes: int, position: Position) -> None:
        """Add a document, and note the position behind it."""
        content, count = tokens.astype(self.dtype).tobytes(), getattr(self.record, side)
        self.files[side].write(content)
        count.documents, count.tokens, count.bytes = count.documents + 1, count.tokens + len(tokens), count.bytes + num_bytes
        count.checksum = zlib.crc32(content, count.checksum)
        self.record.position = position

    def save(self) -> None:
        """Bring everything to disk: first the tokens, then the record of them, which is replaced as a whole."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        write_json(self.path / "source.json", asdict(self.record))

    def close(self) -> None:
        """Close the files."""
        for file in self.files.values():
            file.close()


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a file whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_record(path: Path) -> Record | None:
    """How far the source in a folder is; None if nothing was recorded.

    Raises:
        ValueError: the record cannot be read.
    """
    file = path / "source.json"
    if not file.exists():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        sides = {side: SideCount(**values.pop(side)) for side in SIDES}
        return Record(**values | sides | {"position": Position(**values["position"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} cannot be read ({error}): remove {path}") from error


def read_header(corpus: Path) -> Header | None:
    """What the sources of a corpus share; None if there is no corpus.

    Raises:
        ValueError: it cannot be read.
    """
    file = corpus / "corpus.json"
    if not file.exists():
        return None
    try:
        return Header(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{file} cannot be read ({error}): remove it and run lordo prepare again") from error


def start_corpus(config: DataConfig, encoder: Encoder) -> Path:
    """Make the corpus's folder with its header and tokenizer, or open one made with the same settings.

    Raises:
        ValueError: it was made with other settings.
    """
    assert config.corpus is not None
    path = Path(config.corpus).expanduser()
    header = Header(config.tokenizer, encoder.fingerprint, encoder.vocabulary, encoder.dtype.name, config.validation_fraction)
    found = read_header(path)
    if found is not None:
        check_header(path, found, config)
        if found.fingerprint != encoder.fingerprint:
            raise ValueError(f"{path} was made when {config.tokenizer!r} was another tokenizer: remove it, or choose another data.corpus")
        return path
    path.mkdir(parents=True, exist_ok=True)
    encoder.tokenizer.save_pretrained(path / "tokenizer")
    write_json(path / "corpus.json", asdict(header))
    return path


def check_header(path: Path, header: Header, config: DataConfig) -> None:
    """Refuse a corpus made with other settings than the recipe's."""
    for name in ("tokenizer", "validation_fraction"):
        made, asked = getattr(header, name), getattr(config, name)
        if made != asked:
            raise ValueError(
                f"data.corpus = '{config.corpus}' was made with data.{name} = {made!r}, but the recipe says {asked!r}: "
                "choose another corpus, or remove that folder and run lordo prepare again"
            )


def corpus_tokenizer(config: DataConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that a corpus was made with."""
    assert config.corpus is not None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(Path(config.corpus).expanduser() / "tokenizer")
    return tokenizer


# ---- reading


def load_corpus(config: DataConfig) -> Splits:
    """Map the tokens of every source into memory, cut into blocks of `sequence_length`.

    Validation blocks are as many as give every source its share; sources with too little for a block there are left out of it.

    Raises:
        ValueError: it is not prepared, not finished, or was prepared with other settings; or a source has less than one block.
    """
    assert config.corpus is not None
    path = Path(config.corpus).expanduser()
    header = read_header(path)
    if header is None:
        raise ValueError(f"data.corpus = '{config.corpus}' is not there yet: run lordo prepare with this recipe first")
    check_header(path, header, config)
    names = [source_name(entry) for entry in config.mix]
    records = [_complete(path, name) for name in names]
    train = [_blocks(path / name / "train.bin", record.train, header, config) for name, record in zip(names, records, strict=True)]
    for name, blocks, record in zip(names, train, records, strict=True):
        if not len(blocks):
            raise ValueError(
                f"{path / name}: {record.train.tokens} tokens to train on are fewer than one block of data.sequence_length = "
                f"{config.sequence_length}; lower that or prepare more"
            )
    parts = tuple(
        Part(name, entry.weight, blocks, record.train.checksum)
        for name, entry, blocks, record in zip(names, config.mix, train, records, strict=True)
    )
    kept = [(path / name / "validation.bin", record.validation) for name, record in zip(names, records, strict=True)]
    validation = [_blocks(file, count, header, config) for file, count in kept]
    return Splits(
        train=parts,
        validation=_in_shares(validation, [entry.weight for entry in config.mix], path),
        vocabulary=header.vocabulary,
        num_train_documents=sum(record.train.documents for record in records),
        num_validation_documents=sum(record.validation.documents for record in records),
        train_bytes=sum(record.train.bytes for record in records),
        validation_bytes=sum(record.validation.bytes for record in records),
    )


def _complete(corpus: Path, name: str) -> Record:
    record = read_record(corpus / name)
    if record is None:
        raise ValueError(f"data.corpus = '{corpus}' has no source {name!r} yet: run lordo prepare with this recipe")
    if not record.complete:
        raise ValueError(f"data.corpus = '{corpus}': {name} is not finished: run lordo prepare with this recipe, it goes on where it was")
    return record


def _blocks(file: Path, count: SideCount, header: Header, config: DataConfig) -> Tensor:
    """The tokens of one side, (num_blocks, sequence_length), mapped from the file; the last ones, too few for a block, are left out."""
    num_blocks, dtype = count.tokens // config.sequence_length, np.dtype(header.dtype)
    if not num_blocks:
        return torch.empty(0, config.sequence_length, dtype=torch.int64)
    if file.stat().st_size < count.tokens * dtype.itemsize:
        raise ValueError(f"{file} is shorter than it once was: remove {file.parent} and run lordo prepare again")
    shape = (num_blocks, config.sequence_length)
    return torch.from_numpy(np.memmap(file, dtype=dtype, mode="c", shape=shape))  # "c": torch warns of arrays it may not write to


def _in_shares(sides: list[Tensor], weights: list[float], path: Path) -> Tensor:
    """The most blocks of all sources, at even distances, so that each has its share."""
    there = [(blocks, weight) for blocks, weight in zip(sides, weights, strict=True) if len(blocks)]
    if not there:
        raise ValueError(f"{path} has less than one block of validation text: raise data.validation_fraction, or prepare more")
    per_weight = min(len(blocks) / weight for blocks, weight in there)
    return torch.cat([spread(blocks, max(int(per_weight * weight), 1)) for blocks, weight in there])
