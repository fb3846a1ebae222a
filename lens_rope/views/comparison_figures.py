"""Figures of several reports on one axis: usage over cycles, sinks and ranks over depth, bounds.

Figures take tables, so that reports read from disk and results in memory are drawn alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import plotly.graph_objects as go

from lens_rope.views.colors import MARK, MARK_TEXT
from lens_rope.views.comparison_styles import label, plain, style
from lens_rope.views.downloads import add_table
from lens_rope.views.layout import figure
from lens_rope.words import number, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

Side = Literal["query", "key", "both"]

MANY = 6
"""More lines than this are drawn thinner."""
MAX_BANDS = 3
"""Reports whose spread over layers is shaded; the shades of more would hide each other."""


def usage_curves(
    names: Sequence[str], tables: Sequence[pd.DataFrame], side: Side = "both"
) -> go.Figure:
    """Relative magnitude against cycles over the context, one curve per report.

    Args:
        names: Names of the reports.
        tables: What `usage_by_cycles` says of each.
        side: Queries, keys, or the geometric mean of the two.
    """
    what = "query and key" if side == "both" else side
    fig = _lines(
        names,
        label=(
            f"Magnitude of {what} against cycles over the context, relative to the median of the "
            f"layer, for {_listed(names)}"
        ),
        height=430 if side == "both" else 340,
        xaxis_title="cycles over the context",
        xaxis_type="log",
        yaxis_title=f"{what} magnitude ÷ layer median",
        yaxis_type="log",
    )
    for index, (name, table) in enumerate(zip(names, tables, strict=True)):
        drawn = style(index)
        x, y = table["cycles"], table[f"{side}_median"]
        band = [*table[f"{side}_high"], *table[f"{side}_low"][::-1]]
        if len(table) > 1 and len(names) <= MAX_BANDS and np.isfinite(np.array(band)).all():
            fig.add_trace(
                go.Scatter(
                    x=[*x, *x[::-1]], y=band, fill="toself", fillcolor=drawn.color, opacity=0.16,
                    line={"width": 0}, hoverinfo="skip", showlegend=False, legendgroup=str(index),
                    name=label(name),
                )
            )  # fmt: skip
        fig.add_trace(
            _line(
                index, name, x, y,
                [
                    [row["pairs"], row["layers"],
                     *(number(row[key])
                       for key in ("wavelength", "cycles", f"{side}_low", f"{side}_high"))]
                    for row in table.to_dict("records")
                ],
                "pair %{customdata[0]} of %{customdata[1]} layers<br>"
                "wavelength %{customdata[2]} tokens<br>%{customdata[3]} cycles over the context<br>"
                f"{what} magnitude %{{y:.3g}} × the layer's median<br>"
                "half of the layers: %{customdata[4]} to %{customdata[5]}",
            )
        )  # fmt: skip
    ends = [value for table in tables for value in table["cycles"]]
    if ends:
        low, high = np.log10(min(ends)) - 0.1, np.log10(max(ends)) + 0.1
        fig.update_xaxes(range=[low, high])
        if low < 0 < high:
            fig.add_vline(x=1, line={"color": MARK, "width": 1.5, "dash": "dash"})
            fig.add_annotation(
                x=0, xref="x", y=0, yref="paper", text="◂ partial cycles", showarrow=False,
                xanchor="right", yanchor="bottom", font={"color": MARK_TEXT["light"]},
            )  # fmt: skip
    _thin(fig, len(names))
    fig.update_xaxes(dtick=1, exponentformat="power", zeroline=False)
    fig.update_yaxes(zeroline=False, tickvals=_TICKS, ticktext=[f"{t:g}×" for t in _TICKS])
    magnitude = f"{what.replace(' ', '_')}_magnitude_over_layer_median"
    return add_table(
        fig,
        f"{what.capitalize()} magnitude against cycles over the context",
        _stacked_columns(
            names, tables,
            {
                "pairs": "pairs", "layers": "layers", "wavelength_tokens": "wavelength",
                "cycles_over_context": "cycles", magnitude: f"{side}_median",
                "lower_quartile": f"{side}_low", "upper_quartile": f"{side}_high",
            },
        ),
    )  # fmt: skip


_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def sink_curves(names: Sequence[str], tables: Sequence[pd.DataFrame]) -> go.Figure:
    """Share of the heads of each layer that are sink heads, over relative depth.

    Args:
        names: Names of the reports.
        tables: What `by_depth` says of each.
    """
    fig = _lines(
        names,
        label=f"Share of heads that are sink heads over the depth of {_listed(names)}",
        height=330,
        xaxis_title="depth (0: first layer, 1: last)",
        yaxis_title="heads that are sink heads",
    )
    for index, (name, table) in enumerate(zip(names, tables, strict=True)):
        fig.add_trace(
            _line(
                index, name, table["depth"], table["sink_share"],
                [[row["layer"], number(row["sink_heads"])] for row in table.to_dict("records")],
                "layer %{customdata[0]}<br>%{customdata[1]} sink heads, %{y:.0%} of the heads",
            )
        )  # fmt: skip
    _thin(fig, len(names))
    fig.update_xaxes(range=[-0.03, 1.03], zeroline=False)
    fig.update_yaxes(range=[-0.03, 1.03], tickformat=".0%", zeroline=False)
    columns = {
        "layer": "layer", "depth": "depth", "sink_heads": "sink_heads",
        "share_of_heads": "sink_share",
    }  # fmt: skip
    return add_table(fig, "Sink heads by depth", _stacked_columns(names, tables, columns))


def rank_curves(names: Sequence[str], tables: Sequence[pd.DataFrame]) -> go.Figure:
    """Components that hold 90 % of the variance of a layer's keys, before and after RoPE.

    Args:
        names: Names of the reports.
        tables: What `by_depth` says of each.
    """
    fig = _lines(
        names,
        label=(
            "Share of components that hold 90% of the variance of the keys before and after RoPE, "
            f"over the depth of {_listed(names)}"
        ),
        height=360,
        xaxis_title="depth (0: first layer, 1: last)",
        yaxis_title="components (90% of key variance)",
    )
    for index, (name, table) in enumerate(zip(names, tables, strict=True)):
        custom = [[row["layer"]] for row in table.to_dict("records")]
        for side, when in (("pre", "before RoPE"), ("post", "after RoPE")):
            trace = _line(
                index, name, table["depth"], table[f"rank90_{side}"], custom,
                f"layer %{{customdata[0]}}<br>%{{y:.0%}} of the components {when}",
            )  # fmt: skip
            if side == "pre":
                trace.update(
                    mode="markers", opacity=0.8, showlegend=False,
                    marker={"symbol": f"{style(index).symbol}-open", "size": 7},
                )  # fmt: skip
            fig.add_trace(trace)
    _thin(fig, len(names))
    fig.update_xaxes(range=[-0.03, 1.03], zeroline=False)
    fig.update_yaxes(range=[-0.03, 1.03], tickformat=".0%", zeroline=False)
    columns = {
        "layer": "layer", "depth": "depth", "share_of_components_before": "rank90_pre",
        "share_of_components_after": "rank90_post",
    }  # fmt: skip
    return add_table(
        fig, "Components that hold 90% of key variance, by depth",
        _stacked_columns(names, tables, columns),
    )  # fmt: skip


def bound_dots(
    names: Sequence[str], shares: Sequence[float], base_rates: Sequence[float]
) -> go.Figure:
    """Share of strong offset features of at most half a cycle, beside that of all pairs.

    Args:
        names: Names of the reports.
        shares: Share of each report's features; nan where it has none.
        base_rates: Share of all its pairs.
    """
    fig = figure(
        height=110 + 30 * len(names),
        label=(
            "Share of strong offset features of at most half a cycle, and of all pairs, for "
            f"{_listed(names)}"
        ),
        xaxis_title="at most half a cycle",
        showlegend=False,
    )
    for index, (name, share, base) in enumerate(zip(names, shares, base_rates, strict=True)):
        drawn = style(index)
        fig.add_trace(
            go.Scatter(
                x=[base, share], y=[index, index], mode="lines+markers", name=label(name),
                line={"color": drawn.color, "width": 2},
                marker={
                    "color": drawn.color, "size": [10, 11],
                    "symbol": [f"{drawn.symbol}-open", drawn.symbol],
                },
                customdata=[["all pairs", percent(base)], ["strong features", percent(share)]],
                hovertemplate=(
                    "%{fullData.name}<br>%{customdata[1]} of %{customdata[0]}<extra></extra>"
                ),
            )
        )  # fmt: skip
    fig.update_xaxes(range=[-0.02, 1.02], tickformat=".0%", zeroline=False)
    fig.update_yaxes(
        tickvals=list(range(len(names))), ticktext=[label(name) for name in names],
        range=[len(names) - 0.5, -0.5], showgrid=False, zeroline=False,
    )  # fmt: skip
    return add_table(
        fig,
        "Strong offset features of at most half a cycle",
        {
            "report": [plain(name) for name in names],
            "share_of_strong_features": np.array(shares, dtype=float),
            "share_of_all_pairs": np.array(base_rates, dtype=float),
        },
    )


def _lines(names: Sequence[str], *, height: int, **layout: Any) -> go.Figure:
    """An empty figure with room for a legend of so many names above it."""
    longest = max((len(label(name)) for name in names), default=0)
    per_row = max(1, 110 // (longest + 8))
    return figure(
        height=height + 20 * (-(-len(names) // per_row)),
        legend={"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
        showlegend=True,
        hovermode="closest",
        **layout,
    )


def _thin(fig: go.Figure, n: int) -> None:
    """Makes lines and markers smaller where there are more than a few."""
    if n > MANY:
        fig.update_traces(line_width=1.3, marker_size=4, selector={"mode": "lines+markers"})


def _line(
    index: int, name: str, x: pd.Series, y: pd.Series, customdata: list[list[Any]], hover: str
) -> go.Scatter:
    drawn = style(index)
    return go.Scatter(
        x=np.asarray(x, dtype=float),
        y=np.asarray(y, dtype=float),
        mode="lines+markers",
        line={"color": drawn.color, "width": 2, "dash": drawn.dash},
        marker={"color": drawn.color, "symbol": drawn.symbol, "size": 6},
        customdata=customdata,
        hovertemplate=f"%{{fullData.name}}<br>{hover}<extra></extra>",
        name=label(name),
        legendgroup=str(index),
    )


def _stacked_columns(
    names: Sequence[str], tables: Sequence[pd.DataFrame], columns: dict[str, str]
) -> dict[str, np.ndarray]:
    """The tables one below the other, with the report that each row is of.

    Args:
        names: Names of the reports.
        tables: A table of each.
        columns: Column of the tables by the name that it gets.
    """
    rows = [plain(name) for name, table in zip(names, tables, strict=True) for _ in table.index]
    return {
        "report": np.array(rows, dtype=str),
        **{
            new: np.concatenate([table[old].to_numpy() for table in tables])
            for new, old in columns.items()
        },
    }


def _listed(names: Sequence[str]) -> str:
    """Names in a sentence, for readers who cannot see the figure."""
    shown = [plain(name) for name in names]
    if len(shown) > 4:
        return f"{len(shown)} models"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))
