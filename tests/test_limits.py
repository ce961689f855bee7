"""What one client may cost the others: keys, origins, a full queue, slow bodies, long requests, silent streams."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest

from reference.tokenizer import ByteTokenizer
from serve.cli import build_parser, main
from serve.limits import KEY_VARIABLE, ServerLimits, limits_from
from serve.options import UsageError
from tests.server import DEADLINE_S, MODEL, ScriptedEngine, eventually, says, serving

CHAT = "/v1/chat/completions"
ASKS = [
    ("GET", "/v1/models"), ("GET", f"/v1/models/{MODEL}"), ("POST", "/v1/completions"), ("POST", CHAT),
    ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/version"), ("GET", "/metrics"),
    ("GET", "/openapi.json"), ("GET", "/nope"),
]  # fmt: skip


# ---- holds ------------------------------------------------------------------------------------------------------


def test_every_route_but_live_and_ready_asks_for_a_key():
    with serving(ScriptedEngine(), api_keys=("first", "second")) as running:
        for method, path in ASKS:
            for header in ({}, {"authorization": "Bearer firs"}, {"authorization": "first"}, {"x-api-key": "first"}):
                reply = running.http.request(method, path, headers=header, json={})
                assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key"), path
                assert reply.headers["www-authenticate"] == "Bearer"
        assert running.http.get("/health").json() == {"status": "ok"}
        assert running.http.get("/ready").status_code == 200
        for key in ("first", "second"):
            header = {"authorization": f"Bearer {key}"}
            body = {"model": MODEL, "prompt": "x"}
            assert running.http.post("/v1/completions", json=body, headers=header).status_code == 200
            assert running.http.get("/v1/models", headers={"authorization": f"bearer {key}"}).status_code == 200


def test_pages_of_other_origins_are_let_in_only_when_named():
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    preflight["access-control-request-headers"] = "authorization,content-type"
    with serving(ScriptedEngine()) as running:
        reply = running.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=preflight)
        assert "access-control-allow-origin" not in reply.headers
        assert running.http.request("OPTIONS", "/v1/completions", headers=preflight).status_code == 405
    with serving(ScriptedEngine(), allow_origins=("https://a.example",), api_keys=("key",)) as running:
        # The preflight has no key and is answered; the request itself needs one, and the page may read that.
        reply = running.http.request("OPTIONS", "/v1/completions", headers=preflight)
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "https://a.example")
        reply = running.http.post("/v1/completions", json={}, headers={"origin": "https://a.example"})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (401, "https://a.example")
        stranger = running.http.request(
            "OPTIONS", "/v1/completions", headers=preflight | {"origin": "https://b.example"}
        )
        assert "access-control-allow-origin" not in stranger.headers


def test_a_full_queue_is_told_before_anything_is_encoded(monkeypatch: pytest.MonkeyPatch):
    tokenizer, begun, go_on = ByteTokenizer(), threading.Event(), threading.Event()
    encode, calls = tokenizer.encode, []

    def slow(text: str, **options: Any) -> list[int]:
        calls.append(text)
        begun.set()
        go_on.wait(DEADLINE_S)
        return encode(text, **options)

    with serving(ScriptedEngine(), tokenizer, max_open=2) as running:
        monkeypatch.setattr(tokenizer, "encode", slow)
        first = threading.Thread(target=lambda: running.post(prompt="first", n=2))
        first.start()
        assert begun.wait(DEADLINE_S)
        # Nothing is submitted yet: the places are held by the one that is being encoded.
        for reply in (
            running.post(prompt="second"),
            running.post(prompt="second", stream=True),
            running.post(CHAT, messages=[{"role": "user", "content": "second"}]),
        ):
            assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
            assert reply.json()["error"]["code"] == "queue_full"
        assert running.http.get("/ready").status_code == 429
        go_on.set()
        first.join(DEADLINE_S)
        assert calls == ["first"]
        assert running.http.get("/ready").json() == {"status": "ready"}
        assert running.post(prompt="third", n=2).status_code == 200


def test_a_request_that_takes_too_long_is_given_up_and_frees_its_place():
    engine = ScriptedEngine(step_s=0.01, max_model_len=100_000)
    with serving(engine, request_timeout_s=0.2) as running:
        reply = running.post(prompt="x", max_tokens=90_000)
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "request_timeout")
        events = running.events(prompt="x", max_tokens=90_000)
        assert json.loads(events[0])["choices"][0]["text"]
        assert (json.loads(events[-2])["error"]["code"], events[-1]) == ("request_timeout", "[DONE]")
        eventually(running.is_idle)
        assert running.post(prompt="x", max_tokens=2).status_code == 200


def test_a_request_waiting_for_its_turn_is_given_up_as_well():
    with serving(ScriptedEngine(paused=True), request_timeout_s=0.1) as running:
        assert running.post(prompt="x").status_code == 504
        eventually(running.is_idle)


def test_a_body_that_does_not_come_is_told_and_its_connection_closed():
    with serving(ScriptedEngine(), body_timeout_s=0.1) as running:
        with socket.create_connection(("127.0.0.1", running.port), timeout=DEADLINE_S) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
            answer = b"".join(iter(lambda: client.recv(4096), b""))  # to the end: the server closes
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code": "body_timeout"' in answer


def test_a_body_that_says_it_is_too_large_is_not_waited_for():
    with serving(ScriptedEngine(), max_body_bytes=1000) as running:
        for length in (b"1001", b"9" * 18, b"9" * 30):
            with socket.create_connection(("127.0.0.1", running.port), timeout=DEADLINE_S) as client:
                client.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: " + length + b"\r\n\r\n{")
                assert client.recv(4096).startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 400 "))
        parts = iter([b'{"prompt": "', b"x" * 2000, b'"}'])  # in chunks, without a length
        assert running.http.post("/tokenize", content=parts).status_code == 413
        assert running.http.post("/tokenize", json={"prompt": "x"}).status_code == 200


def test_a_silent_stream_gets_comments_that_clients_skip():
    engine = ScriptedEngine(says("ab"), paused=True)
    with serving(engine, keep_alive_s=0.02) as running:
        body = {"model": MODEL, "prompt": "x", "stream": True}
        with running.http.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            assert [next(lines), next(lines), next(lines)] == [": keep-alive", "", ": keep-alive"]
            engine.paused = False
            data = [line for line in lines if line.startswith("data: ")]
        assert data[-1] == "data: [DONE]"
        engine.paused = True
        threading.Timer(0.1, lambda: setattr(engine, "paused", False)).start()
        parts = running.openai.completions.create(model=MODEL, prompt="x", stream=True)
        assert "".join(part.choices[0].text for part in parts) == "ab"


def test_version_and_readiness_have_routes():
    engine = ScriptedEngine()
    with serving(engine) as running:
        assert set(running.http.get("/version").json()) == {"version"}
        assert running.http.get("/ready").status_code == 200
        engine.fault = RuntimeError("broken")
        running.post(prompt="x")
        for path in ("/ready", "/health"):
            assert running.http.get(path).status_code == 503
        assert running.http.get("/version").status_code == 200


def test_keys_come_from_the_command_line_and_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEY_VARIABLE, "c, d,")
    args = ["serve", "--api-key", "a", "--api-key", "b", "--allow-origin", "*", "--max-open", "7", "--max-body", "1KiB"]
    limits = limits_from(build_parser().parse_args([*args, "--request-timeout", "0", "--drain-timeout", "2.5"]))
    assert limits.api_keys == ("a", "b", "c", "d")
    assert (limits.allow_origins, limits.max_open, limits.max_body_bytes) == (("*",), 7, 1024)
    assert (limits.request_timeout_s, limits.drain_s) == (0, 2.5)
    assert "'a'" not in repr(limits)
    monkeypatch.delenv(KEY_VARIABLE)
    assert limits_from(build_parser().parse_args(["serve"])) == ServerLimits()


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "two words", "naïve", "tab\t"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(key: str):
    with pytest.raises(UsageError, match="--api-key: ") as refusal:
        limits_from(build_parser().parse_args(["serve", "--api-key", key]))
    assert not key or key not in str(refusal.value)


@pytest.mark.parametrize("option", ["--request-timeout", "--drain-timeout"])
@pytest.mark.parametrize("value", ["-1", "nan", "soon", "1e9"])
def test_a_time_out_of_range_is_refused_by_option(option: str, value: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["serve", option, value])
    told = capsys.readouterr().err
    assert option in told
    assert value in told
