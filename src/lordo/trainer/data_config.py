"""The settings of `[data]` and `[[data.mix]]`."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from lordo.trainer.settings import Count, Positive, Settings, folder_name


class MixConfig(Settings):
    """One source of a mixture of text."""

    source: Annotated[str, Field(min_length=1)]
    """A file or a folder of .parquet, .jsonl or text files, or a dataset's name on the Hugging Face hub, such as "owner/name"."""

    name: str | None = None
    """What it is called, and its folder in the corpus; None takes the end of `source` and `subset`."""

    subset: str | None = None
    """Of a dataset on the hub: which of its configurations."""

    split: str = "train"
    """Of a dataset on the hub: which of its splits."""

    text_column: str = "text"
    """Which column of a parquet or jsonl file or a dataset holds the text."""

    weight: Positive = 1.0
    """Its share of the blocks that are read, relative to the other sources' weights."""

    @field_validator("name")
    @classmethod
    def _can_name_a_folder(cls, name: str | None) -> str | None:
        return name if name is None else folder_name(name)


class DataConfig(Settings):
    """The text it is trained on: `source`, small and read as bytes at each start, or a `mix`, tokenized once by `lordo prepare`."""

    source: Literal["stdlib"] | Annotated[list[str], Field(min_length=1)] | None = None
    """"stdlib" (the Python standard library's own .py files) or a list of text files and folders of .txt, .py, .md."""

    mix: list[MixConfig] = []
    """Sources of text with their weights; needs `lordo prepare` before training."""

    tokenizer: str = "bytes"
    """Of a mixture: "bytes", a folder with a tokenizer as transformers saves it, or the name of one on the Hugging Face hub."""

    corpus: Annotated[str, Field(min_length=1)] | None = None
    """Of a mixture: the folder into which `lordo prepare` writes its tokens."""

    sequence_length: Annotated[int, Field(ge=2)] = 128
    """Tokens in a block; a block predicts all of its tokens but the first."""

    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """About this fraction of the files (of a mixture: of each source's documents), never fewer than one, is kept for validation."""

    max_bytes: Count | None = None
    """Of `source`: most bytes of text read, in whole files chosen by a hash of their names; None reads everything."""

    @model_validator(mode="after")
    def _source_or_mix(self) -> "DataConfig":
        if (self.source is None) == (not self.mix):
            raise ValueError('give either source (such as "stdlib", or a list of files and folders) or [[data.mix]] entries')
        if self.mix and self.corpus is None:
            raise ValueError('[[data.mix]] needs corpus, the folder for its tokens, such as corpus = "corpora/mine"')
        if self.mix and self.max_bytes is not None:
            raise ValueError("max_bytes limits source; what is taken of [[data.mix]] is limited by: lordo prepare RECIPE --max-tokens N")
        if not self.mix and (self.tokenizer != "bytes" or self.corpus is not None):
            raise ValueError("tokenizer and corpus need [[data.mix]] entries; source is read as bytes")
        return self
