"""A report on the demo model says what independent code measured on the same text.

The expected numbers were measured once by a prototype that shares no code with this package:
HookedTransformer of transformer-lens 3.9.0, float32, no weight processing, the first T tokens (BOS
included) of `data/gpl-3.0.txt`; offsets over tokens 1 and up. Counts hold within 3, other numbers
within 2 %.
"""

import math

import golden
import numpy as np
import pytest

import lens_rope as lr

pytestmark = [pytest.mark.demo, pytest.mark.slow]

WITHIN = 0.02


@pytest.fixture(scope="module")
def model():
    return lr.load_model("smollm2-135m")


@pytest.fixture(scope="module")
def content(model):
    """`report.json` at T = 512."""
    return lr.report(model, golden.text(), max_tokens=512).to_dict()


@pytest.fixture(scope="module")
def sinks(content):
    return {(sink["layer"], sink["head"]): sink for sink in content["sinks"]["heads"]}


def test_sink_heads(sinks):
    first_key = [sink for sink in sinks.values() if sink["position"] == 0]
    assert abs(len(first_key) - 141) <= 3
    assert min(sink["layer"] for sink in first_key) == 12


def test_one_pair_makes_a_sink(sinks):
    head = sinks[27, 7]
    assert head["sink_share"] == pytest.approx(0.72, rel=WITHIN)
    assert head["frequencies"][0]["share_after_removal"] == pytest.approx(0.02, abs=0.002)
    collapsed = [s["frequencies"][0]["share_after_removal"] < 0.1 for s in sinks.values()]
    assert np.mean(collapsed) == pytest.approx(0.96, rel=WITHIN)
    assert all(s["control_share"] > 0.5 * s["sink_share"] for s in sinks.values())


def test_loss_without_these_pairs(content):
    done = content["ablation"]
    assert done["loss_before"] == pytest.approx(3.00, rel=WITHIN)
    assert done["loss_after"] == pytest.approx(3.88, rel=WITHIN)
    # Random pairs differ from draw to draw; their median does not leave what was measured.
    assert 3.02 * (1 - WITHIN) <= np.median(done["loss_controls"]) <= 3.10 * (1 + WITHIN)


def test_offset_features_and_bounds(content):
    bounds = content["bounds"]
    assert abs(bounds["features"] - 274) <= 3
    assert bounds["within_half_cycle"] == pytest.approx(0.996, rel=WITHIN)
    assert bounds["base_rate_half_cycle"] == pytest.approx(0.31, rel=WITHIN)
    assert bounds["positive_angle"] == pytest.approx(0.98, rel=WITHIN)


def test_a_positional_head(content):
    head = next(h for h in content["heads"] if (h["layer"], h["head"]) == (16, 0))
    assert head["pattern"] == "previous token"
    assert head["previous_share"] == pytest.approx(0.74, rel=WITHIN)
    assert head["offset_shares"]["offset_offset"] == pytest.approx(0.93, rel=WITHIN)


@pytest.mark.parametrize(
    ("layer", "head", "pair", "amplitude", "angle", "turn"),
    [(27, 7, 23, 24.2, 0.54, 0.66), (19, 3, 23, 23.8, 0.55, None), (16, 0, 25, 20.6, 0.68, None)],
)
def test_strongest_offset_features(model, layer, head, pair, amplitude, angle, turn):
    qk = lr.capture(model, golden.text(), [layer], max_tokens=1024)
    features = lr.offset_features(qk).features().query("head == @head")
    strongest = features.iloc[0]
    assert strongest["pair"] == pair
    assert strongest["amplitude"] == pytest.approx(amplitude, rel=WITHIN)
    assert strongest["angle"] / math.pi == pytest.approx(angle, rel=WITHIN)
    if turn is not None:
        assert 2 * strongest["cycles"] == pytest.approx(turn, rel=WITHIN)


def test_key_spectrum(model):
    spectrum = lr.key_spectrum(lr.capture(model, golden.text(), max_tokens=2048))
    assert abs(spectrum.layer(0).pre.rank90 - 8) <= 3
    assert abs(spectrum.layer(0).post.rank90 - 52) <= 3
    assert spectrum.near_zero("pre", 0.5) == pytest.approx(0.71, rel=WITHIN)
    assert spectrum.near_zero("post", 0.5) == pytest.approx(0.45, rel=WITHIN)
