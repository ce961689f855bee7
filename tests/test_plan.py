"""A decode plan addresses what the block tables hold, in O(rows) host work, and grows every row or none."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fast.blocks import BlockTable, OutOfBlocks
from fast.buckets import BucketSet
from fast.inputs import FIELDS, DecodeInputs
from fast.plan import DecodePlan, plan_decode
from fast.slots import rebuild_mapping
from gates import GateError
from gates.plan import check_plan_addressing, check_plan_fresh, check_rebuild_bounded, check_slots_unique
from tests.addressing import Paged

OPTIONS = [(False, False), (True, False), (False, True), (True, True)]  # (bucket_decode, persist_inputs)


def filled(*lengths: int, max_model_len: int = 32, gather: bool = False) -> Paged:
    """Rows of these lengths, prefilled and not yet mirrored."""
    paged = Paged(len(lengths), max_model_len, gather=gather)
    for row, length in enumerate(lengths):
        paged.adopt(row, length)
    return paged


def options(paged: Paged, bucket_decode: bool, persist_inputs: bool) -> dict[str, Any]:
    """The two switches as what `plan_decode` takes."""
    rows, columns = paged.slots.slots.shape
    buckets = BucketSet(max_batch_size=rows, max_model_len=columns, width_multiple=16) if bucket_decode else None
    inputs = DecodeInputs(max_batch_size=rows, sink_slot=paged.sink) if persist_inputs else None
    return {"buckets": buckets, "inputs": inputs}


def addressing(plan: DecodePlan, sink: int, **changes: Any) -> dict[str, Any]:
    """A plan as its gate takes it, with a fault put in."""
    fields = ("slot_mapping", "context_lens", "write_slots", "positions", "rows")
    return {name: getattr(plan, name) for name in fields} | {"sink_slot": sink} | changes


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(0,), (0, 1, 2), (1, 3), (3, 0), (0, 1, 2, 3)])
@pytest.mark.parametrize(("bucket_decode", "persist_inputs"), OPTIONS)
@pytest.mark.parametrize("gather", [False, True])
def test_a_plan_says_what_the_block_tables_say(
    rows: tuple[int, ...], bucket_decode: bool, persist_inputs: bool, gather: bool
):
    paged = filled(5, 3, 8, 15, gather=gather)
    switches = options(paged, bucket_decode, persist_inputs)
    for step in range(3):
        ids = [50 + step + row for row in rows]
        plan = paged.plan(rows, ids, **switches)
        wanted, lens = rebuild_mapping(paged.tables, rows)
        live = len(rows)
        for line, length in enumerate(lens.tolist()):
            assert torch.equal(plan.slot_mapping[line, :length], wanted[line, :length])
        assert torch.equal(plan.context_lens[:live], lens)
        assert torch.equal(plan.positions[:live], lens - 1)
        assert plan.input_ids[:live].tolist() == ids
        assert plan.write_slots[:live].tolist() == [paged.truth(row)[-1] for row in rows] == list(plan.slots)
        assert plan.lengths == tuple(lens.tolist())
        assert plan.bucket == ((plan.num_rows, plan.width) if bucket_decode else None)
        assert all(getattr(plan, name).shape == (plan.num_rows,) for name in FIELDS)


@pytest.mark.parametrize(("bucket_decode", "persist_inputs"), OPTIONS)
def test_each_switch_does_its_own_part(bucket_decode: bool, persist_inputs: bool):
    paged = filled(5, 3, 8, 15)
    switches = options(paged, bucket_decode, persist_inputs)
    plans = [paged.plan((0, 1, 2), **switches) for _ in range(2)]
    assert (plans[0].num_rows, plans[0].width) == ((4, 16) if bucket_decode else (3, 9))
    assert (plans[1].num_rows, plans[1].width) == ((4, 16) if bucket_decode else (3, 10))
    same = [getattr(plans[0], name).data_ptr() == getattr(plans[1], name).data_ptr() for name in FIELDS]
    assert same == [persist_inputs] * 4
    assert paged.slots.is_window(plans[0].slot_mapping)  # the window depends on neither


def test_bucketed_steps_count_their_padding():
    paged = filled(5, 3, 8)
    switches = options(paged, True, False)
    paged.plan((0, 1, 2), **switches)
    buckets = switches["buckets"]
    assert (buckets.steps, buckets.real_rows, buckets.padded_rows) == (1, 3, 0)
    assert (buckets.real_cells, buckets.padded_cells) == (6 + 4 + 9, 3 * 16 - 19)


@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (1, 3)])
def test_host_work_a_step_does_not_grow_with_the_history(rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    calls, slot = [0], BlockTable.slot

    def counting(table: BlockTable, token: int) -> int:
        calls[0] += 1
        return slot(table, token)

    paged = filled(4, 4, 4, 4, max_model_len=256)
    paged.plan(rows)  # the first step mirrors the prompts
    monkeypatch.setattr(BlockTable, "slot", counting)
    per_step = []
    for _ in range(200):
        before = calls[0]
        paged.plan(rows)
        per_step.append(calls[0] - before)
    assert set(per_step) == {len(rows)}


def test_a_plan_is_frozen_and_its_host_copies_outlive_its_windows():
    paged = filled(5, 3)
    switches = options(paged, False, True)
    first = paged.plan((0, 1), **switches)
    lengths, slots = first.lengths, first.slots
    paged.plan((0, 1), **switches)
    assert first.context_lens.tolist() == [7, 5]  # the persistent buffer moved on
    assert (first.lengths, first.slots) == (lengths, slots) == ((6, 4), first.slots)
    with pytest.raises(FrozenInstanceError):
        first.rows = (1,)  # type: ignore[misc]


def test_padding_is_a_legal_index_after_a_shorter_tenant_took_the_row():
    paged = filled(9, 12)
    paged.plan((0, 1))
    paged.release(0)
    paged.adopt(0, 2)
    plan = paged.plan((0, 1))
    padding = plan.slot_mapping[0, plan.lengths[0] :]
    assert int(padding.max()) > 0  # not zero: the old tenant's slots stand there, and every one of them exists
    assert int(padding.min()) >= 0
    assert int(padding.max()) < paged.sink


@pytest.mark.parametrize(
    ("rows", "ids", "said"),
    [
        ((), (), r"rows: \(\) is not a set"),
        ((0, 0), (1, 2), r"rows: \(0, 0\) is not a set"),
        ((-1, 0), (1, 2), r"rows: \(-1, 0\) is not a set"),
        ((0, 1), (1,), "input_ids: 1 tokens for 2 rows"),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused(rows: tuple[int, ...], ids: tuple[int, ...], said: str):
    paged = filled(5, 3)
    with pytest.raises(ValueError, match=said):
        plan_decode(tables=paged.tables, slot_table=paged.slots, rows=rows, input_ids=ids, sink_slot=paged.sink)
    assert [table.length for table in paged.tables] == [5, 3]


def test_a_row_without_a_block_stops_every_row():
    paged = filled(5, 8)  # row 0 has room in its block, row 1 has not
    with pytest.raises(OutOfBlocks, match=r"rows \[1\] have no block for their next token"):
        plan_decode(tables=paged.tables, slot_table=paged.slots, rows=(0, 1), input_ids=(1, 2), sink_slot=paged.sink)
    assert [table.length for table in paged.tables] == [5, 8]
    assert paged.slots.appended_cells == 0


def test_a_row_at_the_length_limit_stops_every_row():
    paged = filled(5, 8, max_model_len=8)
    with pytest.raises(ValueError, match=r"rows: \[1\] already hold 8 tokens, the length limit"):
        plan_decode(tables=paged.tables, slot_table=paged.slots, rows=(0, 1), input_ids=(1, 2), sink_slot=paged.sink)
    assert [table.length for table in paged.tables] == [5, 8]


@pytest.mark.parametrize(("rows", "width"), [(4, 64), (8, 16)])
def test_a_bucket_set_made_for_larger_storage_is_refused_before_anything_grows(rows: int, width: int):
    paged = filled(5, 3, 2, 4)
    buckets = BucketSet(max_batch_size=rows, max_model_len=width, width_multiple=64, row_sizes=(rows,))
    with pytest.raises(ValueError, match=f"bucket: {rows} x {width} exceeds the storage of 4 x 32"):
        paged.plan((0, 1), buckets=buckets)
    assert [table.length for table in paged.tables] == [5, 3, 2, 4]


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_inputs_made_for_a_smaller_batch_are_refused_before_anything_grows():
    paged = Paged(4, 16)
    for row in range(3):
        paged.adopt(row, 2)
    small = DecodeInputs(max_batch_size=2, sink_slot=paged.sink)
    with pytest.raises(ValueError, match="bucket: 3 x 3 exceeds the storage of 2 x 16"):
        paged.plan(range(3), inputs=small)
    assert [table.length for table in paged.tables[:3]] == [2, 2, 2]


def test_gate_rejects_a_row_whose_last_entry_is_not_where_it_writes():
    paged = filled(5, 3)
    plan = paged.plan((0, 1))
    check_plan_addressing(**addressing(plan, paged.sink))
    with pytest.raises(GateError, match=r"plan\.addressing: row 1 writes to slot \d+, its last entry is slot \d+"):
        check_plan_addressing(**addressing(plan, paged.sink, write_slots=plan.write_slots.flip(0), rows=(1, 0)))
    paged.slots.slots[0, 5] = 0  # over a window, the same comparison says that somebody rewrote it
    with pytest.raises(GateError, match=r"row 0 writes to slot \d+, its last entry is slot 0"):
        check_plan_addressing(**addressing(plan, paged.sink))


def test_gate_rejects_a_position_one_past_the_token():
    paged = filled(5, 3)
    plan = paged.plan((0, 1))
    with pytest.raises(GateError, match="row 0 is at position 6, it reads 6 tokens"):
        check_plan_addressing(**addressing(plan, paged.sink, positions=plan.context_lens))


@pytest.mark.parametrize("length", [0, 7])
def test_gate_rejects_a_length_outside_the_rectangle(length: int):
    paged = filled(5, 3)
    plan = paged.plan((0, 1))
    with pytest.raises(GateError, match=f"row 0 reads {length} tokens, the rectangle is 6 wide"):
        check_plan_addressing(**addressing(plan, paged.sink, context_lens=torch.tensor([length, 4])))


@pytest.mark.parametrize("cell", [-1, 10_000])
def test_gate_rejects_padding_that_is_no_slot(cell: int):
    paged = filled(5, 3)
    plan = paged.plan((0, 1))
    plan.slot_mapping[1, 5] = paged.sink  # the last index that exists: nobody reads it, and it is legal
    check_plan_addressing(**addressing(plan, paged.sink))
    plan.slot_mapping[1, 5] = cell
    with pytest.raises(GateError, match=rf"cells are .*{cell}.*, legal slots are 0\.\.{paged.sink}"):
        check_plan_addressing(**addressing(plan, paged.sink))


def test_gate_rejects_a_plan_that_is_run_twice():
    paged = filled(5, 3)
    plan = paged.plan((0, 1))

    def fresh() -> None:
        check_plan_fresh(rows=plan.rows, lengths=plan.lengths, table_lengths=[t.length for t in paged.tables])

    fresh()
    paged.plan((1,))
    with pytest.raises(GateError, match=r"made at lengths \[6, 4\], the tables hold \[6, 5\].*first at row 1; 1 of 2"):
        fresh()


def test_gate_rejects_two_rows_that_share_a_block():
    paged = filled(5, 4)
    paged.tables[1].blocks = list(paged.tables[0].blocks)  # a block with two owners
    paged.tables[1].length = paged.tables[0].length
    with pytest.raises(GateError, match=r"plan\.slots_unique: rows 0 and 1 both write to slot \d+"):
        paged.plan((0, 1))


@pytest.mark.parametrize("slot", [-1, 80, 81])
def test_gate_rejects_a_write_slot_that_no_block_names(slot: int):
    check_slots_unique(rows=(0, 3), slots=(0, 79), sink_slot=80)  # the first and the last slot of the blocks
    with pytest.raises(GateError, match=r"write slots .* are not all in 0\.\.79 \[first at row 3; 1 of 2\]"):
        check_slots_unique(rows=(0, 3), slots=(4, slot), sink_slot=80)


def test_gate_rejects_a_rectangle_that_is_rebuilt_every_step():
    paged, rebuilt = filled(16, 16, 16, 16, max_model_len=528), 0
    for _ in range(512):
        paged.plan(range(4))
        rebuilt += rebuild_mapping(paged.tables, range(4))[0].numel()
    check_rebuild_bounded(cells_written=paged.slots.written_cells, tokens_appended=4 * 512)
    with pytest.raises(
        GateError, match=r"plan\.rebuild: 558,080 cells written to append 2,048 tokens, 272x; at most 2x"
    ):
        check_rebuild_bounded(cells_written=rebuilt, tokens_appended=4 * 512)
    check_rebuild_bounded(cells_written=20, tokens_appended=10)
    with pytest.raises(GateError, match="21 cells written to append 10 tokens"):
        check_rebuild_bounded(cells_written=21, tokens_appended=10)


# ---- any order --------------------------------------------------------------------------------------------------


@given(data=st.data(), lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6), gather=st.booleans())
def test_any_sequence_of_batches_is_planned_as_it_would_be_rebuilt(
    data: st.DataObject, lengths: list[int], gather: bool
):
    paged = filled(*lengths, gather=gather)
    switches = options(paged, data.draw(st.booleans()), data.draw(st.booleans()))
    for _ in range(data.draw(st.integers(1, 8))):
        rows = data.draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True))
        plan = paged.plan(rows, **switches)
        wanted, lens = rebuild_mapping(paged.tables, rows)
        width = wanted.shape[1]
        real = torch.arange(width) < lens[:, None]
        assert torch.equal(plan.slot_mapping[: len(rows), :width][real], wanted[real])
        check_plan_fresh(rows=plan.rows, lengths=plan.lengths, table_lengths=[paged.tables[row].length for row in rows])
        paged.check_agrees(rows)
