"""Two reports row by row: layers, heads, pairs and offset features, matched by their numbers.

Columns end in `_a` for the first report and `_b` for the second; a difference is b minus a. Rows
that only one report has are there, with nan on the other side. Where two models have different
shapes, layers and heads of the same number have nothing to do with each other; the rows are there
all the same, and differences are nan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from lens_rope.reporting.side_by_side import by_depth, magnitude_share

if TYPE_CHECKING:
    from lens_rope.reporting.saved import SavedReport

_HEAD_NUMBERS = ("sink_share", "previous_share", "entropy", "offset_offset", "strength")


def has_same_rotation(a: SavedReport, b: SavedReport) -> bool:
    """Whether pairs of the same index turn at the same frequency in all layers of both."""
    if a.shape != b.shape or a.layers != b.layers:
        return False
    return all(one.same_rotation(other) for one, other in zip(a.ropes, b.ropes, strict=True))


def layer_rows(a: SavedReport, b: SavedReport) -> pd.DataFrame:
    """One row per layer of either: sink heads, features, ranks, and where magnitudes lie.

    Ranks are numbers of components, `query_partial` and `key_partial` the shares of summed mean
    magnitude in partial cycles, `offset_share` that of the rotated offset in the variance of keys.
    """
    return _side_by_side(_layers(a), _layers(b), ["layer"], is_matched=a.shape == b.shape)


def head_rows(a: SavedReport, b: SavedReport) -> pd.DataFrame:
    """One row per head of either: pattern, shares, and the best pair where it is a sink head.

    `pattern_changed` is whether both have a pattern and it differs; `best_pair` is -1 where a head
    is no sink head.
    """
    is_matched = a.shape == b.shape
    table = _side_by_side(_heads(a), _heads(b), ["layer", "head"], is_matched=is_matched)
    both = table["pattern_a"].notna() & table["pattern_b"].notna()
    table["pattern_changed"] = is_matched & both & (table["pattern_a"] != table["pattern_b"])
    for side in ("a", "b"):
        table[f"best_pair_{side}"] = table[f"best_pair_{side}"].fillna(-1).astype(int)
    return table


def pair_rows(a: SavedReport, b: SavedReport) -> pd.DataFrame:
    """One row per layer and pair: magnitudes of both and their ratio, b over a.

    Empty where the two rotate differently, because pairs of the same index are then different
    frequencies.
    """
    columns = [
        "layer", "pair", "wavelength", "cycles_a", "cycles_b",
        *(f"{side}_{end}" for side in ("query", "key") for end in ("a", "b", "ratio")),
    ]  # fmt: skip
    if not has_same_rotation(a, b):
        return pd.DataFrame(columns=columns)
    table = a.usage.merge(
        b.usage.drop(columns="wavelength"), on=["layer", "pair"], suffixes=("_a", "_b")
    )
    for side in ("query", "key"):
        base = table[f"{side}_a"].astype(float)
        table[f"{side}_ratio"] = table[f"{side}_b"] / base.where(base > 0)
    return table.reindex(columns=columns)


def feature_rows(a: SavedReport, b: SavedReport) -> pd.DataFrame:
    """One row per offset feature of either, the largest change of amplitude first.

    `change` is `kept`, `gained` (only in b) or `lost` (only in a). Empty where the two rotate
    differently, as for `pair_rows`.
    """
    columns = [
        "layer", "head", "pair", "change", "cycles",
        *(f"{name}_{side}" for name in ("amplitude", "angle") for side in ("a", "b")),
    ]  # fmt: skip
    if not has_same_rotation(a, b):
        return pd.DataFrame(columns=columns)
    table = _outer(a.features, b.features, ["layer", "head", "pair"])
    has_a, has_b = table["amplitude_a"].notna(), table["amplitude_b"].notna()
    table["change"] = np.select([has_a & has_b, has_b], ["kept", "gained"], "lost")
    table["cycles"] = table["cycles_a"].fillna(table["cycles_b"])
    size = (table["amplitude_b"].fillna(0.0) - table["amplitude_a"].fillna(0.0)).abs()
    order = size.sort_values(ascending=False, kind="stable").index
    return table.loc[order, columns].reset_index(drop=True)


def _layers(report: SavedReport) -> pd.DataFrame:
    table = by_depth(report)[["layer", "sink_heads", "features"]]
    spectrum = report.spectrum[["layer", "rank90_pre", "rank90_post", "offset_share"]]
    table = table.merge(spectrum, on="layer", how="left")
    mean = report.heads.groupby("layer")["sink_share"].mean()
    table.insert(2, "mean_sink_share", table["layer"].map(mean).astype(float))
    for side in ("query", "key"):
        table[f"{side}_partial"] = [
            magnitude_share(report.usage.loc[report.usage["layer"] == layer], side)
            for layer in report.layers
        ]
    return table


def _heads(report: SavedReport) -> pd.DataFrame:
    best = report.sinks[["layer", "head", "best_pair"]]
    columns = ["layer", "head", "pattern", *_HEAD_NUMBERS]
    return report.heads[columns].merge(best, on=["layer", "head"], how="left")


def _side_by_side(
    a: pd.DataFrame, b: pd.DataFrame, keys: list[str], *, is_matched: bool
) -> pd.DataFrame:
    table = _outer(a, b, keys)
    columns = list(keys)
    for name in a.columns.drop(keys):
        columns += [f"{name}_a", f"{name}_b"]
        if name not in ("pattern", "best_pair"):
            difference = table[f"{name}_b"].astype(float) - table[f"{name}_a"].astype(float)
            table[f"{name}_difference"] = difference if is_matched else np.nan
            columns.append(f"{name}_difference")
    return table.reindex(columns=columns)


def _outer(a: pd.DataFrame, b: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Rows of either, in the order of their keys."""
    table = a.merge(b, on=keys, how="outer", suffixes=("_a", "_b"))
    return table.sort_values(keys, ignore_index=True)
