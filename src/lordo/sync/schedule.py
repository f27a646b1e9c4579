"""What is due at step t: pure functions of the step and the settings, so that every worker comes to the same answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What can be averaged, in the order in which it is, and the setting that holds its period.
PERIODS = {
    "exp_avg": "sync_exp_avg_every",
    "exp_avg_sq": "sync_exp_avg_sq_every",
    "error": "sync_error_every",
    "parameters": "sync_every",
}


def period(settings: Mapping[str, Any], what: str) -> int | None:
    """Steps between two averages of `what`; None is never. Moments follow the parameters unless set."""
    own = settings[PERIODS[what]]
    if own is None and what in ("exp_avg", "exp_avg_sq"):
        return int(settings["sync_every"])
    return None if own is None else int(own)


def is_due(settings: Mapping[str, Any], what: str, step: int, fragment: int = 0) -> bool:
    """Whether `what` of the parameters of a fragment is averaged after step t = 1, 2, …"""
    every = period(settings, what)
    return every is not None and (step + _lead(settings, every, fragment)) % every == 0


def num_due(settings: Mapping[str, Any], what: str, steps: int, fragment: int = 0) -> int:
    """How often `what` of a fragment is averaged in the first `steps` steps."""
    every = period(settings, what)
    return 0 if every is None else (steps + _lead(settings, every, fragment)) // every


def last_due(settings: Mapping[str, Any], what: str, step: int, fragment: int) -> int:
    """The last step up to t after which `what` of a fragment was averaged."""
    every = period(settings, what)
    assert every is not None, what
    return step - (step + _lead(settings, every, fragment)) % every


def steps_to_next(settings: Mapping[str, Any], step: int) -> int:
    """Steps from t to the next average of parameters, of any fragment, 1 to K."""
    every = int(settings["sync_every"])
    return min(every - (step + _lead(settings, every, f)) % every for f in range(settings["sync_fragments"]))


def _lead(settings: Mapping[str, Any], every: int, fragment: int) -> int:
    """Steps by which fragment f of P is ahead of the first: f/P of a period."""
    return fragment * every // int(settings["sync_fragments"])
