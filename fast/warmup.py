"""Record the capture list before the server accepts anything, on batches that are nothing but padding.

A warm batch is a decode step over no rows: every row is padding, so it reads nothing (context length 0) and
writes only the sink slot. It is the limit of a real plan and no special case, which is why the recordings made
over it compute real steps: all that they hold is storage that real steps write through. The second half of the
file prices a list in seconds and bytes, because a closed set of shapes is a product and warming all of it can
cost more than the stalls it removes.

Gates: gates.warmup. Proof: tests/test_warmup.py. Story: warmup.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fast.buckets import BucketSet
from fast.capture import CapturedDecode, Shape, workspace_bytes
from fast.inputs import DecodeInputs
from fast.plan import DecodePlan, run_plan_gates
from fast.slots import SlotTable
from gates.capture import check_pool_budget
from gates.core import FULL, enabled
from gates.slots import check_table_stable
from gates.warmup import (
    check_all_warm,
    check_biggest_first,
    check_warm_budget,
    check_warm_graphs_unbound,
    check_warm_rows_empty,
    check_warm_touches_nothing,
    check_warm_writes_sink,
)

MADE_UP_TOKEN = 0  # what a padded row holds anyway, and every vocabulary has it


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What a warm-up recorded and what it cost: shapes in order, wall seconds, and the shared pool's bytes."""

    shapes: tuple[Shape, ...]
    seconds: float
    workspace_bytes: int
    recorder: str

    @property
    def graphs(self) -> int:
        """Recordings made."""
        return len(self.shapes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `/health`: the corners of the list rather than all of it."""
        return {
            "graphs": self.graphs,
            "recorder": self.recorder,
            "seconds": round(self.seconds, 3),
            "workspace_bytes": self.workspace_bytes,
            "max_rows": max((rows for rows, _ in self.shapes), default=0),
            "max_width": max((width for _, width in self.shapes), default=0),
        }

    def render(self) -> str:
        """The boot line."""
        if not self.shapes:
            return "warm list: empty"
        rows, width = self.shapes[0]
        return (
            f"warm list: {self.graphs} {self.recorder} recordings up to {rows} rows x {width} tokens "
            f"in {self.seconds:.2f} s, {self.workspace_bytes / 1e6:.1f} MB of shared workspace"
        )


def warm_shapes(buckets: BucketSet, *, max_rows: int | None = None, max_width: int | None = None) -> list[Shape]:
    """The bucket set as a capture list, biggest first, trimmed to what a server will present.

    Recordings share one pool that is sized by its largest member, so that one is recorded first and the pool
    is allocated once at its final size.
    """
    rows = [r for r in buckets.row_sizes if max_rows is None or r <= max_rows]
    widths = [w for w in buckets.widths if max_width is None or w <= max_width]
    return sorted(((r, w) for r in rows for w in widths), key=lambda s: (s[0] * s[1], s), reverse=True)


def warmup_plan(shape: Shape, *, slot_table: SlotTable, inputs: DecodeInputs) -> DecodePlan:
    """The plan of one shape over no sequences: the real rectangle's window and the real input buffers."""
    pad_rows, width = shape
    slot_mapping = slot_table.rectangle((), width, pad_rows)
    window = inputs.write(input_ids=(), positions=(), write_slots=(), context_lens=(), pad_rows=pad_rows)
    return DecodePlan(
        rows=(),
        pad_rows=pad_rows,
        slot_mapping=slot_mapping,
        context_lens=window.context_lens,
        write_slots=window.write_slots,
        positions=window.positions,
        input_ids=window.input_ids,
        lengths=(),
        slots=(),
        bucket=shape,
    )


def warmup_batch(shape: Shape, *, slot_table: SlotTable, inputs: DecodeInputs) -> DecodePlan:
    """A warm plan with its made-up tokens in the input buffer, held to every gate that a real step's plan is."""
    plan = warmup_plan(shape, slot_table=slot_table, inputs=inputs)
    plan.input_ids.fill_(MADE_UP_TOKEN)
    check_warm_rows_empty(rows=plan.rows, pad_rows=plan.pad_rows, shape=shape)
    run_plan_gates(plan, inputs.sink_slot)
    check_warm_writes_sink(write_slots=plan.write_slots, context_lens=plan.context_lens, sink_slot=inputs.sink_slot)
    return plan


def warm_decode(
    captured: CapturedDecode,
    shapes: Sequence[Shape],
    *,
    num_heads: int,
    pools: Sequence[Tensor] = (),  # each [S + 1, ...]: K/V pools with the sink as their last slot
    budget_bytes: int | None = None,
) -> WarmupReport:
    """Record every shape of the list over padding alone, and prove that nothing else was touched."""
    slot_table, inputs, sink_slot = captured.slot_table, captured.inputs, captured.inputs.sink_slot
    needed = max((workspace_bytes(rows=r, width=w, num_heads=num_heads) for r, w in shapes), default=0)
    if budget_bytes is not None and shapes:
        widest, rows = max(w for _, w in shapes), max(r for r, _ in shapes)
        check_pool_budget(needed=needed, budget=budget_bytes, shape=shapes[0])
        ceiling = width_ceiling(budget_bytes, rows=rows, num_heads=num_heads)
        check_warm_budget(widest=widest, ceiling=ceiling, rows=rows)
    check_biggest_first(shapes=shapes)
    before = [pool[:sink_slot].clone() for pool in pools] if enabled(FULL) else []
    address, start = slot_table.address, time.perf_counter()
    for shape in shapes:
        captured.record(warmup_batch(shape, slot_table=slot_table, inputs=inputs))
    seconds = time.perf_counter() - start
    if enabled(FULL):
        check_warm_touches_nothing(before=before, after=[pool[:sink_slot] for pool in pools])
    check_table_stable(recorded=address, now=slot_table.address)
    check_warm_graphs_unbound(recorded_rows=[recording.rows for recording in captured.recordings.values()])
    check_all_warm(wanted=shapes, recorded=captured.shapes)
    return WarmupReport(tuple(shapes), seconds, needed, captured.recorder.name)


def lazy_captures(*, generated: int, prompt_tokens: int, width_multiple: int) -> int:
    """Recordings that a run takes in front of its client: one a width bucket that it crosses.

    The contexts read are prompt_tokens + 1 .. prompt_tokens + generated.
    """
    if generated < 1:
        return 0
    first, last = prompt_tokens + 1, prompt_tokens + generated
    return -(-last // width_multiple) - -(-first // width_multiple) + 1


def stall_seconds(captures: int, *, seconds_per_graph: float) -> float:
    """Seconds of a client's latency that lazy recordings take."""
    return captures * seconds_per_graph


def warmup_seconds(shapes: Sequence[Shape], *, seconds_per_graph: float) -> float:
    """Seconds of start-up that recording the whole list takes."""
    return len(shapes) * seconds_per_graph


def warm_budget_bytes(*, free_bytes: int, reserved_bytes: int = 0) -> int:
    """Bytes left for the shared pool once weights and K/V pool are resident, less a reserve; never negative."""
    return max(0, free_bytes - reserved_bytes)


def width_ceiling(budget_bytes: int, *, rows: int, num_heads: int, element_bytes: int = 4) -> int:
    """The widest capture (tokens) whose workspace at `rows` rows fits the budget: `workspace_bytes` inverted."""
    return budget_bytes // workspace_bytes(rows=rows, width=1, num_heads=num_heads, element_bytes=element_bytes)
