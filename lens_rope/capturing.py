"""From a model and prompts to a verified capture.

Each prompt runs on its own, unpadded and uncached: a row of a padded batch gives the same numbers
as its own run, and padding enters no statistic because it never enters the model. Each layer is
fitted, verified and moved to the CPU as its hooks fire; the first layer that fails ends the
capture with nothing returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lens_rope.errors import InputError, PromptError, UnsupportedModelError
from lens_rope.fit import MIN_TOKENS, fit_rope, rotated
from lens_rope.hosts import Host, LayerReading, host_of
from lens_rope.hosts.editing import layers_changed_after_rotation
from lens_rope.records import LayerCapture, ModelInfo, Prompt, RotaryCapture
from lens_rope.spec import LayerRope, RopeSpec, ranges
from lens_rope.text import pad_token_id, starts_with_bos, token_texts, tokenize
from lens_rope.verify import TOLERANCE, check_finite, verify

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
        progress: Called as `progress(done, total)` after each layer of each prompt.

    Returns:
        Queries and keys of every prompt and layer on the CPU, in float32.

    Raises:
        InputError: A layer, mask or argument is out of range, the model is of another class, or
            `ablate_frequencies` is changing one of these layers.
        PromptError: A prompt is empty, or longer than the model's context.
        UnsupportedModelError: The model has no RoPE, or cannot be read by any route.
        VerificationError: What was read does not reproduce the model's scores.
    """
    host = host_of(model)
    layers = checked_layers(host, layers)
    if context is not None and context < 1:
        raise InputError(f"context is {context}; it must be at least 1 token")
    rows = token_rows(model, prompts, attention_mask=attention_mask, prepend_bos=prepend_bos)
    changed = sorted(layers_changed_after_rotation(model) & set(layers))
    if changed:
        raise InputError(
            f"layers {ranges(changed)} are inside ablate_frequencies, which changes queries or "
            "keys after their rotation, so what is read there could not be verified; leave these "
            "layers out, or capture outside of it (ablation_report compares inside and outside)"
        )
    records, done = [], 0
    named = _named(model, host, rows, names, max_tokens)
    for prompt in named:
        captured: list[LayerCapture] = []
        ropes = _short_prompt_ropes(host, prompt, layers)

        def visit(reading: LayerReading, captured: list = captured, ropes: dict = ropes) -> None:
            nonlocal done
            check_finite(reading, host.info.name)
            rope = ropes.get(reading.layer) or fit_rope(reading)
            if context is not None:
                rope = dataclasses.replace(rope, trained_context=context)
            captured.append(_layer_capture(reading, rope, host.info.name))
            done += 1
            if progress is not None:
                progress(done, len(named) * len(layers))

        host.read(prompt.token_ids, layers, visit)
        records.append(tuple(captured))
    if not any(record.rope.n_pairs for record in records[0]) and layers == host.attention_layers:
        raise UnsupportedModelError(f"no layer of {host.info.name} rotates its queries and keys")
    # Configurations count the components and heads of some architectures in other ways.
    first = records[0][0]
    info = dataclasses.replace(host.info, d_head=first.rope.d_head, n_kv_heads=first.n_kv_heads)
    return RotaryCapture(info, tuple(named), layers, tuple(records))


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


def checked_layers(host: Host, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The layers to read, ascending and without repeats.

    Raises:
        InputError: One of them does not exist or has no attention.
    """
    if layers is None:
        return host.attention_layers
    wanted = tuple(sorted(set(layers)))
    unknown = [layer for layer in wanted if layer not in host.attention_layers]
    if unknown or not wanted:
        raise InputError(
            f"layers {list(unknown or wanted)} cannot be read; {host.info.name} has attention in "
            f"{len(host.attention_layers)} layers, numbered {host.attention_layers[0]} to "
            f"{host.attention_layers[-1]}; choose among them"
        )
    return wanted


def _layer_capture(reading: LayerReading, rope: LayerRope, model_name: str) -> LayerCapture:
    if reading.q.dtype not in TOLERANCE:
        raise InputError(
            f"the model computes in {reading.q.dtype}; load it in float32, bfloat16 or float16"
        )
    q, k = rotated(reading, rope)
    check = verify(q, k, rope, reading, model_name)
    sinks = reading.sinks
    return LayerCapture(
        rope=rope,
        q=q.float().cpu().contiguous(),
        k=k.float().cpu().contiguous(),
        scale=reading.scale,
        softcap=reading.softcap,
        # A copy: on the CPU this is the model's own parameter.
        sinks=None if sinks is None else sinks.to("cpu", torch.float32, copy=True),
        check=check,
    )


def _short_prompt_ropes(
    host: Host, prompt: Prompt, layers: tuple[int, ...]
) -> dict[int, LayerRope]:
    """Rotations for a prompt that is too short to tell them, from its tokens repeated."""
    ropes: dict[int, LayerRope] = {}

    def visit(reading: LayerReading) -> None:
        check_finite(reading, host.info.name)
        rope = ropes[reading.layer] = fit_rope(reading)
        # One token is not rotated at all, so the prompt itself would not tell a wrong rotation.
        verify(*rotated(reading, rope), rope, reading, host.info.name)

    if len(prompt) < MIN_TOKENS:
        token_ids = (prompt.token_ids * MIN_TOKENS)[:MIN_TOKENS]
        host.read(token_ids, layers, visit)
    return ropes


def _named(
    model: Any,
    host: Host,
    rows: list[list[int]],
    names: Sequence[str] | None,
    max_tokens: int | None,
) -> list[Prompt]:
    """Prompts with their token texts, cut where asked and checked against the context."""
    if max_tokens is not None and max_tokens < 1:
        raise InputError(f"max_tokens is {max_tokens}; it must be at least 1")
    if names is None:
        names = [f"prompt {i}" for i in range(len(rows))]
    elif len(names) != len(rows):
        raise InputError(f"{len(names)} names for {len(rows)} prompts; give one each")
    prompts = []
    for name, row in zip(names, rows, strict=True):
        token_ids = row[:max_tokens]
        if len(token_ids) > host.max_tokens:
            raise PromptError(
                f"{name} has {len(token_ids)} tokens and the context of {host.info.name} is "
                f"{host.max_tokens}; shorten it or cut it to a maximum of tokens"
            )
        prompts.append(
            Prompt(
                name=name,
                token_ids=tuple(token_ids),
                tokens=token_texts(model, token_ids),
                starts_with_bos=starts_with_bos(model, token_ids),
                cut_from=len(row) if len(row) > len(token_ids) else None,
            )
        )
    return prompts


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
