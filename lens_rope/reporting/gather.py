"""From a model and prompts to the numbers of a report, one prompt at a time.

Each prompt runs once. Its layers are reduced to numbers that add up over prompts in any order, and
its queries and keys are dropped; only those of the first prompt are kept until the end, because the
gallery shows heads on that prompt. Two things need more runs: a prompt of repeated random tokens
tells induction heads, and the first prompt is run again without the best pair of each sink head.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lens_rope import __version__
from lens_rope.ablation_effects import AblationReport, ablation_report
from lens_rope.bounds import check_bounds
from lens_rope.capturing import capture, model_shape, token_rows
from lens_rope.errors import (
    InputError,
    PromptError,
    UnsupportedModelError,
    VerificationError,
)
from lens_rope.heads import repeated_patterns
from lens_rope.offsets import CONSTANCY, RELATIVE, OffsetFeatures, offset_notes
from lens_rope.patterns import LayerPatterns, is_long_enough
from lens_rope.records import LayerCheck, ModelInfo, RotaryCapture
from lens_rope.reporting.analysis import LayerAnalysis, analyse, merge
from lens_rope.reporting.data import PromptSummary, ReportData
from lens_rope.reporting.findings import findings, notes
from lens_rope.reporting.gallery import build_gallery
from lens_rope.reporting.sample import SAMPLE_NAME, sample_text
from lens_rope.sink_heads import SinkHead
from lens_rope.sinks import SINK_THRESHOLD
from lens_rope.spectrum import (
    KeyMoments,
    LayerSpectrum,
    layer_keys,
    layer_spectrum,
    merge_keys,
)
from lens_rope.verify import TOLERANCE

if TYPE_CHECKING:
    from jaxtyping import Int

StageProgress = Callable[[str, int, int], None]
"""Called as `progress(stage, done, total)`."""


def gather(
    model: Any,
    prompts: str | Sequence[str] | Int[torch.Tensor, "batch pos"] | None = None,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
    max_tokens: int | None = None,
    context: int | None = None,
    names: Sequence[str] | None = None,
    interventions: bool = True,
    progress: StageProgress | None = None,
) -> ReportData:
    """Reads every prompt and adds up what the report shows.

    Args:
        model: A `HookedTransformer` or `TransformerBridge`. It is left as it was.
        prompts: A text, several texts, token ids, or None for the sample text of the package.
        layers: Layers to read; None reads all.
        heads: (layer, head) of the gallery; None chooses the most telling ones.
        max_tokens: Cut longer prompts to this many tokens.
        context: Trained context in tokens, in place of the model's own.
        names: A name per prompt.
        interventions: Whether to run the first prompt again without the best pair of each sink
            head, and without random others.
        progress: Called as `progress(stage, done, total)`.

    Raises:
        InputError: A layer, head or other argument is out of range.
        PromptError: A prompt is empty or longer than the model's context.
        UnsupportedModelError: The model has no RoPE, or cannot be read.
        VerificationError: What was read does not reproduce the model's scores.
    """
    info = model_shape(model)
    check_heads(info, heads, layers)
    rows, names = _named(model, prompts, names)
    first: RotaryCapture | None = None
    summaries: list[PromptSummary] = []
    analyses: dict[int, list[LayerAnalysis]] = {}
    checks: dict[int, list[LayerCheck]] = {}
    # Sums over keys are as large as the square of all key components: one per layer, no more.
    keys: dict[int, KeyMoments] = {}
    spectra: list[LayerSpectrum] = []
    same_rope = True
    for index, (name, row) in enumerate(zip(names, rows, strict=True)):
        stage = f"reading {name}" if len(rows) == 1 else f"reading {index + 1}/{len(rows)}"
        qk = capture(
            model, torch.tensor(row), layers, names=[name], max_tokens=max_tokens,
            context=context, progress=_staged(progress, stage),
        )  # fmt: skip
        read = qk.prompts[0]
        summaries.append(
            PromptSummary(name, len(read), read.cut_from, read.starts_with_bos, read.tokens)
        )
        for done, record in enumerate(qk.records[0], start=1):
            layer = record.rope.layer
            # Numbers per pair and head; queries and keys go with the next prompt.
            analyses.setdefault(layer, []).append(analyse(record, read.token_ids))
            checks.setdefault(layer, []).append(record.check)
            is_alike = first is None or record.rope.same_rotation(first.layer(layer).rope)
            same_rope &= is_alike
            if is_alike:
                new = layer_keys(record)
                keys[layer] = merge_keys([keys[layer], new]) if layer in keys else new
            if index == len(rows) - 1:
                spectra.append(layer_spectrum(keys.pop(layer)))
            if progress is not None:
                progress(stage.replace("reading", "summing up"), done, len(qk.layer_indices))
        first = first or qk
    if first is None:
        raise PromptError("there is no prompt; give at least one text")
    gallery, rule = build_gallery(
        first,
        [analyses[layer][0].shares for layer in first.layer_indices],
        heads,
        n_prompts=len(rows),
        progress=_staged(progress, "splitting scores by pair"),
    )
    layers_read = tuple(merge(analyses[layer]) for layer in first.layer_indices)
    sinks = [sink for layer in first.layer_indices for sink in analyses[layer][0].sinks]
    repeated, not_repeated = _repeated(model, first, _staged(progress, "repeating random tokens"))
    ablation, not_ablated = (
        _without_best_pairs(
            model, first, sinks, _staged(progress, "removing pairs from sink heads")
        )
        if interventions
        else (None, None)
    )
    is_long = is_long_enough(summary.n_tokens for summary in summaries)
    offsets = tuple(entry.offsets for entry in layers_read)
    features = OffsetFeatures(first.model, offsets, CONSTANCY, RELATIVE, offset_notes(offsets))
    data = ReportData(
        version=__version__,
        created=_now(),
        model=first.model,
        prompts=tuple(summaries),
        rope=first.rope(),
        same_rope=same_rope,
        checks=tuple(_worst(checks[layer]) for layer in first.layer_indices),
        tolerance=TOLERANCE[getattr(torch, first.model.dtype)],
        layers=layers_read,
        heads=tuple(
            head
            for index, entry in enumerate(layers_read)
            for head in entry.heads(
                is_long=is_long, repeated=repeated[index] if repeated is not None else None
            )
        ),
        bounds=check_bounds(features),
        spectra=tuple(spectra),
        ablation=ablation,
        is_repeated=repeated is not None,
        threshold=SINK_THRESHOLD,
        gallery=gallery,
        gallery_rule=rule,
        findings=(),
        notes=(),
        left_out=tuple(note for note in (not_repeated, not_ablated) if note),
        context=context,
    )
    return dataclasses.replace(data, findings=findings(data), notes=notes(data))


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


def check_heads(
    info: ModelInfo, heads: Sequence[tuple[int, int]] | None, layers: Sequence[int] | None
) -> None:
    """Checks heads against the shape of the model, before anything is run.

    Raises:
        InputError: A head does not exist, or its layer is not among those that are read.
    """
    for layer, head in heads or ():
        if not 0 <= layer < info.n_layers or not 0 <= head < info.n_heads:
            raise InputError(
                f"head {layer}.{head} does not exist; {info.name} has layers 0 to "
                f"{info.n_layers - 1} with heads 0 to {info.n_heads - 1}; choose among them"
            )
        if layers is not None and layer not in layers:
            raise InputError(
                f"head {layer}.{head} was asked for, but layer {layer} is not among the layers to "
                "read; add it to the layers or leave the head out"
            )


def _named(
    model: Any, prompts: str | Sequence[str] | torch.Tensor | None, names: Sequence[str] | None
) -> tuple[list[list[int]], list[str]]:
    """Token ids of each prompt, and a name for each."""
    if prompts is None:
        prompts, names = [sample_text()], names or [SAMPLE_NAME]
    # All at once: whether a row of token ids is padded shows only beside the others.
    rows = token_rows(model, prompts)
    if names is None:
        names = [f"prompt {index + 1}" for index in range(len(rows))]
    if len(names) != len(rows):
        raise InputError(f"{len(names)} names for {len(rows)} prompts; give one each")
    return rows, list(names)


def _worst(checks: Sequence[LayerCheck]) -> LayerCheck:
    """The largest of each error; a check that could not be made (nan) does not count."""

    def worst(values: Sequence[float]) -> float:
        known = [value for value in values if not math.isnan(value)]
        return max(known) if known else math.nan

    return dataclasses.replace(
        checks[0],
        **{
            name: worst([getattr(check, name) for check in checks])
            for name in ("score", "pattern", "norm", "angle")
        },
        head_residual=tuple(map(max, *(check.head_residual for check in checks)))
        if len(checks) > 1
        else checks[0].head_residual,
    )


def _staged(progress: StageProgress | None, stage: str) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda done, total: progress(stage, done, total)


def _now() -> str:
    """Now, or the moment that SOURCE_DATE_EPOCH names, for builds that must be reproducible."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    moment = (
        datetime.datetime.fromtimestamp(int(epoch), datetime.timezone.utc)
        if epoch.isdigit()
        else datetime.datetime.now(datetime.timezone.utc)
    )
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
