"""`lordo eval`: perplexity and bits per byte of a finished run's model, on the run's validation text or any text; and known tasks."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lordo.trainer.data import spread
from lordo.trainer.finished import FinishedRun, open_run
from lordo.trainer.folder import finite_or_none
from lordo.trainer.options import Parser
from lordo.trainer.prepared import pick_device
from lordo.trainer.score import Score, block_windows, sliding_windows, summed_nats, token_bytes
from lordo.trainer.settings import UsageError
from lordo.trainer.tasks import TaskScore, score_tasks
from lordo.trainer.terminal import human_bytes, plain_table, wide_console
from lordo.trainer.text import load_text
from lordo.trainer.tokenizer import Encoder

NOTES = """\
Perplexity is per token, so compare it between models of one tokenizer only; bits per byte are comparable between all. Validation text
is read as in training: in blocks of {sequence_length} tokens, all but the first of each counted. A text file is read through a window of
{context} tokens that moves by half of them: every token is counted once, and sees at least {least} tokens before it unless the text has
just begun."""


TASK_NOTES = """\
By lm-eval. cut: the share of questions with an answer that are longer than the {context} tokens that the model sees; their beginning is
cut off."""


@dataclass(frozen=True)
class Scored:
    """A text, the tokens that the model saw of it at once, and its score."""

    text: str
    context: int
    score: Score


def main(arguments: list[str]) -> int:
    """Evaluate, print, and keep the results in the run's folder.

    Raises:
        UsageError, ConfigError: what was asked for cannot work.
    """
    asked = parser().parse_args(arguments)
    for name, least in (("max_tokens", 2), ("context", 2)):
        given = getattr(asked, name)
        if given is not None and given < least:
            raise UsageError(f"--{name.replace('_', '-')} {given}: give at least {least}")
    try:
        run = open_run(asked.run, pick_device(asked.device))
        context = checked_context(run, asked.context)
        scored = [on_file(run, Path(name), context, asked.max_tokens) for name in asked.texts]
        tasks = on_tasks(run, asked.tasks, asked.task_data, context)
        if not scored and not tasks:
            scored = [on_validation(run, asked.max_tokens)]
    except ValueError as error:
        raise UsageError(str(error)) from error
    console = wide_console()
    if scored:
        print_scores(run, scored, context, console)
    if tasks:
        print_tasks(run, tasks, context, console)
    keep(run.path, {**{each.text: as_json(each) for each in scored}, **{each.task: asdict(each) for each in tasks}})
    return 0


def checked_context(run: FinishedRun, asked: int | None) -> int:
    """Tokens seen at once: those of a training block, unless others are asked for.

    Raises:
        ValueError: more than the model has positions for.
    """
    positions = getattr(run.model.config.get_text_config(), "max_position_embeddings", None)
    if asked is not None and positions is not None and asked > positions:
        raise ValueError(f"--context {asked} is more than the model's max_position_embeddings = {positions}: give at most that")
    return asked or run.context


def on_validation(run: FinishedRun, max_tokens: int | None) -> Scored:
    """The run's own validation blocks, as in training; a part of them, at even distances, if that is all that is asked for."""
    blocks = load_text(run.config.data, run.config.seed).validation
    length = blocks.shape[1]
    if max_tokens is not None and max_tokens < blocks.numel():
        blocks = spread(blocks, max(max_tokens // length, 1))
    nats = summed_nats(run.model, blocks.reshape(-1), block_windows(len(blocks), length))
    counted = blocks[:, 1:].long()
    return Scored("validation", length, Score(nats, counted.numel(), int(token_bytes(run.tokenizer)[counted].sum())))


def on_file(run: FinishedRun, file: Path, context: int, max_tokens: int | None) -> Scored:
    """A text file as one document, its first token predicted from the end of the document before."""
    text = read_text(file)
    encoder = Encoder(run.tokenizer, is_bytes=run.config.data.tokenizer == "bytes")
    tokens = torch.from_numpy(encoder.encode([text])[0])[:-1]  # without the end of the document
    num_bytes = len(text.encode())
    if max_tokens is not None and max_tokens < len(tokens):
        tokens = tokens[:max_tokens]
        num_bytes = int(token_bytes(run.tokenizer)[tokens].sum())
    stream = torch.cat([torch.tensor([encoder.end]), tokens])
    windows = list(sliding_windows(len(stream), context=context, stride=max(context // 2, 1)))
    return Scored(str(file), context, Score(summed_nats(run.model, stream, windows), len(tokens), num_bytes))


def on_tasks(run: FinishedRun, names: str | None, folder: str | None, context: int) -> list[TaskScore]:
    """The tasks asked for, if any.

    Raises:
        ValueError: see `score_tasks`.
        UsageError: lm-eval is not installed.
    """
    if names is None:
        if folder is not None:
            raise ValueError("--task-data without --tasks: say which tasks, such as --tasks arc_easy,piqa")
        return []
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    try:
        return score_tasks(run, wanted, None if folder is None else Path(folder), context=context)
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'lordo[eval]'") from error


def read_text(file: Path) -> str:
    """The text of a file; bytes that are not UTF-8 are replaced, as they are in training text.

    Raises:
        ValueError: it cannot be read, is empty, or is not text.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    if not content:
        raise ValueError(f"{file} is empty: there is nothing to predict")
    if b"\0" in content:
        raise ValueError(f"{file} is not text, for it has a zero byte: give a text file")
    return content.decode("utf-8", errors="replace")


def print_scores(run: FinishedRun, scored: list[Scored], context: int, console: Console) -> None:
    """The table, and what was counted."""
    table = plain_table("text", "tokens", "bytes", "nats/token", "perplexity", "bits/byte", title=f"{run.path}")
    for each in scored:
        s = each.score
        table.add_row(
            each.text, f"{s.num_tokens:,}", human_bytes(s.num_bytes), f"{s.loss:.4f}", f"{s.perplexity:.4f}", f"{s.bits_per_byte:.4f}"
        )
    console.print(table)
    notes = NOTES.format(sequence_length=run.context, context=context, least=context - max(context // 2, 1))
    console.print(notes, highlight=False, soft_wrap=True)


def print_tasks(run: FinishedRun, tasks: list[TaskScore], context: int, console: Console) -> None:
    """The table of the tasks."""
    table = plain_table("task", "metric", "value", "±", "questions", "cut", title=f"{run.path}")
    for each in tasks:
        for metric, value in each.metrics.items():
            cut = f"{each.num_cut / each.num_pairs:.0%}" if each.num_pairs else "–"
            error = f"{each.stderr[metric]:.4f}" if metric in each.stderr else "–"
            table.add_row(each.task, metric, f"{value:.4f}", error, f"{each.num_questions:,}", cut)
    console.print(table)
    console.print(TASK_NOTES.format(context=context), highlight=False, soft_wrap=True)


def as_json(scored: Scored) -> dict[str, Any]:
    """A score as it is kept in `evaluations.json`."""
    s = scored.score
    numbers = {"loss": s.loss, "perplexity": s.perplexity, "bits_per_byte": s.bits_per_byte}
    counts = {"num_tokens": s.num_tokens, "num_bytes": s.num_bytes, "context": scored.context}
    return {**{name: finite_or_none(value) for name, value in numbers.items()}, **counts}


def keep(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    """Put results into the folder's `evaluations.json`, in place of earlier ones of the same name; written whole or not at all."""
    file = folder / "evaluations.json"
    try:
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps({**kept, **results}, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, file)
    except (OSError, ValueError) as error:
        raise UsageError(f"the results could not be kept in {file}: {error}") from error


def parser() -> Parser:
    """The arguments of `eval`."""
    p = Parser(
        prog="lordo eval", description="Perplexity and bits per byte of a finished run's averaged model; kept in RUN/evaluations.json."
    )
    p.add_argument("run", metavar="RUN", help="folder of a finished run, such as runs/tiny")
    p.add_argument("texts", metavar="TEXT", nargs="*", help="text files, each read as one document (default: the run's validation text)")
    p.add_argument("--tasks", metavar="A,B", help="tasks of lm-eval, such as arc_easy,hellaswag (needs pip install 'lordo[eval]')")
    p.add_argument("--task-data", metavar="FOLDER", help="local data for tasks: TASK.jsonl, lines of query, choices, gold")
    p.add_argument("--context", type=int, metavar="N", help="tokens of a text file or task seen at once (default: as in training)")
    p.add_argument("--max-tokens", type=int, metavar="N", help="most tokens evaluated of each text (default: all)")
    p.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute (default: auto)")
    return p
