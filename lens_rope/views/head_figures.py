"""Figures of one head: what each pair contributes, and over which distances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from lens_rope.views.colors import INK, PASS_THROUGH, pair_color
from lens_rope.views.downloads import add_table
from lens_rope.views.layout import figure
from lens_rope.words import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lens_rope.results import DistanceProfile, PairSummary
    from lens_rope.spec import LayerRope

MIN_COUNT = 8
"""Distances that fewer (query, key) pairs of the prompt have are left out: their mean is noise."""


def pair_bars(summary: PairSummary, rope: LayerRope) -> go.Figure:
    """Share of the head's score variance that each pair carries, as bars.

    Args:
        summary: The head's contributions, summed up by pair.
        rope: The layer's rotation.
    """
    fig = figure(
        height=260,
        label="Bars: share of the score variance carried by each rotary pair",
        xaxis_title="rotary pair (0 turns fastest)",
        yaxis_title="share of score variance",
        bargap=0.15,
        showlegend=False,
    )
    pairs = np.arange(rope.n_pairs)
    if rope.n_pairs:
        fig.add_trace(
            go.Bar(
                x=pairs,
                y=np.asarray(summary.share, dtype=np.float32),
                marker={"color": [pair_color(i) for i in range(rope.n_pairs)]},
                customdata=[
                    [number(rope.wavelength[i]), number(summary.share[i]), number(summary.rms[i]),
                     number(summary.mean[i])]
                    for i in pairs
                ],
                hovertemplate=(
                    f"layer {rope.layer} pair %{{x}}<br>wavelength %{{customdata[0]}} tokens<br>"
                    "share %{customdata[1]} of score variance<br>"
                    "contribution: rms %{customdata[2]}, mean %{customdata[3]} score units"
                    "<extra></extra>"
                ),
                name="pairs",
            )
        )  # fmt: skip
    if len(rope.pass_components):
        fig.add_trace(
            go.Bar(
                x=[rope.n_pairs + 0.5],
                y=[float(summary.pass_through_share)],
                marker={"color": PASS_THROUGH},
                hovertemplate=(
                    f"layer {rope.layer} pass-through ({len(rope.pass_components)} components "
                    f"that are not rotated)<br>share {number(summary.pass_through_share)} of score "
                    f"variance<br>contribution: rms {number(summary.pass_through_rms)}, mean "
                    f"{number(summary.pass_through_mean)} score units<extra></extra>"
                ),
                name="pass-through",
            )
        )
        step = max(1, rope.n_pairs // 8)
        fig.update_xaxes(
            tickvals=[*range(0, rope.n_pairs, step), rope.n_pairs + 0.5],
            ticktext=[*map(str, range(0, rope.n_pairs, step)), "none"],
        )
    fig.update_xaxes(showgrid=False, zeroline=False)
    fig.update_yaxes(tickformat=".0%", zeroline=True)
    names = [str(pair) for pair in range(rope.n_pairs)]
    columns = {
        "wavelength_tokens": list(rope.wavelength),
        "share_of_score_variance": list(summary.share),
        "rms_contribution_score_units": list(summary.rms),
        "mean_contribution_score_units": list(summary.mean),
    }
    if len(rope.pass_components):
        names.append("pass-through")
        rest = (
            np.nan, summary.pass_through_share, summary.pass_through_rms, summary.pass_through_mean,
        )  # fmt: skip
        for column, value in zip(columns.values(), rest, strict=True):
            column.append(float(value))
    return add_table(
        fig,
        "Share of the score variance by rotary pair",
        {"layer": rope.layer, "pair": names, **columns},
    )


def distance_curves(
    profile: DistanceProfile,
    summary: PairSummary,
    rope: LayerRope,
    *,
    n_pairs: int = 4,
    min_count: int = MIN_COUNT,
) -> go.Figure:
    """Mean score at each distance, and what the strongest pairs add to it.

    Args:
        profile: The head's mean contributions by distance.
        summary: The head's contributions by pair, which say what is strongest.
        rope: The layer's rotation.
        n_pairs: How many pairs to draw.
        min_count: As for `kept_distances`.
    """
    return profile_figure(profile, strongest_pairs(summary, n_pairs), rope, min_count=min_count)


def profile_figure(
    profile: DistanceProfile,
    pairs: Sequence[int],
    rope: LayerRope,
    *,
    min_count: int = MIN_COUNT,
) -> go.Figure:
    """Mean score at each distance, and what some pairs add to it.

    Args:
        profile: The head's mean contributions by distance.
        pairs: The pairs to draw.
        rope: The layer's rotation.
        min_count: As for `kept_distances`.
    """
    fig = figure(
        height=300,
        label="Curves: mean score by distance, in total and for some of the rotary pairs",
        xaxis_title="distance between query and key (tokens)",
        yaxis_title="mean contribution (score units)",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
    )
    count = np.asarray(profile.count)
    keep = kept_distances(profile, min_count)
    distance = np.asarray(profile.distance)[keep]

    def add(values: np.ndarray, name: str, hover: str, **style: object) -> None:
        fig.add_trace(
            go.Scatter(
                x=distance,
                y=np.asarray(values, dtype=np.float32)[keep],
                mode="lines" if distance.size > 1 else "markers",
                name=name,
                hovertemplate=(
                    f"layer {rope.layer} {hover}<br>distance %{{x}} tokens<br>"
                    "mean %{y:.3g} score units<extra></extra>"
                ),
                **style,
            )
        )

    has_rest = len(rope.pass_components) > 0
    add(
        np.asarray(profile.total), "total",
        "total of all pairs and what is not rotated" if has_rest else "total of all pairs",
        line={"color": INK["light"], "width": 2.2}, meta="ink",
    )  # fmt: skip
    mean = np.asarray(profile.mean)
    # Dashes tell apart what a reader may not be able to tell apart by colour.
    dashes = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
    for rank, pair in enumerate(pairs):
        add(
            mean[:, pair], f"pair {pair}",
            f"pair {pair}, wavelength {number(rope.wavelength[pair])} tokens",
            line={"color": pair_color(pair), "width": 1.8, "dash": dashes[rank % len(dashes)]},
        )  # fmt: skip
    if len(rope.pass_components):
        add(
            np.asarray(profile.pass_through), "pass-through", "pass-through",
            line={"color": PASS_THROUGH, "width": 1.8, "dash": "dot"},
        )  # fmt: skip
    fig.update_yaxes(zeroline=True)
    fig.update_xaxes(zeroline=False, showgrid=False)
    traces: Any = fig.data
    return add_table(
        fig,
        "Mean score by distance",
        {
            "layer": rope.layer,
            "part": [trace.name for trace in traces for _ in distance],
            "distance_tokens": np.tile(distance, len(traces)),
            "query_key_pairs": np.tile(count[keep], len(traces)),
            "mean_score_units": np.concatenate([trace.y for trace in traces]),
        },
    )


def kept_distances(profile: DistanceProfile, min_count: int = MIN_COUNT) -> np.ndarray:
    """`[distance]` Whether a distance has enough pairs to be shown.

    Args:
        profile: The head's mean contributions by distance.
        min_count: Leave out distances with fewer (query, key) pairs, unless none has as many.
    """
    count = np.asarray(profile.count)
    return count >= min(min_count, int(count.max()))


def strongest_pairs(summary: PairSummary, n_pairs: int) -> list[int]:
    """The pairs with the largest root mean square contribution, strongest first."""
    order = np.argsort(-np.asarray(summary.rms), kind="stable")
    return [int(pair) for pair in order[:n_pairs]]
