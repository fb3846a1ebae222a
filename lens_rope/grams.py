"""Sums over all visible (query, key), in time linear in the number of positions.

A sum over keys of `(q[m] . k[n]) y[n]` factors: keys before a block of queries enter through one
matrix, their sum of `k[n] y[n]ᵀ`, and those of the block itself through the small square of the
block's own scores. Nothing of the size of query times key is formed. Products are in the precision
of the queries and keys, and what is carried from block to block is in float64. A sliding window is
the difference of two such sums, over all keys up to the query and over those that have left the
window, and needs float64, so that the difference costs no digit that matters. Elsewhere float32
will do once the mean key is taken off, which centred rows do not see (`centred_rows`), unless
queries are so nearly orthogonal to keys that sums over keys cancel (`is_precise`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Shaped

LEAST_VARIANCE = 1e-12
"""Less than this part of the sum of squares is the rounding of equal numbers, and no variance."""

_CANCELLED = 1e-3
"""Products whose squares sum to less than this part of what the lengths allow need float64."""

_BLOCK = 64
"""Positions per block: about `d_head`, where both ways of adding up cost the same."""


def precisions(n_pos: int, window: int | None) -> tuple[torch.dtype, ...]:
    """What to sum in: float32, then float64 where that is not `is_precise`.

    Float64 alone where a window cuts keys off.
    """
    if window is None or window >= n_pos:
        return torch.float32, torch.float64
    return (torch.float64,)


def is_precise(
    total: Float[torch.Tensor, " head"],
    q: Float[torch.Tensor, "pos head d_head"],
    k: Float[torch.Tensor, "pos kv_head d_head"],
) -> bool:
    """Whether the precision of `q` and `k` tells the sum of the squares of their products.

    Args:
        total: `[head]` Sum over all queries and the keys up to each of `(q[m] . k[n])²`.
        q: `[pos, head, d_head]` Queries.
        k: `[pos, kv_head, d_head]` Keys.
    """
    if q.dtype == torch.float64:
        return True
    of_q, of_k = (x.square().sum(dim=-1, keepdim=True).double() for x in (q, k))
    largest = by_key_head(of_q, running_sums(of_k)).sum(dim=(0, 2))
    return bool((total >= _CANCELLED * largest).all())


def running_sums(
    y: Shaped[torch.Tensor, "pos ..."], window: int | None = None
) -> Shaped[torch.Tensor, "pos ..."]:
    """`[pos, ...]` Sum of `y` over the positions that the query at each position sees.

    Args:
        y: `[pos, ...]` Values at each position, float64 or complex128.
        window: Sliding window in tokens (a query and the `window - 1` keys before it), or None.
    """
    total = y.cumsum(dim=0)
    if window is not None and window < len(y):
        # Out of place: the sums that are taken off must not be changed ones.
        total = torch.cat([total[:window], total[window:] - total[:-window]])
    return total


def visible_products(
    x: Sequence[Float[torch.Tensor, "pos head c"]],
    q: Float[torch.Tensor, "pos head d_head"],
    y: Sequence[Float[torch.Tensor, "pos kv_head c"]],
    k: Float[torch.Tensor, "pos kv_head d_head"],
    window: int | None = None,
) -> Float[torch.Tensor, "x_part y_part head c"]:
    """`[x_part, y_part, head, c]` Sum over visible (m, n) of `x[m, c] y[n, c] (q[m] . k[n])`.

    Positions that are no queries or no keys are those where `x` or `y` is zero. The result is
    float64.

    Args:
        x: `[pos, head, c]` each. Values of the queries; several parts at once.
        q: `[pos, head, d_head]` Queries, all in one precision, see `precisions`.
        y: `[pos, kv_head, c]` each. Values of the keys. A key head serves `head // kv_head`
            consecutive query heads.
        k: `[pos, kv_head, d_head]` Keys.
        window: Sliding window in tokens, or None.
    """
    shape = len(x), len(y), q.shape[1], x[0].shape[-1]
    if 0 in shape or not q.shape[-1]:  # a layer may have nothing that is not rotated
        return q.new_zeros(shape, dtype=torch.float64)
    values = torch.cat(tuple(y), dim=-1)
    total = _products(x, q, values, k)
    if window is not None and window < len(k):
        # What has left the window of query m is every key up to m - window.
        total -= _products([part[window:] for part in x], q[window:], values[:-window], k[:-window])
    return total.permute(0, 3, 1, 2, 4).flatten(2, 3)


def centred_rows(
    q: Float[torch.Tensor, "pos head d_head"],
    k: Float[torch.Tensor, "pos kv_head d_head"],
    kept: Float[torch.Tensor, " pos"],
    window: int | None,
    dtype: torch.dtype,
) -> tuple[
    Float[torch.Tensor, "pos head d_head_and_1"],
    Float[torch.Tensor, "pos kv_head d_head_and_1"],
    Float[torch.Tensor, " head"],
]:
    """Queries and keys whose products are those of `q` and `k` less the mean of each query's row.

    Args:
        q: `[pos, head, d_head]` Queries.
        k: `[pos, kv_head, d_head]` Keys.
        kept: `[pos]` 1 where a position is a query and a key, else 0, float64.
        window: Sliding window in tokens, or None.
        dtype: Precision of the result.

    Returns:
        `[pos, head, d_head + 1]` and `[pos, kv_head, d_head + 1]` less the mean key and with the
        mean of the row as one more component, and `[head]` the sum of the squares of the means over
        all visible (m, n), float64.
    """
    counts = running_sums(kept, window).clamp_min(1)
    # Any vector may be taken off all keys where rows are centred: less is left to be rounded.
    common = torch.tensordot(kept, k.double(), 1) / kept.sum().clamp_min(1)
    k = ((k - common) * kept[:, None, None]).to(dtype)
    wide = q.to(dtype)
    sums = running_sums(k.double(), window).to(dtype)
    means = by_key_head(wide, sums).sum(dim=-1) / counts[:, None]
    one = k.new_ones(()).expand(*k.shape[:2], 1)
    of_q, of_k = torch.cat([wide, -means[..., None].to(dtype)], dim=-1), torch.cat([k, one], dim=-1)
    of_q[kept == 0] = 0  # a query of zero adds nothing to any sum
    means = means + by_key_head(wide, common.to(dtype)[None]).sum(dim=-1)
    return of_q, of_k, (counts * kept) @ means**2


def by_key_head(
    x: Shaped[torch.Tensor, "pos head c"], y: Shaped[torch.Tensor, "pos kv_head c"]
) -> Shaped[torch.Tensor, "pos head c"]:
    """`[pos, head, c]` Values of the queries times those of the key head that each reads."""
    return (x.unflatten(1, (y.shape[1], -1)) * y[:, :, None]).flatten(1, 2)


def _products(
    x: Sequence[Float[torch.Tensor, "pos head c"]],
    q: Float[torch.Tensor, "pos head d_head"],
    values: Float[torch.Tensor, "pos kv_head y_c"],
    k: Float[torch.Tensor, "pos kv_head d_head"],
) -> Float[torch.Tensor, "x_part kv_head group y_part c"]:
    """`visible_products` where a query sees every key up to its own position."""
    n_kv, width = k.shape[1], x[0].shape[-1]
    queries, *parts = (z.unflatten(1, (n_kv, -1)) for z in (q, *x))
    n_parts = values.shape[-1] // width
    total = q.new_zeros((len(x), n_kv, queries.shape[2], n_parts, width), dtype=torch.float64)
    before = q.new_zeros((n_kv, k.shape[-1], values.shape[-1]), dtype=torch.float64)
    sees = q.new_ones((_BLOCK, _BLOCK)).tril()[:, None]
    for start in range(0, len(q), _BLOCK):
        here = slice(start, start + _BLOCK)
        of_q = queries[here].transpose(0, 1).flatten(1, 2)  # [kv_head, pos * group, d_head]
        of_k, of_y = k[here].transpose(0, 1), values[here].transpose(0, 1)
        size = of_k.shape[1]
        scores = (of_q @ of_k.mT).unflatten(1, (size, -1)).mul_(sees[:size, :, :size])
        sums = torch.baddbmm(scores.flatten(1, 2) @ of_y, of_q, before.to(q.dtype))
        before += of_k.mT @ of_y
        sums = sums.unflatten(1, (size, -1)).unflatten(-1, (n_parts, width)).transpose(0, 1)
        for of_x, one in zip(total, parts, strict=True):
            of_x += (one[here][..., None, :] * sums).sum(dim=0)
    return total
