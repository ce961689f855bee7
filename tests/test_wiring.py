"""The decode path's switches: each alone, together, refused where they contradict, and equal in tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from fast.coverage import coverage
from fast.engine import Engine
from gates import GateError
from gates.warmup import check_arm_replayed_every_step, check_no_cold_captures
from reference.request import Request, SamplingParams
from tests.harness import TINY, tiny_weights

ANSWERS = [SamplingParams(max_tokens=n, temperature=0.7, seed=n, ignore_eos=True) for n in (4, 8, 16, 32)]
SWITCHES = ("bucket_decode", "persist_inputs", "capture_decode")
SIZES = {"max_batch_size": 4, "num_blocks": 40, "block_size": 4, "max_model_len": 48, "width_multiple": 16}
WARM = dict.fromkeys(SWITCHES, True)


def engine(**switches) -> Engine:
    return Engine.build(TINY, tiny_weights(), **(SIZES | switches))


def answers(built: Engine, requests: int = 8) -> list[list[int]]:
    prompts = [Request((7, 11, 13, i), ANSWERS[i % len(ANSWERS)], f"r{i}") for i in range(requests)]
    return [completion.token_ids for completion in built.generate(prompts)]


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["free", "compact", "gather"])
@pytest.mark.parametrize(
    "switches", list(product([False, True], repeat=3)), ids=lambda s: "".join("01"[on] for on in s)
)
def test_every_combination_of_switches_gives_the_same_tokens(switches, rows):
    chosen = dict(zip(SWITCHES, switches, strict=True))
    chosen |= {"compact_rows": rows == "compact", "gather_rows": rows == "gather"}
    if chosen["capture_decode"] and not (chosen["bucket_decode"] and chosen["persist_inputs"]):
        with pytest.raises(ValueError, match="capture_decode: True needs bucket_decode and persist_inputs"):
            engine(**chosen)
        return
    built = engine(**chosen)
    if chosen["capture_decode"]:
        built.warm_decode()
    assert answers(built) == answers(engine())


@pytest.mark.parametrize("rows", ["compact_rows", "gather_rows"])
def test_a_warm_engine_replays_every_decode_step(rows):
    built = engine(**WARM, **{rows: True})
    report = built.warm_decode()
    answers(built)
    stats = built.stats()
    assert report.graphs == stats["captures"] == 3 * 3  # rows 1, 2, 4 and widths 16, 32, 48
    assert stats["decode_steps"] == coverage(rows=4, requests=8, gens=(4, 8, 16, 32)).decode_steps
    check_arm_replayed_every_step(
        decode_steps=stats["decode_steps"], replayed=stats["replayed"], reasons=stats["eager"]
    )
    check_no_cold_captures(captures_after_ready=stats["captures_after_ready"])
    assert (stats["moves"] > 0) == (rows == "compact_rows")


def test_gate_rejects_the_control_arm_without_compaction():
    built = engine(**WARM)
    built.warm_decode()
    answers(built)
    stats = built.stats()
    assert stats["eager"]["scattered rows"] == stats["decode_steps"] - stats["replayed"] > 0
    with pytest.raises(GateError, match="decode steps, .* replayed .eager: .* scattered rows"):
        check_arm_replayed_every_step(
            decode_steps=stats["decode_steps"], replayed=stats["replayed"], reasons=stats["eager"]
        )


def test_every_switch_is_off_until_it_is_asked_for():
    path = engine().decode
    assert (path.buckets, path.inputs, path.captured, path.compiled) == (None, None, None, None)
    asked = Engine.build(TINY, tiny_weights(), **{k: v for k, v in SIZES.items() if k != "width_multiple"}, **WARM)
    assert asked.decode.buckets.width_multiple == 128
    assert asked.decode.captured.record_on_miss is False
    assert path.last_outcome.bucket is None, "before the first step"


def test_a_row_is_one_tenancy_for_each_request_that_sat_in_it():
    built = engine(**WARM, compact_rows=True)
    built.warm_decode()
    answers(built, 5)
    assert (built.cache.tenancies, built.prefill.tokens) == (5, 5 * 4)


def test_a_list_trimmed_on_both_axes_leaves_counted_eager_steps():
    built = engine(**WARM, compact_rows=True)
    report = built.warm_decode(max_rows=2, max_width=16)
    assert set(report.shapes) == {(1, 16), (2, 16)}
    assert answers(built) == answers(engine())
    stats = built.stats()
    assert set(stats["eager"]) == {"unseen shape"}
    assert stats["replayed"] + stats["eager"]["unseen shape"] == stats["decode_steps"]


def test_the_lazy_arm_records_in_front_of_the_client_and_counts_it():
    built = engine(**WARM, compact_rows=True, record_on_miss=True)
    built.decode.captured.ready()
    assert answers(built) == answers(engine())
    assert built.stats()["captures_after_ready"] > 0
    assert built.stats()["replayed"] == built.stats()["decode_steps"]


def test_warming_leaves_the_pool_and_the_prefix_of_a_real_run_alone():
    cold, warm = engine(), engine(**WARM, compact_rows=True)
    warm.warm_decode()
    assert warm.cache.allocator.num_free == SIZES["num_blocks"]
    assert all(table.length == 0 and not table.blocks for table in warm.cache.tables)
    for pool in [*warm.cache.k, *warm.cache.v]:
        assert not pool[: warm.cache.sink_slot].any()
        assert pool[warm.cache.sink_slot].any(), "the sink took the warm rows' K/V"
    assert answers(warm, 1) == answers(cold, 1)


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_moving_and_gathering_at_once_is_refused():
    with pytest.raises(ValueError, match="gather_rows: True leaves rows in place, compact_rows moves them"):
        engine(compact_rows=True, gather_rows=True)


def test_warming_without_a_capture_is_refused():
    with pytest.raises(ValueError, match="capture_decode is off"):
        engine(bucket_decode=True).warm_decode()


def test_a_budget_that_the_list_does_not_fit_is_refused_before_anything_is_recorded():
    built = engine(**WARM)
    with pytest.raises(GateError, match="gate capture.pool_budget"):
        built.warm_decode(budget_bytes=100)
    assert built.stats()["captures"] == 0


def test_gate_rejects_a_recording_made_after_ready():
    built = engine(**WARM, compact_rows=True)
    built.warm_decode(max_rows=1)
    built.submit(Request((3, 4), replace(ANSWERS[1], max_tokens=3), "a"))
    built.step()
    built.decode.captured.captures_after_ready += 1  # what a recorder that slipped past would leave behind
    with pytest.raises(GateError, match="gate warmup.no_cold_captures: 1 recordings after ready, 0 may"):
        built.step()
