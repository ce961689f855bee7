"""Stopping: what is open ends or is told why, in both signals' ways, and nobody meets a cut connection."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from serve.app import build_app
from serve.limits import ServerLimits
from serve.shutdown import DrainingServer, terminate_as_interrupt
from serve.wire import server_config
from tests.server import DEADLINE_S, MODEL, ByteTokenizer, ScriptedEngine, eventually
from tests.test_boot import served


@contextmanager
def draining(engine: ScriptedEngine, *, drain_s: float) -> Iterator[tuple[DrainingServer, str]]:
    """The real shutdown over a scripted engine."""
    app = build_app(engine, ByteTokenizer(), model_name=MODEL, limits=ServerLimits(drain_s=drain_s))
    listener = socket.create_server(("127.0.0.1", 0))
    server = DrainingServer(server_config(app, log_level="critical"), app.state.engine_loop, drain_s=drain_s)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    eventually(lambda: server.started)
    try:
        yield server, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        listener.close()
        assert not thread.is_alive()


def stream(url: str, max_tokens: int):
    body = {"model": MODEL, "prompt": "x", "max_tokens": max_tokens, "stream": True}
    return httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=DEADLINE_S)


# ---- holds ------------------------------------------------------------------------------------------------------


def test_an_answer_that_can_end_in_time_is_whole():
    with (
        draining(ScriptedEngine(step_s=0.01), drain_s=DEADLINE_S) as (server, url),
        stream(url, 40) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        server.handle_exit(signal.SIGTERM, None)
        data = [line for line in lines if line]
    assert data[-1] == "data: [DONE]"
    assert json.loads(data[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_an_answer_that_cannot_end_in_time_is_told_so_on_its_stream():
    with (
        draining(ScriptedEngine(step_s=0.01, max_model_len=100_000), drain_s=0.1) as (server, url),
        stream(url, 90_000) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        server.handle_exit(signal.SIGTERM, None)
        data = [line for line in lines if line]
    assert data[-1] == "data: [DONE]"
    assert json.loads(data[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"


def test_a_whole_reply_that_cannot_end_in_time_is_a_503_in_the_envelope():
    engine = ScriptedEngine(step_s=0.01, max_model_len=100_000)
    with draining(engine, drain_s=0.1) as (server, url):
        replies: list[httpx.Response] = []
        body = {"model": MODEL, "prompt": "x", "max_tokens": 90_000}
        asking = threading.Thread(
            target=lambda: replies.append(httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S))
        )
        asking.start()
        eventually(lambda: bool(engine.running))
        server.handle_exit(signal.SIGINT, None)
        asking.join(DEADLINE_S)
    assert replies[0].status_code == 503
    assert replies[0].json()["error"]["code"] == "shutting_down"


def test_a_body_that_has_not_come_is_refused_and_not_waited_for():
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"
    with (
        draining(ScriptedEngine(), drain_s=10 * DEADLINE_S) as (server, url),
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=DEADLINE_S) as client,
    ):
        client.sendall(head)
        eventually(lambda: bool(server.server_state.tasks))
        server.handle_exit(signal.SIGTERM, None)
        answer = b""
        while more := client.recv(2**16):
            answer += more
    assert answer.startswith(b"HTTP/1.1 503")
    assert b'"shutting_down"' in answer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_process_with_an_open_stream_ends_in_order(number: signal.Signals):
    with served("--served-model-name", MODEL, "--drain-timeout", "2") as (process, url, _):
        body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(number)
            data = [line for line in lines if line]
        _, err = process.communicate(timeout=60)
    assert data[-1] == "data: [DONE]"
    assert process.returncode == 0, err
    assert err.endswith("stopped\n")
    assert "Traceback" not in err


def test_a_second_signal_waits_for_nothing():
    with served("--served-model-name", MODEL) as (process, url, _):
        body = {"model": MODEL, "prompt": [1], "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 16}
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            for _ in range(400):  # some steps later, or the two signals would be one
                next(lines)
            process.send_signal(signal.SIGINT)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "terminate called" not in err


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_sigterm_is_an_interrupt_only_within_the_block():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminate_as_interrupt():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
