"""The warm list: nothing but padding, nothing touched, nothing cold afterwards, and what it costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fast.buckets import BucketSet
from fast.capture import CapturedDecode, HostRecorder, workspace_bytes
from fast.inputs import DecodeInputs
from fast.slots import SlotTable
from fast.warmup import (
    MADE_UP_TOKEN,
    WarmupReport,
    lazy_captures,
    stall_seconds,
    warm_budget_bytes,
    warm_decode,
    warm_shapes,
    warmup_batch,
    warmup_plan,
    warmup_seconds,
    width_ceiling,
)
from gates import GateError
from gates.warmup import (
    check_all_warm,
    check_arm_replayed_every_step,
    check_biggest_first,
    check_no_cold_captures,
    check_warm_budget,
    check_warm_graphs_unbound,
    check_warm_rows_empty,
    check_warm_touches_nothing,
    check_warm_writes_sink,
)
from tests.test_capture import Bench, toy_forward

SERVING = BucketSet(max_batch_size=256, max_model_len=8192, width_multiple=128)


def writing_forward(pool: torch.Tensor, *, slot: int | None = None):
    """A forward that stores each row's token in `pool` at its write slot (or all of them at `slot`)."""

    def forward(plan):
        where = plan.write_slots if slot is None else torch.full_like(plan.write_slots, slot)
        pool.index_copy_(0, where, plan.input_ids.to(pool.dtype) + 1.0)
        return toy_forward(plan)

    return forward


# ---- holds ------------------------------------------------------------------------------------------------------


def test_a_warm_batch_is_a_step_whose_rows_are_all_padding():
    bench = Bench()
    plan = warmup_plan((3, 16), slot_table=bench.slot_table, inputs=bench.inputs)
    assert (plan.rows, plan.pad_rows, plan.width, plan.bucket) == ((), 3, 16, (3, 16))
    assert plan.context_lens.tolist() == [0, 0, 0]
    assert plan.write_slots.tolist() == [bench.sink] * 3
    assert plan.slot_mapping.data_ptr() == bench.slot_table.address
    assert plan.input_ids.data_ptr() == bench.inputs.addresses["input_ids"]


def test_a_warm_batch_is_its_plan_and_made_up_tokens():
    bench = Bench()
    bench.admit(0, 3)
    bench.plan(0)  # a real step before it, whose token must not stay
    batch = warmup_batch((2, 8), slot_table=bench.slot_table, inputs=bench.inputs)
    assert batch.rows == ()
    assert batch.input_ids.tolist() == [MADE_UP_TOKEN, MADE_UP_TOKEN]
    assert batch.input_ids.data_ptr() == bench.inputs.addresses["input_ids"]


def test_the_list_is_the_bucket_set_biggest_first_and_trims_on_both_axes():
    shapes = warm_shapes(SERVING)
    assert len(shapes) == 576
    assert set(shapes) == set(SERVING.shapes)
    areas = [rows * width for rows, width in shapes]
    assert areas == sorted(areas, reverse=True)
    assert len(warm_shapes(SERVING, max_rows=8)) == 256
    assert len(warm_shapes(SERVING, max_rows=8, max_width=2048)) == 64


def test_warming_records_the_list_and_writes_only_the_sink():
    bench = Bench()
    pool = torch.randn(bench.sink + 1)
    live = pool[: bench.sink].clone()
    bench.captured.call = writing_forward(pool)
    shapes = warm_shapes(bench.buckets, max_rows=2)
    report = warm_decode(bench.captured, shapes, num_heads=4, pools=[pool])
    assert report.shapes == tuple(shapes) == tuple(bench.captured.shapes)
    assert report.graphs == len(shapes)
    assert report.workspace_bytes == workspace_bytes(rows=2, width=24, num_heads=4)
    assert torch.equal(pool[: bench.sink], live)
    assert "6 host recordings up to 2 rows x 24 tokens" in report.render()


def test_an_empty_list_warms_nothing_and_says_so():
    bench = Bench()
    assert warm_decode(bench.captured, [], num_heads=1).render() == "warm list: empty"


def test_an_empty_list_fits_any_budget():
    assert warm_decode(Bench().captured, [], num_heads=1, budget_bytes=0).graphs == 0


def test_a_report_tells_its_shapes_as_plain_values():
    report = WarmupReport(((4, 8), (2, 32), (1, 8)), 1.23456, 512, "host")
    told = report.as_dict()
    assert (told["max_rows"], told["max_width"], told["seconds"]) == (4, 32, 1.235)
    nothing = WarmupReport((), 0.0, 0, "host").as_dict()
    assert (nothing["max_rows"], nothing["max_width"]) == (0, 0)


def test_a_warm_up_takes_the_seconds_that_it_took():
    bench = Bench()
    report = warm_decode(bench.captured, warm_shapes(bench.buckets), num_heads=1)
    assert 0 <= report.seconds < 600
    assert report.workspace_bytes > 0
    assert warm_decode(Bench().captured, [], num_heads=1).workspace_bytes == 0


def test_nothing_is_reserved_unless_it_is_asked_for():
    assert warm_budget_bytes(free_bytes=100) == 100


def test_an_answer_without_tokens_stalls_nobody():
    assert lazy_captures(generated=0, prompt_tokens=5, width_multiple=8) == 0
    assert lazy_captures(generated=0, prompt_tokens=8, width_multiple=8) == 0


def test_after_warming_nothing_is_recorded_in_front_of_a_client():
    bench = Bench(record_on_miss=True)
    bench.warm()
    bench.admit(0, 1)
    for _ in range(20):
        bench.captured.run(bench.plan(0))
    check_no_cold_captures(captures_after_ready=bench.captured.captures_after_ready)
    check_arm_replayed_every_step(decode_steps=20, replayed=bench.captured.replays, reasons=dict(bench.captured.eager))


@pytest.mark.parametrize(("generated", "expected"), [(8, 1), (32, 2), (64, 3), (128, 5)])
def test_a_lazy_run_stalls_once_a_width_and_a_warm_one_never(generated, expected):
    assert lazy_captures(generated=generated, prompt_tokens=16, width_multiple=32) == expected
    for warm in (False, True):
        assert cold_captures(generated, warm=warm) == (0 if warm else expected)


def cold_captures(generated: int, *, warm: bool) -> int:
    """Recordings after ready of a real run: 2 rows off a 16-token prompt, width multiple 32."""
    from tests.addressing import Paged

    length = 16 + generated
    paged = Paged(rows=2, max_model_len=length)
    inputs = DecodeInputs(max_batch_size=2, sink_slot=paged.sink)
    buckets = BucketSet(max_batch_size=2, max_model_len=length, width_multiple=32)
    captured = CapturedDecode(
        toy_forward, HostRecorder(), slot_table=paged.slots, inputs=inputs, record_on_miss=not warm
    )
    if warm:
        warm_decode(captured, warm_shapes(buckets), num_heads=1)
    captured.ready()
    for row in (0, 1):
        paged.adopt(row, 16)
    for _ in range(generated):
        captured.run(paged.plan((0, 1), buckets=buckets, inputs=inputs))
    assert captured.replays == generated
    return captured.captures_after_ready


@pytest.mark.parametrize(("generated", "seconds"), [(128, 0.05), (512, 0.20), (2048, 0.80), (8192, 3.20)])
def test_the_stall_is_a_rate_and_the_list_is_a_product(generated, seconds):
    captures = lazy_captures(generated=generated, prompt_tokens=0, width_multiple=128)
    assert stall_seconds(captures, seconds_per_graph=0.05) == pytest.approx(seconds, abs=1e-12)
    full, rows, both = (
        warm_shapes(SERVING),
        warm_shapes(SERVING, max_rows=8),
        warm_shapes(SERVING, max_rows=8, max_width=2048),
    )
    prices = [round(warmup_seconds(shapes, seconds_per_graph=0.05), 2) for shapes in (full, rows, both)]
    assert prices == [28.80, 12.80, 3.20]


@pytest.mark.parametrize(("budget", "width", "shapes"), [(64_000_000, 1953, 135), (268_000_000, 8178, 567)])
def test_a_budget_caps_the_width_and_not_the_length_of_the_list(budget, width, shapes):
    ceiling = width_ceiling(budget, rows=256, num_heads=32)
    assert ceiling == width
    assert len(warm_shapes(SERVING, max_width=ceiling)) == shapes
    whole = width_ceiling(1_000_000_000, rows=256, num_heads=32)
    assert len(warm_shapes(SERVING, max_width=whole)) == SERVING.num_shapes


def test_the_budget_is_what_is_left_and_never_negative():
    assert warm_budget_bytes(free_bytes=100, reserved_bytes=30) == 70
    assert warm_budget_bytes(free_bytes=10, reserved_bytes=30) == 0


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_gate_rejects_a_warm_batch_over_a_real_row():
    with pytest.raises(GateError, match=r"a warm batch over real rows \(0,\)"):
        check_warm_rows_empty(rows=(0,), pad_rows=1, shape=(2, 8))
    with pytest.raises(GateError, match=r"1 padded rows, shape \(rows, width\) \(2, 8\)"):
        check_warm_rows_empty(rows=(), pad_rows=1, shape=(2, 8))


def test_gate_rejects_a_warm_row_that_writes_a_real_slot_or_reads():
    with pytest.raises(GateError, match=r"not the sink 96 \[first at row 1; 1 of 2\]"):
        check_warm_writes_sink(write_slots=torch.tensor([96, 0]), context_lens=torch.tensor([0, 0]), sink_slot=96)
    with pytest.raises(GateError, match=r"may read a history; .* \[first at row 0; 2 of 2\]"):
        check_warm_writes_sink(write_slots=torch.tensor([96, 96]), context_lens=torch.tensor([1, 1]), sink_slot=96)


@pytest.mark.parametrize("poison", [1e4, float("nan")])
def test_gate_rejects_a_warm_up_that_writes_slot_0(poison):
    bench = Bench()
    pool = torch.full((bench.sink + 1,), poison)
    bench.captured.call = writing_forward(pool, slot=0)  # the first user's block, as a public engine once did
    with pytest.raises(GateError, match=r"gate warmup.touches_nothing: pool 0: [1-4] bytes changed"):
        warm_decode(bench.captured, [(2, 8)], num_heads=1, pools=[pool])


def test_gate_rejects_pools_that_changed_by_one_bit():
    before = torch.zeros(4)
    after = before.clone()
    after[2] = -0.0  # equal as a number, not as bits
    check_warm_touches_nothing(before=[before], after=[before.clone()])
    with pytest.raises(GateError, match="1 bytes changed while warming, 0 may"):
        check_warm_touches_nothing(before=[before], after=[after])


def test_gate_rejects_a_recording_bound_to_rows():
    with pytest.raises(GateError, match=r"1 of 2 recordings are bound to rows, the first to \(0, 1\)"):
        check_warm_graphs_unbound(recorded_rows=[(), (0, 1)])


def test_gate_rejects_a_list_that_a_step_slipped_into():
    bench = Bench()
    bench.admit(0, 3)
    bench.captured.record(bench.plan(0))
    with pytest.raises(GateError, match="gate warmup.graphs_unbound"):
        warm_decode(bench.captured, [(2, 8)], num_heads=1)
    with pytest.raises(GateError, match=r"1 bound|1 of 1"):
        check_warm_graphs_unbound(recorded_rows=[(3,)])


def test_gate_rejects_a_capture_after_ready():
    with pytest.raises(GateError, match="2 recordings after ready, 0 may"):
        check_no_cold_captures(captures_after_ready=2)


def test_gate_rejects_a_list_with_a_shape_missing_or_over():
    with pytest.raises(GateError, match=r"2 shapes in the warm list, 1 not recorded: first \[\(1, 8\)\]"):
        check_all_warm(wanted=[(2, 8), (1, 8)], recorded=[(2, 8)])
    with pytest.raises(GateError, match=r"1 shapes recorded that the warm list does not hold: first \[\(4, 8\)\]"):
        check_all_warm(wanted=[(2, 8)], recorded=[(2, 8), (4, 8)])


def test_gate_rejects_a_list_whose_pool_would_grow_while_it_is_recorded():
    with pytest.raises(GateError, match=r"\(1, 16\) is recorded before \(2, 16\), which needs a larger pool"):
        check_biggest_first(shapes=[(1, 16), (2, 16)])
    bench = Bench()
    with pytest.raises(GateError, match="gate warmup.biggest_first"):
        warm_decode(bench.captured, warm_shapes(bench.buckets)[::-1], num_heads=4)
    assert bench.captured.captures == 0


def test_gate_rejects_a_list_wider_than_the_budget():
    with pytest.raises(GateError, match="reaches width 2048 at 256 rows, the budget ends at 1953"):
        check_warm_budget(widest=2048, ceiling=1953, rows=256)
    bench = Bench()
    needed = r"needs 12,288 bytes for .rows, width. \(4, 24\), 1,000 are left"
    with pytest.raises(GateError, match=rf"gate capture.pool_budget: the shared pool {needed}"):
        warm_decode(bench.captured, warm_shapes(bench.buckets), num_heads=32, budget_bytes=1000)
    # No shape of this list is over the budget, but its most rows at its widest would be.
    corner = r"reaches width 24 at 4 rows, the budget ends at 8"
    with pytest.raises(GateError, match=f"gate warmup.budget: the warm list {corner}"):
        warm_decode(bench.captured, [(4, 1), (1, 24)][::-1], num_heads=32, budget_bytes=4096)
    assert bench.captured.captures == 0


def test_gate_rejects_an_arm_with_an_eager_step():
    with pytest.raises(GateError, match="47 decode steps, 12 replayed .eager: 35 scattered rows"):
        check_arm_replayed_every_step(decode_steps=47, replayed=12, reasons={"scattered rows": 35})
    with pytest.raises(GateError, match="47 decode steps, 46 replayed .eager: none counted"):
        check_arm_replayed_every_step(decode_steps=47, replayed=46, reasons={})


# ---- any order --------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 90), st.integers(1, 40))
def test_every_batch_that_fits_the_list_is_warm(max_rows, max_len, multiple):
    buckets = BucketSet(max_batch_size=max_rows, max_model_len=max_len, width_multiple=multiple)
    shapes = set(warm_shapes(buckets))
    assert {buckets.bucket_for(r, w) for r in range(1, max_rows + 1) for w in range(1, max_len + 1)} <= shapes


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 64))
def test_predicted_stalls_are_the_widths_a_run_crosses(prompt, generated, multiple):
    crossed = {-(-(prompt + step) // multiple) for step in range(1, generated + 1)}
    predicted = lazy_captures(generated=generated, prompt_tokens=prompt, width_multiple=multiple)
    assert predicted == len(crossed)


@given(st.integers(0, 10**12), st.integers(1, 512), st.integers(1, 128))
def test_the_ceiling_is_the_widest_that_fits(budget, rows, heads):
    width = width_ceiling(budget, rows=rows, num_heads=heads)
    assert workspace_bytes(rows=rows, width=width, num_heads=heads) <= budget
    assert workspace_bytes(rows=rows, width=width + 1, num_heads=heads) > budget


def test_a_slot_table_that_moved_between_recordings_is_noticed():
    bench = Bench()

    def moving_forward(plan):
        bench.slot_table.slots = bench.slot_table.slots.clone()
        return toy_forward(plan)

    bench.captured.call = moving_forward
    with pytest.raises(GateError, match="gate slots.table_stable"):
        warm_decode(bench.captured, [(2, 8)], num_heads=1)
    assert isinstance(bench.slot_table, SlotTable)
