"""The browser of the tests here, without a network."""

from __future__ import annotations

import os
import shutil

import pytest
from planted import named_heads, planted_capture
from report_fixtures import HOSTILE, random_capture, report_data, rope

from browser.browsing import open_page
from lens_rope.reporting import Report

REQUIRED = os.environ.get("LENS_ROPE_REQUIRE_BROWSER") == "1" or os.environ.get("CI") == "true"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = shutil.which("chromedriver")

# Layers of every kind: whole, partial, without RoPE, with a window.
ROPES = (rope(0), rope(1, rotary_dim=8), rope(2, rotary_dim=0), rope(3, window=16))
TOKENS = (*HOSTILE, *(f" word{i}" for i in range(14)))


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    if CHROMIUM is None or DRIVER is None:
        if REQUIRED:
            pytest.fail("chromium and chromedriver are needed here and were not found")
        pytest.skip("chromium and chromedriver are not installed")
    webdriver = pytest.importorskip("selenium.webdriver") if not REQUIRED else _webdriver()
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--hide-scrollbars", f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0},
    )
    yield driver
    driver.quit()


def _webdriver():
    from selenium import webdriver

    return webdriver


@pytest.fixture(scope="session")
def data():
    return report_data(random_capture(ROPES, tokens=TOKENS), heads=((0, 1), (1, 2), (2, 0)))


@pytest.fixture(scope="session")
def path(data, tmp_path_factory):
    return Report(data).save(tmp_path_factory.mktemp("out") / "tiny") / "report.html"


@pytest.fixture
def page(driver, path):
    """The page, wide and light; opened again only where the last test left another one."""
    if getattr(driver, "shows", None) != (path, 1400, False):
        open_page(driver, path)
    return driver


@pytest.fixture(scope="session")
def planted(tmp_path_factory):
    """A page with a head of each pattern, a sink among them."""
    qk = planted_capture(list(named_heads(96).values()))
    folder = Report(report_data(qk, heads=((0, 0),))).save(tmp_path_factory.mktemp("out") / "named")
    return folder / "report.html"
