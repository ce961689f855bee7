"""What a GPU's prefill hands out covers every token once; no card and no Triton is needed to say so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast.gpu_tasks import TASK_FIELDS, checked_tasks, plan_tasks
from gates import GateError
from gates.gpu import check_tasks_cover

CHUNKS = [(4, 9, 0), (0, 1, 13), (7, 5, 14)]  # (position, tokens, where the table begins)


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "tile", "most"), [(3, 16, 5), (4, 16, 4), (1, 64, 64), (32, 16, 1)])
def test_tasks_are_as_many_as_tiles(group: int, tile: int, most: int):
    tasks = checked_tasks(CHUNKS, group=group, tile=tile)
    assert tasks.shape == (sum(-(-tokens // most) for _, tokens, _ in CHUNKS), TASK_FIELDS)


def test_nothing_to_compute_is_no_task():
    assert checked_tasks([], group=3, tile=16).shape == (0, TASK_FIELDS)


# ---- rejects ----------------------------------------------------------------------------------------------------

FAULTS = {
    "a tile that begins where its chunk did": (1, (5, 4, 4, 0), r"task 1 is .* \(5, 4, 0\), the next is \(5, 9, 0\)"),
    "a tile of the next chunk's table": (1, (5, 4, 9, 13), r"\(5, 9, 13\), the next is \(5, 9, 0\)"),
    "a tile past its chunk's end": (1, (5, 5, 9, 0), "task 1 holds 5 tokens, 1 to 4 are left and fit a tile"),
    "a tile of nothing": (0, (0, 0, 4, 0), "task 0 holds 0 tokens, 1 to 5 are left"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_gate_rejects_a_task_that_is_not_the_next(fault: str):
    index, task, said = FAULTS[fault]
    tasks = plan_tasks(CHUNKS, group=3, tile=16).tolist()
    tasks[index] = task
    with pytest.raises(GateError, match=said):
        check_tasks_cover(tasks=tasks, chunks=CHUNKS, most=5)


def test_gate_rejects_tasks_that_end_early_or_late():
    tasks = plan_tasks(CHUNKS, group=3, tile=16).tolist()
    with pytest.raises(GateError, match="3 tasks, and token 10 is in none of them"):
        check_tasks_cover(tasks=tasks[:-1], chunks=CHUNKS, most=5)
    with pytest.raises(GateError, match="5 tasks, the first 4 hold all 15 tokens"):
        check_tasks_cover(tasks=[*tasks, tasks[-1]], chunks=CHUNKS, most=5)


# ---- any order --------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=5), st.integers(1, 9), st.integers(1, 64))
def test_any_chunks_are_covered(sizes: list[tuple[int, int]], group: int, tile: int):
    chunks = [(start, tokens, 100 * index) for index, (start, tokens) in enumerate(sizes)]
    tasks = checked_tasks(chunks, group=group, tile=tile)
    held = [first + i for first, count, *_ in tasks.tolist() for i in range(count)]
    assert held == list(range(sum(tokens for _, tokens, _ in chunks)))
