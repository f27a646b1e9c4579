"""The nearest name to a mistyped one, and the sentence that says so."""

from collections.abc import Iterable
from difflib import get_close_matches

SHOWN = 20
"""How many choices a sentence lists before it says how many more there are."""


def nearest(word: str, choices: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """Give the choice most like `word`, upper and lower case being the same, or None when none is as like as asked for (0 to 1)."""
    lowered = {choice.lower(): choice for choice in choices}
    found = get_close_matches(word.lower(), lowered, n=1, cutoff=likeness)
    return lowered[found[0]] if found else None


def listed(choices: Iterable[str]) -> str:
    """List choices, sorted and joined by commas; past the first `SHOWN`, only their number."""
    names = sorted(choices)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def unknown(kind: str, given: str, choices: Iterable[str]) -> str:
    """Say that `given` is no known `kind`: "unknown method 'lordoo'; did you mean 'lordo'? (choices: adamw, lordo)"."""
    names = list(choices)
    close = nearest(given, names)
    hint = f"; did you mean {close!r}?" if close else ""
    return f"unknown {kind} {given!r}{hint} (choices: {listed(names)})"
