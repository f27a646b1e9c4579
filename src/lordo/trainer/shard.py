"""One worker's part of the text, as a stream whose place is one integer."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lordo.trainer.data import stable_hash


class Shard:
    """One worker's own part of the blocks, as a stream that never ends.

    The blocks are shuffled once by the seed and dealt out to the workers like cards. A worker reads all of its part
    once an epoch, each epoch in a new order given by (seed, epoch). Where it stands is one integer, the number of
    blocks it has used; nothing else needs to be saved to resume.

    When the number of workers changes, what each had not read of its epoch is pooled, dealt out again, and read first; then whole
    epochs follow. So no block comes twice, and none is left out, in an epoch that several numbers of workers share.

    Args:
        blocks: (num_blocks, sequence_length) of an integer type, the same on every worker.
        worker: this one, from 0 up to, not including, `num_workers`.
        num_workers: how many share the blocks.
        seed: decides the order, the same on every worker.
        earlier: (number of workers, blocks used by each) before the number changed, oldest first.

    Raises:
        ValueError: there is no such worker, or there are fewer blocks than workers.
    """

    def __init__(self, blocks: Tensor, worker: int, num_workers: int, seed: int, *, earlier: Sequence[tuple[int, int]] = ()) -> None:
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
        self._begin(worker, num_workers, len(earlier), _left_over(blocks, seed, earlier))

    def _begin(self, worker: int, num_workers: int, era: int, left_over: Tensor) -> None:
        """Take this worker's cards: of what is left over from before, and of the whole."""
        self.first = left_over[worker::num_workers]
        self.rows = _dealt(len(self.blocks), self.seed)[worker::num_workers]
        self._era = (era,) if era else ()
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
        if used < len(self.first):
            return int(self.first[used])
        epoch, offset = divmod(used - len(self.first), len(self))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        return int(self._order[offset])

    def _order_of(self, epoch: int) -> Tensor:
        return self.rows[permutation(len(self), "epoch", self.seed, epoch, *self._era)]

    def unread(self, used: int) -> Tensor:
        """Rows of the present epoch that are still to come after `used` blocks; none at an epoch's end."""
        if used <= len(self.first) and len(self.first):
            return self.first[used:]
        epoch, offset = divmod(used - len(self.first), len(self))
        return self._order_of(epoch)[offset:] if offset else self.rows[:0]


def _left_over(blocks: Tensor, seed: int, earlier: Sequence[tuple[int, int]]) -> Tensor:
    """Rows that nobody has read yet of the epochs in which the number of workers last changed."""
    rows = torch.empty(0, dtype=torch.int64)
    for era, (num_workers, used) in enumerate(earlier):
        unread = []
        for worker in range(num_workers):
            shard = Shard(blocks, worker, num_workers, seed)
            shard._begin(worker, num_workers, era, rows)
            unread.append(shard.unread(used))
        rows = torch.cat(unread)
        rows = rows[permutation(len(rows), "deal again", seed, era + 1)]
    return rows


@lru_cache(maxsize=1)
def _dealt(num: int, seed: int) -> Tensor:
    """The order in which blocks are dealt out; kept, since each stretch with another number of workers deals from it."""
    return permutation(num, "deal", seed)


def permutation(num: int, *parts: str | int) -> Tensor:
    """Give a random order of `num` things, decided by `parts` alone."""
    return torch.randperm(num, generator=torch.Generator().manual_seed(stable_hash(*parts)))
