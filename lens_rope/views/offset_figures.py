"""Figures of offsets: components by layer, and strong offset features against the bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import plotly.graph_objects as go

from lens_rope.errors import InputError
from lens_rope.views.cells import add_cells, row_axis, stacked
from lens_rope.views.colors import INK, MARK, MARK_TEXT, MISSING, pair_color
from lens_rope.views.downloads import add_table, cell_columns
from lens_rope.views.layout import color_axis, figure, log_ticks, map_height
from lens_rope.words import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from lens_rope.bounds import BoundsCheck
    from lens_rope.offsets import LayerOffsets
    from lens_rope.spec import LayerRope

Side = Literal["query", "key"]
Statistic = Literal["largest", "mean"]

PAIRS_AT, TOP = 0.04, 2.03
"""Where the numbers of pairs are written and where the plot ends, angles in units of π."""
REGION = "rgba(31,158,119,0.16)"
REGION_EDGE = "#1f9e77"
REGION_POINTS = 80
"""Points along the upper edge of the region, a straight line that a logarithmic axis bends."""

MAX_NAMED = 24
"""With more columns of features than this the numbers of their pairs would run into each other."""


def component_map(
    layers: Sequence[LayerOffsets], side: str = "key", statistic: str = "largest"
) -> go.Figure:
    """Absolute value of each component of queries or keys by layer, after rotation.

    The first figure of "Rotary Offset Features in Large Language Models" (Jonasson 2025, arXiv
    2503.01832). Colour is linear and starts at zero, so that only what is large stands out. A
    dashed line divides the first from the second components of pairs that are halves of the
    rotated ones, a solid line what is rotated from what is not. Lines are drawn where all layers
    with rotary pairs agree on them, and only across these layers.

    Args:
        layers: Offsets of each layer.
        side: `query` or `key`.
        statistic: `largest` or `mean` over tokens and heads.

    Raises:
        InputError: The side or the statistic is unknown, or there is no layer.
    """
    for what, value, choices in (
        ("side", side, get_args(Side)), ("statistic", statistic, get_args(Statistic)),
    ):  # fmt: skip
        if value not in choices:
            raise InputError(f"{what} is {value!r}; it must be one of {', '.join(choices)}")
    layers = tuple(layers)
    if not layers:
        raise InputError("there are no layers to draw")
    values = stacked([getattr(getattr(entry, side), f"component_{statistic}") for entry in layers])
    ropes = [entry.rope for entry in layers]
    title = f"{statistic} absolute value of a {side} component"
    dashed, solid = _borders(ropes)
    fig = figure(
        height=map_height(len(layers), extra=165 if dashed or solid else 150),
        label=f"Heat map of the {title} by layer and component, over tokens and heads",
        xaxis_title=_component_axis(dashed, solid),
        showlegend=False,
    )
    seen = values[np.isfinite(values)]
    top = float(seen.max(initial=0)) or 1.0
    color_axis(fig, "sequential", f"{title} (activation units)", 0, top)
    names = [_component_names(rope, values.shape[1]) for rope in ropes]
    custom = [[[rope.layer, name] for name in row] for rope, row in zip(ropes, names, strict=True)]
    where = "layer %{customdata[0]} component %{x}<br>"
    add_cells(
        fig, values, values, custom,
        f"{where}{statistic} absolute value %{{text}} activation units<br>%{{customdata[1]}}",
        f"{where}no value",
    )  # fmt: skip
    _border_lines(fig, ropes, dashed, "dash", "first components to the left, second to the right")
    _border_lines(fig, ropes, solid, "solid", "between rotated and not rotated components")
    row_axis(fig, [rope.layer for rope in ropes], "layer")
    fig.update_xaxes(range=[-0.5, values.shape[1] - 0.5], showgrid=False, zeroline=False)
    pair = np.full(values.shape, np.nan)
    for row, rope in zip(pair, ropes, strict=True):
        for components in rope.components:
            row[components] = np.arange(rope.n_pairs)
    columns = {"pair": pair, f"{statistic}_absolute_value_activation_units": values}
    return add_table(
        fig,
        f"{title.capitalize()} by layer and component",
        cell_columns([rope.layer for rope in ropes], "component", **columns),
    )


def bounds_plot(check: BoundsCheck) -> go.Figure:
    """Angle against `w L` of every strong feature, with the region that the bounds allow.

    The angle φ is drawn in [0, 2π) and `w L` on a logarithmic axis, both in units of π. The region
    is `φ ≥ π/2` and `φ + w L ≤ 3π/2`. Markers are filled where a feature lies in it, their area
    grows with the amplitude, and their colour names the pair.

    Args:
        check: Strong offset features against the bounds.
    """
    table = check.table
    turn = np.asarray(table["turn"], dtype=np.float64) / np.pi
    angle = np.mod(np.asarray(table["angle"], dtype=np.float64), 2 * np.pi) / np.pi
    known = np.isfinite(turn) & np.isfinite(angle)
    slowest = float(turn[known & (turn > 0)].min(initial=0.1))
    low, high = slowest / 1.5, float(turn[known].max(initial=4.0)) * 1.5
    has_zero = bool((turn[known] == 0).any())
    # A pair that does not turn has no place on a logarithmic axis; it is drawn at a tick of its
    # own, a third of a decade left of the others.
    zero_at, low = slowest / 2, slowest / 3 if has_zero else low
    fig = figure(
        height=460,
        label=(
            f"Dots: angle against turn over the context of {len(table)} strong offset features, "
            "with the region that the bounds allow shaded"
        ),
        yaxis_title="angle φ between query and key offset",
        yaxis_title_standoff=14,
        xaxis_type="log",
        margin={"l": 60, "r": 12, "t": 44, "b": 44},
        showlegend=True,
        legend={
            "orientation": "h", "x": 0, "y": 1.06, "xanchor": "left", "yanchor": "bottom",
            "itemsizing": "constant", "traceorder": "normal",
        },
    )  # fmt: skip
    _add_region(fig, low)
    for x, text, anchor in ((1, "half a cycle", "right"), (2, "full cycles", "left")):
        # They end above the numbers of the pairs.
        fig.add_shape(
            type="line", x0=x, x1=x, y0=PAIRS_AT + 0.06, y1=TOP, layer="below",
            line={"color": MARK, "width": 1.5, "dash": "dash"},
        )  # fmt: skip
        # On a logarithmic axis shapes take values and annotations take logarithms.
        fig.add_annotation(
            x=float(np.log10(x)), y=1, yref="paper", text=text, showarrow=False, xanchor=anchor,
            yanchor="bottom", font={"color": MARK_TEXT["light"]},
        )  # fmt: skip
    within = np.asarray(table["within_region"], dtype=bool)
    place = np.where(turn == 0, zero_at, turn)
    for name, keep, symbol in (
        ("keeps the bounds", within, "circle"),
        ("does not keep them", ~within, "circle-open"),
    ):
        _add_features(fig, table.loc[keep], place[keep], angle[keep], name, symbol, _top(table))
    named = _name_pairs(fig, table, place, apart=0.025 * float(np.log10(high / low)))
    if not len(table):
        fig.add_annotation(
            x=0.5, y=0.9, xref="paper", yref="paper", showarrow=False, font={"size": 14},
            text=f"no offset feature has an amplitude above {check.strong:g} score units",
        )  # fmt: skip
    ticks, text = log_ticks(np.log10(low), np.log10(high))
    extra = [zero_at] if has_zero else []
    fig.update_xaxes(
        range=[np.log10(low), np.log10(high)],
        tickvals=[*extra, *(10**tick for tick in ticks)],
        ticktext=["0"] * len(extra) + ["π" if label == "1" else f"{label}π" for label in text],
        title_text="w L, turn over the effective context" + (" (numbers: pairs)" if named else ""),
        showgrid=False,
        zeroline=False,
    )
    fig.update_yaxes(
        range=[-0.03, TOP],
        tickvals=[0, 0.5, 1, 1.5, 2],
        ticktext=["0", "π/2", "π", "3π/2", "2π"],
        zeroline=False,
    )
    names = {
        "layer": "layer", "head": "head", "pair": "pair", "amplitude": "amplitude_score_units",
        "angle": "angle_rad", "turn": "turn_over_context_rad", "cycles": "cycles_over_context",
        "within_region": "within_all_bounds",
    }  # fmt: skip
    columns = {new: table[old].to_numpy() for old, new in names.items()}
    return add_table(fig, "Strong offset features against the bounds", columns)


def _borders(ropes: Sequence[LayerRope]) -> tuple[list[float], list[float]]:
    """Where all rotating layers have a border: between halves of pairs, and to what is not rotated.

    Borders lie half a component before the first component at their right.
    """
    halves: list[set[float]] = []
    ends: list[set[float]] = []
    for rope in ropes:
        if not rope.n_pairs:
            continue
        start, end = rope.rotary_start, rope.rotary_start + rope.rotary_dim
        halves.append({start + rope.n_pairs - 0.5} if rope.pairing == "half" else set())
        ends.append({edge - 0.5 for edge in (start, end) if 0 < edge < rope.d_head})
    if not halves:
        return [], []
    return sorted(set.intersection(*halves)), sorted(set.intersection(*ends))


def _border_lines(
    fig: go.Figure, ropes: Sequence[LayerRope], borders: list[float], dash: str, name: str
) -> None:
    """Adds vertical lines across the rows of layers with rotary pairs."""
    x: list[float | None] = []
    y: list[float | None] = []
    for border in borders:
        for row, rope in enumerate(ropes):
            if rope.n_pairs:
                x += [border, border]
                y += [row - 0.5, row + 0.5]
            elif x and x[-1] is not None:
                x.append(None)
                y.append(None)
        x.append(None)
        y.append(None)
    if x:
        fig.add_trace(
            go.Scatter(
                x=x, y=y, mode="lines", line={"color": MARK, "width": 1.5, "dash": dash},
                hoverinfo="skip", showlegend=False, name=name,
            )
        )  # fmt: skip


def _component_axis(dashed: list[float], solid: list[float]) -> str:
    """Title of the axis of components, which says what its lines divide."""
    lines = []
    if dashed:
        lines.append("dashed: first components of the pairs to the left, second to the right")
    if solid:
        lines.append("solid: rotated on one side only")
    return "component" + (
        f'<br><span style="font-size:11px">{"; ".join(lines)}</span>' if lines else ""
    )


def _component_names(rope: LayerRope, n: int) -> list[str]:
    """What each component is, in words."""
    names = ["not rotated" if c < rope.d_head else "" for c in range(n)]
    for which, components in zip(("first", "second"), rope.components, strict=True):
        for pair, component in enumerate(components):
            names[component] = (
                f"{which} of pair {pair}<br>wavelength {number(rope.wavelength[pair])} tokens, "
                f"{number(rope.cycles[pair])} cycles"
            )
    return names


def _add_region(fig: go.Figure, low: float) -> None:
    """Shades `φ ≥ π/2, φ + w L ≤ 3π/2`, from the left edge `low` to its tip at `w L = π`."""
    x = np.geomspace(min(low, 1.0), 1, REGION_POINTS)
    # Upper edge from left to right, down to the tip, and back along the lower edge.
    x = [*x, x[0], x[0]]
    y = [*(1.5 - np.asarray(x[:-2])), 0.5, 1.5 - x[0]]
    fig.add_trace(
        go.Scatter(
            x=x, y=y, mode="lines", line={"color": REGION_EDGE, "width": 1}, fill="toself",
            fillcolor=REGION, hoverinfo="skip", name="allowed region",
        )
    )  # fmt: skip


def _top(table: pd.DataFrame) -> float:
    return float(np.asarray(table["amplitude"], dtype=np.float64).max(initial=0)) or 1.0


def _add_features(
    fig: go.Figure, table: pd.DataFrame, turn: np.ndarray, angle: np.ndarray, name: str,
    symbol: str, top: float,
) -> None:  # fmt: skip
    amplitude = np.asarray(table["amplitude"], dtype=np.float64)
    fig.add_trace(
        go.Scatter(
            x=turn,
            y=angle,
            mode="markers",
            marker={
                "symbol": symbol,
                "size": np.maximum(4, 15 * np.sqrt(amplitude / top)),
                "color": [pair_color(int(pair)) for pair in table["pair"]] or MISSING,
                "opacity": 0.75,
                "line": {"width": 1.6 if symbol.endswith("open") else 0.4},
            },
            customdata=[_feature_hover(row, name) for row in table.to_dict("records")],
            hovertemplate="%{customdata}<extra></extra>",
            showlegend=False,
            name=name,
        )
    )
    # The legend would show the colour of the first pair; grey stands for all of them.
    fig.add_trace(
        go.Scatter(
            x=[None], y=[None], mode="markers", name=f"{name} ({len(table)})", hoverinfo="skip",
            marker={"symbol": symbol, "size": 10, "color": MISSING, "line": {"width": 1.6}},
        )
    )  # fmt: skip


def _name_pairs(fig: go.Figure, table: pd.DataFrame, place: np.ndarray, *, apart: float) -> bool:
    """Writes the number of each pair below its features, where there is room for it.

    Of columns that are less than `apart` decades from each other, the one with the largest
    amplitude is named.
    """
    amplitude: dict[tuple[float, int], float] = {}
    for x, pair, size in zip(place, table["pair"], table["amplitude"], strict=True):
        column = (float(x), int(pair))
        amplitude[column] = max(size, amplitude.get(column, 0.0))
    columns: list[tuple[float, int]] = []
    for x, pair in sorted(amplitude, key=lambda column: (-amplitude[column], column)):
        if all(abs(np.log10(x / other)) >= apart for other, _ in columns):
            columns.append((x, pair))
    columns.sort()
    if not 0 < len(columns) <= MAX_NAMED:
        return False
    fig.add_trace(
        go.Scatter(
            x=[x for x, _ in columns],
            y=[PAIRS_AT] * len(columns),
            mode="text",
            text=[str(pair) for _, pair in columns],
            textfont={"size": 11, "color": INK["light"]},
            meta="ink",
            hoverinfo="skip",
            showlegend=False,
            name="pairs",
        )
    )
    return True


def _feature_hover(row: dict, name: str) -> str:
    angle = float(np.mod(row["angle"], 2 * np.pi)) / np.pi
    return (
        f"layer {row['layer']} head {row['head']} pair {row['pair']}<br>"
        f"amplitude {number(row['amplitude'])} score units<br>"
        f"angle {number(angle)}π, w L {number(row['turn'] / np.pi)}π "
        f"({number(row['cycles'])} cycles)<br>{name}"
    )
