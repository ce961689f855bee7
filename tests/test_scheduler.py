"""The schedule: order of arrival decides, rows and blocks are accounted for, nobody waits for ever."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fast.cache import BatchedPagedKVCache
from fast.compact import RowCompactor
from fast.coverage import Coverage, coverage
from fast.rows import Rows, Sequence, TokenCounts
from fast.scheduler import Scheduler, SchedulerOutput
from gates import GateError
from gates.blocks import check_blocks_conserved, check_owned_once, check_tables_cover
from gates.scheduler import (
    check_decode_room,
    check_earliest_kept,
    check_overtaken_bounded,
    check_preempted_late,
    check_preempted_wait,
    check_queue_order,
    check_rows_accounted,
    check_rows_follow_requests,
    check_somebody_runs,
    check_vacated_rows_neutral,
)
from reference.request import Request, SamplingParams
from tests.harness import TINY


def make(
    *,
    rows: int = 3,
    blocks: int = 8,
    block_size: int = 2,
    compact: bool = False,
    columns: Rows | None = None,
    **options: Any,
) -> Scheduler:
    cache = BatchedPagedKVCache(
        TINY, max_batch_size=rows, num_blocks=blocks, block_size=block_size, max_model_len=blocks * block_size
    )
    compactor = RowCompactor("compact" if compact else "free")
    scheduler = Scheduler(
        cache,
        compactor=compactor,
        on_admit=columns.admit if columns else None,
        on_release=columns.release if columns else None,
        **options,
    )

    def on_move(move):
        cache.move_row(src=move.src, dst=move.dst)
        if columns:
            columns.move(src=move.src, dst=move.dst)

    compactor.on_move = on_move
    return scheduler


def sequence(arrival: int, prompt: int, answer: int, priority: int = 0, **params) -> Sequence:
    request = Request((7,) * prompt, SamplingParams(max_tokens=answer, **params), f"r{arrival}", priority=priority)
    return Sequence(
        request=request,
        arrival=arrival,
        seed=arrival,
        ends=frozenset({2}),
        forbidden=(2,),
        max_tokens=answer,
        tokens=list(request.prompt_ids),
    )


def step(scheduler: Scheduler) -> SchedulerOutput:
    """One step without a model: tables advance, every computed row gets one token, those at their end leave."""
    output = scheduler.schedule()
    for chunk in output.chunks:
        scheduler.cache.advance_row(chunk.row, chunk.count)
    for row in output.decode_rows:
        scheduler.cache.tables[row].append()
    for row in output.rows:
        running = scheduler.running[row]
        running.tokens.append(9)
        if running.num_generated == running.max_tokens:
            scheduler.release(running)
    return output


# ---- holds ------------------------------------------------------------------------------------------------------

FREE_ROWS = [
    (4, 8, (16,), Coverage(30, 30, 0, 0)),
    (4, 8, (8, 16), Coverage(31, 21, 0, 0)),
    (4, 8, (4, 32), Coverage(43, 36, 0, 0)),
    (8, 16, (16,), Coverage(30, 30, 0, 0)),
    (8, 16, (8, 16), Coverage(31, 14, 0, 0)),
    (8, 16, (4, 32), Coverage(47, 35, 0, 0)),
    (8, 16, (4, 8, 16, 32), Coverage(47, 12, 0, 0)),
    (16, 32, (4, 32), Coverage(51, 34, 0, 0)),
]
PERSISTENT = [
    (4, 8, (16,), Coverage(30, 30, 0, 0)),
    (4, 8, (8, 16), Coverage(31, 31, 3, 33)),
    (4, 8, (4, 32), Coverage(43, 43, 5, 95)),
    (8, 16, (16,), Coverage(30, 30, 0, 0)),
    (8, 16, (8, 16), Coverage(31, 31, 6, 66)),
    (8, 16, (4, 32), Coverage(47, 47, 11, 217)),
    (8, 16, (4, 8, 16, 32), Coverage(47, 47, 8, 80)),
    (16, 32, (4, 32), Coverage(51, 51, 23, 461)),
]


@pytest.mark.parametrize(("rows", "requests", "gens", "figures"), FREE_ROWS)
def test_free_rows_replay_exactly_these_steps(rows: int, requests: int, gens: tuple[int, ...], figures: Coverage):
    assert coverage(rows=rows, requests=requests, gens=gens, compact_rows=False) == figures


@pytest.mark.parametrize(("rows", "requests", "gens", "figures"), PERSISTENT)
def test_a_persistent_batch_replays_every_step_for_these_moves(
    rows: int, requests: int, gens: tuple[int, ...], figures: Coverage
):
    assert coverage(rows=rows, requests=requests, gens=gens, compact_rows=True) == figures


@given(
    rows=st.integers(1, 6),
    requests=st.integers(1, 12),
    gens=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    prompt=st.integers(1, 20),
)
def test_compaction_leaves_no_step_scattered_and_moves_at_most_once_a_release(
    rows: int, requests: int, gens: list[int], prompt: int
):
    free = coverage(rows=rows, requests=requests, gens=gens, prompt_tokens=prompt, compact_rows=False)
    persistent = coverage(rows=rows, requests=requests, gens=gens, prompt_tokens=prompt, compact_rows=True)
    assert persistent.scattered == 0
    assert persistent.decode_steps == free.decode_steps
    assert persistent.moves <= requests


def test_the_lowest_free_row_goes_first():
    scheduler = make(rows=4, blocks=16)
    for arrival, answer in enumerate((2, 9, 2, 9)):
        scheduler.add(sequence(arrival, 1, answer))
    step(scheduler)
    step(scheduler)
    scheduler.add(sequence(4, 1, 3))
    scheduler.add(sequence(5, 1, 3))
    assert step(scheduler).admitted_rows == (0, 2)


def test_newcomers_are_prefilled_and_decode_from_the_next_step_on():
    scheduler = make()
    scheduler.add(sequence(0, 3, 4))
    first, second = step(scheduler), step(scheduler)
    assert (first.admitted_rows, first.decode_rows) == ((0,), ())
    assert (second.admitted_rows, second.decode_rows) == ((), (0,))


def test_nobody_jumps_a_head_that_does_not_fit():
    scheduler = make(rows=3, blocks=4)
    scheduler.add(sequence(0, 4, 4))
    scheduler.add(sequence(1, 6, 1))
    scheduler.add(sequence(2, 1, 1))
    step(scheduler)
    assert [waiting.arrival for waiting in scheduler.waiting] == [1, 2]


def test_a_dry_pool_costs_the_latest_arrival_its_place_and_nobody_is_admitted_in_that_step():
    scheduler = make(rows=3, blocks=4)
    for arrival in range(2):
        scheduler.add(sequence(arrival, 4, 4))
    scheduler.add(sequence(2, 1, 1))
    step(scheduler)
    output = step(scheduler)
    assert [preempted.arrival for preempted in output.preempted] == [1]
    assert output.admitted == ()
    assert [waiting.arrival for waiting in scheduler.waiting] == [1, 2]
    assert output.decode_rows == (0,)


def test_the_preempted_wait_in_order_of_arrival():
    scheduler = make(rows=4, blocks=4, block_size=1)
    for arrival in range(4):
        scheduler.add(sequence(arrival, 1, 3))
    step(scheduler)
    output = step(scheduler)
    assert [preempted.arrival for preempted in output.preempted] == [3, 2]
    assert [waiting.arrival for waiting in scheduler.waiting] == [2, 3]


@pytest.mark.parametrize("reserve", [False, True])
def test_an_admission_may_leave_a_block_for_each_row_that_will_grow(reserve: bool):
    scheduler = make(rows=3, blocks=4, reserve_growth=reserve)
    for arrival, answer in enumerate((4, 4)):
        scheduler.add(sequence(arrival, 4, answer))
    scheduler.add(sequence(2, 3, 2))  # one token of its answer is stored, in the second block that it has anyway
    assert [one.arrival for one in step(scheduler).admitted] == ([0] if reserve else [0, 1])
    while scheduler.has_work:
        step(scheduler)
    assert (scheduler.preemptions == 0) == reserve


@pytest.mark.parametrize(("answer", "admitted"), [(4, 0), (1, 1)], ids=["grows", "does not"])
def test_the_room_that_is_kept_is_for_the_newcomer_too(answer: int, admitted: int):
    scheduler = make(rows=2, blocks=5, reserve_growth=True)
    scheduler.add(sequence(0, 3, 2))  # has its last block already
    step(scheduler)
    scheduler.add(sequence(1, 6, answer))
    assert len(step(scheduler).admitted) == admitted, "three blocks are free, and a prompt of three"


def test_the_budget_is_shared_in_the_order_of_the_line_and_not_of_the_rows():
    scheduler = make(rows=2, blocks=40, chunk_tokens=4)
    for arrival, (prompt, priority) in enumerate(((20, 0), (30, -1))):
        scheduler.add(sequence(arrival, prompt, 2, priority=priority))
        output = step(scheduler)
    # The first in line is the longer and sits in the second row: it has one half, the shorter the other.
    assert [(chunk.row, chunk.count) for chunk in output.chunks] == [(1, 2), (0, 2)]


def test_no_block_is_left_for_a_last_token_that_is_never_stored():
    scheduler = make(rows=2, blocks=2, reserve_growth=True)
    for arrival in range(2):
        scheduler.add(sequence(arrival, 2, 1))  # the one token of the answer would be the first of a second block
    assert len(step(scheduler).admitted) == 2


def test_a_lower_priority_number_goes_first_and_is_preempted_last():
    scheduler = make(rows=2, blocks=5)
    for arrival, priority in enumerate((0, 5, -1, 5, 0)):
        scheduler.add(sequence(arrival, 2, 9, priority=priority))
    assert [one.arrival for one in scheduler.waiting] == [2, 0, 4, 1, 3]
    assert [one.arrival for one in step(scheduler).admitted] == [2, 0]
    scheduler.add(sequence(5, 1, 1, priority=-9))
    assert step(scheduler).preempted == (), "a newcomer puts nobody out"
    while not scheduler.preemptions:
        output = step(scheduler)
    assert [one.arrival for one in output.preempted] == [0]
    assert [one.arrival for one in scheduler.waiting] == [5, 0, 4, 1, 3]
    with pytest.raises(ValueError, match="priority: 1.5 is not an integer"):
        Request((1,), priority=1.5)


def ran_before(scheduler: Scheduler, patient: int, *, stream: int, prompt: int = 1, answer: int = 1) -> int:
    """How many of a stream of urgent requests, one a step, are admitted while the request of this arrival waits."""
    before = 0
    for arrival in range(stream, 999):
        scheduler.add(sequence(arrival, prompt, answer, priority=-(2**31) + 1))
        admitted = [one.arrival for one in step(scheduler).admitted]
        if patient in admitted:
            return before
        before += sum(one > patient for one in admitted)
    raise AssertionError(f"arrival {patient} waits for ever")


@pytest.mark.parametrize("due_after", [1, 2, 7, 256])
def test_an_endless_stream_of_urgent_requests_overtakes_a_patient_one_so_many_times_and_no_more(due_after: int):
    scheduler = make(rows=1, blocks=4)
    scheduler.due_after = due_after
    scheduler.add(sequence(0, 2, 2, priority=2**31 - 1))
    assert ran_before(scheduler, 0, stream=1) == due_after - 1


def test_the_due_go_in_order_of_arrival_and_an_urgent_one_still_before_those_it_came_with():
    scheduler = make(rows=1, blocks=6)
    scheduler.due_after = 3
    for arrival, priority in enumerate((9, 5, 0, 0, -1, -9)):
        scheduler.add(sequence(arrival, 1, 1, priority=priority))
    assert [one.arrival for one in scheduler.waiting] == [0, 1, 2, 5, 4, 3]
    assert [step(scheduler).admitted[0].arrival for _ in range(6)] == [0, 1, 2, 5, 4, 3]


@pytest.mark.parametrize("due_after", [2, 256])
def test_who_is_due_keeps_its_row_and_its_place_when_the_pool_is_dry(due_after: int):
    scheduler = make(rows=2, blocks=4)
    scheduler.due_after = due_after
    scheduler.add(sequence(0, 2, 5, priority=3))
    step(scheduler)
    for arrival in (1, 2):
        scheduler.add(sequence(arrival, 3, 5, priority=-3))
    preempted = [one.arrival for _ in range(4) for one in step(scheduler).preempted]
    assert preempted == ([1] if due_after == 2 else [0]), "the last in line"
    assert [one.arrival for one in scheduler.waiting] == ([1, 2] if due_after == 2 else [2, 0])


@pytest.mark.parametrize("name", [column.name for column in Rows.columns()])
def test_every_column_follows_its_request_and_leaves_a_neutral_row(name: str):
    rows = Rows(3)
    column = next(column for column in Rows.columns() if column.name == name)
    loud = SamplingParams(
        max_tokens=5, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.5, presence_penalty=1.0,
        frequency_penalty=1.0, logit_bias={3: 1.0}, min_tokens=2, logprobs=2,
    )  # fmt: skip
    tenant = sequence(4, 2, 5)
    tenant.request = Request((7, 7), loud, "loud")
    tenant.guide = object()  # a column holds whatever it is; only the sampler asks it anything
    rows.admit(2, tenant)
    assert name in rows.dirty_columns(2), "the loud request must differ from neutral in every column"
    held = getattr(rows, name)[2]
    rows.move(src=2, dst=0)
    assert getattr(rows, name)[0] is held or getattr(rows, name)[0] == held
    assert rows.dirty_columns(2) == rows.dirty_columns(1) == []
    rows.release(0)
    assert getattr(rows, name)[0] == column.metadata["neutral"]


def test_every_array_of_the_rows_is_a_declared_column():
    rows = Rows(2)
    arrays = {name for name in rows.__slots__ if isinstance(getattr(rows, name), np.ndarray)}
    assert arrays == {column.name for column in Rows.columns()}
    assert set(rows.__slots__) - arrays == {"max_batch_size"}


def test_counts_tell_prompt_from_answer_and_survive_a_second_admission():
    tenant = sequence(0, 2, 6, frequency_penalty=1.0)
    tenant.tokens += [9, 7, 9]
    counts = TokenCounts(tenant)
    counts.add(11)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {7: 1.0, 9: 2.0, 11: 1.0}


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_gate_rejects_a_row_that_is_free_and_running():
    scheduler = make()
    scheduler.add(sequence(0, 1, 3))
    step(scheduler)
    scheduler._free_rows.append(0)  # the fault: a release that forgets the running side
    with pytest.raises(GateError, match="row 0 is free and running"):
        scheduler.schedule()


def test_gate_rejects_a_lost_row():
    with pytest.raises(GateError, match="neither free nor running"):
        check_rows_accounted(free=[2], running=[0], total=3)


def test_gate_rejects_a_preempted_sequence_at_the_back_of_the_queue(monkeypatch: pytest.MonkeyPatch):
    scheduler = make(rows=3, blocks=4)
    for arrival in range(2):
        scheduler.add(sequence(arrival, 4, 4))
    scheduler.add(sequence(2, 1, 1))
    step(scheduler)

    class Backwards(deque):
        def insert(self, at: int, one: Sequence) -> None:
            self.append(one)  # the fault

    scheduler.waiting = Backwards(scheduler.waiting)
    with pytest.raises(GateError, match="arrival 2 waits ahead of arrival 1"):
        scheduler.schedule()


def test_gate_rejects_a_newcomer_that_runs_ahead_of_the_queue():
    with pytest.raises(GateError, match="arrival 5 runs while arrival 3 waits"):
        check_queue_order(running=[1, 5], waiting=[(0, 3)])
    with pytest.raises(GateError, match="arrival 3 runs while arrival 3 waits"):
        check_queue_order(running=[1, 3], waiting=[(0, 3)])
    with pytest.raises(GateError, match="arrival 7 runs while arrival 3 waits"):
        check_queue_order(running=[], waiting=[(0, 3)], admitted=[(1, 7)])
    check_queue_order(running=[], waiting=[(0, 3), (0, 4)])
    check_queue_order(running=[1, 2], waiting=[(0, 3)])
    check_queue_order(running=[2], waiting=[(0, 3), (1, 2)], admitted=[(0, 2)])


@pytest.mark.parametrize("patient", ["waits", "runs"])
def test_gate_rejects_a_stream_that_overtakes_without_end(patient: str, monkeypatch: pytest.MonkeyPatch):
    # The fault: the place in line is priority and arrival, however long somebody has stood there.
    monkeypatch.setattr(Scheduler, "_make_due", lambda scheduler, order: None)
    scheduler = make(rows=1 + (patient == "runs"), blocks=6)
    scheduler.due_after = 5
    scheduler.add(sequence(0, 2, 9, priority=1))
    if patient == "runs":
        step(scheduler)  # and is put out by those that come
    fact = r"arrival \d+ runs while arrival 0 waits, \d+ requests ahead of it; whoever came 5"
    with pytest.raises(GateError, match=fact):
        ran_before(scheduler, 0, stream=1, prompt=3, answer=4)
    check_overtaken_bounded(running=9, waiting=5, due_after=5)
    with pytest.raises(GateError, match="arrival 9 runs while arrival 4 waits, 5 requests ahead of it; whoever came 5"):
        check_overtaken_bounded(running=9, waiting=4, due_after=5)


def test_gate_rejects_a_preempted_earliest_arrival():
    with pytest.raises(GateError, match="arrival 4 is the first in line that runs and was preempted"):
        check_earliest_kept(earliest=4, preempted=[7, 4])


def test_gate_rejects_an_arrival_that_is_preempted_and_admitted_in_one_step():
    check_preempted_wait(preempted=[4], admitted=[3])
    with pytest.raises(GateError, match=r"arrival \[4\] is preempted and admitted in one step"):
        check_preempted_wait(preempted=[7, 4], admitted=[4])


def test_gate_rejects_a_preemption_right_after_an_admission(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Scheduler, "_fits", lambda scheduler, head: True)  # the fault: no room is kept
    scheduler = make(rows=3, blocks=4, reserve_growth=True)
    for arrival in range(2):
        scheduler.add(sequence(arrival, 4, 4))
    step(scheduler)
    with pytest.raises(GateError, match="arrival 1 is preempted 1 steps after it was admitted, a block lasts 2 steps"):
        step(scheduler)
    check_preempted_late(arrival=1, steps=2, block_size=2)


def test_gate_rejects_an_empty_batch_in_front_of_a_queue(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Scheduler, "_fits", lambda scheduler, head: False)  # the fault: a head that never fits
    scheduler = make()
    scheduler.add(sequence(0, 2, 4))
    with pytest.raises(GateError, match="1 requests wait, 0 run and none was preempted"):
        scheduler.schedule()
    check_somebody_runs(running=0, waiting=0, preempted=0)


def test_gate_rejects_a_row_that_was_vacated_without_its_blocks():
    scheduler = make()
    scheduler.add(sequence(0, 2, 4))
    step(scheduler)
    scheduler.cache.reset_row(0)  # the fault: an abort that forgets the blocks; the allocator still calls them owned
    with pytest.raises(GateError, match="6 free . 1 owned = 7 blocks, the pool has 8"):
        scheduler.schedule()


def test_gate_rejects_a_decode_row_that_did_not_grow():
    scheduler = make()
    scheduler.add(sequence(0, 2, 4))
    step(scheduler)
    table = scheduler.cache.tables[0]  # two tokens in a block of two, and the grow stage left out
    with pytest.raises(GateError, match="2 tokens stored, blocks hold 2"):
        check_decode_room(lengths=[table.length], capacities=[table.capacity])
    check_decode_room(lengths=[table.length], capacities=[table.length + 1])  # room for exactly one


def test_gate_rejects_sampler_state_that_stayed_behind():
    rows = Rows(2)
    rows.admit(1, sequence(3, 1, 2))
    with pytest.raises(GateError, match="row 0 runs request 'r3', its sampler state is ''"):
        check_rows_follow_requests(rows={0: "r3"}, state={0: rows.request_id(0)})


def test_gate_rejects_a_vacated_row_that_keeps_a_column():
    rows = Rows(2)
    rows.admit(1, sequence(3, 1, 2, top_p=0.5))
    rows.release(1)
    rows.top_p[1] = 0.5  # the fault: a column that release forgot
    with pytest.raises(GateError, match="empty row 1 still holds top_p"):
        check_vacated_rows_neutral(dirty={row: rows.dirty_columns(row) for row in (0, 1)}, total=2)


def test_coverage_refuses_what_it_cannot_run():
    with pytest.raises(ValueError, match="gens: 0"):
        coverage(rows=1, requests=1, gens=[0])
    with pytest.raises(ValueError, match="num_blocks: 1 of 16 hold 16 of 24 tokens"):
        coverage(rows=1, requests=1, gens=[20], num_blocks=1)


# ---- any order --------------------------------------------------------------------------------------------------


class Schedule(RuleBasedStateMachine):
    """Submit, step and abort in any order over a tight pool; the model is a dict of how long each answer is."""

    @initialize(
        rows=st.integers(1, 4),
        blocks=st.integers(2, 9),
        block_size=st.integers(1, 3),
        compact=st.booleans(),
        reserve=st.booleans(),
        budget=st.integers(0, 3) | st.none(),
        due_after=st.integers(1, 5),
    )
    def start(self, rows, blocks, block_size, compact: bool, reserve: bool, budget: int | None, due_after: int):
        self.columns = Rows(rows)
        policy = {"reserve_growth": reserve, "chunk_tokens": None if budget is None else rows + budget}
        sizes = {"rows": rows, "blocks": blocks, "block_size": block_size}
        self.scheduler = make(**sizes, compact=compact, columns=self.columns, **policy)
        self.scheduler.due_after = due_after
        self.limit = self.scheduler.cache.max_model_len
        self.open: dict[int, Sequence] = {}
        self.answers: dict[int, int] = {}  # arrival -> tokens emitted so far
        self.arrivals = 0

    @rule(data=st.data())
    def submit(self, data: st.DataObject):
        prompt = data.draw(st.integers(1, max(1, self.limit - 1)))
        answer = data.draw(st.integers(1, max(1, self.limit - prompt)))
        if prompt + answer > self.limit:
            return
        urgency = data.draw(st.sampled_from([0, 0, 1, -1, -9]))
        newcomer = sequence(self.arrivals, prompt, answer, urgency, top_k=3, presence_penalty=1.0)
        self.open[self.arrivals], self.answers[self.arrivals] = newcomer, 0
        self.arrivals += 1
        self.scheduler.add(newcomer)

    @precondition(lambda self: getattr(self, "open", None))
    @rule(data=st.data())
    def abort(self, data: st.DataObject):
        arrival = data.draw(st.sampled_from(sorted(self.open)))
        self.scheduler.release(self.open.pop(arrival))

    @precondition(lambda self: hasattr(self, "open"))
    @rule()
    def step(self):
        before = {arrival: one.num_generated for arrival, one in self.open.items()}
        # The line as it is told here: those that `due_after` have come after, and then by priority.
        due = {arrival for arrival in self.open if self.arrivals - 1 - arrival >= self.scheduler.due_after}
        line = sorted(self.open, key=lambda a: (a not in due, 0 if a in due else self.open[a].request.priority, a))
        ran = {a for a in line if self.open[a].row is not None}
        stored = {a: self.scheduler.cache.tables[self.open[a].row].length for a in ran}
        waited = [a for a in line if a not in ran]
        output = step(self.scheduler)
        # Who is let in is the head of the line, and who is put out its tail.
        assert [one.arrival for one in output.admitted] == waited[: len(output.admitted)]
        lost = [a for a in line if a in ran][len(ran) - len(output.preempted) :]
        assert [one.arrival for one in output.preempted] == lost[::-1]
        # Exactly the computed rows gained exactly one token, a resumed sequence included.
        gained = {a for a, one in self.open.items() if one.num_generated == before[a] + 1}
        same = {a for a, one in self.open.items() if one.num_generated == before[a]}
        assert gained | same == set(self.open)
        assert len(gained) == len(output.rows)
        first = next((a for a in line if a in ran), None)
        if first is not None:
            row = self.open[first].row
            after = stored[first] + 1 if row is None else self.scheduler.cache.tables[row].length
            assert after > stored[first], "the first in line of those that run advances in every step"
        self.open = {a: one for a, one in self.open.items() if one.num_generated < one.max_tokens}
        for one in self.scheduler.waiting:
            late = [
                a for a, b in self.open.items() if b.row is not None and a - one.arrival >= self.scheduler.due_after
            ]
            assert not late, "nobody waits for who came so long after"

    @invariant()
    def blocks_and_rows_are_conserved(self):
        if not hasattr(self, "open"):
            return
        cache, running = self.scheduler.cache, self.scheduler.running
        allocator = cache.allocator
        check_blocks_conserved(free=allocator.num_free, owned=allocator.num_owned, total=allocator.num_blocks)
        check_owned_once(tables=dict(enumerate(t.blocks for t in cache.tables)), num_blocks=allocator.num_blocks)
        check_tables_cover(
            lengths=[table.length for table in cache.tables],
            blocks_held=[len(table.blocks) for table in cache.tables],
            block_size=cache.block_size,
            known=[len(running[row].tokens) if row in running else 0 for row in range(cache.max_batch_size)],
        )
        check_rows_accounted(free=self.scheduler.free_rows, running=list(running), total=cache.max_batch_size)
        check_rows_follow_requests(
            rows={row: one.request.id for row, one in running.items()},
            state={row: self.columns.request_id(row) for row in running},
        )
        check_vacated_rows_neutral(
            dirty={row: self.columns.dirty_columns(row) for row in self.scheduler.free_rows},
            total=cache.max_batch_size,
        )
        assert {*running.values(), *self.scheduler.waiting} == set(self.open.values())

    def teardown(self):
        if not hasattr(self, "open"):
            return
        # No livelock from any state: each step computes a token of the first in line that runs. It may lose them to
        # one before it that waits now, and to nobody who comes later, so all there is, once for each, bounds the steps.
        every = sum(len(one.request.prompt_ids) + one.max_tokens for one in self.open.values())
        for _ in range(every * len(self.open)):
            if self.scheduler.has_work:
                step(self.scheduler)
        assert not self.scheduler.has_work
        assert self.scheduler.cache.allocator.num_owned == 0


TestSchedule = Schedule.TestCase
