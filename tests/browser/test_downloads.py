"""What a figure gives away: its picture stands alone, and its table holds the report's numbers."""

from __future__ import annotations

import base64
import csv
import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from browser.browsing import errors, find, luminance, open_page, requests
from lens_rope.views.tokens import display_text

pytestmark = pytest.mark.browser

# A download begins with a click on a link to a blob. Both are kept, and nothing is saved.
_CATCH = """
if (!window.caught) {
  window.caught = [];
  const make = URL.createObjectURL;
  URL.createObjectURL = blob => { caught.push({blob}); return make(blob); };
  HTMLAnchorElement.prototype.click = function () {
    caught[caught.length - 1].name = this.download;
  };
}
"""

_SAVE = """
const [button, done] = arguments;
caught.length = 0;
button.click();
const wait = () => {
  const last = caught[caught.length - 1];
  if (!last || !last.name) return setTimeout(wait, 30);
  const reader = new FileReader();
  reader.onload = () => done([last.name, last.blob.type, reader.result.split(",")[1]]);
  reader.readAsDataURL(last.blob);
};
wait();
"""


def save(page, plot, kind: str) -> tuple[str, str, bytes]:
    """File name, type and content of what the button of a figure saves."""
    page.execute_script(_CATCH)
    button = page.execute_script(
        "return arguments[0].closest('.drawn').querySelector(`[data-save=${arguments[1]}]`)",
        plot,
        kind,
    )
    name, mime, content = page.execute_async_script(_SAVE, button)
    return name, mime, base64.b64decode(content)


def table(page, plot) -> list[dict[str, str]]:
    content = save(page, plot, "csv")[2].decode("utf-8-sig")
    return list(csv.DictReader(io.StringIO(content, newline=""), strict=True))


def numbers(rows: list[dict[str, str]], column: str) -> np.ndarray:
    return np.array([float(row[column]) if row[column] else np.nan for row in rows])


@pytest.fixture
def saving(page):
    page.set_script_timeout(30)
    yield page
    assert errors(page) == []
    assert [url for url in requests(page) if not url.startswith("file:")] == []


def test_every_figure_has_its_buttons_and_its_table(saving):
    plots = find(saving, ".plot")
    assert len(plots) > 20
    names = set()
    for plot in plots:
        name, mime, content = save(saving, plot, "csv")
        assert mime.startswith("text/csv")
        assert re.fullmatch(r"tiny-[a-z0-9-]{10,}\.csv", name), name
        names.add(name)
        lines = list(csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True))
        assert len(lines) >= 2 or "strong-offset-features" in name, name
        assert {len(line) for line in lines} == {len(lines[0])}, name
        for field in {field for line in lines for field in line}:
            assert field not in ("NaN", "nan", "null", "undefined", "Infinity", "[object Object]")
        labels = saving.execute_script(
            "return [...arguments[0].closest('.drawn').querySelectorAll('button')]"
            ".map(b => [b.textContent, b.ariaLabel, b.tabIndex, b.closest('[role=img]') === null])",
            plot,
        )
        assert [label[0] for label in labels] == ["SVG", "PNG", "CSV"]
        for text, label, tab, outside in labels:
            assert label.startswith(f"{text}: ")
            assert (tab, outside) == (0, True)
    assert len(names) > 12


@pytest.mark.parametrize(("index", "side"), [(0, "query"), (1, "key")])
def test_the_table_of_usage_holds_magnitudes_and_leaves_missing_cells_empty(
    saving, data, index, side
):
    rows = table(saving, find(saving, "#usage .plot")[index])
    expected = np.full((4, 8), np.nan)
    for row, entry in zip(expected, data.usage, strict=True):
        values = getattr(entry, side)
        row[: len(values)] = values
    found = numbers(rows, f"{side}_magnitude_activation_units").reshape(4, 8)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.isnan(found).sum() == 4 + 8
    assert [int(row["layer"]) for row in rows[::8]] == [0, 1, 2, 3]
    assert [int(row["pair"]) for row in rows[:8]] == list(range(8))
    waves = numbers(rows, "wavelength_tokens").reshape(4, 8)
    np.testing.assert_allclose(waves[0], data.rope[0].wavelength, rtol=1e-6)
    assert np.isnan(waves[1, 4:]).all()


def test_the_table_of_the_first_figure_holds_ratios_not_logarithms(saving, data):
    rows = table(saving, find(saving, "#summary .plot")[0])
    both = np.sqrt(np.asarray(data.usage[0].query) * np.asarray(data.usage[0].key))
    found = numbers(rows, "query_and_key_magnitude_over_layer_median")[:8]
    np.testing.assert_allclose(found, both / np.median(both), rtol=1e-6)


def test_the_tables_of_heads_hold_shares(saving, data):
    rows = table(saving, find(saving, "#attention .plot")[0])
    np.testing.assert_allclose(
        numbers(rows, "sink_share"), np.concatenate([s.sink_share for s in data.shares]), rtol=1e-6
    )
    np.testing.assert_array_equal(
        numbers(rows, "strongest_key_position"),
        np.concatenate([s.sink_position for s in data.shares]),
    )
    rows = table(saving, find(saving, "#heads .plot")[0])
    found = np.stack([numbers(rows, name) for name in list(rows[0])[2:]], axis=1)
    expected = np.array([head.offset_shares for head in data.heads])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    assert [(int(r["layer"]), int(r["head"])) for r in rows] == [
        (head.layer, head.head) for head in data.heads
    ]


def test_the_tables_of_a_head_hold_its_split(saving, data):
    bars, curves = find(saving, "#gallery .plot")[:2]
    head = data.gallery[0]
    rows = table(saving, bars)
    np.testing.assert_allclose(
        numbers(rows, "share_of_score_variance"), head.by_pair.share, rtol=1e-5
    )
    rows = [row for row in table(saving, curves) if row["part"] == "total"]
    at = numbers(rows, "distance_tokens").astype(int)
    distance = list(head.by_distance.distance)
    expected = [head.by_distance.total[distance.index(d)] for d in at]
    np.testing.assert_allclose(numbers(rows, "mean_score_units"), expected, rtol=1e-5, atol=1e-6)


def test_patterns_and_sinks_are_in_their_tables(driver, planted):
    page = open_page(driver, planted)
    rows = table(page, find(page, "#heads .plot")[0])
    assert {"sink", "previous token", "induction"} <= {row["pattern"] for row in rows}
    removed = next(
        plot for plot in find(page, "#attention .plot") if "removed" in plot.accessible_name
    )
    rows = table(page, removed)
    assert rows
    assert (numbers(rows, "sink_share") > 0.3).all()


def test_fields_are_quoted_and_never_formulas(page):
    texts = ["=1+1", "+1", "-1", "@x", 'a,"b"', "two\nlines", "\tx", "plain", "</script>", "é 💩"]
    content = page.execute_script(
        """
        const numbers = [1.5, -2, null, NaN, Infinity, 1e-9, 0.1 + 0.2, 123456789, 0, -0.5];
        const table = {"=head, er": arguments[0], "n_units": numbers};
        return lensRopeCsv({layout: {meta: {title: "t", table}}});
        """,
        texts,
    )
    rows = list(csv.reader(io.StringIO(content, newline=""), strict=True))
    assert rows[0] == ["'=head, er", "n_units"]
    expected = [f"'{text}" if text[0] in "=+-@\t" else text for text in texts]
    assert [row[0] for row in rows[1:]] == expected
    shown = ["1.5", "-2", "", "", "", "1e-9", "0.3", "123456789", "0", "-0.5"]
    assert [row[1] for row in rows[1:]] == shown


@pytest.mark.parametrize("dark", [False, True])
def test_a_saved_svg_is_light_and_stands_alone(driver, path, dark):
    page = open_page(driver, path, dark=dark)
    page.set_script_timeout(30)
    name, mime, content = save(page, find(page, "#usage .plot")[0], "svg")
    assert name == "tiny-query-magnitude-by-layer-and-rotary-pair.svg"
    assert mime.startswith("image/svg+xml")
    root = ElementTree.fromstring(content)
    text = content.decode()
    title = "Query magnitude by layer and rotary pair · tiny"
    assert title in "".join(root.itertext())
    # It lies within the picture, above everything else.
    boxes = page.execute_script(
        """
        document.body.insertAdjacentHTML("beforeend", "<div id='saved'>" + arguments[0] + "</div>");
        const svg = document.querySelector("#saved svg"), frame = svg.getBoundingClientRect();
        const boxes = [...svg.querySelectorAll("text")].map(e => {
          const box = e.getBoundingClientRect();
          return [e.textContent, box.top - frame.top, box.bottom - frame.top,
                  box.left - frame.left, box.right - frame.right, box.width];
        });
        document.getElementById("saved").remove();
        return boxes.filter(box => box[5] > 0);
        """,
        text,
    )
    first, *rest = sorted(boxes, key=lambda box: box[1])
    assert first[0] == title
    assert 0 <= first[1] < first[2] <= min(box[1] for box in rest)
    assert all(box[3] >= 0 and box[4] <= 0 for box in boxes)
    # The first rectangle is the paper.
    paper = next(e for e in root.iter() if e.tag.endswith("rect"))
    fill = re.search(r"fill: (rgb\([^)]*\)).*?(?:fill-opacity: (\d))?", paper.attrib["style"])
    assert fill is not None
    assert luminance(fill[1]) == 1
    inks = set(re.findall(r"<text [^>]*?fill: (rgb\([^)]*\))", text))
    assert inks
    assert max(map(luminance, inks)) < 0.2
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    # The page itself is as it was.
    assert page.execute_script("return document.documentElement.dataset.figures") == (
        "dark" if dark else "light"
    )
    assert errors(page) == []


def test_a_saved_png_is_white_and_large(saving):
    name, mime, content = save(saving, find(saving, "#heads .plot")[0], "png")
    assert (name[-4:], mime) == (".png", "image/png")
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert width == 1920
    assert height > 400
    corner = saving.execute_async_script(
        """
        const [content, done] = arguments, image = new Image();
        image.onload = () => {
          const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
          context.drawImage(image, 0, 0);
          done(Array.from(context.getImageData(2, 2, 1, 1).data));
        };
        image.src = "data:image/png;base64," + content;
        """,
        base64.b64encode(content).decode(),
    )
    assert corner == [255, 255, 255, 255]


def test_a_hostile_name_makes_a_harmless_file(page):
    names = page.execute_script(
        "return arguments[0].map(n => lensRopeFileName({layout: {meta: {title: 'T'}}}, n))",
        ["../../etc/passwd", "a/b:c*?", "💩", "</script>", "x" * 300, display_text("a\n\tb")],
    )
    assert names[:4] == ["etc-passwd-t", "a-b-c-t", "t", "script-t"]
    assert len(names[4]) <= 120
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name) for name in names)
