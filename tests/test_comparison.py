"""Comparisons and the index say what the reports' own JSON says.

Numbers are counted again from `report.json` with loops; what changed between two reports is known
because it was changed by hand.
"""

from __future__ import annotations

import copy
import csv
import hashlib
import json
import re
import subprocess
import sys
from itertools import pairwise
from statistics import mean, median

import numpy as np
import pytest
from planted import named_heads, planted_capture
from report_fixtures import random_capture, report_data, rope, with_pairs
from typer.testing import CliRunner

import lens_rope as lr
from lens_rope.cli import app
from lens_rope.errors import InputError, OutputError
from lens_rope.reporting import Report
from lens_rope.reporting.comparison import SCHEMA, Comparison, compare
from lens_rope.reporting.differences import NO_DIFFERENCE
from lens_rope.reporting.index import render_index
from lens_rope.reporting.report_files import read_report
from lens_rope.reporting.side_by_side import usage_by_cycles
from lens_rope.views.comparison_figures import usage_curves
from lens_rope.views.comparison_styles import COLORS, label, style

ROPES = (rope(0), rope(1, rotary_dim=8), rope(2, rotary_dim=0), rope(3, window=16))
HOSTILE_NAME = '</script><b>"&\u202e\x00\n💩'


def as_saved(done: Report) -> dict:
    return json.loads(json.dumps(done.to_dict()))


@pytest.fixture(scope="module")
def small() -> Report:
    """Four layers of every kind, 40 tokens."""
    return Report(report_data(random_capture(ROPES, n_pos=40)))


@pytest.fixture(scope="module")
def planted() -> Report:
    """One layer with a head of each pattern, sinks among them, 96 tokens."""
    return Report(report_data(planted_capture(list(named_heads(96).values()))))


@pytest.fixture(scope="module")
def uniform() -> Report:
    """Layers that all rotate alike, with more depth and other pairs than `small`."""
    ropes = tuple(rope(layer, rotary_dim=12, d_head=12) for layer in range(6))
    return Report(report_data(random_capture(ropes, n_pos=96)))


def value(comparison: Comparison, metric: str, side: str = "a") -> float:
    table = comparison.to_dataframe().set_index("metric")
    return float(table.loc[metric, side])


# The same twice, and where reports come from


def test_the_same_report_twice_has_no_difference(planted, small, tmp_path):
    for done in (planted, small):
        same = compare(done, as_saved(done))
        assert same.sentences == (NO_DIFFERENCE,)
        assert same.notes == () or all("too short" in note for note in same.notes)
        differences = same.to_dataframe()["difference"].dropna()
        assert len(differences) > 10
        assert (differences == 0).all()
        assert not same.heads()["pattern_changed"].any()
        assert set(same.features()["change"]) <= {"kept"}


def test_reports_come_from_memory_folder_file_and_dict(planted, uniform, tmp_path):
    folder = planted.save(tmp_path / "a", formats=["json"])
    sources = [planted, planted.to_dict(), folder, str(folder), folder / "report.json"]
    expected = compare(planted, uniform).to_dict()
    for source in sources:
        assert compare(source, uniform).to_dict() == expected


def test_no_model_and_no_torch_are_needed(planted, uniform, tmp_path):
    planted.save(tmp_path / "a", formats=["json"])
    uniform.save(tmp_path / "b", formats=["json"])
    code = (
        "import sys, lens_rope as lr; done = lr.compare('a', 'b'); print(done); done.to_dict();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)


def test_what_is_not_a_report_is_refused(planted, tmp_path):
    content = as_saved(planted)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty").mkdir()
    cases = [
        (3, "a int is not a report"),
        ({}, "is not a report of lens-rope"),
        ({"schema": "lens-rope-comparison/1"}, "is not a report of lens-rope"),
        ({**content, "schema": "lens-rope-report/9"}, "written as lens-rope-report/9"),
        ({**content, "usage": [{"layer": 0, "query": ["x"] * 9, "key": [0] * 9}]}, "is damaged"),
        ({**content, "usage": "all"}, "is damaged"),
        ({**content, "rope": []}, "is damaged"),
        ({**content, "model": {**content["model"], "layers": "many"}}, "is damaged"),
        ({k: v for k, v in content.items() if k != "rope"}, "is damaged"),
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "empty", "does not exist"),
        (tmp_path / "broken.json", "is not JSON"),
        ("x" * 5000, "cannot be read"),
    ]
    for source, message in cases:
        for pair in ((source, planted), (planted, source)):
            with pytest.raises(InputError, match=message):
                compare(*pair)


def test_names(planted, uniform, tmp_path):
    assert compare(planted, uniform).names == ("planted", "tiny")
    assert compare(planted, planted).names == ("planted (a)", "planted (b)")
    a = planted.save(tmp_path / "one", formats=["json"])
    b = planted.save(tmp_path / "two", formats=["json"])
    c = planted.save(tmp_path / "deeper" / "two", formats=["json"])
    assert compare(a, b / "report.json").names == ("one", "two")
    assert compare(b, c).names == (str(b), str(c))
    assert compare(a, b, names=["before", "after"]).names == ("before", "after")
    for names in (["x"], ["x", "x"], "xy", ["x", 1], ["x", "y", "z"]):
        with pytest.raises(InputError, match="two different texts"):
            compare(a, b, names=names)


# Numbers


def test_metrics_are_those_of_the_report(planted, uniform):
    # Sinks at different keys, of different pairs, so that no share is 0 or 1.
    varied = as_saved(planted)
    sinks = varied["sinks"]["heads"]
    while len(sinks) < 4:
        sinks.append(copy.deepcopy(sinks[0]))
    for sink, (position, pair, after) in zip(
        sinks, [(0, 0, 0.5), (0, 4, 0.05), (3, 8, 0.02), (0, 8, 0.01)], strict=False
    ):
        sink["position"] = position
        sink["frequencies"][0].update(frequency=pair, share_after_removal=after)
    done = compare(varied, uniform)
    for side, saved in (("a", varied), ("b", as_saved(uniform))):
        assert value(done, "layers", side) == len(saved["rope"])
        assert value(done, "tokens", side) == sum(p["tokens"] for p in saved["prompts"])
        inside = total = pairs = partial = 0.0
        for layer, use in zip(saved["rope"], saved["usage"], strict=True):
            for w, size in zip(layer["inv_freq"], use["query"], strict=True):
                is_partial = w * layer["context"] / (2 * np.pi) < 1
                pairs, partial = pairs + 1, partial + is_partial
                inside, total = inside + size * is_partial, total + size
        assert value(done, "partial_pairs", side) == pytest.approx(partial / pairs)
        assert value(done, "query_partial", side) == pytest.approx(inside / total)
        assert value(done, "offset_features", side) == len(saved["offset_features"])
        assert value(done, "within_region", side) == pytest.approx(
            np.nan
            if saved["bounds"]["within_region"] is None
            else saved["bounds"]["within_region"],
            nan_ok=True,
        )
        ranks = [
            entry["post"]["rank90"] / len(entry["post"]["eigenvalues"])
            for entry in saved["spectrum"]
            if entry["post"]["rank90"] is not None
        ]
        # 96 tokens cannot fill the components of the planted keys.
        assert bool(ranks) == (side == "b")
        if ranks:
            assert value(done, "rank90_post", side) == pytest.approx(median(ranks))
        sinks = saved["sinks"]["heads"]
        assert value(done, "sink_heads", side) == len(sinks)
        assert value(done, "sink_head_share", side) == len(sinks) / len(saved["heads"])
        named = [head["pattern"] for head in saved["heads"]]
        for pattern in set(named):
            share = named.count(pattern) / len(named)
            assert value(done, f"pattern_{pattern.replace(' ', '_')}", side) == share
        assert value(done, "mean_previous_share", side) == pytest.approx(
            mean(head["previous_share"] for head in saved["heads"])
        )
    sinks = varied["sinks"]["heads"]
    assert value(done, "first_sink_layer") == min(sink["layer"] for sink in sinks)
    at_first = mean(sink["position"] == 0 for sink in sinks)
    assert value(done, "sinks_at_first_token") == pytest.approx(at_first)
    ropes = {entry["layer"]: entry for entry in varied["rope"]}
    turns = [
        ropes[s["layer"]]["inv_freq"][s["frequencies"][0]["frequency"]]
        * ropes[s["layer"]]["context"]
        / (2 * np.pi)
        for s in sinks
    ]
    shares = [
        value(done, f"sinks_by_{name}")
        for name in ("full_cycles", "partial_cycle", "below_half_a_cycle")
    ]
    counted = [
        mean(t >= 1 for t in turns), mean(0.5 < t < 1 for t in turns), mean(t <= 0.5 for t in turns)
    ]  # fmt: skip
    assert shares == pytest.approx(counted)
    assert min(at_first, shares[0], shares[2]) > 0
    assert at_first < 1
    gone = [s["frequencies"][0]["share_after_removal"] < 0.1 for s in sinks if s["frequencies"]]
    assert value(done, "sinks_gone") == pytest.approx(mean(gone))
    # A pattern that only one of the two names is 0 in the other, and no number is unknown.
    assert value(done, "pattern_induction", "b") == 0


def test_shares_of_findings_and_metrics_agree(small, uniform):
    for done in (small, uniform):
        text = next(f for f in done.data.findings if f.startswith("Partial cycles"))
        found = re.search(r"hold (\S+) of query magnitude and (\S+) of key", text)
        assert found is not None
        table = compare(done, done)
        for shown, side in zip(found.groups(), ("query", "key"), strict=True):
            assert lr.words.percent(value(table, f"{side}_partial")) == shown  # type: ignore[attr-defined]


def test_usage_by_cycles_by_hand(uniform, small):
    saved = as_saved(uniform)
    points = usage_by_cycles(read_report(uniform))
    assert len(points) == 6
    for pair in range(6):
        row = points.iloc[5 - pair]  # slowest first
        relative = [use["key"][pair] / median(use["key"]) for use in saved["usage"]]
        assert row["key_median"] == pytest.approx(median(relative))
        assert row["key_low"] <= row["key_median"] <= row["key_high"]
        w = saved["rope"][0]["inv_freq"][pair]
        assert row["cycles"] == pytest.approx(w * 256 / (2 * np.pi))
        assert (row["pairs"], row["layers"]) == (str(pair), 6)
    # However close its pairs are, each is a point where all layers rotate alike.
    dense = tuple(
        rope(layer, rotary_dim=12, d_head=12, inv_freq=1.1 ** -np.arange(6.0)) for layer in (0, 1)
    )
    points = usage_by_cycles(read_report(Report(report_data(random_capture(dense)))))
    assert list(points["pairs"]) == ["5", "4", "3", "2", "1", "0"]
    # Layers that rotate differently share bins of cycles, and every pair is in one of them.
    points = usage_by_cycles(read_report(small))
    gaps = np.diff(np.log2(points["cycles"].to_numpy(dtype=float)))
    assert (gaps > 0).all()
    assert points["layers"].max() > 1


def test_what_was_changed_is_what_is_said(planted):
    """One of everything changed by hand in the saved report."""
    before, after = as_saved(planted), as_saved(planted)
    sink = after["sinks"]["heads"].pop(0)
    head = next(
        h for h in after["heads"] if (h["layer"], h["head"]) == (sink["layer"], sink["head"])
    )
    old_share, head["sink_share"], head["pattern"] = head["sink_share"], 0.125, "mixed"
    after["usage"][0]["key"][3] *= 8
    before["offset_features"] = [
        {
            "layer": 0, "head": h, "frequency": 2, "amplitude": 10.0 + h, "angle": 2.0,
            "cycles": 0.4, "query_constancy": 0.9, "key_constancy": 0.9, "within_half_cycle": True,
            "within_angle": True, "within_region": True,
        }
        for h in (0, 1)
    ]  # fmt: skip
    after["offset_features"] = [{**before["offset_features"][1], "head": h} for h in (1, 2)]
    done = compare(before, after, names=["old", "new"])
    assert done.notes == ()
    text = "\n".join(done.sentences)
    n, total = len(before["sinks"]["heads"]), len(before["heads"])
    assert f"{n} of {total} heads in old" in text
    assert f"{n - 1} are sink heads in both, 1 in old alone and 0 in new alone" in text
    where = f"layer {sink['layer']} head {sink['head']}"
    assert f"{where}, from {lr.words.percent(old_share)} to 12%" in text  # type: ignore[attr-defined]
    assert "1 of" in next(s for s in done.sentences if s.startswith("Patterns"))
    assert "sink → mixed (1)" in text
    assert "pair 3 in the keys of layer 0 changed most, to 8 times its magnitude in old" in text
    assert "changed by a factor of at most 1." in text
    assert "Offset features: 2 in old and 2 in new; by layer, head and pair, 1 are in both" in text
    assert "1 in old alone and 1 in new alone" in text
    features = done.features().set_index("head")
    assert features["change"].to_dict() == {0: "lost", 1: "kept", 2: "gained"}
    heads = done.heads().set_index(["layer", "head"])
    row = heads.loc[(sink["layer"], sink["head"])]
    assert row["sink_share_difference"] == pytest.approx(0.125 - old_share)
    assert row["best_pair_b"] == -1
    assert row["best_pair_a"] == sink["frequencies"][0]["frequency"]
    assert heads["pattern_changed"].sum() == 1
    pairs = done.pairs()
    assert pairs.set_index(["layer", "pair"]).loc[(0, 3), "key_ratio"] == pytest.approx(8)
    # A pair that no query uses has no ratio.
    assert (pairs["query_ratio"].dropna() == 1).all()
    assert pairs["query_ratio"].notna().any()
    layers = done.layers().set_index("layer")
    assert layers.loc[sink["layer"], "sink_heads_difference"] == -1
    # The other way round, differences change their sign.
    back = compare(after, before, names=["new", "old"])
    one, other = (d.to_dataframe().set_index("metric")["difference"] for d in (done, back))
    known = one.dropna()
    assert len(known) > 15
    np.testing.assert_allclose(other[known.index], -known)


def test_only_common_layers_are_compared(planted, small):
    whole = as_saved(small)
    part = Report(report_data(random_capture(ROPES, n_pos=40)))
    content = as_saved(part)
    for section in ("rope", "usage", "spectrum", "metrics"):
        content[section] = [entry for entry in content[section] if entry["layer"] != 2]
    for section in ("heads", "offset_features"):
        content[section] = [entry for entry in content[section] if entry["layer"] != 2]
    content["sinks"]["heads"] = [s for s in content["sinks"]["heads"] if s["layer"] != 2]
    done = compare(whole, content, names=["whole", "part"])
    assert any("both reports have, 0-1, 3 of 4" in note for note in done.notes)
    assert done.first.layers == done.second.layers == (0, 1, 3)
    assert set(done.heads()["layer"]) == {0, 1, 3}
    assert (done.to_dataframe().set_index("metric")["difference"].dropna() == 0).all()
    content["rope"] = [entry for entry in content["rope"] if entry["layer"] == 3]
    content["usage"] = [entry for entry in content["usage"] if entry["layer"] == 3]
    whole["rope"], whole["usage"] = whole["rope"][:2], whole["usage"][:2]
    with pytest.raises(InputError, match="no layer in common"):
        compare(whole, content)


def test_models_of_different_shape_are_compared_by_shares(planted, uniform):
    done = compare(planted, uniform)
    assert not done.is_matched
    assert not done.has_same_rotation
    assert any("cannot be matched" in note for note in done.notes)
    assert len(done.pairs()) == len(done.features()) == 0
    layers = done.layers()
    assert len(layers) == 6
    for table in (layers, done.heads()):
        differences = [name for name in table.columns if name.endswith("_difference")]
        assert differences
        assert table[differences].isna().all().all()
    assert not done.heads()["pattern_changed"].any()
    assert any(s.startswith("Patterns: ") for s in done.sentences)


def test_the_same_shape_at_other_frequencies_is_not_matched_by_pair(uniform):
    ropes = tuple(
        rope(layer, rotary_dim=12, d_head=12, inv_freq=500000.0 ** (-np.arange(6) / 6))
        for layer in range(6)
    )
    other = Report(report_data(random_capture(ropes, n_pos=96)))
    done = compare(uniform, other)
    assert done.is_matched
    assert not done.has_same_rotation
    assert any("different frequencies" in note for note in done.notes)
    assert len(done.pairs()) == len(done.features()) == 0
    assert len(done.heads()) == 24
    assert not any(s.startswith("Usage by pair") for s in done.sentences)


def test_other_causes_are_noted(planted, tmp_path):
    content = as_saved(planted)
    for change, what in (
        ({"prompts": [{**content["prompts"][0], "name": "other"}]}, "prompts"),
        ({"model": {**content["model"], "dtype": "bfloat16"}}, "dtype"),
        ({"host": {"class": "TransformerBridge"}}, "host"),
        ({"lens_rope": "9.9"}, "version of lens_rope"),
    ):
        done = compare(planted, {**content, **change})
        assert [what in note for note in done.notes] == [True], what
    # Two texts of one name and length are told apart by the manifests.
    for name, text in (("one", "a b c"), ("two", "d e f"), ("three", "a b c")):
        folder = planted.save(tmp_path / name, formats=["json"])
        manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
        manifest["prompts"]["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    done = compare(tmp_path / "one", tmp_path / "two")
    assert ["texts of their prompts" in note for note in done.notes] == [True]
    assert compare(tmp_path / "one", tmp_path / "three").notes == ()
    # The same texts, cut by one of the two: also for models with other tokenizers.
    prompt = {**content["prompts"][0], "tokens": 5, "cut_from": 99}
    cut = {**content, "prompts": [prompt], "model": {**content["model"], "kv_heads": 1}}
    assert any("prompts" in note for note in compare(planted, cut).notes)
    longer = copy.deepcopy(content)
    for entry in longer["rope"]:
        entry["context"] *= 4
    assert any("Cycles are counted" in note for note in compare(planted, longer).notes)
    named = {**content, "model": {**content["model"], "name": "another"}}
    assert any("matched by number" in note for note in compare(planted, named).notes)


@pytest.mark.parametrize(
    "gone", ["usage", "heads", "sinks", "offset_features", "bounds", "spectrum", "ablation"]
)
def test_a_report_that_lacks_a_section_is_compared_without_it(planted, uniform, gone):
    older = {key: entry for key, entry in as_saved(planted).items() if key != gone}
    for a, b in ((older, planted), (uniform, older)):
        done = compare(a, b)
        assert len(done.sentences) >= 1
        assert any("has no" in note for note in done.notes) == (gone != "ablation")
        assert done.to_dict()["schema"] == SCHEMA
        assert "<h1>" in done.html()
        assert "data-lens-rope" in done._repr_html_()
    if gone == "usage":
        with pytest.raises(InputError, match="usage"):
            compare(older, planted).plot()


def test_no_rope_one_token_and_nan(small):
    nope = Report(report_data(random_capture((rope(0, rotary_dim=0), rope(1, rotary_dim=0)))))
    short = Report(report_data(random_capture((rope(0), rope(1)), n_pos=1)))
    for a, b in ((nope, nope), (short, short), (nope, short), (short, small), (nope, small)):
        done = compare(a, b)
        assert repr(done)
        assert json.dumps(done.to_dict(), allow_nan=False)
        assert "<h1>" in done.html()


def test_an_ablated_model_is_compared_on_the_layers_it_shows():
    """What the docstring says of `ablate_frequencies`, on a real model."""
    import zoo

    model = zoo.bridge_of(zoo.hf_model("llama"), "llama")
    tokens = zoo.tokens(48)
    before = lr.report(model, tokens, interventions=False)
    with lr.ablate_frequencies(model, {(0, None): list(range(4))}):
        with pytest.raises(InputError, match="leave these layers out"):
            lr.report(model, tokens, interventions=False)
        after = lr.report(model, tokens, layers=[1], interventions=False)
    done = compare(before, after, names=["before", "after"])
    assert done.first.layers == (1,)
    assert done.sentences != (NO_DIFFERENCE,)
    assert (done.heads()["entropy_difference"].abs() > 0).any()
    again = lr.report(model, tokens, interventions=False)
    assert compare(before, again).sentences == (NO_DIFFERENCE,)


# What is shown and written


def test_the_page_is_the_same_every_time_and_holds_plotly_once(planted, uniform):
    a, b = compare(planted, uniform), compare(planted, uniform)
    page = a.html()
    assert page == b.html()
    assert page.count("plotly.js v") == 1
    assert "default-src 'none'" in page
    assert len(page) < 8e6
    assert a._repr_html_() == b._repr_html_()
    assert len(a.plot().data) >= 2
    for sentence in a.sentences:
        assert sentence.split(": ")[-1][1:30] in page.replace("&#39;", "'")


def test_hostile_names_are_text(planted, uniform):
    content = as_saved(planted)
    content["model"]["name"] = HOSTILE_NAME
    content["prompts"][0]["name"] = HOSTILE_NAME
    done = compare(content, uniform)
    for page in (done.html(), done._repr_html_()):
        assert "</script><b>" not in page
        assert "\x00" not in page
        assert "\u202e" not in page
        assert "&lt;/script&gt;&lt;b&gt;" in page
    assert label("<b>&" + "x" * 90).startswith("&lt;b&gt;&amp;x")
    assert len(label("x" * 90)) < 50


def test_saved_files_hold_the_same_numbers(planted, uniform, tmp_path):
    done = compare(planted, uniform)
    folder = done.save(tmp_path / "there" / "cmp")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        ".lens-rope-comparison.json", "compare.html", "comparison.json",
        *(f"tables/{name}.csv" for name in ("metrics", "layers", "heads", "pairs", "features")),
    }  # fmt: skip
    assert (folder / "compare.html").read_text("utf-8") == done.html()
    content = json.loads((folder / "comparison.json").read_text("utf-8"))
    assert content == json.loads(json.dumps(done.to_dict()))
    with (folder / "tables/metrics.csv").open(newline="") as file:
        rows = {row["metric"]: row for row in csv.DictReader(file)}
    assert float(rows["sink_heads"]["a"]) == value(done, "sink_heads")
    # Written again it is replaced; beside other files it is not.
    done.save(folder)
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"holds mine\.txt"):
        done.save(folder)
    assert (folder / "mine.txt").read_text() == "mine"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(OutputError, match="left alone"):
        done.save(tmp_path / "other")
    with pytest.raises(OutputError, match="is a file"):
        done.save(tmp_path / "other" / "thesis.tex")
    report = planted.save(tmp_path / "report", formats=["json"])
    with pytest.raises(OutputError, match="left alone"):
        done.save(report)
    assert not list(tmp_path.glob(".lens-rope-tmp*"))


def test_an_interrupted_save_leaves_the_earlier_comparison(planted, uniform, tmp_path, monkeypatch):
    import os

    first = compare(planted, planted)
    folder = first.save(tmp_path / "cmp")
    rename, calls = os.rename, []

    def failing(a, b):
        calls.append((a, b))
        if os.fspath(b) == os.fspath(folder.resolve()) and os.path.basename(a) == "new":
            raise KeyboardInterrupt
        rename(a, b)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(KeyboardInterrupt):
        compare(planted, uniform).save(folder)
    assert calls
    assert (folder / "compare.html").read_text("utf-8") == first.html()
    assert [path.name for path in tmp_path.iterdir()] == ["cmp"]


def test_styles_differ_in_more_than_colour():
    styles = [style(index) for index in range(48)]
    assert len({(s.color, s.dash) for s in styles}) == 48
    assert len({s.color for s in styles[:8]}) == len(COLORS) == 8
    for one, other in pairwise(styles):
        assert one.dash != other.dash
        assert one.symbol != other.symbol
    for s in styles[:8]:
        # Against the light and the dark page, by the luminance of WCAG: at least 3 to 1.
        channels = [int(s.color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        light = float(np.dot([0.2126, 0.7152, 0.0722], linear))
        assert 1.03 / (light + 0.05) > 3, s
        assert (light + 0.05) / 0.0595 > 3, s


# The command line


@pytest.fixture
def folders(planted, uniform, tmp_path):
    planted.save(tmp_path / "a", formats=["json"])
    uniform.save(tmp_path / "b", formats=["json"])
    return str(tmp_path / "a"), str(tmp_path / "b")


def run(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def test_the_command_prints_and_writes(folders, planted, uniform, tmp_path):
    expected = compare(planted, uniform)
    done = run(*folders)
    assert done.exit_code == 0
    text = " ".join(done.stdout.split())
    for sentence in expected.sentences:
        assert " ".join(sentence.split()) in text
    assert "sink heads (heads)" in text
    assert all(f"lens-rope: note: {note}" in done.stderr for note in expected.notes)
    done = run(*folders, "--format", "json", "--out", tmp_path / "cmp")
    assert json.loads(done.stdout) == json.loads(json.dumps(expected.to_dict()))
    assert f"Wrote {tmp_path / 'cmp' / 'compare.html'}" in done.stderr
    assert (tmp_path / "cmp" / "compare.html").is_file()
    done = run(*folders, "--format", "csv", "--name", "x", "--name", "y")
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert [row["metric"] for row in rows] == list(expected.to_dataframe()["metric"])


def test_the_command_says_what_is_wrong(folders, tmp_path):
    done = run(folders[0], tmp_path / "nowhere")
    assert done.exit_code == InputError.exit_code
    assert done.stderr.count("\n") == 1
    assert "does not exist" in done.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    done = run(*folders, "--out", tmp_path / "full")
    assert done.exit_code == OutputError.exit_code
    assert run(*folders, "--name", "x").exit_code == InputError.exit_code


# The index


def index_of(tmp_path, failed=()) -> str:
    page = render_index(tmp_path, failed)
    assert "Traceback" not in page
    return page


def cells(page: str, section: str) -> list[list[str]]:
    """The cells of the table of a section, row by row, as text."""
    body = page.partition(f'<section id="{section}">')[2].partition("</section>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", body.partition("<tbody>")[2], re.S)
    found = [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row, re.S) for row in rows]
    return [[re.sub(r"<.*?>", "", cell) for cell in row] for row in found]


def test_the_index_compares_models_side_by_side(planted, uniform, small, tmp_path):
    for name, done in (("p", planted), ("u", uniform), ("s", small)):
        done.save(tmp_path / name, formats=["json", "html"])
    page = index_of(tmp_path, [("gone", "no such model")])
    assert page == index_of(tmp_path, [("gone", "no such model")])
    assert page.count("plotly.js v") == 1
    rows = cells(page, "sinks")
    # Two models have one name, so their folders tell them apart.
    assert [row[0] for row in rows] == ["planted", "tiny (s)", "tiny (u)"]
    saved = as_saved(planted)
    n = len(saved["sinks"]["heads"])
    assert rows[0][1:3] == [str(n), lr.words.percent(n / len(saved["heads"]))]  # type: ignore[attr-defined]
    usage = cells(page, "usage")
    assert [row[1] for row in usage] == ["1", "4", "6"]
    assert "1 model failed in the last run" in page
    assert page.index("no such model") < page.index("Usage against cycles")
    specs = [json.loads(text) for text in re.findall(r'id="fig-\d+-data">(.*?)</script>', page)]
    titles = [spec["layout"]["meta"]["title"] for spec in specs]
    assert titles[0] == "Query and key magnitude against cycles over the context"
    lines = [t["name"] for t in specs[0]["data"] if t.get("mode") == "lines+markers"]
    assert lines == ["planted", "tiny (s)", "tiny (u)"]
    assert [spec["layout"]["meta"]["title"] for spec in specs][3] == "Sink heads by depth"


def test_one_report_or_none_needs_no_plotly(planted, tmp_path):
    page = index_of(tmp_path, [("a", "reason")])
    assert "There is no report in this folder yet" in page
    assert "reason" in page
    planted.save(tmp_path / "p")
    page = index_of(tmp_path)
    assert 'href="p/report.html"' in page
    assert "plotly" not in page
    assert "script-src" not in page
    assert "is not compared" not in page
    # The first findings beside what was verified, as they are in the report.
    said = [f for f in planted.data.findings if not f.startswith("Verified")]
    assert len(re.findall(r"<li>", page)) == min(5, len(said))


def test_reports_without_json_and_foreign_files_are_remarked(planted, uniform, tmp_path):
    planted.save(tmp_path / "p", formats=["json"])
    uniform.save(tmp_path / "u", formats=["json"])
    planted.save(tmp_path / "h", formats=["html"])
    planted.save(tmp_path / "c", formats=["csv"])
    planted.save(tmp_path / "bad", formats=["json"])
    (tmp_path / "bad" / "report.json").write_text("{")
    newer = planted.save(tmp_path / "newer", formats=["json"]) / "report.json"
    newer.write_text(json.dumps({**as_saved(planted), "schema": "lens-rope-report/9"}))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "report.json").write_text('{"tool": "other"}')
    # Copied by hand, without the hidden file that names a report.
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied" / "report.json").write_text(json.dumps(as_saved(uniform)))
    (tmp_path / ".lens-rope-tmp-x").mkdir()
    (tmp_path / ".lens-rope-tmp-x" / "report.json").write_text("{}")
    page = index_of(tmp_path)
    assert page.count("as it was written without report.json") == 2
    assert "report.json is not JSON" in page
    assert "written as lens-rope-report/9" in page
    assert "foreign is passed over: report.json is not a report of lens-rope" in page
    assert 'href="copied/report.json"' in page
    assert 'href="h/report.html"' in page
    assert "lens-rope-tmp" not in page
    assert [row[0] for row in cells(page, "usage")] == ["tiny (copied)", "planted (p)", "tiny (u)"]
    assert str(tmp_path) not in page


def test_hostile_names_in_the_index_are_text(planted, uniform, tmp_path):
    uniform.save(tmp_path / "u", formats=["json"])
    folder = tmp_path / "javascript:alert(1)"
    folder.mkdir()
    content = as_saved(planted)
    content["model"]["name"] = HOSTILE_NAME
    content["findings"][1] = HOSTILE_NAME
    (folder / "report.json").write_text(json.dumps(content))
    page = index_of(tmp_path, [(HOSTILE_NAME, HOSTILE_NAME)])
    assert "</script><b>" not in page
    assert "\x00" not in page
    assert "javascript:" not in "".join(re.findall(r'href="(.*?)"', page))
    assert "&lt;/script&gt;&lt;b&gt;" in page


def test_more_models_than_colours(planted, tmp_path):
    reports = [read_report(planted)] * 20
    names = [f"model {i}" for i in range(20)]
    fig = usage_curves(names, [usage_by_cycles(report) for report in reports])
    assert [trace.name for trace in fig.data] == names
    assert fig.layout.height > 500


def test_changed_pairs_are_those_that_were_planted(uniform):
    """Through the whole report: one pair of one layer made longer in the capture."""
    ropes = tuple(rope(layer, rotary_dim=12, d_head=12) for layer in range(6))
    changed = with_pairs(random_capture(ropes, n_pos=96), 2, (9.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    done = compare(uniform, Report(report_data(changed)))
    pairs = done.pairs()
    other = pairs[pairs["layer"] != 2]
    assert (other[["query_ratio", "key_ratio"]] == 1).all().all()
    assert (pairs[pairs["layer"] == 2]["key_ratio"] != 1).all()
    assert "of layer 2 changed most" in next(s for s in done.sentences if "by pair" in s)
