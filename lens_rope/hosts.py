"""The two hosts, `HookedTransformer` and `TransformerBridge`, behind one small interface.

This is the only module that knows TransformerLens: the names of hook points, where a layer keeps
its scale, window, soft-cap and sinks, and by which route rotated queries and keys are obtained.
A host runs one unpadded prompt and hands over one `LayerReading` per layer, as that layer's hooks
fire; nothing of size query x key outlives its layer.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from lens_rope.errors import InputError, PromptError, UnsupportedModelError
from lens_rope.records import ModelInfo, Route

try:
    from transformer_lens import HookedTransformer
except ImportError:  # transformer-lens 4 has only the bridge
    HookedTransformer = None
from transformer_lens.model_bridge import TransformerBridge

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class LayerReading:
    """Everything one layer's forward pass shows about its rotary attention, on the model's device.

    Attributes:
        layer: Index of the layer.
        route: `hook_rot` when `q` and `k` are rotated, `hook_cos` when they still have to be.
        q: `[pos, head, d_head]` Queries.
        k: `[pos, kv_head, d_head]` Keys.
        rotary_start: First rotated component of `q` and `k`.
        sample: Vectors before and after the model's own rotation, each `[pos, n, d_head]`, or None
            where the host shows only one side.
        cos: `[pos, width]` Cosines times the attention factor, as the layer used them; None where
            the layer does not rotate.
        sin: `[pos, width]` Sines, likewise.
        inv_freq_candidates: Arrays the model's own modules hold, in rad/token. They are only used
            where they agree with `cos` and `sin`.
        scores: `[head, q_pos, k_pos]` What the host's `hook_attn_scores` says.
        pattern: `[head, q_pos, k_pos]` Attention after softmax.
        scale: What query-key products are multiplied by.
        softcap: Soft-cap of the scores, or None.
        sinks: `[head]` Learned sink logits, or None.
        window: Sliding window in tokens, or None.
        trained_context: Context of the model in tokens.
    """

    layer: int
    route: Route
    q: Tensor
    k: Tensor
    rotary_start: int
    sample: tuple[Tensor, Tensor] | None
    cos: Tensor | None
    sin: Tensor | None
    inv_freq_candidates: tuple[np.ndarray, ...]
    scores: Tensor
    pattern: Tensor
    scale: float
    softcap: float | None
    sinks: Tensor | None
    window: int | None
    trained_context: int


class Host(Protocol):
    """What a host model must offer."""

    model: Any

    @property
    def info(self) -> ModelInfo:
        """Name, shape and versions, without running the model."""
        ...

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that have attention."""
        ...

    @property
    def trained_context(self) -> int:
        """Context of the model in tokens."""
        ...

    def read(
        self, token_ids: Sequence[int], layers: Sequence[int], visit: Callable[[LayerReading], None]
    ) -> None:
        """Runs one prompt and visits each layer once, in order.

        Raises:
            UnsupportedModelError: A layer's hooks did not show what is needed.
        """
        ...


def host_of(model: Any) -> Host:
    """The host interface of a model.

    Args:
        model: A `HookedTransformer` or a `TransformerBridge`.

    Raises:
        InputError: It is neither.
        UnsupportedModelError: It has no rotary position embedding.
    """
    if HookedTransformer is not None and isinstance(model, HookedTransformer):
        return _Hooked(model)
    if isinstance(model, TransformerBridge):
        return _Bridge(model)
    raise InputError(
        f"cannot read a {type(model).__name__}; pass a HookedTransformer or a TransformerBridge, "
        "for example from lens_rope.load_model"
    )


def tokenize(model: Any, text: str, *, prepend_bos: bool | None = None) -> list[int]:
    """Token ids of a text as the model would see it, never truncated.

    Args:
        model: The host model.
        text: The prompt.
        prepend_bos: Whether to start with BOS; None keeps the model's own default.

    Raises:
        PromptError: The text is empty, or the model has no tokenizer.
    """
    if not text.strip():
        raise PromptError("the prompt is empty; give some text")
    if model.tokenizer is None:
        raise PromptError("the model has no tokenizer; pass a tensor of token ids instead of text")
    bos = {} if prepend_bos is None else {"prepend_bos": prepend_bos}
    return model.to_tokens(text, truncate=False, **bos)[0].tolist()


def token_texts(model: Any, token_ids: Sequence[int]) -> tuple[str, ...]:
    """Each token as text; a token that is part of a character is shown as its bytes."""
    if model.tokenizer is None:
        return tuple(f"#{token}" for token in token_ids)
    texts = []
    for token in token_ids:
        text = model.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if "\ufffd" in text:
            text = _bytes_text(model.tokenizer.convert_ids_to_tokens(token)) or text
        texts.append(text)
    return tuple(texts)


def starts_with_bos(model: Any, token_ids: Sequence[int]) -> bool | None:
    """Whether token 0 is the tokenizer's BOS token; None where there is no such token."""
    bos = getattr(model.tokenizer, "bos_token_id", None)
    return None if bos is None else token_ids[0] == bos


def pad_token_id(model: Any) -> int | None:
    """The tokenizer's padding token, if any."""
    return getattr(model.tokenizer, "pad_token_id", None)


def _bytes_text(token: str | None) -> str | None:
    """`<F0 9F>` for a byte-level BPE token that is not whole characters."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    if not token or any(char not in byte_of for char in token):
        return None
    return "<" + " ".join(f"{byte_of[char]:02X}" for char in token) + ">"


class _HostBase:
    """What both hosts share."""

    kind: str

    def __init__(self, model: Any) -> None:
        self.model = model

    def _info(self, *, d_head: int, dtype: torch.dtype) -> ModelInfo:
        cfg = self.model.cfg
        return ModelInfo(
            name=str(getattr(cfg, "model_name", "") or "unnamed model"),
            n_layers=int(cfg.n_layers),
            n_heads=int(cfg.n_heads),
            n_kv_heads=int(getattr(cfg, "n_key_value_heads", None) or cfg.n_heads),
            d_head=d_head,
            dtype=str(dtype).removeprefix("torch."),
            host=self.kind,
            versions={
                "transformer_lens": importlib.metadata.version("transformer-lens"),
                "transformers": importlib.metadata.version("transformers"),
                "torch": torch.__version__,
            },
        )

    def _run(
        self,
        token_ids: Sequence[int],
        hooks: list[tuple[str, Callable[..., None]]],
        **kwargs: Any,
    ) -> None:
        device = next(self.model.parameters()).device
        tokens = torch.tensor([list(token_ids)], device=device)
        # An explicit mask: hosts guess one from the tokens otherwise, and may take a BOS that is
        # also the padding token for padding.
        mask = torch.ones_like(tokens)
        with torch.no_grad(), _as_before(self.model), self.model.hooks(fwd_hooks=hooks):
            self.model(tokens, return_type=None, attention_mask=mask, **kwargs)


@contextmanager
def _as_before(model: Any) -> Iterator[None]:
    """Evaluation mode inside; afterwards every flag and rotary table is what it was.

    Rotary tables grow with the longest prompt and some scalings switch on it, so a forward pass of
    ours would otherwise change what the caller's next one computes.
    """
    root = getattr(model, "original_model", model)
    modules = {id(m): m for owner in (model, root) for m in owner.modules()}.values()
    training = [(m, m.training) for m in modules]
    rotary = [
        _RotaryState(m)
        for m in modules
        if any("inv_freq" in name or "rotary_" in name for name in m._buffers)
    ]
    try:
        for m, _ in training:
            m.training = False
        yield
    finally:
        for m, flag in training:
            m.training = flag
        for state in rotary:
            state.restore()


class _RotaryState:
    """Tables and counters of one rotary module, which hosts replace or overwrite in place."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._buffers = dict(module._buffers)
        self._values = {
            name: buffer.clone()
            for name, buffer in self._buffers.items()
            if buffer is not None and "inv_freq" in name
        }
        self._counters = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, (int, float, Tensor)) and name != "training"
        }

    def restore(self) -> None:
        self._module._buffers.clear()
        self._module._buffers.update(self._buffers)
        for name, value in self._values.items():
            buffer = self._buffers[name]
            if not torch.equal(buffer, value):
                buffer.copy_(value)
        for name, value in self._counters.items():
            setattr(self._module, name, value)


class _Hooked(_HostBase):
    """`HookedTransformer`: rotated values at `hook_rot_q` and `hook_rot_k`."""

    kind = "HookedTransformer"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        kind = model.cfg.positional_embedding_type
        if kind != "rotary":
            raise UnsupportedModelError(
                f"{model.cfg.model_name} has no RoPE (its positional embedding is {kind!r}); "
                "lens_rope reads rotary models only"
            )

    @cached_property
    def info(self) -> ModelInfo:
        return self._info(d_head=self.model.cfg.d_head, dtype=self.model.W_E.dtype)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(range(self.model.cfg.n_layers))

    @property
    def trained_context(self) -> int:
        return int(self.model.cfg.n_ctx)

    def read(
        self, token_ids: Sequence[int], layers: Sequence[int], visit: Callable[[LayerReading], None]
    ) -> None:
        seen: dict[str, Tensor] = {}
        hooks: list[tuple[str, Callable[..., None]]] = []

        def keep(value: Tensor, hook: Any, key: str) -> None:
            seen[key] = value.detach()[0]

        for layer in layers:

            def finish(value: Tensor, hook: Any, layer: int = layer) -> None:
                seen["pattern"] = value.detach()[0]
                visit(self._reading(layer, seen))
                seen.clear()

            at = f"blocks.{layer}.attn.hook_"
            for key in ("rot_q", "rot_k", "attn_scores"):
                hooks.append((at + key, _with_key(keep, key)))
            hooks.append((at + "pattern", finish))
        self._run(token_ids, hooks, stop_at_layer=max(layers) + 1)

    def _reading(self, layer: int, seen: dict[str, Tensor]) -> LayerReading:
        cfg, attn = self.model.cfg, self.model.blocks[layer].attn
        q, k = seen["rot_q"], self._ungrouped(seen["rot_k"])
        cos, sin = self._tables(attn, q.shape[0])
        softcap = float(cfg.attn_scores_soft_cap)
        return LayerReading(
            layer=layer,
            route="hook_rot",
            q=q,
            k=k,
            rotary_start=0,
            sample=self._sample(attn, q),
            cos=cos,
            sin=sin,
            inv_freq_candidates=(),
            scores=seen["attn_scores"],
            pattern=seen["pattern"],
            scale=1.0 / float(attn.attn_scale),
            softcap=softcap if softcap > 0 else None,
            sinks=attn.sinks.detach() if getattr(cfg, "use_attention_sinks", False) else None,
            window=int(cfg.window_size) if attn.attn_type == "local" else None,
            trained_context=self.trained_context,
        )

    def _ungrouped(self, k: Tensor) -> Tensor:
        """One row per key head also where the host expanded them to one per query head."""
        groups = self.model.cfg.n_key_value_heads
        if groups is None or k.shape[1] == groups:
            return k
        first = k[:, :: k.shape[1] // groups]
        # Expanded heads can be edited one by one; then they are key heads of their own.
        expanded = first.repeat_interleave(k.shape[1] // groups, dim=1)
        return first if torch.equal(expanded, k) else k

    @staticmethod
    def _sample(attn: Any, q: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors through the layer's own `apply_rotary`.

        The layer shows no hook between QK-norm or clipping and the rotation, so the rotation
        itself is tried on random vectors, in the state that this forward pass left it in.
        """
        generator = torch.Generator().manual_seed(0)
        before = torch.randn((1, q.shape[0], 2, q.shape[2]), generator=generator)
        before = before.to(q.device, q.dtype)
        mask = torch.ones((1, q.shape[0]), dtype=torch.long, device=q.device)
        return before[0], attn.apply_rotary(before, 0, mask)[0]

    @staticmethod
    def _tables(attn: Any, n_pos: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of this forward pass; in float32 where they round to those it used."""
        cos, sin = attn.rotary_cos[:n_pos], attn.rotary_sin[:n_pos]
        if cos.dtype in (torch.float32, torch.float64):
            return cos, sin
        fine_sin, fine_cos = attn.calculate_sin_cos_rotary(
            attn.cfg.rotary_dim, n_pos, base=attn._rotary_base(), dtype=torch.float32
        )
        fine_cos, fine_sin = fine_cos.to(cos.device), fine_sin.to(sin.device)
        is_same = torch.equal(fine_cos.to(cos), cos) and torch.equal(fine_sin.to(sin), sin)
        return (fine_cos, fine_sin) if is_same else (cos, sin)


class _Bridge(_HostBase):
    """`TransformerBridge`: rotated values where they are hooked, else rotated by its own tables."""

    kind = "TransformerBridge"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        kind = getattr(model.cfg, "positional_embedding_type", None)
        if kind != "rotary":
            raise UnsupportedModelError(
                f"{model.cfg.model_name} has no RoPE (its positional embedding is {kind!r}); "
                "lens_rope reads rotary models only"
            )

    @cached_property
    def info(self) -> ModelInfo:
        dtype = next(self.model.original_model.parameters()).dtype
        return self._info(d_head=int(self.model.cfg.d_head), dtype=dtype)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        names = self.model.hook_dict
        return tuple(
            layer
            for layer in range(self.model.cfg.n_layers)
            if f"blocks.{layer}.attn.hook_pattern" in names
        )

    @property
    def trained_context(self) -> int:
        config = _text_config(self.model.original_model.config)
        # Dynamic scaling is the one that stretches the context at run time.
        scaling = getattr(config, "rope_parameters", None) or {}
        factor = scaling.get("factor", 1) if scaling.get("rope_type") == "dynamic" else 1
        for name in ("max_position_embeddings", "n_positions", "seq_length"):
            if getattr(config, name, None):
                return int(getattr(config, name) * factor)
        return int(self.model.cfg.n_ctx)

    def read(
        self, token_ids: Sequence[int], layers: Sequence[int], visit: Callable[[LayerReading], None]
    ) -> None:
        names = self.model.hook_dict
        seen: dict[str, Tensor] = {}
        hooks: list[tuple[str, Callable[..., None]]] = []

        def keep(value: Tensor, hook: Any, key: str) -> None:
            seen[key] = value.detach()

        for layer in layers:

            def finish(value: Tensor, hook: Any, layer: int = layer) -> None:
                visit(self._reading(layer, seen))
                seen.clear()

            for key in _BRIDGE_HOOKS:
                if f"blocks.{layer}.attn.{key}" in names:
                    hooks.append((f"blocks.{layer}.attn.{key}", _with_key(keep, key)))
            # Some hosts fire the scores after the pattern, so a layer ends with its block.
            hooks.append((f"blocks.{layer}.hook_out", finish))
        self._run(token_ids, hooks)

    def _reading(self, layer: int, seen: dict[str, Tensor]) -> LayerReading:
        if "hook_pattern" not in seen or "hook_attn_scores" not in seen:
            raise self._refusal(layer, "its hook_attn_scores and hook_pattern did not fire")
        attn = self.model.blocks[layer].attn.original_component
        read = self._read_latent if "hook_kv_latent" in seen else self._read_plain
        route, q, k, start, sample = read(layer, attn, seen)
        cos, sin = self._tables(layer, seen, q.shape[0])
        if cos is None:
            if sample is None:
                raise self._refusal(layer, "neither its rotated values nor its angles are hooked")
            if not torch.equal(*sample):
                raise self._refusal(layer, "it rotates, but its angles are not hooked")
        config = _text_config(self.model.original_model.config)
        softcap = getattr(attn, "attn_logit_softcapping", None)
        sinks = getattr(attn, "sinks", None)
        scale = getattr(attn, "scaling", None)
        return LayerReading(
            layer=layer,
            route=route,
            q=q,
            k=k,
            rotary_start=start,
            sample=sample,
            cos=cos,
            sin=sin,
            inv_freq_candidates=self._candidates(),
            scores=seen["hook_attn_scores"][0],
            pattern=seen["hook_pattern"][0],
            scale=float(scale) if scale is not None else q.shape[-1] ** -0.5,
            softcap=float(softcap) if softcap else None,
            sinks=sinks.detach() if isinstance(sinks, Tensor) else None,
            window=_window(attn, config, layer),
            trained_context=self.trained_context,
        )

    def _read_plain(self, layer: int, attn: Any, seen: dict[str, Tensor]) -> _QK:
        """Queries and keys of ordinary attention."""
        before = []
        for side in ("q", "k"):
            value = next(
                (seen[key] for key in (f"hook_{side}_normed", f"{side}.hook_out") if key in seen),
                None,
            )
            if value is None:
                raise self._refusal(layer, f"its hook_{side} did not fire")
            rotated = seen.get(f"hook_rot_{side}")
            before.append(self._heads_last(value[0], rotated))
        clip = getattr(getattr(attn, "config", None), "clip_qkv", None)
        if clip is not None:
            before = [value.clamp(-clip, clip) for value in before]
        if "hook_rot_q" not in seen or "hook_rot_k" not in seen:
            return "hook_cos", before[0], before[1], 0, None
        q, k = seen["hook_rot_q"][0], seen["hook_rot_k"][0]
        return "hook_rot", q, k, 0, (torch.cat(before, dim=1), torch.cat([q, k], dim=1))

    def _heads_last(self, value: Tensor, rotated: Tensor | None) -> Tensor:
        """`[pos, head, d_head]` from any of the layouts that the hooks before rotation have."""
        if value.ndim == 2:
            d_head = self.model.cfg.d_head if rotated is None else rotated.shape[-1]
            return value.unflatten(-1, (-1, d_head))
        # Normalised per head, the host holds them as [head, pos, d_head].
        is_head_first = rotated is not None and value.shape != rotated.shape[1:]
        return value.transpose(0, 1) if is_head_first else value

    def _read_latent(self, layer: int, attn: Any, seen: dict[str, Tensor]) -> _QK:
        """Multi-head latent attention: only the last components of a head are rotated."""
        q, k = (seen[key][0].transpose(0, 1) for key in ("hook_q", "hook_k"))
        start = int(attn.qk_nope_head_dim)
        projected = seen.get("q_b_proj.hook_out", seen.get("q_proj.hook_out"))
        if projected is None:
            raise self._refusal(layer, "its query projection is not hooked")
        before = projected[0].unflatten(-1, (-1, q.shape[-1]))
        if getattr(attn.config, "rope_interleave", False):
            # The host sorts adjacent pairs into halves as it rotates.
            rope_part = torch.cat([before[..., start::2], before[..., start + 1 :: 2]], dim=-1)
            before = torch.cat([before[..., :start], rope_part], dim=-1)
        return "hook_rot", q, k, start, (before, q)

    def _tables(
        self, layer: int, seen: dict[str, Tensor], n_pos: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Cosines and sines `[pos, width]` of this forward pass."""
        if "hook_cos" in seen and "hook_sin" in seen:
            tables = []
            for value in (seen["hook_cos"], seen["hook_sin"]):
                if value.ndim == 4 and not (value == value[:1]).all():
                    raise self._refusal(
                        layer, "its tokens have several position streams (multimodal RoPE)"
                    )
                tables.append(value.reshape(-1, *value.shape[-2:])[0])
            return tables[0], tables[1]
        for name, buffer in self.model.original_model.named_buffers():
            if name.endswith("embed_positions"):  # GPT-J keeps sines, then cosines, of all positions
                sin, cos = buffer[:n_pos].to(seen["hook_pattern"].device).chunk(2, dim=-1)
                return cos, sin
        return None, None

    def _candidates(self) -> tuple[np.ndarray, ...]:
        """Every `inv_freq` that the model's rotary modules hold."""
        return tuple(
            buffer.detach().double().cpu().numpy()
            for name, buffer in self.model.original_model.named_buffers()
            if "inv_freq" in name and buffer.ndim == 1
        )

    def _refusal(self, layer: int, why: str) -> UnsupportedModelError:
        kind = type(self.model.blocks[layer].attn.original_component).__name__
        return UnsupportedModelError(
            f"cannot read layer {layer} of {self.model.cfg.model_name} ({kind}) on the "
            f"TransformerBridge: {why}; try HookedTransformer for this model, or another model"
        )


_QK = tuple[Route, Tensor, Tensor, int, "tuple[Tensor, Tensor] | None"]

_BRIDGE_HOOKS = (
    "q.hook_out",
    "k.hook_out",
    "q_b_proj.hook_out",
    "q_proj.hook_out",
    "hook_q",
    "hook_k",
    "hook_q_normed",
    "hook_k_normed",
    "hook_kv_latent",
    "hook_cos",
    "hook_sin",
    "hook_rot_q",
    "hook_rot_k",
    "hook_attn_scores",
    "hook_pattern",
)


def _with_key(function: Callable[..., None], key: str) -> Callable[..., None]:
    """A hook that also says which hook point it is."""
    return lambda value, hook: function(value, hook, key)


def _text_config(config: Any) -> Any:
    """The language model's part of a Hugging Face configuration."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _window(attn: Any, config: Any, layer: int) -> int | None:
    """Sliding window of one layer of a Hugging Face model, or None.

    The attention module knows it in some architectures; in others the model builds the mask from
    the configuration. What is returned here is checked against the pattern.
    """
    if hasattr(attn, "sliding_window"):
        window = attn.sliding_window
    elif getattr(config, "layer_types", None):
        is_sliding = config.layer_types[layer] == "sliding_attention"
        window = getattr(config, "sliding_window", None) if is_sliding else None
    elif getattr(config, "use_sliding_window", True):
        window = getattr(config, "sliding_window", None)
    else:
        window = None
    return int(window) if window else None
