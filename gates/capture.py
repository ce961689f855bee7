"""What must hold before a recorded decode step is run again, and what the recordings may cost.

A recording is bound to the addresses it was launched with, so these gates compare what a recording froze with
what the step about to run says. None of them reads a tensor. They know shapes and rows, no engine.

Proof: tests/test_capture.py. Story: capture.
"""

from __future__ import annotations

from collections.abc import Sequence

from gates.core import CHEAP, gate, require


@gate("capture.replay_rows", at=CHEAP)
def check_replay_rows(*, recorded: Sequence[int], rows: Sequence[int]) -> None:
    """A recording made over real rows may only be replayed over those rows; one made over none fits all."""
    recorded, rows = tuple(recorded), tuple(rows)
    require(
        recorded in ((), rows),
        f"recorded over rows {recorded}, replayed over rows {rows}; record it on a warm batch, which has no rows",
    )


@gate("capture.replay_shape", at=CHEAP)
def check_replay_shape(*, recorded: tuple[int, int], planned: tuple[int, int]) -> None:
    """The (rows, width) that was recorded is the (rows, width) the plan was padded to."""
    require(recorded == planned, f"recorded (rows, width) {recorded}, planned {planned}")


@gate("capture.pool_budget", at=CHEAP)
def check_pool_budget(*, needed: int, budget: int, shape: tuple[int, int]) -> None:
    """The largest recording's workspace fits what is left after weights and K/V pool (bytes).

    Recordings share one pool, so the budget caps the widest shape, not the length of the list.
    """
    require(
        needed <= budget,
        f"the shared pool needs {needed:,} bytes for (rows, width) {shape}, {budget:,} are left; narrow the list",
    )


@gate("capture.key_complete", at=CHEAP)
def check_key_complete(*, consumed: Sequence[str], keyed: Sequence[str], constant: Sequence[str]) -> None:
    """Every field a launch consumed is in the graph's key or is a constant of the process."""
    missing = sorted(set(consumed) - set(keyed) - set(constant))
    require(not missing, f"the launch consumed {missing}, the key holds {sorted(keyed)}")


@gate("capture.eager_counted", at=CHEAP)
def check_eager_counted(*, steps: int, replayed: int, eager: int) -> None:
    """Every decode step was replayed or is in the count of eager steps: no silent fall-through."""
    require(steps == replayed + eager, f"{steps} decode steps, {replayed} replayed + {eager} counted eager")
