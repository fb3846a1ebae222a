"""What is kept of some prompts of a report, and how such parts are put together.

A report can be gathered in parts: `gather.read_shard` is a pure function from a model and some
prompts to a `ShardResult`, `merge_shards` adds results up in any order and grouping, and
`finishing.finish` makes the report of the whole. Results hold plain numbers and can be pickled, so
the parts can be read by other processes or machines.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

from lens_rope.errors import InputError
from lens_rope.reporting.analysis import LayerAnalysis, merge
from lens_rope.spectrum import KeyMoments, merge_keys

if TYPE_CHECKING:
    from lens_rope.ablation_effects import AblationReport
    from lens_rope.patterns import LayerPatterns
    from lens_rope.records import LayerCheck, ModelInfo
    from lens_rope.reporting.data import GalleryHead, PromptSummary
    from lens_rope.spec import LayerRope, RopeSpec
    from lens_rope.streaming import AttentionChoice


@dataclass(frozen=True)
class ReadOptions:
    """What is read of every prompt, and of the first one besides.

    Attributes:
        layers: Layers to read; None reads all.
        heads: (layer, head) of the gallery; None chooses the most telling ones.
        max_tokens: Longer prompts are cut to this many tokens; None cuts nothing.
        context: Trained context in tokens, in place of the model's own.
        interventions: Whether to run the first prompt again without the best pair of each sink
            head, and without random others.
        attention: How the model computes attention while it is read, as for `capture`.
        rope: The rotation that offsets and key spectra are of, that of prompt 0. None takes that of
            the shard's first prompt, which is the same unless the rotation depends on the prompt's
            length; then shards that do not hold prompt 0 need it.
    """

    layers: tuple[int, ...] | None = None
    heads: tuple[tuple[int, int], ...] | None = None
    max_tokens: int | None = None
    context: int | None = None
    interventions: bool = True
    attention: AttentionChoice = "auto"
    rope: RopeSpec | None = None


@dataclass(frozen=True, eq=False)
class FirstPrompt:
    """What is shown of prompt 0 alone.

    Attributes:
        gallery: The heads of the gallery.
        gallery_rule: How they were chosen, as a sentence.
        repeated: By layer, where attention goes on repeated random tokens; None if not known.
        ablation: What removing the best pair of each sink head does; None where there is none.
        left_out: What could not be measured and why, one sentence each.
    """

    gallery: tuple[GalleryHead, ...]
    gallery_rule: str
    repeated: tuple[LayerPatterns, ...] | None
    ablation: AblationReport | None
    left_out: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ShardResult:
    """What was read of one or more prompts of a report. Nothing but `prompts` grows with them.

    Attributes:
        model: Name and shape of the model, and its host.
        device: The device that it ran on.
        options: What was asked for.
        prompts: (index in the report, summary) of each prompt, by index.
        rope: The rotation that offsets and key sums are of.
        same_rope: Whether all prompts are rotated like that.
        layers: Per layer, what was added up.
        checks: Per layer, the worst of each error.
        keys: Per layer, sums over the keys of the prompts that are rotated alike. They take as much
            as the square of all key components.
        tokens: `[pos]` The token at each position as text, None where prompts differ there.
        first: What is shown of prompt 0, where the shard holds it.
    """

    model: ModelInfo
    device: str
    options: ReadOptions
    prompts: tuple[tuple[int, PromptSummary], ...]
    rope: RopeSpec
    same_rope: bool
    layers: tuple[LayerAnalysis, ...]
    checks: tuple[LayerCheck, ...]
    keys: tuple[KeyMoments, ...]
    tokens: tuple[str | None, ...]
    first: FirstPrompt | None


def merge_shards(results: Iterable[ShardResult]) -> ShardResult:
    """Adds results up, whatever the order and however often they were merged before.

    Args:
        results: Results of one model with the same options, each of other prompts.

    Returns:
        One result that holds the prompts of all.

    Raises:
        InputError: There is nothing to merge, the results are of different models, options, layers
            or rotations, or hold the same prompt twice.
    """
    parts = sorted(results, key=lambda part: part.prompts[0][0])
    if not parts:
        raise InputError("there are no results to merge; read at least one prompt")
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    for part in parts[1:]:
        _refuse_other(first, part)
    prompts = sorted(
        (entry for part in parts for entry in part.prompts), key=lambda entry: entry[0]
    )
    for (index, _), (other, _) in pairwise(prompts):
        if index == other:
            raise InputError(f"prompt {index} is in more than one result; read each prompt once")

    def by_layer(name: str) -> Iterable[tuple]:
        return zip(*(getattr(part, name) for part in parts), strict=True)

    return ShardResult(
        model=first.model,
        device=first.device,
        options=first.options,
        prompts=tuple(prompts),
        rope=first.rope,
        same_rope=all(part.same_rope and _alike(part.rope, first.rope) for part in parts),
        layers=tuple(merge(entries) for entries in by_layer("layers")),
        checks=tuple(worst_check(entries) for entries in by_layer("checks")),
        keys=tuple(merge_keys(entries) for entries in by_layer("keys")),
        tokens=common_tokens(part.tokens for part in parts),
        first=first.first,
    )


def common_tokens(tokens: Iterable[Sequence[str | None]]) -> tuple[str | None, ...]:
    """`[pos]` The token at each position, None where those that reach it differ.

    Args:
        tokens: By prompt, the token at each position, or what this function returned before.
    """
    beyond = object()  # not None, which says that prompts differ
    common: list = []
    for row in tokens:
        common = [
            b if a is beyond else a if b is beyond or a == b else None
            for a, b in zip_longest(common, row, fillvalue=beyond)
        ]
    return tuple(common)


def worst_check(checks: Sequence[LayerCheck]) -> LayerCheck:
    """The largest of each error; a check that could not be made (nan) does not count.

    `checked_queries` is the smallest number of queries that a fused pass was compared on, None
    where every query of every prompt was.
    """

    def worst(values: Sequence[float]) -> float:
        known = [value for value in values if not math.isnan(value)]
        return max(known) if known else math.nan

    residuals = zip(*(check.head_residual for check in checks), strict=True)
    return dataclasses.replace(
        checks[0],
        **{
            name: worst([getattr(check, name) for check in checks])
            for name in ("score", "pattern", "norm", "angle", "output")
        },
        checked_queries=min(
            (check.checked_queries for check in checks if check.checked_queries is not None),
            default=None,
        ),
        head_residual=tuple(max(values) for values in residuals),
    )


def _alike(one: RopeSpec, other: RopeSpec) -> bool:
    pairs: Iterable[tuple[LayerRope, LayerRope]] = zip(one.layers, other.layers, strict=True)
    return all(a.same_rotation(b) for a, b in pairs)


def _refuse_other(one: ShardResult, other: ShardResult) -> None:
    def layers(part: ShardResult) -> list[int]:
        return [entry.rope.layer for entry in part.layers]

    def asked(part: ShardResult) -> ReadOptions:
        return dataclasses.replace(part.options, rope=None)

    bare = [dataclasses.replace(part.model, versions={}) for part in (one, other)]
    if one.model != other.model and bare[0] == bare[1]:
        names = {*one.model.versions, *other.model.versions}
        other_names = [
            name
            for name in sorted(names)
            if one.model.versions.get(name) != other.model.versions.get(name)
        ]
        raise InputError(
            f"results were read with different versions of {', '.join(other_names)}; use the same "
            "for every prompt"
        )
    if one.model != other.model or layers(one) != layers(other):
        raise InputError(
            f"results of {one.model.name} and {other.model.name} with other layers, shapes or "
            "hosts cannot be merged; read every prompt with the same model"
        )
    if asked(one) != asked(other):
        raise InputError("results were read with different options; use the same for every prompt")
    if not _alike(one.rope, other.rope):
        raise InputError(
            "the rotation depends on the length of the prompt, and results hold offsets of "
            "different rotations; read every shard with the rotation of prompt 0 as `rope`"
        )
