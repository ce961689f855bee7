"""Recordings: a key that misses something, a list with a gap, storage that moved, a launch in front of a client."""

from __future__ import annotations

import inspect

from fast.buckets import BucketSet
from fast.capture import CapturedDecode, GraphKey
from fast.decode import DecodePath
from fast.engine import Engine
from fast.inputs import DecodeInputs
from fast.model import Forward
from fast.slots import SlotTable
from fast.warmup import warm_shapes, warmup_plan
from tests.museum import scenes
from tests.museum.exhibit import HARMLESS, LOCKSTEP, Edit, Exhibit

KEY = "cls((plan.num_rows, plan.width), tuple(layouts))"
NO_WIDTH = "cls((plan.num_rows, 0), tuple(layouts[:-1]))"
ROW_SIZES = "self.row_sizes = tuple(sorted({*wanted, max_batch_size}))"

EXHIBITS = (
    Exhibit(
        name="a launch bakes in no host number that the key does not hold",
        thread="huggingface/transformers#45323",
        story="The longest context is a host number that the launch keeps, so every replay reads as far as the first.",
        edits=(
            Edit(
                inspect.unwrap(Forward.decode),
                "plan.slot_mapping, plan.context_lens",
                "plan.slot_mapping[:, : max(plan.lengths, default=1)], plan.context_lens",
            ),
        ),
        scene=scenes.captured_rush,
        full="capture.key_complete",
        says="the launch consumed ['lengths']",
        cheap=LOCKSTEP,
        off=LOCKSTEP,
    ),
    Exhibit(
        name="two shapes have two keys",
        thread="huggingface/transformers#45323",
        story="The key of a recording leaves the width out, so each width overwrites the one before it.",
        edits=(Edit(GraphKey.of.__func__, KEY, NO_WIDTH),),
        scene=scenes.captured_rush,
        full="warmup.all_warm",
        says="9 shapes in the warm list, 6 not recorded",
        cheap="warmup.all_warm",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a recording is replayed at the shape it was made at",
        thread="huggingface/transformers#45323",
        story="Recorded at its first step and looked up without the width, a shape answers for a wider one.",
        edits=(Edit(GraphKey.of.__func__, KEY, NO_WIDTH),),
        scene=scenes.lazy_rush,
        full="capture.replay_shape",
        says="recorded (rows, width) (2, 16), planned (2, 32)",
        cheap="capture.replay_shape",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="the largest batch has a bucket",
        thread="vllm-project/vllm-ascend#16049",
        story="The batch limit is off the capture stride, so the largest batches have no graph.",
        edits=(
            Edit(
                BucketSet.__init__,
                ROW_SIZES,
                "self.row_sizes = tuple(size for size in (1, 2, 4, 8) if size <= max_batch_size)",
            ),
        ),
        scene=scenes.off_stride,
        full="buckets.covers",
        says="the largest rows size is 4, the limit is 5",
        cheap="buckets.covers",
        off="ValueError",
    ),
    Exhibit(
        name="every batch size maps to a bucket",
        thread="GeeeekExplorer/nano-vllm model_runner.py",
        story="The smallest size that takes a batch is looked up in a list that ends below the limit.",
        edits=(Edit(BucketSet.__init__, "_round_up_table(self.row_sizes)", "_round_up_table(self.row_sizes[:-1])"),),
        scene=scenes.off_stride,
        full="buckets.covers",
        says="4 rows counts are mapped, the limit is 5",
        cheap="buckets.covers",
        off="IndexError",
    ),
    Exhibit(
        name="no bucket is larger than the batch",
        thread="NVIDIA/TensorRT-LLM#10688",
        story="The default capture list holds size 113 where the batch ends at 4.",
        edits=(Edit(BucketSet.__init__, ROW_SIZES, "self.row_sizes = tuple(sorted({*wanted, max_batch_size, 113}))"),),
        scene=scenes.captured_rush,
        full="buckets.covers",
        says="the largest rows size is 113, the limit is 4",
        cheap="buckets.covers",
        off="ValueError",
    ),
    Exhibit(
        name="no bucket is wider than the table",
        thread="GeeeekExplorer/nano-vllm#106",
        story="The last width is rounded up past the limit, and a step's rectangle is wider than its buffer.",
        edits=(
            Edit(
                DecodePath._bucket_set,
                "max_model_len=cache.max_model_len",
                "max_model_len=cache.max_model_len + width_multiple",
            ),
        ),
        scene=scenes.full_context,
        full="ValueError",
        says="width: 54 is not in 1..38",
        cheap="ValueError",
        off="ValueError",
    ),
    Exhibit(
        name="an answer ends at the length limit",
        thread="GeeeekExplorer/nano-vllm#106",
        story="The limit is counted one too late, and the last token of a full context asks for a column more.",
        edits=(Edit(Engine.submit, "room = self.max_model_len - len", "room = self.max_model_len + 1 - len"),),
        scene=scenes.full_context,
        full="engine.within_limits",
        says="38 of 38 in all, the request goes on",
        cheap="engine.within_limits",
        off=LOCKSTEP,
    ),
    Exhibit(
        name="a step without a recording is counted",
        thread="vllm-project/vllm-ascend#16049",
        story="A step that no recording takes runs eagerly, several times slower, and nobody is told.",
        edits=(Edit(CapturedDecode.run, "self.eager[reason] += 1", "pass"),),
        scene=scenes.half_warm_rush,
        full="capture.eager_counted",
        says="decode steps, ",
        cheap="capture.eager_counted",
        off=HARMLESS,
    ),
    Exhibit(
        name="the warm list is every shape that was asked for",
        thread="vllm-project/vllm#40734",
        story="The largest row bucket is left off the list.",
        edits=(Edit(warm_shapes, "for r in buckets.row_sizes if", "for r in buckets.row_sizes[:-1] if"),),
        scene=scenes.captured_rush,
        full="warmup.all_warm",
        says="9 shapes in the warm list, 3 not recorded",
        cheap="warmup.all_warm",
        off=HARMLESS,
    ),
    Exhibit(
        name="the largest recording is made first",
        thread="vllm-project/vllm#23378",
        story="The list is recorded smallest first, and the shared pool is allocated anew for each larger shape.",
        edits=(Edit(warm_shapes, "reverse=True", "reverse=False"),),
        scene=scenes.captured_rush,
        full="warmup.biggest_first",
        says="which needs a larger pool",
        cheap="warmup.biggest_first",
        off=HARMLESS,
    ),
    Exhibit(
        name="a warm batch has no rows",
        thread="vllm-project/vllm#57720",
        story="The list is recorded over a dummy request in row 0, so its recordings belong to that row.",
        edits=(Edit(warmup_plan, "        rows=(),\n        pad_rows", "        rows=(0,),\n        pad_rows"),),
        scene=scenes.captured_rush,
        full="warmup.rows_empty",
        says="a warm batch over real rows (0,)",
        cheap="warmup.rows_empty",
        off=HARMLESS,
    ),
    Exhibit(
        name="a recording made over rows serves those rows",
        thread="vllm-project/vllm#41331",
        story="A recording of one batch is replayed for another one of the same shape.",
        edits=(Edit(CapturedDecode._recording_for, "and recording.rows in ((), plan.rows)", ""),),
        scene=scenes.lazy_rush,
        full="capture.replay_rows",
        says="recorded over rows (0, 1, 2, 3), replayed over rows (0, 1, 2)",
        cheap="capture.replay_rows",
        off=HARMLESS,
    ),
    Exhibit(
        name="nothing is recorded in front of a client",
        thread="GeeeekExplorer/nano-vllm#105",
        story="A shape that was not warmed is recorded when it first comes, and the client waits for it.",
        edits=(Edit(CapturedDecode._recording_for, "if self.record_on_miss:", "if True:"),),
        scene=scenes.half_warm_rush,
        full="warmup.no_cold_captures",
        says="1 recordings after ready, 0 may",
        cheap="warmup.no_cold_captures",
        off=HARMLESS,
    ),
    Exhibit(
        name="the table stays where it was recorded",
        thread="vllm-project/vllm#41331",
        story="The table is reallocated when a row is copied in, and the recordings read the old one.",
        edits=(
            Edit(
                SlotTable.extend,
                "self._lengths[row] = stop",
                "self.slots = self.slots.clone(); self._bind(); self._lengths[row] = stop",
            ),
        ),
        scene=scenes.captured_rush,
        full="slots.table_stable",
        says="the slot table was recorded at",
        cheap="slots.table_stable",
        off=HARMLESS,
    ),
    Exhibit(
        name="inputs are written in place",
        thread="vllm-project/vllm#52531",
        story="A step's inputs are new tensors, and the recording reads those of the step that made it.",
        edits=(
            Edit(
                DecodeInputs.write,
                "rows = len(input_ids)",
                "rows, self._buffer = len(input_ids), self._buffer.clone(); self._host = self._buffer.numpy()",
            ),
        ),
        scene=scenes.captured_rush,
        full="inputs.addresses",
        says="a recording made before reads storage that no step writes",
        cheap="inputs.addresses",
        off=HARMLESS,
    ),
    Exhibit(
        name="a recording is made over the table itself",
        thread="vllm-project/vllm#57720",
        story="The rectangle is a copy, and the recording is bound to a tensor that is gone after the step.",
        edits=(
            Edit(SlotTable.rectangle, "return self.slots[:total, :width]", "return self.slots[:total, :width].clone()"),
        ),
        scene=scenes.captured_rush,
        full="slots.window",
        says="so the fix is on the plan's side",
        cheap="slots.window",
        off=HARMLESS,
    ),
)
