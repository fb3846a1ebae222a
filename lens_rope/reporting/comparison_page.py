"""The page of a comparison, and what a notebook shows of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from lens_rope.errors import InputError
from lens_rope.reporting.report_metrics import SHARE
from lens_rope.reporting.sheet import SheetFigures, drawing, shown
from lens_rope.reporting.side_by_side import by_depth, usage_by_cycles
from lens_rope.views import comparison_figures as drawn
from lens_rope.views.comparison_maps import grid, share_difference_map, usage_ratio_map
from lens_rope.views.comparison_styles import plain, swatch
from lens_rope.views.tables import Description, Table
from lens_rope.words import number, percent

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from lens_rope.reporting.comparison import Comparison

ROWS = 15
"""Rows in the tables of heads and of offset features; the CSV files have them all."""


def usage_figure(comparison: Comparison, side: drawn.Side = "both") -> go.Figure:
    """Magnitude against cycles, one curve per report.

    Raises:
        InputError: One of the two has no usage.
    """
    for report, name in zip((comparison.first, comparison.second), comparison.names, strict=True):
        if "usage" in report.missing:
            raise InputError(
                f"the report of {plain(name)} has no usage to draw; make it again with this version"
            )
    tables = [usage_by_cycles(report) for report in (comparison.first, comparison.second)]
    return drawn.usage_curves(comparison.names, tables, side)


def render(comparison: Comparison) -> str:
    """The comparison as one HTML document."""
    from lens_rope.reporting.page import environment

    figures = SheetFigures()
    reports = comparison.first, comparison.second
    names = comparison.names
    depths = [by_depth(report) for report in reports]
    has_usage = not any("usage" in report.missing for report in reports)
    has_sinks = all(table["sink_share"].notna().any() for table in depths)
    has_ranks = all(table["rank90_post"].notna().any() for table in depths)
    context: dict[str, Any] = {
        "names": [plain(name) for name in names],
        "sentences": [plain(sentence) for sentence in comparison.sentences],
        "notes": [plain(note) for note in comparison.notes],
        "usage": figures.add(usage_figure(comparison)) if has_usage else None,
        "sides": (
            [figures.add(usage_figure(comparison, side)) for side in ("query", "key")]
            if has_usage
            else []
        ),
        "ratios": _ratios(comparison, figures) if has_usage else [],
        "sinks": figures.add(drawn.sink_curves(names, depths)) if has_sinks else None,
        "sink_map": _sink_map(comparison, figures) if has_sinks else None,
        "ranks": figures.add(drawn.rank_curves(names, depths)) if has_ranks else None,
        "metrics": metric_rows(comparison.to_dataframe()),
        "head_rows": _head_rows(comparison),
        "feature_rows": _feature_rows(comparison),
        "reports": reports,
        "plain": plain,
        "swatches": [Markup(swatch(index)) for index in range(2)],
        **drawing(),
    }
    return environment().get_template("compare.html").render(context)


def describe(comparison: Comparison) -> Description:
    """What a terminal and a notebook are told: the sentences, and the metrics as a table."""
    import pandas as pd

    a, b = map(plain, comparison.names)
    return Description(
        sentences=(f"{a} and {b} compared", *map(plain, comparison.sentences)),
        table=Table(
            title=f"Metrics; differences are {b} minus {a}, those of shares in percentage points",
            frame=pd.DataFrame(metric_rows(comparison.to_dataframe())),
            columns={
                "metric": ("metric", str), "a": (a, str), "b": (b, str),
                "difference": ("difference", str),
            },
            wraps=("metric", a, b),
        ),
        notes=tuple(map(plain, comparison.notes)),
    )  # fmt: skip


def notebook_output(comparison: Comparison) -> str:
    """Sentences, metrics and usage as the output of a notebook."""
    from lens_rope.views.result_html import result_html

    has_usage = not any("usage" in r.missing for r in (comparison.first, comparison.second))
    return result_html(describe(comparison), [usage_figure(comparison)] if has_usage else [])


def metric_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """The table of metrics as text: shares in percent, their differences in percentage points."""
    return [
        {
            "metric": row["what"] if row["unit"] == SHARE else f"{row['what']} ({row['unit']})",
            "a": shown(row["a"], row["unit"]),
            "b": shown(row["b"], row["unit"]),
            "difference": _difference(row["difference"], row["unit"]),
        }
        for row in table.to_dict("records")
    ]


def _difference(value: float, unit: str) -> str:
    if not np.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if unit == SHARE:
        points = f"{100 * abs(value):.1f}"
        size = f"{'under 0.1' if points == '0.0' else points} points"
    else:
        size = number(abs(value))
    return f"{'+' if value > 0 else '−'}{size}"


def _ratios(comparison: Comparison, figures: SheetFigures) -> list[Any]:
    """Maps of how pairs changed, where they can be matched and some did."""
    pairs = comparison.pairs()
    layers = comparison.first.layers
    out = []
    for side in ("query", "key") if len(pairs) else ():
        ratio = grid(pairs, layers, "pair", f"{side}_ratio")
        ropes = comparison.first.ropes
        out.append(figures.add(usage_ratio_map(comparison.names, ropes, ratio, side)))
    return out


def _sink_map(comparison: Comparison, figures: SheetFigures) -> Any:
    if not comparison.is_matched:
        return None
    layers = comparison.first.layers
    first, second = (
        grid(report.heads, layers, "head", "sink_share")
        for report in (comparison.first, comparison.second)
    )
    if first.shape != second.shape:
        return None
    return figures.add(share_difference_map(comparison.names, layers, first, second))


def _head_rows(comparison: Comparison) -> list[dict[str, str]]:
    """The heads whose sink share or pattern changed most, as text."""
    if not comparison.is_matched:
        return []
    heads = comparison.heads()
    size = heads["sink_share_difference"].abs().fillna(0.0)
    heads = heads[(size > 0) | heads["pattern_changed"]]
    heads = heads.loc[size[heads.index].sort_values(ascending=False, kind="stable").index]
    return [
        {
            "head": f"{row['layer']}.{row['head']}",
            "patterns": _arrow(row["pattern_a"] or "–", row["pattern_b"] or "–"),
            "sink_share": _arrow(percent(row["sink_share_a"]), percent(row["sink_share_b"])),
            "previous": _arrow(percent(row["previous_share_a"]), percent(row["previous_share_b"])),
            "offset": _arrow(percent(row["offset_offset_a"]), percent(row["offset_offset_b"])),
            "best_pair": _arrow(
                *("–" if p < 0 else str(p) for p in (row["best_pair_a"], row["best_pair_b"]))
            ),
        }
        for row in heads.head(ROWS).to_dict("records")
    ]


def _feature_rows(comparison: Comparison) -> list[dict[str, str]]:
    """The offset features that were gained or lost, the largest first, as text."""
    features = comparison.features()
    changed = features[features["change"] != "kept"]
    return [
        {
            "head": f"{row['layer']}.{row['head']}",
            "pair": str(row["pair"]),
            "change": row["change"],
            "cycles": number(row["cycles"]),
            "amplitude": number(
                row["amplitude_b"] if row["change"] == "gained" else row["amplitude_a"]
            ),
        }
        for row in changed.head(ROWS).to_dict("records")
    ]


def _arrow(before: str, after: str) -> str:
    return before if before == after else f"{before} → {after}"
