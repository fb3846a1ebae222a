"""Tiny random models of every architecture under test.

Hidden size 64, 4 heads, 2 key-value heads where the architecture has them, 128 tokens. Default
initialisation makes scores so small that a wrong rotation hides in any tolerance, so matrices are
multiplied by `GAIN`; norms and biases are moved off their neutral values, because a neutral norm
commutes with the rotation and would not tell whether it came before or after.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import tokenizers
import torch
import transformers as hf
from transformer_lens.model_bridge import TransformerBridge

try:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
except ImportError:  # transformer-lens 4 has only the bridge
    HookedTransformer = HookedTransformerConfig = None

VOCAB = 128
GAIN = 8.0
HOOKED_GAIN = 2.5  # its initialisation is larger
CONTEXT = 128

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}

LONGROPE_SHORT = [1.0 + 0.1 * i for i in range(8)]
LONGROPE_LONG = [2.0 + i for i in range(8)]


def _scaled(rope_type: str, theta: float = 1e4, **kwargs: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **kwargs}}


def _config(cls: Callable[..., Any], without: tuple[str, ...] = (), **kwargs: Any) -> Callable:
    base = {key: value for key, value in _BASE.items() if key not in without}
    return lambda: cls(**{**base, **kwargs})


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _config(hf.LlamaConfig),
    "llama-llama3": _config(
        hf.LlamaConfig,
        **_scaled(
            "llama3",
            5e5,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-llama3-8192": _config(
        hf.LlamaConfig,
        **_scaled(
            "llama3",
            5e5,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "llama-linear": _config(hf.LlamaConfig, **_scaled("linear", factor=4.0)),
    "llama-dynamic": _config(
        hf.LlamaConfig, max_position_embeddings=32, **_scaled("dynamic", factor=4.0)
    ),
    "llama-yarn": _config(
        hf.LlamaConfig, **_scaled("yarn", factor=4.0, original_max_position_embeddings=32)
    ),
    "mistral": _config(hf.MistralConfig, sliding_window=16),
    "mixtral": _config(hf.MixtralConfig, num_local_experts=2),
    "qwen2": _config(hf.Qwen2Config, **_scaled("default", 1e6)),
    "qwen3": _config(hf.Qwen3Config, head_dim=32),
    "gemma": _config(hf.GemmaConfig, head_dim=16),
    "gemma2": _config(
        hf.Gemma2Config,
        head_dim=16,
        sliding_window=16,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=24,
    ),
    "gemma3": _config(
        hf.Gemma3TextConfig,
        num_hidden_layers=6,
        head_dim=16,
        sliding_window=16,
        query_pre_attn_scalar=24,
    ),
    "phi": _config(hf.PhiConfig),
    "phi3": _config(hf.Phi3Config),
    "phi3-longrope": _config(
        hf.Phi3Config,
        original_max_position_embeddings=16,
        **_scaled(
            "longrope",
            short_factor=LONGROPE_SHORT,
            long_factor=LONGROPE_LONG,
            original_max_position_embeddings=16,
        ),
    ),
    "gpt-neox": _config(hf.GPTNeoXConfig, without=("num_key_value_heads",)),
    "gpt-j": lambda: hf.GPTJConfig(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT,
        rotary_dim=8,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "stablelm": _config(hf.StableLmConfig),
    "stablelm-qk-norm": _config(hf.StableLmConfig, qk_layernorm=True),
    "olmo-clip": _config(hf.OlmoConfig, clip_qkv=2.0),
    "olmo2": _config(hf.Olmo2Config),
    "gpt-oss": _config(
        hf.GptOssConfig,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=16,
    ),
    "cohere": _config(hf.CohereConfig),
    "glm": _config(hf.GlmConfig, head_dim=16),
    "smollm3": _config(hf.SmolLM3Config, num_hidden_layers=4),
    "deepseek-v3": _config(hf.DeepseekV3Config, **_DEEPSEEK, rope_interleave=False),
    "deepseek-v3-interleaved": _config(hf.DeepseekV3Config, **_DEEPSEEK, rope_interleave=True),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT
    ),
}


def tokens(n_tokens: int, seed: int = 0) -> torch.Tensor:
    """`[1, n_tokens]` Random token ids, special tokens left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB, (1, n_tokens), generator=generator)


@functools.cache
def tokenizer() -> Any:
    """One word per token, saved and loaded again as the bridge will do with its name."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t3")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="t1", eos_token="t2", pad_token="t0", unk_token="t3"
    )
    # The bridge loads it again later, so the directory lives as long as the process.
    _KEPT.append(directory := tempfile.TemporaryDirectory())
    fast.save_pretrained(directory.name)
    return hf.AutoTokenizer.from_pretrained(directory.name)


_KEPT: list[tempfile.TemporaryDirectory] = []


def hf_model(
    name: str, *, attention: str = "eager", gain: float = GAIN, config: Any = None
) -> torch.nn.Module:
    """A Hugging Face model; the same weights each time.

    Args:
        name: Key of `CONFIGS`, ignored where a configuration is given.
        attention: Name of the attention implementation.
        gain: Factor on matrices other than embeddings.
        config: Configuration to use instead.
    """
    torch.manual_seed(0)
    config = config if config is not None else CONFIGS[name]()
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
            elif "embed" not in key and "wte" not in key:
                parameter.mul_(gain)
    model.config.architectures = [type(model).__name__]
    return model


def bridge_of(model: torch.nn.Module, name: str) -> TransformerBridge:
    """A `TransformerBridge` around a Hugging Face model, which it may change."""
    return TransformerBridge.boot_transformers(name, hf_model=model, tokenizer=tokenizer())


def qwen2_5_vl() -> hf.Qwen2_5_VLConfig:
    """Text tokens of a model whose positions are three streams: time, height and width."""
    streams = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    return hf.Qwen2_5_VLConfig(
        text_config={**_BASE, "rope_parameters": streams},
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 32,
            "out_hidden_size": 64,
        },
        image_token_id=100,
        video_token_id=101,
        vision_start_token_id=102,
        vision_end_token_id=103,
    )


def qwen2_5_vl_bridge() -> TransformerBridge:
    """Its bridge. Only the text model runs: neither torchvision nor an image processor is there."""
    from transformer_lens.model_bridge.supported_architectures import qwen2_5_vl as supported

    model = hf.Qwen2_5_VLForConditionalGeneration._from_config(
        qwen2_5_vl(), attn_implementation="eager"
    )
    model.config.architectures = [type(model).__name__]
    adapter = supported.Qwen2_5_VLArchitectureAdapter
    with (
        mock.patch.object(adapter, "required_libraries", []),
        mock.patch.object(hf.AutoProcessor, "from_pretrained", lambda *args, **kwargs: None),
    ):
        return bridge_of(model.eval(), "qwen2.5-vl")


@functools.cache
def bridge(name: str) -> TransformerBridge:
    """The bridge of a tiny model, shared between tests, which must leave it as it is."""
    return bridge_of(hf_model(name), name)


def hooked(seed: int = 0, **overrides: Any) -> HookedTransformer:
    """A `HookedTransformer` from its configuration alone, with 16 components per head."""
    torch.manual_seed(seed)
    values: dict[str, Any] = {
        "n_layers": 2,
        "d_model": 64,
        "n_ctx": CONTEXT,
        "d_head": 16,
        "n_heads": 4,
        "d_vocab": VOCAB,
        "d_mlp": 96,
        "act_fn": "silu",
        "gated_mlp": True,
        "normalization_type": "RMS",
        "positional_embedding_type": "rotary",
        "rotary_dim": 16,
    }
    model = HookedTransformer(HookedTransformerConfig(**{**values, **overrides}))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("W_Q", "W_K")):
                parameter.mul_(HOOKED_GAIN)
            elif key.endswith((".w", "b_Q", "b_K", "sinks")):
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()
