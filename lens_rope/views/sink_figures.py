"""Figures of attention sinks: what removing a pair does to them, and which pairs make them."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from lens_rope.bounds import band
from lens_rope.sink_heads import COLLAPSED
from lens_rope.sinks import SINK_THRESHOLD
from lens_rope.views.cells import PAIR_AXIS, add_cells, partial_line, row_axis, stacked
from lens_rope.views.colors import MARK, MISSING
from lens_rope.views.downloads import add_table
from lens_rope.views.layout import color_axis, figure, map_height
from lens_rope.words import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lens_rope.sink_heads import SinkHead

SHARE = "#3497a9"
MAX_ROWS = 60
"""With more sink heads than this `sink_pairs` shows the mean over those of a layer."""


def removal_dots(heads: Sequence[SinkHead]) -> go.Figure:
    """Sink share of each sink head: as it is, without its best pair, and without another pair.

    The last is the control, the median over the other pairs. Heads are ordered by layer, then head.

    Args:
        heads: Sink heads of one model.
    """
    heads = _ordered(heads)
    fig = figure(
        height=360,
        label=(
            "Dots: sink share of each sink head, the share after its best rotary pair is removed, "
            "and the median share after another pair is removed"
        ),
        xaxis_title="sink heads, by layer",
        yaxis_title="sink share",
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
    )
    shares = [(e.share, e.share_without_best, e.control_share) for e in heads]
    size = 9 if len(heads) <= 60 else 7 if len(heads) <= 150 else 5
    x: list[float | None] = []
    y: list[float | None] = []
    for column, values in enumerate(shares):
        known = [value for value in values if np.isfinite(value)]
        if known:
            x += [column, column, None]
            y += [min(known), max(known), None]
    fig.add_trace(
        go.Scatter(
            x=x, y=y, mode="lines", line={"color": MISSING, "width": 1}, opacity=0.6,
            hoverinfo="skip", showlegend=False, name="span",
        )
    )  # fmt: skip
    # Shapes tell the marks apart where colours do not, and the share comes last, on top of a
    # control that is the same.
    marks: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("without another pair (median)", 2,
         {"symbol": "line-ew-open", "size": size + 3, "color": MISSING, "line": {"width": 2}}),
        ("without its best pair", 1, {"symbol": "diamond", "size": size, "color": MARK}),
        ("sink share", 0, {"symbol": "circle", "size": size, "color": SHARE}),
    )  # fmt: skip
    for name, index, marker in marks:
        fig.add_trace(
            go.Scatter(
                x=list(range(len(heads))),
                y=np.array([values[index] for values in shares], dtype=np.float32),
                mode="markers",
                marker=marker,
                # The whole story once, at the mark that every head has, to keep pages small.
                customdata=[
                    _short_hover(entry, name, values[index]) if index else _hover(entry)
                    for entry, values in zip(heads, shares, strict=True)
                ],
                hovertemplate="%{customdata}<extra></extra>",
                name=name,
                legendrank=1000 + index,
            )
        )
    ends = [-0.7, max(len(heads), 1) - 0.3]
    for level, name, dash in (
        (SINK_THRESHOLD, f"sink heads are above {SINK_THRESHOLD:g}", "dash"),
        (COLLAPSED, f"collapsed below {COLLAPSED:g}", "dot"),
    ):
        fig.add_trace(
            go.Scatter(
                x=ends, y=[level, level], mode="lines", hoverinfo="skip", name=name,
                line={"color": MARK, "width": 1.3, "dash": dash}, legendrank=1010,
            )
        )  # fmt: skip
    if not heads:
        _say(fig, "no sink head")
    _layer_axis(fig, heads)
    fig.update_xaxes(range=ends, showgrid=False, zeroline=False)
    fig.update_yaxes(range=[-0.02, 1.02], tickvals=[0, 0.25, 0.5, 0.75, 1], zeroline=False)
    return add_table(
        fig,
        "Sink share with one rotary pair removed",
        {
            "layer": [entry.layer for entry in heads],
            "head": [entry.head for entry in heads],
            "sink_position": [entry.position for entry in heads],
            "sink_share": [float(entry.share) for entry in heads],
            "best_pair": [np.nan if e.best_pair < 0 else float(e.best_pair) for e in heads],
            "sink_share_without_best_pair": [float(values[1]) for values in shares],
            "sink_share_without_another_pair_median": [float(values[2]) for values in shares],
        },
    )


def sink_pairs(heads: Sequence[SinkHead]) -> go.Figure:
    """What each pair adds to the sink's score over that of the other keys, in score units.

    Rows are sink heads, or, with more than `MAX_ROWS` of them, layers, with the mean over the sink
    heads of a layer. A last column holds what is not rotated, where there is any.

    Args:
        heads: Sink heads of one model.
    """
    heads = _ordered(heads)
    by_layer = len(heads) > MAX_ROWS
    groups = [[entry] for entry in heads]
    if by_layer:
        groups = [list(group) for _, group in groupby(heads, key=lambda entry: entry.layer)]
    ropes = [group[0].rope for group in groups]
    pairs = stacked([np.mean([e.advantage.pairs for e in group], axis=0) for group in groups])
    rest: list[float] = [
        float(np.mean([entry.advantage.pass_through for entry in group]))
        if len(group[0].rope.pass_components)
        else np.nan
        for group in groups
    ]
    rest_column = np.array(rest)[:, None]
    n_pairs = pairs.shape[1]
    values = np.hstack([pairs, rest_column]) if np.isfinite(rest_column).any() else pairs
    rows = "mean over the sink heads of a layer" if by_layer else "sink heads"
    title = "advantage of the sink" + (f", {rows}" if by_layer else "")
    fig = figure(
        height=map_height(len(groups)),
        label=(
            f"Heat map of the advantage of the sink by rotary pair; rows: {rows}; partial cycles "
            "lie to the right of the dashed line"
        ),
        xaxis_title=PAIR_AXIS,
        showlegend=False,
    )
    top = float(np.abs(values[np.isfinite(values)]).max(initial=0)) or 1.0
    color_axis(fig, "diverging", f"{title} (score units)", -top, top)
    custom = [
        [
            [_row_name(group, by_layer), _column(group[0], column, n_pairs)]
            for column in range(values.shape[1])
        ]
        for group in groups
    ]
    head = "%{customdata[0]}<br>%{customdata[1]}<br>"
    add_cells(
        fig, values, values, custom, f"{head}advantage %{{text}} score units", f"{head}no value"
    )
    partial_line(fig, ropes)
    names = [str(g[0].layer) if by_layer else f"{g[0].layer}.{g[0].head}" for g in groups]
    row_axis(fig, range(len(groups)), "layer" if by_layer else "layer.head")
    step = max(1, -(-len(names) // 30))
    fig.update_yaxes(tickvals=list(range(len(names)))[::step], ticktext=names[::step])
    fig.update_xaxes(range=[-0.5, values.shape[1] - 0.5], showgrid=False, zeroline=False)
    if values.shape[1] > n_pairs:
        ticks = list(range(0, n_pairs, max(1, n_pairs // 8)))
        fig.update_xaxes(tickvals=[*ticks, n_pairs], ticktext=[*map(str, ticks), "none"])
    if not heads:
        _say(fig, "no sink head")
    width = values.shape[1]
    columns = [*map(str, range(n_pairs)), *(["not rotated"] if width > n_pairs else [])]
    first = [group[0] for group in groups]
    return add_table(
        fig,
        "Advantage of the sink by rotary pair",
        {
            "layer": np.repeat([entry.layer for entry in first], width),
            "heads": np.repeat(
                [f"mean of {len(g)}" if by_layer else str(g[0].head) for g in groups], width
            ),
            "pair": columns * len(groups),
            "advantage_score_units": values.ravel() if groups else [],
        },
    )


def _ordered(heads: Sequence[SinkHead]) -> list[SinkHead]:
    return sorted(heads, key=lambda entry: (entry.layer, entry.head))


def _layer_axis(fig: go.Figure, heads: Sequence[SinkHead]) -> None:
    """Names layers below the middle of their heads, and shades every other layer."""
    ticks: list[float] = []
    names: list[str] = []
    first = 0
    for number_of_layer, (layer, group) in enumerate(groupby(heads, key=lambda e: e.layer)):
        last = first + len(list(group)) - 1
        if number_of_layer % 2:
            fig.add_vrect(
                x0=first - 0.5, x1=last + 0.5, fillcolor=MISSING, opacity=0.1, line_width=0,
                layer="below",
            )  # fmt: skip
        middle = (first + last) / 2
        # Labels keep a distance that lets them be read.
        if not ticks or middle - ticks[-1] >= len(heads) / 32:
            ticks.append(middle)
            names.append(str(layer))
        first = last + 1
    fig.update_xaxes(tickvals=ticks, ticktext=names, tickangle=0)


def _hover(entry: SinkHead) -> str:
    gain, pair = entry.advantage, entry.best_pair
    lines = [
        f"layer {entry.layer} head {entry.head}, sink at position {entry.position}"
        + ("" if entry.same_position else " (most often)"),
        f"sink share {number(entry.share)}",
    ]
    if pair < 0:
        lines.append(f"no rotary pairs<br>advantage {number(gain.total)} score units")
        return "<br>".join(lines)
    lines += [
        f"without pair {pair}: {number(entry.share_without_best)}",
        f"without another pair (median): {number(entry.control_share)}",
        f"pair {pair}: {band(float(entry.rope.cycles[pair]))}, wavelength "
        f"{number(entry.rope.wavelength[pair])} tokens",
        f"advantage {number(gain.pairs[pair])} of {number(gain.total)} score units",
        f"lift {number(gain.lift[pair])}, push {number(gain.push[pair])}",
    ]
    return "<br>".join(lines)


def _short_hover(entry: SinkHead, name: str, share: float) -> str:
    return f"layer {entry.layer} head {entry.head}<br>{name}: {number(share)}"


def _row_name(group: Sequence[SinkHead], by_layer: bool) -> str:
    if not by_layer:
        return f"layer {group[0].layer} head {group[0].head}"
    return f"layer {group[0].layer}, mean of {len(group)} sink heads"


def _column(entry: SinkHead, column: int, n_pairs: int) -> str:
    if column == n_pairs:
        return "components that are not rotated"
    if column >= entry.rope.n_pairs:
        return f"no pair {column}"
    return (
        f"pair {column}, {band(float(entry.rope.cycles[column]))}, wavelength "
        f"{number(entry.rope.wavelength[column])} tokens"
    )


def _say(fig: go.Figure, text: str) -> None:
    """Writes into an empty figure why it is empty."""
    fig.add_annotation(
        x=0.5, y=0.6, xref="paper", yref="paper", text=text, showarrow=False, font={"size": 14}
    )
