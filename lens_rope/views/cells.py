"""Heat maps of layers: rows, cells, and how a missing value is drawn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from lens_rope.views.colors import INK, MARK, MISSING
from lens_rope.words import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lens_rope.spec import LayerRope

PAIR_AXIS = "rotary pair (0 turns fastest)"


def add_cells(
    fig: go.Figure,
    values: np.ndarray,
    shown: np.ndarray,
    customdata: list[list[Any]],
    hover: str,
    missing_hover: str,
) -> None:
    """Adds a heat map, and a second one for the cells that have no value.

    Args:
        fig: The figure, with its colour axis set.
        values: `[row, column]` What the colour encodes; nan where there is no value.
        shown: `[row, column]` What the hover text reports as `z`, in its own unit.
        customdata: `[row][column]` What else the hover text reports.
        hover: Hover template of cells with a value; `%{text}` is the shown value.
        missing_hover: Hover template of cells without.
    """
    missing = ~np.isfinite(values)
    text = [
        ["" if gone else number(value) for value, gone in zip(*rows, strict=True)]
        for rows in zip(shown, missing, strict=True)
    ]
    fig.add_trace(
        go.Heatmap(
            z=np.where(missing, np.nan, values).astype(np.float32),
            text=text,
            customdata=customdata,
            coloraxis="coloraxis",
            hovertemplate=hover + "<extra></extra>",
            hoverongaps=False,
            xgap=0.5,
            ygap=0.5,
        )
    )
    if missing.any():
        # A grey that is on no scale, and a cross, because colour alone must not carry meaning.
        fig.add_trace(
            go.Heatmap(
                z=np.where(missing, 1.0, np.nan).astype(np.float32),
                text=[["×" if gone else "" for gone in row] for row in missing],
                texttemplate="%{text}",
                textfont={"color": INK["light"]},
                meta="ink",
                customdata=customdata,
                colorscale=[[0, MISSING], [1, MISSING]],
                showscale=False,
                opacity=0.45,
                hovertemplate=missing_hover + "<extra></extra>",
                hoverongaps=False,
                name="no value",
                xgap=0.5,
                ygap=0.5,
            )
        )


def row_axis(fig: go.Figure, numbers: Sequence[int], title: str) -> None:
    """Labels rows 0, 1, 2, ... from top to bottom with the numbers they stand for."""
    step = max(1, math.ceil(len(numbers) / 16))
    rows = list(range(0, len(numbers), step))
    fig.update_yaxes(
        title_text=title,
        tickvals=rows,
        ticktext=[str(numbers[row]) for row in rows],
        range=[len(numbers) - 0.5, -0.5],
        showgrid=False,
        zeroline=False,
    )


def stacked(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of different length as one array, nan where a row has ended."""
    out = np.full((len(rows), max((len(row) for row in rows), default=0) or 1), np.nan)
    for target, row in zip(out, rows, strict=True):
        target[: len(row)] = row
    return out


def pair_cells(
    fig: go.Figure,
    ropes: Sequence[LayerRope],
    values: np.ndarray,
    shown: np.ndarray,
    unit: str,
    what: str = "",
) -> None:
    """Adds the cells of a layer by pair map, with layers as rows and wavelengths in the hover text.

    Args:
        fig: The figure, with its colour axis set.
        ropes: One rotation per row.
        values: `[layer, pair]` What the colour encodes; nan where a layer has no such pair.
        shown: `[layer, pair]` What the hover text reports, in `unit`.
        unit: Unit of `shown`.
        what: What `shown` is, unless the unit says it.
    """
    custom: list[list[Any]] = [
        [
            [rope.layer, *(map(number, (rope.wavelength[i], rope.cycles[i])))]
            if i < rope.n_pairs
            else [rope.layer, "none", "none"]
            for i in range(values.shape[1])
        ]
        for rope in ropes
    ]
    head = "layer %{customdata[0]} pair %{x}<br>"
    waves = "<br>wavelength %{customdata[1]} tokens<br>%{customdata[2]} cycles over the context"
    if unit == "cycles":
        waves = "<br>wavelength %{customdata[1]} tokens"
    add_cells(
        fig, values, shown, custom,
        f"{head}{what + ' ' if what else ''}%{{text}} {unit}{waves}",
        f"{head}no value",
    )  # fmt: skip
    row_axis(fig, [rope.layer for rope in ropes], "layer")
    fig.update_xaxes(range=[-0.5, values.shape[1] - 0.5], showgrid=False, zeroline=False)


def partial_line(fig: go.Figure, ropes: Sequence[LayerRope]) -> None:
    """Steps along the border between full and partial cycles."""
    x: list[float | None] = []
    y: list[float | None] = []
    for row, rope in enumerate(ropes):
        partial = np.flatnonzero(rope.cycles < 1)
        if partial.size:
            x += [float(partial[0]) - 0.5] * 2
            y += [row - 0.5, row + 0.5]
        elif x:
            x.append(None)
            y.append(None)
    if x:
        fig.add_trace(
            go.Scatter(
                x=x, y=y, mode="lines", line={"color": MARK, "width": 1.5, "dash": "dash"},
                hoverinfo="skip", showlegend=False, name="partial cycles to the right",
            )
        )  # fmt: skip
