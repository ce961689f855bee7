"""A small HTTP client for measuring: one connection a request, and the moment at which each event arrived.

Load tools and the soak use it instead of a general client, whose own work would stand in the measured times. It
reads what this server writes (a length or chunks, server-sent events); it knows no engine.

Proof: tests/test_bench_serve.py. Story: metrics.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

DONE = b"[DONE]"
LIMIT_BYTES = 2**24  # of one line or chunk that is waited for


@dataclass(slots=True)
class Sample:
    """What one streamed request looked like from outside. Times are `time.perf_counter` seconds."""

    due_s: float  # when it was to be sent; an open loop counts from here, so a late client hides nothing
    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)  # arrival of each event that had text or an end
    ended_s: float = 0.0
    status: int = 0
    text: str = ""
    num_tokens: int = 0
    error: str = ""
    num_ends: int = 0  # finish reasons that came

    @property
    def ok(self) -> bool:
        """True when it was answered in full."""
        return self.status == 200 and not self.error and self.num_tokens > 0

    @property
    def ttft_s(self) -> float:
        """Time to the first event, from when the request was due."""
        return self.token_times_s[0] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Between two events."""
        return [after - before for before, after in zip(self.token_times_s, self.token_times_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 for one token."""
        if self.num_tokens < 2:
            return 0.0
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_tokens - 1)


async def fetch(url: str, path: str) -> tuple[int, bytes]:
    """`GET url + path`: status and body.

    Raises:
        OSError: the server cannot be reached, or hung up.
    """
    async with answered(url, "GET", path, b"") as (status, reader, headers):
        parts = [part async for part in parts_of(reader, headers)]
    return status, b"".join(parts)


async def stream(url: str, path: str, body: dict[str, Any], *, due_s: float) -> Sample:
    """POST one request that streams, usage included, and note when each event came; errors are in the sample."""
    sample = Sample(due_s, sent_s=time.perf_counter())
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with answered(url, "POST", path, json.dumps(asked).encode()) as (status, reader, headers):
            sample.status = status
            parts = parts_of(reader, headers)
            if status != 200:
                sample.error = b"".join([part async for part in parts]).decode("utf-8", "replace")
            else:
                await _take(sample, parts)
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.ended_s = time.perf_counter()
    return sample


async def _take(sample: Sample, parts: AsyncIterator[bytes]) -> None:
    waiting = b""
    done = False
    async for part in parts:
        now = time.perf_counter()
        *events, waiting = (waiting + part).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == DONE:
                done = True
            elif event.startswith(b"data: "):
                _note(sample, json.loads(data), now)
    if not done and not sample.error:
        sample.error = "the stream ended before [DONE]"


def _note(sample: Sample, chunk: dict[str, Any], now: float) -> None:
    if "error" in chunk:
        sample.error = chunk["error"]["message"]
    elif chunk.get("usage"):
        sample.num_tokens = chunk["usage"]["completion_tokens"]
    for choice in chunk.get("choices", ()):
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        sample.text += text
        sample.num_ends += choice["finish_reason"] is not None
        if text or choice["finish_reason"] is not None:
            sample.token_times_s.append(now)


@asynccontextmanager
async def answered(
    url: str, method: str, path: str, body: bytes
) -> AsyncIterator[tuple[int, asyncio.StreamReader, dict[str, str]]]:
    """Send one request; the status, the rest of the connection, and the headers by lower-case name.

    The connection is closed when the block ends, whatever is still to come.

    Raises:
        OSError, asyncio.IncompleteReadError: the server cannot be reached, or hung up before it answered.
    """
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=LIMIT_BYTES)
    try:
        head = f"{method} {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode("ascii") + b"\r\n" + body)
        await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        yield int(lines[0].split(" ")[1]), reader, headers
    finally:
        writer.close()


async def parts_of(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body as it arrives: chunk by chunk, or whole when its length was told."""
    if headers.get("transfer-encoding") != "chunked":
        yield await reader.readexactly(int(headers.get("content-length", "0")))
        return
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
