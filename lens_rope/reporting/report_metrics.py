"""The numbers that reports are compared by, each with a name, a unit and what it is in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from lens_rope.reporting.side_by_side import (
    by_depth,
    largest_usage,
    magnitude_share,
    pattern_counts,
    sink_bands,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lens_rope.reporting.saved import SavedReport

SHARE = "share"
"""Unit of shares, which are shown as percentages."""


@dataclass(frozen=True)
class Metric:
    """One number of one report.

    Attributes:
        name: Its name, that of a column.
        what: What it is, in words.
        unit: Its unit; `share` for shares.
        value: nan where the report has no such number.
    """

    name: str
    what: str
    unit: str
    value: float


def metrics(report: SavedReport, patterns: Iterable[str] = ()) -> list[Metric]:
    """The numbers that reports are compared by, in the order of a report's sections.

    Args:
        report: The report.
        patterns: Patterns to count even where no head has them.
    """
    return [
        *_shape(report),
        *_usage(report),
        *_sinks(report),
        *_patterns(report, patterns),
        *_features(report),
        *_keys(report),
        *_loss(report),
    ]


def metric_table(reports: Sequence[SavedReport]) -> pd.DataFrame:
    """Metrics of several reports side by side; one that only some have is nan in the others.

    Returns:
        One row per metric: `metric`, `unit`, one column of values per report, numbered from 0, and
        `what` in words.
    """
    # A pattern that one report names and another does not is 0 there, not unknown.
    patterns = dict.fromkeys(name for report in reports for name in pattern_counts(report))
    order: dict[str, Metric] = {}
    columns: list[dict[str, float]] = []
    for report in reports:
        found = metrics(report, patterns)
        columns.append({entry.name: entry.value for entry in found})
        for entry in found:
            order.setdefault(entry.name, entry)
    return pd.DataFrame(
        {
            "metric": list(order),
            "unit": [entry.unit for entry in order.values()],
            **{
                index: [float(values.get(name, np.nan)) for name in order]
                for index, values in enumerate(columns)
            },
            "what": [entry.what for entry in order.values()],
        }
    )


def _shape(report: SavedReport) -> Iterator[Metric]:
    yield Metric("layers", "layers that were read", "layers", len(report.layers))
    yield Metric("heads", "query heads in a layer", "heads", report.n_heads)
    yield Metric("kv_heads", "key heads in a layer", "heads", report.n_kv_heads)
    yield Metric("tokens", "tokens that were read", "tokens", sum(n for _, n in report.prompts))
    context = max(rope.context for rope in report.ropes)
    yield Metric("context", "context of the layers, the longest", "tokens", context)


def _usage(report: SavedReport) -> Iterator[Metric]:
    cycles = np.concatenate([rope.cycles for rope in report.ropes])
    if cycles.size:
        share = float((cycles < 1).mean())
        yield Metric("partial_pairs", "pairs that are partial cycles", SHARE, share)
    if "usage" in report.missing:
        return
    for side in ("query", "key"):
        what = f"{side} magnitude in partial cycles"
        yield Metric(f"{side}_partial", what, SHARE, magnitude_share(report.usage, side))
    top = largest_usage(report)
    if top is not None:
        what = "largest usage, query and key, median over layers"
        yield Metric("largest_usage", what, "× layer median", top[1])
        yield Metric("cycles_at_largest_usage", "where usage is largest", "cycles", top[0])


def _sinks(report: SavedReport) -> Iterator[Metric]:
    if "sinks" in report.missing or not report.is_long:
        return
    sinks = report.sinks
    yield Metric("sink_heads", "sink heads", "heads", len(sinks))
    yield Metric(
        "sink_head_share", "heads that are sink heads", SHARE, len(sinks) / len(report.heads)
    )
    if not len(sinks):
        return
    first = int(sinks["layer"].min())
    yield Metric("first_sink_layer", "first layer with a sink head", "layer", first)
    at_first = float((sinks["position"] == 0).mean())
    yield Metric("sinks_at_first_token", "sinks that are the first token", SHARE, at_first)
    counts = sink_bands(report)
    for name, count in counts.items() if sum(counts.values()) else ():
        yield Metric(
            f"sinks_by_{name.replace(' ', '_')}", f"sinks whose best pair is in: {name}", SHARE,
            count / sum(counts.values()),
        )  # fmt: skip
    without = sinks["share_without"].dropna()
    if len(without):
        gone = float((without < report.collapsed_below).mean())
        yield Metric("sinks_gone", "sinks that are gone without their best pair", SHARE, gone)


def _patterns(report: SavedReport, patterns: Iterable[str]) -> Iterator[Metric]:
    if report.is_long:
        counts = pattern_counts(report)
        for name in dict.fromkeys((*patterns, *counts)):
            yield Metric(
                f"pattern_{name.replace(' ', '_')}", f"heads with the pattern: {name}", SHARE,
                counts.get(name, 0) / len(report.heads),
            )  # fmt: skip
    for name, what in (
        ("previous_share", "attention to the previous token, mean over heads"),
        ("offset_offset", "score variance from offsets alone, mean over heads"),
    ):
        values = report.heads[name].dropna()
        if len(values):
            yield Metric(f"mean_{name}", what, SHARE, float(values.mean()))


def _features(report: SavedReport) -> Iterator[Metric]:
    if "offset_features" not in report.missing:
        n = len(report.features)
        yield Metric("offset_features", "offset features", "features", n)
    if "features" not in report.bounds:
        return
    n = report.bounds["features"]
    yield Metric("strong_features", "strong offset features", "features", n)
    for name, what in _BOUNDS.items():
        within = report.bounds.get(f"within_{name}", np.nan)
        yield Metric(f"within_{name}", f"strong features {what}", SHARE, within)
        base = report.bounds.get(f"base_rate_{name}", np.nan)
        if np.isfinite(base):
            yield Metric(f"base_rate_{name}", f"all pairs {what}", SHARE, base)


_BOUNDS = {
    "half_cycle": "of at most half a cycle",
    "angle": "with query and key a right angle apart",
    "region": "within all bounds",
}


def _keys(report: SavedReport) -> Iterator[Metric]:
    depth = by_depth(report)
    for side, when in (("pre", "before"), ("post", "after")):
        ranks = depth[f"rank90_{side}"].dropna()
        if len(ranks):
            yield Metric(
                f"rank90_{side}",
                f"components with 90% of key variance {when} RoPE, median over layers", SHARE,
                float(ranks.median()),
            )  # fmt: skip
    offset = report.spectrum["offset_share"].dropna()
    if len(offset):
        what = "key variance that is the rotated offset, median over layers"
        yield Metric("offset_share", what, SHARE, float(offset.median()))


def _loss(report: SavedReport) -> Iterator[Metric]:
    if report.loss is not None:
        before, after = report.loss
        yield Metric("loss", "loss", "nats per token", before)
        what = "loss without the best pair of each sink head"
        yield Metric("loss_without_best_pairs", what, "nats per token", after)
