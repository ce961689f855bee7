"""Stopping in order: at the first signal open answers may end, at the second nothing is waited for.

uvicorn waits for open connections before it ends the application, so the drain has to begin at the signal and not
in the application's shutdown: by then the handlers would have been cancelled under their clients. It knows the
engine's loop and no engine.

Proof: tests/test_shutdown.py. Story: limits.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from serve.loop import EngineLoop

AFTER_DRAIN_SECONDS = 5  # for the last error events to reach their clients


class DrainingServer(uvicorn.Server):
    """A uvicorn server whose first signal starts `EngineLoop.stop`: what is open ends, or is told why it did not."""

    def __init__(self, config: uvicorn.Config, engine_loop: EngineLoop, *, drain_s: float) -> None:
        super().__init__(config)
        config.timeout_graceful_shutdown = int(drain_s) + AFTER_DRAIN_SECONDS
        self._engine_loop = engine_loop
        self._drain_s = drain_s
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to stop."""
        self._event_loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: uvicorn stops listening (or, the second time, waiting), and the drain begins."""
        super().handle_exit(sig, frame)
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        if self._drain is None:
            self._drain = asyncio.ensure_future(self._engine_loop.stop(drain_s=self._drain_s))


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Within the block SIGTERM is a KeyboardInterrupt, as SIGINT is: a supervisor's stop is an orderly one."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
