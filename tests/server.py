"""A real server on a loopback socket, and an engine whose answers a test dictates.

`ScriptedEngine` keeps the `Engine` protocol and emits the ids it is told; it can be paused between steps, made to
raise, and made to hang. `serving` runs uvicorn in a thread on a free port and gives an `openai` and an `httpx` client.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import httpx
import openai
import tokenizers
import uvicorn
from fastapi import FastAPI
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from reference.request import Event, Request, TokenLogprobs, validate_submit
from reference.token_bytes import byte_alphabet
from reference.tokenizer import ByteTokenizer, Tokenizer
from reference.weights import random_weights
from serve.app import build_app
from serve.limits import ServerLimits
from serve.wire import server_config
from tests.harness import tiny_config

MODEL = "tiny"
BOS, EOS, TURN = 256, 257, 258
VOCAB = 259
DEADLINE_S = 20.0


def eventually(fact: Callable[[], bool], *, within_s: float = DEADLINE_S) -> None:
    """Poll until `fact` holds, or fail."""
    deadline = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < deadline, f"not so within {within_s} seconds"
        time.sleep(0.005)


@dataclass
class Row:
    """One open request of the scripted engine."""

    request: Request
    ids: Iterator[int]
    emitted: int = 0


def endless(request: Request) -> Iterator[int]:
    """The letters of the alphabet, again and again."""
    while True:
        yield from b"abcdefghijklmnopqrstuvwxyz"


def says(text: str | bytes | Sequence[int], *, then: Sequence[int] = (EOS,)) -> Callable[[Request], Iterator[int]]:
    """Every answer is the bytes of `text` (or these ids), one a token, and then `then`."""
    ids = list(text.encode() if isinstance(text, str) else text)
    return lambda request: iter([*ids, *then])


@dataclass
class ScriptedEngine:
    """The `Engine` protocol with forced answers: `answer(request)` gives the ids of a request."""

    answer: Callable[[Request], Iterator[int]] = endless
    max_model_len: int = 256
    max_running: int = 64
    vocab_size: int = VOCAB
    eos: int = EOS
    paused: bool = False  # steps emit nothing but aborts
    fault: BaseException | None = None  # raised by the next step
    hang: threading.Event | None = None  # the next step waits for it
    step_s: float = 0.0  # what a step takes; without it an endless answer drowns the event loop
    steps: int = 0
    seen: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.aborted: list[str] = []

    def idle(self) -> bool:
        return False

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.aborted)

    def submit(self, request: Request) -> None:
        open_ids = {row.request.id: row for row in (*self.waiting, *self.running)}
        limits = {"vocab_size": self.vocab_size, "max_model_len": self.max_model_len}
        validate_submit(request, **limits, open_ids=open_ids)
        self.seen.append(request)
        self.waiting.append(Row(request, self.answer(request)))

    def abort(self, request_id: str) -> None:
        for rows in (self.waiting, self.running):
            for row in list(rows):
                if row.request.id == request_id:
                    rows.remove(row)
                    self.aborted.append(request_id)

    def step(self) -> list[Event]:
        self.steps += 1
        if self.fault is not None:
            raise self.fault
        if self.hang is not None:
            self.hang.wait(DEADLINE_S)
        events = [Event(request_id, None, "abort") for request_id in self.aborted]
        self.aborted.clear()
        time.sleep(max(self.step_s, 0.001 if self.paused else 0.0))
        if self.paused:
            return events
        while self.waiting and len(self.running) < self.max_running:
            self.running.append(self.waiting.popleft())
        events += [self._advance(row) for row in list(self.running)]
        return events

    def describe(self) -> dict[str, Any]:
        return {"name": "scripted", "max_model_len": self.max_model_len}

    def stats(self) -> dict[str, Any]:
        tokens = sum(len(row.request.prompt_ids) + row.emitted for row in self.running)
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "kv_tokens": tokens,
            "kv_capacity_tokens": self.max_running * self.max_model_len,
        }

    def _advance(self, row: Row) -> Event:
        params, told = row.request.params, None
        if not row.emitted and params.prompt_logprobs is not None:
            told = (None, *(_ranked(other, params.prompt_logprobs) for other in row.request.prompt_ids[1:]))
        if params.max_tokens == 0:
            self.running.remove(row)
            return Event(row.request.id, None, "length", prompt_logprobs=told)
        token = next(row.ids)
        row.emitted += 1
        full = row.emitted == params.max_tokens or len(row.request.prompt_ids) + row.emitted == self.max_model_len
        ends = token in params.stop_token_ids or (token == self.eos and not params.ignore_eos)
        reason = "stop" if ends else "length" if full else None
        if reason is not None:
            self.running.remove(row)
        logprobs = None if params.logprobs is None else _ranked(token, params.logprobs)
        return Event(row.request.id, token, reason, logprobs, prompt_logprobs=told)


def _ranked(token: int, num_top: int) -> TokenLogprobs:
    ranked = [(token, -0.25), *((other, float("-inf")) for other in range(97, 120) if other != token)]
    return TokenLogprobs(-0.25, 1, tuple(ranked[:num_top]))


def piece_tokenizer(pieces: Sequence[bytes], *, adds_bos: bool = False, template: str | None = None) -> Tokenizer:
    """A byte tokenizer with further tokens, ids 256 and on, that only an answer can hold; the specials follow."""
    alphabet = byte_alphabet()
    words = [*alphabet, *("".join(alphabet[byte] for byte in piece) for piece in pieces)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<bos>", "<eos>", "<turn>")])
    if adds_bos:
        bos = backend.token_to_id("<bos>")
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=["<bos>", "$A"], special_tokens=[("<bos>", bos)]
        )
    templates = {} if template is None else {"default": template}
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return Tokenizer(backend, special_tokens=special, chat_templates=templates)


ENGINES = ("scripted", "reference", "fast")


def make_engine(kind: str, *, max_model_len: int = 256, **switches: Any) -> Any:
    """An engine by name over the byte vocabulary; the real ones hold the same tiny seeded weights.

    `switches` are the fast engine's.
    """
    if kind == "scripted":
        return ScriptedEngine(max_model_len=max_model_len)
    config = tiny_config(vocab_size=VOCAB, bos_token_id=BOS, eos_token_ids=(EOS,))
    weights = random_weights(config, seed=3)
    if kind == "reference":
        from reference.engine import Engine

        return Engine(config, weights, max_model_len=max_model_len)
    from fast.engine import Engine as FastEngine

    return FastEngine.build(config, weights, max_model_len=max_model_len, **switches)


@dataclass
class Served:
    """A running server and its clients."""

    url: str
    app: FastAPI
    openai: openai.OpenAI
    http: httpx.Client

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def health(self) -> dict[str, Any]:
        return self.http.get("/health").json()

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return self.http.post(path, json={"model": MODEL, **body})

    def events(self, path: str = "/v1/completions", **body: Any) -> list[str]:
        """The data of all events of a stream."""
        with self.http.stream("POST", path, json={"model": MODEL, "stream": True, **body}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            text = response.read().decode("utf-8")
        assert text.endswith("\n\n")
        lines = text[:-2].split("\n\n")
        assert all(line.startswith("data: ") for line in lines)
        return [line.removeprefix("data: ") for line in lines]

    def is_idle(self) -> bool:
        """Nothing open, running, waiting or held, as `/health` tells it."""
        state = self.health()
        counts = state["engine"]
        return state["open"] == counts["running"] == counts["waiting"] == counts["kv_tokens"] == 0


@contextmanager
def serving(engine: Any, tokenizer: Tokenizer | None = None, *, wrap: Any = None, **options: Any) -> Iterator[Served]:
    """Serve `engine` on 127.0.0.1 until the block ends; `wrap(app)` may add middleware, `options` are limits or not."""
    names = {field.name for field in fields(ServerLimits)}
    limits = ServerLimits(**{name: options.pop(name) for name in names & options.keys()})
    app = build_app(engine, tokenizer or ByteTokenizer(), model_name=MODEL, limits=limits, **options)
    if wrap is not None:
        wrap(app)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = server_config(app, log_level="critical")
    config.timeout_graceful_shutdown = 3
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    eventually(lambda: server.started)
    try:
        # One client for both, without TLS: reading the certificates takes longer than most tests.
        with httpx.Client(base_url=url, timeout=DEADLINE_S, verify=False) as http:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
            yield Served(url, app, client, http)
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        listener.close()
        assert not thread.is_alive()
