"""How well a model predicts a text: cross-entropy per token and per byte, and which tokens are counted.

Letters: C `context`, tokens the model sees at once; S `stride`, tokens counted in each window but the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lordo.trainer.evaluate import sequences_at_once

Window = tuple[int, int, int]  # first token, token behind the last one, first token that is counted


@dataclass(frozen=True)
class Score:
    """Cross-entropy summed over the counted tokens.

    Attributes:
        nats: the sum. num_tokens: how many were counted. num_bytes: bytes of text that they stand for.
    """

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """e to the loss: per token, so not to be compared between tokenizers."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text: comparable between tokenizers."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else math.nan


def block_windows(num_blocks: int, length: int) -> list[Window]:
    """Blocks laid one after another, as in training: each is seen alone, and all of its tokens but the first are counted."""
    return [(i * length, (i + 1) * length, i * length + 1) for i in range(num_blocks)]


def sliding_windows(num_tokens: int, *, context: int, stride: int) -> Iterator[Window]:
    """Every token but the very first counted once, each after the first C seen with at least C − S tokens before it."""
    end, counted = min(context, num_tokens), 1
    while counted < num_tokens:
        yield max(end - context, 0), end, counted
        end, counted = min(end + stride, num_tokens), end


@torch.no_grad()
def summed_nats(model: PreTrainedModel, tokens: Tensor, windows: Sequence[Window]) -> float:
    """Cross-entropy summed over the counted tokens of all windows, in float64.

    Args:
        model: in evaluation mode. tokens: (num_tokens,) of any integer type. windows: on the tokens.
    """
    total = 0.0
    for length, group in groupby(windows, key=lambda window: window[1] - window[0]):
        size = sequences_at_once(model, length)
        while batch := list(islice(group, size)):
            seen = torch.stack([tokens[start:end] for start, end, _ in batch]).long().to(model.device)
            logits = model(input_ids=seen, use_cache=False).logits[:, :-1].float()
            losses = F.cross_entropy(logits.transpose(1, 2), seen[:, 1:], reduction="none").double()
            first = torch.tensor([counted - start - 1 for start, _, counted in batch], device=losses.device)
            places = torch.arange(length - 1, device=losses.device)
            total += losses.where(places >= first[:, None], 0.0).sum().item()
    return total


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Bytes of text that each token stands for, (vocabulary,) int64; none for a special token.

    Exact for byte-level tokenizers, which write one letter for each byte, and for sentencepiece ones, which write "▁" for a space and
    <0x0A> for a byte that is in no piece.
    """
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special, added = set(tokenizer.all_special_ids), set(tokenizer.get_added_vocab().values())  # the latter are written as they are
    letters = set(bytes_to_unicode().values())
    byte_level = all(set(token) <= letters for i, token in enumerate(tokens) if i not in special | added)
    size = len if byte_level else _piece_bytes
    return torch.tensor([0 if i in special else len(t.encode()) if i in added else size(t) for i, t in enumerate(tokens)])


def _piece_bytes(piece: str) -> int:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return 1
    return len(piece.replace("▁", " ").encode())
