"""The page for those who read it otherwise: with keys, a screen reader, on a phone, on paper."""

from __future__ import annotations

import base64
import re
import time

import numpy as np
import pytest

from browser.browsing import axe, errors, find, n_colors, open_page, pixels, wait_for

pytestmark = pytest.mark.browser

# What CircuitsVis draws has no labels or roles of its own; the page labels the whole view.
INNARDS = (".cv",)


@pytest.mark.parametrize(
    ("width", "dark"), [(1400, False), (1400, True), (390, False), (390, True)]
)
def test_axe_finds_nothing(driver, path, width, dark):
    page = open_page(driver, path, width=width, dark=dark)
    page.set_script_timeout(120)
    page.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    time.sleep(0.5)
    page.shows = None
    assert axe(page, without=INNARDS) == []


def test_axe_finds_nothing_where_there_are_sinks(driver, planted):
    page = open_page(driver, planted)
    page.set_script_timeout(120)
    page.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.shows = None
    assert axe(page, without=INNARDS) == []


def test_axe_would_find_something(page):
    page.set_script_timeout(120)
    page.shows = None
    page.execute_script(
        """
        document.querySelector(".plot").removeAttribute("aria-label");
        document.querySelector(".facts").style.color = "#d0d0d0";
        document.querySelector("main").insertAdjacentHTML("beforeend", "<h5>skipped</h5>");
        """
    )
    found = {line.split(":")[0] for line in axe(page, without=INNARDS)}
    assert found >= {"role-img-alt", "color-contrast", "heading-order"}


def test_the_first_screen_holds_findings_and_the_figure(driver, planted):
    page = open_page(driver, planted)
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 1400, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    page.shows = None
    items = find(page, "#summary .first .findings li")
    assert 1 <= len(items) <= 5
    plot = find(page, "#summary .plot")[0]
    for element in [*items, plot, *find(page, "#summary .save button")]:
        box = page.execute_script(
            "const b = arguments[0].getBoundingClientRect(); return [b.bottom, b.height]", element
        )
        assert box[0] <= 900
    heights = [item.rect["height"] for item in items]
    line = float(
        page.execute_script(
            "return parseFloat(getComputedStyle(arguments[0]).lineHeight)", items[0]
        )
    )
    assert max(heights) <= 4.2 * line
    for link in find(page, "#summary .topic"):
        assert find(page, link.get_attribute("href")[link.get_attribute("href").index("#") :])


def test_everything_can_be_reached_with_the_tab_key(page):
    from selenium.webdriver import ActionChains, Keys

    page.shows = None
    page.execute_script("document.activeElement.blur(); window.scrollTo(0, 0)")
    wanted = page.execute_script(
        "return document.querySelectorAll('.save button, nav a, summary, .scroll').length"
    )
    visible = page.execute_script(
        """
        return [...document.querySelectorAll('.save button, nav a, summary, .scroll')]
            .filter(e => e.checkVisibility() && e.tabIndex === 0).length;
        """
    )
    assert 40 < visible <= wanted
    seen = set()
    for _ in range(30):
        ActionChains(page).send_keys(Keys.TAB).perform()
        name, outline = page.execute_script(
            """
            const e = document.activeElement, style = getComputedStyle(e);
            return [(e.className || e.tagName) + " " + (e.ariaLabel || e.textContent).slice(0, 60),
                    style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
            """
        )
        assert outline, name
        seen.add(name)
    assert len(seen) > 20
    assert "skip Skip to the report" in seen
    saved = {name.split(":")[0] for name in seen if name.startswith("BUTTON")}
    assert saved >= {"BUTTON SVG", "BUTTON PNG", "BUTTON CSV"}


def test_the_section_read_is_marked(page):
    page.shows = None
    ids = [link.get_attribute("href").split("#")[1] for link in find(page, "nav a")]
    assert ids[:8] == [
        "summary", "frequencies", "usage", "offsets", "attention", "heads", "keys", "gallery",
    ]  # fmt: skip
    order = page.execute_script(
        "return [...document.querySelectorAll('main > section')].map(s => s.id)"
    )
    assert order == ids
    for target in ids:
        page.execute_script("document.getElementById(arguments[0]).scrollIntoView()", target)
        at_end = page.execute_script(
            "return innerHeight + scrollY >= document.documentElement.scrollHeight - 2"
        )
        wait_for(
            page,
            "return [...document.querySelectorAll('nav a[aria-current]')].map(a => a.hash)",
            [f"#{ids[-1] if at_end else target}"],
            10,
        )


def _sticking_out(page) -> list[str]:
    return page.execute_script(
        """
        const width = document.documentElement.clientWidth;
        return Array.from(document.querySelectorAll("main *")).filter(e => {
          const box = e.getBoundingClientRect();
          return e.checkVisibility() && !e.closest("svg, .cv") && box.width > 0 &&
                 (box.right > width + 1 || box.left < -1);
        }).map(e => e.outerHTML.slice(0, 200));
        """
    )


@pytest.mark.parametrize(("name", "size"), [("A4", 210), ("Letter", 215.9)])
def test_nothing_is_cut_on_paper(driver, path, planted, name, size):
    for report in (path, planted):
        page = open_page(driver, report, dark=True)
        page.shows = None
        width = int((size - 24) / 25.4 * 96)
        page.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]},
        )
        page.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False},
        )
        page.execute_script("window.dispatchEvent(new Event('beforeprint'))")
        wait_for(page, "return document.documentElement.dataset.figures", "light")
        time.sleep(0.5)
        try:
            assert page.execute_script("return document.documentElement.scrollWidth") <= width
            assert _sticking_out(page) == []
            for plot in find(page, ".plot"):
                if not plot.is_displayed():
                    continue
                outer, inner = page.execute_script(
                    "return [arguments[0].clientWidth, "
                    "arguments[0].querySelector('svg.main-svg').getBoundingClientRect().width]",
                    plot,
                )
                assert abs(outer - inner) < 2
            # All words are dark on white, whatever the screen is.
            first = pixels(page, find(page, "#summary .plot")[0])
            assert (first[2, 2] == 255).all()
            assert n_colors(first) > 20
            assert not any(button.is_displayed() for button in find(page, ".save button"))
        finally:
            page.execute_script("window.dispatchEvent(new Event('afterprint'))")
            page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_printing_draws_figures_for_the_sheet_and_puts_them_back(driver, planted):
    page = open_page(driver, planted, dark=True)
    page.shows = None
    page.set_script_timeout(60)
    widths = (
        "return [...document.querySelectorAll('.plot')].map(e => Math.round(e._fullLayout.width))"
    )
    before = page.execute_script(widths)
    page.execute_script(
        """
        window.seen = [];
        window.addEventListener("beforeprint", () => {
          window.seen = [...document.querySelectorAll(".plot")].map(e =>
            [e._fullLayout.width, e._fullLayout.font.color, e.clientWidth]);
          window.folded = [...document.querySelectorAll("details.printed")].filter(d => !d.open);
        });
        """
    )
    mm = 1 / 25.4
    printed = page.execute_cdp_cmd(
        "Page.printToPDF",
        {
            "paperWidth": 210 * mm, "paperHeight": 297 * mm, "printBackground": True,
            **{f"margin{side}": 12 * mm for side in ("Top", "Bottom", "Left", "Right")},
        },
    )  # fmt: skip
    pdf = base64.b64decode(printed["data"])
    assert pdf.startswith(b"%PDF")
    assert 4 < len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf)) < 60
    # Widths as the printer met them: before the event was over.
    seen = page.execute_script("return window.seen")
    assert len(seen) == len(before) > 20
    for width, color, room in seen:
        assert (width, color) == (room, "#22272c")
        assert width <= 703
    assert page.execute_script("return window.folded.length") == 0
    wait_for(page, "return document.documentElement.dataset.figures", "dark")
    wait_for(page, widths, before, 20)
    assert not page.execute_script("return document.documentElement.classList.contains('paper')")
    assert errors(page) == []


@pytest.mark.parametrize("width", [390, 1400])
def test_words_of_figures_stay_inside_them(driver, planted, width):
    page = open_page(driver, planted, width=width)
    cut = page.execute_script(
        """
        const out = [];
        for (const plot of document.querySelectorAll(".plot")) {
          if (!plot.checkVisibility()) continue;
          const frame = plot.getBoundingClientRect();
          for (const text of plot.querySelectorAll("text")) {
            const box = text.getBoundingClientRect();
            if (box.width && (box.left < frame.left - 2 || box.right > frame.right + 2))
              out.push([plot.id, text.textContent, box.left - frame.left, box.right - frame.right]);
          }
          const labels = [...plot.querySelectorAll(".xtick text")]
            .map(e => e.getBoundingClientRect()).filter(b => b.width).sort((a, b) => a.x - b.x);
          for (let i = 1; i < labels.length; i++)
            if (Math.abs(labels[i].top - labels[i - 1].top) < 3 &&
                labels[i].left < labels[i - 1].right - 1)
              out.push([plot.id, "labels run into each other", i]);
        }
        return out;
        """
    )
    assert cut == []


@pytest.mark.parametrize("dark", [False, True])
def test_crosses_of_missing_cells_stand_out(driver, path, dark):
    page = open_page(driver, path, dark=dark)
    plot = find(page, "#usage .plot")[0]
    x, y, w, h = page.execute_script(
        """
        const frame = arguments[0].getBoundingClientRect();
        const box = [...arguments[0].querySelectorAll("text")].find(t => t.textContent === "×")
          .getBoundingClientRect();
        return [box.left - frame.left, box.top - frame.top, box.width, box.height];
        """,
        plot,
    )
    image = pixels(page, plot)
    cell = image[round(y) : round(y + h), round(x) : round(x + w)].reshape(-1, 3) / 255
    linear = np.where(cell <= 0.04045, cell / 12.92, ((cell + 0.055) / 1.055) ** 2.4)
    light = np.sort(linear @ [0.2126, 0.7152, 0.0722])
    ground = np.median(light)
    sign = light[-1] if dark else light[0]
    contrast = (max(sign, ground) + 0.05) / (min(sign, ground) + 0.05)
    assert contrast > 3.5
