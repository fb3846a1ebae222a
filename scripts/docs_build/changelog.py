"""CHANGELOG.md as a page of the site."""

from __future__ import annotations

from pathlib import Path

SOURCE = Path(__file__).parents[2] / "CHANGELOG.md"


def markdown() -> str:
    """The text as it is: it links to nothing inside the repository."""
    return SOURCE.read_text(encoding="utf-8")
