"""What a report shows of its first prompt alone, made while its queries and keys are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lens_rope.ablation_effects import AblationReport, ablation_report
from lens_rope.errors import InputError, UnsupportedModelError, VerificationError
from lens_rope.heads import repeated_patterns
from lens_rope.reporting.gallery import build_gallery
from lens_rope.reporting.shard import FirstPrompt, ReadOptions

if TYPE_CHECKING:
    from lens_rope.patterns import LayerPatterns
    from lens_rope.records import RotaryCapture
    from lens_rope.reporting.analysis import LayerAnalysis
    from lens_rope.sink_heads import SinkHead

StageProgress = Callable[[str, int, int], None]
"""Called as `progress(stage, done, total)`."""


def staged(progress: StageProgress | None, stage: str) -> Callable[[int, int], None] | None:
    """The progress of one stage, None where nobody asks for it."""
    if progress is None:
        return None
    return lambda done, total: progress(stage, done, total)


def first_prompt(
    model: Any,
    qk: RotaryCapture,
    analyses: Sequence[LayerAnalysis],
    options: ReadOptions,
    progress: StageProgress | None,
) -> FirstPrompt:
    """The gallery, induction on repeated tokens, and the intervention, all on prompt 0.

    Args:
        model: The model, for what needs more runs.
        qk: A capture of prompt 0.
        analyses: Its own numbers, by layer.
        options: What was asked for.
        progress: Called as `progress(stage, done, total)`.
    """
    gallery, rule = build_gallery(
        qk,
        [entry.shares for entry in analyses],
        options.heads,
        progress=staged(progress, "splitting scores by pair"),
    )
    repeated, not_repeated = _repeated(model, qk, staged(progress, "repeating random tokens"))
    ablation, not_ablated = None, None
    if options.interventions:
        sinks = [sink for entry in analyses for sink in entry.sinks]
        stage = staged(progress, "removing pairs from sink heads")
        ablation, not_ablated = _without_best_pairs(model, qk, sinks, stage)
    left_out = tuple(note for note in (not_repeated, not_ablated) if note)
    return FirstPrompt(gallery, rule, repeated, ablation, left_out)


def _repeated(
    model: Any, first: RotaryCapture, progress: Callable[[int, int], None] | None
) -> tuple[tuple[LayerPatterns, ...] | None, str | None]:
    """Where attention goes on repeated random tokens, or why that is not known."""
    if progress is not None:
        progress(0, 1)
    try:
        repeated = repeated_patterns(model, first)
    except InputError as error:
        return None, f"Induction and its like are measured on the prompts alone: {error}."
    if progress is not None:
        progress(1, 1)
    return repeated, None


def _without_best_pairs(
    model: Any,
    first: RotaryCapture,
    sinks: Sequence[SinkHead],
    progress: Callable[[int, int], None] | None,
) -> tuple[AblationReport | None, str | None]:
    """The running model without the best pair of each sink head, or why that could not be run.

    The sinks are those on the first prompt, which is the one that is run; a prompt too short to
    tell has none.
    """
    pairs = {(sink.layer, sink.head): [sink.best_pair] for sink in sinks if sink.best_pair >= 0}
    if not pairs:
        return None, None
    if progress is not None:
        progress(0, 1)
    prompt = first.prompts[0]
    try:
        done = ablation_report(model, torch.tensor(prompt.token_ids), pairs, names=[prompt.name])
    except (InputError, UnsupportedModelError, VerificationError) as error:
        return None, f"The model was not run without the best pairs: {error}."
    if progress is not None:
        progress(1, 1)
    return done, None
