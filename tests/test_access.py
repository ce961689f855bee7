"""Every HTTP request has an id, and one record when it is over, however it ended."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from serve.access import Finished, log_request
from tests.server import MODEL, ScriptedEngine, eventually, says, serving

# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["abc-1", "00-4bf92f3577b34da6-01", "x" * 128])
def test_the_clients_id_comes_back(given: str):
    with serving(ScriptedEngine(says("a"))) as served:
        reply = served.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "x"}, headers={"X-Request-Id": given}
        )
        assert reply.headers.get_list("x-request-id") == [given]


def test_refusals_and_unknown_paths_have_an_id_too():
    with serving(ScriptedEngine()) as served:
        ids = [
            served.http.get("/health").headers["x-request-id"],
            served.http.get("/nowhere").headers["x-request-id"],
            served.http.post("/v1/completions", content=b"{").headers["x-request-id"],
        ]
    assert len(set(ids)) == 3


def test_one_record_tells_of_the_request_and_its_answers(caplog: pytest.LogCaptureFixture):
    seen: list[Finished] = []
    caplog.set_level(logging.INFO, logger="nanoserve.request")
    with serving(ScriptedEngine(says("hello")), sinks=[seen.append, log_request]) as served:
        headers = {"x-request-id": "mine"}
        body = {"model": MODEL, "prompt": "secret", "n": 2, "max_tokens": 3, "stream": True}
        events = served.http.post("/v1/completions", json=body, headers=headers).text
        eventually(lambda: len(seen) == 1)
    assert "data: [DONE]" in events
    line: dict[str, Any] = json.loads(caplog.records[-1].message)
    assert (line["request_id"], line["status"], line["path"]) == ("mine", 200, "/v1/completions")
    assert (line["prompt_tokens"], line["completion_tokens"], line["answers"]) == (7, 6, 2)  # a BOS and six letters
    assert line["finish_reasons"] == ["length"]
    assert line["id"].startswith("cmpl-")
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["duration_ms"]
    assert "secret" not in caplog.text
    assert "hel" not in caplog.text


def test_a_client_that_leaves_is_recorded_once():
    seen: list[Finished] = []
    with serving(ScriptedEngine(step_s=0.002), sinks=[seen.append]) as served:
        body = {"model": MODEL, "prompt": "x", "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body) as reply:
            next(reply.iter_lines())
        eventually(lambda: len(seen) == 1)
        eventually(served.is_idle)
    assert [answer.finish_reason for answer in seen[0].answers] == ["abort"]
    assert [finished.path for finished in seen].count("/v1/completions") == 1


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "ä"])
def test_an_id_that_could_forge_a_line_is_replaced(given: str):
    with serving(ScriptedEngine()) as served:
        reply = served.http.get("/health", headers={"x-request-id": given.encode("utf-8")})
        assert reply.headers["x-request-id"] != given
        assert len(reply.headers["x-request-id"]) == 32


def test_a_sink_that_fails_fails_no_request():
    def broken(finished: Finished) -> None:
        raise OSError("disk full")

    with serving(ScriptedEngine(says("a")), sinks=[broken]) as served:
        assert served.post(prompt="x").status_code == 200
        assert served.post(prompt="x").status_code == 200


def test_a_made_up_method_is_no_label_of_its_own():
    with serving(ScriptedEngine()) as served:
        assert served.http.request("PURGE", "/health").status_code == 405
        assert served.http.request("BREW", "/health").status_code == 400  # no method at all
        text = served.http.get("/metrics").text
    assert 'method="other"' in text
    assert "BREW" not in text
    assert "PURGE" not in text
