"""The bounds against brute force over distances; p-values against exact sums and exact tails."""

import math

import numpy as np
import planted
import pytest
from scipy.stats import hypergeom
from test_decompose import random_capture

import lens_rope.bounds as bounds
from lens_rope.bounds import (
    BOUNDS,
    band,
    check_bounds,
    within_angle,
    within_half_cycle,
    within_partial_cycle,
    within_region,
)
from lens_rope.errors import InputError
from lens_rope.offsets import LayerOffsets, OffsetFeatures, SideOffsets, offset_features
from lens_rope.records import ModelInfo

ANGLES = np.linspace(-np.pi, np.pi, 122)[1:]  # none of them on a border
TURNS = np.linspace(0, 4 * np.pi, 97)


def highest(angle, turn):
    """Largest value of the curve over the whole stretch of distances."""
    return np.cos(angle + np.linspace(0, turn, 601)).max()


def test_region_is_where_the_curve_is_nowhere_positive():
    kept = np.array([[within_region(a, t) for t in TURNS] for a in ANGLES])
    brute = np.array([[highest(a, t) <= 1e-9 for t in TURNS] for a in ANGLES])
    np.testing.assert_array_equal(kept, brute)
    assert 0 < kept.sum() < kept.size / 4
    angle, turn = np.meshgrid(ANGLES, TURNS, indexing="ij")
    # Either bound is necessary, and none of them alone is enough.
    assert (within_angle(angle) & within_half_cycle(turn) >= kept).all()
    assert (within_partial_cycle(turn) >= within_half_cycle(turn)).all()
    assert (within_angle(angle) & within_half_cycle(turn) & ~kept).any()


def test_half_a_cycle_is_the_most_that_any_angle_allows():
    best = [min(highest(a, t) for a in np.linspace(-np.pi, np.pi, 73)) for t in TURNS[::2]]
    np.testing.assert_array_equal(within_half_cycle(TURNS[::2]), np.array(best) <= 1e-9)
    assert within_half_cycle(np.pi) and not within_half_cycle(np.pi + 1e-9)
    assert within_partial_cycle(2 * np.pi - 1e-9) and not within_partial_cycle(2 * np.pi)


def test_a_small_step_over_each_border_breaks_it():
    step = 1e-3
    half = np.pi / 2
    assert within_region(half, np.pi) and within_region(half + step, np.pi - 2 * step)
    assert not within_region(half - step, 0.5) and highest(half - step, 0.5) > 0
    assert within_region(-half - step, step / 2) and highest(-half - step, step / 2) <= 0
    assert not within_region(-half - step, 2 * step) and highest(-half - step, 2 * step) > 0
    assert not within_region(half, np.pi + step) and highest(half, np.pi + step) > 0
    assert within_angle(half) and within_angle(-half) and within_angle(np.pi)
    assert not within_angle(half - step) and not within_angle(step - half)


def test_bands_in_words():
    words = {0.0: "below half a cycle", 0.5: "below half a cycle", 0.51: "partial cycle",
             0.99: "partial cycle", 1.0: "full cycles", 30.0: "full cycles"}  # fmt: skip
    assert {cycles: band(cycles) for cycles in words} == words


def layer_with(strong, angle=None, *, frequencies=None, n_kv=None, size=3.0, n_tokens=100, **rope):
    """Offsets of a layer in which exactly these `[head, pair]` are features of amplitude 9."""
    strong = np.asarray(strong, bool)
    n_heads, n_pairs = strong.shape
    n_kv = n_heads if n_kv is None else n_kv
    frequencies = np.linspace(2, 0.001, n_pairs) if frequencies is None else frequencies
    angle = np.full(strong.shape, 2.0) if angle is None else np.asarray(angle, float)
    key = np.zeros((n_kv, n_pairs), bool)
    for head in range(n_heads):
        key[head // (n_heads // n_kv)] |= strong[head]

    def side(is_large, turn):
        length = np.where(is_large, size, 1.0)
        mean = length * np.exp(1j * turn) * np.where(is_large, 1, 0.1)
        flat, rest = np.ones(2 * n_pairs), np.zeros((len(is_large), 0))
        return SideOffsets(mean, length, length, flat, flat, rest)

    entry = planted.make_rope(frequencies, n_rest=0, **rope)
    return LayerOffsets(entry, 1.0, n_tokens, 1, side(strong, angle), side(key, np.zeros_like(key)))


def features_of(*layers):
    first = layers[0]
    info = ModelInfo("m", len(layers), first.n_heads, len(first.key.mean), 8, "float32", "", {})
    return OffsetFeatures(info, layers, 0.8, 2.0, ())


def spots(n_heads, n_pairs, *where):
    """`[head, pair]` True at these places."""
    out = np.zeros((n_heads, n_pairs), bool)
    out[tuple(np.transpose(where))] = True
    return out


EIGHT = (3, 2.5, 2, 1.0, 0.2, 0.1, 0.04, 0.01)  # over 64 tokens: ..., 64, 12.8, 6.4, 2.56, 0.64


def test_table_and_base_rates_by_counting():
    angle = np.array([[1, 1, 1, 2, 1, -2, 2, -2], [1, 1, 1, 2, 2, 2, 3, 0.1]])
    where = ((0, 3), (0, 6), (0, 7), (1, 5), (1, 6))
    layer = layer_with(spots(2, 8, *where), angle, frequencies=EIGHT, trained_context=64)
    check = check_bounds(features_of(layer))
    table = check.table.sort_values(["head", "pair"], ignore_index=True)
    assert table[["head", "pair"]].to_numpy().tolist() == [list(at) for at in where]
    np.testing.assert_allclose(table["amplitude"], 9)
    np.testing.assert_allclose(table["turn"], [64, 2.56, 0.64, 6.4, 2.56])
    np.testing.assert_allclose(table["cycles"], table["turn"] / (2 * np.pi))
    np.testing.assert_allclose(table["angle"], [2, 2, -2, 2, 3])
    assert table["context"].tolist() == [64] * 5 and table["layer"].tolist() == [0] * 5
    expected = {
        # name: (of the features in order, share of all sixteen)
        "half_cycle": ([0, 1, 1, 0, 1], 4 / 16),
        "partial_cycle": ([0, 1, 1, 0, 1], 4 / 16),
        "angle": ([1, 1, 1, 1, 1], 8 / 16),
        # 2 + 2.56 < 3π/2; -2 + 2π + 0.64 > 3π/2; 3 + 2.56 > 3π/2
        "region": ([0, 1, 0, 0, 0], 1 / 16),
    }
    assert tuple(expected) == BOUNDS == tuple(entry.name for entry in check.shares)
    for name, (kept, base) in expected.items():
        assert table[f"within_{name}"].tolist() == [bool(k) for k in kept]
        share = check[name]
        assert (share.n, share.within) == (5, sum(kept))
        assert share.share == sum(kept) / 5
        assert share.base_rate == pytest.approx(base)
    assert check.positive_angle == 4 / 5 and check.positive_angle_base_rate == 14 / 16
    assert len(check.exceptions()) == 4
    by_layer = check.by_layer()
    assert by_layer.to_numpy().tolist() == [[0, 64, 5, 3, 3, 5, 1]]
    assert check.to_dataframe()["bound"].tolist() == list(BOUNDS)
    assert check.to_dataframe()["features"].tolist() == [5] * 4
    assert repr(check).startswith("5 offset features with an amplitude above 5")


def test_amplitude_decides_who_is_judged():
    layer = layer_with(spots(1, 5, (0, 3)))
    assert len(check_bounds(features_of(layer), 8.9).table) == 1
    assert len(check_bounds(features_of(layer), 9.1).table) == 0
    order = [layer_with(spots(1, 5, (0, 3)), size=s, layer=i) for i, s in enumerate((3, 5, 4))]
    assert check_bounds(features_of(*order)).table["layer"].tolist() == [1, 2, 0]


def test_binomial_p_value_is_the_exact_sum():
    angle = np.full((3, 8), 0.5)
    angle[:, :3] = 2.0
    where = spots(3, 8, (0, 0), (0, 1), (0, 5), (1, 2), (1, 7), (2, 0))
    check = check_bounds(features_of(layer_with(where, angle)))
    assert check.positive_angle == 1
    share = check["angle"]
    n, within, base = 6, 4, 3 / 8
    assert (share.n, share.within, share.base_rate) == (n, within, base)
    exact = sum(math.comb(n, k) * base**k * (1 - base) ** (n - k) for k in range(within, n + 1))
    assert share.p_binomial == pytest.approx(exact)


def test_heads_that_share_keys_count_once():
    """Four heads on two key heads: pair 0 in both heads of a group is one, and fails in one."""
    where = spots(4, 6, (0, 0), (1, 0), (1, 3), (2, 0), (3, 0))
    angle = np.full((4, 6), 2.0)
    angle[3, 0] = 0.0
    share = check_bounds(features_of(layer_with(where, angle, n_kv=2)))["angle"]
    assert (share.n, share.within) == (5, 4)
    assert (share.n_distinct, share.within_distinct) == (3, 2)
    base = 23 / 24
    exact = sum(math.comb(3, k) * base**k * (1 - base) ** (3 - k) for k in (2, 3))
    assert share.p_binomial_distinct == pytest.approx(exact)
    alone = check_bounds(features_of(layer_with(where, angle)))["angle"]
    assert (alone.n_distinct, alone.within_distinct) == (5, 4)


def half_cycle_layer(where, n_within, **changes):
    """A layer whose last `n_within` pairs are within half a cycle of 100 tokens."""
    frequencies = np.where(np.arange(where.shape[1]) < where.shape[1] - n_within, 1.0, 0.01)
    return layer_with(where, frequencies=frequencies, trained_context=100, **changes)


def near(p, exact):
    """Within five standard errors of so many permutations."""
    return abs(p - exact) < 5 * np.sqrt(exact / bounds.PERMUTATIONS) + 2 / bounds.PERMUTATIONS


def test_permutation_p_value_is_the_exact_tail():
    """One head: pairs drawn without replacement. Equal heads of a layer move together."""
    where = spots(1, 12, (0, 0), (0, 9), (0, 10))
    tail = hypergeom(12, 4, 3)
    share = check_bounds(features_of(half_cycle_layer(where, 4)))["half_cycle"]
    assert share.within == 2 and near(share.p_value, tail.sf(1))
    together = check_bounds(features_of(half_cycle_layer(np.repeat(where, 3, axis=0), 4)))
    assert together["half_cycle"].within == 6 and near(together["half_cycle"].p_value, tail.sf(1))
    assert together["half_cycle"].p_binomial < 0.5 * together["half_cycle"].p_value
    two = [half_cycle_layer(where, 4, layer=i) for i in range(2)]
    share = check_bounds(features_of(*two))["half_cycle"]
    pmf = np.convolve(tail.pmf(range(4)), tail.pmf(range(4)))
    assert share.within == 4 and near(share.p_value, pmf[4:].sum())


def test_permutation_p_value_of_a_planted_effect_is_the_smallest():
    layers = [half_cycle_layer(spots(2, 16, (0, 15), (1, 14)), 3, layer=i) for i in range(8)]
    share = check_bounds(features_of(*layers))["half_cycle"]
    assert share.p_value == 1 / (bounds.PERMUTATIONS + 1)
    nowhere = [half_cycle_layer(spots(2, 16, (0, 1), (1, 2)), 3, layer=i) for i in range(8)]
    assert check_bounds(features_of(*nowhere))["half_cycle"].p_value == 1


def test_permutation_p_value_under_the_null(monkeypatch):
    """No more often small than it says, and not much less often."""
    monkeypatch.setattr(bounds, "PERMUTATIONS", 199)
    rng = np.random.default_rng(0)
    p = []
    for trial in range(80):
        layers = []
        for index in range(6):
            chosen = rng.choice(24, size=4, replace=False)
            where = spots(2, 24, *((h, pair) for h in range(2) for pair in chosen))
            layers.append(half_cycle_layer(where, 12, layer=index))
        p.append(check_bounds(features_of(*layers), seed=trial)["half_cycle"].p_value)
    p = np.array(p)
    for level in (0.05, 0.2, 0.5):
        share, error = (p <= level).mean(), np.sqrt(level * (1 - level) / 80)
        assert level - 0.12 - 3 * error < share < level + 3 * error
    # Counting features as independent finds too much.
    assert p.std() > 0.2


def test_seed_decides_the_p_value_alone():
    where = spots(2, 16, (0, 0), (1, 15), (0, 15))
    features = features_of(half_cycle_layer(where, 6))
    one, same, other = (check_bounds(features, seed=seed) for seed in (3, 3, 4))
    assert repr(one) == repr(same)
    assert one["half_cycle"].p_value != other["half_cycle"].p_value
    assert near(one["half_cycle"].p_value, other["half_cycle"].p_value)
    assert one["half_cycle"].p_binomial == other["half_cycle"].p_binomial


def test_each_layer_is_judged_by_its_own_context():
    where = spots(1, 4, (0, 1))
    layers = [
        layer_with(where, frequencies=[1, 0.1, 0.05, 0.01], trained_context=1000, layer=0),
        layer_with(where, frequencies=[1, 0.1, 0.05, 0.01], trained_context=1000, window=20,
                   layer=1),
    ]  # fmt: skip
    check = check_bounds(features_of(*layers))
    table = check.table.set_index("layer")
    assert table["context"].to_dict() == {0: 1000, 1: 20}
    assert table["turn"].to_dict() == pytest.approx({0: 100, 1: 2})
    assert table["within_half_cycle"].to_dict() == {0: False, 1: True}
    assert check["half_cycle"].base_rate == 3 / 8
    wide = check_bounds(features_of(*layers), context=30)
    assert wide.table["context"].tolist() == [30, 30]
    assert wide["half_cycle"].within == 2 and wide["half_cycle"].base_rate == 6 / 8


@pytest.mark.filterwarnings("error")
def test_nothing_strong_is_nothing_judged():
    check = check_bounds(features_of(layer_with(spots(1, 4, (0, 1)))), 100.0)
    assert check.notes == ("No offset feature is that strong, so there is nothing to judge.",)
    assert check.notes[0] in repr(check)
    for entry in check.shares:
        assert entry.n == entry.within == entry.n_distinct == 0
        assert np.isnan([entry.share, entry.p_value, entry.p_binomial]).all()
        assert np.isfinite(entry.base_rate)
    assert np.isnan(check.positive_angle) and check.positive_angle_base_rate == 1
    assert len(check.exceptions()) == len(check.by_layer()) == 0
    assert len(check.to_dataframe()) == 4


@pytest.mark.filterwarnings("error")
def test_unknown_offsets_and_layers_without_rope_are_left_out():
    strong = spots(1, 4, (0, 1))
    short = layer_with(strong, n_tokens=5)
    nope = layer_with(np.zeros((1, 0), bool), layer=1)
    check = check_bounds(features_of(short, nope))
    assert len(check.table) == 0 and np.isnan(check["region"].base_rate)
    assert np.isnan(check.positive_angle_base_rate)
    assert repr(check).startswith("0 offset features")
    known = layer_with(strong, layer=2)
    check = check_bounds(features_of(short, nope, known))
    assert check.table["layer"].tolist() == [2]
    assert check["angle"].base_rate == 1


def test_through_a_capture():
    """A slow pair that is constant and large on both sides, found and judged."""
    from test_offsets import one_feature

    features = offset_features(one_feature(size=6.0))
    check = features.check_bounds()
    assert check.table[["head", "pair", "context"]].to_numpy().tolist() == [[1, 3, 128]]
    assert check.table["turn"][0] == pytest.approx(0.2 * 128)
    assert check["half_cycle"].within == 0 and check["angle"].within in (0, 1)
    short = features.check_bounds(10, context=12)
    assert short["half_cycle"].within == 1 and short["half_cycle"].base_rate == 6 / 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context": 0}, "context is 0; it must be at least 1 token"),
        ({"context": -3}, "context is -3"),
        ({"strong": -1.0}, "strong is -1.0; it must be an amplitude of at least 0 score units"),
        ({"strong": float("nan")}, "strong is nan"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        offset_features(random_capture()).check_bounds(**arguments)


def test_unknown_bound_is_refused():
    check = check_bounds(features_of(layer_with(spots(1, 4, (0, 1)))))
    with pytest.raises(InputError, match="there is no bound 'x'; the bounds are half_cycle, part"):
        check["x"]
