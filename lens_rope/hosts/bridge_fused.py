"""A pass on the `TransformerBridge` in which no layer forms all its scores at once.

The bridge computes attention anew, score by score, so that each can be hooked. In a fused pass the
attention modules of the Hugging Face model run instead, with an attention function of ours, which
is handed the rotated queries and keys that the model goes on with, and no mask of all queries and
keys is built. What is checked of each layer that is read:

- The mask. The model's own mask function is asked for a sample of queries and all keys.
- Scale, soft-cap, sinks and output. The model's own eager attention function is run on the same
  sample. `LayerReading.pattern` is what it returns and `output_error` how far the fused output is
  from its own; it shows no scores, so ours are compared with the logarithm of that pattern.
- The rotation. The module is given the layer's input once more with cosines 1 and sines 0, which
  shows queries and keys as they are before they are rotated, whatever projects and normalises them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_rope.errors import UnsupportedModelError
from lens_rope.hosts.blocked import SampledAttention, blocked_attention, sampled_attention

_NAME = "lens_rope_fused"


class NotFusedError(UnsupportedModelError):
    """Attention of a layer cannot be fused.

    Attributes:
        why: What stands in the way.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"attention cannot be fused: {why}; read the model with eager attention")
        self.why = why


@dataclass(frozen=True, eq=False)
class FusedLayer:
    """What one layer of a fused pass shows, see `LayerReading` for the fields.

    Attributes:
        layer: Index of the layer.
        q: `[pos, head, d_head]` Rotated queries.
        k: `[pos, kv_head, d_head]` Rotated keys.
        before: `[pos, head + kv_head, d_head]` Queries and keys before the rotation.
        cos: Cosines as the layer was given them, in whatever shape.
        sin: Sines, likewise.
        scale: What query-key products are multiplied by.
        softcap: Soft-cap of the scores, or None.
        sinks: `[head]` Learned sink logits, or None.
        sampled: A sample of queries in the model's own eager attention.
    """

    layer: int
    q: Float[Tensor, "pos head d_head"]
    k: Float[Tensor, "pos kv_head d_head"]
    before: Float[Tensor, "pos n d_head"]
    cos: Tensor
    sin: Tensor
    scale: float
    softcap: float | None
    sinks: Float[Tensor, " head"] | None
    sampled: SampledAttention


@contextmanager
def fused_attention(
    attentions: Mapping[int, Any],
    windows: Mapping[int, int | None],
    visits: Mapping[int, Callable[[FusedLayer], None]],
    configs: list[Any],
) -> Iterator[None]:
    """Inside, these layers run as the Hugging Face model's and never form all their scores.

    Args:
        attentions: The bridge's attention component of each layer that has attention.
        windows: Sliding window of each of these layers in tokens, or None.
        visits: Called with what a layer shows, during its forward pass, for the layers to read.
        configs: Every Hugging Face configuration that the model reads, the outermost first.

    Raises:
        NotFusedError: In the forward pass, where a layer does not allow it or shows too little.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    before = [(config, config._attn_implementation) for config in configs]
    try:
        for config in configs:
            config._attn_implementation = _NAME
        for layer, attn in attentions.items():
            run = _Layer(layer, attn.original_component, windows[layer], visits.get(layer))
            # On the object, past `__setattr__`, which hands attributes on to the module it wraps.
            attn.__dict__["forward"] = run.forward
        yield
    finally:
        for attn in attentions.values():
            attn.__dict__.pop("forward", None)
        # The outermost first: setting it sets those inside as well.
        for config, implementation in before:
            config._attn_implementation = implementation


_calling: ContextVar[Callable[..., Tensor] | None] = ContextVar("lens_rope_fused", default=None)
"""Takes what the attention module that runs at present hands to its attention function."""


def _attention(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The attention function: `[batch, head, pos, d_head]` in, heads last out."""
    take = _calling.get()
    if take is None:
        raise NotFusedError(f"nobody asked a {type(module).__name__} for it")
    return take(*args, **kwargs), None


class _Mask:
    """What the model asks a mask of: rows of it can be formed when they are needed."""

    def __init__(self, **asked: Any) -> None:
        self._asked = asked

    def rows(self, rows: range, dtype: torch.dtype) -> Float[Tensor, "1 1 row k_pos"]:
        """Zero where a query sees a key, and the smallest number elsewhere."""
        from transformers.masking_utils import eager_mask

        offset = self._asked["q_offset"] + rows.start
        asked = {**self._asked, "q_length": len(rows), "q_offset": offset, "dtype": dtype}
        return eager_mask(**asked)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """In place of a mask, an array of its shape that takes no memory and knows how to form it."""
    placeholder = torch.zeros((), dtype=torch.bool, device=device)
    placeholder = placeholder.expand(batch_size, 1, q_length, kv_length)
    placeholder.lens_rope_mask = _Mask(  # type: ignore[attr-defined]
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        device=device,
        **kwargs,
    )
    return placeholder


class _QueriesAndKeysSeen(Exception):
    """Ends the call of an attention module that was only asked for its queries and keys."""


class _Layer:
    """One layer's attention module in a fused pass."""

    def __init__(
        self,
        layer: int,
        module: Any,
        window: int | None,
        visit: Callable[[FusedLayer], None] | None,
    ) -> None:
        self._layer = layer
        self._module = module
        self._window = window
        self._visit = visit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of the bridge's own."""
        seen = None
        if self._visit is not None:
            tables = self._tables(kwargs)
            seen = (*tables, self._before_rotation(tables, args, kwargs))
        calls: list[None] = []

        def take(*given: Any, **more: Any) -> Tensor:
            calls.append(None)
            return self._attend(seen, *given, **more)

        output = self._call(take, args, kwargs)
        if len(calls) != 1:
            raise self._refusal("its attention function cannot be replaced")
        return output

    def _refusal(self, why: str) -> NotFusedError:
        kind = type(self._module).__name__
        return NotFusedError(f"layer {self._layer} ({kind}): {why}")

    def _call(self, take: Callable[..., Tensor], args: Any, kwargs: dict[str, Any]) -> Any:
        token = _calling.set(take)
        try:
            return self._module(*args, **kwargs)
        finally:
            _calling.reset(token)

    def _tables(self, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The very cosines and sines that the attention module is given, in this order."""
        given: Any = kwargs.get("position_embeddings")
        is_pair = isinstance(given, tuple) and len(given) == 2
        if not is_pair or not all(isinstance(x, Tensor) and not x.is_complex() for x in given):
            raise self._refusal("it is not given cosines and sines")
        # Some models hand over sines first; at position 0 they are nothing but zeros.
        first = given[0].reshape(-1, *given[0].shape[-2:])[0, 0]
        return (given[0], given[1]) if bool((first != 0).any()) else (given[1], given[0])

    def _before_rotation(
        self, tables: tuple[Tensor, Tensor], args: Any, kwargs: dict[str, Any]
    ) -> Float[Tensor, "pos n d_head"]:
        """Queries and keys of the same input at angle zero."""
        seen: list[Tensor] = []

        def take(query: Tensor, key: Tensor, *given: Any, **more: Any) -> Tensor:
            seen.append(_heads_side_by_side(query, key))
            raise _QueriesAndKeysSeen

        unturned = {id(tables[0]): torch.ones_like, id(tables[1]): torch.zeros_like}
        given = tuple(unturned[id(table)](table) for table in kwargs["position_embeddings"])
        try:
            self._call(take, args, {**kwargs, "position_embeddings": given})
        except _QueriesAndKeysSeen:
            return seen[0]
        raise self._refusal("its attention function cannot be replaced")

    def _attend(
        self,
        seen: tuple[Tensor, Tensor, Tensor] | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> Float[Tensor, "1 pos head d_v"]:
        """What the attention function returns; shows the layer if it is to be read."""
        scaling, softcap, sinks = (kwargs.get(key) for key in ("scaling", "softcap", "s_aux"))
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        output = blocked_attention(
            query,
            key,
            value,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            window=self._window,
        ).transpose(1, 2)
        if seen is None or self._visit is None:
            return output
        cos, sin, before = seen
        self._visit(
            FusedLayer(
                layer=self._layer,
                q=query[0].transpose(0, 1),
                k=key[0].transpose(0, 1),
                before=before,
                cos=cos,
                sin=sin,
                scale=scale,
                softcap=None if softcap is None else float(softcap),
                sinks=None if sinks is None else sinks.detach(),
                sampled=self._sampled(output, query, key, value, attention_mask, kwargs),
            )
        )
        return output

    def _sampled(
        self,
        output: Float[Tensor, "1 pos head d_v"],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> SampledAttention:
        """A sample of queries by the model's own mask and eager attention."""
        mask = getattr(attention_mask, "lens_rope_mask", None)
        if mask is None:
            raise self._refusal("its mask is not one that the model asks transformers for")
        eager = getattr(sys.modules[type(self._module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise self._refusal("its modelling code has no eager attention to compare with")

        def own(rows: range) -> tuple[None, Tensor, Tensor]:
            visible = self._visible(rows, query.shape[2], query.device)
            # In float32: scores that are rounded to half precision differ by more than a kernel
            # that adds up in float32 does.
            hidden = mask.rows(rows, torch.float32)
            if not torch.equal(hidden[0, 0] == 0, visible):
                raise self._refusal(f"it hides other keys than window {self._window} does")
            q = query[:, :, rows.start : rows.stop].float()
            k, v = (x[:, :, : rows.stop].float() for x in (key, value))
            theirs, pattern = eager(self._module, q, k, v, hidden[..., : rows.stop], **kwargs)
            return None, pattern[0], theirs[0]

        return sampled_attention(output[0], own, 4)

    def _visible(self, rows: range, n_pos: int, device: Any) -> Bool[Tensor, "row k_pos"]:
        """Which keys these queries see, by window alone."""
        queries = torch.arange(rows.start, rows.stop, device=device)[:, None]
        distance = queries - torch.arange(n_pos, device=device)
        seen = distance >= 0
        return seen if self._window is None else seen & (distance < self._window)


def _heads_side_by_side(
    query: Float[Tensor, "1 head pos d_head"], key: Float[Tensor, "1 kv_head pos d_head"]
) -> Float[Tensor, "pos n d_head"]:
    return torch.cat([query[0], key[0]]).transpose(0, 1)
