"""Figures of offsets, sinks and patterns show the numbers of the results they are given.

Results are made by hand, so that every number in a figure is known; figures of real results are
drawn too, with layers without rotary pairs among them.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from report_fixtures import random_capture, rope

from lens_rope.advantage import Advantage
from lens_rope.bounds import BoundsCheck, band, within_angle, within_half_cycle, within_region
from lens_rope.errors import InputError
from lens_rope.heads import explain_heads
from lens_rope.offsets import LayerOffsets, SideOffsets, offset_features
from lens_rope.patterns import PATTERNS, HeadPattern
from lens_rope.sink_heads import COLLAPSED, SinkHead
from lens_rope.sinks import SINK_THRESHOLD
from lens_rope.views import offset_figures, pattern_figures, sink_figures
from lens_rope.views.colors import MARK, pair_color
from lens_rope.views.pattern_figures import LETTERS, MAX_LETTERED, PATTERN_COLORS, UNJUDGED
from lens_rope.views.sink_figures import MAX_ROWS
from lens_rope.words import number, percent

# A type checker does not know the traces of a figure.
component_map: Any = offset_figures.component_map
bounds_plot: Any = offset_figures.bounds_plot
removal_dots: Any = sink_figures.removal_dots
sink_pairs: Any = sink_figures.sink_pairs
pattern_map: Any = pattern_figures.pattern_map
offset_share_map: Any = pattern_figures.offset_share_map

# Rotated components 4 to 11 of 16, all components, none, and a window.
PARTIAL = {"rotary_dim": 8, "rotary_start": 4}


def offsets(*ropes) -> tuple[LayerOffsets, ...]:
    """Component values that name the layer, the component, the side and the statistic."""

    def side(r, first):
        nothing = np.zeros((2, r.n_pairs))
        component = 100 * r.layer + np.arange(r.d_head) + first
        rest = np.zeros((2, r.d_head - r.rotary_dim))
        return SideOffsets(
            nothing.astype(complex), nothing, nothing, component + 0.25, component + 0.5, rest
        )

    return tuple(LayerOffsets(r, 1.0, 100, 1, side(r, 20), side(r, 50)) for r in ropes)


def lines(fig, dash) -> Any:
    """The x and y of the line of this dash, None where there is no such line."""
    found = [t for t in fig.data if t.type == "scatter" and t.line.dash == dash]
    return (list(found[0].x), list(found[0].y)) if found else None


def cells(trace) -> np.ndarray:
    return np.array(trace.z, dtype=float)


def drawn(fig) -> dict:
    """What a page gets; and what all figures of this module have in common."""
    assert fig.layout.paper_bgcolor == "#ffffff"
    assert fig.layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert len(fig.layout.meta["label"]) > 30
    assert fig.layout.width is None
    text = fig.to_json()
    assert "NaN" not in text
    return json.loads(text)


# Components


@pytest.mark.parametrize(("side", "first"), [("query", 20), ("key", 50)])
@pytest.mark.parametrize(("statistic", "extra"), [("mean", 0.25), ("largest", 0.5)])
def test_component_cells_are_the_statistics(side, first, statistic, extra):
    fig = component_map(offsets(rope(0), rope(2)), side, statistic)
    expected = np.array([0, 200])[:, None] + np.arange(16) + first + extra
    assert cells(fig.data[0]) == pytest.approx(expected, abs=1e-4)
    assert fig.data[0].text[1][3] == number(expected[1, 3])
    assert fig.layout.coloraxis.cmin == 0
    assert fig.layout.coloraxis.cmax == pytest.approx(expected.max())
    title = fig.layout.coloraxis.colorbar.title.text
    assert title == f"{statistic} absolute value of a {side} component (activation units)"
    assert list(fig.layout.yaxis.ticktext) == ["0", "2"]
    assert fig.layout.yaxis.range[0] > fig.layout.yaxis.range[1]  # the first layer at the top
    assert fig.layout.meta["scales"] == {"coloraxis": "sequential"}
    drawn(fig)


def test_largest_keys_are_the_default():
    layers = offsets(rope(0))
    assert component_map(layers).to_json() == component_map(layers, "key", "largest").to_json()


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_hover_names_the_pair_of_each_component(pairing):
    r = rope(7, pairing=pairing, **PARTIAL)
    fig = component_map(offsets(r))
    said = fig.data[0].customdata[0]
    order = {
        "half": ["first", "first", "first", "first", "second", "second", "second", "second"],
        "adjacent": ["first", "second"] * 4,
    }[pairing]
    pairs = {"half": [0, 1, 2, 3] * 2, "adjacent": [0, 0, 1, 1, 2, 2, 3, 3]}[pairing]
    for component in range(16):
        layer, name = said[component]
        assert layer == 7
        if not 4 <= component < 12:
            assert name == "not rotated"
            continue
        pair = pairs[component - 4]
        assert name.startswith(f"{order[component - 4]} of pair {pair}<br>")
        assert f"wavelength {number(r.wavelength[pair])} tokens" in name
        assert f"{number(r.cycles[pair])} cycles" in name
    for part in ("layer %{customdata[0]}", "component %{x}", "%{text} activation units"):
        assert part in fig.data[0].hovertemplate


def test_lines_divide_the_halves_and_what_is_rotated():
    fig = component_map(offsets(rope(0, **PARTIAL), rope(1, **PARTIAL)))
    x, y = lines(fig, "dash")
    assert x == [7.5, 7.5, 7.5, 7.5, None]
    assert y == [-0.5, 0.5, 0.5, 1.5, None]
    x, _ = lines(fig, "solid")
    assert sorted({v for v in x if v is not None}) == [3.5, 11.5]
    assert "dashed" in fig.layout.xaxis.title.text
    assert "solid" in fig.layout.xaxis.title.text


def test_no_line_where_there_is_nothing_to_divide():
    fig = component_map(offsets(rope(0)))
    assert lines(fig, "dash")[0][0] == 7.5
    assert lines(fig, "solid") is None
    assert "solid" not in fig.layout.xaxis.title.text
    fig = component_map(offsets(rope(0, pairing="adjacent", rotary_dim=8)))
    assert lines(fig, "dash") is None
    assert lines(fig, "solid")[0][0] == 7.5
    assert "dashed" not in fig.layout.xaxis.title.text


def test_lines_only_where_rotating_layers_agree():
    fig = component_map(offsets(rope(0, rotary_dim=8), rope(1)))
    assert lines(fig, "dash") is lines(fig, "solid") is None
    assert fig.layout.xaxis.title.text == "component"
    # The halves end at 7.5 in both; the rotated components do not end alike.
    fig = component_map(offsets(rope(0), rope(1, **PARTIAL)))
    assert lines(fig, "dash")[0][0] == 7.5
    assert lines(fig, "solid") is None
    fig = component_map(offsets(rope(0), rope(1, pairing="adjacent")))
    assert lines(fig, "dash") is None


def test_lines_leave_out_layers_without_rotary_pairs():
    fig = component_map(offsets(rope(0), rope(1, rotary_dim=0), rope(2)))
    x, y = lines(fig, "dash")
    assert x == [7.5, 7.5, None, 7.5, 7.5, None]
    assert y == [-0.5, 0.5, None, 1.5, 2.5, None]
    assert {name for _, name in fig.data[0].customdata[1]} == {"not rotated"}
    alone = component_map(offsets(rope(0, rotary_dim=0)))
    assert [t.type for t in alone.data] == ["heatmap"]


def test_components_without_value_are_missing():
    first, second = offsets(rope(0), rope(1, d_head=8, rotary_dim=8))
    gone = dataclasses.replace(first.key, component_largest=np.full(16, np.nan))
    fig = component_map([dataclasses.replace(first, key=gone), second])
    assert np.isnan(cells(fig.data[0])[0]).all()
    missing = cells(fig.data[1])
    assert fig.data[1].name == "no value"
    assert (missing == 1).sum() == 16 + 8
    assert np.isnan(missing[1, :8]).all()
    drawn(fig)
    alone = component_map([dataclasses.replace(first, key=gone)])
    assert alone.layout.coloraxis.cmax == 1


def test_component_map_says_what_it_knows():
    layers = offsets(rope(0))
    with pytest.raises(InputError, match=r"side is 'both'; it must be one of query, key"):
        component_map(layers, "both")
    with pytest.raises(InputError, match=r"statistic is 'rms'; it must be one of largest, mean"):
        component_map(layers, "key", "rms")
    with pytest.raises(InputError, match="no layers"):
        component_map([])


# Bounds


def checked(*rows, strong=5.0) -> BoundsCheck:
    """Features given as (layer, head, pair, amplitude, angle, turn)."""
    names = ("layer", "head", "pair", "amplitude", "angle", "turn")
    table = pd.DataFrame(list(rows), columns=list(names))
    angle, turn = table["angle"].astype(float), table["turn"].astype(float)
    table["cycles"] = turn / (2 * np.pi)
    table["within_region"] = within_region(angle.to_numpy(), turn.to_numpy())
    return BoundsCheck(strong, table, (), np.nan, np.nan, ())


INSIDE = (3, 1, 6, 8.0, np.pi, 0.2 * np.pi)
OUTSIDE = (4, 0, 2, 32.0, -np.pi / 4, 30 * np.pi)


def test_region_is_what_the_bounds_allow():
    for rows in ((), (INSIDE,), (INSIDE, OUTSIDE), ((0, 0, 0, 9.0, 3.0, 1e-4),)):
        fig = bounds_plot(checked(*rows))
        region = fig.data[0]
        assert region.fill == "toself"
        x, y = np.array(region.x, float), np.array(region.y, float)
        assert (x[0], y[0]) == (x[-1], y[-1])  # closed
        # The corners, and where the straight upper edge runs on the logarithmic axis.
        low = 10 ** fig.layout.xaxis.range[0]
        assert x.min() == pytest.approx(low)
        assert (x.max(), y.min()) == (pytest.approx(1), pytest.approx(0.5))
        assert y.max() == pytest.approx(1.5 - low)
        assert len(set(np.round(x, 6))) > 30
        middle = np.sqrt(low)
        center = np.array([middle, (0.5 + 1.5 - middle) / 2])
        for point in np.column_stack([x, y]):
            inside, outside = center + (point - center) * 0.999, center + (point - center) * 1.01
            assert within_region(inside[1] * np.pi, inside[0] * np.pi)
            # Left of the left edge the region goes on, where the plot has ended.
            if outside[0] >= low:
                assert not within_region(outside[1] * np.pi, outside[0] * np.pi)


def test_every_point_of_the_plot_is_shaded_as_it_is_judged():
    """Shading and judgement agree on a grid, by a ray that counts crossings."""
    region = bounds_plot(checked(INSIDE, OUTSIDE)).data[0]
    x, y = np.array(region.x, float), np.array(region.y, float)
    rng = np.random.default_rng(0)
    low = x.min()
    for turn, angle in zip(
        np.exp(rng.uniform(np.log(low), np.log(4), 400)), rng.uniform(0, 2, 400), strict=True
    ):
        a, b = slice(None, -1), slice(1, None)
        crosses = (y[a] > angle) != (y[b] > angle)
        with np.errstate(divide="ignore", invalid="ignore"):
            at = x[a] + (angle - y[a]) / (y[b] - y[a]) * (x[b] - x[a])
        shaded = (crosses & (turn < at)).sum() % 2 == 1
        assert shaded == within_region(angle * np.pi, turn * np.pi)
        if shaded:
            assert within_half_cycle(turn * np.pi)
            assert within_angle((angle * np.pi + np.pi) % (2 * np.pi) - np.pi)


def features(fig, name):
    return next(t for t in fig.data if t.name == name)


def test_features_are_where_the_table_says():
    fig = bounds_plot(checked(INSIDE, OUTSIDE, (5, 2, 6, 8.0, -np.pi / 2, 0.2 * np.pi)))
    kept, others = features(fig, "keeps the bounds"), features(fig, "does not keep them")
    assert list(kept.x) == pytest.approx([0.2])
    assert list(kept.y) == pytest.approx([1])
    # Angles below zero are drawn in [0, 2π).
    assert list(others.x) == pytest.approx([30, 0.2])
    assert list(others.y) == pytest.approx([1.75, 1.5])
    assert kept.marker.symbol == "circle"
    assert others.marker.symbol == "circle-open"
    assert list(kept.marker.color) == [pair_color(6)]
    assert list(others.marker.color) == [pair_color(2), pair_color(6)]
    # A quarter of the amplitude is half of the diameter.
    assert kept.marker.size[0] == pytest.approx(others.marker.size[0] / 2)
    low, high = fig.layout.xaxis.range
    assert low < np.log10(0.1) and high > np.log10(30)
    legend = [t.name for t in fig.data if t.showlegend is not False]
    assert legend == ["allowed region", "keeps the bounds (1)", "does not keep them (2)"]
    drawn(fig)


def test_hover_tells_all_of_a_feature():
    fig = bounds_plot(checked(INSIDE, OUTSIDE))
    assert features(fig, "keeps the bounds").customdata[0] == (
        "layer 3 head 1 pair 6<br>amplitude 8 score units<br>angle 1π, w L 0.2π (0.1 cycles)<br>"
        "keeps the bounds"
    )
    said = features(fig, "does not keep them").customdata[0]
    assert said.startswith("layer 4 head 0 pair 2<br>amplitude 32")
    assert "angle 1.75π, w L 30π (15 cycles)" in said
    assert said.endswith("does not keep them")
    assert features(fig, "keeps the bounds").hovertemplate == "%{customdata}<extra></extra>"


def test_half_and_full_cycles_are_marked():
    fig = bounds_plot(checked(INSIDE))
    assert [(s.x0, s.x1) for s in fig.layout.shapes] == [(1, 1), (2, 2)]
    said = {a.text: a for a in fig.layout.annotations}
    assert said["half a cycle"].x == 0
    assert said["full cycles"].x == pytest.approx(np.log10(2))
    assert fig.layout.xaxis.type == "log"
    assert "π" in fig.layout.xaxis.ticktext
    assert list(fig.layout.yaxis.ticktext) == ["0", "π/2", "π", "3π/2", "2π"]


def test_columns_bear_the_numbers_of_their_pairs():
    fig = bounds_plot(checked(INSIDE, OUTSIDE, (9, 9, 6, 7.0, 1.0, 0.2 * np.pi)))
    names = features(fig, "pairs")
    assert list(names.text) == ["6", "2"]
    assert list(names.x) == pytest.approx([0.2, 30])


def test_of_pairs_that_crowd_the_strongest_is_named():
    # Four in one place, and one apart.
    crowd = [(0, 0, pair, 6.0 + (pair == 2), 3.0, 1.0 + 0.001 * pair) for pair in range(4)]
    names = features(bounds_plot(checked(*crowd, (0, 0, 9, 5.5, 3.0, 0.1))), "pairs")
    assert list(names.text) == ["9", "2"]
    many = [(0, 0, pair, 9.0, 3.0, 0.1 * 1.2**pair) for pair in range(60)]
    fig = bounds_plot(checked(*many))
    named = [trace for trace in fig.data if trace.name == "pairs"]
    low, high = fig.layout.xaxis.range
    for trace in named:
        assert (np.diff(np.log10(np.asarray(trace.x, float))) > 0.02 * (high - low)).all()


def test_a_pair_that_does_not_turn_has_a_place():
    fig = bounds_plot(checked(INSIDE, (0, 0, 7, 9.0, np.pi, 0.0)))
    kept = features(fig, "keeps the bounds")
    place = kept.x[1]
    assert 10 ** fig.layout.xaxis.range[0] < place < 0.2
    assert place in fig.layout.xaxis.tickvals
    assert fig.layout.xaxis.ticktext[list(fig.layout.xaxis.tickvals).index(place)] == "0"
    assert "w L 0π (0 cycles)" in kept.customdata[1]
    drawn(fig)


def test_without_features_the_region_is_there_and_a_note():
    fig = bounds_plot(checked(strong=7.5))
    assert fig.data[0].name == "allowed region"
    assert any("above 7.5 score units" in a.text for a in fig.layout.annotations)
    drawn(fig)
    assert not any("above" in a.text for a in bounds_plot(checked(INSIDE)).layout.annotations)


# Sinks


def sink(layer, head, *, share=0.8, pairs=(1.0, 2.0, 9.0, 3.0), rest=0.0, rope_of=None, **changes):
    """A sink head whose share after removal of pair i is i percent."""
    r = rope_of or rope(layer, rotary_dim=2 * len(pairs), d_head=16 if rest else 2 * len(pairs))
    push = 0.25 * np.array([*pairs, rest])
    gained = Advantage(60, np.array([*pairs, rest]) - push, push)
    return SinkHead(
        **{
            "layer": layer, "head": head, "rope": r, "position": 0, "same_position": True,
            "share": share, "share_of_all": share, "n_prompts": 1, "n_queries": 61,
            "advantage": gained,
            "share_without": np.arange(len(pairs)) / 100, "share_without_two": 0.0, **changes,
        }
    )  # fmt: skip


def bare_sink(layer=2, head=1):
    """A sink head of a layer without rotary pairs."""
    return sink(layer, head, share=0.6, pairs=(), rest=4.0, rope_of=rope(layer, rotary_dim=0))


def test_marks_are_the_three_shares_in_order_of_layer_and_head():
    heads = [sink(4, 0, share=0.5), sink(1, 3, share=0.9), sink(1, 2, share=0.7)]
    fig = removal_dots(heads)
    assert list(features(fig, "sink share").y) == pytest.approx([0.7, 0.9, 0.5])
    assert list(features(fig, "without its best pair").y) == pytest.approx([0.02] * 3)
    # The median of 0, 1 and 3 percent: the best pair is not among the others.
    assert list(features(fig, "without another pair (median)").y) == pytest.approx([0.01] * 3)
    span = features(fig, "span")
    assert list(span.x) == [0, 0, None, 1, 1, None, 2, 2, None]
    assert list(span.y) == pytest.approx([0.01, 0.7, None, 0.01, 0.9, None, 0.01, 0.5, None])
    assert span.hoverinfo == "skip"
    assert list(fig.layout.xaxis.ticktext) == ["1", "4"]
    assert list(fig.layout.xaxis.tickvals) == [0.5, 2]
    assert len({t.marker.symbol for t in fig.data if t.mode == "markers"}) == 3
    drawn(fig)


def test_thresholds_are_those_of_the_analyses():
    fig = removal_dots([sink(0, 0)])
    for name, level in (
        (f"sink heads are above {SINK_THRESHOLD:g}", SINK_THRESHOLD),
        (f"collapsed below {COLLAPSED:g}", COLLAPSED),
    ):
        line = features(fig, name)
        assert list(line.y) == [level, level]
        assert line.line.dash in ("dash", "dot")
        assert (line.x[0], line.x[1]) == tuple(fig.layout.xaxis.range)
    low, high = fig.layout.yaxis.range
    assert low < 0 and high > 1 and high - low < 1.1


def test_hover_explains_the_sink():
    entry = sink(4, 2, position=17)
    said = features(removal_dots([entry]), "sink share").customdata[0]
    r = entry.rope
    assert said == (
        "layer 4 head 2, sink at position 17<br>sink share 0.8<br>without pair 2: 0.02<br>"
        f"without another pair (median): 0.01<br>pair 2: {band(r.cycles[2])}, wavelength "
        f"{number(r.wavelength[2])} tokens<br>advantage 9 of 15 score units<br>lift 6.75, push 2.25"
    )
    moved = dataclasses.replace(entry, same_position=False)
    said = features(removal_dots([moved]), "sink share").customdata[0]
    assert "position 17 (most often)" in said
    short = features(removal_dots([entry]), "without its best pair").customdata[0]
    assert short == "layer 4 head 2<br>without its best pair: 0.02"


def test_a_sink_without_rotary_pairs_has_its_share_alone():
    fig = removal_dots([sink(1, 0), bare_sink()])
    assert list(features(fig, "sink share").y) == pytest.approx([0.8, 0.6])
    for name in ("without its best pair", "without another pair (median)"):
        assert np.isnan(features(fig, name).y[1])
    assert list(features(fig, "span").y)[3:] == pytest.approx([0.6, 0.6, None])
    said = features(fig, "sink share").customdata[1]
    assert said.endswith("no rotary pairs<br>advantage 4 score units")
    drawn(fig)


def test_layers_are_told_apart_and_their_names_do_not_collide():
    heads = [sink(layer, head) for layer in range(90) for head in range(1 + layer % 2)]
    fig = removal_dots(heads)
    assert np.diff(fig.layout.xaxis.tickvals).min() >= len(heads) / 32
    assert list(fig.layout.xaxis.ticktext[:2]) == ["0", "3"]
    shaded = fig.layout.shapes
    assert len(shaded) == 45
    # Layer 3 has the heads in columns 4 and 5.
    assert (shaded[1].x0, shaded[1].x1) == (3.5, 5.5)
    few = removal_dots(heads[:3])
    assert features(fig, "sink share").marker.size < features(few, "sink share").marker.size


def test_no_sink_is_said():
    for fig in (removal_dots([]), sink_pairs([])):
        assert [a.text for a in fig.layout.annotations] == ["no sink head"]
        drawn(fig)
    for fig in (removal_dots([sink(0, 0)]), sink_pairs([sink(0, 0)])):
        assert not fig.layout.annotations


def test_cells_are_the_advantages():
    heads = [sink(4, 0, pairs=(1.0, -12.0, 3.0, 4.0)), sink(1, 3), sink(1, 2)]
    fig = sink_pairs(heads)
    expected = [[1, 2, 9, 3], [1, 2, 9, 3], [1, -12, 3, 4]]
    assert cells(fig.data[0]) == pytest.approx(np.array(expected, float))
    assert list(fig.layout.yaxis.ticktext) == ["1.2", "1.3", "4.0"]
    assert fig.layout.yaxis.title.text == "layer.head"
    axis = fig.layout.coloraxis
    assert (axis.cmin, axis.cmid, axis.cmax) == (-12, 0, 12)
    assert axis.colorbar.title.text == "advantage of the sink (score units)"
    assert fig.layout.meta["scales"] == {"coloraxis": "diverging"}
    said = fig.data[0].customdata[2][1]
    r = heads[0].rope
    assert said[0] == "layer 4 head 0"
    assert said[1] == f"pair 1, {band(r.cycles[1])}, wavelength {number(r.wavelength[1])} tokens"
    assert "%{text} score units" in fig.data[0].hovertemplate
    assert "rows: sink heads" in fig.layout.meta["label"]
    drawn(fig)


def test_what_is_not_rotated_has_a_column():
    fig = sink_pairs([sink(0, 0, rest=5.0), sink(1, 0), bare_sink()])
    values = cells(fig.data[0])
    assert values[0] == pytest.approx([1, 2, 9, 3, 5])
    assert values[1][:4] == pytest.approx([1, 2, 9, 3])
    assert np.isnan(values[1][4])
    assert np.isnan(values[2][:4]).all()
    assert values[2][4] == pytest.approx(4)
    assert (cells(fig.data[1]) == 1).sum() == 5
    assert fig.layout.xaxis.ticktext[-1] == "none"
    assert fig.layout.xaxis.tickvals[-1] == 4
    custom = fig.data[0].customdata
    assert custom[0][4][1] == "components that are not rotated"
    assert list(custom[2][1]) == ["layer 2 head 1", "no pair 1"]
    drawn(fig)
    assert cells(sink_pairs([sink(1, 0)]).data[0]).shape == (1, 4)


def test_many_sink_heads_are_averaged_by_layer():
    heads = [
        sink(layer, head, pairs=(head, layer, -1.0, 0.0)) for layer in (3, 5) for head in range(31)
    ]
    assert len(heads) > MAX_ROWS
    fig = sink_pairs(heads)
    assert cells(fig.data[0]) == pytest.approx(np.array([[15, 3, -1, 0], [15, 5, -1, 0]]))
    assert list(fig.layout.yaxis.ticktext) == ["3", "5"]
    assert fig.layout.yaxis.title.text == "layer"
    assert "mean over the sink heads of a layer" in fig.layout.coloraxis.colorbar.title.text
    assert "mean over the sink heads of a layer" in fig.layout.meta["label"]
    assert fig.data[0].customdata[1][0][0] == "layer 5, mean of 31 sink heads"
    assert cells(sink_pairs(heads[:MAX_ROWS]).data[0]).shape == (MAX_ROWS, 4)


def test_partial_cycles_begin_at_the_dashed_line():
    r = rope(0, rotary_dim=8, d_head=8)
    first = int(np.flatnonzero(r.cycles < 1)[0])
    x, y = lines(sink_pairs([sink(0, 0)]), "dash")
    assert (x, y) == ([first - 0.5] * 2, [-0.5, 0.5])


# Patterns


def head_pattern(layer, head, pattern, *, shares=(0.4, 0.3, 0.2, 0.1), **changes):
    r = changes.pop("rope", rope(layer, rotary_dim=8, d_head=8))
    values = np.append(np.arange(1.0, r.n_pairs + 1), 0.5)
    return HeadPattern(
        **{
            "layer": layer, "head": head, "rope": r, "pattern": pattern, "also": (),
            "strength": 0.625, "base_rate": 0.0125, "masses": {}, "base_rates": {},
            "sink_share": 0.1, "sink_position": 0, "previous_share": 0.1, "entropy": 0.75,
            "offset_shares": np.array(shares), "token_consistency": np.nan,
            "target": str(pattern), "advantage": Advantage(60, values, np.zeros(r.n_pairs + 1)),
            **changes,
        }
    )  # fmt: skip


def test_each_pattern_has_its_cells_colour_letter_and_count():
    heads = [
        head_pattern(layer, head, (*PATTERNS, None)[(3 * layer + head) % 10])
        for layer in (0, 2, 5)
        for head in range(7)
    ]
    fig = pattern_map(heads[::-1])
    seen = np.zeros((3, 7))
    for trace in fig.data:
        name = trace.name.rsplit(" (", 1)[0]
        own = [
            e
            for e in heads
            if name
            == (f"{LETTERS[e.pattern]} {e.pattern}".strip() if e.pattern else "× not judged")
        ]
        here = np.isfinite(cells(trace))
        assert here.sum() == len(own) > 0
        assert trace.name == f"{name} ({len(own)})"
        assert trace.showlegend
        for e in own:
            row = [0, 2, 5].index(e.layer)
            assert here[row, e.head]
            assert trace.text[row][e.head] == (LETTERS[e.pattern] if e.pattern else "×")
            color = PATTERN_COLORS[e.pattern] if e.pattern else UNJUDGED
            assert [stop[1] for stop in trace.colorscale] == [color] * 2
        seen += here
    assert (seen == 1).all()
    assert len(fig.data) == 10
    assert list(fig.layout.yaxis.ticktext) == ["0", "2", "5"]
    drawn(fig)


def test_colours_and_letters_are_one_for_each_name():
    assert set(PATTERN_COLORS) == set(LETTERS) == set(PATTERNS)
    assert len(set(PATTERN_COLORS.values())) == len(set(LETTERS.values())) == len(PATTERNS)
    assert MARK not in PATTERN_COLORS.values()


def test_patterns_that_do_not_occur_are_left_out():
    fig = pattern_map([head_pattern(0, 0, "sink")])
    assert [t.name for t in fig.data] == ["S sink (1)"]
    assert cells(fig.data[0]).shape == (1, 1)


def test_heads_that_are_not_there_are_blank():
    fig = pattern_map([head_pattern(0, 2, "sink"), head_pattern(1, 0, "mixed")])
    assert sum(np.isfinite(cells(t)).sum() for t in fig.data) == 2
    assert all(t.hoverongaps is False for t in fig.data)


def test_letters_are_left_out_where_they_do_not_fit():
    heads = [head_pattern(0, h, "sink") for h in range(MAX_LETTERED + 1)]
    trace = pattern_map(heads).data[0]
    assert trace.texttemplate is None
    assert trace.name == f"sink ({len(heads)})"
    assert pattern_map(heads[:-1]).data[0].texttemplate == "%{text}"


def test_hover_tells_what_the_head_does():
    entry = head_pattern(4, 1, "induction", also=("sink", "local"))
    trace = pattern_map([entry]).data[0]
    r = entry.rope
    assert trace.customdata[0][1] == (
        "layer 4 head 1: induction<br>also sink, local<br>strength 62%, base rate 1%<br>"
        f"advantage of induction: 10.5 score units<br>most by pair 3 ({band(r.cycles[3])}, "
        f"wavelength {number(r.wavelength[3])} tokens): 4<br>offset·offset 40%, offset·content 30%"
        "<br>content·offset 20%, content·content 10%<br>entropy 0.75 of 1"
    )
    assert trace.hovertemplate == "%{customdata}<extra></extra>"


def test_hover_says_what_is_not_known():
    bare = rope(0, rotary_dim=0)
    nothing = Advantage(0, np.full(5, np.nan), np.full(5, np.nan))
    said = [
        pattern_map([entry]).data[0].customdata[0][0]
        for entry in (
            head_pattern(0, 0, "content", base_rate=np.nan, target="attended", rope=bare),
            head_pattern(0, 0, None, strength=np.nan, shares=(np.nan,) * 4, advantage=nothing),
        )
    ]
    assert "base rate" not in said[0]
    assert "advantage of attended: 0.5 score units<br>no rotary pairs" in said[0]
    assert said[1].startswith("layer 0 head 0: not judged<br>strength no value")
    assert "advantage of None: no value" in said[1]
    assert "offset·offset no value" in said[1]


def test_offset_shares_by_layer_and_head():
    heads = [
        head_pattern(1, 0, "sink"),
        head_pattern(0, 1, "mixed", shares=(-0.25, 0.5, 0.5, 0.25)),
        head_pattern(0, 0, "mixed", shares=(1.25, -0.1, -0.1, -0.05)),
        head_pattern(1, 1, None, shares=(np.nan,) * 4),
    ]
    fig = offset_share_map(heads)
    assert cells(fig.data[0])[0] == pytest.approx([1.25, -0.25])
    assert cells(fig.data[0])[1, 0] == pytest.approx(0.4)
    assert np.isnan(cells(fig.data[0])[1, 1])
    assert cells(fig.data[1])[1, 1] == 1
    axis = fig.layout.coloraxis
    assert (axis.cmin, axis.cmid, axis.cmax) == (-1.25, 0, 1.25)
    assert fig.layout.meta["scales"] == {"coloraxis": "diverging"}
    said = list(fig.data[0].customdata[0][1])
    assert said == [
        "0", f"offset·offset {percent(-0.25)}, offset·content 50%",
        "content·offset 50%, content·content 25%",
    ]  # fmt: skip
    for part in ("layer %{customdata[0]} head %{x}", "%{customdata[1]}<br>%{customdata[2]}"):
        assert part in fig.data[0].hovertemplate
    assert offset_share_map(heads[:1]).layout.coloraxis.cmax == 1
    drawn(fig)


# Results


@pytest.fixture(scope="module")
def qk():
    return random_capture((rope(0), rope(1, rotary_dim=8), rope(2, rotary_dim=0)), n_pos=80)


def test_plots_of_results_are_these_figures(qk):
    found = offset_features(qk, constancy=0, relative=0)
    assert found.plot().to_json() == component_map(found.layers).to_json()
    assert found.plot("query", "mean").to_json() == (
        component_map(found.layers, "query", "mean").to_json()
    )
    check = found.check_bounds(0.1)
    fig = bounds_plot(check)
    assert check.plot().to_json() == fig.to_json()
    counts = check.table["within_region"].sum(), (~check.table["within_region"]).sum()
    assert [t.name for t in fig.data if t.name and t.name.endswith(")")] == [
        f"keeps the bounds ({counts[0]})", f"does not keep them ({counts[1]})",
    ]  # fmt: skip
    assert found.check_bounds(1e9).plot().layout.annotations[-1].text.startswith("no offset")
    heads = explain_heads(qk)
    fig = pattern_map(heads.heads)
    assert heads.plot().to_json() == fig.to_json()
    assert sum(int(t.name.rsplit("(", 1)[1][:-1]) for t in fig.data) == len(heads.heads) == 12
    drawn(offset_share_map(heads.heads))
