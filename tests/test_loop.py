"""The engine thread: answers end once, nobody waits for a dead or hung engine, and aborts leave nothing behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gates import GateError
from reference.request import Request, SamplingParams
from serve.errors import ApiError
from serve.loop import EngineLoop
from serve.ticket import Ticket
from tests.server import ScriptedEngine, says

WITHIN_S = 10.0


def request(id: str, *, max_tokens: int = 4) -> Request:
    return Request((1, 2, 3), SamplingParams(max_tokens=max_tokens), id)


@asynccontextmanager
async def running(engine: ScriptedEngine, **options) -> AsyncIterator[EngineLoop]:
    loop = EngineLoop(engine, **options)
    loop.start()
    try:
        yield loop
    finally:
        await asyncio.wait_for(loop.stop(drain_s=0.01), WITHIN_S)


async def until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not fact():
        assert time.monotonic() < deadline, f"not so within {WITHIN_S} seconds"
        await asyncio.sleep(0.002)


async def everything(ticket: Ticket) -> list[tuple[int, int | None, str | None]]:
    """All events of a ticket until its answers have ended."""
    seen = []
    # An answer may end while its last events are still to be taken.
    while ticket.num_open or ticket._events:
        for index, event in await asyncio.wait_for(ticket.take(), WITHIN_S):
            seen.append((index, event.token_id, event.finish_reason))
    return seen


def idle(loop: EngineLoop) -> bool:
    return loop.num_open == 0 and not any(loop.stats[name] for name in ("running", "waiting", "kv_tokens"))


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", [1, 3, 7])
def test_every_answer_gets_its_events_in_order_and_ends_once(answers: int):
    async def main() -> None:
        async with running(ScriptedEngine(says(b"abc"))) as loop:
            ticket = await loop.submit([request(f"r{i}", max_tokens=3) for i in range(answers)])
            seen = await everything(ticket)
            for index in range(answers):
                assert [s[1:] for s in seen if s[0] == index] == [(97, None), (98, None), (99, "length")]
            await until(lambda: idle(loop))

    asyncio.run(main())


def test_a_step_crosses_to_the_event_loop_in_one_call():
    async def main() -> None:
        engine = ScriptedEngine(paused=True)
        async with running(engine) as loop:
            tickets = [await loop.submit([request(f"r{i}", max_tokens=5)]) for i in range(8)]
            calls = 0
            plain = loop._call

            def counted(*arguments) -> None:
                nonlocal calls
                calls += 1
                plain(*arguments)

            loop._call = counted  # type: ignore[method-assign]
            engine.paused = False
            await asyncio.gather(*(everything(ticket) for ticket in tickets))
            assert calls == 5

    asyncio.run(main())


def test_a_reader_that_never_reads_holds_up_nobody():
    async def main() -> None:
        async with running(ScriptedEngine()) as loop:
            silent = await loop.submit([request("silent", max_tokens=200)])
            other = await loop.submit([request("other", max_tokens=200)])
            assert len(await everything(other)) == 200
            await until(lambda: silent.num_open == 0)
            assert len(await everything(silent)) == 200

    asyncio.run(main())


def test_an_abort_frees_the_engine_without_further_traffic():
    async def main() -> None:
        engine = ScriptedEngine(max_running=20, paused=False)
        async with running(engine) as loop:
            tickets = [await loop.submit([request(f"r{i}", max_tokens=250)]) for i in range(3)]
            engine.paused = True
            tickets += [await loop.submit([request(f"p{i}", max_tokens=250)]) for i in range(22)]
            for ticket in tickets:
                ticket.close()
            await until(lambda: not engine.has_work and idle(loop))

    asyncio.run(main())


def test_closing_twice_or_after_the_end_changes_nothing():
    async def main() -> None:
        engine = ScriptedEngine(says(b"a"))
        async with running(engine) as loop:
            ticket = await loop.submit([request("r", max_tokens=1)])
            await everything(ticket)
            ticket.finish(0)
            ticket.close()
            ticket.close()
            await everything(await loop.submit([request("r", max_tokens=1)]))

    asyncio.run(main())


def test_stopping_lets_open_answers_end_and_takes_no_new_ones():
    async def main() -> None:
        engine = ScriptedEngine(paused=True)
        loop = EngineLoop(engine)
        loop.start()
        ticket = await loop.submit([request("r", max_tokens=4)])
        stopping = asyncio.create_task(loop.stop(drain_s=WITHIN_S))
        await until(lambda: loop.status == "stopping")
        with pytest.raises(ApiError) as refused:
            await loop.submit([request("late")])
        assert refused.value.status == 503
        engine.paused = False
        assert len(await everything(ticket)) == 4
        await asyncio.wait_for(stopping, WITHIN_S)

    asyncio.run(main())


def test_answers_that_outlast_the_drain_end_with_an_error():
    async def main() -> None:
        engine = ScriptedEngine(paused=True)
        async with running(engine) as loop:
            ticket = await loop.submit([request("r")])
        with pytest.raises(ApiError, match="shutting down"):
            await ticket.take()
        assert not engine.has_work

    asyncio.run(main())


@pytest.mark.parametrize("preparing", [0, 1, 3])
def test_an_idle_engine_takes_what_is_being_prepared_with_what_has_come(preparing: int):
    loop, coming = EngineLoop(ScriptedEngine()), deque(["second", "third", "fourth"])

    def get(*, timeout: float) -> object:
        loop._reserved -= 1
        return coming.popleft()

    loop._reserved, loop._commands = preparing, SimpleNamespace(get=get)
    taken = ["first"]
    loop._gather(taken)
    assert taken == ["first", "second", "third", "fourth"][: 1 + preparing]


def test_an_answer_that_is_prepared_for_long_is_not_waited_for():
    async def main() -> None:
        async with running(ScriptedEngine()) as loop:
            with loop.reserve(1):
                assert len(await everything(await loop.submit([request("a")]))) == 4

    asyncio.run(main())


def test_what_can_wait_is_done_while_nobody_waits_and_a_broken_promise_ends_nothing(caplog):
    left = [None, GateError("recheck.rerun", "request a, answer token 0: other bits"), None]
    engine = ScriptedEngine()

    def idle() -> bool:
        if left and (broken := left.pop()) is not None:
            raise broken
        return bool(left)

    engine.idle = idle

    async def main() -> None:
        async with running(engine) as loop:
            await until(lambda: not left)
            assert await everything(await loop.submit([request("a")]))
            assert loop.status == "ok"

    asyncio.run(main())
    assert "gate recheck.rerun: request a, answer token 0: other bits" in caplog.text


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_a_refused_submission_takes_nothing_of_its_batch():
    async def main() -> None:
        engine = ScriptedEngine(paused=True)
        async with running(engine) as loop:
            with pytest.raises(ValueError, match="length limit is 256"):
                await loop.submit([request("good"), request("good-too"), request("long", max_tokens=254)])
            await until(lambda: not engine.has_work and idle(loop))

    asyncio.run(main())


def test_a_dead_engine_fails_what_is_open_and_refuses_what_is_new():
    async def main() -> None:
        engine, told = ScriptedEngine(max_running=2, paused=True), []
        async with running(engine, on_death=told.append) as loop:
            tickets = [await loop.submit([request(f"r{i}")]) for i in range(3)]
            engine.fault = RuntimeError("boom")
            for ticket in tickets:
                with pytest.raises(ApiError) as failed:
                    await asyncio.wait_for(ticket.take(), WITHIN_S)
                assert failed.value.status == 500
                assert "boom" not in failed.value.message
            with pytest.raises(ApiError) as refused:
                await loop.submit([request("late")])
            assert (refused.value.status, loop.status) == (503, "dead")
            assert told == [engine.fault]
            assert idle(loop)

    asyncio.run(main())


def test_a_hung_engine_fails_what_is_open_and_recovers_when_it_returns():
    async def main() -> None:
        engine = ScriptedEngine(paused=True)
        async with running(engine, stuck_after_s=0.1) as loop:
            ticket = await loop.submit([request("r")])
            engine.hang = threading.Event()
            with pytest.raises(ApiError, match="does not answer"):
                await asyncio.wait_for(ticket.take(), WITHIN_S)
            with pytest.raises(ApiError) as refused:
                await loop.submit([request("late")])
            assert (refused.value.status, loop.status) == (503, "stuck")
            hang, engine.hang, engine.paused = engine.hang, None, False
            hang.set()
            await until(lambda: loop.status == "ok" and not engine.has_work)
            assert len(await everything(await loop.submit([request("next")]))) == 4

    asyncio.run(main())


def test_a_submission_in_flight_when_the_engine_dies_is_told():
    async def main() -> None:
        engine = ScriptedEngine(paused=True)
        async with running(engine, stuck_after_s=WITHIN_S) as loop:
            first = await loop.submit([request("r")])
            engine.hang = threading.Event()
            second = asyncio.create_task(loop.submit([request("s")]))
            await asyncio.sleep(0)
            engine.fault = RuntimeError("boom")
            engine.hang.set()
            with pytest.raises(ApiError):
                await asyncio.wait_for(first.take(), WITHIN_S)
            with pytest.raises(ApiError):
                await (await asyncio.wait_for(second, WITHIN_S)).take()

    asyncio.run(main())


def test_more_answers_than_the_limit_are_refused_for_now():
    async def main() -> None:
        async with running(ScriptedEngine(paused=True), max_open=3) as loop:
            await loop.submit([request("a"), request("b")])
            with pytest.raises(ApiError) as full:
                await loop.submit([request("c"), request("d")])
            assert (full.value.status, full.value.headers) == (429, {"retry-after": "1"})
            await loop.submit([request("e")])
            with pytest.raises(ApiError) as never:
                await loop.submit([request(f"n{i}") for i in range(4)])
            assert never.value.status == 400

    asyncio.run(main())


# ---- any order --------------------------------------------------------------------------------------------------

jobs = st.lists(
    st.tuples(
        st.lists(st.integers(1, 12), min_size=1, max_size=3),  # max_tokens of each answer
        st.sampled_from(["read", "close", "abort_one", "close_later"]),
    ),
    min_size=1,
    max_size=8,
)


@given(jobs=jobs, max_running=st.integers(1, 4))
def test_whatever_clients_do_every_answer_ends_once_and_the_engine_is_empty(jobs, max_running: int):
    async def client(loop: EngineLoop, number: int, sizes: list[int], habit: str) -> None:
        ticket = await loop.submit([request(f"{number}-{i}", max_tokens=size) for i, size in enumerate(sizes)])
        if habit == "close":
            return ticket.close()
        if habit == "close_later":
            await ticket.take()
            return ticket.close()
        aborted = habit == "abort_one" and len(sizes) > 1
        if aborted:
            ticket.finish(0)
        seen = await everything(ticket)
        for index, size in enumerate(sizes):
            reasons = [reason for i, _, reason in seen if i == index]
            if index or not aborted:
                assert reasons == [None] * (size - 1) + ["length"]
            else:
                assert len(reasons) <= size

    async def main() -> None:
        engine = ScriptedEngine(max_running=max_running)
        async with running(engine) as loop:
            await asyncio.gather(*(client(loop, n, sizes, habit) for n, (sizes, habit) in enumerate(jobs)))
            await until(lambda: idle(loop) and not engine.has_work)
            assert loop._routes == {}

    asyncio.run(main())
