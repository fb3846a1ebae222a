"""What the build of the site does beyond mkdocs and its plugins; the work is in `docs_build`."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

from docs_build import llms, mathematics, report_schema, tutorials

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.nav import Navigation
    from mkdocs.structure.pages import Page

# Pages that show a file of the repository.
_SHOWN = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
_GENERATED = re.compile(r"^<!-- generated: (\w+) -->$", re.M)


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the executed tutorials, their downloads, and files made from the package."""
    tutorials.add_to(files, config)
    for uri, content in report_schema.files().items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keeps the order of the pages for `llms.txt`."""
    llms.collect(nav)
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills in the generated parts of a page."""
    markdown = _GENERATED.sub(
        lambda match: importlib.import_module(f"docs_build.{match[1]}").markdown(), markdown
    )
    llms.keep(page, markdown)
    if config.repo_url and page.file.src_uri in _SHOWN:
        page.edit_url = f"{config.repo_url.rstrip('/')}/edit/main/{_SHOWN[page.file.src_uri]}"
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas become MathML; a tutorial gets its download and shares its libraries."""
    if tutorials.is_tutorial(page):
        return tutorials.finish(html, page, files, config)
    return mathematics.in_html(html)


def on_post_build(config: MkDocsConfig) -> None:
    """Writes what is about the site as a whole."""
    llms.write(config)
