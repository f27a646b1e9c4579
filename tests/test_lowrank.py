"""Laws of subspaces: orientation, projection, the leading subspace, rotation of the moments."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common import orthonormal, randn, with_spectrum
from lordo import lowrank
from lordo.lowrank import canonical, canonical_shape, leading_subspace, lift, overlap, power_iteration, project, rotate_moments

pytestmark = pytest.mark.usefixtures("rng_untouched")

GAP = [10.0, 8.0, 6.0, 4.0] + [0.01 / (i + 1) for i in range(16)]  # four directions stand out


def assert_orthonormal(basis: torch.Tensor, *, atol: float = 1e-5) -> None:
    assert basis.isfinite().all()
    torch.testing.assert_close(basis.mT @ basis, torch.eye(basis.shape[1], dtype=basis.dtype), rtol=0, atol=atol)


# -- orientation, projection -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)], ids=str)
def test_canonical_is_a_view_with_no_more_rows_than_columns(shape):
    matrix = randn(*shape)
    view = canonical(matrix)
    assert view.shape == canonical_shape(shape) == (min(shape), max(shape))
    assert view.data_ptr() == matrix.data_ptr()
    assert torch.equal(canonical(view), view)
    assert torch.equal(canonical(matrix.mT.contiguous()), view) or shape[0] == shape[1]


def test_a_square_matrix_keeps_its_orientation():
    matrix = randn(4, 4)
    assert canonical(matrix) is matrix


def test_lift_after_project_is_the_orthogonal_projection():
    Q, X = orthonormal(8, 3, dtype=torch.float64), randn(8, 12, dtype=torch.float64)
    P = lift(Q, project(Q, X))
    torch.testing.assert_close(lift(Q, project(Q, P)), P)
    torch.testing.assert_close(project(Q, X - P), torch.zeros(3, 12, dtype=torch.float64))


def test_overlap_by_hand():
    axes = torch.eye(6)
    assert overlap(axes[:, :2], axes[:, :2]) == 1
    assert overlap(axes[:, :2], axes[:, 2:4]) == 0
    assert overlap(axes[:, :2], axes[:, 1:3]) == 0.5


def test_overlap_does_not_depend_on_the_basis_of_a_subspace_nor_on_the_order():
    first, second, turn = orthonormal(9, 3), orthonormal(9, 3, seed=1), orthonormal(3, 3, seed=2)
    assert overlap(first, first @ turn) == pytest.approx(1, abs=1e-5)
    assert overlap(first, second @ turn) == pytest.approx(overlap(first, second), abs=1e-5)
    assert overlap(first, second) == pytest.approx(overlap(second, first), abs=1e-6)


# -- the leading subspace ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["svd", "subspace"])
@pytest.mark.parametrize("start", ["axes", "random", "orthogonal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leading_subspace_is_that_of_the_svd_where_there_is_a_spectral_gap(method, start, dtype):
    matrix = with_spectrum(GAP, 40, 60, dtype=dtype)
    left = torch.linalg.svd(matrix.double())[0]
    starts = {"axes": torch.eye(40, 4), "random": orthonormal(40, 4, seed=9), "orthogonal": left[:, -4:]}
    basis = leading_subspace(matrix, starts[start].to(dtype), method=method)
    assert basis.dtype == dtype
    assert_orthonormal(basis)
    assert overlap(basis.double(), left[:, :4]) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("method", ["svd", "subspace"])
def test_the_columns_are_the_singular_vectors_largest_first(method):
    matrix = with_spectrum(GAP, 40, 60, dtype=torch.float64)
    left = torch.linalg.svd(matrix)[0][:, :4]
    basis = leading_subspace(matrix, orthonormal(40, 4, seed=9, dtype=torch.float64), method=method)
    torch.testing.assert_close((basis.mT @ left).abs(), torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-4)


def test_auto_is_exact_up_to_the_limit_and_iterates_above_it():
    for m in (lowrank.SVD_LIMIT, lowrank.SVD_LIMIT + 1):
        matrix, start = randn(m, m + 4), torch.eye(m, 3)
        by_method = {method: leading_subspace(matrix, start, method=method) for method in ("auto", "svd", "subspace")}
        assert torch.equal(by_method["auto"], by_method["svd" if m == lowrank.SVD_LIMIT else "subspace"])
        assert not torch.equal(by_method["svd"], by_method["subspace"])


@pytest.mark.parametrize("method", ["svd", "subspace"])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize("rank", [1, 4, 19])
def test_tiny_and_huge_matrices_have_the_same_subspace(method, scale, rank):
    matrix, start = with_spectrum([2.0**-i for i in range(20)], 20, 30), orthonormal(20, rank, seed=5)
    basis = leading_subspace(matrix * scale, start, method=method)
    assert_orthonormal(basis)
    if rank < 19:  # ΔΔᵀ squares the singular values: the last ones are below float32's resolution
        assert overlap(basis, leading_subspace(matrix, start, method=method)) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("method", ["svd", "subspace"])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("num_directions", [1, 2, 5])
@pytest.mark.parametrize("shape", [(12, 20), (12, 12)], ids=str)
def test_a_matrix_of_deficient_rank_has_a_finite_orthonormal_basis_that_holds_all_of_it(method, scale, num_directions, shape):
    """Zero-initialised layers and experts without tokens: what there is lies in the basis, the rest is filled up."""
    matrix = with_spectrum([3.0] * num_directions, *shape)
    basis = leading_subspace(matrix * scale, torch.eye(12, 6), method=method)
    assert_orthonormal(basis)
    torch.testing.assert_close(lift(basis, project(basis, matrix)), matrix, rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", ["svd", "subspace"])
def test_one_entry_is_enough(method):
    matrix = torch.zeros(8, 12)
    matrix[5, 7] = -1e-25
    basis = leading_subspace(matrix, torch.eye(8, 2), method=method)
    assert_orthonormal(basis)
    assert basis[5, 0].abs() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("method", ["svd", "subspace", "auto"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_matrix_that_is_not_finite_gives_no_basis(method, bad, dtype):
    start = orthonormal(9, 2)
    for position in range(0, 9 * 37, 41):  # wherever it stands: reductions work on lanes and on remainders
        matrix = randn(9, 37, dtype=dtype)
        matrix.view(-1)[position] = bad
        assert leading_subspace(matrix, start, method=method) is None


def test_a_zero_matrix_gives_no_basis():
    start = orthonormal(9, 2)
    for method in ("svd", "subspace", "auto"):
        assert leading_subspace(torch.zeros(9, 12), start, method=method) is None


@pytest.mark.parametrize("method", ["svd", "subspace"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(method, dtype):
    matrix, start = with_spectrum(GAP, 40, 60, dtype=dtype), torch.eye(40, 4)
    assert torch.equal(leading_subspace(matrix, start, method=method), leading_subspace(matrix.float(), start, method=method))
    assert leading_subspace(matrix, start.to(dtype), method=method).dtype == dtype


@pytest.mark.parametrize("method", ["svd", "subspace"])
def test_autocast_changes_nothing(method):
    matrix, start = randn(20, 30), orthonormal(20, 3)
    plain = leading_subspace(matrix, start, method=method)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(leading_subspace(matrix, start, method=method), plain)


def test_fresh_columns_depend_on_the_seed_alone():
    matrix, start = randn(40, 60), orthonormal(40, 3)
    seeds = [(0, "w", 1), (1, "w", 1), (0, "v", 1), (0, "w", 2)]
    bases = [leading_subspace(matrix, start, method="subspace", seed=seed) for seed in seeds]
    assert torch.equal(bases[0], leading_subspace(matrix, start, method="subspace", seed=seeds[0]))
    assert all(not torch.equal(bases[0], other) for other in bases[1:])


def test_fresh_columns_let_new_directions_in():
    """From a basis orthogonal to the whole matrix nothing is reached without them."""
    matrix = with_spectrum([5.0, 4.0], 10, 14)
    left = torch.linalg.svd(matrix)[0]
    start = left[:, 2:4].contiguous()
    assert overlap(leading_subspace(matrix, start, method="subspace"), left[:, :2]) == pytest.approx(1, abs=1e-4)


def test_warm_start_at_the_answer_stays_there():
    matrix = with_spectrum(GAP, 40, 60)
    left = torch.linalg.svd(matrix)[0][:, :4].contiguous()
    for fresh in (0, 8):
        assert overlap(leading_subspace(matrix, left, method="subspace", fresh=fresh), left) == pytest.approx(1, abs=1e-5)


def test_subspace_iteration_does_not_mind_the_default_device():
    """torch.set_default_device moves what is made without a device: the private generator stays on the CPU, and so must its numbers."""
    matrix, start = randn(20, 30), orthonormal(20, 3)
    plain = leading_subspace(matrix, start, method="subspace")
    with torch.device("meta"):
        assert torch.equal(leading_subspace(matrix, start, method="subspace"), plain)


# -- LDAdam's power iteration ------------------------------------------------------------------------------------------------


def test_power_iteration_is_one_step_on_the_mixture_it_never_forms():
    Q, u, X, rho = orthonormal(10, 3, dtype=torch.float64), randn(3, 14, dtype=torch.float64), randn(10, 14, dtype=torch.float64), 0.9
    B = rho * Q @ u + (1 - rho) * X
    expected = torch.linalg.qr(B @ B.mT @ Q)[0]
    basis = power_iteration(Q, u, X, share=rho)
    assert_orthonormal(basis)
    assert overlap(basis, expected) == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
def test_power_iteration_of_tiny_and_huge_matrices(scale):
    Q, u, X = orthonormal(10, 3), randn(3, 14, seed=1), randn(10, 14, seed=2)
    basis = power_iteration(Q, u * scale, X * scale, share=0.9)
    assert_orthonormal(basis)
    assert overlap(basis, power_iteration(Q, u, X, share=0.9)) == pytest.approx(1, abs=1e-4)


def test_power_iteration_of_nothing_gives_no_basis():
    Q = orthonormal(10, 3)
    assert power_iteration(Q, torch.zeros(3, 14), torch.zeros(10, 14), share=0.9) is None
    assert power_iteration(Q, torch.zeros(3, 14), torch.full((10, 14), math.nan), share=0.9) is None


def test_power_iteration_of_a_rank_one_matrix_is_orthonormal():
    assert_orthonormal(power_iteration(orthonormal(10, 4), torch.zeros(4, 14), with_spectrum([1.0], 10, 14), share=0.5))


# -- rotation of the moments -------------------------------------------------------------------------------------------------

MOMENTS = {"betas": (0.9, 0.99), "step": 7.0}


def moments(r: int, n: int, *, betas, step: int, seed: int = 0, dtype=torch.float32):
    """First and second moment as Adam would hold them after `step` gradients."""
    u, v = torch.zeros(r, n, dtype=torch.float64), torch.zeros(r, n, dtype=torch.float64)
    for t in range(step):
        g = randn(r, n, seed=seed + t, dtype=torch.float64)
        u, v = betas[0] * u + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
    return u.to(dtype), v.to(dtype)


def test_rotation_to_the_same_basis_is_the_identity():
    Q = orthonormal(8, 3)
    u, v = moments(3, 5, betas=(0.9, 0.99), step=7)
    rotated, rotated_sq = rotate_moments(u, v, Q, Q, **MOMENTS)
    torch.testing.assert_close(rotated, u)
    torch.testing.assert_close(rotated_sq, v)


def test_rotation_to_turned_and_swapped_axes_swaps_rows():
    """Q_new = Q times a permutation with signs: the mean follows, the second moment forgets the signs. Exact up to rounding."""
    Q = torch.eye(8, 3, dtype=torch.float64)
    u, v = moments(3, 5, betas=(0.9, 0.99), step=7, dtype=torch.float64)
    new = torch.stack([-Q[:, 2], Q[:, 0], Q[:, 1]], dim=1)
    rotated, rotated_sq = rotate_moments(u, v, Q, new, **MOMENTS)
    torch.testing.assert_close(rotated, torch.stack([-u[2], u[0], u[1]]))
    torch.testing.assert_close(rotated_sq, torch.stack([v[2], v[0], v[1]]))


def test_rotation_by_hand():
    """One axis turned by 45°, one column, β = (0, 0) so that c = 1: mean 2 -> √2; variance 9 − 4 = 5 -> 5/2; v' = 5/2 + 2."""
    old, new = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.5**0.5], [0.5**0.5]])
    rotated, rotated_sq = rotate_moments(torch.tensor([[2.0]]), torch.tensor([[9.0]]), old, new, betas=(0.0, 0.0), step=1)
    assert rotated.item() == pytest.approx(2**0.5)
    assert rotated_sq.item() == pytest.approx(4.5)


@st.composite
def rotations(draw):
    m = draw(st.integers(2, 8))
    r = draw(st.integers(1, m - 1))
    betas = draw(st.sampled_from([(0.9, 0.99), (0.0, 0.9), (0.999, 0.9999), (0.9, 0.9999)]))
    step = draw(st.integers(1, 30))
    seed = draw(st.integers(0, 10**6))
    u, v = moments(r, 6, betas=betas, step=step, seed=seed)
    scale = draw(st.sampled_from([1e-8, 1.0, 1e8]))  # squares stay normal numbers
    return u * scale, v * scale**2, orthonormal(m, r, seed=seed), orthonormal(m, r, seed=seed + 1), {"betas": betas, "step": float(step)}


@given(rotations())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_rotation_projects_the_lifted_mean_and_keeps_the_second_moment_a_second_moment(case):
    u, v, old, new, when = case
    rotated, rotated_sq = rotate_moments(u, v, old, new, **when)
    torch.testing.assert_close(lift(new, rotated), lift(new, project(new, lift(old, u))), rtol=1e-4, atol=1e-5 * float(u.abs().max()))
    assert rotated_sq.isfinite().all()
    assert (rotated_sq >= 0).all()
    c1, c2 = (1 - beta ** when["step"] for beta in when["betas"])
    mean_sq = (rotated / c1).square()
    assert (rotated_sq / c2 >= mean_sq * (1 - 1e-4)).all(), "the second moment fell below the square of the mean"


def test_rotation_is_finite_at_the_first_step_with_the_slowest_decay():
    u, v = moments(3, 5, betas=(0.9999, 0.9999), step=1)
    for tensor in rotate_moments(u, v, orthonormal(8, 3), orthonormal(8, 3, seed=1), betas=(0.9999, 0.9999), step=1):
        assert tensor.isfinite().all()
    assert (rotate_moments(u, v, orthonormal(8, 3), orthonormal(8, 3, seed=1), betas=(0.9999, 0.9999), step=1)[1] >= 0).all()


def test_rotation_leaves_its_arguments_alone():
    u, v = moments(3, 5, betas=(0.9, 0.99), step=7)
    before = u.clone(), v.clone()
    rotate_moments(u, v, orthonormal(8, 3), orthonormal(8, 3, seed=1), **MOMENTS)
    assert torch.equal(u, before[0])
    assert torch.equal(v, before[1])


def test_moments_of_no_steps_are_zero_and_stay_so():
    zeros = torch.zeros(3, 5)
    for tensor in rotate_moments(zeros, zeros, orthonormal(8, 3), orthonormal(8, 3, seed=1), betas=(0.9, 0.99), step=0):
        assert torch.equal(tensor, zeros)
