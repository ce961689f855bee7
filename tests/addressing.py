"""A cache without K/V for the tests of the decode path's addressing: block tables, their mirror, and their truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fast.blocks import BlockAllocator, BlockTable
from fast.buckets import sink_slot
from fast.plan import DecodePlan, plan_decode
from fast.slots import SlotTable
from gates.slots import check_slots_agree


class Paged:
    """Rows of block tables over one allocator, kept in step with a slot table the way the engine's cache does it."""

    def __init__(self, rows: int = 4, max_model_len: int = 32, *, block_size: int = 4, gather: bool = False) -> None:
        num_blocks = rows * -(-max_model_len // block_size)
        self.allocator = BlockAllocator(num_blocks)
        self.tables = [BlockTable(block_size) for _ in range(rows)]
        self.slots = SlotTable(max_batch_size=rows, max_model_len=max_model_len, gather=gather)
        self.sink = sink_slot(num_blocks=num_blocks, block_size=block_size)

    def adopt(self, row: int, tokens: int) -> None:
        """A new tenant with `tokens` prefilled tokens; the mirror learns of it at the next sync."""
        self.tables[row].adopt([])
        self.reserve(row, tokens)
        self.tables[row].advance(tokens)

    def reserve(self, row: int, tokens: int) -> None:
        """Blocks for `tokens` tokens in all, one at a time, so that rows interleave in the pool."""
        self.tables[row].extend(self.allocator.allocate(self.tables[row].blocks_short(tokens)))

    def release(self, row: int) -> None:
        """The tenant is gone: lengths are zero on both sides and no cell was cleared."""
        self.slots.reset(row)
        self.allocator.free(self.tables[row].release())

    def move(self, src: int, dst: int) -> None:
        """The tables change places and the mirror follows."""
        self.slots.move_row(src, dst)
        self.tables[src], self.tables[dst] = self.tables[dst], self.tables[src]

    def plan(self, rows: Sequence[int], input_ids: Sequence[int] | None = None, **options: Any) -> DecodePlan:
        """Grow what needs a block, then plan one step."""
        for row in rows:
            self.reserve(row, self.tables[row].length + 1)
        return plan_decode(
            tables=self.tables,
            slot_table=self.slots,
            rows=rows,
            input_ids=list(range(len(rows))) if input_ids is None else input_ids,
            sink_slot=self.sink,
            **options,
        )

    def truth(self, row: int) -> list[int]:
        """The slots of a row, from its block table alone."""
        return self.tables[row].slots(0, self.tables[row].length)

    def check_agrees(self, rows: Sequence[int] | None = None) -> None:
        """The gate between mirror and block tables, over `rows` or all of them."""
        rows = range(len(self.tables)) if rows is None else rows
        check_slots_agree(
            slots=self.slots.slots, lengths=self.slots.lengths(rows), truth=[self.truth(r) for r in rows], rows=rows
        )
