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
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_rope.errors import UnsupportedModelError
from lens_rope.hosts.blocked import SampledAttention, blocked_attention, sampled_attention
from lens_rope.hosts.state import modules_of
from lens_rope.scores import sees

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


Beside = Callable[[int, Callable[[], Any]], Callable[[Any], None]]
"""Looks at a layer's own attention beside the fused one.

Called with the layer and with what runs the bridge's own attention on the input at hand, before
the fused one runs; what it returns is called with what the fused one returned."""


@contextmanager
def fused_attention(
    attentions: Mapping[int, Any],
    windows: Mapping[int, int | None],
    visits: Mapping[int, Callable[[FusedLayer], None]],
    configs: list[Any],
    beside: Beside | None = None,
) -> Iterator[None]:
    """Inside, these layers run as the Hugging Face model's and never form all their scores.

    Args:
        attentions: The bridge's attention component of each layer that has attention.
        windows: Sliding window of each of these layers in tokens, or None.
        visits: Called with what a layer shows, during its forward pass, for the layers to read.
        configs: Every Hugging Face configuration that the model reads, the outermost first.
        beside: Looks at each layer's own attention as well.

    Raises:
        NotFusedError: In the forward pass, where a layer does not allow it or shows too little.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    own = [(config, config._attn_implementation) for config in configs]
    # One that somebody put in place of the class's is put back.
    forwards = {layer: vars(attn).get("forward") for layer, attn in attentions.items()}

    def bridges_own(
        forward: Callable[..., Any], layer: _Layer, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        with _implementations(own):
            return forward(*args, **{**kwargs, "attention_mask": layer.whole_mask(kwargs)})

    try:
        with _implementations([(config, _NAME) for config in configs]):
            for layer, attn in attentions.items():
                run = _Layer(layer, attn.original_component, windows[layer], visits.get(layer))
                if beside is not None:
                    run.beside = partial(beside, layer), partial(bridges_own, attn.forward, run)
                # On the object, past `__setattr__`, which hands attributes on to the module it
                # wraps.
                attn.__dict__["forward"] = run.forward
            yield
    finally:
        for layer, attn in attentions.items():
            attn.__dict__.pop("forward", None)
            if forwards[layer] is not None:
                attn.__dict__["forward"] = forwards[layer]


@contextmanager
def _implementations(names: list[tuple[Any, str]]) -> Iterator[None]:
    """Attention implementations of configurations, the outermost first."""
    before = [(config, config._attn_implementation) for config, _ in names]
    try:
        # In this order: setting it sets those inside as well.
        for config, name in names:
            config._attn_implementation = name
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


_calling: ContextVar[tuple[Any, Callable[..., Tensor]] | None] = ContextVar(
    "lens_rope_fused", default=None
)
"""The attention module that runs at present, and what takes all it hands to its attention
function."""


def _attention(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The attention function: `[batch, head, pos, d_head]` in, heads last out."""
    calling = _calling.get()
    if calling is None or calling[0] is not module:
        raise NotFusedError(f"nobody asked a {type(module).__name__} for it")
    return calling[1](*args, **kwargs), None


class _Mask:
    """What the model asks a mask of: rows of it can be formed when they are needed."""

    def __init__(self, **asked: Any) -> None:
        self._asked = asked

    def whole(self) -> Float[Tensor, "1 1 q_pos k_pos"]:
        """Zero where a query sees a key, and the smallest number elsewhere."""
        from transformers.masking_utils import eager_mask

        return eager_mask(**self._asked)

    def rows(self, rows: range, dtype: torch.dtype) -> Float[Tensor, "1 1 row k_pos"]:
        """The same of these queries alone, in another precision."""
        offset = self._asked["q_offset"] + rows.start
        asked = {**self._asked, "q_length": len(rows), "q_offset": offset, "dtype": dtype}
        return _Mask(**asked).whole()


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
        self.beside: tuple[Callable[..., Callable[[Any], None]], Callable[..., Any]] | None = None

    def whole_mask(self, kwargs: dict[str, Any]) -> Float[Tensor, "1 1 q_pos k_pos"]:
        """The mask that the model's own attention is given."""
        return self._mask(kwargs.get("attention_mask")).whole()

    def _mask(self, attention_mask: Any) -> _Mask:
        mask = getattr(attention_mask, "lens_rope_mask", None)
        if mask is None:
            raise self._refusal("its mask is not one that the model asks transformers for")
        return mask

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of the bridge's own."""
        compare = None
        if self.beside is not None:
            beside, own = self.beside
            compare = beside(lambda: own(args, kwargs))
        calls: list[None] = []
        with projected_once(self._module if self._visit is not None else None):
            seen = None
            if self._visit is not None:
                tables = self._tables(kwargs)
                seen = (*tables, self._before_rotation(tables, args, kwargs))

            def take(*given: Any, **more: Any) -> Tensor:
                calls.append(None)
                return self._attend(seen, *given, **more)

            output = self._call(take, args, kwargs)
        if len(calls) != 1:
            raise self._refusal("its attention function cannot be replaced")
        if compare is not None:
            compare(output)
        return output

    def _refusal(self, why: str) -> NotFusedError:
        kind = type(self._module).__name__
        return NotFusedError(f"layer {self._layer} ({kind}): {why}")

    def _call(self, take: Callable[..., Tensor], args: Any, kwargs: dict[str, Any]) -> Any:
        token = _calling.set((self._module, take))
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
        mask = self._mask(attention_mask)
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
                sampled=self._sampled(output, query, key, value, mask, kwargs),
            )
        )
        return output

    def _sampled(
        self,
        output: Float[Tensor, "1 pos head d_v"],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: _Mask,
        kwargs: dict[str, Any],
    ) -> SampledAttention:
        """A sample of queries by the model's own mask and eager attention."""
        eager = getattr(sys.modules[type(self._module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise self._refusal("its modelling code has no eager attention to compare with")

        def own(rows: range) -> tuple[None, Tensor, Tensor]:
            positions = torch.arange(query.shape[2], device=query.device)
            visible = sees(positions[rows.start : rows.stop], positions, self._window)
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


@contextmanager
def projected_once(module: torch.nn.Module | None) -> Iterator[None]:
    """Inside, linear maps of the module that are given the same once more do not compute anew.

    Args:
        module: In evaluation mode; None is no module.
    """
    linear = [] if module is None else modules_of(module)
    linear = [part for part in linear if type(part) is torch.nn.Linear]
    own = [vars(part).get("forward") for part in linear]
    try:
        for part in linear:
            part.__dict__["forward"] = _Remembered(part.forward)
        yield
    finally:
        for part, forward in zip(linear, own, strict=True):
            part.__dict__.pop("forward", None)
            if forward is not None:
                part.__dict__["forward"] = forward


class _Remembered:
    """A function that gives what it gave before where its argument is the very same tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function
        self._last: tuple[Tensor, int, Tensor, int] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_inference():  # and does not tell whether it was changed
            return self._function(x)
        if self._last is not None:
            given, version, output, output_version = self._last
            is_same = given is x and x._version == version
            if is_same and output._version == output_version:
                return output
        output = self._function(x)
        self._last = (x, x._version, output, output._version)
        return output


def _heads_side_by_side(
    query: Float[Tensor, "1 head pos d_head"], key: Float[Tensor, "1 kv_head pos d_head"]
) -> Float[Tensor, "pos n d_head"]:
    return torch.cat([query[0], key[0]]).transpose(0, 1)
