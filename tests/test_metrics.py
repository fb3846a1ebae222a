"""Head metrics equal their published formulas in loops, and known heads have the known extremes.

Oracles: complex128 loops over all queries, keys and distances, with the normal distribution of the
standard library; numbers of rope-profiler 0.1.0 for one random layer.
"""

import cmath
import dataclasses
import itertools
import math
from statistics import NormalDist, fmean, pstdev

import numpy as np
import pytest
import torch
import zoo
from test_decompose import looped, random_capture
from test_usage_and_sinks import pattern_of_loops, planted

from lens_rope.capturing import capture
from lens_rope.errors import InputError
from lens_rope.metrics import (
    LEFT_OUT,
    METRICS,
    _cells,
    head_metrics,
    layer_metrics,
    merge_metrics,
)
from lens_rope.records import LayerCapture, LayerCheck, RotaryCapture
from lens_rope.sinks import head_shares
from lens_rope.spec import LayerRope

SHAPES = {
    "half": {},
    "adjacent": {"pairing": "adjacent"},
    "all rotated": {"rotary_dim": 12},
    "rope part last": {"start": 4},
    "window": {"window": 5},
    "one key head": {"n_kv": 1},
}


def with_factor(captured, factor):
    record = captured.layer(5)
    rope = dataclasses.replace(record.rope, attention_factor=factor)
    return dataclasses.replace(record, rope=rope)


def before_rotation(record, x):
    """`[pos, pair]` complex values before rotation and `[pos, rest]`, in loops."""
    rope, half, s = record.rope, record.rope.n_pairs, record.rope.rotary_start
    z = np.zeros((len(x), half), complex)
    for m in range(len(x)):
        for i in range(half):
            a, b = (s + i, s + i + half) if rope.pairing == "half" else (s + 2 * i, s + 2 * i + 1)
            turn = cmath.exp(-1j * float(rope.inv_freq[i]) * m) / rope.attention_factor
            z[m, i] = complex(float(x[m, a]), float(x[m, b])) * turn
    rest = [c for c in range(rope.d_head) if not s <= c < s + rope.rotary_dim]
    return z, x[:, rest].double().numpy()


def looped_metrics(record, head):
    """Positional sensitivity and semantic stability over all cells, from their definitions."""
    rope = record.rope
    n = record.n_pos if rope.window is None else min(record.n_pos, rope.window)
    z_q, rest_q = before_rotation(record, record.q[:, head])
    z_k, rest_k = before_rotation(record, record.k[:, record.kv_head(head)])
    scale = record.scale * rope.attention_factor**2
    pairs = [(m, k) for m in range(record.n_pos) for k in range(max(0, m - n + 1), m)]

    def curve(c):
        return [
            sum((c[i] * cmath.exp(1j * rope.inv_freq[i] * d)).real for i in range(len(c)))
            for d in range(n)
        ]

    changes = []
    for m, k in pairs:
        c = scale * z_q[m] * z_k[k].conj()
        s = curve(c)
        step = fmean(abs(after - before) for before, after in itertools.pairwise(s))
        changes.append(step / math.sqrt(sum(abs(x) ** 2 for x in c)))
    reversals = []
    for (m, a), (other, b) in itertools.combinations(pairs, 2):
        if m != other:
            continue
        rest = record.scale * float(rest_q[m] @ (rest_k[a] - rest_k[b]))
        g = [rest + s for s in curve(scale * z_q[m] * (z_k[a] - z_k[b]).conj())]
        sign = 1 if g[0] > 0 else -1
        reversals.append(NormalDist(sign * fmean(g), pstdev(g)).cdf(0))
    return fmean(changes), 1 - fmean(reversals)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("factor", [1.0, 1.4])
def test_shift_metrics_equal_loops(shape, factor):
    record = with_factor(random_capture(n_pos=9, **SHAPES[shape]), factor)
    metrics = layer_metrics(record)
    for head in (0, 3):
        sensitivity, stability = looped_metrics(record, head)
        assert metrics.positional_sensitivity[head] == pytest.approx(sensitivity, rel=1e-6)
        assert metrics.semantic_stability[head] == pytest.approx(stability, rel=1e-6)


def test_shift_metrics_equal_those_of_rope_profiler():
    """`score_activations` of rope-profiler 0.1.0 on all pairs and triplets, all distances."""
    metrics = layer_metrics(random_capture(n_pos=12, seed=3).layer(5))
    np.testing.assert_allclose(
        metrics.positional_sensitivity,
        [0.21290691154481725, 0.20492428596254575, 0.29320077244006265, 0.27899110787064596],
        rtol=1e-7,
    )
    np.testing.assert_allclose(
        metrics.semantic_stability,
        [0.8094475151260606, 0.7460541979038187, 0.7526674025035359, 0.6932476819957888],
        rtol=1e-7,
    )


def test_sampled_shift_metrics_are_near_those_of_all_cells():
    record = random_capture(n_pos=40, seed=1).layer(5)
    whole = layer_metrics(record, max_cells=10**6)
    some = layer_metrics(record, max_cells=400)
    assert not np.array_equal(whole.positional_sensitivity, some.positional_sensitivity)
    for name, close in (("positional_sensitivity", 0.02), ("semantic_stability", 0.06)):
        np.testing.assert_allclose(getattr(some, name), getattr(whole, name), atol=close)
    again, other = (layer_metrics(record, max_cells=400, seed=seed) for seed in (0, 1))
    np.testing.assert_array_equal(some.semantic_stability, again.semantic_stability)
    assert not np.array_equal(some.semantic_stability, other.semantic_stability)


@pytest.mark.parametrize(("n_pos", "n_distances"), [(1, 1), (2, 2), (3, 3), (12, 12), (12, 5)])
def test_cells_are_all_that_a_query_sees_before_itself(n_pos, n_distances):
    pairs, triplets = _cells(n_pos, n_distances, 10**6, 0)
    seen = {m: range(max(0, m - n_distances + 1), m) for m in range(n_pos)}
    assert [tuple(p) for p in pairs.tolist()] == [(m, k) for m in seen for k in seen[m]]
    expected = sorted((m, *two) for m in seen for two in itertools.combinations(seen[m], 2))
    assert sorted(map(tuple, triplets.tolist())) == expected


def test_cells_are_drawn_evenly_and_once():
    pairs, triplets = _cells(200, 200, 3000, 0)
    for cells in (pairs, triplets):
        assert len(cells) == len({tuple(cell) for cell in cells.tolist()}) == 3000
        assert (cells[:, 1:] < cells[:, :1]).all()
    # Query m has m pairs and m (m - 1) / 2 triplets, so the means over cells are 2/3 and 3/4 of n.
    assert pairs[:, 0].double().mean() / 200 == pytest.approx(2 / 3, abs=0.02)
    assert triplets[:, 0].double().mean() / 200 == pytest.approx(3 / 4, abs=0.02)


def made(z_q, z_k, inv_freq, rest_q=None, rest_k=None, **changes):
    """One head with these values before rotation, half layout."""
    n_pos, n_pairs = z_q.shape
    rest_q, rest_k = (np.zeros((n_pos, 0)) if r is None else r for r in (rest_q, rest_k))
    d_head = 2 * n_pairs + rest_q.shape[1]
    rope = LayerRope(
        **{
            "layer": 5, "inv_freq": np.array(inv_freq), "inv_freq_error": np.zeros(n_pairs),
            "pairing": "half", "rotary_dim": 2 * n_pairs, "d_head": d_head,
            "attention_factor": 1.0, "window": None, "trained_context": 64, **changes,
        }
    )  # fmt: skip
    turn = np.exp(1j * np.arange(n_pos)[:, None] * rope.inv_freq)
    q, k = (
        torch.tensor(np.concatenate([(z * turn).real, (z * turn).imag, rest], axis=1))
        for z, rest in ((z_q, rest_q), (z_k, rest_k))
    )
    check = LayerCheck(5, "hook_rot", 0.0, 0.0, 0.0, 0.0, (0.0,))
    return LayerCapture(rope, q[:, None].float(), k[:, None].float(), 0.3, None, None, check)


RNG = np.random.default_rng(0)
REAL = RNG.normal(size=(8, 3)) + 0j


def test_scores_that_turn_half_a_turn_each_step_have_the_largest_sensitivity():
    """Each step swings every one of P equal pairs from one extreme to the other: 2 sqrt(P)."""
    metrics = layer_metrics(made(np.ones((8, 3)) + 0j, np.ones((8, 3)) + 0j, [np.pi] * 3))
    assert metrics.positional_sensitivity[0] == pytest.approx(2 * math.sqrt(3), rel=1e-5)


def test_scores_that_do_not_turn_have_no_sensitivity_and_stay_in_order():
    metrics = layer_metrics(made(REAL, RNG.normal(size=(8, 3)) + 0j, [0.0] * 3))
    assert metrics.positional_sensitivity[0] == 0
    assert metrics.semantic_stability[0] == 1


def test_one_pair_has_the_mean_step_of_a_cosine():
    metrics = layer_metrics(made(REAL[:, :1], REAL[::-1, :1].copy(), [0.25]))
    steps = np.abs(np.diff(np.cos(0.25 * np.arange(8)))).mean()
    assert metrics.positional_sensitivity[0] == pytest.approx(steps, rel=1e-5)


def test_order_that_turns_around_at_each_step_is_half_stable():
    """Over an even number of distances the mean difference is zero, so either order is likely."""
    metrics = layer_metrics(made(REAL[:, :1], REAL[::-1, :1].copy(), [np.pi]))
    assert metrics.semantic_stability[0] == pytest.approx(0.5, abs=1e-6)


def test_order_that_differs_at_distance_zero_alone_is_unstable():
    """`G` is 1 at distance 0 and about -1 after it: a slow pair plus a constant do that."""
    n = 8
    z_q, rest_q = np.ones((n, 1)) + 0j, np.ones((n, 1))
    z_k, rest_k = np.zeros((n, 1)) + 0j, np.zeros((n, 1))
    z_k[1], rest_k[1] = 4.0, -3.0
    metrics = layer_metrics(made(z_q, z_k, [0.4], rest_q, rest_k))
    g = 4 * np.cos(0.4 * np.arange(n)) - 3
    # Triplets with key 1 count; the others tie.
    assert metrics.semantic_stability[0] == pytest.approx(
        1 - NormalDist(g.mean(), g.std()).cdf(0), abs=1e-6
    )
    assert metrics.semantic_stability[0] < 0.2


def test_order_by_the_pass_through_alone_is_stable():
    zero = np.zeros((8, 2)) + 0j
    record = made(zero, zero, [1.0, 0.1], RNG.normal(size=(8, 2)), RNG.normal(size=(8, 2)))
    metrics = layer_metrics(record)
    assert metrics.semantic_stability[0] == 1
    # There is no rotated score to normalise by.
    assert np.isnan(metrics.positional_sensitivity[0])


def test_a_key_of_zero_is_left_out_of_the_sensitivity():
    z_k = np.ones((8, 3)) + 0j
    z_k[2] = 0
    metrics = layer_metrics(made(np.ones((8, 3)) + 0j, z_k, [np.pi] * 3))
    assert metrics.positional_sensitivity[0] == pytest.approx(2 * math.sqrt(3), rel=1e-5)


def test_keys_that_are_equal_before_rotation_tie():
    """Rounding of the rotated values makes one of them win by chance; they are left out."""
    record = made(REAL, np.repeat(REAL[:1], 8, axis=0), [1.0, 0.1, 0.01])
    metrics = layer_metrics(record)
    assert np.isnan(metrics.semantic_stability[0]) and metrics.semantic_prompts[0] == 0
    assert np.isfinite(metrics.positional_sensitivity[0])


@pytest.mark.parametrize("factor", [1.0, 1.4])
def test_full_cycle_shares_equal_loops(factor):
    record = with_factor(random_capture(window=30), factor)
    # cycles over 30 tokens: inv_freq 1, 0.215, 0.046, 0.01 turn 4.8, 1.03, 0.22, 0.05 times
    assert (record.rope.cycles >= 1).tolist() == [True, True, False, False]
    metrics = layer_metrics(record)
    for head in range(4):
        for name, x in (("query", record.q[:, head]), ("key", record.k[:, head // 2])):
            z, _ = before_rotation(record, x)
            lengths = [fmean(abs(row[i]) for row in z) for i in range(4)]
            share = getattr(metrics, f"{name}_full_cycle_share")[head]
            assert share == pytest.approx(sum(lengths[:2]) / sum(lengths), rel=1e-6)


def test_full_cycle_shares_at_their_extremes():
    first, last = np.zeros((8, 2)) + 0j, np.zeros((8, 2)) + 0j
    first[:, 0], last[:, 1] = 3, 3
    metrics = layer_metrics(made(first, last, [1.0, 0.01]))
    assert metrics.query_full_cycle_share[0] == 1 and metrics.key_full_cycle_share[0] == 0
    # Exactly one turn over the context of 64 is a full cycle.
    exact = layer_metrics(made(last, last, [1.0, 2 * np.pi / 64]))
    assert exact.query_full_cycle_share[0] == 1


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("sinks", [False, True])
def test_sink_metrics_equal_loops(window, sinks):
    record = random_capture(n_pos=70, window=window, sinks=sinks).layer(5)
    metrics = layer_metrics(record)
    np.testing.assert_array_equal(metrics.sink_share, head_shares(record).sink_share)
    for head in range(4):
        if sinks:
            contributions, passed = looped(record, head)
            weights = np.exp(contributions.sum(0) + passed)
            total = np.nansum(weights, axis=1, keepdims=True) + math.exp(float(record.sinks[head]))
            pattern = np.nan_to_num(weights / total)
        else:
            pattern = pattern_of_loops(record, head)
        share = sum(pattern[m, 0] for m in range(70)) / 70
        assert metrics.first_token_share[head] == pytest.approx(share, abs=1e-6)
        assert metrics.first_token_sink[head] == (share > 0.3)
    assert (metrics.sink_tokens, metrics.sink_prompts) == (70, 1)


def test_sink_elsewhere_is_no_first_token_sink():
    at_first, elsewhere = layer_metrics(planted(0, 80)), layer_metrics(planted(3, 80))
    assert at_first.first_token_sink[0] == 1 and at_first.sink_share[0] > 0.99
    assert elsewhere.first_token_sink[0] == 0 and elsewhere.sink_share[0] > 0.99


@pytest.mark.parametrize("n_pos", [1, 2, 3, 63])
def test_too_few_tokens_give_nan(n_pos):
    metrics = layer_metrics(random_capture(n_pos=n_pos).layer(5))
    assert np.isnan([metrics.sink_share, metrics.first_token_share]).all()
    assert np.isnan(metrics.first_token_sink).all() and metrics.sink_prompts == 0
    assert np.isnan(metrics.positional_sensitivity).all() == (n_pos < 2)
    assert np.isnan(metrics.semantic_stability).all() == (n_pos < 3)
    assert np.isfinite(metrics.query_full_cycle_share).all()


def test_layer_without_rope_has_sinks_only():
    metrics = layer_metrics(random_capture(n_pos=70, rotary_dim=0).layer(5))
    for name in METRICS[:4]:
        assert np.isnan(getattr(metrics, name)).all()
    for name in METRICS[4:]:
        assert np.isfinite(getattr(metrics, name)).all()


def several():
    return [layer_metrics(random_capture(n_pos=n, seed=n).layer(5)) for n in (1, 2, 3, 70, 64, 200)]


def test_merge_weighs_as_the_definitions_do():
    metrics = several()
    merged = merge_metrics(metrics)
    tokens = np.array([1, 2, 3, 70, 64, 200])
    for name in ("query_length", "query_full_cycle_length", "key_length", "key_full_cycle_length"):
        values = np.array([getattr(m, name) for m in metrics])
        np.testing.assert_allclose(getattr(merged, name), tokens @ values / 340)
    for name, first in (("positional_sensitivity", 1), ("semantic_stability", 2)):
        values = np.array([getattr(m, name) for m in metrics[first:]])
        np.testing.assert_allclose(getattr(merged, name), values.mean(axis=0))
    for name in ("sink_share", "first_token_share"):
        values = np.array([getattr(m, name) for m in metrics[3:]])
        np.testing.assert_allclose(getattr(merged, name), tokens[3:] @ values / 334)
    sinks = [m.first_token_sink for m in metrics[3:]]
    np.testing.assert_allclose(merged.first_token_sink, np.mean(sinks, axis=0))
    assert merged.positional_prompts.tolist() == [5] * 4
    assert merged.semantic_prompts.tolist() == [4] * 4
    assert (merged.n_tokens, merged.sink_tokens, merged.sink_prompts) == (340, 334, 3)
    # A merge of merges is the same mean.
    halves = merge_metrics([merge_metrics(metrics[:4]), merge_metrics(metrics[4:])])
    for name in METRICS:
        np.testing.assert_allclose(getattr(halves, name), getattr(merged, name))


def test_merged_first_token_sink_is_a_share_of_prompts():
    metrics = [layer_metrics(planted(position, n)) for position, n in ((0, 80), (3, 160))]
    assert merge_metrics(metrics).first_token_sink[0] == 0.5


def test_merge_does_not_depend_on_order():
    metrics = several()
    first = merge_metrics(metrics)
    for order in itertools.islice(itertools.permutations(metrics), 0, 720, 37):
        merged = merge_metrics(order)
        for field in dataclasses.fields(merged):
            np.testing.assert_array_equal(getattr(merged, field.name), getattr(first, field.name))


def test_merge_refuses_what_does_not_belong_together():
    metrics = layer_metrics(random_capture(n_pos=4).layer(5))
    fewer = layer_metrics(random_capture(n_pos=4, n_heads=2).layer(5))
    for wrong in ([], [metrics, fewer], [metrics, dataclasses.replace(metrics, layer=4)]):
        with pytest.raises(InputError, match="only metrics of one layer with the same heads"):
            merge_metrics(wrong)


def together(*captures):
    """One capture of several prompts."""
    return RotaryCapture(
        captures[0].model,
        tuple(c.prompts[0] for c in captures),
        (5,),
        tuple(c.records[0] for c in captures),
    )


def test_table_has_a_row_per_layer_and_head():
    captured = together(random_capture(n_pos=70), random_capture(n_pos=80, seed=1))
    metrics = head_metrics(captured, max_cells=50)
    table = metrics.to_dataframe()
    assert table.columns.tolist() == ["layer", "head", *METRICS]
    assert table[["layer", "head"]].values.tolist() == [[5, h] for h in range(4)]
    merged = merge_metrics(layer_metrics(r[0], max_cells=50) for r in captured.records)
    for name in METRICS:
        np.testing.assert_array_equal(table[name], getattr(merged, name))
    rate = np.mean([merged.first_token_sink])
    assert metrics.first_token_sink_rate == rate and metrics.n_prompts == 2


def test_text_says_what_is_missing():
    text = repr(head_metrics(random_capture(n_pos=2, window=1)))
    assert "1 of 1 prompts have fewer than 64 tokens and are left out of sink share" in text
    assert "1 of 1 prompts have fewer than 3 tokens: semantic stability needs" in text
    assert "layers 5 have a sliding window shorter than a prompt" in text
    assert "1 of the model's 6 layers are at hand" in text
    for name in LEFT_OUT:
        assert f"left out: {name}; " in text
    assert "layers 5 have no RoPE" in repr(head_metrics(random_capture(rotary_dim=0)))
    sampled = repr(head_metrics(random_capture(n_pos=40), max_cells=100, seed=7))
    assert "at most 100 (query, key) pairs" in sampled and "seed 7" in sampled
    assert "seed" not in repr(head_metrics(random_capture(n_pos=5)))
    record = made(REAL, np.repeat(REAL[:1], 8, axis=0), [1.0, 0.1, 0.01])
    base = random_capture(n_pos=8, n_heads=1, n_kv=1)
    tied = dataclasses.replace(base, records=((record,),))
    assert "in layers 5 positional sensitivity or semantic stability" in repr(head_metrics(tied))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: head_metrics(c, layers=[3]), "layer 3 was not captured"),
        (lambda c: head_metrics(c, layers=[]), "layers is empty"),
        (lambda c: head_metrics(c, max_cells=0), "max_cells is 0; it must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(InputError, match=message):
        call(random_capture(n_pos=4))


def test_metrics_of_a_model(host_model):
    tokens = zoo.tokens(70)
    captured = capture(host_model, tokens)
    metrics = head_metrics(captured, layers=[1])
    _, cache = host_model.run_with_cache(tokens)
    pattern = cache["blocks.1.attn.hook_pattern"][0].detach().double().numpy()
    first = metrics.layers[0].first_token_share
    np.testing.assert_allclose(first, pattern[:, :, 0].mean(axis=1), atol=1e-5)
    assert metrics.to_dataframe().notna().all(axis=None)
