"""What every trainer that was made for DistributedDataParallel has to be told: gradients stay local, evaluation wants the mean."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lordo.optimizer import DistributedOptimizer
from lordo.sync.shares import average_


class LocalSteps:
    """Keeps a DistributedDataParallel wrapper quiet, and puts the mean of the workers' weights into the model where it is looked at.

    Every worker makes the same calls at the same steps.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        """The optimizer whose weights these are."""
        self.optimizer = optimizer
        self._quiet = ExitStack()
        self._own: list[tuple[Tensor, Tensor]] | None = None

    def begin(self, wrapped: Module) -> None:
        """Enter `no_sync` of the wrapper, if the model has one: it then sends nothing, neither gradients nor buffers, until `end`."""
        if isinstance(wrapped, DistributedDataParallel) and not self.optimizer.method.averages_gradients:
            self._quiet.enter_context(wrapped.no_sync())

    @torch.no_grad()
    def show_mean(self) -> None:
        """Put the mean of the workers' weights into the model, keeping this worker's own; what is sent counts as "evaluation"."""
        if self._own is not None:
            return
        stale = self.optimizer.unaveraged_parameters()
        self._own = [(p, p.detach().clone()) for _, p in stale]
        average_([("evaluation", name, p.detach()) for name, p in stale], self.optimizer.workers)

    @torch.no_grad()
    def show_own(self) -> None:
        """Give this worker its own weights back."""
        for p, weights in self._own or ():
            p.copy_(weights)
        self._own = None

    def end(self) -> None:
        """After the last step: the model keeps the mean, or whatever was loaded over it."""
        if self._own is None:
            self.optimizer.average_parameters()
        self._own = None
        self._quiet.close()


def check(optimizer: object, *, num_processes: int) -> DistributedOptimizer:
    """The optimizer, if it can work in a trainer that runs in so many processes.

    Raises:
        TypeError: it is none of lordo's. ValueError: it trains alone among others, or averages what the trainer averages already.
    """
    if not isinstance(optimizer, DistributedOptimizer):
        raise TypeError(f"the trainer's optimizer must be lordo.LoRDO or lordo.DistributedOptimizer; got {type(optimizer).__name__}")
    if optimizer.method.averages_gradients and optimizer.workers.size > 1:
        raise ValueError(f"method '{optimizer.method.name}' averages gradients, which the trainer does already: build it with workers=None")
    if optimizer.workers.size != num_processes and not optimizer.method.averages_gradients:
        raise ValueError(
            f"the trainer runs in {num_processes} processes, but the optimizer has {optimizer.workers.size} workers: build it with "
            "workers=torch.distributed.group.WORLD, after the trainer's library has started the process group"
        )
    return optimizer


def facts(optimizer: DistributedOptimizer) -> dict[str, float]:
    """What is told in a trainer's log: bytes each worker sent for training, steps to the next synchronisation, skipped steps, overlap."""
    workers = optimizer.workers
    told: Iterable[tuple[str, float | None]] = (
        ("lordo/bytes_sent", workers.bytes_sent() - workers.bytes_sent("evaluation")),
        ("lordo/steps_to_next_sync", optimizer.steps_to_next_sync),
        ("lordo/skipped_steps", optimizer.num_skipped_steps),
        ("lordo/overlap", optimizer.report.overlap),
    )
    return {name: value for name, value in told if value is not None}
