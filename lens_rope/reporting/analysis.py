"""One layer of one prompt, reduced to the numbers that a report adds up.

`analyse` is a pure function of a captured layer, and `merge` adds its results up over prompts in
any order and any grouping. Queries and keys are not kept, and nothing that is kept grows with the
number of prompts; what a sink's position is counted by grows with the longest prompt at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lens_rope.attention import read_attention
from lens_rope.metrics import LayerMetrics, layer_metrics, merge_metrics
from lens_rope.offset_shares import OffsetShares, layer_offset_shares, merge_offset_shares
from lens_rope.offsets import LayerOffsets, layer_offsets, merge_offsets, no_offsets
from lens_rope.patterns import (
    HeadPattern,
    LayerPatterns,
    judge_layer,
    layer_patterns,
    merge_patterns,
    pattern_targets,
)
from lens_rope.sink_heads import SinkHead, layer_sinks, merge_sinks, sinks_over_all
from lens_rope.sinks import MIN_TOKENS, HeadShares, head_shares, merge_shares, sink_positions
from lens_rope.usage import LayerUsage, merge_usage, pair_usage

if TYPE_CHECKING:
    from lens_rope.records import LayerCapture
    from lens_rope.spec import LayerRope
    from lens_rope.targets import Target


@dataclass(frozen=True, eq=False)
class LayerAnalysis:
    """What a report keeps of one layer, of one prompt or of several.

    Attributes:
        rope: The layer's rotation, on the report's first prompt.
        usage: Mean pair magnitudes.
        shares: Sink and previous-token shares.
        patterns: Where its attention goes.
        offsets: Offsets, over the prompts that are rotated like the first.
        offset_shares: How its scores split over offset and content.
        sinks: Its heads that have a sink in some prompt; after `judge`, its sink heads.
        metrics: Head metrics of the literature.
        is_long: Whether some prompt is long enough to tell sinks and patterns. Then these are of
            such prompts alone.
    """

    rope: LayerRope
    usage: LayerUsage
    shares: HeadShares
    patterns: LayerPatterns
    offsets: LayerOffsets
    offset_shares: OffsetShares
    sinks: tuple[SinkHead, ...]
    metrics: LayerMetrics
    is_long: bool

    def heads(self, *, is_long: bool, repeated: LayerPatterns | None) -> tuple[HeadPattern, ...]:
        """The pattern of each head.

        Args:
            is_long: Whether the prompts are long enough to tell patterns.
            repeated: Where attention goes on a prompt of repeated tokens.
        """
        sinks = {sink.head: sink.advantage for sink in self.sinks}
        return judge_layer(
            self.rope, self.patterns, self.shares, self.offset_shares, sinks,
            repeated=repeated, is_long=is_long,
        )  # fmt: skip


def analyse(
    record: LayerCapture,
    token_ids: Sequence[int],
    rope: LayerRope | None = None,
    targets: Sequence[Target] | None = None,
) -> LayerAnalysis:
    """Everything that a report keeps of one layer on one prompt.

    Args:
        record: Queries and keys of the layer.
        token_ids: The prompt's tokens.
        rope: The rotation that offsets are of, that of the report's first prompt. Where this
            prompt is rotated in another way, pairs do not mean the same, and its offsets are those
            of no token. None takes the prompt's own.
        targets: The prompt's `pattern_targets` in this layer, where they are at hand: layers with
            the same window share them.
    """
    targets = pattern_targets(token_ids, record.rope) if targets is None else targets
    attention = read_attention(record, targets)
    shares = head_shares(record, attention)
    left_out = sink_positions(attention)
    offsets = layer_offsets(record, left_out)
    rope = record.rope if rope is None else rope
    return LayerAnalysis(
        rope=rope,
        usage=pair_usage(record),
        shares=shares,
        patterns=layer_patterns(record, attention, targets),
        offsets=offsets if record.rope.same_rotation(rope) else no_offsets(offsets, rope),
        offset_shares=layer_offset_shares(record, token_ids, offsets, left_out),
        # A pair is what it is under the rotation of the report.
        sinks=tuple(
            dataclasses.replace(sink, rope=rope) for sink in layer_sinks(record, attention, shares)
        ),
        metrics=layer_metrics(record, attention),
        is_long=record.n_pos >= MIN_TOKENS,
    )


def merge(analyses: Sequence[LayerAnalysis]) -> LayerAnalysis:
    """One layer over several prompts, or over what was merged before.

    A merge of merges is the merge of all, up to rounding, so prompts can be added up as they come
    and in parts. `judge` says at the end what can only be said of all. Short prompts tell no sinks
    and no patterns, and are left out of these as soon as there is a long one.

    Args:
        analyses: The layer on one or more prompts each; the rotation is that of the first.

    Raises:
        InputError: There is nothing to merge, or the layers or the rotations of offsets differ.
    """
    telling = [entry for entry in analyses if entry.is_long] or analyses
    return LayerAnalysis(
        rope=analyses[0].rope,
        usage=merge_usage(entry.usage for entry in analyses),
        shares=merge_shares(entry.shares for entry in telling),
        patterns=merge_patterns(entry.patterns for entry in telling),
        offsets=merge_offsets(entry.offsets for entry in analyses),
        offset_shares=merge_offset_shares(entry.offset_shares for entry in analyses),
        sinks=merge_sinks(sink for entry in telling for sink in entry.sinks),
        metrics=merge_metrics(entry.metrics for entry in analyses),
        is_long=any(entry.is_long for entry in analyses),
    )


def judge(analysis: LayerAnalysis) -> LayerAnalysis:
    """A layer over all prompts with its sink heads: those that are one over all of them."""
    return dataclasses.replace(analysis, sinks=sinks_over_all(analysis.sinks, analysis.shares))
