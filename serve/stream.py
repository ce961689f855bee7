"""From events to text as it may be shown, and onto the wire as server-sent events.

An `Answer` turns one request's ids into pieces: no half character, nothing that may still become a stop string,
no text of the token that ended it. `pieces` drives the answers of a ticket; `EventStream` sends chunks until the
client has all of them or is gone. The pieces of an answer join to its whole text. It knows no JSON shape.

Gates: gates.stream. Proof: tests/test_stream.py. Story: stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gates.core import CHEAP, enabled
from gates.stream import check_all_answers_ended
from gates.tokenizer import check_text_is_stream
from reference.request import Event, SamplingParams, TokenLogprobs
from reference.stops import StopMatcher
from reference.tokenizer import IncrementalDecoder, Tokenizer
from serve.errors import ApiError, engine_failed, internal_error
from serve.ticket import Ticket

log = logging.getLogger("nanoserve")

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


@dataclass(frozen=True, slots=True)
class Position:
    """One shown token with its logprobs; `offset` is the character of the answer at which its text begins."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain with one token. The piece with a `finish_reason` is the answer's last."""

    text: str
    positions: tuple[Position, ...] = ()
    finish_reason: str | None = None


class Answer:
    """The text of one answer as it grows, and why it ended."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, echo: str = "") -> None:
        """`echo` is what the answer begins with, before its first token."""
        self._echo = echo
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer)
        self._matcher = StopMatcher(params.stop)
        self._min_tokens = params.min_tokens
        self._shown_ids: list[int] = []
        self._decoded = 0  # characters the decoder gave, those withheld included
        self._texts: list[str] = []
        self._waiting: list[Position] = []  # positions whose text is not out yet
        self.positions: list[Position] = []
        self.num_tokens = 0  # all that were computed for it, the one that ended it included
        self.finish_reason: str | None = None

    @property
    def text(self) -> str:
        """All pieces so far, joined."""
        return "".join(self._texts)

    def push(self, event: Event) -> Piece:
        """Take the next event; a piece without text and finish reason is not worth sending.

        Raises:
            ApiError: the engine gave the request up.
        """
        if event.finish_reason not in (None, "stop", "length"):
            raise engine_failed(event.error or f"the engine ended the request: {event.finish_reason}")
        assert event.token_id is not None
        self.num_tokens += 1
        # A token that ended its request with "stop" is EOS or a stop id: counted, not shown.
        text = "" if event.finish_reason == "stop" else self._show(event.token_id, event.logprobs)
        safe, stop = self._match(text)
        if event.finish_reason is not None and stop is None:
            tail, stop = self._match(self._decoder.flush())
            safe += tail + self._matcher.flush()
        if not self._texts:
            safe = self._echo + safe
        self._texts.append(safe)
        self.finish_reason = "stop" if stop is not None else event.finish_reason
        if self.finish_reason is not None:
            self._check(stop)
        return self._piece(safe)

    def _show(self, token_id: int, logprobs: TokenLogprobs | None) -> str:
        self._shown_ids.append(token_id)
        if logprobs is not None:
            self._waiting.append(Position(token_id, self._decoded, logprobs))
        text = self._decoder.push(token_id)
        self._decoded += len(text)
        return text

    def _match(self, text: str) -> tuple[str, str | None]:
        """Stop strings begin to count after `min_tokens` tokens, as EOS does."""
        if self.num_tokens <= self._min_tokens:
            return text, None
        return self._matcher.push(text)

    def _piece(self, text: str) -> Piece:
        """Logprobs travel with the first text at or after their token."""
        if not text and self.finish_reason is None:
            return Piece("")
        positions = tuple(self._waiting)
        self.positions += positions
        self._waiting.clear()
        return Piece(text, positions, self.finish_reason)

    def _check(self, stop: str | None) -> None:
        if enabled(CHEAP):
            decoded = self._echo + self._tokenizer.decode(self._shown_ids)
            check_text_is_stream(streamed=self.text, decoded=decoded, stop=stop)


async def pieces(ticket: Ticket, answers: Sequence[Answer]) -> AsyncIterator[list[tuple[int, Piece]]]:
    """(choice, piece) as they become certain, in batches, until every answer has ended.

    Raises:
        ApiError: the engine failed, or gave one of the requests up.
    """
    num_open = len(answers)
    while num_open:
        batch: list[tuple[int, Piece]] = []
        for index, event in await ticket.take():
            answer = answers[index]
            if answer.finish_reason is not None:
                continue  # computed before the engine heard that a stop string had ended it
            piece = answer.push(event)
            if piece.finish_reason is not None:
                num_open -= 1
                ticket.finish(index)
            if piece.text or piece.finish_reason is not None:
                batch.append((index, piece))
        if batch:
            yield batch
    check_all_answers_ended(open_ids=ticket.open_ids, finish_reasons=[answer.finish_reason for answer in answers])


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` for as long as the client is there. The request's body must have been read.

    Raises:
        ClientGone: it left first; `work` was cancelled.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. An error after the first byte is an event of its own; `[DONE]` ends either way."""

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], *, on_end: Callable[[], None], keep_alive_s: float = 15.0
    ) -> None:
        """`chunks` are events as they are sent; `on_end` is called once, however the stream ends.

        After `keep_alive_s` seconds without one a comment goes out, which clients skip and idle timers count.
        """
        self.status_code = 200
        self.background = None
        self._chunks = chunks
        self._on_end = on_end
        self._keep_alive_s = keep_alive_s
        self._silent = True
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until done or the client is gone. A client that does not read blocks this coroutine alone."""
        try:
            await until_gone(receive, self._send(send))
        except ClientGone:
            pass
        finally:
            self._on_end()
            await self._chunks.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        beat = asyncio.ensure_future(self._beat(send))
        try:
            async for data in self._chunks:
                self._silent = False
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except ApiError as error:
            await send({"type": "http.response.body", "body": sse(error.json()), "more_body": True})
        except Exception:
            log.exception("a stream failed")
            await send({"type": "http.response.body", "body": sse(internal_error().json()), "more_body": True})
        finally:
            beat.cancel()
        await send({"type": "http.response.body", "body": sse(b"[DONE]"), "more_body": False})

    async def _beat(self, send: Send) -> None:
        """Comments between events; each is one write, so it cannot fall into the middle of an event."""
        while True:
            self._silent = True
            await asyncio.sleep(self._keep_alive_s)
            if self._silent:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


def sse(data: bytes) -> bytes:
    """One event; `data` holds no line break, since JSON escapes them."""
    return b"data: " + data + b"\n\n"


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
