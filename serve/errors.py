"""Every refusal and failure in OpenAI's envelope: `{"error": {"message", "type", "param", "code"}}`.

A message names the field, the value and the range allowed; a stack trace goes to the server's log and never
into a body. This module knows status codes and no engine.

Proof: tests/test_http_cases.py. Story: app.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("nanoserve")

MAX_SHOWN = 120  # characters of a refused value that a message repeats
INVALID, NOT_FOUND, OVERLOADED, SERVER = (
    "invalid_request_error",
    "not_found_error",
    "overloaded_error",
    "server_error",
)


class ApiError(Exception):
    """An answer that is an error. `param` is the request's field at fault, when one is."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def envelope(self) -> dict[str, Any]:
        """The body, and the payload of an error event on a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def json(self) -> bytes:
        """The envelope in ASCII: a message may repeat a lone surrogate, which UTF-8 cannot hold."""
        return json.dumps(self.envelope()).encode("ascii")

    def response(self) -> Response:
        """The whole HTTP answer."""
        return Response(self.json(), self.status, self.headers, media_type="application/json")


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request as written cannot be honoured."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, *, code: str) -> ApiError:
    """503: nothing is wrong with the request, the engine cannot take it."""
    return ApiError(503, message, type=SERVER, code=code)


def timed_out(seconds: float) -> ApiError:
    """504: the request was taken and is given up, not done in its time."""
    message = f"the request was not done within {seconds:g} seconds, the server's limit"
    return ApiError(504, message, type=SERVER, code="request_timeout")


def engine_failed(message: str) -> ApiError:
    """500: the request was taken and the engine did not finish it."""
    return ApiError(500, message, type=SERVER, code="engine_error")


def internal_error() -> ApiError:
    """500 for a fault of the server itself; what happened stands in the log."""
    return ApiError(500, "internal server error; the server's log has the details", type=SERVER, code="internal_error")


def shown(value: Any) -> str:
    """`repr` of a refused value, cut to a length that suits a message."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def from_value_error(error: ValueError, *, names: Mapping[str, str]) -> ApiError:
    """A `ValueError` of the contract (`field: value is not ...`) as a 400; `names` renames fields to the client's."""
    refusal = named(str(error))
    ours = names.get(refusal.param or "")
    if ours is not None and refusal.param is not None:
        return bad_request(ours + refusal.message.removeprefix(refusal.param), param=ours)
    return refusal


def named(message: str) -> ApiError:
    """A 400 whose message begins with a field's name (`seed: ...`, `logit_bias[5]: ...`), that name its `param`."""
    field = re.match(r"(\w+)[^:]{0,30}:", message)
    return bad_request(message, param=field.group(1) if field else None)


def from_validation_error(error: ValidationError) -> ApiError:
    """The first complaint of pydantic as a 400 that names the field by its path (`messages.0.content`)."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = [str(part) for part in first["loc"]]
    field, complaint = ".".join(path), first["msg"].removeprefix("Value error, ")
    if not path:
        return named(complaint)
    if first["type"] == "missing":
        complaint = "missing; this field is required"
    elif first["type"] == "extra_forbidden":
        complaint = "unknown field; it is not one that this server honours"
    elif first["type"] != "value_error":
        complaint = f"{shown(first['input'])} is refused: {complaint[0].lower()}{complaint[1:]}"
    return bad_request(f"{field}: {complaint}", param=path[0])


def install_error_handlers(app: FastAPI) -> None:
    """Give every error of the app the one envelope, unknown paths and methods included."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        # The envelope replaces the body only; `Allow` of a 405 stays.
        kind = NOT_FOUND if error.status_code == 404 else INVALID
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = ApiError(error.status_code, message, type=kind).response()
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_middleware(LastResort)


class LastResort:
    """Turns a fault of the server into a 500 and keeps the connection: the client's next request may be on it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app; answer in its place when it raised before it began to."""
        begun = False

        async def watch(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            if begun or scope["type"] != "http":
                raise
            log.exception("%s %s failed", scope["method"], scope["path"])
            await internal_error().response()(scope, receive, send)
