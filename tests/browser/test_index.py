"""The index and the page of a comparison as a reader meets them, in a real browser with the network
off: what they compare is drawn, and names that look like markup are text."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from planted import named_heads, planted_capture
from report_fixtures import random_capture, report_data, rope

from browser.browsing import (
    axe,
    errors,
    find,
    luminance,
    n_colors,
    open_page,
    pixels,
    prepare,
    requests,
    wait_for,
)
from lens_rope.reporting import Report
from lens_rope.reporting.comparison import compare
from lens_rope.reporting.index import render_index

pytestmark = pytest.mark.browser

HOSTILE = "</script><b>bold</b> <img src=x onerror=alert(1)> %{x} 💩"


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    whole = tuple(rope(layer, rotary_dim=12, d_head=12) for layer in range(5))
    mixed = (rope(0), rope(1, rotary_dim=8), rope(2, rotary_dim=0), rope(3, window=16))
    return {
        "planted": Report(report_data(planted_capture(list(named_heads(96).values())))),
        "whole": Report(report_data(random_capture(whole, n_pos=96))),
        "mixed": Report(report_data(random_capture(mixed, n_pos=96))),
    }


@pytest.fixture(scope="module")
def index(reports, tmp_path_factory):
    """Three reports, one with a hostile name, one without report.json, and two failures."""
    root = tmp_path_factory.mktemp("batch")
    for name, done in reports.items():
        done.save(root / name, formats=["json", "html"] if name == "planted" else ["json"])
    reports["planted"].save(root / "page-only", formats=["html"])
    (root / "#odd 100%").mkdir()
    content = json.loads(json.dumps(reports["mixed"].to_dict()))
    content["model"]["name"] = HOSTILE
    (root / "#odd 100%" / "report.json").write_text(json.dumps(content))
    path = root / "index.html"
    path.write_text(render_index(root, [(HOSTILE, "no such model"), ("b", HOSTILE)]), "utf-8")
    return path


@pytest.fixture(scope="module")
def comparison(reports, tmp_path_factory):
    """Two reports of one shape, one of which has been changed by hand."""
    before = json.loads(json.dumps(reports["whole"].to_dict()))
    after = json.loads(json.dumps(before))
    for use in after["usage"]:
        use["key"][0] *= 4
    for head in after["heads"][:3]:
        head["sink_share"] = 0.75
        head["pattern"] = "sink"
    done = compare(before, after, names=["before", HOSTILE])
    return done.save(tmp_path_factory.mktemp("cmp") / "out") / "compare.html"


@pytest.fixture(scope="module")
def two_models(reports, tmp_path_factory):
    done = compare(reports["planted"], reports["mixed"])
    return done.save(tmp_path_factory.mktemp("two") / "out") / "compare.html"


def background(page) -> np.ndarray:
    text = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    return np.array([int(x) for x in text[text.index("(") + 1 : -1].split(",")[:3]])


def all_is_drawn(page, n_figures: int) -> None:
    plots = find(page, ".plot")
    assert len(plots) == n_figures
    blank = background(page)
    for plot in plots:
        image = pixels(page, plot)
        what = plot.get_attribute("aria-label")
        inked = (np.abs(image - blank).sum(axis=2) > 60).mean()
        assert inked > 0.004, f"{what}: {inked:.2%} of the figure is drawn"
        assert n_colors(image) > 20, what


@pytest.mark.parametrize("dark", [False, True])
def test_the_index_draws_and_fetches_nothing(driver, index, dark):
    page = open_page(driver, index, dark=dark)
    assert errors(page) == []
    assert requests(page) == [index.as_uri()]
    # Usage of both and of each side, sinks, ranks; nothing is strong, so no bounds are drawn.
    titles = [button.get_attribute("aria-label") for button in find(page, "[data-save=svg]")]
    all_is_drawn(page, len(titles))
    assert titles[0] == "SVG: Query and key magnitude against cycles over the context"
    assert any("Sink heads" in title for title in titles)
    assert any("key variance" in title for title in titles)


def test_every_model_has_its_line_and_its_colour(driver, index):
    page = open_page(driver, index)
    drawn = page.execute_script(
        """
        const plot = document.querySelector("#usage .plot");
        return [...plot.querySelectorAll(".scatterlayer .trace")].map(
          e => e.querySelector(".lines path.js-line")).filter(Boolean).map(
          e => [getComputedStyle(e).stroke, getComputedStyle(e).strokeDasharray]);
        """
    )
    assert len(drawn) == 4
    assert len({stroke for stroke, _ in drawn}) == len({dash for _, dash in drawn}) == 4
    image = pixels(page, find(page, "#usage .plot")[0])
    for stroke, _ in drawn:
        color = np.array([int(x) for x in stroke[stroke.index("(") + 1 : -1].split(",")[:3]])
        assert (np.abs(image - color).sum(axis=2) < 40).sum() > 60, stroke
    # The pictures in the tables are those of the lines, in the same order.
    swatches = page.execute_script(
        "return [...document.querySelectorAll('#usage table .swatch')]"
        ".map(e => getComputedStyle(e).stroke)"
    )
    assert swatches == [stroke for stroke, _ in drawn]


def test_hover_names_model_pair_wavelength_and_cycles(driver, index):
    from selenium.webdriver import ActionChains

    page = open_page(driver, index)
    driver.shows = None
    plot = find(page, "#usage .plot")[0]
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    time.sleep(0.3)
    x, y, width, height = page.execute_script(
        """
        const layout = arguments[0]._fullLayout, full = arguments[0]._fullData;
        const trace = full.filter(t => t.mode === "lines+markers" && t.name === "tiny (whole)")[0];
        return [layout.xaxis._offset + layout.xaxis.d2p(trace.x[2]),
                layout.yaxis._offset + layout.yaxis.d2p(trace.y[2]),
                arguments[0].clientWidth, arguments[0].clientHeight];
        """,
        plot,
    )
    move = ActionChains(page)
    move.move_to_element_with_offset(plot, round(x - width / 2), round(y - height / 2)).perform()
    move.move_by_offset(1, 0).perform()
    wait_for(
        page, "return document.querySelectorAll('#usage .hoverlayer text').length > 0", True, 10
    )
    text = page.execute_script(
        "return [...document.querySelectorAll('#usage .hoverlayer tspan')]"
        ".map(t => t.textContent).join(' ')"
    )
    for part in ("tiny (whole)", "pair 3 of 5 layers", "wavelength 628 tokens", "cycles", "median"):
        assert part in text, text


def test_hostile_names_are_shown_as_they_are(driver, index, comparison):
    for path in (index, comparison):
        page = open_page(driver, path)
        assert errors(page) == []
        assert find(page, "main b img, main img, main script[src]") == []
        body = page.execute_script("return document.querySelector('main').textContent")
        assert HOSTILE in body
        legend = page.execute_script(
            "return [...document.querySelectorAll('#usage .plot .legendtext')]"
            ".map(e => e.textContent)"
        )
        # Long names are cut in the middle, and what is left is the text itself.
        assert any(name.startswith("</script><b>bold") for name in legend), legend
        assert any(name.endswith("%{x} 💩") for name in legend), legend


def test_failures_come_first_and_links_lead_to_reports(driver, index):
    page = open_page(driver, index)
    failed = find(page, ".failed")[0]
    assert "2 models failed in the last run" in failed.text
    assert failed.location["y"] < find(page, "#usage")[0].location["y"]
    hrefs = [link.get_attribute("href") for link in find(page, "main a")]
    assert (index.parent / "planted" / "report.html").as_uri() in hrefs
    local = [href for href in hrefs if not href.startswith(f"{index.as_uri()}#")]
    assert len(local) > 6
    from pathlib import Path
    from urllib.parse import unquote, urlparse

    for href in local:
        assert Path(unquote(urlparse(href).path)).is_file(), href
    cards = find(page, "article.card")
    assert len(cards) == 5
    assert any("without report.json" in card.text for card in cards)
    page.get(hrefs[hrefs.index((index.parent / "planted" / "report.html").as_uri())])
    driver.shows = None
    assert "planted" in page.title


@pytest.mark.parametrize("dark", [False, True])
def test_the_comparison_draws_and_fetches_nothing(driver, comparison, two_models, dark):
    page = open_page(driver, comparison, dark=dark)
    assert errors(page) == []
    assert requests(page) == [comparison.as_uri()]
    # Usage, of each side, pair by pair of each side, sinks, head by head, ranks.
    all_is_drawn(page, 8)
    page = open_page(driver, two_models, dark=dark)
    assert errors(page) == []
    all_is_drawn(page, len(find(page, "[data-save=csv]")))
    assert find(page, "#usage h3") == []


def test_changed_cells_are_warm_and_the_others_are_not(driver, comparison):
    page = open_page(driver, comparison)
    keys = find(page, "#usage .plot")[4]
    at = """
        const [plot, column, row] = arguments, layout = plot._fullLayout;
        return [layout.xaxis._offset + layout.xaxis.d2p(column + 0.3),
                layout.yaxis._offset + layout.yaxis.d2p(row + 0.3)];
    """
    image = pixels(page, keys)
    for row in range(5):
        x, y = page.execute_script(at, keys, 0, row)
        red, green, blue = image[round(y), round(x)]
        assert red - blue > 60, (row, red, green, blue)
        x, y = page.execute_script(at, keys, 3, row)
        assert np.ptp(image[round(y), round(x)]) < 12


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1400])
def test_axe_finds_nothing(driver, index, comparison, width, dark):
    for path in (index, comparison):
        page = open_page(driver, path, width=width, dark=dark)
        assert axe(page) == []


@pytest.mark.parametrize("width", [360, 768, 1400])
def test_nothing_sticks_out_at_any_width(driver, index, comparison, two_models, width):
    for path in (index, comparison, two_models):
        page = open_page(driver, path, width=width)
        wide = page.execute_script(
            """
            return Array.from(document.querySelectorAll("main *")).filter(e =>
                !e.closest(".scroll, svg, .skip") &&
                e.getBoundingClientRect().right > arguments[0] + 1)
              .map(e => e.outerHTML.slice(0, 200));
            """,
            width,
        )
        assert wide == []
        assert page.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("dark", [False, True])
def test_words_in_figures_are_legible(driver, index, dark):
    page = open_page(driver, index, dark=dark)
    back = luminance(page.execute_script("return getComputedStyle(document.body).backgroundColor"))
    colors = page.execute_script(
        "return [...new Set([...document.querySelectorAll('.xtick text, .ytick text, .xtitle, "
        ".legendtext, .annotation-text')].map(e => getComputedStyle(e).fill))]"
    )
    assert len(colors) >= 2
    for color in colors:
        fore = luminance(color)
        assert (max(fore, back) + 0.05) / (min(fore, back) + 0.05) >= 4.5, color


def test_downloads_hold_what_is_drawn(driver, index, reports):
    page = open_page(driver, index)
    driver.shows = None
    page.execute_script(
        "window.caught = []; const make = URL.createObjectURL;"
        "URL.createObjectURL = blob => { window.caught.push(blob); return make(blob); };"
        "document.querySelector('#usage [data-save=csv]').click();"
    )
    text = page.execute_async_script("window.caught[0].text().then(arguments[0])")
    header, *rows = text.lstrip("\ufeff").split("\r\n")[:-1]
    assert header.split(",")[:4] == ["report", "pairs", "layers", "wavelength_tokens"]
    whole = [row.split(",") for row in rows if row.startswith("tiny (whole)")]
    assert [row[1] for row in whole] == ["5", "4", "3", "2", "1", "0"]
    saved = json.loads(json.dumps(reports["whole"].to_dict()))
    for row in whole:
        w = saved["rope"][0]["inv_freq"][int(row[1])]
        assert float(row[3]) == pytest.approx(2 * np.pi / w, rel=1e-6)


def test_paper_holds_all_figures(driver, index, comparison):
    """What a printer gets: figures redrawn for the width of a sheet, in light."""
    for path in (index, comparison):
        page = open_page(driver, path, dark=True)
        driver.shows = None
        # The narrowest that the page is laid out for on paper, A4 with margins.
        page.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": 718, "height": 1000, "deviceScaleFactor": 1, "mobile": False},
        )
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        page.execute_script("window.dispatchEvent(new Event('beforeprint'))")
        wait_for(page, "return document.documentElement.dataset.figures", "light")
        time.sleep(0.5)
        widths = page.execute_script(
            "return [...document.querySelectorAll('.plot')].map(e => [e.offsetWidth, "
            "e.querySelector('svg.main-svg').getBoundingClientRect().width])"
        )
        assert widths
        assert all(inner <= outer + 2 for outer, inner in widths), widths
        page.execute_script("window.dispatchEvent(new Event('afterprint'))")
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_one_report_alone_needs_no_script(driver, reports, tmp_path):
    reports["planted"].save(tmp_path / "one")
    path = tmp_path / "index.html"
    path.write_text(render_index(tmp_path), encoding="utf-8")
    prepare(driver)
    driver.get(path.as_uri())
    link = find(driver, "h3 a")[0]
    assert (link.text, link.get_attribute("href")) == (
        "planted", (path.parent / "one" / "report.html").as_uri()
    )  # fmt: skip
    assert errors(driver) == []
    assert axe(driver) == []
