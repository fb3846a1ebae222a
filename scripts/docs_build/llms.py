"""`llms.txt` (what is where) and `llms-full.txt` (all of it), for readers that are programs."""

from __future__ import annotations

import inspect
import logging
import pydoc
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.nav import Navigation
    from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.plugins.llms")

_QUESTION = re.compile(r"\*\*Question\.\*\*\s+(.+?)(?:\n\s*\n|$)", re.S)
# A block of mkdocstrings with its options.
_OBJECT = re.compile(r"^::: (\S+)\n((?: {4}.*)?\n)*", re.M)
_PICTURE = re.compile(r"<(svg|style)\b.*?</\1>", re.S)
_pages: list[Page] = []
_sources: dict[str, str] = {}


def collect(nav: Navigation) -> None:
    """Remembers the pages in the order of the navigation."""
    _pages[:] = nav.pages
    _sources.clear()


def keep(page: Page, markdown: str) -> None:
    """Remembers the Markdown of a page."""
    text = _PICTURE.sub("", _OBJECT.sub(_docstring, markdown))
    _sources[page.file.src_uri] = text


def write(config: MkDocsConfig) -> None:
    """Writes both files into the built site."""
    head = f"# {config.site_name}\n\n> {config.site_description}\n"
    listing, full, section = [head], [head], None
    for page in _pages:
        title = page.ancestors[-1].title if page.ancestors else "Start"
        if title != section:
            section = title
            listing.append(f"\n## {section}\n")
        source = _sources[page.file.src_uri]
        url = page.canonical_url or page.file.url
        listing.append(f"- [{page.title}]({url}): {_description(page, source)}")
        full.append(f"\n---\n\n{source.strip()}\n")
    site = Path(config.site_dir)
    (site / "llms.txt").write_text("\n".join(listing) + "\n", encoding="utf-8")
    (site / "llms-full.txt").write_text("\n".join(full), encoding="utf-8")


def _description(page: Page, source: str) -> str:
    """What a page is about: its own word, or the question that a tutorial asks."""
    if description := page.meta.get("description"):
        return description
    if question := _QUESTION.search(source):
        return " ".join(question[1].split())
    log.warning("%s has no description", page.file.src_uri)
    return ""


def _docstring(match: re.Match[str]) -> str:
    """What Python's own help says, in place of a block that only the site can fill in."""
    target = pydoc.locate(match[1])
    text = inspect.getdoc(target) or ""
    try:
        call = str(inspect.signature(target)) if callable(target) else ""  # type: ignore[arg-type]
    except ValueError:
        call = ""
    return f"### {match[1]}\n\n```python\n{match[1].rpartition('.')[2]}{call}\n```\n\n{text}\n\n"
