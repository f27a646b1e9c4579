"""One worker's part of a mixture of sources, as a stream whose place is one integer."""

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from lordo.trainer.shard import Shard, permutation
from lordo.trainer.splits import Part

WEIGHT_UNITS = 10_000
"""Weights are taken to the nearest ten-thousandth."""


class Mix:
    """A stream of blocks in which sources take turns by weight: one worker's own part of each of them, without an end.

    The turns come in rounds of at most about ten thousand blocks, in each of which every source has its exact share, in an order given
    by (seed, round) and the same on every worker. From each source a worker reads its own `Shard`. Where it stands is one integer, the
    number of blocks it has used. A mixture of one source is that source's shard.

    Args:
        parts: the sources, the same on every worker.
        worker, num_workers, seed: see `Shard`.
        earlier: (number of workers, blocks of all sources used by each) before the number of workers changed, oldest first.

    Raises:
        ValueError: there is no such worker, or a source has fewer blocks than there are workers.
    """

    def __init__(self, parts: Sequence[Part], worker: int, num_workers: int, seed: int, *, earlier: Sequence[tuple[int, int]] = ()) -> None:
        """Take this worker's part of each source."""
        self.turns = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(whole_shares([part.weight for part in parts])))
        self.seed, self.num_sources = seed, len(parts)
        self._round, self._order, self._nth = -1, self.turns, self.turns
        self._begin(0)
        before = [(workers, self.used_of_each(used)) for workers, used in earlier]
        self.shards = [
            _shard(part, worker, num_workers, seed, [(workers, used[i]) for workers, used in before]) for i, part in enumerate(parts)
        ]

    def batch(self, position: int, size: int) -> Tensor:
        """Give the next `size` blocks, (size, sequence_length) int64, after `position` blocks were used."""
        return torch.cat([self.shards[source].batch(used, 1) for source, used in map(self.place, range(position, position + size))])

    def place(self, used: int) -> tuple[int, int]:
        """Give the source of the next block after `used` blocks, and how many blocks of that source came before."""
        number, offset = divmod(used, len(self.turns))
        self._begin(number)
        source = int(self._order[offset])
        return source, number * int((self.turns == source).sum()) + int(self._nth[offset])

    def used_of_each(self, used: int) -> list[int]:
        """Give how many of the first `used` blocks come from each source."""
        number, offset = divmod(used, len(self.turns))
        self._begin(number)
        whole, rest = (torch.bincount(turns, minlength=self.num_sources) for turns in (self.turns, self._order[:offset]))
        return [int(count) for count in number * whole + rest]

    def _begin(self, number: int) -> None:
        """Lay out a round: the source of each turn, and how many turns of that source came before in this round."""
        if number == self._round:
            return
        self._round = number
        self._order = self.turns[permutation(len(self.turns), "mix", self.seed, number)]
        self._nth = torch.empty_like(self._order)
        for source in range(self.num_sources):
            mine = self._order == source
            self._nth[mine] = torch.arange(int(mine.sum()))


def _shard(part: Part, worker: int, num_workers: int, seed: int, earlier: Sequence[tuple[int, int]]) -> Shard:
    try:
        return Shard(part.blocks, worker, num_workers, seed, earlier=earlier)
    except ValueError as error:
        raise ValueError(f"{part.name}: {error}") from error


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Weights as whole numbers without a common divisor, each at least 1: the turns of each source in a round."""
    units = [max(round(WEIGHT_UNITS * weight / sum(weights)), 1) for weight in weights]
    divisor = gcd(*units)
    return [unit // divisor for unit in units]
