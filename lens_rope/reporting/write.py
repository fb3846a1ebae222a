"""Writing: whole or not at all, and never over something that is not ours.

A report is written into a temporary folder beside its place and renamed into it. An earlier report
is moved aside first and put back if that fails. A small marker file tells our folders from others
and carries what an index needs, so that an index can be made from any set of folders.

A process that is killed cannot clean up. Its temporary folder stays, with a lock that nobody holds
any more, and whoever writes beside it next puts an earlier report back and removes the folder.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from lens_rope.errors import OutputError
from lens_rope.reporting.data import SCHEMA

if TYPE_CHECKING:
    from lens_rope.reporting.data import ReportData

MARKER = ".lens-rope-report.json"
GENERATOR = '<meta name="generator" content="lens-rope'
RUN_SCHEMA = "lens-rope-run/1"
_TEMPORARY = ".lens-rope-tmp-"
# What a temporary folder holds: its lock, the name of the folder that is to be replaced, what is
# being written, and what was moved aside.
_LOCK, _TARGET, _NEW, _OLD = "lock", "target", "new", "old"
# A folder without a lock is of a process that was killed before it had one, or is having one made.
_UNLOCKED_FOR = 3600.0
# What desktops leave in every folder that somebody looks at.
_LITTER = frozenset((".DS_Store", "Thumbs.db", "desktop.ini"))
_MARKER_TYPES: dict[str, type | tuple[type, ...]] = {
    "schema": str,
    "created": str,
    "model": str,
    "host": str,
    "layers": int,
    "heads": int,
    "max_relative_error": (int, float),
    "prompts": int,
    "tokens": int,
    "findings": list,
    "files": list,
}


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder that is written whole.

    Attributes:
        noun: What it holds.
        marker: Name of the file that tells it from other folders.
        read: The content of the marker, with the names of all files under `files`; None where the
            folder is none of this kind.
    """

    noun: str
    marker: str
    read: Callable[[Path], dict[str, Any] | None]


def now() -> str:
    """Now, or the moment that SOURCE_DATE_EPOCH names, for builds that must be reproducible."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    moment = (
        datetime.datetime.fromtimestamp(int(epoch), datetime.timezone.utc)
        if epoch.isdigit()
        else datetime.datetime.now(datetime.timezone.utc)
    )
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def write_report(folder: str | Path, files: Mapping[str, str], data: ReportData) -> Path:
    """Writes the files of a report into a folder, all or none.

    Args:
        folder: A new or empty folder, or an earlier report, which is replaced as long as nothing
            else lies in its folder.
        files: Text by path relative to the folder.
        data: The report, for the marker.

    Raises:
        OutputError: The folder holds something else, or cannot be written.
    """
    folder = Path(folder)
    marker = {
        "schema": SCHEMA,
        "created": data.created,
        "model": data.model.name,
        "host": data.model.host,
        "layers": len(data.checks),
        "heads": data.model.n_heads,
        "max_relative_error": data.max_relative_error,
        "prompts": len(data.prompts),
        "tokens": sum(prompt.n_tokens for prompt in data.prompts),
        "findings": list(data.findings),
        "files": sorted(files),
    }
    return write_folder(folder, files, marker, REPORT)


def write_folder(
    folder: str | Path, files: Mapping[str, str], marker: Mapping[str, Any], kind: FolderKind
) -> Path:
    """Writes files and their marker into a folder, all or none.

    Args:
        folder: A new or empty folder, or one of the same kind, which is replaced as long as nothing
            else lies in it.
        files: Text by path relative to the folder.
        marker: Content of the marker; `files` in it names the files.
        kind: What is written.

    Raises:
        OutputError: The folder holds something else, or cannot be written.
    """
    folder = Path(folder)
    refuse_foreign(folder, kind)
    with output_errors(folder), _temporary_beside(folder) as temporary:
        for name, text in {**files, kind.marker: json.dumps(marker, indent=1) + "\n"}.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            # Names from outside can hold half characters, which UTF-8 cannot.
            path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        _move_into_place(temporary, folder, kind)
    return folder


def check_folder(folder: str | Path) -> None:
    """Checks that a report could be written here, and leaves everything as it was.

    Raises:
        OutputError: The folder holds something else, or cannot be written.
    """
    folder = Path(folder)
    with output_errors(folder), _temporary_beside(folder) as temporary:
        (temporary / "probe").write_text("", encoding="utf-8")
        refuse_foreign(folder, REPORT)


def write_index(folder: str | Path, text: str) -> Path:
    """Writes `index.html` into a folder of reports.

    Raises:
        OutputError: There is an `index.html` that lens_rope did not write, or it cannot be written.
    """
    check_index(folder)
    return _write_file(Path(folder) / "index.html", text)


def write_run(folder: str | Path, record: Mapping[str, Any]) -> Path:
    """Writes `run.json`, the record of a run over several models, into a folder of reports.

    Raises:
        OutputError: There is a `run.json` that lens_rope did not write, or it cannot be written.
    """
    check_run(folder)
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    return _write_file(Path(folder) / "run.json", text)


def check_run(folder: str | Path) -> None:
    """Refuses a folder whose `run.json` is not ours.

    Raises:
        OutputError: There is a `run.json` that lens_rope did not write.
    """
    path = Path(folder) / "run.json"
    with output_errors(path):
        if not os.path.lexists(path):
            return
        try:
            schema = json.loads(path.read_text(encoding="utf-8"))["schema"]
        except (IsADirectoryError, ValueError, RecursionError, KeyError, TypeError):
            schema = None
        if schema != RUN_SCHEMA:
            raise OutputError(
                f"{path} was not written by lens-rope and is left alone; choose another folder"
            )


def _write_file(path: Path, text: str) -> Path:
    with output_errors(path), _temporary_beside(path) as temporary:
        new = temporary / path.name
        new.write_text(text, encoding="utf-8", newline="\n")
        os.replace(new, path)
    return path


def check_index(folder: str | Path) -> None:
    """Refuses a folder whose `index.html` is not ours.

    Raises:
        OutputError: There is an `index.html` that lens_rope did not write.
    """
    path = Path(folder) / "index.html"
    with output_errors(path):
        if path.is_dir() or (path.exists() and GENERATOR not in _head(path)):
            raise OutputError(
                f"{path} was not written by lens-rope and is left alone; choose another folder"
            )


def read_markers(folder: str | Path) -> list[tuple[str, dict[str, Any]]]:
    """The reports in a folder as (name of the folder, content of its marker), by name.

    Folders whose marker is incomplete or was not written by lens_rope are left out.
    """
    found = []
    for path in sorted(Path(folder).glob(f"*/{MARKER}")):
        if path.parent.name.startswith(_TEMPORARY):
            continue
        marker = _read_marker(path.parent)
        if marker is not None:
            found.append((path.parent.name, marker))
    return found


def read_marker(folder: str | Path) -> dict[str, Any] | None:
    """The marker of one report, None where there is no report or not every file of it."""
    folder = Path(folder)
    marker = _read_marker(folder)
    if marker is None or not all((folder / name).is_file() for name in marker["files"]):
        return None
    return marker


def recover(folder: str | Path) -> None:
    """Tidies up in a folder after processes that were killed while they wrote there.

    A report that was moved aside and not replaced is put back. What a running process is writing
    is left alone.
    """
    for temporary in Path(folder).glob(f"{_TEMPORARY}*"):
        lock_file = temporary / _LOCK
        if not lock_file.exists():
            with contextlib.suppress(OSError):
                if time.time() - temporary.stat().st_mtime > _UNLOCKED_FOR:
                    _discard(temporary)
            continue
        lock = filelock.FileLock(lock_file)
        try:
            lock.acquire(timeout=0)
        except (filelock.Timeout, OSError, NotImplementedError):
            continue  # in use, gone by now, or not ours to touch
        try:
            _discard(temporary)
        finally:
            lock.release()


def _read_marker(folder: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return marker if _is_marker(marker) else None


REPORT = FolderKind("report", MARKER, _read_marker)


def _is_marker(marker: Any) -> bool:
    """Whether this is a marker with everything that an index needs."""
    return (
        isinstance(marker, dict)
        and all(isinstance(marker.get(key), kind) for key, kind in _MARKER_TYPES.items())
        and all(isinstance(text, str) for text in (*marker["findings"], *marker["files"]))
        and marker["schema"].startswith("lens-rope-report/")
    )


def refuse_foreign(folder: Path, kind: FolderKind) -> None:
    """Refuses a folder that holds anything but what this package wrote there.

    Raises:
        OutputError: It does.
    """
    with output_errors(folder):
        if not os.path.lexists(folder):
            return
        if not folder.is_dir():
            raise OutputError(f"{folder} is a file; give a folder to write the {kind.noun} into")
        marker = kind.read(folder)
        if marker is None:
            if any(path.name not in _LITTER for path in folder.iterdir()):
                raise OutputError(
                    f"{folder} holds something that is not a lens-rope {kind.noun} and is left "
                    "alone; choose another folder"
                )
            return
        ours = {kind.marker, *marker["files"]}
        for path in sorted(folder.rglob("*")):
            is_folder = path.is_dir() and not path.is_symlink()
            name = path.relative_to(folder).as_posix()
            if not is_folder and name not in ours and path.name not in _LITTER:
                raise OutputError(
                    f"{folder} holds {name} beside a {kind.noun}, and a new {kind.noun} would "
                    "replace the whole folder; move that file away or choose another folder"
                )


def _move_into_place(new: Path, folder: Path, kind: FolderKind) -> None:
    """Puts `new`, which `_temporary_beside(folder)` gave, into the place of `folder`."""
    refuse_foreign(folder, kind)
    # A symbolic link keeps pointing where it did: what it points to is replaced.
    folder = folder.resolve()
    if folder.exists():
        os.rename(folder, new.parent / _OLD)
    os.rename(new, folder)


@contextlib.contextmanager
def _temporary_beside(path: Path) -> Iterator[Path]:
    """An empty folder on the same file system as `path`, gone afterwards.

    Folders above `path` that do not exist are made, and removed again when they end up empty.
    """
    path = path.resolve()
    made = [p for p in (path.parent, *path.parent.parents) if not p.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    recover(path.parent)
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=path.parent))
    lock = None
    try:
        (temporary / _TARGET).write_text(path.name, encoding="utf-8", errors="surrogateescape")
        lock = _locked(temporary)
        # Not the folder of mkdtemp: that one can only be entered by its owner.
        new = temporary / _NEW
        new.mkdir()
        yield new
    finally:
        _discard(temporary)
        if lock is not None:
            lock.release()
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _locked(temporary: Path) -> filelock.BaseFileLock | None:
    """A lock that tells others that this process is at work here; the system drops it with us.

    None on file systems without locks, where leftovers are told by their age.
    """
    # It is taken under another name, so that nobody ever sees it free.
    lock = filelock.FileLock(temporary / f"{_LOCK}.new")
    try:
        lock.acquire(timeout=0)
        os.rename(temporary / f"{_LOCK}.new", temporary / _LOCK)
    except (filelock.Timeout, NotImplementedError, PermissionError):
        lock.release()
        return None
    return lock


def _discard(temporary: Path) -> None:
    """Removes a temporary folder; a report that was moved aside is put back if its place is free.

    This is also what happens after an error or an interrupt at any point of the move. Where putting
    back fails the folder stays, and the next one who writes here tries again.
    """
    try:
        if (temporary / _OLD).exists():
            name = (temporary / _TARGET).read_text(encoding="utf-8", errors="surrogateescape")
            place = temporary.parent / Path(name).name
            if not os.path.lexists(place):
                os.rename(temporary / _OLD, place)
    except OSError:
        return
    # The lock goes last: a leftover without it is not looked at for an hour.
    for entry in (_NEW, _OLD):
        shutil.rmtree(temporary / entry, ignore_errors=True)
    shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Says what could not be written, in place of the system's own errors."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(
            f"cannot write {path}: {reason[:1].lower()}{reason[1:]}; choose another folder or make "
            "room there"
        ) from error


def _head(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(2000)
