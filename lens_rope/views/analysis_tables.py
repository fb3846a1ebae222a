"""The analyses as tables for a terminal, as text: one headline, one table."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from lens_rope.patterns import PATTERNS
from lens_rope.spec import ranges
from lens_rope.views.terminal import MAX_ROWS, WIDTH, frame_table
from lens_rope.views.tokens import SPACE, display_text
from lens_rope.words import number, percent

if TYPE_CHECKING:
    import pandas as pd

    from lens_rope.ablation_effects import AblationReport
    from lens_rope.bounds import BoundsCheck
    from lens_rope.heads import HeadExplanation
    from lens_rope.offsets import OffsetFeatures
    from lens_rope.sink_heads import SinkExplanation
    from lens_rope.spectrum import KeySpectrum

CLEAREST = 4
"""Heads of each pattern that a table shows where there are too many to show all."""


def sinks_table(found: SinkExplanation) -> str:
    """How many sink heads there are, the strongest in words, and the strongest as a table."""
    from lens_rope.sink_heads import sentence, sink_table

    sinks = sorted(found.heads, key=lambda e: (-e.share, e.layer, e.head))
    # Tokens on one line; among words, a space need not be made visible.
    where = [display_text(found.where(sink)).replace(SPACE, " ") for sink in sinks]
    strongest = [sentence(*first) for first in list(zip(sinks, where, strict=True))[:1]]
    lines = _wrapped(_headline(found), *strongest)
    table = _with_heads(sink_table(sinks)).assign(at=where)
    if not len(table):
        return lines
    return lines + frame_table(
        "The pair that adds most to the sink's advantage, and the sink share without it, without "
        "the two best, without another (median)",
        table,
        {
            "head": ("head", str),
            "at": ("at", str),
            "sink_share": ("share", percent),
            "best_pair": ("pair", _index),
            "wavelength": ("wavelength", number),
            "cycles": ("cycles", number),
            "best_advantage": ("adds", _tenth),
            "advantage": ("of", _tenth),
            "share_without_best": ("without it", percent),
            "share_without_two": ("without two", percent),
            "control_share": ("without other", percent),
        },
        wraps=["at"],
    )


def heads_table(found: HeadExplanation) -> str:
    """How many heads have each pattern, and the clearest of each as a table."""
    order = ["strength", "layer", "head"]
    table = found.to_dataframe().sort_values(order, ascending=[False, True, True])
    table = _with_heads(table)
    title = "What each head does"
    if len(table) > MAX_ROWS and table["pattern"].notna().any():
        table = table.groupby("pattern", sort=False).head(CLEAREST)
        table = table.sort_values(
            "pattern", key=lambda names: names.map(PATTERNS.index), kind="stable"
        )
        title = f"The {CLEAREST} clearest heads of each pattern; csv and json have all heads"
    counts = ", ".join(
        f"{count} {'not named' if name == 'None' else name}"
        for name, count in found.counts().items()
    )
    return _wrapped(f"{len(found.heads)} heads of {found.model.name}: {counts}") + frame_table(
        f"{title}; 'positional' is the share of offset·offset in the score variance",
        table,
        {
            "head": ("head", str),
            "pattern": ("pattern", str),
            "also": ("also", str),
            "strength": ("strength", _thousandth),
            "base_rate": ("base rate", _thousandth),
            "entropy": ("entropy", _thousandth),
            "offset_offset": ("positional", _thousandth),
            "pair": ("pair", _index),
            "wavelength": ("wavelength", number),
            "advantage": ("adds", _tenth),
            "total_advantage": ("of", _tenth),
        },
        wraps=["also"],
    )


def features_table(found: OffsetFeatures) -> str:
    """How many offset features there are, and the largest."""
    table = _with_heads(found.features())
    lines = _wrapped(_headline(found))
    if not len(table):
        return lines
    return lines + frame_table(
        "Offset features, the largest amplitude first (size: mean length over the head's median)",
        table,
        {
            "head": ("head", str),
            "kv_head": ("key head", _index),
            "pair": ("pair", _index),
            "wavelength": ("wavelength", number),
            "cycles": ("cycles", number),
            "query_relative": ("query size", number),
            "key_relative": ("key size", number),
            "query_constancy": ("query constancy", _thousandth),
            "key_constancy": ("key constancy", _thousandth),
            "amplitude": ("amplitude", number),
            "angle": ("angle (rad)", number),
        },
    )


def outliers_table(found: OffsetFeatures, relative: float) -> str:
    """Pairs that are large in the queries or keys of a head, the largest first."""
    return frame_table(
        f"Outliers of {found.model.name}: pairs of size {relative:g} or more (mean length over the "
        "head's median; key heads for keys)",
        _with_heads(found.outliers(relative)),
        {
            "head": ("head", str),
            "side": ("side", str),
            "pair": ("pair", _index),
            "wavelength": ("wavelength", number),
            "cycles": ("cycles", number),
            "mean": ("mean length", number),
            "largest": ("largest length", number),
            "relative": ("size", number),
            "constancy": ("constancy", _thousandth),
        },
    )


def bounds_table(check: BoundsCheck) -> str:
    """Strong offset features against each bound."""
    return frame_table(
        f"Bounds on the {_headline(check)}",
        check.to_dataframe(),
        {
            "bound": ("bound", lambda name: name.replace("_", " ")),
            "features": ("features", _index),
            "within": ("within", _index),
            "share": ("share", percent),
            "base_rate": ("base rate", percent),
            "p_value": ("p (by layer)", number),
            "p_binomial": ("p (binomial)", number),
            "distinct": ("distinct", _index),
            "within_distinct": ("distinct within", _index),
            "p_binomial_distinct": ("p (distinct)", number),
        },
    )


def spectrum_table(found: KeySpectrum, *, by_head: bool = False) -> str:
    """Key spectra before → after rotation, by layer or by key head."""
    table = found.heads_dataframe() if by_head else found.to_dataframe()
    columns: dict[str, tuple[str, Callable[[Any], str]]] = {"layer": ("layer", _index)}
    if by_head:
        columns["kv_head"] = ("key head", _index)
    for name, heading, form in (
        ("rank90", "rank 90%", number),
        ("rank99", "rank 99%", number),
        ("participation_ratio", "participation", number),
        ("trace", "variance", number),
        ("near_zero", "near zero", percent),
        ("median", "median", number),
    ):
        table[name] = _arrows(table[f"{name}_pre"], table[f"{name}_post"], form)
        columns[name] = (heading, str)
    columns["offset_energy"] = ("offset energy", number)
    columns["offset_share"] = ("offset share", percent)
    return _wrapped(_headline(found)) + frame_table("Before → after rotation", table, columns)


def ablation_table(done: AblationReport) -> str:
    """What the intervention did to the loss, and to each ablated head."""
    table = _with_heads(done.to_dataframe())
    table["pairs"] = [ranges(head.pairs) for head in done.heads]
    for name in ("sink", "previous"):
        table[name] = _arrows(table[f"{name}_before"], table[f"{name}_after"], percent)
    # The notes are shown apart.
    sentences = dataclasses.replace(done, notes=()).summary()
    return _wrapped(sentences) + frame_table(
        "Attention of each ablated head before → after, and after with random other pairs; change "
        "is the distance between the two, in [0, 1]",
        table,
        {
            "head": ("head", str),
            "pairs": ("pairs", str),
            "sink": ("sink share", str),
            "sink_control": ("random", percent),
            "previous": ("previous token", str),
            "previous_control": ("random", percent),
            "change": ("change", _hundredth),
            "change_control": ("random", _hundredth),
        },
        wraps=["pairs"],
    )


def _headline(result: Any) -> str:
    """The first line of what a result shows of itself."""
    return repr(result).partition("\n")[0]


def _wrapped(*sentences: str) -> str:
    return "".join(f"{textwrap.fill(sentence, WIDTH)}\n" for sentence in sentences)


def _with_heads(table: pd.DataFrame) -> pd.DataFrame:
    """Heads as layer.head, as the options take them."""
    return table.assign(head=table["layer"].astype(str) + "." + table["head"].astype(str))


def _arrows(
    before: Iterable[float], after: Iterable[float], form: Callable[[float], str]
) -> list[str]:
    """`before → after` where both exist, else nothing."""
    return [
        f"{form(a)} → {form(b)}" if math.isfinite(a) and math.isfinite(b) else ""
        for a, b in zip(before, after, strict=True)
    ]


def _index(value: int) -> str:
    return "" if value < 0 else str(value)


def _tenth(value: float) -> str:
    return f"{value:.1f}"


def _hundredth(value: float) -> str:
    return f"{value:.2f}"


def _thousandth(value: float) -> str:
    return f"{value:.3f}"
