"""`nanoserve bench soak`: clients that leave, stall, and send nonsense, at a server whose pool is too small for them.

Many seeded clients act at random until the time is up; then all go, and the server must be as it was: nothing runs,
waits or holds a block, every answer ended exactly once, no gate fired, no answer was a server error, and memory did
not grow. What a client may count on is checked on the way: an answer that it read to the end ended once and says so.

Gates: gates.metrics. Proof: tests/test_bench_soak.py. Story: limits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from serve.client import answered, fetch, parts_of, stream
from serve.launch import launched

# Rows are few, the pool holds two long answers, and the queue is short: everybody is in everybody's way.
TIGHT = ("--max-batch-size", "8", "--max-model-len", "128", "--max-open", "24", "--kv-cache-memory")
TIGHT_POOL = {"tiny-random": "128KiB"}
MIB = 2**20
MAX_GROWTH = 48 * MIB  # of resident memory, from a third of the way to the end
SETTLE_SECONDS = 20.0
Metrics = dict[str, float]

BAD_BODIES: tuple[bytes, ...] = (
    b"",
    b"[]",
    b"5",
    b'{"model": ',
    b'{"model": "m", "prompt": "\xc3\x28"}',
    b'{"prompt": "no model"}',
    b'{"model": "another", "prompt": "x"}',
)
BAD_FIELDS: tuple[dict[str, Any], ...] = (
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": [-1]},
    {"prompt": "x", "max_tokens": 0},
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "n": 10_000},
    {"prompt": "x", "logit_bias": {"99999999": 1}},
    {"prompt": "x" * 5000},
    {"prompt": "x", "stop": [""] * 9},
    {"prompt": "x", "unknown": 1},
)


@dataclass(slots=True)
class Clients:
    """What the clients of one soak did, and what was wrong with what they saw."""

    url: str
    model: str
    acts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def saw(self, act: str, status: int, *, allowed: tuple[int, ...]) -> None:
        """An answer came; a status that this act may not get is a fault."""
        self.statuses[status] += 1
        if status not in allowed:
            self.faults.append(f"{act}: status {status}, allowed are {allowed}")


def bench_soak(args: argparse.Namespace) -> int:
    """Soak a server of its own and print what came of it; 1 when something was wrong.

    Raises:
        RuntimeError: the server did not start.
    """
    pool = args.kv_cache_memory or TIGHT_POOL.get(args.model, "32MiB")
    with launched(["--model", args.model, *TIGHT, pool]) as server:
        report = asyncio.run(soak(server.url, seconds=args.seconds, seed=args.seed, clients=args.clients))
    print(json.dumps(report) if args.json else render(report))
    return 1 if report["faults"] else 0


async def soak(url: str, *, seconds: float, seed: int, clients: int) -> dict[str, Any]:
    """Let `clients` act for `seconds`, wait until the server is idle, and compare it with what it was before."""
    model = json.loads((await fetch(url, "/v1/models"))[1])["data"][0]["id"]
    seen, before = Clients(url, model), await scrape(url)
    began = time.monotonic()
    resident: list[float] = []
    acting = [_client(seen, random.Random(f"{seed}/{at}"), until=began + seconds) for at in range(clients)]
    await asyncio.gather(*acting, _watch_memory(url, resident, until=began + seconds))
    after = await _settled(url)
    third = resident[len(resident) // 3] if resident else 0.0
    growth = after["process_resident_memory_bytes"] - third
    return {
        "seconds": round(time.monotonic() - began, 1),
        "seed": seed,
        "acts": dict(sorted(seen.acts.items())),
        "statuses": {str(status): count for status, count in sorted(seen.statuses.items())},
        "answers": int(after["nanoserve:request_submitted_total"] - before["nanoserve:request_submitted_total"]),
        "preemptions": int(_total(after, "num_preemptions") - _total(before, "num_preemptions")),
        "resident_mib": [round(size / MIB, 1) for size in (third, after["process_resident_memory_bytes"])],
        "faults": [*seen.faults[:10], *leftovers(before, after, growth=growth)],
    }


def leftovers(before: Metrics, after: Metrics, *, growth: float) -> list[str]:
    """What a server that nobody uses any more still shows, or lost; each in a sentence with both sides."""
    found = []
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_cache_tokens"):
        if after[f"nanoserve:{name}"] != 0:
            found.append(f"{name} is {after[f'nanoserve:{name}']:g}, nobody asks for anything")
    free, blocks = (after.get(f"nanoserve:kv_cache_{name}", 0) for name in ("free_blocks", "blocks"))
    if free != blocks:
        found.append(f"{free:g} of {blocks:g} blocks are free")
    submitted, ended = _total(after, "request_submitted"), _total(after, "request_success")
    if submitted != ended:
        found.append(f"{submitted:g} answers were submitted, {ended:g} ended")
    failures = _total(after, "gate_failures") - _total(before, "gate_failures")
    if failures:
        found.append(f"{failures:g} gate failures")
    if after["nanoserve:engine_up"] != 1:
        found.append("the engine is down")
    if growth > MAX_GROWTH:
        found.append(f"resident memory grew by {growth / MIB:.0f} MiB, {MAX_GROWTH / MIB:.0f} are allowed")
    return found


async def scrape(url: str) -> Metrics:
    """`/metrics` by name; the values of one name's labels are added up."""
    text = (await fetch(url, "/metrics"))[1].decode("utf-8")
    found: Metrics = {}
    for name, value in re.findall(r"^([\w:]+)(?:\{.*\})? (\S+)$", text, re.M):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def render(report: dict[str, Any]) -> str:
    """The report for people."""
    counts = {name: ", ".join(f"{key} {count}" for key, count in report[name].items()) for name in ("acts", "statuses")}
    ends = [f"FAULT: {fault}" for fault in report["faults"]] or ["ok"]
    return "\n".join(
        [
            f"{report['seconds']:g} s, seed {report['seed']}",
            f"answers   {report['answers']}, preempted {report['preemptions']}",
            f"acts      {counts['acts']}",
            f"statuses  {counts['statuses']}",
            "resident  {} MiB a third of the way, {} MiB at the end".format(*report["resident_mib"]),
            *ends,
        ]
    )


# ---- what a client may do ------------------------------------------------------------------------------------------


async def _client(seen: Clients, draw: random.Random, *, until: float) -> None:
    names, weights = zip(*((name, weight) for name, (_, weight) in ACTS.items()), strict=True)
    while time.monotonic() < until:
        name = draw.choices(names, weights)[0]
        seen.acts[name] += 1
        try:
            await ACTS[name][0](seen, draw)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            seen.faults.append(f"{name}: {type(error).__name__}: {error}")


def _body(seen: Clients, draw: random.Random) -> dict[str, Any]:
    """A good request of a random size; some are as long as the server allows."""
    prompt = [draw.randint(10, 250) for _ in range(draw.choice((1, 3, 15, 16, 17, 60)))]
    body = {
        "model": seen.model,
        "prompt": prompt,
        "max_tokens": draw.choice((1, 2, 7, 20, 60)),
        "seed": draw.getrandbits(20),
    }
    extras: tuple[dict[str, Any], ...] = ({}, {"n": 3}, {"ignore_eos": True}, {"stop": ["a", "zz"]}, {"logprobs": 2})
    return body | draw.choice(extras) | {"temperature": draw.choice((0.0, 0.8))}


async def _whole(seen: Clients, draw: random.Random) -> None:
    body = _body(seen, draw)
    async with answered(seen.url, "POST", "/v1/completions", json.dumps(body).encode()) as (status, reader, headers):
        reply = json.loads(b"".join([part async for part in parts_of(reader, headers)]))
    seen.saw("whole", status, allowed=(200, 429))
    if status == 200:
        reasons = [choice["finish_reason"] for choice in reply["choices"]]
        if len(reasons) != body.get("n", 1) or None in reasons:
            seen.faults.append(f"whole: finish reasons {reasons} of {body.get('n', 1)} answers")


async def _streamed(seen: Clients, draw: random.Random) -> None:
    body = _body(seen, draw)
    sample = await stream(seen.url, "/v1/completions", body, due_s=0.0)
    seen.saw("streamed", sample.status, allowed=(200, 429))
    if sample.status == 200 and (sample.error or sample.num_ends != body.get("n", 1)):
        seen.faults.append(f"streamed: {sample.num_ends} ends of {body.get('n', 1)} answers {sample.error}")


async def _leave_stream(seen: Clients, draw: random.Random) -> None:
    """Read some chunks, or none, and go."""
    body = json.dumps({**_body(seen, draw), "stream": True}).encode()
    async with answered(seen.url, "POST", "/v1/completions", body) as (status, reader, headers):
        seen.saw("leave_stream", status, allowed=(200, 429))
        chunks = parts_of(reader, headers)
        for _ in range(draw.randint(0, 4)):
            if await anext(chunks, None) is None:
                break


async def _hang_up(seen: Clients, draw: random.Random) -> None:
    """Ask for a whole answer and do not wait for it."""
    body = json.dumps({**_body(seen, draw), "max_tokens": 60, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    await _send_and_go(seen, head + body, pause_s=draw.choice((0.0, 0.001, 0.01, 0.05)))


async def _half_body(seen: Clients, draw: random.Random) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n"
    await _send_and_go(seen, head + b'{"model": "' * draw.randint(0, 9), pause_s=draw.choice((0.0, 0.01)))


async def _bad(seen: Clients, draw: random.Random) -> None:
    body = draw.choice(BAD_BODIES)
    if draw.random() < 0.6:
        body = json.dumps({"model": seen.model, **draw.choice(BAD_FIELDS)}).encode()
    async with answered(seen.url, "POST", "/v1/completions", body) as (status, reader, headers):
        reply = json.loads(b"".join([part async for part in parts_of(reader, headers)]))
    seen.saw("bad", status, allowed=(400, 404, 429))
    if "message" not in reply.get("error", {}):
        seen.faults.append(f"bad: status {status} without an error's message: {str(reply)[:100]}")


async def _look(seen: Clients, draw: random.Random) -> None:
    path = draw.choice(("/metrics", "/health", "/v1/models", "/nowhere", "/"))
    status, _ = await fetch(seen.url, path)
    seen.saw("look", status, allowed=(404,) if path == "/nowhere" else (200,))


async def _watch(seen: Clients, draw: random.Random) -> None:
    """Look at the engine's picture for a moment, or open it and never read."""
    async with answered(seen.url, "GET", "/steps", b"") as (status, reader, headers):
        seen.saw("watch", status, allowed=(200, 429, 501))
        if status == 200:
            await anext(parts_of(reader, headers))
            await asyncio.sleep(draw.choice((0.0, 0.2)))


async def _send_and_go(seen: Clients, data: bytes, *, pause_s: float) -> None:
    host, port = seen.url.removeprefix("http://").rsplit(":", 1)
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    await writer.drain()
    await asyncio.sleep(pause_s)
    writer.close()


ACTS: dict[str, tuple[Callable[[Clients, random.Random], Awaitable[None]], int]] = {
    "whole": (_whole, 5),
    "streamed": (_streamed, 5),
    "leave_stream": (_leave_stream, 5),
    "hang_up": (_hang_up, 4),
    "half_body": (_half_body, 2),
    "bad": (_bad, 4),
    "look": (_look, 1),
    "watch": (_watch, 1),
}


async def _watch_memory(url: str, resident: list[float], *, until: float) -> None:
    while time.monotonic() < until:
        resident.append((await scrape(url)).get("process_resident_memory_bytes", 0.0))
        await asyncio.sleep(0.25)


async def _settled(url: str) -> Metrics:
    """The metrics once nothing runs or waits, or when that took too long."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        now = await scrape(url)
        if not any(now[f"nanoserve:num_requests_{state}"] for state in ("running", "waiting")):
            return now
        if time.monotonic() > deadline:
            return now
        await asyncio.sleep(0.05)


def _total(metrics: Metrics, name: str) -> float:
    return metrics.get(f"nanoserve:{name}_total", 0.0)
