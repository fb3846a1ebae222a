"""The table of a figure is what the results hold: no words, logarithms or colours for numbers."""

from __future__ import annotations

import numpy as np
import pytest
from planted import named_heads, planted_capture
from report_fixtures import random_capture, report_data, rope

from lens_rope.spectrum import KeySpectrum
from lens_rope.views import (
    figures,
    offset_figures,
    pattern_figures,
    rope_figures,
    sink_figures,
    spectrum_figures,
)
from lens_rope.views.downloads import add_table
from lens_rope.views.layout import figure

ROPES = (rope(0), rope(1, rotary_dim=8), rope(2, rotary_dim=0), rope(3, window=16))


def unpacked(fig) -> dict[str, list]:
    out = {}
    for name, column in fig.layout.meta["table"].items():
        if isinstance(column, dict):
            column = np.asarray(column["levels"])[np.asarray(column["codes"])]
        out[name] = np.asarray(column).tolist()
    return out


@pytest.fixture(scope="module")
def data():
    return report_data(random_capture(ROPES, n_pos=70), heads=())


@pytest.fixture(scope="module")
def planted():
    return report_data(planted_capture(list(named_heads(96).values())), heads=())


def test_a_table_comes_back_as_it_was():
    columns = {
        "numbers": [1.5, np.nan, -2.0, 1e-9],
        "counts": [1, 2, 3, -4],
        "words": ["a", "b,c", "", "é"],
        "flags": [True, False, True, True],
        "same": 7,
    }
    found = unpacked(add_table(figure(height=100, label="a label"), "title", columns))
    assert list(found) == list(columns)
    np.testing.assert_allclose(found["numbers"], columns["numbers"], rtol=1e-7)
    assert found["counts"] == columns["counts"]
    assert found["words"] == columns["words"]
    assert found["flags"] == ["yes", "no", "yes", "yes"]
    assert found["same"] == [7] * 4


def test_columns_that_repeat_are_stored_once():
    values = np.repeat(np.array([3.0, np.nan, 1.0]), 40)
    fig = add_table(figure(height=100, label="a label"), "title", {"v": values})
    assert len(fig.layout.meta["table"]["v"]["levels"]) == 3
    np.testing.assert_array_equal(unpacked(fig)["v"], values)


def test_columns_of_different_length_are_refused():
    with pytest.raises(ValueError, match="column b"):
        add_table(figure(height=100, label="a label"), "t", {"a": [1, 2, 3], "b": [1, 2]})


def test_an_empty_table_has_its_columns():
    found = unpacked(add_table(figure(height=100, label="a label"), "t", {"a": [], "b": []}))
    assert found == {"a": [], "b": []}


def test_maps_of_pairs_leave_out_what_a_layer_has_not(data):
    found = unpacked(figures.usage_map(ROPES, data.usage, "both", relative=True))
    values = np.reshape(found["query_and_key_magnitude_over_layer_median"], (4, 8))
    both = np.sqrt(np.asarray(data.usage[3].query) * np.asarray(data.usage[3].key))
    np.testing.assert_allclose(values[3], both / np.median(both), rtol=1e-6)
    assert np.isnan(values[1, 4:]).all()
    assert np.isnan(values[2]).all()
    np.testing.assert_allclose(found["cycles_over_context"][-8:], ROPES[3].cycles, rtol=1e-6)


def test_components_name_their_pair(data):
    found = unpacked(offset_figures.component_map([e.offsets for e in data.layers], "key"))
    pair = np.reshape(found["pair"], (4, 16))
    assert pair[0].tolist() == [*range(8), *range(8)]
    assert pair[1, :8].tolist() == [*range(4), *range(4)]
    assert np.isnan(pair[1, 8:]).all()
    assert np.isnan(pair[2]).all()
    largest = data.layers[0].offsets.key.component_largest
    name = "largest_absolute_value_activation_units"
    np.testing.assert_allclose(np.reshape(found[name], (4, 16))[0], largest, rtol=1e-6)


def test_bounds_are_in_radians(data):
    table = data.bounds.table
    found = unpacked(offset_figures.bounds_plot(data.bounds))
    np.testing.assert_allclose(found["angle_rad"], table["angle"], rtol=1e-6)
    np.testing.assert_allclose(found["turn_over_context_rad"], table["turn"], rtol=1e-6)


def test_sinks_are_in_score_units_and_shares(planted):
    heads = planted.sinks
    found = unpacked(sink_figures.removal_dots(heads))
    np.testing.assert_allclose(found["sink_share"], [h.share for h in heads], rtol=1e-6)
    np.testing.assert_allclose(
        found["sink_share_without_best_pair"], [h.share_without_best for h in heads], rtol=1e-6
    )
    found = unpacked(sink_figures.sink_pairs(heads))
    n = heads[0].rope.n_pairs
    np.testing.assert_allclose(
        found["advantage_score_units"][:n], heads[0].advantage.pairs, rtol=1e-5
    )


def test_heads_keep_their_four_shares(planted):
    found = unpacked(pattern_figures.offset_share_map(planted.heads))
    shares = np.array([found[name] for name in list(found)[2:]])
    expected = np.array([head.offset_shares for head in planted.heads]).T
    np.testing.assert_allclose(shares, expected, rtol=1e-6)
    sums = shares.sum(axis=0)
    np.testing.assert_allclose(sums[np.isfinite(sums)], 1, atol=1e-5)
    found = unpacked(pattern_figures.pattern_map(planted.heads))
    assert found["pattern"] == [head.pattern for head in planted.heads]


def test_histograms_count_every_eigenvalue(data):
    spectrum = KeySpectrum(data.model, data.spectra, 70, ())
    found = unpacked(spectrum_figures.spectrum_histogram(spectrum))
    rows = list(zip(found["side"], found["bins"], found["eigenvalues"], strict=True))
    for side in ("before RoPE", "after RoPE"):
        counted = sum(n for name, bins, n in rows if (name, bins) == (side, "whole range"))
        assert counted == sum(len(entry.pre.eigenvalues) for entry in data.spectra)


def test_cycles_and_cosines_are_those_of_the_rotation():
    found = unpacked(rope_figures.cycles_curve(ROPES))
    assert set(found["layers"]) == {"0", "1", "3"}
    np.testing.assert_allclose(found["w_rad_per_token"][:8], ROPES[0].inv_freq, rtol=1e-6)
    found = unpacked(rope_figures.rotation_strips(ROPES[0], n_bins=10))
    assert len(found["mean_cosine"]) == 80
    # The slowest pair has not turned at the nearest distance.
    assert found["mean_cosine"][70] == pytest.approx(1, abs=1e-3)
