"""One colour language for every figure, in a light and a dark form.

Shares and magnitudes are drawn on a sequential scale that starts at the colour of the page. Signed
values are drawn on a diverging scale whose middle is zero and, again, the colour of the page. A
pair has one colour wherever it appears in a report. A cell without a value is none of these.
"""

from __future__ import annotations

import math
from typing import Literal

Scale = Literal["sequential", "diverging"]

# The sequential scale is "mako" (seaborn, BSD licence): perceptually uniform and safe for colour-
# blind readers. The dark form runs the other way, so that "nothing" always recedes into the page.
SCALES: dict[str, dict[Scale, list[tuple[float, str]]]] = {
    "light": {
        "sequential": [
            (0.0, "#f2f8f4"), (0.15, "#bfe6d4"), (0.35, "#60ceac"), (0.55, "#3497a9"),
            (0.75, "#395d9c"), (0.9, "#382a54"), (1.0, "#160d18"),
        ],
        "diverging": [
            (0.0, "#1d5a93"), (0.25, "#6a9fcb"), (0.45, "#d3e2ee"), (0.5, "#f7f7f5"),
            (0.55, "#f4ddd0"), (0.75, "#df8e69"), (1.0, "#b04323"),
        ],
    },
    "dark": {
        "sequential": [
            (0.0, "#181c20"), (0.1, "#2c2744"), (0.25, "#3c4a82"), (0.45, "#357ba3"),
            (0.65, "#38a9ab"), (0.85, "#73d5b3"), (1.0, "#e4f7ea"),
        ],
        "diverging": [
            (0.0, "#7fb6e8"), (0.25, "#4380b8"), (0.45, "#24384a"), (0.5, "#1c2024"),
            (0.55, "#46301f"), (0.75, "#c76a40"), (1.0, "#f2a37e"),
        ],
    },
}  # fmt: skip

INK = {"light": "#22272c", "dark": "#dfe3e7"}
GRID = {"light": "#e4e6e8", "dark": "#2f353b"}
# Words in the colour of marks; the marks themselves are too pale to be read as text.
MARK_TEXT = {"light": "#9a5510", "dark": "#e8a45c"}
THEME = {"scales": SCALES, "ink": INK, "grid": GRID, "mark": MARK_TEXT}
"""What `figure.js` needs to give a figure its light or its dark form."""
# Legible on either page, so they need no second form.
MISSING = "#9aa1a8"
MARK = "#d9822b"
PASS_THROUGH = "#8b929a"
ACCENT = "#2b6f91"


def pair_color(pair: int) -> str:
    """The colour of a pair, the same in every figure and every report.

    Neighbouring pairs often matter together, so hues step by the golden angle: pairs that are near
    in frequency are far in colour. The colour names a pair and says nothing about its frequency.
    Lightness is even (OKLCH), in the middle, so that lines read on a light and on a dark page.

    Args:
        pair: Index of the pair.

    Returns:
        A colour as `#rrggbb`.
    """
    hue = math.radians((25 + 137.50776 * pair) % 360)
    lightness, chroma = (0.62, 0.145) if pair % 2 else (0.67, 0.125)
    return _oklch(lightness, chroma, hue)


def _oklch(lightness: float, chroma: float, hue: float) -> str:
    """OKLCH to `#rrggbb` (Ottosson 2020), clipped to the sRGB gamut."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(min(max(c, 0.0), 1.0))):02x}" for c in linear)


def _gamma(channel: float) -> float:
    return 12.92 * channel if channel <= 0.0031308 else 1.055 * channel ** (1 / 2.4) - 0.055
