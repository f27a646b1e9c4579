"""The built-in vocabulary as a tokenizer that transformers opens: a token is a byte of UTF-8 text."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

END = "\0"
"""The byte that ends a document; no document holds it."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are the bytes of the text, 0 up to 255, and whose end-of-text token is the byte 0.

    It is a byte-level BPE without merges: such tokenizers write each byte as one printable letter of its own. The byte 0 keeps its own
    character instead, so that it can be the end-of-text token without a letter of real text being taken for it.
    """
    letters: dict[int, str] = bytes_to_unicode() | {0: END}
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
