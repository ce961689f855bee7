"""One HTTP request's open answers, as the event loop sees them: events come in, are taken in batches, or fail.

A ticket lives on the event loop's thread. Each answer in it ends exactly once: by the engine's last event, by
an abort from this side, or by a failure of the engine, and its timeline says when and why. It knows no engine and
no text.

Proof: tests/test_loop.py. Story: app.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from reference.request import Event, Request
from serve.errors import ApiError
from serve.timeline import Observer, Timeline


class Ticket:
    """Answers 0..n-1 of one submission. `take` waits for events; `close` gives up those that are still open."""

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        abort: Callable[[Sequence[str]], None],
        on_end: Callable[[Ticket], None],
        observer: Observer,
    ) -> None:
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        now = time.monotonic()
        self.timelines = [Timeline(request.id, len(request.prompt_ids), now) for request in requests]
        self._open = set(range(len(requests)))
        self._abort = abort
        self._on_end = on_end
        self._observer = observer
        self._events: deque[tuple[int, Event]] = deque()
        self._arrival = asyncio.Event()
        self._failure: ApiError | None = None
        self.timer: asyncio.TimerHandle | None = None  # fails this ticket when its time is over; its owner's
        for timeline in self.timelines:
            observer.submitted(timeline)

    @property
    def num_open(self) -> int:
        """Answers whose last event has not come and that were not aborted."""
        return len(self._open)

    @property
    def open_ids(self) -> list[str]:
        """Engine ids of the answers that are still open."""
        return [self.timelines[index].request_id for index in sorted(self._open)]

    async def take(self) -> list[tuple[int, Event]]:
        """Wait, then return all (answer index, event) that came since the last call, at least one.

        Raises:
            ApiError: the engine failed; what came before that was returned first.
        """
        await self._arrival.wait()
        if self._events:
            batch = list(self._events)
            self._events.clear()
            if self._failure is None:
                self._arrival.clear()
            return batch
        assert self._failure is not None
        raise self._failure

    def finish(self, index: int) -> None:
        """A stop string ended one answer, which the engine cannot know; one that has ended stays as it is."""
        if index in self._open:
            self._abort([self.timelines[index].request_id])
            self._end([index], "stop")

    def close(self, reason: str = "abort") -> None:
        """End all answers that are still open; safe to call at any time, more than once."""
        if self._open:
            self._abort(self.open_ids)
            self._end(sorted(self._open), reason)
        if not self.accepted.done():
            self.accepted.cancel()

    def settle(self, refusal: ValueError | None) -> None:
        """The engine took the requests, or refused them all."""
        if refusal is not None:
            self._end(sorted(self._open), "refused")
        if self.accepted.done():
            return
        if refusal is None:
            self.accepted.set_result(None)
        else:
            self.accepted.set_exception(refusal)

    def start(self, index: int, *, at_s: float) -> None:
        """An answer got a row in the step that began then; its first token may be some steps away."""
        if index in self._open:
            self.timelines[index].start(at_s)

    def put(self, index: int, event: Event, *, began_s: float, ended_s: float) -> None:
        """Hand in one event of a step, with the step's times; what comes for an answer after its end is dropped."""
        if index not in self._open:
            return
        timeline = self.timelines[index]
        if event.token_id is not None or event.finish_reason == "length":
            timeline.start(began_s)  # unless it was told of its row before
        if event.token_id is not None:
            self._observer.token(timeline, timeline.token(ended_s))
        self._events.append((index, event))
        self._arrival.set()
        if event.finish_reason is not None:
            self._end([index], event.finish_reason)

    def fail(self, error: ApiError) -> None:
        """End all open answers with `error`, for whoever waits on `accepted` or `take`."""
        self._failure = error
        self._arrival.set()
        waits = not self.accepted.done()
        if waits:
            self.accepted.set_exception(error)
        self.close("error")

    def _end(self, indices: Sequence[int], reason: str) -> None:
        if not self._open:
            return
        now = time.monotonic()
        for index in indices:
            if index in self._open:
                self._open.remove(index)
                self.timelines[index].end(now, reason)
                self._observer.ended(self.timelines[index])
        if not self._open:
            self._on_end(self)
