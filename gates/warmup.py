"""What a warm-up must be (a batch of nothing but padding), must touch (nothing) and must leave behind.

The first four gates stand around the recording of one shape, the others at the end of the list and at the end
of a run. They take plain values and tensors, no engine.

Proof: tests/test_warmup.py. Story: warmup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gates.core import CHEAP, FULL, gate, require, require_rows

Shape = tuple[int, int]


@gate("warmup.rows_empty", at=CHEAP)
def check_warm_rows_empty(*, rows: Sequence[int], pad_rows: int, shape: Shape) -> None:
    """A warm batch holds no real row and is padding from end to end."""
    require(not rows, f"a warm batch over real rows {tuple(rows)}; it must hold none")
    require(pad_rows == shape[0], f"{pad_rows} padded rows, shape (rows, width) {shape}")


@gate("warmup.writes_sink", at=FULL)
def check_warm_writes_sink(
    *,
    write_slots: Tensor,  # [N]
    context_lens: Tensor,  # [N]
    sink_slot: int,
) -> None:
    """Every row of a warm batch writes the sink slot and may read nothing."""
    slots, lengths = write_slots.tolist(), context_lens.tolist()
    stray = [row for row, slot in enumerate(slots) if slot != sink_slot]
    require_rows(stray, len(slots), f"a warm row writes a slot that is not the sink {sink_slot}")
    reads = [row for row, length in enumerate(lengths) if length != 0]
    require_rows(reads, len(lengths), "a warm row may read a history; its context length must be 0")


@gate("warmup.touches_nothing", at=FULL)
def check_warm_touches_nothing(
    *,
    before: Iterable[Tensor],  # each [S, ...]: a layer's pool without its sink
    after: Iterable[Tensor],  # the same, after the recording
) -> None:
    """Bit for bit, no slot that the allocator can hand out changed while a shape was recorded."""
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        same = torch.eq(old.contiguous().view(torch.uint8), new.contiguous().view(torch.uint8))
        require(bool(same.all()), f"pool {index}: {int((~same).sum())} bytes changed while warming, 0 may")


@gate("warmup.graphs_unbound", at=CHEAP)
def check_warm_graphs_unbound(*, recorded_rows: Sequence[tuple[int, ...]]) -> None:
    """Every recording in the list was made over no rows, so none can be wrong about which rows it serves."""
    bound = [index for index, rows in enumerate(recorded_rows) if rows]
    require(
        not bound,
        f"{len(bound)} of {len(recorded_rows)} recordings are bound to rows, the first to "
        f"{recorded_rows[bound[0]] if bound else ()}; a step recorded them, not the warm-up",
    )


@gate("warmup.no_cold_captures", at=CHEAP)
def check_no_cold_captures(*, captures_after_ready: int) -> None:
    """Nothing was recorded in front of a waiting client."""
    require(captures_after_ready == 0, f"{captures_after_ready} recordings after ready, 0 may")


@gate("warmup.all_warm", at=CHEAP)
def check_all_warm(*, wanted: Iterable[Shape], recorded: Iterable[Shape]) -> None:
    """The recordings that exist are the warm list, no shape more and none missing."""
    wanted_set, recorded_set = set(wanted), set(recorded)
    missing, extra = sorted(wanted_set - recorded_set), sorted(recorded_set - wanted_set)
    require(not missing, f"{len(wanted_set)} shapes in the warm list, {len(missing)} not recorded: first {missing[:1]}")
    require(not extra, f"{len(extra)} shapes recorded that the warm list does not hold: first {extra[:1]}")


@gate("warmup.biggest_first", at=CHEAP)
def check_biggest_first(*, shapes: Sequence[Shape]) -> None:
    """Recordings that share one pool are made in falling size, so that the pool is allocated once."""
    for (rows, width), (next_rows, next_width) in pairwise(shapes):
        require(
            rows * width >= next_rows * next_width,
            f"(rows, width) {(rows, width)} is recorded before {(next_rows, next_width)}, which needs a larger pool",
        )


@gate("warmup.budget", at=CHEAP)
def check_warm_budget(*, widest: int, ceiling: int, rows: int) -> None:
    """The widest shape of the list is within what the memory left can hold (tokens, at `rows` rows)."""
    require(widest <= ceiling, f"the warm list reaches width {widest} at {rows} rows, the budget ends at {ceiling}")


@gate("warmup.arm_replayed_every_step", at=CHEAP)
def check_arm_replayed_every_step(*, decode_steps: int, replayed: int, reasons: dict[str, int]) -> None:
    """An arm that claims recordings ran every decode step from one; `reasons` counts the others by cause."""
    causes = ", ".join(f"{count} {cause}" for cause, count in sorted(reasons.items())) or "none counted"
    require(replayed == decode_steps, f"{decode_steps} decode steps, {replayed} replayed (eager: {causes})")
