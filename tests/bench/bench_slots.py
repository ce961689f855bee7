"""What a decode step's addressing costs: rebuilt every step, read as a window, or gathered from scattered rows.

Run: `python -m pytest tests/bench/bench_slots.py --benchmark-enable --benchmark-only`. Cells are exact and the same
on every machine; the clock is this machine's. At 512 steps the window arm writes 264 times fewer cells than the
rebuild and is far from 264 times faster: what is left is O(rows) Python with a fat constant, and short runs have to
pay for mirroring the prompts once.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import pytest
import torch

from fast.plan import plan_decode
from fast.slots import SlotTable, rebuild_mapping
from gates.core import at_level
from tests.addressing import Paged

ROWS, PROMPT = 4, 16
RUNS = {8: (656, 96), 64: (12_416, 320), 128: (41_216, 576), 512: (558_080, 2_112)}


def filled(steps: int, rows: int = ROWS) -> Paged:
    """Prompts in place and blocks for the whole run, so that an arm times addressing and nothing else."""
    paged = Paged(2 * rows, PROMPT + steps, block_size=16)
    for row in range(2 * rows):
        paged.adopt(row, PROMPT)
        paged.reserve(row, PROMPT + steps)
    return paged


def run_rebuild(paged: Paged, rows: tuple[int, ...], steps: int) -> tuple[torch.Tensor, int]:
    """Grow every row by one and build the rectangle anew; returns the last rectangle and the cells written."""
    cells = 0
    for _ in range(steps):
        for row in rows:
            paged.tables[row].append()
        mapping, _ = rebuild_mapping(paged.tables, rows)
        cells += mapping.numel()
    return mapping, cells


def run_table(paged: Paged, rows: tuple[int, ...], steps: int) -> tuple[torch.Tensor, int]:
    """The same run through a slot table: sync, append, read."""
    table: SlotTable = paged.slots
    for _ in range(steps):
        table.sync(paged.tables, rows)
        table.append(rows, [paged.tables[row].append() for row in rows])
        mapping, _ = table.read(rows, max(table.lengths(rows)))
    return mapping, table.written_cells


ARMS: dict[str, tuple[Callable[..., tuple[torch.Tensor, int]], tuple[int, ...]]] = {
    "rebuild": (run_rebuild, (0, 1, 2, 3)),
    "window": (run_table, (0, 1, 2, 3)),
    "gather": (run_table, (0, 2, 4, 6)),
}


@pytest.mark.parametrize("steps", RUNS)
@pytest.mark.parametrize("arm", ARMS)
def test_addressing(benchmark, steps: int, arm: str):
    run, rows = ARMS[arm]
    # Correct first: this arm's last rectangle is what the block tables say, and its cells are the exact figure.
    paged = filled(steps)
    mapping, cells = run(paged, rows, steps)
    assert torch.equal(mapping, rebuild_mapping(paged.tables, rows)[0])
    assert cells == RUNS[steps][arm != "rebuild"]
    assert paged.slots.window_share == (0.0 if arm == "gather" else 1.0)
    benchmark.group = f"addressing, {steps} steps"
    benchmark.extra_info.update(
        cells_written=cells,
        cells_rebuilt=RUNS[steps][0],
        windows=paged.slots.windows,
        gathers=paged.slots.gathers,
        rows=len(rows),
        prompt_tokens=PROMPT,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        machine=platform.processor() or platform.machine(),
    )
    benchmark.pedantic(run, setup=lambda: ((filled(steps), rows, steps), {}), rounds=5)


@pytest.mark.parametrize("context", [64, 1024, 4096])
@pytest.mark.parametrize("rows", [8, 64, 256])
def test_plan_host_work(benchmark, rows: int, context: int):
    """Host work of one `plan_decode`, gates at the server's level: flat in the context, linear in the rows."""
    steps = 64
    paged = Paged(rows, context + steps, block_size=16)
    for row in range(rows):
        paged.adopt(row, context)
        paged.reserve(row, context + steps)
    everyone, ids = tuple(range(rows)), [1] * rows

    def step() -> torch.Tensor:
        return plan_decode(
            tables=paged.tables, slot_table=paged.slots, rows=everyone, input_ids=ids, sink_slot=paged.sink
        ).slot_mapping

    first = step()
    assert first[-1].tolist() == paged.truth(rows - 1)
    with at_level("cheap"):
        benchmark.group = f"plan_decode, {rows} rows"
        benchmark.extra_info.update(rows=rows, context=context, resident_tokens=rows * context)
        benchmark.pedantic(step, rounds=steps - 8, warmup_rounds=4)
    assert paged.slots.written_cells - rows * context == paged.slots.appended_cells
