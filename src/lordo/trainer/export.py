"""`lordo export`: a finished run as a folder that transformers opens."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lordo.trainer.finished import FinishedRun, open_run
from lordo.trainer.folder import no_progress_bars
from lordo.trainer.options import Parser
from lordo.trainer.settings import UsageError
from lordo.trainer.terminal import human_bytes


def main(arguments: list[str]) -> int:
    """Export.

    Raises:
        UsageError, ConfigError: what was asked for cannot work.
    """
    asked = parser().parse_args(arguments)
    target = Path(asked.folder)
    _check_is_free(target)
    export(open_run(asked.run), target)
    size = sum(file.stat().st_size for file in target.iterdir())
    print(f"{target}/: {human_bytes(size)}; open it with")
    print(f'  AutoModelForCausalLM.from_pretrained("{target}")')
    print(f'  AutoTokenizer.from_pretrained("{target}")')
    return 0


def export(run: FinishedRun, target: Path) -> None:
    """Write model and tokenizer into a folder that is new or empty; it appears whole or not at all.

    Raises:
        UsageError: it cannot be written.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save(run.model, run.tokenizer, partial)
        if target.is_dir():
            target.rmdir()
        partial.rename(target)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write both as `from_pretrained` reads them, the model's config naming the tokenizer's special tokens (not those of its type)."""
    for settings in (model.config, model.generation_config):
        settings.bos_token_id = tokenizer.bos_token_id
        settings.eos_token_id = tokenizer.eos_token_id
        settings.pad_token_id = tokenizer.pad_token_id
    tokenizer.model_max_length = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
    with no_progress_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _check_is_free(target: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"{target} exists already: give a folder that is new or empty, for nothing is overwritten")


def parser() -> Parser:
    """The arguments of `export`."""
    p = Parser(prog="lordo export", description="Write a finished run's averaged model and its tokenizer as transformers opens them.")
    p.add_argument("run", metavar="RUN", help="folder of a finished run, such as runs/tiny")
    p.add_argument("folder", metavar="FOLDER", help="where to write: a folder that is new or empty")
    return p
