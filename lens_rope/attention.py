"""What the heads of one layer attend to, reduced to a few numbers per head and key.

The one place where a layer's patterns are gone through, once, in blocks of queries and of all heads
at a time. No pattern is ever whole; what is kept is linear in heads and positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lens_rope.advantage import Advantage, Attended, target_advantages
from lens_rope.scores import BITS, QUERY_BLOCK, query_blocks, soft_capped

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from lens_rope.records import LayerCapture
    from lens_rope.scores import BITS, QueryBlock
    from lens_rope.targets import Target

BLOCK_VALUES = 2**20
"""Scores of all heads that are formed at a time, at most, as long as a block has some queries."""

_FEW = 16

_ENTRIES = 2**20
"""Entries of targets that are looked up at a time, at most, unless one block has more."""


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """Attention received by each key of one layer of one prompt.

    Attributes:
        layer: Index of the layer.
        received: `[head, k_pos]` Sink share of every key: mean attention to it over the queries
            that see it (Gu et al. 2024, arXiv 2410.10781).
        counts: `[k_pos]` Whether a key counts as a possible sink: at least half as many queries
            see it as see the key that most queries see. The last keys are seen by a few queries
            only, themselves among them, and would pass for sinks.
        previous: `[head]` Mean attention of a query to the token before it; nan for one token.
        learned: `[head]` Mean attention to the head's learned sink, 0 where there is none.
        uniform: Sink share that uniform attention would give the first key.
        entropy: `[head]` Mean over queries of the entropy of attention over the log of the number
            of visible keys, in [0, 1]; nan for one token. Rows are scaled to sum to 1 where a
            learned sink takes a part, and left out where it takes all.
        mass: By name of target, `[head]` mean attention of its queries to its keys.
        advantages: By name of target, `[head]` its advantage, by pair.
        attended: `[head]` Advantage of what the head attends to, by pair.
    """

    layer: int
    received: Float[np.ndarray, "head k_pos"]
    counts: Bool[np.ndarray, " k_pos"]
    previous: Float[np.ndarray, " head"]
    learned: Float[np.ndarray, " head"]
    uniform: float
    entropy: Float[np.ndarray, " head"]
    mass: Mapping[str, Float[np.ndarray, " head"]]
    advantages: Mapping[str, tuple[Advantage, ...]]
    attended: tuple[Advantage, ...]

    @property
    def n_pos(self) -> int:
        """Number of positions."""
        return self.received.shape[1]

    @property
    def candidates(self) -> Float[np.ndarray, "head k_pos"]:
        """`[head, k_pos]` Sink shares of the keys that count, -inf for the others."""
        return np.where(self.counts, self.received, -np.inf)


def read_attention(
    record: LayerCapture, targets: Sequence[Target] = (), *, block: int | None = None
) -> LayerAttention:
    """Goes through the patterns of one layer, a block of queries at a time.

    Args:
        record: Queries and keys of the layer.
        targets: Targets whose attention mass and advantages are wanted.
        block: Queries per block; None takes as many as suit the cache. It changes no number by
            more than rounding.
    """
    n_pos, window = record.n_pos, record.rope.window
    reach = n_pos if window is None else min(window, n_pos)
    positions = np.arange(n_pos)
    sees = np.minimum(positions + 1, reach)
    seen_by = np.minimum(n_pos - positions, reach)
    if block is None:
        block = min(QUERY_BLOCK, max(_FEW, BLOCK_VALUES // (record.n_heads * reach)))
    sums = _Sums(record, targets, block, block * min(n_pos, reach + block - 1))
    for part in query_blocks(n_pos, window, block, record.q.device):
        sums.add(part)
    is_single = n_pos == 1
    advantages = target_advantages(record, targets, Attended(sums.lift / BITS, sums.kept))
    # Queries that see one key have none, and neither have rows that a learned sink takes whole.
    several = sees > 1
    # Of equal scores it is the log itself, to rounding.
    entropy = (sums.entropy[:, several] / np.log(sees[several])).clip(0, 1)
    defined = np.isfinite(entropy)
    return LayerAttention(
        layer=record.rope.layer,
        received=sums.received.numpy() / seen_by,
        counts=seen_by >= 0.5 * seen_by.max(),
        previous=sums.previous.numpy() / (np.nan if is_single else n_pos - 1),
        learned=np.zeros(record.n_heads) if record.sinks is None else sums.learned.numpy() / n_pos,
        uniform=float((1 / sees[:reach]).mean()),
        entropy=np.where(defined, entropy, 0).sum(axis=1)
        / np.where(defined.any(axis=1), defined.sum(axis=1), np.nan),
        mass={
            target.name: mass / (len(target.queries) or np.nan)
            for target, mass in zip(targets, sums.mass, strict=True)
        },
        advantages={
            target.name: heads for target, heads in zip(targets, advantages[:-1], strict=True)
        },
        attended=advantages[-1],
    )


class _Sums:
    """What is added up over the queries of a layer, all heads side by side."""

    def __init__(
        self, record: LayerCapture, targets: Sequence[Target], block: int, size: int
    ) -> None:
        n_pos, n_heads, d_head = record.q.shape
        wide = torch.promote_types(record.q.dtype, torch.float32)
        self.record, self.entries = record, _Entries(targets, n_pos, block)
        # Heads first, so that each key head is multiplied with the queries of all its heads.
        # In bits: powers of two are as fast for what is far below the largest score, which powers
        # of e are not.
        self.q = (BITS * record.scale * record.q.to(wide).movedim(0, 1)).contiguous()
        self.sinks = None if record.sinks is None else BITS * record.sinks.to(wide)[:, None]
        self.k = record.k.to(wide).movedim(0, 1).contiguous()
        # Written again by each block: memory that is asked for anew costs as much as the work.
        self.buffers = self.q.new_empty(2, n_heads * size)
        zeros = torch.zeros(n_heads, dtype=torch.float64)
        self.received = torch.zeros(n_heads, n_pos, dtype=torch.float64)
        self.previous, self.learned = zeros.clone(), zeros.clone()
        self.entropy = np.empty((n_heads, n_pos))
        self.mass = np.zeros((len(targets), n_heads))
        self.lift = torch.zeros(n_heads, d_head, dtype=torch.float64)
        self.kept = torch.ones(n_heads, n_pos, dtype=torch.bool)
        self.kept[:, 0] = False

    def add(self, block: QueryBlock) -> None:
        """Adds the queries of one block."""
        record, rows, keys = self.record, block.rows, block.keys
        q, k = self.q[:, rows], self.k[:, keys]
        n_heads, n_rows, n_keys = len(q), q.shape[1], k.shape[1]
        shape = (n_heads, n_rows, n_keys)
        by_group = (len(k), n_heads // len(k) * n_rows, -1)
        scores, pattern = (_view(buffer, shape) for buffer in self.buffers)
        torch.bmm(q.reshape(by_group), k.mT, out=scores.view(by_group))
        if record.softcap is not None:
            scores.copy_(soft_capped(scores, BITS * record.softcap))
        # Finite, so that weight times score is 0 where nothing is seen.
        block.hide(scores, torch.finfo(scores.dtype).min / 2)
        most = scores.amax(dim=-1, keepdim=True)
        scores.sub_(most)
        torch.exp2(scores, out=pattern)
        total = pattern.sum(dim=-1)
        # -sum (p / r) log (p / r) over the keys, r their sum: what a learned sink takes cancels.
        surprise = scores.mul_(pattern).sum(dim=-1) / total
        entropy = total.log() - surprise / BITS
        whole, row = total, None
        if self.sinks is not None:
            whole = total + (self.sinks - most[..., 0]).exp2()
            row = total / whole
            self.learned += (1 - row).sum(dim=1, dtype=torch.float64)
            self.kept[:, rows] &= row > 0
            entropy.masked_fill_(row == 0, torch.nan)
        self.entropy[:, rows] = entropy.numpy()
        pattern.mul_((1 / whole)[..., None])
        self.received[:, keys] += pattern.sum(dim=1)
        attended = (pattern.view(by_group) @ k).view(n_heads, n_rows, -1)
        if row is not None:
            attended.div_(row[..., None])
        attended.masked_fill_(~self.kept[:, rows, None], 0)
        self.lift += attended.mul_(q).sum(dim=1, dtype=torch.float64)
        before = pattern.diagonal(rows.start - 1 - keys.start, dim1=1, dim2=2)
        self.previous += before.sum(dim=1, dtype=torch.float64)
        if self.entries.targets:
            self._add_masses(block, pattern.view(n_heads, -1).numpy())

    def _add_masses(
        self, block: QueryBlock, pattern: Float[np.ndarray, "head row_and_key"]
    ) -> None:
        query, key, starts = self.entries.of(block.rows.start)
        seen = key >= block.keys.start
        if not seen.all():  # in a window of one token, none before it
            starts, query, key = np.insert(seen.cumsum(), 0, 0)[starts], query[seen], key[seen]
        n_keys = block.keys.stop - block.keys.start
        some = starts[1:] > starts[:-1]
        if some.any():
            at = (query - block.rows.start) * n_keys + (key - block.keys.start)
            masses = pattern.take(at, axis=1)
            sums = np.add.reduceat(masses, starts[:-1][some], axis=1, dtype=np.float64)
            self.mass[some] += sums.T


class _Entries:
    """The entries of some targets by block of queries, looked up for many blocks at a time."""

    def __init__(self, targets: Sequence[Target], n_pos: int, block: int) -> None:
        self.targets, self.block, self.n_blocks = targets, block, -(-n_pos // block)
        in_block = np.zeros(self.n_blocks, dtype=np.int64)
        for target in targets:
            np.add.at(in_block, target.queries // block, target.count)
        self.before = np.append(0, in_block.cumsum())
        self.first = self.last = 0

    def of(
        self, row: int
    ) -> tuple[
        Int[np.ndarray, " entry"], Int[np.ndarray, " entry"], Int[np.ndarray, " target_and_one"]
    ]:
        """Query and key of the entries of a block, by target, and where each target starts.

        Args:
            row: The first query of the block; blocks are asked for in order.
        """
        block, n = row // self.block, len(self.targets)
        if block >= self.last:
            self._look_up(block)
        starts = self.starts[(block - self.first) * n :][: n + 1]
        of = slice(starts[0], starts[-1])
        return self.query[of], self.key[of], starts - starts[0]

    def _look_up(self, block: int) -> None:
        enough = np.searchsorted(self.before, self.before[block] + _ENTRIES, side="right") - 1
        self.first, self.last = block, min(max(block + 1, int(enough)), self.n_blocks)
        rows = self.first * self.block, self.last * self.block
        parts = [target.entries(*rows) for target in self.targets]
        # A block and target: the targets of a block side by side.
        n = len(self.targets)
        box = [
            (query // self.block - self.first) * n + index for index, (query, _) in enumerate(parts)
        ]
        box = np.concatenate([*box, np.empty(0, dtype=np.int64)])
        order = np.argsort(box, kind="stable")
        counts = np.bincount(box, minlength=(self.last - self.first) * n)
        self.starts = np.append(0, counts.cumsum())
        self.query, self.key = (np.concatenate(part)[order] for part in zip(*parts, strict=True))


def _view(buffer: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The first values of a buffer in another shape."""
    return buffer[: math.prod(shape)].view(shape)
