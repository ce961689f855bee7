"""`nanoserve bench http`: what a token costs over HTTP, against the same engine stepped by hand.

Two arms take turns at each number of streams: the engine in this process, all requests submitted at once and stepped
to their end, and a server in a process of its own with the same flags, streaming the same requests to this process.
Both must give the same number of tokens, and the same texts. The ratio of their tokens a second is what serving
leaves of the engine; the processor time a token, told beside it, does not depend on what else the machine does.

Clients have processors of their own, and this one shares the engine's, where all it does would count as the server's
cost. So it sleeps while the answers come: the server writes each token to its socket as it would to anybody, the
kernel keeps the bytes, and the client wakes at the end of a stream to read them at once and takes them apart after
the clock has stopped. What it still cost is told too.

Proof: tests/test_bench_http.py. Story: metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from http.client import HTTPResponse
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from reference.request import Engine, Request, SamplingParams
from reference.tokenizer import Tokenizer
from serve.bench_serve import ID_RANGE
from serve.bench_soak import scrape
from serve.boot import boot
from serve.client import fetch
from serve.launch import launched
from serve.machine import machine

CPU = "process_cpu_seconds_total"
WAKE_AT_BYTES = 2**20  # of one stream, unread; its end wakes the reader too


@dataclass(frozen=True, slots=True)
class Round:
    """One run of one arm: wall seconds, processor seconds of the process with the engine, and the answers."""

    seconds: float
    cpu_seconds: float
    num_tokens: int
    texts: tuple[str, ...]
    client_cpu_seconds: float = 0.0


def bench_http(args: argparse.Namespace) -> int:
    """Measure both arms in turn and print a table, or one JSON object.

    Raises:
        RuntimeError: the arms did not say the same, or the server did not start or answer.
    """
    from serve.cli import build_parser

    flags = ["--model", args.model, "--max-batch-size", str(max(args.streams)), "--recheck-every", "0"]
    flags += [] if args.threads is None else ["--threads", str(args.threads)]
    loaded, engine = boot(build_parser().parse_args(["serve", *flags]))
    results = []
    with launched(flags) as server:
        for streams in args.streams:
            prompts = _prompts(streams, tokens=args.prompt_tokens)
            rounds: dict[str, list[Round]] = {"engine": [], "http": []}
            for at in range(args.rounds + 1):  # the first is not counted: it warms both
                alone = step_by_hand(engine, loaded.tokenizer, prompts, tokens=args.tokens)
                served = over_http(server.url, prompts, tokens=args.tokens)
                check_same(alone, served)
                if at:
                    rounds["engine"].append(alone)
                    rounds["http"].append(served)
            results.append({"streams": streams, **compare(rounds["engine"], rounds["http"])})
            print(_line(results[-1]), file=sys.stderr)
    report = {"model": args.model, "tokens": args.tokens, "rounds": args.rounds, "machine": machine()}
    print(json.dumps(report | {"results": results}) if args.json else "\n".join(map(_line, results)))
    return 0


def step_by_hand(engine: Engine, tokenizer: Tokenizer, prompts: list[list[int]], *, tokens: int) -> Round:
    """All requests at once on an idle engine, stepped to their end in this thread."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    ids: dict[str, list[int]] = {str(at): [] for at in range(len(prompts))}
    began, cpu_began = time.perf_counter(), time.process_time()
    for at, prompt in enumerate(prompts):
        engine.submit(Request(tuple(prompt), params, str(at)))
    while engine.has_work:
        for event in engine.step():
            if event.token_id is not None:
                ids[event.request_id].append(event.token_id)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    texts = tuple(tokenizer.decode(answer) for answer in ids.values())
    return Round(seconds, cpu_seconds, sum(map(len, ids.values())), texts)


def over_http(url: str, prompts: list[list[int]], *, tokens: int) -> Round:
    """The same requests, a stream each, from the first byte sent to the last one read.

    Raises:
        RuntimeError: one of them was not answered in full.
    """
    model = json.loads(asyncio.run(fetch(url, "/v1/models"))[1])["data"][0]["id"]
    common = {"model": model, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "stream": True}
    common["stream_options"] = {"include_usage": True}
    bodies = [json.dumps({**common, "prompt": prompt}).encode() for prompt in prompts]
    cpu_began = asyncio.run(scrape(url)).get(CPU, 0.0)
    streams = [_connected(url) for _ in bodies]
    began, client_began = time.perf_counter(), time.process_time()
    for stream, body in zip(streams, bodies, strict=True):
        stream.sendall(_request(url, body))
    answers = [_read_to_end(stream) for stream in streams]
    seconds, client_seconds = time.perf_counter() - began, time.process_time() - client_began
    cpu_seconds = asyncio.run(scrape(url)).get(CPU, 0.0) - cpu_began
    parts = [_text_and_count(answer) for answer in answers]
    texts, counts = tuple(text for text, _ in parts), [count for _, count in parts]
    return Round(seconds, cpu_seconds, sum(counts), texts, client_seconds)


def check_same(alone: Round, served: Round) -> None:
    """Before a number counts: both arms computed the same.

    Raises:
        RuntimeError: they did not.
    """
    if alone.num_tokens != served.num_tokens:
        raise RuntimeError(f"the engine gave {alone.num_tokens} tokens, the server {served.num_tokens}")
    wrong = [at for at, (one, other) in enumerate(zip(alone.texts, served.texts, strict=True)) if one != other]
    if wrong:
        raise RuntimeError(f"answer {wrong[0]} of {len(alone.texts)} is another over HTTP ({len(wrong)} differ)")


def compare(engine: list[Round], http: list[Round]) -> dict[str, Any]:
    """Medians of each arm, and the median of the rounds' ratios: neighbours in time, so the machine is the same."""
    pairs = list(zip(engine, http, strict=True))
    figures: dict[str, Any] = {}
    for name, rounds in (("engine", engine), ("http", http)):
        figures[f"{name}_tokens_per_s"] = round(median(one.num_tokens / one.seconds for one in rounds), 2)
        figures[f"{name}_cpu_ms_per_token"] = round(median(one.cpu_seconds * 1e3 / one.num_tokens for one in rounds), 3)
    client = median(one.client_cpu_seconds * 1e3 / one.num_tokens for one in http)
    figures["client_cpu_ms_per_token"] = round(client, 4)
    figures["throughput_ratio"] = round(median(alone.seconds / served.seconds for alone, served in pairs), 4)
    figures["best_ratio"] = round(min(one.seconds for one in engine) / min(one.seconds for one in http), 4)
    cpu = [alone.cpu_seconds / served.cpu_seconds for alone, served in pairs if served.cpu_seconds]
    figures["cpu_ratio"] = round(median(cpu), 4) if cpu else None
    return figures


def _prompts(count: int, *, tokens: int) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randint(*ID_RANGE) for _ in range(tokens)] for _ in range(count)]


def _connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    stream = socket.create_connection((parts.hostname or "", parts.port or 80))
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, WAKE_AT_BYTES)
    return stream


def _request(url: str, body: bytes) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\nconnection: close\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode("ascii") + body


def _read_to_end(stream: socket.socket) -> bytes:
    with stream:
        return b"".join(iter(partial(stream.recv, WAKE_AT_BYTES), b""))


def _text_and_count(answer: bytes) -> tuple[str, int]:
    """The joined text of a recorded stream, and the tokens that its usage tells."""
    response = HTTPResponse(_Recorded(answer))  # type: ignore[arg-type]  # it asks for a file and nothing else
    response.begin()
    body = response.read()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {body.decode('utf-8', 'replace')}")
    *events, done = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event.startswith(b"data: ")]
    chunks = [json.loads(event) for event in events]
    failed = [chunk["error"]["message"] for chunk in chunks if "error" in chunk]
    if failed or done != b"[DONE]":
        raise RuntimeError(failed[0] if failed else "a stream ended before [DONE]")
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    return text, chunks[-1]["usage"]["completion_tokens"]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What was read from a socket, for `HTTPResponse`."""

    data: bytes

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self.data)


def _line(one: dict[str, Any]) -> str:
    return (
        f"{one['streams']:>3} streams: engine {one['engine_tokens_per_s']:.1f} tokens/s, "
        f"http {one['http_tokens_per_s']:.1f}, ratio {one['throughput_ratio']:.3f} (best of each "
        f"{one['best_ratio']:.3f}); cpu ms/token {one['engine_cpu_ms_per_token']:.2f} and "
        f"{one['http_cpu_ms_per_token']:.2f}, the client's {one['client_cpu_ms_per_token']:.3f}"
    )
