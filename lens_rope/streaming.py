"""One prompt through the model, layer by layer, each verified as its hooks fire.

A prompt runs on its own, unpadded and uncached: a row of a padded batch gives the same numbers as
its own run, and padding enters no statistic because it never enters the model. Each layer is
fitted, verified, moved to the CPU and handed over before the next layer runs; the first layer that
fails ends the run. Whoever takes the layers decides what to keep: `capture` keeps them all, a
report reduces them to numbers and lets them go.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from lens_rope.errors import InputError, PromptError, UnsupportedModelError
from lens_rope.fit import MIN_TOKENS, fit_rope, rotated
from lens_rope.hosts import Attention, Host, LayerReading, host_of
from lens_rope.hosts.editing import layers_changed_after_rotation
from lens_rope.memory import MemoryShape, check_fits, has_room, kept_bytes, pass_bytes
from lens_rope.records import LayerCapture, ModelInfo, Prompt
from lens_rope.spec import LayerRope, ranges
from lens_rope.text import starts_with_bos, token_texts
from lens_rope.verify import TOLERANCE, check_finite, verify

if TYPE_CHECKING:
    from jaxtyping import Float

Visit = Callable[[LayerCapture], None]
"""Called with each layer, in order."""

AttentionChoice = Literal["auto", "eager", "fused"]
"""How the model computes attention while it is read: `eager` as it always does, forming all scores
of a layer at once; `fused` by `scaled_dot_product_attention`, where a sample of the queries is
compared with the model's own attention; `auto` eager up to `MAX_EAGER_BYTES`, and beyond that
fused where the host can."""

MAX_EAGER_BYTES = 2**25
"""Bytes of one layer's scores, `n_heads * n_tokens**2` times the bytes of one, up to which `auto`
lets the model form them, and every score is compared. Attention holds a few arrays of that size at
a time, and where they are larger it takes longer than a fused pass. See `attention_for` for passes
to the logits."""


class LayerStream:
    """A model opened for reading.

    Attributes:
        host: The model's host.
        layers: The layers that are read, ascending.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[int] | None = None,
        *,
        context: int | None = None,
        attention: AttentionChoice = "auto",
        keeps_layers: bool = False,
    ) -> None:
        """Checks what can be told without running the model.

        Args:
            model: A `HookedTransformer` or `TransformerBridge`. It is left as it was.
            layers: Layers to read; None reads all.
            context: Trained context in tokens, in place of the model's own.
            attention: How the model computes attention while it is read.
            keeps_layers: Whether the caller keeps the queries and keys of every layer, rather than
                of one at a time.

        Raises:
            InputError: A layer or the context is out of range, the model is of another class, its
                attention cannot be fused where that was asked for, or `ablate_frequencies` is
                changing one of these layers.
            UnsupportedModelError: The model has no RoPE.
        """
        self.host = host_of(model)
        self.layers = checked_layers(self.host, layers)
        self._model, self._context, self._attention = model, context, attention
        self._kept_layers = len(self.layers) if keeps_layers else 1
        if attention not in get_args(AttentionChoice):
            raise InputError(f"attention is {attention!r}; it must be auto, eager or fused")
        if context is not None and context < 1:
            raise InputError(f"context is {context}; it must be at least 1 token")
        changed = sorted(layers_changed_after_rotation(model) & set(self.layers))
        if changed:
            raise InputError(
                f"layers {ranges(changed)} are inside ablate_frequencies, which changes queries or "
                "keys after their rotation, so what is read there could not be verified; leave "
                "these layers out, or capture outside of it (ablation_report compares inside and "
                "outside)"
            )
        if attention == "fused":
            self._refuse_unfused(self._run_layers("fused"))

    def attention_for(self, n_tokens: int, *, logits: bool = False, before: int = 0) -> Attention:
        """How attention is computed for a prompt of this length.

        A pass to the logits is compared with others of the same prompt, which form their scores, so
        `auto` lets it form them as well where they fit in memory.

        Args:
            n_tokens: Its number of tokens.
            logits: Whether the model runs to its end.
            before: Bytes that will be kept of prompts that are read before this one.
        """
        if self._attention == "eager" or self._attention == "fused":
            return self._attention
        info = self.host.info
        scores = info.n_heads * n_tokens**2 * getattr(torch, info.dtype).itemsize
        is_large = scores > MAX_EAGER_BYTES and not logits
        if not is_large:
            eager = self._memory_shape("eager", logits=logits)
            fused = dataclasses.replace(eager, attention="fused")
            # Few queries are all in the sample, and then a fused pass forms more than an eager one.
            is_large = pass_bytes(fused, n_tokens) < pass_bytes(eager, n_tokens) and not has_room(
                eager, n_tokens, device=self._device, before=before
            )
        if not is_large:
            return "eager"
        layers = self._run_layers("fused", logits=logits)
        return "fused" if self.host.fused_refusal(layers) is None else "eager"

    def prompt(self, name: str, token_ids: Sequence[int], max_tokens: int | None = None) -> Prompt:
        """A prompt with its token texts, cut where asked.

        Args:
            name: How it is called.
            token_ids: Its tokens, without padding.
            max_tokens: Cut it to this many tokens where it is longer.

        Raises:
            InputError: `max_tokens` is below 1.
            PromptError: It is longer than what the model can run.
        """
        if max_tokens is not None and max_tokens < 1:
            raise InputError(f"max_tokens is {max_tokens}; it must be at least 1")
        kept = list(token_ids[:max_tokens])
        refuse_long(self.host, name, len(kept))
        return Prompt(
            name=name,
            token_ids=tuple(kept),
            tokens=token_texts(self._model, kept),
            starts_with_bos=starts_with_bos(self._model, kept),
            cut_from=len(token_ids) if len(token_ids) > len(kept) else None,
        )

    def refuse_unfit(
        self, name: str, n_tokens: int, *, logits: bool = False, before: int = 0
    ) -> None:
        """Refuses a prompt that does not fit in memory, before it is run.

        Args:
            name: How the prompt is called.
            n_tokens: Its number of tokens, after it was cut.
            logits: Whether the model is to run to its end.
            before: Bytes that will be kept of prompts that are read before this one.

        Raises:
            PromptError: It takes more than there is; the error has both and the longest that fits.
        """
        shape = self._memory_shape(
            self.attention_for(n_tokens, logits=logits, before=before), logits=logits
        )
        check_fits(shape, n_tokens, name=name, device=self._device, before=before)

    def refuse_unfit_together(self, prompts: Iterable[Prompt]) -> None:
        """Refuses prompts that do not fit in memory one after another, what is kept of each added.

        Args:
            prompts: What `prompt` made, in the order in which they will be read.

        Raises:
            PromptError: As `refuse_unfit`, for the first that does not fit.
        """
        before = 0
        for prompt in prompts:
            self.refuse_unfit(prompt.name, len(prompt), before=before)
            before += kept_bytes(self._memory_shape("eager"), len(prompt))

    def fits(self, n_tokens: int, *, logits: bool = False) -> bool:
        """Whether `refuse_unfit` lets a prompt of this length pass; arguments as there."""
        try:
            self.refuse_unfit("the prompt", n_tokens, logits=logits)
        except PromptError:
            return False
        return True

    @property
    def _device(self) -> torch.device:
        return next(self.host.model.parameters()).device

    def _memory_shape(self, attention: Attention, *, logits: bool = False) -> MemoryShape:
        info, cfg = self.host.info, self.host.model.cfg
        return MemoryShape(
            n_layers=len(self.layers),
            n_heads=info.n_heads,
            n_kv_heads=info.n_kv_heads,
            d_head=info.d_head,
            d_model=int(cfg.d_model),
            d_mlp=int(getattr(cfg, "d_mlp", None) or 4 * cfg.d_model),
            d_vocab=int(cfg.d_vocab),
            itemsize=getattr(torch, info.dtype).itemsize,
            attention=attention,
            squares=self.host.score_arrays,
            kept_layers=self._kept_layers,
            logits=logits,
        )

    def run(self, prompt: Prompt, visit: Visit) -> None:
        """Runs one prompt as far as the last layer that is read; the model is left as it was.

        Args:
            prompt: What `prompt` made.
            visit: Called with each layer's queries and keys, on the CPU in float32.

        Raises:
            PromptError: It does not fit in memory.
            UnsupportedModelError: A layer cannot be read by any route.
            VerificationError: What was read does not reproduce the model's scores.
        """
        attention = self.attention_for(len(prompt))
        self.refuse_unfit(prompt.name, len(prompt))
        layers = self._run_layers(attention)
        take = self._verified(prompt, layers, visit)
        self.host.read(prompt.token_ids, layers, take, attention)

    def run_to_logits(self, prompt: Prompt, visit: Visit) -> Float[torch.Tensor, "pos vocab"]:
        """As `run`, and on to the model's end.

        Returns:
            `[pos, vocab]` Logits in float32, on the model's device.

        Raises:
            InputError: Attention was to be fused and cannot be in a later layer.
            PromptError: As `run`.
            UnsupportedModelError: As `run`.
            VerificationError: As `run`.
        """
        if self._attention == "fused":
            self._refuse_unfused(self._run_layers("fused", logits=True))
        attention = self.attention_for(len(prompt), logits=True)
        self.refuse_unfit(prompt.name, len(prompt), logits=True)
        layers = self._run_layers(attention, logits=True)
        take = self._verified(prompt, layers, visit)
        return self.host.read_logits(prompt.token_ids, layers, take, attention)

    def info(self, record: LayerCapture) -> ModelInfo:
        """Name and shape of the model.

        Args:
            record: A layer that was read; configurations count the components and heads of some
                architectures in other ways.
        """
        return dataclasses.replace(
            self.host.info, d_head=record.rope.d_head, n_kv_heads=record.n_kv_heads
        )

    def refuse_unrotated(self, ropes: Iterable[LayerRope]) -> None:
        """Refuses a model of which all layers were read and none rotates.

        Args:
            ropes: The rotation of each layer that was read.

        Raises:
            UnsupportedModelError: No layer of the model rotates.
        """
        if self.layers == self.host.attention_layers and not any(rope.n_pairs for rope in ropes):
            raise UnsupportedModelError(
                f"no layer of {self.host.info.name} rotates its queries and keys"
            )

    def _run_layers(self, attention: Attention, *, logits: bool = False) -> tuple[int, ...]:
        """The layers that are verified.

        In a fused pass all that run: the attention of each is not the host's own, and what comes
        after a layer rests on it.
        """
        if attention == "eager":
            return self.layers
        changed = layers_changed_after_rotation(self._model)
        return tuple(
            layer
            for layer in self.host.attention_layers
            if (logits or layer <= self.layers[-1]) and layer not in changed
        )

    def _refuse_unfused(self, layers: Sequence[int]) -> None:
        reason = self.host.fused_refusal(layers)
        if reason is not None:
            raise InputError(
                f"the attention of {self.host.info.name} cannot be fused: {reason}; choose "
                'attention="auto" or "eager", with fewer tokens where memory is short'
            )

    def _verified(
        self, prompt: Prompt, layers: tuple[int, ...], visit: Visit
    ) -> Callable[[LayerReading], None]:
        ropes = _short_prompt_ropes(self.host, prompt, layers)
        name = self.host.info.name

        def take(reading: LayerReading) -> None:
            check_finite(reading, name)
            rope = ropes.get(reading.layer) or fit_rope(reading)
            if self._context is not None:
                rope = dataclasses.replace(rope, trained_context=self._context)
            record = _layer_capture(reading, rope, name)
            if reading.layer in self.layers:
                visit(record)

        return take


def refuse_long(host: Host, name: str, n_tokens: int) -> None:
    """Refuses a prompt that the model cannot run at all.

    A prompt may be longer than the trained context, where angles are computed for any position.

    Args:
        host: The model's host.
        name: How the prompt is called.
        n_tokens: Its number of tokens, after it was cut.

    Raises:
        PromptError: It has more tokens than the model has angles for.
    """
    limit = host.longest_prompt
    if limit is not None and n_tokens > limit:
        raise PromptError(
            f"{name} has {n_tokens} tokens and {host.info.name} has angles for {limit} positions "
            "only; shorten it or cut it to a maximum of tokens"
        )


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
