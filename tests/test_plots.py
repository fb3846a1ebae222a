"""Every result gives its figure by `plot()`, and shows nothing itself. Figures that belong to
results alone hold the numbers of the result."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import plotly.graph_objects as go
import pytest
from planted import named_heads, planted_capture
from public_results import RESULTS, ablation
from report_fixtures import random_capture, rope

import lens_rope as lr
from lens_rope.errors import InputError


@pytest.fixture(scope="module")
def qk():
    return planted_capture(list(named_heads(96).values()))


@pytest.mark.parametrize("name", RESULTS)
def test_results_draw_themselves(name, qk, capsys):
    fig = RESULTS[name](qk).plot()
    assert isinstance(fig, go.Figure)
    assert len(fig.data) and len(fig.layout.meta["label"]) > 20
    # For those who save it: what it is, and its numbers.
    assert fig.layout.meta["title"]
    assert len(fig.layout.meta["table"]) > 1
    assert capsys.readouterr().out == ""


def test_components_have_a_side_and_a_statistic(qk):
    fig = lr.offset_features(qk).plot("query", "mean")
    assert "mean absolute value of a query component" in fig.layout.meta["label"]


def test_score_bars_are_the_contributions_and_name_the_tokens():
    qk = random_capture((rope(0, rotary_dim=8),), tokens=("<b>", "a", "&amp;", *"bcdefghijk"))
    score = lr.decompose(qk, 0, 0).at(2, 0)
    fig = score.plot()
    pairs, rest = fig.data
    np.testing.assert_allclose(pairs.y, score.contribution, rtol=1e-6)
    assert list(pairs.x) == [0, 1, 2, 3]
    assert sum(pairs.y) + rest.y[0] == pytest.approx(score.score, abs=1e-5)
    assert "<b>" in fig.layout.meta["label"]
    assert "“&lt;b&gt;”" in fig.layout.title.text
    assert "“&amp;amp;”" in fig.layout.title.text
    assert len(lr.decompose(random_capture((rope(0),)), 0, 0).at(2, 0).plot().data) == 1


def test_a_profile_draws_the_pairs_that_move_most(qk):
    profile = lr.decompose(qk, 0, 2).by_distance()
    fig = profile.plot()
    # This head was made of these two pairs.
    assert [trace.name for trace in fig.data[:3]] == ["total", "pair 3", "pair 5"]
    np.testing.assert_allclose(fig.data[1].y, profile.mean[: len(fig.data[1].y), 3], rtol=1e-5)


def test_an_intervention_shows_every_draw_and_head():
    done = ablation(4)
    fig = done.plot()
    by_name = {}
    for trace in fig.data:
        by_name.setdefault((trace.legendgroup, trace.xaxis), trace)
    assert list(by_name["control", None].y) == [3.375, 3.5, 3.3125]
    assert list(by_name["before", None].y) == [3.25]
    assert list(by_name["after", None].y) == [5.5]
    np.testing.assert_allclose(by_name["before", "x2"].y, [e.sink_before for e in done.heads])
    np.testing.assert_allclose(by_name["after", "x2"].y, [e.sink_after for e in done.heads])
    np.testing.assert_allclose(by_name["control", "x2"].y, [e.sink_control for e in done.heads])
    previous = done.plot("previous")
    np.testing.assert_allclose(
        next(t for t in previous.data if (t.legendgroup, t.xaxis) == ("after", "x2")).y,
        [e.previous_after for e in done.heads],
    )
    with pytest.raises(InputError, match="attention is 'both'"):
        done.plot("both")


def test_without_sinks_an_intervention_shows_the_previous_token():
    heads = tuple(
        dataclasses.replace(e, sink_before=math.nan, sink_after=math.nan, sink_control=math.nan)
        for e in ablation(2).heads
    )
    fig = ablation(2, heads=heads).plot()
    assert "previous token" in fig.layout.yaxis2.title.text


def test_a_metric_is_shown_by_layer_and_head(qk):
    found = lr.head_metrics(qk)
    for name in ("positional_sensitivity", "sink_share"):
        values = getattr(found.layers[0], name)
        np.testing.assert_allclose(found.plot(name).data[0].z[0], values, rtol=1e-6)
    with pytest.raises(InputError, match="metric is 'size'"):
        found.plot("size")


def test_a_capture_shows_the_worst_prompt_of_each_layer():
    qk = planted_capture(list(named_heads(96).values()), list(named_heads(70).values()))
    check = qk.records[0][0].check
    records = tuple(
        (dataclasses.replace(layers[0], check=dataclasses.replace(check, score=error)),)
        for layers, error in zip(qk.records, (2e-6, 3e-7), strict=True)
    )
    fig = dataclasses.replace(qk, records=records).plot()
    assert list(fig.data[0].y) == [2e-6]
