"""Drives a headless Chromium for the tests that need one: load a page, wait for a fact, tell what the page says.

A single file is opened with `--dump-dom` after a virtual time budget, so there is no socket, no driver and no sleep. A
script may be put behind the page's own, to press keys and write down what it sees. Pages that are served are driven.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")
NEEDS_DRIVER = (
    "runs where Chromium and its driver are (Debian: apt-get install chromium chromium-driver; pip install selenium)"
)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--allow-file-access-from-files")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


def chrome() -> Iterator[Any]:
    """For a fixture to `yield from`: a headless Chromium that is driven, and that logs what it requests."""
    webdriver = pytest.importorskip("selenium.webdriver", reason=NEEDS_DRIVER)
    if CHROMIUM is None or DRIVER is None:
        pytest.skip(NEEDS_DRIVER)
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (*FLAGS[:4], "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def dom(page: Path, *, size: tuple[int, int] = (1200, 900), budget_ms: int = 3000) -> str:
    """The page's document after its scripts ran for `budget_ms` of virtual time.

    Raises:
        RuntimeError: the browser failed; its complaint is in the message.
    """
    return _run(page, size, [f"--virtual-time-budget={budget_ms}", "--dump-dom"])


def screenshot(page: Path, out: Path, *, size: tuple[int, int] = (1200, 900), dark: bool = False) -> Path:
    """A picture of the page's first screen."""
    scheme = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    _run(page, size, [*scheme, "--virtual-time-budget=3000", "--hide-scrollbars", f"--screenshot={out}"])
    return out


def _run(page: Path, size: tuple[int, int], options: list[str]) -> str:
    assert CHROMIUM is not None
    profile = page.parent / ".chromium"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", *options]
    done = subprocess.run([*command, page.absolute().as_uri()], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{CHROMIUM} ended with {done.returncode}: {done.stderr[-400:]}")
    return done.stdout
