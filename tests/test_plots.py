"""Every result with a figure gives it by `plot()`, and shows nothing itself."""

import plotly.graph_objects as go
import pytest
from planted import named_heads, planted_capture

import lens_rope as lr


@pytest.fixture(scope="module")
def qk():
    return planted_capture(list(named_heads(96).values()))


PLOTS = {
    "components": lambda qk: lr.offset_features(qk).plot("query", "mean"),
    "bounds": lambda qk: lr.offset_features(qk).check_bounds().plot(),
    "sinks": lambda qk: lr.explain_sinks(qk).plot(),
    "heads": lambda qk: lr.explain_heads(qk).plot(),
    "spectrum": lambda qk: lr.key_spectrum(qk).plot(),
    "distance": lambda qk: lr.distance_curve(qk, 0, 0, 40, 3).plot(),
}


@pytest.mark.parametrize("name", PLOTS)
def test_results_draw_themselves(name, qk, capsys):
    fig = PLOTS[name](qk)
    assert isinstance(fig, go.Figure)
    assert len(fig.data) and len(fig.layout.meta["label"]) > 20
    assert capsys.readouterr().out == ""
