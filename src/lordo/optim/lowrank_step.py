"""The local step of one low-rank weight, or of several of one shape at once.

Letters as in the paper: W weight, G gradient, E error, X = G + E, all (m, n) with m <= n; Q basis (m, r);
g = QᵀX, u, v moments, D denominator (r, n); ω share of the low-rank momentum; μ a mean of D.

With an error of the form S = E + Q h (see `error.py`), S holding this step's gradient already, X = S − Q h. Hence g = QᵀS − h, and
what X adds to the step is (1−ω) S/μ less Q times (1−ω) h/μ, which joins ω û/D in one product with Q: two products for each step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lordo.lowrank import project
from lordo.optim.blocks import column_blocks
from lordo.optim.error import decode, encode_, is_rounded
from lordo.optim.rounding import store_
from lordo.updates import denominator, fullrank_scale, lowrank_direction, update_moments_

State = dict[str, Tensor]


class LowRankStep:
    """One step of one weight in its three parts, so that sums over the devices of a worker may come between them.

    Nothing of the weight's full size is allocated: where weight, gradient and state have the dtype of the computation (float32, or
    float64 for float64 weights) they are worked on where they lie, else block by block.

    Attributes:
        scale: 1/μ(D), (1, n) or (1, 1); None without a full-rank term. Known after `learn_`.
        D: √v̂ + ε, (r, n). Known after `learn_`.
    """

    def __init__(self, weight: Tensor, gradient: Tensor, state: State, options: dict[str, Any]) -> None:
        """What the step is about.

        Args:
            weight, gradient: (m, n), or a stack of them, or some of their rows or columns; the gradient is only read.
            state: step (already counting this step), exp_avg, exp_avg_sq, basis, and what `error.py` keeps if the error is fed back, in
                canonical orientation. An error that is not rounded holds X already.
            options: the parameter group.
        """
        self.weight, self.state, self.options = weight, state, options
        self.work = torch.promote_types(weight.dtype, torch.float32)
        self.signal = _Signal(gradient, state, self.work)
        self.scale: Tensor | None = None
        self.D: Tensor
        self._g: Tensor
        self._direction: Tensor

    def coordinates(self) -> Tensor:
        """QᵀX, (r, n), or QᵀS where the error is kept as sums; of some rows, what these add to it."""
        return self.signal.projected()

    def learn_(self, coordinates: Tensor) -> None:
        """Update both moments with what `coordinates` gave, added up over all rows."""
        options = self.options
        self._g = self.signal.gradient_part(coordinates)
        self._direction, self.D = _learn_(self._g, self.state, options, self.work)
        if options["omega"] < 1 and options["fullrank_signal"] == "projected":
            self._direction.addcdiv_(self._g, self.D, value=1 - options["omega"])
        elif options["omega"] < 1:
            self.scale = fullrank_scale(self.D, over=options["fullrank_denominator"]).reciprocal_()

    def apply_(self) -> None:
        """W = (1 − lr·wd) W − lr · [ (1−ω) F/μ(D) + ω Q(û/D) ], and the error."""
        signal, state, scale, direction, options = self.signal, self.state, self.scale, self._direction, self.options
        omega, lr = options["omega"], float(options["lr"]) * options["scale"]
        if scale is not None and signal.before is not None and options["fullrank_signal"] == "gradient+error":
            direction.addcmul_(signal.before, scale, value=omega - 1)
        signal.remember_()

        Q, decay = state["basis"], 1 - float(options["lr"]) * options["weight_decay"]
        for columns in signal.blocks(self.weight):
            W = self.weight[..., columns]
            updated = W.to(self.work)  # the weight itself where it has that dtype
            X = signal.block(columns)
            if decay != 1:
                updated.mul_(decay)
            if scale is not None:
                F = signal.gradient[..., columns].to(self.work) if options["fullrank_signal"] == "gradient" else X
                updated.addcmul_(F, scale if scale.shape[-1] == 1 else scale[..., columns], value=-lr * (1 - omega))
            _add_product_(updated, Q, direction[..., columns], factor=-lr)
            if updated.dtype != W.dtype:
                W.copy_(updated)
            signal.keep_(columns, X, self._g)


def lowrank_step_(weight: Tensor, gradient: Tensor, state: State, options: dict[str, Any]) -> None:
    """The step of a weight (or a stack of them) that one device has all of; see `LowRankStep`."""
    step = LowRankStep(weight, gradient, state, options)
    step.learn_(step.coordinates())
    step.apply_()


def _learn_(g: Tensor, state: State, options: dict[str, Any], work: torch.dtype) -> tuple[Tensor, Tensor]:
    """Update both moments with g; returns ω û/D and D, new (r, n) tensors."""
    betas, t = options["betas"], state["step"]
    u, v = state["exp_avg"].to(work), state["exp_avg_sq"].to(work)
    update_moments_(u, v, g, betas=betas)
    D = denominator(v, beta2=betas[1], eps=options["eps"], step=float(t))
    direction = lowrank_direction(u, D, beta1=betas[0], step=float(t)).mul_(options["omega"])
    if state["exp_avg"].dtype != work:
        store_(state["exp_avg"], u, int(t))
        store_(state["exp_avg_sq"], v, int(t) + 1)
    return direction, D


class _Signal:
    """X = G + E of one weight, in whatever form E is held.

    Attributes:
        gradient: G, (m, n). before: h before this step, where the error keeps S and h apart.
    """

    def __init__(self, gradient: Tensor, state: State, work: torch.dtype) -> None:
        self.gradient, self.state, self.work = gradient, state, work
        self.before = state.get("error_projection")
        self.rounded = is_rounded(state)
        self.sums: Tensor | None = None

    def blocks(self, weight: Tensor) -> Any:
        """Slices of columns: one for all, unless something has to be converted."""
        exact = self.work == weight.dtype == self.gradient.dtype and not self.rounded
        return [slice(None)] if exact or not weight.numel() else column_blocks(weight)

    def block(self, columns: slice) -> Tensor:
        """X (or S) of some columns, (m, c)."""
        if self.rounded:
            return decode(self.state, columns, self.work).add_(self.gradient[..., columns])
        held = self.state.get("error", self.gradient)
        return held[..., columns].to(self.work)

    def projected(self) -> Tensor:
        """QᵀX (or QᵀS), (r, n)."""
        Q = self.state["basis"]
        parts = [project(Q, self.block(columns)) for columns in self.blocks(self.gradient)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def gradient_part(self, coordinates: Tensor) -> Tensor:
        """g = QᵀX, (r, n), of what `projected` gave."""
        if self.before is None:
            return coordinates
        self.sums = coordinates
        return coordinates - self.before

    def remember_(self) -> None:
        """h of the next step: the coordinates of S."""
        if self.before is not None and self.sums is not None:
            self.before.copy_(self.sums)

    def keep_(self, columns: slice, X: Tensor, g: Tensor) -> None:
        """E = X − Q g in the columns of a block, unless S and h say it already."""
        if "error" not in self.state or self.before is not None:
            return
        _add_product_(X, self.state["basis"], g[..., columns], factor=-1)
        if self.rounded:
            encode_(self.state, columns, X)


def _add_product_(target: Tensor, first: Tensor, second: Tensor, *, factor: float) -> None:
    """target + factor · first · second, in place, of matrices or of stacks of them."""
    add = target.addmm_ if target.ndim == 2 else target.baddbmm_
    add(first, second, alpha=factor)
