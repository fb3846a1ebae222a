"""What a reader of a comparison has to know: what besides the models differs, what is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lens_rope.reporting.matching import has_same_rotation
from lens_rope.reporting.saved import read_the_same
from lens_rope.spec import ranges
from lens_rope.words import listed

if TYPE_CHECKING:
    from lens_rope.reporting.saved import SavedReport

_SECTIONS = {
    "usage": "usage", "heads": "heads", "sinks": "sinks", "offset_features": "offset features",
    "bounds": "bounds", "spectrum": "key spectra",
}  # fmt: skip


def notes(
    whole: tuple[SavedReport, SavedReport],
    used: tuple[SavedReport, SavedReport],
    names: tuple[str, str],
) -> tuple[str, ...]:
    """What besides the model differs, and what is not compared.

    Args:
        whole: The two reports as they are.
        used: The two with the layers that are compared.
        names: What they are called.
    """
    a, b = whole
    out = []
    mixed = [] if read_the_same(a, b) else [_prompts(a, b)]
    mixed += [
        f"{what} ({one} and {other})"
        for what, one, other in (
            ("dtype", a.dtype, b.dtype),
            ("host", a.host.get("class", "unknown"), b.host.get("class", "unknown")),
            ("version of lens_rope", a.version, b.version),
        )
        if one != other
    ]
    if mixed:
        out.append(
            f"The reports also differ in {listed(mixed)}, so a difference between their numbers "
            "need not be one between the models."
        )
    if a.shape != b.shape:
        out.append(
            f"{names[0]} has {_shape(a)}, {names[1]} has {_shape(b)}: layers and heads cannot be "
            "matched, so shares and distributions over cycles and depth are compared."
        )
        out += [
            f"Of {name}, only layers {ranges(report.layers)} of {report.n_layers} were read."
            for report, name in zip(whole, names, strict=True)
            if len(report.layers) < report.n_layers
        ]
    else:
        if used[0] is not a or used[1] is not b:
            out.append(
                f"Compared are the layers that both reports have, {ranges(used[0].layers)} of "
                f"{a.n_layers}. Base rates of the bounds and losses are known for all layers of a "
                "report together, and left out where it has more."
            )
        if a.model != b.model:
            out.append(
                "Layers and heads are matched by number, because the two have the same shape; "
                "unless one was trained from the other, such a match means nothing."
            )
        if not has_same_rotation(*used):
            out.append(
                "The two rotate at different frequencies, so pairs of the same index are not "
                "matched, and usage is compared by cycles."
            )
    if a.shape == b.shape and [r.context for r in used[0].ropes] != [
        r.context for r in used[1].ropes
    ]:
        out.append(
            f"Cycles are counted over {_contexts(used[0])} tokens in {names[0]} and over "
            f"{_contexts(used[1])} in {names[1]}."
        )
    for report, name in zip(whole, names, strict=True):
        lacking = [_SECTIONS[section] for section in report.missing if section in _SECTIONS]
        if lacking:
            out.append(
                f"The report of {name} has no {listed(lacking)}, as reports of that version had "
                "not; that is not compared."
            )
        if not report.is_long and "heads" not in report.missing:
            out.append(
                f"The prompts of {name} were too short to tell sinks and patterns, so these are "
                "not compared."
            )
    return tuple(out)


def _prompts(a: SavedReport, b: SavedReport) -> str:
    """How the prompts differ."""

    def named(report: SavedReport) -> str:
        shown = [f"{name}, {n:,} tokens" for name, n in report.prompts[:2]]
        more = report.prompts[2:]
        if more:
            shown.append(f"{len(more)} more with {sum(n for _, n in more):,} tokens")
        return "; ".join(shown) or "none named"

    if a.prompts == b.prompts:
        return "the texts of their prompts, which have the same names and lengths"
    return f"prompts ({named(a)} and {named(b)})"


def _shape(report: SavedReport) -> str:
    pairs = max(rope.n_pairs for rope in report.ropes)
    return f"{report.n_layers} layers of {report.n_heads} heads with {pairs} pairs"


def _contexts(report: SavedReport) -> str:
    return listed([f"{n:,}" for n in sorted({rope.context for rope in report.ropes})])
