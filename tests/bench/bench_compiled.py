"""Compiled pieces against the plain forward over the same bucketed shapes, alone and under recordings.

Run: `python -m pytest tests/bench/bench_compiled.py --benchmark-enable --benchmark-only -m slow`. Inductor compiles
three pieces for each row bucket first, which takes a minute (`-m "slow and not model"` for the tiny model alone). Every
arm gives the eager arm's tokens before it is timed; what compiling cost is stored beside what it saved.
"""

from __future__ import annotations

import pytest

from tests.bench.arms import SIZES, time_arm

PERSISTENT = {"bucket_decode": True, "persist_inputs": True, "compact_rows": True}
COMPILED = {"compile_decode": True, "compile_backend": "inductor"}
REPLAY = {"capture_decode": True}
ARMS: dict[str, dict[str, bool | str]] = {
    "bucketed": PERSISTENT,
    "replay": PERSISTENT | REPLAY,
    "compiled": PERSISTENT | COMPILED,
    "compiled-replay": PERSISTENT | REPLAY | COMPILED,
}
TRACED = {"compile_decode": True, "compile_backend": "eager"}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")  # inductor imports deprecated parts


def bench_traced_pieces_of_a_tiny_model(benchmark):
    """No compiler: what it costs to enter the pieces, guards included."""
    run(benchmark, "tiny", "traced", PERSISTENT | TRACED)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS)
def bench_compiled_tiny_model(benchmark, arm: str):
    run(benchmark, "tiny", arm, ARMS[arm])


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("arm", ARMS)
def bench_compiled_real_model(benchmark, arm: str):
    run(benchmark, list(SIZES)[1], arm, ARMS[arm])


def run(benchmark, name: str, arm: str, switches: dict[str, bool | str]) -> None:
    workload = time_arm(benchmark, name, arm, switches, rounds=5)
    compiled = workload.engine.decode.compiled
    stats = workload.engine.stats()
    assert stats["compiles"] == (0 if compiled is None else 3 * len(workload.engine.decode.buckets.row_sizes))
    assert not stats["uncompiled"]
    if compiled is not None:
        benchmark.extra_info.update(compile_seconds=round(compiled.seconds, 2), backend=compiled.backend.name)
