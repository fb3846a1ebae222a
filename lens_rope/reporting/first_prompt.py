"""What a report shows of its first prompt alone: kept while its layers go by, made after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lens_rope.ablation_effects import (
    AblationReport,
    Baseline,
    BaselineLayer,
    ablation_report,
    baseline_layer,
    compare_with_baseline,
    next_token_loss,
)
from lens_rope.errors import (
    InputError,
    PromptError,
    UnsupportedModelError,
    VerificationError,
)
from lens_rope.heads import read_repeated, repeated_tokens
from lens_rope.reporting.gallery import Shortlist
from lens_rope.reporting.shard import FirstPrompt, ReadOptions
from lens_rope.sinks import MIN_TOKENS

if TYPE_CHECKING:
    from jaxtyping import Float

    from lens_rope.patterns import LayerPatterns
    from lens_rope.records import LayerCapture, Prompt
    from lens_rope.reporting.analysis import LayerAnalysis
    from lens_rope.streaming import LayerStream

StageProgress = Callable[[str, int, int], None]
"""Called as `progress(stage, done, total)`."""

INTERVENTION_TOKENS = 2048
"""The model is run without pairs on this many tokens at most: it forms all scores of a layer."""


def staged(progress: StageProgress | None, stage: str) -> Callable[[int, int], None] | None:
    """The progress of one stage, None where nobody asks for it."""
    if progress is None:
        return None
    return lambda done, total: progress(stage, done, total)


class FirstReader:
    """What is kept of prompt 0 while its layers go by."""

    def __init__(self, prompt: Prompt, options: ReadOptions, stream: LayerStream) -> None:
        """Nothing yet.

        Args:
            prompt: Prompt 0.
            options: What was asked for.
            stream: The model, as it will read the prompt.
        """
        self._prompt = prompt
        self._is_ablated = options.interventions and len(prompt) >= MIN_TOKENS
        # What is read is then the unchanged model that the interventions are compared with, unless
        # it computes attention in another way than they do, or has no room for its logits.
        self.needs_loss = (
            self._is_ablated
            and len(prompt) <= INTERVENTION_TOKENS
            and stream.attention_for(len(prompt), logits=True) == "eager"
            and stream.fits(len(prompt), logits=True)
        )
        self._shortlist = Shortlist(prompt, options.heads)
        self._pairs: dict[tuple[int, int], list[int]] = {}
        self._layers: dict[int, BaselineLayer] = {}
        self._loss: float | None = None

    def add(self, record: LayerCapture, own: LayerAnalysis) -> None:
        """Looks at one layer.

        Args:
            record: Queries and keys of the layer.
            own: Its numbers on this prompt alone.
        """
        self._shortlist.add(record, own.shares)
        sinks = [sink for sink in own.sinks if sink.best_pair >= 0] if self._is_ablated else []
        self._pairs |= {(sink.layer, sink.head): [sink.best_pair] for sink in sinks}
        if sinks and self.needs_loss:
            heads = [sink.head for sink in sinks]
            self._layers[record.rope.layer] = baseline_layer(record, own.shares, heads)

    def add_logits(self, logits: Float[torch.Tensor, "pos vocab"]) -> None:
        """Takes the loss of the unchanged model.

        Args:
            logits: `[pos, vocab]` What it predicts after each token.
        """
        self._loss = next_token_loss(logits, self._prompt.token_ids)

    def done(self, model: Any, stream: LayerStream, progress: StageProgress | None) -> FirstPrompt:
        """The gallery, induction on repeated tokens, and the intervention.

        Args:
            model: The model, for what needs more runs.
            stream: The model as it was read.
            progress: Called as `progress(stage, done, total)`.
        """
        gallery, rule = self._shortlist.gallery(staged(progress, "splitting scores by pair"))
        repeated, not_repeated = self._repeated(
            model, stream, staged(progress, "repeating random tokens")
        )
        ablation, not_ablated = None, None
        if self._pairs:
            stage = staged(progress, "removing pairs from sink heads")
            ablation, not_ablated = self._without_best_pairs(model, stage)
        left_out = tuple(note for note in (not_repeated, not_ablated) if note)
        return FirstPrompt(gallery, rule, repeated, ablation, left_out)

    def _repeated(
        self, model: Any, stream: LayerStream, progress: Callable[[int, int], None] | None
    ) -> tuple[tuple[LayerPatterns, ...] | None, str | None]:
        """Where attention goes on repeated random tokens, or why that is not known."""
        if progress is not None:
            progress(0, 1)
        try:
            repeated = read_repeated(stream, repeated_tokens(model, self._prompt))
        except (InputError, PromptError) as error:
            return None, f"Induction and its like are measured on the prompts alone: {error}."
        if progress is not None:
            progress(1, 1)
        return repeated, None

    def _without_best_pairs(
        self, model: Any, progress: Callable[[int, int], None] | None
    ) -> tuple[AblationReport | None, str | None]:
        """The running model without the best pair of each sink head, or why that was not run.

        The sinks are those on this prompt; one too short to tell has none.
        """
        if progress is not None:
            progress(0, 1)
        try:
            done = self._ablated(model)
        except (InputError, PromptError, UnsupportedModelError, VerificationError) as error:
            return None, f"The model was not run without the best pairs: {error}."
        if progress is not None:
            progress(1, 1)
        return done, None

    def _ablated(self, model: Any) -> AblationReport:
        prompt = self._prompt
        if self._loss is not None:
            baseline = Baseline(prompt, self._layers, self._loss)
            return compare_with_baseline(model, baseline, self._pairs)
        tokens = torch.tensor(prompt.token_ids[:INTERVENTION_TOKENS])
        done = ablation_report(model, tokens, self._pairs, names=[prompt.name])
        if len(tokens) == len(prompt):
            return done
        note = (
            f"The model was run without the best pairs on the first {INTERVENTION_TOKENS:,} of "
            f"{len(prompt):,} tokens of {prompt.name}, and compared with itself there."
        )
        return dataclasses.replace(done, notes=(*done.notes, note))
