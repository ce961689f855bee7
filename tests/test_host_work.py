"""Host work of a decode step follows its rows and nothing else, counted in bytecodes and not by a clock.

Every bytecode and C call of a step is counted at a short context and at a long one, on a young engine and on one that
has served hundreds. Seventeen steps are a block of 16 and one more, so the step that allocates is among them.
"""

from __future__ import annotations

import pytest

from gates.core import at_level
from tests.hostwork import decoding, work_of

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
    short, long = work("off"), work("off", context=1024)
    assert sum(long.values()) > 4 * sum(short.values())
