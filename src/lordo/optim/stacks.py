"""Small weights of one shape step together: a stack of them takes as many calls as one of them alone.

Stacking copies everything once there and once back, so it pays only where a call costs more than its work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lordo.optim.error import is_rounded
from lordo.optim.lowrank_step import lowrank_step_

# A weight up to this size is stacked with others like it, up to that many elements: their copies are the memory it takes.
SMALL_ELEMENTS = 1 << 14
STACK_ELEMENTS = 1 << 18

# What a step reads and writes of the state, besides the count of steps; the rest belongs to the synchronisation.
_USED = ("exp_avg", "exp_avg_sq", "basis", "error", "error_projection")

Part = tuple[Tensor, Tensor, dict[str, Tensor]]  # weight, gradient, state; of low-rank ones in canonical orientation


def lowrank_steps_(parts: Sequence[Part], options: dict[str, Any]) -> None:
    """The step of `lowrank_step_` for many weights.

    Args:
        parts: weight, gradient and state of each. options: the parameter group of all of them.
    """
    for stack in _stacks(parts):
        if len(stack) == 1:
            lowrank_step_(*stack[0], options)
        else:
            _stacked_step_(stack, options)


def _stacked_step_(stack: list[Part], options: dict[str, Any]) -> None:
    weights = torch.stack([weight for weight, _, _ in stack])
    gradients = torch.stack([gradient for _, gradient, _ in stack])
    states = [state for _, _, state in stack]
    together = {key: torch.stack([state[key] for state in states]) for key in _USED if key in states[0]}
    lowrank_step_(weights, gradients, together | {"step": states[0]["step"]}, options)
    torch._foreach_copy_([weight for weight, _, _ in stack], list(weights.unbind()))
    for key in together.keys() - {"basis"}:
        torch._foreach_copy_([state[key] for state in states], list(together[key].unbind()))


def _stacks(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Large weights one by one; small ones together with those of the same shape, types and number of steps."""
    alike: dict[Any, list[Part]] = {}
    for part in parts:
        weight, gradient, state = part
        # numbers rounded at random draw by their place in a tensor: a stack would draw others
        if weight.numel() > SMALL_ELEMENTS or is_rounded(state) or state["exp_avg"].dtype == torch.bfloat16:
            yield [part]
            continue
        key = (weight.shape, weight.dtype, weight.device, gradient.dtype, state["exp_avg"].shape, float(state["step"]))
        stack = alike.setdefault(key, [])
        stack.append(part)
        if len(stack) * weight.numel() >= STACK_ELEMENTS:
            yield alike.pop(key)
    yield from alike.values()
