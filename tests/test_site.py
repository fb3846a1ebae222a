"""The site as it is built: strict, whole, its tutorials run, and nothing fetched from anywhere."""

from __future__ import annotations

import json
import re
import zlib
from types import SimpleNamespace
from urllib.parse import urlsplit

import built_site
import jupytext
import nbformat
import pytest
from built_site import ROOT, TUTORIALS, outputs_of, resolve

import lens_rope as lr
from docs_build import mathematics, tutorials

pytestmark = [pytest.mark.demo, pytest.mark.slow]

PAGES = sorted(
    path.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
    for path in (ROOT / "docs").rglob("*.md")
)


def test_every_page_is_built(site):
    assert set(site.pages) == {*PAGES, *(f"tutorials/{name}.html" for name in TUTORIALS)}
    assert len(TUTORIALS) == 8


def test_the_build_says_nothing_but_what_it_does(site):
    said = [line for line in site.output.splitlines() if not line.startswith("INFO")]
    # A kernel says so on the stderr of the build, whatever is set.
    known = "Kernel is running over TCP without encryption"
    assert [line for line in said if known not in line] == []


def test_no_link_is_dead(site):
    dead = []
    for name, page in site.pages.items():
        for target in (*page.links, *page.loads):
            found = resolve(name, target)
            if found is None:
                continue
            path, anchor = found
            is_there = (site.folder / path).is_file()
            if path in site.pages and anchor:
                is_there = anchor in site.pages[path].ids
            if not is_there:
                dead.append((name, target))
    assert dead == []


def test_nothing_is_loaded_from_elsewhere(site):
    for name, page in site.pages.items():
        assert [url for url in page.loads if urlsplit(url).netloc] == [], name
    for sheet in site.folder.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.search(r"""(url\(|@import)\s*["']?(https?:)?//""", text), sheet.name


@pytest.mark.parametrize("name", TUTORIALS)
class TestTutorial:
    def test_it_ran_and_shows_what_it_computed(self, site, name):
        page = site.pages[f"tutorials/{name}.html"]
        kinds = outputs_of(page.html)
        assert len(kinds) >= 5
        assert "text/html" in kinds
        assert not {"application/vnd.jupyter.stderr", "application/vnd.jupyter.error"} & set(kinds)

    def test_it_asks_first_and_says_last_what_was_shown(self, site, name):
        page = site.pages[f"tutorials/{name}.html"]
        # The last time, because the table of contents names it first.
        assert page.prose.index("Question.") < page.prose.rindex("What was shown, and what was not")
        assert len(page.prose) > 2000

    def test_its_libraries_are_shared(self, site, name):
        page = site.pages[f"tutorials/{name}.html"]
        assert '"code":"' not in page.html
        assert ("data-lens-rope=" in page.html) == ("window.lensRopePacked[" in page.html)

    def test_its_download_is_its_source_without_outputs(self, site, name):
        path = site.folder / f"tutorials/notebooks/{name}.ipynb"
        assert (
            f'download href="notebooks/{name}.ipynb"' in site.pages[f"tutorials/{name}.html"].html
        )
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        source = jupytext.read(ROOT / f"tutorials/{name}.py")
        assert [cell.source for cell in notebook.cells] == [cell.source for cell in source.cells]
        assert not any(cell.get("outputs") for cell in notebook.cells)

    def test_it_can_be_edited_where_it_is(self, site, name):
        links = site.pages[f"tutorials/{name}.html"].links
        assert f"https://example.org/lens_rope/edit/main/tutorials/{name}.py" in links


def test_other_pages_can_be_edited_where_they_are(site):
    edit = "https://example.org/lens_rope/edit/main/"
    for name, page in site.pages.items():
        (link,) = {link for link in page.links if link.startswith(edit)}
        path = link.removeprefix(edit)
        assert (ROOT / path).is_file(), name
    assert f"{edit}CHANGELOG.md" in site.pages["changelog.html"].links


def test_nothing_of_this_machine_or_hour_is_on_a_page(site):
    told = re.compile(r"/tmp/|/root/|/home/|localhost:|20\d\d-\d\d-\d\dT\d\d:\d\d")
    for name, page in site.pages.items():
        assert not told.search(page.prose), name
        assert str(ROOT) not in page.html, name


def test_a_dead_link_in_a_tutorial_is_told(caplog):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="t/a.ipynb", dest_uri="t/a.html"))
    files = [SimpleNamespace(dest_uri="t/a.html"), SimpleNamespace(dest_uri="b.html")]
    links = '<a href="../b.html#x">b</a><a href="#y">y</a><a href="https://example.org">e</a>'
    tutorials._check_links(links, page, files)
    assert caplog.messages == []
    tutorials._check_links('<a href="../c.html">c</a>', page, files)
    assert caplog.messages == ["t/a.ipynb links to ../c.html, which is not there"]


def test_a_tutorial_that_fails_is_named(tmp_path):
    path = tmp_path / "9_wrong.py"
    path.write_text("# %%\n1 / 0\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"^9_wrong\.py failed: .*\n(.*\n)*.*ZeroDivisionError"):
        tutorials.execute(path)


def test_no_number_about_a_model_is_typed_into_a_tutorial():
    """Numbers with a decimal point, percent sign or thousands in prose come from a cell."""
    typed = re.compile(r"\d+\.\d{2,}|\d+(\.\d+)?\s*(%|per cent)|\d+,\d{3}")
    # Examples and definitions, which no model has a say in.
    defined = {"1,000", "9,999", "0.0001", "90 %", "10,000", "0.31", "0.29"}
    # Formulas, code, and the names of papers.
    allowed = re.compile(r"arXiv[\s:]?\d{4}\.\d{5}|\$[^$]*\$|`[^`]*`|\[[^\]]*\]\([^)]*\)")
    found = []
    for path in tutorials.sources():
        for cell in tutorials.read(path).cells:
            if cell.cell_type == "markdown":
                prose = allowed.sub("", cell.source)
                found += [(path.stem, match[0]) for match in typed.finditer(prose)]
    assert [(name, number) for name, number in found if number not in defined] == []


def test_formulas_are_rendered(site):
    assert site.pages["mathematics.html"].n_formulas > 50
    for name, page in site.pages.items():
        assert "merror" not in page.html, name
        assert re.findall(r"\$[^$]{1,80}\$|\\[(\[]", page.prose) == [], name


def test_a_formula_with_an_unknown_command_is_refused():
    with pytest.raises(ValueError, match=r"cannot render \\nonsense"):
        mathematics.mathml(r"\nonsense{x} + 1", False)


def test_formulas_in_notebooks_leave_code_and_prices_alone():
    text = "`$x$` and $a_i$\n\n```\n$y$\n```\n\n$$\\frac{1}{2}$$ costs 5$ or 6$"
    done = mathematics.in_markdown(text)
    assert "`$x$`" in done and "$y$" in done and done.endswith("costs 5$ or 6$")
    assert done.count("<math ") == 2


def test_generated_parts_are_filled_in(site):
    for name, page in site.pages.items():
        assert "<!-- generated:" not in page.html, name


def test_every_public_name_can_be_linked_to(site):
    content = (site.folder / "objects.inv").read_bytes()
    *_, packed = content.split(b"\n", 4)
    names = {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}
    for name in lr.__all__:
        if name != "__version__":
            assert f"lens_rope.{name}" in names


def test_search_finds_pages_and_is_not_filled_with_data(site):
    index = json.loads((site.folder / "search/search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].split("#")[0] for entry in index["docs"]}
    assert found == set(site.pages)
    assert max(len(word) for entry in index["docs"] for word in entry["text"].split()) < 400


def test_programs_find_every_page(site):
    listing = (site.folder / "llms.txt").read_text(encoding="utf-8")
    assert listing.startswith("# lens_rope\n\n> ")
    links = re.findall(r"^- \[.+?\]\((.+?)\): .+$", listing, re.M)
    assert set(links) == set(site.pages)
    full = (site.folder / "llms-full.txt").read_text(encoding="utf-8")
    assert "def " not in full[:200]
    assert "SINK_THRESHOLD: Final = 0.3" in full or "SINK_THRESHOLD = 0.3" in full
    assert lr.RotaryCapture.save.__doc__.splitlines()[0] in full
    for name in TUTORIALS:
        title = tutorials.read(ROOT / f"tutorials/{name}.py").cells[0].source.splitlines()[0]
        assert title in full
    assert not re.search(r"^(<!-- generated:|::: )", full, re.M)


def test_a_build_that_fails_is_told(tmp_path):
    (tmp_path / "site.json").write_text(json.dumps([1, "WARNING - no such page"]))
    with pytest.raises(AssertionError, match="no such page"):
        built_site.build(tmp_path)
