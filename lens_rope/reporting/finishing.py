"""From what was added up over all prompts to the numbers and sentences of a report."""

from __future__ import annotations

import dataclasses

import torch

from lens_rope import __version__
from lens_rope.bounds import check_bounds
from lens_rope.errors import InputError
from lens_rope.offsets import CONSTANCY, RELATIVE, OffsetFeatures, offset_notes
from lens_rope.reporting.analysis import judge
from lens_rope.reporting.data import Provenance, ReportData
from lens_rope.reporting.findings import findings, notes
from lens_rope.reporting.gallery import RULE_ASKED
from lens_rope.reporting.prompts import checksum
from lens_rope.reporting.shard import ShardResult
from lens_rope.reporting.write import now
from lens_rope.sinks import SINK_THRESHOLD
from lens_rope.spectrum import layer_spectrum
from lens_rope.verify import TOLERANCE


def finish(result: ShardResult) -> ReportData:
    """The report of all prompts of a result.

    Args:
        result: All prompts of the report, merged; no model is needed any more.

    Returns:
        The numbers and sentences of the report; `Report(data).save(folder)` writes them.

    Raises:
        InputError: A prompt is missing, or none is rotated as the options say.
    """
    indices = [index for index, _ in result.prompts]
    first = result.first
    if first is None or indices != list(range(len(indices))):
        missing = next(i for i in range(len(indices) + 1) if i not in indices)
        raise InputError(
            f"prompt {missing} is missing from the results; merge those of every prompt, 0 to "
            f"{max(indices)}"
        )
    if not all(keys.n_tokens for keys in result.keys):
        raise InputError("no prompt is rotated as `rope` says; give the rotation of prompt 0")
    summaries = tuple(summary for _, summary in result.prompts)
    layers = tuple(judge(entry) for entry in result.layers)
    is_long = any(entry.is_long for entry in layers)
    repeated = first.repeated or [None] * len(layers)
    offsets = tuple(entry.offsets for entry in layers)
    features = OffsetFeatures(result.model, offsets, CONSTANCY, RELATIVE, offset_notes(offsets))
    rule = first.gallery_rule
    if rule != RULE_ASKED and len(summaries) > 1:
        rule += f" All on {summaries[0].name} alone, the first of {len(summaries)} prompts."
    options = result.options
    data = ReportData(
        version=__version__,
        created=now(),
        model=result.model,
        prompts=summaries,
        rope=result.rope,
        same_rope=result.same_rope,
        checks=result.checks,
        tolerance=TOLERANCE[getattr(torch, result.model.dtype)],
        layers=layers,
        heads=tuple(
            head
            for entry, of_repeated in zip(layers, repeated, strict=True)
            for head in entry.heads(is_long=is_long, repeated=of_repeated)
        ),
        bounds=check_bounds(features),
        spectra=tuple(layer_spectrum(keys) for keys in result.keys),
        ablation=first.ablation,
        is_repeated=first.repeated is not None,
        threshold=SINK_THRESHOLD,
        gallery=first.gallery,
        gallery_rule=rule,
        findings=(),
        notes=(),
        left_out=first.left_out,
        context=options.context,
        tokens=result.tokens,
        provenance=Provenance(
            arguments={
                "layers": None if options.layers is None else list(options.layers),
                "heads": None if options.heads is None else [list(head) for head in options.heads],
                "max_tokens": options.max_tokens,
                "context": options.context,
                "interventions": options.interventions,
                "attention": options.attention,
            },
            device=result.device,
            prompts_sha256=checksum(summary.sha256 for summary in summaries),
        ),
    )
    return dataclasses.replace(data, findings=findings(data), notes=notes(data))
