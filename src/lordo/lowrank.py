"""Subspaces of a weight matrix: orientation, basis, projection, rotation, overlap.

Pure functions on tensors. Letters: W, Δ (m, n) with m <= n; Q (m, r) orthonormal columns; g, u, v (r, n).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

BasisMethod = Literal["auto", "svd", "subspace"]

# A matrix whose smaller side is above this gets its basis from subspace iteration when the method is "auto":
# an exact decomposition of 2048 x 5632 takes seconds, and a model has dozens of such matrices.
SVD_LIMIT = 128
# Fresh random columns beside the old basis let directions enter that the old basis never touched.
FRESH_COLUMNS = 8
# Multiplications by ΔΔᵀ in one refresh.
ITERATIONS = 2


def canonical(matrix: Tensor) -> Tensor:
    """View a matrix so that it has no more rows than columns: a tall (n, m) one as its (m, n) transpose."""
    return matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix


def canonical_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """Sides (m, n) of a 2-D weight in canonical orientation, m <= n."""
    rows, columns = shape
    return min(rows, columns), max(rows, columns)


def project(basis: Tensor, matrix: Tensor) -> Tensor:
    """Coordinates g = Qᵀ X in the subspace: (m, r), (m, n) -> (r, n)."""
    return basis.mT @ matrix


def lift(basis: Tensor, coordinates: Tensor) -> Tensor:
    """Back to the full space, Q g: (m, r), (r, n) -> (m, n)."""
    return basis @ coordinates


def overlap(first: Tensor, second: Tensor) -> float:
    """Share ‖Q₁ᵀQ₂‖²_F / r that two subspaces have in common: 1 for the same subspace, r/m for random ones."""
    return common_share(first.mT @ second)


def common_share(change: Tensor) -> float:
    """`overlap` from C = Q₁ᵀQ₂, (r, r)."""
    return float(change.square().sum() / change.shape[-1])


def identity_basis(m: int, rank: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """First `rank` coordinate axes (m, r): a basis to hold before any gradient was seen."""
    return torch.eye(m, rank, dtype=dtype, device=device)


def is_usable(matrix: Tensor, *, noise: float = 0.0) -> bool:
    """Whether a matrix can give a basis: every entry finite, and some entry larger than what rounding leaves behind."""
    largest = float(peak(matrix))
    return math.isfinite(largest) and largest > noise


def peak(tensor: Tensor) -> Tensor:
    """Largest absolute value, (); NaN if there is one. Ten times as fast as the norm of that name, which runs on one core."""
    low, high = torch.aminmax(tensor)
    return torch.maximum(-low, high)


def rounding_noise(weight: Tensor, dtype: torch.dtype) -> float:
    """Largest entry that Δ = mean of W − anchor may have by rounding alone, when no worker has moved."""
    return 4 * torch.finfo(dtype).eps * float(peak(weight)) if weight.numel() else 0.0


def leading_subspace(
    matrix: Tensor,
    basis: Tensor,
    *,
    method: BasisMethod = "auto",
    seed: tuple[int, str, int] = (0, "", 0),
    fresh: int = FRESH_COLUMNS,
    noise: float = 0.0,
) -> Tensor | None:
    """Orthonormal basis of the r leading left singular vectors of a matrix.

    Args:
        matrix: (m, n), m <= n; any float dtype, computed in float32 or better.
        basis: (m, r), the present basis: gives r, and the start of the iteration.
        method: "svd" is exact; "subspace" is block power iteration from the present basis, a few matrix products;
            "auto" takes "svd" up to a smaller side of 128.
        seed: (number, parameter name, step) of the private generator of the fresh columns.
        fresh: how many random columns join the present basis at the start of the iteration.
        noise: a matrix without an entry above this counts as zero.

    Returns:
        (m, r) in the dtype of `basis`; None for a matrix that is zero or not finite: the present basis stays then.
    """
    if not is_usable(matrix, noise=noise):
        return None
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    if is_exact(method, matrix.shape[0]):
        return checked(lambda: svd_basis(matrix, basis.shape[-1]), basis)
    return checked(lambda: subspace_basis(WholeGram(matrix), basis.to(matrix.dtype), seed=seed, fresh=fresh), basis)


def is_exact(method: BasisMethod, m: int) -> bool:
    """Whether the basis of a matrix with m rows comes from its exact decomposition."""
    return method == "svd" or (method == "auto" and m <= SVD_LIMIT)


def checked(compute: Callable[[], Tensor], basis: Tensor) -> Tensor | None:
    """A basis that is computed with autocast off, in the dtype of the present one; None where nothing finite comes of it."""
    with torch.autocast(basis.device.type, enabled=False), suppress(LinAlgError):  # it did not converge
        new = compute()
        return new.to(basis.dtype) if bool(torch.isfinite(new).all()) else None
    return None


def svd_basis(matrix: Tensor, rank: int) -> Tensor:
    """Exact r leading left singular vectors: (m, n) -> (m, r)."""
    left: Tensor = torch.linalg.svd(matrix, full_matrices=False)[0]
    return left[:, :rank].contiguous()


class Gram(Protocol):
    """ΔΔᵀ of a matrix Δ (m, n), divided by the square of Δ's largest entry: tiny entries would vanish when squared."""

    def times(self, block: Tensor) -> Tensor:
        """ΔΔᵀ Q: (m, k) -> (m, k)."""

    def within(self, block: Tensor) -> Tensor:
        """QᵀΔΔᵀ Q: (m, k) -> (k, k)."""


class WholeGram:
    """ΔΔᵀ of a matrix that one device has."""

    def __init__(self, matrix: Tensor) -> None:
        """Δ (m, n), finite, not zero."""
        self.matrix, self.scale = matrix, peak(matrix)

    def times(self, block: Tensor) -> Tensor:
        """ΔΔᵀ Q, without forming ΔΔᵀ."""
        return (self.matrix @ (self.matrix.mT @ block).div_(self.scale)).div_(self.scale)

    def within(self, block: Tensor) -> Tensor:
        """(QᵀΔ)(QᵀΔ)ᵀ."""
        small = (block.mT @ self.matrix).div_(self.scale)
        return small @ small.mT


def subspace_basis(
    gram: Gram,
    basis: Tensor,
    *,
    seed: tuple[int, str, int],
    fresh: int = FRESH_COLUMNS,
    iterations: int = ITERATIONS,
) -> Tensor:
    """Leading left singular subspace by warm-started block power iteration and one Rayleigh-Ritz step.

    Args:
        gram: ΔΔᵀ of a matrix (m, n), finite, not zero; asked `iterations` times for `times`, then once for `within`.
        basis: (m, r), where to start.
        seed, fresh: see `leading_subspace`.
        iterations: how many multiplications by ΔΔᵀ.

    Returns:
        (m, r), orthonormal whatever the rank of the matrix (QR completes what power iteration loses).
    """
    m, rank = basis.shape
    block = _orthonormal(torch.cat([basis, _fresh_columns(basis, num_columns(m, rank, fresh) - rank, seed)], dim=1))
    for _ in range(iterations):
        block = _orthonormal(gram.times(block))
    directions: Tensor = torch.linalg.eigh(gram.within(block))[1]  # ascending
    return block @ directions[:, -rank:].flip(-1)


def num_columns(m: int, rank: int, fresh: int = FRESH_COLUMNS) -> int:
    """Columns k of the blocks in an iteration: the present basis and fresh ones, no more than there are rows."""
    return min(rank + fresh, m)


def power_iteration(basis: Tensor, momentum: Tensor, signal: Tensor, *, share: float) -> Tensor | None:
    """One step of block power iteration on B = ρ Q û + (1−ρ) X from Q, without forming B (LDAdam, arXiv 2410.16103).

    B Bᵀ Q = B (Bᵀ Q), and Bᵀ Q = ρ ûᵀ + (1−ρ) Xᵀ Q because QᵀQ = I.

    Args:
        basis: Q (m, r). momentum: û (r, n). signal: X (m, n). share: ρ.

    Returns:
        (m, r), orthonormal columns; None where B is zero or not finite.
    """
    coordinates = share * momentum.mT + (1 - share) * (signal.mT @ basis)  # Bᵀ Q, (n, r)
    if not is_usable(coordinates):
        return None
    coordinates = coordinates / peak(coordinates)
    return _orthonormal(share * (basis @ (momentum @ coordinates)) + (1 - share) * (signal @ coordinates))


def _orthonormal(block: Tensor) -> Tensor:
    orthonormal: Tensor = torch.linalg.qr(block)[0]
    return orthonormal


def _fresh_columns(basis: Tensor, num: int, seed: tuple[int, str, int]) -> Tensor:
    """(m, num) random columns from a generator of their own, drawn on the CPU so that every device agrees."""
    run, name, step = seed
    generator = torch.Generator().manual_seed(zlib.crc32(f"{run}/{name}/{step}".encode()))
    columns = torch.randn(basis.shape[0], num, generator=generator, dtype=torch.float64, device="cpu")
    return columns.to(basis.device, basis.dtype)


def rotate_moments(
    exp_avg: Tensor, exp_avg_sq: Tensor, old: Tensor, new: Tensor, *, betas: tuple[float, float], step: float
) -> tuple[Tensor, Tensor]:
    """Carry both moments from one basis to another (LDAdam, arXiv 2410.16103).

    With C = Q_newᵀ Q_old and c_i = 1 − β_iᵗ:  u' = C u,
    v' = c2 |(C∘C) max(v/c2 − (u/c1)², 0) + (C u/c1)²|:  variances rotate, means rotate, squares are put back together.

    Args:
        exp_avg: u, (r, n). exp_avg_sq: v, (r, n).
        old, new: (m, r), orthonormal columns.
        betas: decay rates of the moments. step: t, this parameter's own steps; at 0 both moments are returned as given.

    Returns:
        u', v', both (r, n), v' >= 0.
    """
    return change_basis(exp_avg, exp_avg_sq, new.mT @ old, betas=betas, step=step)


def change_basis(exp_avg: Tensor, exp_avg_sq: Tensor, change: Tensor, *, betas: tuple[float, float], step: float) -> tuple[Tensor, Tensor]:
    """`rotate_moments` with C = Q_newᵀ Q_old, (r, r), already formed."""
    if step == 0:
        return exp_avg, exp_avg_sq
    c1, c2 = (1 - beta**step for beta in betas)
    # no more than three of the moments' size are alive at once
    variance = (exp_avg_sq / c2).sub_((exp_avg / c1).square_()).clamp_(min=0)
    rotated = change @ exp_avg
    rotated_sq = change.square() @ variance
    del variance
    rotated_sq.add_((rotated / c1).square_()).abs_().mul_(c2)
    return rotated, rotated_sq
