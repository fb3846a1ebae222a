"""What is left of a head's attention when the contributions of some pairs are removed.

The pattern is formed again from what is left of the scores, exactly and after the fact: later
layers do not answer. `ablate_frequencies` lets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from lens_rope.scores import pattern_of, soft_capped

if TYPE_CHECKING:
    from jaxtyping import Float

    from lens_rope.records import LayerCapture

_BLOCK = 128


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
    window = record.rope.window
    last = record.n_pos if window is None else min(record.n_pos, key + window)
    queries = np.arange(key, last)
    if max_queries is not None and len(queries) > max_queries:
        queries = queries[np.linspace(0, len(queries) - 1, max_queries).round().astype(int)]
    first, second = (torch.as_tensor(c) for c in record.rope.components)
    sinks = None if record.sinks is None else record.sinks[head : head + 1]
    total = np.zeros(len(removals))
    # In blocks of queries: they fit the processor's cache, and need no keys after their end.
    for start in range(0, len(queries), _BLOCK):
        rows = torch.as_tensor(queries[start : start + _BLOCK])
        begin = 0 if window is None else max(0, int(rows[0]) - window + 1)
        distance = rows[:, None] - torch.arange(begin, int(rows[-1]) + 1)[None, :]
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        q = record.q[rows, head]
        k = record.k[begin : int(rows[-1]) + 1, record.kv_head(head)]
        scores = record.scale * (q @ k.T)
        for index, pairs in enumerate(removals):
            parts = torch.cat([first[list(pairs)], second[list(pairs)]])
            left = scores - record.scale * (q[:, parts] @ k[:, parts].T) if len(pairs) else scores
            pattern = pattern_of(soft_capped(left, record.softcap)[None], visible, sinks)[0]
            total[index] += float(pattern[:, key - begin].sum(dtype=torch.float64))
    return total / len(queries)
