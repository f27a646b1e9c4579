"""Bandwidths as people write them."""

from __future__ import annotations

import re

from lordo.suggest import unknown

BITS = {"bps": 1.0, "kbps": 1e3, "Mbps": 1e6, "Gbps": 1e9, "Tbps": 1e12}


def bandwidth(text: str) -> float:
    """Bits per second of "100Mbps", "1.5 Gbps", …

    Raises:
        ValueError: no number, a number that is not positive, or an unknown unit (with the nearest one).
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(\S+)\s*", text, flags=re.IGNORECASE)
    if not found:
        raise ValueError(f"bandwidth {text!r} is not a number with a unit, such as 100Mbps or 1.5Gbps")
    number, unit = found.groups()
    if unit not in BITS:
        raise ValueError(f"bandwidth {text!r}: {unknown('unit', unit, BITS)}")
    try:
        bits = float(number) * BITS[unit]
    except ValueError:
        raise ValueError(f"bandwidth {text!r}: {number!r} is not a number") from None
    if bits <= 0:
        raise ValueError(f"bandwidth {text!r} must be above zero")
    return bits
