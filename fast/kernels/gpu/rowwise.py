"""Work of one row: the residual sum with the RMSNorm after it, and the gate of the feed-forward (SwiGLU).

A row is one program (a piece of a row, for the gate), computed in float32 and rounded once, so its bits cannot depend
on its company.

Sources: Zhang and Sennrich 2019 (RMSNorm); Shazeer 2020 (SwiGLU).

Proof: tests/test_gpu_kernels.py. Story: kernels.
"""

# Triton compiles these by what they are called with; shapes are in the docstrings.
# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from fast.kernels.gpu import OPTIONS, power_of_two

GATE_TILE = 1024
GATE_OPTIONS: dict[str, Any] = OPTIONS | {"num_warps": 4}


def add_and_norm(
    hidden: Tensor,  # [T, M], contiguous; the sum is left here
    delta: Tensor | None,  # [T, M], contiguous
    weight: Tensor,  # [M]
    out: Tensor,  # [T, M]
    *,
    eps: float,
) -> Tensor:  # [T, M]
    """hidden += delta, rounded as it is stored; out = RMSNorm(hidden) * weight."""
    size = hidden.shape[1]
    _norm_kernel[(hidden.shape[0],)](
        hidden, hidden if delta is None else delta, weight, out, eps,
        **norm_constants(size, added=delta is not None), **norm_options(size),
    )  # fmt: skip
    return out


def norm_constants(size: int, *, added: bool) -> dict[str, Any]:
    """What the norm is compiled for."""
    return {"SIZE": size, "TILE": power_of_two(size), "ADDED": added}


def norm_options(size: int) -> dict[str, Any]:
    """Warps by the row's size alone: the order of its sum must not depend on how many rows there are."""
    return OPTIONS | {"num_warps": 4 if size <= 2048 else 8}


def naive_add_and_norm(
    hidden: Tensor,  # [T, M]
    delta: Tensor | None,  # [T, M]
    weight: Tensor,  # [M]
    *,
    eps: float,
) -> tuple[Tensor, Tensor]:  # [T, M] in hidden's dtype, [T, M] float64
    """The sum as it is stored, and the norm of what is stored."""
    total = hidden if delta is None else (hidden.double() + delta.double()).to(hidden.dtype)
    wide = total.double()
    return total, wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def gate(
    gate_up: Tensor,  # [T, 2F], contiguous: gate, then up
    out: Tensor,  # [T, F]
) -> Tensor:  # [T, F]
    """silu(gate) * up."""
    size = out.shape[1]
    grid = (out.shape[0], triton.cdiv(size, GATE_TILE))
    _gate_kernel[grid](gate_up, out, SIZE=size, TILE=GATE_TILE, **GATE_OPTIONS)
    return out


def naive_gate(gate_up: Tensor) -> Tensor:  # [T, 2F] -> [T, F] float64
    """The same in float64."""
    first, second = gate_up.double().chunk(2, dim=-1)
    return F.silu(first) * second


@triton.jit
def _norm_kernel(hidden, delta, weight, out, eps, SIZE: tl.constexpr, TILE: tl.constexpr, ADDED: tl.constexpr):
    """One row [M] of each."""
    begin, at = tl.program_id(0).to(tl.int64) * SIZE, tl.arange(0, TILE)
    real = at < SIZE
    x = tl.load(hidden + begin + at, mask=real, other=0.0).to(tl.float32)
    if ADDED:
        x = x + tl.load(delta + begin + at, mask=real, other=0.0).to(tl.float32)
        rounded = x.to(hidden.dtype.element_ty)
        tl.store(hidden + begin + at, rounded, mask=real)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    normed = x * scale * tl.load(weight + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + begin + at, normed.to(out.dtype.element_ty), mask=real)


@triton.jit
def _gate_kernel(gate_up, out, SIZE: tl.constexpr, TILE: tl.constexpr):
    """One piece [TILE] of one row."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = at < SIZE
    x = tl.load(gate_up + row * (2 * SIZE) + at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + at, mask=real, other=0.0).to(tl.float32)
    silu = x / (1.0 + tl.exp(-x))
    tl.store(out + row * SIZE + at, (silu * up).to(out.dtype.element_ty), mask=real)
