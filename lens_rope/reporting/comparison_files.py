"""Writing a comparison: whole or not at all, and never over something that is not one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lens_rope.errors import OutputError
from lens_rope.reporting.write import OLD, output_errors, temporary_beside

if TYPE_CHECKING:
    from lens_rope.reporting.comparison import Comparison

MARKER = ".lens-rope-comparison.json"
# What desktops leave in every folder that somebody looks at.
_LITTER = frozenset((".DS_Store", "Thumbs.db", "desktop.ini"))


def write_comparison(folder: str | Path, comparison: Comparison) -> Path:
    """Writes `compare.html`, `comparison.json` and `tables/*.csv`, all or none.

    Args:
        folder: A new or empty folder, or an earlier comparison, which is replaced as long as
            nothing else lies in its folder.
        comparison: What to write.

    Raises:
        OutputError: The folder holds something else, or cannot be written.
    """
    from lens_rope.reporting.tables import to_csv

    folder = Path(folder)
    check_comparison_folder(folder)
    content = comparison.to_dict()
    files = {
        "compare.html": comparison.html(),
        "comparison.json": json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1)
        + "\n",
        **{f"tables/{name}.csv": to_csv(table) for name, table in comparison.tables().items()},
    }
    marker = {"schema": content["schema"], "files": sorted(files)}
    with output_errors(folder), temporary_beside(folder) as new:
        for name, text in {**files, MARKER: json.dumps(marker, indent=1) + "\n"}.items():
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        check_comparison_folder(folder)
        # A symbolic link keeps pointing where it did: what it points to is replaced. What is moved
        # aside is put back by whoever tidies up, if the next step fails or never comes.
        place = folder.resolve()
        if place.exists():
            os.rename(place, new.parent / OLD)
        os.rename(new, place)
    return folder


def check_comparison_folder(folder: Path) -> None:
    """Refuses a folder that holds anything but an earlier comparison.

    Raises:
        OutputError: It does.
    """
    with output_errors(folder):
        if not os.path.lexists(folder):
            return
        if not folder.is_dir():
            raise OutputError(f"{folder} is a file; give a folder to write the comparison into")
        files = _files_of(folder)
        if files is None:
            if any(path.name not in _LITTER for path in folder.iterdir()):
                raise OutputError(
                    f"{folder} holds something that is not a lens-rope comparison and is left "
                    "alone; choose another folder"
                )
            return
        for path in sorted(folder.rglob("*")):
            is_folder = path.is_dir() and not path.is_symlink()
            name = path.relative_to(folder).as_posix()
            if not is_folder and name not in files and path.name not in _LITTER:
                raise OutputError(
                    f"{folder} holds {name} beside a comparison, and a new one would replace the "
                    "whole folder; move that file away or choose another folder"
                )


def _files_of(folder: Path) -> set[str] | None:
    """What an earlier comparison wrote here, None where there is none."""
    try:
        marker: Any = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(marker, dict) or not str(marker.get("schema")).startswith(
        "lens-rope-comparison/"
    ):
        return None
    files = marker.get("files")
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        return None
    return {MARKER, *files}
