"""Prompts from the command line: texts, text files, and JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

from lens_rope.errors import PromptError


def read_prompts(
    texts: list[str] | None, files: list[Path] | None, lines: Path | None
) -> tuple[list[str] | None, list[str] | None]:
    """Names and texts of all prompts, in the order texts, files, lines.

    Args:
        texts: Prompts as they are.
        files: Files that hold one prompt each, in UTF-8.
        lines: A file of JSON lines, each an object with "text" and maybe "name".

    Returns:
        Names and texts, or None and None where nothing was given.

    Raises:
        PromptError: A file cannot be read, a prompt or its name is not text, or a prompt is empty.
    """
    found: list[tuple[str, str]] = []
    for index, text in enumerate(texts or (), start=1):
        found.append((f"text {index}" if len(texts or ()) > 1 else "text", text))
    for path in files or ():
        found.append((_printable(path.name), _read_text(path)))
    if lines is not None:
        found.extend(_read_lines(lines))
    for name, text in found:
        _refuse_surrogates(name, text)
        if not text.strip():
            raise PromptError(f"{name} is empty; give some text")
    if not found:
        return None, None
    return [name for name, _ in found], [text for _, text in found]


def _refuse_surrogates(what: str, text: str) -> None:
    """Python holds bytes that are not UTF-8, and half characters of JSON, as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{what} is not text: character {error.start + 1} is half a character or a byte that "
            "is not UTF-8; give text in UTF-8"
        ) from error


def _printable(name: str) -> str:
    """A file name; bytes in it that are not UTF-8 are spelled out."""
    return name.encode("utf-8", "backslashreplace").decode()


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{path} is not a text file: byte {error.start} is not UTF-8; convert it to UTF-8"
        ) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise PromptError(
            f"cannot read {path}: {reason[:1].lower()}{reason[1:]}; check the path"
        ) from error
    if "\0" in text:
        raise PromptError(f"{path} is not a text file: it holds NUL bytes; give a text file")
    return text


def _read_lines(path: Path) -> list[tuple[str, str]]:
    found = []
    # Not splitlines(): JSON strings may hold the other characters that it splits at.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{_printable(str(path))} line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{where} is not JSON ({error}); give one object a line") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
            raise PromptError(f'{where} has no "text"; each line is an object with a "text" string')
        name = entry.get("name", f"{_printable(path.name)} line {number}")
        if not isinstance(name, str):
            raise PromptError(f'{where}: "name" must be a string')
        _refuse_surrogates(f'{where}: "text"', entry["text"])
        _refuse_surrogates(f'{where}: "name"', name)
        if not entry["text"].strip():
            raise PromptError(f"{where} is empty; give some text")
        found.append((name, entry["text"]))
    if not found:
        raise PromptError(f"{path} holds no prompts; give one JSON object a line")
    return found
