"""Padding: rows that exist only to fill a bucket write over live K/V, or read it, or stop the step."""

from __future__ import annotations

from fast.attention import decode_attention
from fast.cache import BatchedPagedKVCache
from fast.capture import HostRecorder
from fast.inputs import DecodeInputs
from fast.plan import plan_decode
from fast.warmup import warmup_plan
from tests.museum import scenes
from tests.museum.exhibit import HARMLESS, LOCKSTEP, Edit, Exhibit

NEUTRAL = "(0, 0, sink_slot, 0)"

EXHIBITS = (
    Exhibit(
        name="a padded row writes to no slot by a negative name",
        thread="vllm-project/vllm#43810",
        story="Padded rows carry slot -1, which plain indexing reads as the last slot; here that is the sink.",
        edits=(
            Edit(DecodeInputs.__init__, NEUTRAL, "(0, 0, -1, 0)"),
            Edit(BatchedPagedKVCache.write, "self.k[layer].index_copy_(0, slots, k)", "self.k[layer][slots] = k"),
            Edit(BatchedPagedKVCache.write, "self.v[layer].index_copy_(0, slots, v)", "self.v[layer][slots] = v"),
        ),
        scene=scenes.full_pool,
        full="buckets.pad_inert",
        says="padded rows write to the sink, slot 32, but line 3 says -1",
        cheap=HARMLESS,
        off=HARMLESS,
    ),
    Exhibit(
        name="the last slot that a block can name is no sink",
        thread="vllm-project/vllm#43810",
        story="Padding has no slot of its own, so padded rows write over the last token of the last block.",
        edits=(Edit(BatchedPagedKVCache.sink_slot.fget, "return self.num_slots", "return self.num_slots - 1"),),
        scene=scenes.full_pool,
        full="blocks.sink_outside",
        says="the sink is slot 31, blocks name 0..31",
        cheap="blocks.sink_outside",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="the sink is a slot of the pool",
        thread="vllm-project/vllm#13418",
        story="The pool ends where the blocks end, so every padded row addresses one slot past it.",
        edits=(Edit(BatchedPagedKVCache.__init__, "(self.num_slots + 1, ", "(self.num_slots, "),),
        scene=scenes.eager_rush,
        full="blocks.sink_outside",
        says="the sink is slot 64, blocks name 0..63, the pool has 64 slots",
        cheap="blocks.sink_outside",
        off="IndexError",
    ),
    Exhibit(
        name="a padded row does not write to slot 0",
        thread="GeeeekExplorer/nano-vllm#89",
        story="Write slots are zeroed before a replay, so every padded row stores its K/V over somebody's first token.",
        edits=(Edit(DecodeInputs.__init__, NEUTRAL, "(0, 0, 0, 0)"),),
        scene=scenes.eager_rush,
        full="buckets.pad_inert",
        says="padded rows write to the sink, slot 64, but line 3 says 0",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a warm-up writes to no slot that a block can name",
        thread="sgl-project/sglang#17404",
        story="Capture runs its dummy batch over slot 0, which is also the first slot that a sequence is given.",
        edits=(Edit(warmup_plan, "write_slots=window.write_slots", "write_slots=window.write_slots * 0"),),
        scene=scenes.captured_rush,
        full="buckets.pad_inert",
        says="padded rows write to the sink, slot 64, but line 0 says 0",
        cheap=HARMLESS,
        off=HARMLESS,
    ),
    Exhibit(
        name="a recording leaves no trace in the pool",
        thread="sgl-project/sglang#17404",
        story="The recorder itself runs a dummy step over slot 0, after the plan was checked.",
        edits=(
            Edit(
                HostRecorder.record,
                "        call(plan)\n    return",
                "        plan.write_slots.zero_()\n        call(plan)\n    return",
            ),
        ),
        scene=scenes.captured_rush,
        full="warmup.touches_nothing",
        says="bytes changed while warming, 0 may",
        cheap=HARMLESS,
        off=HARMLESS,
    ),
    Exhibit(
        name="nothing of a larger batch stands behind a smaller one",
        thread="vllm-project/vllm#21196",
        story="Only the live rows are written in place, so padded rows keep write slots of requests that are gone.",
        edits=(
            Edit(DecodeInputs.write, "buffer[rows:] = neutral", "buffer[rows:] = buffer[rows:] if rows else neutral"),
        ),
        scene=scenes.full_pool,
        full="inputs.tail",
        says="behind 3 live rows it is to be 0",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a padded row is no second copy of a live one",
        thread="NVIDIA/TensorRT-LLM#13278",
        story="The batch is filled up by repeating its last row, whose K/V is then written twice with two histories.",
        edits=(Edit(DecodeInputs.write, "buffer[rows:] = neutral", "buffer[rows:] = values[-1] if rows else neutral"),),
        scene=scenes.eager_rush,
        full="inputs.tail",
        says="behind 3 live rows it is to be 0",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a padded row reads nothing",
        thread="sgl-project/sglang#1469",
        story="Padding has the sequence length 1, so it reads a slot that it does not own.",
        edits=(Edit(DecodeInputs.__init__, NEUTRAL, "(0, 0, sink_slot, 1)"),),
        scene=scenes.eager_rush,
        full="buckets.pad_inert",
        says="padded rows have context_len 0, but line 3 says 1",
        cheap=HARMLESS,
        off=HARMLESS,
    ),
    Exhibit(
        name="every vector of a step is as long as the padded batch",
        thread="vllm-project/vllm#13418",
        story="The rectangle is padded to the bucket and the vectors are not.",
        edits=(
            Edit(
                plan_decode,
                "context_lens=lengths,\n        pad_rows=padded - len(rows)",
                "context_lens=lengths,\n        pad_rows=0",
            ),
        ),
        scene=scenes.eager_rush,
        full="buckets.pad_inert",
        says="padded rows have context_len 0, but line 2",
        cheap="RuntimeError",
        off="RuntimeError",
    ),
    Exhibit(
        name="a padded row computes finite numbers",
        thread="vllm-project/vllm#40047",
        story="A row of length 0 has no maximum, so its softmax is NaN, which a reduction over the batch would spread.",
        edits=(Edit(decode_attention, ".masked_fill_((context_lens == 0)[:, None, None, None], 0.0)", ""),),
        scene=scenes.eager_rush,
        full="buckets.pad_finite",
        says="logits of padded rows are not finite",
        cheap=HARMLESS,
        off=HARMLESS,
    ),
    Exhibit(
        name="a weight of zero does not let a NaN through",
        thread="vllm-project/vllm#40047",
        story="Values that padding addresses are weighed with zero but not masked, and zero times NaN is NaN.",
        edits=(Edit(decode_attention, ".masked_fill_(~readable[:, :, None, None], 0.0)", ""),),
        scene=scenes.poisoned_rush,
        full="buckets.pad_finite",
        says="logits of padded rows are not finite",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="what stands past a row's length is never read",
        thread="vllm-project/vllm#42494",
        story="The attention reads the rectangle to its full width, stale tail and all.",
        edits=(
            Edit(decode_attention, 'scores = scores.masked_fill(~readable[:, None, None, :], float("-inf"))', "pass"),
        ),
        scene=scenes.eager_rush,
        full=LOCKSTEP,
        says="alone it is",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
)
