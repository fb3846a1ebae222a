"""What the README and the pages of docs/ show runs as it stands."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
README = PAGES[0].read_text(encoding="utf-8")


def blocks(language):
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def each(language, pages):
    """Each block of these pages, named by its page and its place there."""
    for page in pages:
        found = re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL)
        for number, block in enumerate(found):
            name = page.relative_to(ROOT).with_suffix("").as_posix()
            yield pytest.param(block, id=f"{name}-{number}")


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.parametrize("block", list(each("python", PAGES[1:])))
def test_python_runs(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("example.py").write_text(block, encoding="utf-8")
    runpy.run_path("example.py")
    printed = capsys.readouterr().out
    assert bool(printed.strip()) == ("print(" in block)


@pytest.mark.demo
@pytest.mark.slow
def test_the_parts_of_a_head_add_up_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/report.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    Path("example.py").write_text(block, encoding="utf-8")
    table = runpy.run_path("example.py")["shown"].to_dataframe()
    parts = table[["pair 0", "pair 25", "pairs 1–8", "the rest"]]
    assert (parts.sum(axis=1) - table["score"]).abs().max() < 1e-4


@pytest.mark.demo
@pytest.mark.slow
def test_the_readme_shows_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, second = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    Path("first.py").write_text(first, encoding="utf-8")
    names = runpy.run_path("first.py")
    printed = capsys.readouterr().out
    assert names["d"].layer == 16
    assert "verified: scores within" in printed
    assert "score " in printed and "pass-through" in printed
    Path("second.py").write_text(second, encoding="utf-8")
    names = runpy.run_path("second.py")
    printed = capsys.readouterr().out
    assert names["sinks"].heads
    assert "Layer " in printed and "without it the share" in printed
    assert names["loss"] > 0 and "nats/token" in printed


def test_commands_and_options_exist():
    from lens_rope.cli import app

    lines = [line for block in blocks("bash") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("lens-rope ")]
    assert {command[1] for command in commands} == {
        "report", "compare", "features", "sinks", "heads", "spectrum", "ablate", "inspect", "check",
    }  # fmt: skip
    for _, name, *arguments in commands:
        help_text = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
        for argument in arguments:
            if argument.startswith("--"):
                assert argument in help_text


def test_scripts_exist():
    for line in "\n".join(blocks("bash")).splitlines():
        if line.startswith("scripts/"):
            assert (ROOT / line.split()[0]).stat().st_mode & 0o111


def test_exit_codes_are_those_of_the_errors():
    from lens_rope import errors

    rows = {int(code): what for code, what in re.findall(r"^\| (\d+) \| (.*) \|$", README, re.M)}
    raised = {
        error.exit_code for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.LensRopeError)
    }  # fmt: skip
    assert raised | {0, 130} == set(rows)


def test_files_the_readme_links_to_exist():
    """Links of the docs are checked where the site is built."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_public_names_are_not_hidden_by_modules():
    """A submodule that is imported becomes an attribute of the package under its own name."""
    import importlib
    import pkgutil

    import lens_rope

    for module in pkgutil.iter_modules(lens_rope.__path__):
        importlib.import_module(f"lens_rope.{module.name}")
    for name in lens_rope.__all__:
        assert not isinstance(getattr(lens_rope, name), type(lens_rope)), name
