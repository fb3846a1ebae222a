"""Why attention sinks are where they are: which rotary pairs make them, and what removal does.

A sink head gives one key a sink share above `SINK_THRESHOLD` (see `sinks`). The advantage of that
key splits over pairs into what lifts its own score and what pushes the other keys down. Removing
a pair tells whether the sink needs it; the median over the other pairs is the control.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lens_rope.advantage import (
    Advantage,
    first_key_advantages,
    layer_advantages,
    merge_advantages,
)
from lens_rope.attention import LayerAttention, read_attention
from lens_rope.bounds import band
from lens_rope.errors import InputError
from lens_rope.removal import head_shares_without
from lens_rope.sinks import (
    MIN_TOKENS,
    SINK_THRESHOLD,
    HeadShares,
    added_positions,
    head_shares,
    merge_shares,
    strongest_position,
)
from lens_rope.targets import sink_target
from lens_rope.usage import exact_mean
from lens_rope.words import number, percent

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    from jaxtyping import Float

    from lens_rope.records import LayerCapture, ModelInfo, Prompt, RotaryCapture
    from lens_rope.spec import LayerRope

COLLAPSED = 0.1
"""A sink has collapsed when its share falls below this."""

EXACT_PAIRS = 5
"""The strongest pairs are removed for many queries; the others, for the control, for few."""

REMOVAL_QUERIES = 1024
"""Queries of a prompt behind the removal of the strongest pairs; all where there are fewer."""

CONTROL_QUERIES = 128
"""Queries of a prompt behind the removal of each of the other pairs, likewise."""


@dataclass(frozen=True, eq=False)
class SinkHead:
    """One sink head, over the prompts in which it has a sink.

    Attributes:
        layer: Index of the layer.
        head: Index of the query head.
        rope: The layer's rotation.
        position: Position of the sink, the strongest key; over several prompts the one with the
            largest token-weighted share.
        same_position: Whether the sink is there in all of these prompts.
        share: Sink share of the sink, in [0, 1], over the prompts in which the head has one. What
            removal does is measured there, so this is what to compare it with.
        share_of_all: The head's sink share over all prompts.
        n_prompts: Number of prompts in which the head has a sink.
        n_queries: Number of queries that see the sink.
        advantage: Advantage of the sink, by pair, in score units.
        share_without: `[pair]` Sink share after a pair is removed, from up to `REMOVAL_QUERIES`
            queries of each prompt, up to `CONTROL_QUERIES` for pairs that are not among the
            `EXACT_PAIRS` strongest.
        share_without_two: Sink share after the two strongest pairs of each prompt are removed, from
            up to `REMOVAL_QUERIES` queries.
        positions: The query-weighted shares of the prompts added up by the position that each has
            its sink at; empty for one prompt, whose only position is `position`.
        share_without_error: `[pair]` Standard error of `share_without` from taking some of the
            queries, 0 where all were taken, nan where one of several was; empty where it is not
            known. Over several prompts each counts with the error of the queries that were taken
            there, and errors of prompts are independent.
    """

    layer: int
    head: int
    rope: LayerRope
    position: int
    same_position: bool
    share: float
    share_of_all: float
    n_prompts: int
    n_queries: int
    advantage: Advantage
    share_without: Float[np.ndarray, " pair"]
    share_without_two: float
    positions: Mapping[int, float] = field(default_factory=dict)
    share_without_error: Float[np.ndarray, " pair"] = field(default_factory=lambda: np.empty(0))

    @property
    def at(self) -> Mapping[int, float]:
        """The query-weighted share by position, see `positions`."""
        return self.positions or {self.position: self.n_queries * self.share}

    @property
    def best_pair(self) -> int:
        """The pair with the largest advantage over all prompts, -1 in a layer without pairs."""
        return next(iter(self.advantage.strongest(1)), -1)

    @property
    def share_without_best(self) -> float:
        """Sink share after the best pair is removed; nan in a layer without pairs."""
        return float(self.share_without[self.best_pair]) if self.best_pair >= 0 else np.nan

    @property
    def share_without_best_error(self) -> float:
        """Standard error of `share_without_best` from taking some of the queries, 0 for all."""
        known = self.best_pair >= 0 and self.share_without_error.size
        return float(self.share_without_error[self.best_pair]) if known else np.nan

    @property
    def control_share(self) -> float:
        """Median over the other pairs of the sink share after removal; nan where there are none."""
        others = self.share_without[np.arange(len(self.share_without)) != self.best_pair]
        return float(np.median(others)) if others.size else np.nan

    @property
    def is_collapsed(self) -> bool:
        """Whether the sink falls below `COLLAPSED` without its best pair."""
        return self.share_without_best < COLLAPSED

    @property
    def is_control_standing(self) -> bool:
        """Whether the sink keeps more than half of its share without another pair (median)."""
        return self.control_share > self.share / 2


def layer_sinks(
    record: LayerCapture, attention: LayerAttention, shares: HeadShares
) -> tuple[SinkHead, ...]:
    """The sink heads of one layer on one prompt, explained; none in prompts too short to tell.

    Args:
        record: Queries and keys of the layer.
        attention: What `read_attention` says of the record.
        shares: What `head_shares` says of it.
    """
    if attention.n_pos < MIN_TOKENS:
        return ()
    heads = np.flatnonzero(shares.sink_share > SINK_THRESHOLD)
    found: dict[int, SinkHead] = {}
    # Heads with the same sink, most often all of them, are removed from together.
    for position in np.unique(shares.sink_position[heads]):
        together = heads[shares.sink_position[heads] == position].tolist()
        for sink in _sink_heads(record, attention, together, int(position), shares):
            found[sink.head] = sink
    return tuple(found[head] for head in sorted(found))


def _sink_heads(
    record: LayerCapture,
    attention: LayerAttention,
    heads: list[int],
    position: int,
    shares: HeadShares,
) -> list[SinkHead]:
    """Heads of one layer that have their sink at the same position."""
    rope = record.rope
    target = sink_target(position, record.n_pos, rope.window)
    of_layer = None if position else first_key_advantages(record, attention.attended)
    if of_layer is None:
        of_layer = layer_advantages(record, target)
    gained = [of_layer[head] for head in heads]
    strongest = [gain.strongest(EXACT_PAIRS) for gain in gained]
    others = [[pair for pair in range(rope.n_pairs) if pair not in pairs] for pairs in strongest]
    exact = [[[pair] for pair in pairs] + [list(pairs[:2])] for pairs in strongest]
    control = [[[pair] for pair in pairs] for pairs in others]
    left, error = head_shares_without(record, heads, position, exact, max_queries=REMOVAL_QUERIES)
    left_control, error_control = head_shares_without(
        record, heads, position, control, max_queries=CONTROL_QUERIES
    )
    sinks = []
    for index, head in enumerate(heads):
        pairs = [*strongest[index], *others[index]]
        without, without_error = np.empty((2, rope.n_pairs))
        without[pairs] = [*left[index, :-1], *left_control[index]]
        without_error[pairs] = [*error[index, :-1], *error_control[index]]
        share = float(shares.sink_share[head])
        sinks.append(
            SinkHead(
                layer=rope.layer,
                head=head,
                rope=rope,
                position=position,
                same_position=True,
                share=share,
                share_of_all=share,
                n_prompts=1,
                n_queries=len(target.queries) + 1,
                advantage=gained[index],
                share_without=without,
                share_without_two=float(left[index, -1]) if len(strongest[index]) > 1 else np.nan,
                share_without_error=without_error,
            )
        )
    return sinks


def merge_sink_heads(heads: Iterable[SinkHead]) -> SinkHead:
    """One head over several prompts: means weighted by queries, whatever the order.

    Raises:
        InputError: There is nothing to merge, or the heads differ.
    """
    heads = list(heads)
    if len({(entry.layer, entry.head, len(entry.share_without)) for entry in heads}) != 1:
        raise InputError("only sinks of one head can be merged")
    weights = [entry.n_queries for entry in heads]
    positions = added_positions([entry.at for entry in heads])

    def mean(name: str) -> Float[np.ndarray, " n"]:
        return exact_mean([np.atleast_1d(getattr(entry, name)) for entry in heads], weights)

    return SinkHead(
        layer=heads[0].layer,
        head=heads[0].head,
        rope=heads[0].rope,
        position=strongest_position(positions),
        same_position=len(positions) == 1,
        share=float(mean("share")[0]),
        share_of_all=float(mean("share_of_all")[0]),
        n_prompts=sum(entry.n_prompts for entry in heads),
        n_queries=sum(weights),
        advantage=merge_advantages(entry.advantage for entry in heads),
        share_without=mean("share_without"),
        share_without_two=float(mean("share_without_two")[0]),
        positions=positions,
        share_without_error=_merged_error([entry.share_without_error for entry in heads], weights),
    )


def _merged_error(
    errors: list[Float[np.ndarray, " pair"]], weights: list[int]
) -> Float[np.ndarray, " pair"]:
    """Standard error of a weighted mean whose parts err on their own; empty where one is."""
    if not all(error.size for error in errors):
        return np.empty(0)
    total = sum(weights)
    # A mean of squares, so that it too is rounded once, whatever the order.
    squares = [weight * error**2 for weight, error in zip(weights, errors, strict=True)]
    return np.sqrt(exact_mean(squares, weights) / total)


def merge_sinks(sinks: Iterable[SinkHead]) -> tuple[SinkHead, ...]:
    """The heads of one layer that have a sink in some prompt, added up over prompts.

    None is left out: a head that falls below the threshold over the prompts so far can rise above
    it again, so `sinks_over_all` judges when all prompts are in.

    Args:
        sinks: The layer's sink heads, each over one or more prompts.
    """
    found: dict[int, list[SinkHead]] = {}
    for sink in sinks:
        found.setdefault(sink.head, []).append(sink)
    return tuple(
        merge_sink_heads(found[head]) if len(found[head]) > 1 else found[head][0]
        for head in sorted(found)
    )


def sinks_over_all(sinks: Iterable[SinkHead], shares: HeadShares) -> tuple[SinkHead, ...]:
    """The sink heads of one layer over all prompts.

    Args:
        sinks: The layer's sink heads, each over one or more prompts.
        shares: The layer's shares over all prompts. A head whose share is above the threshold in
            some prompts only, and not over all, is no sink head.
    """
    return tuple(
        dataclasses.replace(sink, share_of_all=float(shares.sink_share[sink.head]))
        for sink in merge_sinks(sinks)
        if shares.sink_share[sink.head] > SINK_THRESHOLD
    )


def sentence(sink: SinkHead, where: str | None = None) -> str:
    """What the numbers of one sink head say, in words.

    Args:
        sink: The sink head.
        where: What the sink is called, such as `position 0 (BOS)`; None names the position.
    """
    head = (
        f"Layer {sink.layer} head {sink.head} gives {percent(sink.share)} of its attention to "
        f"{where or f'position {sink.position}'}"
    )
    if sink.best_pair < 0:
        return f"{head}; the layer has no rotary pairs, so the pass-through makes the sink."
    pair, gain = sink.best_pair, sink.advantage
    lift, push = float(gain.lift[pair]), float(gain.push[pair])
    # What is larger decides the words; where both work against the sink there is nothing to name.
    ways = sorted(((push, "pushing the other keys down"), (lift, "lifting the sink")), reverse=True)
    (more, how), (less, _) = ways
    if more <= 0:
        how = "neither lifting the sink nor pushing the other keys down"
    elif less > 0.5 * more:
        how = "lifting the sink and pushing the other keys down"
    pass_through = (
        f", the pass-through {gain.pass_through:.1f}" if len(sink.rope.pass_components) else ""
    )
    effect = (
        "falls to" if sink.share_without_best < sink.share / 2
        else "rises to" if sink.share_without_best > 1.1 * sink.share
        else "stays at" if sink.share_without_best >= 0.9 * sink.share
        else "goes to"
    )  # fmt: skip
    control = (
        f", without another pair (median) it is {percent(sink.control_share)}"
        if np.isfinite(sink.control_share)
        else ""
    )
    return (
        f"{head}: pair {pair} ({band(sink.rope.cycles[pair])}, wavelength "
        f"{number(sink.rope.wavelength[pair])} tokens) adds {gain.pairs[pair]:.1f} to the sink's "
        f"advantage of {gain.total:.1f}{pass_through}, by {how}; without it the share {effect} "
        f"{percent(sink.share_without_best)}{control}."
    )


@dataclass(frozen=True, eq=False)
class SinkExplanation:
    """The sinks of a model: where they are, and which pairs make them.

    Attributes:
        model: Name and shape of the model.
        prompts: The prompts that were read.
        shares: Sink share, position and previous-token share of every head, by layer.
        heads: The sink heads, in order of layer and head.
        received: By prompt and layer, `[head, k_pos]` sink share of every key.
        learned: By layer, `[head]` mean attention to the learned sink (0 where there is none).
        notes: What a reader has to know, one sentence each.
    """

    model: ModelInfo
    prompts: tuple[Prompt, ...]
    shares: tuple[HeadShares, ...]
    heads: tuple[SinkHead, ...]
    received: tuple[Mapping[int, Float[np.ndarray, "head k_pos"]], ...]
    learned: Mapping[int, Float[np.ndarray, " head"]]
    notes: tuple[str, ...]

    def head(self, layer: int, head: int) -> SinkHead:
        """One sink head.

        Args:
            layer: Index of the layer.
            head: Index of the query head.

        Raises:
            InputError: That head is not a sink head.
        """
        for entry in self.heads:
            if (entry.layer, entry.head) == (layer, head):
                return entry
        raise InputError(
            f"layer {layer} head {head} is not a sink head; there are {len(self.heads)}, listed by "
            "to_dataframe()"
        )

    def best_pairs(self) -> dict[tuple[int, int], list[int]]:
        """The best pair of each sink head, in the form that `ablate_frequencies` takes."""
        return {(e.layer, e.head): [e.best_pair] for e in self.heads if e.best_pair >= 0}

    def where(self, sink: SinkHead) -> str:
        """What the key of a sink is called: its position, its token, and whether it is BOS.

        Args:
            sink: One of `heads`.
        """
        at = sink.position
        texts = {prompt.tokens[at] for prompt in self.prompts if at < len(prompt)}
        token = texts.pop() if len(texts) == 1 else None
        return sink_name(sink, token, [prompt.starts_with_bos for prompt in self.prompts])

    def sentences(self) -> tuple[str, ...]:
        """One sentence per sink head, the largest share first."""
        order = sorted(self.heads, key=lambda e: (-e.share, e.layer, e.head))
        return tuple(sentence(entry, self.where(entry)) for entry in order)

    def to_dataframe(self) -> pd.DataFrame:
        """One row per sink head.

        Columns: `layer`, `head`, `position` (of the sink), `sink_share` (`SinkHead.share`, over the
        prompts in which the head has a sink: `sink_share_there` of `report.json`, whose
        `sink_share` is `SinkHead.share_of_all`), `advantage` (of the whole score, score units),
        `best_pair` (-1 without pairs), its `wavelength` (tokens), `cycles` and
        `band`, its `best_advantage`, of which `best_lift` and `best_push` (score units), and the
        sink share after removal: `share_without_best`, with `share_without_best_error` (standard
        error from taking some of the queries of a long prompt, 0 where all were taken),
        `share_without_two`, `control_share` (another pair, median).
        """
        return sink_table(self.heads)

    def plot(self) -> go.Figure:
        """Sink share of each sink head: as it is, without its best pair, and the control."""
        from lens_rope.views.sink_figures import removal_dots

        return removal_dots(self.heads)

    def _repr_html_(self) -> str:
        """For a notebook: how many there are, the strongest, what removal does, and which pairs."""
        from lens_rope.views.descriptions import describe_sinks
        from lens_rope.views.result_html import result_html
        from lens_rope.views.sink_figures import sink_pairs

        return result_html(describe_sinks(self), [self.plot(), sink_pairs(self.heads)])

    def __repr__(self) -> str:
        """How many there are, the strongest in words, and the table."""
        total = sum(len(entry.sink_share) for entry in self.shares)
        lines = [
            f"{len(self.heads)} of {total} heads of {self.model.name} are sink heads "
            f"(sink share above {SINK_THRESHOLD:g})"
        ]
        if self.heads:
            table = self.to_dataframe().sort_values("sink_share", ascending=False).head(20)
            lines += [self.sentences()[0], table.to_string(index=False)]
        return "\n".join([*lines, *self.notes])


def explain_sinks(capture: RotaryCapture) -> SinkExplanation:
    """Which heads have attention sinks, at which keys, and which rotary pairs make them.

    What a sink head is, is the definition of Gu et al. 2024, "When Attention Sink Emerges in
    Language Models" (arXiv 2410.10781).

    Args:
        capture: A verified capture; prompts of at least 64 tokens can tell sinks.

    Returns:
        The sink heads over all prompts, and the sink share of every key.
    """
    received: list[dict[int, np.ndarray]] = []
    shares: dict[int, list[HeadShares]] = {}
    learned: dict[int, list[np.ndarray]] = {}
    sinks: dict[int, list[SinkHead]] = {}
    for records in capture.records:
        received.append({})
        for record in records:
            attention = read_attention(record)
            of_heads = head_shares(record, attention)
            layer = record.rope.layer
            received[-1][layer] = attention.received
            learned.setdefault(layer, []).append(attention.learned)
            shares.setdefault(layer, []).append(of_heads)
            sinks.setdefault(layer, []).extend(layer_sinks(record, attention, of_heads))
    weights = [len(prompt) for prompt in capture.prompts]
    merged = {layer: merge_shares(_long(shares[layer])) for layer in capture.layer_indices}
    return SinkExplanation(
        model=capture.model,
        prompts=capture.prompts,
        shares=tuple(merged.values()),
        heads=tuple(
            sink
            for layer, of_heads in merged.items()
            for sink in sinks_over_all(sinks[layer], of_heads)
        ),
        received=tuple(received),
        learned={layer: exact_mean(learned[layer], weights) for layer in capture.layer_indices},
        notes=sink_notes([len(prompt) for prompt in capture.prompts]),
    )


def _long(shares: list[HeadShares]) -> list[HeadShares]:
    """Those of prompts that can tell sinks, or all where there are none."""
    return [entry for entry in shares if entry.n_tokens >= MIN_TOKENS] or shares


def sink_notes(n_tokens: Sequence[int]) -> tuple[str, ...]:
    """What has to be said about sinks on prompts of these lengths."""
    short = [n for n in n_tokens if n < MIN_TOKENS]
    if not short:
        return ()
    which = (
        "The prompt is" if len(n_tokens) == 1 else f"{len(short)} of {len(n_tokens)} prompts are"
    )
    return (
        f"{which} too short to tell sinks ({min(short)} tokens, uniform attention alone makes high "
        f"shares there), so sinks in it are left out; give at least {MIN_TOKENS} tokens.",
    )


def sink_name(sink: SinkHead, token: str | None, starts_with_bos: Sequence[bool | None]) -> str:
    """Position of a sink with its token, and whether that is BOS, as far as prompts agree.

    Args:
        sink: The sink head.
        token: The token at its position as text; None where prompts differ there.
        starts_with_bos: By prompt, whether token 0 is BOS (None where there is no such token).
    """
    if not sink.same_position:
        return f"one key (most often position {sink.position})"
    where = f"position {sink.position}"
    if sink.position == 0 and None not in starts_with_bos:
        some = set(starts_with_bos)
        bos = "BOS in some prompts" if len(some) > 1 else "BOS" if some == {True} else "not BOS"
        return f"{where} ({bos})"
    return where if token is None else f"{where} (“{token}”)"


def sink_table(heads: Sequence[SinkHead]) -> pd.DataFrame:
    """One row per sink head; columns as `SinkExplanation.to_dataframe`."""
    import pandas as pd

    rows = []
    for entry in heads:
        pair = entry.best_pair
        known = pair >= 0
        rows.append(
            {
                "layer": entry.layer,
                "head": entry.head,
                "position": entry.position,
                "sink_share": entry.share,
                "advantage": entry.advantage.total,
                "best_pair": pair,
                "wavelength": entry.rope.wavelength[pair] if known else np.nan,
                "cycles": entry.rope.cycles[pair] if known else np.nan,
                "band": band(entry.rope.cycles[pair]) if known else "",
                "best_advantage": entry.advantage.pairs[pair] if known else np.nan,
                "best_lift": entry.advantage.lift[pair] if known else np.nan,
                "best_push": entry.advantage.push[pair] if known else np.nan,
                "share_without_best": entry.share_without_best,
                "share_without_best_error": entry.share_without_best_error,
                "share_without_two": entry.share_without_two,
                "control_share": entry.control_share,
            }
        )
    columns = [
        "layer", "head", "position", "sink_share", "advantage", "best_pair", "wavelength", "cycles",
        "band", "best_advantage", "best_lift", "best_push", "share_without_best",
        "share_without_best_error", "share_without_two", "control_share",
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)
