"""The commands of the analyses print what the functions return: CSV is the table of the result,
JSON has the values of a report under the same keys, and what cannot be done is one sentence."""

from __future__ import annotations

import dataclasses
import io
import json
import unicodedata

import numpy as np
import pandas as pd
import pytest
import zoo
from report_fixtures import random_capture, rope, saved_model
from typer.testing import CliRunner

import lens_rope as lr
import lens_rope.capturing
import lens_rope.models
import lens_rope.sink_heads
from lens_rope.ablation import How
from lens_rope.ablation_effects import ablation_report
from lens_rope.bounds import check_bounds
from lens_rope.cli import app
from lens_rope.cli.parsing import parse_pairs
from lens_rope.reporting.schema import ablation_to_dict
from lens_rope.spectrum import key_spectrum
from lens_rope.views import analysis_tables, terminal
from lens_rope.views.tokens import display_text

FIRST = " ".join(f"t{40 + i % 11}" for i in range(90))
SECOND = " ".join(f"t{60 + i % 7}" for i in range(70))
MAX_TOKENS = 80
PROMPTS = ["--text", FIRST, "--text", SECOND, "--max-tokens", str(MAX_TOKENS)]
CUT = "lens-rope: note: text 1 was cut: the first 80 of 91 tokens were read.\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A saved tiny model, loaded once for all commands."""
    return lr.load_model(str(saved_model("llama", tmp_path_factory.mktemp("models"))))


@pytest.fixture(scope="module")
def qk(model):
    return lr.capture(model, [FIRST, SECOND], max_tokens=MAX_TOKENS)


@pytest.fixture
def run(model, monkeypatch):
    """Runs a command on the model; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(lens_rope.models, "load_model", lambda *args, **kwargs: model)
    # Random models have no sinks; with this, some of their heads count as if they had.
    monkeypatch.setattr(lens_rope.sink_heads, "SINK_THRESHOLD", 0.05)

    def invoke(command: str, *arguments: str):
        result = CliRunner().invoke(app, [command, "llama", *arguments])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return invoke


@pytest.fixture
def no_model(run, monkeypatch):
    """Whatever happens, happens before a model is loaded."""

    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(lens_rope.models, "load_model", refuse)


def read(text: str) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(text))


def assert_same(csv: str, expected: pd.DataFrame) -> None:
    """The CSV holds all rows and columns of a result, to the digits that it prints."""
    assert len(expected)
    pd.testing.assert_frame_equal(
        read(csv), read(expected.to_csv(index=False)), rtol=1e-8, check_dtype=False
    )


def features(qk):
    return lr.offset_features(qk, constancy=0.2, relative=0.5)


EXPECTED = {
    "sinks": (["sinks"], lambda qk, model: lr.explain_sinks(qk).to_dataframe()),
    "heads": (["heads"], lambda qk, model: lr.explain_heads(qk, model=model).to_dataframe()),
    "another seed": (
        ["heads", "--seed", "3"],
        lambda qk, model: lr.explain_heads(qk, model=model, seed=3).to_dataframe(),
    ),
    "the prompts alone": (
        ["heads", "--no-repeated"], lambda qk, model: lr.explain_heads(qk).to_dataframe(),
    ),
    "features": (
        ["features", "--constancy", "0.2", "--relative", "0.5"],
        lambda qk, model: features(qk).features(),
    ),
    "outliers": (
        ["features", "--outliers", "--relative", "1.2"],
        lambda qk, model: lr.offset_features(qk).outliers(1.2),
    ),
    "bounds": (
        ["features", "--bounds", "--constancy", "0.2", "--relative", "0.5", "--strong", "0.1"],
        lambda qk, model: check_bounds(features(qk), 0.1).to_dataframe(),
    ),
    "spectrum": (["spectrum"], lambda qk, model: key_spectrum(qk).to_dataframe()),
    "spectrum by head": (
        ["spectrum", "--by-head"], lambda qk, model: key_spectrum(qk).heads_dataframe(),
    ),
    "ablate": (
        ["ablate"],
        lambda qk, model: ablated(model, lr.explain_sinks(qk).best_pairs()),
    ),
    "ablate pairs": (
        ["ablate", "--pairs", "1.0:2-3;0.*:1", "--controls", "2", "--seed", "5"],
        lambda qk, model: ablated(model, {(1, 0): [2, 3], (0, None): [1]}, controls=2, seed=5),
    ),
    "ablate to the mean": (
        ["ablate", "--pairs", "1.*:7", "--how", "mean"],
        lambda qk, model: ablated(model, {(1, None): [7]}, "mean", offsets=qk),
    ),
    "unrotate": (
        ["ablate", "--pairs", "*.*:7", "--how", "unrotate"],
        lambda qk, model: ablated(model, {(None, None): [7]}, "unrotate"),
    ),
}  # fmt: skip


def ablated(model, pairs, how: How = "zero", **options) -> pd.DataFrame:
    return ablation_report(
        model, [FIRST, SECOND], pairs, how, max_tokens=MAX_TOKENS, **options
    ).to_dataframe()


@pytest.fixture(scope="module")
def defaults():
    """What each command printed without options of its own."""
    return {}


@pytest.mark.parametrize("name", EXPECTED)
def test_csv_is_the_table_of_the_result(run, model, qk, name, defaults):
    arguments, expected = EXPECTED[name]
    code, out, err = run(*arguments, *PROMPTS, "--format", "csv")
    assert code == 0, err
    assert err.startswith(CUT)
    assert_same(out, expected(qk, model))
    # Options that changed nothing could not be told from options that get lost.
    command = arguments[0]
    if command not in defaults:
        defaults[command] = run(command, *PROMPTS, "--format", "csv")[1]
    assert (out != defaults[command]) == (len(arguments) > 1)


def test_json_has_the_values_of_a_report_under_the_same_keys(run, model):
    whole = lr.report(
        model, [FIRST, SECOND], names=["text 1", "text 2"], max_tokens=MAX_TOKENS,
        interventions=False,
    ).to_dict()  # fmt: skip
    for command, keys in (
        ("sinks", ["sinks"]),
        ("heads", ["heads"]),
        ("features", ["offset_features", "bounds"]),
        ("spectrum", ["spectrum"]),
    ):
        code, out, err = run(command, *PROMPTS, "--format", "json")
        assert code == 0, err
        content = json.loads(out)
        assert content["model"] == whole["model"]["name"]
        for got, expected in zip(content["prompts"], whole["prompts"], strict=True):
            assert got == {key: expected[key] for key in ("name", "tokens", "cut_from")}
        assert content["notes"][0] + "\n" == CUT.removeprefix("lens-rope: note: ")
        assert [f"lens-rope: note: {note}" for note in content["notes"]] == err.splitlines()
        for key in keys:
            assert content[key] == whole[key], key


def test_json_of_an_ablation_is_that_of_its_report(run, model):
    _, out, _ = run("ablate", "--pairs", "1.0:2", *PROMPTS, "--format", "json")
    done = ablation_report(
        model, [FIRST, SECOND], {(1, 0): [2]}, max_tokens=MAX_TOKENS, names=["text 1", "text 2"]
    )
    assert json.loads(out)["ablation"] == ablation_to_dict(done)


def test_json_of_parts_is_what_was_asked_for(run, qk):
    def keys(*arguments):
        content = json.loads(run(*arguments, *PROMPTS, "--format", "json")[1])
        return content, sorted(content.keys() - {"model", "prompts", "notes"})

    thresholds = ("--constancy", "0.2", "--relative", "0.5")
    content, found = keys("features", *thresholds)
    assert found == ["bounds", "offset_features"]
    # The same features, in the order of layers and not of amplitudes.
    table = features(qk).features()
    assert [(e["layer"], e["head"], e["frequency"]) for e in content["offset_features"]] == sorted(
        zip(table["layer"], table["head"], table["pair"], strict=True)
    )
    assert keys("features", "--bounds", *thresholds)[1] == ["bounds"]
    content, found = keys("features", "--outliers", "--relative", "1.2")
    assert found == ["outliers"]
    table = lr.offset_features(qk).outliers(1.2)
    assert len(content["outliers"]) == len(table)
    got, row = content["outliers"][1], table.iloc[1]
    assert got == {
        "layer": row["layer"], "side": row["side"], "head": row["head"], "frequency": row["pair"],
        **{key: row[key] for key in ("mean", "largest", "relative", "constancy")},
    }  # fmt: skip
    content, found = keys("spectrum", "--by-head", "--layers", "1")
    assert found == ["spectrum"]
    assert [(e["layer"], e["kv_head"]) for e in content["spectrum"]] == [(1, 0), (1, 1)]
    pre, post = key_spectrum(qk).layer(1).heads[1]
    last = content["spectrum"][1]
    assert last["pre"]["trace"] == pytest.approx(pre.trace)
    assert last["post"]["eigenvalues"] == pytest.approx(post.eigenvalues.tolist())
    assert last["offset_energy"] == pytest.approx(pre.mean_energy - post.mean_energy)


def test_layers_and_context_reach_the_capture(run, qk):
    short = ["--layers", "1", *PROMPTS, "--format", "csv"]
    for command in ("sinks", "heads", "spectrum", "ablate"):
        _, out, _ = run(command, *short)
        assert set(read(out)["layer"]) == {1}, command
    _, out, _ = run("features", "--constancy", "0.2", "--relative", "0.5", *short)
    assert set(read(out)["layer"]) == {1}
    for command in (["sinks"], ["features", "--constancy", "0.2", "--relative", "0.5"]):
        before, after = (
            read(run(*command, *PROMPTS, *more, "--format", "csv")[1])
            for more in ([], ["--context", str(4 * qk.layer(0).rope.context)])
        )
        np.testing.assert_allclose(after["cycles"], 4 * before["cycles"])


def test_unrotating_sinks_takes_whole_groups(run, qk):
    _, out, _ = run("ablate", "--how", "unrotate", *PROMPTS, "--format", "csv")
    table = read(out)
    where = zip(table["layer"], table["head"], strict=True)
    got = dict(zip(where, table["pairs"].astype(str), strict=True))
    groups: dict = {}
    for (layer, head), (pair,) in lr.explain_sinks(qk).best_pairs().items():
        groups.setdefault((layer, head // 2), set()).add(pair)
    assert got == {
        (layer, 2 * group + i): " ".join(map(str, sorted(pairs)))
        for (layer, group), pairs in groups.items()
        for i in range(2)
    }


@pytest.mark.parametrize("arguments", [[], ["--pairs", "1.0:2", "--how", "mean"]])
def test_an_ablation_reads_with_the_attention_that_was_asked_for(run, monkeypatch, arguments):
    """Sink heads and means are read so; the runs that are compared are the model's own."""
    bridge = zoo.bridge("llama")
    monkeypatch.setattr(lens_rope.models, "load_model", lambda *args, **kwargs: bridge)
    tables = {}
    for attention in ("eager", "fused"):
        code, tables[attention], err = run(
            "ablate", *arguments, *PROMPTS, "--attention", attention, "--format", "csv"
        )
        assert code == 0, err
        assert ("read in a fused pass" in err) == (attention == "fused")
    eager, fused = (read(table) for table in tables.values())
    pd.testing.assert_frame_equal(fused, eager, rtol=1e-4)


def test_prompts_of_a_spectrum_are_read_one_by_one(run, monkeypatch):
    given = []
    capture = lens_rope.capturing.capture

    def noting(model, prompts, *args, **kwargs):
        given.append(prompts)
        return capture(model, prompts, *args, **kwargs)

    monkeypatch.setattr(lens_rope.capturing, "capture", noting)
    assert run("spectrum", *PROMPTS)[0] == 0
    assert given == [FIRST, SECOND]


def test_without_prompts_the_sample_text_is_read(run):
    content = json.loads(run("spectrum", "--max-tokens", "40", "--format", "json")[1])
    (prompt,) = content["prompts"]
    assert (prompt["name"], prompt["tokens"]) == ("sample text", 40)
    assert prompt["cut_from"] > 100


# Tables


@pytest.mark.parametrize("name", EXPECTED)
def test_tables_fit_a_terminal_and_are_not_cut(run, name):
    arguments, _ = EXPECTED[name]
    code, out, _ = run(*arguments, *PROMPTS)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 140
    assert "…" not in out
    assert "nan" not in out


def test_tables_begin_with_the_headline(run, qk):
    def first(*arguments):
        return run(*arguments, *PROMPTS)[1].splitlines()[0]

    n = len(lr.explain_sinks(qk).heads)
    assert first("sinks").startswith(f"{n} of 8 heads of llama are sink heads")
    assert first("heads").startswith("8 heads of llama: ")
    assert " offset features in llama (constancy at least 0.8" in first("features")
    assert first("spectrum").startswith("Key spectrum of llama, 151 tokens, layers 0-1: ")
    assert first("ablate", "--pairs", "0.1:2").startswith("Setting to zero 1 pairs of 1 heads")


def test_sinks_are_listed_by_share(run, qk):
    lines = run("sinks", *PROMPTS)[1].splitlines()
    order = sorted(lr.explain_sinks(qk).heads, key=lambda e: -e.share)
    listed = [line.split()[0] for line in lines if line[:2] == "  " and line[2:3].isdigit()]
    assert listed == [f"{e.layer}.{e.head}" for e in order]
    assert f"Layer {order[0].layer} head {order[0].head} gives" in lines[1]


def test_long_tables_say_how_much_is_left_out(run, monkeypatch):
    frame = pd.DataFrame({"a": range(45), "b": [np.nan] * 45, "c": ["x"] * 45})
    columns = {"a": ("one", str), "b": ("two", str), "c": ("three", str)}
    lines = terminal.frame_table("Title", frame, columns).splitlines()
    assert lines[0] == "Title"
    assert lines[2].split() == ["one", "two", "three"]
    rows = [line.split() for line in lines[4:-1] if line]
    assert rows == [[str(i), "x"] for i in range(40)]
    assert lines[-1] == "  and 5 more; csv and json have all of them"
    assert "more" not in terminal.frame_table("Title", frame.head(40), columns)
    # Heads are then a few of each pattern.
    monkeypatch.setattr(analysis_tables, "MAX_ROWS", 2)
    monkeypatch.setattr(analysis_tables, "CLEAREST", 1)
    _, out, _ = run("heads", *PROMPTS)
    table = read(run("heads", *PROMPTS, "--format", "csv")[1])
    clearest = table.sort_values("strength", ascending=False).groupby("pattern").head(1)
    listed = {line.split()[0] for line in out.splitlines()[3:] if line[2:3].isdigit()}
    assert listed == {f"{layer}.{head}" for layer, head in clearest[["layer", "head"]].to_numpy()}
    assert len(listed) < len(table)


@pytest.mark.parametrize("token", ["a\n\n\tb", "\u202e", "\x00"])
def test_tokens_in_a_table_stay_on_their_line(monkeypatch, token):
    monkeypatch.setattr(lens_rope.sink_heads, "SINK_THRESHOLD", 0.01)
    found = lr.explain_sinks(random_capture((rope(0),), n_pos=70))
    prompt = dataclasses.replace(found.prompts[0], tokens=(token,) * 70)
    sink = dataclasses.replace(found.heads[0], position=3)
    out = analysis_tables.sinks_table(dataclasses.replace(found, prompts=(prompt,), heads=(sink,)))
    assert display_text(token) in out
    assert not {unicodedata.category(c) for c in out.replace("\n", "")} & {"Cc", "Cf"}


# What can go wrong


@pytest.mark.parametrize(
    "value",
    ["", "16", "16.0", "16.0:", "16.0:a", "16.0:3-1", "x.0:1", "16.0:1;", "1.2.3:4", "**.0:1"],
)
def test_pairs_that_are_not_understood(run, no_model, value):
    code, out, err = run("ablate", "--pairs", value)
    assert (code, out) == (2, "")
    assert err == (
        f"lens-rope: --pairs {value!r} is not understood; write layer.head:pair,pair with ; "
        "between heads and * for all of them, like 16.0:23,24;27.*:23\n"
    )


def test_pairs_that_are_understood():
    assert parse_pairs(None) is None
    assert parse_pairs("16.0:24,23; 27.* : 1-3,2;*.*:0;16.0:5,24") == {
        (16, 0): [5, 23, 24], (27, None): [1, 2, 3], (None, None): [0],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["features", "--outliers", "--bounds"], "--outliers and --bounds print different tables"),
        (["ablate", "--pairs", "0.0:1", "--layers", "1"], "--layers says where to look for sink"),
        (
            ["ablate", "--pairs", "0.0:1", "--attention", "fused"],
            "--attention says how the model is read to find sink heads or means, and pairs from "
            "--pairs with --how zero need neither; leave it out",
        ),
        (
            ["ablate", "--pairs", "0.0:1", "--how", "unrotate", "--attention", "eager"],
            "--attention says how the model is read to find sink heads or means, and pairs from "
            "--pairs with --how unrotate need neither; leave it out",
        ),
        (["sinks", "--layers", "3-1"], "--layers '3-1' is not understood"),
        (["spectrum", "--file", "missing.txt"], "cannot read missing.txt"),
    ],
)
def test_what_makes_no_sense_is_said_before_a_model_is_loaded(run, no_model, arguments, message):
    code, out, err = run(*arguments)
    assert code == (7 if "--file" in arguments else 2)
    assert out == ""
    assert err.startswith(f"lens-rope: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["features", "--constancy", "1.5"], ["features", "--relative", "-1"],
        ["features", "--strong", "-1"], ["heads", "--seed", "-1"], ["ablate", "--controls", "0"],
        ["ablate", "--how", "gone"], ["sinks", "--format", "html"], ["sinks", "--max-tokens", "0"],
        ["heads", "--context", "0"],
    ],
)  # fmt: skip
def test_options_out_of_range_are_usage_errors(run, no_model, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "Usage:" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["sinks", "--layers", "0-7"], 2, "layers [2, 3, 4, 5, 6, 7] cannot be read"),
        (["ablate", "--pairs", "0.0:8"], 2, "pair 8 is out of range; layer 0 has 8 pairs"),
        (["ablate", "--pairs", "0.4:1"], 2, "head 4 is out of range; layer 0 has 4 heads"),
        (["ablate", "--pairs", "9.0:1"], 2, "layers [9] cannot be read"),
        (["ablate", "--pairs", "9.0:1", "--how", "mean"], 2, "layers [9] cannot be read"),
        (["ablate", "--pairs", "0.0-7:1"], 2, "--pairs '0.0-7:1' is not understood"),
        (["ablate", "--pairs", "0.*:0-7"], 2, "layer 0 head 0 has no pairs besides the ablated"),
    ],
)
def test_what_the_model_cannot_do_is_one_sentence(run, arguments, code, message):
    got, out, err = run(*arguments, "--text", " ".join(["t50"] * 130))
    assert (got, out) == (code, "")
    assert message in err
    assert err.startswith("lens-rope: ")
    assert err.count("\n") == 1


def test_short_prompts_are_said_and_their_numbers_left_out(run):
    short = ["--text", "t5 t6 t7"]

    def printed(*arguments, form):
        code, out, err = run(*arguments, *short, "--format", form)
        assert code == 0, err
        return (json.loads(out) if form == "json" else read(out)), err

    content, err = printed("sinks", form="json")
    assert content["sinks"]["heads"] == []
    assert "The prompt is too short to tell sinks (4 tokens" in err
    assert len(printed("sinks", form="csv")[0]) == 0
    assert (
        run("sinks", *short)[1] == "0 of 8 heads of llama are sink heads (sink share above 0.05)\n"
    )

    content, err = printed("heads", form="json")
    assert {head["pattern"] for head in content["heads"]} == {None}
    assert "No head is named: the shortest prompt has 4 tokens" in err
    assert printed("heads", form="csv")[0]["pattern"].isna().all()
    assert run("heads", *short)[1].startswith("8 heads of llama: 8 not named\n")

    content, err = printed("features", form="json")
    assert content["offset_features"] == []
    assert content["bounds"]["p_value"] is None
    assert "Offsets are left out where fewer than 32 tokens" in err
    assert printed("features", "--bounds", form="csv")[0]["share"].isna().all()

    content, err = printed("spectrum", form="json")
    assert {side["rank90"] for e in content["spectrum"] for side in (e["pre"], e["post"])} == {None}
    assert "Layers 0-1 have 4 tokens for up to 32 components" in err
    assert printed("spectrum", form="csv")[0]["rank90_pre"].isna().all()

    content, err = printed("ablate", "--pairs", "1.0:2", form="json")
    assert content["ablation"]["loss_after"] > 0
    assert content["ablation"]["heads"][0]["sink_share"] == [None, None, None]
    assert "1 of 1 prompts have fewer than 64 tokens" in err
    code, out, err = run("ablate", *short)
    assert (code, out) == (2, "")
    assert err.startswith("lens-rope: The prompt is too short to tell sinks (4 tokens")
    assert err.endswith("There is no sink head to ablate; name pairs with --pairs\n")


def test_cut_prompts_are_counted_together(run):
    _, _, err = run("spectrum", "--text", FIRST, "--text", SECOND, "--max-tokens", "50")
    note = "lens-rope: note: 2 of 2 prompts were cut to 50 tokens; together they had 162.\n"
    assert err.startswith(note)


def test_heads_of_a_model_too_small_for_repeated_tokens(run, monkeypatch):
    config = zoo.CONFIGS["llama"]()
    config.max_position_embeddings = 20
    small = zoo.bridge_of(zoo.hf_model("llama", config=config), "llama")
    monkeypatch.setattr(lens_rope.models, "load_model", lambda *args, **kwargs: small)
    code, out, err = run("heads", "--text", FIRST, "--format", "csv")
    assert code == 0, err
    assert len(read(out)) == 8
    where = "Induction, duplicate token and first occurrence are measured where tokens of the text"
    assert f"{where} come back; the model is too small for repeated random tokens." in err
    _, _, err = run("heads", "--text", FIRST, "--no-repeated")
    assert f"{where} come back; leave out --no-repeated for repeated random tokens." in err
    assert "model=" not in err
