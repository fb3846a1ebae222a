"""Where a head may attend to: the token before, an earlier copy of the token, a user's mask, ...

A target gives each of its queries weights over the keys it sees, summing to 1. A query's keys are a
stretch of one list that all queries share, so a prompt in which a word comes back a thousand times
costs no more than its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from lens_rope.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

LOCAL_REACH = 8
"""Local attention is attention to the query itself and the `LOCAL_REACH - 1` keys before it."""


@dataclass(frozen=True, eq=False)
class Target:
    """Weights over keys for some of the queries.

    Attributes:
        name: What it is called.
        queries: `[row]` The queries that have a target, ascending.
        keys: `[slot]` Positions of keys.
        start: `[row]` The query's keys, all of which it sees, are `keys[start:stop]`.
        stop: `[row]` End of that stretch, beyond `start`. Stretches may overlap.
        weights: `[slot]` Weight of each key, those of a query summing to 1; None where the keys of
            a query have equal weights.
    """

    name: str
    queries: Int[np.ndarray, " row"]
    keys: Int[np.ndarray, " slot"]
    start: Int[np.ndarray, " row"]
    stop: Int[np.ndarray, " row"]
    weights: Float[np.ndarray, " slot"] | None = None

    @cached_property
    def count(self) -> Int[np.ndarray, " row"]:
        """`[row]` Number of keys of each query."""
        return self.stop - self.start

    @cached_property
    def query(self) -> Int[np.ndarray, " entry"]:
        """`[entry]` Position of the query, ascending; an entry is a query with one of its keys."""
        return np.repeat(self.queries, self.count)

    @cached_property
    def key(self) -> Int[np.ndarray, " entry"]:
        """`[entry]` Position of the key."""
        return self.keys[self._slots(slice(None))]

    @cached_property
    def weight(self) -> Float[np.ndarray, " entry"]:
        """`[entry]` Weight of that key; those of a query sum to 1."""
        if self.weights is None:
            return np.repeat(1 / self.count, self.count)
        return self.weights[self._slots(slice(None))]

    def entries(
        self, first: int, last: int
    ) -> tuple[Int[np.ndarray, " entry"], Int[np.ndarray, " entry"]]:
        """Query and key of every entry whose query is one of `first`, ..., `last - 1`."""
        begin, end = np.searchsorted(self.queries, [first, last])
        rows = slice(int(begin), int(end))
        return np.repeat(self.queries[rows], self.count[rows]), self.keys[self._slots(rows)]

    def within(self, window: int | None) -> Target:
        """The target without keys that a window hides; queries with none left have no target."""
        if window is None:
            return self
        seen = self.query - self.key < window
        query, weight = self.query[seen], self.weight[seen]
        total = np.bincount(query, weight)
        return _of_entries(self.name, query, self.key[seen], weight / total[query])

    def mass(self, pattern: Float[np.ndarray, "q_pos k_pos"]) -> float:
        """Mean attention of the target's queries to its keys; nan where no query has a target."""
        if not self.queries.size:
            return np.nan
        return float(pattern[self.query, self.key].sum(dtype=np.float64) / len(self.queries))

    def uniform_mass(self, window: int | None) -> float:
        """The mass that uniform attention over the visible keys would have: the base rate."""
        if not self.queries.size:
            return np.nan
        return float((self.count / _seen(self.queries, window)).mean())

    def _slots(self, rows: slice) -> Int[np.ndarray, " entry"]:
        """`[entry]` Where the keys of these rows are in `keys`."""
        count = self.count[rows]
        end = count.cumsum()
        return np.arange(end[-1] if end.size else 0) + np.repeat(
            self.start[rows] - (end - count), count
        )


def target_from_mask(name: str, mask: Bool[np.ndarray, "q_pos k_pos"]) -> Target:
    """Equal weights over the keys that a mask allows to each query."""
    return _of_entries(name, *np.nonzero(mask))


def target_from_weights(
    weights: Float[np.ndarray, "q_pos k_pos"], visible: Bool[np.ndarray, "q_pos k_pos"]
) -> Target:
    """A user's mask or weights; rows are scaled to sum to 1, rows of zeros have no target.

    Raises:
        InputError: The shape is wrong, a weight is negative or not finite, a weight lies on a key
            that its query does not see, or there is no weight at all.
    """
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape != visible.shape:
        raise InputError(
            f"the target is {list(weights.shape)}; it must be [q_pos, k_pos], here "
            f"{list(visible.shape)}"
        )
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise InputError("the target must hold finite weights of at least 0")
    hidden = (weights > 0) & ~visible
    if hidden.any():
        query, key = (int(i) for i in np.argwhere(hidden)[0])
        raise InputError(
            f"the target gives weight to key {key} for query {query}, which does not see it; "
            "set it to 0 there"
        )
    query, key = np.nonzero(weights)
    if not query.size:
        raise InputError("the target is 0 everywhere; give some keys weight")
    return _of_entries(
        "target",
        query,
        key,
        (weights / weights.sum(axis=1, keepdims=True).clip(1e-300))[query, key],
    )


def sink_target(position: int, n_pos: int, window: int | None) -> Target:
    """One key, for every query after it that sees it."""
    last = n_pos if window is None else min(n_pos, position + window)
    query = np.arange(position + 1, last)
    zero = np.zeros_like(query)
    return Target("sink", query, np.array([position]), zero, zero + 1)


def previous_target(n_pos: int, window: int | None) -> Target:
    """The token before, for every query but the first; no query in a window of one token."""
    if window == 1:
        return _empty("previous token")
    query = np.arange(1, n_pos)
    return Target("previous token", query, np.arange(n_pos), query - 1, query)


def local_target(n_pos: int, window: int | None) -> Target:
    """The query itself and the keys right before it, for queries that see twice as many."""
    if window is not None and window < 2 * LOCAL_REACH:
        return _empty("local")
    query = np.arange(2 * LOCAL_REACH - 1, n_pos)
    return Target("local", query, np.arange(n_pos), query - LOCAL_REACH + 1, query + 1)


def repeat_targets(token_ids: Sequence[int], window: int | None) -> tuple[Target, Target, Target]:
    """Targets that need a token to come back: induction, duplicate token, first occurrence.

    Induction: the keys right after an earlier occurrence of the query's token. Duplicate token:
    the earlier occurrences themselves. First occurrence: the first of them, for queries whose
    token occurred at least twice before (otherwise it is the same as the duplicate).
    Definitions of the first two: Olsson et al. 2022, "In-context Learning and Induction Heads",
    arXiv 2209.11895; Wang et al. 2022, arXiv 2211.00593.
    """
    tokens = np.asarray(token_ids)
    n_pos = len(tokens)
    # Occurrences of each token side by side, in order of position: those before a query are the
    # stretch from the first occurrence of its token to the query itself.
    order = np.argsort(tokens, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(n_pos)
    token = np.cumsum(np.diff(tokens[order], prepend=tokens[order[:1]]) != 0)
    first = np.searchsorted(token, token)[place]
    start = first
    if window is not None:
        oldest = token[place] * n_pos + np.arange(n_pos) - window + 1
        start = np.maximum(first, np.searchsorted(token * n_pos + order, oldest))
    # The key after the occurrence must be before the query: attending to itself copies nothing.
    is_next = np.diff(tokens, prepend=tokens[:1] - 1) == 0
    return (
        _of_stretches("induction", np.minimum(order + 1, n_pos - 1), start, place - is_next),
        _of_stretches("duplicate token", order, start, place),
        _of_stretches(
            "first occurrence",
            order,
            first,
            np.where((place - first > 1) & (start == first), first + 1, first),
        ),
    )


def _of_stretches(
    name: str,
    keys: Int[np.ndarray, " slot"],
    start: Int[np.ndarray, " q_pos"],
    stop: Int[np.ndarray, " q_pos"],
) -> Target:
    """A target from a stretch per query; queries with an empty one have no target."""
    queries = np.flatnonzero(stop > start)
    return Target(name, queries, keys, start[queries], stop[queries])


def _of_entries(
    name: str,
    query: Int[np.ndarray, " entry"],
    key: Int[np.ndarray, " entry"],
    weight: Float[np.ndarray, " entry"] | None = None,
) -> Target:
    """A target from entries in order of their queries."""
    queries, start = np.unique(query, return_index=True)
    return Target(name, queries, key, start, np.append(start, len(query))[1:], weight)


def _empty(name: str) -> Target:
    nothing = np.empty(0, dtype=np.int64)
    return Target(name, nothing, nothing, nothing, nothing)


def _seen(queries: Int[np.ndarray, " row"], window: int | None) -> Int[np.ndarray, " row"]:
    """`[row]` How many keys each query sees."""
    seen = queries + 1
    return seen if window is None else np.minimum(seen, window)
