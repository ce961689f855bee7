"""What a decode step costs on the host beside the forward and the sampler: schedule, plan, inputs, bookkeeping, gates.

Run: `python -m pytest tests/bench/bench_plan.py --benchmark-enable --benchmark-only`. The engine is the real one with
the server's switches, over a model that answers at once. The work is flat in the context, which is exact (the
bytecodes of a step are counted and equal), and linear in the rows; the clock is this machine's. The honest part: a step
has a constant of about 100 microseconds, so a small batch pays more for each row than a large one.
"""

from __future__ import annotations

from functools import cache

import pytest

from fast.engine import Engine
from gates.core import at_level
from serve.machine import machine
from tests.hostwork import decoding, fixed_sampler, work_of

ROUNDS, COUNTED = 40, 17
SHORT = 64


@pytest.mark.parametrize("context", [SHORT, 1024, 4096])
@pytest.mark.parametrize("level", ["cheap", "off"])
@pytest.mark.parametrize("rows", [8, 64, 256])
def bench_host_work_of_a_step(benchmark, rows: int, level: str, context: int):
    work = counted(SHORT, level)
    assert counted(context, level) == work, "host work is to be flat in the context"
    engine = loaded(rows, context)
    with at_level(level), fixed_sampler():
        benchmark.pedantic(engine.step, rounds=ROUNDS, warmup_rounds=4)
    stats = engine.stats()
    assert stats["replayed"] == stats["decode_steps"] > 0
    benchmark.group = f"host work of a decode step, {rows} rows"
    benchmark.extra_info.update(
        rows=rows,
        context=context,
        gates=level,
        bytecodes_of_a_step_of_8_rows=work // COUNTED,
        replay_share=stats["replayed"] / stats["decode_steps"],
        row_padding_share=stats["row_padding_share"],
        **machine(),
    )
    if benchmark.stats is not None:  # timed
        for name in ("min", "median"):
            benchmark.extra_info[f"us_per_row_{name}"] = round(getattr(benchmark.stats.stats, name) * 1e6 / rows, 2)


@pytest.mark.parametrize("waiting", [10, 10_000])
def bench_host_work_before_a_queue(benchmark, waiting: int):
    """A step of eight rows with a queue behind them that finds no row."""
    engine = loaded(8, SHORT, waiting=waiting)
    with at_level("cheap"), fixed_sampler():
        benchmark.pedantic(engine.step, rounds=ROUNDS, warmup_rounds=4)
    assert engine.stats()["waiting"] == waiting
    benchmark.group = "host work of a decode step, 8 rows, before a queue"
    benchmark.extra_info.update(waiting=waiting, **machine())


def loaded(rows: int, context: int, waiting: int = 0) -> Engine:
    with at_level("cheap"):
        return decoding(rows=rows, context=context, steps=ROUNDS + COUNTED, waiting=waiting)


@cache
def counted(context: int, level: str) -> int:
    """Bytecodes and C calls of `COUNTED` steps of eight rows."""
    engine = loaded(8, context)
    with at_level(level):
        return sum(work_of(engine, COUNTED).values())
