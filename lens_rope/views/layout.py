"""What all figures share: fonts, axes, colour bars, and how missing values are drawn.

Figures are made in their light form, on white, so that they can be read wherever Plotly shows them
by itself. `layout.meta` names the scale of each colour axis and a trace that follows the text
colour has `meta == "ink"`, so that a page, which shows its own ground through a figure, can give it
its dark form without knowing what it shows.
"""

from __future__ import annotations

import math
from typing import Any

import plotly.graph_objects as go

from lens_rope.views.colors import ACCENT, GRID, INK, MISSING, SCALES, Scale
from lens_rope.words import number

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def figure(*, height: int, label: str, **layout: Any) -> go.Figure:
    """An empty figure in the common style.

    Args:
        height: Height in CSS pixels; the width follows the page.
        label: What the figure shows, in words, for readers who cannot see it.
        **layout: Further layout attributes.
    """
    axis = {
        "gridcolor": GRID["light"], "zerolinecolor": GRID["light"], "linecolor": GRID["light"],
        "tickcolor": GRID["light"], "ticks": "outside", "ticklen": 4, "automargin": True,
        "title": {"standoff": 8},
    }  # fmt: skip
    fig = go.Figure()
    fig.update_layout(
        # Without a template the figure carries its own few settings, not the whole default theme.
        template="none",
        height=height,
        margin={"l": 48, "r": 12, "t": 12, "b": 44},
        paper_bgcolor="#ffffff",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 12, "color": INK["light"]},
        hoverlabel={
            "bgcolor": "#20262c", "bordercolor": "#20262c", "align": "left",
            "font": {"family": FONT, "size": 12, "color": "#f4f6f8"},
        },
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": MISSING, "activecolor": ACCENT},
        xaxis=axis,
        yaxis=axis,
        meta={"label": label, "scales": {}},
    )  # fmt: skip
    fig.update_layout(layout)
    return fig


def color_axis(
    fig: go.Figure, scale: Scale, title: str, low: float, high: float, **colorbar: Any
) -> None:
    """Gives the figure its colour axis, with title and unit on the colour bar above the plot.

    Args:
        fig: The figure.
        scale: `sequential`, or `diverging` around zero.
        title: What the colour means, with its unit.
        low: Value at the lower end (ignored for `diverging`, which is symmetric).
        high: Value at the upper end.
        **colorbar: Further attributes of the colour bar.
    """
    axis: dict[str, Any] = {
        "colorscale": [list(stop) for stop in SCALES["light"][scale]],
        "cmin": -high if scale == "diverging" else low,
        "cmax": high,
        "colorbar": {
            "orientation": "h", "thickness": 10, "len": 1.0, "x": 0, "xanchor": "left", "y": 1.0,
            "yanchor": "bottom", "ypad": 2, "outlinewidth": 0, "ticks": "outside", "ticklen": 3,
            "title": {"text": title, "side": "top"},
            **colorbar,
        },
    }  # fmt: skip
    if scale == "diverging":
        axis["cmid"] = 0
    layout: Any = fig.layout
    meta = dict(layout.meta)
    meta["scales"] = {**meta["scales"], "coloraxis": scale}
    fig.update_layout(coloraxis=axis, meta=meta)


def map_height(n_rows: int, *, extra: int = 150) -> int:
    """Height of a heat map in pixels: rows of even height, within reason."""
    return extra + min(max(n_rows * 13, 60), 640)


def log_ticks(low: float, high: float, *, base: float = 10) -> tuple[list[float], list[str]]:
    """Tick positions on a logarithmic colour axis, and the values to write there.

    Args:
        low: Logarithm of the smallest value.
        high: Logarithm of the largest value.
        base: Base of the logarithm.
    """
    step = max(1, math.ceil((high - low) / 6))
    powers = list(range(math.ceil(low), math.floor(high) + 1, step))
    return [float(p) for p in powers], [number(float(base) ** p) for p in powers]
