"""Every kind of rotary attention that a `HookedTransformer` can be configured to have.

Identity: queries and keys from the model's own `hook_q` and `hook_k`, normalised or clipped as
the configuration says and rotated here in complex128 by frequencies from the papers' formulas, are
those of the capture; and the contributions of their pairs plus the pass-through sum to the model's
own `hook_attn_scores`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import zoo

from lens_rope.capturing import capture, read_rope
from lens_rope.decomposition import decompose
from lens_rope.errors import UnsupportedModelError, VerificationError
from lens_rope.records import RotaryCapture
from lens_rope.rotation import to_pairs, unrotate

pytestmark = pytest.mark.skipif(
    zoo.HookedTransformer is None, reason="this transformer-lens has no HookedTransformer"
)

TOLERANCE = 1e-5
FLOAT32 = float(np.finfo(np.float32).eps)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors as small as these take longer to share out than to work on."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A configuration, and what is to be read of it.

    Attributes:
        overrides: Fields of the configuration.
        inv_freq: `[pair]` Frequencies of each layer by number of tokens.
        pairing: Which components form a pair.
        rotary_dim: Number of rotated components.
        kv_heads: Number of key heads.
        scales: Factor on query-key products of each layer.
        factor: Attention factor.
        softcap: Soft-cap, or None.
        windows: Window of each layer.
        has_sinks: Whether there are learned sinks.
        before: What happens to `hook_q` and `hook_k` before the rotation.
    """

    overrides: dict[str, Any]
    inv_freq: tuple[Callable[[int], np.ndarray], Callable[[int], np.ndarray]] = (
        lambda n: oracle.plain(16),
    ) * 2
    pairing: str = "half"
    rotary_dim: int = 16
    kv_heads: int = 4
    scales: tuple[float, float] = (0.25, 0.25)
    factor: float = 1.0
    softcap: float | None = None
    windows: tuple[int | None, int | None] = (None, None)
    has_sinks: bool = False
    before: Callable[[np.ndarray, np.ndarray | None], np.ndarray] = lambda x, weight: x

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The two components of each pair."""
        return oracle.pair_components(self.pairing, self.rotary_dim)


def both(inv_freq: Callable[[int], np.ndarray]) -> tuple[Any, Any]:
    return inv_freq, inv_freq


def clipped(x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    return x.clip(-0.5, 0.5)


def normalised(x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * weight


def qwen_dynamic(n_tokens: int, trained: int = 16) -> np.ndarray:
    """Qwen's rule: the base grows by 1, 3, 7, ... as the length passes 1, 2, 4, ... times."""
    stretch = 1.0
    if n_tokens > trained:
        stretch = 2.0 ** np.ceil(np.log2(n_tokens / trained) + 1) - 1
    return oracle.plain(16, 1e4 * stretch ** (16 / 14))


NTK = {
    "rotary_base": 500000,
    "use_NTK_by_parts_rope": True,
    "NTK_by_parts_factor": 8.0,
    "NTK_by_parts_low_freq_factor": 1.0,
    "NTK_by_parts_high_freq_factor": 4.0,
    "NTK_original_ctx_len": 32,
}
YARN = {
    "use_yarn_rope": True,
    "yarn_factor": 4.0,
    "yarn_original_max_position_embeddings": 32,
    "yarn_attention_factor": 1.1386,
}
LOCAL = {
    "rotary_base": 1000000,
    "rotary_base_local": 1000,
    "use_local_attn": True,
    "attn_types": ["local", "global"],
    "window_size": 16,
}

VARIANTS: dict[str, Variant] = {
    "half": Variant({}),
    "adjacent": Variant({"rotary_adjacent_pairs": True}, pairing="adjacent"),
    "base-1e6": Variant({"rotary_base": 1000000}, both(lambda n: oracle.plain(16, 1e6))),
    "partial": Variant({"rotary_dim": 4}, both(lambda n: oracle.plain(4)), rotary_dim=4),
    "partial-adjacent": Variant(
        {"rotary_dim": 8, "rotary_adjacent_pairs": True},
        both(lambda n: oracle.plain(8)),
        pairing="adjacent",
        rotary_dim=8,
    ),
    "grouped": Variant({"n_key_value_heads": 2}, kv_heads=2),
    "multi-query": Variant({"n_key_value_heads": 1}, kv_heads=1),
    "grouped-expanded": Variant(
        {"n_key_value_heads": 2, "ungroup_grouped_query_attention": True}, kv_heads=2
    ),
    "qk-norm": Variant({"use_qk_norm": True}, before=normalised),
    "clip": Variant({"clip_qkv": 0.5}, before=clipped),
    "softcap": Variant({"attn_scores_soft_cap": 2.0}, softcap=2.0),
    "ntk-by-parts": Variant(NTK, both(lambda n: oracle.llama3(16, 5e5, 8.0, 1.0, 4.0, 32))),
    "ntk-by-parts-8192": Variant(
        {**NTK, "NTK_original_ctx_len": 8192},
        both(lambda n: oracle.llama3(16, 5e5, 8.0, 1.0, 4.0, 8192)),
    ),
    "yarn": Variant(YARN, both(lambda n: oracle.yarn(16, 1e4, 4.0, 32)), factor=1.1386),
    "linear": Variant({"rotary_scaling_factor": 4.0}, both(lambda n: oracle.plain(16) / 4)),
    "dynamic": Variant({"use_dynamic_ntk_rope": True, "train_seq_length": 16}, both(qwen_dynamic)),
    "local-base-with-window": Variant(
        LOCAL,
        (lambda n: oracle.plain(16, 1e3), lambda n: oracle.plain(16, 1e6)),
        windows=(16, None),
    ),
    "inverse-layer-scale": Variant({"scale_attn_by_inverse_layer_idx": True}, scales=(0.25, 0.125)),
    "no-scale": Variant({"use_attn_scale": False}, scales=(1.0, 1.0)),
    "other-scale": Variant({"attn_scale": 24**0.5}, scales=(24**-0.5,) * 2),
    "split-input": Variant({"use_split_qkv_input": True}),
    "sinks": Variant({"use_attention_sinks": True}, has_sinks=True),
}
CASES = [(name, n) for name in VARIANTS for n in (17, 40)]
each_case = pytest.mark.parametrize(
    ("name", "n_tokens"), CASES, ids=[f"{name}-{n}" for name, n in CASES]
)


@functools.cache
def model(name: str) -> Any:
    return zoo.hooked(**VARIANTS[name].overrides)


@functools.cache
def captured(name: str, n_tokens: int) -> RotaryCapture:
    return capture(model(name), zoo.tokens(n_tokens))


@functools.cache
def cached(name: str, n_tokens: int) -> dict[str, np.ndarray]:
    """The model's own activations of one prompt, by hook name, in float64."""
    with torch.no_grad():
        _, cache = model(name).run_with_cache(zoo.tokens(n_tokens))
    return {key: value[0].double().numpy() for key, value in cache.items()}


def own(name: str, n_tokens: int, layer: int, hook: str) -> np.ndarray:
    return cached(name, n_tokens)[f"blocks.{layer}.attn.hook_{hook}"]


def before_rotation(name: str, n_tokens: int, layer: int, side: str) -> np.ndarray:
    """`[pos, head, d_head]` From `hook_q` or `hook_k`, one row per head of its own."""
    variant, attention = VARIANTS[name], model(name).blocks[layer].attn
    norm = getattr(attention, f"{side}_norm", None)
    weight = None if norm is None else norm.w.detach().double().numpy()
    x = own(name, n_tokens, layer, side)
    n_heads = 4 if side == "q" else variant.kv_heads
    return variant.before(x, weight)[:, :: x.shape[1] // n_heads]


def rotated(
    x: np.ndarray, pairs: list[tuple[int, int]], inv_freq: np.ndarray, factor: float = 1.0
) -> np.ndarray:
    """`[pos, head, d_head]` Pair by pair and position by position, in complex128."""
    result = x.copy()
    for i, (a, b) in enumerate(pairs):
        for m in range(len(x)):
            z = factor * (x[m, :, a] + 1j * x[m, :, b]) * np.exp(1j * inv_freq[i] * m)
            result[m, :, a], result[m, :, b] = z.real, z.imag
    return result


def off(ours: Any, theirs: np.ndarray) -> float:
    """Largest difference relative to the largest true value; infinite where shapes differ."""
    ours = np.asarray(ours, dtype=np.float64)
    return (
        np.inf if ours.shape != theirs.shape else np.abs(ours - theirs).max() / np.abs(theirs).max()
    )


@each_case
def test_frequencies_are_those_of_the_formula(name: str, n_tokens: int) -> None:
    variant = VARIANTS[name]
    for rope in captured(name, n_tokens).rope().layers:
        expected = variant.inv_freq[rope.layer](n_tokens)
        assert rope.inv_freq.shape == expected.shape
        np.testing.assert_allclose(rope.inv_freq, expected, rtol=1e-6)
        assert (np.abs(rope.inv_freq / expected - 1) <= 3 * rope.inv_freq_error).all()
        assert (rope.inv_freq_error < 1e-6).all()
        assert rope.attention_factor == pytest.approx(variant.factor, rel=1e-6)


@each_case
def test_layout_scale_softcap_sinks_and_window_are_those_of_the_layer(
    name: str, n_tokens: int
) -> None:
    variant = VARIANTS[name]
    for layer in (0, 1):
        record = captured(name, n_tokens).layer(layer)
        rope = record.rope
        assert list(zip(*(c.tolist() for c in rope.components), strict=True)) == variant.pairs
        assert (rope.pairing, rope.rotary_dim) == (variant.pairing, variant.rotary_dim)
        assert (rope.d_head, rope.rotary_start) == (16, 0)
        assert rope.window == variant.windows[layer]
        assert rope.trained_context == zoo.CONTEXT
        assert record.scale == pytest.approx(variant.scales[layer], rel=1e-6)
        assert record.softcap == variant.softcap
        assert (record.n_heads, record.n_kv_heads) == (4, variant.kv_heads)
        assert (record.sinks is not None) == variant.has_sinks
        if record.sinks is not None:
            sinks = model(name).blocks[layer].attn.sinks.detach()
            torch.testing.assert_close(record.sinks, sinks, rtol=0, atol=0)


@each_case
def test_queries_and_keys_are_hook_q_and_hook_k_rotated(name: str, n_tokens: int) -> None:
    variant = VARIANTS[name]
    for layer in (0, 1):
        record, inv_freq = captured(name, n_tokens).layer(layer), variant.inv_freq[layer](n_tokens)
        for ours, side in ((record.q, "q"), (record.k, "k")):
            before = before_rotation(name, n_tokens, layer, side)
            assert off(ours, rotated(before, variant.pairs, inv_freq, variant.factor)) < TOLERANCE
            z, rest = to_pairs(ours, record.rope)
            undone = unrotate(z, record.positions, record.rope).numpy()
            for i, (a, b) in enumerate(variant.pairs):
                true = before[..., a] + 1j * before[..., b]
                assert np.abs(undone[..., i] - true).max() < TOLERANCE * np.abs(before).max()
            passed = before[..., record.rope.pass_components]
            np.testing.assert_allclose(rest, passed, atol=TOLERANCE * np.abs(before).max())


@each_case
def test_contributions_sum_to_the_score_of_the_model(name: str, n_tokens: int) -> None:
    variant = VARIANTS[name]
    for layer in (0, 1):
        q, k = (own(name, n_tokens, layer, f"rot_{side}") for side in "qk")
        scale = variant.scales[layer]
        by_pair, passed = oracle.contributions(q, k, scale, variant.pairs)
        theirs = own(name, n_tokens, layer, "attn_scores")
        seen = oracle.visible(n_tokens, variant.windows[layer])
        for head in range(4):
            ours = decompose(captured(name, n_tokens), layer, head)
            score = by_pair[head].sum(axis=0) + passed[head]
            size = np.abs(score[seen]).max()
            assert size > 0.5, "scores too small for a wrong rotation to show"
            parts, rest = ours.contributions(), ours.pass_through()
            assert parts.shape == by_pair[head].shape
            np.testing.assert_array_equal(np.isnan(parts), np.broadcast_to(~seen, parts.shape))
            assert np.abs(parts - by_pair[head])[:, seen].max() < TOLERANCE * size
            assert np.abs(rest - passed[head])[seen].max() < TOLERANCE * size
            total = parts.sum(axis=0) + rest
            assert np.abs(ours.scores() - total)[seen].max() < TOLERANCE * size
            if variant.softcap is not None:
                assert size > variant.softcap
                total = variant.softcap * np.tanh(total / variant.softcap)
            assert np.abs(total - theirs[head])[seen].max() < TOLERANCE * size


@each_case
def test_pattern_is_that_of_the_model(name: str, n_tokens: int) -> None:
    for layer in (0, 1):
        theirs = own(name, n_tokens, layer, "pattern")
        for head in range(4):
            ours = decompose(captured(name, n_tokens), layer, head).pattern()
            assert np.abs(ours - theirs[head]).max() < TOLERANCE
        if VARIANTS[name].has_sinks:  # a learned sink is no key, so rows are not renormalised
            assert theirs.sum(axis=-1).min() < 0.9
        else:
            assert theirs.sum(axis=-1) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "other"),
    [("split-input", "half"), ("grouped-expanded", "grouped")],
    ids=["split-input", "grouped-expanded"],
)
def test_how_the_host_holds_its_heads_changes_no_number(name: str, other: str) -> None:
    for layer in (0, 1):
        ours, theirs = (captured(key, 40).layer(layer) for key in (name, other))
        assert ours.k.shape == theirs.k.shape
        torch.testing.assert_close(ours.q, theirs.q, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(ours.k, theirs.k, rtol=1e-6, atol=1e-5)
        for head in range(4):
            a, b = (decompose(captured(key, 40), layer, head) for key in (name, other))
            assert a.kv_head == b.kv_head
            np.testing.assert_allclose(a.contributions(), b.contributions(), atol=1e-4)


@pytest.mark.parametrize("name", ["grouped", "grouped-expanded"])
def test_query_head_reads_the_key_head_of_its_group(name: str) -> None:
    keys = own("grouped", 40, 0, "rot_k")
    assert off(keys[:, 0], keys[:, 1]) > 0.1
    record = captured(name, 40).layer(0)
    assert record.n_kv_heads == 2
    for head in range(4):
        assert record.kv_head(head) == head // 2
        assert off(record.k[:, record.kv_head(head)], keys[:, head // 2]) < TOLERANCE


def test_expanded_key_heads_that_were_edited_are_key_heads_of_their_own() -> None:
    edited = zoo.hooked(n_key_value_heads=2, ungroup_grouped_query_attention=True)

    def edit(value: torch.Tensor, hook: Any) -> torch.Tensor:
        value = value.clone()
        value[:, :, 1] *= -1
        return value

    edited.add_perma_hook("blocks.0.attn.hook_k", edit)
    ours = capture(edited, zoo.tokens(40))
    assert [record.n_kv_heads for record in ours.records[0]] == [4, 2]
    keys = own("grouped", 40, 0, "rot_k")
    assert off(ours.layer(0).k, keys[:, [0, 0, 1, 1]] * np.array([1, -1, 1, 1])[:, None]) < 1e-6


def test_dynamic_scaling_is_that_of_the_length_of_the_prompt() -> None:
    slowest = {n: captured("dynamic", n).rope()[0].inv_freq[-1] for n in (16, 17, 40)}
    assert slowest[16] > slowest[17] > slowest[40]
    assert slowest[16] == pytest.approx(qwen_dynamic(16)[-1], rel=1e-6)
    assert not captured("dynamic", 17).rope()[0].same_rotation(captured("dynamic", 40).rope()[0])


def test_linear_scaling_leaves_local_layers_alone() -> None:
    local = zoo.hooked(**LOCAL, rotary_scaling_factor=8.0)
    near, far = read_rope(local).layers
    np.testing.assert_allclose(near.inv_freq, oracle.plain(16, 1e3), rtol=1e-6)
    np.testing.assert_allclose(far.inv_freq, oracle.plain(16, 1e6) / 8, rtol=1e-6)


def test_scale_that_grows_with_the_position_is_refused_beyond_the_trained_length() -> None:
    logn = zoo.hooked(use_logn_attn=True, train_seq_length=16)
    assert capture(logn, zoo.tokens(16)).max_relative_error < TOLERANCE
    with pytest.raises(VerificationError, match=r"layer 0 .* score error") as caught:
        capture(logn, zoo.tokens(40))
    assert caught.value.check == "score"


@pytest.mark.parametrize("kind", ["standard", "shortformer", "alibi"])
def test_model_without_rope_is_refused_by_name(kind: str) -> None:
    without = zoo.hooked(positional_embedding_type=kind, model_name="gpt2-like")
    for read in (read_rope, lambda m: capture(m, zoo.tokens(40))):
        with pytest.raises(UnsupportedModelError, match=f"gpt2-like has no RoPE .*{kind}"):
            read(without)


def test_prompt_longer_than_the_rotary_table_and_shorter_than_the_context() -> None:
    long = zoo.hooked(n_layers=1, n_heads=1, n_ctx=4096, d_mlp=8)
    n_tokens = 3000
    assert long.blocks[0].attn.rotary_cos.shape[0] < n_tokens
    rows = long.blocks[0].attn.rotary_cos.shape[0]
    seen: dict[str, np.ndarray] = {}

    def keep(value: torch.Tensor, hook: Any) -> None:
        seen[hook.name[-1]] = value.detach()[0].double().numpy()

    with torch.no_grad():
        ours = capture(long, zoo.tokens(n_tokens))
        assert long.blocks[0].attn.rotary_cos.shape[0] == rows
        hooks = [(f"blocks.0.attn.hook_{side}", keep) for side in "qk"]
        long.run_with_hooks(zoo.tokens(n_tokens), fwd_hooks=hooks, stop_at_layer=1)
    record = ours.layer(0)
    assert record.rope.trained_context == 4096
    np.testing.assert_allclose(record.rope.inv_freq, oracle.plain(16), rtol=1e-6)
    pairs = oracle.pair_components("half", 16)
    # The model forms its angles in float32: at 3000 rad they are off by up to 2e-4 rad.
    for x, side in ((record.q, "q"), (record.k, "k")):
        assert off(x, rotated(seen[side], pairs, oracle.plain(16))) < 5e-4
    d = decompose(ours, 0, 0)
    parts = d.contributions(queries=[2999, 2500], keys=[0, 2100])
    by_pair, _ = oracle.contributions(
        record.q.double().numpy()[[2999, 2500, 0, 2100]],
        record.k.double().numpy()[[2999, 2500, 0, 2100]],
        record.scale,
        pairs,
    )
    np.testing.assert_allclose(parts, by_pair[0, :, :2, 2:], atol=1e-4)


@pytest.mark.parametrize("name", ["half", "adjacent", "ntk-by-parts", "yarn", "linear", "partial"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_low_precision_angles_are_right_beyond_256_tokens(dtype: torch.dtype, name: str) -> None:
    variant = VARIANTS[name]
    coarse = zoo.hooked(**{**variant.overrides, "n_ctx": 512})
    coarse.to(dtype, print_details=False)
    ours = capture(coarse, zoo.tokens(300))
    assert ours.model.dtype == str(dtype).removeprefix("torch.")
    assert 1e-5 < ours.max_relative_error < 2e-2
    for rope in ours.rope().layers:
        expected = variant.inv_freq[rope.layer](300)
        np.testing.assert_allclose(rope.inv_freq, expected, rtol=1e-6)
        assert (np.abs(rope.inv_freq / expected - 1) <= 3 * rope.inv_freq_error).all()
        assert rope.attention_factor == pytest.approx(variant.factor, rel=2e-3)


def test_low_precision_error_of_frequencies_is_stated() -> None:
    # These angles are kept in bfloat16 only; nothing finer can be had from the model.
    coarse = zoo.hooked(**{**VARIANTS["dynamic"].overrides, "n_ctx": 512})
    coarse.to(torch.bfloat16, print_details=False)
    for rope in capture(coarse, zoo.tokens(300)).rope().layers:
        expected = qwen_dynamic(300)
        actual = np.abs(rope.inv_freq / expected - 1)
        assert actual.max() > 1e-6
        # 300 tokens tell the fast pairs far better than the two digits of one cosine.
        assert actual[0] < 1e-4
        assert (actual <= 2 * rope.inv_freq_error).all()
        assert rope.inv_freq_error.max() < 2e-2


@pytest.mark.parametrize("name", ["half", "grouped", "softcap", "local-base-with-window"])
def test_scores_below_minus_1e5_are_no_masked_scores(name: str) -> None:
    variant = VARIANTS[name]
    large = zoo.hooked(**variant.overrides)
    with torch.no_grad():
        for key, parameter in large.named_parameters():
            if key.endswith(("W_Q", "W_K", "b_Q", "b_K")):
                parameter.mul_(1000)
        _, cache = large.run_with_cache(zoo.tokens(40))
    ours = capture(large, zoo.tokens(40))
    assert ours.max_relative_error < TOLERANCE
    lowest = 0.0
    for layer in (0, 1):
        q, k = (cache[f"blocks.{layer}.attn.hook_rot_{s}"][0].double().numpy() for s in "qk")
        by_pair, passed = oracle.contributions(q, k, variant.scales[layer], variant.pairs)
        seen = oracle.visible(40, variant.windows[layer])
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0].double().numpy()
        for head in range(4):
            d = decompose(ours, layer, head)
            score = by_pair[head].sum(axis=0) + passed[head]
            size, lowest = np.abs(score[seen]).max(), min(lowest, score[seen].min())
            np.testing.assert_array_equal(np.isfinite(d.scores()), seen)
            assert np.abs(d.contributions() - by_pair[head])[:, seen].max() < TOLERANCE * size
            assert np.abs(d.contributions().sum(0) - score)[seen].max() < TOLERANCE * size
            assert np.abs(d.pattern() - pattern[head]).max() < 0.1
    assert lowest < -1e5
