"""What tests in a browser share: opening a page, looking at its pixels, its errors and requests."""

from __future__ import annotations

import base64
import json
import time
from importlib.resources import files

import numpy as np


def prepare(driver, *, width=1400, dark=False):
    """Empties the logs and sets the window, before a page is opened."""
    driver.get_log("browser")
    driver.get_log("performance")
    driver.shows = None
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    emulate(driver, dark=dark)


def open_page(driver, path, *, width=1400, dark=False):
    """Opens a report and waits until all of its figures and views are drawn."""
    prepare(driver, width=width, dark=dark)
    driver.get(path.as_uri())
    wait_for(driver, "return document.documentElement.dataset.figures", "dark" if dark else "light")
    # CircuitsVis draws when React gets to it.
    wait_for(
        driver,
        "return [...document.querySelectorAll('.lens-rope-head')].every(e => "
        "e.dataset.state === 'drawn')",
        True,
    )
    time.sleep(0.5)
    driver.shows = (path, width, dark)
    return driver


def emulate(driver, *, dark):
    features = {
        "prefers-color-scheme": "dark" if dark else "light",
        "prefers-reduced-motion": "reduce",  # no scrolling that takes its time
    }
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": name, "value": value} for name, value in features.items()]},
    )


def wait_for(driver, script, expected, seconds=60):
    end = time.monotonic() + seconds
    while driver.execute_script(script) != expected:
        assert time.monotonic() < end, f"{script} is still {driver.execute_script(script)!r}"
        time.sleep(0.1)


# The browser can decode its own screenshot, so the tests need no library for images.
_DECODE = """
const [source, done] = [arguments[0], arguments[1]], image = new Image();
image.onload = () => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.width, image.height];
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const bytes = context.getImageData(0, 0, image.width, image.height).data;
  let text = "";
  for (let i = 0; i < bytes.length; i += 8192)
    text += String.fromCharCode.apply(null, bytes.subarray(i, i + 8192));
  done([image.width, image.height, btoa(text)]);
};
image.src = "data:image/png;base64," + source;
"""


def pixels(driver, element) -> np.ndarray:
    """`[row, column, rgb]` The element as it is on the screen."""
    box = driver.execute_script(
        "const b = arguments[0].getBoundingClientRect();"
        "return [b.left + scrollX, b.top + scrollY, b.width, b.height]",
        element,
    )
    shot = driver.execute_cdp_cmd(
        "Page.captureScreenshot",
        {
            "format": "png",
            "captureBeyondViewport": True,
            "clip": {**dict(zip(("x", "y", "width", "height"), box, strict=True)), "scale": 1},
        },
    )
    width, height, content = driver.execute_async_script(_DECODE, shot["data"])
    image = np.frombuffer(base64.b64decode(content), np.uint8).reshape(height, width, 4)
    return image[..., :3].astype(int)


def map_pixels(driver, element) -> np.ndarray:
    """`pixels` of a map of CircuitsVis.

    A screenshot beyond the viewport resizes the page for a moment, and a chart that answers to that
    is caught empty now and then; so it is taken again.
    """
    for _ in range(10):
        image = pixels(driver, element)
        if n_colors(image) > 12:
            break
        time.sleep(0.2)
    return image


def n_colors(image: np.ndarray) -> int:
    return len(np.unique(image.reshape(-1, 3), axis=0))


def find(driver, selector):
    return driver.find_elements("css selector", selector)


def errors(driver) -> list[str]:
    return [e["message"] for e in driver.get_log("browser") if e["level"] in ("SEVERE", "WARNING")]


def requests(driver) -> list[str]:
    found = []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            found.append(message["params"]["request"]["url"])
    return [url for url in found if not url.startswith(("data:", "blob:", "chrome:"))]


def luminance(color: str) -> float:
    """Relative luminance of a colour as CSS writes it, `rgb(…)`."""
    channels = [float(x) / 255 for x in color[color.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def axe(driver, *, without: tuple[str, ...] = ()) -> list[str]:
    """What axe-core finds wrong with the page that is open, one line for each element.

    Args:
        without: Selectors of elements that are not judged.
    """
    folder = files("axe_core_python")
    driver.execute_script(folder.joinpath("axe.min.js").read_text(encoding="utf-8"))
    found = driver.execute_async_script(
        """
        const [exclude, done] = arguments;
        axe.run({exclude: exclude.map(selector => [selector])},
                {runOnly: ["wcag2a", "wcag2aa", "best-practice"], resultTypes: ["violations"]})
           .then(result => done(result.violations), error => done(String(error)));
        """,
        list(without),
    )
    assert isinstance(found, list), found
    return [
        f"{rule['id']}: {node['html'][:160]} {node['failureSummary'][:300]}"
        for rule in found
        for node in rule["nodes"]
    ]
