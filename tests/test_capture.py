"""Recorded decode steps: replay computes what the step says, the key is complete, nothing falls through silently."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fast.blocks import BlockTable
from fast.buckets import BucketSet
from fast.capture import (
    LAUNCH_TENSORS,
    CapturedDecode,
    CUDAGraphRecorder,
    GraphKey,
    HostRecorder,
    fields_consumed,
    pool_sharing_ratio,
    rows_are_a_prefix,
    workspace_bytes,
)
from fast.inputs import DecodeInputs
from fast.plan import DecodePlan, plan_decode
from fast.slots import SlotTable
from fast.warmup import warm_decode, warm_shapes, warmup_plan
from gates import GateError
from gates.capture import (
    check_eager_counted,
    check_key_complete,
    check_pool_budget,
    check_replay_rows,
    check_replay_shape,
)
from gates.core import at_level

ROWS, COLUMNS, BLOCK = 4, 24, 4


class Bench:
    """Tables, a slot table, inputs and a toy forward that reads every launch tensor and nothing else."""

    def __init__(self, *, record_on_miss: bool = False, gather: bool = False) -> None:
        self.sink = ROWS * COLUMNS
        self.tables = [BlockTable(BLOCK) for _ in range(ROWS)]
        self.slot_table = SlotTable(max_batch_size=ROWS, max_model_len=COLUMNS, gather=gather)
        self.inputs = DecodeInputs(max_batch_size=ROWS, sink_slot=self.sink)
        self.buckets = BucketSet(max_batch_size=ROWS, max_model_len=COLUMNS, width_multiple=8)
        self.captured = CapturedDecode(
            toy_forward,
            HostRecorder(),
            slot_table=self.slot_table,
            inputs=self.inputs,
            record_on_miss=record_on_miss,
        )

    def admit(self, row: int, tokens: int) -> None:
        per_row = COLUMNS // BLOCK
        self.tables[row].adopt(list(range(row * per_row, (row + 1) * per_row)))
        self.tables[row].advance(tokens)

    def plan(self, *rows: int, bucketed: bool = True) -> DecodePlan:
        return plan_decode(
            tables=self.tables,
            slot_table=self.slot_table,
            rows=rows,
            input_ids=[row + 5 for row in rows],
            sink_slot=self.sink,
            buckets=self.buckets if bucketed else None,
            inputs=self.inputs,
        )

    def storage(self) -> dict[str, Any]:
        return {"slot_table": self.slot_table, "inputs": self.inputs}

    def warm(self) -> None:
        warm_decode(self.captured, warm_shapes(self.buckets), num_heads=1)
        self.captured.ready()


def toy_forward(plan: DecodePlan) -> Tensor:
    """A number a row that changes with every cell the row may read and with each of the four vectors."""
    readable = torch.arange(plan.slot_mapping.shape[1]) < plan.context_lens[:, None]
    read = (plan.slot_mapping * readable).sum(1)
    return read * 7 + plan.input_ids * 3 + plan.positions * 5 + plan.write_slots


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(3,), (7, 2), (8, 1, 15), (1, 2, 3, 4)])
def test_a_recording_over_nothing_computes_real_steps(lengths):
    bench = Bench()
    bench.warm()
    for row, length in enumerate(lengths):
        bench.admit(row, length)
    for _ in range(5):
        plan = bench.plan(*range(len(lengths)))
        assert torch.equal(bench.captured.run(plan), toy_forward(plan))
    assert bench.captured.replays == bench.captured.steps == 5
    assert bench.captured.captures_after_ready == 0


def test_a_step_over_scattered_rows_runs_eagerly_and_is_counted():
    bench = Bench()
    bench.warm()
    bench.admit(0, 3)
    bench.admit(2, 5)
    plan = bench.plan(0, 2)
    assert not rows_are_a_prefix(plan)
    assert torch.equal(bench.captured.run(plan), toy_forward(plan))
    assert dict(bench.captured.eager) == {"scattered rows": 1}
    assert bench.captured.replay_share == 0.0


def test_scattered_rows_gathered_to_a_fixed_buffer_replay():
    bench = Bench(gather=True)
    bench.warm()
    bench.admit(1, 3)
    bench.admit(3, 5)
    plan = bench.plan(1, 3)
    assert torch.equal(bench.captured.run(plan), toy_forward(plan))
    assert bench.captured.replays == 1


def test_an_unseen_shape_and_an_exact_shape_are_counted_by_reason():
    bench = Bench()
    bench.admit(0, 3)
    bench.captured.run(bench.plan(0))
    bench.captured.run(bench.plan(0, bucketed=False))
    assert dict(bench.captured.eager) == {"unseen shape": 1, "no bucket": 1}


def test_the_lazy_arm_records_once_a_width_and_only_then():
    bench = Bench(record_on_miss=True)
    bench.captured.ready()
    bench.admit(0, 1)
    for _ in range(16):  # contexts 2..17 cross the widths 8, 16 and 24
        bench.captured.run(bench.plan(0))
    assert bench.captured.captures_after_ready == 3
    assert bench.captured.replays == 16


def test_the_lazy_arm_records_again_for_other_rows_and_the_warm_list_does_not():
    lazy, warm = Bench(record_on_miss=True), Bench()
    warm.warm()
    for bench in (lazy, warm):
        for row in range(ROWS):
            bench.admit(row, 2)
        bench.captured.run(bench.plan(0, 1, 2))
        bench.captured.run(bench.plan(0, 1, 2, 3))
    assert lazy.captured.captures == 2
    assert warm.captured.replays == 2
    assert warm.captured.captures == len(warm_shapes(warm.buckets))


def test_the_forward_consumes_nothing_that_the_key_does_not_hold():
    bench = Bench()
    bench.admit(0, 3)
    assert fields_consumed(toy_forward, bench.plan(0)) == sorted(LAUNCH_TENSORS)


@pytest.mark.parametrize("name", LAUNCH_TENSORS)
def test_the_key_changes_with_each_tensor_it_stands_for(name):
    bench = Bench()
    bench.admit(0, 3)
    plan = bench.plan(0)
    tensor = getattr(plan, name)
    other = {
        "another address": tensor.clone(),
        "another dtype": tensor.view(torch.float64),
        "another stride": tensor.as_strided(tensor.shape, tuple(2 * s for s in tensor.stride())),
    }
    for what, changed in other.items():
        assert GraphKey.of(replace(plan, **{name: changed})) != GraphKey.of(plan), what


def test_the_key_is_blind_only_to_what_a_launch_cannot_see():
    blind = {field.name for field in fields(DecodePlan)} - set(LAUNCH_TENSORS)
    assert blind == {"rows", "pad_rows", "lengths", "slots", "bucket"}  # host copies, and the bucket is the shape


@pytest.mark.parametrize(("level", "runs"), [("cheap", 2), ("full", 3)])
def test_the_host_recorder_runs_the_narrow_shapes_and_at_full_gates_all(level: str, runs: int):
    bench, calls = Bench(), []

    def call(plan: DecodePlan) -> Tensor:
        calls.append(plan.width)
        return toy_forward(plan)

    with at_level(level):
        replays = [HostRecorder(16).record(call, warmup_plan((1, width), **bench.storage())) for width in (8, 16, 24)]
    assert calls == [8, 16, 24][:runs]
    replays[2]()
    assert calls[-1] == 24, "what was not run to be recorded runs when it is replayed"
    HostRecorder().record(call, warmup_plan((1, 24), **bench.storage()))
    assert len(calls) == runs + 2, "without a bound every shape runs"


def test_recording_runs_the_call_once_and_only_the_full_gates_run_it_to_watch_it():
    bench, calls = Bench(), []
    bench.captured.call = lambda plan: (calls.append(plan), toy_forward(plan))[1]
    with at_level("cheap"):
        bench.captured.record(warmup_plan((1, 8), **bench.storage()))
    assert len(calls) == 1


def test_an_unseen_shape_runs_eagerly_unless_recording_on_a_miss_is_asked_for():
    bench = Bench()
    captured = CapturedDecode(toy_forward, HostRecorder(), **bench.storage())
    assert captured.replay_share == 1.0, "before the first step"
    bench.admit(0, 3)
    captured.run(bench.plan(0))
    assert (captured.captures, captured.replay_share) == (0, 0.0)
    captured.record(warmup_plan((1, 8), **bench.storage()))
    for _ in range(3):
        captured.run(bench.plan(0))
    assert (captured.steps, captured.replays, captured.replay_share) == (4, 3, 0.75)


def test_a_shared_pool_costs_its_largest_member():
    assert workspace_bytes(rows=256, width=1953, num_heads=32) <= 64_000_000
    assert workspace_bytes(rows=256, width=1954, num_heads=32) > 64_000_000
    assert pool_sharing_ratio([(4, 8), (2, 8), (1, 8), (1, 8)], num_heads=3) == 2.0


@pytest.mark.gpu
def test_a_cuda_graph_replays_what_the_buffers_hold_now():
    x = torch.ones(4, device="cuda")
    replay = CUDAGraphRecorder().record(lambda plan: plan * 2, x)
    x.fill_(21.0)
    assert replay().tolist() == [42.0] * 4


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_gate_rejects_a_replay_over_other_rows():
    with pytest.raises(GateError, match=r"gate capture.replay_rows: recorded over rows \(0, 1\), replayed .* \(0, 2\)"):
        check_replay_rows(recorded=(0, 1), rows=(0, 2))


def test_gate_rejects_a_replay_of_another_shape():
    with pytest.raises(GateError, match=r"recorded \(rows, width\) \(4, 32\), planned \(4, 64\)"):
        check_replay_shape(recorded=(4, 32), planned=(4, 64))


def test_gate_rejects_a_pool_over_budget():
    check_pool_budget(needed=1000, budget=1000, shape=(2, 64))
    with pytest.raises(GateError, match=r"needs 1,000 bytes for \(rows, width\) \(2, 64\), 999 are left"):
        check_pool_budget(needed=1000, budget=999, shape=(2, 64))


def test_gate_rejects_a_launch_that_bakes_in_a_host_number():
    def forward_over_a_host_number(plan: DecodePlan) -> Tensor:
        return toy_forward(plan) + max(plan.lengths, default=0)

    bench = Bench()
    bench.captured.call = forward_over_a_host_number
    with pytest.raises(GateError, match=r"consumed \['lengths'\]"):
        bench.warm()
    with pytest.raises(GateError, match=r"consumed \['max_context'\]"):
        check_key_complete(consumed=["slot_mapping", "max_context"], keyed=LAUNCH_TENSORS, constant=["scale"])


def test_gate_rejects_a_step_that_fell_through_uncounted():
    with pytest.raises(GateError, match="3 decode steps, 1 replayed [+] 1 counted eager"):
        check_eager_counted(steps=3, replayed=1, eager=1)


def test_a_replay_under_a_moved_buffer_is_refused():
    bench = Bench()
    bench.warm()
    bench.admit(0, 3)
    plan = bench.plan(0)
    bench.captured._addresses = {name: place + 8 for name, place in bench.captured._addresses.items()}
    with pytest.raises(GateError, match="gate inputs.addresses"):
        bench.captured.run(plan)


@pytest.mark.parametrize(
    ("name", "line", "gate"),
    [
        ("write_slots", 3, "buckets.pad_inert"),
        ("context_lens", 3, "buckets.pad_inert"),
        ("positions", 0, "plan.addressing"),
        ("write_slots", 2, "plan.addressing"),
        ("context_lens", 1, "slots.window_intact"),
    ],
)
def test_a_plan_that_was_changed_after_it_was_checked_is_refused_before_a_replay(name: str, line: int, gate: str):
    bench = Bench()
    bench.warm()
    for row in range(3):
        bench.admit(row, 3 + row)
    plan = bench.plan(0, 1, 2)
    getattr(plan, name)[line] += 1
    with pytest.raises(GateError, match=f"gate {gate}"):
        bench.captured.run(plan)


def test_a_slot_table_that_moved_is_refused_and_does_not_pass_for_an_unseen_shape():
    bench = Bench()
    bench.warm()
    bench.admit(0, 3)
    plan = bench.plan(0)
    bench.slot_table.slots = bench.slot_table.slots.clone()
    with pytest.raises(GateError, match="gate slots.table_stable"):
        bench.captured.run(plan)
    assert not bench.captured.eager


def test_gate_rejects_a_recording_over_a_copy_of_the_table():
    bench = Bench()
    bench.admit(0, 3)
    plan = bench.plan(0)
    plan = replace(plan, slot_mapping=plan.slot_mapping.clone())
    with pytest.raises(GateError, match="gate slots.window: .* is a copy"):
        bench.captured.record(plan)


def test_gate_rejects_a_copy_of_rows_that_are_a_prefix_and_does_not_count_it_as_scattered():
    bench = Bench()
    bench.warm()
    for row in range(2):
        bench.admit(row, 3)
    scattered = bench.plan(1)
    bench.captured.run(replace(scattered, slot_mapping=scattered.slot_mapping.clone()))
    assert dict(bench.captured.eager) == {"scattered rows": 1}, "of other rows a copy is what there is"
    plan = bench.plan(0, 1)
    with pytest.raises(GateError, match="gate slots.window: .* the fix is on the plan's side"):
        bench.captured.run(replace(plan, slot_mapping=plan.slot_mapping.clone()))
    assert sum(bench.captured.eager.values()) == 1


def test_a_held_plan_is_refused_once_its_row_has_a_new_tenant():
    bench = Bench()
    bench.warm()
    bench.admit(0, 3)
    bench.admit(1, 9)
    held = bench.plan(0, 1)
    bench.tables[0].release()
    bench.slot_table.reset(0)
    bench.tables[0].adopt([5, 4, 3, 2, 1, 0])
    bench.tables[0].advance(6)
    bench.slot_table.sync(bench.tables, (0,))
    with pytest.raises(GateError, match="gate slots.window"):
        bench.captured.run(held)


# ---- any order --------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["admit", "finish", "step"]), max_size=40), st.randoms(use_true_random=False))
def test_replayed_steps_equal_eager_steps_in_any_order(moves, random):
    bench = Bench()
    bench.warm()
    running: list[int] = []
    for move in moves:
        if move == "admit" and len(running) < ROWS:
            row = min(set(range(ROWS)) - set(running))
            bench.admit(row, random.randint(1, 10))
            running.append(row)
        elif move == "finish" and running:
            row = running.pop(random.randrange(len(running)))
            bench.tables[row].release()
            bench.slot_table.reset(row)
        elif move == "step" and running:
            rows = sorted(row for row in running if bench.tables[row].length < COLUMNS)
            if rows:
                plan = bench.plan(*rows)
                assert torch.equal(bench.captured.run(plan), toy_forward(plan))
    assert bench.captured.steps == bench.captured.replays + sum(bench.captured.eager.values())
    assert set(bench.captured.eager) <= {"scattered rows"}
