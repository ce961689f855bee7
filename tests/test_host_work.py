"""Host work of a decode step follows its rows and nothing else, counted in bytecodes and not by a clock.

Every bytecode and C call of a step is counted at a short context and at a long one, on a young engine and on one that
has served hundreds. Seventeen steps are a block of 16 and one more, so the step that allocates is among them.
"""

from __future__ import annotations

import pytest

from fast.engine import Engine
from gates.core import at_level
from reference.request import Request, SamplingParams
from tests.hostwork import decoding, fixed_engine, fixed_sampler, work_of

STEPS = 17


def work(level: str, **workload) -> dict[str, int]:
    """Bytecodes and C calls, by name, of the first `STEPS` decode steps of a workload, gates at `level`."""
    with at_level("cheap"):
        engine = decoding(**({"rows": 8, "context": 64, "steps": STEPS} | workload))
    with at_level(level):
        counted = work_of(engine, STEPS)
    assert engine.stats()["decode_steps"] >= STEPS
    return dict(counted)


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["off", "cheap"])
@pytest.mark.parametrize("switches", [False, True], ids=["plain", "served"])
@pytest.mark.parametrize("context", [1024, 4096])
def test_a_step_costs_the_same_at_any_context(context, switches, level):
    assert work(level, context=context, switches=switches) == work(level, switches=switches)


@pytest.mark.parametrize("level", ["off", "cheap"])
def test_a_step_costs_the_same_after_any_history(level):
    assert work(level, served=300) == work(level)


@pytest.mark.parametrize("level", ["off", "cheap"])
def test_a_step_costs_the_same_before_any_queue(level):
    assert work(level, waiting=500) == work(level, waiting=3)


@pytest.mark.parametrize("level", ["off", "cheap"])
def test_a_step_costs_the_same_for_each_row_it_gains(level):
    few, some, many = (sum(work(level, rows=rows).values()) for rows in (8, 16, 24))
    assert many - some == pytest.approx(some - few, rel=0.02)  # buckets of 8, 16 and 32 rows: a constant more


def test_counting_sees_a_rectangle_that_is_rebuilt(monkeypatch):
    from fast import slots

    def rebuilding(self, tables, rows):
        sync(self, tables, rows)
        slots.rebuild_mapping(tables, rows)  # the fault: what the mirror is there to make needless

    sync = slots.SlotTable.sync
    monkeypatch.setattr(slots.SlotTable, "sync", rebuilding)
    short, long = work("off"), work("off", context=2048)
    assert sum(long.values()) > 4 * sum(short.values())


# What looks prompts up in the prefix cache, follows those that compute one together, and decides who is admitted.
LOOKS = {
    "match",
    "take",
    "catch_up",
    "leaders",
    "idle",
    "publish",
    "_live",
    "_same",
    "_add",
    "_follow",
    "_fits",
    "_admit",
}


def looks_of(engine: Engine, *, after: int, steps: int) -> int:
    """Bytecodes of those functions, comprehensions in them not counted, in so many steps after some others."""
    with at_level("off"):
        with fixed_sampler():
            for _ in range(after):
                engine.step()
        work = work_of(engine, steps)
    return sum(work[name] for name in LOOKS)


def test_prompts_in_chunks_are_followed_at_the_same_cost_at_their_first_blocks_and_at_their_last():
    engine = fixed_engine(rows=4, num_blocks=400, max_model_len=6400, chunk_tokens=64, prefix_cache=True)
    for name, first, length in (("a", 5, 2400), ("b", 6, 2000)):
        engine.submit(Request((first,) * length, SamplingParams(max_tokens=2), name))
    early, late = looks_of(engine, after=2, steps=3), looks_of(engine, after=50, steps=3)
    assert engine.scheduler.running[1].computed == 58 * 32, "both were computed two blocks a step"
    assert early == late > 0


def test_a_prompt_that_waits_is_looked_up_at_the_same_cost_whatever_was_found_of_it():
    costs = []
    for blocks in (4, 150):
        pool = {"num_blocks": blocks + 8, "max_model_len": 16 * (blocks + 8)}
        engine = fixed_engine(rows=4, **pool, chunk_tokens=4096, prefix_cache=True, reserve_growth=True)
        for name, tail, answer in (("runs", 3, 90), ("waits", 16 * 7, 2)):
            prompt = ((5,) * 16 * blocks) + (7,) * tail
            engine.submit(Request(prompt, SamplingParams(max_tokens=answer, ignore_eos=True), name))
        costs.append(looks_of(engine, after=3, steps=17))
        assert [one.request.id for one in engine.scheduler.waiting] == ["waits"]
        assert len(engine.scheduler.waiting[0].prefix.entries) == blocks, "found, and held by the one that runs"
    assert costs[0] == costs[1] > 0
