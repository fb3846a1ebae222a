"""CONTRIBUTING.md as a page of the site: its links lead to pages, and its picture is drawn anew."""

from __future__ import annotations

import re
from pathlib import Path

from docs_build import architecture

SOURCE = Path(__file__).parents[2] / "CONTRIBUTING.md"
_PICTURE = re.compile(r"^!\[[^]]*\]\(docs/images/architecture\.svg\)$", re.M)


def markdown() -> str:
    """The text of CONTRIBUTING.md with the links of the site.

    Raises:
        ValueError: The picture is not where it was.
    """
    text = SOURCE.read_text(encoding="utf-8")
    text, found = _PICTURE.subn(lambda match: architecture.markdown(), text)
    if found != 1:
        raise ValueError(f"CONTRIBUTING.md shows the architecture {found} times; it should once")
    text = text.replace("](CHANGELOG.md", "](changelog.md")
    return re.sub(r"\]\(docs/", "](", text)
