"""`TransformerBridge`: rotated values where they are hooked, else rotated by its own tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint

from lens_rope.errors import UnsupportedModelError
from lens_rope.hosts.base import Attention, Host, LayerReading, Visit, with_key
from lens_rope.hosts.bridge_fused import Beside, FusedLayer, NotFusedError, fused_attention
from lens_rope.hosts.editing import Edit, EditPoint, Tables, refuse_cached
from lens_rope.hosts.state import callers_hooks, modules_of, without_callers_hooks
from lens_rope.records import Route
from lens_rope.spec import ranges


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

_TRIAL_TOKENS = 16

# Nothing that the host shows tells that it is another model than the one it was made from.
_NORM_AFTER_ROTATION = ("HunYuanDenseV1Attention",)


class BridgeHost(Host):
    """`TransformerBridge`: rotated values where they are hooked, else rotated by its own tables."""

    kind = "TransformerBridge"
    score_arrays = 4

    @property
    def _is_first_generation(self) -> bool:
        return self.info.versions["transformer_lens"].startswith("3.")

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.model.original_model.parameters()).dtype

    @cached_property
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

    @property
    def longest_prompt(self) -> int | None:
        """Rows of the table of angles, where the model has one that does not grow (GPT-J)."""
        tables = (module._buffers.get("embed_positions") for module in self._rotary_modules)
        rows = [len(table) for table in tables if table is not None]
        return min(rows) if rows else None

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
        def visit_to_the_last(reading: LayerReading) -> None:
            visit(reading)
            if reading.layer == layers[-1] and not to_end:
                raise _LastLayerRead

        with self._uncached():
            if attention == "fused":
                with self._fused(self.attention_layers, layers, visit_to_the_last):
                    yield {}
            else:
                with self._visited(layers, visit_to_the_last):
                    yield {}

    @contextmanager
    def _uncached(self) -> Iterator[None]:
        """Without keys and values of all layers being kept, which nobody reads."""
        configs = [config for config in self._configs if hasattr(config, "use_cache")]
        kept = [(config, config.use_cache) for config in configs]
        try:
            for config in configs:
                config.use_cache = False
            yield
        finally:
            for config, value in kept:
                config.use_cache = value

    @contextmanager
    def _visited(self, layers: Sequence[int], visit: Visit) -> Iterator[None]:
        """Hooks that make each layer visit its reading."""
        with self._kept(layers) as seen:

            def finish(value: Tensor, hook: Any, layer: int) -> None:
                reading = self._reading(layer, seen)
                seen.clear()
                visit(reading)

            # Some hosts fire the scores after the pattern, so a layer ends with its block.
            names = {f"blocks.{layer}.hook_out": partial(finish, layer=layer) for layer in layers}
            with self._hooked(names):
                yield

    @contextmanager
    def _kept(self, layers: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        """What the hook points of attention show, the last layer's in place of those before."""
        seen: dict[str, Tensor] = {}

        def keep(value: Tensor, hook: Any, key: str) -> None:
            seen[key] = value.detach()

        hooks = {
            f"blocks.{layer}.attn.{key}": with_key(keep, key)
            for layer in layers
            for key in _BRIDGE_HOOKS
        }
        with self._hooked(hooks):
            yield seen

    @contextmanager
    def _hooked(self, hooks: Mapping[str, Callable[..., Tensor | None]]) -> Iterator[None]:
        """Hooks at those of these points that there are.

        The bridge's own way of adding hooks looks up all names anew for each of them, which takes
        longer than a forward pass.
        """
        added: list[tuple[HookPoint, Any]] = []
        points = self.model.hook_dict  # made anew each time
        try:
            for name, function in hooks.items():
                if name in points:
                    points[name].add_hook(function)
                    added.append((points[name], points[name].fwd_hooks[-1]))
            yield
        finally:
            for point, handle in added:
                handle.hook.remove()
                point.fwd_hooks = [kept for kept in point.fwd_hooks if kept is not handle]

    def _run(
        self,
        token_ids: Sequence[int],
        layers: Sequence[int],
        visit: Visit,
        attention: Attention,
        *,
        return_type: str | None,
    ) -> Any:
        if attention == "fused":
            last = layers[-1] if return_type is None else self.attention_layers[-1]
            why = self._found_by_trial(last)
            if why is not None:
                raise NotFusedError(why)
        return super()._run(token_ids, layers, visit, attention, return_type=return_type)

    def _forward(
        self,
        token_ids: Sequence[int],
        visit: Visit,
        watching: Callable[[Visit], AbstractContextManager[dict[str, Any]]],
        return_type: str | None,
    ) -> Any:
        try:
            return super()._forward(token_ids, visit, watching, return_type)
        except _LastLayerRead:
            return None

    def fused_refusal(self, layers: Sequence[int]) -> str | None:
        """Why attention cannot be fused: hooks inside it, or what a trial finds, see `_try_fused`.

        The trial is made once for all prompts, hooks are looked for each time.
        """
        hooks = {
            layer: [hook for module in modules for hook in callers_hooks(module)]
            for layer, modules in self._attention_modules.items()
        }
        last = max(layers)
        for layer in self.attention_layers[self.attention_layers.index(last) + 1 :]:
            # Layers edited after rotation are not read, so those that run may end with some.
            if not any(isinstance(hook, Edit) and hook.point.is_rotated for hook in hooks[layer]):
                break
            last = layer
        hooked = [layer for layer in self.attention_layers if layer <= last and hooks[layer]]
        if hooked:
            return (
                f"layers {ranges(hooked)} have hooks or edits in their attention, which would not "
                "take part"
            )
        return self._found_by_trial(last)

    @cached_property
    def _attention_modules(self) -> dict[int, list[torch.nn.Module]]:
        """All that is inside the attention of each layer."""
        return {layer: modules_of(self.model.blocks[layer].attn) for layer in self.attention_layers}

    def _found_by_trial(self, last: int) -> str | None:
        """Why the layers up to `last` cannot be fused."""
        if last not in self._edit_at:
            found = [why for at, why in self._refused_at.items() if at <= last]
            if found:
                return found[0]
            left_out: list[torch.nn.Module] = []
            try:
                self._try_fused(
                    [layer for layer in self.attention_layers if layer <= last], left_out
                )
            except UnsupportedModelError as error:
                why = error.why if isinstance(error, NotFusedError) else str(error)
                self._refused_at[last] = self._circumstances(left_out) + why
        return self._refused_at.get(last)

    @cached_property
    def _refused_at(self) -> dict[int, str]:
        """By the last layer of a trial, why it failed."""
        return {}

    @cached_property
    def _edit_at(self) -> dict[int, tuple[EditPoint, EditPoint]]:
        """Where each layer that passed a trial can be edited in another pass."""
        return {}

    def _circumstances(self, left_out: Sequence[torch.nn.Module]) -> str:
        """What a trial that failed may have failed for, to be said before the failure itself."""
        said = []
        # Not refused for it: the layers that run may all be on one.
        devices = {str(parameter.device) for parameter in self.model.original_model.parameters()}
        if len(devices) > 1:
            said.append(f"on several devices ({', '.join(sorted(devices))})")
        if left_out:
            names = {id(module): name for name, module in self.model.named_modules()}
            hooked = [names.get(id(module), type(module).__name__) for module in left_out]
            more = f" and {len(hooked) - 3} more" if len(hooked) > 3 else ""
            said.append(f"without the hooks of the caller (modules {', '.join(hooked[:3])}{more})")
        return f"a trial of the model {' and '.join(said)} failed: " if said else ""

    def _try_fused(self, layers: Sequence[int], left_out: list[torch.nn.Module]) -> None:
        """Runs a few tokens, and each layer's attention twice on the same input.

        The Hugging Face modules could hold other weights than the bridge, or the bridge could
        compute something else than they do, which no comparison among the former would show. So the
        output of each is compared, and queries and keys where the bridge shows them rotated; the
        rest of the model is the same in both kinds of pass. Hooks of the caller do not see these
        tokens. Where this passes, `_edit_at` holds the layers.

        Args:
            layers: All layers that run and have attention.
            left_out: Filled with the modules that such hooks are on.

        Raises:
            UnsupportedModelError: The pass fails, or shows too little, or they differ.
        """
        n_tokens = min(_TRIAL_TOKENS, self.trained_context, int(self.model.cfg.d_vocab))
        edit_at: dict[int, tuple[EditPoint, EditPoint]] = {}

        @contextmanager
        def watching(visit: Visit) -> Iterator[dict[str, Any]]:
            # Our own hooks come after them.
            with (
                self._uncached(),
                without_callers_hooks(self.model) as hooked,
                self._kept(layers) as seen,
            ):
                left_out.extend(hooked)
                readings: dict[int, LayerReading] = {}

                def beside(layer: int, own: Callable[[], Any]) -> Callable[[Any], None]:
                    seen.clear()
                    theirs = _output(own())
                    readings[layer] = self._reading(layer, seen)
                    edit_at[layer] = readings[layer].edit_at

                    def compare(output: Any) -> None:
                        self._compare(f"attention output of layer {layer}", _output(output), theirs)
                        if layer == layers[-1]:
                            raise _LastLayerRead

                    return compare

                def compare_queries_and_keys(reading: LayerReading) -> None:
                    own = readings.pop(reading.layer)
                    if own.route == "hook_rot":
                        self._compare(f"q of layer {reading.layer}", reading.q, own.q)
                        self._compare(f"k of layer {reading.layer}", reading.k, own.k)

                with self._fused(layers, layers, compare_queries_and_keys, edit_at, beside):
                    yield {}

        # Hooks are left out inside, where the model is ours alone.
        self._forward(range(n_tokens), lambda reading: None, watching, None)
        self._edit_at.update(edit_at)

    def _compare(
        self, what: str, ours: Float[Tensor, "pos ..."], theirs: Float[Tensor, "pos ..."]
    ) -> None:
        """Raises `NotFusedError` where a fused pass and the bridge's own come to different ends."""
        is_fine = torch.finfo(self._dtype).eps <= torch.finfo(torch.float32).eps
        off = torch.tensor(torch.inf)
        if ours.shape == theirs.shape:
            by_position = (ours - theirs).abs().flatten(1).amax(dim=1)
            # Large scores that are rounded change some tokens; another computation changes all.
            off = by_position.amax() if is_fine else by_position.median()
            off = off / theirs.abs().max().clamp_min(torch.finfo(theirs.dtype).tiny)
        if not off <= (1e-4 if is_fine else 2e-2):
            raise NotFusedError(
                f"{what} would differ by {float(off):.1e} from what the bridge computes"
            )

    def _fused(
        self,
        run: Sequence[int],
        layers: Sequence[int],
        visit: Visit,
        edit_at: Mapping[int, tuple[EditPoint, EditPoint]] | None = None,
        beside: Beside | None = None,
    ) -> AbstractContextManager[None]:
        """Fused attention in all layers that run, those that are read being visited."""
        edit_at = self._edit_at if edit_at is None else edit_at
        config = _text_config(self.model.original_model.config)
        attentions = {layer: self.model.blocks[layer].attn for layer in run}
        windows = {
            layer: _window(attn.original_component, config, layer)
            for layer, attn in attentions.items()
        }

        def take(fused: FusedLayer) -> None:
            visit(self._fused_reading(fused, windows[fused.layer], edit_at[fused.layer]))

        visits = dict.fromkeys(layers, take)
        return fused_attention(attentions, windows, visits, self._configs, beside)

    def _fused_reading(
        self, fused: FusedLayer, window: int | None, edit_at: tuple[EditPoint, EditPoint]
    ) -> LayerReading:
        layer, sampled = fused.layer, fused.sampled
        after = torch.cat([fused.q, fused.k], dim=1)
        cos, sin = self._tables(layer, {"hook_cos": fused.cos, "hook_sin": fused.sin}, len(after))
        if len(after) > 1 and torch.equal(fused.before, after):
            cos = sin = None  # a layer without RoPE is given them as well
        attn = self.model.blocks[layer].attn.original_component
        return LayerReading(
            layer=layer,
            route="hook_rot",
            q=fused.q,
            k=fused.k,
            rotary_start=int(getattr(attn, "qk_nope_head_dim", None) or 0),
            sample=(fused.before, after),
            cos=cos,
            sin=sin,
            inv_freq_candidates=self._candidates(),
            scores=sampled.scores,
            pattern=sampled.pattern,
            scale=fused.scale,
            softcap=fused.softcap,
            sinks=fused.sinks,
            window=window,
            trained_context=self.trained_context,
            edit_at=edit_at,
            rows=sampled.rows,
            output_error=sampled.output_error,
        )

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
        for module in self._rotary_modules:
            # GPT-J keeps sines, then cosines, of all positions.
            table = module._buffers.get("embed_positions")
            if table is not None:
                sin, cos = table[:n_pos].to(seen["hook_pattern"].device).chunk(2, dim=-1)
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

    @cached_property
    def _configs(self) -> list[Any]:
        """Every configuration that the Hugging Face model's modules read, the outermost first."""
        root = self.model.original_model
        found = {id(root.config): root.config}
        for module in modules_of(root):
            config = getattr(module, "config", None)
            for part in (config, *(getattr(config, key, None) for key in _parts(config))):
                if hasattr(part, "_attn_implementation"):
                    found.setdefault(id(part), part)
        return list(found.values())

    @cached_property
    def _rotary_modules(self) -> list[torch.nn.Module]:
        """Modules with frequencies or tables of angles; some set these anew as they run."""
        return [
            module
            for module in modules_of(self.model.original_model)
            if any("inv_freq" in name or name == "embed_positions" for name in module._buffers)
        ]

    def _candidates(self) -> tuple[np.ndarray, ...]:
        """Every `inv_freq` that the model's rotary modules hold."""
        return tuple(
            buffer.detach().double().cpu().numpy()
            for module in self._rotary_modules
            for name, buffer in module._buffers.items()
            if "inv_freq" in name and buffer is not None and buffer.ndim == 1
        )

    def _refusal(self, layer: int, why: str) -> UnsupportedModelError:
        kind = type(self.model.blocks[layer].attn.original_component).__name__
        return UnsupportedModelError(
            f"cannot read layer {layer} of {self.model.cfg.model_name} ({kind}) on the "
            f"TransformerBridge: {why}; try HookedTransformer of transformer-lens 3.9, or another "
            "model"
        )


def _output(returned: Any) -> Float[Tensor, "pos d_model"]:
    """What an attention module returns for the one prompt, without what it adds to it."""
    return (returned[0] if isinstance(returned, tuple) else returned)[0]


class _LastLayerRead(BaseException):
    """Ends a pass of which nothing more is wanted; no `except Exception` is to stop it."""


def _parts(config: Any) -> Iterable[str]:
    return getattr(config, "sub_configs", None) or ()


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
