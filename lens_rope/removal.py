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

from lens_rope.scores import BITS, soft_capped

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from lens_rope.records import LayerCapture

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

    Args:
        record: Queries and keys of the layer.
        head: Index of the query head.
        key: Position of the key.
        removals: Pairs to remove, one list per result; an empty list removes nothing.
        max_queries: Where more queries see the key, take this many evenly spaced ones.
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

    Args:
        record: Queries and keys of the layer.
        heads: Indices of the query heads.
        key: Position of the key.
        removals: By head, the pairs to remove, as many lists for each head.
        max_queries: Where more queries see the key, take this many evenly spaced ones.

    Returns:
        `[head, removal]` sink shares, and the standard error of each from taking some of the
        queries: 0 where all were taken, else that of a sample in even steps, from the differences
        `d` between neighbours, `sqrt((1 - n / N) sum d^2 / (2 n (n - 1)))` for `n` of `N` queries.
        Differences leave out the drift along the prompt, which such a sample follows.
    """
    window = record.rope.window
    last = record.n_pos if window is None else min(record.n_pos, key + window)
    queries = np.arange(key, last)
    if max_queries is not None and len(queries) > max_queries:
        queries = queries[np.linspace(0, len(queries) - 1, max_queries).round().astype(int)]
    shape = (len(heads), len(removals[0]))
    if not shape[1]:
        return np.zeros(shape), np.zeros(shape)
    values = _attention_left(record, heads, key, removals, queries)
    return values.mean(axis=-1), _error(values, last - key)


def _error(
    values: Float[np.ndarray, "head removal query"], n_all: int
) -> Float[np.ndarray, "head removal"]:
    """Standard error of the mean of values at even steps through `n_all`."""
    n = values.shape[-1]
    if n == n_all or n < 2:
        return np.zeros(values.shape[:-1])
    spread = (np.diff(values, axis=-1) ** 2).sum(axis=-1) / (2 * (n - 1))
    return np.sqrt((1 - n / n_all) / n * spread)


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
    kv_heads = torch.tensor([record.kv_head(head) for head in heads])
    q = record.q.index_select(1, torch.tensor(list(heads)))
    q = q[queries[0] : end] if len(queries) == end - queries[0] else q[torch.as_tensor(queries)]
    q = (BITS * record.scale * q).movedim(0, 1)
    own_k = record.k[key, kv_heads]
    k = record.k[first:end]
    k = (k - record.k[key] if softcap is None else k).movedim(0, 2).contiguous()
    k = k.index_select(0, kv_heads)  # [head, d_head, key]
    parts = _components(record, removals)
    n_heads, n_removals, depth = parts.shape
    # What is added to the scores.
    q_parts = -_taken(q.mT, parts).mT  # [head, removal, query, part]
    k_parts = _taken(k, parts)  # [head, removal, part, key]
    own = None
    if record.sinks is not None:
        own_parts = _taken(own_k[..., None], parts)
        own = (q @ own_k[:, :, None])[:, None, :, 0] + (q_parts @ own_parts)[..., 0]
        own = BITS * soft_capped(own / BITS, softcap)
        own = (BITS * record.sinks[list(heads)].to(own)[:, None, None] - own).exp2()
    size = min(_ROWS, len(queries))
    together = max(1, _BLOCK_VALUES // (n_removals * size * (end - first)))
    buffer = q.new_empty(min(together, n_heads) * n_removals * size * (end - first))
    whole = q.new_empty(n_heads, n_removals, len(queries))
    for start in range(0, len(queries), size):
        rows = slice(start, start + size)
        positions = torch.as_tensor(queries[rows])
        begin = 0 if window is None else max(0, int(positions[0]) - window + 1) - first
        keys = slice(begin, int(positions[-1]) + 1 - first)
        scores = q[:, rows] @ k[:, :, keys]
        n_rows, n_keys = scores.shape[1:]
        at = torch.arange(first + keys.start, first + keys.stop)
        hidden = at > positions[:, None]
        if window is not None:
            hidden |= at <= positions[:, None] - window
        if softcap is None:
            # A sum takes a tenth of the time of a mask for all heads.
            scores += q.new_zeros(n_rows, n_keys).masked_fill_(hidden, -torch.inf)
        for head in range(0, n_heads, together):
            some = slice(head, min(head + together, n_heads))
            shape = (some.stop - head, n_removals, n_rows, n_keys)
            left = buffer[: math.prod(shape)].view(shape)
            if depth:
                torch.bmm(
                    q_parts[some, :, rows].flatten(0, 1),
                    k_parts[some, ..., keys].flatten(0, 1),
                    out=left.flatten(0, 1),
                )
                left += scores[some, None]
            else:
                left.copy_(scores[some, None].expand(shape))
            if softcap is not None:
                capped = soft_capped(left, BITS * softcap)
                left = (capped - capped[..., key - first - begin, None]).masked_fill_(
                    hidden, -torch.inf
                )
            torch.sum(left.exp2_(), dim=-1, out=whole[some, :, rows])
    if own is not None:
        whole += own
    # What overflows is a key that takes all, and leaves 1 / inf = 0.
    return whole.reciprocal_().double().numpy()


def _taken(
    x: Float[torch.Tensor, "head d_head pos"], parts: Int[torch.Tensor, "head removal part"]
) -> Float[torch.Tensor, "head removal part pos"]:
    """Some components of each head; one beyond the last, for a removal that has fewer, is 0."""
    x = torch.nn.functional.pad(x, (0, 0, 0, 1))
    at = parts + x.shape[1] * torch.arange(len(x))[:, None, None]
    return x.flatten(0, 1).index_select(0, at.flatten()).view(*parts.shape, x.shape[2])


def _components(
    record: LayerCapture, removals: Sequence[Sequence[Sequence[int]]]
) -> Int[torch.Tensor, "head removal part"]:
    """The components of each removal's pairs, `d_head` where it has fewer than another."""
    depth = max((len(pairs) for of_head in removals for pairs in of_head), default=0)
    pairs = np.full((len(removals), len(removals[0]), depth), record.rope.n_pairs)
    for head, of_head in enumerate(removals):
        for index, removed in enumerate(of_head):
            pairs[head, index, : len(removed)] = list(removed)
    both = [np.append(c, record.rope.d_head)[pairs] for c in record.rope.components]
    return torch.as_tensor(np.concatenate(both, axis=-1).astype(np.int64))
