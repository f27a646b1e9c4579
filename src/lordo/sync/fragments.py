"""Which parameters are averaged at the same step, when a synchronisation is spread over the period (streaming DiLoCo, arXiv 2501.18512)."""

from __future__ import annotations

from collections.abc import Sequence

from lordo.sync.refresh import spread

Size = tuple[int, tuple[int, ...], str, int]  # elements, shape, dtype, rank (0: full-rank)


def assign_fragments(sizes: Sequence[Size], num_fragments: int) -> list[int]:
    """A fragment for each parameter so that they come out about even: the largest first, to the fragment that has least.

    Parameters of one size are told apart by shape, dtype and rank alone, so that accounts made without names come to the same sums.
    """
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i][0], *sizes[i][1:]))
    fragments = [0] * len(sizes)
    for i, fragment in zip(order, spread([float(sizes[i][0]) for i in order], num_fragments), strict=True):
        fragments[i] = fragment
    return fragments
