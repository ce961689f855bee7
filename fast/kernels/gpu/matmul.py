"""A matrix product whose rows do not know each other: x [T, M] times the transpose of a weight [N, M], plus a bias.

A library picks its kernel, and so its order of sums, by the number of rows. Here tiles follow from the weight's shape
alone and every sum runs from 0 to M in steps of one tile, so a row has the same bits in any batch. The price is a
speed below the library's, most of all for long prefills.

Proof: tests/test_gpu_kernels.py. Story: invariance.
"""

# Triton compiles these by what they are called with; shapes are in the docstrings.
# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fast.kernels.gpu import OPTIONS
from fast.kernels.gpu.attend import dot

ROW_TILE, DEPTH_BYTES = 64, 128
MATMUL_OPTIONS: dict[str, Any] = OPTIONS | {"num_warps": 4, "num_stages": 3}
NARROW_UP_TO = 8192  # weights with no more columns of output take narrow tiles, or few programs would read them


def matmul(
    x: Tensor,  # [T, M], contiguous
    weight: Tensor,  # [N, M], contiguous
    bias: Tensor | None,  # [N]
    out: Tensor,  # [T, N]
) -> Tensor:  # [T, N]
    """x times the weight's transpose, plus the bias, into `out`."""
    tokens, depth = x.shape
    fixed = constants(columns=weight.shape[0], depth=depth, biased=bias is not None, element_bytes=x.element_size())
    grid = (triton.cdiv(tokens, ROW_TILE), triton.cdiv(weight.shape[0], fixed["N_TILE"]))
    _matmul_kernel[grid](x, weight, weight if bias is None else bias, out, tokens, **fixed, **MATMUL_OPTIONS)
    return out


def constants(*, columns: int, depth: int, biased: bool, element_bytes: int) -> dict[str, Any]:
    """What the kernel is compiled for: the weight's shape, and nothing of the batch."""
    narrow = columns <= NARROW_UP_TO
    tiles = {"T_TILE": ROW_TILE, "N_TILE": 32 if narrow else 64, "M_TILE": DEPTH_BYTES // element_bytes}
    return {"COLUMNS": columns, "DEPTH": depth, "BIASED": biased, **tiles}


def naive_matmul(
    x: Tensor,  # [T, M]
    weight: Tensor,  # [N, M]
    bias: Tensor | None,  # [N]
) -> Tensor:  # [T, N] float64
    """The same in float64."""
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@triton.jit(do_not_specialize=["tokens"])
def _matmul_kernel(
    x, weight, bias, out, tokens,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr,
    T_TILE: tl.constexpr, N_TILE: tl.constexpr, M_TILE: tl.constexpr,
):  # fmt: skip
    """One tile [T_TILE, N_TILE] of the output."""
    rows = tl.program_id(0).to(tl.int64) * T_TILE + tl.arange(0, T_TILE)
    columns = tl.program_id(1).to(tl.int64) * N_TILE + tl.arange(0, N_TILE)
    depths = tl.arange(0, M_TILE)
    acc = tl.zeros([T_TILE, N_TILE], tl.float32)
    for begin in range(0, DEPTH, M_TILE):
        at = begin + depths
        inside = (at < DEPTH)[None, :]
        a = tl.load(x + rows[:, None] * DEPTH + at[None, :], mask=(rows < tokens)[:, None] & inside, other=0.0)
        b = tl.load(
            weight + columns[:, None] * DEPTH + at[None, :], mask=(columns < COLUMNS)[:, None] & inside, other=0.0
        )
        acc += dot(a, tl.trans(b))
    if BIASED:
        acc += tl.load(bias + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)[None, :]
    real = (rows < tokens)[:, None] & (columns < COLUMNS)[None, :]
    tl.store(out + rows[:, None] * COLUMNS + columns[None, :], acc.to(out.dtype.element_ty), mask=real)
