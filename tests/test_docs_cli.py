"""The page on the command line has every command, option, default and exit code of the app."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import lens_rope.cli
from docs_build import command_line
from lens_rope import errors
from lens_rope.cli import app

ROOT = Path(__file__).parent.parent
MARKDOWN = command_line.markdown()
COMMANDS = typer.main.get_command(app).commands


def plain(text: str) -> str:
    """Text without the marks of Markdown."""
    return re.sub(r"`|\\(?=[|*<>])", "", text)


def section(command: str) -> str:
    """What the page says about a command."""
    (found,) = re.findall(
        rf"^## `lens-rope {command}` {{ #lens-rope-{command} }}\n(.*?)(?=^## )",
        MARKDOWN,
        flags=re.M | re.S,
    )
    return found


def rows(text: str) -> dict[str, list[str]]:
    """The rows of all tables by the name in their first cell: an argument, or an option."""
    found = {}
    for line in re.findall(r"^\| `.*", text, flags=re.M):
        first, *cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for name in re.findall(r"`(.*?)`", first):
            found[name] = [first, *cells]
    return found


def parameters(command: str, kind: str) -> list:
    return [
        p for p in COMMANDS[command].params
        if p.param_type_name == kind and not p.hidden and p.name != "help"
    ]  # fmt: skip


def test_every_command_has_a_section_and_a_link():
    assert re.findall(r"^## `lens-rope (\w+)`", MARKDOWN, flags=re.M) == list(COMMANDS)
    for name, command in COMMANDS.items():
        (summary, *_) = inspect.cleandoc(command.help).split("\n\n")
        summary = " ".join(summary.split())
        assert f"| [`lens-rope {name}`{{ .name }}](#lens-rope-{name}) | {summary} |" in MARKDOWN
        for paragraph in inspect.cleandoc(command.help).split("\n\n"):
            assert " ".join(paragraph.split()) in plain(section(name))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_there_with_its_help_and_default(command):
    shown = rows(section(command))
    for parameter in parameters(command, "option"):
        names = [n for n in (*parameter.opts, *parameter.secondary_opts) if n.startswith("--")]
        for name in names:
            first, value, default, text = shown.pop(name)
            assert f"`{name}`{{ #{command}-{name[2:]} .name }}" in first
            # A default that is not a value is said in the help text.
            said = re.fullmatch(r"(.*?)(?: Default: (.*)\.)?", parameter.help)
            assert plain(text) == said[1]
            if said[2] is not None:
                assert parameter.default is None
                assert plain(default) == said[2]
            elif isinstance(parameter.default, bool):
                assert (default, value) == (f"`{names[0]}`" if names[1:] else "", "")
            elif parameter.default is None:
                assert default == ""
            else:
                expected = getattr(parameter.default, "value", parameter.default)
                assert default == f"`{expected}`"
            assert value or isinstance(parameter.default, bool)
    arguments = {parameter.metavar for parameter in parameters(command, "argument")}
    assert set(shown) == arguments
    for parameter in parameters(command, "argument"):
        assert plain(shown[parameter.metavar][-1]) == parameter.help.split(" Default:")[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_options_and_usage_are_those_that_help_shows(command):
    """By another way than the objects that the page is made from: what is printed."""
    printed = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", printed))
    named = set(re.findall(r"--[a-z][a-z-]*", " ".join(rows(section(command)))))
    in_texts = set(re.findall(r"--[a-z][a-z-]*", COMMANDS[command].help))
    assert options - in_texts - named == {"--help"}
    (usage,) = re.findall(r"```text\n(.*)\n```", section(command))
    assert usage.startswith(f"lens-rope {command} ") and usage.endswith(" [OPTIONS]")
    for parameter in parameters(command, "argument"):
        assert parameter.metavar in usage


def test_what_to_give():
    assert rows(section("report"))["--max-tokens"][1] == "integer ≥ 1"
    assert rows(section("features"))["--constancy"][1] == "number from 0 to 1"
    assert rows(section("ablate"))["--how"][1] == "`zero`, `mean`, `unrotate`"
    assert rows(section("report"))["--out"][1:3] == ["path", "`lens-rope-report`"]
    assert rows(section("report"))["--resume"][1:3] == ["", ""]
    assert rows(section("heads"))["--no-repeated"][1:3] == ["", "`--repeated`"]
    assert "lens-rope report [MODEL]... [OPTIONS]\n" in section("report")
    assert "lens-rope compare A B [OPTIONS]\n" in section("compare")


def test_names_with_a_command_of_their_own_are_anchors_once():
    anchors = re.findall(r"\{ #(\S+)", MARKDOWN)
    assert len(anchors) == len(set(anchors))
    assert {"exit-codes", "lens-rope-report", "report-max-tokens"} <= set(anchors)


def test_every_exit_code_is_there():
    table = dict(re.findall(r"^\| (\d+) \| (.*) \|$", command_line.exit_codes(), flags=re.M))
    raised = {
        error.exit_code: name
        for name, error in vars(errors).items()
        if isinstance(error, type) and issubclass(error, errors.LensRopeError)
    }
    running = lens_rope.cli.running
    others = {0, 1, running._INTERRUPTED, running._TERMINATED}
    assert {int(code) for code in table} == set(raised) | others
    for code, name in raised.items():
        if name != "LensRopeError":
            assert f"[`{name}`][lens_rope.errors.{name}]" in table[str(code)]
    assert "`check`" in table["1"]


def test_the_readme_lists_the_same_exit_codes():
    readme = (ROOT / "README.md").read_text("utf-8")
    mine = set(re.findall(r"^\| (\d+) \|", command_line.exit_codes(), flags=re.M))
    theirs = set(re.findall(r"^\| (\d+) \|", readme, flags=re.M))
    # Being ended by a signal is said on the page alone.
    assert mine - theirs == {"143"} and theirs <= mine
