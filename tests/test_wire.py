"""Connections: what is no HTTP is told so in the one envelope, heads are bounded, offers of clients are passed over."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence

import pytest

from serve.wire import Connection
from tests.server import DEADLINE_S, MODEL, ScriptedEngine, Served, eventually, says, serving

BODY = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(BODY)
NEXT = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedEngine(says("ab"))) as running:
        yield running


def said(served: Served, parts: Sequence[bytes]) -> bytes:
    """All that comes back until the server hangs up; each part is sent once the one before has an answer."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=DEADLINE_S) as client:
        answer = b""
        for part in parts:
            client.sendall(part)
            answer += client.recv(2**16)
        while more := client.recv(2**16):
            answer += more
    return answer


def read_until(client: socket.socket, wanted: bytes) -> None:
    answer = b""
    while wanted not in answer:
        more = client.recv(2**16)
        assert more, answer
        answer += more


def long_request(*, stream: bool) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 200, "stream": stream}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def error_of(answer: bytes, status: bytes) -> dict[str, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert b"connection: close" in head
    assert b"content-type: application/json" in head
    return json.loads(body)["error"]


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offer", [b"", H2C, b"connection: upgrade\r\nupgrade: websocket\r\n"])
@pytest.mark.parametrize("cut", [0, 5])
def test_an_offer_to_go_on_in_another_protocol_is_not_taken_up(served: Served, offer: bytes, cut: int):
    head = POST + offer + b"\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=DEADLINE_S) as client:
        client.sendall(head + BODY[:cut])
        assert served.http.get("/version").status_code == 200  # by now the first bytes have been read alone
        client.sendall(BODY[cut:])
        read_until(client, b'"text":"ab"')
        client.sendall(NEXT)
        read_until(client, b'{"version":')


def test_requests_in_a_row_are_answered_in_order(served: Served):
    answer = said(served, [POST + b"\r\n" + BODY + NEXT])
    assert answer.index(b'"text":"ab"') < answer.index(b'{"version":')


def test_an_answer_to_http_1_0_has_no_chunks_and_ends_with_the_connection(served: Served):
    body = BODY[:-1] + b', "stream": true}'
    head = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body)
    for request, end in [(head + body, b"data: [DONE]\n\n"), (b"GET /version HTTP/1.0\r\n\r\n", b'"}')]:
        answer = said(served, [request])
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"transfer-encoding" not in answer.lower()
        assert b"connection: close" in answer
        assert answer.endswith(end)


def test_who_leaves_with_more_in_the_row_is_heard():
    engine = ScriptedEngine(paused=True)  # what is not aborted never ends
    with serving(engine) as served:
        for stream in (True, False):
            for behind in (NEXT, POST + b"\r\n" + BODY[:-1]):
                with socket.create_connection(("127.0.0.1", served.port), timeout=DEADLINE_S) as client:
                    client.sendall(long_request(stream=stream))
                    eventually(lambda: len(engine.waiting) == 1)
                    client.sendall(behind)
                    assert served.http.get("/version").status_code == 200  # by now it has been read
                eventually(served.is_idle)


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_bytes", "reason"),
    [
        (b"hello\r\n\r\n", "Invalid method"),
        (b"\x16\x03\x01\x02\x00\x01\x00", "Invalid method"),
        (b"GET / HTTP/9.9\r\n\r\n", "Invalid HTTP version"),
        (b"GET / HTTP/1.1\r\nhost x\r\n\r\n", "Invalid header"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\n", "Content-Length"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n", "Transfer-Encoding"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "chunk size"),
    ],
)
def test_what_is_no_http_is_a_400_with_the_reason(served: Served, request_bytes: bytes, reason: str):
    error = error_of(said(served, [request_bytes]), b"400")
    assert (error["type"], error["code"]) == ("invalid_request_error", "malformed_request")
    assert reason in error["message"]
    assert served.post(prompt="x").status_code == 200


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nx: "])
def test_a_head_without_an_end_is_refused(served: Served, start: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("serve.wire.HEAD_BYTES", 1000)
    with socket.create_connection(("127.0.0.1", served.port), timeout=DEADLINE_S) as client:
        client.sendall(start)
        assert served.http.get("/version").status_code == 200
        client.sendall(b"a" * 1001)
        assert error_of(client.recv(2**16), b"431")["code"] == "headers_too_large"


def test_a_head_that_takes_too_long_is_refused_and_silence_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("serve.wire.HEAD_SECONDS", 0.05)
    with serving(ScriptedEngine(says("ab"))) as served:
        assert error_of(said(served, [b"GET /version HTTP/1.1\r\n"]), b"408")["code"] == "headers_timeout"
        # Bytes that nobody has asked for would be taken for the answer to what the client sends next.
        assert said(served, []) == b""
        assert served.post(prompt="x").status_code == 200


def test_a_line_break_keeps_no_connection_open(served: Served, monkeypatch: pytest.MonkeyPatch):
    seconds = property(lambda self: 0.2, lambda self, value: None)
    monkeypatch.setattr(Connection, "timeout_keep_alive", seconds, raising=False)
    get = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    assert said(served, [get, b"\r\n"]).endswith(b'"}')
    assert b"404" in said(served, [b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n", b"a" * 5])


def test_a_head_that_begins_amid_an_answer_waits_as_long_as_that_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("serve.wire.HEAD_SECONDS", 0.05)
    with serving(ScriptedEngine(step_s=0.002)) as served:
        answer = said(served, [long_request(stream=True), b"GET /"])
        assert b"[DONE]" in answer
        assert answer.endswith(b'"headers_timeout"}}')


@pytest.mark.parametrize(
    "garbage", [b"\x00garbage\r\n\r\n", b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"]
)
def test_garbage_behind_a_request_does_not_get_into_its_answer(garbage: bytes):
    with serving(ScriptedEngine(step_s=0.01)) as served:
        answer = said(served, [long_request(stream=True), garbage])
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"malformed" not in answer
        eventually(served.is_idle)


def test_a_connection_that_was_handed_over_keeps_its_bounds_and_its_envelope(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    offer = b"GET /version HTTP/1.1\r\nhost: x\r\n" + H2C + b"\r\n"
    for behind, status in [(b"\x00garbage\r\n\r\n", b"400"), (b"GET /v", b"408")]:
        if status == b"408":
            monkeypatch.setattr("serve.wire.HEAD_SECONDS", 0.05)
        first, _, last = said(served, [offer, behind]).partition(b'"}')
        assert first.startswith(b"HTTP/1.1 200 OK")
        assert error_of(last, status)["type"] == "invalid_request_error"
    bad = b"GET /version HTTP/1.1\r\n" + H2C + b"\r\n"  # without a host, which this parser asks for
    assert error_of(said(served, [bad + NEXT]), b"400")["code"] == "malformed_request"
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("offer", [b"", H2C])
def test_a_client_that_stops_reading_is_hung_up_on(offer: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("serve.wire.STALLED_SECONDS", 0.05)
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 20_000, "logprobs": 20, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    with serving(ScriptedEngine(max_model_len=30_000, step_s=0.0001)) as served, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(DEADLINE_S)
        client.connect(("127.0.0.1", served.port))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + offer + b"content-length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        eventually(lambda: served.health()["open"] == 1)
        eventually(served.is_idle)  # long before its last token
        assert 'finished_reason="abort"' in served.http.get("/metrics").text
