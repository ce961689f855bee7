"""Replay against eager: the same requests decoded with no switch, with buckets, with fixed inputs, from recordings.

Run: `python -m pytest tests/bench/bench_capture.py --benchmark-enable --benchmark-only` (`-m "not model"` for the tiny
model alone). Every arm gives the eager arm's tokens before it is timed. The honest part: on a CPU the host recorder
runs the same call again, so replay wins nothing there and padding costs what it costs. The arms say what the machinery
around a recording costs; the replay share says what a device would save.
"""

from __future__ import annotations

import pytest

from tests.bench.arms import SIZES, time_arm

BUCKETS = {"bucket_decode": True}
PERSISTENT = BUCKETS | {"persist_inputs": True, "compact_rows": True}
ARMS: dict[str, dict[str, bool | str]] = {
    "eager": {},
    "bucketed": BUCKETS,
    "persistent": PERSISTENT,
    "replay": PERSISTENT | {"capture_decode": True},
    "replay-gathered": BUCKETS | {"persist_inputs": True, "capture_decode": True, "gather_rows": True},
    "replay-free-rows": BUCKETS | {"persist_inputs": True, "capture_decode": True},
}


@pytest.mark.parametrize("arm", ARMS)
def bench_decode_of_a_tiny_model(benchmark, arm: str):
    check(time_arm(benchmark, "tiny", arm, ARMS[arm], rounds=7).facts(), arm)


@pytest.mark.model
@pytest.mark.parametrize("arm", ARMS)
def bench_decode_of_the_real_model(benchmark, arm: str):
    check(time_arm(benchmark, list(SIZES)[1], arm, ARMS[arm], rounds=3).facts(), arm)


def check(facts: dict[str, float], arm: str) -> None:
    """The replay share is what the arm claims: all, none, or (rows left where they are) some."""
    share = facts["replay_share"]
    assert share == (arm in ("replay", "replay-gathered")) or arm == "replay-free-rows"
    assert 0 < share < 1 if arm == "replay-free-rows" else True
    assert (facts["row_padding_share"] > 0) == (arm != "eager")
