"""The machinery of gates: when a gate runs, how it speaks, and what is counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gates import core
from gates.core import CHEAP, FULL, OFF, GateError, at_level, enabled, gate, level, require, require_rows, set_level

ROOT = Path(__file__).resolve().parent.parent


@gate("proof.cheap", at=CHEAP)
def check_cheap(*, left: int, right: int) -> None:
    """Two counts agree."""
    require(left == right, f"{left} on the left, {right} on the right")


@gate("proof.full", at=FULL)
def check_full(*, rows: list[int]) -> None:
    """No row is negative."""
    require_rows([i for i, row in enumerate(rows) if row < 0], len(rows), "a row is negative, none may be")


def imported_with(word: str | None) -> subprocess.CompletedProcess[str]:
    """Import gates in a fresh process whose NANOSERVE_GATES is `word` (None: unset) and print the level."""
    environment = {name: value for name, value in os.environ.items() if name != "NANOSERVE_GATES"}
    if word is not None:
        environment["NANOSERVE_GATES"] = word
    command = [sys.executable, "-c", "import gates; print(gates.level())"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


# ---- holds ------------------------------------------------------------------------------------------------------


def test_a_fact_that_holds_is_silent_and_counted():
    before = core.counters()["proof.cheap"].checks
    check_cheap(left=3, right=3)
    assert core.counters()["proof.cheap"].checks == before + 1


def test_a_broken_fact_names_the_gate_and_both_sides():
    with pytest.raises(GateError) as caught:
        check_cheap(left=3, right=4)
    assert str(caught.value) == "gate proof.cheap: 3 on the left, 4 on the right"
    assert (caught.value.name, caught.value.fact) == ("proof.cheap", "3 on the left, 4 on the right")


def test_broken_rows_are_located_and_counted():
    with pytest.raises(GateError) as caught:
        check_full(rows=[0, 1, 2, -1, 4, -5, 6, 7])
    assert str(caught.value) == "gate proof.full: a row is negative, none may be [first at row 3; 2 of 8]"


def test_failures_are_counted():
    before = core.counters()["proof.cheap"].failures
    for _ in range(3):
        with pytest.raises(GateError):
            check_cheap(left=0, right=1)
    assert core.counters()["proof.cheap"].failures == before + 3


def test_a_gate_says_its_name_and_level_and_keeps_its_docstring():
    assert (check_full.gate_name, check_full.gate_level) == ("proof.full", FULL)
    assert check_full.__doc__ == "No row is negative."
    assert check_full.__name__ == "check_full"


@pytest.mark.parametrize(
    ("word", "cheap_runs", "full_runs"), [("off", False, False), ("cheap", True, False), ("full", True, True)]
)
def test_a_level_runs_its_gates_and_the_cheaper_ones(word: str, cheap_runs: bool, full_runs: bool):
    counts = core.counters()
    with at_level(word):
        before = counts["proof.cheap"].checks, counts["proof.full"].checks
        check_cheap(left=1, right=1)
        check_full(rows=[1])
        after = counts["proof.cheap"].checks, counts["proof.full"].checks
        assert (enabled(CHEAP), enabled(FULL)) == (cheap_runs, full_runs)
    assert after == (before[0] + cheap_runs, before[1] + full_runs)


def test_a_gate_that_does_not_run_cannot_fire():
    with at_level("off"):
        check_cheap(left=1, right=2)
        check_full(rows=[-1])


def test_the_level_before_a_block_comes_back_even_after_a_failure():
    set_level("cheap")
    with pytest.raises(RuntimeError, match="on purpose"), at_level("off"):
        raise RuntimeError("on purpose")
    assert level() == CHEAP


def test_a_fault_inside_a_gate_is_not_dressed_as_a_broken_fact():
    @gate("proof.faulty")
    def check_faulty() -> None:
        """A gate with a bug of its own."""
        raise KeyError("bug")

    with pytest.raises(KeyError):
        check_faulty()
    assert core.counters()["proof.faulty"].failures == 0


def test_a_gate_error_is_an_assertion_error():
    assert issubclass(GateError, AssertionError)


@pytest.mark.parametrize(("word", "expected"), [(None, CHEAP), ("off", OFF), ("cheap", CHEAP), ("full", FULL)])
def test_the_environment_sets_the_level(word: str | None, expected: int):
    assert imported_with(word).stdout.strip() == str(expected)


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["", "FULL", "2", "on"])
def test_an_unknown_level_in_the_environment_is_refused_at_import(word: str):
    result = imported_with(word)
    assert result.returncode != 0
    assert f"ValueError: NANOSERVE_GATES: {word!r} is not one of off, cheap, full" in result.stderr


def test_an_unknown_level_is_refused_and_changes_nothing():
    with pytest.raises(ValueError, match="'loud' is not one of off, cheap, full"):
        set_level("loud")
    assert level() == FULL


# ---- any order --------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-3, 20), max_size=12))
def test_rows_are_reported_exactly(rows: list[int]):
    bad = [i for i, row in enumerate(rows) if row < 0]
    if not bad:
        check_full(rows=rows)
        return
    with pytest.raises(GateError, match=rf"\[first at row {bad[0]}; {len(bad)} of {len(rows)}\]"):
        check_full(rows=rows)


@given(st.lists(st.sampled_from(["off", "cheap", "full"]), max_size=6))
def test_nested_levels_unwind_in_order(words: list[str]):
    before = level()
    if words:
        with at_level(words[0]):
            test_nested_levels_unwind_in_order.hypothesis.inner_test(words[1:])
            assert level() == core.LEVELS[words[0]]
    assert level() == before
