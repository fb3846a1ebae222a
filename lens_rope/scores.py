"""Attention scores and patterns from rotated queries and keys, as the model forms them.

Pure functions of tensors. What is compared with the model is the sum of what the rotary pairs and
the pass-through contribute, see `scores_of`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from einops import rearrange

from lens_rope.rotation import split

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from lens_rope.spec import LayerRope


def visibility(
    n_pos: int, window: int | None, *, device: torch.device | str = "cpu"
) -> Bool[torch.Tensor, "q_pos k_pos"]:
    """`[q_pos, k_pos]` Which keys each query of a causal model sees, from positions alone.

    Masked scores are `-inf` in one host and a large finite number in the other, and real scores
    can be as low; so the mask is never read off the scores.

    Args:
        n_pos: Number of positions.
        window: Sliding window in tokens (a query and the `window - 1` keys before it), or None.
        device: Where to put the result.
    """
    positions = torch.arange(n_pos, device=device)
    return sees(positions, positions, window)


def sees(
    queries: Int[torch.Tensor, " row"], keys: Int[torch.Tensor, " key"], window: int | None
) -> Bool[torch.Tensor, "row key"]:
    """`[row, key]` Which of some keys each of some queries sees; `visibility` of all of them.

    Args:
        queries: `[row]` Positions of the queries.
        keys: `[key]` Positions of the keys.
        window: As in `visibility`.
    """
    distance = queries[:, None] - keys
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


BITS = 1 / np.log(2)
"""Bits per unit of score. Powers of two are as fast for what underflows; those of e are not."""

QUERY_BLOCK = 128
"""Queries per block: with the keys they see, a few heads of them fit the cache of a CPU."""


@dataclass(frozen=True, eq=False)
class QueryBlock:
    """Queries and all keys that any of them sees.

    Attributes:
        rows: The queries.
        keys: The keys. Keys outside are seen by none of the queries.
        hidden: `[row, key]` Which of these keys a query does not see; None where all see all.
        n_open: The first so many keys are seen by all the queries.
        band: Where the queries are consecutive: query `i` of the block sees keys `band[0] + i` to
            `band[1] + i` of the block.
    """

    rows: slice
    keys: slice
    hidden: Bool[torch.Tensor, "row key"] | None
    n_open: int
    band: tuple[int, int] | None

    def hide(
        self, x: Float[torch.Tensor, "... row key"], value: float
    ) -> Float[torch.Tensor, "... row key"]:
        """Sets what is not seen to `value`, in place, and touches nothing else.

        Args:
            x: `[..., row, key]` An array over this block.
            value: What to put there.

        Returns:
            `x`.
        """
        if self.hidden is None:
            return x
        part, hidden = x[..., self.n_open :], self.hidden[:, self.n_open :]
        if self.band is None:
            part.masked_fill_(hidden, value)
            return x
        # Zeros beside a diagonal, and a sum, are ten times as fast as a mask for all heads.
        first, last = self.band
        part.tril_(last - self.n_open)
        if self.n_open == 0:
            part.triu_(first)
        if value != 0:
            part.add_(part.new_zeros(hidden.shape).masked_fill_(hidden, value))
        return x


def query_blocks(
    n_pos: int,
    window: int | None = None,
    size: int = QUERY_BLOCK,
    device: torch.device | str = "cpu",
) -> Iterator[QueryBlock]:
    """The queries of a causal model in blocks, in order, each with the keys it sees.

    Args:
        n_pos: Number of positions.
        window: Sliding window in tokens (a query and the `window - 1` keys before it), or None.
        size: Queries per block; the last block may have fewer.
        device: Where to put the masks.
    """
    return _blocks(range(n_pos), window, size, device)


def blocks_of(
    queries: Int[torch.Tensor, " row"], window: int | None = None, size: int = QUERY_BLOCK
) -> Iterator[QueryBlock]:
    """Some of the queries in blocks, in order, each with the keys it sees, as `query_blocks`.

    Args:
        queries: `[row]` Positions of the queries, ascending. The `rows` of a block are indices of
            this array.
        window: Sliding window in tokens, or None.
        size: Queries per block; the last block may have fewer.
    """
    return _blocks(queries.tolist(), window, size, queries.device)


def _blocks(
    positions: Sequence[int], window: int | None, size: int, device: torch.device | str
) -> Iterator[QueryBlock]:
    for start in range(0, len(positions), size):
        queries = positions[start : start + size]
        earliest, last = queries[0], queries[-1]
        first = 0 if window is None else max(0, earliest - window + 1)
        hidden = None
        if last > earliest:
            keys = torch.arange(first, last + 1, device=device)
            hidden = ~sees(torch.tensor(queries, device=device), keys, window)
        # Only a window that has moved hides the first keys of a block from some of its queries.
        n_open = earliest + 1 - first if window is None or last < window else 0
        band = None
        if last - earliest == len(queries) - 1:
            reach = last + 1 if window is None else window
            band = (earliest - reach + 1 - first, earliest - first)
        rows = slice(start, start + len(queries))
        yield QueryBlock(rows, slice(first, last + 1), hidden, n_open, band)


def scores_of(
    q: Float[torch.Tensor, "q_pos head d_head"],
    k: Float[torch.Tensor, "k_pos kv_head d_head"],
    rope: LayerRope,
    scale: float,
) -> Float[torch.Tensor, "head q_pos k_pos"]:
    """`[head, q_pos, k_pos]` Scores before soft-cap and mask: all pairs plus the pass-through.

    The contribution of a pair, `Re(z_q conj(z_k))`, is the sum of the products of its two
    components, so the sum over pairs is a product of first components, plus one of second ones.
    It is added up in these parts, so that what is compared with the model is what contributions add
    up to, and not the model's own product made again.

    Args:
        q: `[q_pos, head, d_head]` Rotated queries. Values below float32 are widened to float32.
        k: `[k_pos, kv_head, d_head]` Rotated keys; a key head serves `head // kv_head` consecutive
            query heads.
        rope: The layer's rotation.
        scale: What query-key products are multiplied by.

    Raises:
        ValueError: The rotation is of heads with another number of components.
    """
    if not q.shape[-1] == k.shape[-1] == rope.d_head:
        raise ValueError(
            f"q and k have {q.shape[-1]} and {k.shape[-1]} components, the rotation {rope.d_head}"
        )
    wide = torch.promote_types(q.dtype, torch.float32)
    # The query heads of a group side by side, so that its keys are not copied per head.
    of_group = scale * rearrange(q.to(wide), "pos (kv group) c -> kv (group pos) c", kv=k.shape[1])
    of_keys = rearrange(k.to(wide), "pos kv c -> kv pos c")
    first, *others = zip(split(of_group, rope), split(of_keys, rope), strict=True)
    scores = first[0] @ first[1].mT
    for queries, keys in others:
        if queries.shape[-1]:
            scores.baddbmm_(queries, keys.mT)
    return scores.view(q.shape[1], q.shape[0], k.shape[0])


def soft_capped(
    scores: Float[torch.Tensor, "..."], softcap: float | None
) -> Float[torch.Tensor, "..."]:
    """`c tanh(s / c)`, or the scores themselves where there is no soft-cap."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def pattern_of(
    scores: Float[torch.Tensor, "head q_pos k_pos"],
    visible: Bool[torch.Tensor, "q_pos k_pos"],
    sinks: Float[torch.Tensor, " head"] | None,
) -> Float[torch.Tensor, "head q_pos k_pos"]:
    """`[head, q_pos, k_pos]` Attention over the visible keys.

    Args:
        scores: `[head, q_pos, k_pos]` Scores after soft-cap.
        visible: `[q_pos, k_pos]` Which keys each query sees.
        sinks: `[head]` Learned sink logits. They take part in the softmax and are not keys, so rows
            then sum to less than 1; they are not renormalised.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return softmaxed(scores.masked_fill(~visible, -torch.inf), sinks)


def softmaxed(
    scores: Float[torch.Tensor, "... head q_pos k_pos"], sinks: Float[torch.Tensor, " head"] | None
) -> Float[torch.Tensor, "... head q_pos k_pos"]:
    """`[..., head, q_pos, k_pos]` Attention of scores that are `-inf` where a key is not seen.

    Args:
        scores: `[..., head, q_pos, k_pos]` Scores after soft-cap and mask.
        sinks: `[head]` Learned sink logits, as for `pattern_of`.
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sink = sinks.to(scores)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
