"""Maps of head metrics, and how exactly a capture was read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from lens_rope.errors import InputError
from lens_rope.metrics import METRICS
from lens_rope.verify import TOLERANCE
from lens_rope.views.cells import add_cells, row_axis, stacked
from lens_rope.views.downloads import add_table, cell_columns
from lens_rope.views.figures import verification_dots
from lens_rope.views.layout import color_axis, figure, map_height

if TYPE_CHECKING:
    from lens_rope.metrics import HeadMetrics
    from lens_rope.records import RotaryCapture

UNBOUNDED = "positional_sensitivity"
"""The one metric that has no upper end; the others are in [0, 1]."""


def metric_map(found: HeadMetrics, metric: str = UNBOUNDED) -> go.Figure:
    """One metric by layer and head.

    Args:
        found: The metrics of every head.
        metric: One of `metrics.METRICS`.

    Raises:
        InputError: There is no such metric.
    """
    if metric not in METRICS:
        raise InputError(f"metric is {metric!r}; it must be one of {', '.join(METRICS)}")
    values = stacked([np.asarray(getattr(layer, metric), np.float64) for layer in found.layers])
    name = metric.replace("_", " ")
    fig = figure(
        height=map_height(len(found.layers)),
        label=f"Heat map of {name} by layer and head",
        xaxis_title="head",
        showlegend=False,
    )
    seen = values[np.isfinite(values)]
    top = float(seen.max(initial=0)) or 1.0
    if metric == UNBOUNDED:
        color_axis(fig, "sequential", f"{name} (dimensionless)", 0, top)
    else:
        color_axis(fig, "sequential", f"{name} (in [0, 1])", 0, 1, tickvals=[0, 0.25, 0.5, 0.75, 1])
    custom = [[[layer.layer]] * values.shape[1] for layer in found.layers]
    where = "layer %{customdata[0]} head %{x}<br>"
    add_cells(fig, values, values, custom, f"{where}{name} %{{text}}", f"{where}no value")
    row_axis(fig, [layer.layer for layer in found.layers], "layer")
    fig.update_xaxes(range=[-0.5, values.shape[1] - 0.5], showgrid=False, zeroline=False)
    if values.shape[1] <= 24:
        fig.update_xaxes(dtick=1)
    layers = [layer.layer for layer in found.layers]
    return add_table(
        fig,
        f"{name.capitalize()} by layer and head",
        cell_columns(layers, "head", **{metric: values}),
    )


def capture_checks(capture: RotaryCapture) -> go.Figure:
    """Error of the recomputed scores in every layer, the largest over the prompts.

    Args:
        capture: A verified capture.
    """
    worst = [
        max((record.check for record in records), key=lambda check: check.score)
        for records in zip(*capture.records, strict=True)
    ]
    tolerances = {str(dtype).removeprefix("torch."): limit for dtype, limit in TOLERANCE.items()}
    return verification_dots(worst, tolerances[capture.model.dtype])
