"""The text of a run, whichever way its settings name it."""

from lordo.trainer.corpus import load_corpus
from lordo.trainer.data import load_blocks
from lordo.trainer.data_config import DataConfig
from lordo.trainer.splits import Splits


def load_text(config: DataConfig, seed: int) -> Splits:
    """Read the text of `source`, or open the corpus of a `mix`.

    Args:
        config: which. seed: decides which files of `source` are for validation; a corpus was split when it was prepared.

    Raises:
        ValueError: see `load_blocks` and `load_corpus`.
    """
    return load_corpus(config) if config.mix else load_blocks(config, seed)
