"""The coverage table: how much of a decode loop a recording replays, and what each way to get there costs.

Run: `python -m pytest tests/bench/bench_coverage.py --benchmark-enable --benchmark-only`. Three arms drive the same
schedule through the real scheduler and tables: `free` leaves rows in place and loses the scattered steps, `persistent`
moves survivors down, `gather` copies every step's rows into one fixed buffer. Counts are exact and the same on every
machine; the clock is host work alone, and on it the arms hardly differ. What they differ in is what a scattered step
costs a device, which no clock of a CPU shows.
"""

from __future__ import annotations

import pytest

from fast.coverage import coverage
from gates.core import at_level
from serve.machine import machine

ARMS = {
    "free": {"compact_rows": False},
    "persistent": {"compact_rows": True},
    "gather": {"compact_rows": False, "gather_rows": True},
}
# rows, requests, generated lengths dealt round robin: decode steps, replayed by free rows, moves, moved cells
WORKLOADS = {
    (4, 8, (16,)): (30, 30, 0, 0),
    (4, 8, (8, 16)): (31, 21, 3, 33),
    (4, 8, (4, 32)): (43, 36, 5, 95),
    (8, 16, (16,)): (30, 30, 0, 0),
    (8, 16, (8, 16)): (31, 14, 6, 66),
    (8, 16, (4, 32)): (47, 35, 11, 217),
    (8, 16, (4, 8, 16, 32)): (47, 12, 8, 80),
    (16, 32, (4, 32)): (51, 34, 23, 461),
}


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(("rows", "requests", "gens"), WORKLOADS)
def bench_coverage(benchmark, rows: int, requests: int, gens: tuple[int, ...], arm: str):
    steps, free_replayed, moves, cells = WORKLOADS[rows, requests, gens]
    workload = {"rows": rows, "requests": requests, "gens": gens, "prompt_tokens": 4}
    result = coverage(**workload, **ARMS[arm])
    # The schedule is one; only where its rows sit, and what was copied to keep them at one address, differ.
    assert result.decode_steps == steps
    assert result.replayed == (free_replayed if arm == "free" else steps)
    assert result.moves == (moves if arm == "persistent" else 0)
    if arm != "gather":
        assert result.cells == (cells if arm == "persistent" else 0)
    else:
        assert result.cells > cells, "a gather copies every row in every step"
    benchmark.group = f"{requests} requests of {'/'.join(map(str, gens))} tokens over {rows} rows"
    benchmark.extra_info.update(
        decode_steps=result.decode_steps,
        replayed=result.replayed,
        scattered=result.scattered,
        replay_share=result.share,
        moves=result.moves,
        cells=result.cells,
        gates="cheap",
        **machine(),
    )
    with at_level("cheap"):
        timed = benchmark.pedantic(coverage, kwargs=workload | ARMS[arm], rounds=5)
    assert timed == result
