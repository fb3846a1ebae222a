"""Every architecture on the bridge, against the Hugging Face model run on its own.

Identity: what `capture` and `decompose` hand out is what the model's own modelling code hands to
its attention function. For each head, the contributions of the pairs plus the pass-through, formed
in complex128 loops from queries and keys that never went through the bridge, equal ours, and their
sum equals the model's score before soft-cap and mask.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import transformers as hf
import zoo
from oracle import EXPECTED

from lens_rope.capturing import capture, read_rope
from lens_rope.decomposition import decompose
from lens_rope.errors import UnsupportedModelError, VerificationError
from lens_rope.hosts import host_of
from lens_rope.records import RotaryCapture
from lens_rope.rotation import to_pairs, unrotate

TOLERANCE = 1e-5
FLOAT32 = float(np.finfo(np.float32).eps)

# The bridge of transformer-lens 3 does not apply Cohere's rotation.
IS_FIRST_BRIDGE = int(importlib.metadata.version("transformer-lens").split(".")[0]) < 4
NAMES = [name for name in EXPECTED if not (name == "cohere" and IS_FIRST_BRIDGE)]
CASES = [(name, n) for name in NAMES for n in (17, 40)] + [("phi3-longrope", 16)]
each_case = pytest.mark.parametrize(
    ("name", "n_tokens"), CASES, ids=[f"{name}-{n}" for name, n in CASES]
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors as small as these take longer to share out than to work on."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@dataclasses.dataclass(frozen=True, eq=False)
class Truth:
    """What the Hugging Face model computes on its own."""

    layers: list[oracle.Attention]
    rotary: list[tuple[np.ndarray, float]]
    patterns: list[np.ndarray]


@functools.cache
def spied_model(name: str) -> torch.nn.Module:
    return zoo.hf_model(name, attention="spy")


@functools.cache
def eager_model(name: str) -> torch.nn.Module:
    return zoo.hf_model(name)


@functools.cache
def truth(name: str, n_tokens: int) -> Truth:
    tokens = zoo.tokens(n_tokens)
    layers = oracle.spy(spied_model(name), tokens)
    # Read before any other pass: some scalings set their frequencies anew by its length.
    rotary = [oracle.own_rotary(spied_model(name), layer) for layer in range(len(layers))]
    with torch.no_grad():
        output = eager_model(name)(tokens, output_attentions=True, use_cache=False)
    return Truth(layers, rotary, [pattern[0].double().numpy() for pattern in output.attentions])


@functools.cache
def captured(name: str, n_tokens: int) -> RotaryCapture:
    return capture(zoo.bridge(name), zoo.tokens(n_tokens))


def off(ours: Any, theirs: np.ndarray) -> float:
    """Largest difference relative to the largest true value; infinite where shapes differ."""
    ours = np.asarray(ours, dtype=np.float64)
    if ours.shape != theirs.shape:
        return math.inf
    if theirs.size == 0:
        return 0.0
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def pairs_of(x: np.ndarray, pairs: list[tuple[int, int]]) -> np.ndarray:
    """`[pos, head, pair]` Components as complex numbers, by hand."""
    stacked = [x[..., a] + 1j * x[..., b] for a, b in pairs]
    return np.stack(stacked, axis=-1) if pairs else np.zeros((*x.shape[:-1], 0), complex)


@each_case
def test_rotated_queries_and_keys_are_those_of_the_model(name: str, n_tokens: int) -> None:
    ours, theirs = captured(name, n_tokens), truth(name, n_tokens).layers
    assert ours.layer_indices == tuple(range(len(theirs)))
    for layer, expected in enumerate(theirs):
        record = ours.layer(layer)
        assert off(record.q, expected.q) < TOLERANCE
        assert off(record.k, expected.k) < TOLERANCE


@each_case
def test_frequencies_are_those_of_this_forward_pass(name: str, n_tokens: int) -> None:
    ours, theirs = captured(name, n_tokens).rope(), truth(name, n_tokens).rotary
    for layer, (own, factor) in enumerate(theirs):
        rope, expected = ours[layer], EXPECTED[name]
        formula = expected.frequencies(layer, n_tokens)
        assert rope.inv_freq.shape == formula.shape
        # The model raises its base to a power in float32, the formula in float64.
        np.testing.assert_allclose(rope.inv_freq, formula, rtol=4 * FLOAT32)
        assert (np.abs(rope.inv_freq - formula) <= 4 * rope.inv_freq_error * formula).all()
        assert (rope.inv_freq_error < 1e-6).all()
        if layer in expected.unrotated:
            assert rope.attention_factor == 1
            continue
        np.testing.assert_allclose(rope.inv_freq, own, rtol=2 * FLOAT32)
        assert rope.attention_factor == pytest.approx(factor, rel=4 * FLOAT32)
        assert rope.attention_factor == pytest.approx(expected.factor, rel=4 * FLOAT32)


@each_case
def test_layout_is_that_of_the_modelling_code(name: str, n_tokens: int) -> None:
    expected = EXPECTED[name]
    for rope in captured(name, n_tokens).rope().layers:
        pairs = expected.pairs(rope.layer)
        assert rope.d_head == expected.d_head
        assert rope.rotary_dim == 2 * len(pairs)
        assert list(zip(*(c.tolist() for c in rope.components), strict=True)) == pairs
        rest = sorted(set(range(expected.d_head)) - {c for pair in pairs for c in pair})
        assert rope.pass_components.tolist() == rest
        if pairs:
            assert rope.pairing == expected.pairing
            assert rope.rotary_start == expected.start


@pytest.mark.parametrize("name", NAMES)
def test_shape_of_the_model_is_that_of_its_tensors(name: str) -> None:
    ours = captured(name, 40)
    for record in ours.records[0]:
        assert record.q.shape == (40, ours.model.n_heads, ours.model.d_head)
        assert record.k.shape == (40, ours.model.n_kv_heads, ours.model.d_head)


@each_case
def test_scale_softcap_sinks_and_window_are_those_of_the_layer(name: str, n_tokens: int) -> None:
    expected, theirs = EXPECTED[name], truth(name, n_tokens).layers
    for layer, attention in enumerate(theirs):
        record = captured(name, n_tokens).layer(layer)
        assert record.scale == pytest.approx(expected.scale, rel=1e-6)
        assert record.scale == pytest.approx(attention.scale, rel=1e-6)
        assert record.softcap == expected.softcap == attention.softcap
        assert record.n_kv_heads == expected.kv_heads
        assert record.rope.window == expected.windows[layer]
        assert record.rope.trained_context == expected.context
        assert (record.sinks is not None) == expected.sinks == (attention.sinks is not None)
        if record.sinks is not None:
            assert off(record.sinks, attention.sinks) < TOLERANCE


@each_case
def test_contributions_sum_to_the_score_of_the_model(name: str, n_tokens: int) -> None:
    expected = EXPECTED[name]
    for layer, attention in enumerate(truth(name, n_tokens).layers):
        q, k, scale = attention.q, attention.k, attention.scale
        by_pair, passed = oracle.contributions(q, k, scale, expected.pairs(layer))
        groups = q.shape[1] // k.shape[1]
        scores = scale * np.einsum("mhd,nhd->hmn", q, k.repeat(groups, axis=1))
        seen = oracle.visible(n_tokens, expected.windows[layer])
        for head in range(q.shape[1]):
            ours = decompose(captured(name, n_tokens), layer, head)
            size = np.abs(scores[head][seen]).max()
            assert size > 1, "scores too small for a wrong rotation to show"
            parts, rest = ours.contributions(), ours.pass_through()
            assert parts.shape == by_pair[head].shape
            assert np.abs(parts - by_pair[head])[:, seen].max(initial=0) < TOLERANCE * size
            assert np.abs(rest - passed[head])[seen].max() < TOLERANCE * size
            total = parts.sum(axis=0) + rest
            assert np.abs(total - scores[head])[seen].max() < TOLERANCE * size
            assert np.abs(ours.scores() - scores[head])[seen].max() < TOLERANCE * size
            assert ours.residual < TOLERANCE * size
            at = ours.at(n_tokens - 1, n_tokens - 3)
            assert abs(at.score - scores[head, -1, -3]) < TOLERANCE * size


@each_case
def test_what_is_not_visible_is_nan_by_position_not_by_size(name: str, n_tokens: int) -> None:
    for layer, window in enumerate(EXPECTED[name].windows):
        hidden = ~oracle.visible(n_tokens, window)
        ours = decompose(captured(name, n_tokens), layer, 0)
        for values in (*ours.contributions(), ours.pass_through(), ours.scores()):
            np.testing.assert_array_equal(np.isnan(values), hidden)


@each_case
def test_pattern_is_that_of_the_model(name: str, n_tokens: int) -> None:
    for layer, pattern in enumerate(truth(name, n_tokens).patterns):
        for head in range(pattern.shape[0]):
            ours = decompose(captured(name, n_tokens), layer, head).pattern()
            assert np.abs(ours - pattern[head]).max() < TOLERANCE
        mass = pattern.sum(axis=-1)
        if EXPECTED[name].sinks:  # a learned sink is no key, so its rows are not renormalised
            assert mass.min() < 0.9
            assert mass.max() < 1 + 1e-6
        else:
            assert mass == pytest.approx(1, abs=1e-5)


@each_case
def test_undone_rotation_gives_the_values_before_it(name: str, n_tokens: int) -> None:
    # At position 0 nothing turns. Queries and keys of the first layer do not depend on positions
    # otherwise, so a pass with every token at position 0 shows them before the rotation.
    model, zeros = spied_model(name), torch.zeros((1, n_tokens), dtype=torch.long)
    still = oracle.spy(model, zoo.tokens(n_tokens), position_ids=zeros)[0]
    record, expected = captured(name, n_tokens).layer(0), EXPECTED[name]
    for ours, theirs in ((record.q, still.q), (record.k, still.k)):
        z, rest = to_pairs(ours, record.rope)
        before = unrotate(z, record.positions, record.rope).numpy()
        true = pairs_of(theirs, expected.pairs(0)) / expected.factor
        assert np.abs(before - true).max() < TOLERANCE * np.abs(true).max()
        assert off(rest, theirs[..., record.rope.pass_components]) < TOLERANCE


def _projections(attention: Any) -> tuple[Any, Any]:
    return attention.q_proj, attention.k_proj


def _norms(attention: Any) -> tuple[Any, Any]:
    return attention.q_norm, attention.k_norm


@pytest.mark.parametrize(
    ("name", "last_step"),
    [
        ("llama", _projections),
        ("llama-yarn", _projections),
        ("qwen3", _norms),
        ("gemma3", _norms),
        ("olmo2", _norms),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__.strip("_"),
)
def test_undone_rotation_gives_what_came_out_of_the_norm_in_every_layer(
    name: str, last_step: Callable[[Any], tuple[Any, Any]]
) -> None:
    n_tokens, expected, model = 40, EXPECTED[name], eager_model(name)
    seen: list[torch.Tensor] = []
    handles = [
        step.register_forward_hook(lambda module, args, output: seen.append(output[0]))
        for layer in model.model.layers
        for step in last_step(layer.self_attn)
    ]
    with torch.no_grad():
        model(zoo.tokens(n_tokens), use_cache=False)
    for handle in handles:
        handle.remove()
    assert len(seen) == 2 * len(expected.windows)
    for layer in range(len(expected.windows)):
        record = captured(name, n_tokens).layer(layer)
        for ours, value in ((record.q, seen[2 * layer]), (record.k, seen[2 * layer + 1])):
            is_head_first = value.ndim == 3 and value.shape[1] == n_tokens
            theirs = value.transpose(0, 1) if is_head_first else value
            theirs = theirs.reshape(n_tokens, -1, expected.d_head).double().numpy()
            true = pairs_of(theirs, expected.pairs(layer))
            z, _ = to_pairs(ours, record.rope)
            before = unrotate(z, record.positions, record.rope).numpy()
            assert np.abs(before - true).max() < TOLERANCE * np.abs(true).max()


def test_longrope_changes_its_frequencies_one_token_past_the_original_context() -> None:
    short, long = (captured("phi3-longrope", n).rope()[0] for n in (16, 17))
    assert short.attention_factor == long.attention_factor == pytest.approx(1.3228757, rel=1e-6)
    np.testing.assert_allclose(short.inv_freq * zoo.LONGROPE_SHORT, oracle.plain(16), rtol=1e-6)
    np.testing.assert_allclose(long.inv_freq * zoo.LONGROPE_LONG, oracle.plain(16), rtol=1e-6)
    assert not short.same_rotation(long)


@pytest.mark.parametrize("theta", [1e4, 1e6], ids=["base-1e4", "base-1e6"])
def test_base_is_that_of_this_model(theta: float) -> None:
    config = hf.Qwen2Config(
        **{**zoo._BASE, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    )
    bridge = zoo.bridge_of(zoo.hf_model("qwen2", config=config), "qwen2")
    for rope in read_rope(bridge).layers:
        np.testing.assert_allclose(rope.inv_freq, oracle.plain(16, theta), rtol=4 * FLOAT32)


def test_gemma3_has_two_bases_and_a_window_on_five_layers_of_six() -> None:
    layers = captured("gemma3", 40).rope().layers
    assert [rope.window for rope in layers] == [16] * 5 + [None]
    assert [rope.context for rope in layers] == [16] * 5 + [zoo.CONTEXT]
    slowest = [rope.inv_freq[-1] for rope in layers]
    assert slowest == pytest.approx([1e4 ** (-7 / 8)] * 5 + [1e6 ** (-7 / 8)], rel=1e-6)


@pytest.mark.parametrize("has_rounded_tables", [False, True], ids=["float32-buffer", "cast-buffer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_low_precision_angles_are_right_beyond_256_tokens(
    dtype: torch.dtype, has_rounded_tables: bool
) -> None:
    config = zoo.CONFIGS["llama-llama3"]()
    config.max_position_embeddings = 512
    model = zoo.hf_model("llama-llama3", config=config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    expected = EXPECTED["llama-llama3"].frequencies(0, 300)
    if has_rounded_tables:
        # A model that was cast as a whole turns by rounded frequencies; these are its own.
        model = model.to(dtype)
        expected = model.model.rotary_emb.inv_freq.double().numpy()
    ours = capture(zoo.bridge_of(model, "llama-llama3"), zoo.tokens(300))
    assert ours.model.dtype == str(dtype).removeprefix("torch.")
    assert 1e-5 < ours.max_relative_error < 2e-2
    for rope in ours.rope().layers:
        np.testing.assert_allclose(rope.inv_freq, expected, rtol=1e-6)
        assert (np.abs(rope.inv_freq / expected - 1) <= 4 * rope.inv_freq_error).all()
        assert (rope.inv_freq_error < 1e-6).all()


@pytest.mark.parametrize("softcap", [False, True], ids=["llama", "gemma2-softcap"])
def test_scores_below_minus_1e5_are_no_masked_scores(softcap: bool) -> None:
    name = "gemma2" if softcap else "llama"
    models = [zoo.hf_model(name, attention=kind) for kind in ("spy", "eager")]
    for model in models:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.mul_(1000)
                layer.self_attn.k_proj.weight.mul_(1000)
    # From the second layer on, rounding of such scores decides which key wins.
    attention = oracle.spy(models[0], zoo.tokens(40))[0]
    ours = capture(zoo.bridge_of(models[1], name), zoo.tokens(40))
    assert ours.max_relative_error < TOLERANCE
    pairs = EXPECTED[name].pairs(0)
    by_pair, _ = oracle.contributions(attention.q, attention.k, attention.scale, pairs)
    seen = oracle.visible(40, EXPECTED[name].windows[0])
    assert by_pair.sum(axis=1)[:, seen].min() < -1e5
    for head in range(4):
        d = decompose(ours, 0, head)
        size = np.abs(by_pair[head].sum(axis=0)[seen]).max()
        assert np.isfinite(d.contributions()[:, seen]).all()
        assert np.abs(d.contributions() - by_pair[head])[:, seen].max() < TOLERANCE * size
        assert np.abs(d.pattern() - attention.pattern[head]).max() < TOLERANCE


def test_partial_rotary_scores_around_1e3_are_conserved_relative_to_their_size() -> None:
    models = [zoo.hf_model("gpt-neox", attention=kind, gain=64.0) for kind in ("spy", "eager")]
    attention = oracle.spy(models[0], zoo.tokens(40))[0]
    record = capture(zoo.bridge_of(models[1], "gpt-neox"), zoo.tokens(40)).layer(0)
    assert (record.rope.rotary_dim, record.rope.pass_components.tolist()) == (4, list(range(4, 16)))
    scores = attention.scale * np.einsum("mhd,nhd->hmn", attention.q, attention.k)
    assert 3e2 < np.abs(scores).max() < 3e3
    assert record.check.relative_error < TOLERANCE
    assert off(record.q, attention.q) < TOLERANCE


def test_softcap_is_reported_apart_and_contributions_sum_to_the_score_before_it() -> None:
    ours = captured("gemma2", 40)
    assert ours.layer(0).softcap == 2.0
    scores = decompose(ours, 0, 0).scores()
    assert np.nanmax(np.abs(scores)) > 2.0


def test_scores_that_are_the_pattern_are_noticed() -> None:
    seen: dict[str, torch.Tensor] = {}
    bridge = zoo.bridge("gpt-j")
    hooks = [
        (f"blocks.0.attn.{key}", lambda value, hook, key=key: seen.update({key: value.detach()}))
        for key in ("hook_attn_scores", "hook_pattern")
    ]
    with torch.no_grad():
        bridge.run_with_hooks(zoo.tokens(40), fwd_hooks=hooks)
    if not torch.equal(seen["hook_attn_scores"], seen["hook_pattern"]):
        pytest.skip("this bridge shows the scores of GPT-J")
    # Taken for scores, it would lie within [0, 1].
    assert np.nanmin(decompose(captured("gpt-j", 40), 0, 0).scores()) < -1


def test_layer_without_rope_has_no_pairs_and_is_all_pass_through() -> None:
    ours = captured("smollm3", 40)
    assert [rope.n_pairs for rope in ours.rope().layers] == [8, 8, 8, 0]
    d = decompose(ours, 3, 0)
    assert d.contributions().shape == (0, 40, 40)
    np.testing.assert_array_equal(d.pass_through(), d.scores())


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3-interleaved"])
def test_latent_attention_rotates_the_last_components_only(name: str) -> None:
    record = captured(name, 40).layer(0)
    assert (record.rope.rotary_start, record.rope.rotary_dim) == (8, 8)
    d = decompose(captured(name, 40), 0, 0)
    assert np.nanmax(np.abs(d.pass_through())) > 0.1
    assert np.nanmax(np.abs(d.contributions())) > 0.1


@pytest.mark.parametrize("name", ["gpt-neox", "phi3", "phi3-longrope", "gpt-j", "llama"])
def test_second_route_is_taken_where_rotated_values_are_not_hooked(name: str) -> None:
    routes = {record.check.route for record in captured(name, 40).records[0]}
    expected = {"llama": "hook_rot", "gpt-j": "hook_cos_pattern"}.get(name, "hook_cos")
    assert routes == {expected}


def test_falcon_multi_query_reads_as_its_modelling_code_rotates() -> None:
    # Falcon's attention takes no function of ours, so its projection is rotated by hand:
    # modeling_falcon rotates whole heads in halves; the last two of the fused heads are key, value.
    config = hf.FalconConfig(
        vocab_size=zoo.VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        multi_query=True,
        alibi=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model, tokens = zoo.hf_model("falcon", config=config), zoo.tokens(40)
    fused: list[torch.Tensor] = []
    handles = [
        block.self_attention.query_key_value.register_forward_hook(
            lambda module, args, output: fused.append(output[0])
        )
        for block in model.transformer.h
    ]
    with torch.no_grad():
        output = model(tokens, output_attentions=True, use_cache=False)
    for handle in handles:
        handle.remove()
    ours = capture(zoo.bridge_of(model, "falcon"), tokens)
    pairs = oracle.pair_components("half", 16)
    turn = np.exp(1j * np.arange(40)[:, None, None] * oracle.plain(16))
    for layer in range(2):
        record = ours.layer(layer)
        heads = fused[layer].reshape(40, 6, 16).double().numpy()
        for x, part in ((record.q, heads[:, :4]), (record.k, heads[:, 4:5])):
            true = pairs_of(part, pairs) * turn
            z, _ = to_pairs(x, record.rope)
            assert z.shape == true.shape
            assert np.abs(z.numpy() - true).max() < TOLERANCE * np.abs(true).max()
        for head in range(4):
            pattern = output.attentions[layer][0, head].double().numpy()
            assert np.abs(decompose(ours, layer, head).pattern() - pattern).max() < TOLERANCE


@pytest.mark.skipif(not IS_FIRST_BRIDGE, reason="this bridge applies Cohere's rotation")
@pytest.mark.parametrize("n_tokens", [1, 2, 17, 40])
def test_host_that_does_not_apply_a_rotation_is_refused(n_tokens: int) -> None:
    with pytest.raises(VerificationError, match=r"layer 0 of cohere .* norm error") as caught:
        capture(zoo.bridge("cohere"), zoo.tokens(n_tokens))
    assert caught.value.check == "norm"
    assert caught.value.layer == 0
    assert caught.value.error > 0.1 > caught.value.tolerance


def _llama4() -> Any:
    return zoo._config(
        hf.Llama4TextConfig,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        intermediate_size_mlp=96,
    )()


def _falcon_alibi() -> Any:
    return hf.FalconConfig(
        vocab_size=zoo.VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True
    )


def _deepseek_v2() -> Any:
    return hf.DeepseekV2Config(**{**zoo._BASE, **zoo._DEEPSEEK, "topk_method": "greedy"})


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("gpt2", zoo.CONFIGS["gpt2"], "gpt2 has no RoPE .*standard"),
        ("falcon-alibi", _falcon_alibi, "falcon-alibi has no RoPE .*alibi"),
        ("llama4", _llama4, r"cannot read layer 0 of llama4 \(Llama4TextAttention\)"),
        ("deepseek-v2", _deepseek_v2, r"cannot read layer 0 of deepseek-v2 \(DeepseekV2Attention"),
    ],
    ids=["no-rope", "alibi", "complex-angles", "complex-angles-latent"],
)
def test_what_cannot_be_read_is_refused_by_name(
    name: str, config: Callable[[], Any], message: str
) -> None:
    bridge = zoo.bridge_of(zoo.hf_model(name, config=config()), name)
    for n_tokens in (1, 40):
        with pytest.raises(UnsupportedModelError, match=message):
            capture(bridge, zoo.tokens(n_tokens))
    with pytest.raises(UnsupportedModelError, match=message):
        read_rope(bridge)


def test_three_position_streams_are_refused_by_name() -> None:
    bridge = zoo.qwen2_5_vl_bridge()
    with pytest.raises(
        UnsupportedModelError, match=r"layer 0 of qwen2\.5-vl \(Qwen2_5_VLAttention"
    ):
        capture(bridge, zoo.tokens(40))


def test_angles_that_differ_between_position_streams_are_refused() -> None:
    host = host_of(zoo.bridge("llama"))
    cos, sin = (torch.ones((3, 1, 5, 16)) for _ in range(2))
    tables = host._tables(0, {"hook_cos": cos, "hook_sin": sin}, 5)
    assert [table.shape for table in tables] == [(5, 16), (5, 16)]
    cos[2] = 0.5
    with pytest.raises(UnsupportedModelError, match="several position streams"):
        host._tables(0, {"hook_cos": cos, "hook_sin": sin}, 5)


def test_norm_after_the_rotation_is_right_or_refused() -> None:
    config = zoo._config(hf.HunYuanDenseV1Config, head_dim=16)()
    attention = oracle.spy(zoo.hf_model("hunyuan", attention="spy", config=config), zoo.tokens(40))
    bridge = zoo.bridge_of(zoo.hf_model("hunyuan", config=config), "hunyuan")
    try:
        ours = capture(bridge, zoo.tokens(40))
    except (UnsupportedModelError, VerificationError) as error:
        assert "layer 0 of hunyuan" in str(error)
        return
    assert off(ours.layer(0).q, attention[0].q) < TOLERANCE
    assert off(ours.layer(0).k, attention[0].k) < TOLERANCE


@pytest.mark.parametrize("n_tokens", [10, 40])
def test_window_is_that_of_the_layer_where_the_module_names_one_for_all(n_tokens: int) -> None:
    config = zoo._config(
        hf.Exaone4Config, num_hidden_layers=4, sliding_window=16, sliding_window_pattern=4
    )()
    bridge = zoo.bridge_of(zoo.hf_model("exaone4", config=config), "exaone4")
    layers = capture(bridge, zoo.tokens(n_tokens)).rope().layers
    assert [rope.window for rope in layers] == [16, 16, 16, None]
    assert [rope.n_pairs for rope in layers] == [8, 8, 8, 0]


@pytest.mark.parametrize("n_tokens", [2, 4])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "stablelm-qk-norm"])
def test_as_many_tokens_as_heads(name, n_tokens):
    """The layout of a normalised query is told by its hook: its shape is the same either way."""
    model = zoo.bridge(name)
    assert n_tokens in (model.cfg.n_heads, model.cfg.n_key_value_heads or model.cfg.n_heads, 2)
    assert capture(model, zoo.tokens(n_tokens)).max_relative_error < 1e-5
