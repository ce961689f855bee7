"""From the bytes of a request to a checked body: within a size, within a time, JSON in UTF-8, field by field.

A client that sends a byte a second holds its own connection and nothing else; one that sends too much is told before
the rest has come. It knows the bodies by their base class alone.

Proof: tests/test_http_cases.py, tests/test_shutdown.py. Story: limits.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from serve.errors import ApiError, bad_request, from_validation_error, shown, unavailable
from serve.messages import Body
from serve.nested import GivenTwice, parse
from serve.stream import ClientGone

B = TypeVar("B", bound=Body)


class BodyReader:
    """Reads the bodies of one server, which a shutdown does not wait for."""

    def __init__(self, *, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._reading: set[asyncio.Task[Any]] = set()
        self._stopped = False

    async def read(self, request: Request, kind: type[B]) -> B:
        """The request's JSON as a body of this kind.

        Raises:
            ApiError: as `read_body`, and 503 when the server stops before it has come.
            ClientGone: the client left before the body's end.
        """
        if self._stopped:
            raise _stopping()
        task = asyncio.ensure_future(read_body(request, kind, max_bytes=self._max_bytes, timeout_s=self._timeout_s))
        self._reading.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._stopped:
                raise _stopping() from None
            raise
        finally:
            self._reading.discard(task)

    def stop(self) -> None:
        """Refuse what has not come, and all that is still to come."""
        self._stopped = True
        for task in self._reading:
            task.cancel()


async def read_body(request: Request, kind: type[B], *, max_bytes: int, timeout_s: float) -> B:
    """The request's JSON as a body of this kind.

    Raises:
        ApiError: as `read_json`, and 400 naming the field that cannot be honoured.
        ClientGone: the client left before the body's end.
    """
    raw = await read_json(request, max_bytes=max_bytes, timeout_s=timeout_s)
    if not isinstance(raw, dict):
        raise bad_request(f"body: {shown(raw)} is not a JSON object")
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise from_validation_error(error) from None


async def read_json(request: Request, *, max_bytes: int, timeout_s: float) -> Any:
    """The body as JSON in UTF-8, whatever its content-type says.

    Raises:
        ApiError: 400 when it is not JSON or cannot be held, 413 when it is longer than `max_bytes`, 408 when it takes
            too long to come.
        ClientGone: the client left before the body's end.
    """
    try:
        data = await asyncio.wait_for(_collect(request, max_bytes), timeout_s)
    except asyncio.TimeoutError:
        message = f"body: not complete after {timeout_s:g} seconds"
        raise ApiError(408, message, code="body_timeout", headers={"connection": "close"}) from None
    except ClientDisconnect:
        raise ClientGone from None
    try:
        return parse(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise bad_request(f"body: not UTF-8, byte {error.start} is {data[error.start]:#04x}") from None
    except GivenTwice as error:
        raise bad_request(str(error), param=error.name) from None
    except ValueError as error:
        raise bad_request(f"body: {error}") from None


def _stopping() -> ApiError:
    return unavailable("the server is shutting down", code="shutting_down")


async def _collect(request: Request, max_bytes: int) -> bytearray:
    told = request.headers.get("content-length", "0")
    message = f"body: longer than {max_bytes} bytes"
    too_large = ApiError(413, message, code="body_too_large", headers={"connection": "close"})
    if len(told) > 18 or int(told) > max_bytes:  # digits alone: the HTTP parser has refused anything else
        raise too_large
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > max_bytes:
            raise too_large
    return data
