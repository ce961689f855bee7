"""The built site, in a browser: light to load, asking nobody else, searched, and legible on a phone, day and night."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import chrome
from tests.pages.drawing import HUES
from tests.pages.regions import ROOT
from tests.pages.slim import used_rules, used_variables
from tests.server import eventually

FIRST_PAGE_BYTES = 250_000
ICON = "assets/images/favicon.png"
PHONE = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
SCHEMES = ("default", "slate")
LEGIBLE = (ROOT / "tests" / "pages" / "legible.js").read_text("utf-8")

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs-material: pip install -e '.[docs]' (make docs)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-d", str(out)]
    assert os.spawnve(os.P_WAIT, sys.executable, command, os.environ | {"NO_MKDOCS_2_WARNING": "1"}) == 0
    return out


class Shelf:
    """Serves a folder, and writes down the size of each file that was asked for."""

    def __init__(self, folder: Path) -> None:
        shelf = self
        self.sent: dict[str, int] = {}

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def send_head(self) -> Any:
                path = Path(self.translate_path(self.path))
                path = path / "index.html" if path.is_dir() else path
                shelf.sent[path.relative_to(folder).as_posix()] = path.stat().st_size if path.is_file() else 0
                return super().send_head()

        handler = functools.partial(Handler, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def shelf(site: Path) -> Iterator[Shelf]:
    shelf = Shelf(site)
    yield shelf
    shelf.server.shutdown()
    shelf.server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from chrome()


def asked(browser: Any) -> list[str]:
    """Every URL that pages have asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith("data:")]


def on_a_phone(browser: Any) -> None:
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    still = {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", still)


# ---- holds ------------------------------------------------------------------------------------------------------


@needs_mkdocs
@pytest.mark.browser
def test_the_first_page_is_light_and_asks_nobody_else_and_a_search_finds(browser: Any, shelf: Shelf, site: Path):
    asked(browser)
    browser.get(f"{shelf.url}/")
    eventually(lambda: browser.execute_script("return document.readyState") == "complete")
    first = {ICON: (site / ICON).stat().st_size} | shelf.sent  # which is asked for when the browser likes
    assert "search/search_index.json" not in first, "the index is fetched before anybody searches"
    assert sum(first.values()) < FIRST_PAGE_BYTES, f"{sum(first.values()):,} bytes: {first}"
    browser.find_element("css selector", "[data-md-component=search-query]").send_keys("compaction")
    found = "return [...document.querySelectorAll('.md-search-result__item > a h1')].map((e) => e.innerText)"
    eventually(lambda: "Day 17: compaction" in browser.execute_script(found))
    assert "search/search_index.json" in shelf.sent
    browser.find_element("css selector", ".md-search-result__item > a").click()
    eventually(lambda: "compact" in browser.current_url and "compaction" in browser.title.lower())
    urls = asked(browser)
    assert len(urls) >= len(first)
    assert all(url.startswith(f"{shelf.url}/") for url in urls), urls
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@needs_mkdocs
@pytest.mark.browser
def test_every_page_is_legible_on_a_phone_by_day_and_by_night(browser: Any, shelf: Shelf, site: Path):
    on_a_phone(browser)
    pages = [path.parent.relative_to(site).as_posix() for path in sorted(site.rglob("index.html"))]
    wrong = []
    for page in [p for p in pages if not p.startswith("source/") or p.endswith("/slots")]:
        browser.get(f"{shelf.url}/{page}/")
        for scheme in SCHEMES:
            browser.execute_script("document.body.dataset.mdColorScheme = arguments[0]", scheme)
            wrong += [f"{page}, {scheme}: {said}" for said in browser.execute_script(LEGIBLE)]
        width = browser.execute_script("return document.documentElement.scrollWidth")
        wrong += [f"{page} scrolls sideways: {width} px wide"] * (width > PHONE["width"])
    assert not wrong, "\n".join(wrong)


@needs_mkdocs
@pytest.mark.browser
def test_the_keyboard_walks_into_the_player_moves_it_and_leaves(browser: Any, shelf: Shelf):
    from selenium.webdriver import ActionChains, Keys

    browser.get(f"{shelf.url}/tour/")
    eventually(lambda: browser.execute_script("return !!document.querySelector('.stepper button')"))
    browser.execute_script("document.querySelector('.stepper').focus()")
    ActionChains(browser).send_keys(Keys.ARROW_RIGHT).perform()
    assert browser.execute_script("return document.querySelector('.stepper').dataset.at") == "1"
    inside = "return !!document.activeElement.closest('.stepper')"
    steps = 0
    while browser.execute_script(inside):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        steps += 1
        assert steps < 20, "the player keeps the keyboard"
    assert steps > 5, "its buttons and links can be reached"


@needs_mkdocs
def test_the_site_asks_for_sheets_that_are_there_and_for_no_map(site: Path):
    sheets = {path.name for path in (site / "assets" / "stylesheets").iterdir()}
    named = set(re.findall(r'href="[^"]*stylesheets/([^"]+)"', (site / "index.html").read_text("utf-8")))
    assert sheets == named


def test_a_rule_stays_when_it_can_apply_and_a_variable_when_it_is_read():
    css = ".a,.b:not(.c){x:1}.c{x:2}@media print{.c{x:3}.a{x:4}}@media screen{.c{x:5}}@keyframes k{0%{x:6}}"
    assert used_rules(css, {"a", "b"}) == ".a,.b:not(.c){x:1}@media print{.a{x:4}}@keyframes k{0%{x:6}}"
    css = ".a[dir=rtl]{x:1}.a[dir=ltr]{x:2}.a:is(.b,.c){x:3}.a\\:b{x:4}"
    assert used_rules(css, {"a", "dir=ltr"}) == ".a[dir=ltr]{x:2}.a:is(.b,.c){x:3}"
    css = ":root{--a:url('data:;}{');--b:var(--c);x:1}.z{--d:2}"
    assert used_variables(css, {"--a"}) == ":root{--a:url('data:;}{');x:1}"


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.browser
def test_faint_text_and_small_drawings_are_found(browser: Any, tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text(
        "<!doctype html><body style='background:#fff'><p style='color:#888'>grey</p><p style='color:#000'>black</p>"
        "<p style='color:#000;opacity:.4'>faded</p><details><summary>more</summary><i style='color:#fff'>hidden</i>"
        "</details><div class='md-content'><svg viewBox='0 0 200 20' width='100'><rect width='99' height='20'/>"
        "<text x='9' y='15' fill='#222' font-size='30'>dark</text><text x='190' y='9' font-size='30'>far out</text>"
        "</svg></div>"
    )
    browser.get(page.as_uri())
    said = "\n".join(browser.execute_script(LEGIBLE))
    for word in ("grey", "faded", "hidden", "drawing: 'dark' has", "'far out' runs out of its frame"):
        assert word in said
    assert "black" not in said
    browser.execute_script("document.querySelector('text').setAttribute('font-size', '12')")
    assert "'dark' is 6.0 px high" in "\n".join(browser.execute_script(LEGIBLE))


@pytest.mark.parametrize("hue", HUES)
def test_white_stands_out_on_the_colour_of_every_owner(hue: str):
    def light(value: int) -> float:
        share = value / 255
        return share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4

    red, green, blue = (light(int(hue[i : i + 2], 16)) for i in (1, 3, 5))
    assert 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) >= 4.5
