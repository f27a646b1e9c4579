"""The settings of each step: pure functions of its number, so that every worker, and a resumed run, comes to the same answer."""

from __future__ import annotations

import math
from typing import Any

from lordo.trainer.config import RunConfig
from lordo.trainer.train_config import TrainConfig


def settings_at(step: int, config: RunConfig) -> dict[str, Any]:
    """Options of the method in force at step t = 1, 2, …, by name: those of `[method]`, then those of each phase that has begun.

    `lr` is the peak learning rate times the schedule's factor; options that neither sets are left out.
    """
    settings: dict[str, Any] = {"lr": config.method.lr, **config.method.settings()}
    for phase in config.phase:
        if phase.from_step <= step:
            settings |= phase.settings()
    return {**settings, "lr": settings["lr"] * lr_factor(step, config.train)}


def changes_at(step: int, config: RunConfig) -> dict[str, Any]:
    """What of `settings_at` may differ from step to step: the learning rate, and every option that some phase sets."""
    changing = {"lr"}.union(*(phase.settings() for phase in config.phase))
    return {name: value for name, value in settings_at(step, config).items() if name in changing}


def lr_factor(step: int, train: TrainConfig) -> float:
    """Share of the peak learning rate at step t = 1, 2, …: a linear warm-up, a plateau, and where the schedule falls its last part.

    With `decay_steps` the plateau ends that many steps before the last one (warm-up, stable, decay); without, there is none.
    """
    if step <= train.warmup_steps:
        return step / train.warmup_steps
    begin = train.warmup_steps if train.decay_steps is None else train.steps - train.decay_steps
    if train.schedule == "constant" or step <= begin:
        return 1.0
    way = (step - begin) / (train.steps - begin)
    remaining = 0.5 * (1 + math.cos(math.pi * way)) if train.schedule == "cosine" else 1 - way
    return train.final_lr_fraction + (1 - train.final_lr_fraction) * remaining
