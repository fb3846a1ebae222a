"""The documentation as a reader meets it, in a real browser with the network off."""

from __future__ import annotations

import functools
import http.server
import threading

import numpy as np
import pytest
from built_site import ROOT, TUTORIALS

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

pytestmark = [pytest.mark.browser, pytest.mark.demo, pytest.mark.slow]

PAGES = sorted(
    [
        path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
    ]
    + [f"tutorials/{name}" for name in TUTORIALS]
)
DRAWN = (
    "return [...document.querySelectorAll('[data-lens-rope]')]"
    ".every(e => e.dataset.drawn === 'done')"
)


@pytest.fixture(scope="module")
def served(driver, site):
    """The address of the site on this machine, which is all of the network that there is."""
    handler = functools.partial(_Quiet, directory=str(site.folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _offline(driver, False)
    yield f"http://127.0.0.1:{server.server_port}"
    _offline(driver, True)
    server.shutdown()
    server.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


def _offline(driver, offline):
    driver.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        {
            "offline": offline,
            "latency": 0,
            "downloadThroughput": 0 if offline else -1,
            "uploadThroughput": 0 if offline else -1,
        },
    )


def visit(driver, served, name, *, width=1400, dark=False):
    # The theme keeps the colours of the last visit.
    driver.get(f"{served}/llms.txt")
    driver.execute_script("localStorage.clear()")
    prepare(driver, width=width, dark=dark)
    driver.get(f"{served}/{name}.html")
    wait_for(driver, DRAWN, True)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_without_a_network(driver, served, name):
    visit(driver, served, name)
    assert errors(driver) == []
    assert [url for url in requests(driver) if not url.startswith(served)] == []
    assert find(driver, ".lr-waiting") == []
    for plot in find(driver, ".lr-plot"):
        assert n_colors(pixels(driver, plot)) > 5
    for formula in find(driver, "math")[:40]:
        box = formula.rect
        assert box["width"] > 3 and box["height"] > 5
    for image in find(driver, ".md-content img"):
        assert driver.execute_script("return arguments[0].naturalWidth", image) > 0
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_a_phone(driver, served, name):
    visit(driver, served, name, width=390)
    too_wide = driver.execute_script(
        "return document.documentElement.scrollWidth > innerWidth ? [...document.querySelectorAll("
        "'.md-content *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
        ".slice(0, 3).map(e => e.outerHTML.slice(0, 120)) : []"
    )
    assert too_wide == []


@pytest.mark.parametrize("name", ["index", "tutorials/3_attention_sinks", "api/decomposition"])
def test_a_page_follows_the_dark_scheme(driver, served, name):
    visit(driver, served, name, dark=True)
    background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    text = driver.execute_script(
        "return getComputedStyle(document.querySelector('.md-typeset')).color"
    )
    assert luminance(background) < 0.05
    assert luminance(text) > 0.4
    for plot in find(driver, ".lr-plot")[:2]:
        assert np.median(pixels(driver, plot)) < 90
    assert errors(driver) == []


@pytest.mark.parametrize("name", ["index", "mathematics", "cli", "tutorials/2_one_score"])
def test_a_page_can_be_read_by_a_screen_reader(driver, served, name):
    visit(driver, served, name)
    # The frame of the page is the theme's; what is judged is what this project writes.
    found = axe(driver, without=(".md-header", ".md-sidebar", ".md-footer", ".md-search"))
    assert [line for line in found if not line.startswith(("region", "landmark"))] == []


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("participation ratio", "glossary.html"),
        ("explain_sinks", "api/sinks.html"),
        ("compressing a KV cache", "tutorials/6_keys_before_and_after.html"),
    ],
)
def test_search_finds_what_is_asked(driver, served, query, page):
    prepare(driver)
    driver.get(f"{served}/index.html")
    box = find(driver, "input.md-search__input")[0]
    driver.execute_script("document.querySelector('[data-md-toggle=search]').click()")
    box.send_keys(query)
    hits = "return document.querySelectorAll('.md-search-result__item').length > 0"
    wait_for(driver, hits, True)
    links = driver.execute_script(
        "return [...document.querySelectorAll('.md-search-result__item a')].map(a => a.href)"
    )
    assert any(page in link for link in links)
    assert [url for url in requests(driver) if not url.startswith(served)] == []
