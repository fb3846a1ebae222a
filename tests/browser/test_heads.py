"""One head as a reader meets it: what CircuitsVis is given for every pair, band and window is what
the decomposition holds, and what is read off by pointer or by keys names the right tokens."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from report_fixtures import HOSTILE, random_capture, rope

import lens_rope as lr
from browser.browsing import (
    axe,
    errors,
    find,
    luminance,
    map_pixels,
    n_colors,
    prepare,
    requests,
    wait_for,
)
from lens_rope.decomposition import decompose
from lens_rope.views.tokens import display_text
from lens_rope.words import number

pytestmark = pytest.mark.browser

# Whole, partial with a gap in front, adjacent pairs and a window, without RoPE.
ROPES = (
    rope(0),
    rope(1, rotary_dim=8, rotary_start=4),
    rope(2, pairing="adjacent", window=9),
    rope(3, rotary_dim=0),
)
TOKENS = (*HOSTILE, *(f" word{i}" for i in range(34)))

# What CircuitsVis is given to draw, by its own components and still drawn by them.
_SPY = """
const circuitsvis = CircuitsVis;
window.seen = {};
CircuitsVis = Object.assign({}, circuitsvis, {
  AttentionPattern: p => {
    window.seen.pattern = p;
    if (window.whileDrawing) window.whileDrawing();
    return circuitsvis.AttentionPattern(p);
  },
  ColoredTokens: p => { window.seen.tokens = p; return circuitsvis.ColoredTokens(p); },
});
"""


@pytest.fixture(scope="module")
def qk():
    return random_capture(ROPES, tokens=TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("heads")


def show(driver, folder, display, *, width=1200, dark=False, spy=True):
    """Opens the page of a head; with `spy` the page records what CircuitsVis is given."""
    html = display.html()
    if spy:
        before, call, after = html.rpartition("lensRopeHead(document")
        html = before + _SPY + call + after
    path = folder / "head.html"
    path.write_text(html, encoding="utf-8")
    prepare(driver, width=width, dark=dark)
    driver.get(path.as_uri())
    settle(driver)
    return path


def settle(driver):
    time.sleep(0.05)
    wait_for(
        driver,
        "return [...document.querySelectorAll('.lens-rope-head')].map(e => e.dataset.state)"
        ".every(s => s === 'drawn')",
        True,
    )


def drawn(driver) -> np.ndarray:
    """`[query, key]` The map that CircuitsVis was given last; nan where it draws no cell."""
    rows = driver.execute_script(
        "return window.seen.pattern.attention.map(r => Array.from(r, x => x ?? null))"
    )
    out = np.full((len(rows), len(rows)), np.nan)
    for query, row in enumerate(rows):
        out[query, : len(row)] = [np.nan if x is None else x for x in row]
    return out


def slide(driver, label, value):
    driver.execute_script(
        "const [label, value] = arguments;"
        "const input = [...document.querySelectorAll('label')]"
        ".find(e => e.textContent.includes(label)).querySelector('input');"
        "input.value = value; input.dispatchEvent(new Event('input'));",
        label,
        value,
    )
    settle(driver)


def press(driver, number):
    find(driver, ".lr-map")[number].click()
    settle(driver)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_every_pair_and_band_is_drawn_as_the_decomposition_has_it(driver, folder, qk, layer):
    split = decompose(qk, layer, 3)
    show(driver, folder, lr.show_head(qk, layer, 3, pairs=[1], start=0, size=50))
    expected = split.contributions()
    for pair in range(split.rope.n_pairs):
        slide(driver, "first pair", pair)
        np.testing.assert_allclose(drawn(driver), expected[pair], atol=1e-5)
        limits = driver.execute_script(
            "return [window.seen.pattern.minValue, window.seen.pattern.maxValue]"
        )
        assert limits[0] == -limits[1] != 0
        assert limits[1] >= np.nanmax(np.abs(expected[pair])) - 1e-5
        assert f"pair {pair}: wavelength" in find(driver, "output")[0].text
    slide(driver, "first pair", 1)
    slide(driver, "pairs in the band", 3)
    np.testing.assert_allclose(drawn(driver), expected[1:4].sum(axis=0), atol=1e-5)
    assert "pairs 1–3: wavelength" in find(driver, "output")[0].text
    for button, values in ((1, split.scores()), (0, None), (3, split.scores() - expected[1])):
        press(driver, button)
        if values is None:
            values = np.where(split.record.visible, split.pattern(), np.nan)
        np.testing.assert_allclose(drawn(driver), values, atol=1e-4)
    assert errors(driver) == []


def test_a_head_without_pairs_has_attention_and_scores(driver, folder, qk):
    show(driver, folder, lr.show_head(qk, 3, 0))
    assert [e.text for e in find(driver, ".lr-name")] == ["attention", "score"]
    assert find(driver, "fieldset") == []
    press(driver, 1)
    np.testing.assert_allclose(drawn(driver), decompose(qk, 3, 0).pass_through(), atol=1e-4)


def test_another_window_has_its_own_values(driver, folder, qk):
    split = decompose(qk, 2, 1)
    path = show(driver, folder, lr.show_head(qk, 2, 1, pairs=[0, (2, 5)], start=20, size=16))
    select = find(driver, "select")[0]
    options = select.find_elements("css selector", "option")
    assert [o.text for o in options] == ["0–15", "16–31", "20–35", "32–47", "34–49"]
    assert [o.is_selected() for o in options] == [False, False, True, False, False]
    for start, option in ((20, options[2]), (34, options[4]), (0, options[0])):
        option.click()
        settle(driver)
        square = slice(start, start + 16), slice(start, start + 16)
        press(driver, 0)
        seen = np.where(split.record.visible, split.pattern(), np.nan)[square]
        np.testing.assert_allclose(drawn(driver), seen, atol=5.1e-5)
        press(driver, 3)
        band = split.contributions([2, 5]).sum(axis=0)[square]
        np.testing.assert_allclose(drawn(driver), band, atol=1e-5)
        move_to(driver, ".lr-main .cv", 2, 1, 16)
        readout = find(driver, ".lr-readout")[0].text
        before = re.search(r"([\d.]+)% of this query’s attention goes to keys before", readout)
        if start:
            expected = 100 * split.pattern()[start + 2, :start].sum()
            assert float(before[1]) == pytest.approx(expected, abs=0.06)
        else:
            assert before is None
    assert errors(driver) == []
    assert requests(driver) == [path.as_uri()]


def move_to(driver, selector, query, key, size):
    from selenium.webdriver import ActionChains

    box = find(driver, selector)[0]
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", box)
    width, height = driver.execute_script(
        "const b = arguments[0].getBoundingClientRect(); return [b.width, b.height]", box
    )
    x, y = ((key + 0.5) / size - 0.5) * width, ((query + 0.5) / size - 0.5) * height
    ActionChains(driver).move_to_element_with_offset(box, round(x), round(y)).perform()


def assert_reads(driver, split, query, key):
    """The readout names both tokens and gives attention, score and the largest contributions."""
    text = find(driver, ".lr-readout")[0].get_attribute("textContent")
    tokens = [display_text(TOKENS[position]) for position in (query, key)]
    shown = find(driver, ".lr-tokens b")
    assert [e.get_attribute("textContent") for e in shown] == tokens
    assert f"query {query} " in text
    assert f"key {key} " in text
    one = split.at(query, key)
    attention = split.pattern()[query, key]
    facts = [e.get_attribute("textContent") for e in find(driver, ".lr-facts b")]
    sign = "−" if one.score < 0 else "+"
    assert float(facts[0].removesuffix("%")) == pytest.approx(100 * attention, abs=0.06)
    assert facts[1] == f"{sign}{abs(one.score):.2f}"
    assert facts[2] == str(query - key)
    rows = [
        [cell.get_attribute("textContent") for cell in row.find_elements("css selector", "th, td")]
        for row in find(driver, ".lr-readout tbody tr")
    ]
    for row, best in zip(rows, one.to_dataframe().head(4).itertuples(), strict=False):
        sign = "−" if best.contribution < 0 else "+"
        assert row[0] == f"pair {best.pair}"
        assert row[1] == f"{sign}{abs(best.contribution):.2f}"
        assert row[3] == f"{number(best.wavelength)} tokens"


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_pointer_reads_the_cell_under_it(driver, folder, qk, layer):
    split = decompose(qk, layer, 0)
    show(driver, folder, lr.show_head(qk, layer, 0, size=50))
    for query, key in ((49, 45), (30, 30), (7, 3), (0, 0), (12, 10)):
        move_to(driver, ".lr-main .cv", query, key, 50)
        assert_reads(driver, split, query, key)
    # A small map reads the same cells; what a query does not see is no cell.
    move_to(driver, ".lr-map .cv", 40, 36, 50)
    text = find(driver, ".lr-readout")[0].text
    assert text.startswith("query ")
    move_to(driver, ".lr-main .cv", 3, 30, 50)
    assert "query 49 " in find(driver, ".lr-readout")[0].text


def test_arrow_keys_move_a_cell_and_say_it(driver, folder, qk):
    from selenium.webdriver import ActionChains, Keys

    split = decompose(qk, 2, 1)
    show(driver, folder, lr.show_head(qk, 2, 1, size=50))
    move_to(driver, ".lr-main .cv", 20, 15, 50)
    main = find(driver, ".lr-main")[0]
    ActionChains(driver).click().perform()
    driver.execute_script("arguments[0].focus()", main)
    assert driver.switch_to.active_element == main
    main.send_keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert_reads(driver, split, 21, 16)
    spoken = find(driver, "[aria-live=polite]")[0].get_attribute("textContent")
    assert spoken.startswith(f"query 21 {display_text(TOKENS[21])}, key 16 ")
    best = split.at(21, 16).to_dataframe().iloc[0]
    assert f"most from pair {best['pair']:.0f} with " in spoken
    # Keys do not leave what the query sees: here the last nine keys.
    main.send_keys(*[Keys.ARROW_LEFT] * 30)
    assert_reads(driver, split, 21, 13)
    main.send_keys(*[Keys.ARROW_RIGHT] * 30)
    assert_reads(driver, split, 21, 21)
    main.send_keys(*[Keys.ARROW_UP] * 60)
    assert_reads(driver, split, 0, 0)


def test_the_map_is_the_right_way_round_in_pixels(driver, folder, qk):
    """Cells take the colour of their value, at row query and column key; unseen ones are grey."""
    split = decompose(qk, 2, 0)
    show(driver, folder, lr.show_head(qk, 2, 0, pairs=[3], size=50))
    press(driver, 1)
    image = map_pixels(driver, find(driver, ".lr-main .cv")[0])
    score, n = split.scores(), 50
    cell = np.array(image.shape[:2]) / n
    warm, cool = [], []
    for query in range(2, n - 1):  # the last is marked
        for key in range(n):
            at = ((np.array([query, key]) + 0.5) * cell).astype(int)
            red, _, blue = image[tuple(at)]
            if np.isnan(score[query, key]):
                assert np.abs(image[tuple(at)] - [0xE6, 0xE8, 0xEA]).sum() < 8, (query, key)
            elif abs(score[query, key]) > 3 and query < 48:
                (warm if score[query, key] > 0 else cool).append(red - blue)
    assert min(len(warm), len(cool)) > 20
    assert min(warm) > 0 > max(cool)


def test_tokens_are_coloured_by_what_is_chosen(driver, folder, qk):
    split = decompose(qk, 0, 2)
    show(driver, folder, lr.show_head(qk, 0, 2, pairs=[4], size=50))

    def values():
        settle(driver)
        return np.array(driver.execute_script("return window.seen.tokens.values"))

    attention = split.pattern()
    received = attention.sum(axis=0) / split.record.visible.numpy().sum(axis=0)
    np.testing.assert_allclose(values(), received, atol=1e-4)
    press(driver, 2)
    pair = split.contributions([4])[0]
    options = find(driver, "select")[1].find_elements("css selector", "option")
    assert [o.text for o in options] == [
        "attention received", "pair 4 of one query", "pair 4, mean over queries",
    ]  # fmt: skip
    options[2].click()
    np.testing.assert_allclose(values(), np.nanmean(pair, axis=0), atol=1e-4)
    options[1].click()
    np.testing.assert_allclose(values(), np.nan_to_num(pair[49]), atol=1e-4)
    find(driver, ".cv .colored-tokens > span > span")[30].click()
    np.testing.assert_allclose(values(), np.nan_to_num(pair[30]), atol=1e-4)
    assert "query 30 " in find(driver, ".lr-readout")[0].text
    low, high = driver.execute_script(
        "return [window.seen.tokens.minValue, window.seen.tokens.maxValue]"
    )
    assert low == -high


def test_hostile_tokens_are_shown_as_they_are(driver, folder, qk):
    path = show(driver, folder, lr.show_head(qk, 0, 0, size=50), spy=False)
    view = find(driver, ".cv.ColoredTokens")[0]
    # A word joiner, invisible, keeps markup from being read as such.
    shown = [
        e.get_attribute("textContent").replace("\u2060", "")
        for e in view.find_elements("css selector", "span > span")
    ]
    assert shown == [display_text(token) for token in TOKENS]
    assert view.find_elements("css selector", "b, script, img") == []
    labels = [e.get_attribute("textContent") for e in find(driver, ".lr-left span")]
    assert labels[0] == f"{display_text(TOKENS[0])} 0"
    move_to(driver, ".lr-main .cv", 1, 0, 50)
    assert "<b>" in find(driver, ".lr-tokens")[0].text
    assert errors(driver) == []
    assert requests(driver) == [path.as_uri()]


def test_a_slider_that_moves_while_a_map_is_drawn_is_followed(driver, folder, qk):
    """The small map and the large one both end at the pair where the slider stops."""
    expected = decompose(qk, 0, 3).contributions()
    show(driver, folder, lr.show_head(qk, 0, 3, pairs=[1], start=0, size=50))
    driver.execute_script(
        "window.ends = []; const input = [...document.querySelectorAll('label')]"
        ".find(e => e.textContent.includes('first pair')).querySelector('input');"
        "const move = pair => { input.value = pair; input.dispatchEvent(new Event('input')); };"
        "const still = [4, 6, 5]; move(0); move(2); window.whileDrawing = () => {"
        "if (still.length) move(still.shift()); else window.ends.push(window.seen.pattern); }"
    )
    settle(driver)
    np.testing.assert_allclose(drawn(driver), expected[5], atol=1e-5)
    ends = driver.execute_script("return window.ends.map(p => p.attention[49])")
    assert len(ends) >= 2
    np.testing.assert_allclose(ends[-2:], [expected[5, 49]] * 2, atol=1e-5)
    assert "pair 5: wavelength" in find(driver, "output")[0].text
    assert errors(driver) == []


def test_a_head_that_leaves_the_page_is_drawn_when_it_is_back(driver, folder, qk):
    """And one that cannot be drawn leaves the others alone."""
    expected = decompose(qk, 0, 3).contributions()
    show(driver, folder, lr.show_head(qk, 0, 3, pairs=[1], start=0, size=50))
    driver.execute_script(
        "const root = document.querySelector('.lens-rope-head'), place = root.parentNode;"
        "const input = [...document.querySelectorAll('label')]"
        ".find(e => e.textContent.includes('first pair')).querySelector('input');"
        "input.value = 6; input.dispatchEvent(new Event('input')); root.remove();"
        "window.back = () => place.append(root);"
    )
    wait_for(driver, "return window.__lensRopeHeads.isDrawing", False)
    driver.execute_script("window.back()")
    settle(driver)
    np.testing.assert_allclose(drawn(driver), expected[6], atol=1e-5)
    assert errors(driver) == []
    driver.execute_script(
        "const box = document.body.appendChild(document.createElement('div'));"
        "window.__lensRopeHeads.queue.push({ box: box, draw: () => { throw Error('no'); } });"
    )
    slide(driver, "first pair", 3)
    np.testing.assert_allclose(drawn(driver), expected[3], atol=1e-5)
    assert driver.execute_script("return window.__lensRopeHeads.queue.length") == 0
    errors(driver)


def test_scrubbing_leaves_nothing_behind(driver, folder, qk):
    """A map is redrawn in its own canvas, and nothing is rendered a second time."""
    show(driver, folder, lr.show_head(qk, 0, 0, size=30))
    before = find(driver, "canvas")
    mounts = len(find(driver, "[id^=lens-rope-cv]"))
    for pair in (3, 5, 1, 7, 2):
        slide(driver, "first pair", pair)
    find(driver, "select")[0].find_elements("css selector", "option")[1].click()
    settle(driver)
    assert find(driver, "canvas") == before
    assert len(find(driver, "[id^=lens-rope-cv]")) == mounts == len(find(driver, ".cv"))
    assert errors(driver) == []


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (380, False)])
def test_it_is_legible_and_accessible(driver, folder, qk, width, dark):
    show(driver, folder, lr.show_head(qk, 2, 3, size=50), width=width, dark=dark, spy=False)
    fore = luminance(driver.execute_script("return getComputedStyle(document.body).color"))
    assert (fore > 0.8) == dark
    image = map_pixels(driver, find(driver, ".lr-main .cv")[0])
    assert n_colors(image) > 50
    unseen = image[5:15, -15:-5].mean()
    assert (unseen < 70) == dark
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    for button in find(driver, ".lr-map"):
        assert n_colors(map_pixels(driver, button.find_element("css selector", ".cv"))) > 10
    # CircuitsVis' own drawing is hidden from assistive technology; the readout says it in words.
    assert axe(driver, without=(".cv",)) == []


def test_an_output_of_a_notebook_draws_twice_in_one_page(driver, folder, qk):
    text = lr.show_head(qk, 1, 1, pairs=[0, (1, 3)], size=20)._repr_html_()
    path = folder / "notebook.html"
    path.write_text(
        f"<!doctype html><meta charset=utf-8><link rel=icon href=data:,>{text}{text}",
        encoding="utf-8",
    )
    prepare(driver)
    driver.get(path.as_uri())
    wait_for(driver, "return document.querySelectorAll('[data-state=drawn]').length", 2)
    time.sleep(0.3)
    for box in find(driver, ".lr-main .cv"):
        assert n_colors(map_pixels(driver, box)) > 20
    assert [e.text for e in find(driver, ".lr-name")][:5] == [
        "attention", "score", "pair 0", "pairs 1, 3", "the rest",
    ]  # fmt: skip
    assert errors(driver) == []
    assert requests(driver) == [path.as_uri()]
