"""Which heads the gallery shows, and what it shows of each.

The heads are known when all layers are read, and by then their queries and keys are gone. So a
short list is kept while the layers go by. It always holds the heads that a choice among all heads
would find: a reason takes the first `PER_REASON` heads of different layers, in order of its
numbers, that earlier reasons have not taken. At most `t` heads are taken, so of one layer the first
`t + 1` can matter, and of all these those up to the last choice: the taken ones, all that a layer
has of each head chosen before, and the choice itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lens_rope.decomposition import HeadDecomposition, pair_shares
from lens_rope.heads import only_heads
from lens_rope.reporting.data import PREVIOUS_THRESHOLD, GalleryHead
from lens_rope.sinks import MIN_TOKENS, SINK_THRESHOLD
from lens_rope.views.heads import MAX_BYTES, head_maps, telling_pairs
from lens_rope.words import percent

if TYPE_CHECKING:
    from jaxtyping import Float

    from lens_rope.records import LayerCapture, Prompt
    from lens_rope.sinks import HeadShares

PER_REASON = 2

GALLERY_BYTES = 5_000_000
"""Most bytes that the windows of all heads take up in the page, unless one window each takes more.

The six heads of the demo model have all their windows in it."""

RULE_ASKED = "The heads that were asked for."

Reason = str
_SINK, _PREVIOUS, _SINGLE = REASONS = (
    "the largest sink share",
    "the largest attention to the previous token",
    "the largest share, at most 100%, of score variance in one rotary pair",
)
"""Why a head is shown, in the order in which heads are chosen."""

Where = tuple[int, int]
"""(layer, head)."""


@dataclass(frozen=True)
class Scored:
    """One head by the number of one reason.

    Attributes:
        value: The number.
        layer: Index of the layer.
        head: Index of the query head.
        at: The position of its sink, or the pair with the largest share.
    """

    value: float
    layer: int
    head: int
    at: int = -1

    @property
    def where(self) -> Where:
        """Layer and head."""
        return self.layer, self.head


class Shortlist:
    """The heads of one prompt that its gallery may show, kept while its layers go by."""

    def __init__(self, prompt: Prompt, heads: Sequence[Where] | None = None) -> None:
        """An empty list.

        Args:
            prompt: The prompt.
            heads: (layer, head) to show; None chooses the leaders of each reason.
        """
        self._prompt = prompt
        self._asked = None if heads is None else tuple(dict.fromkeys(heads))
        self._best: dict[Reason, list[Scored]] = {reason: [] for reason in REASONS}
        self._records: dict[Where, tuple[int, LayerCapture]] = {}

    @property
    def held(self) -> tuple[Where, ...]:
        """The heads whose queries and keys are held."""
        return tuple(self._records)

    def add(
        self,
        record: LayerCapture,
        shares: HeadShares,
        of_pairs: Float[np.ndarray, "head pair"] | None = None,
    ) -> None:
        """Looks at one layer and keeps copies of what may be shown of it.

        Args:
            record: Queries and keys of the layer.
            shares: Its attention shares on this prompt alone.
            of_pairs: `[head, pair]` What `pair_shares` says of the record, where that is at hand.
        """
        if self._asked is None:
            of_pairs = pair_shares(record) if of_pairs is None else of_pairs
            scored_by = _scored(record.rope.layer, shares, of_pairs)
            for number, (reason, scored) in enumerate(scored_by.items()):
                n_taken = number * PER_REASON
                own = _ranked(scored)[: n_taken + 1]
                most = n_taken + (PER_REASON - 1) * (n_taken + 1) + 1
                self._best[reason] = _ranked([*self._best[reason], *own])[:most]
            wanted = {entry.where for best in self._best.values() for entry in best}
        else:
            wanted = set(self._asked)
        here = sorted(head for layer, head in wanted if layer == record.rope.layer)
        self._records = {where: self._records[where] for where in self._records if where in wanted}
        self._records |= {
            (record.rope.layer, head): (record.kv_head(head), only_heads(record, [head]))
            for head in here
        }

    def gallery(
        self, progress: Callable[[int, int], None] | None = None
    ) -> tuple[tuple[GalleryHead, ...], str]:
        """The heads to show, and the rule they were chosen by; every layer was added.

        Args:
            progress: Called as `progress(done, total)`.
        """
        chosen, rule = self._chosen()
        max_bytes = min(GALLERY_BYTES // max(len(chosen), 1), MAX_BYTES)
        built = []
        for (layer, head), reason in chosen.items():
            kv_head, record = self._records[layer, head]
            built.append(_gallery_head(record, head, kv_head, self._prompt, reason, max_bytes))
            if progress is not None:
                progress(len(built), len(chosen))
        return tuple(built), rule

    def _chosen(self) -> tuple[dict[Where, str], str]:
        """The heads with their reason in words, and the rule with what it came to."""
        if self._asked is not None:
            return dict.fromkeys(self._asked, "asked for"), RULE_ASKED
        is_long = len(self._prompt) >= MIN_TOKENS
        chosen: dict[Where, str] = {}
        found = []
        for reason in REASONS:
            leaders = _leaders(self._best[reason], chosen)
            chosen |= {entry.where: _said(reason, entry, is_long=is_long) for entry in leaders}
            found.append(f"{len(leaders) or 'none'} for {reason}")
        rule = (
            f"Up to {PER_REASON} heads of different layers for each of three reasons, in this "
            f"order and each head once: {', '.join(found)}."
        )
        return chosen, rule


def _scored(
    layer: int, shares: HeadShares, of_pairs: Float[np.ndarray, "head pair"]
) -> dict[Reason, list[Scored]]:
    """The heads of one layer by the number of each reason, those that have it."""
    scored = {
        _SINK: [
            Scored(float(share), layer, head, int(shares.sink_position[head]))
            for head, share in enumerate(shares.sink_share)
        ],
        _PREVIOUS: [
            Scored(float(share), layer, head) for head, share in enumerate(shares.previous_share)
        ],
        _SINGLE: [
            Scored(float(share.max()), layer, head, int(share.argmax()))
            for head, share in enumerate(np.nan_to_num(of_pairs, nan=-np.inf))
            # Shares are signed and sum to 1. Above 1 other pairs work against this one, and it
            # does not carry the head.
            if share.size and share.max() <= 1
        ],
    }
    return {
        reason: [entry for entry in entries if np.isfinite(entry.value)]
        for reason, entries in scored.items()
    }


def _ranked(scored: Iterable[Scored]) -> list[Scored]:
    """The largest first. Ties go to the earlier layer and head: a function of the numbers alone."""
    return sorted(scored, key=lambda entry: (-entry.value, entry.layer, entry.head))


def _leaders(ranked: Iterable[Scored], taken: Iterable[Where]) -> list[Scored]:
    """The first heads of different layers that are not yet taken."""
    leaders: list[Scored] = []
    for entry in ranked:
        if entry.where in taken or any(entry.layer == other.layer for other in leaders):
            continue
        leaders.append(entry)
        if len(leaders) == PER_REASON:
            break
    return leaders


def _said(reason: Reason, entry: Scored, *, is_long: bool) -> str:
    """Why one head is shown."""
    share = percent(entry.value)
    if reason == _SINGLE:
        return f"one pair: pair {entry.at} carries {share} of its score variance"
    if reason == _SINK:
        if entry.value > SINK_THRESHOLD and is_long:
            return f"sink: gives {share} of its attention to position {entry.at}"
        return f"largest sink share: {share} to position {entry.at}"
    if entry.value > PREVIOUS_THRESHOLD and is_long:
        return f"previous token: gives it {share} of its attention"
    return f"largest attention to the previous token: {share}"


def _gallery_head(
    record: LayerCapture, head: int, kv_head: int, prompt: Prompt, reason: str, max_bytes: int
) -> GalleryHead:
    """What is shown of the one head of a record, which is `head` of its layer."""
    split = HeadDecomposition(record, 0, prompt)
    by_pair = split.by_pair()
    maps = head_maps(split, telling_pairs(by_pair), max_bytes=max_bytes)
    return GalleryHead(
        layer=split.layer,
        head=head,
        kv_head=kv_head,
        reasons=(reason,),
        rope=split.rope,
        by_pair=by_pair,
        by_distance=split.by_distance(),
        maps=dataclasses.replace(maps, head=head, kv_head=kv_head),
    )
