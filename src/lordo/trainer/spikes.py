"""A training loss that jumps: is it out of all proportion to those before it?"""

from __future__ import annotations

from statistics import median

# The losses that a new one is compared with, and how many there must be first.
HISTORY, ENOUGH = 64, 8
# How often a run goes back to one checkpoint before that is an error.
MAX_TIMES_BACK = 3


def is_spike(loss: float, losses: list[float], factor: float) -> bool:
    """Whether a loss is more than `factor` times the median of those before it; if it is not, `losses` takes it in.

    A loss that is not a number is no spike: its gradients are not finite either, and the optimizer leaves the step out by itself.

    Args:
        loss: the new one. losses: at most HISTORY of those before it that were no spikes, oldest first; changed. factor: more than 1.
    """
    if len(losses) >= ENOUGH and loss > factor * median(losses):
        return True
    if loss == loss:
        losses.append(loss)
        del losses[:-HISTORY]
    return False
