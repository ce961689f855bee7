"""The decode half of a step, from rows to logits: plan, check, then replay or run eagerly.

Six switches, each correct without the next: `bucket_decode` pads to a closed set of shapes, `persist_inputs` writes
the step's vectors in place, `capture_decode` replays recordings (and needs both), `record_on_miss` records an unseen
shape in front of the client, `compile_decode` compiles the pure pieces of the forward (and needs the buckets, which
bound its compilations), and the cache's `gather` reads scattered rows at a fixed address. It owns no row and no
request; the engine says which rows decode and gets one line of logits for each.

Gates: gates.plan. Proof: tests/test_wiring.py. Story: wiring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fast.backend import AnyForward
from fast.buckets import BucketSet, Shape
from fast.cache import BatchedPagedKVCache
from fast.capture import CapturedDecode, CUDAGraphRecorder, HostRecorder, Recorder
from fast.compiled import DEFAULT_BACKEND, CompiledDecode
from fast.gpu import GPUForward
from fast.inputs import DecodeInputs, LateIds
from fast.model import Forward
from fast.plan import DecodePlan, plan_decode
from fast.warmup import WarmupReport, warm_budget_bytes, warm_decode, warm_shapes, warmup_plan, width_ceiling
from gates.blocks import check_mapping_follows_tables
from gates.buckets import check_pad_finite
from gates.core import FULL, enabled
from gates.plan import check_plan_fresh
from gates.slots import check_slots_agree, check_window_intact
from gates.warmup import check_all_warm, check_no_cold_captures

DEFAULT_WIDTH_MULTIPLE = 128
RESERVED_BYTES = 256 << 20  # of a device's free memory, kept out of the recordings' pool for prefills


@dataclass(frozen=True, slots=True)
class DecodeOutcome:
    """How one decode step ran: the bucket it was padded to, and whether it was replayed or why not."""

    bucket: Shape | None
    replayed: bool
    reason: str  # empty when replayed


class DecodePath:
    """Runs decode steps over one cache and one forward.

    Raises:
        ValueError: `capture_decode` without `bucket_decode` and `persist_inputs`: a recording needs a closed set of
            shapes at fixed addresses. `compile_decode` without `bucket_decode`, or where nothing can be compiled.
    """

    def __init__(
        self,
        forward: AnyForward,
        cache: BatchedPagedKVCache,
        *,
        bucket_decode: bool = False,
        persist_inputs: bool = False,
        capture_decode: bool = False,
        record_on_miss: bool = False,
        compile_decode: bool = False,
        compile_backend: str = DEFAULT_BACKEND,
        width_multiple: int = DEFAULT_WIDTH_MULTIPLE,
        recorder: Recorder | None = None,
    ) -> None:
        if capture_decode and not (bucket_decode and persist_inputs):
            raise ValueError("capture_decode: True needs bucket_decode and persist_inputs, which fix shape and address")
        if compile_decode and not bucket_decode:
            raise ValueError("compile_decode: True needs bucket_decode, or every row count would be compiled")
        if compile_decode and not isinstance(forward, Forward):
            raise ValueError("compile_decode: True compiles torch's operators, and kernels has none; choose one")
        self.forward = forward
        self.cache = cache
        self.buckets = self._bucket_set(width_multiple) if bucket_decode else None
        device = cache.slot_table.slots.device
        size = {"max_batch_size": cache.max_batch_size, "sink_slot": cache.sink_slot}
        self.inputs = DecodeInputs(**size, device=device) if persist_inputs else None
        self.compiled: CompiledDecode | None = None
        if isinstance(forward, Forward) and compile_decode and self.buckets is not None:
            self.compiled = CompiledDecode(forward, row_sizes=self.buckets.row_sizes, backend=compile_backend)
        self.captured: CapturedDecode | None = None
        if capture_decode and self.inputs is not None:
            self.captured = CapturedDecode(
                self._forward_plan,
                recorder or self._recorder(device),
                slot_table=cache.slot_table,
                inputs=self.inputs,
                record_on_miss=record_on_miss,
            )
        self.warmup: WarmupReport | None = None
        self.steps = self.tokens = 0
        self.skipped = ""  # why the last step's rows were computed elsewhere
        self.last_plan: DecodePlan | None = None
        self._eager_before: dict[str, int] = {}  # the counts of eager steps when the last step began

    def run(self, rows: Sequence[int], input_ids: Sequence[int], late: LateIds | None = None) -> Tensor:  # [R, V]
        """One token for each of `rows`; line i of the logits belongs to `rows[i]`, padding is cut off.

        `late` are the ids that the host does not know yet; `input_ids` has any id in their places.
        """
        plan = plan_decode(
            tables=self.cache.tables,
            slot_table=self.cache.slot_table,
            rows=rows,
            input_ids=input_ids,
            sink_slot=self.cache.sink_slot,
            buckets=self.buckets,
            inputs=self.inputs,
        )
        if late is not None:
            late.put(plan.input_ids)
        self._check_before(plan)
        self.last_plan, self.skipped = plan, ""
        self.steps += 1
        self.tokens += len(plan.rows)
        if self.captured is None:
            logits = self._forward_plan(plan)
        else:
            self._eager_before = dict(self.captured.eager)
            logits = self.captured.run(plan)
        self._check_after(plan, logits)
        return logits[: len(plan.rows)]

    def warm(
        self, *, max_rows: int | None = None, max_width: int | None = None, budget_bytes: int | None = None
    ) -> WarmupReport:
        """Compile every row bucket, record the warm list, and declare the path ready; before any request runs.

        The list is trimmed on both axes, what is compiled is not: a trimmed step is slow, a compiling one stands.
        On a CUDA device the budget is what is free now, after weights and pool, and it trims the width too; the GPU
        kernels build no score rectangle, and hold their workspace already.

        Raises:
            ValueError: nothing is captured or compiled here, so there is nothing to warm.
            GateError: the list does not fit `budget_bytes`, or a warm batch touched what is not its own.
        """
        if self.compiled is not None:
            self._warm_compiled(self.compiled)
        if self.captured is None or self.buckets is None:
            if self.compiled is None:
                raise ValueError("warm: capture_decode is off, there is no list to record")
            self.warmup = WarmupReport((), self.compiled.seconds, 0, "compiled")
            return self.warmup
        num_heads = self.forward.config.num_heads
        if budget_bytes is None and self.cache.slot_table.slots.is_cuda and isinstance(self.forward, Forward):
            budget_bytes = warm_budget_bytes(free_bytes=torch.cuda.mem_get_info()[0], reserved_bytes=RESERVED_BYTES)
            rows = min(max_rows or self.buckets.max_batch_size, self.buckets.max_batch_size)
            ceiling = width_ceiling(budget_bytes, rows=rows, num_heads=num_heads)
            max_width = ceiling if max_width is None else min(max_width, ceiling)
        shapes = warm_shapes(self.buckets, max_rows=max_rows, max_width=max_width)
        self.warmup = warm_decode(
            self.captured,
            shapes,
            num_heads=num_heads,
            pools=self.cache.covered,
            budget_bytes=budget_bytes,
        )
        # The list once more, from the set and the two trims alone: a shape that it lacks is slow for ever.
        most_rows = self.buckets.max_batch_size if max_rows is None else max_rows
        widest = self.buckets.max_model_len if max_width is None else max_width
        wanted = [shape for shape in self.buckets.shapes if shape[0] <= most_rows and shape[1] <= widest]
        check_all_warm(wanted=wanted, recorded=self.captured.shapes)
        self.captured.ready()
        if isinstance(self.forward, GPUForward):
            self.forward.settle()
        return self.warmup

    @property
    def last_outcome(self) -> DecodeOutcome:
        """How the last step ran; to be asked after one."""
        if self.skipped:
            return DecodeOutcome(None, replayed=False, reason=self.skipped)
        bucket = None if self.last_plan is None else self.last_plan.bucket
        if self.captured is None:
            return DecodeOutcome(bucket, replayed=False, reason="no capture")
        before = self._eager_before
        reasons = [reason for reason, count in self.captured.eager.items() if count > before.get(reason, 0)]
        return DecodeOutcome(bucket, replayed=not reasons, reason=", ".join(reasons))

    def describe(self) -> dict[str, Any]:
        """The switches, the bucket set and the warm list, as plain values."""
        report, captured, buckets = self.warmup, self.captured, self.buckets
        return {
            "bucket_decode": buckets is not None,
            "persist_inputs": self.inputs is not None,
            "capture_decode": captured is not None,
            "record_on_miss": captured is not None and captured.record_on_miss,
            "compile_decode": None if self.compiled is None else self.compiled.render(),
            "row_sizes": [] if buckets is None else list(buckets.row_sizes),
            "width_multiple": None if buckets is None else buckets.width_multiple,
            "warm": None if report is None else report.as_dict(),
        }

    def stats(self) -> dict[str, Any]:
        """Counts of this path: steps, replays, why the others were eager, what padding cost."""
        captured, buckets = self.captured, self.buckets
        kernels = None if isinstance(self.forward, Forward) else self.forward
        return {
            "decode_steps": self.steps,
            "decode_tokens": self.tokens,
            "replayed": 0 if captured is None else captured.replays,
            "eager": {"no capture": self.steps} if captured is None else dict(captured.eager),
            "captures": 0 if captured is None else captured.captures,
            "captures_after_ready": 0 if captured is None else captured.captures_after_ready,
            "kernel_compiles_after_ready": kernels.compiles_after_ready if kernels is not None else 0,
            "compiles": 0 if self.compiled is None else self.compiled.compiles,
            "uncompiled": {} if self.compiled is None else dict(self.compiled.uncompiled),
            "row_padding_share": 0.0 if buckets is None else buckets.row_padding_share,
            "cell_padding_share": 0.0 if buckets is None else buckets.cell_padding_share,
        }

    def _bucket_set(self, width_multiple: int) -> BucketSet:
        cache = self.cache
        if not isinstance(self.forward, Forward):
            width_multiple = cache.max_model_len  # a kernel reads each row to its own length, whatever the width
        return BucketSet(
            max_batch_size=cache.max_batch_size, max_model_len=cache.max_model_len, width_multiple=width_multiple
        )

    def _recorder(self, device: torch.device) -> Recorder:
        if device.type == "cuda":
            return CUDAGraphRecorder()
        return HostRecorder(run_up_to_width=self.buckets.widths[0] if self.buckets else None)

    def _warm_compiled(self, compiled: CompiledDecode) -> None:
        device = self.cache.slot_table.slots.device
        size = {"max_batch_size": self.cache.max_batch_size, "sink_slot": self.cache.sink_slot}
        inputs = self.inputs or DecodeInputs(**size, device=device)

        def padding(rows: int) -> DecodePlan:
            return warmup_plan((rows, 1), slot_table=self.cache.slot_table, inputs=inputs)

        compiled.warm(padding, self.cache)
        compiled.ready()

    def _forward_plan(self, plan: DecodePlan) -> Tensor:  # [N, V]
        forward = self.forward if self.compiled is None else self.compiled
        return forward.decode(plan, self.cache)

    def _check_before(self, plan: DecodePlan) -> None:
        """Between the writer of the plan and its reader."""
        tables = self.cache.tables
        check_plan_fresh(rows=plan.rows, lengths=plan.lengths, table_lengths=[tables[row].length for row in plan.rows])
        if enabled(FULL):
            check_slots_agree(
                slots=self.cache.slot_table.slots,
                lengths=self.cache.slot_table.lengths(plan.rows),
                truth=[tables[row].slots(0, tables[row].length) for row in plan.rows],
                rows=plan.rows,
            )
            check_mapping_follows_tables(
                slot_mapping=plan.slot_mapping[: len(plan.rows)],
                context_lens=plan.context_lens[: len(plan.rows)],
                tables=[tables[row].blocks for row in plan.rows],
                block_size=self.cache.block_size,
            )

    def _check_after(self, plan: DecodePlan, logits: Tensor) -> None:  # logits: [N, V]
        """After the reader: nothing rewrote the plan while it ran, and nothing was recorded that must not be."""
        check_window_intact(
            rows=plan.rows,
            slot_mapping=plan.slot_mapping,
            context_lens=plan.context_lens,
            lengths=plan.lengths,
            slots=plan.slots,
        )
        check_pad_finite(logits=logits, pad_rows=plan.pad_rows)
        if self.captured is not None and not self.captured.record_on_miss:
            check_no_cold_captures(captures_after_ready=self.captured.captures_after_ready)
