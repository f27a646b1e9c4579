"""The arithmetic of one local step, piece by piece; each piece is one equation.

Letters: X, W (m, n); Q (m, r); g, u, v, D (r, n); t this parameter's own step. For a weight that is not low-rank
Q is the identity and every tensor has the weight's shape.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

FullrankSignal = Literal["gradient", "gradient+error"]
FullrankDenominator = Literal["mean", "channel"]


def default_omega(sync_every: int) -> float:
    """ω = max(0.9, 1 − 1/K): the error piles up over K steps before a refresh takes it in, so its share shrinks."""
    return max(0.9, 1 - 1 / sync_every)


def update_moments_(exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, *, betas: tuple[float, float]) -> None:
    """u = β1 u + (1−β1) g,  v = β2 v + (1−β2) g∘g, in place."""
    beta1, beta2 = betas
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)


def denominator(exp_avg_sq: Tensor, *, beta2: float, eps: float, step: float) -> Tensor:
    """D = √(v / (1−β2ᵗ)) + ε, a new tensor of the shape of v."""
    return exp_avg_sq.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)


def fullrank_scale(denominator: Tensor, *, over: FullrankDenominator) -> Tensor:
    """μ(D): one mean over all entries, shape (1, 1), or one for each column over the r axis, shape (1, n)."""
    return denominator.mean(dim=(-2, -1) if over == "mean" else -2, keepdim=True)


def lowrank_direction(exp_avg: Tensor, denominator: Tensor, *, beta1: float, step: float) -> Tensor:
    """û / D with û = u / (1−β1ᵗ), a new (r, n) tensor."""
    return exp_avg.div(denominator).div_(1 - beta1**step)
