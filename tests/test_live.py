"""The live picture is the engine's true state, whenever a viewer joins, and a viewer costs nobody else anything."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from fast.engine import Engine
from gates import GateError
from gates.live import check_viewers_bounded
from reference.request import Event, Request, SamplingParams
from serve.live import MAX_VIEWERS, VIEWER_FRAMES, LiveSteps, Picture, Viewer
from serve.trace import attach_trace
from serve.trace_read import TraceReader
from tests.harness import TINY, tiny_engine
from tests.server import MODEL, Served, eventually, make_engine, serving


def small_engine(**limits: Any) -> Engine:
    return tiny_engine(max_batch_size=4, block_size=4, num_blocks=24, max_model_len=32, **limits)


def submit(engine: Engine, name: str, *, prompt: int = 5, gen: int = 6) -> None:
    params = SamplingParams(max_tokens=gen, ignore_eos=True, temperature=0.0)
    engine.submit(Request(tuple(range(3, 3 + prompt)), params, name))


def truth(engine: Engine) -> tuple[dict[int, str], dict[int, tuple[int, ...]], int, int]:
    """Rows, their blocks, free blocks and queue, asked of the engine itself."""
    running = engine.scheduler.running
    blocks = {row: tuple(engine.cache.tables[row].blocks) for row in running}
    rows = {row: sequence.request.id for row, sequence in running.items()}
    return rows, blocks, engine.cache.allocator.num_free, len(engine.scheduler.waiting)


def shown(picture: Picture, engine: Engine) -> tuple[dict[int, str], dict[int, tuple[int, ...]], int, int]:
    frame = picture.frame(engine.stats())
    return frame["rows"], frame["blocks"], frame["free_blocks"], frame["waiting"]


class Slow:
    """An engine whose steps take a while."""

    def __init__(self, engine: Engine, step_s: float = 0.01) -> None:
        self._engine, self._step_s = engine, step_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def watch_steps(self, on_step: Any) -> None:
        self._engine.watch_steps(on_step)

    def step(self) -> list[Event]:
        time.sleep(self._step_s)
        return self._engine.step()


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("joins_at", [0, 1, 3, 7])
@pytest.mark.parametrize("compact", [True, False])
def test_the_picture_is_the_engines_state_whenever_one_joins(joins_at: int, compact: bool):
    engine, picture = small_engine(compact_rows=compact), Picture(num_blocks=24)
    for index, gen in enumerate((3, 9, 5, 7, 4, 8)):
        submit(engine, f"r{index}", gen=gen)
    for step in range(40):
        if step == joins_at:
            engine.watch_steps(picture.add)
        if step == 9:
            engine.abort("r1")
            submit(engine, "late", gen=3)
        engine.step()
        if step >= joins_at:
            assert shown(picture, engine) == truth(engine), step
    assert not engine.has_work
    assert shown(picture, engine) == ({}, {}, 24, 0)


def test_the_same_blocks_handed_to_the_next_tenant_are_shown():
    engine, picture = small_engine(), Picture(num_blocks=24)
    engine.watch_steps(picture.add)
    for name in ("first", "second"):  # the freed blocks are the next ones handed out
        submit(engine, name, prompt=4, gen=1)
        submit(engine, name + "-long", prompt=4, gen=3)
        while engine.has_work:
            engine.step()
            assert shown(picture, engine) == truth(engine)


def test_a_viewer_and_a_trace_do_not_see_each_other(tmp_path: Path):
    engine, picture = small_engine(compact_rows=True), Picture(num_blocks=24)
    attach_trace(engine, tmp_path / "t.jsonl", model="tiny", config=TINY)
    for index, gen in enumerate((3, 9, 5, 7)):
        submit(engine, f"r{index}", gen=gen)
    for step in range(12):
        if step in (2, 6):
            engine.watch_steps(picture.add)
        if step in (4, 9):
            engine.watch_steps(None)
        engine.step()
    engine.record_steps(None)
    steps = list(TraceReader(tmp_path / "t.jsonl"))  # its gates compare every line with those before
    assert [step.step for step in steps] == list(range(1, 13))
    assert engine.listeners.recorder is None


def test_tokens_counts_moves_and_buckets_are_told():
    engine, picture = small_engine(compact_rows=True, bucket_decode=True), Picture(num_blocks=24)
    engine.watch_steps(picture.add)
    for index, gen in enumerate((2, 6)):
        submit(engine, f"r{index}", gen=gen)
    for _ in range(4):
        engine.step()
    frame = picture.frame(engine.stats())
    assert frame["rows"] == {0: "r1"}
    assert frame["tokens"] == {0: 5 + 4}
    assert [step["step"] for step in frame["steps"]] == [1, 2, 3, 4]
    assert [step["moves"] for step in frame["steps"]] == [(), (), ((1, 0),), ()]
    assert sum(eager for *_, eager in frame["buckets"]) == 3 == frame["totals"]["decode_steps"]
    assert picture.frame(engine.stats())["steps"] == []


def test_a_step_that_also_computes_a_prompt_is_in_no_bucket():
    engine, picture = small_engine(bucket_decode=True), Picture(num_blocks=24)
    engine.mixed_steps = True
    engine.watch_steps(picture.add)
    for name in ("a", "b"):
        submit(engine, name, gen=6)
        engine.step()
    engine.step()
    frame = picture.frame(engine.stats())
    assert [(step["prefills"], step["decode"]) for step in frame["steps"]] == [(1, 0), (1, 1), (0, 2)]
    assert sum(eager for *_, eager in frame["buckets"]) == 1 == frame["totals"]["decode_steps"]


def test_frames_arrive_over_http_and_recording_ends_with_the_last_viewer():
    engine = small_engine(compact_rows=True)
    with serving(Slow(engine, 0.03)) as served:  # a step takes so long that frames fall into an answer
        with served.http.stream("GET", "/steps") as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            lines = (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {"))
            assert next(lines)["shape"] == {"rows": 4, "blocks": 24, "block_size": 4}
            assert next(lines)["rows"] == {}
            for gen in (4, 20, 9):
                served.http.post(
                    "/v1/completions", json={"model": MODEL, "prompt": [3, 4, 5], "max_tokens": gen, "ignore_eos": True}
                )
            frames = []
            for frame in lines:
                frames.append(frame)
                if frame["totals"]["decode_steps"] >= 3 + 19 + 8 and not frame["rows"]:
                    break
        assert any(list(frame["rows"]) == ["0"] for frame in frames)
        assert frames[-1]["free_blocks"] == 24
        eventually(lambda: engine.listeners.recorder is None)


def test_a_viewer_that_does_not_read_misses_frames_and_nothing_else():
    async def main() -> None:
        viewer, fast = Viewer(), Viewer()
        for number in range(VIEWER_FRAMES + 3):
            viewer.offer(b"%d" % number)
        viewer.end()
        got = [data async for data in viewer.frames()]
        assert got[:-1] == [b"%d" % number for number in range(VIEWER_FRAMES)]
        assert json.loads(got[-1].removeprefix(b"data: ")) == {"skipped": 3}
        assert fast.skipped == 0

    asyncio.run(main())


def test_a_viewer_that_never_reads_holds_up_no_request():
    with serving(make_engine("fast")) as served:
        idle = socket.create_connection(("127.0.0.1", served.port))
        idle.sendall(b"GET /steps HTTP/1.1\r\nhost: x\r\n\r\n")
        try:
            for _ in range(3):
                reply = served.post(prompt="ab", max_tokens=50, ignore_eos=True)
                assert reply.json()["usage"]["completion_tokens"] == 50
        finally:
            idle.close()


# ---- rejects ----------------------------------------------------------------------------------------------------


class Hoarder(Viewer):
    """A viewer for whom every frame is kept."""

    def offer(self, frame: bytes) -> None:
        self._waiting.append(frame)
        self._arrival.set()


def test_gate_rejects_a_viewer_whose_frames_wait_without_bound():
    live = LiveSteps(None, boot={})  # type: ignore[arg-type]
    live._viewers |= {Hoarder()}
    for number in range(VIEWER_FRAMES):
        live.offer(b"%d" % number)
    with pytest.raises(GateError, match=r"live\.viewers_bounded: 5 frames wait for viewer 0, at most 4 are kept"):
        live.offer(b"one more")
    with pytest.raises(GateError, match="5 frames wait for viewer 1"):
        check_viewers_bounded(waiting=(4, 5), most=VIEWER_FRAMES)


def test_an_engine_without_records_says_so():
    with serving(make_engine("reference")) as served:
        reply = served.http.get("/steps")
        assert (reply.status_code, reply.json()["error"]["code"]) == (501, "not_recorded")


def test_viewers_are_bounded():
    with serving(make_engine("fast")) as served:
        streams = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(MAX_VIEWERS)]
        for stream in streams:
            stream.sendall(b"GET /steps HTTP/1.1\r\nhost: x\r\n\r\n")
        for stream in streams:
            assert stream.recv(12) == b"HTTP/1.1 200"
        refused = served.http.get("/steps")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
        for stream in streams:
            stream.close()
        eventually(lambda: _is_free(served))


def _is_free(served: Served) -> bool:
    with served.http.stream("GET", "/steps") as reply:
        return reply.status_code == 200
