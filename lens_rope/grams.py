"""Sums over all visible (query, key), in time linear in the number of positions.

A sum over keys of `(q[m] . k[n]) y[n]` factors: keys before a block of queries enter through one
matrix, their sum of `k[n] y[n]ᵀ`, and those of the block itself through the small square of the
block's own scores. Nothing of the size of query times key is formed. A sliding window is the
difference of two such sums, over all keys up to the query and over those that have left the
window; everything is in float64, so that the difference costs no digit that matters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

LEAST_VARIANCE = 1e-12
"""Less than this part of the sum of squares is the rounding of equal numbers, and no variance."""

_BLOCK = 64
"""Positions per block: about `d_head`, where both ways of adding up cost the same."""

_BLOCKS = 8
"""Blocks per step, so that what a step makes stays in the cache."""


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
    x: Float[torch.Tensor, "x_part pos head c"],
    q: Float[torch.Tensor, "pos head d_head"],
    y: Float[torch.Tensor, "y_part pos kv_head c"],
    k: Float[torch.Tensor, "pos kv_head d_head"],
    window: int | None = None,
    means: Float[torch.Tensor, "pos head"] | None = None,
) -> Float[torch.Tensor, "x_part y_part head c"]:
    """`[x_part, y_part, head, c]` Sum over visible (m, n) of `x[m, c] y[n, c] (q[m] . k[n])`.

    With means, that of `x[m, c] y[n, c] (q[m] . k[n] - means[m])`. Positions that are no queries
    or no keys are those where `x` or `y` is zero.

    Args:
        x: `[x_part, pos, head, c]` Values of the queries, float64; several parts at once.
        q: `[pos, head, d_head]` Queries, float64.
        y: `[y_part, pos, kv_head, c]` Values of the keys, float64. A key head serves
            `head // kv_head` consecutive query heads.
        k: `[pos, kv_head, d_head]` Keys, float64.
        window: Sliding window in tokens, or None.
        means: `[pos, head]` What to take off the products of each query, as `row_means`.
    """
    shape = len(x), len(y), q.shape[1], x.shape[-1]
    if 0 in shape or not q.shape[-1]:  # a layer may have nothing that is not rotated
        return q.new_zeros(shape)
    values = torch.cat(tuple(y), dim=-1)
    seen = None if means is None else running_sums(values, window)
    total = _products(x, q, values, k, means, seen)
    if window is not None and window < len(k):
        # What has left the window of query m is every key up to m - window.
        total -= _products(x[:, window:], q[window:], values[:-window], k[:-window])
    return total.unflatten(2, (len(y), -1)).transpose(1, 2)


def row_means(
    q: Float[torch.Tensor, "pos head d_head"],
    k: Float[torch.Tensor, "pos kv_head d_head"],
    counts: Float[torch.Tensor, " pos"],
    window: int | None = None,
) -> Float[torch.Tensor, "pos head"]:
    """`[pos, head]` Mean of `q[m] . k[n]` over the keys that each query sees.

    Args:
        q: `[pos, head, d_head]` Queries, float64.
        k: `[pos, kv_head, d_head]` Keys, float64, zero where a position is no key.
        counts: `[pos]` Number of keys that each query sees, at least 1.
        window: Sliding window in tokens, or None.
    """
    return by_key_head(q, running_sums(k, window)).sum(dim=-1) / counts[:, None]


def by_key_head(
    x: Shaped[torch.Tensor, "pos head c"], y: Shaped[torch.Tensor, "pos kv_head c"]
) -> Shaped[torch.Tensor, "pos head c"]:
    """`[pos, head, c]` Values of the queries times those of the key head that each reads."""
    return (x.unflatten(1, (y.shape[1], -1)) * y[:, :, None]).flatten(1, 2)


def _products(
    x: Float[torch.Tensor, "x_part pos head c"],
    q: Float[torch.Tensor, "pos head d_head"],
    y: Float[torch.Tensor, "pos kv_head y_c"],
    k: Float[torch.Tensor, "pos kv_head d_head"],
    means: Float[torch.Tensor, "pos head"] | None = None,
    seen: Float[torch.Tensor, "pos kv_head y_c"] | None = None,
) -> Float[torch.Tensor, "x_part head y_c"]:
    """`visible_products` where a query sees every key up to its own position.

    `means[m]` times `seen[m]` is taken off.
    """
    (n_pos, n_heads, _), n_kv = q.shape, k.shape[1]
    groups, width, repeats = n_heads // n_kv, x.shape[-1], y.shape[-1] // x.shape[-1]
    total = q.new_zeros((len(x), n_kv, groups, y.shape[-1]))
    before = q.new_zeros((n_kv, k.shape[2], y.shape[2]))
    size = min(_BLOCK, n_pos)
    for start in range(0, n_pos, _BLOCKS * size):
        part = slice(start, start + _BLOCKS * size)

        def split(z: torch.Tensor, part: slice = part) -> torch.Tensor:
            return _blocks(z[part], n_kv, size)

        queries, keys, values = split(q), split(k), split(y)
        grams = (keys.mT @ values).unflatten(0, (n_kv, -1)).cumsum(dim=1) + before[:, None]
        earlier = torch.cat([before[:, None], grams[:, :-1]], dim=1).flatten(0, 1)
        before = grams[:, -1]
        scores = (queries @ keys.mT).unflatten(1, (groups, size)).tril_().flatten(1, 2)
        sums = torch.baddbmm(scores @ values, queries, earlier).unflatten(1, (groups, size))
        if means is not None and seen is not None:
            rows = split(means[..., None]).unflatten(1, (groups, size))
            sums.addcmul_(rows, split(seen)[:, None], value=-1)
        for i, one in enumerate(x):
            weights = split(one).unflatten(1, (groups, size))
            for column in range(repeats):
                here = slice(column * width, (column + 1) * width)
                product = (weights * sums[..., here]).sum(dim=2)
                total[i, ..., here] += product.unflatten(0, (n_kv, -1)).sum(dim=1)
    return total.flatten(1, 2)


def _blocks(
    x: Float[torch.Tensor, "pos head c"], n_kv: int, size: int
) -> Float[torch.Tensor, "kv_block row c"]:
    """`[kv_head * block, group * size, c]` The last block is filled up with zeros, which add 0."""
    missing = -len(x) % size
    if missing:
        x = torch.cat([x, x.new_zeros((missing, *x.shape[1:]))])
    # block pos kv group c -> kv block group pos c
    x = x.view(len(x) // size, size, n_kv, x.shape[1] // n_kv, x.shape[2]).permute(2, 0, 3, 1, 4)
    return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])
