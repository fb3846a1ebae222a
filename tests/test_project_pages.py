"""Pages about the project: the picture of its modules, how to contribute, and how to cite it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import markdown
import pytest

import lens_rope
from docs_build import architecture, citing, contributing, supported_models

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


# --- the flow ---------------------------------------------------------------------------------


def test_imports_flow_one_way() -> None:
    known = architecture.checked()
    assert {"spec", "hosts.bridge", "reporting.batch", "cli"} <= known.keys()


def imported(name: str, source: str) -> list[str]:
    known = set(architecture.modules())
    return architecture.against_the_flow(list(architecture.imports(name, source, known)))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("spec", "from lens_rope.capturing import capture"),
        ("spec", "import lens_rope.capturing"),
        ("offsets", "from lens_rope import heads, reporting"),
        ("offsets", "from lens_rope.views import figures"),
        ("views.figures", "def f():\n    from lens_rope.reporting import report"),
        ("hosts.base", "def f():\n    from lens_rope.fit import fit_rope"),
        ("decomposition", "def f():\n    import transformer_lens.hook_points"),
    ],
)
def test_import_against_the_flow_is_found(name: str, source: str) -> None:
    (sentence,) = imported(name, source)
    assert f"lens_rope.{name}" in sentence


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("capturing", "from lens_rope.hosts import host_of"),
        ("offsets", "def plot(self):\n    from lens_rope.views import figures"),
        ("offsets", "if TYPE_CHECKING:\n    from lens_rope.views.figures import x"),
        ("reporting.manifest", "from lens_rope import __version__"),
        ("hosts.hooked", "from transformer_lens import HookedTransformer"),
    ],
)
def test_import_with_the_flow_is_none(name: str, source: str) -> None:
    assert imported(name, source) == []


def test_module_without_a_stage_ends_the_build() -> None:
    with pytest.raises(ValueError, match=r"lens_rope\.novelty has no stage"):
        architecture.stage_of("novelty")


def test_wrong_import_ends_the_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = tmp_path / "spec.py"
    wrong.write_text("from lens_rope.cli import main", encoding="utf-8")
    known = {**architecture.modules(), "spec": wrong}
    monkeypatch.setattr(architecture, "modules", lambda: known)
    with pytest.raises(ValueError, match=r"spec \(Common ground\) imports lens_rope\.cli"):
        architecture.markdown()


def test_picture_shows_every_module_and_is_the_one_that_is_kept() -> None:
    root = ElementTree.fromstring(architecture.picture())
    shown = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "lr-module"]
    known = architecture.modules()
    packages = {name.rpartition(".")[0] for name in known} - {""}
    hidden = {name for name in known if name.rpartition(".")[2].startswith("_")}
    assert sorted(shown) == sorted(
        name.removeprefix(f"{name.partition('.')[0]}.") for name in known.keys() - packages - hidden
    )
    kept = architecture.PICTURE.read_text(encoding="utf-8")
    assert kept == architecture.picture() + "\n", "run python -m docs_build.architecture in scripts"


def test_picture_is_one_block_of_html() -> None:
    block = architecture.markdown()
    assert "\n" not in block and block.startswith("<div")
    ElementTree.fromstring(block)


# --- how to contribute ------------------------------------------------------------------------


def test_links_lead_from_the_repository_and_from_the_site() -> None:
    source = contributing.SOURCE.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", source)
    assert len(links) > 5
    for target in links:
        assert (ROOT / target).is_file(), target
    page = contributing.markdown()
    assert page.count("<svg") == 1
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page):
        assert (ROOT / "docs" / target).is_file(), target


def test_what_it_names_exists() -> None:
    text = contributing.SOURCE.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:lens_rope|scripts|tests|tutorials|docs)/[\w./]*)`", text))
    named |= {f"lens_rope/{name}" for name in re.findall(r"`((?:reporting|views)/[\w.]+)`", text)}
    assert len(named) > 15
    for path in named - {"scripts/docs_build/NAME.py"}:
        assert (ROOT / path).exists(), path
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("lens_rope", "tests", "scripts/docs_build")
        for path in sorted((ROOT / folder).rglob("*.py"))
    )
    files = {path.name for path in (ROOT / "lens_rope").rglob("*") if path.is_file()}
    for whole in re.findall(r"`([\w.]+)(?:\(\))?`", text):
        name = whole.rpartition(".")[2]
        if name in ("py", "html", "yml", "json"):
            assert whole in files | {"mkdocs.yml", "report.json"}, whole
        elif whole not in ("chromium", "chromedriver"):
            assert re.search(rf"\b{name}\b", code), whole


# --- what the package says, on a page ---------------------------------------------------------


def test_message_is_shown_as_it_is() -> None:
    """Whatever a message holds, neither Markdown nor HTML reads it as its own."""
    says = "a *b* **c** _d_ x_y_z `e` <f> :m: | [g](h) $i$ \"j\" \\* &amp; ~k~ 'l'"
    shown = supported_models._inline(f"{says}\n  again")
    table = f'| says | title |\n|---|---|\n| {shown} | <a title="{shown}">it</a> |'
    root = ElementTree.fromstring(markdown.markdown(table, extensions=["tables", "pymdownx.emoji"]))
    cell, other = root.iter("td")
    assert cell.text == f"{says} again" and not list(cell)
    assert other[0].get("title") == f"{says} again"


# --- how to cite ------------------------------------------------------------------------------


def test_citation_is_of_this_version_and_whole() -> None:
    citation = citing.load()
    assert citation["version"] == lens_rope.__version__
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= reference.keys()
        assert reference["url"].startswith("https://arxiv.org/abs/")


def test_citation_in_words_and_as_bibtex() -> None:
    citation = {
        "title": "lens_rope: a title",
        "version": "1.2.3",
        "license": "MIT",
        "authors": [{"name": "The makers"}, {"family-names": "Noether", "given-names": "Emmy"}],
    }
    assert citing.apa(citation) == (
        "The makers, & Noether, Emmy. (n.d.). lens_rope: a title (Version 1.2.3) "
        "[Computer software]."
    )
    entry = citing.bibtex({**citation, "date-released": "2027-03-04"})
    assert entry.splitlines() == [
        "@software{lens_rope,",
        "  author = {{The makers} and Noether, Emmy},",
        r"  title = {{lens\_rope: a title}},",
        "  version = {1.2.3},",
        "  license = {MIT},",
        "  year = {2027},",
        "}",
    ]
    assert "(2027)" in citing.apa({**citation, "date-released": "2027-03-04"})


def test_every_source_says_where_it_is_used() -> None:
    page = citing.markdown()
    anchors = re.findall(r"mathematics\.md#([\w-]+)", page)
    assert len(anchors) == len(citing.load()["references"]) == len(citing.USED_AT)
    mathematics = (ROOT / "docs/mathematics.md").read_text(encoding="utf-8")
    for anchor in anchors:
        assert f"{{ #{anchor} }}" in mathematics, anchor
