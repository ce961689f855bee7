"""A linear layer whose every output is one chain of fused multiply-adds, in the order of its inputs.

`y[r, n] = fma(x[r, M-1], w[n, M-1], ... fma(x[r, 0], w[n, 0], 0))`: the order depends on neither the number of rows nor
the thread count nor the machine, so a row's bits cannot. Speed comes from how many chains run at once: weights are
packed into panels of 32 outputs, inputs lie in strips of up to 12 rows, and a panel meets a strip in one tile of
registers. Weights are half precision in storage (halves are exact in float32) or float32. What follows the product is
done on the registers that hold it: a bias, a residual sum, or SwiGLU over a panel of 16 gates and 16 ups.
A strip of r rows is [M][r]: all rows' input 0, then input 1, so a tile reads one stream. It knows no model.

Proof: tests/test_kernels.py. Story: kernels.
"""

# numba compiles its functions by the arguments they are called with; their shapes are in the docstrings.
# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fast.kernels.kernel import kernel, stack
from fast.kernels.team import claim, close
from fast.kernels.vector import (
    LANES,
    WIDE,
    add,
    div,
    exp2,
    fma_outer,
    larger,
    load,
    mul,
    prefetch,
    scatter,
    splat,
    store,
    store_tile,
    zeros,
)

PANEL = 2 * LANES  # outputs a panel holds
STRIP = 12  # rows
AHEAD = 32 * PANEL  # weights that are asked for before they are used: 32 steps, 2 KiB of halves
ROW_CHUNK = 8 * STRIP  # rows that meet all panels before the next rows do: their inputs stay in a core's own cache
PLAIN, ADD, SWIGLU = 0, 1, 2
_LOG2_E = np.float32(1.4426950408889634)

Packed = NDArray[np.uint16] | NDArray[np.float32]


def pack(weight: NDArray[np.float32], *, half: bool) -> Packed:  # [N, M] -> [ceil(N / 32), M, 32]
    """Panels of 32 outputs, input by input; missing outputs are zero. `half` rounds to half precision."""
    outputs, inputs = weight.shape
    panels = -(-outputs // PANEL)
    padded = np.zeros((panels * PANEL, inputs), np.float16 if half else np.float32)
    padded[:outputs] = weight
    packed = np.ascontiguousarray(padded.reshape(panels, PANEL, inputs).transpose(0, 2, 1))
    return packed.view(np.uint16) if half else packed


def unpack(packed: Packed, outputs: int) -> NDArray[np.float32]:  # [P, M, 32] -> [N, M]
    """The weight that `pack` was given, after its rounding."""
    values = packed.view(np.float16) if packed.dtype == np.uint16 else packed
    return values.transpose(0, 2, 1).reshape(-1, packed.shape[1])[:outputs].astype(np.float32)


def interleave(gate: NDArray[np.float32], up: NDArray[np.float32]) -> NDArray[np.float32]:  # [F, M] twice -> [2F', M]
    """Gate and up rows in alternating groups of 16, so that SwiGLU finds both in one panel; F is rounded up to 16."""
    outputs, inputs = gate.shape
    groups = -(-outputs // LANES)
    both = np.zeros((groups, 2, LANES, inputs), np.float32)
    for which, rows in enumerate((gate, up)):
        padded = np.zeros((groups * LANES, inputs), np.float32)
        padded[:outputs] = rows
        both[:, which] = padded.reshape(groups, LANES, inputs)
    return both.reshape(-1, inputs)


def to_strips(x: NDArray[np.float32]) -> NDArray[np.float32]:  # [R, M] -> [R * M]
    """Rows as the kernel reads them."""
    return np.concatenate([x[at : at + STRIP].T.reshape(-1) for at in range(0, len(x), STRIP)])


def from_strips(strips: NDArray[np.float32], rows: int, depth: int) -> NDArray[np.float32]:  # [>= R * M] -> [R, M]
    """The inverse of `to_strips`."""
    parts = [strips[at * depth : min(rows, at + STRIP) * depth] for at in range(0, rows, STRIP)]
    return np.concatenate([part.reshape(depth, -1).T for part in parts])


def naive_linear(
    x: NDArray[np.float32], weight: NDArray[np.float32]
) -> NDArray[np.float32]:  # [R, M], [N, M] -> [R, N]
    """The chain, written down: in float64 a product of two float32 is exact, so each step rounds like an `fma`.

    (A sum that lands within 2**-53 of the middle between two float32 may round twice; no such case is likely.)
    """
    y = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    for m in range(x.shape[1]):
        y = (x[:, m, None].astype(np.float64) * weight[None, :, m] + y).astype(np.float32)
    return y


@kernel
def strip(row, rows, depth):
    """Where input 0 of `row` lies in strips of `rows` rows, and how far apart its inputs are."""
    first = row // STRIP * STRIP
    return first * depth + row - first, min(STRIP, rows - first)


@kernel
def linear(words, phase, strips, packed, bias, out, rows, epilogue):
    """`out` from `rows` rows of inputs: strips [>= rows * M], packed [P, M, 32], bias [32 P] or empty.

    PLAIN stores to out [R, N], N >= 32 P. ADD adds to what it holds. SWIGLU stores silu(gate) * up of each panel's
    halves to out [>= rows * 16 P], in strips. One phase of a team; returns the next.
    """
    panels, mine = packed.shape[0], 0
    tasks = panels * -(-rows // ROW_CHUNK)
    task = claim(words, phase, tasks)
    while task >= 0:
        begin = task // panels * ROW_CHUNK
        _panel(strips, packed, bias, out, rows, begin, min(rows, begin + ROW_CHUNK), task % panels, epilogue)
        mine += 1
        task = claim(words, phase, tasks)
    return close(words, phase, tasks, mine)


@kernel
def _panel(strips, packed, bias, out, rows, begin, end, panel, epilogue):
    """One panel for rows begin..end-1, in the largest tiles that there is a compiled loop for."""
    sums = stack(384)  # [12, 32]
    row = begin
    while row < end:
        at, step = strip(row, rows, packed.shape[1])
        if WIDE:
            count = _product(strips, at, step, packed, panel, end - row, sums)
        else:
            count = _product_by_halves(strips, at, step, packed, panel, end - row, sums)
        _finish(sums, bias, out, rows, row, count, panel, packed.shape[0], epilogue)
        row += count


@kernel
def _product(strips, at, step, packed, panel, left, sums):
    """sums [n, 32] for as many rows as there is a loop for, at most `left`; returns n."""
    w = panel * packed.shape[1] * PANEL
    if left >= 12:
        _both(zeros(24), strips, at, step, packed, w, sums)
        return 12
    if left >= 8:
        _both(zeros(16), strips, at, step, packed, w, sums)
        return 8
    if left >= 4:
        _both(zeros(8), strips, at, step, packed, w, sums)
        return 4
    if left >= 2:
        _both(zeros(4), strips, at, step, packed, w, sums)
        return 2
    _both(zeros(2), strips, at, step, packed, w, sums)
    return 1


@kernel
def _both(tile, strips, at, step, packed, w, sums):
    """All 32 outputs: no partial sum leaves its register before the last input is in."""
    for _ in range(packed.shape[1]):
        prefetch(packed, w + AHEAD)
        tile = fma_outer(tile, strips, at, 1, (load(packed, w), load(packed, w + LANES)))
        at += step
        w += PANEL
    store_tile(sums, 0, PANEL, tile, 2)


@kernel
def _product_by_halves(strips, at, step, packed, panel, left, sums):
    """`_product` for registers of eight lanes: from four rows on, 16 outputs after the other 16."""
    w = panel * packed.shape[1] * PANEL
    if left >= 6:
        _one(zeros(6), strips, at, step, packed, w, sums, 0)
        _one(zeros(6), strips, at, step, packed, w + LANES, sums, LANES)
        return 6
    if left >= 4:
        _one(zeros(4), strips, at, step, packed, w, sums, 0)
        _one(zeros(4), strips, at, step, packed, w + LANES, sums, LANES)
        return 4
    if left >= 2:
        _both(zeros(4), strips, at, step, packed, w, sums)
        return 2
    _both(zeros(2), strips, at, step, packed, w, sums)
    return 1


@kernel
def _one(tile, strips, at, step, packed, w, sums, side):
    for _ in range(packed.shape[1]):
        prefetch(packed, w + AHEAD)
        tile = fma_outer(tile, strips, at, 1, (load(packed, w),))
        at += step
        w += PANEL
    store_tile(sums, side, PANEL, tile, 1)


@kernel
def _finish(sums, bias, out, rows, row, count, panel, panels, epilogue):
    """What follows the product of one panel for rows row..row+count-1, and the store."""
    for r in range(count):
        low, high = load(sums, r * PANEL), load(sums, r * PANEL + LANES)
        if bias.size:
            low, high = add(low, load(bias, panel * PANEL)), add(high, load(bias, panel * PANEL + LANES))
        if epilogue == SWIGLU:
            at, step = strip(row + r, rows, panels * LANES)
            scatter(out, at + panel * LANES * step, step, mul(silu(low), high))
        else:
            to = (row + r) * out.shape[1] + panel * PANEL
            if epilogue == ADD:
                low, high = add(load(out, to), low), add(load(out, to + LANES), high)
            store(out, to, low)
            store(out, to + LANES, high)


@kernel
def silu(gate):
    """gate / (1 + exp(-gate)), relative error below 4e-7 + 1.2e-7 * max(-gate, 0).

    Below -87 the exponential is held at exp(87), and the result is smaller than 1e-35.
    """
    power = exp2(mul(larger(gate, splat(-87.0)), splat(-_LOG2_E)))
    return div(gate, add(splat(1.0), power))
