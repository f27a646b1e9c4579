"""Known tasks on a finished run's model, scored by lm-eval (the extra `eval`), with data from the hub or from local files."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lordo.suggest import nearest
from lordo.trainer.finished import FinishedRun

BATCH_SEQUENCES = 16
# Of a local file: the questions as lm-eval's own arc and piqa tasks ask them.
LOCAL_TASK: dict[str, Any] = {
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{query.strip()}}\nAnswer:",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}


@dataclass(frozen=True)
class TaskScore:
    """What lm-eval says of one task.

    Attributes:
        metrics: by name, such as acc (the likeliest answer is the right one) and acc_norm (the likeliest per byte). stderr: of each.
        num_questions: how many were asked. num_cut: of all question-answer pairs, how many began further back than the model sees.
        num_pairs: question-answer pairs. data: the local file, or None for the hub.
    """

    task: str
    metrics: dict[str, float]
    stderr: dict[str, float]
    num_questions: int
    num_cut: int
    num_pairs: int
    data: str | None


def score_tasks(run: FinishedRun, names: Sequence[str], folder: Path | None, *, context: int) -> list[TaskScore]:
    """Score tasks, zero-shot unless a task says otherwise.

    Args:
        names: of lm-eval's tasks, or of files NAME.jsonl in the folder, which go first. context: tokens that the model sees at once.
        folder: of local data; each line of a file is {"query": …, "choices": [answers], "gold": index of the right one}.

    Raises:
        ValueError: an unknown task, a local file that is no such file, data that cannot be had, or an answer longer than the context.
        ModuleNotFoundError: lm-eval is not installed.
    """
    files = {name: file for name in names if folder is not None and (file := folder / f"{name}.jsonl").is_file()}
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--task-data {folder} is not a folder")
    for file in files.values():
        _check_file(file)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of each question that is cut; here they are counted
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    manager = _task_manager(known_tasks=len(files) < len(names))
    for name in names:
        if name not in files and name not in manager.all_tasks:
            local = [] if folder is None else [file.stem for file in folder.glob("*.jsonl")]
            close = nearest(name, [*local, *manager.all_tasks])
            raise ValueError(f"unknown task {name!r}" + (f"; did you mean {close!r}?" if close else "; `lm-eval ls tasks` lists them"))
    lm = HFLM(pretrained=run.model, tokenizer=run.tokenizer, max_length=context, batch_size=BATCH_SEQUENCES, device=str(run.model.device))
    tasks = [_local_task(name, files[name]) if name in files else name for name in names]
    try:
        with _bars_on_terminals_only():
            results = lm_eval.simple_evaluate(model=lm, tasks=tasks, task_manager=manager, bootstrap_iters=100)
    except OSError as error:  # the hub cannot be reached, or does not have the data
        raise ValueError(f"{error}: give --task-data FOLDER with the questions as TASK.jsonl") from error
    except AssertionError as error:  # lm-eval's word for an answer that does not fit
        raise ValueError(f"an answer of {', '.join(names)} is longer than the {context} tokens that the model sees") from error
    assert results is not None
    told = [name for name in results["results"] if name in names] or list(results["results"])
    return [_score(run, name, results, files.get(name), context) for name in told]


@cache
def _task_manager(*, known_tasks: bool) -> Any:
    """lm-eval's index of tasks, which takes seconds to read, or an empty one for local files alone."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=known_tasks)


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Keep lm-eval's progress bars, which cannot be switched off, out of files and pipes; and what git says where it is asked in vain."""
    sys.stderr.flush()
    own, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        with os.fdopen(own, "w", closefd=False) if sys.stderr.isatty() else io.StringIO() as bars, redirect_stderr(bars):
            os.dup2(nowhere, 2)  # for other programs
            yield
    finally:
        os.dup2(own, 2)
        os.close(own)
        os.close(nowhere)


def _local_task(name: str, file: Path) -> dict[str, Any]:
    return {**LOCAL_TASK, "task": name, "dataset_kwargs": {"data_files": {"test": str(file)}}}


def _check_file(file: Path) -> None:
    """Refuse a file whose lines are not questions."""
    number = 0
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            question = json.loads(line)
            choices, gold = question["choices"], question["gold"]
            right = isinstance(question["query"], str) and len(choices) > 1 and all(isinstance(each, str) for each in choices)
            if not right or type(gold) is not int or not 0 <= gold < len(choices):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f'{file}, line {number}: not a question; each line is {{"query": text, "choices": [texts], "gold": index of the right one}}'
            ) from None
    if not number:
        raise ValueError(f"{file} is empty: it has no question")


def _score(run: FinishedRun, name: str, results: Any, file: Path | None, context: int) -> TaskScore:
    """The numbers of one task (or group of tasks, whose metrics are those of its members together)."""
    found = {key.removesuffix(",none"): value for key, value in results["results"][name].items() if key.endswith(",none")}
    metrics = {key: float(value) for key, value in found.items() if not key.endswith("_stderr")}
    stderr = {key: float(found[f"{key}_stderr"]) for key in metrics if isinstance(found.get(f"{key}_stderr"), float)}
    members = [each for each in results["samples"] if each == name or name not in results["samples"]]
    samples = [sample for each in members for sample in results["samples"][each]]
    pairs = [pair for sample in samples for pair in sample["arguments"]]
    num_cut = sum(length > context + 1 for length in _lengths(run, pairs))
    return TaskScore(name, metrics, stderr, len(samples), num_cut, len(pairs), None if file is None else str(file))


def _lengths(run: FinishedRun, pairs: Sequence[tuple[str, ...]]) -> Iterable[int]:
    """Tokens of each question with its answer."""
    texts = ["".join(part for part in pair if isinstance(part, str)) for pair in pairs]
    return (len(tokens) for tokens in run.tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else ()
