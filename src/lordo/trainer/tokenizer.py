"""Text to tokens: any tokenizer that transformers opens, bytes, and a new one trained on the text at hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lordo.trainer.byte_tokenizer import byte_tokenizer

END_OF_TEXT = "<|endoftext|>"
"""Ends a document in tokenizers trained here."""
LEAST_VOCABULARY = 257
"""All bytes and the end of text."""

Tokens = np.ndarray[tuple[int], np.dtype[np.int64]]


def open_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Open a tokenizer by what `data.tokenizer` says: "bytes", a folder, or a name on the hub.

    Raises:
        ValueError: it is not there, cannot be reached or read, or has no end-of-text token.
    """
    if name == "bytes":
        return byte_tokenizer()
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # whatever a damaged folder or a lost connection sets off in there
        there = "the folder" if Path(name).expanduser().exists() else "there is no such folder here, and on the Hugging Face hub the name"
        reason = " ".join(str(error).split())
        reason = reason if len(reason) < 160 else f"{reason[:160]}…"
        raise ValueError(
            f"data.tokenizer = {name!r}: {there} cannot be opened ({type(error).__name__}: {reason}); give the folder of a tokenizer, or "
            "train one by lordo prepare --train-tokenizer"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"data.tokenizer = {name!r} has no end-of-text token, which separates documents: set eos_token in its tokenizer_config.json"
        )
    return tokenizer


class Encoder:
    """Documents to tokens, each with the end-of-text token behind it. Text never yields a special token, whatever it spells.

    Attributes:
        vocabulary: tokens are from 0 up to, not including, this. fingerprint: tells this tokenizer from any other.
        dtype: the smallest type of numpy and torch that holds a token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, is_bytes: bool) -> None:
        """A tokenizer of `open_tokenizer`, and whether it is the built-in one."""
        self.tokenizer, self.is_bytes = tokenizer, is_bytes
        self.vocabulary = len(tokenizer)
        self.end = int(tokenizer.eos_token_id)
        self.dtype = np.dtype(np.uint16 if self.vocabulary <= 1 << 16 else np.int32)
        self.fast: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if self.fast is not None:
            self.fast.no_truncation()
            self.fast.encode_special_tokens = True
        told = self.fast.to_str() if self.fast is not None else repr(sorted(tokenizer.get_vocab().items()))
        self.fingerprint = blake2b(f"{told} {self.end}".encode(), digest_size=8).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokens of each document, (num_tokens,); on all cores where the tokenizer is one of the `tokenizers` library."""
        texts = [text.encode("utf-8", "replace").decode() for text in texts]  # JSON can spell halves of characters
        if self.is_bytes:
            return [np.append(np.frombuffer(text.replace("\0", "").encode(), np.uint8).astype(np.int64), self.end) for text in texts]
        if self.fast is not None:
            ids = (encoding.ids for encoding in self.fast.encode_batch_fast(texts, add_special_tokens=False))
        else:
            ids = (self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts)
        return [np.array([*each, self.end], dtype=np.int64) for each in ids]


def train_tokenizer(documents: Iterable[str], vocabulary: int, folder: Path) -> None:
    """Train a byte-level BPE of `vocabulary` tokens on documents, and save it as transformers opens it.

    Raises:
        ValueError: the vocabulary is too small, or the text has too few different pieces for it.
    """
    if vocabulary < LEAST_VOCABULARY:
        raise ValueError(f"--train-tokenizer {vocabulary}: the 256 bytes and the end of text need at least {LEAST_VOCABULARY}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() < vocabulary:
        there = tokenizer.get_vocab_size()
        raise ValueError(f"--train-tokenizer {vocabulary}: the text is enough for {there} tokens only; ask for fewer or give more text")
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    partial = folder.with_name(f".{folder.name}.partial")
    saved.save_pretrained(partial)
    partial.rename(folder)
