"""What must hold of the slot table: it mirrors the block tables, its windows stand still, its cost stays linear.

Gates of cost stand beside gates of truth here, because a table that is rebuilt every step is right and useless.

Proof: tests/test_slots.py. Story: slots.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gates.core import CHEAP, FULL, gate, require, require_rows


@gate("slots.agree", at=FULL)
def check_slots_agree(
    *,
    slots: Tensor,  # [max_batch_size, max_model_len]
    lengths: Sequence[int],
    truth: Sequence[Sequence[int]],
    rows: Sequence[int],
) -> None:
    """Every slot of `rows` equals the block table's, which `lengths[i]` and `truth[i]` give for `rows[i]`.

    Every slot and not just the length: the mirror's own staleness test is length alone, and it is enough only while
    a block table refuses a second tenant.
    """
    for row, length, wanted in zip(rows, lengths, truth, strict=True):
        require(length == len(wanted), f"row {row} mirrors {length} tokens, its block table holds {len(wanted)}")
        held = slots[row, :length].tolist()
        bad = [token for token in range(length) if held[token] != wanted[token]]
        if bad:
            first = bad[0]
            require(
                False,
                f"row {row} says token {first} is in slot {held[first]}, its block table says {wanted[first]}; "
                f"the row changed tenant without a reset (the cache's side) [{len(bad)} of {length} tokens]",
            )


@gate("slots.vacated", at=CHEAP)
def check_vacated_unmirrored(*, mirrored: Sequence[int], stored: Sequence[int]) -> None:
    """A row whose block table is empty mirrors no token: what it kept would pass for a next tenant of that length.

    An occupied row may lag behind its table until the next sync, which sees it by the length.
    """
    require(len(mirrored) == len(stored), f"{len(mirrored)} rows mirrored, {len(stored)} block tables")
    bad = [row for row, (held, tokens) in enumerate(zip(mirrored, stored, strict=True)) if held and not tokens]
    if bad:
        require_rows(bad, len(stored), f"row {bad[0]} is empty and mirrors {mirrored[bad[0]]} tokens")


@gate("slots.gather_narrow", at=CHEAP)
def check_gather_narrow(*, copied_cells: int, read_cells: int) -> None:
    """A gather copies the cells that are read and no other, for its price is the copy."""
    require(
        copied_cells == read_cells,
        f"{copied_cells:,} cells were copied to read {read_cells:,}; narrow to the width before the gather",
    )


@gate("slots.window", at=CHEAP)
def check_mapping_is_window(
    *,
    mapping: Tensor,  # [N, W]
    table: Tensor,  # [max_batch_size, max_model_len]
    rows: Sequence[int],
) -> None:
    """The rectangle lies at the table's address with the table's row stride, so that a recording may hold it.

    A gate of capture and not of truth: a gathered copy holds the same numbers.
    """
    if mapping.data_ptr() == table.data_ptr() and mapping.stride() == table.stride():
        return
    prefix = tuple(rows) == tuple(range(len(rows)))
    side = "the plan's side" if prefix else "the scheduler's side: move the rows down"
    require(
        False,
        f"the rectangle of rows {tuple(rows)} is a copy at {mapping.data_ptr():#x} with row stride "
        f"{mapping.stride(0)}, the table is at {table.data_ptr():#x} with {table.stride(0)}; the rows "
        f"{'are' if prefix else 'are not'} the prefix 0..{len(rows) - 1}, so the fix is on {side}",
    )


@gate("slots.window_intact", at=FULL)
def check_window_intact(
    *,
    rows: Sequence[int],
    slot_mapping: Tensor,  # [N, W]
    context_lens: Tensor,  # [N]
    lengths: Sequence[int],
    slots: Sequence[int],
    made: Tensor | None = None,  # [N, W]
) -> None:
    """Nothing has rewritten a held plan: its tensors still say what its own host copies `lengths` and `slots` say.

    The block tables are no use here. A window is a view of the mirror, so after a change of tenant the window and
    the tables agree with each other and not with the plan. `made`, a clone taken with the plan, extends the
    comparison from each row's last cell to all of its cells (a shorter new tenant does not reach the last).
    """
    held = context_lens[: len(rows)].tolist()
    bad = [row for row, now, then in zip(rows, held, lengths, strict=True) if now != then]
    require_rows(bad, len(rows), f"the plan holds lengths {list(lengths)}, its context_lens say {held}")
    for line, (row, length, slot) in enumerate(zip(rows, lengths, slots, strict=True)):
        last = int(slot_mapping[line, length - 1])
        require(
            last == slot,
            f"row {row} was planned to end in slot {slot}, its window now says {last}; the row was rewritten under "
            f"a plan that was still held",
        )
        if made is not None:
            changed = int((slot_mapping[line, :length] != made[line, :length]).sum())
            require(changed == 0, f"row {row} was planned over {length} cells, {changed} have changed since")


@gate("slots.appends", at=CHEAP)
def check_appends_incremental(*, appended_cells: int, row_steps: int) -> None:
    """One cell is written for each row and step, whatever the histories are worth."""
    require(
        appended_cells == row_steps,
        f"{appended_cells} cells appended for {row_steps} row steps; each row writes one cell a step",
    )


@gate("slots.resyncs", at=CHEAP)
def check_resyncs_bounded(*, resyncs: int, tenancies: int) -> None:
    """A row is copied in whole at most once for each tenant it ever had."""
    require(
        resyncs <= tenancies,
        f"{resyncs} whole-row resyncs for {tenancies} tenants; some row is rebuilt while its tenant stays, so its "
        f"tokens reach the block table around the slot table (the cache's side)",
    )


@gate("slots.fits", at=CHEAP)
def check_table_fits(*, table_bytes: int, block_table_bytes: int, budget_bytes: int) -> None:
    """The addressing that the process reserves stays within a budget."""
    times = table_bytes // max(1, block_table_bytes)
    require(
        table_bytes <= budget_bytes,
        f"the slot table reserves {table_bytes:,} bytes, the budget is {budget_bytes:,}; the same addressing as "
        f"block ids is {block_table_bytes:,} bytes, {times}x smaller (lower max_model_len or max_batch_size)",
    )


@gate("slots.table_stable", at=CHEAP)
def check_table_stable(*, recorded: int, now: int) -> None:
    """The slot table is at the address it had when the first window on it was recorded."""
    require(
        recorded == now,
        f"the slot table was recorded at {recorded:#x} and is now at {now:#x}; every window recorded before points "
        f"at storage that nobody writes (it was moved to another device after recording)",
    )
