"""`HookedTransformer`: rotated values at `hook_rot_q` and `hook_rot_k`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lens_rope.hosts.base import Hook, Host, LayerReading, with_key
from lens_rope.hosts.editing import EditPoint, Tables, refuse_cached

try:
    from transformer_lens import HookedTransformer
except ImportError:  # transformer-lens 4 has only the bridge
    HookedTransformer = None


class HookedHost(Host):
    """`HookedTransformer`: rotated values at `hook_rot_q` and `hook_rot_k`."""

    kind = "HookedTransformer"

    @property
    def _dtype(self) -> torch.dtype:
        return self.model.W_E.dtype

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(range(self.model.cfg.n_layers))

    @property
    def trained_context(self) -> int:
        """`n_ctx`, which `load_model` sets to the trained context (the host may cap it)."""
        return int(self.model.cfg.n_ctx)

    def _hooks(
        self, layers: Sequence[int], visit: Callable[[LayerReading], None]
    ) -> tuple[list[Hook], dict[str, Any]]:
        seen: dict[str, Tensor] = {}
        hooks: list[Hook] = []

        def keep(value: Tensor, hook: Any, key: str) -> None:
            seen[key] = value.detach()[0]

        def keep_flat(value: Tensor, hook: Any, key: str) -> None:
            seen[key] = value.detach()

        for layer in layers:

            def finish(value: Tensor, hook: Any, layer: int = layer) -> None:
                seen["pattern"] = value.detach()[0]
                visit(self._reading(layer, seen))
                seen.clear()

            at = f"blocks.{layer}.attn.hook_"
            for key in ("q", "k", "rot_q", "rot_k", "attn_scores"):
                hooks.append((at + key, with_key(keep, key)))
            for side in ("q", "k"):
                # The norm's weight comes after this hook, see `_before_rotation`.
                name = f"blocks.{layer}.attn.{side}_norm.hook_normalized"
                if name in self.model.hook_dict:
                    hooks.append((name, with_key(keep_flat, f"{side}_norm")))
            hooks.append((at + "pattern", finish))
        return hooks, {"stop_at_layer": max(layers) + 1}

    def _reading(self, layer: int, seen: dict[str, Tensor]) -> LayerReading:
        cfg, attn = self.model.cfg, self.model.blocks[layer].attn
        q, k = seen["rot_q"], self._ungrouped(seen["rot_k"])
        before = [self._before_rotation(attn, side, seen) for side in ("q", "k")]
        after = [seen["rot_q"], seen["rot_k"]]
        cos, sin = self._tables(attn, q.shape[0])
        softcap = float(cfg.attn_scores_soft_cap)
        return LayerReading(
            layer=layer,
            route="hook_rot",
            q=q,
            k=k,
            rotary_start=0,
            sample=(torch.cat(before, dim=1), torch.cat(after, dim=1)),
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
            edit_at=(
                EditPoint(f"blocks.{layer}.attn.hook_rot_q", is_rotated=True),
                EditPoint(f"blocks.{layer}.attn.hook_rot_k", is_rotated=True),
            ),
        )

    def follow_angles(self, layer: int) -> tuple[list[RemovableHandle], Tables]:
        """From the layer's tables, at the positions that the attention mask implies."""
        attn = self.model.blocks[layer].attn
        masks: list[Tensor | None] = [None]

        def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            refuse_cached(kwargs, layer)
            masks[0] = kwargs.get("attention_mask")

        def tables(x: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = self._tables(attn, x.shape[1])
            if masks[0] is None:
                return cos[None], sin[None]
            # Positions are counted from the first token that is not padding.
            positions = (masks[0].cumsum(dim=1) - 1).clamp_min(0).to(cos.device)
            return cos[positions], sin[positions]

        return [attn.register_forward_pre_hook(look, with_kwargs=True)], tables

    def _ungrouped(self, k: Tensor) -> Tensor:
        """One row per key head also where the host expanded them to one per query head."""
        groups = self.model.cfg.n_key_value_heads
        if groups is None or k.shape[1] == groups:
            return k
        first = k[:, :: k.shape[1] // groups]
        # Expanded heads can be edited one by one; then they are key heads of their own.
        expanded = first.repeat_interleave(k.shape[1] // groups, dim=1)
        return first if torch.equal(expanded, k) else k

    def _before_rotation(self, attn: Any, side: str, seen: dict[str, Tensor]) -> Tensor:
        """`[pos, head, d_head]` What the layer rotates: projected, normalised and clipped."""
        value = seen[side]
        normalised = seen.get(f"{side}_norm")
        if normalised is not None:
            weight = getattr(attn, f"{side}_norm").w
            value = (normalised.to(weight.dtype) * weight).reshape(len(value), -1, value.shape[-1])
        clip = getattr(attn.cfg, "clip_qkv", None)
        return value if clip is None else value.clamp(-clip, clip)

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
