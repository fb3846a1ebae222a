"""The documentation as it is built, once for a whole run of the suite."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from filelock import FileLock

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted(path.stem for path in (ROOT / "tutorials").glob("*.py"))


# What a developer has set for a build of their own.
_ENVIRONMENT = {
    "LENS_ROPE_NO_EXECUTE": "",
    "LENS_ROPE_REPO_URL": "https://example.org/lens_rope",
    "LENS_ROPE_SECOND_MODEL": "",
    "LENS_ROPE_SITE_URL": "",
    "NO_MKDOCS_2_WARNING": "1",
}


@dataclasses.dataclass(frozen=True)
class Site:
    """A built site and what the build said."""

    folder: Path
    output: str

    @functools.cached_property
    def pages(self) -> dict[str, Page]:
        """Every page by its path inside the site, the error page apart."""
        return {
            path.relative_to(self.folder).as_posix(): Page(path.read_text(encoding="utf-8"))
            for path in sorted(self.folder.rglob("*.html"))
            if path.name != "404.html"
        }


def build(shared: Path) -> Site:
    """Builds the site with `mkdocs build --strict` and all tutorials run, unless it is there.

    Args:
        shared: A folder that the workers of one run share.
    """
    folder, log = shared / "site", shared / "site.json"
    with FileLock(shared / "site.lock"):
        if not log.exists():
            done = subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
                cwd=ROOT,
                env={**os.environ, **_ENVIRONMENT},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
            )
            log.write_text(json.dumps([done.returncode, done.stdout]), encoding="utf-8")
    code, output = json.loads(log.read_text(encoding="utf-8"))
    assert code == 0, f"mkdocs build --strict failed:\n{output}"
    return Site(folder, output)


class Page(HTMLParser):
    """What a page links to, loads, and says outside code, formulas and scripts."""

    _VOID = frozenset({"area", "br", "col", "embed", "hr", "img", "input", "link", "meta", "wbr"})
    _SILENT = frozenset({"script", "style", "code", "pre", "math", "svg", "title"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.words: list[str] = []
        self.title = ""
        self.n_formulas = 0
        self._open: list[str] = []
        self.feed(html)
        self.close()

    @property
    def prose(self) -> str:
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if identifier := values.get("id"):
            self.ids.add(identifier)
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload", "prefetch"):
            self.loads.append(values["href"])
        if tag in ("script", "img", "iframe", "source", "video") and values.get("src"):
            self.loads.append(values["src"])
        self.n_formulas += tag == "math"
        if tag not in self._VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open and self._open[-1] == "title":
            self.title += data
        if not self._SILENT & set(self._open):
            self.words.append(data)


def resolve(page: str, target: str) -> tuple[str, str] | None:
    """A link inside the site as path and anchor; None for one that leads out of it."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return None
    path = unquote(parts.path)
    if not path:
        return page, unquote(parts.fragment)
    joined = os.path.normpath(os.path.join(os.path.dirname(page), path)).replace(os.sep, "/")
    if path.endswith("/") or joined == ".":
        joined = os.path.normpath(f"{joined}/index.html")
    return joined, unquote(parts.fragment)


def outputs_of(html: str) -> list[str]:
    """The kind of each output of a tutorial's page."""
    return re.findall(r'jp-OutputArea-output[^"]*" data-mime-type="([^"]+)"', html)
