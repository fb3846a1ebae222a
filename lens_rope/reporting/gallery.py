"""Which heads the gallery shows, and what it shows of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lens_rope.decomposition import decompose
from lens_rope.reporting.data import GalleryHead
from lens_rope.sinks import sink_shares
from lens_rope.views.heads import MAX_WINDOW
from lens_rope.views.layout import percent

if TYPE_CHECKING:
    from lens_rope.records import RotaryCapture
    from lens_rope.sinks import HeadShares

PER_REASON = 2

RULE = (
    "Two heads of different layers for each of three reasons: the largest sink share, the largest "
    "attention to the previous token, and the largest share of score variance in a single rotary "
    "pair. A head that leads twice is shown once, and the next one takes the free place."
)
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
        shares: Attention shares of the captured layers, over all prompts.
        heads: (layer, head) to show; None chooses by `RULE`.
        progress: Called as `progress(done, total)`.
    """
    if heads is not None:
        chosen = {head: ["asked for"] for head in heads}
        rule = RULE_ASKED
    else:
        chosen = _choose(qk, shares, progress)
        rule = RULE
    built = [
        _gallery_head(qk, layer, head, tuple(reasons)) for (layer, head), reasons in chosen.items()
    ]
    return tuple(built), rule


def _choose(
    qk: RotaryCapture,
    shares: Sequence[HeadShares],
    progress: Callable[[int, int], None] | None,
) -> dict[tuple[int, int], list[str]]:
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
                single.append((share.max(), layer, head))
            if progress is not None:
                done = qk.layer_indices.index(layer) * qk.model.n_heads + head + 1
                progress(done, total)
    chosen: dict[tuple[int, int], list[str]] = {}
    for share, layer, head in _leaders(sink, chosen):
        chosen[layer, head] = [
            f"sink: gives {percent(share)} of its attention to position {position[layer, head]}"
        ]
    for share, layer, head in _leaders(previous, chosen):
        chosen[layer, head] = [f"previous token: gives it {percent(share)} of its attention"]
    for share, layer, head in _leaders(single, chosen):
        chosen[layer, head] = [
            f"one pair: pair {best_pair[layer, head]} carries {percent(share)} of its score "
            "variance"
        ]
    return chosen


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
    qk: RotaryCapture, layer: int, head: int, reasons: tuple[str, ...]
) -> GalleryHead:
    split = decompose(qk, layer, head)
    record, prompt = qk.layer(layer), qk.prompts[0]
    pattern = np.asarray(split.pattern(), dtype=np.float64)
    window = slice(0, min(MAX_WINDOW, len(prompt)))
    return GalleryHead(
        layer=layer,
        head=head,
        kv_head=split.kv_head,
        reasons=reasons,
        rope=record.rope,
        by_pair=split.by_pair(),
        by_distance=split.by_distance(),
        tokens=prompt.tokens[window],
        pattern=pattern[window, window],
        received=sink_shares(record, head)[window],
        n_tokens=len(prompt),
    )
