"""Offsets are means of unrotated pairs; their curve is what query and key offsets contribute."""

import cmath
import itertools

import numpy as np
import planted
import pytest
from test_decompose import random_capture

from lens_rope.attention import read_attention
from lens_rope.errors import InputError
from lens_rope.offset_shares import offset_and_content
from lens_rope.offsets import (
    MIN_OFFSET_TOKENS,
    layer_offsets,
    merge_offsets,
    offset_features,
)
from lens_rope.sinks import sink_positions

SHAPES = {
    "plain": {},
    "partial": {"n_rest": 9},
    "everything rotated": {"n_rest": 0},
    "adjacent": {"pairing": "adjacent"},
    "rotated part last": {"rotary_start": 3},
    "factor": {"attention_factor": 1.3},
    "grouped": {"n_heads": 4, "n_kv": 2},
    "window": {"window": 7},
    "scale": {"scale": 0.3},
}


def unrotated(record, side, position, head, pair):
    """One pair before rotation, undone by hand."""
    rope, x = record.rope, getattr(record, side)[position, head].double().tolist()
    half, start = rope.n_pairs, rope.rotary_start
    a, b = (pair, pair + half) if rope.pairing == "half" else (2 * pair, 2 * pair + 1)
    z = complex(x[start + a], x[start + b])
    w = float(rope.inv_freq[pair])
    return z * cmath.exp(-1j * w * position) / rope.attention_factor


@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_equal_loops(shape):
    record = planted.random_record(40, offset=1.0, **SHAPES[shape])
    left_out = (0, 7, 8)
    kept = [m for m in range(40) if m not in left_out]
    offsets = layer_offsets(record, left_out)
    assert (offsets.n_tokens, offsets.n_left_out, offsets.layer) == (37, 3, 0)
    groups = record.n_heads // record.n_kv_heads
    assert offsets.kv_heads.tolist() == [h // groups for h in range(record.n_heads)]
    for name, side in (("q", offsets.query), ("k", offsets.key)):
        x = getattr(record, name)
        for head, pair in itertools.product(range(x.shape[1]), range(record.rope.n_pairs)):
            z = [unrotated(record, name, m, head, pair) for m in kept]
            mean, lengths = sum(z) / 37, [abs(value) for value in z]
            assert side.mean[head, pair] == pytest.approx(mean, rel=1e-5)
            assert side.magnitude[head, pair] == pytest.approx(np.mean(lengths), rel=1e-5)
            assert side.largest[head, pair] == pytest.approx(max(lengths), rel=1e-5)
            constancy = abs(mean) / np.mean(lengths)
            assert side.constancy[head, pair] == pytest.approx(constancy, rel=1e-5)
        medians = [sorted(row) for row in side.magnitude]
        medians = [(row[(len(row) - 1) // 2] + row[len(row) // 2]) / 2 for row in medians]
        relative = side.magnitude / np.array(medians)[:, None]
        np.testing.assert_allclose(side.relative_magnitude, relative)
        after = np.abs(x[kept].numpy())
        np.testing.assert_allclose(side.component_mean, after.mean((0, 1)), rtol=1e-5)
        np.testing.assert_allclose(side.component_largest, after.max((0, 1)), rtol=1e-6)
        rest = x[kept][:, :, record.rope.pass_components].double().mean(dim=0)
        np.testing.assert_allclose(side.rest_mean, rest, rtol=0, atol=1e-6)
    for head, pair in itertools.product(range(record.n_heads), range(record.rope.n_pairs)):
        z_q, z_k = offsets.query.mean[head, pair], offsets.key.mean[head // groups, pair]
        g, scale = record.rope.attention_factor, record.scale
        amplitude = scale * g * g * abs(z_q) * abs(z_k)
        assert offsets.amplitude[head, pair] == pytest.approx(amplitude)
        angle = cmath.phase(z_q * z_k.conjugate())
        assert offsets.angle[head, pair] == pytest.approx(angle)


@pytest.mark.parametrize("shape", SHAPES)
def test_curve_is_the_part_of_both_offsets(shape):
    """`A cos(φ + w distance)` against the product of the rotated offsets, pair by pair."""
    record = planted.random_record(40, offset=1.0, **SHAPES[shape])
    rope, offsets = record.rope, layer_offsets(record)
    (of_query, _), (of_key, _) = offset_and_content(record, offsets)
    first, second = rope.components
    distance = np.arange(40)[:, None] - np.arange(40)
    for head, pair in itertools.product(range(record.n_heads), range(rope.n_pairs)):
        q, k = of_query[:, head].numpy(), of_key[:, record.kv_head(head)].numpy()
        parts = [first[pair], second[pair]]
        product = record.scale * q[:, parts] @ k[:, parts].T
        turn = offsets.angle[head, pair] + rope.inv_freq[pair] * distance
        curve = offsets.amplitude[head, pair] * np.cos(turn)
        np.testing.assert_allclose(product, curve, atol=1e-9)


@pytest.mark.parametrize("name", planted.MODELS)
def test_models(name):
    """In every architecture: means of what was unrotated by hand, and no crash without RoPE."""
    capture = planted.captured(name)
    found = offset_features(capture)
    for record in capture.records[0]:
        left_out = sink_positions(read_attention(record))
        kept = [m for m in range(record.n_pos) if m not in left_out]
        entry = found.layer(record.rope.layer)
        assert entry.n_tokens == len(kept)
        for pair in range(0, record.rope.n_pairs, 3):
            z = [unrotated(record, "k", m, 1, pair) for m in kept]
            assert entry.key.mean[1, pair] == pytest.approx(np.mean(z), rel=1e-4, abs=1e-5)
        assert entry.amplitude.shape == (record.n_heads, record.rope.n_pairs)
    table = found.to_dataframe()
    assert len(table) == sum(4 * record.rope.n_pairs for record in capture.records[0])
    assert found.model.name in repr(found)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_merge_is_all_tokens_pooled(order):
    records = [planted.random_record(n, seed=n, offset=0.5) for n in (1, 20, 33)]
    merged = merge_offsets(layer_offsets(records[i]) for i in order)
    straight = merge_offsets(layer_offsets(record) for record in records)
    assert (merged.n_tokens, merged.n_left_out) == (19 + 32, 3)
    for name, side in (("q", merged.query), ("k", merged.key)):
        other = straight.query if name == "q" else straight.key
        z = [unrotated(r, name, m, 1, 2) for r in records for m in range(1, r.n_pos)]
        assert side.mean[1, 2] == pytest.approx(np.mean(z))
        assert side.magnitude[1, 2] == pytest.approx(np.mean(np.abs(z)))
        assert side.largest[1, 2] == pytest.approx(max(np.abs(z)))
        x = np.concatenate([np.abs(getattr(r, name)[1:].numpy()) for r in records])
        np.testing.assert_allclose(side.component_mean, x.mean((0, 1)), rtol=1e-5)
        np.testing.assert_allclose(side.component_largest, x.max((0, 1)), rtol=1e-6)
        rest = np.concatenate([getattr(r, name)[1:, :, 8:].numpy() for r in records])
        np.testing.assert_allclose(side.rest_mean, rest.mean(0), atol=1e-6)
        np.testing.assert_array_equal(side.mean, other.mean)
        np.testing.assert_array_equal(side.magnitude, other.magnitude)


def test_merge_refuses_what_does_not_belong_together():
    one = layer_offsets(planted.random_record(9))
    others = [
        layer_offsets(planted.random_record(9, layer=1)),
        layer_offsets(planted.random_record(9, n_heads=4)),
        layer_offsets(planted.random_record(9, frequencies=(1.0, 0.5, 0.2, 0.1))),
    ]
    for other in others:
        with pytest.raises(InputError, match="one layer with the same rotation can be merged"):
            merge_offsets([one, other])
    with pytest.raises(InputError, match="there are no offsets to merge"):
        merge_offsets([])


@pytest.mark.parametrize("n_pos", [1, 2, MIN_OFFSET_TOKENS])
def test_too_few_tokens_have_no_offset(n_pos):
    features = offset_features(planted.make_capture(planted.random_record(n_pos, offset=9.0)))
    entry = features.layers[0]
    assert not entry.is_known and entry.n_tokens == n_pos - 1
    assert np.isnan(entry.amplitude).all() and np.isnan(entry.angle).all()
    assert not entry.is_feature(0.0, 0.0).any() and not len(features.features())
    assert f"(here {n_pos - 1}, first tokens and sinks not counted)" in features.notes[0]
    assert features.notes[0] in repr(features)
    assert len(features.to_dataframe()) == 8
    assert features.to_dataframe()["amplitude"].isna().all()


def one_feature(n_pos=60, size=6.0, noise=0.0, side=None, fault="turns"):
    """Pairs of length 1 that go around, and one, pair 3 of head 1, that is constant and large."""
    n_pairs = len(planted.FREQUENCIES)
    around = np.exp(2j * np.pi * np.arange(1, n_pos) * 7 / (n_pos - 1))
    sides = []
    for name in ("query", "key"):
        z = np.zeros((n_pos, 2, n_pairs), complex)
        z[1:] = around[:, None, None]
        # The first position is out of all statistics.
        z[0] = 1000.0
        z[1:, 1, 3] = (size + noise * around) * (1j if name == "query" else 1)
        if side == name:
            z[1:, 1, 3] = {"turns": size * around, "is small": np.ones(n_pos - 1)}[fault]
        sides.append((z, np.zeros((n_pos, 2, planted.BLOCK))))
    return planted.make_capture(planted.make_record(planted.make_rope(), *sides))


def test_a_planted_feature_is_found_alone():
    found = offset_features(one_feature())
    assert found.notes == ()
    table = found.features()
    assert table[["layer", "head", "kv_head", "pair"]].to_numpy().tolist() == [[0, 1, 1, 3]]
    row = table.iloc[0]
    assert row["amplitude"] == pytest.approx(36, rel=1e-5)
    assert row["angle"] == pytest.approx(np.pi / 2, rel=1e-5)
    assert row["query_constancy"] == pytest.approx(1) == row["key_constancy"]
    assert row["query_relative"] == pytest.approx(6, rel=1e-5)
    assert row["key_largest"] == pytest.approx(6, rel=1e-5)
    assert row["cycles"] == pytest.approx(0.2 * 128 / (2 * np.pi))
    assert row["wavelength"] == pytest.approx(2 * np.pi / 0.2)
    outliers = found.outliers()
    assert outliers[["side", "head", "pair"]].to_numpy().tolist() == [
        ["key", 1, 3],
        ["query", 1, 3],
    ]
    assert outliers["constancy"].to_numpy() == pytest.approx([1, 1])
    assert len(found.outliers(7.0)) == 0
    assert "1 offset features in planted (constancy at least 0.8, magnitude at" in repr(found)
    assert found.query_offset(0, 1)[3] == pytest.approx(6j, rel=1e-5)


@pytest.mark.parametrize(("fault", "n_outliers"), [("turns", 2), ("is small", 1)])
@pytest.mark.parametrize("side", ["query", "key"])
def test_a_feature_is_constant_and_large_on_both_sides(side, fault, n_outliers):
    found = offset_features(one_feature(side=side, fault=fault))
    assert not len(found.features())
    assert len(found.outliers()) == n_outliers
    assert repr(found).startswith("0 offset features in planted")


def test_thresholds_decide():
    capture = one_feature(size=3.0, noise=3.0)
    constancy = offset_features(capture).layers[0].key.constancy[1, 3]
    relative = offset_features(capture).layers[0].key.relative_magnitude[1, 3]
    assert 0.75 < constancy < 0.8 and 3 < relative < 4
    assert not len(offset_features(capture).features())
    assert len(offset_features(capture, constancy=constancy - 1e-6).features()) == 1
    args = {"constancy": 0.5}
    assert len(offset_features(capture, **args, relative=relative - 1e-6).features()) == 1
    assert not len(offset_features(capture, **args, relative=relative + 1e-6).features())


def test_sinks_are_left_out():
    """A sink in one head leaves the means of all heads of its layer."""
    plants = [planted.sink_by_lift(80, 9), planted.content(80)]
    entry = offset_features(planted.planted_capture(plants)).layers[0]
    assert (entry.n_tokens, entry.n_left_out) == (78, 2)
    assert entry.key.largest[0, 7] == 0
    expected = plants[1].rest_k[[m for m in range(80) if m not in (0, 9)]].mean(axis=0)
    np.testing.assert_allclose(entry.key.rest_mean[1], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: offset_features(c, constancy=1.1), r"constancy 1.1 must lie in \[0, 1\]"),
        (lambda c: offset_features(c, constancy=float("nan")), "constancy nan must lie"),
        (lambda c: offset_features(c, relative=-1), "relative -1 must be at least 0"),
        (lambda c: offset_features(c).layer(1), "layer 1 was not captured; captured layers: 5"),
        (lambda c: offset_features(c).query_offset(5, 4), "head 4 is out of range; layer 5 has 4"),
        (lambda c: offset_features(c).query_offset(5, -1), "head -1 is out of range"),
        (lambda c: offset_features(c).query_offset(0, 0), "layer 0 was not captured"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(InputError, match=message):
        call(random_capture())
