"""RMSNorm of a row at a time, written straight into the strips that the next linear layer reads.

A row's squares are summed sixteen lanes wide in index order and the lanes folded in one order, so a row's bits
depend on the row. Rows are padded to whole vectors with zeros, which add nothing. It knows no model.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).

Proof: tests/test_kernels.py. Story: kernels.
"""

# numba compiles its functions by the arguments they are called with; their shapes are in the docstrings.
# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fast.kernels.kernel import kernel
from fast.kernels.linear import STRIP, strip
from fast.kernels.team import claim, close
from fast.kernels.vector import LANES, fma, lane_sum, load, mul, scatter, splat


def naive_norm(
    x: NDArray[np.float32],  # [R, M]
    weight: NDArray[np.float32],  # [M]
    epsilon: float,
) -> NDArray[np.float32]:  # [R, M]
    """The same operations in the same order; float64 makes each product exact, so that a step rounds like an `fma`."""
    lanes = np.zeros((x.shape[0], LANES), np.float32)
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % LANES)))
    for at in range(0, padded.shape[1], LANES):
        part = padded[:, at : at + LANES].astype(np.float64)
        lanes = (part * part + lanes).astype(np.float32)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    mean = lanes / np.float32(x.shape[1])
    return x * (np.float32(1.0) / np.sqrt(mean + np.float32(epsilon))) * weight


@kernel
def norm(words, phase, x, weight, epsilon, size, strips, rows):
    """strips [>= rows * M'] = RMSNorm of x[:rows] over its first `size` columns; x [R, M'], weight [M'], M' = 16 n.

    One phase of a team, a task a strip, for rows of one strip lie in the same cache lines; returns the next.
    """
    tasks, mine = -(-rows // STRIP), 0
    task = claim(words, phase, tasks)
    while task >= 0:
        for row in range(task * STRIP, min(rows, (task + 1) * STRIP)):
            _row(x, weight, epsilon, size, strips, row, rows)
        mine += 1
        task = claim(words, phase, tasks)
    return close(words, phase, tasks, mine)


@kernel
def _row(x, weight, epsilon, size, strips, row, rows):
    width = x.shape[1]
    begin = row * width
    at, step = strip(row, rows, width)
    scale = splat(inverse_rms(x, begin, width, size, epsilon))
    for m in range(0, width, LANES):
        scatter(strips, at + m * step, step, mul(mul(load(x, begin + m), scale), load(weight, m)))


@kernel
def inverse_rms(x, begin, width, size, epsilon):
    """1 / sqrt(mean of squares + epsilon) of x.flat[begin : begin + width], `size` of which are not padding."""
    squares = splat(np.float32(0.0))
    for m in range(0, width, LANES):
        value = load(x, begin + m)
        squares = fma(value, value, squares)
    mean = lane_sum(squares) / np.float32(size)
    return np.float32(1.0) / np.sqrt(mean + np.float32(epsilon))
