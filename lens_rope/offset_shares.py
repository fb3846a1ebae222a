"""How the scores of a head split over offset and content, and whether they follow the tokens.

`z = z̄ + (z - z̄)` in query and key splits each contribution exactly in four: offset·offset depends
on distance alone, offset·content on what the key holds, content·offset on what the query holds, and
content·content on both. Components that are not rotated split in the same way, as pairs that do not
turn. The share of a part in the variance of the scores is `sum part · score / sum score²` with each
query's scores centred over the keys it sees; only differences within a row reach the softmax.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lens_rope.errors import InputError
from lens_rope.offsets import LayerOffsets, SideOffsets
from lens_rope.rotation import from_pairs, rotate

if TYPE_CHECKING:
    from jaxtyping import Float

    from lens_rope.records import LayerCapture

PARTS = ("offset_offset", "offset_content", "content_offset", "content_content")
"""The four parts of a score, query first."""

MIN_REPEATS = 100
"""Fewest (query, key, key) with one token in both keys that tell a token consistency."""

CONSISTENCY_QUERIES = 256
"""Longer prompts give this many evenly spaced queries to the token consistency."""


@dataclass(frozen=True, eq=False)
class OffsetShares:
    """How the scores of each head of one layer split over offset and content.

    Attributes:
        layer: Index of the layer.
        n_tokens: Number of analysed tokens.
        parts: `[head, part]` Sums over queries and keys of a part times the score, in score units
            squared, in the order of `PARTS`; 0 where the prompt has too few tokens for an offset.
        same_token: `[head]` Sum of the products of a query's centred scores of two keys that hold
            the same token, in score units squared.
        same_token_square: `[head]` What that sum would be if both scores were always equal.
        n_repeats: Number of (query, key, key) behind the last two.
    """

    layer: int
    n_tokens: int
    parts: Float[np.ndarray, "head part"]
    same_token: Float[np.ndarray, " head"]
    same_token_square: Float[np.ndarray, " head"]
    n_repeats: int

    @property
    def shares(self) -> Float[np.ndarray, "head part"]:
        """`[head, part]` Share of each part in the variance of the scores within a query's row.

        In the order of `PARTS`. They sum to 1 and can be negative. nan where no row has any
        variance, and with too few tokens for an offset in every prompt.
        """
        total = self.parts.sum(axis=1, keepdims=True)
        return _ratio(self.parts, total, total > 0)

    @property
    def token_consistency(self) -> Float[np.ndarray, " head"]:
        """`[head]` Correlation of the scores that a query gives to two keys with the same token.

        Near 1 where scores depend on which token a key holds, near 0 where they do not; nan with
        fewer than `MIN_REPEATS` repeats.
        """
        is_known = (self.n_repeats >= MIN_REPEATS) & (self.same_token_square > 0)
        return _ratio(self.same_token, self.same_token_square, is_known)


def offset_and_content(
    record: LayerCapture, offsets: LayerOffsets
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Rotated queries and keys as (offset, content), each `[pos, head, d_head]` in float64.

    Either sums to the query or key, so the four products of a query part and a key part sum to the
    product of query and key.
    """

    def split(x: torch.Tensor, side: SideOffsets) -> tuple[torch.Tensor, torch.Tensor]:
        mean = torch.as_tensor(side.mean).expand(record.n_pos, -1, -1)
        rest = torch.as_tensor(side.rest_mean).expand(record.n_pos, -1, -1)
        offset = from_pairs(rotate(mean, record.positions, record.rope), rest, record.rope)
        return offset, x.double() - offset

    return split(record.q, offsets.query), split(record.k, offsets.key)


def layer_offset_shares(
    record: LayerCapture,
    token_ids: Sequence[int],
    offsets: LayerOffsets,
    left_out: Sequence[int] = (0,),
) -> OffsetShares:
    """Offset shares of the heads of one layer on one prompt.

    Args:
        record: Queries and keys of the layer.
        token_ids: The prompt's tokens.
        offsets: The offsets to split by, `layer_offsets` of the same record.
        left_out: Positions that are neither queries nor keys: the first and the sinks.
    """
    kept = torch.ones(record.n_pos, dtype=torch.bool)
    kept[list(left_out)] = False
    seen = record.visible & kept[:, None] & kept[None, :]
    count = seen.sum(dim=1, keepdim=True).clamp_min(1)
    queries, keys = offset_and_content(record, offsets)
    repeats = _repeats(record, token_ids, seen)
    parts, same, square = [], [], []
    for head in range(record.n_heads):
        kv = record.kv_head(head)
        scores = record.scores(head).masked_fill(~seen, 0.0)
        deviation = (scores - scores.sum(dim=1, keepdim=True) / count).masked_fill(~seen, 0.0)
        # One product for both key parts; sums over queries in float64.
        both = torch.cat([keys[0][:, kv], keys[1][:, kv]], dim=1).to(deviation.dtype)
        against = (deviation @ both).double().chunk(2, dim=1)
        parts.append(
            [
                record.scale * float((query[:, head] * key).sum())
                for query in queries
                for key in against
            ]
            # The mean of few tokens is no offset, and of none no number.
            if offsets.is_known
            else [0.0] * len(PARTS)
        )
        sums = repeats.sums(deviation)
        same.append(sums[0])
        square.append(sums[1])
    return OffsetShares(
        layer=record.rope.layer,
        n_tokens=int(kept.sum()),
        parts=np.array(parts),
        same_token=np.array(same),
        same_token_square=np.array(square),
        n_repeats=repeats.n,
    )


def merge_offset_shares(shares: Iterable[OffsetShares]) -> OffsetShares:
    """Over several prompts, each split by its own offsets: sums, whatever the order.

    Raises:
        InputError: There is nothing to merge, or the layers or numbers of heads differ.
    """
    from math import fsum

    shares = list(shares)
    if len({(entry.layer, len(entry.parts)) for entry in shares}) != 1:
        raise InputError("only offset shares of one layer with the same heads can be merged")

    def total(name: str) -> np.ndarray:
        values = [getattr(entry, name) for entry in shares]
        columns = zip(*(value.ravel() for value in values), strict=True)
        return np.array([fsum(column) for column in columns]).reshape(values[0].shape)

    return OffsetShares(
        layer=shares[0].layer,
        n_tokens=sum(entry.n_tokens for entry in shares),
        parts=total("parts"),
        same_token=total("same_token"),
        same_token_square=total("same_token_square"),
        n_repeats=sum(entry.n_repeats for entry in shares),
    )


@dataclass(frozen=True, eq=False)
class _Repeats:
    """Which keys hold the same token, for some queries of a prompt.

    Attributes:
        rows: `[row]` The queries.
        members: `[k_pos, group]` 1 where a key holds the token of the group.
        others: `[row, group]` How many other keys of the group a query sees, at least 0.
    """

    rows: torch.Tensor
    members: torch.Tensor
    others: torch.Tensor
    n: int

    def sums(self, deviation: torch.Tensor) -> tuple[float, float]:
        """Sums over (query, key, other key of the same token) of product and of square."""
        if not self.n:
            return 0.0, 0.0
        some = deviation[self.rows]
        square = (some**2 @ self.members).double()
        product = (some @ self.members).double() ** 2 - square
        return float(product.sum()), float((square * self.others).sum())


def _repeats(record: LayerCapture, token_ids: Sequence[int], seen: torch.Tensor) -> _Repeats:
    rows = torch.arange(record.n_pos)
    if len(rows) > CONSISTENCY_QUERIES:
        step = len(rows) / CONSISTENCY_QUERIES
        rows = (torch.arange(CONSISTENCY_QUERIES) * step).long()
    tokens, counts = np.unique(np.asarray(token_ids), return_counts=True)
    groups = torch.as_tensor(tokens[counts > 1])
    members = (torch.as_tensor(list(token_ids))[:, None] == groups[None, :]).float()
    in_group = seen[rows].float() @ members
    others = (in_group - 1).clamp_min(0).double()
    return _Repeats(rows, members, others, int((in_group.double() * others).sum()))


def _ratio(
    part: Float[np.ndarray, "..."], whole: Float[np.ndarray, "..."], is_known: np.ndarray
) -> Float[np.ndarray, "..."]:
    return np.where(is_known, part / np.where(is_known, whole, 1.0), np.nan)
