"""A basis that a worker computes by itself, from its own gradient: for the methods whose basis does not come from a synchronisation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lordo.lowrank import leading_subspace, lift, power_iteration, rotate_moments


def local_basis(signal: Tensor, state: dict[str, Tensor], options: dict[str, Any]) -> None:
    """Renew the basis if this method does so now, and carry the moments (and LDAdam's error) over to it.

    Args:
        signal: X (m, n), the gradient with the error if that is fed back.
        state: of this parameter in canonical orientation, before this step is counted.
        options: the parameter group.
    """
    if options["basis_from"] == "sync":
        return
    signal = signal.to(state["basis"].dtype)
    new = _gradient_basis(signal, state, options) if options["basis_from"] == "gradient" else _momentum_basis(signal, state, options)
    if new is None:
        return
    if options["basis_from"] == "momentum" and "error" in state:
        state["error"].add_(_lost_momentum(new, state, options["betas"][0]))
    _install(new, state, options)


def _gradient_basis(signal: Tensor, state: dict[str, Tensor], options: dict[str, Any]) -> Tensor | None:
    """The leading subspace of X at the first step, and then at steps t with (t − offset) divisible by `basis_every`."""
    taken = int(state["step"])
    if taken and (taken + 1 - options["basis_offset"]) % options["basis_every"]:
        return None
    more = {} if taken else {"fresh": options["rank"]}
    return leading_subspace(signal, state["basis"], method=options["basis"], seed=(0, "", taken), **more)


def _momentum_basis(signal: Tensor, state: dict[str, Tensor], options: dict[str, Any]) -> Tensor | None:
    """LDAdam: one block power iteration on ρ Q û + (1−ρ) X, the SVD of X at the first step."""
    taken, rho = int(state["step"]), options["basis_interpolation"]
    if taken == 0:
        return leading_subspace(signal, state["basis"], method="svd")
    mean = state["exp_avg"].to(state["basis"].dtype) / (1 - options["betas"][0] ** taken)
    return power_iteration(state["basis"], mean, signal, share=rho)


def _lost_momentum(new: Tensor, state: dict[str, Tensor], beta1: float) -> Tensor:
    """LDAdam's generalised error β1/(1−β1) · (Q_old u − Q_new Q_newᵀ Q_old u): the momentum that a change of basis drops."""
    momentum = lift(state["basis"], state["exp_avg"].to(new.dtype))
    return (momentum - lift(new, new.mT @ momentum)).mul_(beta1 / (1 - beta1))


def _install(new: Tensor, state: dict[str, Tensor], options: dict[str, Any]) -> None:
    if options["rotate_moments"]:
        u, v = rotate_moments(
            state["exp_avg"].to(new.dtype),
            state["exp_avg_sq"].to(new.dtype),
            state["basis"],
            new,
            betas=options["betas"],
            step=float(state["step"]),
        )
        state["exp_avg"].copy_(u)
        state["exp_avg_sq"].copy_(v)
    state["basis"].copy_(new)
