"""Who may call at all: API keys, and the origins of web pages.

Both stand in front of every route, as ASGI middleware, so that no handler can forget them. `/health` and `/ready` take
no key, since what asks for them (a load balancer, an orchestrator) has none. A preflight carries no key by its
definition and is answered without one; the request that follows it is not.

Proof: tests/test_limits.py. Story: limits.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.errors import ApiError
from serve.limits import ServerLimits
from serve.playground import playground

OPEN_PATHS = ("/health", "/ready")


def install_guards(app: FastAPI, limits: ServerLimits) -> None:
    """Put in front of `app` what the limits ask for; with neither keys nor origins that is nothing."""
    if limits.api_keys:
        app.add_middleware(KeyGuard, keys=limits.api_keys)
    if limits.allow_origins:
        # Added last, so outermost: a page may read a refusal for want of a key as well.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(limits.allow_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )


class KeyGuard:
    """Answers 401 to every request without one of the keys, but for `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._has_key(scope):
            # A browser cannot send a key before it has a page to enter it in; this one holds nothing of the server.
            page = scope["path"] == "/"
            refusal = playground(status=401) if page else ApiError(401, REFUSAL, code="invalid_api_key").response()
            refusal.headers["www-authenticate"] = "Bearer"
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = _digest(given.strip())
        # Every key is compared, and digests have one length: the time says nothing about how near a guess was.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


REFUSAL = "authorization: this server asks for `Authorization: Bearer KEY` with one of its keys"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
