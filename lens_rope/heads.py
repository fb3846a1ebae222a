"""Every head of a capture explained: its pattern, and the rotary pairs behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lens_rope.advantage import Advantage, advantage, merge_advantages
from lens_rope.attention import read_attention
from lens_rope.errors import InputError
from lens_rope.offset_shares import PARTS, OffsetShares, layer_offset_shares, merge_offset_shares
from lens_rope.offsets import layer_offsets
from lens_rope.patterns import (
    BASE_FACTOR,
    CONTENT_THRESHOLD,
    MASS_THRESHOLD,
    UNIFORM_THRESHOLD,
    HeadPattern,
    LayerPatterns,
    TargetShare,
    is_long_enough,
    judge_layer,
    layer_patterns,
    merge_patterns,
    merge_targets,
    pattern_targets,
)
from lens_rope.scores import visibility
from lens_rope.sinks import (
    MIN_TOKENS,
    SINK_THRESHOLD,
    HeadShares,
    head_shares,
    merge_shares,
    sink_positions,
)
from lens_rope.targets import Target, repeat_targets, sink_target, target_from_weights

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    from jaxtyping import Float

    from lens_rope.records import LayerCapture, ModelInfo, Prompt, RotaryCapture
    from lens_rope.streaming import LayerStream

REPEATED_TOKENS = 48
"""Random tokens that a repeated prompt holds at most."""

REPEATS = 3
"""How often it holds them; from the third time on the first occurrence is not the last one."""


@dataclass(frozen=True, eq=False)
class HeadExplanation:
    """What every head does, and which pairs do it.

    Attributes:
        model: Name and shape of the model.
        heads: The heads, in order of layer and head.
        is_repeated: Whether induction and its like were measured on a prompt of repeated tokens.
        notes: What a reader has to know, one sentence each.
    """

    model: ModelInfo
    heads: tuple[HeadPattern, ...]
    is_repeated: bool
    notes: tuple[str, ...]

    def head(self, layer: int, head: int) -> HeadPattern:
        """One head.

        Args:
            layer: Index of the layer.
            head: Index of the query head.

        Raises:
            InputError: The head was not captured.
        """
        for entry in self.heads:
            if (entry.layer, entry.head) == (layer, head):
                return entry
        raise InputError(f"layer {layer} head {head} is not among the {len(self.heads)} heads read")

    def counts(self) -> dict[str, int]:
        """How many heads have each pattern, the most frequent first; `None` counts unjudged."""
        from collections import Counter

        counted = Counter(str(entry.pattern) for entry in self.heads)
        return dict(sorted(counted.items(), key=lambda item: (-item[1], item[0])))

    def to_dataframe(self) -> pd.DataFrame:
        """One row per head.

        Columns: `layer`, `head`, `pattern`, `also` (other names that hold), `strength`,
        `base_rate`; `sink_share`, `sink_position`, `previous_share`, and the attention mass of the
        other targets, `local`, `induction`, `duplicate_token`, `first_occurrence` (`target_share`
        is that of a given target); `entropy` (normalised); the offset shares `offset_offset`,
        `offset_content`, `content_offset`, `content_content`; `token_consistency`; `target` (what
        the advantage is of), the `pair` with the largest advantage (-1 without pairs), its
        `advantage` and the `total_advantage` (score units), its `wavelength` (tokens) and `band`.
        """
        return head_table(self.heads)

    def plot(self) -> go.Figure:
        """The pattern of each head, layers by heads."""
        from lens_rope.views.pattern_figures import pattern_map

        return pattern_map(self.heads)

    def _repr_html_(self) -> str:
        """For a notebook: how many heads have which pattern, the clearest of each, and the map."""
        from lens_rope.views.descriptions import describe_heads
        from lens_rope.views.result_html import CLEAREST, NOTEBOOK_ROWS, result_html

        said = describe_heads(self, n_rows=NOTEBOOK_ROWS, clearest=CLEAREST)
        return result_html(said, [self.plot()])

    def __repr__(self) -> str:
        """How many heads have which pattern, and the clearest of each."""
        counts = ", ".join(f"{count} {name}" for name, count in self.counts().items())
        table = self.to_dataframe()
        columns = [
            "layer", "head", "pattern", "strength", "base_rate", "entropy", *PARTS, "pair",
            "advantage", "band",
        ]  # fmt: skip
        best = table.sort_values("strength", ascending=False).groupby("pattern", sort=False).head(3)
        lines = [f"{len(self.heads)} heads of {self.model.name}: {counts}"]
        if len(best):
            lines.append(best[columns].to_string(index=False))
        return "\n".join([*lines, *self.notes])


def explain_heads(
    capture: RotaryCapture,
    *,
    target: Any = None,
    model: Any = None,
    seed: int = 0,
) -> HeadExplanation:
    """The pattern of each head, how strong it is, and the rotary pairs behind it.

    Args:
        capture: A verified capture; prompts of at least 64 tokens can tell patterns.
        target: `[q_pos, k_pos]` a mask or weights, or one per prompt: whose advantage to show
            instead of that of the pattern. Rows are scaled to sum to 1, rows of zeros left out; in
            a layer with a window, so is what the window hides.
        model: The model of the capture. Induction, duplicate token and first occurrence are then
            measured on a prompt of repeated random tokens, which is run for this; without it, on
            the tokens of the capture that happen to come back.
        seed: Seed of the random tokens.

    Returns:
        Every head with its name where it clears a stated threshold, else `mixed`.

    Raises:
        InputError: The target has the wrong shape, or the model is another one, has too short a
            context, or is inside `ablate_frequencies`.
        UnsupportedModelError: The model is given and cannot be read.
        VerificationError: The model is given, and what was read does not reproduce its scores.
    """
    targets = _user_targets(capture, target)
    repeated = None if model is None else repeated_patterns(model, capture, seed=seed)
    heads: list[HeadPattern] = []
    is_long = is_long_enough(len(prompt) for prompt in capture.prompts)
    for index in range(len(capture.layer_indices)):
        layers: list[LayerPatterns] = []
        shares: list[HeadShares] = []
        split: list[OffsetShares] = []
        sinks: dict[int, list[Advantage]] = {}
        wanted: list[TargetShare] = []
        for number, prompt in enumerate(capture.prompts):
            record = capture.records[number][index]
            of_prompt = pattern_targets(prompt.token_ids, record.rope)
            users = [t.within(record.rope.window) for t in targets[number : number + 1]]
            attention = read_attention(record, (*of_prompt, *users))
            shares.append(head_shares(record, attention))
            left_out = sink_positions(attention)
            layers.append(layer_patterns(record, attention, of_prompt))
            offsets = layer_offsets(record, left_out)
            split.append(layer_offset_shares(record, prompt.token_ids, offsets, left_out))
            wanted += layer_patterns(record, attention, users).targets.values()
            if len(prompt) >= MIN_TOKENS:
                for head in np.flatnonzero(shares[-1].sink_share > SINK_THRESHOLD):
                    position = int(shares[-1].sink_position[head])
                    at = sink_target(position, record.n_pos, record.rope.window)
                    sinks.setdefault(int(head), []).append(advantage(record, int(head), at))
        heads += judge_layer(
            capture.records[0][index].rope,
            merge_patterns(layers),
            merge_shares(shares),
            merge_offset_shares(split),
            {head: merge_advantages(found) for head, found in sinks.items()},
            repeated=None if repeated is None else repeated[index],
            is_long=is_long,
            wanted=merge_targets(wanted) if wanted else None,
        )
    return HeadExplanation(
        capture.model, tuple(heads), repeated is not None,
        head_notes([len(prompt) for prompt in capture.prompts], repeated is not None),
    )  # fmt: skip


def repeated_patterns(
    model: Any, capture: RotaryCapture, *, seed: int = 0
) -> tuple[LayerPatterns, ...]:
    """Induction and its like on random tokens that come back twice, one entry per layer.

    The prompt starts with BOS where the first prompt of the capture does.

    Args:
        model: The model of the capture.
        capture: Says which layers to read.
        seed: Seed of the random tokens.

    Raises:
        InputError: The model is another one than that of the capture, or its context is too short.
    """
    from lens_rope.capturing import model_shape
    from lens_rope.streaming import LayerStream

    shape, own = model_shape(model), capture.model
    if (shape.name, shape.n_layers, shape.n_heads) != (own.name, own.n_layers, own.n_heads):
        raise InputError(
            f"the model is {shape.name} and the capture is of {own.name}; give the model that was "
            "captured"
        )
    stream = LayerStream(model, capture.layer_indices)
    return read_repeated(stream, repeated_tokens(model, capture.prompts[0], seed=seed))


def read_repeated(stream: LayerStream, token_ids: Sequence[int]) -> tuple[LayerPatterns, ...]:
    """Where attention goes on one prompt of repeated tokens, one entry per layer of the stream.

    Args:
        stream: The model, opened for reading.
        token_ids: What `repeated_tokens` drew.
    """
    targets: dict[int | None, tuple[Target, ...]] = {}
    out: list[LayerPatterns] = []

    def visit(record: LayerCapture) -> None:
        window = record.rope.window
        if window not in targets:
            targets[window] = repeat_targets(token_ids, window)
        attention = read_attention(record, targets[window])
        out.append(layer_patterns(record, attention, targets[window]))

    stream.run(stream.prompt("repeated tokens", token_ids), visit)
    return tuple(out)


def repeated_tokens(model: Any, first: Prompt, *, seed: int = 0) -> list[int]:
    """Token ids of a repeated prompt: BOS where `first` has it, then the same tokens thrice.

    Args:
        model: The model that is to read it.
        first: A prompt of the text that was read.
        seed: Seed of the tokens.

    Raises:
        InputError: The model's context is too short.
    """
    from lens_rope.hosts import host_of

    tokenizer = getattr(model, "tokenizer", None)
    special = set(getattr(tokenizer, "all_special_ids", ()))
    start = [first.token_ids[0]] if first.starts_with_bos else []
    usable = [i for i in range(int(model.cfg.d_vocab)) if i not in special]
    host = host_of(model)
    room = (min(host.max_tokens, host.trained_context) - len(start)) // REPEATS
    n = min(REPEATED_TOKENS, room, len(usable))
    if n < 8:
        raise InputError(
            f"a prompt of repeated tokens needs a context of at least {8 * REPEATS + 1} tokens and "
            "8 tokens to choose from; leave the model out to use the capture alone"
        )
    drawn = np.random.default_rng(seed).choice(usable, size=n, replace=False)
    return start + [int(token) for token in drawn] * REPEATS


def only_heads(record: LayerCapture, heads: Sequence[int]) -> LayerCapture:
    """The same layer with some of its query heads, each with the key head that it reads.

    Its tensors are copies, so that the layer can be freed.

    Args:
        record: Queries and keys of the layer.
        heads: Indices of the query heads, in the order in which the result has them.
    """
    heads = list(heads)
    return dataclasses.replace(
        record,
        q=record.q[:, heads],
        k=record.k[:, [record.kv_head(head) for head in heads]],
        sinks=None if record.sinks is None else record.sinks[heads],
        check=dataclasses.replace(
            record.check, head_residual=tuple(record.check.head_residual[head] for head in heads)
        ),
    )


def head_notes(n_tokens: Sequence[int], is_repeated: bool) -> tuple[str, ...]:
    """What has to be said about patterns on prompts of these lengths."""
    notes = []
    if not is_long_enough(n_tokens):
        notes.append(
            f"No head is named: the shortest prompt has {min(n_tokens)} tokens, and patterns need "
            f"at least {MIN_TOKENS}."
        )
    if not is_repeated:
        notes.append(
            "Induction, duplicate token and first occurrence are measured where tokens of the text "
            "come back; pass model= to measure them on repeated random tokens."
        )
    return tuple(notes)


def head_table(heads: Iterable[HeadPattern]) -> pd.DataFrame:
    """One row per head; columns as `HeadExplanation.to_dataframe`."""
    import pandas as pd

    rows = []
    for entry in heads:
        best = entry.advantage.strongest(1)
        rows.append(
            {
                "layer": entry.layer,
                "head": entry.head,
                "pattern": entry.pattern,
                "also": ", ".join(entry.also),
                "strength": entry.strength,
                "base_rate": entry.base_rate,
                "sink_share": entry.sink_share,
                "sink_position": entry.sink_position,
                "previous_share": entry.previous_share,
                **{
                    # What the advantage is of has the column `target`.
                    "target_share" if name == "target" else name.replace(" ", "_"): mass
                    for name, mass in entry.masses.items()
                    if name != "previous token"
                },
                "entropy": entry.entropy,
                **dict(zip(PARTS, map(float, entry.offset_shares), strict=True)),
                "token_consistency": entry.token_consistency,
                "target": entry.target,
                "pair": best[0] if best else -1,
                "advantage": float(entry.advantage.pairs[best[0]]) if best else np.nan,
                "total_advantage": entry.advantage.total,
                "wavelength": float(entry.rope.wavelength[best[0]]) if best else np.nan,
                "band": entry.band,
            }
        )
    return pd.DataFrame(rows)


def rule() -> str:
    """How heads are named, in a sentence."""
    return (
        f"A head is named after what gets more than {MASS_THRESHOLD:.0%} of the attention of the "
        f"queries that have it, and at least {BASE_FACTOR:g} times what uniform attention would "
        f"give it. It is a sink head above a sink share of {SINK_THRESHOLD:.0%}, uniform from a "
        f"normalised entropy of {UNIFORM_THRESHOLD:g} on, and a content head when at least "
        f"{CONTENT_THRESHOLD:.0%} of its score variance is not offset·offset and the scores that a "
        f"query gives to two keys with the same token have a correlation of at least "
        f"{CONTENT_THRESHOLD:g}"
    )


def _user_targets(capture: RotaryCapture, target: Any) -> list[Target]:
    """One target per prompt, or none."""
    if target is None:
        return []
    if not isinstance(target, (list, tuple)):
        target = [target]
    arrays: list[Float[np.ndarray, "q_pos k_pos"]] = [
        entry.detach().cpu().numpy() if isinstance(entry, torch.Tensor) else np.asarray(entry)
        for entry in target
    ]
    if any(array.ndim != 2 for array in arrays) or len(arrays) != len(capture.prompts):
        raise InputError(
            f"give one target [q_pos, k_pos] per prompt; there are {len(capture.prompts)} prompts "
            f"and {len(arrays)} targets"
        )
    # Of causal models; what a layer's window hides is left out in that layer.
    return [
        target_from_weights(array, visibility(len(prompt), None).numpy())
        for array, prompt in zip(arrays, capture.prompts, strict=True)
    ]
