"""The coverage table, free rows against a persistent batch: exact counts first, then what the host work costs."""

from __future__ import annotations

import pytest

from fast.coverage import coverage

WORKLOADS = [
    (4, 8, (16,)),
    (4, 8, (8, 16)),
    (4, 8, (4, 32)),
    (8, 16, (16,)),
    (8, 16, (8, 16)),
    (8, 16, (4, 32)),
    (8, 16, (4, 8, 16, 32)),
    (16, 32, (4, 32)),
]


@pytest.mark.parametrize("compact_rows", [False, True], ids=["free-rows", "persistent"])
@pytest.mark.parametrize(("rows", "requests", "gens"), WORKLOADS)
def test_bench_coverage(benchmark, rows: int, requests: int, gens: tuple[int, ...], compact_rows: bool):
    free = coverage(rows=rows, requests=requests, gens=gens, compact_rows=False)
    result = benchmark(coverage, rows=rows, requests=requests, gens=gens, compact_rows=compact_rows)
    # The schedule is the same; only where its rows sit differs.
    assert result.decode_steps == free.decode_steps
    assert result.replayed == result.decode_steps if compact_rows else result == free
    benchmark.extra_info |= {
        "decode_steps": result.decode_steps,
        "replayed": result.replayed,
        "scattered": result.scattered,
        "moves": result.moves,
        "cells": result.cells,
    }
