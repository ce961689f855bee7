"""Bytes of a connection, before they are a request and after they are an answer: which parser, and what it may hold.

uvicorn on httptools (the parser of Node.js, in C): a token that is sent passes no state machine in Python. What is no
HTTP gets OpenAI's envelope like every other refusal; a head that is too long, or that does not end in time, is refused
before anything else has heard of it, and who stops reading is hung up on: what a connection holds is bounded.

Who offers to go on in another protocol (Java's client offers HTTP/2 with each request) is answered in this one, as
RFC 9110 has it: that parser stops at such a head, so uvicorn's other one takes the connection over.

Proof: tests/test_wire.py. Story: limits.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from serve.errors import ApiError, bad_request

HEAD_BYTES = 2**16  # of a request's line and headers that have not ended
MAX_QUEUED = 8  # requests behind the one that is answered; more are not read before their turn
HEAD_SECONDS = 30.0  # from a connection, or the first byte of its next request, to the end of the head
STALLED_SECONDS = 60.0  # a client that takes nothing of what waits for it for so long is gone
LATE = "headers: not complete after {:g} seconds"


def server_config(app: FastAPI, *, log_level: str = "warning") -> uvicorn.Config:
    """How this application is served; the sockets are the caller's. No websockets, and Python's own event loop:
    with a sleeping client uvloop's cost a token was the same."""
    kind: dict[str, Any] = {"http": Connection, "ws": Unmoved, "loop": "asyncio", "lifespan": "on"}
    return uvicorn.Config(app, **kind, log_level=log_level, access_log=False)


class _Bounded(asyncio.Protocol):
    """What either parser's connection adds to uvicorn's: a timer on heads, and a watch on readers."""

    transport: asyncio.Transport

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._head_timer: asyncio.TimerHandle | None = None  # None: no head is waited for
        self._reader = _Reader()

    def pause_writing(self) -> None:
        """More waits for the client than it should; nothing is added until it has taken most of that."""
        super().pause_writing()
        self._reader.watch(self.transport)

    def resume_writing(self) -> None:
        """It has."""
        self._reader.leave()
        super().resume_writing()

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = None


class Connection(_Bounded, HttpToolsProtocol):
    """One client's connection. uvicorn's own, with a bound on heads and an envelope for what cannot be parsed."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._data = b""  # being parsed
        self._num_heads = 0  # begun so far
        self._head_bytes = 0  # of the one that has not ended, after the read in which it began
        self._answered: RequestResponseCycle | None = None  # the first of those that are not over

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come, and is to say what it wants."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone: whoever answers is told, which uvicorn tells the last request in the row alone."""
        self._end_head()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes: of a head, of a body, or of several requests in a row."""
        before, self._data = self._num_heads, data
        super().data_received(data)
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return
        if self._head_timer is None:
            self._stay_idle()
            return
        if self._num_heads != before:
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES:
            self._refuse(ApiError(431, f"headers: not complete after {HEAD_BYTES} bytes", code="headers_too_large"))

    def on_message_begin(self) -> None:
        """The parser saw a first byte."""
        super().on_message_begin()
        self._num_heads += 1
        self._await_head()

    def on_headers_complete(self) -> None:
        """The parser saw the blank line."""
        self._end_head()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            # No chunks, which came with HTTP/1.1: an answer without a length ends where the connection does.
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _AnyLength()
        if not self.pipeline:
            self._answered = self.cycle
        elif len(self.pipeline) <= MAX_QUEUED:
            self.flow.resume_reading()  # who does not read does not see a client leave

    def on_response_complete(self) -> None:
        """An answer is over, and the next one's turn has come."""
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()

    def handle_websocket_upgrade(self) -> None:
        """The parser stopped at a head that offers another protocol: the one named `ws` above goes on from there."""
        stopped = sys.exc_info()[1]
        if stopped is None or self._is_answering():
            self.transport.close()  # an answer is being written, and its end would find nobody
            return
        super().handle_websocket_upgrade()
        if rest := self._data[stopped.args[0] :]:  # nothing would be the connection's end
            self.transport.get_protocol().data_received(rest)  # type: ignore[attr-defined]

    def _should_upgrade(self) -> bool:
        return True

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what the parser refused."""
        self._refuse(_not_http(msg))

    def _await_head(self) -> None:
        self._end_head()
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._refuse_late)

    def _refuse_late(self) -> None:
        if self._is_answering():  # it may be that nothing is read before that is over
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._refuse_late)
        else:
            self._refuse(ApiError(408, LATE.format(HEAD_SECONDS), code="headers_timeout"))

    def _stay_idle(self) -> None:
        """What came was no beginning (a line break, the body of a request that is answered), so time goes on."""
        if self._answered is not None and self._answered.response_complete:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _refuse(self, error: ApiError) -> None:
        """Answer and hang up; only hang up where the bytes would be taken for another's answer, or for an early one."""
        asked = self._num_heads > 0 or error.status == 400
        if asked and not self._is_answering():
            self.transport.write(last_words(error, self.server_state.default_headers))
        self.transport.close()

    def _is_answering(self) -> bool:
        """True amid an answer, and before one to a request that is complete; one whose body breaks off gets none."""
        cycle = self._answered
        if cycle is None or cycle.response_complete:
            return False
        return cycle.response_started or not cycle.more_body


class _Reader:
    """A client for which more waits than it should: it goes on taking, or it is hung up on."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None  # None: it takes what comes

    def watch(self, transport: asyncio.Transport, before: int | None = None) -> None:
        """Look again later; `before` are the bytes that waited the last time."""
        waiting = transport.get_write_buffer_size()
        if before is not None and waiting >= before:
            transport.abort()
        else:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(STALLED_SECONDS, self.watch, transport, waiting)

    def leave(self) -> None:
        """It has taken enough, or is gone."""
        if self._timer is not None:
            self._timer.cancel()


class _AnyLength(int):
    """Of a body whose length nobody has told: uvicorn finds none too long for it, and none too short."""

    def __lt__(self, other: int) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: int) -> _AnyLength:
        return self


class Unmoved(_Bounded, H11Protocol):
    """The connection of a client that offered another protocol; it stays with this one, whatever it offers."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.ws_protocol_class = None

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._end_head()
        self._reader.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes, of one request or of several."""
        super().data_received(data)
        self._time_head()

    def on_response_complete(self) -> None:
        """An answer is over, and what came behind its request is looked at."""
        super().on_response_complete()
        self._time_head()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what the parser refused."""
        self._refuse(_not_http(msg))

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: a client may offer it with every request."""

    def _time_head(self) -> None:
        begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not begun or self.transport.is_closing():
            self._end_head()
        elif self._head_timer is None:
            late = ApiError(408, LATE.format(HEAD_SECONDS), code="headers_timeout")
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._refuse, late)

    def _refuse(self, error: ApiError) -> None:
        """Answer where nothing has been, and hang up."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(last_words(error, self.server_state.default_headers))
        self.transport.close()


def last_words(error: ApiError, default_headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The answer that ends a connection."""
    response = error.response()
    headers = [*default_headers, *response.raw_headers, (b"connection", b"close")]
    head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    return STATUS_LINE[error.status] + head + b"\r\n" + bytes(response.body)


def _not_http(msg: str) -> ApiError:
    """What the parser said, in the exception that uvicorn handles while it calls for an answer; else its own `msg`."""
    return bad_request(f"request: not HTTP/1.1: {sys.exc_info()[1] or msg}", code="malformed_request")
