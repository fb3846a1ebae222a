"""The page: figures, views and sentences put into one HTML document."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from lens_rope.bounds import SMALLEST_P
from lens_rope.heads import rule
from lens_rope.offsets import CONSTANCY, RELATIVE
from lens_rope.patterns import PATTERNS
from lens_rope.reporting.headlines import headlines
from lens_rope.reporting.sheet import SheetFigures, drawing
from lens_rope.reporting.tables import features_of
from lens_rope.reporting.write import GENERATOR
from lens_rope.sink_heads import CONTROL_QUERIES, EXACT_PAIRS, REMOVAL_QUERIES, sentence
from lens_rope.spectrum import KeySpectrum
from lens_rope.views import (
    figures,
    offset_figures,
    pattern_figures,
    rope_figures,
    sink_figures,
    spectrum_figures,
)
from lens_rope.views.head_figures import MIN_COUNT, distance_curves, pair_bars
from lens_rope.views.heads import SCRIPTS
from lens_rope.views.libraries import (
    asset,
    circuitsvis_js,
)
from lens_rope.words import number, percent

if TYPE_CHECKING:
    from lens_rope.patterns import HeadPattern
    from lens_rope.reporting.data import GalleryHead, ReportData

SINK_ROWS = 12
"""Rows in the table of sink heads; the figure and heads.csv have them all."""
FEATURE_ROWS = 15
"""Rows in the tables of offset features; the figure and offset_features.csv have them all."""
SENTENCES = 8
"""Sink heads explained in words; sinks.csv has the numbers of all."""
PER_PATTERN = 3
"""Heads of each pattern in the table of heads; heads.csv has them all."""
PAGE_BYTES = 14_500_000
"""Most bytes of a page that has room for one window of each head; windows are left out to fit."""
STRIPS = 4
"""Kinds of layer whose rotation is drawn over distance; the tables have them all."""


def render(data: ReportData) -> str:
    """The report as one HTML document that loads nothing from anywhere."""
    figure = SheetFigures().add
    ropes = data.rope.layers
    groups = rope_figures.rope_groups(ropes)
    rotary = [(layers, rope) for layers, rope in groups if rope.n_pairs]
    # In prompts too short to tell sinks nothing is marked as one.
    marked = None if data.is_too_short_for_sinks else data.threshold
    offsets = [entry.offsets for entry in data.layers]
    long = not data.is_too_short_for_sinks
    spectrum = KeySpectrum(data.model, data.spectra, data.spectra[0].pre.n_tokens, ())
    context = {
        **drawing(),
        "data": data,
        "headlines": headlines(data),
        "generator": Markup(GENERATOR + f' {data.version}">'),
        "key_figure": figure(figures.usage_map(ropes, data.usage, "both", relative=True)),
        "verification_figure": figure(figures.verification_dots(data.checks, data.tolerance)),
        "groups": groups,
        "cycles_curve": figure(rope_figures.cycles_curve(ropes)) if rotary else None,
        "cycles_map": figure(rope_figures.cycles_map(ropes)) if len(groups) > 1 else None,
        "strips": [
            (layers, figure(rope_figures.rotation_strips(rope), f"layers {layers}"))
            for layers, rope in rotary[:STRIPS]
        ],
        "more_strips": max(0, len(rotary) - STRIPS),
        "usage_figures": [
            figure(figures.usage_map(ropes, data.usage, side)) for side in ("query", "key")
        ],
        "component_figures": [
            figure(offset_figures.component_map(offsets, side, "largest"))
            for side in ("query", "key")
        ],
        "component_mean_figures": [
            figure(offset_figures.component_map(offsets, side, "mean")) for side in ("query", "key")
        ],
        "bounds_figure": figure(offset_figures.bounds_plot(data.bounds)) if rotary else None,
        "bounds": data.bounds,
        "feature_rows": features_of(data).head(FEATURE_ROWS).to_dict("records"),
        "feature_count": sum(int(entry.is_feature().sum()) for entry in offsets),
        "exceptions": data.bounds.exceptions().head(FEATURE_ROWS).to_dict("records"),
        "constancy": CONSTANCY,
        "relative": RELATIVE,
        "removal_figure": figure(sink_figures.removal_dots(data.sinks)) if data.sinks else None,
        "sink_pairs_figure": figure(sink_figures.sink_pairs(data.sinks)) if data.sinks else None,
        "sink_sentences": [
            sentence(sink, data.where(sink)) for sink in data.sink_heads_by_shares()[:SENTENCES]
        ],
        "smallest_p": SMALLEST_P,
        "control_queries": CONTROL_QUERIES,
        "removal_queries": f"{REMOVAL_QUERIES:,}",
        "exact_pairs": EXACT_PAIRS,
        "pattern_figure": figure(pattern_figures.pattern_map(data.heads)) if long else None,
        "offset_share_figure": figure(pattern_figures.offset_share_map(data.heads)),
        "naming_rule": rule(),
        "pattern_rows": _pattern_rows(data),
        "spectrum_figure": figure(spectrum_figures.spectrum_histogram(spectrum)),
        "rank_figure": figure(spectrum_figures.rank_curve(spectrum)),
        "spectrum_rows": data.spectra,
        "sink_figure": figure(figures.share_map(data.shares, "sink", threshold=marked)),
        "previous_figure": figure(figures.share_map(data.shares, "previous")),
        "sink_rows": [] if marked is None else _sink_rows(data),
        "pattern_only": any(check.route == "hook_cos_pattern" for check in data.checks),
        "circuitsvis_js": Markup(circuitsvis_js()),
        "head_js": Markup("\n".join(asset(name) for name in SCRIPTS)),
        "head_css": Markup(asset("head.css")),
        "min_count": MIN_COUNT,
    }
    gallery = [_gallery(head, figure) for head in data.gallery]
    template = environment().get_template("report.html")
    # What the heads' maps may take is what all the rest leaves.
    bare = template.render(context, gallery=[{**item, "maps": ""} for item in gallery])
    room = (PAGE_BYTES - len(bare.encode())) // max(len(gallery), 1)
    for item in gallery:
        item["maps"] = Markup(item["head"].maps.cut(room).to_json())
    return template.render(context, gallery=gallery)


def _gallery(head: GalleryHead, figure: Any) -> dict[str, Any]:
    name = f"layer {head.layer} head {head.head}"
    return {
        "head": head,
        "bars": figure(pair_bars(head.by_pair, head.rope), name),
        "curves": figure(distance_curves(head.by_distance, head.by_pair, head.rope), name),
    }


def _sink_rows(data: ReportData) -> list[dict[str, Any]]:
    rows = [
        {
            "layer": entry.layer,
            "head": head,
            "share": float(entry.sink_share[head]),
            "position": int(entry.sink_position[head]),
            "token": data.token_at(int(entry.sink_position[head])),
            "previous": float(entry.previous_share[head]),
        }
        for entry in data.shares
        for head in range(len(entry.sink_share))
        if entry.sink_share[head] > data.threshold
    ]
    return sorted(rows, key=lambda row: (-row["share"], row["layer"], row["head"]))[:SINK_ROWS]


def _pattern_rows(data: ReportData) -> list[HeadPattern]:
    """The strongest heads of each pattern, the most specific pattern first."""
    rows: list[HeadPattern] = []
    for name in PATTERNS:
        if name == "mixed":
            continue
        found = [head for head in data.heads if head.pattern == name]
        found.sort(key=lambda head: (-head.strength, head.layer, head.head))
        rows += found[:PER_PATTERN]
    return rows


@cache
def environment() -> Environment:
    """The templates of this package, with the filters that they use."""

    def load(name: str) -> str:
        return (
            files("lens_rope.reporting").joinpath(f"templates/{name}").read_text(encoding="utf-8")
        )

    templates = Environment(
        loader=FunctionLoader(load),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(number=number, percent=percent)
    return templates
