"""LoRDO in Lightning.

class Model(LightningModule):
    def configure_optimizers(self):
        return lordo.LoRDO(lordo.param_groups(self, rank=64), lr=3e-3, sync_every=32, workers=torch.distributed.group.WORLD)

trainer = Trainer(strategy="ddp", callbacks=[LoRDOCallback()], …)
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lordo.integrations.local_steps import LocalSteps, check, facts


class LoRDOCallback(Callback):
    """Keeps gradients on their worker, lets validation and checkpoints see the mean of the workers' weights, and reports."""

    def __init__(self) -> None:
        """The optimizer is known when training begins."""
        self.steps: LocalSteps | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the optimizer, and keep the DistributedDataParallel wrapper quiet.

        Raises:
            ValueError, TypeError: there are several optimizers, another one, or one that does not fit the trainer's processes.
        """
        if len(trainer.optimizers) != 1:
            raise ValueError(f"LoRDOCallback needs one optimizer; the module configures {len(trainer.optimizers)}")
        self.steps = LocalSteps(check(trainer.optimizers[0], num_processes=trainer.world_size))
        assert trainer.strategy.model is not None
        self.steps.begin(trainer.strategy.model)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Report, where the trainer logs."""
        if self.steps is not None:
            pl_module.log_dict(facts(self.steps.optimizer))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate the mean."""
        if self.steps is not None:
            self.steps.show_mean()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on from this worker's own weights."""
        if self.steps is not None:
            self.steps.show_own()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the mean: every worker prepares a checkpoint, and the first one writes it."""
        if self.steps is not None:
            self.steps.show_mean()
            checkpoint["state_dict"] = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}
            self.steps.show_own()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The model is the mean now."""
        if self.steps is not None:
            self.steps.end()
            self.steps = None
