"""Paged causal attention of prefill chunks: many queries of several sequences, each over the keys up to its own.

A task is a tile of neighbouring tokens of one chunk, times the query heads that share a K/V head. Its keys are read
through the chunk's table, split by split from position 0, as a decode reads them; so a chunk may begin anywhere in its
sequence. With tiles of one matrix instruction (`INVARIANT_TILE`) a query's bits are those that a decode of the same
length gives; larger tiles read K/V fewer times.

Proof: tests/test_gpu_attention.py. Story: gpu.
"""

# Triton compiles these by what they are called with; shapes are in the docstrings.
# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fast.kernels.gpu import power_of_two
from fast.kernels.gpu.attend import ATTENTION_OPTIONS, LOG2_E, SMALLEST_TILE, attend_split, combine, constants

INVARIANT_TILE, LARGE_TILE = SMALLEST_TILE, 64  # rows of a query tile: tokens times heads of a group


def query_tile(dtype: torch.dtype, *, invariant: bool) -> int:
    """Rows of a query tile. Float32 products run without the matrix units, where a large tile would spill."""
    return INVARIANT_TILE if invariant or dtype == torch.float32 else LARGE_TILE


def options(tile: int) -> dict[str, Any]:
    """The decode kernel's at its tile, so that sums have its order; more warps for a tile with more registers."""
    return ATTENTION_OPTIONS if tile == INVARIANT_TILE else ATTENTION_OPTIONS | {"num_warps": 8}


def paged_prefill(
    q: Tensor,  # [T, H, D], contiguous: the tokens of all chunks, flat
    k_pool: Tensor,  # [slots, K, D], contiguous
    v_pool: Tensor,  # [slots, K, D], contiguous
    table: Tensor,  # [any] int64: every chunk's slots, or blocks, one chunk after another
    tasks: Tensor,  # [N, 4] int64, of `fast.gpu_tasks` with the same group and tile
    out: Tensor,  # [T, H, D]
    *,
    split: int,
    tile: int,
    scale: float,
    block_size: int | None = None,
) -> Tensor:  # [T, H, D]
    """Causal attention of every query that a task names, into `out`."""
    heads, dim = q.shape[1:]
    kv_heads = k_pool.shape[1]
    fixed = constants(heads=heads, kv_heads=kv_heads, dim=dim, split=split, block_size=block_size)
    _prefill_kernel[(tasks.shape[0], kv_heads)](
        q, k_pool, v_pool, table, tasks, out, scale * LOG2_E,
        M=max(tile, power_of_two(heads // kv_heads)), **fixed, **options(tile),
    )  # fmt: skip
    return out


def naive_paged_prefill(
    q: Tensor,  # [T, H, D]
    k_pool: Tensor,  # [slots, K, D]
    v_pool: Tensor,  # [slots, K, D]
    slots: Tensor,  # [start + T] int64: every token of one sequence up to the last query
    *,
    scale: float,
) -> Tensor:  # [T, H, D] float64
    """One chunk by the definition."""
    group, start = q.shape[1] // k_pool.shape[1], slots.shape[0] - q.shape[0]
    k, v = (pool[slots].double().repeat_interleave(group, dim=1) for pool in (k_pool, v_pool))  # [S, H, D]
    scores = torch.einsum("thd,shd->hts", q.double(), k) * scale
    future = torch.arange(slots.shape[0])[None, :] > torch.arange(start, slots.shape[0])[:, None]
    weights = scores.masked_fill(future.to(q.device), float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)


@triton.jit(do_not_specialize_on_alignment=["table", "tasks"])
def _prefill_kernel(
    q, k_pool, v_pool, table, tasks, out, scale_log2,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, M: tl.constexpr,
    SPLIT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, H, D] of one task's tokens and one K/V head's query heads."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    task, head = tasks + tl.program_id(0) * 4, tl.program_id(1)
    first, tokens = tl.load(task), tl.load(task + 1).to(tl.int32)
    position, base = tl.load(task + 2).to(tl.int32), tl.load(task + 3)
    m, d = tl.arange(0, M), tl.arange(0, D_TILE)
    token = m // GROUP
    lines = (first + token) * HEADS + head * GROUP + m % GROUP
    ours = (token < tokens)[:, None] & (d < D)[None, :]
    queries = tl.load(q + lines[:, None] * D + d[None, :], mask=ours, other=0.0)
    limits = position + token + 1
    end = position + tokens  # no key past the tile's last query is addressed
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D_TILE], tl.float32)
    for begin in range(0, end, SPLIT):
        split_peak, split_total, split_acc = attend_split(
            queries, limits, k_pool, v_pool, table + base, head,
            begin, tl.minimum(begin + SPLIT, end), scale_log2, KV_HEADS, D, D_TILE, TILE, BLOCK,
        )  # fmt: skip
        peak, total, acc = combine(peak, total, acc, split_peak, split_total, split_acc)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + lines[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=ours)
