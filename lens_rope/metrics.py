"""Head metrics of the literature, computed on one capture so that results can be compared.

- *Full-cycle share* of queries or keys: the part of the mean pair length that lies in pairs which
  turn at least once over the layer's effective context, `sum over cycles_i >= 1 of u_i / sum of
  u_i` with `u_i` the mean of `|z_i|` over tokens, in [0, 1]. The mean 2-norm per frequency is the
  measure of Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205); the sum over full
  cycles is ours.
- *Positional sensitivity* of a head (Wu, Du and Peng, "RoPE at the End of Its Rope?", arXiv
  2609.39929, as released in rope-profiler 0.1.0): the mean over queries and earlier keys of
  `mean over m of |S(m + 1) - S(m)| / sqrt(sum of |c_i|²)`. `S(m) = Re sum of c_i exp(1j w_i m)` is
  the score of the frozen query and key at distance `m`, with `c_i = scale g² z_q conj(z_k)`, and
  `m` runs over the `N - 1` steps between the distances `0 .. N - 1`. Dimensionless, 0 and up.
- *Semantic stability* (same source): one minus the mean probability that the order of two keys is
  reversed by a shift of position. For a query and two earlier keys at the same distance `m`,
  `G(m)` is the difference of their scores, pass-through included. The reference order is that at
  distance 0; with the mean `a` and the standard deviation `s` of `G` over `m = 0 .. N - 1`, the
  probability is that of a Gaussian, `Phi(-sign(G(0)) a / s)`. In [0, 1].
- *Sink share*: see `sinks.head_shares`. *First-token share* `a_1`: mean attention of all queries
  to token 0. *First-token sink*: share of prompts with `a_1 > 0.3`; its mean over all heads is the
  `Sink_1^0.3` of Gu et al. 2024 (arXiv 2410.10781), who use prompts of 64 tokens.

`N` is the number of tokens of the prompt, as in the release of arXiv 2609.39929; that refuses
layers with a sliding window, where `N` and the keys here end at the window. The values before
rotation are those that the model rotates, after its own normalisation. The two metrics average
over prompts with equal weight, as their source does; lengths and attention shares weigh a prompt
by its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import fsum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lens_rope.attention import read_attention
from lens_rope.errors import InputError
from lens_rope.grams import by_key_head
from lens_rope.rotation import split, to_pairs
from lens_rope.sinks import MIN_TOKENS, SINK_THRESHOLD, head_shares
from lens_rope.spec import ranges
from lens_rope.usage import mean_lengths, pair_lengths

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    from jaxtyping import Bool, Complex, Float, Int

    from lens_rope.attention import LayerAttention
    from lens_rope.records import LayerCapture, RotaryCapture

MAX_CELLS = 512
"""(query, key) pairs, and (query, key, key) triplets, per head and prompt; above it they are
sampled."""

LEFT_OUT = {
    "frequency entropy": (
        "the definition could not be established with certainty (Probing Rotary Position "
        "Embeddings through Frequency Entropy, ICLR 2026): the window function of its short-time "
        "transform is open, and so is its signal, as the length of a rotary pair, which it is said "
        "to be, does not change under rotation and cannot show the periodicity reported for it"
    ),
    "high-frequency norm share": (
        "the cut-off of r_H (arXiv 2609.39929) is a constant that its release gives two values, "
        "0.05 and 0.06; the full-cycle shares cut at one turn over the context instead"
    ),
}
"""Metrics of the literature that are not computed, and why."""

_CHUNK, _ROWS = 2**18, 512
"""Numbers and cells per step of the positional sensitivity: what fits the cache."""

_TIE = 8 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True, eq=False)
class LayerMetrics:
    """The metrics of the heads of one layer, on one or more prompts; formulas in `metrics`.

    Attributes:
        layer: Index of the layer.
        n_tokens: Number of tokens behind the lengths.
        query_length: `[head]` Mean over tokens of the summed pair lengths of the rotated queries,
            activation units.
        query_full_cycle_length: `[head]` The same over pairs with at least one full cycle.
        key_length: `[head]` The same for the keys that the head reads.
        key_full_cycle_length: `[head]` Likewise.
        positional_sensitivity: `[head]` Mean over prompts, dimensionless; nan where undefined.
        positional_prompts: `[head]` Number of prompts behind it.
        semantic_stability: `[head]` Mean over prompts, in [0, 1]; nan where undefined.
        semantic_prompts: `[head]` Number of prompts behind it.
        sink_share: `[head]` Largest sink share, nan without a prompt of at least 64 tokens.
        first_token_share: `[head]` Mean attention of all queries to token 0, nan likewise.
        first_token_sink: `[head]` Share of prompts in which that is above 0.3, nan likewise.
        sink_tokens: Number of tokens of the prompts behind these three.
        sink_prompts: Number of those prompts.
    """

    layer: int
    n_tokens: int
    query_length: Float[np.ndarray, " head"]
    query_full_cycle_length: Float[np.ndarray, " head"]
    key_length: Float[np.ndarray, " head"]
    key_full_cycle_length: Float[np.ndarray, " head"]
    positional_sensitivity: Float[np.ndarray, " head"]
    positional_prompts: Int[np.ndarray, " head"]
    semantic_stability: Float[np.ndarray, " head"]
    semantic_prompts: Int[np.ndarray, " head"]
    sink_share: Float[np.ndarray, " head"]
    first_token_share: Float[np.ndarray, " head"]
    first_token_sink: Float[np.ndarray, " head"]
    sink_tokens: int
    sink_prompts: int

    @property
    def query_full_cycle_share(self) -> Float[np.ndarray, " head"]:
        """`[head]` Part of the queries' pair lengths in full-cycle pairs; nan without RoPE."""
        return _ratio(self.query_full_cycle_length, self.query_length)

    @property
    def key_full_cycle_share(self) -> Float[np.ndarray, " head"]:
        """`[head]` Part of the keys' pair lengths in full-cycle pairs; nan without RoPE."""
        return _ratio(self.key_full_cycle_length, self.key_length)


METRICS = (
    "query_full_cycle_share",
    "key_full_cycle_share",
    "positional_sensitivity",
    "semantic_stability",
    "sink_share",
    "first_token_share",
    "first_token_sink",
)
"""The metrics, in the order of the table's columns."""


@dataclass(frozen=True, eq=False)
class HeadMetrics:
    """The metrics of every head that was asked for.

    Attributes:
        model: Name of the model.
        n_prompts: Number of prompts.
        layers: One entry per layer, merged over prompts.
        notes: What is nan, sampled or adapted, in sentences.
    """

    model: str
    n_prompts: int
    layers: tuple[LayerMetrics, ...]
    notes: tuple[str, ...]

    @property
    def first_token_sink_rate(self) -> float:
        """Share of heads with a sink at token 0, over layers, heads and prompts.

        The `Sink_1^0.3` of Gu et al. 2024 where all layers are at hand; nan without a prompt that
        is long enough.
        """
        return float(np.mean([layer.first_token_sink for layer in self.layers]))

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer and head, one column per metric.

        Columns: `layer`, `head`, `query_full_cycle_share`, `key_full_cycle_share` (in [0, 1]),
        `positional_sensitivity` (dimensionless), `semantic_stability`, `sink_share`,
        `first_token_share`, `first_token_sink` (in [0, 1]).
        """
        import pandas as pd

        return pd.concat(
            [
                pd.DataFrame(
                    {
                        "layer": entry.layer,
                        "head": np.arange(len(entry.sink_share)),
                        **{name: getattr(entry, name) for name in METRICS},
                    }
                )
                for entry in self.layers
            ],
            ignore_index=True,
        )

    def layer_means(self) -> pd.DataFrame:
        """One row per layer: the mean of each metric over its heads, nan left out.

        Columns as `to_dataframe`, without `head`.
        """
        by_layer: Any = self.to_dataframe().drop(columns="head").groupby("layer")
        return by_layer.mean().reset_index()

    def plot(self, metric: str = "positional_sensitivity") -> go.Figure:
        """One metric by layer and head.

        Args:
            metric: One of `METRICS`.

        Raises:
            InputError: There is no such metric.
        """
        from lens_rope.views.metric_figures import metric_map

        return metric_map(self, metric)

    def _repr_html_(self) -> str:
        """For a notebook: means by layer, the notes, and the two metrics that only this has."""
        from lens_rope.views.descriptions import describe_metrics
        from lens_rope.views.result_html import result_html

        maps = [self.plot(name) for name in ("positional_sensitivity", "semantic_stability")]
        return result_html(describe_metrics(self), maps)

    def __repr__(self) -> str:
        """Means over the heads of each layer, then the notes and what is left out."""
        prompts = "1 prompt" if self.n_prompts == 1 else f"{self.n_prompts} prompts"
        return "\n".join(
            [
                f"HeadMetrics of {self.model} on {prompts}, mean over the heads of each layer",
                self.layer_means().to_string(index=False, float_format="{:.4f}".format),
                f"share of heads with a sink at token 0: {self.first_token_sink_rate:.4f}",
                *(f"note: {note}" for note in self.notes),
                *(f"left out: {name}; {reason}" for name, reason in LEFT_OUT.items()),
            ]
        )


def head_metrics(
    capture: RotaryCapture,
    *,
    layers: Sequence[int] | None = None,
    max_cells: int = MAX_CELLS,
    seed: int = 0,
) -> HeadMetrics:
    """The head metrics that the literature uses, for every layer and head of a capture.

    Full-cycle shares after Barbero et al. 2024 (arXiv 2410.06205), positional sensitivity and
    semantic stability (arXiv 2609.39929), sink shares (Gu et al. 2024, arXiv 2410.10781). The
    module's docstring has each formula.

    Args:
        capture: A verified capture.
        layers: Which layers; None gives all that were captured.
        max_cells: At most this many (query, key) pairs, and as many triplets, stand for a head and
            prompt in positional sensitivity and semantic stability. All are used where there are no
            more, else as many are drawn evenly without replacement.
        seed: Seed of that draw, the same for every prompt and layer.

    Returns:
        Every metric of every head, over all prompts.

    Raises:
        InputError: A layer was not captured or there is none, or `max_cells` is below 1.
    """
    layers = capture.layer_indices if layers is None else tuple(layers)
    if not layers:
        raise InputError("layers is empty; give at least one, or None for all")
    prompts = range(len(capture.prompts))
    merged = tuple(
        merge_metrics(
            layer_metrics(capture.layer(layer, prompt=prompt), max_cells=max_cells, seed=seed)
            for prompt in prompts
        )
        for layer in layers
    )
    notes = _notes(capture, merged, max_cells, seed)
    return HeadMetrics(capture.model.name, len(prompts), merged, notes)


def layer_metrics(
    record: LayerCapture,
    attention: LayerAttention | None = None,
    *,
    max_cells: int = MAX_CELLS,
    seed: int = 0,
) -> LayerMetrics:
    """The metrics of one layer on one prompt.

    Args:
        record: Queries and keys of the layer.
        attention: What `read_attention` says of the record, where that is at hand.
        max_cells: See `head_metrics`.
        seed: See `head_metrics`.

    Raises:
        InputError: `max_cells` is below 1.
    """
    if max_cells < 1:
        raise InputError(f"max_cells is {max_cells}; it must be at least 1")
    n_heads, rope = record.n_heads, record.rope
    has_full_cycle = torch.tensor(rope.cycles >= 1)
    lengths, full = [], []
    for x in (record.q, record.k):
        size = mean_lengths(x, rope)
        lengths.append(size.sum(dim=1).numpy())
        full.append(size[:, has_full_cycle].sum(dim=1).numpy())
    read = [record.kv_head(head) for head in range(n_heads)]
    pairs, triplets = _cells(record.n_pos, _n_distances(record), max_cells, seed)
    positional, semantic = np.full(n_heads, np.nan), np.full(n_heads, np.nan)
    if rope.n_pairs:
        shifts = _shifts(_n_distances(record), rope.inv_freq.tobytes())
        if len(pairs):
            positional = _positional_sensitivity(record, pairs, shifts)
        if len(triplets):
            semantic = _semantic_stability(record, triplets, shifts)
    is_long = record.n_pos >= MIN_TOKENS
    sink_share = first = np.full(n_heads, np.nan)
    if is_long:
        attention = read_attention(record) if attention is None else attention
        sink_share = head_shares(record, attention).sink_share
        # Over all queries, as its source has it: those that do not see token 0 attend to it by 0.
        first = attention.received[:, 0] * (_n_distances(record) / record.n_pos)
    return LayerMetrics(
        layer=rope.layer,
        n_tokens=record.n_pos,
        query_length=lengths[0],
        query_full_cycle_length=full[0],
        key_length=lengths[1][read],
        key_full_cycle_length=full[1][read],
        positional_sensitivity=positional,
        positional_prompts=np.isfinite(positional).astype(int),
        semantic_stability=semantic,
        semantic_prompts=np.isfinite(semantic).astype(int),
        sink_share=sink_share,
        first_token_share=first,
        first_token_sink=(first > SINK_THRESHOLD).astype(float) if is_long else first,
        sink_tokens=record.n_pos if is_long else 0,
        sink_prompts=int(is_long),
    )


def merge_metrics(metrics: Iterable[LayerMetrics]) -> LayerMetrics:
    """The metrics of one layer over several prompts, whatever the order.

    Raises:
        InputError: There is nothing to merge, or the layers or numbers of heads differ.
    """
    entries = list(metrics)
    if len({(entry.layer, len(entry.sink_share)) for entry in entries}) != 1:
        raise InputError("only metrics of one layer with the same heads can be merged")

    def mean(name: str, weight: str) -> Float[np.ndarray, " head"]:
        return _mean([getattr(e, name) for e in entries], [getattr(e, weight) for e in entries])

    return LayerMetrics(
        layer=entries[0].layer,
        n_tokens=sum(entry.n_tokens for entry in entries),
        query_length=mean("query_length", "n_tokens"),
        query_full_cycle_length=mean("query_full_cycle_length", "n_tokens"),
        key_length=mean("key_length", "n_tokens"),
        key_full_cycle_length=mean("key_full_cycle_length", "n_tokens"),
        positional_sensitivity=mean("positional_sensitivity", "positional_prompts"),
        positional_prompts=np.sum([entry.positional_prompts for entry in entries], axis=0),
        semantic_stability=mean("semantic_stability", "semantic_prompts"),
        semantic_prompts=np.sum([entry.semantic_prompts for entry in entries], axis=0),
        sink_share=mean("sink_share", "sink_tokens"),
        first_token_share=mean("first_token_share", "sink_tokens"),
        first_token_sink=mean("first_token_sink", "sink_prompts"),
        sink_tokens=sum(entry.sink_tokens for entry in entries),
        sink_prompts=sum(entry.sink_prompts for entry in entries),
    )


class _Shifts:
    """The score of a frozen query and key over distances, as products of real vectors.

    `Re sum of c_i exp(1j w_i m)` is `x @ waves[m]` with `x` the real and imaginary part of each
    `c_i`, float32, and `waves[m]` the cosines and negated sines at distance `m`. Mean and standard
    deviation over all distances follow from the mean and the covariance of the waves, whatever
    `c` is.
    """

    def __init__(self, n_distances: int, inv_freq: Float[np.ndarray, " pair"]) -> None:
        angles = torch.arange(n_distances).double()[:, None] * torch.tensor(inv_freq)
        self.turn = torch.polar(torch.ones_like(angles), angles)
        waves = torch.view_as_real(self.turn.conj().resolve_conj()).flatten(1)
        self.steps = waves.diff(dim=0).T.float().contiguous()
        mean = waves.mean(dim=0)
        centred = waves - mean
        # A root `r` of the covariance, `r rᵀ`: a variance as a sum of squares is never negative.
        size, axes = torch.linalg.eigh(centred.T @ centred / n_distances)
        self.root = (axes * size.clamp_min(0).sqrt()).float()
        self.mean = mean.float()

    def mean_step(self, x: Float[torch.Tensor, "cell wave"]) -> Float[torch.Tensor, " cell"]:
        """`[cell]` Mean over distances of `|S(m + 1) - S(m)|`."""
        steps = self.steps.split(_CHUNK // _ROWS, dim=1)
        parts = x.split(_ROWS)
        totals = [sum((part @ step).abs_().sum(dim=1).double() for step in steps) for part in parts]
        return torch.cat([torch.as_tensor(total) for total in totals]) / self.steps.shape[1]

    def moments(
        self, x: Float[torch.Tensor, "cell wave"]
    ) -> tuple[Float[torch.Tensor, " cell"], Float[torch.Tensor, " cell"]]:
        """`[cell]` twice: mean and standard deviation over distances."""
        spread = (x @ self.root).square_().sum(dim=1).sqrt()
        return x @ self.mean, spread


@lru_cache(maxsize=2)
def _shifts(n_distances: int, inv_freq: bytes) -> _Shifts:
    """The same for all layers that rotate by the same frequencies."""
    return _Shifts(n_distances, np.frombuffer(inv_freq))


def _positional_sensitivity(
    record: LayerCapture, cells: Int[torch.Tensor, "cell 2"], shifts: _Shifts
) -> Float[np.ndarray, " head"]:
    """`[head]` On one prompt. A common factor of all scores cancels."""
    query, key = cells.unbind(dim=1)
    x = _waves(record.q[query], _at_zero(record.k[key], query - key, record, shifts), record)
    norm = x.square().sum(dim=2).sqrt()
    is_valid = norm > 0
    steps = shifts.mean_step(x.flatten(0, 1)).view_as(norm)
    return _means_where(steps / norm.masked_fill(~is_valid, 1.0), is_valid)


def _semantic_stability(
    record: LayerCapture, cells: Int[torch.Tensor, "cell 3"], shifts: _Shifts
) -> Float[np.ndarray, " head"]:
    """`[head]` On one prompt. The scale is common to all; the attention factor is on the pairs."""
    query, one, other = cells.unbind(dim=1)
    q, k_one, k_other = record.q[query], record.k[one], record.k[other]
    # What keys of equal tokens share must not hide what differs, and goes off in float64.
    keys = ((k_one, one), (k_other, other))
    z_one, z_other = (_at_zero(k.double(), query - key, record, shifts) for k, key in keys)
    x = _waves(q, (z_one - z_other).to(torch.complex64), record)
    rest_q, rest_one, rest_other = (split(y, record.rope)[2] for y in (q, k_one, k_other))
    rest = by_key_head(rest_q, rest_one - rest_other).sum(dim=2).double()
    at_zero = x[..., ::2].sum(dim=2) + rest
    mean, spread = (y.view_as(rest).double() for y in shifts.moments(x.flatten(0, 1)))
    # Where `G` does not move it has no spread, and its order is never reversed.
    ratio = at_zero.sign() * (mean + rest) / spread.clamp_min(torch.finfo(torch.float64).tiny)
    reversal = 0.5 * torch.erfc(ratio / 2**0.5)
    # Keys of equal tokens can be equal before rotation; the rounding of the captured values must
    # not decide which of them wins.
    size_k = pair_lengths(k_one, record.rope) + pair_lengths(k_other, record.rope)
    sizes = by_key_head(pair_lengths(q, record.rope), size_k).sum(dim=2)
    rest_sizes = by_key_head(rest_q.abs(), rest_one.abs() + rest_other.abs()).sum(dim=2)
    return 1 - _means_where(reversal, at_zero.abs() > _TIE * (sizes + rest_sizes))


def _at_zero(
    k: Float[torch.Tensor, "cell kv_head d_head"],
    distance: Int[torch.Tensor, " cell"],
    record: LayerCapture,
    shifts: _Shifts,
) -> Complex[torch.Tensor, "cell kv_head pair"]:
    """`[cell, kv_head, pair]` The pairs of keys as if they were at the distance 0."""
    pairs, _ = to_pairs(k, record.rope)
    return pairs * shifts.turn[distance].to(pairs.dtype)[:, None]


def _waves(
    q: Float[torch.Tensor, "cell head d_head"],
    z_k: Complex[torch.Tensor, "cell kv_head pair"],
    record: LayerCapture,
) -> Float[torch.Tensor, "cell head wave"]:
    """`[cell, head, wave]` Real and imaginary part of each `z_q conj(z_k)`."""
    z_q, _ = to_pairs(q, record.rope)
    return torch.view_as_real(by_key_head(z_q, z_k.conj().resolve_conj())).flatten(2)


def _n_distances(record: LayerCapture) -> int:
    """Distances 0, 1, ... that occur between a query and the keys that it sees."""
    window = record.rope.window
    return record.n_pos if window is None else min(record.n_pos, window)


def _keys_before(n_pos: int, n_distances: int) -> Int[np.ndarray, " q_pos"]:
    """`[q_pos]` How many keys before itself each query sees."""
    return np.minimum(np.arange(n_pos), n_distances - 1)


@lru_cache(maxsize=8)
def _cells(
    n_pos: int, n_distances: int, max_cells: int, seed: int
) -> tuple[Int[torch.Tensor, "cell 2"], Int[torch.Tensor, "cell 3"]]:
    """(query, key) and (query, key, later key) with keys before the query, all or a fair draw."""
    generator = np.random.default_rng(seed)
    before = _keys_before(n_pos, n_distances)

    def drawn(count: Int[np.ndarray, " q_pos"]) -> tuple[np.ndarray, np.ndarray]:
        """Query of each drawn cell, and the number of the cell among those of its query."""
        ends = np.cumsum(count)
        total = int(ends[-1])
        if total <= max_cells:
            cell = np.arange(total)
        else:
            cell = np.sort(generator.choice(total, max_cells, replace=False))
        query = np.searchsorted(ends, cell, side="right")
        return query, cell - (ends - count)[query]

    query, number = drawn(before)
    pairs = np.stack([query, query - before[query] + number], axis=1)
    query, number = drawn(before * (before - 1) // 2)
    # Cell `number` is the pair (a, b) with a < b and number = b (b - 1) / 2 + a.
    b = ((1 + np.sqrt(1 + 8 * number)) // 2).astype(int)
    a = number - b * (b - 1) // 2
    first = query - before[query]
    triplets = np.stack([query, first + a, first + b], axis=1)
    return torch.from_numpy(pairs), torch.from_numpy(triplets)


def _means_where(
    values: Float[torch.Tensor, "cell head"], is_valid: Bool[torch.Tensor, "cell head"]
) -> Float[np.ndarray, " head"]:
    """`[head]` Mean over the valid cells, nan where there is none."""
    return values.masked_fill(~is_valid, torch.nan).nanmean(dim=0).numpy()


def _ratio(part: np.ndarray, whole: np.ndarray) -> Float[np.ndarray, " head"]:
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)


def _mean(
    values: list[np.ndarray], weights: list[int] | list[np.ndarray]
) -> Float[np.ndarray, " head"]:
    """`[head]` Weighted mean of what is defined; each sum is rounded once, whatever the order."""
    by_head = np.stack([np.broadcast_to(weight, values[0].shape) for weight in weights], axis=1)
    means = []
    for weight, column in zip(by_head, np.stack(values, axis=1), strict=True):
        terms = [w * value for w, value in zip(weight, column, strict=True) if w]
        means.append(fsum(terms) / weight.sum() if terms else np.nan)
    return np.array(means)


def _notes(
    capture: RotaryCapture, merged: tuple[LayerMetrics, ...], max_cells: int, seed: int
) -> tuple[str, ...]:
    """What is nan, sampled or adapted in these metrics."""
    n_prompts = len(capture.prompts)
    records = [
        [capture.layer(entry.layer, prompt=prompt) for prompt in range(n_prompts)]
        for entry in merged
    ]
    lengths = [len(prompt) for prompt in capture.prompts]
    notes = []
    short = sum(length < MIN_TOKENS for length in lengths)
    if short:
        notes.append(
            f"{short} of {n_prompts} prompts have fewer than {MIN_TOKENS} tokens and are left out "
            "of sink share, first-token share and first-token sink (nan where none is left)"
        )
    few = sum(length < 3 for length in lengths)
    if few:
        notes.append(
            f"{few} of {n_prompts} prompts have fewer than 3 tokens: semantic stability needs a "
            "query and two earlier keys, positional sensitivity one earlier key"
        )
    without = [r[0].rope.layer for r in records if not r[0].rope.n_pairs]
    if without:
        notes.append(
            f"layers {ranges(without)} have no RoPE: full-cycle shares, positional sensitivity and "
            "semantic stability are nan"
        )
    windowed = [r[0].rope.layer for r in records if any(_n_distances(one) < one.n_pos for one in r)]
    if windowed:
        notes.append(
            f"layers {ranges(windowed)} have a sliding window shorter than a prompt: the distances "
            "and keys of positional sensitivity and semantic stability end at the window, and "
            "arXiv 2609.39929 does not cover such layers"
        )
    undefined = [
        entry.layer
        for entry, r in zip(merged, records, strict=True)
        if r[0].rope.n_pairs
        and max(_n_distances(one) for one in r) >= 3
        and not (entry.positional_prompts.all() and entry.semantic_prompts.all())
    ]
    if undefined:
        notes.append(
            f"in layers {ranges(undefined)} positional sensitivity or semantic stability of a head "
            "is nan: its rotated queries or keys are zero, or its keys all tie"
        )
    seen = [_keys_before(one.n_pos, _n_distances(one)) for r in records for one in r]
    if any(max(n.sum(), (n * (n - 1) // 2).sum()) > max_cells for n in seen):
        notes.append(
            f"positional sensitivity and semantic stability use at most {max_cells} (query, key) "
            f"pairs and as many (query, key, key) triplets per head and prompt, seed {seed}"
        )
    if len(merged) < capture.model.n_layers:
        notes.append(
            f"{len(merged)} of the model's {capture.model.n_layers} layers are at hand, so the "
            "share of heads with a sink at token 0 is not that of the whole model"
        )
    return tuple(notes)
