"""How weights are cut: as torch.chunk does, and as the side that is left of them."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lordo.accounting import Weight, basis_numel, inside_step_bytes, moment_numel
from lordo.optim.shared_steps import LARGEST_BATCH, SMALLEST_BATCH, batches
from lordo.shards import cut_side, span, state_cut


@given(st.integers(0, 40), st.integers(1, 9))
@settings(deadline=None, derandomize=True)
def test_spans_are_the_chunks_of_torch(length, num_parts):
    chunks = [chunk.tolist() for chunk in torch.arange(length).chunk(num_parts)] if length else []
    spans = [span(length, num_parts, part) for part in range(num_parts)]
    assert [list(range(*each)) for each in spans] == chunks + [[]] * (num_parts - len(chunks))


def cut(shape, dim):
    """A weight as a DTensor looks to the functions that only ask how it is cut."""
    placement = SimpleNamespace(dim=dim, is_shard=lambda: True)
    return SimpleNamespace(shape=torch.Size(shape), placements=(placement,))


@pytest.mark.parametrize(
    ("shape", "dim", "side"),
    [((3, 5), 0, "rows"), ((3, 5), 1, "columns"), ((5, 3), 0, "columns"), ((5, 3), 1, "rows"), ((4, 4), 0, "rows"), ((4, 4), 1, "columns")],
)
def test_the_side_that_is_cut_is_told_in_the_canonical_orientation_of_the_whole_weight(shape, dim, side):
    weight = cut(shape, dim)
    assert cut_side(weight) == side
    kept = {"rows": (0, None), "columns": (None, 1)}[side]
    assert (state_cut("basis", weight, lowrank=True), state_cut("exp_avg", weight, lowrank=True)) == kept
    assert state_cut("sent_exp_avg_sq", weight, lowrank=True) == state_cut("error_projection", weight, lowrank=True) == kept[1]
    assert {state_cut(key, weight, lowrank=True) for key in ("error", "anchor", "sent_parameters", "residual")} == {dim}
    assert state_cut("exp_avg", weight, lowrank=False) == dim
    assert state_cut("step", weight, lowrank=True) is None


def test_a_whole_weight_is_cut_nowhere():
    weight = torch.zeros(3, 5)
    assert cut_side(weight) is None
    assert state_cut("error", weight, lowrank=True) is None


@given(st.tuples(st.integers(1, 12), st.integers(1, 12)), st.integers(0, 1), st.integers(1, 5), st.integers(1, 6))
@settings(deadline=None, derandomize=True)
def test_parts_add_up_to_the_whole_where_they_are_cut(shape, dim, shards, rank):
    whole = Weight(shape, rank)
    parts = [Weight(shape, rank, shards=shards, part=part, dim=dim) for part in range(shards)]
    assert sum(part.part_numel for part in parts) == whole.numel
    rows = (dim == 0) == (shape[0] <= shape[1])
    if whole.is_lowrank:
        summed, same = (basis_numel, moment_numel) if rows else (moment_numel, basis_numel)
        assert sum(map(summed, parts)) == summed(whole)
        assert {same(part) for part in parts} == {same(whole)}
    sent = {inside_step_bytes([part]) for part in parts}
    assert sent == {2 * 4 * moment_numel(whole) * (shards - 1) // shards if whole.is_lowrank and rows else 0}


@given(st.lists(st.tuples(st.integers(2, 3000), st.integers(2, 3000)), max_size=9), st.integers(1, 300))
@settings(deadline=None, derandomize=True)
def test_batches_hold_every_weight_once_and_stay_below_one_matrix(shapes, rank):
    weights = [torch.empty(shape, device="meta") for shape in shapes]
    runs = list(batches(weights, rank=rank))
    assert [i for run in runs for i in range(*run.indices(len(weights)))] == list(range(len(weights)))
    for run in runs:
        numel = sum(rank * max(w.shape) for w in weights[run])
        alone = run.stop - run.start == 1
        assert alone or numel <= min(max(max(w.numel() for w in weights) // 6, SMALLEST_BATCH), LARGEST_BATCH)
