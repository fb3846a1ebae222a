"""The manifest of a report: what it was made of, with what, and from what.

`manifest.json` lies in the folder of every report. It says enough to make the same report again,
and to tell whether a report is still the one that would be made now (see `outdated`). Nothing in it
depends on the machine or the time but `created`, the device and the versions.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lens_rope import __version__
from lens_rope.reporting.write import read_marker

if TYPE_CHECKING:
    from lens_rope.reporting.data import ReportData
    from lens_rope.reporting.source import ModelSource

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = "lens-rope-manifest/1"
"""Version of `manifest.json`; within a version keys are only ever added."""


def manifest(
    data: ReportData,
    formats: Sequence[str],
    *,
    source: ModelSource | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The manifest of a report as plain values, in a fixed order.

    Args:
        data: The report.
        formats: What it is written as.
        source: Where the model came from, as far as the caller knows.
        arguments: Arguments as they were given to whoever made the report; None takes those that
            `report` was called with.
    """
    known = data.provenance
    if arguments is None and known is not None:
        arguments = known.arguments
    return {
        "schema": MANIFEST_SCHEMA,
        "created": data.created,
        "versions": {
            "lens_rope": data.version,
            "python": platform.python_version(),
            **data.model.versions,
        },
        "arguments": None if arguments is None else dict(arguments),
        "formats": sorted(formats),
        "model": {
            "asked": None if source is None else source.asked,
            "name": data.model.name,
            "source": None if source is None else source.to_dict(),
            "host": data.model.host,
            "dtype": data.model.dtype,
            "device": None if known is None else known.device,
        },
        "prompts": {
            "sha256": None if known is None else known.prompts_sha256,
            "count": len(data.prompts),
            "tokens": sum(prompt.n_tokens for prompt in data.prompts),
        },
    }


def to_json(content: Mapping[str, Any]) -> str:
    """A manifest as text."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def read_manifest(folder: str | Path) -> dict[str, Any] | None:
    """The manifest of a report, None where there is none that can be read."""
    try:
        content = json.loads((Path(folder) / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("schema") != MANIFEST_SCHEMA:
        return None
    return content


def outdated(
    folder: str | Path,
    *,
    arguments: Mapping[str, Any],
    formats: Sequence[str],
    prompts_sha256: str,
    source: ModelSource,
    changed: float = 0.0,
) -> str | None:
    """Why the report in a folder is not the one that would be made now; None where it is.

    Args:
        folder: Where the report would be.
        arguments: The arguments that it would be made with.
        formats: What it would be written as.
        prompts_sha256: Checksum of the prompts.
        source: Where the model would come from.
        changed: When the newest of the model's files was changed, in seconds since the epoch.
    """
    folder = Path(folder)
    found = read_manifest(folder)
    if read_marker(folder) is None:
        return "there is no whole report"
    if found is None:
        return "its report has no manifest"
    try:
        model, before = found["model"], found["model"]["source"] or {}
        now = source.to_dict()
        then = found["arguments"]
        others = [k for k in sorted({*then, *arguments}) if then.get(k) != arguments.get(k)]
        # Where the hub cannot be reached and nothing is cached, the commit is not known now.
        keys = [key for key in now if key != "revision" or source.revision is not None]
        differs = {
            "another version of lens_rope made it": found["versions"]["lens_rope"] != __version__,
            f"it was made with another {' and '.join(others)}": bool(others),
            "it was written in other formats": found["formats"] != sorted(formats),
            "it was made of other prompts": found["prompts"]["sha256"] != prompts_sha256,
            "it is of another model": model["asked"] != source.asked,
            "the model has changed": any(before.get(key) != now[key] for key in keys)
            or changed > (folder / MANIFEST).stat().st_mtime,
        }
    except (KeyError, TypeError, AttributeError, OSError):
        return "its manifest cannot be read"
    return next((reason for reason, is_so in differs.items() if is_so), None)
