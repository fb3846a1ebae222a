"""From a model and prompts to the numbers of a report, one layer of one prompt at a time.

Each prompt runs once. Each of its layers is reduced to numbers that add up over prompts in any
order, and its queries and keys are dropped before the next layer runs. Of the first prompt some
heads are kept for what is shown of it alone: the gallery, and another run without the best pair of
each sink head; a prompt of repeated random tokens tells induction heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lens_rope.capturing import model_shape, token_rows
from lens_rope.errors import InputError, PromptError
from lens_rope.hosts import host_of
from lens_rope.patterns import pattern_targets
from lens_rope.reporting.analysis import LayerAnalysis, analyse, merge
from lens_rope.reporting.data import PromptSummary, ReportData
from lens_rope.reporting.finishing import finish
from lens_rope.reporting.first_prompt import FirstReader, StageProgress, staged
from lens_rope.reporting.prompts import NamedText, prompt_digest
from lens_rope.reporting.sample import SAMPLE_NAME, sample_text
from lens_rope.reporting.shard import (
    FirstPrompt,
    ReadOptions,
    ShardResult,
    common_tokens,
    worst_check,
)
from lens_rope.spec import RopeSpec
from lens_rope.spectrum import layer_keys, merge_keys, no_keys
from lens_rope.streaming import AttentionChoice, LayerStream, Visit, checked_layers, refuse_long

if TYPE_CHECKING:
    from jaxtyping import Int

    from lens_rope.records import LayerCapture, LayerCheck, ModelInfo, Prompt
    from lens_rope.spec import LayerRope
    from lens_rope.spectrum import KeyMoments
    from lens_rope.targets import Target


@dataclass(frozen=True)
class ShardPrompt:
    """One prompt of a report.

    Attributes:
        index: Its index among all prompts of the report.
        name: How the report calls it.
        content: A text, or token ids.
    """

    index: int
    name: str
    content: str | tuple[int, ...]


def gather(
    model: Any,
    prompts: str | Iterable[str | NamedText] | Int[torch.Tensor, "batch pos"] | None = None,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
    max_tokens: int | None = None,
    context: int | None = None,
    names: Iterable[str] | None = None,
    interventions: bool = True,
    attention: AttentionChoice = "auto",
    progress: StageProgress | None = None,
) -> ReportData:
    """Reads every prompt and adds up what the report shows.

    Args:
        model: A `HookedTransformer` or `TransformerBridge`. It is left as it was.
        prompts: A text, texts, token ids, or None for the sample text of the package. Texts that
            can be gone through once only, such as those of a generator, are taken one at a time.
        layers: Layers to read; None reads all.
        heads: (layer, head) of the gallery; None chooses the most telling ones.
        max_tokens: Cut longer prompts to this many tokens.
        context: Trained context in tokens, in place of the model's own.
        names: A name per prompt.
        interventions: Whether to run the first prompt again without the best pair of each sink
            head, and without random others.
        attention: How the model computes attention while it is read, as for `capture`.
        progress: Called as `progress(stage, done, total)`.

    Raises:
        InputError: A layer, head or other argument is out of range.
        PromptError: A prompt is empty, longer than the model can run, or does not fit in memory.
        UnsupportedModelError: The model has no RoPE, or cannot be read.
        VerificationError: What was read does not reproduce the model's scores.
    """
    options = ReadOptions(
        layers=None if layers is None else tuple(layers),
        heads=None if heads is None else tuple(heads),
        max_tokens=max_tokens,
        context=context,
        interventions=interventions,
        attention=attention,
    )
    _check_options(model, options)
    stream = _stream(model, options)
    found, total = _prompts(model, stream, prompts, names, options)
    return finish(_read(model, stream, found, options, total=total, progress=progress))


def read_shard(
    model: Any,
    prompts: Iterable[ShardPrompt],
    options: ReadOptions,
    *,
    total: int | None = None,
    progress: StageProgress | None = None,
) -> ShardResult:
    """Reads some prompts of a report, one at a time.

    Args:
        model: A `HookedTransformer` or `TransformerBridge`. It is left as it was.
        prompts: The prompts, by ascending index.
        options: What to read of them.
        total: How many prompts there are, for the progress.
        progress: Called as `progress(stage, done, total)`.

    Returns:
        What was read, as plain numbers that can be pickled.

    Raises:
        InputError: An option is out of range.
        PromptError: There is no prompt, or one is empty or longer than the model can run.
        UnsupportedModelError: The model has no RoPE, or cannot be read.
        VerificationError: What was read does not reproduce the model's scores.
    """
    _check_options(model, options)
    return _read(model, _stream(model, options), prompts, options, total=total, progress=progress)


def _read(
    model: Any,
    stream: LayerStream,
    prompts: Iterable[ShardPrompt],
    options: ReadOptions,
    *,
    total: int | None,
    progress: StageProgress | None,
) -> ShardResult:
    """`read_shard` by one stream, which finds out but once how the model can be read."""
    sums = _Sums(options.rope)
    first: FirstPrompt | None = None
    for done, prompt in enumerate(prompts, start=1):
        stage = (
            f"reading {prompt.name}" if total == 1
            else f"reading {done}/{total}" if total
            else f"reading prompt {done}"
        )  # fmt: skip
        read = stream.prompt(prompt.name, _row(model, prompt), options.max_tokens)
        reader = FirstReader(read, options, stream) if prompt.index == 0 else None
        visit = sums.visitor(prompt, read, stream, reader, staged(progress, stage))
        if reader is not None and reader.needs_loss:
            reader.add_logits(stream.run_to_logits(read, visit))
        else:
            stream.run(read, visit)
        sums.end_prompt(stream)
        if reader is not None:
            first = reader.done(model, stream, progress)
    if sums.model is None or sums.rope is None:
        raise PromptError("there is no prompt; give at least one text")
    return ShardResult(
        model=sums.model,
        device=str(next(model.parameters()).device),
        options=options,
        prompts=tuple(sums.summaries),
        rope=sums.rope,
        same_rope=sums.same_rope,
        layers=tuple(sums.layers.values()),
        checks=tuple(sums.checks.values()),
        keys=tuple(sums.keys.values()),
        tokens=sums.tokens,
        first=first,
    )


class _Sums:
    """What is kept while prompts are read: one prompt's numbers at a time, and the sums."""

    def __init__(self, rope: RopeSpec | None) -> None:
        self.model: ModelInfo | None = None
        self.rope = rope
        self.same_rope = True
        self.summaries: list[tuple[int, PromptSummary]] = []
        self.tokens: tuple[str | None, ...] = ()
        self.layers: dict[int, LayerAnalysis] = {}
        self.checks: dict[int, LayerCheck] = {}
        self.keys: dict[int, KeyMoments] = {}
        self._ropes: list[LayerRope] = []

    def visitor(
        self,
        prompt: ShardPrompt,
        read: Prompt,
        stream: LayerStream,
        first: FirstReader | None,
        progress: Callable[[int, int], None] | None,
    ) -> Visit:
        """What takes the layers of one prompt, adds them up and lets them go."""
        digest = prompt_digest(prompt.name, prompt.content)
        summary = PromptSummary(read.name, len(read), read.cut_from, read.starts_with_bos, digest)
        self.summaries.append((prompt.index, summary))
        self.tokens = common_tokens([self.tokens, read.tokens])
        self._ropes = []
        targets: dict[int | None, tuple[Target, ...]] = {}

        def visit(record: LayerCapture) -> None:
            self.model = self.model or stream.info(record)
            self._ropes.append(record.rope)
            window = record.rope.window
            if window not in targets:
                targets[window] = pattern_targets(read.token_ids, record.rope)
            rope = record.rope if self.rope is None else self.rope[record.rope.layer]
            own = analyse(record, read.token_ids, rope, targets[window])
            self._add(record, own, rope)
            if first is not None:
                first.add(record, own)
            if progress is not None:
                progress(len(self._ropes), len(stream.layers))

        return visit

    def end_prompt(self, stream: LayerStream) -> None:
        """Every layer of the prompt was read; the rotation of the first one is the report's."""
        if len(self.summaries) == 1:
            stream.refuse_unrotated(self._ropes)
        if self.rope is None:
            self.rope = RopeSpec(stream.host.info.name, tuple(self._ropes))

    def _add(self, record: LayerCapture, new: LayerAnalysis, rope: LayerRope) -> None:
        layer, check = record.rope.layer, record.check
        if layer in self.layers:
            new = merge([self.layers[layer], new])
            check = worst_check([self.checks[layer], check])
        self.layers[layer], self.checks[layer] = new, check
        keys = layer_keys(record)
        if record.rope.same_rotation(rope):
            known = [self.keys[layer]] if layer in self.keys else []
            self.keys[layer] = merge_keys([*known, keys])
        else:
            self.same_rope = False
            self.keys.setdefault(layer, no_keys(keys))


def _check_options(model: Any, options: ReadOptions) -> None:
    """What can be told without running the model.

    Raises:
        InputError: A head does not exist, or its layer is not among those that are read.
    """
    info = model_shape(model)
    for layer, head in options.heads or ():
        if not 0 <= layer < info.n_layers or not 0 <= head < info.n_heads:
            raise InputError(
                f"head {layer}.{head} does not exist; {info.name} has layers 0 to "
                f"{info.n_layers - 1} with heads 0 to {info.n_heads - 1}; choose among them"
            )
        if options.layers is not None and layer not in options.layers:
            raise InputError(
                f"head {layer}.{head} was asked for, but layer {layer} is not among the layers to "
                "read; add it to the layers or leave the head out"
            )
    checked_layers(host_of(model), options.layers)


def _stream(model: Any, options: ReadOptions) -> LayerStream:
    return LayerStream(model, options.layers, context=options.context, attention=options.attention)


def _prompts(
    model: Any,
    stream: LayerStream,
    prompts: str | Iterable[str | NamedText] | torch.Tensor | None,
    names: Iterable[str] | None,
    options: ReadOptions,
) -> tuple[Iterable[ShardPrompt], int | None]:
    """The prompts with their names, and how many there are where that is known.

    What can be gone through twice is checked before anything is read: a prompt at the end that
    cannot be used should not be found after hours.
    """
    contents: Iterable[Any]
    if prompts is None:
        contents, names = [sample_text()], names or [SAMPLE_NAME]
    elif isinstance(prompts, torch.Tensor):
        # All at once: whether a row of token ids is padded shows only beside the others.
        contents = [tuple(row) for row in token_rows(model, prompts)]
    elif isinstance(prompts, str):
        contents = [prompts]
    elif isinstance(prompts, Iterable):
        contents = prompts
    else:
        raise InputError("prompts must be texts or one tensor of token ids")
    if isinstance(contents, Iterator):
        return _paired(contents, names), None
    names = None if names is None else list(names)
    if names is not None and isinstance(contents, Sized) and len(names) != len(contents):
        raise InputError(f"{len(names)} names for {len(contents)} prompts; give one each")
    total = 0
    for prompt in _paired(contents, names):
        n_tokens = len(_row(model, prompt)[: options.max_tokens])
        refuse_long(stream.host, prompt.name, n_tokens)
        stream.refuse_unfit(prompt.name, n_tokens)
        total += 1
    return _paired(contents, names), total


def _paired(contents: Iterable[Any], names: Iterable[str] | None) -> Iterator[ShardPrompt]:
    """Each prompt with its index and name."""
    given = None if names is None else iter(names)
    for index, content in enumerate(contents):
        name = f"prompt {index + 1}"
        if isinstance(content, NamedText):
            name, content = content.name, content.text
        elif not isinstance(content, (str, tuple)):
            raise InputError("prompts must be texts or one tensor of token ids")
        if given is not None:
            try:
                name = next(given)
            except StopIteration:
                raise InputError(
                    f"there are {index} names and more prompts; give one each"
                ) from None
        yield ShardPrompt(index, name, content)
    if given is not None and next(given, None) is not None:
        raise InputError("there are more names than prompts; give one each")


def _row(model: Any, prompt: ShardPrompt) -> list[int]:
    """Token ids of one prompt."""
    if not isinstance(prompt.content, str):
        return list(prompt.content)
    try:
        row = token_rows(model, prompt.content)[0]
    except PromptError as error:
        raise PromptError(f"{prompt.name}: {error}") from error
    if not row:
        raise PromptError(f"{prompt.name} has no token in the model's vocabulary; give other text")
    return row
