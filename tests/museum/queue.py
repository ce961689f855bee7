"""The queue and the pool: who is preempted, what a preempted request forgets, whose block it is."""

from __future__ import annotations

from fast.blocks import BlockAllocator
from fast.engine import Engine
from fast.scheduler import Scheduler
from tests.museum import scenes
from tests.museum.exhibit import HARMLESS, LOCKSTEP, Edit, Exhibit

FREE = "self.cache.free(row)"
LATEST = "by_arrival[len(by_arrival) - 1 - len(preempted)]"

EXHIBITS = (
    Exhibit(
        name="a token that was sampled is kept",
        thread="GeeeekExplorer/nano-vllm#217",
        story="A request that was preempted drops the token that its second prefill samples.",
        edits=(
            Edit(
                Engine._commit,
                "sequence.tokens.append(token)",
                "sequence.tokens += [token] if not sequence.preemptions or len(sequence.tokens) % 3 else []",
            ),
        ),
        scene=scenes.tight_pool,
        full="engine.tokens_cached",
        says="its request holds",
        cheap="engine.tokens_cached",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a token that was sent is not sampled again",
        thread="vllm-project/vllm#38624",
        story="The last token of a preempted request is forgotten with its row and sent a second time.",
        edits=(
            Edit(Scheduler._preempt, "sequence.preemptions += 1", "sequence.preemptions += 1; sequence.tokens.pop()"),
        ),
        scene=scenes.tight_pool,
        full=LOCKSTEP,
        says="alone it is",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a second prefill covers the answer",
        thread="vllm-project/vllm#28787",
        story="A preempted request is computed again from its prompt, and its answer so far is not.",
        edits=(
            Edit(
                Engine._prefill,
                "self.cache.advance_row(row, len(sequence.tokens))",
                "self.cache.advance_row(row, len(sequence.request.prompt_ids))",
            ),
            Edit(Engine._prefill, "tuple(sequence.tokens)", "tuple(sequence.request.prompt_ids)"),
        ),
        scene=scenes.tight_pool,
        full="engine.tokens_cached",
        says="its request holds",
        cheap="engine.tokens_cached",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="the earliest request is never preempted",
        thread="vllm-project/vllm#25538",
        story="The earliest request makes room for the latest, and two long ones undo each other for ever.",
        edits=(Edit(Scheduler._grow, LATEST, "by_arrival[len(preempted)]"),),
        scene=scenes.tight_pool,
        full="scheduler.earliest_kept",
        says="arrival 0 is the earliest running and was preempted",
        cheap="scheduler.earliest_kept",
        off=HARMLESS,
    ),
    Exhibit(
        name="nobody is preempted and admitted in one step",
        thread="vllm-project/vllm-gaudi#1794",
        story="Newcomers are admitted before the running rows grow, and make room for them in the same step.",
        edits=(
            Edit(Scheduler.schedule, "preempted = self._grow()", "early = self._admit()\n    preempted = self._grow()"),
            Edit(
                Scheduler.schedule,
                "tuple(sorted(self.running))",
                "tuple(sorted(row for row, s in self.running.items() if s not in early))",
            ),
            Edit(Scheduler.schedule, "admitted = () if preempted else self._admit()", "admitted = early"),
        ),
        scene=scenes.crowded,
        full="scheduler.preempted_wait",
        says="is preempted and admitted in one step",
        cheap="scheduler.preempted_wait",
        off="ValueError",
    ),
    Exhibit(
        name="the preempted go back to the front",
        thread="vllm-project/vllm-gaudi#1794",
        story="A preempted request queues up again behind everybody; answers stay right and waits grow.",
        edits=(Edit(Scheduler._preempt, "self.waiting.appendleft(sequence)", "self.waiting.append(sequence)"),),
        scene=scenes.queue,
        full="scheduler.queue_order",
        says="waits ahead of arrival",
        cheap="scheduler.queue_order",
        off=HARMLESS,
    ),
    Exhibit(
        name="nobody jumps the head of the queue",
        thread="vllm-project/vllm#39734",
        story="The smallest waiting request is admitted first, and a long one waits for as long as short ones come.",
        edits=(
            Edit(Scheduler._admit, "head = self.waiting[0]", "head = min(self.waiting, key=lambda s: len(s.tokens))"),
            Edit(Scheduler._admit, "self.waiting.popleft()", "self.waiting.remove(head)"),
        ),
        scene=scenes.queue,
        full="scheduler.queue_order",
        says="runs while arrival",
        cheap="scheduler.queue_order",
        off=HARMLESS,
    ),
    Exhibit(
        name="a row that decodes has grown",
        thread="GeeeekExplorer/nano-vllm#217",
        story="Growth asks for the tokens that are stored and not for the one to come, wrong just past a block's end.",
        edits=(Edit(Scheduler._grow_one, "if table.length < table.capacity", "if table.length <= table.capacity"),),
        scene=scenes.captured_rush,
        full="scheduler.decode_room",
        says="one more is to be written",
        cheap="scheduler.decode_room",
        off="OutOfBlocks",
    ),
    Exhibit(
        name="an abort gives the blocks back",
        thread="vllm-project/vllm#29928",
        story="A dropped request leaves its row, its blocks stay owned by nobody, and the pool never empties.",
        edits=(Edit(Scheduler._vacate, FREE, "self.cache.reset_row(row)"),),
        scene=scenes.aborted_rush,
        full="blocks.conserved",
        says="owned =",
        cheap="blocks.conserved",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="an aborted request says nothing more",
        thread="vllm-project/vllm#22545",
        story="An abort is reported and the request runs on.",
        edits=(Edit(Engine.abort, "self.scheduler.release(self._open[request_id])", "pass"),),
        scene=scenes.aborted_rush,
        full="engine.ends_once",
        says="has an event after the one that ended it",
        cheap="engine.ends_once",
        off="KeyError",
    ),
    Exhibit(
        name="a block is freed once",
        thread="vllm-project/vllm#37076",
        story="A sequence's blocks are freed twice, and the second owner's K/V is given to a third.",
        edits=(
            Edit(Scheduler._vacate, FREE, "self.cache.allocator.free(list(self.cache.tables[row].blocks)); " + FREE),
            Edit(BlockAllocator.free, "if not (0 <= block < self.num_blocks and self._owned[block])", "if block < 0"),
        ),
        scene=scenes.captured_rush,
        full="blocks.conserved",
        says="the pool has 16",
        cheap="blocks.conserved",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a double free is refused where it happens",
        thread="vllm-project/vllm#37076",
        story="The same double free with the allocator's own check in place.",
        edits=(
            Edit(Scheduler._vacate, FREE, "self.cache.allocator.free(list(self.cache.tables[row].blocks)); " + FREE),
        ),
        scene=scenes.captured_rush,
        full="ValueError",
        says="it was freed twice or never handed out",
        cheap="ValueError",
        off="ValueError",
    ),
    Exhibit(
        name="a free block is nobody's",
        thread="sgl-project/sglang#23392",
        story="Other ids than the freed ones go on the free list: as many, and some of them in use.",
        edits=(
            Edit(
                BlockAllocator.free, "reversed(blocks)", "[(block + 1) % self.num_blocks for block in reversed(blocks)]"
            ),
        ),
        scene=scenes.captured_rush,
        full="blocks.conserved",
        says="7 free + 8 owned = 15 blocks, the pool has 16",
        cheap="blocks.conserved",
        off="ValueError",
    ),
    Exhibit(
        name="no block stands in a table twice",
        thread="vllm-project/vllm#37076",
        story="One block is given out for each that was taken off the list, so the counts balance.",
        edits=(Edit(BlockAllocator.allocate, "return taken", "return taken[:1] * count"),),
        scene=scenes.captured_rush,
        full="blocks.owned_once",
        says="block 0 is in table 0 and in table 0",
        cheap="ValueError",
        off="ValueError",
    ),
    Exhibit(
        name="a block that is handed out is off the list",
        thread="vllm-project/vllm#37076",
        story="Blocks are read from the free list and not taken off it.",
        edits=(
            Edit(
                BlockAllocator.allocate,
                "[self._free.pop() for _ in range(count)]",
                "[self._free[-1 - i] for i in range(count)]",
            ),
        ),
        scene=scenes.captured_rush,
        full="blocks.conserved",
        says="the pool has 16",
        cheap="blocks.conserved",
        off="ValueError",
    ),
)
