"""`TransformerBridge`: rotated values where they are hooked, else rotated by its own tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lens_rope.errors import UnsupportedModelError
from lens_rope.hosts.base import Hook, Host, LayerReading, with_key
from lens_rope.hosts.editing import EditPoint, Tables, refuse_cached
from lens_rope.records import Route


@dataclass(frozen=True, eq=False)
class _QueriesAndKeys:
    """What the hooks of one layer give, see `LayerReading` for the fields."""

    route: Route
    q: Tensor
    k: Tensor
    rotary_start: int
    sample: tuple[Tensor, Tensor] | None
    edit_at: tuple[EditPoint, EditPoint]


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

# Nothing that the host shows tells that it is another model than the one it was made from.
_NORM_AFTER_ROTATION = ("HunYuanDenseV1Attention",)


class BridgeHost(Host):
    """`TransformerBridge`: rotated values where they are hooked, else rotated by its own tables."""

    kind = "TransformerBridge"

    @property
    def _is_first_generation(self) -> bool:
        return self.info.versions["transformer_lens"].startswith("3.")

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.model.original_model.parameters()).dtype

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Those whose pattern is hooked; hybrid models have others too."""
        names = self.model.hook_dict
        return tuple(
            layer
            for layer in range(self.model.cfg.n_layers)
            if f"blocks.{layer}.attn.hook_pattern" in names
        )

    @property
    def trained_context(self) -> int:
        """From the Hugging Face configuration."""
        config = _text_config(self.model.original_model.config)
        for name in ("max_position_embeddings", "n_positions", "seq_length"):
            if getattr(config, name, None):
                return int(getattr(config, name))
        return int(self.model.cfg.n_ctx)

    @property
    def max_tokens(self) -> int:
        """The trained context, stretched by dynamic scaling, which is made for longer prompts."""
        config = _text_config(self.model.original_model.config)
        scaling = getattr(config, "rope_parameters", None) or {}
        factor = scaling.get("factor", 1) if scaling.get("rope_type") == "dynamic" else 1
        return int(self.trained_context * factor)

    def _hooks(
        self, layers: Sequence[int], visit: Callable[[LayerReading], None]
    ) -> tuple[list[Hook], dict[str, Any]]:
        names = self.model.hook_dict
        seen: dict[str, Tensor] = {}
        hooks: list[Hook] = []

        def keep(value: Tensor, hook: Any, key: str) -> None:
            seen[key] = value.detach()

        for layer in layers:

            def finish(value: Tensor, hook: Any, layer: int = layer) -> None:
                visit(self._reading(layer, seen))
                seen.clear()

            for key in _BRIDGE_HOOKS:
                if f"blocks.{layer}.attn.{key}" in names:
                    hooks.append((f"blocks.{layer}.attn.{key}", with_key(keep, key)))
            # Some hosts fire the scores after the pattern, so a layer ends with its block.
            hooks.append((f"blocks.{layer}.hook_out", finish))
        return hooks, {}

    def _reading(self, layer: int, seen: dict[str, Tensor]) -> LayerReading:
        if "hook_pattern" not in seen or "hook_attn_scores" not in seen:
            raise self._refusal(layer, "its hook_attn_scores and hook_pattern did not fire")
        attn = self.model.blocks[layer].attn.original_component
        if type(attn).__name__ in _NORM_AFTER_ROTATION and self._is_first_generation:
            raise self._refusal(
                layer,
                "the model normalises queries and keys after the rotation and this bridge does so "
                "before it, so it computes other scores than the model; transformer-lens 4 refuses "
                "or mends that",
            )
        read = self._read_latent if "hook_kv_latent" in seen else self._read_plain
        read_qk = read(layer, attn, seen)
        q, k, sample = read_qk.q, read_qk.k, read_qk.sample
        cos, sin = self._tables(layer, seen, q.shape[0])
        if cos is None:
            if sample is None:
                raise self._refusal(layer, "neither its rotated values nor its angles are hooked")
            if not torch.equal(*sample):
                raise self._refusal(layer, "it rotates, but its angles are not hooked")
        config = _text_config(self.model.original_model.config)
        softcap = getattr(attn, "attn_logit_softcapping", None)
        sinks = getattr(attn, "sinks", None)
        # Some hosts give the pattern under the name of the scores as well (GPT-J).
        is_pattern_only = torch.equal(seen["hook_attn_scores"], seen["hook_pattern"])
        route: Route = "hook_cos_pattern" if is_pattern_only else read_qk.route
        scale = getattr(attn, "scaling", None)
        return LayerReading(
            layer=layer,
            route=route,
            q=q,
            k=k,
            rotary_start=read_qk.rotary_start,
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
            edit_at=read_qk.edit_at,
        )

    def _read_plain(self, layer: int, attn: Any, seen: dict[str, Tensor]) -> _QueriesAndKeys:
        """Queries and keys of ordinary attention."""
        before, before_at = [], []
        for side in ("q", "k"):
            key = next(
                (key for key in (f"hook_{side}_normed", f"{side}.hook_out") if key in seen), None
            )
            if key is None:
                raise self._refusal(layer, f"its hook_{side} did not fire")
            value, rotated = seen[key][0], seen.get(f"hook_rot_{side}")
            before.append(self._heads_last(key, value, rotated))
            layout = "flat" if value.ndim == 2 else "pos head"
            before_at.append(EditPoint(f"blocks.{layer}.attn.{key}", False, layout))
        clip = getattr(getattr(attn, "config", None), "clip_qkv", None)
        if clip is not None:
            before = [value.clamp(-clip, clip) for value in before]
        if "hook_rot_q" not in seen or "hook_rot_k" not in seen:
            edit_at = (before_at[0], before_at[1])
            return _QueriesAndKeys("hook_cos", before[0], before[1], 0, None, edit_at)
        q, k = seen["hook_rot_q"][0], seen["hook_rot_k"][0]
        sample = (torch.cat(before, dim=1), torch.cat([q, k], dim=1))
        edit_at = (
            EditPoint(f"blocks.{layer}.attn.hook_rot_q", is_rotated=True),
            EditPoint(f"blocks.{layer}.attn.hook_rot_k", is_rotated=True),
        )
        return _QueriesAndKeys("hook_rot", q, k, 0, sample, edit_at)

    def _heads_last(self, key: str, value: Tensor, rotated: Tensor | None) -> Tensor:
        """`[pos, head, d_head]` from any of the layouts that the hooks before rotation have."""
        if value.ndim == 2:
            d_head = self.model.cfg.d_head if rotated is None else rotated.shape[-1]
            return value.unflatten(-1, (-1, d_head))
        # Normalised per head, the host holds them as [head, pos, d_head]. The hook tells, not the
        # shape: there may be as many positions as heads.
        return value.transpose(0, 1) if key.endswith("_normed") else value

    def _read_latent(self, layer: int, attn: Any, seen: dict[str, Tensor]) -> _QueriesAndKeys:
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
        edit_at = (
            EditPoint(f"blocks.{layer}.attn.hook_q", is_rotated=True, layout="head pos"),
            EditPoint(f"blocks.{layer}.attn.hook_k", is_rotated=True, layout="head pos"),
        )
        return _QueriesAndKeys("hook_rot", q, k, start, (before, q), edit_at)

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
            if name.endswith(
                "embed_positions"
            ):  # GPT-J keeps sines, then cosines, of all positions
                sin, cos = buffer[:n_pos].to(seen["hook_pattern"].device).chunk(2, dim=-1)
                return cos, sin
        return None, None

    def follow_angles(self, layer: int) -> tuple[list[RemovableHandle], Tables]:
        """From the cosines and sines that the layer is given, else from the model's one table."""
        names, handles = self.model.hook_dict, []
        seen: dict[str, Tensor] = {}
        for key in ("hook_cos", "hook_sin"):

            def keep(module: Any, args: Any, value: Tensor, key: str = key) -> None:
                seen[key] = value.detach()

            if f"blocks.{layer}.attn.{key}" in names:
                point = names[f"blocks.{layer}.attn.{key}"]
                handles.append(point.register_forward_hook(keep))

        def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            refuse_cached(kwargs, layer)
            seen.clear()
            given = kwargs.get("position_embeddings")
            # Queries can be hooked before the angles are. (GPT-J, which hooks no angles, is given
            # sines first.)
            if handles and isinstance(given, tuple) and len(given) == 2:
                seen.update(hook_cos=given[0].detach(), hook_sin=given[1].detach())

        def tables(x: Tensor) -> tuple[Tensor, Tensor]:
            if len(seen) == 2:
                # Rows of a padded batch can have positions of their own.
                cos, sin = (seen[key] for key in ("hook_cos", "hook_sin"))
                return cos.reshape(-1, *cos.shape[-2:]), sin.reshape(-1, *sin.shape[-2:])
            cos, sin = self._tables(layer, {"hook_pattern": x}, x.shape[1])
            if cos is None or sin is None:
                raise self._refusal(layer, "its angles are not hooked")
            return cos[None], sin[None]

        attn = self.model.blocks[layer].attn
        look_first = attn.register_forward_pre_hook(look, with_kwargs=True)
        return [*handles, look_first], tables

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
            f"TransformerBridge: {why}; try HookedTransformer of transformer-lens 3.9, or another "
            "model"
        )


def _text_config(config: Any) -> Any:
    """The language model's part of a Hugging Face configuration."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _window(attn: Any, config: Any, layer: int) -> int | None:
    """Sliding window of one layer of a Hugging Face model, or None.

    Which layers have one is said per layer where the configuration does so; otherwise the attention
    module knows it, or the model builds one mask for all. What is returned is checked against the
    pattern, which tells only where the prompt is longer than the window.
    """
    window = getattr(attn, "sliding_window", None) or getattr(config, "sliding_window", None)
    if getattr(config, "layer_types", None):
        is_sliding = config.layer_types[layer] == "sliding_attention"
    elif hasattr(attn, "sliding_window"):
        is_sliding = attn.sliding_window is not None
    else:
        is_sliding = getattr(config, "use_sliding_window", True)
    return int(window) if window and is_sliding else None
