"""What one attention head shows over windows of its tokens, as data for the page to draw.

The page forms the contribution of any pair at any cell itself, from the rotated queries and keys
that are shipped here; so that every pair and every band can be looked at and the page stays small.
Attention and what is visible are computed here and shipped as they are. CircuitsVis checks nothing
that it is given, so everything is checked here.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lens_rope.decomposition import HeadDecomposition
from lens_rope.errors import InputError
from lens_rope.records import LayerCapture, Prompt
from lens_rope.sinks import sink_shares
from lens_rope.views.colors import PASS_THROUGH, SCALES, pair_color
from lens_rope.views.libraries import script_json
from lens_rope.views.tokens import display_text
from lens_rope.words import number

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from lens_rope.results import PairSummary
    from lens_rope.spec import LayerRope

SCRIPTS = ("head_values.js", "head_views.js", "head.js")
"""Assets that draw a head; they define `lensRopeHead`."""

MAX_WINDOW = 64
"""Most tokens that are shown at once: the size of a view grows with their square."""

DECIMALS = 4
"""Decimals of attention that a page keeps; a difference of 1e-4 is not visible."""

MAX_BYTES = 3_000_000
"""Most bytes that the windows of one head take up in a page, unless one window takes more."""

MAX_GROUPS = 12
"""Most pairs and bands side by side."""


@dataclass(frozen=True, eq=False)
class HeadWindow:
    """One window of positions, of queries and keys alike.

    Attributes:
        start: First position.
        stop: One past the last position.
        pattern: `[window, window]` Attention from each query (row) to each key (column).
        before: `[window]` Attention of each query to all keys before the window.
    """

    start: int
    stop: int
    pattern: Float[np.ndarray, "window window"]
    before: Float[np.ndarray, " window"]

    @property
    def name(self) -> str:
        """First and last position."""
        return f"{self.start}–{self.stop - 1}"


@dataclass(frozen=True, eq=False)
class HeadMaps:
    """One head on one prompt, over the windows that are shown.

    Attributes:
        head: Index of the query head.
        kv_head: The key head it reads.
        prompt: Name of the prompt.
        n_tokens: Number of tokens of the prompt.
        record: The layer's rotation, scale and soft-cap, with the queries and keys of this head
            alone, at the positions that are shown.
        positions: `[shown]` Those positions, ascending.
        tokens: `[shown]` Their tokens.
        first_key: `[shown]` The first key that each query sees.
        received: `[shown]` Mean attention of each key over the queries of the whole prompt that
            see it.
        windows: The windows, ascending.
        opening: Index of the window that is shown first.
        groups: Pairs that are shown side by side, each a pair or a band that is summed.
        skipped: Number of windows left out to keep the page small.
    """

    head: int
    kv_head: int
    prompt: str
    n_tokens: int
    record: LayerCapture
    positions: Int[np.ndarray, " shown"]
    tokens: tuple[str, ...]
    first_key: Int[np.ndarray, " shown"]
    received: Float[np.ndarray, " shown"]
    windows: tuple[HeadWindow, ...]
    opening: int
    groups: tuple[tuple[int, ...], ...]
    skipped: int

    @property
    def rope(self) -> LayerRope:
        """The layer's rotation."""
        return self.record.rope

    @property
    def window(self) -> HeadWindow:
        """The window that is shown first."""
        return self.windows[self.opening]

    def split(self) -> HeadDecomposition:
        """The scores of the window that is shown first, as a decomposition of its own."""
        at = int(np.searchsorted(self.positions, self.window.start))
        stop = at + self.window.stop - self.window.start
        record = dataclasses.replace(
            self.record, q=self.record.q[at:stop], k=self.record.k[at:stop]
        )
        prompt = Prompt(self.prompt, tuple(range(at, stop)), self.tokens[at:stop], None)
        return HeadDecomposition(record, 0, prompt)

    def cut(self, max_bytes: int) -> HeadMaps:
        """The same head with windows left out until the rest takes up no more than this in a page.

        The window that is shown first stays in any case; then the first and the last are kept.

        Args:
            max_bytes: Size in bytes.
        """
        size = self.window.stop - self.window.start
        most = max(max_bytes // _bytes(size, self.rope.d_head), 1)
        order = dict.fromkeys([self.opening, 0, len(self.windows) - 1, *range(len(self.windows))])
        kept = sorted(list(order)[:most])
        if len(kept) == len(self.windows):
            return self
        windows = tuple(self.windows[i] for i in kept)
        stays = np.zeros(len(self.positions), dtype=bool)
        for window in windows:
            stays |= (self.positions >= window.start) & (self.positions < window.stop)
        at = np.flatnonzero(stays)
        return dataclasses.replace(
            self,
            record=dataclasses.replace(self.record, q=self.record.q[at], k=self.record.k[at]),
            positions=self.positions[at],
            tokens=tuple(self.tokens[i] for i in at),
            first_key=self.first_key[at],
            received=self.received[at],
            windows=windows,
            opening=kept.index(self.opening),
            skipped=self.skipped + len(self.windows) - len(windows),
        )

    def notes(self) -> list[str]:
        """What a reader has to know about what is shown, one sentence each."""
        notes = []
        if self.skipped:
            shown = len(self.windows)
            notes.append(
                f"Of {shown + self.skipped} windows of this prompt {shown} "
                f"{'are' if shown > 1 else 'is'} here ({', '.join(w.name for w in self.windows)}); "
                "the others are left out to keep this small."
            )
        if self.record.softcap is not None:
            notes.append(
                f"Scores and contributions are before the soft-cap of {number(self.record.softcap)}"
                "; attention is after it."
            )
        if self.record.sinks is not None:
            notes.append("A learned sink, which is no key, takes its part of each query.")
        if self.rope.window is not None:
            notes.append(
                f"A query sees the last {self.rope.window} keys; keys it does not see are grey."
            )
        return notes

    def to_json(self) -> str:
        """All of it as JSON that is safe inside a script element."""
        rope, record = self.rope, self.record
        first, second = rope.components
        return script_json(
            {
                "layer": rope.layer,
                "head": self.head,
                "tokens": [display_text(token) for token in self.tokens],
                "windows": [
                    {
                        "name": window.name,
                        "start": window.start,
                        "size": window.stop - window.start,
                        "at": int(np.searchsorted(self.positions, window.start)),
                        "pattern": _packed(np.rint(window.pattern * 10**DECIMALS), "<u2"),
                        "before": _rounded(window.before),
                    }
                    for window in self.windows
                ],
                "per_attention": 10**DECIMALS,
                "opening": self.opening,
                "first_key": self.first_key.tolist(),
                "received": _rounded(self.received),
                "q": _packed(record.q[:, 0].numpy(), "<f4"),
                "k": _packed(record.k[:, 0].numpy(), "<f4"),
                "d_head": rope.d_head,
                "scale": record.scale,
                "first": first.tolist(),
                "second": second.tolist(),
                "rest": rope.pass_components.tolist(),
                "wavelength": [number(value) for value in rope.wavelength],
                "cycles": [number(value) for value in rope.cycles],
                "colors": [pair_color(pair) for pair in range(rope.n_pairs)],
                "groups": [list(group) for group in self.groups],
                "notes": self.notes(),
                "positive": SCALES["light"]["diverging"][-1][1],
                "negative": SCALES["light"]["diverging"][0][1],
                "share": SCALES["light"]["sequential"][4][1],
                "pass_through": PASS_THROUGH,
            }
        )


def head_maps(
    split: HeadDecomposition,
    groups: Sequence[int | Sequence[int]] | None = None,
    *,
    start: int = 0,
    size: int = MAX_WINDOW,
    max_bytes: int = MAX_BYTES,
) -> HeadMaps:
    """What is needed to show one head.

    Args:
        split: The head's decomposition.
        groups: Pairs side by side: a pair each, or several that are summed. None gives the four
            pairs that carry most of the score variance in the first window that is shown.
        start: First position of the window that is shown first.
        size: Tokens in a window, at most `MAX_WINDOW`; fewer where the prompt ends.
        max_bytes: Windows are left out until the rest takes up no more than this in a page; the
            one at `start` stays, then the first, the last, and the others in order.

    Raises:
        InputError: A window or pair is not there, or values are not finite.
    """
    record, rope, head = split.record, split.rope, split.head
    n_tokens = record.n_pos
    if not 1 <= size <= MAX_WINDOW:
        raise InputError(f"a window has 1 to {MAX_WINDOW} tokens, not {size}")
    if not 0 <= start < n_tokens:
        raise InputError(
            f"the window starts at {start}; the prompt has {n_tokens} tokens, numbered from 0"
        )
    known = None if groups is None else checked_groups(groups, rope.n_pairs)
    starts, skipped = _starts(n_tokens, start, size, max_bytes // _bytes(size, rope.d_head))
    windows = tuple(_window(split, at, min(at + size, n_tokens)) for at in starts)
    received = sink_shares(record, head)
    if not all(np.isfinite(x).all() for x in (received, *(window.pattern for window in windows))):
        raise InputError(
            f"the attention of layer {rope.layer} head {head} holds NaN or infinity, which cannot "
            "be shown"
        )
    positions = np.unique(np.concatenate([np.arange(w.start, w.stop) for w in windows]))
    kv_head = split.kv_head
    maps = HeadMaps(
        head=head,
        kv_head=kv_head,
        prompt=split.prompt.name,
        n_tokens=n_tokens,
        record=LayerCapture(
            rope=rope,
            # Copies, so that the whole layer can be freed.
            q=record.q[positions, head : head + 1].clone(),
            k=record.k[positions, kv_head : kv_head + 1].clone(),
            scale=record.scale,
            softcap=record.softcap,
            sinks=None if record.sinks is None else record.sinks[head : head + 1].clone(),
            check=dataclasses.replace(
                record.check, head_residual=(record.check.head_residual[head],)
            ),
        ),
        positions=positions,
        tokens=tuple(split.prompt.tokens[position] for position in positions),
        first_key=np.maximum(positions - (n_tokens if rope.window is None else rope.window) + 1, 0),
        received=received[positions],
        windows=windows,
        opening=starts.index(start),
        groups=known or (),
        skipped=skipped,
    )
    if known is not None:
        return maps
    return dataclasses.replace(maps, groups=telling_pairs(maps.split().by_pair()))


def _window(split: HeadDecomposition, start: int, stop: int) -> HeadWindow:
    """Attention of the queries of one window, within it and before it."""
    pattern = split.pattern(queries=range(start, stop), keys=range(stop)).astype(np.float64)
    # A copy, so that what is before the window can be freed.
    return HeadWindow(start, stop, pattern[:, start:].copy(), pattern[:, :start].sum(axis=1))


def checked_groups(
    groups: Sequence[int | Sequence[int]], n_pairs: int
) -> tuple[tuple[int, ...], ...]:
    """Pairs and bands as tuples of pairs.

    Raises:
        InputError: One is empty, names a pair twice or one that is not there, or there are more
            than `MAX_GROUPS`.
    """
    if isinstance(groups, str | int | np.integer):
        raise InputError(
            f"pairs is {groups!r}; give a list of pairs and bands, like [23, (20, 21, 22)]"
        )
    known = []
    for group in groups:
        members = tuple(group) if isinstance(group, Iterable) else (group,)
        for pair in members:
            if isinstance(pair, bool) or not isinstance(pair, int | np.integer):
                raise InputError(f"pair {pair!r} is no index of a pair; give whole numbers")
            if not 0 <= pair < n_pairs:
                raise InputError(
                    f"pair {pair} is out of range; there are {n_pairs}, numbered from 0"
                )
        if not members or len(set(members)) < len(members):
            raise InputError(f"the band {members} must name at least one pair, and each pair once")
        known.append(tuple(sorted(map(int, members))))
    if len(known) > MAX_GROUPS:
        raise InputError(f"at most {MAX_GROUPS} pairs and bands fit side by side, not {len(known)}")
    return tuple(known)


def group_name(group: Sequence[int]) -> str:
    """A pair or a band in words."""
    if len(group) == 1:
        return f"pair {group[0]}"
    if group[-1] - group[0] == len(group) - 1:
        return f"pairs {group[0]}–{group[-1]}"
    return "pairs " + ", ".join(map(str, group))


def telling_pairs(summary: PairSummary, n_pairs: int = 4) -> tuple[tuple[int, ...], ...]:
    """The pairs with the largest share, of either sign, of the score variance within a query."""
    # Where scores do not vary within a query (one token), the largest contributions stand in.
    size = summary.rms if np.isnan(summary.share).all() else np.abs(summary.share)
    return tuple((int(pair),) for pair in np.argsort(-size, kind="stable")[:n_pairs])


def _starts(n_tokens: int, start: int, size: int, most: int) -> tuple[list[int], int]:
    """First positions of the windows that are shown, and how many are not."""
    last = max(n_tokens - size, 0)
    tiles = sorted({*range(0, last + 1, size), last, start})
    kept = list(dict.fromkeys([start, 0, last, *tiles]))[: max(most, 1)]
    return sorted(kept), len(tiles) - len(kept)


def _bytes(size: int, d_head: int) -> int:
    """About how much of a page one window takes: queries, keys and pattern in base64."""
    return (2 * size * d_head * 4 + size * size * 2) * 4 // 3 + 40 * size


def _packed(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode()


def _rounded(values: np.ndarray) -> list[Any]:
    # Adding zero turns -0.0 into 0.0.
    return (np.round(values, DECIMALS) + 0.0).tolist()
