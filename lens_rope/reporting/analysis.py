"""One layer of one prompt, reduced to the numbers that a report adds up.

`analyse` is a pure function of a captured layer, and `merge` adds its results up over prompts in
any order. Queries and keys are not kept, and nothing that is kept grows with the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lens_rope.attention import read_attention
from lens_rope.metrics import LayerMetrics, layer_metrics, merge_metrics
from lens_rope.offset_shares import OffsetShares, layer_offset_shares, merge_offset_shares
from lens_rope.offsets import LayerOffsets, layer_offsets, merge_offsets
from lens_rope.patterns import (
    HeadPattern,
    LayerPatterns,
    judge_layer,
    layer_patterns,
    merge_patterns,
    pattern_targets,
)
from lens_rope.sink_heads import SinkHead, layer_sinks, merge_sinks
from lens_rope.sinks import HeadShares, head_shares, merge_shares, sink_positions
from lens_rope.usage import LayerUsage, merge_usage, pair_usage

if TYPE_CHECKING:
    from lens_rope.records import LayerCapture
    from lens_rope.spec import LayerRope


@dataclass(frozen=True, eq=False)
class LayerAnalysis:
    """What a report keeps of one layer, of one prompt or of several.

    Attributes:
        rope: The layer's rotation, on the first prompt.
        usage: Mean pair magnitudes.
        shares: Sink and previous-token shares.
        patterns: Where its attention goes.
        offsets: Offsets, over the prompts that are rotated like the first.
        offset_shares: How its scores split over offset and content.
        sinks: Its sink heads.
        metrics: Head metrics of the literature.
    """

    rope: LayerRope
    usage: LayerUsage
    shares: HeadShares
    patterns: LayerPatterns
    offsets: LayerOffsets
    offset_shares: OffsetShares
    sinks: tuple[SinkHead, ...]
    metrics: LayerMetrics

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


def analyse(record: LayerCapture, token_ids: Sequence[int]) -> LayerAnalysis:
    """Everything that a report keeps of one layer on one prompt.

    Args:
        record: Queries and keys of the layer.
        token_ids: The prompt's tokens.
    """
    targets = pattern_targets(token_ids, record.rope)
    attention = read_attention(record, targets)
    shares = head_shares(record, attention)
    left_out = sink_positions(attention)
    offsets = layer_offsets(record, left_out)
    return LayerAnalysis(
        rope=record.rope,
        usage=pair_usage(record),
        shares=shares,
        patterns=layer_patterns(record, attention, targets),
        offsets=offsets,
        offset_shares=layer_offset_shares(record, token_ids, offsets, left_out),
        sinks=layer_sinks(record, attention, shares),
        metrics=layer_metrics(record, attention),
    )


def merge(analyses: Sequence[LayerAnalysis]) -> LayerAnalysis:
    """One layer over several prompts.

    Rotations that depend on a prompt's length give pairs that do not mean the same, so offsets are
    added up over the prompts that are rotated like the first.

    Args:
        analyses: The layer on each prompt.

    Raises:
        InputError: There is nothing to merge, or the layers differ.
    """
    first = analyses[0]
    shares = merge_shares(entry.shares for entry in analyses)
    alike = [entry for entry in analyses if entry.rope.same_rotation(first.rope)]
    sinks = [sink for entry in analyses for sink in entry.sinks]
    return LayerAnalysis(
        rope=first.rope,
        usage=merge_usage(entry.usage for entry in analyses),
        shares=shares,
        patterns=merge_patterns(entry.patterns for entry in analyses),
        offsets=merge_offsets(entry.offsets for entry in alike),
        offset_shares=merge_offset_shares(entry.offset_shares for entry in analyses),
        sinks=merge_sinks(sinks, shares),
        metrics=merge_metrics(entry.metrics for entry in analyses),
    )
