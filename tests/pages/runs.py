"""The runs that pages show: small workloads on the real engine, traced, as frames for the player or as text.

Each run says why it exists. Sizes are small enough to be followed by eye, and odd enough to meet an edge.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fast.engine import Engine
from reference.request import Request, SamplingParams
from serve.trace import attach_trace
from serve.trace_html import frames
from serve.trace_read import TraceReader, TraceStep
from tests.harness import TINY, tiny_engine

CAPTURED: dict[str, Any] = {"bucket_decode": True, "persist_inputs": True, "capture_decode": True, "width_multiple": 16}
Arrivals = Sequence[tuple[int, str, int, int]]  # (step, id, prompt tokens, answer tokens)
Stops = Mapping[str, tuple[int, ...]]


def asked(name: str, prompt: int, answer: int, stops: tuple[int, ...] = ()) -> Request:
    """A seeded request whose answer has exactly `answer` tokens, unless one of `stops` comes before."""
    ids = tuple((3 + 7 * i + 5 * prompt) % 61 for i in range(prompt))
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True, stop_token_ids=stops)
    return Request(ids, params, name)


def traced(arrivals: Arrivals, *, warm: bool = True, stops: Stops | None = None, **switches: Any) -> TraceReader:
    """Run arrivals on a tiny engine to their end and read the trace back; `stops` are token ids by request."""
    sizes: dict[str, Any] = {"max_batch_size": 4, "block_size": 4, "num_blocks": 16, "max_model_len": 48}
    engine = tiny_engine(**(sizes | switches))
    if warm and engine.decode.captured is not None:
        engine.warm_decode()
    path = Path(tempfile.mkdtemp()) / "trace.jsonl"
    attach_trace(engine, path, model="tiny", config=TINY)
    _drive(engine, arrivals, stops or {})
    return TraceReader(path)


def _drive(engine: Engine, arrivals: Arrivals, stops: Stops) -> None:
    step, last = 0, max(at for at, *_ in arrivals)
    while step <= last or engine.has_work:
        for _, name, prompt, answer in (a for a in arrivals if a[0] == step):
            engine.submit(asked(name, prompt, answer, stops.get(name, ())))
        engine.step()
        step += 1


def scheduler() -> TraceReader:
    """Three requests that cannot all grow, and one more: preemption, requeueing, computing again."""
    return traced(
        [(0, "A", 5, 14), (0, "B", 6, 14), (0, "C", 7, 14), (3, "D", 3, 5)], num_blocks=8, compact_rows=True, **CAPTURED
    )


def slots() -> TraceReader:
    """Two rows of different lengths, one step at a time, without padding."""
    return traced([(0, "A", 6, 9), (0, "B", 3, 9)], max_batch_size=2, num_blocks=10)


def buckets() -> TraceReader:
    """Rows come and go and contexts grow, under row buckets 1, 2, 4 and widths of 16."""
    return traced([(0, "A", 5, 26), (2, "B", 9, 6), (4, "C", 4, 12)], num_blocks=20, compact_rows=True, **CAPTURED)


def compact() -> TraceReader:
    """Answer lengths 4, 8, 16, 8 and four more behind them: holes, moves, and every step replayed."""
    lengths = (4, 8, 16, 8, 4, 8, 16, 8)
    return traced(
        [(0, "ABCDEFGH"[i], 4, n) for i, n in enumerate(lengths)], num_blocks=24, compact_rows=True, **CAPTURED
    )


def chunk() -> TraceReader:
    """A long prompt arrives while two rows decode, and a short one behind it: ten tokens a step, shared."""
    arrivals = [(0, "A", 4, 14), (0, "B", 5, 14), (3, "L", 29, 3), (4, "S", 3, 4)]
    return traced(arrivals, num_blocks=24, chunk_tokens=10, compact_rows=True, **CAPTURED)


def prefix() -> TraceReader:
    """Three requests with one prompt: one computes it, one comes while it runs, one when it has ended."""
    arrivals = [(0, "A", 13, 6), (3, "B", 13, 5), (8, "C", 13, 4)]
    return traced(arrivals, prefix_cache=True, chunk_tokens=16, compact_rows=True, **CAPTURED)


def free() -> TraceReader:
    """The run of `compact` with rows that never move."""
    lengths = (4, 8, 16, 8, 4, 8, 16, 8)
    return traced([(0, "ABCDEFGH"[i], 4, n) for i, n in enumerate(lengths)], num_blocks=24, **CAPTURED)


def overlap() -> TraceReader:
    """One answer of three tokens, one that stops where nobody can foresee it, and one that goes on."""
    arrivals = [(0, "A", 3, 3), (0, "B", 6, 12), (0, "C", 4, 9)]
    return traced(arrivals, stops={"C": (18,)}, overlap=True, compact_rows=True, **CAPTURED)


STEPPERS: dict[str, Callable[[], TraceReader]] = {
    "scheduler": scheduler,
    "slots": slots,
    "buckets": buckets,
    "compact": compact,
    "chunk": chunk,
    "prefix": prefix,
}


def stepper(name: str) -> dict[str, Any]:
    """The frames that the player of a page is given."""
    return frames(STEPPERS[name]())


def steps(reader: TraceReader) -> list[TraceStep]:
    """All steps of a trace."""
    return list(reader)
