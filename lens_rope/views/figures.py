"""Figures of a whole model: usage, attention shares and exactness over layers.

Every function takes results and returns a Plotly figure; nothing is displayed. Rows are layers,
from the first at the top; columns are pairs, from the fastest at the left, or heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import plotly.graph_objects as go

from lens_rope.errors import InputError
from lens_rope.views.cells import (
    PAIR_AXIS,
    add_cells,
    pair_cells,
    partial_line,
    row_axis,
    stacked,
)
from lens_rope.views.colors import MARK, MARK_TEXT
from lens_rope.views.downloads import add_table, cell_columns, pair_columns
from lens_rope.views.layout import color_axis, figure, log_ticks, map_height
from lens_rope.words import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lens_rope.records import LayerCheck
    from lens_rope.sinks import HeadShares
    from lens_rope.spec import LayerRope
    from lens_rope.usage import LayerUsage

Side = Literal["query", "key", "both"]
ShareKind = Literal["sink", "previous"]


def usage_map(
    ropes: Sequence[LayerRope],
    usage: Sequence[LayerUsage],
    side: Side,
    *,
    relative: bool = False,
) -> go.Figure:
    """Mean pair magnitude by layer and pair, on a logarithmic colour scale.

    Args:
        ropes: One rotation per layer.
        usage: The usage of the same layers, in the same order.
        side: Whether to show queries, keys, or the geometric mean of the two.
        relative: Divide each layer by its median over pairs, so that layers of different norm can
            be compared; the scale is then centred on the median.

    Raises:
        InputError: The layers of `ropes` and `usage` differ.
    """
    ropes, usage = tuple(ropes), tuple(usage)
    if [rope.layer for rope in ropes] != [entry.layer for entry in usage]:
        raise InputError("the rotations and the usage are of different layers")
    values = stacked([_magnitude(entry, side) for entry in usage])
    if relative:
        with np.errstate(all="ignore"):
            values = values / _row_median(values)
    name = "query and key" if side == "both" else side
    with np.errstate(divide="ignore"):
        logs = np.where(values > 0, np.log(np.where(values > 0, values, 1.0)), np.nan)
        logs = logs / np.log(2.0 if relative else 10.0)
    seen = logs[np.isfinite(logs)]
    what = "relative to the layer's median" if relative else "in activation units"
    fig = figure(
        height=map_height(len(ropes)),
        label=f"Heat map of {name} magnitude by layer and rotary pair, {what}",
        xaxis_title=PAIR_AXIS,
    )
    if relative:
        top = float(np.abs(seen).max()) if seen.size else 1.0
        ticks, text = log_ticks(-top, top, base=2)
        color_axis(
            fig, "diverging", f"{name} magnitude ÷ layer median", -top, top or 1.0,
            tickvals=ticks, ticktext=[f"{t}×" for t in text],
        )  # fmt: skip
    else:
        low, high = (float(seen.min()), float(seen.max())) if seen.size else (0.0, 1.0)
        ticks, text = _one_two_five(low, high)
        color_axis(
            fig, "sequential", f"mean {name} magnitude of a pair (activation units)", low, high,
            tickvals=ticks, ticktext=text,
        )  # fmt: skip
    unit = "× the layer's median" if relative else "activation units"
    pair_cells(fig, ropes, logs, values, unit, what=f"{name} magnitude")
    partial_line(fig, ropes)
    column = name.replace(" ", "_") + "_magnitude"
    column += "_over_layer_median" if relative else "_activation_units"
    title = f"{name.capitalize()} magnitude by layer and rotary pair"
    return add_table(fig, title, pair_columns(ropes, **{column: values}))


def share_map(
    shares: Sequence[HeadShares], kind: ShareKind, *, threshold: float | None = None
) -> go.Figure:
    """Attention shares by layer and head.

    Args:
        shares: One entry per layer.
        kind: `sink`, the mean attention to the key that receives most, or `previous`, the mean
            attention to the token before.
        threshold: Mark the cells above this share.
    """
    shares = tuple(shares)
    values = stacked([np.asarray(getattr(s, f"{kind}_share"), dtype=np.float64) for s in shares])
    title = (
        "mean attention to the head's strongest key"
        if kind == "sink"
        else "mean attention to the previous token"
    )
    fig = figure(
        height=map_height(len(shares)),
        label=f"Heat map of {title} by layer and head",
        xaxis_title="head",
        showlegend=False,
    )
    color_axis(fig, "sequential", f"{title} (share)", 0, 1, tickvals=[0, 0.25, 0.5, 0.75, 1])
    custom = [
        [
            [entry.layer, int(entry.sink_position[h]) if h < len(entry.sink_position) else -1]
            for h in range(values.shape[1])
        ]
        for entry in shares
    ]
    where = "<br>strongest key at position %{customdata[1]}" if kind == "sink" else ""
    head = "layer %{customdata[0]} head %{x}<br>"
    add_cells(
        fig, values, values, custom, f"{head}share %{{text}} of attention{where}", f"{head}no value"
    )
    if threshold is not None:
        rows, columns = np.nonzero(np.nan_to_num(values) > threshold)
        fig.add_trace(
            go.Scatter(
                x=columns,
                y=rows,
                mode="markers",
                marker={"size": 4.5, "color": MARK, "line": {"width": 0.8, "color": "#fff"}},
                hoverinfo="skip",
                name=f"above {threshold:g}",
            )
        )
    row_axis(fig, [entry.layer for entry in shares], "layer")
    fig.update_xaxes(range=[-0.5, values.shape[1] - 0.5], showgrid=False, zeroline=False)
    if values.shape[1] <= 24:
        fig.update_xaxes(dtick=1)
    shown = {f"{kind}_share": values}
    if kind == "sink":
        positions = [np.asarray(entry.sink_position, dtype=np.float64) for entry in shares]
        shown["strongest_key_position"] = stacked(positions)
    layers = [entry.layer for entry in shares]
    return add_table(
        fig, f"{title.capitalize()} by layer and head", cell_columns(layers, "head", **shown)
    )


def verification_dots(checks: Sequence[LayerCheck], tolerance: float) -> go.Figure:
    """Error of the recomputed scores in every layer, against the largest that is accepted.

    Args:
        checks: One entry per layer, with `layer`, `score` and `route`.
        tolerance: The largest relative error that is accepted.
    """
    # An error of exactly zero has no place on a logarithmic axis; half a float32 step stands in.
    floor = float(np.finfo(np.float32).eps) / 2
    errors = [max(check.score, floor) for check in checks]
    fig = figure(
        height=220,
        label="Relative error of the recomputed attention scores by layer, and the tolerance",
        xaxis_title="layer",
        yaxis_title="relative error",
        yaxis_type="log",
        showlegend=False,
    )
    fig.add_trace(
        go.Scatter(
            x=[check.layer for check in checks],
            y=errors,
            mode="markers",
            marker={"size": 8, "color": "#3497a9"},
            customdata=[[f"{check.score:.1e}", check.route] for check in checks],
            hovertemplate=(
                "layer %{x}<br>relative error %{customdata[0]}<br>route %{customdata[1]}"
                "<extra></extra>"
            ),
        )
    )
    fig.add_hline(y=tolerance, line={"color": MARK, "width": 1.5, "dash": "dash"})
    # On a logarithmic axis shapes take values and annotations take logarithms.
    fig.add_annotation(
        x=1, xref="paper", y=float(np.log10(tolerance)), yref="y", xanchor="right",
        yanchor="bottom", text=f"tolerance {tolerance:.0e}", showarrow=False,
        font={"color": MARK_TEXT["light"]},
    )  # fmt: skip
    low, high = np.log10(min(errors) / 3), np.log10(max(tolerance, *errors) * 3)
    fig.update_yaxes(range=[low, high], dtick=1, exponentformat="power", zeroline=False)
    fig.update_xaxes(zeroline=False, showgrid=False)
    return add_table(
        fig,
        "Relative error of the recomputed scores by layer",
        {
            "layer": [check.layer for check in checks],
            "relative_error": [check.score for check in checks],
            "tolerance": tolerance,
            "route": [check.route for check in checks],
        },
    )


def _magnitude(usage: LayerUsage, side: Side) -> np.ndarray:
    if side != "both":
        return np.asarray(getattr(usage, side), dtype=np.float64)
    return np.sqrt(np.asarray(usage.query, np.float64) * np.asarray(usage.key, np.float64))


def _row_median(values: np.ndarray) -> np.ndarray:
    return np.array(
        [[np.median(row[np.isfinite(row)]) if np.isfinite(row).any() else np.nan] for row in values]
    )


def _one_two_five(low: float, high: float) -> tuple[list[float], list[str]]:
    """Ticks at 1, 2, 5 times powers of ten between two decimal logarithms, at most seven."""
    steps = (1, 2, 5) if high - low < 2.4 else (1,)
    values = [
        step * 10.0**power
        for power in range(int(np.floor(low)), int(np.ceil(high)) + 1)
        for step in steps
        if low <= np.log10(step * 10.0**power) <= high
    ]
    values = values[:: max(1, -(-len(values) // 7))] or [10.0**low]
    return [float(np.log10(v)) for v in values], [number(v) for v in values]
