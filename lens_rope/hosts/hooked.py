"""`HookedTransformer`: rotated values at `hook_rot_q` and `hook_rot_k`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lens_rope.errors import UnsupportedModelError
from lens_rope.hosts.base import Attention, Hook, Host, LayerReading, Visit, with_key
from lens_rope.hosts.blocked import SampledAttention, blocked_attention, sampled_attention
from lens_rope.hosts.editing import EditPoint, Tables, refuse_cached

try:
    from transformer_lens import HookedTransformer
except ImportError:  # transformer-lens 4 has only the bridge
    HookedTransformer = None


class HookedHost(Host):
    """`HookedTransformer`: rotated values at `hook_rot_q` and `hook_rot_k`."""

    kind = "HookedTransformer"
    score_arrays = 5

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

    def fused_refusal(self, layers: Sequence[int]) -> str | None:
        """Where attention is not causal, or something acts on what a fused pass does not form."""
        cfg = self.model.cfg
        if getattr(cfg, "use_logn_attn", False):
            return "its queries are scaled by their position after hook_rot_q"
        for layer, attn in enumerate(self._attentions[: max(layers) + 1]):
            if (getattr(attn, "_attention_dir_override", None) or cfg.attention_dir) != "causal":
                return "its attention is not causal"
            for key in ("attn_scores", "pattern", "z"):
                point = getattr(attn, f"hook_{key}")
                if point._forward_hooks or point._forward_pre_hooks:
                    return (
                        f"a hook at blocks.{layer}.attn.hook_{key} acts on what a fused pass does "
                        "not form"
                    )
        return None

    @property
    def _attentions(self) -> list[Any]:
        return [block.attn for block in self.model.blocks]

    @contextmanager
    def _watching(
        self,
        n_tokens: int,
        layers: Sequence[int],
        visit: Visit,
        attention: Attention,
        *,
        to_end: bool,
    ) -> Iterator[dict[str, Any]]:
        cfg = self.model.cfg
        # The host grows its tables with the prompt, and stops at `n_ctx`. Those that depend on the
        # length are made anew for it.
        if n_tokens > cfg.n_ctx and not getattr(cfg, "use_dynamic_ntk_rope", False):
            for attn in self._attentions:
                if n_tokens > len(attn.rotary_cos):
                    attn._extend_rotary_embeddings(n_tokens)

        def without_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
            mask = kwargs.get("attention_mask")
            added = kwargs.get("additive_attention_mask")
            if added is not None or (mask is not None and not bool(mask.all())):
                raise UnsupportedModelError(
                    "another hook masks keys, which a fused pass does not form; choose "
                    'attention="eager"'
                )
            return args, {**kwargs, "attention_mask": None}

        handles = [
            # All ones: it would only be broadcast against the one score that the host forms.
            attn.register_forward_pre_hook(without_mask, with_kwargs=True)
            for attn in (self._attentions if attention == "fused" else [])
        ]
        try:
            with self.model.hooks(fwd_hooks=self._hooks(layers, visit, attention)):
                yield {} if to_end else {"stop_at_layer": max(layers) + 1}
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self, layers: Sequence[int], visit: Visit, attention: Attention) -> list[Hook]:
        """Forward hooks that make each layer visit its reading."""
        seen: dict[str, Tensor] = {}
        hooks: list[Hook] = []

        def keep(value: Tensor, hook: Any, key: str) -> None:
            seen[key] = value.detach()[0]

        def keep_flat(value: Tensor, hook: Any, key: str) -> None:
            seen[key] = value.detach()

        for layer in layers:
            names = (
                ("q", "k") if attention == "fused" else ("q", "k", "rot_q", "rot_k", "attn_scores")
            )
            for key in names:
                hooks.append((f"blocks.{layer}.attn.hook_{key}", with_key(keep, key)))
            for side in ("q", "k"):
                # The norm's weight comes after this hook, see `_before_rotation`.
                name = f"blocks.{layer}.attn.{side}_norm.hook_normalized"
                if name in self.model.hook_dict:
                    hooks.append((name, with_key(keep_flat, f"{side}_norm")))
        if attention == "fused":
            hooks += self._fused_hooks(layers, visit, seen)
        else:
            for layer in layers:

                def finish(value: Tensor, hook: Any, layer: int = layer) -> None:
                    seen["pattern"] = value.detach()[0]
                    visit(self._reading(layer, seen))
                    seen.clear()

                hooks.append((f"blocks.{layer}.attn.hook_pattern", finish))
        return hooks

    def _fused_hooks(
        self,
        layers: Sequence[int],
        visit: Visit,
        seen: dict[str, Tensor],
    ) -> list[Hook]:
        """The host goes on with one position, forms one score, and is given the whole output."""
        hooks: list[Hook] = []

        def keep_and_narrow(value: Tensor, hook: Any, key: str) -> Tensor:
            seen[key] = value.detach()[0]
            return value[:, :1]

        for layer, attn in enumerate(self._attentions):

            def finish(value: Tensor, hook: Any, layer: int = layer, attn: Any = attn) -> Tensor:
                clip = getattr(attn.cfg, "clip_qkv", None)
                if clip is not None:  # comes after hook_v
                    seen["v"] = seen["v"].clamp(-clip, clip)
                q, k, v = (seen[key].transpose(0, 1)[None] for key in ("rot_q", "rot_k", "v"))
                output = blocked_attention(
                    q, k, v.to(q.dtype), sinks=self._sinks(attn), **self._score_options(attn)
                )
                output = output[0].transpose(0, 1).to(value.dtype)
                if layer in layers:
                    sample = self._sampled(attn, output, seen)
                    assert sample.scores is not None  # `_sampled` has them
                    seen["attn_scores"], seen["pattern"] = sample.scores, sample.pattern
                    visit(self._reading(layer, seen, sample))
                seen.clear()
                return output[None]

            at = f"blocks.{layer}.attn.hook_"
            hooks += [(at + key, with_key(keep_and_narrow, key)) for key in ("rot_q", "rot_k", "v")]
            hooks.append((at + "z", finish))
        return hooks

    def _sampled(self, attn: Any, output: Tensor, seen: dict[str, Tensor]) -> SampledAttention:
        """Some queries through the layer's own scores and mask.

        In float32 at least, as the kernels add up: the rounding of large scores to half precision
        would change attention by more than any error that is to be found.
        """
        wide = torch.promote_types(seen["rot_q"].dtype, torch.float32)
        q, k, v = (seen[key].to(wide) for key in ("rot_q", "rot_k", "v"))
        sinks = self._sinks(attn)

        def own(block: range) -> tuple[Tensor, Tensor, Tensor]:
            stop = block.stop
            scores = attn.calculate_attention_scores(q[None, block.start : stop], k[None, :stop])
            scores = attn.apply_causal_mask(scores, block.start)[0]
            logits = scores
            if sinks is not None:
                sink = sinks.to(scores)[:, None, None].expand(-1, len(block), 1)
                logits = torch.cat([scores, sink], dim=-1)
            pattern = torch.softmax(logits, dim=-1)[..., :stop]
            weights = pattern.reshape(v.shape[1], -1, stop)
            z = (weights @ v[:stop].transpose(0, 1)).view(*pattern.shape[:2], -1)
            return scores, pattern, z.transpose(0, 1)

        return sampled_attention(output, own, q.element_size())

    def _score_options(self, attn: Any) -> dict[str, Any]:
        """Scale, soft-cap and window of a layer."""
        softcap = float(self.model.cfg.attn_scores_soft_cap)
        return {
            "scale": 1.0 / float(attn.attn_scale),
            "softcap": softcap if softcap > 0 else None,
            "window": int(self.model.cfg.window_size) if attn.attn_type == "local" else None,
        }

    def _sinks(self, attn: Any) -> Tensor | None:
        has_sinks = getattr(self.model.cfg, "use_attention_sinks", False)
        return attn.sinks.detach() if has_sinks else None

    def _reading(
        self, layer: int, seen: dict[str, Tensor], sample: SampledAttention | None = None
    ) -> LayerReading:
        attn = self.model.blocks[layer].attn
        q, k = seen["rot_q"], self._ungrouped(seen["rot_k"])
        before = [self._before_rotation(attn, side, seen) for side in ("q", "k")]
        after = [seen["rot_q"], seen["rot_k"]]
        cos, sin = self._tables(attn, q.shape[0])
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
            sinks=self._sinks(attn),
            **self._score_options(attn),
            trained_context=self.trained_context,
            edit_at=(
                EditPoint(f"blocks.{layer}.attn.hook_rot_q", is_rotated=True),
                EditPoint(f"blocks.{layer}.attn.hook_rot_k", is_rotated=True),
            ),
            rows=None if sample is None else sample.rows,
            output_error=None if sample is None else sample.output_error,
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
