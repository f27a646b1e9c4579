"""The algorithm for M workers in one slow function, in float64: the oracle of the other tests.

It shares no line with the library.

    M   workers                          W   weight (m, n), m <= n: a tall one enters as its transpose
    G   gradient (m, n)                  r   rank; a vector, or a matrix with m <= r, is full-rank
    Q   basis (m, r)                     F   full-rank signal (m, n): G, or X
    g   projected gradient (r, n)        D   Adam's denominator (r, n), and μ its mean
    u   first moment of g (r, n)         d   direction (m, n)
    v   second moment of g (r, n)        E   what projection dropped so far (m, n); X = G + E
    Δ   averaged W minus the one before  ω   share of the low-rank momentum

W, u, v and E are lists with one tensor per worker; Q and the anchor are common to all. A full-rank parameter has
g = G and neither Q nor E.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class State:
    """One parameter on one worker after the last step, in the canonical orientation (m <= n)."""

    low_rank: bool
    exp_avg: Tensor
    exp_avg_sq: Tensor
    basis: Tensor | None = None
    error: Tensor | None = None


@dataclass
class Result:
    """What `run` returns; weights are in the orientation they were given in.

    separation: the smallest gap between neighbours among σ_1 … σ_{r+1}, over σ_1, of all matrices a basis was taken
    from; 1 if there was none. Adam divides entry by entry, so a step depends on the singular vectors themselves (up to
    sign) and not on their span alone: where two σ meet, the algorithm is not defined.
    """

    weights: list[list[list[Tensor]]]  # [step][worker][parameter]
    state: list[list[State]]  # [worker][parameter]
    separation: float


def canonical(A: Tensor) -> Tensor:
    """A tall matrix as its transpose, all else as it is."""
    return A.mT if A.dim() == 2 and A.shape[0] > A.shape[1] else A


def mean(tensors: list[Tensor]) -> Tensor:
    """The mean over workers."""
    return torch.stack(tensors).mean(0)


def leading(A: Tensor, r: int) -> tuple[Tensor, float]:
    """The r leading left singular vectors of A (m, r), and how well they are separated (see `Result`)."""
    Q, σ, _ = torch.linalg.svd(A, full_matrices=False)
    return Q[:, :r], ((σ[:r] - σ[1 : r + 1]).min() / σ[0]).item()


def run(
    initial: list[Tensor],  # [parameter], the same on every worker
    gradients: list[list[list[Tensor]]],  # [step][worker][parameter]; the first ones finite and not zero
    *,
    lr: float,
    rank: int,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    omega: float,
    error_feedback: bool,
    fullrank_signal: str,  # "gradient" or "gradient+error"
    fullrank_denominator: str,  # "mean" or "channel"
    sync_every: int,
    sync_exp_avg_every: int,
    sync_exp_avg_sq_every: int,
    sync_error_every: int | None = None,
) -> Result:
    """Train every parameter on M workers with the gradients given, one parameter after the other: they do not meet."""
    M, r, (β1, β2), ω = len(gradients[0]), rank, betas, omega
    weights: list[list[list[Tensor]]] = [[[] for _ in range(M)] for _ in gradients]
    states: list[list[State]] = [[] for _ in range(M)]
    separation = 1.0

    for p, parameter in enumerate(initial):
        anchor = canonical(parameter.double())
        low_rank = anchor.dim() == 2 and r < anchor.shape[0]
        with_error = low_rank and error_feedback
        W, E = [anchor] * M, [torch.zeros_like(anchor)] * M
        moments = torch.zeros(r, anchor.shape[1], dtype=torch.float64) if low_rank else torch.zeros_like(anchor)
        u, v = [moments] * M, [moments] * M

        for t, by_worker in enumerate(gradients, start=1):
            G = [canonical(of_parameter[p].double()) for of_parameter in by_worker]
            c1, c2 = 1 - β1**t, 1 - β2**t
            if low_rank and t == 1:  # first basis
                Q, gap = leading(mean(G), r)
                separation = min(separation, gap)

            # local step
            for i in range(M):
                X = G[i] + E[i] if with_error else G[i]
                g = Q.mT @ X if low_rank else X
                if with_error:
                    E[i] = X - Q @ g
                u[i] = β1 * u[i] + (1 - β1) * g
                v[i] = β2 * v[i] + (1 - β2) * g * g
                û, D = u[i] / c1, (v[i] / c2).sqrt() + eps
                if low_rank:
                    F = {"gradient": G[i], "gradient+error": X}[fullrank_signal]
                    μ = {"mean": D.mean(), "channel": D.mean(0, keepdim=True)}[fullrank_denominator]
                    d = (1 - ω) * F / μ + ω * Q @ (û / D)
                else:
                    d = ((1 - ω) * G[i] + ω * û) / D
                W[i] = (1 - lr * weight_decay) * W[i] - lr * d

            # synchronisation: average, then rotate, then install
            if t % sync_exp_avg_every == 0:
                u = [mean(u)] * M
            if t % sync_exp_avg_sq_every == 0:
                v = [mean(v)] * M
            if sync_error_every is not None and t % sync_error_every == 0:
                E = [mean(E)] * M
            if t % sync_every == 0:
                W = [mean(W)] * M
                Δ, anchor = W[0] - anchor, W[0]
                if low_rank and Δ.isfinite().all() and Δ.any():
                    Q_new, gap = leading(Δ, r)
                    separation = min(separation, gap)
                    C = Q_new.mT @ Q
                    for i in range(M):
                        û = u[i] / c1
                        s = (v[i] / c2 - û * û).clamp(min=0)
                        u[i] = C @ u[i]
                        v[i] = c2 * ((C * C) @ s + (C @ û) ** 2).abs()
                    Q = Q_new

            for i in range(M):
                weights[t - 1][i].append(W[i].mT if W[i].shape != parameter.shape else W[i])

        for i in range(M):
            states[i].append(State(low_rank, u[i], v[i], Q if low_rank else None, E[i] if with_error else None))

    return Result(weights, states, separation)
