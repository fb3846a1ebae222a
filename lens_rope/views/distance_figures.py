"""The figure of a distance curve: one frozen query and key, moved apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from lens_rope.errors import InputError
from lens_rope.views.colors import INK, MARK, pair_color
from lens_rope.views.downloads import add_table
from lens_rope.views.layout import figure
from lens_rope.words import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lens_rope.distance import DistanceCurve

N_PAIRS = 4
"""Pairs that are drawn when none are named."""

N_BINS = 240
"""Bins of distance; the near ones hold one distance each."""

ZERO_AT = 0.5
"""Where distance 0 is drawn: a logarithmic axis has no place for it."""


def distance_curve_figure(curve: DistanceCurve, *, pairs: Sequence[int] | None = None) -> go.Figure:
    """The score of one frozen query and key over distance, in total and for some pairs.

    The axis is logarithmic, with distance 0 drawn at its left end. Far distances are drawn in bins:
    a line for the mean of the bin and a band from its lowest to its highest value, so that a pair
    that turns faster than the page can show is seen as a band and not as a false slow wave.

    Args:
        curve: The curve.
        pairs: Which pairs to draw; None gives the four whose contribution changes most.

    Raises:
        InputError: A pair is out of range.
    """
    n_pairs = curve.rope.n_pairs
    pairs = curve.largest_pairs(N_PAIRS) if pairs is None else [int(pair) for pair in pairs]
    for pair in pairs:
        if not 0 <= pair < n_pairs:
            raise InputError(f"pair {pair} is out of range; there are {n_pairs}, numbered from 0")
    bins = _Bins(curve.distance)
    layer, head = curve.rope.layer, curve.head
    fig = figure(
        height=340,
        label=(
            f"Curves: score of query {curve.query} and key {curve.key} of layer {layer} head "
            f"{head} over their distance, in total and for rotary pairs"
        ),
        xaxis_title="distance between query and key (tokens)",
        yaxis_title="contribution (score units)",
        xaxis_type="log",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
    )
    # Dashes tell apart what a reader may not be able to tell apart by colour.
    dashes = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
    for rank, pair in enumerate(pairs):
        wavelength = number(curve.rope.wavelength[pair])
        _add(
            fig, bins, curve.contribution[:, pair], f"pair {pair}",
            f"pair {pair}, wavelength {wavelength} tokens", pair_color(pair),
            {"width": 1.6, "dash": dashes[rank % len(dashes)]},
        )  # fmt: skip
    rest = ", pass-through included" if len(curve.rope.pass_components) else ""
    _add(
        fig, bins, curve.total, "total", f"total of all pairs{rest}", INK["light"],
        {"width": 2.2}, meta="ink",
    )  # fmt: skip
    _mark_actual(fig, curve)
    shown = [*bins.x, *([_place(curve.actual)] if curve.actual >= 0 else [])]
    low, high = min(shown), max(*shown, 1.0)
    ticks = [10.0**p for p in range(int(np.log10(high)) + 1) if 10.0**p >= low]
    has_zero = low == ZERO_AT
    fig.update_xaxes(
        range=[np.log10(low / 1.1), np.log10(high * 1.1)],
        tickvals=[*([ZERO_AT] if has_zero else []), *ticks],
        ticktext=[*(["0"] if has_zero else []), *[f"{tick:,.0f}" for tick in ticks]],
        showgrid=False,
        zeroline=False,
    )
    fig.update_yaxes(zeroline=True)
    parts = [
        *((f"pair {pair}", curve.contribution[:, pair]) for pair in pairs), ("total", curve.total),
    ]  # fmt: skip
    reduced = [bins.reduce(values) for _, values in parts]
    return add_table(
        fig,
        f"Score over distance of layer {layer} head {head}",
        {
            "part": [name for name, _ in parts for _ in bins.x],
            "distance_from_tokens": np.tile(bins.first, len(parts)),
            "distance_to_tokens": np.tile(bins.last, len(parts)),
            **{
                f"{name}_score_units": np.concatenate([values[i] for values in reduced])
                for i, name in enumerate(("mean", "lowest", "highest"))
            },
        },
    )


class _Bins:
    """Distances grouped in bins that are even on the logarithmic axis."""

    def __init__(self, distance: np.ndarray) -> None:
        self.order = np.argsort(distance, kind="stable")
        self.distance = distance[self.order]
        top = max(float(self.distance[-1]), 1.0)
        edges = np.geomspace(1, top * (1 + 1e-9), N_BINS + 1)
        # Bin 0 is distance 0; distance 1 is in bin 1.
        index = np.searchsorted(edges, self.distance, side="right")
        self.start = np.flatnonzero(np.diff(index, prepend=-1))
        self.first = self.distance[self.start]
        self.last = self.distance[np.append(self.start[1:], len(index)) - 1]
        count = np.diff(np.append(self.start, len(index)))
        self.count = count
        place = np.log([_place(d) for d in self.distance])
        self.x = np.exp(np.add.reduceat(place, self.start) / count)

    def reduce(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`[bin]` mean, lowest and highest value."""
        values = values[self.order]
        mean = np.add.reduceat(values, self.start) / self.count
        low, high = (f.reduceat(values, self.start) for f in (np.minimum, np.maximum))
        return mean, low, high


def _add(
    fig: go.Figure, bins: _Bins, values: np.ndarray, name: str, hover: str, color: str,
    line: dict, **style: object,
) -> None:  # fmt: skip
    mean, low, high = bins.reduce(values)
    x = bins.x.astype(np.float32)
    dense = np.flatnonzero(bins.count > 1)
    if dense.size:
        # From the last single distance on, so that the band begins where the line stands.
        begin = max(int(dense[0]) - 1, 0)
        outline = np.concatenate([high[begin:], low[begin:][::-1]])
        fig.add_trace(
            go.Scatter(
                x=np.concatenate([x[begin:], x[begin:][::-1]]),
                y=outline.astype(np.float32),
                mode="lines",
                line={"width": 0},
                fill="toself",
                fillcolor=_faint(color),
                hoverinfo="skip",
                showlegend=False,
                legendgroup=name,
                name=f"{name}, lowest to highest",
            )
        )
    text = [
        f"distance {first:,} tokens<br>{m:.3g} score units"
        if first == last
        else f"distances {first:,} to {last:,} tokens<br>mean {m:.3g}, {lo:.3g} to {hi:.3g} score "
        "units"
        for first, last, m, lo, hi in zip(bins.first, bins.last, mean, low, high, strict=True)
    ]
    fig.add_trace(
        go.Scatter(
            x=x,
            y=mean.astype(np.float32),
            mode="lines" if len(x) > 1 else "markers",
            line={"color": color, **line},
            marker={"color": color},
            customdata=text,
            hovertemplate=f"{hover}<br>%{{customdata}}<extra></extra>",
            legendgroup=name,
            name=name,
            **style,
        )
    )


def _mark_actual(fig: go.Figure, curve: DistanceCurve) -> None:
    """A line at the distance in the prompt and a point at the model's score."""
    if curve.actual < 0:
        return
    place = _place(curve.actual)
    fig.add_vline(x=place, line={"color": MARK, "width": 1.5, "dash": "dash"}, layer="below")
    fig.add_trace(
        go.Scatter(
            x=[place],
            y=[curve.score],
            mode="markers",
            marker={"size": 9, "color": MARK, "line": {"width": 1, "color": "#fff"}},
            hovertemplate=(
                f"in the prompt: distance {curve.actual:,} tokens<br>score "
                f"{number(curve.score)}<extra></extra>"
            ),
            name=f"in the prompt (distance {curve.actual:,})",
        )
    )


def _place(distance: int) -> float:
    return float(distance) if distance else ZERO_AT


def _faint(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.13)"
