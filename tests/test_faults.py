"""What breaks while clients wait: each hears of it, the others go on, and the process says so by how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.server import MODEL, ScriptedEngine, eventually, make_engine, serving

CHAT = "/v1/chat/completions"
USER: Any = [{"role": "user", "content": "Is it raining?"}]

# The real command line over an engine whose thread dies at its 30th step.
DYING = """
import sys
from fast.engine import Engine
step, steps = Engine._step, []
def dying(self, mark):
    steps.append(1)
    if len(steps) == 30:
        raise MemoryError("the pool is on fire")
    return step(self, mark)
Engine._step = dying
from serve.cli import main
sys.exit(main())
"""


@contextmanager
def process(*options: str, program: str = "from serve.cli import main; import sys; sys.exit(main())") -> Iterator[Any]:
    """`nanoserve serve` in a process of its own: it, and its base URL."""
    command = [sys.executable, "-c", program, "serve", "--model", "tiny-random", "--port", "0", "--no-kernels"]
    command += ["--served-model-name", MODEL, "--no-cuda-graphs", *options]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    try:
        line = running.stdout.readline()
        assert line.startswith("serving on "), running.communicate()[1]
        yield running, line.split()[2].removesuffix("/v1")
    finally:
        running.kill()
        running.communicate()


# ---- holds ------------------------------------------------------------------------------------------------------


def test_an_engine_thread_that_dies_is_told_to_everybody_and_by_the_exit_status():
    with process(program=DYING) as (running, url), ThreadPoolExecutor(2) as pool:
        body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 500, "ignore_eos": True}
        whole = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60) as reply:
            data = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
        assert (json.loads(data[-2])["error"]["code"], data[-1]) == ("engine_error", "[DONE]")
        assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (500, "engine_error")
        _, err = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "nanoserve serve: the engine died: MemoryError: the pool is on fire" in err
    assert "on fire" not in whole.result().text


@pytest.mark.skipif(not __import__("os").path.exists("/dev/full"), reason="runs where there is a /dev/full (Linux)")
def test_a_full_disk_ends_the_trace_and_no_answer():
    with process("--trace", "/dev/full") as (running, url):
        body = {"model": MODEL, "prompt": [1, 2], "max_tokens": 40, "ignore_eos": True}
        for _ in range(2):
            reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 40)
        assert httpx.get(f"{url}/health").json()["status"] == "ok"
        running.terminate()
        _, err = running.communicate(timeout=60)
    assert running.returncode == 0
    assert "No space left on device" in err
    assert "Traceback" not in err


def test_an_answer_that_breaks_a_gate_fails_alone_over_http():
    engine = make_engine("fast")
    engine.fail_alone = True
    submit = engine.submit

    def tampered(request: Any) -> None:
        submit(request)
        if request.params.seed == 666:
            engine._open[request.id].max_tokens += 5  # the limit of somebody else

    body: dict[str, Any] = {"prompt": "x", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    with serving(engine) as running, ThreadPoolExecutor(2) as pool:
        alone = running.post(**body).json()["choices"]
        engine.submit = tampered
        broken = pool.submit(lambda: running.post(**body, seed=666))
        streamed = pool.submit(lambda: running.events(**body, seed=666))
        for _ in range(3):
            assert running.post(**body).json()["choices"] == alone
        error = broken.result().json()["error"]
        assert (broken.result().status_code, error["code"]) == (500, "engine_error")
        assert error["message"].startswith("gate engine.within_limits: ")
        assert json.loads(streamed.result()[-2])["error"] == error
        eventually(running.is_idle)
        assert engine.stats()["free_blocks"] == engine.stats()["num_blocks"]
        assert running.health()["status"] == "ok"


def test_text_that_is_not_its_tokens_fails_alone(monkeypatch: pytest.MonkeyPatch):
    from reference.tokenizer import ByteTokenizer

    tokenizer, decode = ByteTokenizer(), ByteTokenizer().decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: decode(ids, **options) + "!" * (len(ids) == 7))
    with serving(ScriptedEngine(), tokenizer) as running:
        assert running.post(prompt="x", max_tokens=7).status_code == 500
        assert json.loads(running.events(prompt="x", max_tokens=7)[-2])["error"]["code"] == "internal_error"
        assert running.post(prompt="x", max_tokens=8).status_code == 200
        assert running.health()["status"] == "ok"


def test_a_client_that_stops_reading_holds_no_row_once_its_time_is_over():
    import socket

    engine = ScriptedEngine(max_model_len=2_000_000)
    with serving(engine, request_timeout_s=0.3) as running:
        body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1_900_000, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", running.port), timeout=20) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            eventually(lambda: bool(engine.running))
            assert running.post(prompt="y", max_tokens=3).status_code == 200
            eventually(running.is_idle)
            gone = threading.Event()
            threading.Thread(target=lambda: (running.post(prompt="y", max_tokens=3), gone.set())).start()
            assert gone.wait(20)
