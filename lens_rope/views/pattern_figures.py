"""Figures of what heads do: the pattern of each, and how much of its scores offsets make.

Rows are layers, from the first at the top; columns are heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from lens_rope.offset_shares import PARTS
from lens_rope.patterns import PATTERNS
from lens_rope.views.cells import add_cells, row_axis
from lens_rope.views.colors import INK
from lens_rope.views.downloads import add_table
from lens_rope.views.layout import color_axis, figure, map_height
from lens_rope.words import number, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lens_rope.patterns import HeadPattern

# Chosen for the largest smallest distance (OKLab) between any two, seen with normal vision and with
# each of the three dichromacies (Machado et al. 2009), and legible on a light and on a dark page.
# Names that are near in meaning are near in hue.
PATTERN_COLORS = {
    "first occurrence": "#af3219",
    "induction": "#9600e1",
    "duplicate token": "#af7dfa",
    "previous token": "#e16419",
    "sink": "#96c8e1",
    "local": "#faaf64",
    "uniform": "#4b647d",
    "content": "#4b9696",
    "mixed": "rgba(154,161,168,0.22)",
}
"""One colour per pattern, the same in every figure; `mixed` is drawn faintly."""

# Colour alone must not carry meaning.
LETTERS = {
    "first occurrence": "F", "induction": "I", "duplicate token": "D", "previous token": "P",
    "sink": "S", "local": "L", "uniform": "U", "content": "C", "mixed": "",
}  # fmt: skip
UNJUDGED = "rgba(154,161,168,0.34)"
MAX_LETTERED = 80
"""With more heads than this in a layer the letters would not fit into their cells."""


def pattern_map(heads: Sequence[HeadPattern]) -> go.Figure:
    """The pattern of each head, one colour and one letter per name.

    Args:
        heads: The heads of one model, each once.
    """
    layers, columns = _grid(heads)
    fig = figure(
        height=map_height(len(layers)),
        label="Map of the pattern of each attention head by layer and head, with counts",
        xaxis_title="head",
        showlegend=True,
        legend={
            "orientation": "h", "x": 0, "y": 1.01, "xanchor": "left", "yanchor": "bottom",
            "traceorder": "normal",
        },
    )  # fmt: skip
    for name in PATTERNS:
        own = [entry for entry in heads if entry.pattern == name]
        if not own:
            continue
        letter = LETTERS[name] if columns <= MAX_LETTERED else ""
        label = f"{letter} {name}" if letter else name
        _add_category(fig, own, layers, columns, label, PATTERN_COLORS[name], letter)
    unjudged = [entry for entry in heads if entry.pattern is None]
    if unjudged:
        _add_category(fig, unjudged, layers, columns, "× not judged", UNJUDGED, "×")
    _axes(fig, layers, columns)
    best = [(entry.advantage.strongest(1) or [-1])[0] for entry in heads]
    return add_table(
        fig,
        "Pattern of each head by layer and head",
        {
            **_names(heads),
            "pattern": [entry.pattern or "not judged" for entry in heads],
            "also": [", ".join(entry.also) for entry in heads],
            "strength": [float(entry.strength) for entry in heads],
            "base_rate": [float(entry.base_rate) for entry in heads],
            "advantage_score_units": [float(entry.advantage.total) for entry in heads],
            "strongest_pair": [np.nan if pair < 0 else float(pair) for pair in best],
            "strongest_pair_advantage_score_units": [
                np.nan if pair < 0 else float(entry.advantage.pairs[pair])
                for pair, entry in zip(best, heads, strict=True)
            ],
            "entropy_of_1": [float(entry.entropy) for entry in heads],
        },
    )


def offset_share_map(heads: Sequence[HeadPattern]) -> go.Figure:
    """Share of the score variance that query and key offsets alone make, by layer and head.

    The share is of signed products, so it can be slightly negative or above 1; the scale is centred
    on zero and reaches at least from -1 to 1.

    Args:
        heads: The heads of one model, each once.
    """
    layers, columns = _grid(heads)
    values = np.full((len(layers), columns), np.nan)
    custom = [[[str(layer), "", ""] for _ in range(columns)] for layer in layers]
    for entry in heads:
        row = layers.index(entry.layer)
        values[row, entry.head] = entry.offset_shares[0]
        custom[row][entry.head][1:] = _offset_lines(entry)
    seen = np.abs(values[np.isfinite(values)])
    title = "offset·offset share of score variance"
    fig = figure(
        height=map_height(len(layers)),
        label=f"Heat map of the {title} by layer and head, centred on zero",
        xaxis_title="head",
        showlegend=False,
    )
    color_axis(fig, "diverging", title, -1, max(1.0, float(seen.max(initial=0))))
    where = "layer %{customdata[0]} head %{x}<br>"
    add_cells(
        fig, values, values, custom,
        f"{where}offset shares of score variance<br>%{{customdata[1]}}<br>%{{customdata[2]}}",
        f"{where}no value",
    )  # fmt: skip
    _axes(fig, layers, columns)
    shares = {
        f"{part}_share_of_score_variance": [float(entry.offset_shares[i]) for entry in heads]
        for i, part in enumerate(PARTS)
    }
    return add_table(
        fig, "Offset shares of the score variance by layer and head", {**_names(heads), **shares}
    )


def _names(heads: Sequence[HeadPattern]) -> dict[str, list[int]]:
    return {"layer": [entry.layer for entry in heads], "head": [entry.head for entry in heads]}


def _grid(heads: Sequence[HeadPattern]) -> tuple[list[int], int]:
    """The layers, in order, and how many columns the widest of them needs."""
    layers = sorted({entry.layer for entry in heads})
    return layers, max((entry.head for entry in heads), default=0) + 1


def _add_category(
    fig: go.Figure,
    own: Sequence[HeadPattern],
    layers: list[int],
    columns: int,
    name: str,
    color: str,
    letter: str,
) -> None:
    """Adds the cells of the heads of one name, with an entry in the legend."""
    drawn = np.full((len(layers), columns), np.nan)
    text = [[""] * columns for _ in layers]
    custom = [[""] * columns for _ in layers]
    for entry in own:
        row = layers.index(entry.layer)
        drawn[row, entry.head] = 1
        text[row][entry.head] = letter
        custom[row][entry.head] = _hover(entry)
    fig.add_trace(
        go.Heatmap(
            z=drawn.astype(np.float32),
            zmin=0,
            zmax=1,
            text=text,
            texttemplate="%{text}" if letter else None,
            # Plotly chooses dark or light letters by the colour, but does not see through it.
            textfont={"size": 9, **({"color": INK["light"]} if color == UNJUDGED else {})},
            meta="ink" if color == UNJUDGED else None,
            customdata=custom,
            colorscale=[[0, color], [1, color]],
            showscale=False,
            showlegend=True,
            hovertemplate="%{customdata}<extra></extra>",
            hoverongaps=False,
            name=f"{name} ({len(own)})",
            xgap=1,
            ygap=1,
        )
    )


def _hover(entry: HeadPattern) -> str:
    lines = [f"layer {entry.layer} head {entry.head}: {entry.pattern or 'not judged'}"]
    if entry.also:
        lines.append(f"also {', '.join(entry.also)}")
    base = f", base rate {_share(entry.base_rate)}" if np.isfinite(entry.base_rate) else ""
    lines.append(f"strength {_share(entry.strength)}{base}")
    best = entry.advantage.strongest(1)
    if best:
        pair = best[0]
        lines.append(
            f"advantage of {entry.target}: {number(entry.advantage.total)} score units<br>"
            f"most by pair {pair} ({entry.band}, wavelength "
            f"{number(entry.rope.wavelength[pair])} tokens): "
            f"{number(entry.advantage.pairs[pair])}"
        )
    elif not entry.rope.n_pairs:
        lines.append(
            f"advantage of {entry.target}: {number(entry.advantage.total)} score units<br>"
            "no rotary pairs"
        )
    else:
        lines.append(f"advantage of {entry.target}: no value")
    lines += _offset_lines(entry)
    lines.append(f"entropy {number(entry.entropy)} of 1")
    return "<br>".join(lines)


def _offset_lines(entry: HeadPattern) -> list[str]:
    """The four offset shares, in two lines."""
    words = [
        f"{part.replace('_', '·')} {_share(float(value))}"
        for part, value in zip(PARTS, entry.offset_shares, strict=True)
    ]
    return [", ".join(words[:2]), ", ".join(words[2:])]


def _share(value: float) -> str:
    return percent(value) if np.isfinite(value) else "no value"


def _axes(fig: go.Figure, layers: list[int], columns: int) -> None:
    row_axis(fig, layers, "layer")
    fig.update_xaxes(range=[-0.5, columns - 0.5], showgrid=False, zeroline=False)
    if columns <= 24:
        fig.update_xaxes(dtick=1)
