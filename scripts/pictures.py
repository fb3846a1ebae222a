"""Takes the pictures of a report for the README and the docs; `scripts/screenshot` runs it.

Usage: pictures.py REPORT_HTML FOLDER
"""

from __future__ import annotations

import base64
import shutil
import sys
import tempfile
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

WIDTH, HEIGHT = 1400, 900
# The gallery begins with two sink heads; of the demo model, the next is layer 16 head 0, which
# looks at the previous token.
PREVIOUS = "#gallery article:nth-of-type(3)"
DRAWN = """
return document.documentElement.dataset.figures === "light" &&
  [...document.querySelectorAll(".plot")].every(e => !e.offsetParent || e.querySelector("svg"));
"""


def main(report: Path, folder: Path) -> None:
    """Opens the page and writes one PNG per picture."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        driver = _browser(profile)
        try:
            _open(driver, report)
            _shoot(driver, folder / "report.png", (0, 0, WIDTH, HEIGHT))
            _shoot(driver, folder / "sinks.png", _beginning(driver, "#attention", 1570))
            _shoot(driver, folder / "head.png", _beginning(driver, PREVIOUS, 950))
        finally:
            driver.quit()


def _browser(profile: str) -> webdriver.Chrome:
    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        sys.exit(
            "pictures: chromium and chromedriver are needed; install them (on Debian the packages "
            "chromium and chromium-driver)"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--hide-scrollbars", f"--user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False},
    )
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {
            "features": [
                {"name": "prefers-color-scheme", "value": "light"},
                {"name": "prefers-reduced-motion", "value": "reduce"},
            ]
        },
    )
    return driver


def _open(driver: webdriver.Chrome, page: Path) -> None:
    driver.get(page.resolve().as_uri())
    end = time.monotonic() + 120
    while not driver.execute_script(DRAWN):
        if time.monotonic() > end:
            sys.exit(f"pictures: the figures of {page} are not drawn after two minutes")
        time.sleep(0.2)
    # Some views are drawn when they come into sight.
    for element in driver.find_elements("css selector", "#gallery article, figure"):
        driver.execute_script("arguments[0].scrollIntoView()", element)
        time.sleep(0.1)
    driver.execute_script("scrollTo(0, 0)")
    time.sleep(1)


Box = tuple[int, int, int, int]
"""Left, top, width and height on the page, in CSS pixels."""


def _beginning(driver: webdriver.Chrome, selector: str, height: int) -> Box:
    """The beginning of an element, with some air around it."""
    left, top, width = driver.execute_script(
        "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
        "return [b.left + scrollX, b.top + scrollY, b.width]",
        selector,
    )
    return max(round(left) - 24, 0), round(top), round(width) + 48, height


def _shoot(driver: webdriver.Chrome, path: Path, box: Box) -> None:
    shot = driver.execute_cdp_cmd(
        "Page.captureScreenshot",
        {
            "format": "png",
            "captureBeyondViewport": True,
            "clip": {**dict(zip(("x", "y", "width", "height"), box, strict=True)), "scale": 1},
        },
    )
    path.write_bytes(base64.b64decode(shot["data"]))
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
