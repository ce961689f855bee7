"""Rude clients leave a server as they found it, and a soak notices when they do not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from serve.bench_soak import ACTS, MAX_GROWTH, leftovers, render, scrape, soak
from serve.cli import main
from tests.server import ScriptedEngine, eventually, serving

P = "nanoserve:"
IDLE = {
    P + "num_requests_running": 0.0,
    P + "num_requests_waiting": 0.0,
    P + "kv_cache_usage_perc": 0.0,
    P + "kv_cache_tokens": 0.0,
    P + "kv_cache_free_blocks": 24.0,
    P + "kv_cache_blocks": 24.0,
    P + "request_submitted_total": 9.0,
    P + "request_success_total": 9.0,
    P + "gate_failures_total": 2.0,
    P + "engine_up": 1.0,
}


# ---- holds ------------------------------------------------------------------------------------------------------


def test_a_server_is_as_it_was_after_rude_clients(capsys: pytest.CaptureFixture[str]):
    code = main(["bench", "soak", "--seconds", "3", "--clients", "24", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["faults"]) == (0, [])
    assert set(report["acts"]) == set(ACTS)
    assert report["answers"] > 20
    assert report["preemptions"] > 0, "the pool was never too small: the soak shows nothing"
    assert {"200", "400", "404", "429"} >= set(report["statuses"]) >= {"200", "400"}
    assert render(report).endswith("ok")


def test_a_scrape_adds_up_the_labels_of_a_name():
    with serving(ScriptedEngine()) as served:
        for path in ("/health", "/nowhere", "/health"):
            served.http.get(path)
        metrics = asyncio.run(scrape(served.url))
    assert metrics["http_requests_total"] == 3
    assert metrics[P + "num_requests_running"] == 0


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({P + "num_requests_running": 106.0}, "num_requests_running is 106, nobody asks for anything"),
        ({P + "kv_cache_usage_perc": 0.9}, "kv_cache_usage_perc is 0.9"),
        ({P + "kv_cache_free_blocks": 23.0}, "23 of 24 blocks are free"),
        ({P + "request_success_total": 10.0}, "9 answers were submitted, 10 ended"),
        ({P + "gate_failures_total": 3.0}, "1 gate failures"),
        ({P + "engine_up": 0.0}, "the engine is down"),
    ],
)
def test_what_is_left_over_is_said(change: dict[str, float], said: str):
    assert leftovers(IDLE, IDLE, growth=0.0) == []
    (found,) = leftovers(IDLE, IDLE | change, growth=0.0)
    assert said in found


def test_memory_that_grows_is_said():
    (found,) = leftovers(IDLE, IDLE, growth=2.0 * MAX_GROWTH)
    assert "resident memory grew by 96 MiB, 48 are allowed" in found


def test_a_server_error_is_a_fault():
    engine = ScriptedEngine(step_s=0.002)
    with serving(engine) as served:
        eventually(lambda: served.health()["status"] == "ok")
        engine.fault = RuntimeError("out of order")
        report: dict[str, Any] = asyncio.run(soak(served.url, seconds=0.3, seed=1, clients=4))
    assert any("status 50" in fault for fault in report["faults"])
    assert "the engine is down" in report["faults"]
    assert "FAULT: " in render(report)
