"""What a figure gives to those who download it: a title and its numbers as one tidy table.

The table lies in `layout.meta`, so that a page can write it as CSV without knowing what the figure
shows. It holds values in their own units, where the traces may hold logarithms or words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import plotly.graph_objects as go

    from lens_rope.spec import LayerRope

FEW = 0.25
"""Columns with fewer distinct values than this share of their rows are stored as levels."""


def add_table(fig: go.Figure, title: str, columns: Mapping[str, Any]) -> go.Figure:
    """Gives a figure its title and its table.

    Args:
        fig: The figure.
        title: What it shows in a few words: heading and file name of a download.
        columns: One entry per column, its unit in its name; `[row]` numbers (nan where there is
            no value) or text, or a single value for all rows.

    Returns:
        The figure.

    Raises:
        ValueError: Columns differ in length.
    """
    arrays = [np.asarray(values) for values in columns.values()]
    length = max((array.size for array in arrays if array.ndim), default=1)
    table = {}
    for name, array in zip(columns, arrays, strict=True):
        if array.ndim and array.shape != (length,):
            raise ValueError(f"column {name} is {array.shape}; the table has {length} rows")
        table[name] = _packed(np.broadcast_to(array, (length,)))
    layout: Any = fig.layout
    fig.update_layout(meta={**layout.meta, "title": title, "table": table})
    return fig


def cell_columns(layers: Sequence[int], column: str, **values: np.ndarray) -> dict[str, Any]:
    """Columns of a map of layers.

    Args:
        layers: `[row]` Number of each layer.
        column: Name of what the columns of the map count.
        **values: `[row, column]` each.
    """
    n = next(iter(values.values())).shape[1]
    return {
        "layer": np.repeat(np.asarray(layers), n),
        column: np.tile(np.arange(n), len(layers)),
        **{name: np.asarray(value).ravel() for name, value in values.items()},
    }


def pair_columns(ropes: Sequence[LayerRope], **values: np.ndarray) -> dict[str, Any]:
    """Columns of a map of layers and pairs, with the wavelength and cycles of each pair.

    Args:
        ropes: One rotation per row.
        **values: `[layer, pair]` each; nan where a layer has no such pair.
    """
    n = next(iter(values.values())).shape[1]
    known: dict[str, np.ndarray] = {}
    for name, attribute in (("wavelength_tokens", "wavelength"), ("cycles_over_context", "cycles")):
        known[name] = np.full((len(ropes), n), np.nan)
        for row, rope in zip(known[name], ropes, strict=True):
            row[: rope.n_pairs] = getattr(rope, attribute)
    return cell_columns([rope.layer for rope in ropes], "pair", **{**known, **values})


def _packed(array: np.ndarray) -> Any:
    """A column as a page stores it: text and what repeats itself as levels, numbers in float32."""
    if array.dtype.kind in "fc":
        array = array.astype(np.float32)
    elif array.dtype.kind not in "iub":
        array = array.astype(str)
    if array.dtype.kind == "b":
        array = np.where(array, "yes", "no")
    levels, codes = np.unique(array, return_inverse=True)
    if array.dtype.kind == "U":
        return {"levels": levels.tolist(), "codes": codes.ravel().astype(np.int32)}
    if levels.size < FEW * array.size:
        return {"levels": levels, "codes": codes.ravel().astype(np.int32)}
    return array
