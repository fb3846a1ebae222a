"""What a layer attends to, against loops over queries and keys and scipy's entropy."""

import dataclasses

import numpy as np
import planted
import pytest
from scipy.stats import entropy

from lens_rope.attention import read_attention
from lens_rope.sinks import head_shares, sink_positions
from lens_rope.targets import previous_target, repeat_targets, sink_target, target_from_mask

SHAPES = {
    "plain": {},
    "window": {"window": 7},
    "window wider than the prompt": {"window": 90},
    "learned sinks": {"sinks": [0.5, -1.0]},
    "soft-cap": {"softcap": 1.5},
    "grouped": {"n_heads": 4, "n_kv": 2},
}


def check(record):
    """Every number of a layer against its definition."""
    n = record.n_pos
    seen = planted.seen_by_hand(record)
    weights = np.tril(np.random.default_rng(0).random((n, n)) > 0.7) & seen
    targets = [
        t
        for t in (previous_target(n, record.rope.window), target_from_mask("some", weights))
        if len(t.query)
    ]
    attention = read_attention(record, targets)
    assert attention.layer == record.rope.layer and attention.n_pos == n
    assert attention.received.shape == (record.n_heads, n)
    by_key = [int(seen[:, key].sum()) for key in range(n)]
    assert attention.counts.tolist() == [count >= max(by_key) / 2 for count in by_key]
    for head in range(record.n_heads):
        pattern = planted.pattern_by_hand(record, head, planted.scores_by_hand(record, head))
        received = [pattern[seen[:, key], key].mean() for key in range(n)]
        np.testing.assert_allclose(attention.received[head], received, atol=3e-6)
        sums = pattern.sum(axis=1)
        assert attention.learned[head] == pytest.approx((1 - sums).mean(), abs=1e-6)
        if record.sinks is None:
            assert attention.learned[head] == 0
        if n > 1:
            previous = np.mean([pattern[m, m - 1] for m in range(1, n)])
            assert attention.previous[head] == pytest.approx(previous, abs=1e-6)
            normal = entropy(pattern[1:], axis=1) / np.log(seen[1:].sum(axis=1))
            assert attention.entropy[head] == pytest.approx(np.mean(normal), abs=1e-5)
        for target in targets:
            allowed = weights if target.name == "some" else np.eye(n, k=-1, dtype=bool)
            rows = allowed.any(axis=1)
            mass = (pattern * allowed)[rows].sum(axis=1).mean()
            assert attention.mass[target.name][head] == pytest.approx(mass, abs=1e-6)
    uniform = np.mean([1 / seen[m].sum() for m in range(n) if seen[m, 0]])
    assert attention.uniform == pytest.approx(uniform)
    return attention


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n_pos", [2, 33])
def test_equals_loops(shape, n_pos):
    check(planted.random_record(n_pos, **SHAPES[shape]))


@pytest.mark.parametrize("name", planted.MODELS)
def test_equals_loops_on_every_architecture(name):
    for record in planted.captured(name).records[0]:
        check(record)


def test_one_token():
    attention = check(planted.random_record(1))
    assert np.isnan(attention.previous).all() and np.isnan(attention.entropy).all()
    assert attention.received.tolist() == [[1], [1]]
    assert attention.uniform == 1
    assert all(np.isnan(gain.total) and gain.n_queries == 0 for gain in attention.attended)
    assert sink_positions(attention) == (0,)


def test_entropy_of_a_uniform_and_of_a_certain_head():
    plants = [planted.Plant(70), planted.sink_by_lift(70, 0, size=60.0)]
    attention = read_attention(planted.planted_record(plants))
    assert attention.entropy[0] == pytest.approx(1)
    assert attention.entropy[1] == pytest.approx(0, abs=1e-6)


def test_mass_of_a_sink_is_its_share_without_its_own_query():
    record = planted.random_record(40)
    attention = read_attention(record, [sink_target(3, 40, None)])
    pattern = record.pattern(0).numpy()
    assert attention.mass["sink"][0] == pytest.approx(pattern[4:, 3].mean(), abs=1e-6)
    own = (pattern[3, 3] + 36 * attention.mass["sink"][0]) / 37
    assert attention.received[0, 3] == pytest.approx(own, abs=1e-6)


def test_sinks_that_statistics_leave_out():
    """The first position, and any key that some head uses as a sink; none in a short prompt."""
    plants = [planted.sink_by_push(80, 0), planted.sink_by_lift(80, 9), planted.Plant(80)]
    attention = read_attention(planted.planted_record(plants))
    assert sink_positions(attention) == (0, 9)
    assert sink_positions(read_attention(planted.planted_record(plants[2:]))) == (0,)
    short = [planted.sink_by_lift(63, 9)]
    assert sink_positions(read_attention(planted.planted_record(short))) == (0,)
    late = [planted.sink_by_lift(80, 60)]  # seen by fewer than half of the queries
    attention = read_attention(planted.planted_record(late))
    assert attention.received[0, 60] > 0.9
    assert attention.candidates[0, 60] == -np.inf
    assert sink_positions(attention) == (0,)


def test_shares_are_those_of_the_attention():
    record = planted.planted_record([planted.sink_by_push(80, 5), planted.Plant(80)])
    attention = read_attention(record)
    shares = head_shares(record, attention)
    again = head_shares(record)
    for name in ("sink_share", "sink_position", "previous_share", "same_position"):
        np.testing.assert_array_equal(getattr(shares, name), getattr(again, name))
    assert shares.sink_position[0] == 5 and shares.n_tokens == 80
    assert shares.sink_share[0] == attention.received[0, 5] > 0.9


def test_rows_that_a_learned_sink_takes_whole_are_left_out():
    record = planted.random_record(12, sinks=(1e4, 0.0))
    attention = read_attention(record)
    assert attention.learned[0] == 1.0
    assert np.isnan(attention.entropy[0]) and attention.attended[0].n_queries == 0
    assert np.isfinite(attention.entropy[1]) and attention.attended[1].n_queries == 11


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 5, 16, 50])
@pytest.mark.parametrize("entries", [1, 150, 2**20])
def test_the_size_of_blocks_makes_no_difference(monkeypatch, shape, size, entries):
    record = planted.random_record(53, size=2.0, **SHAPES[shape])
    window = record.rope.window
    tokens = ([0, 1, 2] * 18)[:53]
    targets = [
        previous_target(53, window),
        sink_target(3, 53, window),
        *repeat_targets(tokens, window),
    ]
    whole = read_attention(record, targets, block=53)
    monkeypatch.setattr("lens_rope.attention._ENTRIES", entries)
    parts = read_attention(record, targets, block=size)
    for name in ("received", "previous", "learned", "entropy"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), atol=1e-6)
    assert len(whole.mass) == len(targets)
    for name, mass in whole.mass.items():
        np.testing.assert_allclose(parts.mass[name], mass, atol=1e-6)
    for mine, other in zip(parts.attended, whole.attended, strict=True):
        np.testing.assert_allclose(mine.pairs, other.pairs, atol=1e-5)
        assert mine.n_queries == other.n_queries


def test_scores_far_below_the_largest_take_no_attention():
    """Powers that underflow are 0, next to soft ones in the same row."""
    record = planted.random_record(40, size=9.0)
    attention = check(record)
    assert np.isfinite(attention.entropy).all()


@pytest.mark.parametrize("block", [1, 4, 30])
def test_a_window_of_one_token_hides_the_token_before(block):
    targets = [previous_target(30, None), previous_target(30, 1)]
    targets[0] = dataclasses.replace(targets[0], name="hidden")
    attention = read_attention(planted.random_record(30, window=1), targets, block=block)
    assert not attention.mass["hidden"].any() and not attention.previous.any()
    # No query sees it, so there is nothing to take a mean of.
    assert np.isnan(attention.mass["previous token"]).all()
    assert np.isnan(attention.entropy).all()
    np.testing.assert_allclose(attention.received, 1, rtol=1e-6)
