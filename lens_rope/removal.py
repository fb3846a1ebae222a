"""What is left of a head's attention when the contributions of some pairs are removed.

The pattern is formed again from what is left of the scores, exactly and after the fact: later
layers do not answer. `ablate_frequencies` lets them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from lens_rope.errors import InputError
from lens_rope.scores import BITS, blocks_of, soft_capped

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from lens_rope.records import LayerCapture

SAMPLE_SEED = 0
"""Seed of the draw of queries from long prompts."""

_ROWS = 32
"""Queries at a time: few, so that little is formed of keys that they do not see."""

_BLOCK_VALUES = 2**19
"""Heads are taken together as long as what is left of their scores fits the processor's cache."""


def shares_without(
    record: LayerCapture,
    head: int,
    key: int,
    removals: Sequence[Sequence[int]],
    *,
    max_queries: int | None = None,
) -> Float[np.ndarray, " removal"]:
    """`[removal]` Sink share of one key after the contributions of some pairs are removed.

    Arguments and errors as those of `head_shares_without`, for one head.
    """
    return head_shares_without(record, [head], key, [removals], max_queries=max_queries)[0][0]


def head_shares_without(
    record: LayerCapture,
    heads: Sequence[int],
    key: int,
    removals: Sequence[Sequence[Sequence[int]]],
    *,
    max_queries: int | None = None,
) -> tuple[Float[np.ndarray, "head removal"], Float[np.ndarray, "head removal"]]:
    """Sink shares of one key in several heads after removals, and their sampling errors.

    Where more than `n = max_queries` queries see the key, `n` of these `N` are used. The first
    `n // 4`, along which attention to an early key falls steeply, are all among them; the others
    are cut into stretches of nearly equal length, and one query of each is drawn by a generator
    with the seed `SAMPLE_SEED`, so that `N` and `n` alone decide which. With `M_h` the number of
    queries that query `h` stands for, 1 for the first ones, the share is `sum M_h v_h / N` over
    their attention `v_h` to the key. It has no bias, and its standard error is
    `sqrt(sum M_h (M_h - 1) s_h²) / N`, where `s_h²` is half the mean squared difference between
    `v_h` and the values that were drawn right before and after it. These differences hold also what
    attention drifts from one stretch to the next, so the error is stated rather too large than too
    small.

    Args:
        record: Queries and keys of the layer.
        heads: Indices of the query heads.
        key: Position of the key.
        removals: By head, the pairs to remove, as many lists for each head; an empty list removes
            nothing.
        max_queries: The most queries that are used; None uses all that see the key.

    Returns:
        `[head, removal]` sink shares, and the standard error of each from using some of the
        queries: 0 where all were used, nan where one of several was, which tells no error.

    Raises:
        InputError: `max_queries` is below 1.
    """
    if max_queries is not None and max_queries < 1:
        raise InputError(f"max_queries is {max_queries}; at least 1 query is needed for a share")
    window = record.rope.window
    n_all = (record.n_pos if window is None else min(record.n_pos, key + window)) - key
    at, stands_for = _sample(n_all, max_queries)
    shape = (len(heads), len(removals[0]))
    if not shape[1]:
        return np.zeros(shape), np.zeros(shape)
    values = _attention_left(record, heads, key, removals, key + at)
    n_drawn = len(at) - (0 if len(at) == n_all else len(at) // 4)
    error = _error(values[..., -n_drawn:], stands_for[-n_drawn:]) / n_all
    return (values * stands_for).sum(axis=-1) / n_all, error


def _sample(
    n_all: int, most: int | None
) -> tuple[Int[np.ndarray, " query"], Int[np.ndarray, " query"]]:
    """Which of `n_all` queries are used, ascending, and how many each of them stands for."""
    if most is None or n_all <= most:
        return np.arange(n_all), np.ones(n_all, dtype=np.int64)
    n_first = most // 4
    edges = n_first + np.arange(most - n_first + 1) * (n_all - n_first) // (most - n_first)
    drawn = np.random.default_rng(SAMPLE_SEED).integers(edges[:-1], edges[1:])
    first = np.arange(n_first)
    return np.append(first, drawn), np.append(np.ones_like(first), np.diff(edges))


def _error(
    values: Float[np.ndarray, "head removal query"], stands_for: Int[np.ndarray, " query"]
) -> Float[np.ndarray, "head removal"]:
    """Standard error of a sum over all queries from those that were drawn."""
    weights = stands_for * (stands_for - 1)
    if not weights.any():
        return np.zeros(values.shape[:-1])
    if len(stands_for) == 1:
        return np.full(values.shape[:-1], np.nan)
    squares = np.diff(values, axis=-1) ** 2
    # The first and the last value have one beside them, whose difference counts twice.
    squares = np.concatenate([squares[..., :1], squares, squares[..., -1:]], axis=-1)
    variance = (squares[..., :-1] + squares[..., 1:]) / 4
    return np.sqrt((weights * variance).sum(axis=-1))


def _attention_left(
    record: LayerCapture,
    heads: Sequence[int],
    key: int,
    removals: Sequence[Sequence[Sequence[int]]],
    queries: Int[np.ndarray, " query"],
) -> Float[np.ndarray, "head removal query"]:
    """Attention of some queries to one key after each removal.

    The attention to a key is 1 over the sum over keys of `exp(score - score of that key)`, and with
    keys taken relative to it those differences are themselves products of query and key.
    """
    window, softcap = record.rope.window, record.softcap
    first = 0 if window is None else max(0, int(queries[0]) - window + 1)
    end = int(queries[-1]) + 1
    at, kv_heads = torch.as_tensor(queries), torch.tensor([record.kv_head(head) for head in heads])
    q = record.q[queries[0] : end] if len(at) == end - queries[0] else record.q[at]
    q = q.index_select(1, torch.tensor(list(heads))).mul_(BITS * record.scale).movedim(0, 1)
    k = record.k[first:end]
    k = (k if softcap is not None else k - record.k[key]).permute(1, 2, 0).contiguous()
    k = k.index_select(0, kv_heads)  # [head, d_head, key]
    parts, is_part = _components(record, removals)
    n_heads, n_removals, depth = parts.shape
    # What is added to the scores.
    q_parts = -_taken(q.mT, parts).mul_(is_part[..., None]).mT  # [head, removal, query, part]
    k_parts = _taken(k, parts)  # [head, removal, part, key]
    own = None
    if record.sinks is not None:
        own_k = record.k[key, kv_heads][..., None]
        own = (q @ own_k)[:, None, :, 0] + (q_parts @ _taken(own_k, parts))[..., 0]
        own = BITS * soft_capped(own / BITS, softcap)
        own = (BITS * record.sinks[list(heads)].to(own)[:, None, None] - own).exp2()
    size = min(_ROWS, len(queries))
    together = max(1, _BLOCK_VALUES // (n_removals * size * (end - first)))
    buffer = q.new_empty(min(together, n_heads) * n_removals * size * (end - first))
    whole = q.new_empty(n_heads, n_removals, len(queries))
    for block in blocks_of(at, window, size):
        rows, keys = block.rows, slice(block.keys.start - first, block.keys.stop - first)
        scores = q[:, rows] @ k[:, :, keys]
        if softcap is None:
            block.hide(scores, -torch.inf)
        for head in range(0, n_heads, together):
            some = slice(head, head + together)
            of_heads = scores[some, None]
            shape = (len(of_heads), n_removals, *scores.shape[1:])
            left = buffer[: math.prod(shape)].view(shape)
            if depth:
                factors = q_parts[some, :, rows], k_parts[some, ..., keys]
                torch.bmm(*(x.flatten(0, 1) for x in factors), out=left.flatten(0, 1))
                left += of_heads
            else:
                left.copy_(of_heads)
            if softcap is not None:
                capped = soft_capped(left, BITS * softcap)
                left = block.hide(capped - capped[..., key - block.keys.start, None], -torch.inf)
            torch.sum(left.exp2_(), dim=-1, out=whole[some, :, rows])
    if own is not None:
        whole += own
    # What overflows is a key that takes all, and leaves 1 / inf = 0.
    return whole.reciprocal_().double().numpy()


def _taken(
    x: Float[torch.Tensor, "head d_head pos"], parts: Int[torch.Tensor, "head removal part"]
) -> Float[torch.Tensor, "head removal part pos"]:
    """Some components of each head."""
    at = parts + x.shape[1] * torch.arange(len(x))[:, None, None]
    return x.flatten(0, 1).index_select(0, at.flatten()).view(*parts.shape, x.shape[2])


def _components(
    record: LayerCapture, removals: Sequence[Sequence[Sequence[int]]]
) -> tuple[Int[torch.Tensor, "head removal part"], Bool[torch.Tensor, "head removal part"]]:
    """The components of each removal's pairs, and which count: it can have fewer than another."""
    depth = max((len(pairs) for of_head in removals for pairs in of_head), default=0)
    pairs = np.full((len(removals), len(removals[0]), depth), -1)
    for head, of_head in enumerate(removals):
        for index, removed in enumerate(of_head):
            pairs[head, index, : len(removed)] = list(removed)
    both = np.concatenate([np.append(c, 0)[pairs] for c in record.rope.components], axis=-1)
    return torch.as_tensor(both), torch.as_tensor(np.tile(pairs >= 0, 2))
