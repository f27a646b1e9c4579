"""The local step of weights that are not low-rank: the same equations with Q = I and an elementwise denominator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lordo.optim.rounding import store_
from lordo.optim.stacks import Part

# Elements handled at once: temporaries stay this small, however large the embedding.
CHUNK_ELEMENTS = 1 << 18


def fullrank_step_(parts: Sequence[Part], options: dict[str, Any]) -> None:
    """W = (1 − lr·wd) W − lr · [ (1−ω) G + ω û ] / D for a list of weights; ω = 1 is AdamW.

    Args:
        parts: weight, gradient and state (step, exp_avg, exp_avg_sq) of each, tensors of one shape.
        options: the parameter group.
    """
    for batch in _batches(parts):
        _foreach_step_(batch, options)


def _foreach_step_(batch: list[Part], options: dict[str, Any]) -> None:
    lr, (beta1, beta2), omega = float(options["lr"]), options["betas"], options["omega"]
    work = [torch.promote_types(weight.dtype, torch.float32) for weight, _, _ in batch]
    u = [state["exp_avg"].to(dtype) for (_, _, state), dtype in zip(batch, work, strict=True)]
    v = [state["exp_avg_sq"].to(dtype) for (_, _, state), dtype in zip(batch, work, strict=True)]
    steps = [float(state["step"]) for _, _, state in batch]
    G = [gradient.to(dtype) for (_, gradient, _), dtype in zip(batch, work, strict=True)]
    W = [weight.to(dtype) for (weight, _, _), dtype in zip(batch, work, strict=True)]

    torch._foreach_lerp_(u, G, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, G, G, 1 - beta2)
    D = torch._foreach_sqrt(v)
    torch._foreach_div_(D, [(1 - beta2**t) ** 0.5 for t in steps])
    torch._foreach_add_(D, options["eps"])

    torch._foreach_mul_(W, 1 - lr * options["weight_decay"])
    if omega < 1:
        torch._foreach_addcdiv_(W, G, D, -lr * (1 - omega))
    torch._foreach_addcdiv_(W, u, D, [-lr * omega / (1 - beta1**t) for t in steps])
    for (weight, _, state), updated, first, second in zip(batch, W, u, v, strict=True):
        if updated is not weight:
            weight.copy_(updated)
        if first is not state["exp_avg"]:
            store_(state["exp_avg"], first, int(state["step"]))
            store_(state["exp_avg_sq"], second, int(state["step"]) + 1)


def _batches(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Cut large weights and gather small ones so that each batch has about CHUNK_ELEMENTS elements."""
    batch: list[Part] = []
    held = 0
    for part in parts:
        for piece in _pieces(part):
            if held and held + piece[0].numel() > CHUNK_ELEMENTS:
                yield batch
                batch, held = [], 0
            batch.append(piece)
            held += piece[0].numel()
    if batch:
        yield batch


def _pieces(part: Part) -> Iterator[Part]:
    weight, gradient, state = part
    tensors = (weight, gradient, state["exp_avg"], state["exp_avg_sq"])
    if weight.numel() <= CHUNK_ELEMENTS or not all(t.is_contiguous() for t in tensors):
        yield part
        return
    for w, g, u, v in zip(*(torch.split(t.view(-1), CHUNK_ELEMENTS) for t in tensors), strict=True):
        yield w, g, {"step": state["step"], "exp_avg": u, "exp_avg_sq": v}
