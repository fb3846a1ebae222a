"""`llms.txt` (what is where) and `llms-full.txt` (all of it), for readers that are programs."""

from __future__ import annotations

import logging
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import griffe

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.nav import Navigation
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
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
        source = _sources.get(page.file.src_uri, "")  # a preview may render some pages only
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
    """What the docstrings say, in place of a block that only the site can fill in."""
    found = _package()[match[1].removeprefix("lens_rope.")]
    return f"{_described(found.final_target if found.is_alias else found, 3)}\n\n"


@cache
def _package() -> griffe.Module:
    package = griffe.load("lens_rope", search_paths=[str(ROOT)], resolve_aliases=True)
    assert isinstance(package, griffe.Module)
    return package


def _described(found: griffe.Object, level: int) -> str:
    """The signature or the value of an object, its docstring, and the same of its members."""
    if isinstance(found, griffe.Function):
        code = found.signature()
    elif isinstance(found, griffe.Attribute):
        kind = f": {found.annotation}" if found.annotation else ""
        code = f"{found.name}{kind}" + (f" = {found.value}" if found.value else "")
    else:
        code = f"class {found.name}"
    parts = [f"{'#' * level} {found.path}", f"```python\n{code}\n```"]
    if found.docstring:
        parts.append(found.docstring.value)
    if isinstance(found, griffe.Class):
        parts += [
            _described(member, level + 1)
            for name, member in found.members.items()
            if not name.startswith("_") and not member.is_alias
        ]
    return "\n\n".join(parts)
