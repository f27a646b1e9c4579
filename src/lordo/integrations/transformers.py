"""LoRDO in the `Trainer` of transformers.

    optimizer = lordo.LoRDO(lordo.param_groups(model, rank=64), lr=3e-3, sync_every=32, workers=torch.distributed.group.WORLD)
    trainer = Trainer(model=model, args=args, optimizers=(optimizer, None), …)
    attach(trainer)
    trainer.train()

`args = TrainingArguments(…)` comes first: it starts the process group. On GPUs, move the model to `args.device` before the optimizer is
built.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lordo.integrations.local_steps import LocalSteps, check, facts
from lordo.optimizer import DistributedOptimizer


def attach(trainer: Trainer) -> None:
    """Let a Trainer that was given one of lordo's optimizers train locally, report, and evaluate and save the mean of the weights.

    Raises:
        TypeError, ValueError: the trainer has another optimizer, or one that does not fit its processes or its device.
    """
    optimizer = check(trainer.optimizer, num_processes=trainer.args.world_size)
    for p in (p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state):
        moment: torch.Tensor = optimizer.state[p]["exp_avg"]
        if moment.device != p.device:
            raise ValueError(
                f"the model is on {p.device}, the optimizer's state on {moment.device}: move the model to args.device before building it"
            )
    trainer.callback_handler.callbacks.insert(0, ReportCallback(optimizer))  # before those that send the log somewhere
    trainer.add_callback(LocalStepsCallback(trainer, optimizer))  # behind the one that decides when to evaluate and save


class ReportCallback(TrainerCallback):
    """Adds to each line of the training log what was sent, skipped and refreshed."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        """The optimizer that is reported on."""
        self.optimizer = optimizer

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Change the line that is about to be sent, and the one that was just kept."""
        logs: dict[str, Any] = kwargs["logs"]
        if "loss" in logs:
            told = facts(self.optimizer)
            logs.update(told)
            state.log_history[-1].update(told)


class LocalStepsCallback(TrainerCallback):
    """Keeps gradients on their worker, and lets evaluation and saving see the mean of the workers' weights."""

    def __init__(self, trainer: Trainer, optimizer: DistributedOptimizer) -> None:
        """The trainer, which has the wrapped model once training begins."""
        self.trainer = trainer
        self.steps = LocalSteps(optimizer)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Keep the wrapper quiet."""
        self.steps.begin(self.trainer.model_wrapped)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Go on from this worker's own weights."""
        self.steps.show_own()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Show the mean, if it is about to be looked at: every worker decides so at the same steps."""
        if control.should_evaluate or control.should_save:
            self.steps.show_mean()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The same where an epoch is what decides."""
        self.on_step_end(args, state, control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The model is the mean now."""
        self.steps.end()
