"""The command line does what its functions do, says what went wrong in one sentence on stderr with
an exit code of its own, and leaves nothing half-written."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zoo
from report_fixtures import saved_model
from typer.testing import CliRunner

import lens_rope.cli as cli
import lens_rope.demo
import lens_rope.models
from lens_rope.cli.running import Bars, progress
from lens_rope.errors import ModelLoadError, VerificationError
from lens_rope.reporting.batch import folders_of
from lens_rope.reporting.write import MARKER

TEXT = " ".join(f"t{40 + i % 11}" for i in range(30))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(saved_model("llama", tmp_path_factory.mktemp("models")))


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the command line in an empty folder; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str):
        result = CliRunner().invoke(cli.app, list(arguments))
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return invoke


@pytest.fixture
def no_model(monkeypatch):
    """Whatever happens, happens before a model is loaded."""

    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(lens_rope.models, "load_model", refuse)


def one_sentence(stderr: str) -> str:
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("lens-rope: ")
    assert "Traceback" not in stderr
    return lines[0].removeprefix("lens-rope: ")


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# What it does


def test_report_writes_a_folder_per_model_and_an_index(run, tiny, tmp_path):
    # Long enough for every number, so there is nothing to remark on.
    text = " ".join([TEXT] * 3)
    code, out, err = run("report", tiny, "--text", text, "--out", "there")
    assert (code, err) == (0, "")
    assert "Wrote there/llama/report.html" in out
    assert "Verified: the attention scores of 2 layers" in out
    found = files(tmp_path / "there")
    assert {"index.html", "llama/report.html", "llama/report.json", f"llama/{MARKER}"} <= set(found)
    assert 'href="llama/report.html"' in (tmp_path / "there/index.html").read_text("utf-8")
    content = json.loads((tmp_path / "there/llama/report.json").read_text("utf-8"))
    assert content["prompts"] == [
        {"name": "text", "tokens": 91, "cut_from": None, "starts_with_bos": True}
    ]
    # Again: the earlier report is replaced.
    assert run("report", tiny, "--text", TEXT, "--out", "there", "--format", "json")[0] == 0
    assert "llama/report.html" not in files(tmp_path / "there")


def test_options_reach_the_report(run, tiny, tmp_path):
    (tmp_path / "a.txt").write_text("\ufefft50 t51 t52", encoding="utf-8")
    lines = [{"text": TEXT, "name": "first"}, {"text": "t60 t61\u2028t62"}]
    (tmp_path / "p.jsonl").write_text(
        "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8"
    )
    code, _, err = run(
        "report", tiny, "--text", "t5 t6", "--text", "t7 t8", "--file", "a.txt",
        "--prompts", "p.jsonl", "--layers", "1", "--heads", "1.3,1.0", "--max-tokens", "20",
        "--backend", "bridge", "--device", "cpu", "--dtype", "bfloat16",
        "--format", "json", "--format", "csv",
    )  # fmt: skip
    assert code == 0, err
    folder = tmp_path / "lens-rope-report" / "llama"
    assert not (tmp_path / "lens-rope-report" / "index.html").exists()
    content = json.loads((folder / "report.json").read_text("utf-8"))
    assert [(p["name"], p["tokens"]) for p in content["prompts"]] == [
        ("text 1", 3), ("text 2", 3), ("a.txt", 4), ("first", 20), ("p.jsonl line 3", 4),
    ]  # fmt: skip
    assert content["host"]["class"] == "TransformerBridge"
    assert content["model"]["dtype"] == "bfloat16"
    assert [entry["layer"] for entry in content["rope"]] == [1]
    with (folder / "tables" / "gallery_by_pair.csv").open(newline="") as file:
        heads = dict.fromkeys((row["layer"], row["head"]) for row in csv.DictReader(file))
    assert list(heads) == [("1", "3"), ("1", "0")]
    assert "lens-rope: note: First was cut: the first 20 of 31 tokens were read.\n" in err


def test_the_demo_model_has_one_name():
    assert cli.DEMO_MODEL == lens_rope.demo.DEMO_MODEL


def short_context(n_tokens):
    config = zoo.CONFIGS["llama"]()
    config.max_position_embeddings = n_tokens
    return zoo.bridge_of(zoo.hf_model("llama", config=config), "llama")


def test_defaults_fit_models_of_short_context(run, tmp_path, monkeypatch):
    monkeypatch.setattr(lens_rope.models, "load_model", lambda *a, **k: short_context(24))
    code, _, err = run("report", "short", "--text", TEXT, "--format", "json")
    assert code == 0, err
    assert "note: Text was cut: the first 24 of 31 tokens were read." in err
    code, out, err = run("check", "short", "--text", TEXT)
    assert (code, err) == (0, "")
    assert out.count("yes") == 2
    # Asked for, it is taken as it is, and said.
    for command in ("report", "check"):
        code, _, err = run(command, "short", "--text", TEXT, "--max-tokens", "30")
        assert code == 0, err
        assert re.search(r"note: .*trained context (is|of) 24\b", err), err


@pytest.mark.parametrize("command", ["check", "spectrum", "report"])
def test_attention_and_threads_reach_the_pass(run, tiny, command, monkeypatch):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    arguments = [command, tiny, "--text", TEXT, "--backend", "bridge", "--threads", "1"]
    said = "read in a fused pass"
    code, _, err = run(*arguments, "--attention", "fused")
    assert (code, threads) == (0, [1])
    assert command == "report" or err.count(said) == 1
    assert said not in run(*arguments, "--attention", "eager")[2]
    assert run(*arguments, "--attention", "flash")[0] == 2


def test_the_context_can_be_given(run, tiny, tmp_path):
    code, out, _ = run("inspect", tiny, "--context", "4096", "--format", "json")
    assert code == 0
    assert {entry["context"] for entry in json.loads(out)["rope"]} == {4096}
    code, _, err = run(
        "report", tiny, "--text", TEXT, "--context", "4096", "--format", "json", "--out", "there"
    )
    assert code == 0
    assert "note: Cycles are counted over a context of 4,096 tokens" in err
    content = json.loads((tmp_path / "there/llama/report.json").read_text("utf-8"))
    assert {entry["context"] for entry in content["rope"]} == {4096}
    assert run("check", tiny, "--text", TEXT, "--context", "4096")[0] == 0
    assert run("report", tiny, "--context", "0")[0] == 2


def test_no_model_means_the_demo_on_the_sample_text(run, tmp_path, monkeypatch):
    asked = []

    def load(name, backend, **kwargs):
        asked.append((name, backend))
        return zoo.bridge_of(zoo.hf_model("llama"), "llama")

    monkeypatch.setattr(lens_rope.models, "load_model", load)
    code, _, err = run("report", "--max-tokens", "16", "--format", "json")
    assert code == 0, err
    assert asked == [("smollm2-135m", "auto")]
    assert files(tmp_path / "lens-rope-report") == [
        "run.json", f"smollm2-135m/{MARKER}", "smollm2-135m/manifest.json",
        "smollm2-135m/report.json",
    ]  # fmt: skip
    assert "Sample text was cut: the first 16 of" in err


def test_one_model_that_fails_does_not_stop_the_others(run, tiny, tmp_path):
    code, out, err = run("report", "./missing-model", tiny, "--text", TEXT)
    assert code == ModelLoadError.exit_code
    assert "llama/report.html" in out
    lines = err.splitlines()
    assert lines[0].startswith("lens-rope: ./missing-model: ")
    assert lines[-1] == "lens-rope: failed: ./missing-model"
    index = (tmp_path / "lens-rope-report/index.html").read_text("utf-8")
    assert "llama/report.html" in index
    assert "./missing-model" in index
    assert not any("missing" in name for name in files(tmp_path))


def test_inspect_prints_the_rope(run, tiny):
    code, out, err = run("inspect", tiny)
    assert (code, err) == (0, "")
    assert "RoPE of llama" in out
    assert "0-1" in out
    assert "19,869" in out  # the longest wavelength, 2 pi 1e4 ** (7 / 8)
    code, out, _ = run("inspect", tiny, "--format", "json", "--layers", "1")
    content = json.loads(out)
    assert [entry["layer"] for entry in content["rope"]] == [1]
    assert content["rope"][0]["inv_freq"][4] == pytest.approx(0.01)
    rows = list(csv.DictReader(io.StringIO(run("inspect", tiny, "--format", "csv")[1])))
    assert len(rows) == 16
    assert float(rows[12]["wavelength"]) == pytest.approx(628.3185, rel=1e-5)


def test_check_prints_the_verification(run, tiny):
    code, out, err = run("check", tiny, "--text", TEXT)
    assert (code, err) == (0, "")
    assert out.count("yes") == 2
    code, out, _ = run("check", tiny, "--format", "json", "--max-tokens", "20")
    rows = json.loads(out)["layers"]
    assert [(row["prompt"], row["layer"], row["ok"]) for row in rows] == [
        ("sample text", 0, True), ("sample text", 1, True),
    ]  # fmt: skip
    assert all(row["relative_error"] < 1e-5 for row in rows)


def test_check_names_the_layer_that_fails_and_shows_the_others(run, tiny, monkeypatch):
    from lens_rope import streaming

    verify = streaming.verify

    def break_layer_one(q, k, rope, reading, name):
        return verify(q * (1.01 if rope.layer == 1 else 1), k, rope, reading, name)

    monkeypatch.setattr(streaming, "verify", break_layer_one)
    code, out, err = run("check", tiny, "--text", TEXT, "--format", "csv")
    assert code == 1
    assert one_sentence(err).startswith("layer 1 of llama cannot be read exactly: score error")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["layer"], row["ok"]) for row in rows] == [("0", "True"), ("1", "False")]
    assert float(rows[1]["relative_error"]) > 1e-3
    assert "FAILS" in run("check", tiny, "--text", TEXT)[1]
    # In a report the same is an error of its own, and there is no report.
    code, _, err = run("report", tiny, "--text", TEXT)
    assert code == VerificationError.exit_code
    one_sentence(err)


def test_version_and_help(run):
    from lens_rope import __version__

    assert run("--version")[:2] == (0, f"lens-rope {__version__}\n")
    commands = (
        "report", "compare", "inspect", "check", "sinks", "heads", "features", "spectrum", "ablate",
    )  # fmt: skip
    for command in commands:
        assert command in run("--help")[1]


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from lens_rope.cli import app;"
        "assert CliRunner().invoke(app, ['report', '--help']).exit_code == 0;"
        "assert CliRunner().invoke(app, ['report', '--layers', 'x']).exit_code == 2;"
        "assert CliRunner().invoke(app, ['ablate', 'm', '--pairs', 'x']).exit_code == 2;"
        "heavy = {'torch', 'transformer_lens', 'plotly', 'pandas'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# What can go wrong


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--layers", "3-1"], 2, "--layers '3-1' is not understood; write it like 0-3,7"),
        (["--layers", "a"], 2, "--layers 'a' is not understood"),
        (["--layers", ""], 2, "--layers '' is not understood"),
        (["--layers", "-1"], 2, "--layers '-1' is not understood"),
        (["--heads", "16"], 2, "--heads '16' is not understood; write layer.head"),
        (["--text", " \n"], 7, "text is empty"),
        (["--text", "ok", "--text", ""], 7, "text 2 is empty"),
        (["--file", "missing.txt"], 7, "cannot read missing.txt: no such file or directory"),
        (["--file", "."], 7, "cannot read .: is a directory"),
        (["--file", "binary"], 7, "binary is not a text file: byte 1 is not UTF-8"),
        (["--file", "nul"], 7, "nul is not a text file: it holds NUL bytes"),
        (["--file", "empty"], 7, "empty is empty"),
        (["--prompts", "missing.jsonl"], 7, "cannot read missing.jsonl"),
        (["--prompts", "empty"], 7, "empty holds no prompts"),
        (["--prompts", "bad.jsonl"], 7, "bad.jsonl line 3 is not JSON"),
        (["--prompts", "list.jsonl"], 7, 'list.jsonl line 1 has no "text"'),
        (["--prompts", "name.jsonl"], 7, 'name.jsonl line 1: "name" must be a string'),
        (["--prompts", "blank.jsonl"], 7, "blank.jsonl line 1 is empty"),
        (["--prompts", "deep.jsonl"], 7, "deep.jsonl line 2 is not JSON"),
        (["--prompts", "half.jsonl"], 7, 'half.jsonl line 2: "text" is not text: character 3 is'),
        (["--prompts", "halfname.jsonl"], 7, 'halfname.jsonl line 1: "name" is not text'),
        (["--text", "\udcff w5"], 7, "text is not text: character 1 is half a character or a byte"),
        (["--out", "mixed"], 6, "mixed/smollm2-135m holds mine.txt beside a report"),
        (["--out", "empty"], 6, "cannot write empty/smollm2-135m: "),
        (
            ["--out", "taken"],
            6,
            "taken/smollm2-135m holds something that is not a lens-rope report",
        ),
        (["--out", "homepage"], 6, "homepage/index.html was not written by lens-rope"),
    ],
)
def test_bad_input_is_one_sentence_before_a_model_is_loaded(
    run, no_model, tmp_path, arguments, code, message
):
    (tmp_path / "binary").write_bytes(b"a\xff\xfe")
    (tmp_path / "nul").write_bytes(b"a\0b")
    (tmp_path / "empty").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n\n{"text": \n')
    (tmp_path / "list.jsonl").write_text('["a"]\n')
    (tmp_path / "name.jsonl").write_text('{"text": "a", "name": 3}\n')
    (tmp_path / "blank.jsonl").write_text('{"text": " "}\n')
    (tmp_path / "taken" / "smollm2-135m").mkdir(parents=True)
    (tmp_path / "taken" / "smollm2-135m" / "mine.txt").write_text("precious")
    (tmp_path / "deep.jsonl").write_text('{"text": "a"}\n' + "[" * 200_000)
    (tmp_path / "half.jsonl").write_text('{"text": "a"}\n{"text": "a \\ud800"}\n')
    (tmp_path / "halfname.jsonl").write_text('{"text": "a", "name": "\\ud800"}\n')
    (tmp_path / "mixed" / "smollm2-135m").mkdir(parents=True)
    (tmp_path / "mixed" / "smollm2-135m" / "mine.txt").write_text("precious")
    marker = {
        "schema": "lens-rope-report/1", "created": "", "model": "", "host": "", "layers": 1,
        "heads": 1, "max_relative_error": 0.0, "prompts": 1, "tokens": 1, "findings": [],
        "files": [],
    }  # fmt: skip
    (tmp_path / "mixed" / "smollm2-135m" / MARKER).write_text(json.dumps(marker))
    (tmp_path / "homepage").mkdir()
    (tmp_path / "homepage" / "index.html").write_text("<h1>Mine</h1>")
    before = files(tmp_path)
    got, out, err = run("report", *arguments)
    assert message in one_sentence(err)
    assert (got, out) == (code, "")
    assert files(tmp_path) == before
    assert not (tmp_path / "lens-rope-report").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--layers", "0-7"], 2, "layers [2, 3, 4, 5, 6, 7] cannot be read"),
        (["--heads", "0.9"], 2, "head 0.9 does not exist; llama has layers 0 to 1"),
        (["--heads", "0.1", "--layers", "1"], 2, "layer 0 is not among the layers"),
        (["--dtype", "int3"], 2, "int3"),
        (["--device", "nowhere"], 2, "nowhere"),
    ],
)
def test_what_the_model_cannot_do_is_one_sentence_and_no_folder(
    run, tiny, tmp_path, arguments, code, message
):
    text = " ".join(["t50"] * 130)
    got, out, err = run("report", tiny, "--text", text, *arguments)
    assert message in one_sentence(err)
    assert (got, out) == (code, "")
    assert files(tmp_path) == []
    assert not (tmp_path / "lens-rope-report").exists()


def test_unknown_options_are_a_usage_error(run, no_model):
    assert run("report", "--colour", "red")[0] == 2
    assert run("report", "--format", "pdf")[0] == 2
    assert run("report", "--max-tokens", "0")[0] == 2


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
def test_a_folder_without_permission_is_refused(run, no_model, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    code, _, err = run("report", "--out", "locked/here")
    assert code == 6
    assert "permission denied" in one_sentence(err)


def test_an_interrupt_leaves_nothing(run, tiny, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    # While reading the model, and while writing.
    for target in (
        "lens_rope.reporting.gather.analyse",
        "lens_rope.reporting.write._move_into_place",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, interrupt)
            code, out, err = run("report", tiny, "--text", TEXT)
        assert code == 130
        assert one_sentence(err) == "interrupted; nothing was left half-written"
        assert out == ""
        assert list(tmp_path.iterdir()) == []


def test_a_bug_shows_its_traceback(run, tiny, monkeypatch):
    def bug(*args, **kwargs):
        raise RuntimeError("a bug")

    monkeypatch.setattr("lens_rope.reporting.gather.analyse", bug)
    with pytest.raises(RuntimeError, match="a bug"):
        run("report", tiny, "--text", TEXT)


def test_our_warnings_are_sentences_and_others_are_not_shown(run, monkeypatch):
    import warnings

    def load(*args, **kwargs):
        warnings.warn("fell back\nto the bridge", UserWarning, stacklevel=2)
        warnings.warn_explicit("noise", UserWarning, "other.py", 1, module="other")
        return zoo.bridge_of(zoo.hf_model("llama"), "llama")

    monkeypatch.setattr(lens_rope.models, "load_model", load)
    code, _, err = run("inspect", "anything")
    assert code == 0
    assert one_sentence(err) == "warning: fell back to the bridge"


def test_models_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a/model", "b/model"):
        (tmp_path / folder).mkdir(parents=True)
    models = ["org/model", "a/model", "b/model", "x/y z.gguf", "a/model", "../.."]
    assert {model: path.as_posix() for model, path in folders_of(Path("out"), models).items()} == {
        "org/model": "out/org--model",
        "a/model": "out/model",
        "b/model": "out/model-2",
        "x/y z.gguf": "out/y-z",
        "../..": f"out/{(tmp_path / '../..').resolve().name}",
    }


def test_progress_is_shown_on_a_terminal_only(capsys, monkeypatch):
    with progress() as step:
        step("reading", 1, 2)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress() as step:
        step("reading [b]", 1, 2)
        step("reading [b]", 2, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "reading [b]" in captured.err
    # Of thousands of stages the last few are shown; what is printed in between ends the bars.
    bars = Bars()
    for prompt in range(50):
        bars(f"reading {prompt}/50", 1, 1)
    bars.close()
    assert "reading 49/50" in capsys.readouterr().err
    bars.close()
    bars("again", 0, 1)
    bars.close()
    assert "again" in capsys.readouterr().err


def test_threads_are_left_alone(run, tiny):
    before = torch.get_num_threads()
    run("check", tiny, "--text", TEXT)
    assert torch.get_num_threads() == before
