"""Numbers that findings and headlines of a report both speak of, and how they count things."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lens_rope.spectrum import NEAR_ZERO

if TYPE_CHECKING:
    from lens_rope.reporting.data import ReportData

SINGLE_THRESHOLD = 0.3
"""A pair is said to carry a head from this share of its score variance on."""


def partial_share(data: ReportData, side: str) -> float | None:
    """Share of the summed mean pair magnitude that lies in partial cycles."""
    inside = total = 0.0
    for rope, usage in zip(data.rope.layers, data.usage, strict=True):
        values = np.asarray(getattr(usage, side), dtype=np.float64)
        inside += float(values[rope.cycles < 1].sum())
        total += float(values.sum())
    return inside / total if total > 0 else None


def standing_out(data: ReportData) -> tuple[float, int, int] | None:
    """Ratio to the layer's median, layer and pair of the key magnitude with the largest ratio."""
    best: tuple[float, int, int] | None = None
    for rope, usage in zip(data.rope.layers, data.usage, strict=True):
        key = np.asarray(usage.key, dtype=np.float64)
        if key.size < 2 or not np.median(key) > 0:
            continue
        pair = int(np.argmax(key))
        ratio = float(key[pair] / np.median(key))
        if best is None or ratio > best[0]:
            best = (ratio, rope.layer, pair)
    return best


class KeySpectra(NamedTuple):
    """Key spectra over layers: medians, and shares of all eigenvalues."""

    near_zero_before: float
    near_zero_after: float
    rank_before: float
    rank_after: float
    ups: int
    layers: int
    offset_share: float


def key_spectra(data: ReportData) -> KeySpectra | None:
    """What rotation does to the keys of the layers that have enough tokens and rotary pairs."""
    known = [entry for entry in data.spectra if entry.pre.has_enough_tokens]
    known = [entry for entry in known if data.rope[entry.layer].n_pairs]
    if not known:
        return None
    pre, post = (
        np.concatenate([getattr(entry, side).eigenvalues for entry in known])
        for side in ("pre", "post")
    )
    before, after = (float((values < NEAR_ZERO).mean()) for values in (pre, post))
    return KeySpectra(
        near_zero_before=before,
        near_zero_after=after,
        rank_before=float(np.median([entry.pre.rank90 for entry in known])),
        rank_after=float(np.median([entry.post.rank90 for entry in known])),
        ups=sum(entry.post.rank90 > entry.pre.rank90 for entry in known),
        layers=len(known),
        offset_share=float(np.median([entry.offset_share for entry in known])),
    )


def single_pair(data: ReportData) -> tuple[float, int, int, int] | None:
    """Share, layer, head and pair of the gallery's head that one pair carries most clearly.

    Shares are signed and sum to 1: a share above 1 means that other pairs work against this one.
    """
    if data.is_too_short_for_sinks:
        return None
    best: tuple[float, int, int, int] | None = None
    for head in data.gallery:
        share = np.asarray(head.by_pair.share, dtype=np.float64)
        if not share.size or not np.isfinite(share).any():
            continue
        pair = int(np.nanargmax(share))
        # Fewer pairs have larger shares each, by an even spread alone.
        if not max(SINGLE_THRESHOLD, 2 / share.size) <= share[pair] <= 1:
            continue
        if best is None or share[pair] > best[0]:
            best = (float(share[pair]), head.layer, head.head, pair)
    return best


def count(n: int, noun: str) -> str:
    """A number of things: `1 head`, `2 heads`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def capital(text: str) -> str:
    """The text with its first letter in upper case, the rest as it is."""
    return text[:1].upper() + text[1:]
