"""One worker's part of the text, as a stream whose place is one integer."""

import torch
from torch import Tensor

from lordo.trainer.data import stable_hash


class Shard:
    """One worker's own part of the blocks, as a stream that never ends.

    The blocks are shuffled once by the seed and dealt out to the workers like cards. A worker reads all of its part
    once an epoch, each epoch in a new order given by (seed, epoch). Where it stands is one integer, the number of
    blocks it has used; nothing else needs to be saved to resume.

    Args:
        blocks: (num_blocks, sequence_length) of an integer type, the same on every worker.
        worker: this one, from 0 up to, not including, `num_workers`.
        num_workers: how many share the blocks.
        seed: decides the order, the same on every worker.

    Raises:
        ValueError: there is no such worker, or there are fewer blocks than workers.
    """

    def __init__(self, blocks: Tensor, worker: int, num_workers: int, seed: int) -> None:
        """Deal out the blocks and keep this worker's."""
        if not 0 <= worker < num_workers:
            raise ValueError(f"worker = {worker} of {num_workers} does not exist; give one from 0 to {num_workers - 1}")
        if len(blocks) < num_workers:
            raise ValueError(
                f"{len(blocks)} blocks ({blocks.numel()} tokens of training text in all) are too few for {num_workers} "
                "workers; lower workers or data.sequence_length, or give more text"
            )
        self.blocks = blocks
        self.seed = seed
        self.rows = permutation(len(blocks), "deal", seed)[worker::num_workers]
        self._epoch, self._order = 0, self._order_of(0)

    def __len__(self) -> int:
        """Give the number of blocks in an epoch of this worker."""
        return len(self.rows)

    def batch(self, position: int, size: int) -> Tensor:
        """Give the next `size` blocks, (size, sequence_length) int64, after `position` blocks were used.

        The one after it is at `position + size`. A batch may go on into the next epoch.
        """
        if position < 0 or size < 1:
            raise ValueError(f"position = {position} and size = {size}: give a position from 0 on and a size from 1 on")
        rows = [self._row(used) for used in range(position, position + size)]
        return self.blocks[rows].long()

    def _row(self, used: int) -> int:
        epoch, offset = divmod(used, len(self))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        return int(self._order[offset])

    def _order_of(self, epoch: int) -> Tensor:
        return self.rows[permutation(len(self), "epoch", self.seed, epoch)]


def permutation(num: int, *parts: str | int) -> Tensor:
    """Give a random order of `num` things, decided by `parts` alone."""
    return torch.randperm(num, generator=torch.Generator().manual_seed(stable_hash(*parts)))
