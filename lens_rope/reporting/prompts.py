"""Prompts from the command line: texts, text files, and JSON lines.

A file of JSON lines can hold more than fits into memory. It is read line by line: once before any
model is loaded, so that a bad line is told early, and once per model, one prompt at a time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lens_rope.errors import PromptError
from lens_rope.reporting.sample import SAMPLE_NAME, sample_text

DEFAULT_MAX_TOKENS = 1024
"""Longer prompts are cut to this many tokens where nothing else was asked for."""


@dataclass(frozen=True)
class NamedText:
    """A prompt with the name that a report calls it by.

    Attributes:
        name: Its name.
        text: The prompt.
    """

    name: str
    text: str


@dataclass(frozen=True, eq=False)
class PromptSource:
    """Prompts that were checked once and can be gone through again and again.

    Attributes:
        given: Prompts that are in memory; they come first.
        lines: A file of JSON lines, read again each time; None where there is none.
        name: What the file is called in names and messages.
        sha256: Checksum of all prompts in their order, see `checksum`.
        count: Number of prompts.
        kept: A copy of what came through a pipe, which cannot be read twice; it goes with this.
    """

    given: tuple[NamedText, ...]
    lines: Path | None
    name: str
    sha256: str
    count: int
    kept: IO[bytes] | None = None

    def __len__(self) -> int:
        """Number of prompts."""
        return self.count

    def __iter__(self) -> Iterator[NamedText]:
        """The prompts, one at a time.

        Raises:
            PromptError: The file changed so that a line cannot be used any more.
        """
        yield from self.given
        if self.lines is not None:
            yield from _read_lines(self.lines, self.name)


def open_prompts(
    texts: Sequence[str] | None, files: Sequence[Path] | None, lines: Path | None
) -> PromptSource | None:
    """Checks all prompts, in the order texts, files, lines; None where nothing was given.

    Args:
        texts: Prompts as they are.
        files: Files that hold one prompt each, in UTF-8.
        lines: A file of JSON lines, each an object with "text" and maybe "name".

    Raises:
        PromptError: A file cannot be read, a prompt or its name is not text, or a prompt is empty.
    """
    given: list[NamedText] = []
    for index, text in enumerate(texts or (), start=1):
        given.append(NamedText(f"text {index}" if len(texts or ()) > 1 else "text", text))
    for path in files or ():
        given.append(NamedText(_printable(path.name), _read_text(path)))
    for prompt in given:
        _refuse_surrogates(prompt.name, prompt.text)
        if not prompt.text.strip():
            raise PromptError(f"{prompt.name} is empty; give some text")
    kept, name = None, "" if lines is None else str(lines)
    if lines is not None and lines.exists() and not (lines.is_file() or lines.is_dir()):
        kept = _kept_copy(lines)
        lines = Path(kept.name)
    source = PromptSource(tuple(given), lines, name, "", 0, kept)
    digests = (prompt_digest(prompt.name, prompt.text) for prompt in source)
    total, count = _checksum(digests)
    if not count:
        return None
    return PromptSource(tuple(given), lines, name, total, count, kept)


def sample_prompts() -> PromptSource:
    """The sample text of the package, for who gives no prompt."""
    prompt = NamedText(SAMPLE_NAME, sample_text())
    total = checksum([prompt_digest(prompt.name, prompt.text)])
    return PromptSource((prompt,), None, "", total, 1)


def read_prompts(
    texts: list[str] | None, files: list[Path] | None, lines: Path | None
) -> tuple[list[str] | None, list[str] | None]:
    """Names and texts of all prompts, in memory; arguments and errors as those of `open_prompts`.

    Returns:
        Names and texts, or None and None where nothing was given.
    """
    source = open_prompts(texts, files, lines)
    if source is None:
        return None, None
    found = list(source)
    return [prompt.name for prompt in found], [prompt.text for prompt in found]


def prompt_digest(name: str, content: str | Sequence[int]) -> str:
    """Checksum of one prompt: SHA-256 of the JSON array of its name and its text or token ids."""
    entry = [name, content if isinstance(content, str) else list(content)]
    return hashlib.sha256(json.dumps(entry, separators=(",", ":")).encode()).hexdigest()


def checksum(digests: Iterable[str]) -> str:
    """Checksum of prompts in their order: SHA-256 of their checksums in hex, a line each.

    It is a checksum of checksums so that prompts which were read apart can be put together.
    """
    return _checksum(digests)[0]


def _checksum(digests: Iterable[str]) -> tuple[str, int]:
    total, count = hashlib.sha256(), 0
    for digest in digests:
        total.update(f"{digest}\n".encode())
        count += 1
    return total.hexdigest(), count


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


def _cannot_read(path: str | Path, error: OSError) -> PromptError:
    reason = error.strerror or str(error)
    return PromptError(f"cannot read {path}: {reason[:1].lower()}{reason[1:]}; check the path")


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{path} is not a text file: byte {error.start} is not UTF-8; convert it to UTF-8"
        ) from error
    except OSError as error:
        raise _cannot_read(path, error) from error
    if "\0" in text:
        raise PromptError(f"{path} is not a text file: it holds NUL bytes; give a text file")
    return text


def _kept_copy(path: Path) -> IO[bytes]:
    """What a pipe holds, in a temporary file that is gone when it is not needed any more."""
    copy: Any = tempfile.NamedTemporaryFile(prefix="lens-rope-", suffix=".jsonl")  # noqa: SIM115
    try:
        with path.open("rb") as file:
            shutil.copyfileobj(file, copy)
        copy.flush()
    except OSError as error:
        raise _cannot_read(path, error) from error
    return copy


def _read_lines(path: Path, shown: str) -> Iterator[NamedText]:
    """The prompts of a file of JSON lines, one line in memory at a time.

    Args:
        path: The file.
        shown: What it is called.
    """
    found = False
    try:
        # In bytes: text would also be split at other characters, which JSON strings may hold.
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                prompt = _read_line(raw, number, shown)
                if prompt is not None:
                    found = True
                    yield prompt
    except OSError as error:
        raise _cannot_read(shown, error) from error
    if not found:
        raise PromptError(f"{shown} holds no prompts; give one JSON object a line")


def _read_line(raw: bytes, number: int, shown: str) -> NamedText | None:
    where = f"{_printable(shown)} line {number}"
    if b"\0" in raw:
        raise PromptError(f"{where} is not text: it holds NUL bytes; give a text file")
    try:
        line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{where} is not text: byte {error.start + 1} of it is not UTF-8; convert the file to "
            "UTF-8"
        ) from error
    if not line.strip():
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where} is not JSON ({error}); give one object a line") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise PromptError(f'{where} has no "text"; each line is an object with a "text" string')
    name = entry.get("name", f"{_printable(Path(shown).name)} line {number}")
    if not isinstance(name, str):
        raise PromptError(f'{where}: "name" must be a string')
    _refuse_surrogates(f'{where}: "text"', entry["text"])
    _refuse_surrogates(f'{where}: "name"', name)
    if not entry["text"].strip():
        raise PromptError(f"{where} is empty; give some text")
    return NamedText(name, entry["text"])
