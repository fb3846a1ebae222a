"""The page of a folder of reports: links them and shows what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from lens_rope.reporting.page import environment
from lens_rope.reporting.write import GENERATOR, read_markers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def render_index(folder: str | Path, failed: Sequence[tuple[str, str]] = ()) -> str:
    """The index of every report in a folder.

    Args:
        folder: A folder that holds one folder per report.
        failed: (model, what went wrong) of each model that has no report.
    """
    return (
        environment()
        .get_template("index.html")
        .render(entries=read_markers(folder), failed=failed, generator=Markup(GENERATOR + '">'))
    )
