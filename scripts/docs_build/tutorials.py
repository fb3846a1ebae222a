"""The tutorials: run when the site is built, shown with what they computed, and given for download.

`tutorials/*.py` are the source, in the percent format of jupytext and without outputs. A cell that
fails stops the build; one that writes to stderr is a warning, which a strict build does not pass.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from posixpath import join, normpath, relpath
from typing import TYPE_CHECKING

import jupytext
import nbformat
import plotly.graph_objects as go
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from markdown.extensions.toc import nest_toc_tokens
from mkdocs.structure.files import File
from mkdocs.structure.toc import get_toc
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from docs_build import llms, mathematics
from lens_rope.views.layout import figure
from lens_rope.views.libraries import packed
from lens_rope.views.notebook import figures_output

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page
    from mkdocs.structure.toc import TableOfContents

log = logging.getLogger("mkdocs.plugins.tutorials")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tutorials"
NO_EXECUTE = "LENS_ROPE_NO_EXECUTE"
PLOTLY = "application/vnd.plotly.v1+json"
CELL_SECONDS = 600

# A link in Markdown, images included; what has a scheme or is an anchor alone is left as it is.
_LINK = re.compile(r"(?P<open>\]\()(?P<target>(?![a-z]+:|#)[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_NOTEBOOK = re.compile(r'<div class="jupyter-wrapper">.*</div> <!-- jupyter-wrapper -->', re.S)
# The code of a cell, with a button that copies from a second, hidden copy of the code.
_CODE_CELL = re.compile(
    r'<div class="zeroclipboard-container">.*?</clipboard-copy>\s*</div>\s*'
    r'<div class="highlight-ipynb hl-\w+"><pre>(?P<code>.*?)</pre></div>\s*'
    r'<div class="clipboard-copy-txt"[^>]*>.*?</div>',
    re.S,
)
_CODE_IN_PROSE = re.compile(r'<div class="highlight"><pre>(?P<code>.*?)</pre></div>', re.S)
_HEADING = re.compile(r'<h([1-3]) id="([^"]+)">(.*?)<a class="headerlink"', re.S)
_executed: dict[str, nbformat.NotebookNode] = {}


def sources() -> list[Path]:
    """The tutorials in order."""
    return sorted(FOLDER.glob("*.py"))


def read(path: Path) -> nbformat.NotebookNode:
    """A tutorial as a notebook without outputs; the same bytes every time."""
    notebook = jupytext.read(path)
    notebook.metadata.pop("jupytext", None)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    return notebook


def execute(path: Path) -> nbformat.NotebookNode:
    """A tutorial with its outputs, run in a kernel of its own and an empty directory.

    Raises:
        RuntimeError: A cell failed.
    """
    notebook = read(path)
    environment = {
        **os.environ,
        # Figures as data: the page draws them with the one Plotly that it has anyway.
        "PLOTLY_RENDERER": "plotly_mimetype",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            km=AsyncKernelManager(
                kernel_name="python3",
                # The kernel of this interpreter alone, not one that a user installed elsewhere.
                kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            ),
            resources={"metadata": {"path": folder}},
        )
        try:
            # A kernel of one's own would otherwise stay, with its model, until the build is over.
            client.execute(env=environment, cleanup_kc=True)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as exc:
            raise RuntimeError(f"{path.name} failed: {exc}") from exc
        if left := sorted(entry.name for entry in Path(folder).iterdir()):
            log.warning("%s leaves files behind: %s", path.name, ", ".join(left))
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                log.warning("%s writes to stderr: %s", path.name, output.text.strip())
    return notebook


def add_to(files: Files, config: MkDocsConfig) -> None:
    """Adds each tutorial as a page, and beside it the notebook for download."""
    paths = sources()
    if os.environ.get(NO_EXECUTE):
        notebooks = [read(path) for path in paths]
    else:
        with ThreadPoolExecutor(max_workers=2) as pool:
            notebooks = list(pool.map(_remembered, paths))
    # mkdocs-jupyter tells its notebooks by the folder that they are in.
    folder = Path(_scratch().name) / "tutorials"
    folder.mkdir(exist_ok=True)
    for path, notebook in zip(paths, notebooks, strict=True):
        page = folder / f"{path.stem}.ipynb"
        nbformat.write(_for_the_page(notebook), page)
        uri = f"tutorials/{page.name}"
        files.append(File(uri, str(folder.parent), config.site_dir, config.use_directory_urls))
        download = nbformat.writes(read(path)) + "\n"
        files.append(File.generated(config, f"tutorials/notebooks/{page.name}", content=download))
    for library in ("Plotly", "CircuitsVis"):
        code = packed(library)
        identifier = _library_id(code)
        content = (
            f'(window.lensRopePacked = window.lensRopePacked || {{}})["{identifier}"] = "{code}";\n'
        )
        uri = f"javascripts/lens-rope-{identifier}.js"
        files.append(File.generated(config, uri, content=content))


def is_tutorial(page: Page) -> bool:
    """Whether this page is a notebook."""
    return page.file.src_uri.endswith(".ipynb")


def finish(html: str, page: Page, files: Files, config: MkDocsConfig) -> str:
    """What mkdocs-jupyter made of a tutorial, as a page of this site."""
    path = FOLDER / f"{Path(page.file.src_uri).stem}.py"
    llms.keep(page, jupytext.writes(read(path), fmt="md"))
    if config.repo_url:
        page.edit_url = f"{config.repo_url.rstrip('/')}/edit/main/tutorials/{path.name}"
    html = _in_the_look_of_the_site(html)
    html = _share_libraries(html, page)
    _check_links(html, page, files)
    page.toc = _contents(html)
    download = (
        f'<p class="tutorial-download"><a class="md-button" download '
        f'href="notebooks/{path.stem}.ipynb">Download this notebook</a></p>'
    )
    return html.replace("</h1>", f"</h1>{download}", 1)


def _in_the_look_of_the_site(html: str) -> str:
    """The cells alone, with code as the theme has it.

    mkdocs-jupyter brings JupyterLab's style sheets and a CDN's MathJax into every page. Without
    them, code has the colours and the copy button of the site, in its light and its dark form.
    """
    match = _NOTEBOOK.search(html)
    if match is None:
        raise ValueError("mkdocs-jupyter wrote a notebook in another form than this build knows")
    html, n_cells = match[0], match[0].count("jp-CodeMirrorEditor")
    for pattern in (_CODE_CELL, _CODE_IN_PROSE):
        html, n_found = pattern.subn(
            lambda match: f'<div class="highlight"><pre><code>{match["code"]}</code></pre></div>',
            html,
        )
        if pattern is _CODE_CELL and n_found != n_cells:
            raise ValueError(f"of {n_cells} cells with code, {n_found} have a form known here")
    return re.sub(r'<a class="anchor-link"', '<a class="headerlink" title="Permanent link"', html)


def _contents(html: str) -> TableOfContents:
    """The table of contents by the headings as they are; mkdocs-jupyter leaves code out of them."""
    tokens = [
        {
            "level": int(level),
            "id": identifier,
            "name": re.sub(r"<[^>]+>", "", text),
            "children": [],
        }
        for level, identifier, text in _HEADING.findall(html)
    ]
    return get_toc(nest_toc_tokens(tokens))


@cache
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="lens-rope-tutorials-")


def _package() -> bytes:
    """A digest of the files of the package, on which every output depends."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "lens_rope").rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(path.read_bytes())
    return digest.digest()


def _remembered(path: Path) -> nbformat.NotebookNode:
    """Runs a tutorial once for as long as it and the package stay the same, for a preview."""
    key = hashlib.sha256(path.read_bytes() + _package()).hexdigest()
    if key not in _executed:
        log.info("Running %s", path.name)
        _executed[key] = execute(path)
    return _executed[key]


def _for_the_page(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Formulas as MathML, links as the site has them, figures as outputs that need no CDN."""
    notebook = nbformat.from_dict(json.loads(json.dumps(notebook)))
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _prose(cell.source)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/markdown" in data:
                data["text/markdown"] = _prose("".join(data["text/markdown"]))
            if PLOTLY in data:
                output["data"] = {"text/html": _figure(data[PLOTLY])}
    return notebook


def _prose(source: str) -> str:
    return _LINK.sub(_site_link, mathematics.in_markdown(source))


def _site_link(match: re.Match[str]) -> str:
    """`../docs/x.md` and `y.py`, as the repository has them, where the site puts them."""
    target = match["target"].removeprefix("../docs/")
    if target != match["target"]:
        target = f"../{target}"
    target = re.sub(r"\.(md|py|ipynb)$", ".html", target)
    return f"{match['open']}{target}{match['anchor'] or ''})"


def _figure(data: dict) -> str:
    """A figure in the common style, which one that a cell makes by itself may lack in part."""
    if data.get("frames"):
        raise ValueError("a figure with frames would lose them")
    own = go.Figure(data["data"], data["layout"])
    title = own.layout.title.text
    shown = figure(height=own.layout.height or 380, label=title or "Figure")
    if own.layout.margin.t is None:  # room for the titles of the figure or of its parts
        shown.update_layout(margin={"t": 48})
    shown.add_traces(own.data)
    layout = own.layout.to_plotly_json()
    layout.pop("template", None)
    meta = {**shown.layout.meta, **layout.pop("meta", {})}
    return figures_output("", [shown.update_layout(layout).update_layout(meta=meta)])


def _library_id(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _share_libraries(html: str, page: Page) -> str:
    """The libraries that every output brings, once, as a file of the site."""
    scripts = []
    root = relpath(".", Path(page.file.dest_uri).parent.as_posix())
    for library in ("Plotly", "CircuitsVis"):
        code = packed(library)
        if code in html:
            identifier = _library_id(code)
            html = html.replace(f'"{code}"', f'window.lensRopePacked["{identifier}"]')
            scripts.append(f'<script src="{root}/javascripts/lens-rope-{identifier}.js"></script>')
    return "".join(scripts) + html


def _check_links(html: str, page: Page, files: Files) -> None:
    """Warns of links of the prose that lead nowhere; mkdocs does not see them in a notebook."""
    here = Path(page.file.dest_uri).parent.as_posix()
    known = {file.dest_uri for file in files}
    for target in re.findall(r'(?:href|src)="(?![a-z]+:|#|//|/)([^"#?]+)', html):
        if normpath(join(here, target)) not in known | {""}:
            log.warning("%s links to %s, which is not there", page.file.src_uri, target)
