"""A finished run's folder, opened again: its settings, its model, its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lordo.suggest import nearest
from lordo.trainer.byte_tokenizer import byte_tokenizer
from lordo.trainer.checkpoint import checkpoints, complete
from lordo.trainer.config import RunConfig
from lordo.trainer.folder import no_progress_bars
from lordo.trainer.recipe import load
from lordo.trainer.settings import UsageError


@dataclass(frozen=True)
class FinishedRun:
    """What a finished run left: its folder, its settings, the averaged model and the tokenizer of its text."""

    path: Path
    config: RunConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def context(self) -> int:
        """Tokens it was trained to look back on: the length of a block."""
        return self.config.data.sequence_length


def open_run(folder: str, device: str | torch.device = "cpu") -> FinishedRun:
    """Open the folder that `lordo train` left; the model is in evaluation mode.

    Raises:
        UsageError: there is no such folder, it is no run's, the run is not finished, or its files cannot be read.
    """
    path = Path(folder)
    config = run_config(path)
    if not (path / "model").is_dir():
        raise UsageError(_without_model(path, config))
    try:
        with no_progress_bars():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path / "model", local_files_only=True)
            own = AutoTokenizer.from_pretrained(path / "model", local_files_only=True) if config.data.mix else byte_tokenizer()
    except Exception as error:  # whatever a damaged file sets off in there
        raise UsageError(f"{path / 'model'} cannot be opened: {' '.join(str(error).split())}") from error
    model.eval()
    return FinishedRun(path, config, model.to(device), own)  # type: ignore[arg-type]


def _without_model(path: Path, config: RunConfig) -> str:
    """Why a run's folder holds no model, and what to do."""
    if (path / "summary.json").exists():
        return f"{path} keeps no model, since it belongs to a comparison: train one with lordo train {path / 'config.toml'}"
    kept = complete(checkpoints(path))
    if kept:
        reached = f"its last checkpoint is that of step {kept[-1]} of {config.train.steps}"
        return f"{path} is not finished, {reached}: go on with lordo train {path} --resume"
    return f"{path} is not finished and has no checkpoint yet: wait for its end, or begin again with lordo train {path / 'config.toml'}"


def run_config(path: Path) -> RunConfig:
    """The settings of the run in a folder, finished or not.

    Raises:
        UsageError: there is no such folder, or it is no run's.
    """
    if not path.is_dir():
        names = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
        close = nearest(path.name, names)
        raise UsageError(
            f"{path} is not a folder" + (f"; did you mean '{path.parent / close}'?" if close else ": give the folder of a run")
        )
    if not (path / "config.toml").is_file():
        raise UsageError(f"{path} is not the folder of a run: it has no config.toml, which lordo train writes into it")
    return load(path / "config.toml")
