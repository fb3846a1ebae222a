"""Long prompts: a fused pass changes no number, and positions go beyond the trained context.

Identity: blockwise attention equals a softmax over the dense scores in float64, and logits,
queries and keys of a fused pass equal those of the model's own pass.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import zoo
from allocations import Largest
from conftest import needs_hooked
from test_capture import assert_as_before, state_of

from lens_rope import streaming
from lens_rope.capturing import capture
from lens_rope.errors import InputError, PromptError, VerificationError
from lens_rope.hosts import hooked, host_of
from lens_rope.hosts.blocked import blocked_attention, sampled_blocks
from lens_rope.records import RotaryCapture
from lens_rope.streaming import LayerStream

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"n_key_value_heads": 2},
    "grouped-expanded": {"n_key_value_heads": 2, "ungroup_grouped_query_attention": True},
    "multi-query": {"n_key_value_heads": 1},
    "window": {"use_local_attn": True, "attn_types": ["local", "global"], "window_size": 16},
    "softcap": {"attn_scores_soft_cap": 2.0},
    "sinks": {"use_attention_sinks": True},
    "clip": {"clip_qkv": 0.5},
    "qk-norm": {"use_qk_norm": True},
    "inverse-layer-scale": {"scale_attn_by_inverse_layer_idx": True},
    "split-input": {"use_split_qkv_input": True},
    "result": {"use_attn_result": True},
    "everything": {
        "n_key_value_heads": 2,
        "attn_scores_soft_cap": 2.0,
        "use_attention_sinks": True,
        "use_local_attn": True,
        "attn_types": ["global", "local"],
        "window_size": 100,
    },
}
LONG = 700  # more queries than are sampled, and more than one block of them


def hooked_model(name: str = "grouped", **overrides: Any) -> Any:
    return zoo.hooked(**{"n_ctx": 1024, **VARIANTS[name], **overrides})


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    window: int | None,
) -> torch.Tensor:
    """Attention from an array of all scores, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    output = torch.empty(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])[None, :]
    hidden = (j > i) | (torch.zeros(1, dtype=torch.bool) if window is None else i - j >= window)
    for head in range(q.shape[1]):
        scores = scale * torch.einsum("bqd,bkd->bqk", q[:, head], k[:, head // groups])
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.exp().masked_fill(hidden, 0)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks[head].double().exp()
        output[:, head] = torch.einsum("bqk,bkd->bqd", weights / total, v[:, head // groups])
    return output


def random_qkv(n_pos: int, kv_heads: int = 2, d_head: int = 16, d_value: int = 16, batch: int = 1):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(batch, heads, n_pos, width, generator=generator)
        for heads, width in ((4, d_head), (kv_heads, d_head), (kv_heads, d_value))
    )


SINKS = torch.tensor([-1.0, 0.0, 1.0, 3.0])
COMBINATIONS = list(itertools.product((None, 2.0), (None, SINKS), (None, 5, 100, 2000)))


@pytest.mark.parametrize(
    ("softcap", "sinks", "window"),
    COMBINATIONS,
    ids=[f"{c}-{'none' if s is None else 'sinks'}-{w}" for c, s, w in COMBINATIONS],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_blockwise_attention_is_that_of_dense_scores(kv_heads, softcap, sinks, window) -> None:
    q, k, v = random_qkv(571, kv_heads)  # no multiple of any block
    options = {"scale": 0.4, "softcap": softcap, "sinks": sinks, "window": window}
    ours = blocked_attention(q, k, v, **options)
    torch.testing.assert_close(ours.double(), dense(q, k, v, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_pos", [1, 2, 63, 64, 65, 1025])
@pytest.mark.parametrize("window", [None, 1, 64])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_blocks_of_every_length(n_pos: int, window: int | None, softcap: float | None) -> None:
    q, k, v = random_qkv(n_pos)
    options = {"scale": 0.25, "softcap": softcap, "sinks": None, "window": window}
    ours = blocked_attention(q, k, v, **options)
    torch.testing.assert_close(ours.double(), dense(q, k, v, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("d_head", "d_value"), [(24, 16), (16, 24), (10, 6)])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_values_can_be_of_another_width_than_keys(d_head, d_value, window, softcap) -> None:
    q, k, v = random_qkv(100, 2, d_head, d_value, batch=2)
    options = {"scale": 0.25, "softcap": softcap, "sinks": SINKS, "window": window}
    for sinks in (None, SINKS):
        options["sinks"] = sinks
        ours = blocked_attention(q, k, v, **options)
        assert ours.shape == (2, 4, 100, d_value)
        torch.testing.assert_close(ours.double(), dense(q, k, v, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_precision_of_the_model_is_kept(dtype: torch.dtype, softcap: float | None) -> None:
    q, k, v = (x.to(dtype) for x in random_qkv(300))
    for window, sinks in itertools.product((None, 50), (None, SINKS)):
        options = {"scale": 0.25, "softcap": softcap, "sinks": sinks, "window": window}
        ours, theirs = blocked_attention(q, k, v, **options), dense(q, k, v, **options)
        assert ours.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float64 else 1e-2
        assert (ours.double() - theirs).abs().max() < tolerance * theirs.abs().max()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 500])
def test_no_array_of_all_scores_is_made(softcap: float | None, window: int | None) -> None:
    n_pos = 4000
    q, k, v = random_qkv(n_pos)
    with Largest() as largest:
        blocked_attention(q, k, v, scale=0.25, softcap=softcap, sinks=None, window=window)
    assert 4 * n_pos * 16 <= largest.numel <= 2**23 + 4 * n_pos


@pytest.mark.parametrize("n_heads", [4, 4000])
def test_sampled_queries_are_spread_from_the_first_to_the_last(n_heads: int) -> None:
    assert sampled_blocks(200, 4 * n_heads) == [range(200)]
    for n_pos in (257, 300, 1000, 4001):
        blocks = sampled_blocks(n_pos, 4 * n_heads * n_pos)
        queries = [query for block in blocks for query in block]
        assert len(set(queries)) == len(queries) and queries == sorted(queries)
        assert (queries[0], queries[-1]) == (0, n_pos - 1)
        assert len(blocks) == 8
        assert len(queries) <= 256
        assert len(queries) == 8 or len(queries) * 4 * n_heads * n_pos <= 2**26
        starts = np.array([block.start for block in blocks])
        assert np.ptp(np.diff(starts)) <= 1


@needs_hooked
@pytest.mark.parametrize("n_tokens", [1, 40, LONG])
@pytest.mark.parametrize("name", VARIANTS)
def test_fused_pass_of_hooked_transformer_changes_no_number(name: str, n_tokens: int) -> None:
    model = hooked_model(name)
    host, token_ids = host_of(model), zoo.tokens(n_tokens)[0].tolist()
    with torch.no_grad():
        own = model(zoo.tokens(n_tokens), return_type="logits")[0]
        _, cache = model.run_with_cache(zoo.tokens(n_tokens))
    readings: list[Any] = []
    logits = host.read_logits(token_ids, (0, 1), readings.append, "fused")
    assert own.abs().max() > 0.1
    torch.testing.assert_close(logits, own, rtol=1e-4, atol=1e-4)
    assert [reading.layer for reading in readings] == [0, 1]
    for reading in readings:
        rows = list(range(n_tokens)) if reading.rows is None else reading.rows.tolist()
        assert len(rows) == min(n_tokens, 256) and rows[0] == 0 and rows[-1] == n_tokens - 1
        at = f"blocks.{reading.layer}.attn.hook_"
        torch.testing.assert_close(
            reading.scores, cache[at + "attn_scores"][0][:, rows], rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(
            reading.pattern, cache[at + "pattern"][0][:, rows], rtol=1e-4, atol=1e-5
        )
        assert 0 <= reading.output_error < 1e-5


@needs_hooked
@pytest.mark.parametrize("name", VARIANTS)
def test_fused_capture_is_the_eager_capture(name: str) -> None:
    model, token_ids = hooked_model(name), zoo.tokens(LONG)
    eager, fused = (capture(model, token_ids, attention=a) for a in ("eager", "fused"))
    for own, ours in zip(eager.records[0], fused.records[0], strict=True):
        torch.testing.assert_close(ours.q, own.q, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.k, own.k, rtol=1e-4, atol=1e-4)
        assert ours.rope.same_rotation(own.rope) and ours.rope.window == own.rope.window
        assert (ours.scale, ours.softcap) == (own.scale, own.softcap)
        assert (own.check.checked_queries, ours.check.checked_queries) == (None, 256)
        assert np.isnan(own.check.output) and ours.check.output < 1e-5
        assert ours.check.score < 1e-5 and ours.check.pattern < 1e-5


@needs_hooked
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["grouped", "everything"])
def test_fused_pass_in_low_precision(name: str, dtype: torch.dtype) -> None:
    model = hooked_model(name)
    model.to(dtype, print_details=False)
    for record in capture(model, zoo.tokens(LONG), attention="fused").records[0]:
        assert 0 < record.check.output < 1e-2
        assert record.q.dtype == torch.float32


@needs_hooked
def test_fused_pass_of_hooked_transformer_forms_no_square() -> None:
    n_tokens = 3000
    model = hooked_model("grouped", n_ctx=4096, n_layers=1, d_mlp=8, d_vocab=16)
    with Largest() as largest:
        capture(model, zoo.tokens(n_tokens) % 16, attention="fused")
    assert largest.numel < n_tokens**2  # of one head
    with Largest() as largest:
        capture(model, zoo.tokens(n_tokens) % 16, attention="eager")
    assert largest.numel >= 4 * n_tokens**2


@needs_hooked
def test_layers_that_are_not_read_run_fused_as_well() -> None:
    model, token_ids = hooked_model(), zoo.tokens(LONG)
    with Largest() as largest:
        ours = capture(model, token_ids, [1], attention="fused")
    assert largest.numel < 4 * LONG**2
    with Largest() as largest:
        own = capture(model, token_ids, [1], attention="eager")
    assert largest.numel >= 4 * LONG**2
    torch.testing.assert_close(ours.layer(1).q, own.layer(1).q, rtol=1e-4, atol=1e-4)


@needs_hooked
@pytest.mark.parametrize(
    ("wrong", "error"),
    [({"scale": 0.2501}, "output"), ({"softcap": 30.0}, "output"), ({"window": 600}, "output")],
)
def test_fused_output_that_is_not_that_of_the_model_is_refused(monkeypatch, wrong, error) -> None:
    def misfused(q: Any, k: Any, v: Any, **options: Any) -> torch.Tensor:
        return blocked_attention(q, k, v, **{**options, **wrong})

    monkeypatch.setattr(hooked, "blocked_attention", misfused)
    with pytest.raises(VerificationError, match=r"layer 0 .* output error .*Nothing") as caught:
        capture(hooked_model(), zoo.tokens(LONG), attention="fused")
    assert caught.value.check == error


@needs_hooked
def test_wrong_scores_of_any_sampled_block_are_refused(monkeypatch) -> None:
    own = hooked.sampled_attention
    for block in range(8):

        def wrong(*args: Any, block: int = block) -> Any:
            sample = own(*args)
            sample.scores[3, 32 * block + 7, 0] += 0.1
            return sample

        monkeypatch.setattr(hooked, "sampled_attention", wrong)
        with pytest.raises(VerificationError):
            capture(hooked_model(), zoo.tokens(LONG), attention="fused")


def stream_of(model: Any, attention: Any = "auto") -> LayerStream:
    return LayerStream(model, attention=attention)


def test_auto_is_eager_until_the_scores_of_a_layer_are_large(host_model, monkeypatch) -> None:
    stream = stream_of(host_model)
    largest = int((streaming.MAX_EAGER_BYTES / 4 / 4) ** 0.5)  # heads, bytes
    assert stream.attention_for(largest) == "eager"
    if stream.host.fused_refusal((0, 1)) is None:
        assert stream.attention_for(largest + 1) == "fused"
    assert stream_of(host_model, "eager").attention_for(10**6) == "eager"
    monkeypatch.setattr(streaming, "MAX_EAGER_BYTES", 4 * 4 * 20**2)
    short, long = (capture(host_model, zoo.tokens(n)).records[0][1].check for n in (20, 21))
    assert np.isnan(short.output)
    assert not np.isnan(long.output) or stream.host.fused_refusal((0, 1)) is not None
    with pytest.raises(InputError, match="attention is 'fast'; it must be auto, eager or fused"):
        capture(host_model, zoo.tokens(20), attention="fast")  # type: ignore[arg-type]


@needs_hooked
@pytest.mark.parametrize("key", ["attn_scores", "pattern", "z"])
def test_hooks_on_what_is_not_formed_keep_the_pass_eager(key: str, monkeypatch) -> None:
    model, shapes = hooked_model(), []
    model.add_hook(f"blocks.0.attn.hook_{key}", lambda value, hook: shapes.append(value.shape))
    with pytest.raises(
        InputError, match=rf"cannot be fused: a hook at blocks\.0\.attn\.hook_{key}"
    ):
        capture(model, zoo.tokens(40), attention="fused")
    monkeypatch.setattr(streaming, "MAX_EAGER_BYTES", 1)
    assert np.isnan(capture(model, zoo.tokens(40)).layer(0).check.output)
    assert all(40 in shape for shape in shapes) and shapes
    model.reset_hooks()
    assert not np.isnan(capture(model, zoo.tokens(40)).layer(0).check.output)


@needs_hooked
def test_hooks_of_the_caller_act_in_a_fused_pass() -> None:
    model = hooked_model()
    for key in ("q", "v"):
        model.add_hook(f"blocks.0.attn.hook_{key}", lambda value, hook: 1.5 * value)
    eager, fused = (capture(model, zoo.tokens(40), attention=a) for a in ("eager", "fused"))
    untouched = capture(hooked_model(), zoo.tokens(40))
    torch.testing.assert_close(fused.layer(1).q, eager.layer(1).q, rtol=1e-4, atol=1e-4)
    assert (fused.layer(1).q - untouched.layer(1).q).abs().max() > 0.1


@needs_hooked
@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"use_logn_attn": True, "train_seq_length": 16}, "scaled by their position"),
        ({"attention_dir": "bidirectional"}, "its attention is not causal"),
    ],
)
def test_model_that_cannot_be_fused_says_why(overrides: dict[str, Any], reason: str) -> None:
    model = zoo.hooked(**overrides)
    with pytest.raises(InputError, match=rf"cannot be fused: .*{reason}.*; choose attention="):
        capture(model, zoo.tokens(12), attention="fused")


@pytest.mark.parametrize("fails", [False, True], ids=["success", "exception"])
def test_model_is_left_as_it_was_by_a_fused_pass(host_model, fails: bool, monkeypatch) -> None:
    if host_of(host_model).fused_refusal((0, 1)) is not None:
        pytest.skip("this host cannot")
    tokens = zoo.tokens(140)  # beyond the tables too
    host_model.train()
    host_model(tokens[:, :40])
    before, n_forward_hooks = state_of(host_model), hooks_of_modules(host_model)
    if fails:
        monkeypatch.setattr(streaming, "verify", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            capture(host_model, tokens, attention="fused")
    else:
        capture(host_model, tokens, attention="fused")
    assert_as_before(before, state_of(host_model))
    assert hooks_of_modules(host_model) == n_forward_hooks


def hooks_of_modules(model: Any) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def test_prompt_beyond_the_trained_context_is_read_and_noted(host_model) -> None:
    short, long = (capture(host_model, zoo.tokens(n)) for n in (128, 200))
    assert short.notes == ()
    assert long.notes == (
        "prompt 0 has 200 tokens and the trained context is 128: positions beyond it are new to "
        "the model",
    )
    assert f"\n  note: {long.notes[0]}" in repr(long)
    for record in long.records[0]:
        assert record.rope.trained_context == 128 and record.n_pos == 200
        np.testing.assert_allclose(record.rope.inv_freq, oracle.plain(16), rtol=1e-6)
    # What comes later does not change what was before it.
    torch.testing.assert_close(long.layer(1).q[:128], short.layer(1).q, rtol=1e-4, atol=1e-4)
    assert capture(host_model, zoo.tokens(200), context=4096).notes == ()
    assert capture(host_model, zoo.tokens(200), max_tokens=128).notes == ()


@needs_hooked
@pytest.mark.parametrize("attention", ["eager", "fused"])
def test_positions_beyond_the_table_of_hooked_transformer_are_right(attention: Any) -> None:
    model, seen = zoo.hooked(n_key_value_heads=2), {}
    rows = [len(block.attn.rotary_cos) for block in model.blocks]
    assert rows == [128, 128]

    def keep(value: torch.Tensor, hook: Any) -> None:
        seen[hook.name] = value.detach()[0].double().numpy()

    points = [f"blocks.{layer}.attn.hook_{side}" for layer in (0, 1) for side in "qk"]
    with model.hooks(fwd_hooks=[(point, keep) for point in points]):
        ours = capture(model, zoo.tokens(300), attention=attention)
    assert [len(block.attn.rotary_cos) for block in model.blocks] == rows
    for layer in (0, 1):
        for x, side in ((ours.layer(layer).q, "q"), (ours.layer(layer).k, "k")):
            before = seen[f"blocks.{layer}.attn.hook_{side}"]
            turn = np.exp(1j * np.arange(300)[:, None, None] * oracle.plain(16))
            z = (before[..., :8] + 1j * before[..., 8:]) * turn
            true = np.concatenate([z.real, z.imag], axis=-1)
            assert np.abs(x.numpy() - true).max() < 1e-4 * np.abs(true).max()


@needs_hooked
@pytest.mark.parametrize("attention", ["eager", "fused"])
def test_scaling_by_length_goes_on_beyond_the_context(attention: Any) -> None:
    model = zoo.hooked(use_dynamic_ntk_rope=True, train_seq_length=32)
    for n_tokens in (200, 40, 300):
        stretch = 2.0 ** np.ceil(np.log2(n_tokens / 32) + 1) - 1
        expected = oracle.plain(16, 1e4 * stretch ** (16 / 14))
        ours = capture(model, zoo.tokens(n_tokens), attention=attention)
        np.testing.assert_allclose(ours.rope()[0].inv_freq, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-yarn", "llama-llama3", "phi3-longrope"])
def test_scaled_bridges_are_read_beyond_their_context(name: str) -> None:
    ours = capture(zoo.bridge(name), zoo.tokens(200))
    assert ours.max_relative_error < 1e-5
    assert "200 tokens and the trained context is" in ours.notes[0]
    if name == "llama-dynamic":
        # transformers stretches the base by the length; see oracle for the formula.
        stretch = (4.0 * 200 / 32) - 3.0
        expected = oracle.plain(16, 1e4 * stretch ** (16 / 14))
        np.testing.assert_allclose(ours.rope()[0].inv_freq, expected, rtol=1e-5)
    if name == "phi3-longrope":
        expected = oracle.plain(16) / np.array(zoo.LONGROPE_LONG)
        np.testing.assert_allclose(ours.rope()[0].inv_freq, expected, rtol=1e-6)


def test_table_that_does_not_grow_limits_the_prompt() -> None:
    model = zoo.bridge("gpt-j")
    assert capture(model, zoo.tokens(128)).notes == ()
    with pytest.raises(PromptError, match=r"prompt 0 has 129 tokens .* angles for 128 positions"):
        capture(model, zoo.tokens(129))
    assert capture(model, zoo.tokens(129), max_tokens=128).layer(0).n_pos == 128


@needs_hooked
def test_capture_says_on_how_many_queries_it_was_compared(tmp_path) -> None:
    model = hooked_model()
    both = torch.cat([zoo.tokens(LONG), zoo.tokens(LONG, seed=1)])
    ours = capture(model, both, attention="fused", names=["first", "second"])
    table = ours.verification()
    assert table["checked_queries"].tolist() == [256] * 4
    assert table["output_error"].tolist() == [r.check.output for p in ours.records for r in p]
    largest = table["output_error"].max()
    assert (
        f"of the model's own on 256 of 700 queries, attention output within {largest:.1e}"
        in repr(ours)
    )
    assert [note.split(";")[0] for note in ours.notes] == [
        "first, layers 0-1: read in a fused pass",
        "second, layers 0-1: read in a fused pass",
    ]
    assert "formed for 256 of 700 queries" in ours.notes[0]
    again = RotaryCapture.load(ours.save(tmp_path / "capture"))
    assert again.notes == ours.notes and repr(again) == repr(ours)

    few = capture(model, zoo.tokens(40), attention="fused")
    assert "formed for all queries" in few.notes[0]
    assert few.verification()["checked_queries"].tolist() == [40, 40]
    assert repr(few).splitlines()[3].endswith("of the model's own")
    eager = capture(model, zoo.tokens(40)).verification()
    assert eager["checked_queries"].tolist() == [40, 40]
    assert eager["output_error"].isna().all()


@needs_hooked
@pytest.mark.demo
def test_fused_logits_of_the_demo_model_are_its_own() -> None:
    import lens_rope as lr

    model = lr.load_model("smollm2-135m", "hooked")
    token_ids = model.to_tokens(lr.sample_text())[:, :600]
    with torch.no_grad():
        own = model(token_ids, return_type="logits")[0]
    logits = host_of(model).read_logits(token_ids[0].tolist(), (0,), lambda reading: None, "fused")
    assert (logits - own).abs().max() < 1e-4 * own.abs().max()


@needs_hooked
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
def test_fused_pass_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    model, token_ids = hooked_model(name), zoo.tokens(LONG)
    if dtype == torch.float32:
        own = capture(model, token_ids, attention="eager")
        model.to("cuda", print_details=False)
        ours = capture(model, token_ids, attention="fused")
        torch.testing.assert_close(ours.layer(1).q, own.layer(1).q, rtol=1e-3, atol=1e-3)
    else:
        model.to("cuda", print_details=False).to(dtype, print_details=False)
        ours = capture(model, token_ids, attention="fused")
    assert ours.layer(1).check.checked_queries == 256
    assert ours.layer(1).q.device.type == "cpu"
