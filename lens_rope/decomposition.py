"""One head's attention scores, frequency by frequency.

The contribution of pair `i` to the score of query `m` and key `n` is
`scale * Re(zR_q[m] conj(zR_k[n]))`, with `zR` the rotated pair as a complex number. Contributions
over all pairs plus the pass-through (components that are not rotated) sum to the model's own score
before soft-cap and mask. Reductions form neither a `[pair, query, key]` array nor the scores: over
all queries and keys they factor through running sums of keys (`grams`), and by distance they are
cross-correlations (one FFT per component). Their time is linear in the number of tokens, up to the
logarithm of an FFT.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from lens_rope.errors import InputError
from lens_rope.grams import (
    LEAST_VARIANCE,
    by_key_head,
    centred_rows,
    is_precise,
    precisions,
    running_sums,
    visible_products,
)
from lens_rope.memory import refuse_array
from lens_rope.records import LayerCapture, Prompt, RotaryCapture
from lens_rope.results import DistanceProfile, PairSummary, ScoreBreakdown
from lens_rope.rotation import split, to_pairs
from lens_rope.scores import QUERY_BLOCK, pattern_of, scores_of, sees, soft_capped
from lens_rope.spec import LayerRope

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from jaxtyping import Bool, Complex, Float, Int

_SPECTRUM_VALUES = 2**22
"""Numbers of the spectra that are formed at a time, at most, as long as a key head has no more."""


def decompose(
    capture: RotaryCapture, layer: int, head: int, *, prompt: int = 0
) -> HeadDecomposition:
    """Splits the scores of one head into what each rotary pair contributes.

    Args:
        capture: A verified capture.
        layer: Index of the layer.
        head: Index of the query head.
        prompt: Index of the prompt.

    Returns:
        The head's scores by pair, at one query and key, over all of them, or by distance.

    Raises:
        InputError: The layer, head or prompt is not in the capture.
    """
    record = capture.layer(layer, prompt=prompt)
    if not 0 <= head < record.n_heads:
        raise InputError(
            f"head {head} is out of range; layer {layer} has {record.n_heads} heads, "
            "numbered from 0"
        )
    return HeadDecomposition(record, head, capture.prompts[prompt])


@dataclass(frozen=True, eq=False)
class HeadDecomposition:
    """The scores of one head on one prompt, split over rotary pairs.

    Attributes:
        record: Rotated queries and keys of the layer.
        head: Index of the query head.
        prompt: The prompt.
    """

    record: LayerCapture
    head: int
    prompt: Prompt

    @property
    def layer(self) -> int:
        """Index of the layer."""
        return self.record.rope.layer

    @property
    def kv_head(self) -> int:
        """Index of the key head that this head reads."""
        return self.record.kv_head(self.head)

    @property
    def rope(self) -> LayerRope:
        """The layer's rotation."""
        return self.record.rope

    @property
    def residual(self) -> float:
        """Largest difference from the model's own scores when this was captured, in score units."""
        return self.record.check.head_residual[self.head]

    def contributions(
        self,
        pairs: Sequence[int] | None = None,
        *,
        queries: Sequence[int] | None = None,
        keys: Sequence[int] | None = None,
    ) -> Float[np.ndarray, "pair q_pos k_pos"]:
        """`[pair, q_pos, k_pos]` Contributions in score units, nan where the key is not visible.

        Args:
            pairs: Which pairs; None gives all.
            queries: Which query positions; None gives all.
            keys: Which key positions; None gives all.

        Raises:
            InputError: A pair or position is out of range, or the array does not fit in memory.
        """
        pairs = self._checked("pair", pairs, self.rope.n_pairs).tolist()
        what = f"the contributions of {len(pairs)} pairs"
        queries_at, keys_at = self._cells(what, queries, keys, len(pairs))
        of_queries, of_keys = (
            torch.stack([part[at][:, pairs] for part in parts[:2]], dim=-1)
            for parts, at in zip(self._split, (queries_at, keys_at), strict=True)
        )
        product = (self.record.scale * of_queries.movedim(0, 1)) @ of_keys.permute(1, 2, 0)
        return self._without_hidden(product, queries_at, keys_at)

    def pass_through(
        self, *, queries: Sequence[int] | None = None, keys: Sequence[int] | None = None
    ) -> Float[np.ndarray, "q_pos k_pos"]:
        """`[q_pos, k_pos]` What unrotated components contribute; nan where not visible.

        In score units.

        Args:
            queries: Which query positions; None gives all.
            keys: Which key positions; None gives all.

        Raises:
            InputError: A position is out of range, or the array does not fit in memory.
        """
        queries_at, keys_at = self._cells("the pass-through", queries, keys)
        (*_, rest_q), (*_, rest_k) = self._split
        product = (self.record.scale * rest_q[queries_at]) @ rest_k[keys_at].T
        return self._without_hidden(product, queries_at, keys_at)

    def scores(
        self, *, queries: Sequence[int] | None = None, keys: Sequence[int] | None = None
    ) -> Float[np.ndarray, "q_pos k_pos"]:
        """`[q_pos, k_pos]` Scores before soft-cap, in score units; nan where not visible.

        Args:
            queries: Which query positions; None gives all.
            keys: Which key positions; None gives all.

        Raises:
            InputError: A position is out of range, or the array does not fit in memory.
        """
        queries_at, keys_at = self._cells("the scores", queries, keys)
        return self._without_hidden(self._scores(queries_at, keys_at), queries_at, keys_at)

    def pattern(
        self, *, queries: Sequence[int] | None = None, keys: Sequence[int] | None = None
    ) -> Float[np.ndarray, "q_pos k_pos"]:
        """`[q_pos, k_pos]` Attention; rows sum to less than 1 where there is a learned sink.

        Args:
            queries: Which query positions; None gives all.
            keys: Which key positions; None gives all. Attention is over all keys in any case.

        Raises:
            InputError: A position is out of range, or the array does not fit in memory.
        """
        record, every = self.record, torch.arange(self.record.n_pos)
        queries_at, keys_at = self._cells("the pattern", queries, keys)
        sinks = None if record.sinks is None else record.sinks[self.head : self.head + 1]
        pattern = torch.empty(len(queries_at), len(keys_at), dtype=record.q.dtype)
        for part, rows in zip(
            pattern.split(QUERY_BLOCK), queries_at.split(QUERY_BLOCK), strict=True
        ):
            scores = soft_capped(self._scores(rows, every), record.softcap)
            visible = sees(rows, every, self.rope.window)
            part.copy_(pattern_of(scores[None], visible, sinks)[0][:, keys_at])
        return pattern.numpy()

    def at(self, query: int, key: int) -> ScoreBreakdown:
        """Every pair's contribution to the score of one query and one key.

        Args:
            query: Position of the query.
            key: Position of the key.

        Raises:
            InputError: A position is out of range, or the query does not see the key.
        """
        cell = self._cells("the score", [query], [key])
        if not sees(*cell, self.rope.window):
            window = self.rope.window
            seen = "keys up to its own position" if window is None else f"the last {window} keys"
            raise InputError(f"query {query} does not see key {key}; a query sees {seen}")
        contribution = self.contributions(queries=[query], keys=[key])[:, 0, 0]
        rest = float(self.pass_through(queries=[query], keys=[key])[0, 0])
        return ScoreBreakdown(
            query=query,
            key=key,
            query_token=self.prompt.tokens[query],
            key_token=self.prompt.tokens[key],
            score=float(contribution.sum(dtype=np.float64)) + rest,
            contribution=contribution,
            pass_through=rest,
            rope=self.rope,
        )

    def by_pair(self) -> PairSummary:
        """What each pair contributes over all visible queries and keys."""
        return layer_pair_summaries(self._one_head)[0]

    def by_distance(self) -> DistanceProfile:
        """The mean contribution of each pair at each distance, by FFT."""
        return layer_distance_profiles(self._one_head)[0]

    @property
    def _one_head(self) -> LayerCapture:
        """The layer with this head alone."""
        record, head, kv = self.record, self.head, self.kv_head
        q, k = record.q[:, head : head + 1], record.k[:, kv : kv + 1]
        return dataclasses.replace(record, q=q, k=k, sinks=None)

    @cached_property
    def _split(self) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]:
        """First and second components of pairs, and pass-through, of queries and of keys."""
        q, k = self.record.q[:, self.head], self.record.k[:, self.kv_head]
        return split(q, self.rope), split(k, self.rope)

    def _scores(
        self, queries: Int[torch.Tensor, " q_pos"], keys: Int[torch.Tensor, " k_pos"]
    ) -> Float[torch.Tensor, "q_pos k_pos"]:
        record, kv_head = self.record, self.kv_head
        q = record.q[queries, self.head : self.head + 1]
        k = record.k[keys, kv_head : kv_head + 1]
        return scores_of(q, k, record.rope, record.scale)[0]

    def _without_hidden(
        self,
        values: Float[torch.Tensor, "... q_pos k_pos"],
        queries: Int[torch.Tensor, " q_pos"],
        keys: Int[torch.Tensor, " k_pos"],
    ) -> Float[np.ndarray, "... q_pos k_pos"]:
        """The values, nan where the key is not visible, in place and a block at a time."""
        for part, rows in zip(
            values.split(QUERY_BLOCK, dim=-2), queries.split(QUERY_BLOCK), strict=True
        ):
            part.masked_fill_(~sees(rows, keys, self.rope.window), torch.nan)
        return values.numpy()

    def _cells(
        self,
        what: str,
        queries: Sequence[int] | None,
        keys: Sequence[int] | None,
        n_values: int = 1,
    ) -> tuple[Int[torch.Tensor, " q_pos"], Int[torch.Tensor, " k_pos"]]:
        """Positions of some queries and keys, where as many values of each two fit in memory."""
        n_pos = self.record.n_pos
        found = self._checked("query", queries, n_pos), self._checked("key", keys, n_pos)
        n_queries, n_keys = map(len, found)
        refuse_array(
            n_queries * n_keys * n_values * self.record.q.element_size(),
            f"{what} of {n_queries:,} queries and {n_keys:,} keys",
            "name the queries and keys that are wanted, as in queries=range(100), or one of each "
            "in at(query, key)",
        )
        return found

    @staticmethod
    def _checked(what: str, wanted: Sequence[int] | None, n: int) -> Int[torch.Tensor, " index"]:
        if wanted is None:
            return torch.arange(n)
        wanted = [int(i) for i in wanted]
        for i in wanted:
            if not 0 <= i < n:
                raise InputError(f"{what} {i} is out of range; there are {n}, numbered from 0")
        return torch.tensor(wanted, dtype=torch.int64)

    def plot(self) -> go.Figure:
        """Share of the score variance that each pair carries, see `by_pair`.

        `by_distance().plot()` draws the mean score over distance, `at(query, key).plot()` one
        score.
        """
        return self.by_pair().plot()

    def _repr_html_(self) -> str:
        """For a notebook: where this is from, the strongest pairs, and curves by distance."""
        from lens_rope.views.head_descriptions import describe_decomposition
        from lens_rope.views.head_figures import distance_curves
        from lens_rope.views.result_html import result_html

        summary = self.by_pair()
        curves = distance_curves(self.by_distance(), summary, self.rope)
        return result_html(describe_decomposition(self, summary), [summary.plot(), curves])

    def __repr__(self) -> str:
        """Where this is from."""
        return (
            f"HeadDecomposition of layer {self.layer} head {self.head} (KV head {self.kv_head}) "
            f"on {self.prompt.name}: {self.record.n_pos} tokens, {self.rope.n_pairs} pairs"
        )


def layer_pair_summaries(record: LayerCapture) -> tuple[PairSummary, ...]:
    """What each pair of each head contributes over all visible queries and keys.

    Args:
        record: Queries and keys of the layer.

    Returns:
        One summary per query head, as `HeadDecomposition.by_pair` has it.
    """
    moments, rope, scale = _Moments.of(record), record.rope, record.scale
    (z_q, rest_q), (z_k, rest_k) = (
        to_pairs(x, rope) for x in (record.q.double(), record.k.double())
    )
    count, window = float(moments.counts.sum()), rope.window
    mean = by_key_head(z_q, running_sums(z_k.conj().resolve_conj(), window)).real.sum(dim=0)
    # Re(z)² is half of |z|² + Re(z²), and both factor into the query's and the key's.
    size = by_key_head(_squared(z_q), running_sums(_squared(z_k), window)).sum(dim=0)
    turned = by_key_head(z_q**2, running_sums((z_k**2).conj().resolve_conj(), window)).real
    square = ((size + turned.sum(dim=0)) / 2).clamp_min(0)
    rest_mean = by_key_head(rest_q, running_sums(rest_k, window)).sum(dim=(0, 2))
    rest_square = visible_products([rest_q], rest_q, [rest_k], rest_k, window)[0, 0]
    pairs, rest = moments.shares(rope)
    return tuple(
        PairSummary(
            mean=(scale * mean[head] / count).numpy(),
            rms=(abs(scale) * (square[head] / count).sqrt()).numpy(),
            share=pairs[head].numpy(),
            pass_through_mean=float(scale * rest_mean[head] / count),
            pass_through_rms=float(
                abs(scale) * (rest_square[head].sum() / count).clamp_min(0).sqrt()
            ),
            pass_through_share=float(rest[head]),
            rope=rope,
        )
        for head in range(record.n_heads)
    )


def pair_shares(record: LayerCapture) -> Float[np.ndarray, "head pair"]:
    """`[head, pair]` Share of each pair in the variance of the scores within a query's row.

    The `share` of `layer_pair_summaries` alone; nan where no row of the head has any variance.

    Args:
        record: Queries and keys of the layer.
    """
    return _Moments.of(record).shares(record.rope)[0].numpy()


def layer_distance_profiles(record: LayerCapture) -> tuple[DistanceProfile, ...]:
    """The mean contribution of each pair of each head at each distance, by FFT.

    Args:
        record: Queries and keys of the layer.

    Returns:
        One profile per query head, as `HeadDecomposition.by_distance` has it.
    """
    from scipy.fft import next_fast_len

    rope, n_pos, n_kv = record.rope, record.n_pos, record.n_kv_heads
    reach = n_pos if rope.window is None else min(n_pos, rope.window)
    distance = np.arange(reach)
    count = n_pos - distance
    # Long enough that negative distances do not wrap around to those that are wanted.
    length = int(next_fast_len(n_pos + reach - 1, real=True) or 0)
    queries = record.q.unflatten(1, (n_kv, -1)).permute(1, 2, 3, 0)
    keys = record.k.permute(1, 2, 0)[:, None]

    def spectrum(
        x: Float[torch.Tensor, "kv group d_head pos"],
    ) -> Complex[torch.Tensor, "kv group d_head frequency"]:
        return torch.fft.rfft(x.double(), length)

    profiles: list[DistanceProfile] = []
    step = max(1, _SPECTRUM_VALUES // (length * rope.d_head * (queries.shape[1] + 1)))
    for start in range(0, n_kv, step):
        kv = slice(start, start + step)
        # A pair's contribution is two products of real components.
        product = spectrum(queries[kv]).mul_(spectrum(keys[kv]).conj())
        first, second, rest = split(product.movedim(2, -1), rope)
        sums = torch.cat([first + second, rest.sum(dim=-1, keepdim=True)], dim=-1)
        mean = torch.fft.irfft(sums.movedim(-1, 2), length)[..., :reach].flatten(0, 1).numpy()
        mean *= record.scale / count
        profiles += [DistanceProfile(distance, count, x[:-1].T, x[-1], rope) for x in mean]
    return tuple(profiles)


@dataclass(frozen=True, eq=False)
class _Moments:
    """What is summed up once for all shares of a layer, in float64.

    Attributes:
        counts: `[pos]` Number of keys that each query sees.
        variance: `[head, d_head]` Sum over visible (m, n) of what a component adds to `q[m] . k[n]`
            times the latter less the mean of its row.
        has_variance: `[head]` A row of one key, or rows of equal scores, have none to share out.
    """

    counts: Float[torch.Tensor, " pos"]
    variance: Float[torch.Tensor, "head d_head"]
    has_variance: Bool[torch.Tensor, " head"]

    @staticmethod
    def of(record: LayerCapture) -> _Moments:
        window, kept = record.rope.window, torch.ones(record.n_pos, dtype=torch.float64)
        variance = total = of_means = torch.empty(0)
        for dtype in precisions(record.n_pos, window):
            q, k, of_means = centred_rows(record.q, record.k, kept, window, dtype)
            x, y = q[..., :-1], k[..., :-1]
            variance = visible_products([x], q, [y], k, window)[0, 0]
            total = variance.sum(dim=1)
            if is_precise(total, x, y):
                break
        has_variance = total > LEAST_VARIANCE * (total + of_means)
        return _Moments(running_sums(kept, window), variance, has_variance)

    def shares(
        self, rope: LayerRope
    ) -> tuple[Float[torch.Tensor, "head pair"], Float[torch.Tensor, " head"]]:
        """`[head, pair]` and `[head]` Shares of the pairs and of the pass-through."""
        share = self.variance / self.variance.sum(dim=1, keepdim=True)
        share = share.masked_fill(~self.has_variance[:, None], torch.nan)
        pairs, rest = to_pairs(share, rope)
        return pairs.real + pairs.imag, rest.sum(dim=1).masked_fill(~self.has_variance, torch.nan)


def _squared(z: Complex[torch.Tensor, "..."]) -> Float[torch.Tensor, "..."]:
    return z.real**2 + z.imag**2
