"""Figures of key spectra before and after rotation, in two colours throughout."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from lens_rope.spec import ranges
from lens_rope.spectrum import NEAR_ZERO
from lens_rope.views.colors import MISSING
from lens_rope.views.downloads import add_table
from lens_rope.views.layout import figure
from lens_rope.words import number, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lens_rope.spectrum import KeySpectrum, Side

BEFORE = "#e08a2e"
AFTER = "#1f9e77"
SIDES: tuple[tuple[Side, str, str], ...] = (
    ("pre", "before RoPE", BEFORE),
    ("post", "after RoPE", AFTER),
)
INSET_TOP = 2.0
"""Where the inset ends, in activation units squared; most eigenvalues of most models are below."""
INSET_LEFT, INSET_BOTTOM = 0.42, 0.42
"""Where the inset begins, in shares of the width and height of the plot."""
UNIT = "activation units²"


def spectrum_histogram(
    spectrum: KeySpectrum,
    layers: Sequence[int] | None = None,
    *,
    n_bins: int = 50,
    n_inset_bins: int = 60,
) -> go.Figure:
    """Histograms of the eigenvalues before and after rotation, one over the other.

    Counts are on a logarithmic axis; an inset shows eigenvalues up to `INSET_TOP` in finer bins
    with counts on a linear axis.

    Args:
        spectrum: Key spectra of a model.
        layers: Layers whose eigenvalues are counted together; None takes all.
        n_bins: Bins of the main plot, from 0 to the largest eigenvalue.
        n_inset_bins: Bins of the inset.

    Raises:
        InputError: No layer is given, or one was not analysed.
    """
    values = {side: spectrum.eigenvalues(side, layers) for side, _, _ in SIDES}
    top = max(INSET_TOP, *(float(side.max()) for side in values.values()))
    chosen = [entry.layer for entry in spectrum.layers] if layers is None else sorted(set(layers))
    fig = figure(
        height=420,
        label=(
            "Histograms of the eigenvalues of the keys' covariance before and after RoPE, layers "
            f"{ranges(chosen)}, with an inset from 0 to {INSET_TOP:g}"
        ),
        xaxis_title=f"eigenvalue of the keys' covariance ({UNIT})",
        yaxis_title="eigenvalues in a bin",
        yaxis_type="log",
        barmode="overlay",
        bargap=0,
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.01, "xanchor": "left", "yanchor": "bottom"},
    )
    _add_inset(fig)
    highest, behind = 1, 1
    rows: list[tuple[str, str, float, float, int]] = []
    for side, name, color in SIDES:
        median = spectrum.median(side, layers=layers)
        near = spectrum.near_zero(side, layers=layers)
        share = number(near) if np.isnan(near) else percent(near)
        text = f"{name}: median {number(median)}, {share} below {NEAR_ZERO:g}"
        for axes, end, bins in (("", top, n_bins), ("2", INSET_TOP, n_inset_bins)):
            counts, edges = np.histogram(values[side], bins=bins, range=(0, end))
            if not axes:
                highest = max(highest, int(counts.max()))
                behind = max(behind, int(counts[edges[1:] > (INSET_LEFT - 0.04) * top].max()))
            fig.add_trace(_bars(counts, edges, name, text, color, axes))
            bins_of = "inset" if axes else "whole range"
            rows += [
                (name, bins_of, float(a), float(b), int(n))
                for (a, b), n in zip(pairwise(edges), counts, strict=True)
            ]
    # A bar of one eigenvalue has the logarithm 0, so the axis starts below it; and it ends where
    # no bar reaches the inset.
    low = np.log10(0.7)
    high = max(np.log10(2 * highest), low + (np.log10(behind) - low) / (INSET_BOTTOM - 0.12))
    fig.update_layout(
        xaxis={"range": [0, top], "showgrid": False, "zeroline": False},
        yaxis={"range": [low, high], "dtick": 1, "showgrid": False, "zeroline": False},
    )
    names = ("side", "bins", "eigenvalue_from", "eigenvalue_to", "eigenvalues")
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    return add_table(fig, "Eigenvalues of the keys before and after RoPE", columns)


def rank_curve(spectrum: KeySpectrum) -> go.Figure:
    """How many eigenvalues hold 90 % of the variance of each layer's keys, before and after.

    Args:
        spectrum: Key spectra of a model.
    """
    fig = figure(
        height=300,
        label="Number of eigenvalues that hold 90% of the variance of the keys, by layer",
        xaxis_title="layer",
        yaxis_title="eigenvalues (90% of variance)",
        legend={"orientation": "h", "x": 0, "y": 1.01, "xanchor": "left", "yanchor": "bottom"},
    )
    for side, name, color in SIDES:
        entries = [getattr(entry, side) for entry in spectrum.layers]
        fig.add_trace(
            go.Scatter(
                x=[entry.layer for entry in spectrum.layers],
                y=[entry.rank90 for entry in entries],
                mode="lines+markers",
                line={"color": color, "width": 2},
                marker={"color": color, "size": 6},
                customdata=[
                    [len(entry.eigenvalues), number(entry.participation_ratio)] for entry in entries
                ],
                hovertemplate=(
                    f"{name}<br>layer %{{x}}<br>%{{y}} of %{{customdata[0]}} eigenvalues hold 90% "
                    "of the variance<br>participation ratio %{customdata[1]}<extra></extra>"
                ),
                name=name,
            )
        )
    fig.update_xaxes(zeroline=False, showgrid=False)
    fig.update_yaxes(rangemode="tozero", zeroline=False)
    sides = [
        (entry.layer, name, getattr(entry, side))
        for side, name, _ in SIDES
        for entry in spectrum.layers
    ]
    return add_table(
        fig,
        "Rank of the keys by layer before and after RoPE",
        {
            "layer": [layer for layer, _, _ in sides],
            "side": [name for _, name, _ in sides],
            "eigenvalues_for_90_percent_of_variance": [float(side.rank90) for _, _, side in sides],
            "eigenvalues": [len(side.eigenvalues) for _, _, side in sides],
            "participation_ratio": [float(side.participation_ratio) for _, _, side in sides],
        },
    )


def _add_inset(fig: go.Figure) -> None:
    """Second axes within the first, of the same style, with a line where near zero ends."""
    layout: Any = fig.layout
    style = layout.xaxis.to_plotly_json()
    fig.update_layout(
        xaxis2={
            **style, "domain": [INSET_LEFT, 1], "anchor": "y2", "range": [0, INSET_TOP],
            "showgrid": False, "zeroline": False,
            "title": {"text": f"the same from 0 to {INSET_TOP:g}", "standoff": 4},
        },
        yaxis2={
            **style, "domain": [INSET_BOTTOM, 0.98], "anchor": "x2", "nticks": 5, "title": None,
        },
    )  # fmt: skip
    fig.add_shape(
        type="line", xref="x2", yref="y2 domain", x0=NEAR_ZERO, x1=NEAR_ZERO, y0=0, y1=1,
        line={"color": MISSING, "width": 1, "dash": "dot"},
    )  # fmt: skip


def _bars(
    counts: np.ndarray, edges: np.ndarray, name: str, text: str, color: str, axes: str
) -> go.Bar:
    """Bars of one histogram on the main axes or on those of the inset."""
    return go.Bar(
        x=(edges[:-1] + edges[1:]) / 2,
        y=counts,
        width=np.diff(edges),
        marker={"color": color, "opacity": 0.6, "line": {"width": 0}},
        customdata=[[number(a), number(b)] for a, b in pairwise(edges)],
        hovertemplate=(
            f"{name}<br>%{{y}} eigenvalues from %{{customdata[0]}} to %{{customdata[1]}} {UNIT}"
            "<extra></extra>"
        ),
        name=text,
        legendgroup=name,
        showlegend=not axes,
        xaxis=f"x{axes}",
        yaxis=f"y{axes}",
    )
