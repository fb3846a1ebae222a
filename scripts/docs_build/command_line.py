"""The command line, command by command, from the signatures and help texts of the app itself."""

from __future__ import annotations

import inspect
import re
import signal
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from typer.main import get_command
from typer.models import ArgumentInfo, OptionInfo

from lens_rope import errors
from lens_rope.cli import app

_DEFAULT = re.compile(r"\s*Default: (?P<default>.*?)\.?$")
_KINDS = {str: "text", int: "integer", float: "number", Path: "path"}


@dataclass(frozen=True)
class Parameter:
    """One argument or option as it is typed.

    Attributes:
        names: The argument's name, or the option with its opposite.
        is_option: Whether it is an option.
        value: What to give, in words; empty for flags.
        default: What holds without it; empty where there is nothing to say.
        help: What it does, without the default.
    """

    names: tuple[str, ...]
    is_option: bool
    value: str
    default: str
    help: str


def markdown() -> str:
    """A section per command, then the exit codes."""
    commands = _commands()
    links = [
        f"[`lens-rope {name}`{{ .name }}](#lens-rope-{name}) | {_paragraphs(_function(command))[0]}"
        for name, command in commands.items()
    ]
    sections = [part for name, command in commands.items() for part in _section(name, command)]
    exits = ["## Exit codes { #exit-codes }", exit_codes()]
    return "\n\n".join([_table(["Command", ""], links), *sections, *exits])


def exit_codes() -> str:
    """What each exit code says, from the classes of the errors."""
    raised = [
        (error.exit_code, f"[`{name}`][lens_rope.errors.{name}]: {_paragraphs(error)[0]}")
        for name, error in vars(errors).items()
        if isinstance(error, type)
        and issubclass(error, errors.LensRopeError)
        and error is not errors.LensRopeError
    ]
    others = [
        (0, "Done."),
        (
            1,
            "`check`: something was not verified. `report` on several models: the first that "
            "failed did so by an unexpected error; run it alone to see where it comes from.",
        ),
        (2, "Also: an option that does not exist, or a value of the wrong kind."),
        (130, "Interrupted with Ctrl-C; nothing was left half-written."),
        (128 + signal.SIGTERM, "Ended by a signal (SIGTERM); nothing was left half-written."),
    ]
    texts: dict[int, list[str]] = {}
    for code, text in [*raised, *others]:
        texts.setdefault(code, []).append(text)
    rows = [f"{code} | {' '.join(text)}" for code, text in sorted(texts.items())]
    return _table(["Exit code", ""], rows)


def parameters(command: Any) -> Iterator[Parameter]:
    """The arguments and options of a command that are not hidden, in the order of its help."""
    hints = get_type_hints(_function(command), include_extras=True)
    for parameter in command.params:
        if parameter.hidden or parameter.name not in hints:  # `--help` is that of every command
            continue
        kind, info = _annotated(hints[parameter.name])
        is_option = parameter.param_type_name == "option"
        found = [*parameter.opts, *parameter.secondary_opts]
        names = [name for name in found if name.startswith("-")]
        if not is_option:
            names = [parameter.metavar or parameter.name.upper()]
        text, default = parameter.help, _shown(parameter.default, names)
        if parameter.required:
            default = "required"
        elif said := _DEFAULT.search(text):
            text, default = text[: said.start()], said["default"]
        yield Parameter(tuple(names), is_option, _value(kind, info), default, text)


def _commands() -> dict[str, Any]:
    """The commands that are not hidden, by name, in the order of the help."""
    found = get_command(app).commands
    return {name: command for name, command in found.items() if not command.hidden}


def _function(command: Any) -> Callable[..., Any]:
    return inspect.unwrap(command.callback)


def _section(name: str, command: Any) -> Iterator[str]:
    all_of_them = list(parameters(command))
    arguments = [p for p in all_of_them if not p.is_option]
    options = [p for p in all_of_them if p.is_option]
    usage = " ".join(
        p.names[0] if p.default == "required" else f"[{p.names[0]}]..." for p in arguments
    )
    yield f"## `lens-rope {name}` {{ #lens-rope-{name} }}"
    yield from map(_cell, _paragraphs(_function(command)))
    yield f"```text\nlens-rope {name} {usage} [OPTIONS]\n```"
    rows = [f"`{p.names[0]}`{{ .name }} | {_cell(p.default)} | {_cell(p.help)}" for p in arguments]
    yield _table(["Argument", "Default", ""], rows)
    rows = []
    for p in options:
        names = ", ".join(f"`{n}`{{ #{name}-{n.lstrip('-')} .name }}" for n in p.names)
        rows.append(f"{names} | {p.value} | {_cell(p.default)} | {_cell(p.help)}")
    yield _table(["Option", "Value", "Default", ""], rows)


def _table(heads: list[str], rows: Iterable[str]) -> str:
    lines = [" | ".join(heads), "|".join(["---"] * len(heads)), *rows]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(text: str) -> str:
    """Plain text as a cell of a table; options in it become code."""
    text = re.sub(r"([|*<>])", r"\\\1", text)
    return re.sub(r"(?<![\w`-])--[a-z][a-z-]*", r"`\g<0>`", text)


def _paragraphs(documented: Any) -> list[str]:
    """The paragraphs of a docstring's text, each on one line; sections of Google style are left."""
    paragraphs = inspect.cleandoc(documented.__doc__).split("\n\n")
    return [" ".join(p.split()) for p in paragraphs if not re.match(r"\w+:\n", p)]


def _annotated(hint: Any) -> tuple[Any, ArgumentInfo | OptionInfo]:
    """The type and the description of a parameter."""
    if get_origin(hint) is not Annotated:  # Python 3.10 adds None around it
        hint = next(inner for inner in get_args(hint) if get_origin(inner) is Annotated)
    kind, info = get_args(hint)[:2]
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(inner for inner in get_args(kind) if inner is not type(None))
    return kind, info


def _value(kind: Any, info: ArgumentInfo | OptionInfo) -> str:
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    if kind is bool:
        return ""
    if issubclass(kind, Enum):
        return ", ".join(f"`{entry.value}`" for entry in kind)
    if info.min is not None and info.max is not None:
        return f"{_KINDS[kind]} from {info.min:g} to {info.max:g}"
    return _KINDS[kind] + ("" if info.min is None else f" ≥ {info.min:g}")


def _shown(default: Any, names: list[str]) -> str:
    """A default as it would be typed; empty for flags that are off, and where there is none."""
    if isinstance(default, bool):
        return f"`{names[0]}`" if len(names) > 1 else ""
    if default is None:
        return ""
    return f"`{default.value if isinstance(default, Enum) else default}`"
