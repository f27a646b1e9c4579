"""The local step of one low-rank weight.

Letters as in the paper: W weight, G gradient, E error, X = G + E, all (m, n) with m <= n; Q basis (m, r);
g = QᵀX, u, v moments, D denominator (r, n); ω share of the low-rank momentum; μ a mean of D.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lordo.lowrank import canonical, project
from lordo.updates import denominator, fullrank_scale, lowrank_direction, update_moments_


def lowrank_step_(weight: Tensor, gradient: Tensor, state: dict[str, Tensor], options: dict[str, Any]) -> None:
    """W = (1 − lr·wd) W − lr · [ (1−ω) F/μ(D) + ω Q(û/D) ], with the moments and the error updated.

    Nothing of the weight's full size is allocated when weight and gradient have the dtype of the state (float32, float64);
    for lower precision the step is computed in the dtype of the state and rounded once.

    Args:
        weight, gradient: the weight's own shape; the gradient is only read.
        state: of this parameter: step (already counting this step), exp_avg, exp_avg_sq, basis, and error if it is fed back.
        options: the parameter group.
    """
    Q, u, v = state["basis"], state["exp_avg"], state["exp_avg_sq"]
    betas, omega, t = options["betas"], options["omega"], float(state["step"])
    learning_rate = float(options["lr"])
    lr = learning_rate * options["scale"]

    G = canonical(gradient.to(v.dtype))
    work = weight.to(v.dtype)  # the weight itself when the dtype is the state's
    W = canonical(work)
    X = G
    if "error" in state:  # the caller has added the gradient: the error holds X until the end of the step
        X = canonical(state["error"])

    g = project(Q, X)
    update_moments_(u, v, g, betas=betas)
    D = denominator(v, beta2=betas[1], eps=options["eps"], step=t)

    W.mul_(1 - learning_rate * options["weight_decay"])
    direction = lowrank_direction(u, D, beta1=betas[0], step=t).mul_(omega)
    if omega < 1 and options["fullrank_signal"] == "projected":
        direction.addcdiv_(g, D, value=1 - omega)
    elif omega < 1:
        F = G if options["fullrank_signal"] == "gradient" else X
        W.addcdiv_(F, fullrank_scale(D, over=options["fullrank_denominator"]), value=-lr * (1 - omega))
    if "error" in state:
        X.addmm_(Q, g, alpha=-1)
    W.addmm_(Q, direction, alpha=-lr)
    if work is not weight:
        weight.copy_(work)
