"""Figures of key spectra show the eigenvalues of the result, in the page's colours."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from test_decompose import random_capture
from test_spectrum import layered

from lens_rope.errors import InputError
from lens_rope.spectrum import KeySpectrum, LayerSpectrum, Spectrum, key_spectrum
from lens_rope.views.colors import GRID, INK
from lens_rope.views.spectrum_figures import (
    AFTER,
    BEFORE,
    INSET_BOTTOM,
    INSET_TOP,
    rank_curve,
    spectrum_histogram,
)
from lens_rope.words import number, percent


@pytest.fixture(scope="module")
def spectrum() -> KeySpectrum:
    return key_spectrum(layered((1, 2, 4)))


def histogram(*args: Any) -> Any:
    return spectrum_histogram(*args)


def curve(spectrum: KeySpectrum) -> Any:
    return rank_curve(spectrum)


def known(pre, post, n_tokens=1000) -> KeySpectrum:
    """A spectrum of one layer with these eigenvalues."""
    sides = [Spectrum(np.array(v), float(np.sum(v)), 0.0, n_tokens) for v in (pre, post)]
    model = random_capture().model
    return KeySpectrum(model, (LayerSpectrum(0, sides[0], sides[1], ()),), n_tokens, ())


@pytest.mark.parametrize("layers", [None, [4], [1, 2]])
def test_bars_count_the_eigenvalues(spectrum, layers):
    fig = histogram(spectrum, layers)
    assert len(fig.data) == 4
    for side, main, inset in (("pre", *fig.data[:2]), ("post", *fig.data[2:])):
        values = spectrum.eigenvalues(side, layers)
        assert sum(main.y) == len(values)
        assert sum(inset.y) == (values <= INSET_TOP).sum()
        for bars in (main, inset):
            assert bars.x[0] == pytest.approx(bars.width[0] / 2)
            for x, width, y in list(zip(bars.x, bars.width, bars.y, strict=True))[:-1]:
                inside = (values >= x - width / 2 - 1e-12) & (values < x + width / 2 - 1e-12)
                assert y == inside.sum()
        assert inset.width[0] < main.width[0]
        assert (main.xaxis, main.yaxis) == ("x", "y")
        assert (inset.xaxis, inset.yaxis) == ("x2", "y2")


def test_one_colour_and_one_entry_in_the_legend_for_each_side(spectrum):
    fig = histogram(spectrum)
    assert [bars.marker.color for bars in fig.data] == [BEFORE, BEFORE, AFTER, AFTER]
    assert [bars.showlegend for bars in fig.data] == [True, False, True, False]
    assert all(0 < bars.marker.opacity < 1 for bars in fig.data)
    assert fig.layout.barmode == "overlay"
    for bars, side, name in ((fig.data[0], "pre", "before"), (fig.data[2], "post", "after")):
        median, near = spectrum.median(side), spectrum.near_zero(side)
        assert bars.name == f"{name} RoPE: median {number(median)}, {percent(near)} below 0.5"
    lines = [trace.line.color for trace in curve(spectrum).data]
    assert lines == [BEFORE, AFTER]


def test_numbers_are_those_of_the_layers_shown(spectrum):
    fig = histogram(spectrum, [4])
    assert f"median {number(spectrum.layer(4).pre.median)}," in fig.data[0].name
    assert f"{percent(spectrum.layer(4).post.near_zero())} below" in fig.data[2].name
    assert "layers 4," in fig.layout.meta["label"]


def test_axes_are_of_the_page(spectrum):
    """A page gives every axis its grid colour anew and text its ink; nothing else holds either."""
    fig = histogram(spectrum)
    for name in ("xaxis", "yaxis", "xaxis2", "yaxis2"):
        for line in ("gridcolor", "zerolinecolor", "linecolor", "tickcolor"):
            assert fig.layout[name][line] == GRID["light"]
    assert fig.layout.font.color == INK["light"]
    assert fig.to_json().count(INK["light"]) == 1
    assert fig.layout.yaxis.type == "log"
    assert fig.layout.yaxis2.type is None
    assert "units²" in fig.layout.xaxis.title.text
    for drawn in (fig, curve(spectrum)):
        assert len(drawn.layout.meta["label"]) > 20
        assert drawn.layout.paper_bgcolor == "#ffffff"
        assert drawn.layout.plot_bgcolor == "rgba(0,0,0,0)"
        assert drawn.layout.width is None


def test_no_bar_reaches_the_inset():
    """As many large eigenvalues as small ones: all bars are of one height."""
    flat = np.linspace(90, 0, 6000)
    fig = histogram(known(flat, flat))
    low, high = fig.layout.yaxis.range
    heights = (np.log10(np.asarray(fig.data[0].y, float)) - low) / (high - low)
    assert 0.2 < heights.max() < INSET_BOTTOM - 0.1
    assert low < 0  # or a bar of one eigenvalue would have no height


def test_bars_reach_up_where_the_inset_is_not(spectrum):
    values = [50.0, *np.full(999, 0.01)]
    fig = histogram(known(values, values))
    low, high = fig.layout.yaxis.range
    assert (3 - low) / (high - low) > 0.8


def test_large_values_lie_within_the_axis(spectrum):
    fig = histogram(known([700.0, 1.0], [300.0, 0.0]))
    assert list(fig.layout.xaxis.range) == [0, 700]
    assert fig.data[0].y[-1] == 1
    small = histogram(known([0.0, 0.0], [0.0, 0.0]))
    assert list(small.layout.xaxis.range) == [0, INSET_TOP]


def test_too_few_tokens_are_said_in_the_figure():
    few = key_spectrum(random_capture(n_pos=20))
    fig = histogram(few)
    assert fig.data[0].name == "before RoPE: median no value, no value below 0.5"
    assert sum(fig.data[0].y) == 24
    assert json.loads(curve(few).to_json())["data"][0]["y"] == [None]


def test_rank_curve_is_the_table(spectrum):
    fig, table = curve(spectrum), spectrum.to_dataframe()
    for trace, side in zip(fig.data, ("pre", "post"), strict=True):
        assert list(trace.x) == [1, 2, 4]
        assert list(trace.y) == table[f"rank90_{side}"].tolist()
        assert trace.customdata[0][0] == 24
        assert "layer %{x}" in trace.hovertemplate


def test_plot_is_the_histogram_and_the_same_bytes_every_time(spectrum):
    for layers in (None, [2]):
        assert spectrum.plot(layers).to_json() == spectrum_histogram(spectrum, layers).to_json()
    with pytest.raises(InputError, match="layer 3 has no spectrum"):
        spectrum.plot([3])


def test_hover_tells_the_bin(spectrum):
    bars = histogram(spectrum).data[1]
    assert list(bars.customdata[1]) == ["0.0333", "0.0667"]
    assert "%{y} eigenvalues from %{customdata[0]} to %{customdata[1]}" in bars.hovertemplate
    assert bars.hovertemplate.startswith("before RoPE")
