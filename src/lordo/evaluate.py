"""Evaluation of the averaged model, its work shared by the workers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lordo.methods import DistributedOptimizer
from lordo.models import validation_loss

BATCH_SEQUENCES = 32


@dataclass(frozen=True)
class Evaluation:
    """Mean next-token cross-entropy in nats over the validation blocks."""

    loss: float

    @property
    def perplexity(self) -> float:
        """e to the loss; per byte where tokens are bytes."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_token(self) -> float:
        """The loss in bits; for byte tokens these are bits per byte."""
        return self.loss / math.log(2)


def evaluate(model: PreTrainedModel, optimizer: DistributedOptimizer, blocks: Tensor) -> Evaluation:
    """Validation loss of the mean of the workers' weights; the same value on every worker, weights left as they are.

    Args:
        model: whose parameters `optimizer` trains. blocks: (num_blocks, sequence_length), the same on every worker; each worker
            evaluates its part of them.
    """
    comm = optimizer.workers
    mine = blocks[comm.rank :: comm.size]
    with averaged_weights(optimizer), comm.timed("evaluation"):
        loss = validation_loss(model, mine, BATCH_SEQUENCES) if len(mine) else 0.0
    parts = comm.gather((loss * len(mine), len(mine)))
    return Evaluation(sum(total for total, _ in parts) / sum(num for _, num in parts))


@contextmanager
def averaged_weights(optimizer: DistributedOptimizer) -> Iterator[None]:
    """Inside, the model has the mean of the workers' weights; afterwards each worker has its own again.

    What is sent for it is counted as "evaluation". One worker's own weights, just before a synchronisation, are not the model.
    """
    stale = optimizer.unaveraged_parameters()
    own = [p.detach().clone() for p in stale]
    optimizer.workers.mean_([("evaluation", p.detach()) for p in stale])
    try:
        yield
    finally:
        with torch.no_grad():
            for p, weights in zip(stale, own, strict=True):
                p.copy_(weights)
