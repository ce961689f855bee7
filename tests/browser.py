"""Drives a headless Chromium for the tests that need one: load a page, wait for a fact, tell what the page says.

A test page is opened with `--dump-dom` after a virtual time budget, so there is no socket, no driver and no sleep. A
script may be put behind the page's own, to press keys and write down what it sees.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--allow-file-access-from-files")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


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
