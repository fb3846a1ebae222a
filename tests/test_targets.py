"""Targets against their definitions in words, written as loops over queries and keys."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lens_rope.errors import InputError
from lens_rope.scores import visibility
from lens_rope.targets import (
    LOCAL_REACH,
    local_target,
    previous_target,
    repeat_targets,
    sink_target,
    target_from_mask,
    target_from_weights,
)


def dense(target, n_pos):
    """`[q, k]` The weights as a matrix."""
    out = np.zeros((n_pos, n_pos))
    np.add.at(out, (target.query, target.key), target.weight)
    return out


def scaled(mask):
    """Rows scaled to sum to 1, rows of zeros left."""
    total = mask.sum(axis=1, keepdims=True)
    return np.divide(mask, total, out=np.zeros(mask.shape), where=total > 0)


def seen(n_pos, window):
    return visibility(n_pos, window).numpy()


WINDOWS = [None, 1, 5, 10, 16, 17, 99]


@pytest.mark.parametrize("window", WINDOWS)
def test_targets_by_place_equal_their_definitions(window):
    n = 40
    assert LOCAL_REACH == 8
    see = seen(n, window)
    previous, local = np.zeros((2, n, n))
    for m in range(n):
        previous[m, m - 1] = m > 0 and window != 1
        for d in range(LOCAL_REACH):
            local[m, m - d] = see[m].sum() >= 2 * LOCAL_REACH
    np.testing.assert_array_equal(dense(previous_target(n, window), n), previous)
    np.testing.assert_allclose(dense(local_target(n, window), n), scaled(local))
    for position in (0, 7, 39):
        sink = np.zeros((n, n))
        sink[position + 1 :, position] = see[position + 1 :, position]
        np.testing.assert_array_equal(dense(sink_target(position, n, window), n), sink)


def looped_repeats(tokens, window):
    n = len(tokens)
    induction, duplicate, first = np.zeros((3, n, n))
    for m in range(n):
        before = [j for j in range(m) if tokens[j] == tokens[m]]
        near = [j for j in before if window is None or m - j < window]
        for j in near:
            duplicate[m, j] = 1
            if j + 1 < m:
                induction[m, j + 1] = 1
        if len(before) >= 2 and near == before:
            first[m, before[0]] = 1
    return scaled(induction), scaled(duplicate), scaled(first)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    window=st.none() | st.integers(1, 12),
)
def test_targets_by_token_equal_their_definitions(tokens, window):
    n = len(tokens)
    see = seen(n, window)
    for target, expected in zip(
        repeat_targets(tokens, window), looped_repeats(tokens, window), strict=True
    ):
        np.testing.assert_allclose(dense(target, n), expected, atol=1e-12)
        assert not dense(target, n)[~see].any()
        assert (np.diff(target.query) >= 0).all()
        assert target.queries.tolist() == np.flatnonzero(expected.any(axis=1)).tolist()
        pattern = np.random.default_rng(0).random((n, n))
        mask = expected > 0
        rows = mask.any(axis=1)
        if not rows.any():
            assert np.isnan(target.mass(pattern)) and np.isnan(target.uniform_mass(window))
            continue
        assert target.mass(pattern) == pytest.approx((pattern * mask)[rows].sum(1).mean())
        uniform = (see / see.sum(axis=1, keepdims=True) * mask)[rows].sum(1).mean()
        assert target.uniform_mass(window) == pytest.approx(uniform)


def test_names():
    names = [t.name for t in repeat_targets([1, 1, 2, 1], None)]
    assert names == ["induction", "duplicate token", "first occurrence"]
    assert [t.name for t in repeat_targets([0, 1], None)] == names
    assert (sink_target(0, 3, None).name, previous_target(3, None).name) == (
        "sink",
        "previous token",
    )
    assert local_target(3, 4).name == local_target(40, None).name == "local"


def test_the_token_that_follows_itself_is_no_induction():
    """In `a a` the key after the first `a` is the query."""
    induction, duplicate, _ = repeat_targets([7, 7], None)
    assert not induction.queries.size and duplicate.queries.tolist() == [1]


@pytest.mark.parametrize("n_pos", [1, 2])
def test_short_prompts(n_pos):
    assert len(previous_target(n_pos, None).queries) == n_pos - 1
    assert len(local_target(n_pos, None).queries) == 0
    assert len(sink_target(0, n_pos, None).queries) == n_pos - 1
    assert np.isnan(previous_target(1, None).mass(np.ones((1, 1))))


def test_users_weights_are_scaled_by_row():
    n = 6
    weights = np.tril(np.random.default_rng(0).random((n, n)))
    weights[2] = 0
    target = target_from_weights(weights, seen(n, None))
    np.testing.assert_allclose(dense(target, n), scaled(weights))
    assert target.name == "target" and 2 not in target.queries
    mask = weights > 0.4
    by_mask = target_from_mask("m", mask)
    np.testing.assert_allclose(dense(by_mask, n), scaled(mask))
    np.testing.assert_allclose(dense(target_from_weights(mask, seen(n, None)), n), scaled(mask))


def test_a_window_takes_keys_from_a_target():
    n = 12
    weights = np.tril(np.random.default_rng(1).random((n, n)))
    weights[9, 7:] = 0  # nothing of this row is left in a window of 3
    target = target_from_weights(weights, seen(n, None))
    np.testing.assert_allclose(dense(target.within(3), n), scaled(np.where(seen(n, 3), weights, 0)))
    assert 9 not in target.within(3).queries
    assert target.within(None) is target
    assert target.within(3).name == "target"
    nothing = repeat_targets([1, 2], None)[0]
    assert not nothing.within(3).queries.size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[:3], r"the target is \[3, 5\]; it must be \[q_pos, k_pos\], here \[5, 5\]"),
        (lambda w: w.ravel(), r"the target is \[25\]"),
        (lambda w: -w, "finite weights of at least 0"),
        (lambda w: w * np.nan, "finite weights of at least 0"),
        (lambda w: w * np.inf, "finite weights of at least 0"),
        (lambda w: w.T, "gives weight to key 1 for query 0, which does not see it; set it to 0"),
        (lambda w: 0 * w, "the target is 0 everywhere; give some keys weight"),
    ],
)
def test_bad_weights_are_refused(change, message):
    weights = np.tril(np.ones((5, 5)))
    with np.errstate(invalid="ignore"), pytest.raises(InputError, match=message):
        target_from_weights(change(weights), seen(5, None))


def test_weight_outside_a_window_is_refused():
    with pytest.raises(InputError, match="key 0 for query 2, which does not see it"):
        target_from_weights(np.tril(np.ones((5, 5))), seen(5, 2))


@pytest.mark.parametrize("window", [None, 1000])
def test_a_word_that_comes_back_all_the_time_costs_no_more_than_the_prompt(window):
    """Half of these tokens are the same, so that there are millions of entries."""
    tokens = np.where(np.arange(6000) % 2, 7, np.arange(6000)).tolist()
    for target in repeat_targets(tokens, window):
        arrays = (target.queries, target.keys, target.start, target.stop)
        assert max(map(len, arrays)) <= 6000 and target.weights is None
    duplicate = repeat_targets(tokens, window)[1]
    query, key = duplicate.entries(5999, 6000)
    first = 1 if window is None else 5001
    assert set(query) == {5999} and key.tolist() == list(range(first, 5999, 2))
    assert duplicate.count.sum() > (4e6 if window is None else 1e6)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 4), min_size=1, max_size=25),
    first=st.integers(0, 25), n=st.integers(0, 9),
)  # fmt: skip
def test_entries_of_some_queries(tokens, first, n):
    for target in repeat_targets(tokens, None):
        query, key = target.entries(first, first + n)
        inside = (target.query >= first) & (target.query < first + n)
        np.testing.assert_array_equal(query, target.query[inside])
        np.testing.assert_array_equal(key, target.key[inside])
