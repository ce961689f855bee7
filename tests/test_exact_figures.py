"""The published figures come out of the real classes, to the last digit."""

from __future__ import annotations

import pytest

from gates.core import at_level
from tests.bench import figures

COVERAGE = [
    (4, 8, "16", 30, (30, 0), (30, 0, 0)),
    (4, 8, "8/16", 31, (21, 10), (31, 3, 33)),
    (4, 8, "4/32", 43, (36, 7), (43, 5, 95)),
    (8, 16, "16", 30, (30, 0), (30, 0, 0)),
    (8, 16, "8/16", 31, (14, 17), (31, 6, 66)),
    (8, 16, "4/32", 47, (35, 12), (47, 11, 217)),
    (8, 16, "4/8/16/32", 47, (12, 35), (47, 8, 80)),
    (16, 32, "4/32", 51, (34, 17), (51, 23, 461)),
]


@pytest.fixture(scope="module")
def counted():
    with at_level("cheap"):  # thousands of steps, whose own tests run at full
        return figures.figures()


def test_cells_written_are_quadratic_when_rebuilt_and_linear_when_kept(counted):
    cells = {row["steps"]: (row["rebuilt_cells"], row["persistent_cells"]) for row in counted["addressing"]}
    assert cells == {8: (656, 96), 64: (12_416, 320), 128: (41_216, 576), 512: (558_080, 2_112)}


def test_recordings_in_front_of_a_client(counted):
    rows = [(r["generated"], r["predicted"], r["lazy"], r["warmed"], r["warm_list"]) for r in counted["captures"]]
    assert rows == [(8, 1, 1, 0, 4), (32, 2, 2, 0, 4), (64, 3, 3, 0, 6), (128, 5, 5, 0, 10)]


def test_the_serving_list_in_shapes_seconds_and_budgets(counted):
    serving = counted["serving_list"]
    assert serving["shapes"] == {"full": 576, "rows<=8": 256, "rows<=8,width<=2048": 64}
    assert serving["warm_seconds"] == {"full": 28.80, "rows<=8": 12.80, "rows<=8,width<=2048": 3.20}
    lazy = {generated: (run["captures"], run["stall_seconds"]) for generated, run in serving["lazy"].items()}
    assert lazy == {128: (1, 0.05), 512: (4, 0.20), 2048: (16, 0.80), 8192: (64, 3.20)}
    budgets = {budget: (b["width"], b["shapes"]) for budget, b in serving["budgets"].items()}
    assert budgets[64_000_000] == (1_953, 135)
    assert budgets[268_000_000] == (8_178, 567)
    assert budgets[1_000_000_000][1] == 576


def test_coverage_by_workload(counted):
    rows = [
        (
            r["rows"],
            r["requests"],
            r["gens"],
            r["decode_steps"],
            (r["free"]["replayed"], r["free"]["scattered"]),
            (r["persistent"]["replayed"], r["persistent"]["moves"], r["persistent"]["cells"]),
        )
        for r in counted["coverage"]
    ]
    assert rows == COVERAGE


def test_prompt_tokens_computed_with_and_without_the_prefix_cache(counted):
    rows = [(r["computed"], r["with_cache"]) for r in counted["shared"]]
    assert rows == [(30_647, 1_639), (2_760, 440)]


def test_what_a_short_prompt_waits_behind_a_long_one(counted):
    rows = [(r["budget"], r["short"], r["long"]) for r in counted["behind"]]
    assert rows == [(512, (1, 512), (8, 4_010)), (8_192, (1, 4_010), (1, 4_010))]


def test_what_a_tight_pool_computes_again(counted):
    rows = [(r["blocks"], r["preemptions"], r["prefill_tokens"], r["steps"]) for r in counted["tight"]]
    assert rows == [(900, 0, 1_080, 122), (60, 16, 2_559, 329), (60, 6, 1_781, 332)]


def test_the_tables_show_what_was_counted(counted):
    text = figures.render(counted)
    for shown in (
        "558,080",
        "2,112",
        "28.80 s",
        "64 graphs   3.20 s",
        "1,953, 135 of 576",
        "12 / 35",
        "30,647",
        "16 preemptions",
    ):
        assert shown in text
