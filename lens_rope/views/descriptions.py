"""What the analyses of a model say of themselves: sentences, and the columns of their table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lens_rope.patterns import PATTERNS
from lens_rope.spec import ranges
from lens_rope.views.tables import (
    Description,
    Form,
    Table,
    arrows,
    headline,
    hundredth,
    index,
    tenth,
    thousandth,
    with_heads,
)
from lens_rope.views.tokens import SPACE, display_text
from lens_rope.words import number, percent

if TYPE_CHECKING:
    from lens_rope.ablation_effects import AblationReport
    from lens_rope.bounds import BoundsCheck
    from lens_rope.heads import HeadExplanation
    from lens_rope.metrics import HeadMetrics
    from lens_rope.offsets import OffsetFeatures
    from lens_rope.sink_heads import SinkExplanation
    from lens_rope.spectrum import KeySpectrum


def describe_sinks(found: SinkExplanation) -> Description:
    """How many sink heads there are, the strongest in words, and the strongest as a table."""
    from lens_rope.sink_heads import sentence, sink_table

    sinks = sorted(found.heads, key=lambda e: (-e.share, e.layer, e.head))
    # Tokens on one line; among words, a space need not be made visible.
    where = [display_text(found.where(sink)).replace(SPACE, " ") for sink in sinks]
    strongest = [sentence(*first) for first in list(zip(sinks, where, strict=True))[:1]]
    table = Table(
        "The pair that adds most to the sink's advantage, and the sink share without it, without "
        "the two best, without another (median)",
        with_heads(sink_table(sinks)).assign(at=where),
        {
            "head": ("head", str),
            "at": ("at", str),
            "sink_share": ("share", percent),
            "best_pair": ("pair", index),
            "wavelength": ("wavelength", number),
            "cycles": ("cycles", number),
            "best_advantage": ("adds", tenth),
            "advantage": ("of", tenth),
            "share_without_best": ("without it", percent),
            "share_without_two": ("without two", percent),
            "control_share": ("without other", percent),
        },
        wraps=("at",),
    )
    return Description(
        (*headline(found), *strongest),
        table if len(table.frame) else None,
        found.notes,
        found.model.name,
    )


def describe_heads(found: HeadExplanation, *, n_rows: int, clearest: int) -> Description:
    """How many heads have each pattern, and the clearest of each as a table.

    Args:
        found: The heads.
        n_rows: With more heads than this only the clearest of each pattern are listed.
        clearest: How many of each pattern.
    """
    order = ["strength", "layer", "head"]
    table = found.to_dataframe().sort_values(order, ascending=[False, True, True])
    table = with_heads(table)
    title, n_all = "What each head does", len(table)
    if n_all > n_rows and table["pattern"].notna().any():
        table = table.groupby("pattern", sort=False).head(clearest)
        table = table.sort_values(
            "pattern", key=lambda names: names.map(PATTERNS.index), kind="stable"
        )
        which = f"{clearest} clearest heads" if clearest > 1 else "clearest head"
        title = f"The {which} of each pattern"
    counts = ", ".join(
        f"{count} {'not named' if name == 'None' else name}"
        for name, count in found.counts().items()
    )
    return Description(
        (f"{len(found.heads)} heads of {found.model.name}: {counts}",),
        Table(
            f"{title}; 'positional' is the share of offset·offset in the score variance",
            table,
            {
                "head": ("head", str),
                "pattern": ("pattern", str),
                "also": ("also", str),
                "strength": ("strength", thousandth),
                "base_rate": ("base rate", thousandth),
                "entropy": ("entropy", thousandth),
                "offset_offset": ("positional", thousandth),
                "pair": ("pair", index),
                "wavelength": ("wavelength", number),
                "advantage": ("adds", tenth),
                "total_advantage": ("of", tenth),
            },
            wraps=("also",),
            n_all=n_all,
        ),
        found.notes,
        found.model.name,
    )


def describe_features(found: OffsetFeatures) -> Description:
    """How many offset features there are, and the largest."""
    table = Table(
        "Offset features, the largest amplitude first (size: mean length over the head's median)",
        with_heads(found.features()),
        {
            "head": ("head", str),
            "kv_head": ("key head", index),
            "pair": ("pair", index),
            "wavelength": ("wavelength", number),
            "cycles": ("cycles", number),
            "query_relative": ("query size", number),
            "key_relative": ("key size", number),
            "query_constancy": ("query constancy", thousandth),
            "key_constancy": ("key constancy", thousandth),
            "amplitude": ("amplitude", number),
            "angle": ("angle (rad)", number),
        },
        source="features()",
    )
    return Description(
        headline(found), table if len(table.frame) else None, found.notes, found.model.name
    )


def describe_outliers(found: OffsetFeatures, relative: float) -> Description:
    """Pairs that are large in the queries or keys of a head, the largest first."""
    table = Table(
        f"Outliers of {found.model.name}: pairs of size {relative:g} or more (mean length over the "
        "head's median; key heads for keys)",
        with_heads(found.outliers(relative)),
        {
            "head": ("head", str),
            "side": ("side", str),
            "pair": ("pair", index),
            "wavelength": ("wavelength", number),
            "cycles": ("cycles", number),
            "mean": ("mean length", number),
            "largest": ("largest length", number),
            "relative": ("size", number),
            "constancy": ("constancy", thousandth),
        },
        source="outliers()",
    )
    return Description((), table)


def describe_bounds(check: BoundsCheck) -> Description:
    """Strong offset features against each bound."""
    table = Table(
        "How many keep each bound, beside the share of all pairs that would (base rate)",
        check.to_dataframe(),
        {
            "bound": ("bound", lambda name: name.replace("_", " ")),
            "features": ("features", index),
            "within": ("within", index),
            "share": ("share", percent),
            "base_rate": ("base rate", percent),
            "p_value": ("p (by layer)", number),
            "p_binomial": ("p (binomial)", number),
            "distinct": ("distinct", index),
            "within_distinct": ("distinct within", index),
            "p_binomial_distinct": ("p (distinct)", number),
        },
    )
    return Description(headline(check), table, check.notes)


def describe_spectrum(found: KeySpectrum, *, by_head: bool = False) -> Description:
    """Key spectra before → after rotation, by layer or by key head."""
    table = found.heads_dataframe() if by_head else found.to_dataframe()
    columns: dict[str, tuple[str, Form]] = {"layer": ("layer", index)}
    if by_head:
        columns["kv_head"] = ("key head", index)
    for name, heading, form in (
        ("rank90", "rank 90%", number),
        ("rank99", "rank 99%", number),
        ("participation_ratio", "participation", number),
        ("trace", "variance", number),
        ("near_zero", "near zero", percent),
        ("median", "median", number),
    ):
        table[name] = arrows(table[f"{name}_pre"], table[f"{name}_post"], form)
        columns[name] = (heading, str)
    columns["offset_energy"] = ("offset energy", number)
    columns["offset_share"] = ("offset share", percent)
    source = "heads_dataframe()" if by_head else "to_dataframe()"
    return Description(
        headline(found),
        Table("Before → after rotation", table, columns, source=source),
        found.notes,
        found.model.name,
    )


def describe_ablation(done: AblationReport) -> Description:
    """What the intervention did to the loss, and to each ablated head."""
    table = with_heads(done.to_dataframe())
    table["pairs"] = [ranges(head.pairs) for head in done.heads]
    for name in ("sink", "previous"):
        table[name] = arrows(table[f"{name}_before"], table[f"{name}_after"], percent)
    return Description(
        done.sentences(),
        Table(
            "Attention of each ablated head before → after, and after with random other pairs; "
            "change is the distance between the two, in [0, 1]",
            table,
            {
                "head": ("head", str),
                "pairs": ("pairs", str),
                "sink": ("sink share", str),
                "sink_control": ("random", percent),
                "previous": ("previous token", str),
                "previous_control": ("random", percent),
                "change": ("change", hundredth),
                "change_control": ("random", hundredth),
            },
            wraps=("pairs",),
        ),
        done.notes,
        done.model,
    )


def describe_metrics(found: HeadMetrics) -> Description:
    """Means over the heads of each layer."""
    from lens_rope.metrics import METRICS

    rate, n = found.first_token_sink_rate, found.n_prompts
    layers = ranges(entry.layer for entry in found.layers)
    sink = f"Share of heads with a sink at token 0: {percent(rate)}"
    return Description(
        (
            f"Head metrics of {found.model} on {n} prompt{'s' if n > 1 else ''}, layers {layers}",
            *((sink,) if rate == rate else ()),
        ),
        Table(
            "Mean over the heads of each layer",
            found.layer_means(),
            {
                "layer": ("layer", index),
                **{name: (name.replace("_", " "), thousandth) for name in METRICS},
            },
        ),
        found.notes,
        found.model,
    )
