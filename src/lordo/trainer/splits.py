"""The text of a run, cut into blocks: what training and evaluation read, wherever it came from."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Part:
    """The training text of one source.

    name: what it is called in messages. weight: its share of the blocks that are read, relative to the others'.
    blocks: (num_blocks, sequence_length) of an integer type; may be mapped from a file.
    fingerprint: a number that tells it from any other text.
    """

    name: str
    weight: float
    blocks: Tensor
    fingerprint: int


@dataclass(frozen=True)
class Splits:
    """The text of a run, cut into blocks.

    train: the sources. validation: (num_blocks, sequence_length) of an integer type, of all sources in their shares; no document has
        text on both sides.
    vocabulary: tokens are from 0 up to, not including, this.
    num_train_documents, num_validation_documents: documents on each side.
    train_bytes, validation_bytes: bytes of text on each side, separators not counted.
    """

    train: tuple[Part, ...]
    validation: Tensor
    vocabulary: int
    num_train_documents: int
    num_validation_documents: int
    train_bytes: int
    validation_bytes: int
