"""Around every HTTP request: an id in and out, a count by route, and one record when it is over.

A plain ASGI wrapper: it passes messages on as they are, so a disconnect still reaches whoever waits for it, and a
streamed answer is not held. The record goes to sinks (the request log below, spans in `serve.spans`); it holds
ids, counts and times, never a prompt or an answer. It knows no engine.

Proof: tests/test_access.py. Story: metrics.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.metrics import Metrics
from serve.stream import PLAIN_SEND
from serve.ticket import Ticket
from serve.timeline import Timeline

log = logging.getLogger("nanoserve")
request_log = logging.getLogger("nanoserve.request")

HEADER = b"x-request-id"
GIVEN = re.compile(rb"[\x21-\x7e]{1,128}")  # anything else could forge a line of a log or a header
UNROUTED = "(none)"
CLIENT_GONE = 499


@dataclass(frozen=True, slots=True)
class Finished:
    """One HTTP request that is over. Times are `time.monotonic` seconds."""

    request_id: str
    method: str
    path: str
    status: int
    client: str
    model: str
    began_s: float
    ended_s: float
    answers: tuple[Timeline, ...]
    traceparent: str | None  # W3C trace context, when the client sent one

    def as_dict(self) -> dict[str, Any]:
        """The record for a log line; what has not happened is left out."""
        line: dict[str, Any] = {"request_id": self.request_id, "method": self.method, "path": self.path}
        line |= {"status": self.status, "client": self.client, "duration_ms": _ms(self.ended_s - self.began_s)}
        if self.answers:
            first, tokens = self.answers[0], [answer.num_tokens for answer in self.answers]
            line |= {"id": first.request_id, "answers": len(tokens), "prompt_tokens": first.num_prompt_tokens}
            line |= {"completion_tokens": sum(tokens), "queue_ms": _ms(first.queue_s), "ttft_ms": _ms(first.ttft_s)}
            line["finish_reasons"] = sorted({answer.finish_reason or "open" for answer in self.answers})
        return {name: value for name, value in line.items() if value is not None}


Sink = Callable[[Finished], None]


def log_request(finished: Finished) -> None:
    """The request log: one JSON object a line, on the logger `nanoserve.request`."""
    request_log.info(json.dumps({"at": _clock(), **finished.as_dict()}))


def note_answers(request: Request, ticket: Ticket) -> None:
    """Have the record of `request` tell of this ticket's answers."""
    request.scope.setdefault("nanoserve.answers", []).extend(ticket.timelines)


class Access:
    """The outermost layer of an application."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, model_name: str, sinks: Sequence[Sink] = ()) -> None:
        self._app = app
        self._model_name = model_name
        self._metrics = metrics
        self._sinks = tuple(sinks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request and record it, however it ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        request_id = _request_id(scope)
        status = CLIENT_GONE  # unless an answer begins

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, request_id)]}
            await send(message)

        scope[PLAIN_SEND] = send
        try:
            await self._app(scope, receive, tagged)
        finally:
            self._record(scope, request_id.decode("ascii"), status, began)

    def _record(self, scope: Scope, request_id: str, status: int, began: float) -> None:
        route = scope.get("route")
        self._metrics.http(method=_method(scope), handler=getattr(route, "path", UNROUTED), status=status)
        if not self._sinks:
            return
        finished = Finished(
            request_id=request_id,
            method=scope["method"],
            path=scope["path"],
            status=status,
            client=scope["client"][0] if scope.get("client") else "",
            model=self._model_name,
            began_s=began,
            ended_s=time.monotonic(),
            answers=tuple(scope.get("nanoserve.answers", ())),
            traceparent=_header(scope, b"traceparent"),
        )
        for sink in self._sinks:
            try:
                sink(finished)
            except Exception:  # an observer that fails must not fail a request
                log.exception("a record of request %s was lost", request_id)


def _request_id(scope: Scope) -> bytes:
    """The client's `x-request-id` where it is a plain word, else a new one."""
    given = next((value for name, value in scope["headers"] if name == HEADER), b"")
    return given if GIVEN.fullmatch(given) else uuid.uuid4().hex.encode("ascii")


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def _method(scope: Scope) -> str:
    """The method, as one of few words: a label's values must not be the client's to choose."""
    known = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
    return scope["method"] if scope["method"] in known else "other"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _clock() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
