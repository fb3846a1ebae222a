"""Where attention rests: sink shares and previous-token shares of each head.

The sink share of a key is the mean attention to it over the queries that can see it. A sink head
has a key above 0.3 (definition and threshold of Gu et al. 2024, "When Attention Sink Emerges in
Language Models", arXiv 2410.10781). The sink need not be position 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING

import numpy as np

from lens_rope.attention import read_attention
from lens_rope.errors import InputError
from lens_rope.usage import exact_mean

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from lens_rope.attention import LayerAttention
    from lens_rope.records import LayerCapture

SINK_THRESHOLD = 0.3
"""Sink share above which a head is a sink head (Gu et al. 2024)."""

MIN_TOKENS = 64
"""Prompts below this say little about sinks: uniform attention alone gives the first of 8 tokens a
share of 0.34, the first of 64 one of 0.07."""


@dataclass(frozen=True, eq=False)
class HeadShares:
    """Where the heads of one layer rest.

    Attributes:
        layer: Index of the layer.
        n_tokens: Number of tokens behind the numbers.
        sink_share: `[head]` Largest sink share over the keys that count (see `head_shares`).
        sink_position: `[head]` Position of that key.
        previous_share: `[head]` Mean attention of a query to the token before it (queries 1 and
            up; nan for a prompt of one token).
        same_position: `[head]` Whether that key is at `sink_position` in every prompt.
        uniform_share: Sink share that uniform attention would give the first key, the base rate of
            `sink_share`.
        n_prompts: Number of prompts behind the numbers.
        positions: By head, the token-weighted sink shares of the prompts added up by the position
            that each has its sink at, so that merges of merges find the same position. Empty for
            one prompt, whose only position is `sink_position`.
    """

    layer: int
    n_tokens: int
    sink_share: Float[np.ndarray, " head"]
    sink_position: Int[np.ndarray, " head"]
    previous_share: Float[np.ndarray, " head"]
    same_position: Bool[np.ndarray, " head"]
    uniform_share: float
    n_prompts: int = 1
    positions: tuple[Mapping[int, float], ...] = ()

    @property
    def n_queries(self) -> int:
        """Number of queries that have a token before them: all but the first of each prompt."""
        return self.n_tokens - self.n_prompts

    def at(self, head: int) -> Mapping[int, float]:
        """The token-weighted sink share of query head `head` by position, see `positions`."""
        if self.positions:
            return self.positions[head]
        return {int(self.sink_position[head]): self.n_tokens * float(self.sink_share[head])}


def sink_shares(record: LayerCapture, head: int) -> Float[np.ndarray, " k_pos"]:
    """`[k_pos]` Sink share of every key: mean attention to it over the queries that see it.

    Args:
        record: Queries and keys of the layer.
        head: Index of the query head.
    """
    kv_head, sinks = record.kv_head(head), record.sinks
    one = dataclasses.replace(
        record,
        q=record.q[:, head : head + 1],
        k=record.k[:, kv_head : kv_head + 1],
        sinks=None if sinks is None else sinks[head : head + 1],
    )
    return read_attention(one).received[0]


def head_shares(record: LayerCapture, attention: LayerAttention | None = None) -> HeadShares:
    """Sink and previous-token shares of one layer on one prompt.

    Args:
        record: Queries and keys of the layer.
        attention: What `read_attention` says of the record, where that is at hand.
    """
    attention = read_attention(record) if attention is None else attention
    shares = attention.candidates
    return HeadShares(
        layer=attention.layer,
        n_tokens=attention.n_pos,
        sink_share=shares.max(axis=1),
        sink_position=shares.argmax(axis=1),
        previous_share=attention.previous,
        same_position=np.ones(len(shares), dtype=bool),
        uniform_share=attention.uniform,
    )


def sink_positions(attention: LayerAttention) -> tuple[int, ...]:
    """The positions that statistics over tokens leave out: the first, and every sink of the layer.

    A sink is a key with a sink share above `SINK_THRESHOLD` in any head. Prompts shorter than
    `MIN_TOKENS` cannot tell sinks, so there it is the first alone.
    """
    if attention.n_pos < MIN_TOKENS:
        return (0,)
    is_sink = (attention.candidates > SINK_THRESHOLD).any(axis=0)
    return (0, *(int(position) for position in np.flatnonzero(is_sink) if position))


def merge_shares(shares: Iterable[HeadShares]) -> HeadShares:
    """Shares over several prompts: means weighted by tokens, whatever the order.

    Each prompt has its own sink, so the position is that of the largest token-weighted share among
    the prompts' positions (the earliest of equals). Prompts where a share is not defined are left
    out of it.

    Raises:
        InputError: There is nothing to merge, or the layers or numbers of heads differ.
    """
    shares = list(shares)
    if len({(share.layer, len(share.sink_share)) for share in shares}) != 1:
        raise InputError("only shares of one layer with the same heads can be merged")
    weights = [share.n_tokens for share in shares]
    defined = [share for share in shares if share.n_queries]
    n_heads = len(shares[0].sink_share)
    positions = tuple(
        added_positions([entry.at(head) for entry in shares]) for head in range(n_heads)
    )
    return HeadShares(
        layer=shares[0].layer,
        n_tokens=sum(weights),
        sink_share=exact_mean([share.sink_share for share in shares], weights),
        sink_position=np.array([strongest_position(at) for at in positions]),
        same_position=np.array([len(at) == 1 for at in positions]),
        uniform_share=float(exact_mean([np.array([s.uniform_share]) for s in shares], weights)[0]),
        previous_share=(
            exact_mean(
                [share.previous_share for share in defined],
                [share.n_queries for share in defined],
            )
            if defined
            else np.full(n_heads, np.nan)
        ),
        n_prompts=sum(share.n_prompts for share in shares),
        positions=positions,
    )


def added_positions(found: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Weighted shares by position, added up; each sum is rounded once, whatever the order.

    Args:
        found: Weighted share by position, of one or more prompts each.
    """
    positions = sorted({position for at in found for position in at})
    return {position: fsum(at.get(position, 0.0) for at in found) for position in positions}


def strongest_position(at: Mapping[int, float]) -> int:
    """The position with the largest weighted share, the earliest of equals."""
    return min(at, key=lambda position: (-at[position], position))
