"""Usage is a mean of pair lengths; sink share is a mean of attention; merges forget the order."""

import itertools

import numpy as np
import pytest
import torch
from test_decompose import looped, random_capture

from lens_rope.errors import InputError
from lens_rope.sinks import SINK_THRESHOLD, head_shares, merge_shares, sink_shares
from lens_rope.usage import merge_usage, pair_usage


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_usage_equals_loops(pairing):
    record = random_capture(pairing=pairing).layer(5)
    usage = pair_usage(record)
    for got, x in ((usage.query, record.q), (usage.key, record.k)):
        expected = np.zeros(4)
        for i in range(4):
            a, b = (i, i + 4) if pairing == "half" else (2 * i, 2 * i + 1)
            lengths = [abs(complex(float(v[a]), float(v[b]))) for row in x for v in row]
            expected[i] = np.mean(lengths)
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert (usage.layer, usage.n_tokens) == (5, 23)


def pattern_of_loops(record, head):
    contributions, passed = looped(record, head)
    weights = np.exp(contributions.sum(0) + passed)
    return np.nan_to_num(weights / np.nansum(weights, axis=1, keepdims=True))


@pytest.mark.parametrize("window", [None, 7], ids=["causal", "window"])
def test_sink_shares_equal_loops(window):
    record = random_capture(window=window).layer(5)
    for head in range(4):
        pattern = pattern_of_loops(record, head)
        expected = []
        for key in range(23):
            last = 23 if window is None else min(23, key + window)
            expected.append(np.mean([pattern[query, key] for query in range(key, last)]))
        np.testing.assert_allclose(sink_shares(record, head), expected, atol=1e-6)


def test_head_shares_equal_loops():
    record = random_capture().layer(5)
    shares = head_shares(record)
    for head in range(4):
        pattern = pattern_of_loops(record, head)
        # 23 queries see key 0; keys 0 to 11 are seen by 12 or more of them.
        by_key = [pattern[key:, key].mean() for key in range(12)]
        assert shares.sink_position[head] == int(np.argmax(by_key))
        assert shares.sink_share[head] == pytest.approx(max(by_key), abs=1e-6)
        previous = np.mean([pattern[m, m - 1] for m in range(1, 23)])
        assert shares.previous_share[head] == pytest.approx(previous, abs=1e-6)


def planted(position, n_pos=40):
    """A head whose every query points at the key of one position, wherever that is."""
    captured = random_capture(n_pos=n_pos, rotary_dim=4, d_head=8, n_heads=1, n_kv=1)
    record = captured.layer(5)
    record.q.zero_(), record.k.zero_()
    record.q[:, 0, 6] = 10.0
    record.k[position, 0, 6] = 10.0
    return record


@pytest.mark.parametrize("position", [0, 3, 10])
def test_sink_is_found_where_it_is(position):
    shares = head_shares(planted(position))
    assert shares.sink_position[0] == position
    assert shares.sink_share[0] > 0.99 > SINK_THRESHOLD


def test_last_key_is_no_sink():
    """Only its own query sees it, and that one attends to it fully."""
    shares = head_shares(planted(39))
    assert shares.sink_share[0] < SINK_THRESHOLD
    assert sink_shares(planted(39), 0)[39] > 0.99


def test_one_token_attends_to_itself():
    shares = head_shares(random_capture(n_pos=1).layer(5))
    assert shares.sink_share.tolist() == [1, 1, 1, 1]
    assert np.isnan(shares.previous_share).all()


def test_merge_weights_by_tokens():
    records = [random_capture(n_pos=n, seed=n).layer(5) for n in (5, 11, 30)]
    usages = [pair_usage(record) for record in records]
    merged = merge_usage(usages)
    together = torch.cat([record.q for record in records])
    lengths = torch.complex(together[..., :4], together[..., 4:8]).abs().mean(dim=(0, 1))
    np.testing.assert_allclose(merged.query, lengths.numpy(), rtol=1e-6)
    assert merged.n_tokens == 46


def test_merge_does_not_depend_on_order():
    records = [random_capture(n_pos=n, seed=n).layer(5) for n in (1, 7, 19, 30)]
    usages, shares = [pair_usage(r) for r in records], [head_shares(r) for r in records]
    first_usage, first_shares = merge_usage(usages), merge_shares(shares)
    for order in itertools.permutations(range(4)):
        usage, share = (
            merge_usage([usages[i] for i in order]),
            merge_shares([shares[i] for i in order]),
        )
        for name in ("query", "key"):
            np.testing.assert_array_equal(getattr(usage, name), getattr(first_usage, name))
        for name in ("sink_share", "sink_position", "previous_share"):
            np.testing.assert_array_equal(getattr(share, name), getattr(first_shares, name))


def test_merge_of_previous_shares_counts_queries_that_have_one():
    records = [random_capture(n_pos=n, seed=n).layer(5) for n in (1, 3, 9)]
    shares = [head_shares(record) for record in records]
    merged = merge_shares(shares)
    expected = (2 * shares[1].previous_share + 8 * shares[2].previous_share) / 10
    np.testing.assert_allclose(merged.previous_share, expected)
    assert np.isnan(merge_shares(shares[:1]).previous_share).all()


def test_merge_refuses_what_does_not_belong_together():
    usage = pair_usage(random_capture().layer(5))
    other = pair_usage(random_capture(rotary_dim=12).layer(5))
    with pytest.raises(InputError, match="only usages of one layer"):
        merge_usage([usage, other])
    with pytest.raises(InputError, match="only usages of one layer"):
        merge_usage([])
    shares = head_shares(random_capture().layer(5))
    with pytest.raises(InputError, match="only shares of one layer"):
        merge_shares([shares, head_shares(random_capture(n_heads=2).layer(5))])
    with pytest.raises(InputError, match="only shares of one layer"):
        merge_shares([])


@pytest.mark.parametrize(("n_pos", "expected"), [(1, 1), (2, 0.75), (8, 0.3397), (64, 0.0741)])
def test_uniform_share_is_the_base_rate(n_pos, expected):
    """The harmonic number over n: query m gives each of its m + 1 keys an equal weight."""
    record = random_capture(n_pos=n_pos).layer(5)
    assert head_shares(record).uniform_share == pytest.approx(expected, abs=1e-4)
    record.q.zero_()
    assert sink_shares(record, 0)[0] == pytest.approx(expected, abs=1e-4)


def test_uniform_share_knows_the_window():
    assert head_shares(random_capture(n_pos=40, window=4).layer(5)).uniform_share == pytest.approx(
        np.mean([1, 1 / 2, 1 / 3, 1 / 4])
    )


def test_merge_says_whether_prompts_agree_on_the_sink():
    def shares(position, n_pos):
        return head_shares(planted(position, n_pos))

    agreed = merge_shares([shares(3, 40), shares(3, 50)])
    assert agreed.sink_position[0] == 3 and agreed.same_position[0]
    apart = merge_shares([shares(0, 40), shares(5, 50)])
    assert apart.sink_position[0] == 5 and not apart.same_position[0]
    assert not merge_shares([apart, shares(5, 40)]).same_position[0]
    uniform = [shares(0, n).uniform_share for n in (40, 50)]
    assert apart.uniform_share == pytest.approx((40 * uniform[0] + 50 * uniform[1]) / 90)
