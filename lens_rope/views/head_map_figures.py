"""The maps of one head as a Plotly figure: attention, score, and pairs side by side."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from lens_rope.views.colors import MISSING
from lens_rope.views.downloads import add_table
from lens_rope.views.layout import color_axis, figure
from lens_rope.views.tokens import display_text
from lens_rope.words import number

if TYPE_CHECKING:
    from lens_rope.views.head_display import HeadDisplay

_COLUMNS = 3
_ROW, _ABOVE = 270, 130


def head_map_figure(display: HeadDisplay) -> go.Figure:
    """Attention, scores and contributions in the window that is shown first.

    Attention has a scale of shares. Scores and contributions have one scale around zero, so that
    they can be compared.

    Args:
        display: The head.
    """
    maps, values = display.maps, display.values()
    rows = -(-len(values) // _COLUMNS)
    fig = figure(
        height=_ABOVE + _ROW * rows,
        label=(
            f"Heat maps of layer {maps.rope.layer} head {maps.head}, queries as rows and keys as "
            f"columns, tokens {maps.window.name}: {', '.join(values)}"
        ),
        showlegend=False,
        margin={"l": 48, "r": 12, "t": 96, "b": 44},
    )
    axes: Any = fig.layout
    shared = axes.xaxis.to_plotly_json(), axes.yaxis.to_plotly_json()
    most = max(float(np.nanmax(np.abs(v))) for name, v in values.items() if name != "attention")
    positions = np.arange(maps.window.start, maps.window.stop)
    # Plotly reads tags, but knows no entity for a quotation mark.
    tokens = [escape(display_text(token), quote=False) for token in maps.split().prompt.tokens]
    pairs = [[[query, key] for key in tokens] for query in tokens]
    height = 1 / rows
    for i, (name, value) in enumerate(values.items()):
        row, column = divmod(i, _COLUMNS)
        suffix = str(i + 1) if i else ""
        unit = "" if name == "attention" else " score units"
        left, top = column / _COLUMNS, 1 - row * height
        domain = {
            "x": [left, left + 0.9 / _COLUMNS],
            "y": [top - 0.8 * height, top - 0.08 * height],
        }
        fig.update_layout(
            {
                f"xaxis{suffix}": {
                    **shared[0], "domain": domain["x"], "anchor": f"y{suffix}", "showgrid": False,
                    "zeroline": False, "title": {"text": "key", "standoff": 32},
                },
                f"yaxis{suffix}": {
                    **shared[1], "domain": domain["y"], "anchor": f"x{suffix}", "showgrid": False,
                    "zeroline": False, "range": [positions[-1] + 0.5, positions[0] - 0.5],
                    "title": {"text": "query" if column == 0 else "", "standoff": 4},
                },
            }
        )  # fmt: skip
        fig.add_annotation(
            text=name, x=left, xref="paper", y=top - 0.07 * height, yref="paper",
            showarrow=False, xanchor="left", yanchor="bottom", font={"size": 12},
        )  # fmt: skip
        fig.add_trace(
            go.Heatmap(
                x=positions, y=positions, z=value.astype(np.float32), customdata=pairs,
                text=[["" if np.isnan(v) else number(v) for v in line] for line in value],
                coloraxis="coloraxis2" if name == "attention" else "coloraxis",
                xaxis=f"x{suffix}", yaxis=f"y{suffix}", hoverongaps=False, name=name,
                hovertemplate=(
                    "query %{y} %{customdata[0]}<br>key %{x} %{customdata[1]}<br>"
                    f"{name} %{{text}}{unit}<extra></extra>"
                ),
            )
        )  # fmt: skip
    # The second colour axis is made like any first one, and then moved.
    color_axis(fig, "sequential", "attention", 0, 1, len=0.4, x=0.55, y=1.02)
    fig.update_layout(coloraxis2=axes.coloraxis.to_plotly_json())
    color_axis(fig, "diverging", "score and contributions (score units)", 0, most, len=0.5, y=1.02)
    fig.update_layout(
        meta={**axes.meta, "scales": {**axes.meta["scales"], "coloraxis2": "sequential"}},
        # What a query does not see shows the ground of the plot, in a grey that no value has.
        plot_bgcolor=f"{MISSING}33",
    )
    return add_table(
        fig,
        f"Maps of layer {maps.rope.layer} head {maps.head}",
        {
            str(name): [display_text(v) if isinstance(v, str) else v for v in column]
            for name, column in display.to_dataframe().items()
        },
    )
