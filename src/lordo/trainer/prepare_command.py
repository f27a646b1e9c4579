"""`lordo prepare`: the sources of a recipe's mixture to tokens on disk, once; interrupted, it goes on where it was."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lordo.trainer.config import RunConfig
from lordo.trainer.corpus import Record
from lordo.trainer.data_config import DataConfig
from lordo.trainer.folder import no_progress_bars
from lordo.trainer.options import RecipeParser
from lordo.trainer.prepared import outline
from lordo.trainer.settings import UsageError
from lordo.trainer.sources import Source, open_sources
from lordo.trainer.terminal import human_bytes, plain_table, wide_console
from lordo.trainer.tokenize import Estimate, budgets, check_room, estimate, fill, sample_texts
from lordo.trainer.tokenizer import Encoder, open_tokenizer, train_tokenizer

LINE_SECONDS = 10.0
"""Between two lines of progress where there is no terminal."""


def main(arguments: list[str]) -> int:
    """Prepare.

    Raises:
        UsageError, ConfigError: what was asked for cannot work.
    """
    config, asked = parser().read(arguments)
    console = wide_console()
    try:
        with no_progress_bars():
            prepare(config, asked.max_tokens, asked.train_tokenizer, console)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except KeyboardInterrupt:
        console.print("\ninterrupted; the same command goes on where it was", highlight=False)
        return 130
    return 0


def prepare(config: RunConfig, max_tokens: int | None, vocabulary: int | None, console: Console) -> None:
    """Tokenize what the recipe asks for.

    Args:
        config: the recipe. max_tokens: of all sources together. vocabulary: of a tokenizer to train first, if one is wanted.

    Raises:
        ValueError: what was asked for cannot work; nothing was written then but what earlier calls wrote.
    """
    data = config.data
    if not data.mix:
        raise ValueError("data.source needs no preparation: lordo train reads it as it is; lordo prepare is for [[data.mix]] entries")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"--max-tokens {max_tokens}: give at least 1")
    assert data.corpus is not None
    sources = open_sources(data.mix)
    if vocabulary is not None:
        _train_tokenizer(data, sources, vocabulary, console)
    encoder = Encoder(open_tokenizer(data.tokenizer), is_bytes=data.tokenizer == "bytes")
    outline(config, vocabulary=encoder.vocabulary)  # refuses a model with fewer tokens
    corpus = Path(data.corpus).expanduser()
    estimates = [estimate(s, encoder, corpus, budget) for s, budget in zip(sources, budgets(sources, max_tokens), strict=True)]
    print_estimates(estimates, check_room(estimates, encoder, corpus), encoder, corpus, console)
    with Watch(estimates, console) as watch:
        records = fill(data, encoder, estimates, watch)
    print_records(sources, records, data, console)


def _train_tokenizer(data: DataConfig, sources: Sequence[Source], vocabulary: int, console: Console) -> None:
    folder = Path(data.tokenizer).expanduser()
    if data.tokenizer == "bytes":
        raise ValueError("--train-tokenizer needs a folder to write to: set data.tokenizer, such as --data.tokenizer tokenizers/mine")
    if folder.exists():
        raise ValueError(f"--train-tokenizer: {folder} exists already; leave the option out to use it, or choose another data.tokenizer")
    console.print(f"training a tokenizer of {vocabulary:,} tokens", highlight=False)
    began = time.monotonic()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        train_tokenizer(sample_texts(sources), vocabulary, folder)
    except OSError as error:
        raise ValueError(f"data.tokenizer = '{folder}' cannot be written: {error.strerror}") from error
    console.print(f"{folder}/ after {time.monotonic() - began:.1f} s", highlight=False)


def print_estimates(estimates: Sequence[Estimate], needed: int | None, encoder: Encoder, corpus: Path, console: Console) -> None:
    """Before the work: how much there is of each source, and how much of it is wanted."""
    table = plain_table("source", "share", "text", "tokens (about)", "there already")
    total = sum(each.source.entry.weight for each in estimates)
    for each in estimates:
        text = "unknown" if each.text_bytes is None else human_bytes(each.text_bytes)
        tokens = "unknown" if each.tokens is None else f"{each.tokens:,}"
        table.add_row(each.source.name, f"{each.source.entry.weight / total:.1%}", text, tokens, f"{each.done:,}")
    console.print(table)
    room = "" if needed is None else f", about {human_bytes(needed)} more on disk"
    console.print(f"into {corpus}/ with {encoder.vocabulary:,} different tokens{room}", highlight=False, soft_wrap=True)


def print_records(sources: Sequence[Source], records: Sequence[Record], data: DataConfig, console: Console) -> None:
    """After the work: what there is."""
    table = plain_table("source", "documents", "tokens", "blocks", "validation blocks", "bytes/token")
    for source, record in zip(sources, records, strict=True):
        blocks, kept = (side.tokens // data.sequence_length for side in (record.train, record.validation))
        documents = record.train.documents + record.validation.documents
        ratio = (record.train.bytes + record.validation.bytes) / max(record.tokens, 1)
        table.add_row(source.name, f"{documents:,}", f"{record.tokens:,}", f"{blocks:,}", f"{kept:,}", f"{ratio:.2f}")
    console.print(table)
    for source, record in zip(sources, records, strict=True):
        if not record.train.tokens // data.sequence_length:
            console.print(f"warning: {source.name} has less than one block to train on: training needs more of it", style="bold")


class Watch:
    """Shows how the work goes: a bar with the time left on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, estimates: Sequence[Estimate], console: Console) -> None:
        """What is to be done, and where to tell."""
        known = [each.tokens for each in estimates]
        self.total = None if None in known else max(sum(filter(None, known)), 1)
        self.tokens = {each.source.name: each.done for each in estimates}
        self.before = sum(self.tokens.values())
        self.console, self.began, self.told = console, time.monotonic(), time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(), transient=True) if console.is_terminal else None

    def __enter__(self) -> Watch:
        """Show the bar."""
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task("", total=self.total, completed=self.before, speed="")
        return self

    def __exit__(self, *exception: object) -> None:
        """Take it away."""
        if self.bar is not None:
            self.bar.stop()

    def advanced(self, source: Source, record: Record) -> None:
        """Show it."""
        self.tokens[source.name] = record.tokens
        done, now = sum(self.tokens.values()), time.monotonic()
        speed = (done - self.before) / max(now - self.began, 1e-9)
        if self.bar is not None:
            self.bar.update(self.task, description=source.name, completed=done, speed=f"{done:,} tokens, {speed:,.0f}/s")
        elif now - self.told > LINE_SECONDS:
            self.told = now
            left = "" if self.total is None else f", about {max(self.total - done, 0) / max(speed, 1):.0f} s left"
            self.console.print(f"{source.name}: {done:,} tokens, {speed:,.0f}/s{left}", highlight=False)


def parser() -> RecipeParser:
    """The options of `prepare`; every other one is a setting of the recipe."""
    p = RecipeParser(
        "lordo prepare",
        "Tokenize the [[data.mix]] of a recipe into data.corpus. Interrupted, it goes on where it was.",
    )
    p.add_argument("--max-tokens", type=number, metavar="N", help="tokens of all sources together, such as 1e9 (default: everything)")
    p.add_argument("--train-tokenizer", type=int, metavar="N", help="first train a BPE of N tokens on the mixture, into data.tokenizer")
    return p


def number(text: str) -> int:
    """A whole number, also written as 1e9."""
    if float(text) != int(float(text)):
        raise ValueError(text)
    return int(float(text))
