"""Writing a comparison: whole or not at all, and never over something that is not one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lens_rope.reporting.write import FolderKind, refuse_foreign, write_folder

if TYPE_CHECKING:
    from lens_rope.reporting.comparison import Comparison

MARKER = ".lens-rope-comparison.json"


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

    refuse_foreign(Path(folder), COMPARISON)  # before the page is made
    content = comparison.to_dict()
    files = {
        "compare.html": comparison.html(),
        "comparison.json": json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1)
        + "\n",
        **{f"tables/{name}.csv": to_csv(table) for name, table in comparison.tables().items()},
    }
    marker = {"schema": content["schema"], "files": sorted(files)}
    return write_folder(folder, files, marker, COMPARISON)


def _read_marker(folder: Path) -> dict[str, Any] | None:
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
    is_whole = isinstance(files, list) and all(isinstance(name, str) for name in files)
    return marker if is_whole else None


COMPARISON = FolderKind("comparison", MARKER, _read_marker)
