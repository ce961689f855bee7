"""What a gate is: a named function that raises `GateError`, a level at which it runs, and a count of both.

Levels are `off`, `cheap` (host integers only, no device synchronisation: the server's default) and `full`
(may read tensors back: the default in tests). `NANOSERVE_GATES` sets the level; `set_level` changes it.
This module knows nothing of any subject; it only knows how a gate speaks and when it keeps silent.

Proof: tests/test_gates.py. Story: gates.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")

OFF, CHEAP, FULL = 0, 1, 2
LEVELS = {"off": OFF, "cheap": CHEAP, "full": FULL}


class GateError(AssertionError):
    """A broken invariant. `name` is the gate's (`slots.window`), `fact` states both sides of what broke."""

    def __init__(self, name: str, fact: str) -> None:
        super().__init__(f"gate {name}: {fact}")
        self.name = name
        self.fact = fact


class _Broken(Exception):
    """Raised by `require` inside a gate; the `gate` wrapper turns it into a named `GateError`."""


@dataclass(slots=True)
class GateCount:
    """How often one gate ran and how often it fired since the process began."""

    checks: int = 0
    failures: int = 0


def _level_from_environment() -> int:
    word = os.environ.get("NANOSERVE_GATES", "cheap")
    if word not in LEVELS:
        raise ValueError(f"NANOSERVE_GATES: {word!r} is not one of {', '.join(LEVELS)}")
    return LEVELS[word]


_level = _level_from_environment()
_counts: dict[str, GateCount] = {}


def level() -> int:
    """The level in force: `OFF`, `CHEAP` or `FULL`."""
    return _level


def enabled(wanted: int) -> bool:
    """True when gates of level `wanted` run; guards arguments that are themselves costly to make."""
    return _level >= wanted


def set_level(word: str) -> None:
    """Set the level by name (`off`, `cheap`, `full`).

    Raises:
        ValueError: the word is not a level.
    """
    global _level
    if word not in LEVELS:
        raise ValueError(f"gate level: {word!r} is not one of {', '.join(LEVELS)}")
    _level = LEVELS[word]


@contextmanager
def at_level(word: str) -> Iterator[None]:
    """Run a block at another level and restore the one before it."""
    global _level
    before = _level
    set_level(word)
    try:
        yield
    finally:
        _level = before


def counters() -> dict[str, GateCount]:
    """Checks and failures by gate name, live (the server exports them as metrics)."""
    return _counts


def gate(name: str, *, at: int = CHEAP) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Declare a `check_*` function as gate `name`, run at level `at` and above.

    The wrapper counts every run, and turns a failed `require` into `GateError("gate <name>: <fact>")`.
    The name and level stay readable on the function (`gate_name`, `gate_level`).
    """

    def declare(check: Callable[P, None]) -> Callable[P, None]:
        count = _counts.setdefault(name, GateCount())

        @wraps(check)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            if _level < at:
                return
            count.checks += 1
            try:
                check(*args, **kwargs)
            except _Broken as broken:
                count.failures += 1
                raise GateError(name, str(broken)) from None

        run.gate_name = name  # type: ignore[attr-defined]
        run.gate_level = at  # type: ignore[attr-defined]
        return run

    return declare


def require(fact: bool, message: str) -> None:
    """Break the surrounding gate with `message` (both sides of the fact) unless `fact` holds."""
    if not fact:
        raise _Broken(message)


def require_rows(bad: Sequence[int], of: int, message: str) -> None:
    """Break the surrounding gate when `bad` names any row: `<message> [first at row 3; 2 of 8]`."""
    if bad:
        raise _Broken(f"{message} [first at row {bad[0]}; {len(bad)} of {of}]")
