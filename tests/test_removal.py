"""Removing pairs leaves the pattern of what is left, formed here by hand."""

import numpy as np
import planted
import pytest
import torch
from test_decompose import looped

import lens_rope.removal
from lens_rope.decomposition import decompose
from lens_rope.errors import InputError
from lens_rope.removal import _sample, head_shares_without, shares_without
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
    (some,), (error,) = head_shares_without(record, [1], key, [[[1]]], max_queries=128)
    of_sample, its_error = sampled_by_hand(pattern[seen, key], 128)
    assert some[0] == pytest.approx(of_sample, abs=1e-5)
    assert error[0] == pytest.approx(its_error, abs=1e-5)
    if seen.sum() <= 128:
        assert some[0] == share and error[0] == 0


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


def sampled_by_hand(values, n):
    """Estimate and standard error of the mean of values of which `n` are used, in plain loops."""
    n_all = len(values)
    if n_all <= n:
        return sum(values) / n_all, 0.0
    used, stands_for = [], []
    n_first, n_drawn = n // 4, n - n // 4
    for i in range(n_first):
        used.append(i)
        stands_for.append(1)
    lows = [n_first + i * (n_all - n_first) // n_drawn for i in range(n_drawn + 1)]
    drawn = np.random.default_rng(lens_rope.removal.SAMPLE_SEED).integers(lows[:-1], lows[1:])
    for low, high, query in zip(lows[:-1], lows[1:], drawn, strict=True):
        assert low <= query < high
        used.append(int(query))
        stands_for.append(high - low)
    total = variance = 0.0
    for i, (query, m) in enumerate(zip(used, stands_for, strict=True)):
        total += m * values[query]
        if i < n_first:
            continue
        beside = [used[j] for j in (i - 1, i + 1) if n_first <= j < n]
        s2 = sum((values[query] - values[j]) ** 2 for j in beside) / len(beside) / 2
        variance += m * (m - 1) * s2
    return total / n_all, np.sqrt(variance) / n_all


def steep(n_pos, seed, n_heads=1):
    """A layer whose attention to key 0 falls steeply along the first queries."""
    record = planted.random_record(n_pos, seed=seed, size=0.4, n_heads=n_heads, n_kv=n_heads)
    record.q[:] += 0.5 * record.k[0] / record.k[0].norm(dim=-1, keepdim=True)
    return record


@pytest.mark.parametrize(
    ("n_all", "n"), [(9, 2), (9, 3), (9, 4), (9, 8), (129, 128), (512, 128), (8192, 1024), (5, 1)]
)
def test_the_queries_of_a_sample(n_all, n):
    """The first quarter, then one of each of some stretches that cover the others once."""
    at, stands_for = _sample(n_all, n)
    assert len(at) == len(stands_for) == n and stands_for.sum() == n_all
    assert (np.diff(at) > 0).all() and at[0] >= 0 and at[-1] < n_all
    assert at[: n // 4].tolist() == list(range(n // 4)) and (stands_for[: n // 4] == 1).all()
    rest = stands_for[n // 4 :]
    assert rest.max() - rest.min() <= 1
    ends = n // 4 + rest.cumsum()
    assert (at[n // 4 :] >= ends - rest).all() and (at[n // 4 :] < ends).all()
    again = _sample(n_all, n)
    np.testing.assert_array_equal(at, again[0])
    for most in (n_all, n_all + 1, None):
        every, ones = _sample(n_all, most)
        assert every.tolist() == list(range(n_all)) and (ones == 1).all()


@pytest.mark.parametrize(("n_all", "n"), [(160, 8), (50, 32)])
def test_a_sample_has_no_bias(monkeypatch, n_all, n):
    """Over many draws the mean of the estimates is the mean over all queries, however steep."""
    values = 1 / np.arange(1, n_all + 1) ** 1.5
    estimates = []
    for seed in range(3000):
        monkeypatch.setattr("lens_rope.removal.SAMPLE_SEED", seed)
        at, stands_for = _sample(n_all, n)
        estimates.append((values[at] * stands_for).sum() / n_all)
    spread = np.std(estimates) / np.sqrt(len(estimates))
    assert np.mean(estimates) == pytest.approx(values.mean(), abs=4 * spread)
    assert spread < 0.01 * values.mean()


def test_the_first_query_does_not_count_for_many():
    """Key 0 gets all the attention of its own query; one of 1300 counts as one of 1300."""
    record = steep(1300, 0)
    (every,), _ = head_shares_without(record, [0], 0, [[[0], []]])
    (some,), (error,) = head_shares_without(record, [0], 0, [[[0], []]], max_queries=64)
    assert (every < 0.15).all() and (5 * error < 1 / 64).all()
    assert (np.abs(some - every) < 4 * error).all()


@pytest.mark.parametrize("key", [0, 5])
def test_the_stated_error_is_that_of_the_sample(key):
    """Over many records, the sample misses the mean of all queries by about its stated error.

    Their lengths differ, so that other queries are drawn of each.
    """
    missed, stated = [], []
    for seed in range(24):
        record = steep(1300 + 7 * seed, seed, n_heads=2)
        removals = [[[0], [3]], [[1], [2]]]
        every, none = head_shares_without(record, [0, 1], key, removals)
        some, error = head_shares_without(record, [0, 1], key, removals, max_queries=64)
        assert not none.any() and (error > 0).all()
        missed += (some - every).ravel().tolist()
        stated += error.ravel().tolist()
    missed, stated = np.array(missed), np.array(stated)
    assert np.abs(missed / stated).max() < 5
    assert 0.6 < np.sqrt(np.mean(missed**2) / np.mean(stated**2)) < 1.2
    # Errors of one record go together, so as many as there are records say where they are centred.
    assert abs(missed.mean()) < 3 * np.sqrt(np.mean(stated**2) / 24)


@pytest.mark.parametrize("window", [None, 400])
def test_the_error_equals_loops(window):
    record = planted.random_record(700, size=0.5, window=window)
    left = [record.scores(1).double().numpy() - looped_pair(record, 1, pair) for pair in (0, 2)]
    some, error = head_shares_without(record, [1], 30, [[[0], [2]]], max_queries=50)
    seen = planted.seen_by_hand(record)[:, 30]
    for index, scores in enumerate(left):
        hidden = np.where(planted.seen_by_hand(record), scores, np.nan)
        values = planted.pattern_by_hand(record, 1, hidden)[seen, 30]
        share, its_error = sampled_by_hand(values, 50)
        assert some[0, index] == pytest.approx(share, rel=1e-5)
        assert error[0, index] == pytest.approx(its_error, rel=1e-4)


def looped_pair(record, head, pair):
    """`[q, k]` What one pair contributes to every score, by its two components."""
    first, second = (c[pair] for c in record.rope.components)
    q, k = (x.double().numpy() for x in (record.q[:, head], record.k[:, record.kv_head(head)]))
    both = np.outer(q[:, first], k[:, first]) + np.outer(q[:, second], k[:, second])
    return record.scale * both


def test_one_query_of_several_tells_no_error():
    record = planted.random_record(30)
    share, error = head_shares_without(record, [0], 3, [[[0]]], max_queries=1)
    assert 0 <= share[0, 0] <= 1 and np.isnan(error).all()
    share, error = head_shares_without(record, [0], 29, [[[0]]], max_queries=1)
    assert error.tolist() == [[0.0]]
    for most in (0, -3):
        with pytest.raises(InputError, match=f"max_queries is {most}; at least 1 query is needed"):
            shares_without(record, 0, 3, [[0]], max_queries=most)
