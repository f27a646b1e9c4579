"""Evaluation of the averaged model, its work shared by the workers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from lordo.optimizer import DistributedOptimizer
from lordo.shards import local
from lordo.sync.shares import average_

BATCH_SEQUENCES = 32
# Logits held at once, 64 MB in float32: evaluating must not need more memory than training does.
LOGITS_ELEMENTS = 1 << 24


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
            evaluates its part of them, and each of its devices a part of that.
    """
    comm = optimizer.workers
    mine = blocks[comm.rank :: comm.size]
    own = mine[comm.inside.device :: comm.inside.num_devices]
    # devices that share weights must read equally often: who has one block less reads its worker's first one, and does not count it
    lacks = -(-len(mine) // comm.inside.num_devices) - len(own)
    read = torch.cat([own, mine[:lacks]]) if lacks else own
    with averaged_weights(model, optimizer), comm.timed("evaluation"):
        batch_size = min(BATCH_SEQUENCES, sequences_at_once(model, blocks.shape[1]))
        total = float(block_losses(model, read, batch_size)[: len(own)].sum()) if len(read) else 0.0
    parts = comm.gather_all((total, len(own)))
    return Evaluation(sum(total for total, _ in parts) / sum(num for _, num in parts))


def sequences_at_once(model: PreTrainedModel, length: int) -> int:
    """Sequences of `length` tokens whose logits are held at once."""
    return max(1, LOGITS_ELEMENTS // (length * int(model.config.get_text_config().vocab_size)))


@contextmanager
def averaged_weights(model: PreTrainedModel, optimizer: DistributedOptimizer) -> Iterator[None]:
    """Inside, the model has the mean of the workers' weights; afterwards each worker has its own again.

    What is sent for it is counted as "evaluation". One worker's own weights, just before a synchronisation, are not the model.
    """
    stale = optimizer.unaveraged_parameters()
    parts = [local(p.detach()) for _, p in stale]
    own = [part.clone() for part in parts]
    average_([("evaluation", name, part) for (name, _), part in zip(stale, parts, strict=True)], optimizer.workers)
    try:
        yield
    finally:
        if isinstance(model, FSDPModule):
            model.reshard()  # a forward pass without backward leaves weights gathered, and the next one would not look at its parts
        for part, weights in zip(parts, own, strict=True):
            part.copy_(weights)


def validation_loss(model: PreTrainedModel, blocks: Tensor, batch_size: int) -> float:
    """Give the mean next-token cross-entropy of a model, in nats, over all tokens but the first of each block.

    Args:
        model: in any mode; evaluated without dropout, and left as it was.
        blocks: (num_blocks, sequence_length) of any integer type, on any device.
        batch_size: blocks read at once; changes memory and time, and the result by rounding alone.

    Raises:
        ValueError: there is no token to predict, or `batch_size` is less than 1.
    """
    return float(block_losses(model, blocks, batch_size).mean())


@torch.no_grad()
def block_losses(model: PreTrainedModel, blocks: Tensor, batch_size: int) -> Tensor:
    """The mean cross-entropy of each block, (num_blocks,) float64; otherwise as `validation_loss`."""
    num_blocks, length = blocks.shape
    if num_blocks == 0 or length < 2:
        raise ValueError(f"blocks of shape ({num_blocks}, {length}) have no token to predict; give more text")
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size} reads nothing; give at least 1")
    modes = [(module, module.training) for module in model.modules()]
    model.train(False)
    try:
        return torch.cat([_losses(model, batch.to(model.device).long()) for batch in torch.split(blocks, batch_size)])
    finally:
        for module, training in modes:
            module.training = training


def _losses(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The mean cross-entropy over the predicted tokens of each block of a batch (size, sequence_length)."""
    logits = model(input_ids=tokens).logits[:, :-1].float()
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return losses.view(len(tokens), -1).double().mean(dim=1).cpu()
