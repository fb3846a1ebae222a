"""What a capture holds: rotated queries and keys of each prompt and layer, and how well they fit.

Plain frozen data on the CPU. Everything after the capture works on these records alone, with no
model present.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from lens_rope.errors import InputError
from lens_rope.scores import pattern_of, scores_of, soft_capped, visibility
from lens_rope.spec import LayerRope, RopeSpec, ranges

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    import plotly.graph_objects as go
    from jaxtyping import Bool, Float, Int

Route = Literal["hook_rot", "hook_cos", "hook_cos_pattern"]
"""By which hook points a layer was read, see `LayerCheck`."""


@dataclass(frozen=True)
class ModelInfo:
    """Name and shape of the model, and the host that ran it.

    Attributes:
        name: Name of the model.
        n_layers: Number of layers.
        n_heads: Number of query heads per layer.
        n_kv_heads: Number of key heads per layer.
        d_head: Components of a query or key.
        dtype: Precision of the queries and keys in the model, such as `float32`.
        host: `HookedTransformer` or `TransformerBridge`.
        versions: Versions of transformer_lens, transformers and torch.
    """

    name: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    dtype: str
    host: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """One prompt as the model saw it: no padding, positions 0, 1, 2, ...

    Attributes:
        name: How reports call it.
        token_ids: `[pos]` Token ids, BOS included where the model saw one.
        tokens: `[pos]` Each token as text.
        starts_with_bos: Whether token 0 is the tokenizer's BOS token (None without a tokenizer).
        cut_from: Number of tokens before the prompt was cut to a maximum, None when it is whole.
    """

    name: str
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    starts_with_bos: bool | None
    cut_from: int | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("a prompt needs at least one token")
        if len(self.tokens) != len(self.token_ids):
            raise ValueError(
                f"{len(self.tokens)} token texts for {len(self.token_ids)} positions; "
                "each position needs one"
            )

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)


@dataclass(frozen=True)
class LayerCheck:
    """How exactly one layer of one prompt was read. Errors are relative.

    Attributes:
        layer: Index of the layer.
        route: `hook_rot` when the rotated values were read at the model's own hook points,
            `hook_cos` when `hook_q` and `hook_k` were rotated with the model's own tables,
            `hook_cos_pattern` when besides the host shows the pattern alone, so that scores are
            compared up to a constant per query.
        score: Error of the recomputed scores against the model's, relative to each head's largest.
        pattern: Largest difference between the model's attention and that which the visibility,
            soft-cap and learned sinks imply.
        norm: Error of each pair's length across the rotation (nan where only the scores
            constrain it).
        angle: Error of the rotated pairs against angles that grow linearly with position (nan
            likewise).
        head_residual: `[head]` Largest absolute difference between the model's score and the sum
            of contributions and pass-through, in score units (after soft-cap where there is one,
            up to a constant per query where only the pattern is shown).
        checked_queries: Number of queries whose scores and attention were compared; None is all,
            as in every pass in which the host formed them.
        output: In a fused pass, the largest difference of its attention output from that of the
            host's own attention, over these queries, relative to the largest output; else nan.
    """

    layer: int
    route: Route
    score: float
    pattern: float
    norm: float
    angle: float
    head_residual: tuple[float, ...]
    checked_queries: int | None = None
    output: float = float("nan")

    @property
    def relative_error(self) -> float:
        """The error of the scores, the number that reports quote."""
        return self.score


@dataclass(frozen=True, eq=False)
class LayerCapture:
    """Rotated queries and keys of one layer of one prompt.

    Attributes:
        rope: The layer's rotation in this forward pass.
        q: `[pos, head, d_head]` Rotated queries, float32, activation units.
        k: `[pos, kv_head, d_head]` Rotated keys, likewise. A key head serves
            `n_heads // n_kv_heads` consecutive query heads.
        scale: What the model multiplies query-key products by to get scores.
        softcap: `c` where the model replaces a score `s` by `c tanh(s / c)`, else None.
        sinks: `[head]` Learned sink logits that join the softmax, else None.
        check: How exactly this was read.
    """

    rope: LayerRope
    q: Float[torch.Tensor, "pos head d_head"]
    k: Float[torch.Tensor, "pos kv_head d_head"]
    scale: float
    softcap: float | None
    sinks: Float[torch.Tensor, " head"] | None
    check: LayerCheck

    def __post_init__(self) -> None:
        if self.q.ndim != 3 or self.k.ndim != 3 or self.q.shape[0] != self.k.shape[0]:
            raise ValueError(
                f"q {tuple(self.q.shape)} and k {tuple(self.k.shape)} must be [pos, head, d_head] "
                "with the same number of positions"
            )
        if self.q.shape[1] % self.k.shape[1]:
            raise ValueError(
                f"{self.q.shape[1]} query heads cannot share {self.k.shape[1]} key heads evenly"
            )
        if not self.q.shape[2] == self.k.shape[2] == self.rope.d_head:
            raise ValueError(
                f"q and k have {self.q.shape[2]} and {self.k.shape[2]} components, "
                f"the rotation {self.rope.d_head}"
            )
        for name, x in (("q", self.q), ("k", self.k)):
            # One pass without a copy tells that all is well: extremes keep NaN.
            if torch.isfinite(torch.stack(torch.aminmax(x))).all():
                continue
            wrong = (~torch.isfinite(x)).any(dim=-1).nonzero()
            if len(wrong):
                position, head = wrong[0].tolist()
                raise ValueError(
                    f"{name} of layer {self.rope.layer} holds NaN or infinite values, first in "
                    f"head {head} at position {position}"
                )

    @property
    def n_pos(self) -> int:
        """Number of positions."""
        return self.q.shape[0]

    @property
    def n_heads(self) -> int:
        """Number of query heads."""
        return self.q.shape[1]

    @property
    def n_kv_heads(self) -> int:
        """Number of key heads."""
        return self.k.shape[1]

    def kv_head(self, head: int) -> int:
        """Index of the key head that query head `head` reads."""
        return head // (self.n_heads // self.n_kv_heads)

    @property
    def positions(self) -> Int[torch.Tensor, " pos"]:
        """`[pos]` Positions in tokens."""
        return torch.arange(self.n_pos)

    @property
    def visible(self) -> Bool[torch.Tensor, "q_pos k_pos"]:
        """`[q_pos, k_pos]` Which keys each query sees, from positions alone."""
        return visibility(self.n_pos, self.rope.window)

    def scores(self, head: int) -> Float[torch.Tensor, "q_pos k_pos"]:
        """`[q_pos, k_pos]` Scores of query head `head` before soft-cap and mask, score units."""
        kv_head = self.kv_head(head)
        q, k = self.q[:, head : head + 1], self.k[:, kv_head : kv_head + 1]
        return scores_of(q, k, self.rope, self.scale)[0]

    def pattern(self, head: int) -> Float[torch.Tensor, "q_pos k_pos"]:
        """`[q_pos, k_pos]` Attention of one head; rows sum below 1 where there is a learned sink.

        Args:
            head: Index of the query head.
        """
        sinks = None if self.sinks is None else self.sinks[head : head + 1]
        return pattern_of(soft_capped(self.scores(head), self.softcap)[None], self.visible, sinks)[
            0
        ]


@dataclass(frozen=True, eq=False)
class RotaryCapture:
    """Verified rotary queries and keys of one model on one or more prompts.

    Attributes:
        model: The model and its host.
        prompts: The prompts, in the order given.
        layer_indices: The layers that were read, ascending.
        records: One tuple per prompt with one `LayerCapture` per entry of `layer_indices`.
    """

    model: ModelInfo
    prompts: tuple[Prompt, ...]
    layer_indices: tuple[int, ...]
    records: tuple[tuple[LayerCapture, ...], ...]

    def __post_init__(self) -> None:
        if len(self.records) != len(self.prompts):
            raise ValueError(f"{len(self.records)} records for {len(self.prompts)} prompts")
        for prompt, layers in zip(self.prompts, self.records, strict=True):
            if tuple(record.rope.layer for record in layers) != self.layer_indices:
                raise ValueError(f"the records of prompt {prompt.name!r} do not match the layers")
            for record in layers:
                if record.n_pos != len(prompt):
                    raise ValueError(
                        f"{record.n_pos} positions for {len(prompt)} tokens in {prompt.name!r}"
                    )

    def layer(self, layer: int, *, prompt: int = 0) -> LayerCapture:
        """Queries and keys of one layer.

        Args:
            layer: Index of the layer in the model.
            prompt: Index of the prompt.

        Raises:
            InputError: The layer or prompt is not in the capture.
        """
        if not 0 <= prompt < len(self.prompts):
            raise InputError(
                f"prompt {prompt} is out of range; this capture has {len(self.prompts)} prompts, "
                "numbered from 0"
            )
        try:
            return self.records[prompt][self.layer_indices.index(layer)]
        except ValueError:
            known = ", ".join(map(str, self.layer_indices))
            raise InputError(f"layer {layer} was not captured; captured layers: {known}") from None

    def rope(self, *, prompt: int = 0) -> RopeSpec:
        """The rotation of each captured layer in the forward pass of one prompt.

        Args:
            prompt: Index of the prompt.

        Raises:
            InputError: The prompt is not in the capture.
        """
        layers = tuple(self.layer(layer, prompt=prompt).rope for layer in self.layer_indices)
        return RopeSpec(self.model.name, layers)

    @property
    def max_relative_error(self) -> float:
        """The largest relative error of the scores over all layers and prompts."""
        return max(record.check.relative_error for layers in self.records for record in layers)

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of how this was read; empty where all is as usual.

        Which prompts are longer than the trained context, and which were read in a fused pass, on
        how many queries their scores were compared with the model's own, and how exactly the
        attention output of the pass agrees there.
        """
        notes = []
        for prompt, layers in zip(self.prompts, self.records, strict=True):
            context = max(record.rope.trained_context for record in layers)
            if len(prompt) > context:
                notes.append(
                    f"{prompt.name} has {len(prompt):,} tokens and the trained context is "
                    f"{context:,}: positions beyond it are new to the model"
                )
        for prompt, layers in zip(self.prompts, self.records, strict=True):
            fused = [record for record in layers if not math.isnan(record.check.output)]
            if fused:
                which = ranges([record.rope.layer for record in fused])
                output = max(record.check.output for record in fused)
                notes.append(
                    f"{prompt.name}, layers {which}: read in a fused pass; the model's own "
                    f"attention was formed for {_share(fused)} and gives the same output within "
                    f"{output:.1e}"
                )
        return tuple(notes)

    def verification(self) -> pd.DataFrame:
        """One row per prompt and layer: by which route it was read and how exactly.

        Columns: `prompt` (name), `layer`, `route`, `relative_error` (of the scores),
        `pattern_error`, `norm_error`, `angle_error` (relative, see `LayerCheck`), `max_residual`
        (largest of the heads, score units), `checked_queries` (number of queries that these are
        over; all but in a fused pass on a long prompt), `output_error` (relative, of the attention
        output of a fused pass, else nan).
        """
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "prompt": prompt.name,
                    "layer": record.check.layer,
                    "route": record.check.route,
                    "relative_error": record.check.score,
                    "pattern_error": record.check.pattern,
                    "norm_error": record.check.norm,
                    "angle_error": record.check.angle,
                    "max_residual": max(record.check.head_residual),
                    "checked_queries": _checked(record),
                    "output_error": record.check.output,
                }
                for prompt, layers in zip(self.prompts, self.records, strict=True)
                for record in layers
            ]
        )

    def save(self, path: str | Path) -> Path:
        """Writes the capture to one safetensors file, whole or not at all.

        Args:
            path: The file; it is replaced when it exists.

        Returns:
            The path.

        Raises:
            OutputError: The file cannot be written.
        """
        from lens_rope.storage import save_capture

        return save_capture(self, path)

    @staticmethod
    def load(path: str | Path) -> RotaryCapture:
        """Reads a capture back; no model is needed.

        Args:
            path: A file written by `save`.

        Raises:
            CaptureFileError: The file is missing, truncated, not a capture, or of another version.
        """
        from lens_rope.storage import load_capture

        return load_capture(path)

    def plot(self) -> go.Figure:
        """Error of the recomputed scores in every layer, the largest over the prompts."""
        from lens_rope.views.metric_figures import capture_checks

        return capture_checks(self)

    def _repr_html_(self) -> str:
        """For a notebook: what was read, and how exactly."""
        from lens_rope.views.head_descriptions import describe_capture
        from lens_rope.views.result_html import result_html

        return result_html(describe_capture(self), [self.plot()])

    def __repr__(self) -> str:
        """Model, prompts and exactness in one line each."""
        tokens = ", ".join(f"{prompt.name} ({len(prompt)} tokens)" for prompt in self.prompts)
        sampled = [
            record
            for layers in self.records
            for record in layers
            if record.check.checked_queries is not None
        ]
        on = ""
        if sampled:
            output = max(record.check.output for record in sampled)
            on = f" on {_share(sampled)}, attention output within {output:.1e}"
        lines = [
            f"RotaryCapture of {self.model.name} on {self.model.host}",
            f"  layers: {ranges(self.layer_indices)}   heads: {self.model.n_heads}"
            f"   KV heads: {self.model.n_kv_heads}   d_head: {self.model.d_head}",
            f"  prompts: {tokens}",
            f"  verified: scores within {self.max_relative_error:.1e} of the model's own{on}",
        ]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def _checked(record: LayerCapture) -> int:
    """Number of queries whose scores were compared with the model's."""
    checked = record.check.checked_queries
    return record.n_pos if checked is None else checked


def _share(records: list[LayerCapture]) -> str:
    """Of how many queries the scores were compared, where it was fewest."""
    fewest = min(records, key=lambda record: _checked(record) / record.n_pos)
    if fewest.check.checked_queries is None:
        return "all queries"
    return f"{_checked(fewest):,} of {fewest.n_pos:,} queries"
