"""Removing pairs leaves the pattern of what is left, formed here by hand."""

import numpy as np
import planted
import pytest
import torch
from test_decompose import looped

from lens_rope.decomposition import decompose
from lens_rope.removal import _error, head_shares_without, shares_without
from lens_rope.scores import pattern_of, soft_capped

SHAPES = {
    "plain": {},
    "partial": {"n_rest": 9},
    "everything rotated": {"n_rest": 0},
    "adjacent": {"pairing": "adjacent"},
    "rotated part last": {"rotary_start": 3},
    "factor": {"attention_factor": 1.3},
    "grouped": {"n_heads": 4, "n_kv": 2},
    "window": {"window": 7},
    "window of many blocks": {"window": 90},
    "learned sinks": {"sinks": [0.5, -1.0]},
    "soft-cap": {"softcap": 1.5},
    "scale": {"scale": 0.3},
}


def share_by_hand(record, head, key, pairs):
    contributions, passed = looped(record, head)
    left = passed + np.delete(contributions, list(pairs), axis=0).sum(axis=0)
    pattern = planted.pattern_by_hand(record, head, left)
    return pattern[planted.seen_by_hand(record)[:, key], key].mean()


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_loops(shape):
    record = planted.random_record(30, **SHAPES[shape])
    removals = [[], [0], [2, 3], range(record.rope.n_pairs)]
    for head, key in ((0, 0), (record.n_heads - 1, 11), (1, 29)):
        shares = shares_without(record, head, key, removals)
        expected = [share_by_hand(record, head, key, pairs) for pairs in removals]
        np.testing.assert_allclose(shares, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("window", [None, 16, 100, 200, 400])
@pytest.mark.parametrize("key", [0, 5, 150, 299])
def test_blocks_of_queries_make_no_difference(window, key):
    """Longer than several blocks; the dense pattern is formed at once."""
    record = planted.random_record(300, window=window)
    d = decompose(planted.make_capture(record), 0, 1)
    left = torch.tensor(np.nan_to_num(d.scores() - d.contributions([1])[0]))
    pattern = pattern_of(soft_capped(left, None)[None], record.visible, None)[0].double().numpy()
    seen = record.visible[:, key].numpy()
    share = shares_without(record, 1, key, [[1]])[0]
    assert share == pytest.approx(pattern[seen, key].mean(), abs=1e-5)
    some = shares_without(record, 1, key, [[1]], max_queries=128)[0]
    queries = np.flatnonzero(seen)
    if len(queries) <= 128:
        assert some == share
    else:
        chosen = [queries[round(i * (len(queries) - 1) / 127)] for i in range(128)]
        assert some == pytest.approx(pattern[chosen, key].mean(), abs=1e-5)


@pytest.mark.parametrize("name", planted.MODELS)
def test_without_all_pairs_the_pass_through_is_left(name):
    for record in planted.captured(name).records[0]:
        rope = record.rope
        rest = torch.as_tensor(rope.pass_components)
        for head, key in ((0, 0), (record.n_heads - 1, 3)):
            q, k = record.q[:, head, rest], record.k[:, record.kv_head(head), rest]
            sinks = None if record.sinks is None else record.sinks[[head]]
            scores = soft_capped(record.scale * q @ k.T, record.softcap)
            alone = pattern_of(scores[None], record.visible, sinks)[0].double().numpy()
            own = record.pattern(head).double().numpy()
            seen = record.visible[:, key].numpy()
            nothing, everything = shares_without(record, head, key, [[], range(rope.n_pairs)])
            # What cancels in float32 is as large as the scores.
            size = max(1.0, float(record.scores(head).abs().max()))
            assert everything == pytest.approx(alone[seen, key].mean(), abs=2e-6 * size)
            assert nothing == pytest.approx(own[seen, key].mean(), abs=2e-6 * size)


def test_one_token_and_no_removals():
    record = planted.random_record(1)
    assert shares_without(record, 0, 0, [[], [0]]).tolist() == [1, 1]
    assert shares_without(record, 0, 0, []).shape == (0,)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_heads_together_and_small_blocks(monkeypatch, shape, rows):
    record = planted.random_record(30, **SHAPES[shape])
    heads = range(record.n_heads)
    removals = [[[head % 4], [], [1, 3]] for head in heads]
    alone = [shares_without(record, head, 4, removals[head]) for head in heads]
    monkeypatch.setattr("lens_rope.removal._BLOCK_VALUES", 700 * rows)
    monkeypatch.setattr("lens_rope.removal._ROWS", rows)
    together, error = head_shares_without(record, list(heads), 4, removals)
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    assert error.shape == together.shape and not error.any()


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_stated_error_is_that_of_the_sample(offset):
    """Over many heads, the sample misses the mean of all queries by about its stated error."""
    missed = []
    for seed in range(25):
        record = planted.random_record(400, seed=seed, offset=offset, size=0.7, n_heads=2, n_kv=2)
        removals = [[[0], [3]], [[1], [2]]]
        every, none = head_shares_without(record, [0, 1], 5, removals)
        some, error = head_shares_without(record, [0, 1], 5, removals, max_queries=80)
        assert not none.any() and (error > 0).all()
        missed += ((some - every) / error).ravel().tolist()
    assert 0.7 < np.sqrt(np.mean(np.square(missed))) < 1.4


def test_a_sample_of_a_drift_errs_less_than_its_spread():
    n, slope = 64, np.linspace(0, 1, 64)[None, None]
    assert _error(slope, 1000)[0, 0] < 0.1 * slope.std() / np.sqrt(n)
    assert _error(slope, n)[0, 0] == 0
    noise = np.random.default_rng(0).normal(size=(1, 500, n))
    expected = np.sqrt((1 - n / 128) / n)
    assert _error(noise, 128).mean() == pytest.approx(expected, rel=0.05)
