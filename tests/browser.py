"""Pages in headless Chromium; tests that want one skip where it or selenium is missing."""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install selenium)")
from selenium.webdriver.common.action_chains import ActionChains

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no Chromium here (apt-get install chromium chromium-driver)"
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1000",
]


class Page:
    """A loaded page."""

    def __init__(self, driver) -> None:
        self.driver = driver

    def load(self, path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        self.driver.get(path.as_uri())

    def __call__(self, script: str):
        return self.driver.execute_script(script)

    def find(self, selector: str):
        return self.driver.find_element("css selector", selector)

    def keys(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()
        self.settle()

    def click(self, selector: str) -> None:
        ActionChains(self.driver).move_to_element(self.find(selector)).click().perform()
        self.settle()

    def settle(self) -> None:
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    def shown(self, selector: str) -> str:
        return self.find(selector).text

    def in_the_dark(self, script: str):
        """Run a script while the system prefers dark colours."""
        dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
        try:
            return self(script)
        finally:
            self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})

    @contextmanager
    def width(self, pixels: int):
        metrics = {"width": pixels, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@contextmanager
def chromium(profile):
    """Give a `Page`; at the end its console must be empty."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield Page(driver)
        log = driver.get_log("browser")
        assert not log, log
    finally:
        driver.quit()
