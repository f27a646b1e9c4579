"""A mixture of sources: exact shares, disjoint workers, one integer for a place."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lordo.trainer.mix import Mix, whole_shares
from lordo.trainer.shard import Shard
from lordo.trainer.splits import Part


def part(source: int, num_blocks: int, weight: float) -> Part:
    """Blocks that tell their source and number."""
    return Part(f"s{source}", weight, torch.tensor([[source, number] for number in range(num_blocks)]).view(num_blocks, 2), 0)


PARTS = [part(0, 30, 0.7), part(1, 9, 0.2), part(2, 7, 0.1)]


def test_a_mixture_of_one_source_is_its_shard():
    (one,) = [part(0, 23, 3.0)]
    for worker in range(2):
        assert torch.equal(Mix([one], worker, 2, 5).batch(3, 40), Shard(one.blocks, worker, 2, 5).batch(3, 40))


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=5))
def test_every_round_gives_every_source_its_share(weights):
    turns = whole_shares(weights)
    assert all(turn >= 1 for turn in turns)
    for turn, weight in zip(turns, weights, strict=True):
        assert turn / sum(turns) == pytest.approx(weight / sum(weights), abs=2e-4)
    assert whole_shares([7 * weight for weight in weights]) == turns


def test_shares_are_exact_in_the_long_run():
    mix = Mix(PARTS, 0, 2, seed=1)
    assert len(mix.turns) == 10
    read = mix.batch(0, 1000)
    assert Counter(read[:, 0].tolist()) == {0: 700, 1: 200, 2: 100}
    orders = {tuple(read[i : i + 10, 0].tolist()) for i in range(0, 1000, 10)}
    assert len(orders) > 50  # each round in an order of its own


def test_a_place_is_one_integer():
    whole = Mix(PARTS, 1, 3, seed=4).batch(0, 300)
    mix = Mix(PARTS, 1, 3, seed=4)
    for position, size in ((250, 50), (0, 7), (123, 1), (99, 2)):
        assert torch.equal(mix.batch(position, size), whole[position : position + size])
    assert not torch.equal(Mix(PARTS, 1, 3, seed=5).batch(0, 300), whole)


def test_workers_share_each_source_without_overlap_and_nothing_is_left_out():
    seen = []
    for worker in range(3):
        blocks = [tuple(block) for block in Mix(PARTS, worker, 3, seed=2).batch(0, 600).tolist()]
        own = set(blocks)
        seen.append(own)
        for source, each in enumerate(PARTS):
            times = Counter(block for block in blocks if block[0] == source)
            assert max(times.values()) - min(times.values()) <= 1  # epochs of its own part, one after another
            assert len(times) == len(Shard(each.blocks, worker, 3, 2))
    assert sum(map(len, seen)) == len(set().union(*seen)) == 30 + 9 + 7


def test_a_source_with_fewer_blocks_than_workers_is_named():
    with pytest.raises(ValueError, match=r"s2: 7 blocks \(14 tokens of training text in all\) are too few for 8 workers"):
        Mix(PARTS, 0, 8, seed=0)
