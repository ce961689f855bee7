"""The page at `/`, in a real browser: a prompt is typed, tokens appear, rows fill and move, nothing leaves the host.

Screenshots are kept in `build/playground/`. Without Chromium and its driver the browser tests are skipped.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reference.request import Event
from reference.weights import random_weights
from serve.playground import FOLDER, PARTS, playground
from tests.browser import chrome
from tests.harness import tiny_config
from tests.server import BOS, EOS, VOCAB, ScriptedEngine, Served, eventually, says, serving

SHOTS = Path(__file__).resolve().parent.parent / "build" / "playground"


class Slow:
    """The fast engine at a pace that an eye, and a browser under load, can follow."""

    def __init__(self) -> None:
        from fast.engine import Engine

        config = tiny_config(vocab_size=VOCAB, bos_token_id=BOS, eos_token_ids=(EOS,))
        sizes = {"max_batch_size": 8, "num_blocks": 160, "max_model_len": 256}
        graphs = {"bucket_decode": True, "persist_inputs": True, "capture_decode": True, "compact_rows": True}
        self._engine = Engine.build(config, random_weights(config, seed=3), **graphs, **sizes)
        self._engine.warm_decode()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def watch_steps(self, on_step: Any) -> None:
        self._engine.watch_steps(on_step)

    def step(self) -> list[Event]:
        time.sleep(0.008)
        return self._engine.step()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium that logs what it requests."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    yield from chrome()


def show(browser: Any, served: Served, *, width: int, height: int, dark: bool = False) -> None:
    """Open the page at a size and colour scheme, and wait until it knows the model."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.get(f"{served.url}/")
    eventually(lambda: "up to" in text(browser, "model"))


def text(browser: Any, id: str) -> str:
    return browser.execute_script(f"return document.getElementById('{id}').textContent")


def data(browser: Any, id: str, name: str) -> str:
    return browser.execute_script(f"return document.getElementById('{id}').dataset.{name} || ''")


def type_keys(browser: Any, *keys: str) -> None:
    """Into whatever has the focus, as a user without a mouse does."""
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def with_shift(browser: Any, key: str) -> None:
    """One key while Shift is held."""
    from selenium.webdriver import ActionChains, Keys

    ActionChains(browser).key_down(Keys.SHIFT).send_keys(key).key_up(Keys.SHIFT).perform()


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.browser
def test_a_prompt_is_typed_tokens_appear_and_rows_move(browser: Any):
    from selenium.webdriver.common.keys import Keys

    browser.get_log("performance")
    with serving(Slow()) as served:
        show(browser, served, width=1280, height=800)
        browser.find_element("css selector", "#load button").click()
        eventually(lambda: len(data(browser, "rows", "used").split(",")) >= 4)
        browser.find_element("id", "prompt").click()
        type_keys(browser, "Who are you?", Keys.ENTER)
        eventually(lambda: browser.execute_script("return !!document.querySelector('.growing .text').textContent"))
        eventually(lambda: browser.execute_script("return !!document.querySelector('.tenant.yours')"))
        eventually(lambda: int(data(browser, "rows", "moved") or 0) > 0)
        browser.save_screenshot(str(SHOTS / "wide-light.png"))
        type_keys(browser, Keys.ESCAPE)
        eventually(lambda: "stopped by you" in text(browser, "log"))
        eventually(lambda: data(browser, "rows", "used") == "" and data(browser, "blocks", "used") == "0")
        eventually(lambda: served.health()["engine"]["running"] == 0)
        assert served.health()["engine"]["moves"] > 0
        only_this_server(browser, served)


@pytest.mark.browser
def test_a_narrow_dark_page_is_used_with_the_keyboard_alone(browser: Any):
    from selenium.webdriver.common.keys import Keys

    with serving(ScriptedEngine(says("I am **not** <b>markup</b>."), step_s=0.001)) as served:
        show(browser, served, width=390, height=780, dark=True)
        assert browser.execute_script("return document.activeElement.id") == "prompt"
        type_keys(browser, "two")
        with_shift(browser, Keys.ENTER)
        type_keys(browser, "lines", Keys.ENTER)
        eventually(lambda: "tokens" in text(browser, "log"))
        said = browser.execute_script("return [...document.querySelectorAll('.text')].map((e) => e.textContent)")
        assert said == ["two\nlines", "I am **not** <b>markup</b>."]
        assert len(browser.find_elements("css selector", ".text b")) == 0
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390
        browser.save_screenshot(str(SHOTS / "narrow-dark-chat.png"))
        assert not browser.find_element("id", "engine").is_displayed()
        for _ in range(8):  # back from the prompt, over the conversation and the theme, to the views
            with_shift(browser, Keys.TAB)
            if browser.switch_to.active_element.text == "Engine":
                break
        type_keys(browser, Keys.ENTER)
        assert browser.find_element("id", "engine").is_displayed()
        eventually(lambda: "keeps no record" in text(browser, "state"))
        browser.save_screenshot(str(SHOTS / "narrow-dark-engine.png"))
        colours = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
        ground, ink = (sum(map(int, re.findall(r"\d+", one)[:3])) for one in browser.execute_script(colours))
        assert ground < 150 < 500 < ink


@pytest.mark.browser
def test_a_key_entered_on_the_page_opens_the_server(browser: Any):
    from selenium.webdriver.common.keys import Keys

    with serving(ScriptedEngine(says("hello")), api_keys=("sesame",)) as served:
        browser.get(f"{served.url}/")
        eventually(lambda: "asks for an API key" in text(browser, "model"))
        assert browser.execute_script("return document.activeElement.id") == "key"
        type_keys(browser, "sesame", Keys.TAB)
        eventually(lambda: "up to" in text(browser, "model"))
        browser.find_element("id", "prompt").send_keys("hi", Keys.ENTER)
        eventually(lambda: "hello" in text(browser, "log"))
        browser.execute_script("sessionStorage.clear()")


def only_this_server(browser: Any, served: Served) -> None:
    """Every request of the page went to the server that gave it, and nothing was blocked or failed on the way."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    paths = {url.removeprefix(served.url) for url in urls if not url.startswith("data:")}
    assert {"/", "/v1/models", "/steps", "/v1/completions", "/v1/chat/completions"} <= paths
    assert all(path.startswith("/") for path in paths), paths
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not severe


def test_the_page_is_one_document_that_may_load_nothing():
    with serving(ScriptedEngine()) as served:
        reply = served.http.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for part in PARTS:
        assert (FOLDER / part).read_text("utf-8") in reply.text
    outside = re.findall(r"""(?:https?:)?//[\w.-]+\.\w{2,}|@import|url\(""", reply.text)
    assert not outside
    assert len(reply.content) < 60_000


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_a_browser_without_a_key_gets_the_page_and_nothing_else():
    with serving(ScriptedEngine(), api_keys=("k",)) as served:
        page, steps = served.http.get("/"), served.http.get("/steps")
    assert (page.status_code, page.headers["www-authenticate"], page.content) == (401, "Bearer", playground().body)
    assert (steps.status_code, steps.json()["error"]["code"]) == (401, "invalid_api_key")
