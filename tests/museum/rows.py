"""Rows: a tenant's state is left behind, or reaches the next tenant, or the batch is read by the wrong index."""

from __future__ import annotations

from fast.cache import BatchedPagedKVCache
from fast.compact import plan_compaction
from fast.engine import Engine
from fast.rows import Rows
from fast.scheduler import Scheduler
from fast.slots import SlotTable
from tests.museum import scenes
from tests.museum.exhibit import HARMLESS, LOCKSTEP, Edit, Exhibit

EXHIBITS = (
    Exhibit(
        name="every column follows its request",
        thread="vllm-project/vllm#43894",
        story="A compaction moves the columns by a hand-written list, and the newest one is not on it.",
        edits=(Edit(Rows.move, "in self.columns()", "in self.columns()[:-2]"),),
        scene=scenes.eager_rush,
        full="compact.right",
        says="forbidden was",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a recycled row holds nothing of its last tenant",
        thread="vllm-project/vllm#43894",
        story="A row takes only what a request asks for and is not cleared when it leaves, so a bias is inherited.",
        edits=(
            Edit(Rows.release, "in self.columns()", "in [c for c in self.columns() if c.name != 'bias']"),
            Edit(
                Rows.admit, "in self.columns()", "in [c for c in self.columns() if c.name != 'bias' or _bias(sequence)]"
            ),
        ),
        scene=scenes.eager_rush,
        full="scheduler.vacated_neutral",
        says="still holds bias",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="the side that a move empties is empty",
        thread="vllm-project/vllm#49613",
        story="A move fills its target and leaves the source as it was.",
        edits=(Edit(Rows.move, "self.release(src)", "pass"),),
        scene=scenes.eager_rush,
        full="scheduler.vacated_neutral",
        says="empty row",
        cheap=HARMLESS,
        off=HARMLESS,
    ),
    Exhibit(
        name="a swap does not alias",
        thread="vllm-project/vllm#48419",
        story="Two views are swapped by assignment, and both rows end as one.",
        edits=(
            Edit(
                BatchedPagedKVCache.move_row,
                "self.tables[src], self.tables[dst] = self.tables[dst], self.tables[src]",
                "self.tables[dst] = self.tables[src]",
            ),
        ),
        scene=scenes.eager_rush,
        full="blocks.conserved",
        says="8 free + 11 owned = 19 blocks, the pool has 16",
        cheap="blocks.conserved",
        off="ValueError",
    ),
    Exhibit(
        name="a mirror forgets a tenant that left",
        thread="vllm-project/vllm#49757",
        story="A vacated row keeps its slots, and a next tenant of the same length is taken for the same one.",
        edits=(Edit(BatchedPagedKVCache.reset_row, "self.slot_table.reset(row)", "pass"),),
        scene=scenes.reused_row,
        full="slots.vacated",
        says="is empty and mirrors 9 tokens",
        cheap="slots.vacated",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a move copies the whole live prefix",
        thread="vllm-project/vllm#34733",
        story="To save time only the active part of a row is copied, and its last cell is taken for inactive.",
        edits=(
            Edit(
                SlotTable.move_row,
                "self.slots[dst, :length].copy_(self.slots[src, :length])",
                "self.slots[dst, : length - 1].copy_(self.slots[src, : length - 1])",
            ),
        ),
        scene=scenes.eager_rush,
        full="compact.right",
        says="slots was",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a move leaves no length behind",
        thread="vllm-project/vllm#49613",
        story="The moved row's old place still counts its tokens.",
        edits=(
            Edit(
                SlotTable.move_row, "self._lengths[dst], self._lengths[src] = length, 0", "self._lengths[dst] = length"
            ),
        ),
        scene=scenes.eager_rush,
        full="slots.vacated",
        says="is empty and mirrors",
        cheap="slots.vacated",
        off=HARMLESS,
    ),
    Exhibit(
        name="a survivor moves into an empty row",
        thread="tenstorrent/vllm-tt-plugin#103",
        story="The hole is one row off, so a survivor is copied over a neighbour.",
        edits=(Edit(plan_compaction, "holes(rows), strict=True", "[row + 1 for row in holes(rows)], strict=True"),),
        scene=scenes.eager_rush,
        full="compact.moves_minimal",
        says="is occupied",
        cheap="compact.moves_minimal",
        off="ValueError",
    ),
    Exhibit(
        name="a compaction moves no row that is in place",
        thread="vllm-project/vllm#34733",
        story="Every row behind a hole moves down by one, which is right and costs the whole batch.",
        edits=(
            Edit(
                plan_compaction,
                "zip(strays(rows), holes(rows), strict=True)",
                "((src, dst) for dst, src in enumerate(sorted(rows)) if src != dst)",
            ),
        ),
        scene=scenes.eager_rush,
        full="compact.moves_minimal",
        says="rows that were in place were copied",
        cheap="compact.moves_minimal",
        off=HARMLESS,
    ),
    Exhibit(
        name="a newcomer sits in the lowest free row",
        thread="vllm-project/vllm#34733",
        story="Newcomers take the highest free row, so the next compaction moves a row that no release displaced.",
        edits=(Edit(Scheduler._admit, "heapq.heappop(self._free_rows)", "self._free_rows.pop()"),),
        scene=scenes.crowded,
        full="compact.moves_amortised",
        says="rows are being moved that no completion displaced",
        cheap="compact.moves_amortised",
        off=HARMLESS,
    ),
    Exhibit(
        name="a rectangle is read by row and not by place in the batch",
        thread="lite_llama docs/continuous_batching.md",
        story="The slot table is indexed by batch position: right until the first early end, then fluent and wrong.",
        edits=(
            Edit(SlotTable.rectangle, "stage(rows, self.slots.device)", "stage(range(len(rows)), self.slots.device)"),
        ),
        scene=scenes.scattered_rush,
        full="plan.addressing",
        says="its last entry is slot",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="only a prefix is a window",
        thread="tenstorrent/vllm-tt-plugin#104",
        story="A batch with a hole is read as the first rows of the table.",
        edits=(Edit(SlotTable.rectangle, "prefix = rows == tuple(range(len(rows)))", "prefix = True"),),
        scene=scenes.scattered_rush,
        full="plan.addressing",
        says="its last entry is slot",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a gather is done anew each step",
        thread="sgl-project/sglang#38140",
        story="The gathered rectangle is taken over from the step before, one token short.",
        edits=(Edit(SlotTable.rectangle, "if rows:", "if rows and self.gathers % 2:"),),
        scene=scenes.gathered_rush,
        full="plan.addressing",
        says="its last entry is slot",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a gather narrows before it copies",
        thread="vllm-project/vllm#34733",
        story="Whole rows of the table are copied for the few columns that are read.",
        edits=(
            Edit(
                SlotTable.rectangle,
                "source.index_select(0, torch.nn.functional.pad(index, (0, pad_rows)))",
                "self.slots.index_select(0, torch.nn.functional.pad(index, (0, pad_rows)))[:, :width]",
            ),
        ),
        scene=scenes.scattered_rush,
        full="slots.gather_narrow",
        says="cells were copied",
        cheap="slots.gather_narrow",
        off=HARMLESS,
    ),
    Exhibit(
        name="sampler state is filled where the request sits",
        thread="vllm-project/vllm#49613",
        story="State is stored by place in the batch while the request sits in a recycled row.",
        edits=(
            Edit(Scheduler._seat, "self.on_admit(row, sequence)", "self.on_admit(len(self.running) - 1, sequence)"),
        ),
        scene=scenes.scattered_rush,
        full="scheduler.rows_follow",
        says="its sampler state is",
        cheap="scheduler.rows_follow",
        off="AttributeError",
    ),
    Exhibit(
        name="a row is sampled with its own state",
        thread="vllm-project/vllm#43894",
        story="Logits are lined up newcomers first, the sampler's columns by batch position.",
        edits=(Edit(Engine._sample, '"index": rows', '"index": sorted(rows)'),),
        scene=scenes.eager_rush,
        full="sampling.draw_position",
        says="draws at position 5, its request holds 17 tokens",
        cheap="sampling.draw_position",
        off=LOCKSTEP,
    ),
)
