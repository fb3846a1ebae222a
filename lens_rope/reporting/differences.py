"""What two reports say about each other, in plain words. Every number is computed here.

A sentence says what two numbers are, and where heads or pairs can be matched, how many changed and
which changed most. Whether a difference matters is for the reader to judge.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from lens_rope.reporting.matching import (
    feature_rows,
    has_same_rotation,
    head_rows,
    layer_rows,
    pair_rows,
)
from lens_rope.reporting.side_by_side import (
    depth_of,
    largest_usage,
    magnitude_share,
    pattern_counts,
    sink_bands,
)
from lens_rope.words import BAND_PHRASES, number, percent

if TYPE_CHECKING:
    from collections.abc import Callable

    from lens_rope.reporting.saved import SavedReport

NO_DIFFERENCE = "No difference: everything that the two reports have in common is the same."
MOST = 3
"""Changes of pattern that a sentence lists."""


def is_same(a: SavedReport, b: SavedReport) -> bool:
    """Whether all that both reports measured is equal, to the last digit."""
    missing = {*a.missing, *b.missing}
    tables = {
        "usage": "usage", "heads": "heads", "sinks": "sinks", "features": "offset_features",
        "spectrum": "spectrum", "bounds_by_layer": "bounds_by_layer",
    }  # fmt: skip
    return (
        a.shape == b.shape
        and a.layers == b.layers
        and has_same_rotation(a, b)
        and all(
            section in missing or getattr(a, name).equals(getattr(b, name))
            for name, section in tables.items()
        )
        and ("bounds" in missing or _same_numbers(a.bounds, b.bounds))
        and (a.loss is None or b.loss is None or a.loss == b.loss)
    )


def sentences(a: SavedReport, b: SavedReport, names: tuple[str, str]) -> tuple[str, ...]:
    """What differs between two reports and what does not.

    Args:
        a: The first report; of the same layers as the second where their shapes are the same.
        b: The second.
        names: What they are called.
    """
    if is_same(a, b):
        return (NO_DIFFERENCE,)
    parts: list[tuple[str, Callable[[SavedReport, SavedReport, tuple[str, str]], str]]] = [
        ("usage", _usage),
        ("usage", _pairs),
        ("sinks", _sinks),
        ("heads", _patterns),
        ("offset_features", _features),
        ("bounds", _bounds),
        ("spectrum", _keys),
        ("loss", _loss),
    ]
    missing = {*a.missing, *b.missing}
    found = [say(a, b, names) for section, say in parts if section not in missing]
    return tuple(sentence for sentence in found if sentence)


def _usage(a: SavedReport, b: SavedReport, names: tuple[str, str]) -> str:
    shares = [
        [magnitude_share(report.usage, side) for side in ("query", "key")] for report in (a, b)
    ]
    if not np.isfinite(shares).all():
        return ""
    text = (
        f"Usage: partial cycles hold {percent(shares[0][0])} of query magnitude in {names[0]} and "
        f"{percent(shares[1][0])} in {names[1]}, and {percent(shares[0][1])} and "
        f"{percent(shares[1][1])} of key magnitude"
    )
    tops = largest_usage(a), largest_usage(b)
    if tops[0] is None or tops[1] is None:
        return f"{text}."
    return (
        f"{text}; the median over layers of query and key is largest at {number(tops[0][0])} "
        f"cycles ({number(tops[0][1])} times the layer's median) in {names[0]} and at "
        f"{number(tops[1][0])} ({number(tops[1][1])} times) in {names[1]}."
    )


def _pairs(a: SavedReport, b: SavedReport, names: tuple[str, str]) -> str:
    """The pair that changed most, where pairs can be matched."""
    best: tuple[float, str, int, int, float] | None = None
    sizes: list[float] = []
    for row in pair_rows(a, b).to_dict("records"):
        for side in ("query", "key"):
            ratio = row[f"{side}_ratio"]
            if not ratio > 0:
                continue
            sizes.append(abs(float(np.log2(ratio))))
            if best is None or sizes[-1] > best[0]:
                best = sizes[-1], side, int(row["layer"]), int(row["pair"]), float(ratio)
    if best is None:
        return ""
    if best[0] == 0:
        return "Usage by pair: every layer and pair has the same mean magnitude in both."
    _, side, layer, pair, ratio = best
    side = {"query": "queries", "key": "keys"}[side]
    return (
        f"Usage by pair: pair {pair} in the {side} of layer {layer} changed most, to "
        f"{number(ratio)} times its magnitude in {names[0]}; half of all magnitudes (layers × "
        f"pairs, queries and keys) changed by a factor of at most "
        f"{number(float(2 ** np.median(sizes)))}."
    )


def _sinks(a: SavedReport, b: SavedReport, names: tuple[str, str]) -> str:
    if not (a.is_long and b.is_long):
        return ""
    said = [
        f"{len(report.sinks)} of {len(report.heads)} heads in {name} "
        f"({percent(len(report.sinks) / len(report.heads))})"
        for report, name in zip((a, b), names, strict=True)
    ]
    text = f"Sink heads: {said[0]} and {said[1]}"
    if a.shape != b.shape:
        return f"{text}{_sink_details(a, b, names)}."
    heads = head_rows(a, b)
    was, now = ({*zip(r.sinks["layer"], r.sinks["head"], strict=True)} for r in (a, b))
    both = was & now
    if was == now:
        text += ", the same heads in both"
    else:
        text += (
            f"; {len(both)} are sink heads in both, {len(was - now)} in {names[0]} alone and "
            f"{len(now - was)} in {names[1]} alone"
        )
    if both:
        rows = heads.set_index(["layer", "head"]).loc[sorted(both)]
        same = int((rows["best_pair_a"] == rows["best_pair_b"]).sum())
        if has_same_rotation(a, b):
            text += f"; {same} of {len(both)} have the same best pair in both"
    change = heads["sink_share_difference"].abs()
    if not change.notna().any():
        return f"{text}."
    if change.max() == 0:
        return f"{text}. Every sink share is the same."
    row = heads.loc[change.idxmax()]
    return (
        f"{text}. The sink share that changed most is that of layer {row['layer']} head "
        f"{row['head']}, from {percent(row['sink_share_a'])} to {percent(row['sink_share_b'])}."
    )


def _sink_details(a: SavedReport, b: SavedReport, names: tuple[str, str]) -> str:
    """Where sinks begin and which band makes them, for models that cannot be matched."""
    parts = []
    for report, name in zip((a, b), names, strict=True):
        if not len(report.sinks):
            continue
        first = int(report.sinks["layer"].min())
        bands = sink_bands(report)
        most = max(bands, key=lambda entry: bands[entry])
        part = (
            f"in {name} the first is in layer {first} of {report.n_layers} (depth "
            f"{percent(depth_of(report, first))})"
        )
        if bands[most]:
            part += (
                f" and the best pair is most often {BAND_PHRASES[most]} ({bands[most]} of "
                f"{sum(bands.values())})"
            )
        parts.append(part)
    return "".join(f"; {part}" for part in parts)


def _patterns(a: SavedReport, b: SavedReport, names: tuple[str, str]) -> str:
    if not (a.is_long and b.is_long):
        return ""
    if a.shape != b.shape:
        shares = [
            {name: count / len(report.heads) for name, count in pattern_counts(report).items()}
            for report in (a, b)
        ]
        parts = [
            f"{name} {percent(shares[0].get(name, 0.0))} and {percent(shares[1].get(name, 0.0))}"
            for name in dict.fromkeys((*shares[0], *shares[1]))
        ]
        return f"Patterns: {', '.join(parts)} of the heads in {names[0]} and in {names[1]}."
    heads = head_rows(a, b)
    named = heads[heads["pattern_a"].notna() & heads["pattern_b"].notna()]
    changed = named[named["pattern_changed"]]
    if not len(changed):
        return f"Patterns: all {len(named)} heads have the same pattern in both."
    kinds = Counter(
        f"{one} → {other}"
        for one, other in zip(changed["pattern_a"], changed["pattern_b"], strict=True)
    )
    most = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))[:MOST]
    listed = ", ".join(f"{name} ({count})" for name, count in most)
    often = "most often " if len(kinds) > MOST else ""
    return (
        f"Patterns: {len(changed)} of {len(named)} heads have another one in {names[1]}, "
        f"{often}{listed}."
    )


def _features(a: SavedReport, b: SavedReport, names: tuple[str, str]) -> str:
    text = f"Offset features: {len(a.features)} in {names[0]} and {len(b.features)} in {names[1]}"
    if not has_same_rotation(a, b):
        return f"{text}."
    table = feature_rows(a, b)
    counts = Counter(table["change"])
    gained, lost = counts["gained"], counts["lost"]
    if not gained and not lost:
        return f"{text}, at the same layers, heads and pairs." if len(table) else f"{text}."
    return (
        f"{text}; by layer, head and pair, {counts['kept']} are in both, {lost} in "
        f"{names[0]} alone and {gained} in {names[1]} alone."
    )


def _bounds(a: SavedReport, b: SavedReport, names: tuple[str, str]) -> str:
    if not all(report.bounds.get("features", 0) > 0 for report in (a, b)):
        return ""
    parts = []
    for report, name in zip((a, b), names, strict=True):
        base = report.bounds.get("base_rate_half_cycle", np.nan)
        chance = f" ({percent(base)} of all pairs do)" if np.isfinite(base) else ""
        half, region = (
            percent(report.bounds.get(f"within_{bound}", np.nan))
            for bound in ("half_cycle", "region")
        )
        parts.append(
            f"{half} of {number(report.bounds['features'])} in {name} turn at most half a cycle "
            f"over the context{chance} and {region} keep all bounds"
        )
    return f"Strong offset features: {parts[0]}; {parts[1]}."


def _keys(a: SavedReport, b: SavedReport, names: tuple[str, str]) -> str:
    parts = []
    for report, name in zip((a, b), names, strict=True):
        known = report.spectrum.dropna(subset=["rank90_pre", "rank90_post"])
        if not len(known):
            return ""
        pre, post = (known[f"rank90_{side}"] / known["components"] for side in ("pre", "post"))
        parts.append(
            f"{percent(pre.median())} of the components before RoPE and {percent(post.median())} "
            f"after it in {name}"
        )
    text = f"Keys: 90% of their variance takes {parts[0]}, and {parts[1]} (medians over layers)"
    if a.shape != b.shape:
        return f"{text}."
    rows = layer_rows(a, b)
    change = rows["rank90_post_difference"].abs()
    if not change.notna().any():
        return f"{text}."
    if change.max() == 0:
        return f"{text}; the rank after RoPE is the same in every layer."
    row = rows.loc[change.idxmax()]
    return (
        f"{text}; the rank after RoPE changed most in layer {number(row['layer'])}, from "
        f"{number(row['rank90_post_a'])} to {number(row['rank90_post_b'])}."
    )


def _loss(a: SavedReport, b: SavedReport, names: tuple[str, str]) -> str:
    if a.loss is None or b.loss is None:
        return ""
    return (
        f"Loss: {a.loss[0]:.2f} nats per token in {names[0]} and {b.loss[0]:.2f} in {names[1]}; "
        f"without the best pair of each sink head {a.loss[1]:.2f} and {b.loss[1]:.2f}."
    )


def _same_numbers(a: object, b: object) -> bool:
    one, other = dict(a), dict(b)  # type: ignore[call-overload]
    return one.keys() == other.keys() and all(
        one[key] == other[key] or (np.isnan(one[key]) and np.isnan(other[key])) for key in one
    )
