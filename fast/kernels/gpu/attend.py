"""The inner loop of paged attention, shared by the decode kernel and the prefill kernel.

A sequence's keys are cut into splits of a fixed number of tokens, a split into tiles; a tile's keys are found through
a table of slots, or of blocks (`block_id * BLOCK + offset`, the 16 times smaller table). A query's running maximum,
sum and output start anew in each split, and splits are combined in order, so what a query gets depends on its own
position alone. Keys past `end` are never addressed. Offsets are 64-bit from the slot on: a pool of
2 ** 31 numbers is 4 GB of halves.

Sources: Milakov and Gimelshein 2018 (online softmax); Dao et al. 2023 (flash-decoding); Kwon et al. 2023 (paging).

Proof: tests/test_gpu_attention.py. Story: gpu.
"""

# Triton compiles these by what they are called with; shapes are in the docstrings.
# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fast.kernels.gpu import ONE_BY_ONE, OPTIONS, power_of_two

SMALLEST_TILE = 16  # rows of a matrix instruction
KEY_TILE = 64
SPLIT_TOKENS = 256  # keys of a split, four tiles
MAX_SPLITS = 64
LOG2_E = 1.4426950408889634
ATTENTION_OPTIONS: dict[str, Any] = OPTIONS | {"num_warps": 4, "num_stages": 2}  # decode, and the invariant prefill


def split_tokens(max_model_len: int) -> int:
    """Keys of a split for an engine of such requests: `SPLIT_TOKENS`, or what keeps a row within `MAX_SPLITS`."""
    return max(SPLIT_TOKENS, power_of_two(-(-max_model_len // MAX_SPLITS)))


def constants(*, heads: int, kv_heads: int, dim: int, split: int, block_size: int | None) -> dict[str, Any]:
    """What both kernels are compiled for; `block_size` None reads a table of slots, a number one of blocks."""
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "D": dim,
        "D_TILE": max(SMALLEST_TILE, power_of_two(dim)),
        "SPLIT": split,
        "TILE": KEY_TILE,
        "BLOCK": 0 if block_size is None else block_size,
    }


@triton.jit
def dot(a, b):
    """a [M, K] @ b [K, N] in float32, without rounding float32 operands to tf32."""
    if ONE_BY_ONE:
        return tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def fade(old, new):
    """exp2(old - new) for a maximum that grew from `old` to `new`; 0 while there is none."""
    return tl.exp2(old - tl.where(new == float("-inf"), 0.0, new))


@triton.jit
def combine(peak, total, acc, split_peak, split_total, split_acc):
    """Two stretches of keys as one: maxima [M], sums [M] and outputs [M, D]. One without keys changes no bit."""
    new = tl.maximum(peak, split_peak)
    ours, theirs = fade(peak, new), fade(split_peak, new)
    return new, total * ours + split_total * theirs, acc * ours[:, None] + split_acc * theirs[:, None]


@triton.jit
def attend_split(
    q, limits, k_pool, v_pool, table, head, begin, end, scale_log2,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(peak [M], total [M], acc [M, D_TILE]) of queries q [M, D_TILE] over keys begin..end-1 of one sequence.

    limits [M]: keys that each query may see. table: the sequence's slots, or its blocks. The pools are [slots, K, D].
    """
    n, d = tl.arange(0, TILE), tl.arange(0, D_TILE)
    peak = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], D_TILE], tl.float32)
    for start in range(begin, end, TILE):
        at = start + n
        live = at < end
        if BLOCK == 0:
            slots = tl.load(table + at, mask=live, other=0).to(tl.int64)
        else:
            slots = tl.load(table + at // BLOCK, mask=live, other=0).to(tl.int64) * BLOCK + at % BLOCK
        cells = (slots * (KV_HEADS * D) + head * D)[:, None] + d[None, :]
        real = live[:, None] & (d < D)[None, :]
        k = tl.load(k_pool + cells, mask=real, other=0.0)
        scores = dot(q, tl.trans(k)) * scale_log2
        scores = tl.where(at[None, :] < limits[:, None], scores, float("-inf"))
        new = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - tl.where(new == float("-inf"), 0.0, new)[:, None])
        ours = fade(peak, new)
        v = tl.load(v_pool + cells, mask=real, other=0.0)
        acc = acc * ours[:, None] + dot(weights.to(v.dtype), v)
        total = total * ours + tl.sum(weights, 1)
        peak = new
    return peak, total, acc
