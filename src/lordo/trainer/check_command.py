"""`lordo check`: everything about a recipe that can be found without running it, each finding a sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from lordo.trainer.compiling import check_compiles
from lordo.trainer.config import RunConfig
from lordo.trainer.corpus import load_corpus, read_header
from lordo.trainer.data import spread
from lordo.trainer.memory import check_memory, gigabytes, need
from lordo.trainer.mix import Mix
from lordo.trainer.options import RecipeParser
from lordo.trainer.prepared import Outline, outline, pick_device
from lordo.trainer.sources import Position, Source, open_sources
from lordo.trainer.splits import Splits
from lordo.trainer.terminal import batch_derivation, wide_console
from lordo.trainer.text import load_text
from lordo.trainer.tokenizer import open_tokenizer


def main(arguments: list[str]) -> int:
    """Check; 0 if nothing was found, 2 otherwise.

    Raises:
        ConfigError: the recipe itself cannot be read.
    """
    config, _ = parser().read(arguments)
    console = wide_console()
    findings = list(dict.fromkeys(findings_of(config, console)))
    for finding in findings:
        print(f"lordo: {finding}", file=sys.stderr)
    if not findings:
        console.print(f"{arguments[0]}: nothing found that would stop it", highlight=False)
    return 2 if findings else 0


def findings_of(config: RunConfig, console: Console) -> Iterator[str]:
    """Each thing that would stop a run; what is right is told on the console."""
    checks: list[Callable[[RunConfig, Console], None]] = [_model, _mixture if config.data.mix else _text]
    for check in checks:
        try:
            check(config, console)
        except ValueError as error:
            yield str(error)
    if config.data.mix:  # what the corpus is from may be missing, and the corpus still serve
        try:
            _corpus(config, console)
        except ValueError as error:
            yield str(error)


def _model(config: RunConfig, console: Console) -> None:
    """Model, method and memory."""
    shapes: Outline = outline(config)
    device = pick_device(config.train.device)
    needed = need(shapes.method, shapes.weights, shapes.settings, config, device)
    console.print(f"{shapes.method.name}, {sum(w.numel for w in shapes.weights):,} parameters, {batch_derivation(config)}", highlight=False)
    console.print(f"memory of a {config.parallel.unit}: {gigabytes(needed.total)} at least ({needed})", highlight=False)
    check_memory(needed, config, device)
    check_compiles(config, device)


def _text(config: RunConfig, console: Console) -> None:
    _serves(config, load_text(config.data, config.seed), console)


def _mixture(config: RunConfig, console: Console) -> None:
    """The sources, each read up to its first document, and the tokenizer beside the model."""
    sources: list[Source] = open_sources(config.data.mix)
    for source in sources:
        if next(source.documents(Position()), None) is None:
            raise ValueError(f"{source.place}: {source.entry.source!r} has no text")
    outline(config, vocabulary=len(open_tokenizer(config.data.tokenizer)))
    console.print(f"sources: {', '.join(source.name for source in sources)}", highlight=False)


def _corpus(config: RunConfig, console: Console) -> None:
    assert config.data.corpus is not None
    if read_header(Path(config.data.corpus).expanduser()) is None:
        console.print(f"data.corpus = '{config.data.corpus}' is not there yet: lordo prepare comes before lordo train", highlight=False)
        return
    _serves(config, load_corpus(config.data), console)


def _serves(config: RunConfig, splits: Splits, console: Console) -> None:
    """Whether there is text for every worker and for every evaluation, and the model knows its tokens."""
    Mix(splits.train, 0, config.workers, config.seed)
    spread(splits.validation, config.train.eval_sequences)
    outline(config, vocabulary=splits.vocabulary)
    blocks = sum(len(part.blocks) for part in splits.train)
    console.print(f"text: {blocks:,} blocks to train on, {len(splits.validation):,} to validate on", highlight=False)


def parser() -> RecipeParser:
    """Every option of `check` is a setting of the recipe."""
    return RecipeParser(
        "lordo check",
        "Find what would stop a run, without running it: settings, model, memory, sources, tokenizer, corpus.",
    )
