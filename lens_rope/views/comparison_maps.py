"""Maps of what differs between two reports of one shape, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lens_rope.views.cells import PAIR_AXIS, add_cells, pair_cells, partial_line, row_axis, stacked
from lens_rope.views.comparison_styles import label, plain
from lens_rope.views.downloads import add_table, cell_columns, pair_columns
from lens_rope.views.layout import color_axis, figure, map_height
from lens_rope.words import number, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import plotly.graph_objects as go

    from lens_rope.spec import LayerRope


def usage_ratio_map(
    names: tuple[str, str], ropes: Sequence[LayerRope], ratio: np.ndarray, side: str
) -> go.Figure:
    """How many times larger the pairs of the second report are than those of the first.

    Args:
        names: The two names.
        ropes: One rotation per row.
        ratio: `[layer, pair]` Magnitude in the second over that in the first; nan for none.
        side: `query` or `key`.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(ratio > 0, np.log2(np.where(ratio > 0, ratio, 1.0)), np.nan)
    top = float(np.nanmax(np.abs(logs))) if np.isfinite(logs).any() else 0.0
    # Where nothing differs the scale still spans something, and everything lies at its middle.
    top = max(top, 0.1)
    first, second = (label(name) for name in names)
    fig = figure(
        height=map_height(len(ropes)),
        label=f"Ratio of {side} magnitudes by layer and pair, {plain(names[1])} over "
        f"{plain(names[0])}",
        xaxis_title=PAIR_AXIS,
        showlegend=False,
    )
    steps = _ratio_ticks(top)
    color_axis(
        fig, "diverging", f"{side} magnitude, {second} ÷ {first}", -top, top,
        tickvals=[float(np.log2(step)) for step in steps],
        ticktext=[f"{number(step)}×" for step in steps],
    )  # fmt: skip
    pair_cells(fig, ropes, logs, ratio, "times the magnitude", what="")
    partial_line(fig, ropes)
    return add_table(
        fig,
        f"{side.capitalize()} magnitude by layer and pair, {plain(names[1])} over "
        f"{plain(names[0])}",
        pair_columns(ropes, magnitude_ratio=ratio),
    )


def _ratio_ticks(top: float) -> list[float]:
    """Ratios to write on a colour bar that ends at `2 ** top`: 1, one in between, and the ends."""
    ends = [2.0 ** (top * share) for share in (0.5, 1.0)]
    # Rounded to what a reader takes in, but never beyond the end of the bar.
    ends = [float(f"{end:.2g}") if float(f"{end:.2g}") <= 2.0**top else end for end in ends]
    return sorted({*(1 / end for end in ends), 1.0, *ends})


def share_difference_map(
    names: tuple[str, str], layers: Sequence[int], first: np.ndarray, second: np.ndarray
) -> go.Figure:
    """Sink share by layer and head, the second report minus the first.

    Args:
        names: The two names.
        layers: The layer of each row.
        first: `[layer, head]` Sink shares in the first report.
        second: `[layer, head]` Those in the second.
    """
    change = second - first
    fig = figure(
        height=map_height(len(layers)),
        label=f"Change of sink share by layer and head, {plain(names[1])} minus {plain(names[0])}",
        xaxis_title="head",
        showlegend=False,
    )
    color_axis(
        fig, "diverging", "change of sink share (share of attention)", -1, 1,
        tickvals=[-1, -0.5, 0, 0.5, 1], ticktext=["−1", "−0.5", "0", "+0.5", "+1"],
    )  # fmt: skip
    custom: list[list[Any]] = [
        [
            [layer, percent(first[row, head]), percent(second[row, head])]
            for head in range(change.shape[1])
        ]
        for row, layer in enumerate(layers)
    ]
    head = "layer %{customdata[0]} head %{x}<br>"
    add_cells(
        fig, change, change, custom,
        f"{head}sink share %{{customdata[1]}} → %{{customdata[2]}}<br>change %{{text}}",
        f"{head}no value",
    )  # fmt: skip
    row_axis(fig, list(layers), "layer")
    fig.update_xaxes(range=[-0.5, change.shape[1] - 0.5], showgrid=False, zeroline=False)
    return add_table(
        fig,
        f"Sink share by layer and head, {plain(names[1])} minus {plain(names[0])}",
        cell_columns(
            layers, "head", sink_share_first=first, sink_share_second=second, change=change
        ),
    )


def grid(table: pd.DataFrame, layers: Sequence[int], column: str, value: str) -> np.ndarray:
    """`[layer, column]` A table's values as rows of a heat map, nan where there is none."""
    by_layer = dict(iter(table.groupby("layer")))
    rows = []
    for layer in layers:
        part = by_layer.get(layer)
        n = 0 if part is None or part.empty else int(part[column].max()) + 1
        row = np.full(n, np.nan)
        if part is not None:
            row[part[column].to_numpy(dtype=int)] = part[value].to_numpy(dtype=float)
        rows.append(row)
    return stacked(rows)
