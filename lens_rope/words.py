"""Numbers and lists as people write them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percent(share: float) -> str:
    """A share as a percentage that says 0% or 100% only where it is exactly that."""
    if math.isnan(share):
        return "no value"
    if share < 0:
        return "under 0%" if f"{share:.0%}" == "-0%" else f"{share:.0%}"
    if share in (0, 1) or f"{share:.0%}" not in ("0%", "100%"):
        return f"{share:.0%}"
    if share < 0.0005:
        return "under 0.1%"
    return "over 99.9%" if f"{share:.1%}" == "100.0%" else f"{share:.1%}"


def number(value: float) -> str:
    """A number with three significant digits, as people write it."""
    if not math.isfinite(value):
        return "no value" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 999.5:
        return f"{value:,.0f}" if size < 1e7 else f"{value:.2e}"
    if size < 1e-3:
        return f"{value:.1e}"
    digits = max(0, 2 - math.floor(math.log10(size)))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def listed(parts: Sequence[str]) -> str:
    """Several things in a sentence: `a, b and c`."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


BAND_PHRASES = {
    "full cycles": "one of full cycles",
    "partial cycle": "a partial cycle of more than half a turn",
    "below half a cycle": "below half a cycle",
}
"""What a pair of each band (`bounds.BANDS`) is called in a sentence."""
