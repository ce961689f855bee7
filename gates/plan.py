"""What must hold of a decode plan: it addresses what it says it does, it is fresh, and it was cheap to make.

Proof: tests/test_plan.py. Story: plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gates.core import CHEAP, FULL, gate, require, require_rows


@gate("plan.addressing", at=FULL)
def check_plan_addressing(
    *,
    rows: Sequence[int],
    slot_mapping: Tensor,  # [N, W]
    context_lens: Tensor,  # [N]
    write_slots: Tensor,  # [N]
    positions: Tensor,  # [N]
    sink_slot: int,
) -> None:
    """Each row writes to its last real entry of the rectangle, at the position of that entry, and every cell is legal.

    Over a list this says how a rectangle was built; over a window the same lines say whether it still stands. Cells
    past a row's length need not be zero, only an index that exists: a read gathers before it masks.
    """
    width = slot_mapping.shape[1]
    lens, writes, at = context_lens.tolist(), write_slots.tolist(), positions.tolist()
    for line, row in enumerate(rows):
        require(1 <= lens[line] <= width, f"row {row} reads {lens[line]} tokens, the rectangle is {width} wide")
        last = int(slot_mapping[line, lens[line] - 1])
        require(last == writes[line], f"row {row} writes to slot {writes[line]}, its last entry is slot {last}")
        require(at[line] == lens[line] - 1, f"row {row} is at position {at[line]}, it reads {lens[line]} tokens")
    low, high = int(slot_mapping.min()), int(slot_mapping.max())
    require(low >= 0 and high <= sink_slot, f"cells are {low}..{high}, legal slots are 0..{sink_slot}")


@gate("plan.fresh", at=CHEAP)
def check_plan_fresh(*, rows: Sequence[int], lengths: Sequence[int], table_lengths: Sequence[int]) -> None:
    """The block tables still hold what the plan counted; `lengths` are the plan's host copies, which cannot move."""
    bad = [row for row, then, now in zip(rows, lengths, table_lengths, strict=True) if then != now]
    require_rows(
        bad,
        len(rows),
        f"the plan was made at lengths {list(lengths)}, the tables hold {list(table_lengths)}; a plan runs once",
    )


@gate("plan.slots_unique", at=CHEAP)
def check_slots_unique(*, rows: Sequence[int], slots: Sequence[int], sink_slot: int) -> None:
    """No two live rows write to one slot, and each slot is one that a block can name."""
    bad = [row for row, slot in zip(rows, slots, strict=True) if not 0 <= slot < sink_slot]
    require_rows(bad, len(rows), f"write slots {list(slots)} are not all in 0..{sink_slot - 1}")
    if len(set(slots)) == len(slots):
        return
    owner: dict[int, int] = {}
    for row, slot in zip(rows, slots, strict=True):
        require(
            slot not in owner, f"rows {owner.get(slot)} and {row} both write to slot {slot}; a block has two owners"
        )
        owner[slot] = row


@gate("plan.rebuild", at=CHEAP)
def check_rebuild_bounded(*, cells_written: int, tokens_appended: int, most: float = 2.0) -> None:
    """Addressing costs at most `most` cells a token that entered a row.

    Two is what a mirror can need: a token is written once by an append and once by a resync. A rectangle that
    is rebuilt every step writes in proportion to the history, 272 cells a token after 512 steps.
    """
    ratio = cells_written / max(1, tokens_appended)
    require(
        cells_written <= most * tokens_appended,
        f"{cells_written:,} cells written to append {tokens_appended:,} tokens, {ratio:.0f}x; at most {most:g}x "
        f"(the rectangle is being rebuilt)",
    )
