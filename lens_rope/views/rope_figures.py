"""Figures of the rotation itself: cycles over the context, and what a distance does to a pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from lens_rope.errors import InputError
from lens_rope.spec import ranges
from lens_rope.views.cells import PAIR_AXIS, pair_cells, partial_line, stacked
from lens_rope.views.colors import MARK, MARK_TEXT, pair_color
from lens_rope.views.downloads import add_table, pair_columns
from lens_rope.views.layout import color_axis, figure, log_ticks, map_height
from lens_rope.words import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lens_rope.spec import LayerRope


def cycles_curve(ropes: Sequence[LayerRope]) -> go.Figure:
    """Turns over the effective context, one curve per distinct rotation, pairs as points.

    Args:
        ropes: One rotation per layer.
    """
    fig = figure(
        height=340,
        label="Cycles over the context of each rotary pair, on a logarithmic axis",
        xaxis_title=PAIR_AXIS,
        yaxis_title="cycles over the context",
        yaxis_type="log",
        showlegend=False,
    )
    fig.update_xaxes(zeroline=False, showgrid=False)
    fig.update_yaxes(dtick=1, zeroline=False)
    lowest, most = 1.0, 1
    for layers, rope in rope_groups(ropes):
        if not rope.n_pairs:
            continue
        lowest, most = min(lowest, float(rope.cycles.min())), max(most, rope.n_pairs)
        pairs = np.arange(rope.n_pairs)
        fig.add_trace(
            go.Scatter(
                x=pairs,
                y=rope.cycles.astype(np.float32),
                mode="lines+markers",
                line={"color": "#8b929a", "width": 1},
                marker={"color": [pair_color(i) for i in range(rope.n_pairs)], "size": 7},
                customdata=[
                    [number(w), number(c)]
                    for w, c in zip(rope.wavelength, rope.cycles, strict=True)
                ],
                hovertemplate=(
                    f"layers {layers}<br>pair %{{x}}<br>wavelength %{{customdata[0]}} tokens<br>"
                    f"%{{customdata[1]}} cycles over {rope.context:,} tokens<extra></extra>"
                ),
                name=f"layers {layers}",
            )
        )
    fig.add_hrect(y0=lowest / 2, y1=1, fillcolor=MARK, opacity=0.12, line_width=0, layer="below")
    fig.add_hline(y=1, line={"color": MARK, "width": 1.5, "dash": "dash"})
    fig.add_annotation(
        x=0, y=0, xref="x", yref="y", text="partial cycles: never a full turn", showarrow=False,
        font={"color": MARK_TEXT["light"]}, xanchor="left", yanchor="top",
    )  # fmt: skip
    fig.update_xaxes(range=[-0.6, most - 0.4])
    rows = [
        (layers, pair, rope.inv_freq[pair], rope.wavelength[pair], rope.cycles[pair], rope.context)
        for layers, rope in rope_groups(ropes)
        for pair in range(rope.n_pairs)
    ]
    names = (
        "layers", "pair", "w_rad_per_token", "wavelength_tokens", "cycles_over_context",
        "context_tokens",
    )  # fmt: skip
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    return add_table(fig, "Cycles of each rotary pair over the context", columns)


def cycles_map(ropes: Sequence[LayerRope]) -> go.Figure:
    """Turns over the effective context of every layer and pair, faint where it is one turn.

    Args:
        ropes: One rotation per layer.
    """
    ropes = tuple(ropes)
    values = stacked([rope.cycles for rope in ropes])
    logs = np.log10(values)
    top = float(np.nanmax(np.abs(logs))) if np.isfinite(logs).any() else 1.0
    fig = figure(
        height=map_height(len(ropes)),
        label="Heat map of cycles over the context by layer and rotary pair",
        xaxis_title=PAIR_AXIS,
    )
    ticks, text = log_ticks(-top, top)
    title = "cycles over the context"
    color_axis(fig, "diverging", title, -top, top, tickvals=ticks, ticktext=text)
    pair_cells(fig, ropes, logs, values, "cycles")
    partial_line(fig, ropes)
    columns = pair_columns(ropes, cycles_over_context=values)
    return add_table(fig, "Cycles over the context by layer and rotary pair", columns)


def rotation_strips(rope: LayerRope, *, n_bins: int = 160) -> go.Figure:
    """What the rotation does to an aligned query and key, for every pair and distance.

    The colour is `cos(w * distance)` averaged within logarithmic bins of distance: warm where a
    pair at this distance still adds, cool where it subtracts, faint where it turns within the bin
    and averages out.

    Args:
        rope: A rotation with at least one pair.
        n_bins: Bins of distance between 1 token and the effective context.

    Raises:
        InputError: The layer has no rotary pairs.
    """
    if not rope.n_pairs:
        raise InputError(f"layer {rope.layer} has no rotary pairs to draw")
    edges = np.geomspace(1, max(rope.context, 2), n_bins + 1)
    width = np.diff(edges)
    phase = rope.inv_freq[:, None] * edges[None, :]
    # The mean of a cosine over a bin in closed form, so that fast pairs fade and do not alias.
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.diff(np.sin(phase)) / (rope.inv_freq[:, None] * width)
    mean = np.where(rope.inv_freq[:, None] > 0, mean, 1.0)
    fig = figure(
        height=map_height(rope.n_pairs),
        label="Mean cosine of the rotation angle by rotary pair and distance",
        xaxis_title="distance between query and key (tokens)",
        yaxis_title=PAIR_AXIS,
        xaxis_type="log",
    )
    color_axis(fig, "diverging", "cos(w · distance), mean in the bin", -1, 1)
    fig.add_trace(
        go.Heatmap(
            x=np.sqrt(edges[1:] * edges[:-1]).astype(np.float32),
            y=np.arange(rope.n_pairs),
            z=mean.astype(np.float32),
            coloraxis="coloraxis",
            customdata=[[number(w)] * n_bins for w in rope.wavelength],
            hovertemplate=(
                "pair %{y}<br>wavelength %{customdata} tokens<br>distance %{x:,.0f} tokens<br>"
                "mean cosine %{z:.2f}<extra></extra>"
            ),
        )
    )
    fig.update_yaxes(range=[rope.n_pairs - 0.5, -0.5], showgrid=False, zeroline=False)
    fig.update_xaxes(showgrid=False, dtick=1, zeroline=False)
    return add_table(
        fig,
        "Mean cosine of the rotation by rotary pair and distance",
        {
            "pair": np.repeat(np.arange(rope.n_pairs), n_bins),
            "wavelength_tokens": np.repeat(rope.wavelength, n_bins),
            "distance_from_tokens": np.tile(edges[:-1], rope.n_pairs),
            "distance_to_tokens": np.tile(edges[1:], rope.n_pairs),
            "mean_cosine": mean.ravel(),
        },
    )


def rope_groups(ropes: Sequence[LayerRope]) -> list[tuple[str, LayerRope]]:
    """Layers that share rotation, window and context, as (`0-3, 7`, the rotation of the first)."""
    groups: list[tuple[list[int], LayerRope]] = []
    for rope in ropes:
        for layers, first in groups:
            if rope.same_rotation(first) and (rope.window, rope.context) == (
                first.window,
                first.context,
            ):
                layers.append(rope.layer)
                break
        else:
            groups.append(([rope.layer], rope))
    return [(ranges(layers), first) for layers, first in groups]
