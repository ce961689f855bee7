"""The prefix cache: what a hit must be, when a block may be published, and who may free or write it."""

from __future__ import annotations

from fast.blocks import BlockAllocator
from fast.engine import Engine
from fast.prefix import PrefixCache
from fast.scheduler import Scheduler
from tests.museum import scenes
from tests.museum.exhibit import HARMLESS, LOCKSTEP, Edit, Exhibit

SAME = "return entry.parent is parent and entry.token_ids == ours and entry.salt == prefix.salt"

EXHIBITS = (
    Exhibit(
        name="a hash is not a prefix",
        thread="ggml-org/llama.cpp#27148",
        story="Two prefixes share a name, and the second is answered from the first one's K/V.",
        edits=(
            Edit(PrefixCache.names, "names.append(self._name_of(", "names.append(index + 0 * self._name_of("),
            Edit(PrefixCache._same, SAME, "return True"),
        ),
        scene=scenes.unequal_prompts,
        full="prefix.hit",
        says="of a hit holds tokens",
        cheap="prefix.hit",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a prompt that is scored is computed",
        thread="vllm-project/vllm#3251",
        story="A request that asks for its prompt's logprobs finds most of it in the cache, where no logits are.",
        edits=(Edit(Engine.submit, "apart=sequence.reads_prompt", "apart=False"),),
        scene=scenes.scored_prompt,
        full="sampling.prompt_scored",
        says="0 logprobs for the 8 prompt tokens after the first",
        cheap="sampling.prompt_scored",
        off=HARMLESS,
    ),
    Exhibit(
        name="a block that is still computed is nobody's hit",
        thread="GeeeekExplorer/nano-vllm#144",
        story="A prompt's blocks are published when it is admitted, before its K/V exists.",
        edits=(
            Edit(
                Scheduler._seat,
                "self.running[row] = sequence",
                "self.running[row] = sequence; self.prefix.publish(sequence.prefix, sequence.tokens, "
                "self.cache.tables[row].blocks, computed=len(sequence.tokens))",
            ),
        ),
        scene=scenes.parting_prompts,
        full="prefix.private",
        says="row 0 writes into block 0, which",
        cheap="prefix.private",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a block is published whole",
        thread="GeeeekExplorer/nano-vllm#207",
        story="Every full block of a prompt is published with its first chunk.",
        edits=(Edit(PrefixCache.publish, "computed // self.block_size)", "len(names))"),),
        scene=scenes.equal_prompts_in_chunks,
        full="prefix.published",
        says="are computed",
        cheap="prefix.published",
        off=HARMLESS,
    ),
    Exhibit(
        name="the last token of a prompt is computed",
        thread="GeeeekExplorer/nano-vllm#144",
        story="A prompt of exactly so many blocks is found whole, and nothing is left to take logits from.",
        edits=(Edit(PrefixCache.match, "(len(tokens) - 1) // self.block_size", "len(tokens) // self.block_size"),),
        scene=scenes.equal_prompts,
        full="prefix.last",
        says="8 of 8 tokens are taken from the cache, 0 are left to compute",
        cheap="prefix.last",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a block that is held is not freed",
        thread="vllm-project/vllm#37076",
        story="The first of two holders gives a shared block back, and it is handed out under the second.",
        edits=(
            Edit(BlockAllocator.free, "if self._holders[block]:\n            continue", "self._holders[block] = 0"),
        ),
        scene=scenes.equal_prompts,
        full="blocks.holders",
        says="block 0 counts 0 holders, 3 tables hold it",
        cheap="ValueError",
        off="ValueError",
    ),
    Exhibit(
        name="a hit has a holder for each row",
        thread="vllm-project/vllm#37076",
        story="A row takes a published block and is not counted, so another row's end gives it away.",
        edits=(Edit(BlockAllocator.share, "self._hold(block)", "self._holders[block] or self._hold(block)"),),
        scene=scenes.equal_prompts,
        full="blocks.conserved",
        says="blocks, the pool has 16",
        cheap="blocks.conserved",
        off="ValueError",
    ),
    Exhibit(
        name="a preempted request that finds its own blocks goes on",
        thread="GeeeekExplorer/nano-vllm#211",
        story="What it finds after a preemption is computed over again, in the place where others read it.",
        edits=(
            Edit(
                Scheduler._seat,
                "adopt_row(row, found, sequence.found)",
                "adopt_row(row, found, 0 if sequence.preemptions else sequence.found)",
            ),
        ),
        scene=scenes.preempted_and_found,
        full="prefix.private",
        says="which is published",
        cheap="prefix.private",
        off=HARMLESS,
    ),
    Exhibit(
        name="what is found is as if computed",
        thread="GeeeekExplorer/nano-vllm#199",
        story="What another has computed meanwhile is taken over, and the request is not told.",
        edits=(Edit(Scheduler._follow, "self._found(sequence, len(taken))", "pass"),),
        scene=scenes.equal_prompts,
        full="prefix.computed_once",
        says="it stores",
        cheap="prefix.computed_once",
        off=HARMLESS,
    ),
)
