"""Contributions and pass-through sum to the score; reductions equal their definitions in loops.

Oracle: complex128 loops over positions and pairs, and the model's own hooks.
"""

import numpy as np
import pytest
import torch
import zoo
from allocations import Largest
from conftest import needs_hooked
from hypothesis import given, settings
from hypothesis import strategies as st

from lens_rope.capturing import capture
from lens_rope.decomposition import decompose
from lens_rope.errors import InputError
from lens_rope.records import LayerCapture, LayerCheck, ModelInfo, Prompt, RotaryCapture
from lens_rope.spec import LayerRope


def random_capture(
    *, n_pos=23, rotary_dim=8, d_head=12, start=0, pairing="half", window=None, n_heads=4, n_kv=2,
    softcap=None, sinks=False, seed=0,
):  # fmt: skip
    """Random rotated queries and keys of one layer; no model stands behind them."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator) * 3  # noqa: E731
    n_pairs = rotary_dim // 2
    rope = LayerRope(
        layer=5,
        inv_freq=100.0 ** -np.linspace(0, 1, n_pairs) if n_pairs else np.empty(0),
        inv_freq_error=np.zeros(n_pairs),
        pairing=pairing,
        rotary_dim=rotary_dim,
        d_head=d_head,
        attention_factor=1.0,
        window=window,
        trained_context=64,
        rotary_start=start,
    )
    check = LayerCheck(5, "hook_rot", 0.0, 0.0, 0.0, 0.0, tuple(0.25 * h for h in range(n_heads)))
    record = LayerCapture(
        rope, draw(n_pos, n_heads, d_head), draw(n_pos, n_kv, d_head), 0.3, softcap,
        draw(n_heads) if sinks else None, check,
    )  # fmt: skip
    prompt = Prompt("p", tuple(range(n_pos)), tuple(f"t{i}" for i in range(n_pos)), None)
    model = ModelInfo("random", 6, n_heads, n_kv, d_head, "float32", "none", {})
    return RotaryCapture(model, (prompt,), (5,), ((record,),))


def looped(record, head):
    """`[pair, q, k]` contributions and `[q, k]` pass-through, in complex128, nan where unseen."""
    rope = record.rope
    q = record.q[:, head].double().numpy()
    k = record.k[:, head // (record.n_heads // record.n_kv_heads)].double().numpy()
    half, s = rope.rotary_dim // 2, rope.rotary_start
    pairs = [
        (s + i, s + i + half) if rope.pairing == "half" else (s + 2 * i, s + 2 * i + 1)
        for i in range(half)
    ]
    rest = [c for c in range(rope.d_head) if not s <= c < s + rope.rotary_dim]
    n = len(q)
    out, passed = np.full((half, n, n), np.nan), np.full((n, n), np.nan)
    for m in range(n):
        for j in range(m + 1):
            if rope.window is not None and m - j >= rope.window:
                continue
            for i, (a, b) in enumerate(pairs):
                z_q, z_k = complex(q[m, a], q[m, b]), complex(k[j, a], k[j, b])
                out[i, m, j] = record.scale * (z_q * z_k.conjugate()).real
            passed[m, j] = record.scale * sum(q[m, c] * k[j, c] for c in rest)
    return out, passed


SHAPES = {
    "half": {},
    "adjacent": {"pairing": "adjacent"},
    "all rotated": {"rotary_dim": 12},
    "nothing rotated": {"rotary_dim": 0},
    "rope part last": {"start": 4},
    "window": {"window": 6},
    "window wider than the prompt": {"window": 60},
    "one key head": {"n_kv": 1},
    "one key head per head": {"n_kv": 4},
    "one token": {"n_pos": 1},
    "two tokens": {"n_pos": 2},
}


@pytest.fixture(params=SHAPES, ids=list(SHAPES))
def captured(request):
    return random_capture(**SHAPES[request.param])


@pytest.mark.parametrize("head", [0, 1, 3])
def test_contributions_equal_loops(captured, head):
    expected, passed = looped(captured.layer(5), head)
    d = decompose(captured, 5, head)
    np.testing.assert_allclose(d.contributions(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d.pass_through(), passed, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d.scores(), expected.sum(0) + passed, rtol=1e-5, atol=2e-5)


def test_contributions_of_some(captured):
    d, n = decompose(captured, 5, 1), captured.layer(5).n_pos
    whole, pairs = d.contributions(), [0][: d.rope.n_pairs]
    some = d.contributions(pairs, queries=[n - 1, 0], keys=[0])
    np.testing.assert_allclose(some, whole[pairs][:, [n - 1, 0]][:, :, [0]], rtol=1e-6, atol=1e-6)


def test_at_equals_loops(captured):
    expected, passed = looped(captured.layer(5), 2)
    n = captured.layer(5).n_pos
    query, key = n - 1, max(0, n - 4)
    at = decompose(captured, 5, 2).at(query, key)
    np.testing.assert_allclose(at.contribution, expected[:, query, key], rtol=1e-5, atol=1e-5)
    assert at.pass_through == pytest.approx(passed[query, key], abs=1e-5)
    assert at.score == pytest.approx(expected[:, query, key].sum() + passed[query, key], abs=2e-5)
    assert (at.query_token, at.key_token) == (f"t{query}", f"t{key}")
    sizes = at.to_dataframe()["contribution"].abs()
    assert (sizes.diff().dropna() <= 0).all()
    assert f"score {at.score:.4f} of query {query}" in str(at)


def test_by_pair_equals_its_definition(captured):
    expected, passed = looped(captured.layer(5), 3)
    summary = decompose(captured, 5, 3).by_pair()
    np.testing.assert_allclose(summary.mean, np.nanmean(expected, (1, 2)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        summary.rms, np.sqrt(np.nanmean(expected**2, (1, 2))), rtol=1e-4, atol=1e-5
    )
    assert summary.pass_through_mean == pytest.approx(np.nanmean(passed), abs=1e-5)
    assert summary.pass_through_rms == pytest.approx(np.sqrt(np.nanmean(passed**2)), rel=1e-4)
    scores = expected.sum(0) + passed
    centred = scores - np.nanmean(scores, axis=1, keepdims=True)
    variance = np.nansum(centred**2)
    if variance == 0:
        assert np.isnan(summary.share).all() and np.isnan(summary.pass_through_share)
        return
    share = np.nansum(expected * centred, (1, 2)) / variance
    np.testing.assert_allclose(summary.share, share, rtol=1e-4, atol=1e-5)
    assert summary.share.sum() + summary.pass_through_share == pytest.approx(1, abs=1e-6)


def test_by_distance_equals_its_definition(captured):
    expected, passed = looped(captured.layer(5), 0)
    profile = decompose(captured, 5, 0).by_distance()
    n, window = captured.layer(5).n_pos, captured.layer(5).rope.window
    assert profile.distance.tolist() == list(range(min(n, window or n)))
    for distance in profile.distance:
        along = [np.diagonal(c, -distance) for c in expected]
        assert (
            profile.count[distance]
            == n - distance
            == np.isfinite(along).sum(-1).max(initial=n - distance)
        )
        np.testing.assert_allclose(
            profile.mean[distance], [a.mean() for a in along], rtol=1e-5, atol=1e-5
        )
        rest = np.diagonal(passed, -distance).mean()
        assert profile.pass_through[distance] == pytest.approx(rest, abs=1e-5)
        total = np.diagonal(expected.sum(0) + passed, -distance).mean()
        assert profile.total[distance] == pytest.approx(total, abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(
    n_pos=st.integers(1, 40), pairs=st.integers(1, 6), window=st.none() | st.integers(1, 50),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_conservation_whatever_the_shape(n_pos, pairs, window, seed):
    captured = random_capture(
        n_pos=n_pos, rotary_dim=2 * pairs, d_head=2 * pairs + 3, window=window, seed=seed
    )
    d = decompose(captured, 5, 2)
    total = d.contributions().sum(0) + d.pass_through()
    np.testing.assert_allclose(total, d.scores(), rtol=1e-5, atol=3e-5)


def test_residual_is_that_of_the_head():
    captured = random_capture()
    assert [decompose(captured, 5, head).residual for head in range(4)] == [0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    "overrides",
    [{}, {"n_key_value_heads": 2}, {"rotary_dim": 4}, {"attn_scores_soft_cap": 2.0},
     {"use_attention_sinks": True}],
    ids=["plain", "grouped", "partial", "soft-cap", "learned sinks"],
)  # fmt: skip
@needs_hooked
def test_scores_and_pattern_are_the_models_own(overrides):
    model, tokens = zoo.hooked(**overrides), zoo.tokens(30)
    captured = capture(model, tokens)
    _, cache = model.run_with_cache(tokens)
    for layer in (0, 1):
        for head in range(4):
            d = decompose(captured, layer, head)
            pattern = cache["pattern", layer][0, head].detach().numpy()
            np.testing.assert_allclose(d.pattern(), pattern, atol=1e-5)
            scores = cache["attn_scores", layer][0, head].detach().numpy()
            seen = np.isfinite(d.scores())
            assert (seen == np.tril(np.ones((30, 30), bool))).all()
            cap = overrides.get("attn_scores_soft_cap")
            ours = d.scores() if cap is None else cap * np.tanh(d.scores() / cap)
            size = np.abs(scores[seen]).max()
            np.testing.assert_allclose(ours[seen], scores[seen], atol=1e-5 * size)


def test_rows_below_one_are_not_renormalised():
    captured = random_capture(sinks=True)
    sums = decompose(captured, 5, 1).pattern().sum(1)
    sink = np.exp(captured.layer(5).sinks[1].item())
    scores = decompose(captured, 5, 1).scores()
    expected = np.nansum(np.exp(scores), 1) / (np.nansum(np.exp(scores), 1) + sink)
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    assert (sums <= 1).all() and sums.min() < 0.95


@pytest.mark.parametrize("window", [None, 6, 200])
def test_some_queries_and_keys_are_cut_from_all(window):
    """In another order, and in more blocks of queries than one."""
    captured = random_capture(n_pos=300, window=window, softcap=2.0, sinks=True)
    d, q, k = decompose(captured, 5, 3), [299, 3, 150, *range(10, 200)], [0, 160, 140, 7]
    scores, cut = d.scores(), np.ix_(q, k)
    distance = np.subtract.outer(np.arange(300), np.arange(300))
    seen = (distance >= 0) & (distance < (window or 300))
    np.testing.assert_array_equal(np.isfinite(scores), seen)
    capped = 2 * np.tanh(scores.astype(np.float64) / 2)
    weights = np.where(seen, np.exp(capped), 0)
    pattern = weights / (weights.sum(1, keepdims=True) + np.exp(float(d.record.sinks[3])))
    np.testing.assert_allclose(d.pattern(), pattern, atol=1e-6)
    np.testing.assert_allclose(d.pattern(queries=q, keys=k), pattern[cut], atol=1e-6)
    np.testing.assert_allclose(d.scores(queries=q, keys=k), scores[cut], rtol=1e-5, atol=1e-5)
    passed = d.pass_through(queries=q, keys=k)
    np.testing.assert_allclose(passed, d.pass_through()[cut], rtol=1e-5, atol=1e-5)
    assert d.contributions(queries=[], keys=[]).shape == (4, 0, 0)


def test_arrays_that_do_not_fit_in_memory_are_refused_and_their_cells_are_not():
    n_pos = 10**6
    captured = random_capture(n_pos=n_pos, rotary_dim=2, d_head=4, n_heads=1, n_kv=1)
    d = decompose(captured, 5, 0)
    with Largest() as largest:
        for call, size in (
            (d.contributions, "1 pairs of 1,000,000 queries and 1,000,000 keys take 4000.0 GB"),
            (d.pass_through, "the pass-through of 1,000,000 queries"),
            (d.scores, "the scores of 1,000,000 queries and 1,000,000 keys take 4000.0 GB"),
            (d.pattern, "the pattern of 1,000,000 queries"),
            (lambda: d.scores(queries=range(0, n_pos, 2)), "500,000 queries .* take 2000.0 GB"),
        ):
            with pytest.raises(InputError, match=rf"{size}.*available; .*queries=range\(100\)"):
                call()
        cell = d.at(900_000, 7)
        some = {"queries": [900_000, 5], "keys": [7, 6]}
        assert d.contributions(**some)[0, 0, 0] == cell.contribution[0]
        assert d.scores(**some)[0, 0] == pytest.approx(cell.score, rel=1e-5)
        assert np.isnan(d.scores(**some)[1, 0])
    assert largest.numel <= d.record.q.numel()
    q, k = (x[at, 0].double().numpy() for x, at in ((d.record.q, 900_000), (d.record.k, 7)))
    assert cell.score == pytest.approx(0.3 * q @ k, rel=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: decompose(c, 4, 0), "layer 4 was not captured; captured layers: 5"),
        (lambda c: decompose(c, 5, 4), "head 4 is out of range; layer 5 has 4 heads"),
        (lambda c: decompose(c, 5, -1), "head -1 is out of range"),
        (lambda c: decompose(c, 5, 0, prompt=1), "prompt 1 is out of range"),
        (lambda c: decompose(c, 5, 0).at(23, 0), "query 23 is out of range; there are 23"),
        (lambda c: decompose(c, 5, 0).at(3, -1), "key -1 is out of range"),
        (lambda c: decompose(c, 5, 0).at(3, 4), "query 3 does not see key 4"),
        (lambda c: decompose(c, 5, 0).contributions([4]), "pair 4 is out of range; there are 4"),
        (lambda c: decompose(c, 5, 0).contributions(keys=[99]), "key 99 is out of range"),
    ],
)
def test_out_of_range_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call(random_capture())


def test_key_outside_the_window_is_refused():
    d = decompose(random_capture(window=6), 5, 0)
    assert np.isfinite(d.at(10, 5).score)
    with pytest.raises(InputError, match="query 10 does not see key 4; a query sees the last 6"):
        d.at(10, 4)


def test_tables_name_their_rows():
    d = decompose(random_capture(), 5, 0)
    assert d.by_pair().to_dataframe()["pair"].tolist() == [0, 1, 2, 3, -1]
    everything = decompose(random_capture(rotary_dim=12), 5, 0).by_pair().to_dataframe()
    assert everything["pair"].tolist() == list(range(6))
    columns = d.by_distance().to_dataframe().columns.tolist()
    assert columns == [
        "distance",
        "count",
        "total",
        "pass_through",
        *[f"pair_{i}" for i in range(4)],
    ]
    assert "layer 5 head 0 (KV head 0)" in repr(d)
    assert repr(decompose(random_capture(), 5, 3)).count("KV head 1")
