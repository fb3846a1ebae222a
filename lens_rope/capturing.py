"""From a model and prompts to a verified capture: every layer of every prompt, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lens_rope.errors import InputError, PromptError
from lens_rope.hosts import host_of
from lens_rope.records import LayerCapture, ModelInfo, RotaryCapture
from lens_rope.spec import RopeSpec
from lens_rope.streaming import AttentionChoice, LayerStream
from lens_rope.text import pad_token_id, tokenize

if TYPE_CHECKING:
    from jaxtyping import Int

Progress = Callable[[int, int], None]
"""Called as `progress(done, total)`."""


def capture(
    model: Any,
    prompts: str | Sequence[str] | Int[torch.Tensor, "batch pos"],
    layers: Sequence[int] | None = None,
    *,
    attention_mask: Int[torch.Tensor, "batch pos"] | None = None,
    names: Sequence[str] | None = None,
    prepend_bos: bool | None = None,
    max_tokens: int | None = None,
    context: int | None = None,
    attention: AttentionChoice = "auto",
    progress: Progress | None = None,
) -> RotaryCapture:
    """Reads rotated queries and keys and verifies them against the model's own scores.

    Args:
        model: A `HookedTransformer` or `TransformerBridge`. It is left as it was.
        prompts: A text, several texts, or token ids `[pos]` or `[batch, pos]`.
        layers: Layers to read; None reads all.
        attention_mask: `[batch, pos]` 1 where a token counts and 0 at padding, for token ids.
        names: A name per prompt for tables and reports.
        prepend_bos: Whether texts start with BOS; None keeps the model's own default.
        max_tokens: Cut longer prompts to this many tokens.
        context: Trained context in tokens, where the host does not know it: `HookedTransformer`
            caps `n_ctx` for some models (`load_model` undoes that), and cycles are counted over it.
        attention: How the model computes attention while it is read. `eager` as it always does,
            which needs `n_heads * n_tokens**2` scores of a layer at a time. `fused` by
            `scaled_dot_product_attention`, which needs no such array: faster, and for long
            prompts; the output of each layer is compared with the model's own attention on a
            sample of queries. `auto` is eager while the scores of one layer fit in 32 MiB
            (`lens_rope.streaming.MAX_EAGER_BYTES`), and fused beyond that where the host can.
        progress: Called as `progress(done, total)` after each layer of each prompt.

    Returns:
        Queries and keys of every prompt and layer on the CPU, in float32.

    Raises:
        InputError: A layer, mask or argument is out of range, the model is of another class, its
            attention cannot be fused where that was asked for, or `ablate_frequencies` is changing
            one of these layers.
        PromptError: A prompt is empty, longer than the model can run, or does not fit in memory
            beside what is kept of those before it. One that is longer than the trained context is
            read, and `RotaryCapture.notes` says so.
        UnsupportedModelError: The model has no RoPE, or cannot be read by any route.
        VerificationError: What was read does not reproduce the model's scores.
    """
    stream = LayerStream(model, layers, context=context, attention=attention, keeps_layers=True)
    rows = token_rows(model, prompts, attention_mask=attention_mask, prepend_bos=prepend_bos)
    named = [
        stream.prompt(name, row, max_tokens)
        for name, row in zip(_names(names, len(rows)), rows, strict=True)
    ]
    stream.refuse_unfit_together(named)
    records: list[tuple[LayerCapture, ...]] = []
    for prompt in named:
        captured: list[LayerCapture] = []

        def keep(record: LayerCapture, captured: list[LayerCapture] = captured) -> None:
            captured.append(record)
            if progress is not None:
                done = len(records) * len(stream.layers) + len(captured)
                progress(done, len(named) * len(stream.layers))

        stream.run(prompt, keep)
        records.append(tuple(captured))
    stream.refuse_unrotated(record.rope for record in records[0])
    info = stream.info(records[0][0])
    return RotaryCapture(info, tuple(named), stream.layers, tuple(records))


def read_rope(
    model: Any, layers: Sequence[int] | None = None, *, context: int | None = None
) -> RopeSpec:
    """The rotation of each layer, read from a short forward pass and verified there.

    Scalings that depend on the prompt's length (longrope, dynamic) are those of a short prompt;
    `capture(...).rope()` has those of a given one.

    Args:
        model: A `HookedTransformer` or `TransformerBridge`.
        layers: Layers to read; None reads all.
        context: Trained context in tokens, where the host does not know it, as for `capture`.

    Returns:
        One `LayerRope` per layer, in order.

    Raises:
        InputError: A layer is out of range, or the model is of another class.
        UnsupportedModelError: The model has no RoPE, or cannot be read by any route.
        VerificationError: What was read does not reproduce the model's scores.
    """
    n_tokens = min(64, host_of(model).trained_context, int(model.cfg.d_vocab))
    token_ids = torch.arange(n_tokens)
    mask = torch.ones_like(token_ids)
    return capture(model, token_ids, layers, attention_mask=mask, context=context).rope()


def model_shape(model: Any) -> ModelInfo:
    """Name, shape and versions of a model, without running it.

    Raises:
        InputError: It is neither a `HookedTransformer` nor a `TransformerBridge`.
        UnsupportedModelError: The model has no RoPE.
    """
    return host_of(model).info


def token_rows(
    model: Any,
    prompts: str | Sequence[str] | Int[torch.Tensor, "batch pos"],
    *,
    attention_mask: Int[torch.Tensor, "batch pos"] | None = None,
    prepend_bos: bool | None = None,
) -> list[list[int]]:
    """Token ids of each prompt, without padding; arguments as those of `capture`.

    Raises:
        InputError: Token ids or mask have the wrong shape or values, or look padded without a mask.
        PromptError: A prompt is empty.
    """
    if not isinstance(prompts, torch.Tensor):
        if attention_mask is not None:
            raise InputError("attention_mask goes with token ids; texts are never padded")
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts:
            raise PromptError("there is no prompt; give at least one text")
        if not all(isinstance(text, str) for text in texts):
            raise InputError("prompts must be texts or one tensor of token ids")
        return [tokenize(model, text, prepend_bos=prepend_bos) for text in texts]
    if prepend_bos is not None:
        raise InputError("prepend_bos goes with texts; token ids are taken as they are")
    if prompts.is_floating_point() or prompts.ndim not in (1, 2) or prompts.numel() == 0:
        raise InputError(
            f"token ids must be a non-empty integer tensor [pos] or [batch, pos], "
            f"not {prompts.dtype} {tuple(prompts.shape)}"
        )
    ids = prompts.reshape(-1, prompts.shape[-1]).cpu()
    d_vocab = int(model.cfg.d_vocab)
    if int(ids.min()) < 0 or int(ids.max()) >= d_vocab:
        raise InputError(f"token ids must lie between 0 and {d_vocab - 1}, the model's vocabulary")
    if attention_mask is None:
        _refuse_hidden_padding(ids, pad_token_id(model))
        return ids.tolist()
    mask = attention_mask.reshape(-1, attention_mask.shape[-1]).cpu().bool()
    if mask.shape != ids.shape:
        raise InputError(
            f"attention_mask {tuple(mask.shape)} does not match token ids {tuple(ids.shape)}"
        )
    kept = [row[keep] for row, keep in zip(ids, mask, strict=True)]
    for i, (row, keep) in enumerate(zip(kept, mask, strict=True)):
        seen = keep.nonzero().flatten()
        if len(row) == 0:
            raise PromptError(f"row {i} of the token ids is all padding; leave it out")
        if int(seen[-1] - seen[0]) + 1 != len(row):
            raise InputError(f"attention_mask has a gap in row {i}; padding must be at the ends")
    return [row.tolist() for row in kept]


def _names(names: Sequence[str] | None, count: int) -> Sequence[str]:
    if names is None:
        return [f"prompt {i}" for i in range(count)]
    if len(names) != count:
        raise InputError(f"{len(names)} names for {count} prompts; give one each")
    return names


def _refuse_hidden_padding(ids: torch.Tensor, pad: int | None) -> None:
    """Without a mask, rows of a batch that look padded cannot be told from rows that are not."""
    if pad is None or len(ids) == 1:
        return
    is_pad = ids == pad
    # One leading padding token can be a BOS.
    if bool((is_pad[:, -1] | (is_pad[:, :2].all(dim=1))).any()):
        raise InputError(
            f"some rows begin or end with the padding token {pad}; pass attention_mask (all ones "
            "if these tokens are part of the text)"
        )
