"""The demo model gives the same exact numbers on every host, and those of an earlier measurement.

The golden numbers are this package's own on one host (see `golden`), so they tell hosts and
versions apart; the literal ones were measured by independent code on the same text.
"""

import golden
import numpy as np
import pytest
from conftest import needs_hooked

import lens_rope as lr
from lens_rope.sinks import SINK_THRESHOLD, head_shares, sink_shares

pytestmark = [pytest.mark.demo, pytest.mark.slow]


@pytest.fixture(scope="module", params=[pytest.param("hooked", marks=needs_hooked), "bridge"])
def captured(request):
    model = lr.load_model("smollm2-135m", backend=request.param)
    return lr.capture(model, golden.text(), max_tokens=golden.N_TOKENS)


def test_scores_are_the_models_own(captured):
    assert captured.layer_indices == tuple(range(30))
    assert captured.max_relative_error <= 1e-5
    table = captured.verification()
    assert (table["norm_error"] <= 1e-5).all() and (table["angle_error"] <= 1e-5).all()
    assert (table["route"] == "hook_rot").all()


def test_rotation_is_that_of_the_model(captured):
    for rope in captured.rope().layers:
        np.testing.assert_allclose(rope.inv_freq, 100000.0 ** (-np.arange(32) / 32), rtol=1e-6)
        assert (rope.pairing, rope.rotary_dim, rope.attention_factor) == ("half", 64, 1.0)
        assert (rope.window, rope.context) == (None, 8192)


def test_tokens_start_as_measured(captured):
    prompt = captured.prompts[0]
    assert prompt.token_ids[:6] == (1, 42185, 28807, 35185, 49126, 35696)
    assert prompt.starts_with_bos


def test_sinks_are_as_measured(captured):
    first_key = np.array(
        [[sink_shares(record, head)[0] for head in range(9)] for record in captured.records[0]]
    )
    is_sink = first_key > SINK_THRESHOLD
    assert abs(is_sink.sum() - 141) <= 3
    assert np.flatnonzero(is_sink.any(axis=1))[0] == 12
    assert first_key[27, 7] == pytest.approx(0.72, rel=0.02)


def test_previous_token_head_is_as_measured(captured):
    assert head_shares(captured.layer(16)).previous_share[0] == pytest.approx(0.74, rel=0.02)


@pytest.mark.parametrize("name", sorted(golden.load()))
def test_hosts_agree(captured, name):
    expected, got = golden.load()[name], golden.summary(captured)[name]
    # Relative to the largest value of the same head and position, or layer.
    size = np.abs(expected).max(axis=-1, keepdims=True)
    assert (np.abs(got - expected) <= 1e-4 * size).all()
