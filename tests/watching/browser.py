"""Chromium without a window, driven by selenium; tests are skipped where there is none (`make browser` installs it)."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="there is no chromium with chromedriver: `make browser` installs them"
)
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars")


class Browser:
    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def text(self, selector: str) -> str:
        return str(self.js("const e = document.querySelector(arguments[0]); return e ? e.innerText : ''", selector))

    def js(self, code: str, *given: object) -> Any:
        return self.driver.execute_script(code, *given)

    def until(self, holds: Callable[[], object], patience_s: float = 60.0) -> float:
        """Waits until this holds; returns how long that took."""
        began_s = time.monotonic()
        while not holds():
            assert time.monotonic() - began_s < patience_s, self.text("body")[:3000]
            time.sleep(0.05)
        return time.monotonic() - began_s

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def complaints(self) -> list[str]:
        """Returns what the browser's console has been told, of errors and refused content."""
        return [str(each["message"]) for each in self.driver.get_log("browser")]


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    options = Options()
    options.binary_location = str(CHROMIUM)
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
