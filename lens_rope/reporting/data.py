"""Everything a report shows, as frozen data: gathered once, then written as HTML, JSON and CSV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lens_rope.views.tokens import display_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lens_rope.ablation_effects import AblationReport
    from lens_rope.bounds import BoundsCheck
    from lens_rope.patterns import HeadPattern
    from lens_rope.records import LayerCheck, ModelInfo
    from lens_rope.reporting.analysis import LayerAnalysis
    from lens_rope.results import DistanceProfile, PairSummary
    from lens_rope.sink_heads import SinkHead
    from lens_rope.sinks import HeadShares
    from lens_rope.spec import LayerRope, RopeSpec
    from lens_rope.spectrum import LayerSpectrum
    from lens_rope.usage import LayerUsage
    from lens_rope.views.heads import HeadMaps

SCHEMA = "lens-rope-report/1"
"""Version of `report.json`; within a version keys are only ever added."""

NAMED_PROMPTS = 4
"""More prompts are counted, not named, where a report is shown in few lines."""

PREVIOUS_THRESHOLD = 0.5
"""Heads that give more than this share of attention to the previous token are counted."""


@dataclass(frozen=True)
class PromptSummary:
    """What was read of one prompt.

    Attributes:
        name: How the report calls it.
        n_tokens: Number of tokens that were read.
        cut_from: Number of tokens it had before it was cut, or None when all were read.
        starts_with_bos: Whether token 0 is BOS (None without a tokenizer).
        sha256: Checksum of the prompt as it was given, see `prompts.prompt_digest`.
    """

    name: str
    n_tokens: int
    cut_from: int | None
    starts_with_bos: bool | None
    sha256: str = ""


@dataclass(frozen=True)
class Provenance:
    """What a report was asked for, so that it can be asked for again.

    Attributes:
        arguments: The arguments of `report` as plain values, by name.
        device: The device that the model ran on.
        prompts_sha256: Checksum of all prompts in their order, see `prompts.checksum`.
    """

    arguments: Mapping[str, Any]
    device: str
    prompts_sha256: str


@dataclass(frozen=True, eq=False)
class GalleryHead:
    """One head of the gallery, on the first prompt.

    Attributes:
        layer: Index of the layer.
        head: Index of the query head.
        kv_head: The key head it reads.
        reasons: Why it was chosen, one phrase each.
        rope: The layer's rotation.
        by_pair: Its contributions by pair.
        by_distance: Its contributions by distance.
        maps: Its attention, queries and keys over windows of the prompt.
    """

    layer: int
    head: int
    kv_head: int
    reasons: tuple[str, ...]
    rope: LayerRope
    by_pair: PairSummary
    by_distance: DistanceProfile
    maps: HeadMaps


@dataclass(frozen=True, eq=False)
class ReportData:
    """The numbers of one report.

    Attributes:
        version: Version of lens_rope.
        created: When the numbers were gathered, ISO 8601 in UTC. The only thing in a report that
            is not a function of its input.
        model: Name and shape of the model, and its host.
        prompts: What was read of each prompt, in the order given.
        rope: The rotation of each layer on the first prompt.
        same_rope: Whether all prompts were rotated alike (dynamic scalings depend on length).
        checks: Per layer, the worst of each error over all prompts.
        tolerance: Largest relative error that is accepted.
        layers: Per layer, what was added up over all prompts.
        heads: The pattern of every head, in order of layer and head.
        bounds: Strong offset features against the bounds on frequency and angle.
        spectra: Per layer, key spectra before and after rotation.
        ablation: What removing the best pair of each sink head does to the running model, on the
            first prompt; None where there is no sink head, or when it was not asked for.
        is_repeated: Whether induction and its like were measured on repeated random tokens.
        threshold: Sink share above which a head is a sink head.
        gallery: The most telling heads, or those that were asked for.
        gallery_rule: How the heads of the gallery were chosen, as a sentence.
        findings: What the numbers say, one sentence each.
        notes: What a reader has to know about the data, one sentence each.
        left_out: What could not be measured and why, one sentence each.
        context: Context in tokens that was asked for instead of the model's own, or None.
        tokens: `[pos]` The token at each position as text, None where prompts that are long enough
            differ there.
        provenance: What was asked for, for the manifest; None where that is not known.
    """

    version: str
    created: str
    model: ModelInfo
    prompts: tuple[PromptSummary, ...]
    rope: RopeSpec
    same_rope: bool
    checks: tuple[LayerCheck, ...]
    tolerance: float
    layers: tuple[LayerAnalysis, ...]
    heads: tuple[HeadPattern, ...]
    bounds: BoundsCheck
    spectra: tuple[LayerSpectrum, ...]
    ablation: AblationReport | None
    is_repeated: bool
    threshold: float
    gallery: tuple[GalleryHead, ...]
    gallery_rule: str
    findings: tuple[str, ...]
    notes: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    context: int | None = None
    tokens: tuple[str | None, ...] = ()
    provenance: Provenance | None = None

    @property
    def usage(self) -> tuple[LayerUsage, ...]:
        """Per layer, mean pair magnitudes."""
        return tuple(entry.usage for entry in self.layers)

    @property
    def shares(self) -> tuple[HeadShares, ...]:
        """Per layer, attention shares."""
        return tuple(entry.shares for entry in self.layers)

    @property
    def sinks(self) -> tuple[SinkHead, ...]:
        """The sink heads, in order of layer and head; none where all prompts are too short."""
        if self.is_too_short_for_sinks:
            return ()
        return tuple(sink for entry in self.layers for sink in entry.sinks)

    def sink_heads_by_shares(self) -> tuple[SinkHead, ...]:
        """The sink heads, the largest share first."""
        return tuple(sorted(self.sinks, key=lambda sink: (-sink.share, sink.layer, sink.head)))

    def where(self, sink: SinkHead) -> str:
        """What the key of a sink is called: its position, its token, and whether it is BOS.

        Args:
            sink: One of `sinks`.
        """
        from lens_rope.sink_heads import sink_name  # here: it needs torch

        bos = [prompt.starts_with_bos for prompt in self.prompts]
        return sink_name(sink, self.token_at(sink.position), bos)

    def token_at(self, position: int) -> str | None:
        """The token at `position` as visible text; None where prompts have different ones."""
        token = self.tokens[position] if position < len(self.tokens) else None
        return None if token is None else display_text(token)

    def named_prompts(self) -> str:
        """The prompts by name and length, or how many there are where they are many."""
        if len(self.prompts) > NAMED_PROMPTS:
            total = sum(prompt.n_tokens for prompt in self.prompts)
            return f"{len(self.prompts):,} prompts ({total:,} tokens)"
        return ", ".join(f"{prompt.name} ({prompt.n_tokens:,} tokens)" for prompt in self.prompts)

    @property
    def max_relative_error(self) -> float:
        """The largest relative error of the scores over all layers and prompts."""
        return max(check.relative_error for check in self.checks)

    @property
    def uniform_share(self) -> float:
        """Sink share that uniform attention would give the first key, the largest over layers."""
        return max(entry.uniform_share for entry in self.shares)

    @property
    def short_prompts(self) -> tuple[PromptSummary, ...]:
        """Prompts so short that uniform attention alone makes high sink shares.

        Sinks and patterns are told without them.
        """
        from lens_rope.sinks import MIN_TOKENS  # here: it needs torch

        return tuple(prompt for prompt in self.prompts if prompt.n_tokens < MIN_TOKENS)

    @property
    def is_too_short_for_sinks(self) -> bool:
        """Whether no prompt is long enough to tell sinks and patterns."""
        return len(self.short_prompts) == len(self.prompts)
