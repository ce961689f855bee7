"""What it costs to keep a decode step's addressing at one address: move rows, gather them, or give the address up.

Run: `python -m pytest tests/bench/bench_compact.py --benchmark-enable --benchmark-only`. Three arms drive the same
requests: `free` leaves rows where they are and reads a fresh copy after the first early finish, `compact` moves
survivors down, `gather` copies every step's rows into one fixed buffer. The clock is host addressing alone, which is
not where the arms differ most: a step of the `free` arm that is not at the address cannot be replayed at all.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from fast.compact import MODES, RowCompactor, RowMove, move_cells
from gates.core import at_level
from tests.addressing import Paged

PROMPT = 4
# rows, requests, generated lengths dealt round robin: (decode steps, steps that free rows replay, moves, cells)
WORKLOADS = {
    (4, 8, (16,)): (30, 30, 0, 0),
    (4, 8, (8, 16)): (31, 21, 3, 33),
    (8, 16, (4, 32)): (47, 35, 11, 217),
    (8, 16, (4, 8, 16, 32)): (47, 12, 8, 80),
    (16, 32, (4, 32)): (51, 34, 23, 461),
}


@dataclass
class Run:
    """One arm's requests, driven to their end over real tables; what it counted on the way."""

    mode: str
    rows: int
    waiting: list[tuple[int, int]]  # (id, tokens still to generate), next last
    steps: int = 0
    replayed: int = 0
    cells: int = 0
    answers: dict[int, list[int]] = field(default_factory=dict)  # id: how far each of its tokens is into its row

    def __post_init__(self) -> None:
        self.longest = PROMPT + max(left for _, left in self.waiting)
        self.paged = Paged(self.rows, self.longest, block_size=4, gather=self.mode == "gather")
        self.running: dict[int, tuple[int, int]] = {}
        self.free = list(range(self.rows))
        self.compactor = RowCompactor(self.mode, on_move=self.move)

    def move(self, move: RowMove) -> None:
        self.cells += move_cells([move], [table.length for table in self.paged.tables])
        self.paged.move(move.src, move.dst)
        self.running[move.dst] = self.running.pop(move.src)

    def step(self) -> None:
        """Compact, admit, decode: a newcomer's first token is its prefill's."""
        if self.compactor.compact(sorted(self.running)):
            self.free = [row for row in range(self.rows) if row not in self.running]
        decoding = sorted(self.running)
        while self.waiting and self.free:
            row, (name, left) = heapq.heappop(self.free), self.waiting.pop()
            self.paged.adopt(row, PROMPT)
            self.running[row], self.answers[name] = (name, left - 1), []
        if decoding:
            plan = self.paged.plan(decoding)
            self.steps += 1
            self.replayed += self.paged.slots.is_window(plan.slot_mapping)
            for line, row in enumerate(decoding):
                name, left = self.running[row]
                self.running[row] = (name, left - 1)
                self.answers[name].append(self.paged.truth(row).index(int(plan.write_slots[line])))
        for row in [row for row, (_, left) in self.running.items() if not left]:
            del self.running[row]
            self.paged.release(row)
            heapq.heappush(self.free, row)

    def to_the_end(self) -> Run:
        while self.waiting or self.running:
            self.step()
        return self


def fresh(mode: str, rows: int, requests: int, gens: Sequence[int]) -> Run:
    return Run(mode, rows, [(name, gens[name % len(gens)]) for name in reversed(range(requests))])


@pytest.mark.parametrize(("rows", "requests", "gens"), WORKLOADS)
@pytest.mark.parametrize("mode", MODES)
def test_arm(benchmark, mode: str, rows: int, requests: int, gens: tuple[int, ...]):
    steps, free_replayed, moves, cells = WORKLOADS[rows, requests, gens]
    # Correct first: all arms decode the same tokens of the same requests, and the counts are the exact figures.
    arms = {each: fresh(each, rows, requests, gens).to_the_end() for each in MODES}
    run = arms[mode]
    assert all(arm.answers == run.answers for arm in arms.values())
    assert run.steps == steps
    assert run.replayed == (free_replayed if mode == "free" else steps)
    assert (run.compactor.moves, run.cells) == ((moves, cells) if mode == "compact" else (0, 0))
    benchmark.group = f"{requests} requests of {'/'.join(map(str, gens))} tokens over {rows} rows"
    benchmark.extra_info.update(
        decode_steps=run.steps,
        replayed=run.replayed,
        replay_share=run.replayed / run.steps,
        moves=run.compactor.moves,
        moved_cells=run.cells,
        windows=run.paged.slots.windows,
        gathers=run.paged.slots.gathers,
        compactor=run.compactor.render(),
    )
    with at_level("cheap"):
        benchmark.pedantic(Run.to_the_end, setup=lambda: ((fresh(mode, rows, requests, gens),), {}), rounds=5)
