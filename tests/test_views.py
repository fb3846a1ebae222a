"""Views show what the results hold: every figure's numbers are the results' numbers, a missing
value is drawn as missing, and no token can break a page or look like another."""

from __future__ import annotations

import itertools
import json
import math
import re

import numpy as np
import pytest
from report_fixtures import HOSTILE, random_capture, rope

from lens_rope.decomposition import decompose
from lens_rope.errors import InputError
from lens_rope.sinks import SINK_THRESHOLD, head_shares
from lens_rope.spec import ranges
from lens_rope.usage import pair_usage
from lens_rope.views import figures, rope_figures
from lens_rope.views.colors import SCALES, pair_color
from lens_rope.views.head_figures import distance_curves, pair_bars, strongest_pairs
from lens_rope.views.libraries import circuitsvis_js
from lens_rope.views.tokens import display_html, display_text
from lens_rope.words import number, percent

MIXED = (rope(0), rope(1, rotary_dim=8), rope(2, rotary_dim=0), rope(3, window=16))


@pytest.fixture(scope="module")
def qk():
    return random_capture(MIXED)


@pytest.fixture(scope="module")
def usage(qk):
    return [pair_usage(record) for record in qk.records[0]]


@pytest.fixture(scope="module")
def shares(qk):
    return [head_shares(record) for record in qk.records[0]]


# Tokens


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("a\n\n\t<b> é 💩", "a↵↵⇥<b>·é·💩"),
        ("", "∅"),
        (" ", "·"),
        ("\r\n", "␍↵"),
        ("\x00", "\\x00"),
        ("\u202eabc", "\\u202eabc"),
        ("\u00a0", "\\xa0"),
        ("\ud83d", "\\ud83d"),
        ("\u0301", "◌\u0301"),
        ("👩\u200d🚀", "👩\u200d🚀"),
        ("\u200d", "\\u200d"),
        ("·", "\\xb7"),
    ],
)
def test_a_token_is_visible_on_one_line(token, shown):
    assert display_text(token) == shown
    assert len(display_text(token).splitlines()) == 1
    display_text(token).encode()  # can be written


def test_different_tokens_look_different():
    tokens = [*HOSTILE, "·", "↵", "\n", "\t", "⇥", "\r", "␍", "∅", "\u200b", "\u2060", "  "]
    assert len({display_text(token) for token in tokens}) == len(set(tokens))


def test_html_of_a_token_holds_no_markup():
    assert display_html("<b> &\"'") == "&lt;b&gt;·&amp;&quot;&#x27;"


def test_circuitsvis_bundle_is_safe_and_alone():
    code = circuitsvis_js()
    # Neither ends the script element nor, as `<!--` before `<script` would, keeps it from ending.
    assert "</script" not in code.lower()
    assert "<!--" not in code
    assert "sourceMappingURL" not in code
    assert code.endswith("})();")
    assert len(code) > 1_000_000


# Colours


def test_scales_of_signed_values_are_centred_on_zero():
    for mode in ("light", "dark"):
        stops = dict(SCALES[mode]["diverging"])
        assert 0.5 in stops
        red, green, blue = (int(stops[0.5][i : i + 2], 16) for i in (1, 3, 5))
        assert max(red, green, blue) - min(red, green, blue) <= 10  # no hue at zero


def test_a_pair_has_one_colour_and_neighbours_differ():
    colors = [pair_color(i) for i in range(128)]
    assert all(re.fullmatch("#[0-9a-f]{6}", color) for color in colors)
    assert len(set(colors)) == 128

    def rgb(color):
        return np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)])

    near = [np.abs(rgb(a) - rgb(b)).sum() for a, b in itertools.pairwise(colors)]
    assert min(near) > 80


# Figures


def values_of(trace) -> np.ndarray:
    return np.asarray(trace.z, dtype=np.float64)


def test_usage_map_shows_the_usage(usage):
    fig = figures.usage_map(MIXED, usage, "key")
    z = values_of(fig.data[0])
    np.testing.assert_allclose(10 ** z[0], usage[0].key, rtol=1e-5)
    np.testing.assert_allclose(10 ** z[1, :4], usage[1].key, rtol=1e-5)
    assert np.isnan(z[1, 4:]).all()
    assert np.isnan(z[2]).all()
    assert "activation units" in fig.layout.coloraxis.colorbar.title.text
    hover = fig.data[0].hovertemplate
    for part in ("layer", "pair", "wavelength", "tokens", "activation units"):
        assert part in hover
    assert fig.data[0].customdata[3][0][0] == 3  # the row's layer
    assert fig.data[0].text[0][0] == number(usage[0].key[0])


def test_missing_cells_are_a_trace_of_their_own(usage, shares):
    fig = figures.usage_map(MIXED, usage, "query")
    missing = fig.data[1]
    assert missing.name == "no value"
    expected = np.zeros((4, 8), bool)
    expected[1, 4:] = expected[2] = True
    np.testing.assert_array_equal(values_of(missing) == 1, expected)
    assert [list(row) for row in missing.text] == [["×" if m else "" for m in r] for r in expected]
    assert missing.colorscale[0][1] not in {c for _, c in SCALES["light"]["sequential"]}
    complete = figures.share_map(shares, "sink")
    assert [trace.name for trace in complete.data] == [None]


def test_relative_usage_is_centred_on_the_layers_median(usage):
    fig = figures.usage_map(MIXED, usage, "both", relative=True)
    axis = fig.layout.coloraxis
    assert axis.cmin == -axis.cmax
    assert axis.cmid == 0
    both = np.sqrt(usage[0].query * usage[0].key)
    np.testing.assert_allclose(2 ** values_of(fig.data[0])[0], both / np.median(both), rtol=1e-5)
    assert fig.layout.meta["scales"] == {"coloraxis": "diverging"}


def test_the_dashed_line_is_where_partial_cycles_begin(usage):
    fig = figures.usage_map(MIXED, usage, "key")
    line = next(trace for trace in fig.data if trace.type == "scatter")
    at = dict(zip(line.y, line.x, strict=True))
    assert at[-0.5] == int((MIXED[0].cycles >= 1).sum()) - 0.5
    assert at[3.5] == int((MIXED[3].cycles >= 1).sum()) - 0.5
    assert at[3.5] != at[-0.5]  # the windowed layer has a border of its own


def test_usage_of_other_layers_is_refused(usage):
    with pytest.raises(InputError, match="different layers"):
        figures.usage_map(MIXED[:2], usage, "key")


def test_share_map_marks_the_heads_above_the_threshold(shares):
    fig = figures.share_map(shares, "sink", threshold=SINK_THRESHOLD)
    values = np.array([entry.sink_share for entry in shares])
    np.testing.assert_allclose(values_of(fig.data[0]), values, rtol=1e-6)
    marks = fig.data[-1]
    assert set(zip(marks.y, marks.x, strict=True)) == set(
        zip(*np.nonzero(values > SINK_THRESHOLD), strict=True)
    )
    assert (fig.layout.coloraxis.cmin, fig.layout.coloraxis.cmax) == (0, 1)


def test_cycles_are_those_of_the_rotation():
    fig = rope_figures.cycles_curve(MIXED)
    curves = {trace.name: trace for trace in fig.data}
    assert set(curves) == {"layers 0", "layers 1", "layers 3"}
    np.testing.assert_allclose(curves["layers 3"].y, MIXED[3].cycles, rtol=1e-6)
    assert fig.layout.yaxis.type == "log"
    assert list(curves["layers 0"].marker.color) == [pair_color(i) for i in range(8)]
    z = values_of(rope_figures.cycles_map(MIXED).data[0])
    np.testing.assert_allclose(10 ** z[0], MIXED[0].cycles, rtol=1e-5)


def test_layers_that_rotate_alike_are_one_group():
    ropes = (rope(0), rope(1), rope(2, window=16), rope(3), rope(4, attention_factor=1.2))
    assert [layers for layers, _ in rope_figures.rope_groups(ropes)] == ["0-1, 3", "2", "4"]


def test_rotation_strips_are_the_mean_cosine_of_each_bin():
    r = rope(0)
    fig = rope_figures.rotation_strips(r, n_bins=12)
    edges = np.geomspace(1, r.context, 13)
    fine = [np.linspace(a, b, 20001) for a, b in itertools.pairwise(edges)]
    expected = [[np.cos(w * x).mean() for x in fine] for w in r.inv_freq]
    np.testing.assert_allclose(values_of(fig.data[0]), expected, atol=1e-3)
    with pytest.raises(InputError, match="no rotary pairs"):
        rope_figures.rotation_strips(rope(0, rotary_dim=0))


def test_bars_and_curves_are_the_decomposition(qk):
    split = decompose(qk, 1, 2)
    summary, profile = split.by_pair(), split.by_distance()
    bars = pair_bars(summary, MIXED[1])
    np.testing.assert_allclose(bars.data[0].y, summary.share, rtol=1e-6)
    np.testing.assert_allclose(bars.data[1].y, [summary.pass_through_share])
    total = sum(float(np.sum(trace.y)) for trace in bars.data)
    assert total == pytest.approx(1, abs=1e-5)
    curves = distance_curves(profile, summary, MIXED[1], n_pairs=2, min_count=4)
    names = [trace.name for trace in curves.data]
    best = strongest_pairs(summary, 2)
    assert names == ["total", f"pair {best[0]}", f"pair {best[1]}", "pass-through"]
    keep = profile.count >= 4
    np.testing.assert_array_equal(curves.data[0].x, profile.distance[keep])
    np.testing.assert_allclose(curves.data[0].y, profile.total[keep], rtol=1e-5)
    np.testing.assert_allclose(curves.data[1].y, profile.mean[keep, best[0]], rtol=1e-5, atol=1e-6)
    # The same pair has the same colour in both figures.
    assert curves.data[1].line.color == bars.data[0].marker.color[best[0]]


def test_the_total_says_what_it_adds_up(qk):
    for layer, text in [
        (0, "total of all pairs<br>"),
        (1, "all pairs and what is not rotated<br>"),
    ]:
        split = decompose(qk, layer, 0)
        curves = distance_curves(split.by_distance(), split.by_pair(), MIXED[layer])
        assert text in curves.data[0].hovertemplate


def test_the_tolerance_is_labelled_where_it_is(qk):
    checks = [record.check for record in qk.records[0]]
    layout = figures.verification_dots(checks, 2e-2).layout
    assert layout.annotations[0].text == "tolerance 2e-02"
    # An annotation on a logarithmic axis is placed by the logarithm, a line by the value.
    assert layout.annotations[0].y == pytest.approx(math.log10(2e-2))
    assert layout.shapes[0].y0 == 2e-2
    low, high = layout.yaxis.range
    assert low < layout.annotations[0].y < high


def test_a_head_without_rope_is_all_pass_through(qk):
    split = decompose(qk, 2, 0)
    bars = pair_bars(split.by_pair(), MIXED[2])
    assert [trace.name for trace in bars.data] == ["pass-through"]
    curves = distance_curves(split.by_distance(), split.by_pair(), MIXED[2])
    assert [trace.name for trace in curves.data] == ["total", "pass-through"]


def test_one_token_can_be_drawn():
    one = random_capture(MIXED, n_pos=1)
    record = one.records[0][0]
    figures.share_map([head_shares(record)], "previous")
    split = decompose(one, 0, 0)
    pair_bars(split.by_pair(), MIXED[0])
    curves = distance_curves(split.by_distance(), split.by_pair(), MIXED[0])
    assert curves.data[0].mode == "markers"
    assert len(curves.data[0].x) == 1


def test_every_figure_says_what_it_is_and_follows_the_page(qk, usage, shares):
    for fig in (
        figures.usage_map(MIXED, usage, "key"),
        figures.share_map(shares, "previous"),
        rope_figures.cycles_curve(MIXED),
        rope_figures.cycles_map(MIXED),
        rope_figures.rotation_strips(MIXED[0]),
        figures.verification_dots([record.check for record in qk.records[0]], 1e-5),
    ):
        assert len(fig.layout.meta["label"]) > 20
        assert fig.layout.paper_bgcolor == "#ffffff"
        assert fig.layout.plot_bgcolor == "rgba(0,0,0,0)"
        assert fig.layout.width is None
        json.loads(fig.to_json())


def test_figures_are_the_same_bytes_every_time(usage):
    first, second = (figures.usage_map(MIXED, usage, "key").to_json() for _ in range(2))
    assert first == second


# Words


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (6.2832, "6.28"), (438460.3, "438,460"), (0.33, "0.33"), (1.0, "1"), (12.0, "12"),
     (3e-7, "3.0e-07"), (0.0123, "0.0123"), (math.nan, "no value"), (math.inf, "∞"),
     (-math.inf, "-∞"), (2.5e9, "2.50e+09"), (-0.5, "-0.5"), (100.0, "100")],
)  # fmt: skip
def test_numbers(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0%"), (1e-5, "under 0.1%"), (0.004, "0.4%"), (0.5, "50%"), (0.996, "99.6%"),
     (0.9999, "over 99.9%"), (1, "100%"), (-0.001, "under 0%"), (-0.12, "-12%"),
     (float("nan"), "no value")],
)  # fmt: skip
def test_percent_never_rounds_to_all_or_nothing(share, text):
    assert percent(share) == text


def test_ranges():
    assert ranges([0, 1, 2, 3, 7]) == "0-3, 7"
    assert ranges([]) == ""
