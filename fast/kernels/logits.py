"""The highest logit of each row and the lowest id that has it, rows in parallel: what a greedy request needs.

One pass for the maximum, which hands a NaN on, and one that stops at the first id with that value. It knows no request.

Proof: tests/test_kernels.py. Story: kernels.
"""

# numba compiles its functions by the arguments they are called with; their shapes are in the docstrings.
# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from fast.kernels.team import claim, close
from fast.kernels.vector import LANES, larger_or_nan, load, splat, stack, store

NO_TOKEN = -1


def naive_greedy(logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:  # [R, V] -> [R], [R]
    """Lowest id of the highest logit, and that logit; `NO_TOKEN` and NaN for a row that holds a NaN."""
    peaks = logits.max(axis=1)
    return np.where(np.isnan(peaks), NO_TOKEN, logits.argmax(axis=1)), peaks


@njit(nogil=True, cache=True)
def greedy(words, phase, logits, stride, size, tokens, peaks, rows):
    """tokens [R] and peaks [R] for rows 0..rows-1: row r is logits.flat[r * stride : r * stride + size].

    One phase of a team, a task a row; returns the next.
    """
    mine = 0
    row = claim(words, phase, rows)
    while row >= 0:
        _highest(logits, stride, size, tokens, peaks, row)
        mine += 1
        row = claim(words, phase, rows)
    return close(words, phase, rows, mine)


@njit(nogil=True, cache=True)
def _highest(logits, stride, size, tokens, peaks, row):
    begin, whole = row * stride, size // LANES * LANES
    best = splat(np.float32(-np.inf))
    for at in range(begin, begin + whole, LANES):
        best = larger_or_nan(load(logits, at), best)
    lanes = stack(16)
    store(lanes, 0, best)
    peak = np.float32(-np.inf)
    for value in lanes:
        peak = value if value > peak or value != value else peak
    for column in range(whole, size):
        value = logits[begin + column]
        peak = value if value > peak or value != value else peak
    peaks[row], tokens[row] = peak, NO_TOKEN
    for column in range(size):
        if logits[begin + column] == peak:
            tokens[row] = column
            break
