"""The one thread that owns the engine, and the tickets through which the event loop waits for its answers.

Nobody else calls the engine. Submissions and aborts cross over in a queue and are done between two steps; the
events of a step cross back in one call. A reader that is slow or gone holds up nothing: its events wait in its
ticket, at most `max_tokens` of them. When the engine dies or hangs, every open ticket fails within seconds and
new ones are refused. This module knows ids and events, no text and no HTTP.

Gates: gates.app, gates.stream. Proof: tests/test_loop.py. Story: app.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from gates import GateError
from gates.app import check_engine_runs
from gates.stream import check_answers_end_once
from reference.request import Engine, Event, Request
from serve.errors import ApiError, bad_request, engine_failed, timed_out, unavailable
from serve.ticket import Ticket
from serve.timeline import Observer, Unobserved

log = logging.getLogger("nanoserve")

STATS_EVERY_S = 0.1
GATHER_S = 0.005  # an idle engine waits so long for answers that are being prepared
BUSY_GAUGES = ("running", "waiting", "kv_tokens")


@dataclass(frozen=True, slots=True)
class _Submit:
    ticket: Ticket
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Watch:
    on_step: Callable[[Any], None] | None


@runtime_checkable
class Watched(Protocol):
    """An engine that tells of its steps to whoever joins."""

    def watch_steps(self, on_step: Callable[[Any], None] | None) -> None:
        """Call `on_step` with a record of each step from now on; None ends that."""


_Command = _Submit | _Abort | _Watch


class EngineLoop:
    """Runs an engine in a thread of its own for the clients of one event loop."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_open: int = 1024,
        stuck_after_s: float = 60.0,
        request_timeout_s: float = 0.0,
        on_death: Callable[[BaseException], None] | None = None,
        observer: Observer | None = None,
    ) -> None:
        """`max_open` bounds the answers open at once, waiting ones included; `on_death` is told of a dead engine.

        A submission that is not done after `request_timeout_s` seconds fails; 0 lets it take as long as it takes.
        `observer` is told of every answer, on the event loop's thread.
        """
        self._engine = engine
        self._max_open = max_open
        self._stuck_after_s = stuck_after_s
        self._request_timeout_s = request_timeout_s
        self._on_death = on_death
        self._observer = observer or Unobserved()
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        # Owned by the event loop's thread.
        self._tickets: set[Ticket] = set()
        self._reserved = 0  # answers that are being prepared; the engine's thread reads it
        self._idle = asyncio.Event()
        self._stopping = False
        self.on_stop: Callable[[], None] = lambda: None  # for who prepares what will not be taken
        self._watchdog: asyncio.Task[None] | None = None
        # Owned by the engine's thread; the other one only reads, whole references at a time.
        self._routes: dict[str, tuple[Ticket, int]] = {}
        self._leaving = False  # told to stop: go once there is no work
        self._aborted = False  # the engine owes abort events, which take a step to come out
        self._failure: BaseException | None = None
        self._busy_since: float | None = None
        self._stats: dict[str, Any] = {}
        self._stats_at = 0.0

    # ---- the event loop's side ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; called once, on the event loop that will wait for the answers."""
        self._loop = asyncio.get_running_loop()
        self._idle.set()
        self._stats = dict(self._engine.stats())
        self._thread.start()
        self._watchdog = self._loop.create_task(self._watch())

    async def stop(self, *, drain_s: float) -> None:
        """Take nothing new, let open answers end for `drain_s` seconds, fail the rest, and join the thread."""
        self._stopping = True
        self.on_stop()
        try:
            await asyncio.wait_for(self._idle.wait(), drain_s)
        except asyncio.TimeoutError:
            self._fail_all(unavailable("the server is shutting down", code="shutting_down"))
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._commands.put(None)
        if self.status == "stopping":
            # A hung engine is not waited for; the thread is a daemon and goes with the process.
            await asyncio.to_thread(self._thread.join, self._stuck_after_s)

    async def submit(self, requests: Sequence[Request]) -> Ticket:
        """Queue the answers of one HTTP request, all or none, and return once the engine has taken them.

        Raises:
            ValueError: the engine refused one of them.
            ApiError: 503 when the engine is dead, stuck or stopping, 429 when too many answers are open.
        """
        self._check_open(len(requests))
        ticket = Ticket(requests, abort=self._abort, on_end=self._forget, observer=self._observer)
        self._tickets.add(ticket)
        if self._request_timeout_s:
            late = timed_out(self._request_timeout_s)
            ticket.timer = self._loop.call_later(self._request_timeout_s, ticket.fail, late)
        self._idle.clear()
        self._commands.put(_Submit(ticket, tuple(requests)))
        try:
            await ticket.accepted
        except BaseException:
            ticket.close()
            raise
        return ticket

    @contextmanager
    def reserve(self, num_answers: int) -> Iterator[None]:
        """Hold places while requests are prepared, so that what cannot be taken is refused before that work.

        A `submit` of as many answers right after the block, with no await between, finds the places free.

        Raises:
            ApiError: as `submit`.
        """
        self._check_open(num_answers)
        self._reserved += num_answers
        try:
            yield
        finally:
            self._reserved -= num_answers

    @property
    def status(self) -> str:
        """`ok`, `dead`, `stuck` (one step lasts longer than `stuck_after_s`) or `stopping`."""
        if self._failure is not None:
            return "dead"
        since = self._busy_since
        if since is not None and time.monotonic() - since > self._stuck_after_s:
            return "stuck"
        return "stopping" if self._stopping else "ok"

    def checked_status(self) -> str:
        """`status`, for whoever acts on it.

        Raises:
            GateError: it says that all is well, and the engine's thread is over.
        """
        alive = self._thread.is_alive()  # before the status, which a thread that ends has set by then
        status = self.status
        check_engine_runs(status=status, thread_alive=alive)
        return status

    @property
    def stats(self) -> dict[str, Any]:
        """The engine's own counts, at most `STATS_EVERY_S` seconds old while it works and exact while it is idle."""
        return self._stats

    @property
    def max_open(self) -> int:
        """The most answers open at once, and so the most that one HTTP request may ask for."""
        return self._max_open

    @property
    def num_open(self) -> int:
        """Answers that are still to end."""
        return sum(ticket.num_open for ticket in self._tickets)

    @property
    def can_watch(self) -> bool:
        """True for an engine that tells of its steps."""
        return isinstance(self._engine, Watched)

    def watch(self, on_step: Callable[[Any], None] | None) -> None:
        """Have `on_step` called on the event loop's thread with a record of every step; None ends that."""
        self._commands.put(_Watch(on_step))

    def check_up(self) -> None:
        """Raise the 503 of an engine that cannot take requests."""
        status = self.checked_status()
        reasons = {
            "dead": "the engine stopped after an error; the server's log has the details",
            "stuck": f"the engine has been in one step for more than {self._stuck_after_s:g} seconds",
            "stopping": "the server is shutting down",
        }
        if status in reasons:
            raise unavailable(reasons[status], code=f"engine_{status}" if status != "stopping" else "shutting_down")

    def _check_open(self, num_answers: int) -> None:
        self.check_up()
        if num_answers > self._max_open:
            message = f"n: {num_answers} answers in one request exceed the server's limit of {self._max_open}"
            raise bad_request(message, param="n")
        num_open = self.num_open + self._reserved
        if num_open + num_answers > self._max_open:
            message = f"{num_open} answers are open, the server's limit is {self._max_open}; try again later"
            raise ApiError(429, message, type="overloaded_error", code="queue_full", headers={"retry-after": "1"})

    def _abort(self, request_ids: Sequence[str]) -> None:
        self._commands.put(_Abort(tuple(request_ids)))

    def _forget(self, ticket: Ticket) -> None:
        self._tickets.discard(ticket)
        if ticket.timer is not None:
            ticket.timer.cancel()
        if not self._tickets:
            self._idle.set()

    def _fail_all(self, error: ApiError) -> None:
        for ticket in list(self._tickets):
            ticket.fail(error)

    async def _watch(self) -> None:
        """Fail the open tickets of a hung engine. Should it come back, it finds their aborts in its queue."""
        while True:
            await asyncio.sleep(min(1.0, self._stuck_after_s / 4))
            if self.status == "stuck" and self._tickets:
                log.error("one engine step has lasted more than %g seconds", self._stuck_after_s)
                self._fail_all(engine_failed("the engine does not answer; the request was given up"))

    def _on_failure(self, failure: BaseException) -> None:
        self._fail_all(engine_failed("the engine stopped after an error; the server's log has the details"))
        if self._on_death is not None:
            self._on_death(failure)

    # ---- the engine thread's side -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._leaving or self._engine.has_work or self._aborted:
                self._turn()
        except Exception as failure:
            log.exception("the engine died")
            self._failure = failure
            # Nothing runs any more, and a gauge must not say otherwise.
            self._stats = self._stats | dict.fromkeys(BUSY_GAUGES, 0)
            if "num_blocks" in self._stats:
                self._stats = self._stats | {"free_blocks": self._stats["num_blocks"]}
            self._call(self._on_failure, failure)

    def _turn(self) -> None:
        """One wait for work, and one step. `_busy_since` covers whatever may hang in the engine's code."""
        commands = self._take(wait=not (self._engine.has_work or self._aborted))
        self._busy_since = time.monotonic()
        for command in commands:
            if command is None:
                self._leaving = True
            elif isinstance(command, _Submit):
                self._admit(command)
            elif isinstance(command, _Abort):
                self._drop(command)
            else:
                self._tell(command)
        events: list[Event] = []
        if self._engine.has_work or self._aborted:
            self._aborted = False
            events = self._engine.step()
        # Before the events go out: whoever has read an answer's end finds it in the counts.
        if commands or not self._engine.has_work or time.monotonic() - self._stats_at > STATS_EVERY_S:
            self._stats, self._stats_at = dict(self._engine.stats()), time.monotonic()
        self._hand_over(events, began_s=self._busy_since)
        self._busy_since = None

    def _take(self, *, wait: bool) -> list[_Command | None]:
        """All commands there are, at least one when there is nothing else to do."""
        while wait and self._commands.empty() and self._idle_turn():
            pass
        commands = [self._commands.get()] if wait else []
        if wait and isinstance(commands[0], _Submit):
            self._gather(commands)
        while True:
            try:
                commands.append(self._commands.get_nowait())
            except queue.Empty:
                return commands

    def _gather(self, commands: list[_Command | None]) -> None:
        """Requests that come together begin together: one prefill for all, not one and then another for the rest.

        Nobody is served meanwhile, and the processors are busy with preparing those that are waited for.
        """
        deadline = time.monotonic() + GATHER_S
        while self._reserved and (left := deadline - time.monotonic()) > 0:
            try:
                commands.append(self._commands.get(timeout=left))
            except queue.Empty:
                return

    def _idle_turn(self) -> bool:
        """A little of what the engine does while nobody waits; a broken promise is said and ends nothing."""
        self._busy_since = time.monotonic()
        try:
            busy = self._engine.idle()
        except GateError as broken:
            log.error("%s", broken)
            busy = True
        self._busy_since = None
        if not busy:
            self._stats = dict(self._engine.stats())
        return busy

    def _admit(self, command: _Submit) -> None:
        refusal = None
        for index, request in enumerate(command.requests):
            try:
                self._engine.submit(request)
            except ValueError as error:
                refusal = error
                self._drop(_Abort(tuple(taken.id for taken in command.requests[:index])))
                break
            self._routes[request.id] = (command.ticket, index)
        self._call(command.ticket.settle, refusal)

    def _drop(self, command: _Abort) -> None:
        for request_id in command.request_ids:
            if request_id in self._routes:
                self._engine.abort(request_id)
                self._aborted = True

    def _tell(self, command: _Watch) -> None:
        if isinstance(self._engine, Watched):
            on_step = command.on_step
            self._engine.watch_steps(None if on_step is None else partial(self._call, on_step))

    def _hand_over(self, events: list[Event], *, began_s: float) -> None:
        """One call into the event loop for all that a step gave."""
        check_answers_end_once(
            events=[(event.request_id, event.finish_reason) for event in events], open_ids=self._routes.keys()
        )
        batch: list[tuple[Ticket, int, Event]] = []
        for event in events:
            route = self._routes.get(event.request_id)
            if route is None:
                continue
            batch.append((*route, event))
            if event.finish_reason is not None:
                del self._routes[event.request_id]
        # Who got a row, where the engine tells; elsewhere, and for an answer that has ended, the first token says so.
        admitted = getattr(self._engine, "last_admitted", ())
        seated = [self._routes[request_id] for request_id in admitted if request_id in self._routes]
        if batch or seated:
            self._call(_deliver, seated, batch, began_s, time.monotonic())

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The event loop is closed: nobody waits for this any more.
            self._leaving = True


def _deliver(
    seated: list[tuple[Ticket, int]], batch: list[tuple[Ticket, int, Event]], began_s: float, ended_s: float
) -> None:
    for ticket, index in seated:
        ticket.start(index, at_s=began_s)
    for ticket, index, event in batch:
        ticket.put(index, event, began_s=began_s, ended_s=ended_s)
