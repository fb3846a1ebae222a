"""The first screen in a few short sentences: what the findings say, without their detail.

`findings` has a sentence with every number for each topic; a headline has the one or two numbers
that a reader takes away. Both are computed from the same data.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lens_rope.patterns import PATTERNS
from lens_rope.reporting.facts import (
    count,
    key_spectra,
    partial_share,
    single_pair,
    standing_out,
)
from lens_rope.sink_heads import COLLAPSED
from lens_rope.sinks import MIN_TOKENS
from lens_rope.spectrum import NEAR_ZERO
from lens_rope.words import number, percent

if TYPE_CHECKING:
    from lens_rope.reporting.data import ReportData

MOST = 5
"""Headlines on the first screen."""

NAMED = 3
"""Patterns of heads that a headline counts."""


class Headline(NamedTuple):
    """One finding in short.

    Attributes:
        topic: What it is about, two or three words.
        text: One or two sentences.
        section: Id of the section of the page that shows it.
    """

    topic: str
    text: str
    section: str


def headlines(data: ReportData) -> tuple[Headline, ...]:
    """At most `MOST` headlines, in the order of the sections.

    How frequencies are used, whether offset features keep the bounds, where sinks are and what
    makes them, what the heads do, and what rotation does to the keys. Where a model or a prompt
    has nothing to say about one of these, the pair that stands out and the clearest single-pair
    head stand in.

    Args:
        data: The numbers of the report.
    """
    chosen = [
        found
        for found in (_usage(data), _bounds(data), _sinks(data), _heads(data), _keys(data))
        if found
    ]
    spare = [found for found in (_standing_out(data), _single(data)) if found]
    return tuple([*chosen, *spare][:MOST])


def _usage(data: ReportData) -> Headline | None:
    pairs = sum(rope.n_pairs for rope in data.rope.layers)
    partial = sum(int((rope.cycles < 1).sum()) for rope in data.rope.layers)
    if not pairs:
        return Headline("No RoPE", "None of the layers read has rotary pairs.", "frequencies")
    if not partial:
        text = f"Each of the {pairs:,} rotary pairs turns at least once over its context."
        return Headline("Full cycles only", text, "frequencies")
    query, key = (partial_share(data, side) for side in ("query", "key"))
    if query is None or key is None:
        return None
    return Headline(
        "Slow pairs",
        f"Pairs that never complete a turn over the context are {percent(partial / pairs)} of all "
        f"pairs and hold {percent(query)} of query and {percent(key)} of key magnitude.",
        "usage",
    )


def _bounds(data: ReportData) -> Headline | None:
    half, region = data.bounds["half_cycle"], data.bounds["region"]
    if not half.n:
        return None
    return Headline(
        "Offset features",
        f"{percent(half.share)} of {count(half.n, 'strong offset feature')} turn at most half a "
        f"cycle ({percent(half.base_rate)} of all pairs do), and {half.n - region.within} break "
        "the bound on frequency and angle together.",
        "offsets",
    )


def _sinks(data: ReportData) -> Headline | None:
    total = sum(len(entry.sink_share) for entry in data.shares)
    if data.is_too_short_for_sinks:
        text = f"Prompts of under {MIN_TOKENS} tokens are too short to tell."
        return Headline("Sinks", text, "attention")
    if not data.sinks:
        text = (
            f"None of {total} heads gives one key more than {percent(data.threshold)} of its "
            "attention."
        )
        return Headline("No sinks", text, "attention")
    text = (
        f"{len(data.sinks)} of {total} heads give one key more than {percent(data.threshold)} of "
        "their attention."
    )
    with_pairs = [sink for sink in data.sinks if sink.best_pair >= 0]
    if with_pairs:
        collapsed = sum(sink.is_collapsed for sink in with_pairs)
        pairs = Counter(sink.best_pair for sink in with_pairs)
        pair = min(pairs, key=lambda pair: (-pairs[pair], pair))
        text += (
            f" Without their best pair (pair {pair} in {pairs[pair]} of them), "
            f"{percent(collapsed / len(with_pairs))} fall below {percent(COLLAPSED)}"
        )
        done = data.ablation
        if done is None:
            text += "."
        else:
            control = float(np.median(done.loss_controls))
            where = "" if len(data.prompts) == 1 else f", on {done.prompts[0]} alone,"
            text += (
                f"; in the running model{where} the loss goes from {done.loss_before:.2f} to "
                f"{done.loss_after:.2f} (random pairs: {control:.2f})."
            )
    return Headline("Sinks", text, "attention")


def _heads(data: ReportData) -> Headline | None:
    counts = Counter(head.pattern for head in data.heads if head.pattern)
    if not counts or data.is_too_short_for_sinks:
        return None
    order = sorted(
        ((name, n) for name, n in counts.items() if name != "mixed"),
        key=lambda item: (-item[1], PATTERNS.index(item[0])),
    )
    if not order:
        text = f"None of {count(len(data.heads), 'head')} clears the threshold of a pattern."
        return Headline("Heads", text, "heads")
    listed = [f"{n} {name}" for name, n in order[:NAMED]]
    rest = sum(n for _, n in order[NAMED:])
    *others, last = [*listed, f"{rest} of other kinds"] if rest else listed
    named = f"{', '.join(others)} and {last}" if others else last
    text = f"{named}; {counts['mixed']} of {len(data.heads)} clear no threshold."
    positional = [
        head
        for head in data.heads
        if head.pattern == "previous token" and np.isfinite(head.offset_shares[0])
    ]
    if positional:
        best = max(positional, key=lambda head: (head.previous_share, -head.layer, -head.head))
        text += (
            f" In the strongest previous-token head, {best.layer}.{best.head}, distance alone "
            f"makes {percent(best.offset_shares[0])} of the score variance."
        )
    return Headline("Heads", text, "heads")


def _keys(data: ReportData) -> Headline | None:
    found = key_spectra(data)
    if found is None:
        return None
    return Headline(
        "Keys",
        f"90% of their variance takes {number(found.rank_before)} dimensions before rotation and "
        f"{number(found.rank_after)} after it; {percent(found.near_zero_before)} of the "
        f"eigenvalues lie below {NEAR_ZERO:g} before and {percent(found.near_zero_after)} after.",
        "keys",
    )


def _standing_out(data: ReportData) -> Headline | None:
    found = standing_out(data)
    if found is None:
        return None
    ratio, layer, pair = found
    text = f"Pair {pair} in the keys of layer {layer}, {ratio:.1f} times the layer's median."
    return Headline("What stands out", text, "usage")


def _single(data: ReportData) -> Headline | None:
    found = single_pair(data)
    if found is None:
        return None
    share, layer, head, pair = found
    text = f"Pair {pair} carries {percent(share)} of the score variance of head {layer}.{head}."
    return Headline("One pair, one head", text, "gallery")
