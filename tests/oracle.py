"""What the models compute, found without TransformerLens and without lens_rope.

- `spy` runs a Hugging Face model whose attention function is ours: it is handed the queries and
  keys that the model's own modelling code rotated, and everything else that goes into the scores.
- `contributions` forms what a pair adds to a score in plain complex128 loops.
- The tables and formulas of `EXPECTED` were written by hand: layouts from the modelling code that
  each comment names, frequencies from the papers on scaling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from zoo import CONTEXT, LONGROPE_LONG, LONGROPE_SHORT


@dataclasses.dataclass(frozen=True, eq=False)
class Attention:
    """What one layer's attention function was handed, and its attention.

    Attributes:
        q: `[pos, head, d_head]` Rotated queries, float64.
        k: `[pos, kv_head, d_head]` Rotated keys, float64.
        scale: Factor on query-key products.
        softcap: Soft-cap of the scores, or None.
        sinks: `[head]` Learned sink logits, or None.
        pattern: `[head, q_pos, k_pos]` Attention.
    """

    q: np.ndarray
    k: np.ndarray
    scale: float
    softcap: float | None
    sinks: np.ndarray | None
    pattern: np.ndarray


_seen: list[Attention] = []


def _spying_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention from its definition; `[batch, head, pos, d_head]` in, heads last out."""
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = scale * (query @ keys.mT)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + attention_mask).float()
    if s_aux is not None:
        sink = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink.to(scores)], dim=-1)
    pattern = scores.softmax(dim=-1)[..., : key.shape[2]].to(query.dtype)
    _seen.append(
        Attention(
            q=query[0].transpose(0, 1).double().numpy(),
            k=key[0].transpose(0, 1).double().numpy(),
            scale=scale,
            softcap=None if softcap is None else float(softcap),
            sinks=None if s_aux is None else s_aux.detach().double().numpy(),
            pattern=pattern[0].double().numpy(),
        )
    )
    return (pattern @ values).transpose(1, 2).contiguous(), pattern


AttentionInterface.register("spy", _spying_attention)
AttentionMaskInterface.register("spy", eager_mask)


def spy(model: torch.nn.Module, token_ids: torch.Tensor, **kwargs: Any) -> list[Attention]:
    """One `Attention` per layer of a model that was made with `attention="spy"`."""
    _seen.clear()
    with torch.no_grad():
        model(token_ids, use_cache=False, **kwargs)
    seen = list(_seen)
    _seen.clear()
    return seen


def pair_components(pairing: str, rotary_dim: int, start: int = 0) -> list[tuple[int, int]]:
    """The two components of each pair."""
    half = rotary_dim // 2
    if pairing == "half":
        return [(start + i, start + i + half) for i in range(half)]
    return [(start + 2 * i, start + 2 * i + 1) for i in range(half)]


def contributions(
    q: np.ndarray, k: np.ndarray, scale: float, pairs: list[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """What each pair, and all that is in no pair, adds to each score.

    Args:
        q: `[pos, head, d_head]` Rotated queries.
        k: `[pos, kv_head, d_head]` Rotated keys.
        scale: Factor on query-key products.
        pairs: The two components of each pair.

    Returns:
        `[head, pair, q_pos, k_pos]` and `[head, q_pos, k_pos]`.
    """
    n_pos, n_heads, d_head = q.shape
    groups = n_heads // k.shape[1]
    rest = [c for c in range(d_head) if not any(c in pair for pair in pairs)]
    by_pair = np.zeros((n_heads, len(pairs), n_pos, n_pos))
    passed = np.zeros((n_heads, n_pos, n_pos))
    for head in range(n_heads):
        for i, (a, b) in enumerate(pairs):
            z_q = q[:, head, a] + 1j * q[:, head, b]
            z_k = k[:, head // groups, a] + 1j * k[:, head // groups, b]
            for m in range(n_pos):
                by_pair[head, i, m] = scale * (z_q[m] * z_k.conj()).real
        for m in range(n_pos):
            for n in range(n_pos):
                passed[head, m, n] = scale * q[m, head, rest] @ k[n, head // groups, rest]
    return by_pair, passed


def visible(n_pos: int, window: int | None) -> np.ndarray:
    """`[q_pos, k_pos]` Which keys each query sees."""
    seen = np.zeros((n_pos, n_pos), dtype=bool)
    for m in range(n_pos):
        for n in range(m + 1):
            seen[m, n] = window is None or m - n < window
    return seen


def plain(rotary_dim: int, theta: float = 1e4) -> np.ndarray:
    """`theta ** (-2 i / r)`, Su et al. 2021, arXiv 2104.09864, section 3.2.2."""
    return np.array([theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)])


def llama3(
    rotary_dim: int, theta: float, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """NTK by parts with a linear ramp in the number of turns over the original context.

    A pair that makes fewer than `low` turns is divided by `factor`, one that makes more than
    `high` is kept (Llama 3.1 model card; Peng et al. 2023, arXiv 2309.00071, section 3.2).
    """
    scaled = []
    for w in plain(rotary_dim, theta):
        turns = original * w / (2 * np.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        scaled.append(kept * w + (1 - kept) * w / factor)
    return np.array(scaled)


def yarn(
    rotary_dim: int,
    theta: float,
    factor: float,
    original: int,
    fast: float = 32.0,
    slow: float = 1.0,
    truncate: bool = True,
) -> np.ndarray:
    """YaRN, Peng et al. 2023, arXiv 2309.00071, with the ramp over pair indices of its code."""

    def index(turns: float) -> float:
        return rotary_dim * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(theta))

    low, high = index(fast), index(slow)
    if truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0.0), min(high, rotary_dim - 1.0)
    scaled = []
    for i, w in enumerate(plain(rotary_dim, theta)):
        interpolated = min(max((i - low) / (high - low), 0.0), 1.0)
        scaled.append(interpolated * w / factor + (1 - interpolated) * w)
    return np.array(scaled)


def dynamic_ntk(rotary_dim: int, theta: float, factor: float, n: int, trained: int) -> np.ndarray:
    """Base that grows with the length beyond the trained context (Hugging Face's rule)."""
    if n > trained:
        theta *= (factor * n / trained - (factor - 1)) ** (rotary_dim / (rotary_dim - 2))
    return plain(rotary_dim, theta)


def _longrope(n_pos: int) -> np.ndarray:
    """Each frequency has its own divisor, Ding et al. 2024, arXiv 2402.13753."""
    return plain(16) / np.array(LONGROPE_LONG if n_pos > 16 else LONGROPE_SHORT)


def yarn_factor(factor: float) -> float:
    """`0.1 ln(s) + 1`, arXiv 2309.00071, section 3.4 (there on the square of the temperature)."""
    return 0.1 * np.log(factor) + 1


@dataclasses.dataclass(frozen=True)
class Expected:
    """What is to be read of one architecture of the zoo.

    Attributes:
        inv_freq: `[pair]` Angular frequencies by number of tokens, or one function per layer.
        pairing: Which components form a pair, in the queries and keys that are multiplied.
        rotary_dim: Number of rotated components.
        d_head: Number of components.
        kv_heads: Number of key heads.
        start: First rotated component.
        scale: Factor on query-key products.
        factor: Attention factor.
        softcap: Soft-cap, or None.
        windows: Window per layer.
        sinks: Whether there are learned sinks.
        unrotated: Layers without RoPE.
        context: Trained context.
    """

    inv_freq: Callable[[int], np.ndarray] | tuple[Callable[[int], np.ndarray], ...]
    pairing: str = "half"
    rotary_dim: int = 16
    d_head: int = 16
    kv_heads: int = 2
    start: int = 0
    scale: float = 0.25
    factor: float = 1.0
    softcap: float | None = None
    windows: tuple[int | None, ...] = (None, None)
    sinks: bool = False
    unrotated: tuple[int, ...] = ()
    context: int = CONTEXT

    def frequencies(self, layer: int, n_pos: int) -> np.ndarray:
        """`[pair]` Angular frequencies of one layer in a pass of `n_pos` tokens."""
        if layer in self.unrotated:
            return np.zeros(0)
        each = self.inv_freq
        return (each[layer] if isinstance(each, tuple) else each)(n_pos)

    def pairs(self, layer: int) -> list[tuple[int, int]]:
        """The two components of each pair of one layer."""
        if layer in self.unrotated:
            return []
        return pair_components(self.pairing, self.rotary_dim, self.start)


def _plain(rotary_dim: int = 16, theta: float = 1e4) -> Callable[[int], np.ndarray]:
    return lambda n_pos: plain(rotary_dim, theta)


_LOCAL, _GLOBAL = _plain(16, 1e4), _plain(16, 1e6)

EXPECTED: dict[str, Expected] = {
    # modeling_llama: rotate_half takes x[..., : d // 2] and x[..., d // 2 :], so pair i is
    # (i, i + d / 2). The same function and the whole head in mistral, mixtral, qwen2, qwen3,
    # gemma, gemma2, gemma3, phi3, olmo2 and smollm3.
    "llama": Expected(_plain()),
    "llama-llama3": Expected(lambda n: llama3(16, 5e5, 8.0, 1.0, 4.0, 32)),
    "llama-llama3-8192": Expected(lambda n: llama3(16, 5e5, 8.0, 1.0, 4.0, 8192)),
    "llama-linear": Expected(lambda n: plain(16) / 4),
    "llama-dynamic": Expected(lambda n: dynamic_ntk(16, 1e4, 4.0, n, 32), context=32),
    "llama-yarn": Expected(lambda n: yarn(16, 1e4, 4.0, 32), factor=yarn_factor(4.0)),
    "mistral": Expected(_plain(), windows=(16, 16)),
    # MixtralConfig.default_theta is 1e6.
    "mixtral": Expected(_plain(16, 1e6)),
    "qwen2": Expected(_plain(16, 1e6)),
    "qwen3": Expected(_plain(32), rotary_dim=32, d_head=32, scale=32**-0.5),
    "gemma": Expected(_plain()),
    # modeling_gemma2: scaling is query_pre_attn_scalar ** -0.5; even layers slide.
    "gemma2": Expected(_plain(), scale=24**-0.5, softcap=2.0, windows=(16, None)),
    # configuration_gemma3: five sliding layers of base 1e4, then one global of base 1e6.
    "gemma3": Expected((_LOCAL,) * 5 + (_GLOBAL,), scale=24**-0.5, windows=(16,) * 5 + (None,)),
    # modeling_phi: the first head_dim * partial_rotary_factor (0.5) components, in halves.
    "phi": Expected(_plain(8), rotary_dim=8),
    "phi3": Expected(_plain()),
    # _compute_longrope_parameters: factor sqrt(1 + ln(s) / ln(original)), s = 128 / 16.
    "phi3-longrope": Expected(_longrope, factor=np.sqrt(1 + np.log(8) / np.log(16))),
    # modeling_gpt_neox: the first head_size * 0.25 components, in halves; no grouped keys.
    "gpt-neox": Expected(_plain(4), rotary_dim=4, kv_heads=4),
    # modeling_gptj: rotate_every_two takes x[..., ::2] and x[..., 1::2] of the first rotary_dim.
    "gpt-j": Expected(_plain(8), "adjacent", rotary_dim=8, kv_heads=4),
    # modeling_stablelm: the first head_dim * 0.25 components, in halves.
    "stablelm": Expected(_plain(4), rotary_dim=4),
    "stablelm-qk-norm": Expected(_plain(4), rotary_dim=4),
    # modeling_olmo: clip_qkv clamps queries, keys and values before the rotation in halves.
    "olmo-clip": Expected(_plain()),
    "olmo2": Expected(_plain()),
    # modeling_gpt_oss: torch.chunk(x, 2) is halves; YaRN of base 1.5e5, factor 32 over 4096
    # tokens without truncation; even layers slide.
    "gpt-oss": Expected(
        lambda n: yarn(16, 1.5e5, 32.0, 4096, truncate=False),
        factor=yarn_factor(32.0),
        windows=(16, None),
        sinks=True,
    ),
    # modeling_cohere: rotate_half takes x[..., ::2] and x[..., 1::2], angles repeat_interleave'd.
    "cohere": Expected(_plain(16, 5e5), "adjacent"),
    # modeling_glm: rotate_half takes x[..., 0::2] and x[..., 1::2] of the first half of a head.
    "glm": Expected(_plain(8), "adjacent", rotary_dim=8),
    # configuration_smollm3: no_rope_layers leaves out every fourth layer.
    "smollm3": Expected(_plain(16, 2e6), windows=(None,) * 4, unrotated=(3,)),
    # modeling_deepseek_v3: qk_nope_head_dim components, then qk_rope_head_dim rotated ones; the
    # interleaved variant sorts its pairs into halves as it rotates.
    "deepseek-v3": Expected(_plain(8), rotary_dim=8, start=8, kv_heads=4),
    "deepseek-v3-interleaved": Expected(_plain(8), rotary_dim=8, start=8, kv_heads=4),
}


def own_rotary(model: torch.nn.Module, layer: int) -> tuple[np.ndarray, float]:
    """Frequencies and attention factor that a Hugging Face model's rotary module holds.

    They are those of the last forward pass: some scalings set them anew by its length.
    """
    for name, module in model.named_modules():
        if not name.endswith("rotary_emb"):
            continue
        if hasattr(module, "embed_positions"):  # GPT-J: sines, then cosines, of all positions
            sin, cos = module.embed_positions[1].double().chunk(2)
            return torch.atan2(sin, cos).numpy(), 1.0
        prefix = ""
        if not hasattr(module, "inv_freq"):  # one set of angles per type of layer
            prefix = model.config.layer_types[layer] + "_"
        inv_freq = getattr(module, prefix + "inv_freq").double().numpy()
        return inv_freq, float(getattr(module, prefix + "attention_scaling"))
    raise LookupError("this model has no rotary module")
