"""Steps: what a plan says is stale, rewritten, or run twice, and a mirror that costs or lies."""

from __future__ import annotations

from fast.blocks import BlockTable
from fast.decode import DecodePath
from fast.forwards import Forwards
from fast.plan import _grow, plan_decode
from fast.prefill import PrefillPath
from fast.slots import SlotTable
from tests.museum import scenes
from tests.museum.exhibit import HARMLESS, LOCKSTEP, Edit, Exhibit

BEFORE = "self._check_before(plan)"
POSITIONS = "[length - 1 for length in lengths]"

EXHIBITS = (
    Exhibit(
        name="a plan runs once",
        thread="vllm-project/vllm#26385",
        story="After a change of the batch the step before is still in flight, and its plan is run again.",
        edits=(Edit(DecodePath.run, BEFORE, "plan = self.last_plan if self.steps % 7 == 6 else plan\n    " + BEFORE),),
        scene=scenes.unpersisted_rush,
        full="plan.fresh",
        says="a plan runs once",
        cheap="plan.fresh",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a held plan's window is not rewritten",
        thread="sgl-project/sglang#38140",
        story="Rows are compacted while a step is in flight, over the very row that the step reads.",
        edits=(
            Edit(
                DecodePath.run,
                BEFORE,
                BEFORE + "\n    table = self.cache.slot_table.slots\n    table[0] = table[len(rows) - 1]",
            ),
        ),
        scene=scenes.captured_rush,
        full="slots.window_intact",
        says="row 0 was planned to end in slot",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a held plan's lengths do not move",
        thread="vllm-project/vllm#38624",
        story="Context lengths are the live ones, and the next step's have been counted before this step has run.",
        edits=(Edit(DecodePath.run, BEFORE, BEFORE + "\n    plan.context_lens[: len(rows)] += 1"),),
        scene=scenes.captured_rush,
        full="slots.window_intact",
        says="its context_lens say",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="no row is looked at before its own plan",
        thread="vllm-project/vllm#49620",
        story="A row's last token is taken from the step before, so the token that was just drawn is not the input.",
        edits=(Edit(Forwards.rows, "tokens[-1]", "tokens[-2]"),),
        scene=scenes.captured_rush,
        full=LOCKSTEP,
        says="alone it is",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="each row has its own position",
        thread="unslothai/unsloth#4100",
        story="All rows share the first one's position, and the shorter ones are rotated wrong.",
        edits=(Edit(plan_decode, POSITIONS, "[lengths[0] - 1 for length in lengths]"),),
        scene=scenes.eager_rush,
        full="plan.addressing",
        says="is at position",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a position counts from zero",
        thread="vllm-project/vllm#28787",
        story="The position of a step's token is its length, one too far.",
        edits=(Edit(plan_decode, POSITIONS, "list(lengths)"),),
        scene=scenes.eager_rush,
        full="plan.addressing",
        says="is at position",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a token's slot is its block times the block size",
        thread="ROCm/aiter#3498",
        story="The stride from block to block is taken to be one slot.",
        edits=(
            Edit(BlockTable.slot, "* self.block_size + token", "+ token"),
            Edit(BlockTable.slots, "range(block * size, block * size + size)", "range(block, block + size)"),
        ),
        scene=scenes.eager_rush,
        full="chunk.slots",
        says="is addressed in slot 1, its block table says 4",
        cheap="plan.slots_unique",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a mirror shows the table of its own row",
        thread="sgl-project/sglang#38140",
        story="A row is copied in one slot off, so the first decode step reads another mapping than the prefill wrote.",
        edits=(Edit(SlotTable.extend, "at + stop] = slots", "at + stop] = [slot + 1 for slot in slots]"),),
        scene=scenes.eager_rush,
        full="slots.agree",
        says="its block table says",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a rectangle is not rebuilt each step",
        thread="vllm-project/vllm#34733",
        story="Every row is copied in anew at every step: right, and quadratic in the answer.",
        edits=(Edit(SlotTable.sync, "if lengths[row] != tables[row].length", "if lengths is not None"),),
        scene=scenes.eager_rush,
        full="slots.resyncs",
        says="some row is rebuilt while its tenant stays",
        cheap="slots.resyncs",
        off=HARMLESS,
    ),
    Exhibit(
        name="an append writes one cell",
        thread="vllm-project/vllm#34733",
        story="A row that grew by one token is written in whole.",
        edits=(Edit(_grow, "slot_table.append(rows, slots)", "[slot_table.resync(tables[row], row) for row in rows]"),),
        scene=scenes.eager_rush,
        full="slots.appends",
        says="0 cells appended for 4 row steps",
        cheap="slots.appends",
        off=HARMLESS,
    ),
    Exhibit(
        name="a mirror does not run ahead of its table",
        thread="vllm-project/vllm#27878",
        story="The next token's place is mirrored before the token exists.",
        edits=(
            Edit(
                DecodePath._check_after,
                "check_window_intact(",
                "self.cache.slot_table.append(plan.rows[:1], plan.slots[:1]); check_window_intact(",
            ),
        ),
        scene=scenes.eager_rush,
        full="plan.rebuild",
        says="the rectangle is being rebuilt",
        cheap="plan.rebuild",
        off=HARMLESS,
    ),
    Exhibit(
        name="a chunk writes where its table says",
        thread="sgl-project/sglang#38140",
        story="A chunk's slots are handed over in another order than the block table's.",
        edits=(Edit(PrefillPath._address, "tuple(slots)", "tuple(slots[::-1])"),),
        scene=scenes.chunked_rush,
        full="chunk.slots",
        says="is addressed in slot",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
)
