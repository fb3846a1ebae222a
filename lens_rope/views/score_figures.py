"""Figures of one score split over pairs, and of one head's scores by distance."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from lens_rope.views.colors import PASS_THROUGH, pair_color
from lens_rope.views.downloads import add_table
from lens_rope.views.head_figures import kept_distances, profile_figure
from lens_rope.views.layout import figure
from lens_rope.views.tokens import display_text
from lens_rope.words import number

if TYPE_CHECKING:
    from lens_rope.results import DistanceProfile, ScoreBreakdown


SHOWN_PAIRS = 4
"""Pairs with a curve, or a column in a table by distance, of their own."""


def score_bars(score: ScoreBreakdown) -> go.Figure:
    """What each pair, and what is not rotated, contributes to one score, as bars.

    Args:
        score: One score, split over pairs.
    """
    rope = score.rope
    n_rest = len(rope.pass_components)
    fig = figure(
        height=300,
        label=(
            f"Bars: what each rotary pair contributes to the score of query {score.query} "
            f"“{display_text(score.query_token)}” and key {score.key} "
            f"“{display_text(score.key_token)}” in layer {rope.layer}"
        ),
        title={
            "text": (
                f"layer {rope.layer}: query {score.query} “{_plotly(score.query_token)}”, "
                f"key {score.key} “{_plotly(score.key_token)}”, score {number(score.score)}"
            ),
            "x": 0, "xref": "container", "y": 1, "yref": "container", "yanchor": "top",
            "pad": {"t": 8, "l": 8}, "font": {"size": 13},
        },
        margin={"l": 48, "r": 12, "t": 40, "b": 44},
        xaxis_title="rotary pair (0 turns fastest)",
        yaxis_title="contribution (score units)",
        bargap=0.15,
        showlegend=False,
    )  # fmt: skip
    if rope.n_pairs:
        fig.add_trace(
            go.Bar(
                x=np.arange(rope.n_pairs),
                y=np.asarray(score.contribution, dtype=np.float32),
                marker={"color": [pair_color(pair) for pair in range(rope.n_pairs)]},
                customdata=[
                    [number(length), number(cycles), number(value)]
                    for length, cycles, value in zip(
                        rope.wavelength, rope.cycles, score.contribution, strict=True
                    )
                ],
                hovertemplate=(
                    f"layer {rope.layer} pair %{{x}}<br>contribution %{{customdata[2]}} score "
                    "units<br>wavelength %{customdata[0]} tokens, %{customdata[1]} cycles"
                    "<extra></extra>"
                ),
                name="pairs",
            )
        )
    if n_rest:
        fig.add_trace(
            go.Bar(
                x=[rope.n_pairs + 0.5],
                y=[float(score.pass_through)],
                marker={"color": PASS_THROUGH},
                hovertemplate=(
                    f"layer {rope.layer} pass-through ({n_rest} components that are not rotated)"
                    f"<br>contribution {number(score.pass_through)} score units<extra></extra>"
                ),
                name="pass-through",
            )
        )
        named = list(range(0, rope.n_pairs, max(1, rope.n_pairs // 8)))
        fig.update_xaxes(tickvals=[*named, rope.n_pairs + 0.5], ticktext=[*map(str, named), "none"])
    fig.update_xaxes(showgrid=False, zeroline=False)
    fig.update_yaxes(zeroline=True)
    pairs = [*map(str, range(rope.n_pairs)), *(["pass-through"] if n_rest else [])]
    nothing = [np.nan] if n_rest else []
    return add_table(
        fig,
        f"Score of query {score.query} “{display_text(score.query_token)}” and key {score.key} "
        f"“{display_text(score.key_token)}” by rotary pair",
        {
            "layer": rope.layer,
            "query": score.query,
            "query_token": display_text(score.query_token),
            "key": score.key,
            "key_token": display_text(score.key_token),
            "pair": pairs,
            "wavelength_tokens": [*rope.wavelength, *nothing],
            "contribution_score_units": [
                *score.contribution,
                *([score.pass_through] if n_rest else []),
            ],
        },
    )


def profile_curves(profile: DistanceProfile) -> go.Figure:
    """Mean score at each distance, and the pairs whose mean moves most.

    Args:
        profile: The head's mean contributions by distance.
    """
    return profile_figure(profile, moving_pairs(profile, SHOWN_PAIRS), profile.rope)


def moving_pairs(profile: DistanceProfile, n_pairs: int) -> list[int]:
    """The pairs whose mean contribution changes most over the distances, the largest range first.

    Args:
        profile: The head's mean contributions by distance.
        n_pairs: How many.
    """
    change = np.ptp(np.asarray(profile.mean)[kept_distances(profile)], axis=0)
    return [int(pair) for pair in np.argsort(-change, kind="stable")[:n_pairs]]


def _plotly(token: str) -> str:
    """A token in a text that Plotly reads as markup, in which it knows no escaped quotes."""
    return html.escape(display_text(token), quote=False)
