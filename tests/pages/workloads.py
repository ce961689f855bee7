"""The workloads behind the faults of days 16 to 34: each passes on the sound source, and is stopped by one edit of it.

Each says what it runs. They are small, seeded, and depend on no clock: what stops one says the same on every machine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fast.coverage import coverage
from fast.engine import Engine
from fast.gpu_tasks import checked_tasks
from fast.linear import PackedLinears
from fast.recheck import Recheck
from gates.core import GateError
from reference.request import Request, SamplingParams
from reference.tokenizer import ByteTokenizer
from reference.weights import random_weights
from serve.errors import ApiError
from serve.guide import Guides, GuideSpec
from serve.live import LiveSteps, Viewer
from serve.loop import EngineLoop
from serve.metrics import Metrics
from serve.timeline import Timeline
from serve.tools import CallParser, ToolUse
from serve.trace_read import TraceError, TraceReader
from tests.harness import TINY, tiny_config, tiny_weights
from tests.museum.scenes import OtherTokens, request
from tests.pages import runs

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
LOGGER = logging.getLogger("nanoserve")


class Told(RuntimeError):
    """What the server's log said."""


def mixed_lengths() -> None:
    """Day 16's question, answered: eight rows, sixteen requests of four lengths, on the real scheduler and tables."""
    coverage(rows=8, requests=16, gens=[4, 8, 16, 32])


def packed_layer() -> None:
    """One layer packed for oneDNN, probed, and gated with rows that the probe has not seen."""
    linears = PackedLinears("fp32", max_rows=8)
    linears(torch.arange(16 * 24, dtype=torch.float32).reshape(16, 24).sin(), None)
    linears.settle()


def two_rows_on_kernels() -> None:
    """Two requests that decode side by side, where start-up has compiled for one row."""
    kernels().generate([Request((3, 1, 4), GREEDY, "a"), Request(tuple(range(1, 21)), GREEDY, "b")])


def compiled_layers() -> None:
    """Every piece compiled for every row count, by a backend that counts and compiles nothing."""
    sizes: dict[str, Any] = {"max_batch_size": 2, "num_blocks": 8, "block_size": 4, "max_model_len": 16}
    built = Engine.build(
        TINY, tiny_weights(), **sizes, bucket_decode=True, compile_decode=True, compile_backend="eager"
    )
    built.warm_decode()


def answered_and_checked() -> None:
    """`a` decodes when `b` comes, so one step computes `b`'s prompt and `a`'s token; then `b` is computed alone."""
    engine = kernels()
    engine.recheck = Recheck(engine.forward, engine.cache, every=1)
    engine.submit(Request((3, 1, 4), GREEDY, "a"))
    engine.step()
    engine.submit(Request((2, 7, 1), GREEDY, "b"))
    while engine.has_work:
        engine.step()
    while engine.idle():
        pass


def kernels() -> Engine:
    """A tiny engine on the CPU kernels, on one thread."""
    sizes: dict[str, Any] = {"max_batch_size": 4, "block_size": 16, "num_blocks": 12, "max_model_len": 100}
    return Engine.build(TINY, tiny_weights(), **sizes, kernels=True, threads=1)


def engine_that_dies() -> None:
    """An engine raises in a step, and then somebody asks whether the server takes requests."""
    from tests.server import ScriptedEngine

    async def main() -> None:
        engine = ScriptedEngine()
        loop = EngineLoop(engine)
        loop.start()
        engine.fault = RuntimeError("a bug")
        await asyncio.gather(loop.submit([request("a", 3, 4)]), return_exceptions=True)
        await asyncio.to_thread(loop._thread.join)
        try:
            loop.check_up()
        except ApiError as refused:
            if refused.status != 503:
                raise
        finally:
            await loop.stop(drain_s=0.0)

    with unheard():
        asyncio.run(main())


def longer_than_the_pool() -> None:
    """A model of 256 positions, a pool of 32 tokens, and a prompt of 40."""
    engine = Engine.build(TINY, tiny_weights(), dtype=torch.float64, num_blocks=8, block_size=4, max_batch_size=2)
    try:
        engine.submit(request("long", 40, 4))
    except ValueError:
        return
    for _ in range(20):  # for ever, if nobody says that it will never fit
        engine.step()


def left_before_its_turn() -> None:
    """Two answers: one ends, the other's client leaves while it waits; then somebody reads the metrics."""
    stats = {"kv_tokens": 0, "kv_capacity_tokens": 1}
    metrics = Metrics(model_name="m", stats=lambda: stats, num_open=lambda: 0, up=lambda: True)
    answered, left = Timeline("a", 3, 10.0), Timeline("b", 3, 10.0)
    for timeline in (answered, left):
        metrics.submitted(timeline)
    answered.start(11.0)
    metrics.token(answered, answered.token(12.0))
    for timeline, reason in ((left, "abort"), (answered, "stop")):
        timeline.end(13.0, reason)
        metrics.ended(timeline)
    with unheard() as said:
        metrics.render()
    if said:
        raise Told(said[0])


def traced_and_read() -> None:
    """The run of day 17, traced, and every line of its file read back."""
    try:
        list(TraceReader(runs.compact().path))
    except TraceError as error:
        raise (error.__context__ if isinstance(error.__context__, GateError) else error) from None


def one_guided_of_two() -> None:
    """Two requests decode side by side; only the second is held to a shape."""
    grammar = Guides(ByteTokenizer()).compile(GuideSpec("regex", "(yes|no)"))
    config = tiny_config(vocab_size=259, eos_token_ids=(257,))
    weights = random_weights(config, seed=7, dtype=torch.float64)
    engine = Engine.build(config, weights, dtype=torch.float64, num_blocks=8, block_size=4, max_batch_size=2)
    free, held = (
        Request((3, 1, 4), GREEDY, "free"),
        Request((2, 7, 1), SamplingParams(max_tokens=5, temperature=0.0), "held", grammar),
    )
    [_, answer] = engine.generate([free, held])
    text = bytes(i for i in answer.token_ids if i < 256)
    if text not in (b"yes", b"no"):
        raise OtherTokens(f"the guided answer is {text!r}")


def call_in_two_pieces() -> None:
    """One call, cut within its first mark."""
    parser = CallParser(ToolUse("hermes", frozenset({"weather"})))
    parser.push("Let me see. <tool_")
    parser.push('call>{"name": "weather", "arguments": {}}</tool_call>')
    parser.finish()


def frames_for_a_sleeper() -> None:
    """One viewer that reads nothing, and a frame for each of eight steps."""
    live = LiveSteps(None, boot={})  # type: ignore[arg-type]
    live._viewers |= {Viewer()}
    for number in range(8):
        live.offer(b"%d" % number)


def tiled_prefill() -> None:
    """Two chunks, the second behind a prefix of twelve tokens, in tiles of five tokens."""
    checked_tasks([(0, 9, 0), (12, 7, 9)], group=3, tile=16)


@contextmanager
def unheard() -> Iterator[list[str]]:
    """Keep the server's log to ourselves, and give what it said."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    propagates, LOGGER.propagate = LOGGER.propagate, False
    LOGGER.addHandler(handler)
    try:
        yield said
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.propagate = propagates
