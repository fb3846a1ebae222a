"""Writing: whole or not at all, and never over something that is not ours.

A report is written into a temporary folder beside its place and renamed into it. An earlier report
is moved aside first and put back if that fails. A small marker file tells our folders from others
and carries what an index needs, so that an index can be made from any set of folders.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lens_rope.errors import OutputError
from lens_rope.reporting.data import SCHEMA

if TYPE_CHECKING:
    from lens_rope.reporting.data import ReportData

MARKER = ".lens-rope-report.json"
GENERATOR = '<meta name="generator" content="lens-rope'
_TEMPORARY = ".lens-rope-tmp-"
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
    with _output_errors(folder), _temporary_beside(folder) as temporary:
        for name, text in {**files, MARKER: json.dumps(marker, indent=1) + "\n"}.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        _move_into_place(temporary, folder)
    return folder


def check_folder(folder: str | Path) -> None:
    """Checks that a report could be written here, and leaves everything as it was.

    Raises:
        OutputError: The folder holds something else, or cannot be written.
    """
    folder = Path(folder)
    with _output_errors(folder), _temporary_beside(folder) as temporary:
        (temporary / "probe").write_text("", encoding="utf-8")
        _refuse_foreign(folder)


def write_index(folder: str | Path, text: str) -> Path:
    """Writes `index.html` into a folder of reports.

    Raises:
        OutputError: There is an `index.html` that lens_rope did not write, or it cannot be written.
    """
    folder = Path(folder)
    path = folder / "index.html"
    check_index(folder)
    with _output_errors(path), _temporary_beside(path) as temporary:
        new = temporary / "index.html"
        new.write_text(text, encoding="utf-8", newline="\n")
        os.replace(new, path)
    return path


def check_index(folder: str | Path) -> None:
    """Refuses a folder whose `index.html` is not ours.

    Raises:
        OutputError: There is an `index.html` that lens_rope did not write.
    """
    path = Path(folder) / "index.html"
    with _output_errors(path):
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


def _read_marker(folder: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return marker if _is_marker(marker) else None


def _is_marker(marker: Any) -> bool:
    """Whether this is a marker with everything that an index needs."""
    return (
        isinstance(marker, dict)
        and all(isinstance(marker.get(key), kind) for key, kind in _MARKER_TYPES.items())
        and all(isinstance(text, str) for text in (*marker["findings"], *marker["files"]))
        and marker["schema"].startswith("lens-rope-report/")
    )


def _refuse_foreign(folder: Path) -> None:
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise OutputError(f"{folder} is a file; give a folder to write the report into")
    marker = _read_marker(folder)
    if marker is None:
        if any(folder.iterdir()):
            raise OutputError(
                f"{folder} holds something that is not a lens-rope report and is left alone; "
                "choose another folder"
            )
        return
    ours = {MARKER, *marker["files"]}
    for path in sorted(folder.rglob("*")):
        is_folder = path.is_dir() and not path.is_symlink()
        name = path.relative_to(folder).as_posix()
        if not is_folder and name not in ours and path.name not in _LITTER:
            raise OutputError(
                f"{folder} holds {name} beside a report, and a new report would replace the whole "
                "folder; move that file away or choose another folder"
            )


def _move_into_place(temporary: Path, folder: Path) -> None:
    _refuse_foreign(folder)
    # A symbolic link keeps pointing where it did: what it points to is replaced.
    folder = folder.resolve()
    if not folder.exists():
        os.rename(temporary, folder)
        return
    with _temporary_beside(folder) as aside:
        old = aside / "old"
        os.rename(folder, old)
        try:
            os.rename(temporary, folder)
        except BaseException:
            os.rename(old, folder)
            raise


@contextlib.contextmanager
def _temporary_beside(path: Path) -> Iterator[Path]:
    """An empty folder on the same file system as `path`, gone afterwards.

    Folders above `path` that do not exist are made, and removed again when they end up empty.
    """
    parent = path.resolve().parent
    made = [p for p in (parent, *parent.parents) if not p.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=parent))
    # mkdtemp makes a folder that only its owner can enter; a report is an ordinary folder.
    umask = os.umask(0)
    os.umask(umask)
    temporary.chmod(0o777 & ~umask)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def _output_errors(path: Path) -> Iterator[None]:
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
