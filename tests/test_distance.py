"""One frozen query and key, moved apart: at their own distance the total is the model's score.

Oracles: complex128 loops on hand-made captures; the model's own score hooks; and, for every
architecture, the model's scores of the same two tokens at other distances, since in layer 0 the
values before rotation depend on the token alone.
"""

import cmath
import dataclasses
import importlib.metadata

import numpy as np
import pytest
import zoo
from conftest import needs_hooked
from oracle import EXPECTED
from test_decompose import SHAPES, random_capture

from lens_rope.capturing import capture
from lens_rope.decomposition import decompose
from lens_rope.distance import MAX_ALL_DISTANCES, distance_curve
from lens_rope.errors import InputError
from lens_rope.views.colors import INK, pair_color

# The bridge of transformer-lens 3 does not apply Cohere's rotation.
IS_FIRST_BRIDGE = int(importlib.metadata.version("transformer-lens").split(".")[0]) < 4
NAMES = [name for name in EXPECTED if not (name == "cohere" and IS_FIRST_BRIDGE)]


def with_rope(captured, **changes):
    """The capture with another rotation around the same rotated values."""
    record = captured.records[0][0]
    changed = dataclasses.replace(record, rope=dataclasses.replace(record.rope, **changes))
    return dataclasses.replace(captured, records=((changed,),))


def looped_curve(record, head, query, key, distances):
    """`[distance, pair]` contributions and the pass-through, by undoing both rotations in loops."""
    rope, half, s = record.rope, record.rope.n_pairs, record.rope.rotary_start
    q = record.q[query, head].double().numpy()
    k = record.k[key, head // (record.n_heads // record.n_kv_heads)].double().numpy()
    g = rope.attention_factor
    out = np.zeros((len(distances), half))
    rotated = set()
    for i in range(half):
        a, b = (s + i, s + i + half) if rope.pairing == "half" else (s + 2 * i, s + 2 * i + 1)
        rotated |= {a, b}
        w = float(rope.inv_freq[i])
        z_q = complex(q[a], q[b]) * cmath.exp(-1j * w * query) / g
        z_k = complex(k[a], k[b]) * cmath.exp(-1j * w * key) / g
        for d, distance in enumerate(distances):
            turned = z_q * z_k.conjugate() * cmath.exp(1j * w * distance)
            out[d, i] = record.scale * g**2 * turned.real
    rest = record.scale * sum(q[c] * k[c] for c in range(rope.d_head) if c not in rotated)
    return out, rest


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attention_factor", [1.0, 1.3])
def test_curve_equals_loops(shape, attention_factor):
    captured = with_rope(random_capture(**SHAPES[shape]), attention_factor=attention_factor)
    record = captured.layer(5)
    for query, key in {(record.n_pos - 1, 0), (0, 0), (0, record.n_pos - 1)}:
        curve = distance_curve(captured, 5, 3, query, key)
        wanted = {*range(record.rope.context + 1), max(query - key, 0)}
        assert curve.distance.tolist() == sorted(wanted)
        expected, rest = looped_curve(record, 3, query, key, curve.distance)
        np.testing.assert_allclose(curve.contribution, expected, rtol=1e-9, atol=1e-9)
        assert curve.pass_through == pytest.approx(rest, abs=1e-9)
        np.testing.assert_allclose(curve.total, expected.sum(1) + rest, rtol=1e-9, atol=1e-9)
        at, rest = looped_curve(record, 3, query, key, [query - key])
        np.testing.assert_allclose(curve.actual_contribution, at[0], rtol=1e-9, atol=1e-9)
        assert curve.score == pytest.approx(at.sum() + rest, abs=1e-9)
        assert curve.actual == query - key


@pytest.mark.parametrize("shape", [name for name in SHAPES if "token" not in name])
def test_total_at_the_actual_distance_is_the_score(shape):
    captured = random_capture(**SHAPES[shape])
    at = decompose(captured, 5, 2).at(20, 16)
    curve = distance_curve(captured, 5, 2, 20, 16)
    assert curve.total[4] == pytest.approx(at.score, rel=1e-5)
    np.testing.assert_allclose(curve.contribution[4], at.contribution, rtol=1e-5, atol=1e-5)
    assert curve.score == pytest.approx(curve.total[4], abs=1e-12)
    assert (curve.query_token, curve.key_token) == ("t20", "t16")


def assert_other_places_agree(captured, n_layers):
    """The curve of two tokens goes through the scores of the same tokens wherever they stand."""
    tokens = captured.prompts[0].token_ids
    last = len(tokens) - 1
    for layer in range(n_layers):
        heads = captured.layer(layer).n_heads
        scores = [decompose(captured, layer, head).scores() for head in range(heads)]
        size = np.nanmax(np.abs(scores))
        assert size > 1, "scores too small for a wrong rotation to show"
        for head, key in [(0, 0), (heads - 1, last - 3)]:
            curve = distance_curve(captured, layer, head, last, key, distances=range(len(tokens)))
            found = 0
            for m, n in np.argwhere(np.isfinite(scores[head])):
                is_same = (tokens[m], tokens[n]) == (tokens[last], tokens[key])
                if (m, n) == (last, key) or (layer == 0 and is_same):
                    difference = abs(curve.total[m - n] - scores[head][m, n])
                    assert difference < 2e-5 * size, (layer, head, m, n)
                    found += 1
            window = captured.layer(layer).rope.window
            assert found >= (10 if layer == 0 else window is None or last - key < window)
            if window is None or last - key < window:
                assert abs(curve.score - scores[head][last, key]) < 1e-5 * size


@pytest.mark.parametrize("name", NAMES)
def test_curve_goes_through_the_scores_of_every_architecture(name):
    captured = capture(zoo.bridge(name), 4 + zoo.tokens(40) % 2)
    assert_other_places_agree(captured, len(captured.layer_indices))


@needs_hooked
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"n_key_value_heads": 2},
        {"rotary_dim": 8},
        {"rotary_adjacent_pairs": True},
        {"attn_scores_soft_cap": 2.0},
        {"use_attention_sinks": True},
        {"use_local_attn": True, "window_size": 16, "attn_types": ["local", "global"]},
    ],
    ids=["plain", "grouped", "partial", "adjacent", "soft-cap", "learned sinks", "window"],
)
def test_curve_goes_through_the_scores_of_hooked_models(overrides):
    captured = capture(zoo.hooked(**overrides), 4 + zoo.tokens(40) % 2)
    assert_other_places_agree(captured, 2)


def test_total_is_what_the_models_own_hook_shows(host_model):
    tokens = zoo.tokens(30)
    captured = capture(host_model, tokens)
    _, cache = host_model.run_with_cache(tokens)
    for layer in (0, 1):
        scores = cache[f"blocks.{layer}.attn.hook_attn_scores"][0].detach().double().numpy()
        for head, query, key in [(0, 29, 0), (1, 17, 17), (3, 20, 13)]:
            curve = distance_curve(captured, layer, head, query, key)
            size = np.abs(scores[head][np.tril_indices(30)]).max()
            assert abs(curve.total[query - key] - scores[head, query, key]) < 1e-5 * size


def test_window_is_where_the_curve_ends():
    curve = distance_curve(random_capture(window=6), 5, 0, 5, 3)
    assert curve.distance.tolist() == list(range(7))


def test_key_that_is_not_seen_is_taken_as_it_is():
    captured = random_capture(window=6)
    hidden = distance_curve(captured, 5, 0, 20, 3)
    # The distance in the prompt is among the distances though it is beyond the window.
    assert hidden.distance.tolist() == [*range(7), 17]
    later = distance_curve(captured, 5, 0, 3, 20)
    assert later.actual == -17 and later.distance.tolist() == list(range(7))
    assert "distance -17 in the prompt" in repr(later)


def test_long_context_is_sampled_evenly_in_log():
    context = 4 * MAX_ALL_DISTANCES
    captured = with_rope(random_capture(n_pos=23), trained_context=context)
    distance = distance_curve(captured, 5, 0, 22, 1).distance
    assert distance[:257].tolist() == list(range(257)) and distance[-1] == context
    assert 2000 < len(distance) < 2300
    steps = np.diff(np.log(distance[distance > 2048]))
    assert steps.max() < 2 * steps.min()
    whole = with_rope(random_capture(), trained_context=MAX_ALL_DISTANCES)
    assert len(distance_curve(whole, 5, 0, 22, 1).distance) == MAX_ALL_DISTANCES + 1


def test_given_distances_are_kept():
    captured = random_capture()
    curve = distance_curve(captured, 5, 1, 9, 2, distances=[300, 7, 0])
    assert curve.distance.tolist() == [300, 7, 0]
    expected, _ = looped_curve(captured.layer(5), 1, 9, 2, [300, 7, 0])
    np.testing.assert_allclose(curve.contribution, expected, rtol=1e-9, atol=1e-9)
    assert curve.total[1] == pytest.approx(curve.score)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: distance_curve(c, 4, 0, 3, 2), "layer 4 was not captured"),
        (lambda c: distance_curve(c, 5, 4, 3, 2), "head 4 is out of range"),
        (lambda c: distance_curve(c, 5, 0, 23, 2), "query 23 is out of range; there are 23"),
        (lambda c: distance_curve(c, 5, 0, 3, -1), "key -1 is out of range"),
        (lambda c: distance_curve(c, 5, 0, 3, 2, prompt=1), "prompt 1 is out of range"),
        (lambda c: distance_curve(c, 5, 0, 3, 2, distances=[]), "distances is empty"),
        (lambda c: distance_curve(c, 5, 0, 3, 2, distances=[1, -1]), "distance -1 is no distance"),
        (lambda c: distance_curve(c, 5, 0, 3, 2, distances=[1.5]), "distance 1.5 is no distance"),
        (lambda c: distance_curve(c, 5, 0, 3, 2).plot([4]), "pair 4 is out of range; there are 4"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(InputError, match=message):
        call(random_capture())


def test_table_and_text():
    curve = distance_curve(random_capture(), 5, 1, 9, 2)
    table = curve.to_dataframe()
    assert table.columns.tolist() == [
        "distance", "total", "pass_through", *[f"pair_{i}" for i in range(4)]
    ]  # fmt: skip
    parts = table.filter(like="pair_").sum(axis=1) + table["pass_through"]
    np.testing.assert_allclose(parts, table["total"])
    text = repr(curve)
    assert "query 9 ('t9') and key 2 ('t2') of layer 5 head 1, distance 7 in the prompt" in text
    assert f"score {curve.score:.4f}" in text
    ranges = np.ptp(curve.contribution, axis=0)
    assert curve.largest_pairs(2) == np.argsort(-ranges)[:2].tolist()
    without = distance_curve(random_capture(rotary_dim=0), 5, 1, 9, 2)
    assert np.ptp(without.total) == 0 and "in the prompt" in repr(without)


def lines(fig):
    return {trace.name: trace for trace in fig.data if trace.fill is None}


def test_figure_shows_the_curve():
    captured = random_capture()
    curve = distance_curve(captured, 5, 1, 9, 2)
    shown = lines(curve.plot())
    assert set(shown) == {
        "in the prompt (distance 7)", "total", *[f"pair {i}" for i in range(4)]
    }  # fmt: skip
    # Near distances have a bin each: there the line is the curve itself.
    assert shown["total"].x[0] == 0.5
    np.testing.assert_allclose(shown["total"].x[1:20], np.arange(1, 20))
    np.testing.assert_allclose(shown["total"].y[:20], curve.total[:20], rtol=1e-6)
    np.testing.assert_allclose(shown["pair 2"].y[:20], curve.contribution[:20, 2], rtol=1e-6)
    assert shown["pair 2"].line.color == pair_color(2)
    assert shown["total"].line.color == INK["light"] and shown["total"].meta == "ink"
    mark = shown["in the prompt (distance 7)"]
    assert (mark.x[0], mark.y[0]) == (7, pytest.approx(curve.score))
    assert set(lines(curve.plot([3]))) == {"in the prompt (distance 7)", "total", "pair 3"}


def test_far_distances_are_drawn_as_bands_from_lowest_to_highest():
    captured = with_rope(random_capture(), trained_context=4000)
    curve = distance_curve(captured, 5, 1, 9, 2)
    fig = curve.plot([0])
    line, band = lines(fig)["pair 0"], next(t for t in fig.data if t.fill and "pair 0" in t.name)
    assert len(line.x) < 260
    # The last bin, by hand: distances above its lower edge.
    edges = np.geomspace(1, 4000, 241)
    values = curve.contribution[np.arange(4001) >= edges[-2] - 1e-6, 0]
    assert line.y[-1] == pytest.approx(values.mean(), rel=1e-5)
    middle = len(band.y) // 2
    assert band.y[middle - 1] == pytest.approx(values.max(), rel=1e-5)
    assert band.y[middle] == pytest.approx(values.min(), rel=1e-5)


def test_figure_does_not_depend_on_the_order_of_distances():
    captured = random_capture()
    sorted_, mixed = (
        distance_curve(captured, 5, 1, 9, 2, distances=d).plot([1]).to_json()
        for d in ([0, 3, 8, 40], [8, 0, 40, 3])
    )
    assert sorted_ == mixed


@pytest.mark.parametrize("distances", [[5], [3, 90], [0], None])
def test_figure_keeps_its_marks_on_the_axis(distances):
    for query, key in [(9, 2), (9, 9), (2, 9)]:
        fig = distance_curve(random_capture(), 5, 1, query, key, distances=distances).plot()
        low, high = fig.layout.xaxis.range
        points = np.log10(np.concatenate([trace.x for trace in fig.data]))
        assert low < points.min() and points.max() < high
        has_mark = any("in the prompt" in trace.name for trace in fig.data)
        assert has_mark == (query >= key)
