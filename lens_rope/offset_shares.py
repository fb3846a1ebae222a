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
from lens_rope.grams import (
    LEAST_VARIANCE,
    centred_rows,
    is_precise,
    precisions,
    visible_products,
)
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

_KEYS = 64
"""Keys per step of the token consistency: what fits the cache, and few rows see but a part."""


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
    return _split(record, offsets, torch.float64)


def _split(
    record: LayerCapture, offsets: LayerOffsets, dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """`offset_and_content` in another precision."""

    def split(x: torch.Tensor, side: SideOffsets) -> tuple[torch.Tensor, torch.Tensor]:
        mean = torch.as_tensor(side.mean)[None].to(dtype.to_complex())
        rest = torch.as_tensor(side.rest_mean).to(dtype).expand(record.n_pos, -1, -1)
        offset = from_pairs(rotate(mean, record.positions, record.rope), rest, record.rope)
        return offset, x.to(dtype) - offset

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
    kept = torch.ones(record.n_pos, dtype=torch.float64)
    kept[list(left_out)] = 0
    q, k, parts = torch.empty(0), torch.empty(0), np.zeros((record.n_heads, len(PARTS)))
    for dtype in precisions(record.n_pos, record.rope.window):
        q, k, of_means = centred_rows(record.q, record.k, kept, record.rope.window, dtype)
        if not offsets.is_known:  # the mean of few tokens is no offset, and of none no number
            break
        found = _parts(record, offsets, q, k, kept.to(dtype))
        total = found.sum(dim=1)
        if is_precise(total, q[..., :-1], k[..., :-1]):
            # What rounding leaves of the variance of rows of equal scores is not shared out.
            has_variance = total > LEAST_VARIANCE * (total + of_means)
            parts = record.scale**2 * torch.where(has_variance[:, None], found, 0.0).numpy()
            break
    same, square, n_repeats = _repeats(record, token_ids, kept, q, k)
    return OffsetShares(
        layer=record.rope.layer,
        n_tokens=int(kept.sum()),
        parts=parts,
        same_token=record.scale**2 * same,
        same_token_square=record.scale**2 * square,
        n_repeats=n_repeats,
    )


def _parts(
    record: LayerCapture,
    offsets: LayerOffsets,
    q: Float[torch.Tensor, "pos head c"],
    k: Float[torch.Tensor, "pos kv_head c"],
    kept: Float[torch.Tensor, " pos"],
) -> Float[torch.Tensor, "head part"]:
    """`[head, part]` Sums of a part times the centred product of query and key, without scale."""
    queries, keys = _split(record, offsets, q.dtype)
    keys = [part * kept[:, None, None] for part in keys]
    products = visible_products(queries, q, keys, k, record.rope.window)
    return products.sum(dim=3).flatten(0, 1).T


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


def _repeats(
    record: LayerCapture,
    token_ids: Sequence[int],
    kept: Float[torch.Tensor, " pos"],
    q: Float[torch.Tensor, "pos head c"],
    k: Float[torch.Tensor, "pos kv_head c"],
) -> tuple[Float[np.ndarray, " head"], Float[np.ndarray, " head"], int]:
    """Sums over (query, key, other key of the same token), without scale.

    Returns:
        `[head]` Sum of the products of the two centred products of query and key, `[head]` sum of
        the squares of the first, and how many there are. With `G` the keys of one token that a
        query sees, the first is the sum over `G` of `(sum of d)² - sum of d²`, and the second of
        `(|G| - 1) d²`.
    """
    n_pos, window = record.n_pos, record.rope.window
    rows = torch.arange(n_pos)
    if n_pos > CONSISTENCY_QUERIES:
        step = n_pos / CONSISTENCY_QUERIES
        rows = (torch.arange(CONSISTENCY_QUERIES) * step).long()
    rows = rows[kept[rows] > 0]
    ids = torch.as_tensor(list(token_ids))[:n_pos]
    _, group, size = ids.unique(return_inverse=True, return_counts=True)
    columns = ((size[group] > 1) & (kept > 0)).nonzero()[:, 0]
    _, group = group[columns].unique(return_inverse=True)
    n_groups = int(group.max()) + 1 if len(group) else 0
    queries = q[rows].float().permute(1, 2, 0)
    keys = k[columns].float().transpose(0, 1)
    keys = keys.repeat_interleave(record.n_heads // record.n_kv_heads, dim=0)
    # `[group, row]` how many keys of the group a query sees, then `[head, group, row]` sums of the
    # centred products and of their squares over these keys.
    n_seen = torch.zeros(n_groups, len(rows))
    sums, squares = torch.zeros(2, record.n_heads, n_groups, len(rows))
    for start in range(0, len(columns), _KEYS):
        part = slice(start, start + _KEYS)
        here, of_group = columns[part], group[part]
        # Queries before the first of these keys see none of them.
        later = slice(int(torch.searchsorted(rows, here[0])), None)
        seen = here[:, None] <= rows[later]
        if window is not None:
            seen &= here[:, None] > rows[later] - window
        seen = seen.float()
        n_seen[:, later].index_add_(0, of_group, seen)
        deviation = (keys[:, part] @ queries[..., later]).mul_(seen)
        sums[..., later].index_add_(1, of_group, deviation)
        squares[..., later].index_add_(1, of_group, deviation.square_())
    n_repeats = int((n_seen * (n_seen - 1)).sum(dtype=torch.float64))
    same = sums.square_().sub_(squares).sum(dim=(1, 2), dtype=torch.float64)
    square = squares.mul_(n_seen - 1).sum(dim=(1, 2), dtype=torch.float64)
    return same.numpy(), square.numpy(), n_repeats


def _ratio(
    part: Float[np.ndarray, "..."], whole: Float[np.ndarray, "..."], is_known: np.ndarray
) -> Float[np.ndarray, "..."]:
    return np.where(is_known, part / np.where(is_known, whole, 1.0), np.nan)
