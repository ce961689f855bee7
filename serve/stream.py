"""The answers of one request, together and onto the wire as server-sent events.

`pieces` drives the answers of a ticket; `EventStream` sends chunks until the client has all of them or is gone. It
knows no JSON shape.

Gates: gates.stream. Proof: tests/test_stream.py. Story: stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gates.stream import check_all_answers_ended
from reference.request import Event
from serve.answer import Answer, AnswerFailed, Piece
from serve.echo import prompt_first
from serve.errors import ApiError, bad_request, engine_failed, internal_error
from serve.events import sse
from serve.guide import FIELDS
from serve.ticket import Ticket

log = logging.getLogger("nanoserve")

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"
PLAIN_SEND = "nanoserve.send"  # in the scope: `send` as `serve.access`, the outermost layer of ours, was given it


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


async def pieces(ticket: Ticket, answers: Sequence[Answer]) -> AsyncIterator[list[tuple[int, Piece]]]:
    """(choice, piece) as they become certain, in batches, until every answer has ended.

    Raises:
        ApiError: the engine failed, or gave one of the requests up.
    """
    num_open = len(answers)
    prompts = [answer.prompt for answer in answers]
    held: list[tuple[int, Event]] = []  # waits for the logprobs of its prompt
    while num_open:
        batch: list[tuple[int, Piece]] = []
        for index, event in prompt_first(await ticket.take(), prompts, held):
            answer = answers[index]
            if answer.finish_reason is not None:
                continue  # computed before the engine heard that a stop string had ended it
            try:
                piece = answer.push(event)
            except AnswerFailed as error:
                raise _given_up(str(error)) from None
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
        """Send until done or the client is gone. A client that does not read blocks this coroutine alone.

        Layers look at an answer's start. What follows, a message a token, goes past them.
        """
        start: Message = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            await send(start)
            await until_gone(receive, self._send(scope.get(PLAIN_SEND, send)))
        except ClientGone:
            pass
        finally:
            self._on_end()
            await self._chunks.aclose()

    async def _send(self, send: Send) -> None:
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


def _given_up(reason: str) -> ApiError:
    """A shape that turned out too much to keep to is the request's fault, whatever else is the engine's."""
    field = reason.partition(":")[0]
    return bad_request(reason, param=field) if field in FIELDS else engine_failed(reason)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
