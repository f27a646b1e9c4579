"""Where a run's progress goes: the live line and the folder always, TensorBoard and W&B if the recipe asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from lordo.trainer.config import RunConfig
from lordo.trainer.folder import RunFolder
from lordo.trainer.progress import ProgressLine
from lordo.trainer.records import Observer, Progress


class Observers:
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        """All of them, told in this order."""
        self.observers = observers

    def progressed(self, progress: Progress) -> None:
        """Tell each."""
        for observer in self.observers:
            observer.progressed(progress)


class TensorBoard:
    """Scalars in the folder `tensorboard/` of the run: `tensorboard --logdir runs` shows them."""

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder.path / "tensorboard"))

    def progressed(self, progress: Progress) -> None:
        """Add a point to each curve, and make it visible at once."""
        for name, value in numbers(asdict(progress)).items():
            self._writer.add_scalar(name, value, progress.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Wandb:
    """A run in W&B's project `lordo`, its files in the folder `wandb/` of the run; WANDB_MODE=offline sends nothing."""

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        """Start the run, with all settings."""
        import wandb

        settings = wandb.Settings(console="off")  # the terminal is the live line's
        self._run = wandb.init(project="lordo", name=folder.path.name, dir=folder.path, config=config.model_dump(), settings=settings)

    def progressed(self, progress: Progress) -> None:
        """Add a point to each curve."""
        self._run.log(numbers(asdict(progress)), step=progress.step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


TRACKERS: dict[str, type[TensorBoard] | type[Wandb]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def check_installed(names: Sequence[str]) -> None:
    """Refuse a tracker whose package is missing.

    Raises:
        ValueError: naming it, and what to install.
    """
    for name in names:
        if find_spec(name) is None:
            raise ValueError(f"train.trackers: {name} is not installed: pip install 'lordo[{name}]', or leave it out")


@contextmanager
def observed(console: Console, folder: RunFolder, config: RunConfig) -> Iterator[Observer]:
    """Everybody who is told how a run goes; a tracker that cannot start is left out with a warning, since training matters more."""
    with ExitStack() as stack:
        observers: list[Observer] = [stack.enter_context(ProgressLine(console, folder, config))]
        for name in config.train.trackers:
            try:
                tracker = TRACKERS[name](folder, config)
            except Exception as error:  # whatever befell its server, its disk or its login
                reason = " ".join(str(error).split())
                console.print(f"{name} could not start, so the run goes on without it: {reason}", highlight=False, soft_wrap=True)
                continue
            stack.callback(tracker.close)
            observers.append(tracker)
        yield Observers(observers)


def numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record under one flat name each, such as `sync/seconds/compute`; the step is the axis, not a curve."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            flat[f"{prefix}{name}"] = value
    return flat
