"""Advantages of pairs and pass-through add up to that of the score; loops say the same of each."""

import itertools

import numpy as np
import planted
import pytest
import torch
from test_decompose import SHAPES, looped, random_capture

from lens_rope.advantage import (
    Advantage,
    Attended,
    advantage,
    first_key_advantages,
    layer_advantages,
    merge_advantages,
    target_advantages,
)
from lens_rope.attention import read_attention
from lens_rope.errors import InputError
from lens_rope.targets import (
    previous_target,
    repeat_targets,
    sink_target,
    target_from_weights,
)


def uniform_by_hand(seen):
    return seen / seen.sum(axis=1, keepdims=True)


def user_weights(record):
    """Weights over what each query sees; some rows have none."""
    n = record.n_pos
    weights = np.random.default_rng(0).random((n, n)) * planted.seen_by_hand(record)
    weights[1::3] = 0
    return weights


def targets_by_hand(record):
    """By name, a target and the same as a dense matrix with a mask of its rows."""
    n, seen = record.n_pos, planted.seen_by_hand(record)
    window = record.rope.window
    weights = user_weights(record)
    sink = np.zeros((n, n))
    at = min(2, n - 1)
    sink[at + 1 :, at] = seen[at + 1 :, at]
    cases = {
        "sink": (sink_target(at, n, window), sink),
        "user": (target_from_weights(weights, seen), weights),
    }
    if window is None or window > 1:
        cases["previous"] = (previous_target(n, window), np.eye(n, k=-1))
    out = {}
    for name, (target, dense) in cases.items():
        rows = dense.sum(axis=1) > 0
        dense = dense / np.where(rows, dense.sum(axis=1), 1)[:, None]
        out[name] = (target, dense, rows)
    return out


def attended_advantage(record, head, pattern):
    """The advantage of what one head attends to; what is summed here is the query times the key."""
    n_pos, n_heads, d_head = record.q.shape
    lift = torch.zeros(n_heads, d_head, dtype=torch.float64)
    weights = pattern.double() / pattern.double().sum(dim=1, keepdim=True)
    keys = weights @ record.k[:, record.kv_head(head)].double()
    lift[head] = record.scale * (record.q[1:, head].double() * keys[1:]).sum(dim=0)
    kept = torch.ones(n_heads, n_pos, dtype=torch.bool)
    kept[:, 0] = False
    return target_advantages(record, (), Attended(lift, kept))[0][head]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head", [0, 3])
def test_every_pair_equals_loops(shape, head):
    record = random_capture(**SHAPES[shape]).layer(5)
    contributions, passed = looped(record, head)
    parts = np.nan_to_num([*contributions, passed])
    uniform = uniform_by_hand(planted.seen_by_hand(record))
    for target, dense, rows in targets_by_hand(record).values():
        gained = advantage(record, head, target)
        assert gained.n_queries == rows.sum() == len(target.queries)
        if not rows.any():
            assert np.isnan(gained.lift).all() and np.isnan(gained.total)
            assert gained.strongest(3) == ()
            continue
        lift = (dense * parts).sum(axis=2)[:, rows].mean(axis=1)
        push = -(uniform * parts).sum(axis=2)[:, rows].mean(axis=1)
        np.testing.assert_allclose(gained.lift, lift, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gained.push, push, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gained.pairs, (lift + push)[:-1], rtol=1e-5, atol=2e-5)
        assert gained.pass_through == pytest.approx((lift + push)[-1], abs=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sinks", [False, True])
def test_attended_equals_loops(shape, sinks):
    record = random_capture(**SHAPES[shape], sinks=sinks).layer(5)
    contributions, passed = looped(record, 1)
    parts = np.nan_to_num([*contributions, passed])
    pattern = record.pattern(1)
    gained = attended_advantage(record, 1, pattern)
    assert gained.n_queries == record.n_pos - 1
    if record.n_pos == 1:
        assert np.isnan(gained.pairs).all()
        return
    weights = pattern.double().numpy()
    weights = weights / weights.sum(axis=1, keepdims=True)
    uniform = uniform_by_hand(planted.seen_by_hand(record))
    lift = (weights * parts).sum(axis=2)[:, 1:].mean(axis=1)
    push = -(uniform * parts).sum(axis=2)[:, 1:].mean(axis=1)
    np.testing.assert_allclose(gained.lift, lift, rtol=1e-5, atol=3e-5)
    np.testing.assert_allclose(gained.push, push, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", planted.MODELS)
def test_sum_over_pairs_is_the_advantage_of_the_score(name):
    for record in planted.captured(name).records[0]:
        uniform = uniform_by_hand(planted.seen_by_hand(record))
        targets = targets_by_hand(record).values()
        for head in (0, record.n_heads - 1):
            scores = np.nan_to_num(planted.scores_by_hand(record, head))
            size = 1e-5 * np.abs(scores).max()
            for target, dense, rows in targets:
                gained = advantage(record, head, target)
                expected = ((dense - uniform) * scores).sum(axis=1)[rows].mean()
                assert gained.total == pytest.approx(expected, abs=size)
                assert gained.pairs.sum() + gained.pass_through == pytest.approx(gained.total)
            pattern = record.pattern(head)
            own = pattern.double().numpy()
            own = own / own.sum(axis=1, keepdims=True)
            attended = attended_advantage(record, head, pattern)
            expected = ((own - uniform) * scores).sum(axis=1)[1:].mean()
            assert attended.total == pytest.approx(expected, abs=size)
            if record.softcap is None:
                # No pattern but uniform can have a mean score below the plain mean.
                assert attended.total >= -size


@pytest.mark.parametrize("window", [None, 1, 8, 30, 31])
@pytest.mark.parametrize("sinks", [None, [0.5, -1.0, 0.0, 2.0]])
def test_the_first_key_from_what_is_attended(window, sinks):
    """Where every query but its own sees it, it has the queries of what is attended."""
    record = planted.random_record(
        30, n_heads=4, n_kv=2, window=window, sinks=sinks, scale=0.4, n_rest=5
    )
    found = first_key_advantages(record, read_attention(record).attended)
    assert (found is None) == (window is not None and window < 30)
    if found is not None:
        expected = layer_advantages(record, sink_target(0, 30, window))
        for mine, other in zip(found, expected, strict=True):
            assert mine.n_queries == other.n_queries == 29
            np.testing.assert_allclose(mine.lift, other.lift, rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(mine.push, other.push, rtol=1e-12, atol=1e-14)


def test_the_first_key_where_a_learned_sink_takes_all_of_a_query():
    record = planted.random_record(9, sinks=[500.0, 0.0])
    assert first_key_advantages(record, read_attention(record).attended) is None
    one = planted.random_record(1)
    assert first_key_advantages(one, read_attention(one).attended) is None


def test_strongest_pairs_in_order():
    gained = Advantage(1, np.array([1.0, 5.0, np.nan, 5.0, 0.0, 99.0]), np.zeros(6))
    assert gained.strongest(2) == (1, 3)
    assert gained.strongest(9) == (1, 3, 0, 4)
    assert gained.strongest(0) == ()


def test_merge_is_the_mean_over_all_queries_in_any_order():
    records = [planted.random_record(n, seed=n) for n in (1, 2, 9, 30)]
    targets = [previous_target(record.n_pos, None) for record in records]
    parts = [advantage(r, 1, t) for r, t in zip(records, targets, strict=True)]
    merged = merge_advantages(parts)
    assert merged.n_queries == 1 + 8 + 29
    expected = (parts[1].lift + 8 * parts[2].lift + 29 * parts[3].lift) / 38
    np.testing.assert_allclose(merged.lift, expected)
    expected = (parts[1].push + 8 * parts[2].push + 29 * parts[3].push) / 38
    np.testing.assert_allclose(merged.push, expected)
    for order in itertools.permutations(parts):
        again = merge_advantages(order)
        np.testing.assert_array_equal(again.lift, merged.lift)
        np.testing.assert_array_equal(again.push, merged.push)
    alone = merge_advantages(parts[:1])
    assert alone.n_queries == 0 and np.isnan(alone.pairs).all()


def test_merge_refuses_what_does_not_belong_together():
    record = planted.random_record(5)
    part = advantage(record, 0, previous_target(5, None))
    other = Advantage(1, np.zeros(3), np.zeros(3))
    for entries in ([], [part, other]):
        with pytest.raises(InputError, match="only advantages over the same pairs can be merged"):
            merge_advantages(entries)


def test_arithmetic_is_that_of_float64():
    """Large constant keys do not drown the small differences that decide."""
    record = planted.random_record(60)
    k = record.k.clone()
    k[:, :, 0] += 3000.0
    shifted = type(record)(record.rope, record.q, k, 1.0, None, None, record.check)
    contributions = torch.einsum("mc,nc->mn", record.q[:, 0].double(), k[:, 0].double()).numpy()
    uniform = uniform_by_hand(planted.seen_by_hand(record))
    weights = np.eye(60, k=-1)
    expected = ((weights - uniform) * contributions).sum(axis=1)[1:].mean()
    gained = advantage(shifted, 0, previous_target(60, None))
    assert gained.total == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("chunk", [1, 10**9])
@pytest.mark.parametrize("slots", [1, 7, 10**9])
@pytest.mark.parametrize("products", [1, 1500, 10**9])
def test_all_heads_at_once_are_the_same_as_each(monkeypatch, chunk, slots, products):
    """Whatever is taken together: key heads, entries of a user's weights, targets, queries."""
    record = planted.random_record(30, n_heads=6, n_kv=3)
    targets = [target for target, _, _ in targets_by_hand(record).values()]
    targets += [*repeat_targets([0, 1, 1, 2, 0] * 6, None), previous_target(1, None)]
    each = [[advantage(record, head, target) for head in range(6)] for target in targets]
    monkeypatch.setattr("lens_rope.advantage._CHUNK", chunk)
    monkeypatch.setattr("lens_rope.advantage._SLOTS", slots)
    monkeypatch.setattr("lens_rope.advantage._PRODUCTS", products)
    together = target_advantages(record, targets)
    for target, heads, expected in zip(targets, together, each, strict=True):
        for mine, other in zip(heads, expected, strict=True):
            assert mine.n_queries == other.n_queries == len(target.queries)
            np.testing.assert_allclose(mine.lift, other.lift, rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(mine.push, other.push, rtol=1e-10, atol=1e-12)
        alone = layer_advantages(record, target)
        np.testing.assert_array_equal(alone[5].lift, heads[5].lift)


@pytest.mark.parametrize("window", [None, 6])
def test_advantages_of_targets_by_token_equal_loops(window):
    record = planted.random_record(30, window=window)
    tokens = [0, 1, 1, 2, 0] * 6
    uniform = uniform_by_hand(planted.seen_by_hand(record))
    q, k = record.q[:, 1].double().numpy(), record.k[:, 1].double().numpy()
    for target in repeat_targets(tokens, window):
        dense = np.zeros((30, 30))
        for query, key, weight in zip(target.query, target.key, target.weight, strict=True):
            dense[query, key] += weight
        rows = dense.any(axis=1)
        expected = ((dense - uniform) * (q @ k.T)).sum(axis=1)[rows].mean()
        assert advantage(record, 1, target).total == pytest.approx(expected, abs=1e-9)
