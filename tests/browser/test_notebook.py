"""Outputs of a notebook that was really run, put into pages as notebooks do it, and looked at in a
real browser without a network."""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path

import numpy as np
import pytest
from planted import named_heads, planted_capture
from public_results import RESULTS, Parsed
from report_fixtures import HOSTILE, random_capture, rope

import lens_rope as lr
from browser.browsing import (
    axe,
    errors,
    find,
    luminance,
    n_colors,
    pixels,
    prepare,
    requests,
    wait_for,
)
from lens_rope.views.downloads import add_table
from lens_rope.views.layout import figure
from lens_rope.views.libraries import asset, packed
from lens_rope.views.notebook import figures_output
from lens_rope.views.tokens import display_text

pytestmark = pytest.mark.browser

TESTS = Path(__file__).parents[1]
# A page as JupyterLab and VS Code make it: markup is inserted, and scripts, which do not run then,
# are made anew.
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>notebook</title>
<meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,"><style>body { margin: 16px; %(style)s }</style>
<script>%(before)s</script></head><body><main><h1>notebook</h1>
<p id="outside">text <table id="table"><tr><td>cell</td></tr></table></p>
%(hosts)s</main><script>
const outputs = %(outputs)s;
document.querySelectorAll(".host").forEach((host, i) => {
  host.innerHTML = outputs[i];
  if (%(trusted)s) host.querySelectorAll("script").forEach(old => {
    const fresh = document.createElement("script");
    fresh.textContent = old.textContent;
    old.replaceWith(fresh);
  });
});
</script></body></html>"""
# Classic notebooks have a module loader, to which libraries would hand themselves.
LOADER = """
window.define = function () { window.defined = (window.defined || 0) + 1; };
window.define.amd = {};
window.module = { exports: {} };
window.exports = window.module.exports;
window.Plotly = window.foreign = { version: "0.0.1" };
window.CircuitsVis = window.foreignToo = { version: "0.0.1" };
"""
DARK = "background: #111; color: #ddd"
DONE = (
    "const roots = [...document.querySelectorAll('[data-lens-rope]')];"
    "return roots.length > 0 && roots.every(e => e.dataset.drawn === 'done')"
)


@pytest.fixture(scope="module")
def qk():
    return planted_capture(list(named_heads(96).values()))


@pytest.fixture(scope="module")
def executed():
    """The outputs of a notebook with a cell for every result, run in a kernel of its own."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    manager = pytest.importorskip("jupyter_client")
    # Without folders of kernels the one of this interpreter is left.
    specs = manager.kernelspec.KernelSpecManager(kernel_dirs=[])
    assert specs.get_kernel_spec("python3").argv[0] == sys.executable
    v4 = nbformat.v4
    cells = [
        "from planted import named_heads, planted_capture\nfrom public_results import RESULTS\n"
        "qk = planted_capture(list(named_heads(96).values()))",
        *(f"RESULTS[{name!r}](qk)" for name in RESULTS),
    ]
    book = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        book,
        timeout=300,
        km=manager.AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs),
        resources={"metadata": {"path": str(TESTS)}},
    )
    client.execute()
    nbformat.validate(book)
    outputs = {}
    for name, cell in zip(RESULTS, book.cells[1:], strict=True):
        (output,) = cell.outputs  # and nothing besides, printed or displayed
        # Plain text is there for those who show no HTML.
        assert set(output.data) == {"text/html", "text/plain"}
        outputs[name] = output.data["text/html"]
    return outputs


def open_outputs(
    driver, folder, outputs, *, before="", style="", trusted=True, width=1100, dark=False
):
    """Puts outputs into a page, one below the other, and opens it."""
    text = PAGE % {
        "before": before, "style": style, "trusted": json.dumps(trusted),
        "hosts": "\n".join('<div class="host"></div>' for _ in outputs),
        "outputs": json.dumps(list(outputs)).replace("<", "\\u003c"),
    }  # fmt: skip
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    prepare(driver, width=width, dark=dark)
    driver.get(path.as_uri())
    if trusted:
        wait_for(driver, DONE, True)
    return path


@pytest.fixture(scope="module")
def shown(driver, executed, tmp_path_factory):
    """All of the outputs on one page, with a module loader and other versions of the libraries."""
    folder = tmp_path_factory.mktemp("notebook")
    path = open_outputs(driver, folder, executed.values(), before=LOADER)
    return path


def test_every_output_of_a_notebook_is_drawn(driver, shown, executed):
    hosts = find(driver, ".host")
    assert len(hosts) == len(RESULTS)
    for name, host in zip(RESULTS, hosts, strict=True):
        plots = host.find_elements("css selector", ".lr-plot")
        assert len(plots) == executed[name].count('class="lr-plot"'), name
        for plot in plots:
            assert plot.size["width"] > 800, name
            assert n_colors(pixels(driver, plot)) > 20, name
        assert not host.find_elements("css selector", ".lr-waiting"), name
        rows = [len(table) for table in Parsed(executed[name]).tables]
        tables = host.find_elements("css selector", "table")
        shown_rows = [len(t.find_elements("css selector", "tr")) for t in tables]
        assert shown_rows[: len(rows)] == rows, name


def test_nothing_is_fetched_and_nothing_goes_wrong(driver, executed, tmp_path):
    path = open_outputs(driver, tmp_path, executed.values(), before=LOADER)
    assert errors(driver) == []
    assert requests(driver) == [path.as_uri()]


def test_the_page_keeps_its_own_libraries(driver, shown):
    """Neither its module loader nor other versions of the libraries are touched."""
    assert driver.execute_script("return window.Plotly === window.foreign") is True
    assert driver.execute_script("return window.CircuitsVis === window.foreignToo") is True
    assert driver.execute_script("return window.defined") is None
    assert driver.execute_script("return Object.keys(window.module.exports)") == []


def test_the_page_keeps_its_own_style(driver, shown, tmp_path):
    read = (
        "return ['outside', 'table'].map(id => { const s = getComputedStyle("
        "document.getElementById(id)); return [s.font, s.color, s.margin, s.borderCollapse]; })"
    )
    with_outputs = driver.execute_script(read)
    open_outputs(driver, tmp_path, ["nothing"], trusted=False)
    assert driver.execute_script(read) == with_outputs
    driver.get("about:blank")


def test_outputs_can_be_read_by_all(driver, qk, tmp_path):
    """axe-core finds nothing wrong with headings, labels and contrast, on light and dark pages."""
    outputs = [RESULTS[name](qk)._repr_html_() for name in ("HeadDecomposition", "Report")]
    for style in ("", DARK):
        open_outputs(driver, tmp_path, outputs, style=style)
        assert axe(driver, without=("#outside", "#table")) == []


def test_an_output_without_a_loader_leaves_nothing_behind(driver, qk, tmp_path):
    open_outputs(driver, tmp_path, [qk.rope()._repr_html_()])
    assert n_colors(pixels(driver, find(driver, ".lr-plot")[0])) > 20
    left = driver.execute_script(
        "return ['Plotly', 'CircuitsVis', 'lensRopeOutput'].filter(name => name in window)"
    )
    assert left == []
    assert errors(driver) == []


def test_the_same_output_can_be_shown_twice(driver, qk, tmp_path):
    """And the second figure of an output is drawn like the first."""
    html = lr.decompose(qk, 0, 2)._repr_html_()
    open_outputs(driver, tmp_path, [html, qk.rope()._repr_html_(), html])
    plots = find(driver, ".lr-plot")
    assert len(plots) == 5
    images = [pixels(driver, plot) for plot in plots]
    assert min(map(n_colors, images)) > 20
    assert len(find(driver, ".lr-save")) == 5
    # Edges of letters depend on where on the screen they are.
    assert abs(images[0] - images[3]).mean() < 0.5
    assert abs(images[1] - images[4]).mean() < 0.5
    # Each library is unpacked once.
    assert driver.execute_script("return Object.keys(window.__lensRopeLibraries).length") == 1


def test_an_output_works_in_a_frame_that_may_do_nothing_but_run_scripts(driver, qk, tmp_path):
    """As in Colab: each output has a page of its own, without an origin."""
    inner = f"<!doctype html><body>{lr.explain_sinks(qk)._repr_html_()}</body>"
    path = tmp_path / "frame.html"
    path.write_text(
        '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">'
        f'<iframe sandbox="allow-scripts" width="1000" height="1000" srcdoc="{escape(inner)}">'
        "</iframe>",
        encoding="utf-8",
    )
    prepare(driver)
    driver.get(path.as_uri())
    frame = find(driver, "iframe")[0]
    driver.switch_to.frame(frame)
    try:
        wait_for(driver, DONE, True)
        assert driver.execute_script("return window.origin") == "null"
        assert len(find(driver, ".lr-plot .main-svg")) >= 2
    finally:
        driver.switch_to.default_content()
    assert n_colors(pixels(driver, frame)) > 50
    assert errors(driver) == []


def test_without_trust_the_output_can_be_read(driver, qk, tmp_path):
    found = lr.explain_heads(qk)
    open_outputs(driver, tmp_path, [found._repr_html_()], trusted=False)
    text = find(driver, ".lens-rope")[0].text
    assert text.startswith("8 heads of planted: ")
    assert "first occurrence duplicate token" in text
    assert "run the cell, or trust the notebook" in text
    assert errors(driver) == []


def test_where_a_library_cannot_be_unpacked_the_output_says_so(driver, qk, tmp_path):
    html = qk.rope()._repr_html_()
    before = "const Kept = DecompressionStream; window.DecompressionStream = undefined;"
    path = open_outputs(driver, tmp_path, [html], before=before, trusted=False)
    assert path.exists()
    driver.execute_script(
        "document.querySelectorAll('.host script').forEach(old => {"
        "const fresh = document.createElement('script'); fresh.textContent = old.textContent;"
        "old.replaceWith(fresh); })"
    )
    wait_for(
        driver,
        "return document.querySelector('.lr-waiting').textContent.slice(0, 33)",
        "The figure cannot be drawn here: ",
    )
    assert "RoPE of planted" in find(driver, ".lens-rope")[0].text
    assert errors(driver) == []
    # The next output tries again.
    driver.execute_script(
        "window.DecompressionStream = Kept; const host = document.querySelector('.host');"
        "host.innerHTML = outputs[0]; host.querySelectorAll('script').forEach(old => {"
        "const fresh = document.createElement('script'); fresh.textContent = old.textContent;"
        "old.replaceWith(fresh); })"
    )
    wait_for(driver, DONE, True)


def test_one_output_that_fails_leaves_the_others_alone(driver, qk, tmp_path):
    html = qk.rope()._repr_html_()
    broken = html.replace('"data":[', '"data":[null,', 1)
    assert broken != html
    other = lr.explain_sinks(qk)._repr_html_()
    # The keys name the content, so the broken one must not be taken for the whole one.
    broken = broken.replace(html.split('data-lens-rope="')[1][:16], "0" * 16)
    open_outputs(driver, tmp_path, [broken, other], trusted=False)
    driver.execute_script(
        "document.querySelectorAll('.host script').forEach(old => {"
        "const fresh = document.createElement('script'); fresh.textContent = old.textContent;"
        "old.replaceWith(fresh); })"
    )
    wait_for(
        driver, "return document.querySelectorAll('.host')[1].firstElementChild.nextElementSibling"
        ".dataset.drawn", "done",
    )  # fmt: skip
    assert "cannot be drawn here: " in find(driver, ".lr-waiting")[0].text


def fill(driver, selector: str) -> str:
    return driver.execute_script(
        "return getComputedStyle(document.querySelector(arguments[0])).fill", selector
    )


def test_figures_follow_the_page_into_the_dark(driver, qk, tmp_path):
    html = lr.offset_features(qk)._repr_html_()
    open_outputs(driver, tmp_path, [html], style=DARK)
    assert luminance(fill(driver, ".lr-plot .xtick text")) > 0.5
    dark = pixels(driver, find(driver, ".lr-plot")[0])
    assert np.median(dark) < 100
    # And back into the light, as when the theme of a notebook is changed.
    driver.execute_script(
        "document.body.style.background = 'white'; document.body.style.color = 'oklch(0.2 0 0)'"
    )
    wait_for(
        driver,
        "const c = getComputedStyle(document.querySelector('.lr-plot .xtick text')).fill;"
        "return Number(c.match(/\\d+/)[0]) < 100",
        True,
    )
    assert luminance(fill(driver, ".lr-plot .xtick text")) < 0.1
    assert np.median(pixels(driver, find(driver, ".lr-plot")[0])) > 150
    assert errors(driver) == []


def test_an_output_follows_the_page_also_after_it_was_away(driver, qk, tmp_path):
    """A head and a figure: notebooks take outputs out of the page and put them back."""
    outputs = [RESULTS[name](qk)._repr_html_() for name in ("HeadDisplay", "DistanceCurve")]
    open_outputs(driver, tmp_path, outputs, style=DARK)
    modes = (
        "const c = getComputedStyle(document.querySelector('.lr-plot .xtick text')).fill;"
        "return [document.querySelector('.lens-rope-head').dataset.mode,"
        "Number(c.match(/\\d+/)[0]) > 128 ? 'dark' : 'light']"
    )
    paint = "[document.body.style.background, document.body.style.color] = arguments[0];"
    assert driver.execute_script(modes) == ["dark", "dark"]
    driver.execute_script(paint, ["white", "black"])
    wait_for(driver, modes, ["light", "light"])
    driver.execute_script(
        "window.away = [...document.querySelectorAll('.lens-rope')].map(e => [e, e.parentNode]);"
        "away.forEach(([e]) => e.remove());"
    )
    driver.execute_async_script("setTimeout(arguments[0], 700)")
    driver.execute_script(paint, ["#111", "#ddd"])
    driver.execute_async_script("setTimeout(arguments[0], 700)")
    driver.execute_script("away.forEach(([e, place]) => place.append(e))")
    wait_for(driver, modes, ["dark", "dark"])
    driver.execute_script(paint, ["white", "black"])
    wait_for(driver, modes, ["light", "light"])
    assert errors(driver) == []


def test_figures_follow_the_width_of_the_output(driver, qk, tmp_path):
    open_outputs(driver, tmp_path, [lr.decompose(qk, 0, 2)._repr_html_()])
    width = "return [...document.querySelectorAll('.lr-plot .main-svg')].map(e => e.clientWidth)"
    before = driver.execute_script(width)
    driver.execute_script("document.querySelector('.host').style.width = '500px'")
    wait_for(driver, width + ".every(w => w === 500)", True)
    assert min(before) > 900


def test_an_output_fits_a_narrow_page(driver, qk, tmp_path):
    outputs = [RESULTS[name](qk)._repr_html_() for name in ("HeadMetrics", "SinkExplanation")]
    open_outputs(driver, tmp_path, outputs, width=390)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("tokens", [HOSTILE, ("$x$", "$$y$$", "\\(z\\)", "<b>bold</b>")])
def test_tokens_are_shown_as_they_are(driver, tmp_path, tokens):
    tokens = (*tokens, *("t" for _ in range(8)))
    qk = random_capture((rope(0),), tokens=tokens)
    d = lr.decompose(qk, 0, 0)
    n = len(tokens) - 8
    scores = [d.at(i, i) for i in range(n)]
    bodies = [score._repr_html_() for score in scores[:2]]
    # One output with all of the figures is quicker than one for each.
    bodies.append(figures_output("", [score.plot() for score in scores]))
    open_outputs(driver, tmp_path, bodies)
    titles = [e.get_attribute("textContent") for e in find(driver, ".lr-plot .gtitle")][2:]
    assert len(titles) == n
    for token, title in zip(tokens, titles, strict=False):
        shown = display_text(token)
        assert f"query {tokens.index(token)} “{shown}”" in title
    for token, root in zip(tokens[:2], find(driver, ".lens-rope"), strict=False):
        assert f"“{display_text(token)}”" in root.text
    assert errors(driver) == []


def test_what_is_saved_is_what_is_drawn(driver, qk, tmp_path):
    score = lr.decompose(qk, 0, 2).at(40, 20)
    open_outputs(driver, tmp_path, [score._repr_html_()])
    driver.execute_script(
        "window.saved = []; URL.createObjectURL = blob => { blob.text().then(t => "
        "window.saved.push(t)); return '#'; }"
    )
    buttons = find(driver, ".lr-save button")
    assert [button.text for button in buttons] == ["SVG", "PNG", "CSV"]
    buttons[2].click()
    wait_for(driver, "return window.saved.length", 1)
    header, *rows = (
        driver.execute_script("return window.saved[0]").strip("\ufeff\r\n").split("\r\n")
    )
    values = [float(row.split(",")[-1]) for row in rows]
    assert header.split(",")[-1] == "contribution_score_units"
    np.testing.assert_allclose(values[:-1], score.contribution, rtol=1e-5, atol=1e-6)


def test_a_button_says_when_nothing_can_be_saved(driver, qk, tmp_path):
    open_outputs(driver, tmp_path, [qk.rope()._repr_html_()])
    driver.execute_async_script(
        "Object.values(window.__lensRopeLibraries)[0].then(Plotly => {"
        "Plotly.downloadImage = () => Promise.reject(Error('no room')); }).then(arguments[0])"
    )
    find(driver, ".lr-save button")[0].click()
    text = "return document.querySelector('.lr-save button').textContent"
    wait_for(driver, text, "SVG failed: no room")
    assert errors(driver) == []


def test_whole_numbers_are_saved_as_they_are(driver):
    columns = {"n": [16_777_217, 2], "large": [2**40 + 1, 3], "x": [0.123456789, 3e10]}
    fig = add_table(figure(height=100, label="nothing"), "numbers", columns)
    text = driver.execute_script(
        asset("figure.js") + "return lensRopeCsv(JSON.parse(arguments[0]))", fig.to_json()
    )
    assert text.split("\r\n") == [
        "n,large,x", "16777217,1099511627777,0.1234568", "2,3,30000000000", "",
    ]  # fmt: skip


def test_an_output_is_little_more_than_its_library(qk):
    """2 MB of it are Plotly, packed; the rest is the result."""
    for name in ("RotaryCapture", "SinkExplanation", "OffsetFeatures"):
        size = len(RESULTS[name](qk)._repr_html_())
        assert size < len(packed("Plotly")) + 300_000, name
