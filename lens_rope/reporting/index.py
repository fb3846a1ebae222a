"""The page of a folder of reports: the models side by side, then each report with its findings.

What is compared is read from each `report.json`; a report without one, or with one that cannot be
read, has its card all the same, with a remark.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from lens_rope.errors import InputError
from lens_rope.reporting.page import environment
from lens_rope.reporting.report_files import FILE, read_report
from lens_rope.reporting.report_metrics import SHARE, metrics
from lens_rope.reporting.saved import SavedReport, read_the_same
from lens_rope.reporting.sheet import SheetFigures, drawing, shown
from lens_rope.reporting.side_by_side import by_depth, usage_by_cycles
from lens_rope.reporting.write import GENERATOR, read_markers
from lens_rope.views import comparison_figures as drawn
from lens_rope.views.comparison_styles import plain, swatch
from lens_rope.words import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FINDINGS = 5
"""Findings on the card of a report; its own page has all of them."""

# Columns of each table: heading, metric, and the metric that is its base rate.
_TABLES: dict[str, tuple[tuple[str, str, str | None], ...]] = {
    "usage": (
        ("layers", "layers", None),
        ("query heads", "heads", None),
        ("key heads", "kv_heads", None),
        ("context (tokens)", "context", None),
        ("pairs in partial cycles", "partial_pairs", None),
        ("query magnitude there", "query_partial", None),
        ("key magnitude there", "key_partial", None),
        ("largest usage (× median)", "largest_usage", None),
        ("at cycles", "cycles_at_largest_usage", None),
    ),
    "sinks": (
        ("sink heads", "sink_heads", None),
        ("of all heads", "sink_head_share", None),
        ("first layer", "first_sink_layer", None),
        ("at the first token", "sinks_at_first_token", None),
        ("best pair: full cycles", "sinks_by_full_cycles", None),
        ("partial cycle", "sinks_by_partial_cycle", None),
        ("below half a cycle", "sinks_by_below_half_a_cycle", None),
        ("gone without it", "sinks_gone", None),
    ),
    "bounds": (
        ("offset features", "offset_features", None),
        ("strong ones", "strong_features", None),
        ("at most half a cycle", "within_half_cycle", "base_rate_half_cycle"),
        ("right angle", "within_angle", "base_rate_angle"),
        ("all bounds", "within_region", "base_rate_region"),
    ),
    "keys": (
        ("components before RoPE", "rank90_pre", None),
        ("after RoPE", "rank90_post", None),
        ("rotated offset", "offset_share", None),
    ),
}


@dataclass(frozen=True)
class Card:
    """One report as the index shows it.

    Attributes:
        folder: Name of its folder.
        name: What it is called; the model, or model and folder where models have one name.
        page: Whether it has a page to link.
        facts: Shape, host and size, as a sentence.
        findings: Its first findings.
        files: Files to link, relative to the folder.
        created: When it was gathered.
        remark: Why it is not compared, or None.
        report: What is compared, or None.
    """

    folder: str
    name: str
    page: bool
    facts: str
    findings: tuple[str, ...]
    files: tuple[str, ...]
    created: str
    remark: str | None
    report: SavedReport | None


def render_index(folder: str | Path, failed: Sequence[tuple[str, str]] = ()) -> str:
    """The index of every report in a folder.

    Args:
        folder: A folder that holds one folder per report.
        failed: (model, what went wrong) of each model that has no report.
    """
    cards, foreign = _cards(Path(folder))
    compared = [card for card in cards if card.report is not None]
    is_compared = len(compared) > 1
    context: dict[str, Any] = {
        "cards": cards,
        "foreign": foreign,
        "failed": [(plain(model), plain(reason)) for model, reason in failed],
        "sections": [],
        "notes": [],
        "is_compared": is_compared,
        "swatches": {},
        "max_bands": drawn.MAX_BANDS,
        "plain": plain,
        "generator": Markup(GENERATOR + '">'),
    }
    if is_compared:
        context |= {
            **drawing(),
            "sections": _sections(compared),
            "notes": _notes(compared),
            "swatches": {card.folder: Markup(swatch(i)) for i, card in enumerate(compared)},
        }
    return environment().get_template("index.html").render(context)


def _sections(cards: Sequence[Card]) -> list[dict[str, Any]]:
    """What is compared, one entry per section that has something to show."""
    reports = [card.report for card in cards if card.report is not None]
    names = [card.name for card in cards]
    figures = SheetFigures()
    values = [{entry.name: entry for entry in metrics(report)} for report in reports]
    depths = [by_depth(report) for report in reports]
    usages = [usage_by_cycles(report) for report in reports]

    def numbers(metric: str) -> list[float]:
        return [of[metric].value if metric in of else float("nan") for of in values]

    def any_known(column: str) -> bool:
        return any(table[column].notna().any() for table in depths)

    bounds = [numbers(name) for name in ("within_half_cycle", "base_rate_half_cycle")]
    builders: dict[str, tuple[bool, Callable[[], list[Any]]]] = {
        "usage": (
            any(len(table) for table in usages),
            lambda: [drawn.usage_curves(names, usages, s) for s in ("both", "query", "key")],
        ),
        "sinks": (any_known("sink_share"), lambda: [drawn.sink_curves(names, depths)]),
        "bounds": (
            bool(np.isfinite(bounds[0]).any()),
            lambda: [drawn.bound_dots(names, *bounds)],
        ),
        "keys": (any_known("rank90_post"), lambda: [drawn.rank_curves(names, depths)]),
    }
    sections = []
    for name, (has_figure, build) in builders.items():
        columns = [entry for entry in _TABLES[name] if np.isfinite(numbers(entry[1])).any()]
        if columns:
            sections.append(
                {
                    "id": name,
                    "figures": [figures.add(fig) for fig in build()] if has_figure else [],
                    "headings": [heading for heading, _, _ in columns],
                    "rows": [
                        [_cell(of, metric, base) for _, metric, base in columns] for of in values
                    ],
                    "cards": cards,
                }
            )
    return sections


def _cell(values: dict[str, Any], metric: str, base: str | None) -> str:
    if metric not in values:
        return "–"
    text = shown(values[metric].value, values[metric].unit)
    if base is not None and base in values and np.isfinite(values[metric].value):
        text += f" (base rate {shown(values[base].value, SHARE)})"
    return text


def _notes(cards: Sequence[Card]) -> list[str]:
    """What besides the model differs between the reports."""
    reports = [card.report for card in cards if card.report is not None]
    what = {
        "prompts": {True, *(read_the_same(reports[0], report) for report in reports)},
        "dtype": {report.dtype for report in reports},
        "host": {report.host.get("class") for report in reports},
        "version of lens_rope": {report.version for report in reports},
    }
    mixed = [name for name, values in what.items() if len(values) > 1]
    notes = []
    if mixed:
        notes.append(
            f"The reports do not all have the same {listed(mixed)}, so a difference between their "
            "numbers need not be one between the models."
        )
    partly = [
        f"{len(report.layers)} of {report.n_layers} of {card.name}"
        for card, report in zip(cards, reports, strict=True)
        if len(report.layers) < report.n_layers
    ]
    if partly:
        notes.append(f"Not all layers were read: {', '.join(partly)}.")
    return notes


def _cards(folder: Path) -> tuple[list[Card], list[str]]:
    """Every report in a folder, and remarks on what only looks like one."""
    markers = dict(read_markers(folder))
    found: dict[str, tuple[SavedReport | None, str | None]] = {}
    for path in sorted(folder.glob("*/" + FILE)):
        name = path.parent.name
        # Folders that begin with a dot are being written.
        if not name.startswith("."):
            found[name] = _read(path)
    foreign = []
    cards = []
    for name in sorted({*markers, *found}):
        report, remark = found.get(name, (None, None))
        if name not in markers and report is None:
            foreign.append(f"{plain(name)} is passed over: {plain(remark or 'no report')}.")
            continue
        cards.append(_card(folder / name, markers.get(name), report, remark))
    names = [card.name for card in cards]
    return [
        card
        if names.count(card.name) == 1
        else dataclasses.replace(card, name=f"{card.name} ({plain(card.folder)})")
        for card in cards
    ], foreign


def _read(path: Path) -> tuple[SavedReport | None, str | None]:
    try:
        return read_report(path), None
    except InputError as error:
        # Where the index lies says where the report is.
        return None, str(error).replace(str(path), FILE)


def _card(
    folder: Path, marker: dict[str, Any] | None, report: SavedReport | None, remark: str | None
) -> Card:
    if marker is not None:
        files = tuple(marker["files"])
        if FILE not in files:
            remark = f"It is not compared, as it was written without {FILE}."
            report = None
        elif report is None:
            remark = f"It is not compared: {remark or f'{FILE} does not exist'}."
        facts = (
            f"{marker['layers']} layers of {marker['heads']} heads, {marker['host']}, "
            f"{marker['tokens']:,} tokens; relative error at most "
            f"{marker['max_relative_error']:.1e}."
        )
        model, created, findings = marker["model"], marker["created"], marker["findings"]
    elif report is None:
        raise ValueError(f"{folder} holds no report; cards are of reports")
    else:
        tables = (f"tables/{path.name}" for path in sorted(folder.glob("tables/*.csv")))
        files = (*(n for n in ("report.html", FILE) if (folder / n).is_file()), *tables)
        facts = (
            f"{len(report.layers)} layers of {report.n_heads} heads, "
            f"{report.host.get('class', 'unknown host')}, "
            f"{sum(n for _, n in report.prompts):,} tokens."
        )
        model, created, findings = report.model, report.created, report.findings
    # The facts tell what was verified.
    said = [finding for finding in findings if not finding.startswith("Verified")]
    return Card(
        folder=folder.name,
        name=plain(model),
        page="report.html" in files,
        facts=plain(facts),
        findings=tuple(plain(finding) for finding in said[:FINDINGS]),
        files=files,
        created=plain(created),
        remark=None if remark is None else plain(remark).replace("..", "."),
        report=report,
    )
