"""Where a head may attend to: the token before, an earlier copy of the token, a user's mask, ...

A target gives each of its queries weights over the keys it sees, summing to 1. Targets are sparse
lists of (query, key, weight), so that a thousand queries with a few keys each stay small.
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
        query: `[entry]` Position of the query, ascending.
        key: `[entry]` Position of a key that this query sees.
        weight: `[entry]` Weight of that key; those of a query sum to 1.
    """

    name: str
    query: Int[np.ndarray, " entry"]
    key: Int[np.ndarray, " entry"]
    weight: Float[np.ndarray, " entry"]

    @cached_property
    def queries(self) -> Int[np.ndarray, " row"]:
        """`[row]` The queries that have a target, ascending."""
        return np.unique(self.query)

    @cached_property
    def row(self) -> Int[np.ndarray, " entry"]:
        """`[entry]` Index of the entry's query in `queries`."""
        return np.searchsorted(self.queries, self.query)

    def within(self, window: int | None) -> Target:
        """The target without keys that a window hides; queries with none left have no target."""
        if window is None:
            return self
        seen = self.query - self.key < window
        total = np.bincount(
            self.query[seen], self.weight[seen], minlength=int(self.query.max(initial=0)) + 1
        )
        weight = self.weight[seen] / total[self.query[seen]]
        return Target(self.name, self.query[seen], self.key[seen], weight)

    def mass(self, pattern: Float[np.ndarray, "q_pos k_pos"]) -> float:
        """Mean attention of the target's queries to its keys; nan where no query has a target."""
        if not self.queries.size:
            return np.nan
        return float(pattern[self.query, self.key].sum(dtype=np.float64) / len(self.queries))

    def uniform_mass(self, window: int | None) -> float:
        """The mass that uniform attention over the visible keys would have: the base rate."""
        if not self.queries.size:
            return np.nan
        seen = _seen(self.queries, window)
        return float((np.bincount(self.row) / seen).mean())


def target_from_mask(name: str, mask: Bool[np.ndarray, "q_pos k_pos"]) -> Target:
    """Equal weights over the keys that a mask allows to each query."""
    query, key = np.nonzero(mask)
    count = mask.sum(axis=1)
    return Target(name, query, key, 1.0 / count[query])


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
    return Target(
        "target",
        query,
        key,
        (weights / weights.sum(axis=1, keepdims=True).clip(1e-300))[query, key],
    )


def sink_target(position: int, n_pos: int, window: int | None) -> Target:
    """One key, for every query after it that sees it."""
    last = n_pos if window is None else min(n_pos, position + window)
    query = np.arange(position + 1, last)
    return Target("sink", query, np.full(len(query), position), np.ones(len(query)))


def previous_target(n_pos: int) -> Target:
    """The token before, for every query but the first."""
    query = np.arange(1, n_pos)
    return Target("previous token", query, query - 1, np.ones(len(query)))


def local_target(n_pos: int, window: int | None) -> Target:
    """The query itself and the keys right before it, for queries that see twice as many."""
    if window is not None and window < 2 * LOCAL_REACH:
        return _empty("local")
    query = np.repeat(np.arange(2 * LOCAL_REACH - 1, n_pos), LOCAL_REACH)
    key = query - np.tile(np.arange(LOCAL_REACH), len(query) // LOCAL_REACH)
    return Target("local", query, key, np.full(len(query), 1 / LOCAL_REACH))


def repeat_targets(token_ids: Sequence[int], window: int | None) -> tuple[Target, Target, Target]:
    """Targets that need a token to come back: induction, duplicate token, first occurrence.

    Induction: the keys right after an earlier occurrence of the query's token. Duplicate token:
    the earlier occurrences themselves. First occurrence: the first of them, for queries whose
    token occurred at least twice before (otherwise it is the same as the duplicate).
    Definitions of the first two: Olsson et al. 2022, "In-context Learning and Induction Heads",
    arXiv 2209.11895; Wang et al. 2022, arXiv 2211.00593.
    """
    before: dict[int, list[int]] = {}
    entries: dict[str, list[tuple[int, int, float]]] = {
        "induction": [],
        "duplicate": [],
        "first": [],
    }
    for query, token in enumerate(token_ids):
        earlier = before.setdefault(token, [])
        seen = [n for n in earlier if window is None or query - n < window]
        # The key after the occurrence must be before the query: attending to itself copies nothing.
        after = [n + 1 for n in seen if n + 1 < query]
        entries["induction"] += [(query, key, 1 / len(after)) for key in after]
        entries["duplicate"] += [(query, key, 1 / len(seen)) for key in seen]
        if len(earlier) > 1 and len(seen) == len(earlier):
            entries["first"].append((query, earlier[0], 1.0))
        earlier.append(query)
    return (
        _target("induction", entries["induction"]),
        _target("duplicate token", entries["duplicate"]),
        _target("first occurrence", entries["first"]),
    )


def _target(name: str, entries: list[tuple[int, int, float]]) -> Target:
    if not entries:
        return _empty(name)
    query, key, weight = (np.array(column) for column in zip(*entries, strict=True))
    return Target(name, query, key, weight)


def _empty(name: str) -> Target:
    nothing = np.empty(0, dtype=np.int64)
    return Target(name, nothing, nothing, np.empty(0))


def _seen(queries: Int[np.ndarray, " row"], window: int | None) -> Int[np.ndarray, " row"]:
    """`[row]` How many keys each query sees."""
    seen = queries + 1
    return seen if window is None else np.minimum(seen, window)
