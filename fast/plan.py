"""What one decode step will address, as frozen data: made first, checked, then executed elsewhere.

`plan_decode` is the only writer of a step's addressing: it counts this step's tokens into the block tables, mirrors
their slots, and reads the rectangle back. Its host work is O(rows), whatever the histories are worth. It knows
no request, no model and no scheduler; what it is given decides the two switches on the way, the bucket set
(`bucket_decode`) and the fixed input buffers (`persist_inputs`).

Gates: gates.plan. Proof: tests/test_plan.py. Story: plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fast.blocks import BlockTable, OutOfBlocks
from fast.buckets import BucketSet
from fast.inputs import DecodeInputs
from fast.slots import SlotTable
from gates.buckets import check_pad_inert
from gates.plan import check_plan_addressing, check_slots_unique
from gates.slots import check_appends_incremental


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One decode step over R real rows padded to N = R + `pad_rows`, reading W columns of addressing.

    `lengths` and `slots` are the plan's own host copies of what the tensors said when it was made. They cannot
    move, so they are what a gate compares shared storage with: live state is never compared with live state.
    """

    rows: tuple[int, ...]  # R row indices in the persistent batch
    pad_rows: int  # N - R
    slot_mapping: Tensor  # [N, W] int64: a window on the slot table, or a gathered copy
    context_lens: Tensor  # [N] int64: tokens each row may read, this step's included; 0 for a padded row
    write_slots: Tensor  # [N] int64: where this step's K/V goes; the sink slot for a padded row
    positions: Tensor  # [N] int64: absolute position of this step's token; 0 for a padded row
    input_ids: Tensor  # [N] int64: this step's tokens; 0 for a padded row
    lengths: tuple[int, ...]  # R: context_lens of the real rows
    slots: tuple[int, ...]  # R: write_slots of the real rows
    bucket: tuple[int, int] | None = None  # (rows, width) this plan was padded to, None when exact

    @property
    def num_rows(self) -> int:
        """Rows the forward sees, padding included (N)."""
        return len(self.rows) + self.pad_rows

    @property
    def width(self) -> int:
        """Columns of addressing the forward sees (W)."""
        return self.slot_mapping.shape[1]


def plan_decode(
    *,
    tables: Sequence[BlockTable],
    slot_table: SlotTable,
    rows: Sequence[int],
    input_ids: Sequence[int],
    sink_slot: int,
    buckets: BucketSet | None = None,
    inputs: DecodeInputs | None = None,
) -> DecodePlan:
    """Plan one token for each of `rows`; all rows grow by one, or none does.

    `tables` has one block table a row of the slot table. Without `buckets` the shape is exact; without `inputs`
    the four vectors are new tensors. Rows that are the prefix 0..R-1 in that order get a window.

    Raises:
        ValueError: no rows, a row named twice, a count of ids that is not the rows', a row at `max_model_len`, or a
            shape that the slot table or the inputs cannot take.
        OutOfBlocks: a row's next token has no block; growth comes before planning.
    """
    rows = tuple(rows)
    _refuse(tables, slot_table, rows, input_ids)
    # 1. The shape, exact or the smallest bucket that takes it: asked first, because asking can refuse.
    width = 1 + max([tables[row].length for row in rows])
    bucket = buckets.bucket_for(len(rows), width) if buckets else None
    padded, width = bucket or (len(rows), width)
    _refuse_shape(slot_table, inputs, padded, width)
    # 2. The mirror catches up before the block tables grow: after, a stale row would look one append behind.
    slot_table.sync(tables, rows)
    # 3. One token a row, in the block tables and in the mirror.
    slots = _grow(tables, slot_table, rows)
    lengths = slot_table.lengths(rows)
    if buckets and bucket:
        buckets.count(rows=len(rows), tokens=sum(lengths), bucket=bucket)
    # 4. The rectangle is read, and the vectors are written where the forward will look for them.
    mapping = slot_table.rectangle(rows, width, padded - len(rows))
    inputs = inputs or DecodeInputs(max_batch_size=padded, sink_slot=sink_slot, device=mapping.device)
    step = inputs.write(
        input_ids=input_ids,
        positions=[length - 1 for length in lengths],
        write_slots=slots,
        context_lens=lengths,
        pad_rows=padded - len(rows),
    )
    plan = DecodePlan(
        rows=rows,
        pad_rows=padded - len(rows),
        slot_mapping=mapping,
        context_lens=step.context_lens,
        write_slots=step.write_slots,
        positions=step.positions,
        input_ids=step.input_ids,
        lengths=lengths,
        slots=slots,
        bucket=bucket,
    )
    run_plan_gates(plan, sink_slot)
    return plan


def run_plan_gates(plan: DecodePlan, sink_slot: int) -> None:
    """The gates of a plan that was just made, a decode step's or a warm-up's."""
    check_slots_unique(rows=plan.rows, slots=plan.slots, sink_slot=sink_slot)
    check_plan_addressing(
        rows=plan.rows,
        slot_mapping=plan.slot_mapping,
        context_lens=plan.context_lens,
        write_slots=plan.write_slots,
        positions=plan.positions,
        sink_slot=sink_slot,
    )
    check_pad_inert(
        context_lens=plan.context_lens,
        write_slots=plan.write_slots,
        pad_rows=plan.pad_rows,
        sink_slot=sink_slot,
    )


def _grow(tables: Sequence[BlockTable], slot_table: SlotTable, rows: tuple[int, ...]) -> tuple[int, ...]:
    slots = tuple([tables[row].append() for row in rows])
    before = slot_table.appended_cells
    slot_table.append(rows, slots)
    check_appends_incremental(appended_cells=slot_table.appended_cells - before, row_steps=len(rows))
    return slots


def _refuse(
    tables: Sequence[BlockTable], slot_table: SlotTable, rows: tuple[int, ...], input_ids: Sequence[int]
) -> None:
    """What the rows themselves can get wrong, before any moves: a batch half grown is worse than one refused."""
    if not rows or len(set(rows)) != len(rows) or min(rows) < 0:
        raise ValueError(f"rows: {rows} is not a set of one row or more")
    if len(input_ids) != len(rows):
        raise ValueError(f"input_ids: {len(input_ids)} tokens for {len(rows)} rows")
    limit = slot_table.max_model_len
    full = [row for row in rows if tables[row].length >= limit]
    if full:
        raise ValueError(f"rows: {full} already hold {limit} tokens, the length limit")
    short = [row for row in rows if tables[row].length >= tables[row].capacity]
    if short:
        raise OutOfBlocks(f"rows {short} have no block for their next token; growth comes before planning")


def _refuse_shape(slot_table: SlotTable, inputs: DecodeInputs | None, padded: int, width: int) -> None:
    """A bucket set made for a larger batch or context than the storage is refused before any row grows."""
    rows = min(slot_table.max_batch_size, inputs.max_batch_size if inputs else slot_table.max_batch_size)
    if padded > rows or width > slot_table.max_model_len:
        raise ValueError(f"bucket: {padded} x {width} exceeds the storage of {rows} x {slot_table.max_model_len}")
