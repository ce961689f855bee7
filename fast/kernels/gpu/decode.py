"""Paged decode attention: one query a row, its keys read where they lie, up to the row's own length.

A program takes one row, one K/V head (all query heads that share it are one tile) and one split of the keys; where a
row has more splits than programs, a program takes every so manyth. Each split's result is kept, and a second kernel
combines a row's splits in order. So a row's bits depend on its own length alone: not on the batch, the width of the
table or the number of programs. A row of length 0 reads nothing and gets zeros.

Proof: tests/test_gpu_attention.py. Story: gpu.
"""

# Triton compiles these by what they are called with; shapes are in the docstrings.
# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fast.kernels.gpu import OPTIONS, power_of_two
from fast.kernels.gpu.attend import ATTENTION_OPTIONS, LOG2_E, SMALLEST_TILE, attend_split, combine, constants

COMBINE_OPTIONS: dict[str, Any] = OPTIONS | {"num_warps": 4}
SPLIT_VARIES = ["programs", "splits", "table_stride"]
COMBINE_VARIES = ["splits"]


@dataclass(frozen=True, slots=True)
class Partials:
    """Where the splits of N rows are kept until they are combined."""

    acc: Tensor  # [N, H, splits, D_TILE] float32
    peaks: Tensor  # [N, H, splits] float32
    totals: Tensor  # [N, H, splits] float32

    @classmethod
    def empty(cls, *, rows: int, heads: int, dim: int, splits: int, device: torch.device | str) -> Partials:
        """Room for `rows` rows of up to `splits` splits."""
        d_tile = max(SMALLEST_TILE, power_of_two(dim))
        shapes = ((rows, heads, splits, d_tile), (rows, heads, splits), (rows, heads, splits))
        return cls(*(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes))

    @property
    def num_bytes(self) -> int:
        """Bytes of all three."""
        return sum(x.numel() * x.element_size() for x in (self.acc, self.peaks, self.totals))


def paged_decode(
    q: Tensor,  # [N, H, D], contiguous
    k_pool: Tensor,  # [slots, K, D], contiguous
    v_pool: Tensor,  # [slots, K, D], contiguous
    table: Tensor,  # [N, W] int64: slots, or blocks; rows may be any stride apart
    lengths: Tensor,  # [N] int64: keys that each row reads
    out: Tensor,  # [N, H, D]
    partials: Partials,
    *,
    split: int,
    programs: int,
    scale: float,
    block_size: int | None = None,
) -> Tensor:  # [N, H, D]
    """Attention of each row's query over its own keys, into `out`; at most `programs` programs a row and K/V head."""
    rows, heads, dim = q.shape
    kv_heads, splits = k_pool.shape[1], partials.peaks.shape[2]
    fixed = constants(heads=heads, kv_heads=kv_heads, dim=dim, split=split, block_size=block_size)
    _split_kernel[(rows, kv_heads, min(programs, splits))](
        q, k_pool, v_pool, table, lengths, partials.acc, partials.peaks, partials.totals,
        scale * LOG2_E, table.stride(0), min(programs, splits), splits,
        M=group_tile(heads, kv_heads), **fixed, **ATTENTION_OPTIONS,
    )  # fmt: skip
    _combine_kernel[(rows, heads)](
        partials.acc, partials.peaks, partials.totals, lengths, out, splits,
        HEADS=heads, D=dim, D_TILE=fixed["D_TILE"], SPLIT=split, **COMBINE_OPTIONS,
    )  # fmt: skip
    return out


def naive_paged_decode(
    q: Tensor,  # [N, H, D]
    k_pool: Tensor,  # [slots, K, D]
    v_pool: Tensor,  # [slots, K, D]
    table: Tensor,  # [N, W] int64
    lengths: Tensor,  # [N] int64
    *,
    scale: float,
    block_size: int | None = None,
) -> Tensor:  # [N, H, D] float64
    """The same by the definition, a row at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[1] // k_pool.shape[1]
    for row, length in enumerate(lengths.tolist()):
        if length:
            at = torch.arange(length, device=q.device)
            slots = table[row, :length] if block_size is None else table[row][at // block_size] * block_size
            slots = slots if block_size is None else slots + at % block_size
            k, v = (pool[slots].double().repeat_interleave(group, dim=1) for pool in (k_pool, v_pool))  # [L, H, D]
            scores = torch.einsum("hd,lhd->hl", q[row].double(), k) * scale
            out[row] = torch.einsum("hl,lhd->hd", scores.softmax(-1), v)
    return out


def group_tile(heads: int, kv_heads: int) -> int:
    """Rows of a query tile: the heads that share a K/V head, rounded up to what a matrix instruction takes."""
    return max(SMALLEST_TILE, power_of_two(heads // kv_heads))


@triton.jit(do_not_specialize=SPLIT_VARIES, do_not_specialize_on_alignment=["table", "lengths"])
def _split_kernel(
    q, k_pool, v_pool, table, lengths, acc_out, peaks_out, totals_out, scale_log2, table_stride, programs, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, M: tl.constexpr,
    SPLIT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """acc [N, H, splits, D_TILE], peaks and totals [N, H, splits] of the splits below each row's length."""
    row, head, program = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    length = tl.load(lengths + row).to(tl.int32)
    m, d = tl.arange(0, M), tl.arange(0, D_TILE)
    lines = row * HEADS + head * GROUP + m  # [M]: this tile's heads among all rows' heads
    ours = (m < GROUP)[:, None] & (d < D)[None, :]
    queries = tl.load(q + lines[:, None] * D + d[None, :], mask=ours, other=0.0)
    for split in range(program, tl.cdiv(length, SPLIT), programs):
        begin = split * SPLIT
        peak, total, acc = attend_split(
            queries, tl.zeros([M], tl.int32) + length, k_pool, v_pool, table + row * table_stride, head,
            begin, tl.minimum(begin + SPLIT, length), scale_log2, KV_HEADS, D, D_TILE, TILE, BLOCK,
        )  # fmt: skip
        to = lines * splits + split
        tl.store(acc_out + to[:, None] * D_TILE + d[None, :], acc, mask=(m < GROUP)[:, None])
        tl.store(peaks_out + to, peak, mask=m < GROUP)
        tl.store(totals_out + to, total, mask=m < GROUP)


@triton.jit(do_not_specialize=COMBINE_VARIES, do_not_specialize_on_alignment=["lengths"])
def _combine_kernel(
    acc_in, peaks, totals, lengths, out, splits,
    HEADS: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """out [N, H, D]: each row's splits in order, from the first; zeros where there is none."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = row * HEADS + head
    length = tl.load(lengths + row).to(tl.int32)
    one, d = tl.arange(0, 1), tl.arange(0, D_TILE)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, D_TILE], tl.float32)
    for split in range(0, tl.cdiv(length, SPLIT)):
        at = line * splits + split + one
        split_acc = tl.load(acc_in + at[:, None] * D_TILE + d[None, :])
        peak, total, acc = combine(peak, total, acc, tl.load(peaks + at), tl.load(totals + at), split_acc)
    # A sum of 0 is a row that read nothing and whose output is 0; a NaN is neither.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + (line + one)[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=(d < D)[None, :])
