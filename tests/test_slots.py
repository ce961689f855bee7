"""The slot table mirrors block tables, hands out windows, and writes one cell a row and step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from fast.plan import DecodePlan
from fast.slots import (
    SlotTable,
    block_table_bytes,
    block_table_cells,
    incremental_cells,
    rebuild_mapping,
    rebuilt_cells,
    resident_share,
    table_bytes,
    table_cells,
)
from gates import GateError
from gates.slots import (
    check_appends_incremental,
    check_gather_narrow,
    check_mapping_is_window,
    check_resyncs_bounded,
    check_slots_agree,
    check_table_fits,
    check_table_stable,
    check_vacated_unmirrored,
    check_window_intact,
)
from tests.addressing import Paged

# The length of a run, the cells a rebuild writes, the cells a slot table writes: 4 rows, 16-token prompts.
RUNS = [(8, 656, 96), (64, 12_416, 320), (128, 41_216, 576), (512, 558_080, 2_112)]


def synced(*lengths: int, max_model_len: int = 32, gather: bool = False) -> Paged:
    """Rows of these lengths (0: empty), already mirrored."""
    paged = Paged(len(lengths), max_model_len, gather=gather)
    for row, length in enumerate(lengths):
        if length:
            paged.adopt(row, length)
    paged.slots.sync(paged.tables, range(len(lengths)))
    return paged


def masked_sum(pool: Tensor, mapping: Tensor, lens: Tensor) -> Tensor:
    """What a gathering read sees: the whole rectangle is dereferenced, then everything past a length is masked."""
    cells = pool[mapping]
    return torch.where(torch.arange(mapping.shape[1]) < lens[:, None], cells, 0.0).sum(1)


def held(plan: DecodePlan, made: Tensor | None = None) -> dict[str, Any]:
    """A held plan as its gate takes it: its tensors, its own host copies, and a clone when there is one."""
    fields = ("rows", "slot_mapping", "context_lens", "lengths", "slots")
    return {name: getattr(plan, name) for name in fields} | {"made": made}


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "rebuilt", "persistent"), RUNS)
def test_cells_written_by_both_constructions(steps: int, rebuilt: int, persistent: int):
    paged, counted = Paged(4, 16 + steps, block_size=16), 0
    for row in range(4):
        paged.adopt(row, 16)
    for _ in range(steps):
        plan = paged.plan(range(4))
        mapping, lens = rebuild_mapping(paged.tables, range(4))
        assert torch.equal(mapping, plan.slot_mapping)
        assert torch.equal(lens, plan.context_lens)
        counted += mapping.numel()
    assert (counted, paged.slots.written_cells) == (rebuilt, persistent)
    assert rebuilt_cells(rows=4, prompt_tokens=16, steps=steps) == rebuilt
    assert incremental_cells(rows=4, prompt_tokens=16, steps=steps) == persistent


def test_a_table_of_slots_is_block_size_times_a_table_of_block_ids():
    size = {"max_batch_size": 256, "max_model_len": 131_072}
    assert table_cells(**size) == 256 * 131_072
    assert table_bytes(**size) == 268_435_456
    assert table_bytes(**size) == 16 * block_table_bytes(**size, block_size=16)
    assert block_table_cells(max_batch_size=3, max_model_len=33, block_size=16) == 9  # a last block counts whole


def test_the_table_reserves_what_the_arithmetic_says():
    table = SlotTable(max_batch_size=7, max_model_len=33)
    assert table.slots.untyped_storage().nbytes() == table_bytes(max_batch_size=7, max_model_len=33)


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("width", [7, 8, 9, 32])
def test_a_prefix_is_a_window_on_the_buffer_itself(count: int, width: int):
    paged = synced(*[7] * 7)
    mapping, lens = paged.slots.read(range(count), width)
    assert mapping.untyped_storage().data_ptr() == paged.slots.slots.untyped_storage().data_ptr()
    assert mapping.data_ptr() == paged.slots.address
    assert mapping.stride() == (32, 1)
    assert paged.slots.is_window(mapping)
    assert lens.tolist() == [7] * count
    assert (paged.slots.windows, paged.slots.gathers, paged.slots.window_share) == (1, 0, 1.0)


def test_the_same_address_with_another_row_stride_is_no_window():
    table = synced(7, 7).slots
    packed = table.slots.view(-1)[:16].view(2, 8)  # begins where the table does; its second row is not row 1
    assert packed.data_ptr() == table.address
    assert not table.is_window(packed)
    with pytest.raises(GateError, match="with row stride 8, the table is at 0x[0-9a-f]+ with 32"):
        check_mapping_is_window(mapping=packed, table=table.read_buffer, rows=(0, 1))


@pytest.mark.parametrize("rows", [(1,), (0, 2), (2, 1, 0), (1, 0), (0, 1, 3)])
def test_any_other_row_set_is_a_copy_of_the_same_numbers(rows: tuple[int, ...]):
    paged = synced(5, 3, 8, 1)
    wanted, wanted_lens = rebuild_mapping(paged.tables, rows)
    mapping, lens = paged.slots.read(rows, wanted.shape[1])
    assert not paged.slots.is_window(mapping)
    assert torch.equal(lens, wanted_lens)
    for line, length in enumerate(lens.tolist()):
        assert torch.equal(mapping[line, :length], wanted[line, :length])
    assert (paged.slots.windows, paged.slots.gathers, paged.slots.window_share) == (0, 1, 0.0)


def test_a_gather_narrows_before_it_copies(monkeypatch: pytest.MonkeyPatch):
    seen: list[torch.Size] = []
    select = Tensor.index_select

    def spy(source: Tensor, dim: int, index: Tensor) -> Tensor:
        seen.append(source.shape)
        return select(source, dim, index)

    monkeypatch.setattr(Tensor, "index_select", spy)
    paged = synced(5, 3, 8, 1)
    mapping, _ = paged.slots.read((0, 2), 8, pad_rows=2)
    assert seen == [torch.Size((4, 8))]
    assert mapping.untyped_storage().nbytes() == 4 * 8 * 8


def test_no_row_may_be_read_when_something_is_padded():
    table = synced(0, 0, 0).slots
    mapping, lens = table.read((), 16, pad_rows=3)
    assert table.is_window(mapping)
    assert mapping.shape == (3, 16)
    assert lens.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r"read: 0 rows padded to 0 is not in 1\.\.3"):
        table.read((), 16)


@pytest.mark.parametrize(("rows", "width", "pad"), [((0,), 4, 0), ((0,), 33, 0), ((0, 1), 5, 3), ((0,), 5, -1)])
def test_a_rectangle_that_does_not_fit_is_refused(rows: tuple[int, ...], width: int, pad: int):
    with pytest.raises(ValueError, match=r"not in \d+\.\."):
        synced(5, 2, 0, 0).slots.read(rows, width, pad_rows=pad)


def test_a_padded_row_has_length_zero_and_legal_cells():
    paged = synced(5, 3, 8, 0)
    for rows in ((0, 1, 2), (0, 2)):
        mapping, lens = paged.slots.read(rows, 12, pad_rows=4 - len(rows))
        assert lens.tolist() == [*paged.slots.lengths(rows), *[0] * (4 - len(rows))]
        assert int(mapping.min()) >= 0
        assert int(mapping.max()) < paged.sink


def test_an_append_lands_inside_a_short_rows_held_window_and_past_a_long_rows():
    paged = synced(2, 4)
    held, lens = paged.slots.read((0, 1), 4)
    before = held.clone()
    for row in (0, 1):
        paged.reserve(row, 8)
    paged.slots.append((0, 1), [paged.tables[0].append(), paged.tables[1].append()])
    assert held[0, 2] == paged.truth(0)[2] != before[0, 2]  # the short row's next token, over held padding
    assert torch.equal(held[1], before[1])  # the long row's went past the right edge
    assert lens.tolist() == [2, 4]  # and only the copied length keeps the new cell out of the read


def test_lengths_are_a_copy_and_the_rectangle_is_not():
    paged = synced(3, 3)
    mapping, lens = paged.slots.read((0, 1), 8)
    paged.slots.append((0,), [7])
    assert mapping[0, 3] == 7
    assert lens.tolist() == [3, 3]


def test_a_reset_clears_nothing_and_a_shorter_tenant_leaves_legal_cells_behind():
    paged = synced(9, 4)
    old = paged.slots.slots[0].clone()
    paged.release(0)
    assert torch.equal(paged.slots.slots[0], old)
    paged.adopt(0, 2)
    paged.slots.sync(paged.tables, (0,))
    tail = paged.slots.slots[0, 2:9]
    assert torch.equal(tail, old[2:9])
    assert int(tail.max()) > 0  # padding is a legal index and not a promise of zero
    assert int(tail.min()) >= 0
    assert int(tail.max()) < paged.sink


@pytest.mark.parametrize("poison", [float("nan"), 1e4])
@pytest.mark.parametrize("rows", [(0, 1, 2), (0, 2)])
def test_what_stands_past_a_rows_length_never_reaches_a_read(rows: tuple[int, ...], poison: float):
    paged = synced(5, 3, 8, 0)
    pool = torch.arange(paged.sink + 1, dtype=torch.float64)
    pool[paged.sink] = 0.0
    clean = masked_sum(pool, *paged.slots.read(rows, 12, pad_rows=1))
    pool[paged.sink] = poison
    for row in range(4):
        paged.slots.slots[row, paged.slots.length(row) :] = paged.sink
    assert torch.equal(masked_sum(pool, *paged.slots.read(rows, 12, pad_rows=1)), clean)


def test_a_sync_copies_only_rows_that_disagree():
    paged = synced(5, 3)
    assert (paged.slots.resyncs, paged.slots.resynced_cells) == (2, 8)
    paged.slots.sync(paged.tables, (0, 1))
    assert paged.slots.resyncs == 2
    paged.release(1)
    paged.adopt(1, 3)  # the same length again: the reset is what makes it visible
    paged.slots.sync(paged.tables, (0, 1))
    assert (paged.slots.resyncs, paged.slots.resynced_cells) == (3, 11)
    paged.check_agrees()


def test_a_move_is_one_copy_of_the_rows_own_length_inside_the_buffer():
    paged = synced(0, 5, 7)
    address, held = paged.slots.address, paged.slots.slots[:2, :7]
    paged.move(2, 0)
    assert (paged.slots.moved_cells, paged.slots.address) == (7, address)
    assert paged.slots.lengths(range(3)) == (7, 5, 0)
    assert held[0].tolist() == paged.truth(0)  # a window taken before the move reads the new tenant
    assert paged.slots.written_cells == 12  # a move is not counted as following the block tables
    paged.check_agrees()


@pytest.mark.parametrize(("src", "dst"), [(2, 1), (1, 1)])
def test_a_move_onto_a_row_in_use_is_refused_and_changes_nothing(src: int, dst: int):
    paged = synced(0, 5, 7)
    before = paged.slots.slots.clone()
    with pytest.raises(ValueError, match=f"row {src} -> {dst}, but row {dst} holds 5 tokens"):
        paged.slots.move_row(src, dst)
    assert torch.equal(paged.slots.slots, before)
    assert paged.slots.lengths(range(3)) == (0, 5, 7)


@pytest.mark.parametrize(("rows", "slots"), [((0, 1), [1, 2]), ((1, 1), [1, 2]), ((1,), [1, 2])])
def test_an_append_writes_every_row_or_none(rows: tuple[int, ...], slots: list[int]):
    paged = synced(8, 3, max_model_len=8)  # row 0 is full
    before = paged.slots.slots.clone()
    with pytest.raises(ValueError, match="append: "):
        paged.slots.append(rows, slots)
    assert torch.equal(paged.slots.slots, before)
    assert paged.slots.lengths((0, 1)) == (8, 3)


@pytest.mark.parametrize("slots", [[-1], [4, 5, 6], [7, -2]])
def test_a_slot_that_would_wrap_and_a_row_that_would_overflow_are_refused(slots: list[int]):
    paged = synced(6, 3, max_model_len=8)
    before = paged.slots.slots.clone()
    with pytest.raises(ValueError, match="extend: row 0 of 8 takes . slots after 6"):
        paged.slots.extend(0, slots)
    if len(slots) < 3:
        with pytest.raises(ValueError, match=r"append: slot -\d is negative"):
            paged.slots.append(tuple(range(len(slots))), slots)
    assert torch.equal(paged.slots.slots, before)
    assert paged.slots.lengths((0, 1)) == (6, 3)


@pytest.mark.parametrize("cuts", [(8,), (1, 7), (3, 3, 2)])
def test_a_row_is_extended_by_what_is_new_in_as_many_cells(cuts: tuple[int, ...]):
    paged = synced(0, 5)
    paged.adopt(0, 8)
    written = paged.slots.written_cells
    done = 0
    for count in cuts:
        paged.slots.extend(0, paged.truth(0)[done : done + count])
        done += count
    assert paged.slots.written_cells - written == 8
    paged.check_agrees()


def test_a_block_table_longer_than_a_row_is_refused():
    paged = synced(0, max_model_len=8)
    paged.adopt(0, 8)
    short = SlotTable(max_batch_size=1, max_model_len=7)
    with pytest.raises(ValueError, match="row 0 holds 8 tokens, the table has 7"):
        short.sync(paged.tables, (0,))


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4)])
def test_a_table_without_cells_is_refused(sizes: tuple[int, int]):
    with pytest.raises(ValueError, match="is not in 1"):
        SlotTable(max_batch_size=sizes[0], max_model_len=sizes[1])


@pytest.mark.parametrize("rows", [(), (0, 1), (0, 2), (2, 0, 1)])
def test_the_gather_design_reads_every_row_set_at_one_address(rows: tuple[int, ...]):
    paged = synced(5, 3, 8, 0, gather=True)
    mapping, lens = paged.slots.read(rows, 12, pad_rows=4 - len(rows))
    assert paged.slots.is_window(mapping)
    assert mapping.data_ptr() == paged.slots.address != paged.slots.slots.data_ptr()
    for line, row in enumerate(rows):
        assert mapping[line, : lens[line]].tolist() == paged.truth(row)
    assert (paged.slots.gathers, paged.slots.windows, paged.slots.moved_cells) == (1, 0, 0)


def test_a_table_moves_only_to_another_device():
    table = synced(3, 2).slots
    address = table.address
    assert table.to("cpu").address == address
    assert table.to("meta").address != address


def test_the_table_says_what_it_did():
    paged = synced(5, 3, 0)
    paged.slots.read((0, 1), 8)
    paged.slots.read((1,), 8)
    paged.move(1, 2)
    assert paged.slots.render() == (
        "slot table 3 x 32: 8 tokens held, 0 cells appended, 8 resynced in 2 resyncs, 3 moved, "
        "1 windows and 1 gathers (50% windows)"
    )
    assert resident_share(paged.slots.lengths(range(3)), max_batch_size=3, max_model_len=32) == 8 / 96


def test_a_rebuild_pads_with_a_legal_index():
    paged = synced(5, 2)
    mapping, lens = rebuild_mapping(paged.tables, (1, 0))
    assert mapping.tolist() == [[*paged.truth(1), 0, 0, 0], paged.truth(0)]
    assert lens.tolist() == [2, 5]
    assert rebuild_mapping(paged.tables, ())[0].shape == (0, 0)


@pytest.mark.gpu
def test_a_table_on_a_device_writes_and_reads_the_same_cells():
    paged = synced(5, 3, 8, 0)
    paged.slots.to("cuda")
    for _ in range(9):
        plan = paged.plan((0, 1, 2))
    assert torch.equal(
        paged.slots.read((0, 2), plan.width)[0].cpu()[1, : plan.lengths[2]], torch.tensor(paged.truth(2))
    )
    paged.check_agrees((0, 1, 2))


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize(("rows", "pad"), [((0,), 0), ((0, 1), 1), ((), 2)])
def test_a_rectangle_has_the_rows_and_columns_that_were_asked_for(rows: tuple[int, ...], pad: int, gather: bool):
    slots = synced(3, 2, 1, 0, gather=gather).slots
    assert slots.rectangle(rows, 5, pad).shape == (len(rows) + pad, 5)
    assert slots.rectangle((0, 1), 5).shape == (2, 5)  # nothing is padded unless it is asked for


def test_a_table_reads_windows_unless_the_gather_is_asked_for():
    slots = SlotTable(max_batch_size=2, max_model_len=8)
    assert slots.read_buffer is slots.slots
    assert slots.window_share == 1.0, "before the first read"
    slots.rectangle((0, 1), 4)
    slots.rectangle((1,), 4)
    slots.rectangle((0,), 4)
    assert slots.window_share == 2 / 3


def test_every_row_is_covered_and_not_only_the_shortest():
    slots = synced(3, 9).slots
    with pytest.raises(ValueError, match=re.escape("width: 5 is not in 9..32 (longest row..table)")):
        slots.rectangle((0, 1), 5)


def test_a_row_does_not_move_onto_itself():
    with pytest.raises(ValueError, match="row 1 -> 1"):
        synced(3, 0).slots.move_row(1, 1)


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_gate_rejects_a_tenant_that_changed_without_a_reset():
    paged = synced(6, 6)
    paged.tables[0], paged.tables[1] = paged.tables[1], paged.tables[0]  # the same lengths: sync sees nothing
    paged.slots.sync(paged.tables, (0, 1))
    with pytest.raises(GateError, match=r"row 0 says token 0 is in slot 0, its block table says \d+.*6 of 6 tokens"):
        paged.check_agrees()


def test_gate_rejects_a_mirror_that_lags_behind():
    paged = synced(6)
    paged.reserve(0, 7)
    paged.tables[0].append()
    with pytest.raises(GateError, match="row 0 mirrors 6 tokens, its block table holds 7"):
        check_slots_agree(slots=paged.slots.slots, lengths=[6], truth=[paged.truth(0)], rows=(0,))


def test_gate_rejects_a_gathered_copy_and_names_the_rows():
    paged = synced(5, 3, 8)
    mapping, _ = paged.slots.read((0, 2), 8)
    with pytest.raises(GateError, match=r"slots\.window: .*rows \(0, 2\) .*the scheduler's side"):
        check_mapping_is_window(mapping=mapping, table=paged.slots.read_buffer, rows=(0, 2))


def test_gate_rejects_a_copy_that_has_the_tables_own_stride():
    table = synced(4, 4).slots.slots
    with pytest.raises(GateError, match="gate slots.window"):
        check_mapping_is_window(mapping=table.clone(), table=table, rows=(0, 1))


def test_gate_rejects_a_mirror_with_fewer_rows_than_block_tables():
    with pytest.raises(GateError, match="1 rows mirrored, 2 block tables"):
        check_vacated_unmirrored(mirrored=[0], stored=[0, 0])


def test_gate_rejects_a_copied_prefix_as_the_plans_fault():
    paged = synced(5, 3, 8)
    mapping = paged.slots.read((0, 1), 8)[0].clone()
    with pytest.raises(GateError, match="the plan's side"):
        check_mapping_is_window(mapping=mapping, table=paged.slots.read_buffer, rows=(0, 1))


def test_gate_rejects_a_window_whose_row_changed_tenant_under_it():
    paged = synced(5, 3)
    plan = paged.plan((0, 1))
    check_window_intact(**held(plan))
    paged.release(0)
    paged.reserve(1, 12)  # takes the freed blocks, so the newcomer gets others
    paged.adopt(0, 6)
    paged.slots.sync(paged.tables, (0,))
    # Live state against live state cannot fail: the window and the tables moved together.
    assert plan.slot_mapping[0, :6].tolist() == paged.truth(0)
    with pytest.raises(GateError, match=r"slots\.window_intact: row 0 was planned to end in slot \d+"):
        check_window_intact(**held(plan))


def test_gate_rejects_a_shorter_tenant_by_the_copy_made_with_the_plan():
    paged = synced(9, 3)
    plan = paged.plan((0, 1))
    made = plan.slot_mapping.clone()
    check_window_intact(**held(plan, made))
    made[1, 4:] += 1  # past row 1's length: no cell of the plan
    check_window_intact(**held(plan, made))
    paged.release(0)
    paged.reserve(1, 12)
    paged.adopt(0, 2)
    paged.slots.sync(paged.tables, (0,))
    check_window_intact(**held(plan))  # the last cell still stands: a host copy of the write slots alone sees nothing
    with pytest.raises(GateError, match="row 0 was planned over 10 cells, 2 have changed since"):
        check_window_intact(**held(plan, made))


def test_gate_rejects_lengths_that_moved_under_a_held_plan():
    paged = synced(5, 3)
    plan = paged.plan((0, 1))
    plan.context_lens[1] += 1  # what sharing the lengths with the table would do at the next append
    with pytest.raises(
        GateError, match=r"holds lengths \[6, 4\], its context_lens say \[6, 5\] \[first at row 1; 1 of 2\]"
    ):
        check_window_intact(**held(plan))


def test_gate_rejects_a_rebuild_that_calls_itself_an_append():
    paged, cells = synced(16, 16), 0
    for _ in range(3):
        paged.plan((0, 1))
        cells += rebuild_mapping(paged.tables, (0, 1))[0].numel()
    check_appends_incremental(appended_cells=paged.slots.appended_cells, row_steps=6)
    with pytest.raises(GateError, match="108 cells appended for 6 row steps"):
        check_appends_incremental(appended_cells=cells, row_steps=6)


def test_gate_rejects_tokens_that_reach_the_block_table_around_the_mirror():
    paged = synced(4, 4)
    check_resyncs_bounded(resyncs=paged.slots.resyncs, tenancies=2)
    paged.reserve(0, 5)
    paged.tables[0].append()  # and the slot table is not told
    paged.slots.sync(paged.tables, (0, 1))
    with pytest.raises(GateError, match="3 whole-row resyncs for 2 tenants"):
        check_resyncs_bounded(resyncs=paged.slots.resyncs, tenancies=2)


def test_gate_rejects_a_table_over_its_budget_and_prices_the_alternative():
    size = {"max_batch_size": 256, "max_model_len": 131_072}
    with pytest.raises(GateError, match=re.escape("268,435,456 bytes, the budget is 64,000,000")) as caught:
        check_table_fits(
            table_bytes=table_bytes(**size),
            block_table_bytes=block_table_bytes(**size, block_size=16),
            budget_bytes=64_000_000,
        )
    assert "16,777,216 bytes, 16x smaller" in str(caught.value)


def test_gate_rejects_a_gather_that_copies_whole_rows_of_the_table(monkeypatch: pytest.MonkeyPatch):
    paged = synced(5, 0, 3)
    index_select = Tensor.index_select

    def whole_rows(source: Tensor, dim: int, index: Tensor) -> Tensor:
        return index_select(paged.slots.slots, dim, index)[:, : source.shape[1]]  # right, and 32 columns for 5

    monkeypatch.setattr(Tensor, "index_select", whole_rows)
    with pytest.raises(GateError, match="64 cells were copied to read 10"):
        paged.slots.read((2, 0), 5)
    with pytest.raises(GateError, match="gate slots.gather_narrow: 1,000 cells"):
        check_gather_narrow(copied_cells=1000, read_cells=10)


def test_gate_rejects_an_empty_row_that_mirrors_a_tenant_who_left():
    paged = synced(5, 3)
    paged.tables[1].release()  # the fault: the block table forgets its tenant and the mirror does not
    with pytest.raises(GateError, match="row 1 is empty and mirrors 3 tokens"):
        check_vacated_unmirrored(mirrored=paged.slots.lengths((0, 1)), stored=[table.length for table in paged.tables])
    paged.slots.reset(1)
    check_vacated_unmirrored(mirrored=paged.slots.lengths((0, 1)), stored=[table.length for table in paged.tables])


def test_gate_rejects_a_table_that_moved_after_recording():
    table = synced(3).slots
    recorded = table.address
    check_table_stable(recorded=recorded, now=table.address)
    table.to("meta")
    with pytest.raises(GateError, match=r"slots\.table_stable: .*recorded at 0x[0-9a-f]+ and is now at 0x0"):
        check_table_stable(recorded=recorded, now=table.address)


# ---- any order --------------------------------------------------------------------------------------------------


class SlotTableMachine(RuleBasedStateMachine):
    """A slot table against plain lists: `model[row]` is the row's slots, in order."""

    ROWS, TOKENS = 5, 14

    @initialize(gather=st.booleans())
    def start(self, gather: bool) -> None:
        self.paged = Paged(self.ROWS, self.TOKENS, block_size=3, gather=gather)
        self.model: list[list[int]] = [[] for _ in range(self.ROWS)]
        self.tenancies = self.row_steps = 0
        self.address = self.paged.slots.address

    def growable(self) -> list[int]:
        return [row for row, slots in enumerate(self.model) if 0 < len(slots) < self.TOKENS]

    @precondition(lambda self: [] in self.model)
    @rule(data=st.data(), tokens=st.integers(1, TOKENS))
    def adopt(self, data: st.DataObject, tokens: int) -> None:
        row = data.draw(st.sampled_from([row for row, slots in enumerate(self.model) if not slots]))
        self.paged.adopt(row, tokens)
        self.model[row] = list(self.paged.truth(row))
        self.tenancies += 1

    @precondition(lambda self: any(self.model))
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from([row for row, slots in enumerate(self.model) if slots]))
        self.paged.release(row)
        self.model[row] = []

    @precondition(lambda self: any(self.model) and [] in self.model)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        src = data.draw(st.sampled_from([row for row, slots in enumerate(self.model) if slots]))
        dst = data.draw(st.sampled_from([row for row, slots in enumerate(self.model) if not slots]))
        self.paged.move(src, dst)
        self.model[dst], self.model[src] = self.model[src], []

    @precondition(lambda self: self.growable())
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.growable()), min_size=1, unique=True))
        plan = self.paged.plan(rows)
        for row, slot in zip(rows, plan.slots, strict=True):
            self.model[row].append(slot)
        self.row_steps += len(rows)
        check_window_intact(**held(plan))

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, self.ROWS - 1), min_size=1, unique=True))
        pad = data.draw(st.integers(0, self.ROWS - len(rows)))
        self.paged.slots.sync(self.paged.tables, rows)
        longest = max(1, *(len(self.model[row]) for row in rows))
        mapping, lens = self.paged.slots.read(rows, data.draw(st.integers(longest, self.TOKENS)), pad_rows=pad)
        assert lens.tolist() == [*(len(self.model[row]) for row in rows), *[0] * pad]
        for line, row in enumerate(rows):
            assert mapping[line, : lens[line]].tolist() == self.model[row]
        if self.paged.slots.is_window(mapping):
            check_mapping_is_window(mapping=mapping, table=self.paged.slots.read_buffer, rows=rows)

    @invariant()
    def mirror_agrees_with_the_lists(self) -> None:
        # A new tenant is mirrored at the first sync after it; until then the mirror holds nothing for its row.
        rows = [row for row, slots in enumerate(self.model) if self.paged.slots.length(row) == len(slots)]
        assert all(self.paged.slots.length(row) == 0 for row in range(self.ROWS) if row not in rows)
        table = self.paged.slots
        check_slots_agree(
            slots=table.slots, lengths=table.lengths(rows), truth=[self.model[row] for row in rows], rows=rows
        )

    @invariant()
    def cost_and_address_stay_what_they_are(self) -> None:
        table = self.paged.slots
        check_appends_incremental(appended_cells=table.appended_cells, row_steps=self.row_steps)
        check_resyncs_bounded(resyncs=table.resyncs, tenancies=self.tenancies)
        check_table_stable(recorded=self.address, now=table.address)
        assert int(table.slots.min()) >= 0
        assert int(table.slots.max()) < self.paged.sink


TestSlotTableMachine = SlotTableMachine.TestCase
