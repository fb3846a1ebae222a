"""Sinks whose cause is known are explained by it: position, pair, lift or push, removal, words."""

import dataclasses
import itertools
import re

import numpy as np
import planted
import pytest
from test_decompose import random_capture
from test_removal import share_by_hand

from lens_rope.attention import read_attention
from lens_rope.errors import InputError
from lens_rope.removal import head_shares_without, shares_without
from lens_rope.sink_heads import (
    CONTROL_QUERIES,
    EXACT_PAIRS,
    explain_sinks,
    merge_sink_heads,
    sentence,
)
from lens_rope.sinks import SINK_THRESHOLD

N = 80


def explained(*prompts, **settings):
    return explain_sinks(planted.planted_capture(*prompts, **settings))


@pytest.mark.parametrize("position", [0, 6, 20])
@pytest.mark.parametrize("pair", [7, 8])
def test_a_sink_that_pushes_the_others_down(position, pair):
    found = explained([planted.Plant(N), planted.sink_by_push(N, position, pair)])
    assert [(e.layer, e.head) for e in found.heads] == [(0, 1)]
    sink = found.head(0, 1)
    assert sink.position == position and sink.same_position and sink.best_pair == pair
    assert sink.n_queries == N - position and sink.n_prompts == 1
    gain = sink.advantage
    assert gain.lift[pair] == 0 and gain.push[pair] == gain.total > 3
    assert np.delete(gain.pairs, pair) == pytest.approx(0) and gain.pass_through == 0
    # Without the pair every score is 0 and attention uniform.
    uniform = np.mean([1 / (m + 1) for m in range(position, N)])
    assert sink.share_without_best == pytest.approx(uniform, abs=1e-5)
    assert sink.share_without_two == pytest.approx(uniform, abs=1e-5)
    assert sink.is_collapsed and sink.is_control_standing
    assert sink.control_share == pytest.approx(sink.share, abs=1e-5)
    assert "by pushing the other keys down; without it the share falls to" in sentence(sink)
    assert found.best_pairs() == {(0, 1): [pair]}


@pytest.mark.parametrize("position", [0, 6])
def test_a_sink_that_is_lifted(position):
    found = explained([planted.sink_by_lift(N, position)])
    sink = found.head(0, 0)
    seen = np.arange(position + 1, N)
    height = 8 * np.cos(0.015 * (seen - position))
    assert (sink.position, sink.best_pair) == (position, 7)
    assert sink.advantage.lift[7] == pytest.approx(height.mean(), rel=1e-5)
    assert sink.advantage.push[7] == pytest.approx(-(height / (seen + 1)).mean(), rel=1e-5)
    assert sink.is_collapsed and sink.is_control_standing
    assert "by lifting the sink; without it" in sentence(sink)


def test_a_sink_that_two_pairs_make():
    """One alone is enough for it, so only the removal of both brings it down."""
    plant = planted.sink_by_push(N, 0, size=9.0)
    plant.z_q[:, 8] = -9.0
    plant.z_k[:, 8] = 1.0
    plant.z_k[0, 8] = 0.0
    plant.z_q[:, 7] *= 1.3
    sink = explained([plant]).head(0, 0)
    assert sink.advantage.strongest(2) == (7, 8)
    assert sink.share_without_best > 0.6 and not sink.is_collapsed
    assert sink.share_without_two < 0.1
    words = sentence(sink)
    assert "without it the share stays at" in words or "without it the share goes to" in words


def test_a_sink_that_is_lifted_and_pushes():
    plant = planted.sink_by_push(N, 0)
    plant.z_k[0, 7] = -0.9
    words = sentence(explained([plant]).head(0, 0))
    assert "by lifting the sink and pushing the other keys down;" in words


def test_a_sink_of_the_pass_through():
    plant = planted.Plant(N)
    plant.rest_q[:, 0] = 9.0
    plant.rest_k[4, 0] = 1.0
    sink = explained([plant]).head(0, 0)
    assert sink.advantage.pass_through > 8
    assert sink.share_without_best == pytest.approx(sink.share) and not sink.is_collapsed
    assert (
        "by neither lifting the sink nor pushing the other keys down; without it the share stays at"
        in sentence(sink)
    )


def test_a_layer_without_rope():
    record = planted.random_record(N, frequencies=(), n_rest=4, n_heads=1, n_kv=1, size=0.1)
    record.q[:, 0, 0] = 9.0
    record.k[0, 0, 0] = 2.0
    found = explain_sinks(planted.make_capture(record))
    sink = found.head(0, 0)
    assert sink.best_pair == -1
    assert np.isnan([sink.share_without_best, sink.control_share, sink.share_without_two]).all()
    assert not sink.is_collapsed and not sink.is_control_standing
    assert "has no rotary pairs, so the pass-through makes the sink." in found.sentences()[0]
    assert found.to_dataframe()["best_pair"].tolist() == [-1]
    assert found.best_pairs() == {} and "1 of 1 heads" in repr(found)


def test_one_pair_has_no_control():
    record = planted.random_record(N, frequencies=(0.01,), n_heads=1, n_kv=1, size=0.1)
    record.q[:, 0, 3] = 9.0
    record.k[0, 0, 3] = 2.0
    sink = explain_sinks(planted.make_capture(record)).head(0, 0)
    assert sink.best_pair == 0 and np.isfinite(sink.share_without_best)
    assert np.isnan([sink.control_share, sink.share_without_two]).all()
    assert not sink.is_control_standing
    assert "without another pair (median) it is nan" not in sentence(sink)


def noisy_sink(n_pos, seed, **changes):
    """A random layer in which head 1 has a sink that several pairs make."""
    record = planted.random_record(
        n_pos, seed=seed, size=0.4, frequencies=planted.FREQUENCIES, **changes
    )
    towards = record.k[0, 0] / record.k[0, 0].norm()
    record.q[:, 1] += 3 * towards
    record.k[2, 1] = 2.5 * towards
    return record


def test_every_pair_is_removed_as_it_should_be():
    """Exactly for the strongest, for some queries for the others; the same in prompts so short."""
    record = noisy_sink(70, 0)
    sink = explain_sinks(planted.make_capture(record)).head(0, 1)
    expected = [share_by_hand(record, 1, sink.position, [pair]) for pair in range(9)]
    np.testing.assert_allclose(sink.share_without, expected, atol=1e-5)
    two = list(np.argsort(-sink.advantage.pairs)[:2])
    both = share_by_hand(record, 1, sink.position, two)
    assert sink.share_without_two == pytest.approx(both, abs=1e-5)
    others = np.delete(expected, sink.best_pair)
    assert sink.control_share == pytest.approx(np.median(others), abs=1e-5)
    assert sink.best_pair == two[0]


def test_the_strongest_pairs_are_removed_for_all_queries():
    record = noisy_sink(200, 1)
    sink = explain_sinks(planted.make_capture(record)).head(0, 1)
    for pair in np.argsort(-sink.advantage.pairs)[:5]:
        expected = share_by_hand(record, 1, sink.position, [pair])
        assert sink.share_without[pair] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", planted.MODELS)
def test_models(name):
    """Advantages sum to that of the score; learned shares are what rows lack of 1."""
    capture = planted.captured(name)
    found = explain_sinks(capture)
    shares = {}
    for record in capture.records[0]:
        layer, seen = record.rope.layer, planted.seen_by_hand(record)
        for head in range(record.n_heads):
            pattern = record.pattern(head).double().numpy()
            lacking = (1 - pattern.sum(axis=1)).mean()
            assert found.learned[layer][head] == pytest.approx(lacking, abs=1e-6)
            assert (found.learned[layer][head] > 1e-4) == (record.sinks is not None)
            received = pattern.sum(axis=0) / seen.sum(axis=0)
            np.testing.assert_allclose(found.received[0][layer][head], received, atol=1e-6)
            counts = seen.sum(axis=0) >= seen.sum(axis=0).max() / 2
            shares[layer, head] = received[counts].max(), int(np.argmax(received * counts))
    big = {at for at, (share, _) in shares.items() if share > SINK_THRESHOLD}
    assert {(e.layer, e.head) for e in found.heads} == big
    for sink in found.heads:
        record = capture.layer(sink.layer)
        share, position = shares[sink.layer, sink.head]
        assert (sink.position, sink.share) == (position, pytest.approx(share, abs=1e-6))
        scores = np.nan_to_num(planted.scores_by_hand(record, sink.head))
        seen = planted.seen_by_hand(record)
        uniform = (seen / seen.sum(axis=1, keepdims=True) * scores).sum(axis=1)
        rows = seen[:, position] & (np.arange(record.n_pos) > position)
        total = (scores[rows, position] - uniform[rows]).mean()
        assert sink.advantage.total == pytest.approx(total, abs=1e-5 * np.abs(scores).max())
    assert len(found.sentences()) == len(found.to_dataframe()) == len(found.heads)
    assert repr(found).startswith(f"{len(found.heads)} of ")


def test_learned_sinks_are_apart():
    """They are no keys: their share counts for no position."""
    record = planted.random_record(N, size=0.1, sinks=[6.0, -9.0])
    found = explain_sinks(planted.make_capture(record))
    assert found.learned[0][0] > 0.8 and found.learned[0][1] < 1e-3
    assert found.heads == ()


def test_the_sentence_keeps_a_pair_apart_from_the_whole():
    sink = explain_sinks(planted.make_capture(noisy_sink(70, 0))).head(0, 1)
    says, gain = parsed(sentence(sink)), sink.advantage
    assert float(says["gain"]) == pytest.approx(gain.pairs[sink.best_pair], abs=0.06)
    assert float(says["total"]) == pytest.approx(gain.total, abs=0.06)
    assert float(says["rest"]) == pytest.approx(gain.pass_through, abs=0.06)
    assert gain.total - gain.pass_through - gain.pairs[sink.best_pair] > 1


def parsed(words):
    """The numbers of a sentence, by name."""
    pattern = (
        r"Layer (?P<layer>\d+) head (?P<head>\d+) gives (?P<share>\d+)% of its attention to "
        r"(?P<where>.+?): pair (?P<pair>\d+) \((?P<band>[a-z ]+), wavelength (?P<wave>[\d.,]+) "
        r"tokens\) adds (?P<gain>[-\d.]+) to the sink's advantage of (?P<total>[-\d.]+), the "
        r"pass-through (?P<rest>[-\d.]+), by (?P<how>[a-z ]+); without it the share "
        r"(?P<effect>[a-z]+ [a-z]+) (?P<without>\d+)%, without another pair \(median\) it is "
        r"(?P<control>\d+)%\."
    )
    match = re.fullmatch(pattern, words)
    assert match, words
    return match.groupdict()


def test_the_sentence_says_the_numbers():
    plants = [planted.sink_by_push(N, 0), planted.sink_by_lift(N, 9, size=6.0)]
    plants.append(planted.sink_by_push(N, 3, pair=8, size=7.0))
    found = explained(plants)
    shares = []
    for words in found.sentences():
        says = parsed(words)
        sink = found.head(int(says["layer"]), int(says["head"]))
        shares.append(sink.share)
        assert says["share"] == f"{100 * sink.share:.0f}"
        assert int(says["pair"]) == sink.best_pair
        wavelength = float(sink.rope.wavelength[sink.best_pair])
        assert float(says["wave"].replace(",", "")) == pytest.approx(wavelength, rel=5e-3)
        cycles = sink.rope.cycles[sink.best_pair]
        assert says["band"] == ("partial cycle" if 0.5 < cycles < 1 else
                                "full cycles" if cycles >= 1 else "below half a cycle")  # fmt: skip
        assert float(says["gain"]) == pytest.approx(sink.advantage.pairs[sink.best_pair], abs=0.06)
        assert float(says["total"]) == pytest.approx(sink.advantage.total, abs=0.06)
        assert float(says["rest"]) == pytest.approx(sink.advantage.pass_through, abs=0.06)
        assert int(says["without"]) == pytest.approx(100 * sink.share_without_best, abs=0.51)
        assert int(says["control"]) == pytest.approx(100 * sink.control_share, abs=0.51)
    assert len(shares) == 3 and shares == sorted(shares, reverse=True)
    assert "of 3 heads" in repr(found) and found.sentences()[0] in repr(found)


@pytest.mark.parametrize(
    ("bos", "position", "name"),
    [
        (True, 0, "position 0 (BOS)"),
        (False, 0, "position 0 (not BOS)"),
        (None, 0, "position 0 (“t0”)"),
        (True, 5, "position 5 (“t5”)"),
    ],
)
def test_what_the_key_is_called(bos, position, name):
    found = explained([planted.sink_by_push(N, position)], bos=bos)
    assert found.where(found.heads[0]) == name
    assert f"of its attention to {name}: pair 7" in found.sentences()[0]


def test_what_the_key_is_called_in_several_prompts():
    def naming(position, *changes):
        plants = [[planted.sink_by_push(N, position)] for _ in changes]
        capture = planted.planted_capture(*plants)
        named = tuple(
            dataclasses.replace(prompt, **change)
            for prompt, change in zip(capture.prompts, changes, strict=True)
        )
        found = explain_sinks(dataclasses.replace(capture, prompts=named))
        return found.where(found.heads[0])

    other = {"tokens": ("x",) * N}
    assert naming(0, {}, {"starts_with_bos": False}) == "position 0 (BOS in some prompts)"
    assert naming(0, {}, {"starts_with_bos": None}) == "position 0 (“t0”)"
    assert naming(4, {}, {}) == "position 4 (“t4”)"
    assert naming(4, {}, other) == "position 4"


def test_prompts_with_sinks_at_different_keys():
    lengths = {0: 100, 7: 80, 5: 70}
    prompts = [[planted.sink_by_push(n, p), planted.Plant(n)] for p, n in lengths.items()]
    found = explained(*prompts)
    sink = found.head(0, 0)
    assert (sink.position, sink.same_position, sink.n_prompts) == (0, False, 3)
    assert sink.n_queries == 100 + 73 + 65 and sink.best_pair == 7
    assert found.where(sink) == "one key (most often position 0)"
    each = [explained(prompt).head(0, 0) for prompt in prompts]
    weights = [100, 73, 65]
    for name in ("share", "share_without_two", "share_without_best", "control_share"):
        mean = np.average([getattr(e, name) for e in each], weights=weights)
        assert getattr(sink, name) == pytest.approx(mean)
    for order in itertools.permutations(each):
        merged = merge_sink_heads(order)
        assert repr((merged.position, merged.share)) == repr((sink.position, sink.share))
        np.testing.assert_array_equal(merged.share_without, sink.share_without)
        np.testing.assert_array_equal(merged.advantage.lift, sink.advantage.lift)
    assert [set(layers) for layers in found.received] == [{0}] * 3
    assert found.received[1][0].shape == (2, 80)


def test_a_sink_in_one_prompt_of_several():
    """The mean over prompts decides, and what is said is of the prompts that have one."""
    with_sink, without = [planted.sink_by_push(90, 2)], [planted.Plant(90)]
    assert explained(with_sink, without, without, without).heads == ()
    sink = explained(with_sink, without).head(0, 0)
    assert (sink.n_prompts, sink.n_queries, sink.position) == (1, 88, 2)
    assert sink.share == explained(with_sink).head(0, 0).share


def test_merge_refuses_what_does_not_belong_together():
    first, second = explained([planted.sink_by_push(N, 0)] * 2).heads
    for heads in ([], [first, second], [first, dataclasses.replace(first, layer=3)]):
        with pytest.raises(InputError, match="only sinks of one head can be merged"):
            merge_sink_heads(heads)


def test_short_prompts_say_so():
    short, long = [planted.sink_by_push(63, 0)], [planted.sink_by_push(64, 0)]
    found = explained(short)
    assert found.heads == () and found.sentences() == ()
    assert found.notes[0].startswith("The prompt is too short to tell sinks (63 tokens, uniform")
    assert "0 of 1 heads of planted are sink heads" in repr(found)
    assert found.notes[0] in repr(found) and len(found.to_dataframe()) == 0
    assert "sink_share" in found.to_dataframe().columns
    assert explained(long).notes == () and len(explained(long).heads) == 1
    both = explained(short, long)
    assert both.notes[0].startswith("1 of 2 prompts are too short to tell sinks (63 tokens")
    assert both.heads[0].n_prompts == 1
    tiny = explain_sinks(planted.make_capture(planted.random_record(1)))
    assert tiny.heads == () and "(1 tokens" in tiny.notes[0]


def test_the_table():
    found = explained([planted.Plant(N), planted.sink_by_push(N, 3)])
    row = found.to_dataframe().iloc[0]
    sink = found.head(0, 1)
    assert (row["layer"], row["head"], row["position"], row["best_pair"]) == (0, 1, 3, 7)
    assert row["sink_share"] == sink.share and row["advantage"] == sink.advantage.total
    assert row["best_advantage"] == row["best_lift"] + row["best_push"] == sink.advantage.pairs[7]
    assert row["wavelength"] == pytest.approx(2 * np.pi / 0.015)
    assert row["cycles"] == pytest.approx(0.015 * 128 / (2 * np.pi))
    assert row["band"] == "below half a cycle"
    for name in ("share_without_best", "share_without_two", "control_share"):
        assert row[name] == getattr(sink, name)


def test_a_window_of_keys():
    """With a window a key is seen by few queries; what it gets is over these alone."""
    plant = planted.sink_by_lift(N, 30, size=20.0)
    record = planted.planted_record([plant], window=20)
    attention = read_attention(record)
    sink = explain_sinks(planted.make_capture(record)).head(0, 0)
    assert (sink.position, sink.n_queries) == (30, 20)
    assert sink.share == pytest.approx(attention.received[0, 30]) and sink.share > 0.9


def test_heads_that_are_none_are_refused():
    found = explain_sinks(random_capture())
    with pytest.raises(InputError, match="layer 5 head 0 is not a sink head; there are 0, listed"):
        found.head(5, 0)


def test_long_prompts_are_sampled_and_say_by_how_much_that_errs(monkeypatch):
    monkeypatch.setattr("lens_rope.sink_heads.REMOVAL_QUERIES", 512)
    record = noisy_sink(700, 3)
    sink = explain_sinks(planted.make_capture(record)).head(0, 1)
    strongest = list(sink.advantage.strongest(EXACT_PAIRS))
    others = [pair for pair in range(9) if pair not in strongest]
    every = shares_without(record, 1, sink.position, [[pair] for pair in range(9)])
    error = sink.share_without_error
    assert (error > 0).all() and error[others].mean() > error[strongest].mean()
    assert (np.abs(sink.share_without - every) < 5 * error).all()
    assert sink.share_without_best_error == error[sink.best_pair]
    table = explain_sinks(planted.make_capture(record)).to_dataframe()
    assert table["share_without_best_error"].iloc[0] == sink.share_without_best_error
    some = shares_without(record, 1, sink.position, [[strongest[0]]], max_queries=512)
    assert sink.share_without_best == pytest.approx(some[0], rel=1e-6)


def test_errors_of_prompts_are_merged(monkeypatch):
    monkeypatch.setattr("lens_rope.sink_heads.REMOVAL_QUERIES", 512)
    records = [noisy_sink(n, n) for n in (700, 600, 100)]
    each = [explain_sinks(planted.make_capture(record)).head(0, 1) for record in records]
    strongest = each[2].advantage.strongest(EXACT_PAIRS)
    assert not each[2].share_without_error[list(strongest)].any()
    merged = merge_sink_heads(each)
    weights = np.array([entry.n_queries for entry in each])
    squares = [(w * e.share_without_error) ** 2 for w, e in zip(weights, each, strict=True)]
    expected = np.sqrt(np.sum(squares, axis=0)) / weights.sum()
    np.testing.assert_allclose(merged.share_without_error, expected)
    unknown = dataclasses.replace(each[0], share_without_error=np.empty(0))
    assert np.isnan(unknown.share_without_best_error)
    assert merge_sink_heads([unknown, each[1]]).share_without_error.size == 0


def test_the_error_of_a_best_pair_is_that_of_the_queries_that_were_used(monkeypatch):
    """Where it is not among the strongest of a prompt, few queries tell what its removal does."""
    monkeypatch.setattr("lens_rope.sink_heads.REMOVAL_QUERIES", 512)
    records = [noisy_sink(n, n) for n in (900, 600)]
    first, second = (explain_sinks(planted.make_capture(record)).head(0, 1) for record in records)
    # A pair that is strongest in neither, as if the advantage in the first were by far the largest.
    strongest = {*first.advantage.strongest(EXACT_PAIRS), *second.advantage.strongest(EXACT_PAIRS)}
    pair = min(set(range(9)) - strongest)
    raised = dataclasses.replace(first.advantage, lift=first.advantage.lift.copy())
    raised.lift[pair] += 100.0
    first = dataclasses.replace(first, advantage=raised)
    merged = merge_sink_heads([first, second])
    assert merged.best_pair == pair
    shares, errors = zip(
        *(
            head_shares_without(
                record, [1], entry.position, [[[pair]]], max_queries=CONTROL_QUERIES
            )
            for record, entry in zip(records, (first, second), strict=True)
        ),
        strict=True,
    )
    weights = np.array([first.n_queries, second.n_queries]) / merged.n_queries
    share = weights @ [share[0, 0] for share in shares]
    error = np.sqrt(weights**2 @ [error[0, 0] ** 2 for error in errors])
    assert merged.share_without_best == pytest.approx(share, rel=1e-6)
    assert merged.share_without_best_error == pytest.approx(error, rel=1e-6)


def test_an_error_that_one_prompt_does_not_know_is_unknown():
    each = [explain_sinks(planted.make_capture(noisy_sink(n, n))).head(0, 1) for n in (100, 90)]
    best = merge_sink_heads(each).best_pair
    error = each[0].share_without_error.copy()
    error[best] = np.nan
    unknown = dataclasses.replace(each[0], share_without_error=error)
    for entries in ([unknown, each[1]], [each[1], unknown], [*each, unknown]):
        assert np.isnan(merge_sink_heads(entries).share_without_best_error)
