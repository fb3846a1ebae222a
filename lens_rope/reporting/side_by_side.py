"""Reports side by side: the same numbers of each, on axes that models of any shape share.

Pairs are put on the axis of cycles over the context, layers on relative depth, and counts of heads
become shares, so that nothing here needs two models to have the same layers, heads or pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from lens_rope.bounds import BANDS, band

if TYPE_CHECKING:
    from lens_rope.reporting.saved import SavedReport

BINS_PER_OCTAVE = 2
"""Where layers rotate differently, their pairs share bins of cycles of this width."""


def relative_usage(report: SavedReport) -> pd.DataFrame:
    """Usage with magnitudes over their layer's median, so that layers can be put on one axis.

    `query_relative` and `key_relative` are those of the sides, `both_relative` is the geometric
    mean of the two magnitudes over its own median.
    """
    table = report.usage.copy()
    table["both"] = np.sqrt(table["query"].astype(float) * table["key"].astype(float))
    for side in ("query", "key", "both"):
        median = table.groupby("layer")[side].transform("median")
        table[f"{side}_relative"] = table[side] / median.where(median > 0)
    return table


def usage_by_cycles(report: SavedReport) -> pd.DataFrame:
    """Usage against cycles, over layers.

    Where all layers rotate alike each row is one pair; otherwise it is a bin of cycles that holds
    pairs of several layers.

    Returns:
        One row per point, slowest first: cycles (the geometric mean over its pairs), wavelength
        in tokens (likewise), pairs (as text), layers (how many), and for query, key and both the
        `median`, `low` and `high` quartile of the relative magnitude over layers.
    """
    table = relative_usage(report)
    table = table[table["cycles"] > 0]
    if _rotate_alike(report):
        table = table.assign(point=table["pair"])
    else:
        table = table.assign(
            point=np.floor(np.log2(table["cycles"].astype(float)) * BINS_PER_OCTAVE)
        )
    rows = []
    for _, part in table.groupby("point"):
        row: dict[str, Any] = {
            "cycles": _geometric_mean(part["cycles"]),
            "wavelength": _geometric_mean(part["wavelength"]),
            "pairs": _span(part["pair"]),
            "layers": len(set(part["layer"])),
        }
        for side in ("query", "key", "both"):
            values = part[f"{side}_relative"].to_numpy(dtype=np.float64)
            values = values[np.isfinite(values)]
            quartiles = np.quantile(values, (0.25, 0.5, 0.75)) if values.size else (np.nan,) * 3
            names = (f"{side}_{what}" for what in ("low", "median", "high"))
            row.update(zip(names, map(float, quartiles), strict=True))
        rows.append(row)
    columns = ["cycles", "wavelength", "pairs", "layers"] + [
        f"{side}_{what}" for side in ("query", "key", "both") for what in ("median", "low", "high")
    ]
    return pd.DataFrame(rows, columns=columns).sort_values("cycles", ignore_index=True)


def largest_usage(report: SavedReport) -> tuple[float, float] | None:
    """Cycles and relative magnitude of query and key where its median over layers is largest."""
    points = usage_by_cycles(report)
    medians = points["both_median"].to_numpy(dtype=np.float64)
    if not np.isfinite(medians).any():
        return None
    top = int(np.nanargmax(medians))
    return float(points["cycles"].iloc[top]), float(medians[top])


def by_depth(report: SavedReport) -> pd.DataFrame:
    """One row per layer that was read, with its place between the first and the last.

    Returns:
        layer; depth (0 is the model's first layer, 1 its last); sink_heads and its share of the
        layer's heads (nan where sinks cannot be told); features, its strong or weak offset
        features; rank90_pre and rank90_post as shares of the components of the layer's keys.
    """
    table = pd.DataFrame({"layer": list(report.layers)})
    table["depth"] = [depth_of(report, layer) for layer in table["layer"]]
    sinks = report.sinks["layer"].value_counts()
    table["sink_heads"] = table["layer"].map(sinks).fillna(0.0).astype(float)
    if not report.is_long or "sinks" in report.missing:
        table["sink_heads"] = np.nan
    table["sink_share"] = table["sink_heads"] / report.n_heads
    features = report.features["layer"].value_counts()
    table["features"] = table["layer"].map(features).fillna(0.0).astype(float)
    if "offset_features" in report.missing:
        table["features"] = np.nan
    spectrum = report.spectrum.set_index("layer")
    for name in ("rank90_pre", "rank90_post"):
        share = spectrum[name] / spectrum["components"]
        table[name] = table["layer"].map(share).astype(float)
    return table


def depth_of(report: SavedReport, layer: int) -> float:
    """Where a layer is, from 0 for the first of the model to 1 for the last."""
    return layer / max(report.n_layers - 1, 1)


def sink_bands(report: SavedReport) -> dict[str, int]:
    """How many sink heads have their best pair in which band of cycles."""
    cycles = {rope.layer: rope.cycles for rope in report.ropes}
    counts: dict[str, int] = dict.fromkeys(BANDS, 0)
    for layer, pair in zip(report.sinks["layer"], report.sinks["best_pair"], strict=True):
        if 0 <= pair < len(cycles[layer]):
            counts[band(float(cycles[layer][pair]))] += 1
    return counts


def pattern_counts(report: SavedReport) -> dict[str, int]:
    """How many heads have which pattern, the most frequent first."""
    counts = report.heads["pattern"].dropna().value_counts()
    return dict(sorted(((str(n), int(c)) for n, c in counts.items()), key=lambda e: (-e[1], e[0])))


def magnitude_share(usage: pd.DataFrame, side: str) -> float:
    """Share of the summed mean pair magnitude that lies in partial cycles.

    Args:
        usage: Usage of some layers; nan where nothing has a magnitude.
        side: `query` or `key`.
    """
    total = usage[side].sum()
    inside = usage[side][usage["cycles"] < 1].sum()
    return float(inside / total) if total > 0 else np.nan


def _rotate_alike(report: SavedReport) -> bool:
    first = report.ropes[0]
    return all(
        len(rope.cycles) == len(first.cycles) and np.allclose(rope.cycles, first.cycles, rtol=1e-6)
        for rope in report.ropes
    )


def _geometric_mean(values: pd.Series) -> float:
    return float(np.exp(np.log(values.to_numpy(dtype=np.float64)).mean()))


def _span(pairs: pd.Series) -> str:
    low, high = int(pairs.min()), int(pairs.max())
    return str(low) if low == high else f"{low}-{high}"
