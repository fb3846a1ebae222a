"""Which heads the gallery shows, and what it shows of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lens_rope.decomposition import decompose
from lens_rope.reporting.data import PREVIOUS_THRESHOLD, GalleryHead
from lens_rope.sinks import MIN_TOKENS, SINK_THRESHOLD
from lens_rope.views.heads import MAX_BYTES, head_maps, telling_pairs
from lens_rope.words import percent

if TYPE_CHECKING:
    from lens_rope.records import RotaryCapture
    from lens_rope.sinks import HeadShares

PER_REASON = 2

GALLERY_BYTES = 5_000_000
"""Most bytes that the windows of all heads take up in the page, unless one window each takes more.

The six heads of the demo model have all their windows in it."""

RULE_ASKED = "The heads that were asked for."


def build_gallery(
    qk: RotaryCapture,
    shares: Sequence[HeadShares],
    heads: Sequence[tuple[int, int]] | None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[tuple[GalleryHead, ...], str]:
    """The heads to show, on the first prompt of a capture, and the rule they were chosen by.

    Args:
        qk: A capture; its first prompt is shown.
        shares: Attention shares of the captured layers, on that prompt alone.
        heads: (layer, head) to show; None chooses the leaders of each reason.
        progress: Called as `progress(done, total)`.
    """
    if heads is not None:
        chosen = {head: ["asked for"] for head in heads}
        rule = RULE_ASKED
    else:
        chosen, rule = _choose(qk, shares, progress)
    max_bytes = min(GALLERY_BYTES // max(len(chosen), 1), MAX_BYTES)
    built = [
        _gallery_head(qk, layer, head, tuple(reasons), max_bytes)
        for (layer, head), reasons in chosen.items()
    ]
    return tuple(built), rule


def _choose(
    qk: RotaryCapture,
    shares: Sequence[HeadShares],
    progress: Callable[[int, int], None] | None,
) -> tuple[dict[tuple[int, int], list[str]], str]:
    """The heads with their reasons, and the rule with what it came to."""
    sink = [(entry.sink_share[h], entry.layer, h) for entry in shares for h in _heads(entry)]
    previous = [
        (entry.previous_share[h], entry.layer, h) for entry in shares for h in _heads(entry)
    ]
    position = {
        (entry.layer, h): int(entry.sink_position[h]) for entry in shares for h in _heads(entry)
    }
    total = len(qk.layer_indices) * qk.model.n_heads
    single, best_pair = [], {}
    for layer in qk.layer_indices:
        for head in range(qk.model.n_heads):
            if qk.layer(layer).rope.n_pairs:
                share = np.nan_to_num(decompose(qk, layer, head).by_pair().share, nan=-np.inf)
                best_pair[layer, head] = int(np.argmax(share))
                # Shares are signed and sum to 1. Above 1 other pairs work against this one, and it
                # does not carry the head.
                if share.max() <= 1:
                    single.append((share.max(), layer, head))
            if progress is not None:
                done = qk.layer_indices.index(layer) * qk.model.n_heads + head + 1
                progress(done, total)
    chosen: dict[tuple[int, int], list[str]] = {}
    is_long = len(qk.prompts[0]) >= MIN_TOKENS
    leaders = _leaders(sink, chosen)
    counts = [(len(leaders), "the largest sink share")]
    for share, layer, head in leaders:
        at = f"position {position[layer, head]}"
        chosen[layer, head] = [
            f"sink: gives {percent(share)} of its attention to {at}"
            if share > SINK_THRESHOLD and is_long
            else f"largest sink share: {percent(share)} to {at}"
        ]
    leaders = _leaders(previous, chosen)
    counts.append((len(leaders), "the largest attention to the previous token"))
    for share, layer, head in leaders:
        chosen[layer, head] = [
            f"previous token: gives it {percent(share)} of its attention"
            if share > PREVIOUS_THRESHOLD and is_long
            else f"largest attention to the previous token: {percent(share)}"
        ]
    leaders = _leaders(single, chosen)
    counts.append(
        (len(leaders), "the largest share, at most 100%, of score variance in one rotary pair")
    )
    for share, layer, head in leaders:
        chosen[layer, head] = [
            f"one pair: pair {best_pair[layer, head]} carries {percent(share)} of its score "
            "variance"
        ]
    found = ", ".join(f"{count or 'none'} for {reason}" for count, reason in counts)
    rule = (
        f"Up to {PER_REASON} heads of different layers for each of three reasons, in this order "
        f"and each head once: {found}."
    )
    return chosen, rule


def _heads(shares: HeadShares) -> range:
    return range(len(shares.sink_share))


def _leaders(
    scored: Iterable[tuple[float, int, int]], taken: dict[tuple[int, int], list[str]]
) -> list[tuple[float, int, int]]:
    """The heads with the largest values, of different layers and not yet taken."""
    known = [entry for entry in scored if np.isfinite(entry[0])]
    leaders: list[tuple[float, int, int]] = []
    # Ties go to the earlier layer and head, so that the choice is a function of the numbers.
    for value, layer, head in sorted(known, key=lambda entry: (-entry[0], entry[1], entry[2])):
        if (layer, head) in taken or any(layer == other for _, other, _ in leaders):
            continue
        leaders.append((float(value), layer, head))
        if len(leaders) == PER_REASON:
            break
    return leaders


def _gallery_head(
    qk: RotaryCapture, layer: int, head: int, reasons: tuple[str, ...], max_bytes: int
) -> GalleryHead:
    split = decompose(qk, layer, head)
    by_pair = split.by_pair()
    return GalleryHead(
        layer=layer,
        head=head,
        kv_head=split.kv_head,
        reasons=reasons,
        rope=split.rope,
        by_pair=by_pair,
        by_distance=split.by_distance(),
        maps=head_maps(split, telling_pairs(by_pair), max_bytes=max_bytes),
    )
