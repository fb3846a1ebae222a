"""The page as a reader meets it: opened in a real browser with the network off, everything on it is
drawn, nothing is fetched, and what is shown is what the report holds."""

from __future__ import annotations

import time

import numpy as np
import pytest
from planted import named_heads

from browser.browsing import (
    emulate,
    errors,
    find,
    luminance,
    map_pixels,
    n_colors,
    open_page,
    pixels,
    requests,
    wait_for,
)
from browser.conftest import TOKENS
from lens_rope.reporting.index import render_index
from lens_rope.views.tokens import display_text

pytestmark = pytest.mark.browser


def test_no_error_and_no_request(driver, path):
    page = open_page(driver, path)
    assert errors(page) == []
    assert requests(page) == [path.as_uri()]


def test_this_would_notice_an_error_and_a_request(driver, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='https://example.org/x.png'><script>undefinedFunction()</script>")
    driver.get_log("browser")
    driver.get_log("performance")
    driver.shows = None
    driver.get(bad.as_uri())
    time.sleep(0.5)
    assert any("undefinedFunction" in message for message in errors(driver))
    assert "https://example.org/x.png" in requests(driver)


def test_every_figure_has_drawn(page):
    plots = find(page, ".plot")
    # Summary, verification, curve, map, three strips, two usage, two largest components, bounds,
    # two shares, offset shares, two spectra, two per head; two mean components are folded away.
    assert len(plots) == 17 + 2 * 3 + 2
    plots = [plot for plot in plots if plot.is_displayed()]
    assert len(plots) == 17 + 2 * 3
    background = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    blank = np.array([int(x) for x in background[4:-1].split(",")])
    for plot in plots:
        label = plot.get_attribute("aria-label")
        image = pixels(page, plot)
        inked = (np.abs(image - blank).sum(axis=2) > 60).mean()
        assert inked > 0.005, f"{label}: {inked:.2%} of the figure is drawn"
        assert n_colors(image) > 20, label


def test_every_circuitsvis_view_has_drawn(page, data):
    canvases = find(page, ".lr-main canvas")
    assert len(canvases) == 3
    for canvas, head in zip(canvases, data.gallery, strict=True):
        image = map_pixels(page, canvas)
        assert min(image.shape[:2]) > 300
        # The upper triangle is grey; a strong cell of the pattern is nearly the full colour.
        assert (np.abs(image - [0xE6, 0xE8, 0xEA]).sum(axis=2) < 6).mean() > 0.1
        blue = image[..., 2] - image[..., 0] > 40
        assert blue.mean() > 0.002, f"{head.layer}.{head.head}"
    for text in find(page, ".cv.ColoredTokens"):
        assert n_colors(pixels(page, text)) > 20


def test_the_attention_pattern_is_the_right_way_round(page, data):
    """The first row (query 0) is at the top and sees key 0, at the left, only."""
    canvas = find(page, ".lr-main canvas")[0]
    image = map_pixels(page, canvas)
    masked = np.abs(image - [0xE6, 0xE8, 0xEA]).sum(axis=2) < 6
    rows, columns = np.nonzero(masked)
    top = masked[np.quantile(rows, 0.05).astype(int)]
    bottom = masked[np.quantile(rows, 0.99).astype(int)]
    assert top.sum() > 3 * bottom.sum()
    assert np.nonzero(bottom)[0].mean() > np.median(columns)


def test_tokens_are_shown_as_they_are(page):
    for view in find(page, ".cv.ColoredTokens"):
        spans = view.find_elements("css selector", "span > span")
        # A word joiner, invisible, keeps markup from being read as such.
        shown = [e.get_attribute("textContent").replace("\u2060", "") for e in spans]
        assert shown == [display_text(token) for token in TOKENS]
        assert view.find_elements("css selector", "b, script, img") == []
    text = find(page, ".cv.ColoredTokens")[0].text.replace("\u2060", "")
    for sign in ("</script>", "<b>", "a↵↵⇥b", "💩", "∅", "{{·7·*·7·}}", "&amp;"):
        assert sign in text


def cell_color(driver, plot, column, row) -> np.ndarray:
    """The colour on screen of one cell of a heat map, off its centre, where there may be a sign."""
    x, y = driver.execute_script(
        """
        const [plot, column, row] = arguments, layout = plot._fullLayout;
        return [layout.xaxis._offset + layout.xaxis.d2p(column + 0.33),
                layout.yaxis._offset + layout.yaxis.d2p(row + 0.3)];
        """,
        plot, column, row,
    )  # fmt: skip
    return pixels(driver, plot)[round(y), round(x)]


@pytest.mark.parametrize("dark", [False, True])
def test_cells_without_a_value_are_visible_as_such(driver, path, dark):
    page = open_page(driver, path, dark=dark)
    usage = find(page, "#usage .plot")[0]
    gone = [cell_color(page, usage, column, 1) for column in (4, 7)]
    gone += [cell_color(page, usage, column, 2) for column in (0, 5)]
    assert max(np.abs(color - gone[0]).sum() for color in gone) < 12
    present = [cell_color(page, usage, column, 0) for column in range(8)]
    assert min(np.abs(color - gone[0]).sum() for color in present) > 30
    background = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    blank = np.array([int(x) for x in background[4:-1].split(",")])
    assert np.abs(gone[0] - blank).sum() > 30
    crosses = page.execute_script(
        "return Array.from(arguments[0].querySelectorAll('text')).filter(t => "
        "t.textContent === '×').length",
        usage,
    )
    assert crosses == 4 + 8


def test_the_tolerance_is_labelled_inside_the_figure(page):
    plot = find(page, "#verification .plot")[0]
    labels = page.execute_script(
        """
        const frame = arguments[0].querySelector(".nsewdrag").getBoundingClientRect();
        return [...arguments[0].querySelectorAll(".annotation-text")].map(e => {
          const box = e.getBoundingClientRect();
          return [e.textContent, box.top > frame.top - 2 && box.bottom < frame.bottom + 2 &&
                                 box.left > frame.left && box.right < frame.right + 2];
        });
        """,
        plot,
    )
    assert labels == [["tolerance 1e-05", True]]


def test_hover_shows_layer_pair_wavelength_value_and_unit(page):
    from selenium.webdriver import ActionChains

    usage = find(page, "#usage .plot")[0]
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", usage)
    x, y, width, height = page.execute_script(
        """
        const layout = arguments[0]._fullLayout;
        return [layout.xaxis._offset + layout.xaxis.d2p(3), layout.yaxis._offset +
                layout.yaxis.d2p(0), arguments[0].clientWidth, arguments[0].clientHeight];
        """,
        usage,
    )
    time.sleep(0.3)
    move = ActionChains(page)
    move.move_to_element_with_offset(usage, round(x - width / 2), round(y - height / 2)).perform()
    move.move_by_offset(1, 0).perform()
    wait_for(
        page, "return document.querySelectorAll('#usage .hoverlayer text').length > 0", True, 10
    )
    text = page.execute_script(
        "return Array.from(document.querySelectorAll('#usage .hoverlayer tspan'))"
        ".map(t => t.textContent).join(' ')"
    )
    for part in ("layer 0 pair 3", "activation units", "wavelength 199 tokens"):
        assert part in text


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_legible_in_light_and_dark(driver, path, dark):
    page = open_page(driver, path, dark=dark)
    back = luminance(page.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert (back < 0.1) == dark
    colors = page.execute_script(
        """
        const colors = {};
        for (const selector of ["p", "figcaption", ".facts", ".reason", "nav a", "a", "td",
                                ".xtick text", ".ytick text", ".xtitle", ".legendtext", ".topic",
                                ".annotation-text", ".save button"]) {
          for (const element of document.querySelectorAll(selector)) {
            if (element.closest(".badge, .skip, .note, tr.partial, .cv")) continue;
            const style = getComputedStyle(element);
            colors[selector + " " + (element instanceof SVGElement ? style.fill : style.color)] = 1;
          }
        }
        return Object.keys(colors);
        """
    )
    assert len(colors) >= 11
    for entry in colors:
        fore = luminance(entry[entry.index("rgb") :])
        contrast = (max(fore, back) + 0.05) / (min(fore, back) + 0.05)
        assert contrast >= 4.5, entry
    assert errors(page) == []


def test_the_page_follows_a_change_of_scheme(page):
    page.shows = None
    emulate(page, dark=True)
    wait_for(page, "return document.documentElement.dataset.figures", "dark")
    scale = page.execute_script(
        "return document.querySelector('#usage .plot')._fullLayout.coloraxis.colorscale[0][1]"
    )
    assert scale == "#181c20"


@pytest.mark.parametrize("width", [360, 768, 1400])
def test_nothing_sticks_out_at_any_width(driver, path, width):
    page = open_page(driver, path, width=width)
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    wide = page.execute_script(
        """
        return Array.from(document.querySelectorAll("main *")).filter(e =>
            !e.closest(".scroll, details, svg, .skip") &&
            e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 200));
        """
    )
    assert wide == []
    for canvas in find(page, ".lr-main canvas"):
        assert canvas.size["width"] > 0.75 * min(width, 400)


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (1400, True), (360, False)])
def test_sinks_and_patterns_are_drawn(driver, planted, width, dark):
    page = open_page(driver, planted, width=width, dark=dark)
    assert errors(page) == []
    assert requests(page) == [planted.as_uri()]
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    labels = [
        plot.get_attribute("aria-label") for plot in find(page, "#attention .plot, #heads .plot")
    ]
    assert len(labels) == 6
    background = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    blank = np.array([int(x) for x in background[4:-1].split(",")])
    for plot in find(page, "#attention .plot, #heads .plot, #keys .plot, #offsets > figure .plot"):
        inked = (np.abs(pixels(page, plot) - blank).sum(axis=2) > 60).mean()
        assert inked > 0.004, f"{plot.get_attribute('aria-label')}: {inked:.2%} is drawn"
    legend = page.execute_script(
        "return [...document.querySelectorAll('#heads .legendtext')].map(e => e.textContent)"
    )
    assert [name for name in named_heads(96) if not any(name in text for text in legend)] == []


def test_folded_figures_draw_when_they_are_opened(driver, planted):
    page = open_page(driver, planted)
    page.shows = None
    page.execute_script("document.querySelector('#offsets details').open = true")
    wait_for(
        page,
        "return [...document.querySelectorAll('#offsets details .plot')]"
        ".every(e => e.querySelector('.heatmaplayer image') && e.offsetWidth > 300)",
        True,
    )
    plots = find(page, "#offsets details .plot")
    assert len(plots) == 2
    widths = page.execute_script(
        "return [...document.querySelectorAll('#offsets details .plot')]"
        ".map(e => [e.offsetWidth, e.querySelector('svg.main-svg').getBoundingClientRect().width])"
    )
    assert all(abs(outer - inner) < 3 for outer, inner in widths)


def test_navigation_reaches_every_section(page):
    links = find(page, "nav a")
    assert len(links) == 10
    for link in links:
        target = link.get_attribute("href").split("#")[1]
        page.execute_script("arguments[0].click()", link)
        wait_for(
            page,
            "const t = document.getElementById(location.hash.slice(1)).getBoundingClientRect().top;"
            "return t < innerHeight * 0.8 && t > -200",
            True,
            10,
        )
        assert page.execute_script("return location.hash") == f"#{target}"


def test_no_button_leads_to_a_cloud(page):
    titles = {b.get_attribute("data-title") for b in find(page, ".modebar-btn")}
    assert not any("cloud" in (title or "").lower() for title in titles)
    assert page.execute_script(
        "return Array.from(document.querySelectorAll('.plot')).every("
        "p => p._context.showSendToCloud === false)"
    )


def test_the_index_opens(driver, path):
    folder = path.parent.parent
    index = folder / "index.html"
    index.write_text(render_index(folder), encoding="utf-8")
    driver.get_log("browser")
    driver.shows = None
    driver.get(index.as_uri())
    link = find(driver, "h3 a")[0]
    assert link.text == "tiny"
    assert errors(driver) == []
    assert link.get_attribute("href") == path.as_uri()
