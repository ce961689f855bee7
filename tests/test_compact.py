"""Compaction makes the running rows a prefix with the fewest moves, and a move is a relabel that loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fast.compact import (
    MODES,
    RowCompactor,
    RowMove,
    holes,
    is_compact,
    move_cells,
    moves_needed,
    plan_compaction,
    strays,
)
from gates import GateError
from gates.compact import check_compaction_right, check_moves_amortised, check_moves_minimal
from gates.slots import check_table_stable
from tests.addressing import Paged

ROW_SETS = [
    (),
    (0,),
    (1,),
    (3,),
    (0, 2),
    (1, 2),
    (2, 5),
    (0, 1, 2),
    (1, 3, 5),
    (0, 4, 5, 6),
    (5, 6, 7),
    tuple(range(7)),
]


def pairs(moves: Sequence[RowMove]) -> list[tuple[int, int]]:
    return [(move.src, move.dst) for move in moves]


class Batch:
    """Rows with tenants: block tables and their mirror, plus an id and a sampler state that have to move along."""

    def __init__(self, rows: int, mode: str) -> None:
        self.paged = Paged(rows, 24, block_size=4, gather=mode == "gather")
        self.tenant: dict[int, dict[str, Any]] = {}
        self.releases = self.arrivals = 0
        self.compactor = RowCompactor(mode, on_move=self.move)

    def admit(self, tokens: int) -> int:
        """A newcomer takes the lowest free row."""
        row = min(row for row in range(len(self.paged.tables)) if row not in self.tenant)
        self.paged.adopt(row, tokens)
        self.tenant[row] = {"id": self.arrivals, "seed": 1000 + self.arrivals}
        self.arrivals += 1
        return row

    def release(self, row: int) -> None:
        self.paged.release(row)
        del self.tenant[row]
        self.releases += 1

    def move(self, move: RowMove) -> None:
        self.paged.move(move.src, move.dst)
        self.tenant[move.dst] = self.tenant.pop(move.src)

    def snapshot(self) -> dict[int, dict[str, Any]]:
        """Plain copies of everything a tenant owns, by row."""
        return {
            row: {**state, "blocks": list(self.paged.tables[row].blocks), "slots": self.paged.truth(row)}
            for row, state in self.tenant.items()
        }


def batch_with(rows: Sequence[int], mode: str = "compact", size: int = 8) -> Batch:
    """A batch whose occupied rows are `rows`: all admitted, mirrored, then the others released."""
    batch = Batch(size, mode)
    for row in range(size):
        batch.admit(3 + row)
    batch.paged.slots.sync(batch.paged.tables, range(size))
    for row in range(size):
        if row not in rows:
            batch.release(row)
    return batch


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROW_SETS)
def test_moves_are_the_strays_into_the_holes_and_leave_a_prefix(rows: tuple[int, ...]):
    moves = plan_compaction(rows)
    assert len(holes(rows)) == len(strays(rows)) == len(moves) == moves_needed(rows)
    assert pairs(moves) == list(zip(sorted(strays(rows)), sorted(holes(rows)), strict=True))
    after = (set(rows) - set(strays(rows))) | set(holes(rows))
    assert is_compact(sorted(after))
    assert plan_compaction(after) == ()
    assert is_compact(rows) == (moves == ())


def test_strays_ascend_whatever_order_a_set_keeps_them_in():
    rows = {64, 33, 8, 97}  # Python's set gives these in another order
    assert strays(rows) == [8, 33, 64, 97]
    assert [(move.src, move.dst) for move in plan_compaction(rows)] == [(8, 0), (33, 1), (64, 2), (97, 3)]


def test_the_order_of_rows_is_part_of_being_compact():
    assert is_compact((0, 1, 2))
    assert is_compact(())
    assert not is_compact((1, 0))  # line 0 of a window is row 0
    assert plan_compaction((1, 0)) == ()  # and yet no row is out of place


def test_a_move_says_what_it_is_and_costs_its_own_length():
    moves = plan_compaction((0, 4, 5))
    assert [move.render() for move in moves] == ["row 4 -> 1", "row 5 -> 2"]
    assert move_cells(moves, {0: 100, 4: 7, 5: 9}) == 16
    assert move_cells(moves, [100, 0, 0, 0, 7, 9]) == 16
    assert move_cells((), {}) == 0


@pytest.mark.parametrize("rows", ROW_SETS)
def test_survivors_keep_everything_and_the_window_its_address(rows: tuple[int, ...]):
    batch = batch_with(rows)
    before, address = batch.snapshot(), batch.paged.slots.address
    cells = move_cells(plan_compaction(rows), [table.length for table in batch.paged.tables])
    moves = batch.compactor.compact(sorted(batch.tenant))
    check_compaction_right(before=before, after=batch.snapshot(), moves=pairs(moves))
    check_table_stable(recorded=address, now=batch.paged.slots.address)
    assert batch.paged.slots.moved_cells == cells
    batch.paged.check_agrees()
    if rows:
        plan = batch.paged.plan(sorted(batch.tenant))
        assert batch.paged.slots.is_window(plan.slot_mapping)


def test_a_move_touches_no_key_or_value():
    batch = batch_with((0, 5, 7))
    pool = torch.arange(batch.paged.sink + 1, dtype=torch.float64)
    before = {state["id"]: pool[batch.paged.truth(row)].clone() for row, state in batch.tenant.items()}
    batch.compactor.compact(sorted(batch.tenant))
    assert set(batch.tenant) == {0, 1, 2}
    for row, state in batch.tenant.items():  # the same places in the same pool, through another row
        assert torch.equal(pool[batch.paged.truth(row)], before[state["id"]])


def test_the_source_row_is_left_with_the_empty_table():
    batch = batch_with((0, 5))
    empty, held = batch.paged.tables[1], batch.paged.tables[5]
    batch.compactor.compact((0, 5))
    assert batch.paged.tables[1] is held
    assert batch.paged.tables[5] is empty
    assert (empty.length, batch.paged.slots.length(5)) == (0, 0)


def test_three_counters_say_that_most_calls_found_nothing_to_do():
    compactor = RowCompactor()
    for rows in [(0, 1), (1, 0), (1,), (0,), (0, 2, 3), (0, 1)]:
        compactor.compact(rows)
    assert (compactor.calls, compactor.compactions, compactor.moves) == (6, 2, 2)
    assert compactor.render() == "6 calls, 2 compactions, 2 moves"


@pytest.mark.parametrize("mode", ["free", "gather"])
def test_other_modes_look_and_move_nothing(mode: str):
    batch = batch_with((0, 5, 7), mode)
    before = batch.snapshot()
    assert batch.compactor.compact((0, 5, 7)) == ()
    assert batch.snapshot() == before
    assert (batch.compactor.calls, batch.compactor.compactions, batch.compactor.moves) == (1, 0, 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [(0, 1), (0, 2), (3,)])
def test_a_mode_replays_exactly_when_its_rectangle_keeps_the_address(mode: str, rows: tuple[int, ...]):
    batch = batch_with(rows, mode)
    batch.compactor.compact(rows)
    rows = tuple(sorted(batch.tenant))
    plan = batch.paged.plan(rows)
    assert batch.compactor.can_replay(rows) == batch.paged.slots.is_window(plan.slot_mapping)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode: 'swap' is not one of compact, free, gather"):
        RowCompactor("swap")


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_gate_rejects_too_few_moves():
    check_moves_minimal(rows=(0, 4, 5), moves=[(4, 1), (5, 2)])
    with pytest.raises(
        GateError, match=r"compact\.moves_minimal: 1 moves for 2 rows .*rows \[5\] .*the scheduler's side"
    ):
        check_moves_minimal(rows=(0, 4, 5), moves=[(4, 1)])
    with pytest.raises(GateError, match=r"0 moves for 1 rows .*rows \[3\] still stand at or above 3"):
        check_moves_minimal(rows=(0, 1, 3), moves=[])  # a stray one row past the prefix
    with pytest.raises(GateError, match="row 5 is to move to 1, but row 1 is occupied"):
        check_moves_minimal(rows=(0, 4, 5), moves=[(4, 1), (5, 1)])


def test_gate_rejects_needless_moves_that_still_end_in_a_prefix():
    shifted = [(row, row - 1) for row in (1, 2, 3)]
    with pytest.raises(GateError, match="3 moves for 1 rows out of place: rows that were in place were copied"):
        check_moves_minimal(rows=(1, 2, 3), moves=shifted)


@pytest.mark.parametrize(("moves", "said"), [([(4, 0)], "but row 0 is occupied"), ([(3, 1)], "but row 3 is empty")])
def test_gate_rejects_a_move_planned_against_another_occupancy(moves: list[tuple[int, int]], said: str):
    with pytest.raises(GateError, match=said):
        check_moves_minimal(rows=(0, 4), moves=moves)


def test_gate_rejects_more_moves_than_releases():
    batch = batch_with((1, 2, 3, 4, 5, 6, 7))
    check_moves_amortised(moves=1, releases=batch.releases)
    for row in range(1, 8):  # everybody shifts down by one, where the highest row alone would fill the hole
        batch.move(RowMove(row, row - 1))
    assert is_compact(sorted(batch.tenant))
    with pytest.raises(GateError, match=r"compact\.moves_amortised: 7 moves for 1 releases"):
        check_moves_amortised(moves=7, releases=batch.releases)


@pytest.mark.parametrize("column", ["id", "seed", "blocks", "slots"])
def test_gate_rejects_a_column_that_stayed_behind(column: str):
    batch = batch_with((0, 5))
    before = batch.snapshot()
    moves = pairs(batch.compactor.compact((0, 5)))
    after = batch.snapshot()
    check_compaction_right(before=before, after=after, moves=moves)
    after[1][column] = before[0][column]
    with pytest.raises(GateError, match=rf"compact\.right: row 5 -> 1: {column} was "):
        check_compaction_right(before=before, after=after, moves=moves)


def test_gate_rejects_a_column_nobody_carried():
    batch = batch_with((0, 5))
    before = batch.snapshot()
    moves = pairs(batch.compactor.compact((0, 5)))
    after = batch.snapshot()
    del after[1]["seed"]
    with pytest.raises(GateError, match=r"row 5 -> 1 had columns \[.*'seed'.*\], has"):
        check_compaction_right(before=before, after=after, moves=moves)


def test_gate_rejects_a_survivor_that_was_written_over():
    batch = batch_with((0, 1, 5))
    before = batch.snapshot()
    with pytest.raises(ValueError, match="row 5 -> 1, but row 1 holds 4 tokens"):
        batch.move(RowMove(5, 1))
    with pytest.raises(GateError, match="3 rows before, 2 rows after the moves"):
        check_compaction_right(before=before, after={}, moves=[(5, 1)])


def test_gate_rejects_a_vacated_row_that_still_has_its_tenant():
    batch = batch_with((0, 5))
    before = batch.snapshot()
    moves = pairs(batch.compactor.compact((0, 5)))
    with pytest.raises(GateError, match=r"rows \[0, 1\] are to be occupied, rows \[0, 1, 5\] are"):
        check_compaction_right(before=before, after=batch.snapshot() | {5: before[5]}, moves=moves)


# ---- any order --------------------------------------------------------------------------------------------------


@given(rows=st.sets(st.integers(0, 40), max_size=20))
def test_any_row_set_takes_one_move_a_stray(rows: set[int]):
    moves = plan_compaction(rows)
    check_moves_minimal(rows=rows, moves=pairs(moves))
    assert len(moves) == sum(row >= len(rows) for row in rows)
    assert not {move.src for move in moves} & {move.dst for move in moves}


class CompactionMachine(RuleBasedStateMachine):
    """Admissions, steps, releases and compactions in any order; the model is one plain dict a request."""

    SIZE = 6

    @initialize(mode=st.sampled_from(MODES))
    def start(self, mode: str) -> None:
        self.batch = Batch(self.SIZE, mode)
        self.model: dict[int, list[int]] = {}  # id: slots
        self.address = self.batch.paged.slots.address

    def rows(self) -> list[int]:
        return sorted(self.batch.tenant)

    @precondition(lambda self: len(self.batch.tenant) < self.SIZE)
    @rule(tokens=st.integers(1, 20))
    def admit(self, tokens: int) -> None:
        row = self.batch.admit(tokens)
        self.model[self.batch.tenant[row]["id"]] = self.batch.paged.truth(row)

    @precondition(lambda self: self.batch.tenant)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows()))
        del self.model[self.batch.tenant[row]["id"]]
        self.batch.release(row)

    @rule()
    def compact(self) -> None:
        before = self.batch.snapshot()
        moves = self.batch.compactor.compact(self.rows())
        check_compaction_right(before=before, after=self.batch.snapshot(), moves=pairs(moves))
        if self.batch.compactor.mode == "compact":
            assert is_compact(self.rows())

    @precondition(lambda self: self.batch.tenant)
    @rule()
    def step(self) -> None:
        rows = [row for row in self.rows() if self.batch.paged.tables[row].length < 24]
        if not rows:
            return
        plan = self.batch.paged.plan(rows)
        for row, slot in zip(rows, plan.slots, strict=True):
            self.model[self.batch.tenant[row]["id"]].append(slot)
        assert self.batch.paged.slots.is_window(plan.slot_mapping) == self.batch.compactor.can_replay(rows)
        self.batch.paged.check_agrees(rows)

    @invariant()
    def every_request_holds_its_own_slots(self) -> None:
        held = {state["id"]: self.batch.paged.truth(row) for row, state in self.batch.tenant.items()}
        assert held == self.model

    @invariant()
    def the_price_follows_completions(self) -> None:
        check_moves_amortised(moves=self.batch.compactor.moves, releases=self.batch.releases)
        check_table_stable(recorded=self.address, now=self.batch.paged.slots.address)


TestCompactionMachine = CompactionMachine.TestCase
