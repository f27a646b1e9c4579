"""The folder of a run: settings, metrics, table, model."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from lordo.trainer.config import RunConfig
from lordo.trainer.corpus import corpus_tokenizer
from lordo.trainer.recipe import dump
from lordo.trainer.records import Progress
from lordo.trainer.summary import Summary
from lordo.trainer.terminal import print_summary, wide_console


class RunFolder:
    """`<output>/<name>/`, or `<name>-2`, … where that exists: nothing of an earlier run is overwritten."""

    def __init__(self, config: RunConfig, *, path: Path | None = None, from_step: int = 0) -> None:
        """Make the folder (at `path` if that is given) and write the resolved settings into it.

        Args:
            config: the run. path: the folder, if it is not to be a new one. from_step: where the run goes on; of the metrics that are
                there, those of later steps are dropped, since they will come again.

        Raises:
            ValueError: it cannot be made.
        """
        self._data = config.data
        self.path = _new_folder(Path(config.output), config.name) if path is None else path
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            dump(config, self.path / "config.toml")
            (self.path / "summary.json").unlink(missing_ok=True)  # it is not finished now
            self._open_metrics(min(from_step, config.train.steps - 1))
        except OSError as error:
            if path is None:  # made just now, and empty
                shutil.rmtree(self.path, ignore_errors=True)
            raise ValueError(f"the run's folder {self.path} cannot be written: {error.strerror}") from error

    def _open_metrics(self, from_step: int) -> None:
        kept = _metrics_until(self.path / "metrics.jsonl", from_step)
        beside = self.path / "metrics.jsonl.partial"
        beside.write_text("".join(kept), encoding="utf-8")
        beside.replace(self.path / "metrics.jsonl")
        self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
        self._last_step = from_step

    def record(self, progress: Progress) -> None:
        """Append one line to `metrics.jsonl`, on disk at once, so that a run can be watched; what JSON lacks (NaN) as null.

        Lines of this step and later ones, from before the run went back, are dropped.
        """
        if progress.step <= self._last_step:
            self._metrics.close()
            self._open_metrics(progress.step - 1)
        self._last_step = progress.step
        self._metrics.write(json.dumps(jsonable(asdict(progress))) + "\n")
        self._metrics.flush()

    def finish(self, summary: Summary, model: PreTrainedModel | None) -> None:
        """Write model and tokenizer as `from_pretrained` reads them, the table as text and, last, as JSON: that finishes the folder."""
        self._metrics.close()
        if model is not None:
            with no_progress_bars():
                model.save_pretrained(self.path / "model")
                if self._data.mix:
                    corpus_tokenizer(self._data).save_pretrained(self.path / "model")
        with (self.path / "summary.txt").open("w", encoding="utf-8") as file:
            print_summary(summary, wide_console(file))
        (self.path / "summary.json").write_text(json.dumps(jsonable(asdict(summary)), indent=2) + "\n", encoding="utf-8")


def jsonable(value: Any) -> Any:
    """A value with None for the numbers that JSON lacks, NaN and the infinities, also inside dicts."""
    if isinstance(value, dict):
        return {name: jsonable(each) for name, each in value.items()}
    return finite_or_none(value) if isinstance(value, float) else value


def finite_or_none(value: float) -> float | None:
    """The number, or None for NaN and the infinities."""
    return value if math.isfinite(value) else None


def load_summary(path: Path) -> Summary | None:
    """The summary of a finished run's folder; None of any other."""
    try:
        values: dict[str, Any] = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        return Summary(**values | {name: math.nan for name in ("validation_loss", "perplexity", "bits_per_token") if values[name] is None})
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars over the terminal."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _metrics_until(path: Path, step: int) -> list[str]:
    """Lines of a run's metrics up to a step; a last line that was cut off by a crash is dropped."""
    if step == 0 or not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("}\n")]
    return [line for line in whole if json.loads(line)["step"] <= step]


def _new_folder(output: Path, name: str) -> Path:
    for number in range(1, 10_000):
        path = output / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not output.is_dir():
                raise ValueError(f"output = '{output}' is a file: runs need a folder to go into") from None
            continue
        except OSError as error:
            raise ValueError(f"the run's folder {path} cannot be made: {error.strerror}") from error
        return path
    raise ValueError(f"there are thousands of runs named '{name}' in {output}: choose another name")
