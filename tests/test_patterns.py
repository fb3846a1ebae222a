"""Heads whose cause is known get their name, unstructured ones never get one."""

import dataclasses
import itertools

import numpy as np
import planted
import pytest

from lens_rope.attention import read_attention
from lens_rope.errors import InputError
from lens_rope.heads import explain_heads
from lens_rope.patterns import (
    BASE_FACTOR,
    MASS_THRESHOLD,
    PATTERNS,
    UNIFORM_THRESHOLD,
    LayerPatterns,
    TargetShare,
    is_long_enough,
    judge_layer,
    layer_patterns,
    merge_patterns,
    merge_targets,
    pattern_targets,
)
from lens_rope.sinks import HeadShares

NAMED = planted.named_heads(96)


@pytest.fixture(scope="module")
def explained():
    return explain_heads(planted.planted_capture(list(NAMED.values())))


@pytest.mark.parametrize(("head", "name"), list(enumerate(NAMED)), ids=list(NAMED))
def test_planted_heads_get_their_name(explained, head, name):
    entry = explained.head(0, head)
    assert entry.pattern == name
    assert entry.strength > 0.85
    base = np.nan if name in ("uniform", "content") else entry.base_rate
    np.testing.assert_equal(base, entry.base_rate)
    if name == "sink":
        assert entry.strength == entry.sink_share and entry.sink_position == 0
        assert entry.base_rate == pytest.approx(np.mean(1 / np.arange(1, 97)))
    elif name in entry.masses:
        assert entry.strength == entry.masses[name]
        assert entry.base_rate == entry.base_rates[name] < 0.2
    assert entry.strength != entry.entropy or name == "uniform"


def test_more_general_names_are_listed_beside(explained):
    also = {name: explained.head(0, head).also for head, name in enumerate(NAMED)}
    assert also["previous token"] == ("local",)
    assert also["first occurrence"] == ("duplicate token",)
    assert also["induction"] == ("content",)
    assert also["sink"] == also["uniform"] == also["duplicate token"] == ()


@pytest.mark.parametrize(
    ("name", "target", "pairs"),
    [
        ("sink", "sink", {7}),
        ("previous token", "previous token", {0, 1, 2}),
        ("local", "local", {3, 5}),
        ("induction", "induction", set()),
        ("duplicate token", "duplicate token", {4}),
        ("first occurrence", "first occurrence", {6}),
        ("content", "attended", set()),
        ("uniform", "attended", set()),
    ],
)
def test_the_pairs_behind_a_head(explained, name, target, pairs):
    entry = explained.head(0, list(NAMED).index(name))
    assert entry.target == target
    found = {int(pair) for pair in np.flatnonzero(np.abs(entry.advantage.pairs) > 1e-4)}
    assert found == pairs
    assert (entry.advantage.pass_through > 1) == (
        name in ("induction", "duplicate token", "first occurrence", "content")
    )
    best = entry.advantage.strongest(1)[0]
    if pairs:
        assert best in pairs
    cycles = planted.FREQUENCIES[best] * 128 / (2 * np.pi)
    words = "full cycles" if cycles >= 1 else "partial cycle" if cycles > 0.5 else "below half"
    assert entry.band.startswith(words)


def test_shares_of_planted_heads(explained):
    """Positional heads are offset·offset, a content head is what its keys hold."""
    positional = explained.head(0, 1).offset_shares
    np.testing.assert_allclose(positional, [1, 0, 0, 0], atol=1e-4)
    of_keys = explained.head(0, 6)
    np.testing.assert_allclose(of_keys.offset_shares, [0, 1, 0, 0], atol=1e-4)
    assert of_keys.token_consistency == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("position", [0, 11])
@pytest.mark.parametrize("build", [planted.sink_by_push, planted.sink_by_lift])
def test_sinks_anywhere(build, position):
    entry = explain_heads(planted.planted_capture([build(80, position)])).head(0, 0)
    assert (entry.pattern, entry.sink_position, entry.target) == ("sink", position, "sink")
    assert entry.advantage.strongest(1) == (7,)


@pytest.mark.parametrize("n_pos", [70, 200])
@pytest.mark.parametrize("size", [2.0, 8.0, 60.0])
def test_unstructured_heads_are_mixed(size, n_pos):
    """Many of them, with scores of middle and of large size; none is ever named."""
    plants = [planted.random_head(n_pos, size, seed) for seed in range(12)]
    found = explain_heads(planted.planted_capture(plants))
    assert found.counts() == {"mixed": 12}
    for entry in found.heads:
        assert entry.also == () and entry.target == "attended" and np.isnan(entry.base_rate)
        assert entry.strength == max(entry.masses.values())
        assert abs(entry.token_consistency) < 0.4


@pytest.mark.parametrize("n_pos", [1, 2, 63])
def test_short_prompts_name_nothing(n_pos):
    found = explain_heads(planted.planted_capture([planted.sink_by_push(n_pos, 0)]))
    entry = found.head(0, 0)
    assert entry.pattern is None and entry.also == () and entry.target == "attended"
    assert f"No head is named: the shortest prompt has {n_pos} tokens" in found.notes[0]
    assert found.counts() == {"None": 1} and found.notes[0] in repr(found)
    assert not is_long_enough([64, 63]) and is_long_enough([64, 64])
    both = [[planted.sink_by_push(n, 0)] for n in (n_pos, 80)]
    assert explain_heads(planted.planted_capture(*both)).head(0, 0).pattern is None
    assert explain_heads(planted.planted_capture(both[1])).head(0, 0).pattern == "sink"


def judged(
    head=0, *, is_sink=True, repeated=None, is_long=True, consistency=0.0, split=None, **changes
):
    """The name of a head with these masses and everything else of no note."""
    values = {"mass": {}, "base": 0.01, "entropy": 0.5, "sink": 0.0, **changes}
    rope = planted.make_rope()
    record = planted.random_record(70, n_heads=1, n_kv=1, frequencies=planted.FREQUENCIES)
    tokens = list(range(35)) * 2
    targets = pattern_targets(tokens, rope)
    patterns = layer_patterns(record, read_attention(record, targets), targets)

    def with_masses(patterns, masses):
        shares = {
            name: dataclasses.replace(
                share, mass=np.array([masses.get(name, 0.1)]), uniform_mass=values["base"]
            )
            for name, share in patterns.targets.items()
        }
        return dataclasses.replace(patterns, targets=shares, entropy=np.array([values["entropy"]]))

    one = np.array([values["sink"]])
    shares = HeadShares(0, 70, one, np.array([0]), one, np.array([True]), 0.07)
    split = np.array([[1.0, 0, 0, 0]]) if split is None else np.array([split])

    @dataclasses.dataclass
    class Shares:
        shares = split
        token_consistency = np.array([consistency])

    return judge_layer(
        rope, with_masses(patterns, values["mass"]), shares, Shares(),
        {0: patterns.attended[0]} if is_sink else {},
        repeated=None if repeated is None else with_masses(patterns, repeated), is_long=is_long,
    )[head]  # fmt: skip


def test_thresholds():
    above, at = MASS_THRESHOLD + 1e-6, MASS_THRESHOLD
    for name in ("previous token", "local", "induction", "duplicate token", "first occurrence"):
        assert judged(mass={name: above}).pattern == name
        assert judged(mass={name: at}).pattern == "mixed"
        assert judged(mass={name: np.nan}).pattern == "mixed"
        assert judged(mass={name: 0.6}, base=0.6 / BASE_FACTOR).pattern == name
        assert judged(mass={name: 0.6}, base=0.601 / BASE_FACTOR).pattern == "mixed"
    assert judged(sink=0.31).pattern == "sink" and judged(sink=0.3).pattern == "mixed"
    # Above the threshold in prompts that are too short to tell.
    assert judged(sink=0.9, is_sink=False).pattern == "mixed"
    assert judged(entropy=UNIFORM_THRESHOLD).pattern == "uniform"
    assert judged(entropy=UNIFORM_THRESHOLD - 1e-6).pattern == "mixed"
    split = [0.5, 0.5, 0, 0]
    assert judged(consistency=0.5, split=split).pattern == "content"
    assert judged(consistency=0.49, split=split).pattern == "mixed"
    assert judged(consistency=0.9, split=[0.51, 0.49, 0, 0]).pattern == "mixed"
    assert judged(consistency=np.nan, split=split).pattern == "mixed"
    assert judged(consistency=0.9, split=[np.nan] * 4).pattern == "mixed"
    assert judged(mass={"local": 0.9}, is_long=False).pattern is None


def test_the_most_specific_name_comes_first():
    everything = {
        "mass": dict.fromkeys(("previous token", "local", "induction", "duplicate token",
                               "first occurrence"), 0.9),
        "sink": 0.9, "entropy": 0.99, "consistency": 0.9, "split": [0, 1, 0, 0],
    }  # fmt: skip
    entry = judged(**everything)
    assert (entry.pattern, *entry.also) == PATTERNS[:-1]
    assert PATTERNS[-1] == "mixed"


def test_repeated_tokens_take_the_place_of_chance():
    for name in ("induction", "duplicate token", "first occurrence"):
        assert judged(mass={name: 0.9}, repeated={}).pattern == "mixed"
        entry = judged(repeated={name: 0.9})
        assert entry.pattern == name == entry.target and entry.strength == 0.9
    for name in ("previous token", "local"):
        assert judged(mass={name: 0.9}, repeated={}).pattern == name
        assert judged(repeated={name: 0.9}).pattern == "mixed"


def patterns_of(n_pos, seed=0, tokens=None):
    record = planted.random_record(n_pos, seed=seed)
    targets = pattern_targets(tokens or [i % 9 for i in range(n_pos)], record.rope)
    return layer_patterns(record, read_attention(record, targets), targets)


def test_merge_is_weighted_by_queries_in_any_order():
    parts = [patterns_of(n, n) for n in (1, 12, 40)]
    merged = merge_patterns(parts)
    assert merged.n_tokens == 53
    expected = (11 * parts[1].entropy + 39 * parts[2].entropy) / 50
    np.testing.assert_allclose(merged.entropy, expected)
    for name, share in merged.targets.items():
        each = [part.targets[name] for part in parts]
        counts = np.array([entry.n_queries for entry in each])
        assert share.n_queries == counts.sum() > 0
        known = counts > 0
        masses = np.array([entry.mass for entry in each])[known]
        np.testing.assert_allclose(share.mass, np.average(masses, axis=0, weights=counts[known]))
        bases = np.array([entry.uniform_mass for entry in each])[known]
        assert share.uniform_mass == pytest.approx(np.average(bases, weights=counts[known]))
        gains = np.array([entry.advantages[1].pairs for entry in each])[known]
        np.testing.assert_allclose(
            share.advantages[1].pairs, np.average(gains, axis=0, weights=counts[known])
        )
    assert merged.attended[0].n_queries == 11 + 39
    for order in itertools.permutations(parts):
        again = merge_patterns(order)
        np.testing.assert_array_equal(again.entropy, merged.entropy)
        for name, share in merged.targets.items():
            np.testing.assert_array_equal(again.targets[name].mass, share.mass)


def test_merge_of_prompts_without_a_target():
    parts = [patterns_of(20, tokens=list(range(20))), patterns_of(1)]
    assert merge_patterns(parts).targets["induction"].n_queries == 0
    assert np.isnan(merge_patterns(parts).targets["induction"].mass).all()
    assert np.isnan(merge_patterns(parts[1:]).entropy).all()
    nothing: list[TargetShare] = [part.targets["induction"] for part in parts]
    assert merge_targets(nothing) is nothing[0]


def test_merge_refuses_what_does_not_belong_together():
    part = patterns_of(9)
    other: LayerPatterns = dataclasses.replace(part, layer=4)
    fewer = dataclasses.replace(part, entropy=part.entropy[:1])
    for parts in ([], [part, other], [part, fewer]):
        with pytest.raises(InputError, match="only patterns of one layer with the same heads"):
            merge_patterns(parts)
