"""How each of several reports is drawn and named, the same in every figure and table.

Each has one colour, one dash and one marker, because colour alone must not carry meaning.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

from lens_rope.views.tokens import display_text

# After Okabe and Ito (2008), shifted so that each reads on a light and on a dark page.
COLORS = (
    "#2f7fc1", "#cf5a1f", "#159472", "#b8609c", "#a67c0b", "#3d97c9", "#7b6bc4", "#7b838b",
)  # fmt: skip
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star")
_JOINER = "\u200d"  # what makes several emoji one sign
MAX_LABEL = 44
"""Longer names are cut in the middle; hover and page have them whole."""


@dataclass(frozen=True)
class Style:
    """How one report is drawn, everywhere.

    Attributes:
        color: As `#rrggbb`.
        dash: Plotly's name of the dash.
        symbol: Plotly's name of the marker.
    """

    color: str
    dash: str
    symbol: str


def style(index: int) -> Style:
    """The style of report `index`; the first 48 differ in colour or dash."""
    # Three steps more with each round of colours, so that a colour meets another dash every time.
    step = index + 3 * (index // len(COLORS))
    return Style(
        COLORS[index % len(COLORS)], DASHES[step % len(DASHES)], SYMBOLS[step % len(SYMBOLS)]
    )


_DASH_ARRAYS = {
    "solid": "", "dash": "6 4", "dot": "2 3", "dashdot": "6 3 2 3", "longdash": "10 4",
    "longdashdot": "10 3 2 3",
}  # fmt: skip
_SHAPES = {
    "circle": '<circle cx="18" cy="7" r="4"/>',
    "square": '<rect x="14" y="3" width="8" height="8"/>',
    "diamond": '<path d="M18 2l5 5-5 5-5-5z"/>',
    "triangle-up": '<path d="M18 2l5 9H13z"/>',
    "x": '<path d="M14 3l8 8m0-8l-8 8" stroke-width="3"/>',
    "cross": '<path d="M18 2v10m-5-5h10" stroke-width="3"/>',
    "star": '<path d="M18 1l2 4 4 .5-3 3 .8 4.2-3.8-2-3.8 2 .8-4.2-3-3 4-.5z"/>',
}


def swatch(index: int) -> str:
    """The style of report `index` as a small picture, for tables beside the figures."""
    drawn = style(index)
    return (
        f'<svg class="swatch" width="36" height="14" aria-hidden="true" fill="{drawn.color}" '
        f'stroke="{drawn.color}"><path d="M0 7h36" fill="none" stroke-width="2" '
        f'stroke-dasharray="{_DASH_ARRAYS[drawn.dash]}"/>{_SHAPES[drawn.symbol]}</svg>'
    )


def label(name: str) -> str:
    """A name as Plotly shows it as it is: to it, text can hold markup and templates."""
    shown = plain(name)
    if len(shown) > MAX_LABEL:
        half = MAX_LABEL // 2
        shown = f"{shown[: half - 1]}…{shown[-half:]}"
    return html.escape(shown, quote=False).replace("%{", "&#37;{")


def plain(text: str) -> str:
    """Text on one line, with what cannot be seen spelled out; it still has to be escaped."""
    return "".join(
        char if char.isprintable() or char == _JOINER else display_text(char) for char in text
    )
