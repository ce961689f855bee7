"""RoPE and the write into the K/V pool: one pass over a step's fused q, k and v.

q is normed (where the model has a weight for it) and turned into a buffer of its own; k likewise and v as it is go to
the token's slot. Everything is computed in float32 and rounded once. A program takes one token and q, k or v whole.
Tokens of a padded row go to the sink slot, several to one, which nothing reads.

Source: Su et al. 2021 (RoPE).

Proof: tests/test_gpu_kernels.py. Story: attention.
"""

# Triton compiles these by what they are called with; shapes are in the docstrings.
# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fast.kernels.gpu import OPTIONS, power_of_two

ROPE_OPTIONS: dict[str, Any] = OPTIONS | {"num_warps": 4}


def rotate_and_write(
    qkv: Tensor,  # [T, (H + 2K) * D], contiguous
    positions: Tensor,  # [T] int64
    slots: Tensor,  # [T] int64: where each token's K/V goes
    cos: Tensor,  # [P, D/2] float32
    sin: Tensor,  # [P, D/2] float32
    q: Tensor,  # [T, H, D]: the turned queries
    k_pool: Tensor,  # [slots, K, D], contiguous
    v_pool: Tensor,  # [slots, K, D], contiguous
    *,
    q_norm: Tensor | None = None,  # [D]
    k_norm: Tensor | None = None,  # [D]
    eps: float = 0.0,
) -> None:
    """Fill `q`, and the tokens' slots of both pools."""
    _rope_kernel[(qkv.shape[0], 3)](
        qkv, positions, slots, cos, sin, q, k_pool, v_pool,
        cos if q_norm is None else q_norm, cos if k_norm is None else k_norm, eps,
        **constants(heads=q.shape[1], kv_heads=k_pool.shape[1], dim=q.shape[2], normed=q_norm is not None),
        **ROPE_OPTIONS,
    )  # fmt: skip


def constants(*, heads: int, kv_heads: int, dim: int, normed: bool) -> dict[str, Any]:
    """What the kernel is compiled for."""
    tiles = {"H_TILE": power_of_two(heads), "K_TILE": power_of_two(kv_heads), "HALF_TILE": power_of_two(dim // 2)}
    return {"HEADS": heads, "KV_HEADS": kv_heads, "D": dim, "NORMED": normed, **tiles}


def naive_rotate(
    x: Tensor,  # [T, H, D]
    positions: Tensor,  # [T]
    cos: Tensor,  # [P, D/2]
    sin: Tensor,  # [P, D/2]
    *,
    norm: Tensor | None = None,  # [D]
    eps: float = 0.0,
) -> Tensor:  # [T, H, D] float64
    """Norm, then turn each pair (i, i + D/2) by its angle."""
    wide = x.double()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * norm.double()
    first, second = wide.chunk(2, dim=-1)
    c, s = (table[positions].double()[:, None, :] for table in (cos, sin))
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rope_kernel(
    qkv, positions, slots, cos, sin, q, k_pool, v_pool, q_norm, k_norm, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, NORMED: tl.constexpr,
    H_TILE: tl.constexpr, K_TILE: tl.constexpr, HALF_TILE: tl.constexpr,
):  # fmt: skip
    """Part 0 of a token is q, part 1 k, part 2 v."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = qkv + token * ((HEADS + 2 * KV_HEADS) * D)
    position = tl.load(positions + token)
    cell = tl.load(slots + token).to(tl.int64) * (KV_HEADS * D)
    if part == 0:
        _turn(line, q + token * (HEADS * D), position, cos, sin, q_norm, eps, HEADS, D, True, NORMED, H_TILE, HALF_TILE)
    elif part == 1:
        at = line + HEADS * D
        _turn(at, k_pool + cell, position, cos, sin, k_norm, eps, KV_HEADS, D, True, NORMED, K_TILE, HALF_TILE)
    else:
        at = line + (HEADS + KV_HEADS) * D
        _turn(at, v_pool + cell, position, cos, sin, k_norm, eps, KV_HEADS, D, False, False, K_TILE, HALF_TILE)


@triton.jit
def _turn(
    x, out, position, cos, sin, norm, eps,
    COUNT: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr, NORMED: tl.constexpr,
    COUNT_TILE: tl.constexpr, HALF_TILE: tl.constexpr,
):  # fmt: skip
    """out [COUNT, D] = x [COUNT, D], normed and turned where asked."""
    HALF: tl.constexpr = D // 2
    head, d = tl.arange(0, COUNT_TILE), tl.arange(0, HALF_TILE)
    real = (head < COUNT)[:, None] & (d < HALF)[None, :]
    cells = head[:, None] * D + d[None, :]
    first = tl.load(x + cells, mask=real, other=0.0).to(tl.float32)
    second = tl.load(x + cells + HALF, mask=real, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
        first = first * scale * tl.load(norm + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        second = second * scale * tl.load(norm + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    if TURNED:
        c = tl.load(cos + position * HALF + d, mask=d < HALF, other=0.0)[None, :]
        s = tl.load(sin + position * HALF + d, mask=d < HALF, other=0.0)[None, :]
        first, second = first * c - second * s, second * c + first * s
    tl.store(out + cells, first.to(out.dtype.element_ty), mask=real)
    tl.store(out + cells + HALF, second.to(out.dtype.element_ty), mask=real)
