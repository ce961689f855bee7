"""Record a decode step once, run it again on the same addresses, and count every step that could not.

A recording keeps the call and its arguments. It computes the right thing later only because every argument is
a window on storage that the next step writes through: the slot table and the persistent inputs. So the key of
a recording holds everything a launch consumes, and six gates stand in front of every replay. Two recorders sit
behind one small interface: CUDA graphs, and a host recorder that runs the kept call again, so that everything
but the launch itself is tested on a CPU. This module knows plans and no scheduler.

Gates: gates.capture. Proof: tests/test_capture.py. Story: capture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fast.compact import is_compact
from fast.inputs import DecodeInputs
from fast.plan import DecodePlan
from fast.slots import SlotTable
from gates.buckets import check_pad_inert
from gates.capture import check_eager_counted, check_key_complete, check_replay_rows, check_replay_shape
from gates.core import FULL, enabled
from gates.inputs import check_addresses_stable
from gates.plan import check_plan_addressing
from gates.slots import check_mapping_is_window, check_table_stable, check_window_intact

Shape = tuple[int, int]
DecodeCall = Callable[[DecodePlan], Tensor]

# What the decode forward may read of a plan. tests/test_capture.py watches a real forward and proves it.
LAUNCH_TENSORS = ("input_ids", "positions", "write_slots", "context_lens", "slot_mapping")


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Everything about a plan that a launch bakes in: the shape, and each tensor's place and layout."""

    shape: Shape
    tensors: tuple[tuple[int, tuple[int, ...], tuple[int, ...], str], ...]  # (address, shape, stride, dtype)

    @classmethod
    def of(cls, plan: DecodePlan) -> GraphKey:
        """The key of the recording that this plan may replay."""
        layouts = []
        for name in LAUNCH_TENSORS:
            tensor: Tensor = getattr(plan, name)
            layouts.append((tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), str(tensor.dtype)))
        return cls((plan.num_rows, plan.width), tuple(layouts))


class Replay(Protocol):
    """One recorded call, ready to run again."""

    def __call__(self) -> Tensor:
        """Run it on what its arguments' storage holds now; logits [N, V]."""


class Recorder(Protocol):
    """Turns a call and its arguments into something that can run again."""

    name: str

    def record(self, call: DecodeCall, plan: DecodePlan) -> Replay:
        """Run `call(plan)` at least once and keep it."""


class HostRecorder:
    """Keeps the call and its very argument objects, and runs it again: a graph without the graph.

    `run_up_to_width` spares the wide shapes their run: what a first run warms on a host (allocator, compiled
    kernels) depends on the rows. At gates full every shape runs, so that what it touches can be seen.
    """

    name = "host"

    def __init__(self, run_up_to_width: int | None = None) -> None:
        self.run_up_to_width = run_up_to_width

    def record(self, call: DecodeCall, plan: DecodePlan) -> Replay:
        """Run once, as a capture would, and keep both."""
        if self.run_up_to_width is None or plan.width <= self.run_up_to_width or enabled(FULL):
            call(plan)
        return lambda: call(plan)


class CUDAGraphRecorder:
    """CUDA graphs that share one memory pool: warmed on a side stream, then captured.

    Source: the torch.cuda.graphs documentation (side-stream warm-up, `pool=` sharing).
    """

    name = "cuda"

    def __init__(self, warm_calls: int = 2) -> None:
        self.warm_calls = warm_calls
        self._pool: Any = None

    def record(self, call: DecodeCall, plan: DecodePlan) -> Replay:
        """Capture into the shared pool; the returned logits are the graph's own output buffer."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self.warm_calls):
                call(plan)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = call(plan)
        self._pool = self._pool or graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


@dataclass(frozen=True, slots=True)
class Recording:
    """One entry of the capture list: the shape, the rows it was recorded over (none when warm), and the replay."""

    shape: Shape
    rows: tuple[int, ...]
    replay: Replay


class CapturedDecode:
    """Runs a decode plan from its recording when there is one, eagerly otherwise, and counts which and why.

    `record_on_miss` records an unseen shape in front of the client (the lazy arm). Without it an unseen shape
    runs eagerly and is counted under its reason. `ready` marks the moment from which a client waits.
    """

    def __init__(
        self,
        call: DecodeCall,
        recorder: Recorder,
        *,
        slot_table: SlotTable,
        inputs: DecodeInputs,
        record_on_miss: bool = False,
    ) -> None:
        self.call = call
        self.recorder = recorder
        self.slot_table = slot_table
        self.inputs = inputs
        self.record_on_miss = record_on_miss
        self.recordings: dict[GraphKey, Recording] = {}
        self.captures = self.captures_after_ready = self.replays = self.steps = 0
        self.eager: Counter[str] = Counter()
        self._ready = False
        # What every recording will be bound to, taken once: the small buffers and the large one.
        self._addresses, self._table_address = inputs.addresses, slot_table.address

    @property
    def shapes(self) -> list[Shape]:
        """The (rows, width) of every recording, in the order they were made."""
        return [recording.shape for recording in self.recordings.values()]

    @property
    def replay_share(self) -> float:
        """Replayed decode steps over all decode steps; 1.0 before the first."""
        return self.replays / self.steps if self.steps else 1.0

    def ready(self) -> None:
        """From here on a client waits for every step; a recording made now counts as a cold one."""
        self._ready = True

    def record(self, plan: DecodePlan) -> Recording:
        """Record one plan; called by the warm-up, and on a miss by the lazy arm."""
        check_mapping_is_window(mapping=plan.slot_mapping, table=self.slot_table.read_buffer, rows=plan.rows)
        if enabled(FULL):
            check_key_complete(consumed=fields_consumed(self.call, plan), keyed=LAUNCH_TENSORS, constant=())
        recording = Recording((plan.num_rows, plan.width), plan.rows, self.recorder.record(self.call, plan))
        self.recordings[GraphKey.of(plan)] = recording
        self.captures += 1
        self.captures_after_ready += self._ready
        return recording

    def run(self, plan: DecodePlan) -> Tensor:
        """Logits [N, V] of one decode step."""
        self.steps += 1
        # Before the lookup: storage that moved changes the key, and the step would pass for one more unseen shape.
        check_addresses_stable(recorded=self._addresses, now=self.inputs.addresses)
        check_table_stable(recorded=self._table_address, now=self.slot_table.address)
        # And a copy of rows that are a prefix would pass for scattered ones, and be slow for ever; the key of a
        # recording holds the address, so once one is found there is nothing left to ask.
        if rows_are_a_prefix(plan):
            check_mapping_is_window(mapping=plan.slot_mapping, table=self.slot_table.read_buffer, rows=plan.rows)
        recording, reason = self._recording_for(plan)
        if recording is None:
            self.eager[reason] += 1
            logits = self.call(plan)
        else:
            self._check_preconditions(plan, recording)
            self.replays += 1
            logits = recording.replay()
        check_eager_counted(steps=self.steps, replayed=self.replays, eager=sum(self.eager.values()))
        return logits

    def _recording_for(self, plan: DecodePlan) -> tuple[Recording | None, str]:
        if plan.bucket is None:
            return None, "no bucket"
        recording = self.recordings.get(GraphKey.of(plan))
        # A recording made over real rows froze them; over other rows it has to be made again.
        if recording is not None and recording.rows in ((), plan.rows):
            return recording, ""
        if not self.slot_table.is_window(plan.slot_mapping):
            return None, "scattered rows"
        if self.record_on_miss:
            return self.record(plan), ""
        return None, "unseen shape"

    def _check_preconditions(self, plan: DecodePlan, recording: Recording) -> None:
        """The facts without which a replay computes something else and raises nothing, but for the two of `run`."""
        check_pad_inert(
            context_lens=plan.context_lens,
            write_slots=plan.write_slots,
            pad_rows=plan.pad_rows,
            sink_slot=self.inputs.sink_slot,
        )
        check_window_intact(
            rows=plan.rows,
            slot_mapping=plan.slot_mapping,
            context_lens=plan.context_lens,
            lengths=plan.lengths,
            slots=plan.slots,
        )
        check_plan_addressing(
            rows=plan.rows,
            slot_mapping=plan.slot_mapping,
            context_lens=plan.context_lens,
            write_slots=plan.write_slots,
            positions=plan.positions,
            sink_slot=self.inputs.sink_slot,
        )
        check_replay_rows(recorded=recording.rows, rows=plan.rows)
        check_replay_shape(recorded=recording.shape, planned=(plan.num_rows, plan.width))


def rows_are_a_prefix(plan: DecodePlan) -> bool:
    """The plan's rows are 0..n-1, so its rectangle is a window: the scheduler's own question, asked once more."""
    return is_compact(plan.rows)


def fields_consumed(call: DecodeCall, plan: DecodePlan) -> list[str]:
    """Names of the plan's fields and properties that one run of `call` reads: what a launch would bake in."""
    seen: set[str] = set()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            seen.add(name)
            return getattr(plan, name)

    call(cast(DecodePlan, Watched()))
    return sorted(seen)


def workspace_bytes(*, rows: int, width: int, num_heads: int, element_bytes: int = 4) -> int:
    """Bytes of the [rows, heads, 1, width] score rectangle that a gathering read builds before it masks."""
    return rows * num_heads * width * element_bytes


def pool_sharing_ratio(shapes: Sequence[Shape], *, num_heads: int, element_bytes: int = 4) -> float:
    """How many times smaller one shared pool is than a private one a recording: sum over maximum."""
    sizes = [workspace_bytes(rows=r, width=w, num_heads=num_heads, element_bytes=element_bytes) for r, w in shapes]
    return sum(sizes) / max(sizes)
