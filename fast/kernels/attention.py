"""Causal attention over the K/V pool: one path for prefill chunks and decode rows.

A query at position p reads keys 0..p of its sequence in tiles of 64 from position 0, keeping a running maximum, sum and
output (online softmax). What a query computes depends on p and on those keys alone: not on how many queries
share a tile, on block size, on threads, or on whether its token came by prefill or by decode. Up to six queries
share a tile's loads: a token's heads of one K/V head, and neighbouring tokens of a chunk. Several such groups take
turns at a tile of keys, which comes from memory once for all of them.

Layout of a layer's pool: K [B, K, D, S] and V [B, K, S, D'], D' = D rounded up to 16. Keys of a block lie side by side,
so scores come 16 at a time; S is a multiple of 16. Both are float32, or half precision as uint16.

Sources: Milakov and Gimelshein 2018 (online softmax); Kwon et al. 2023 (paged attention).

Proof: tests/test_kernels.py. Story: attention.
"""

# numba compiles its functions by the arguments they are called with; their shapes are in the docstrings.
# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fast.kernels.kernel import int_stack, kernel, stack
from fast.kernels.linear import strip
from fast.kernels.team import claim, close
from fast.kernels.vector import (
    LANES,
    WIDE,
    add,
    exp2,
    first_lanes,
    fma_outer,
    fold_tile,
    get,
    lane_max,
    lane_sum,
    larger,
    load,
    mul,
    prefetch,
    put,
    scatter,
    splat,
    store,
    store_tile,
    sub,
    zeros,
)

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

KEY_TILE = 4 * LANES
GROUP_SIZES = (6, 4, 3, 2, 1)  # queries that share a load: what there is a compiled loop for
_MINUS_INFINITY, _LOWEST = np.float32(-np.inf), np.float32(np.finfo(np.float32).min)


def naive_attention(q: Floats, k: Floats, v: Floats, scale: float) -> NDArray[np.float64]:  # [T, H, D], [S, K, D]
    """The last T of S tokens, each against every token up to itself, by the definition and in float64: [T, H, D]."""
    group, late = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
    keys, values = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q.astype(np.float64), keys) * scale
    future = np.arange(k.shape[0])[None, :] > np.arange(q.shape[0])[:, None] + late
    weights = np.exp(np.where(future, -np.inf, scores - scores.max(-1, keepdims=True)))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), values)


@kernel
def attention(words, phase, q, k_pool, v_pool, groups, runs, tasks, strips, tokens):
    """strips [>= T * H * D] = attention of every query of q [T, H * D], from a list of tasks.

    groups [C, W / 16]: slot of keys 0, 16, 32, ... of sequence c. runs [C, 3]: first token in q, number of tokens,
    position of the first. tasks [N, 4]: sequence, first query (token of the run * G + head of the group), number of
    queries, K/V head. A token that no task names keeps what its strip held.
    One phase of a team; returns the next.
    """
    mine = 0
    task = claim(words, phase, tasks.shape[0])
    while task >= 0:
        _task(q, k_pool, v_pool, groups, runs, tasks, task, strips, tokens)
        mine += 1
        task = claim(words, phase, tasks.shape[0])
    return close(words, phase, tasks.shape[0], mine)


@kernel
def _task(q, k_pool, v_pool, groups, runs, tasks, task, strips, tokens):
    """n queries of one sequence and K/V head. A tile of keys meets all of them while it is in the core's cache."""
    kv_heads, dim, width = k_pool.shape[1], k_pool.shape[2], v_pool.shape[3]
    sequence, first, n, head = tasks[task, 0], tasks[task, 1], tasks[task, 2], tasks[task, 3]
    per_head = q.shape[1] // dim // kv_heads
    queries, output, ends = stack(n * dim), stack(n * width), int_stack(n)
    _gather(q, runs, sequence, first, n, head, per_head, dim, queries, ends)
    # A vector is read and written at each query: what a group leaves of it is the next group's, and unchanged.
    peak, total, shrink = stack(n + LANES), stack(n + LANES), stack(LANES)
    weights = stack(6 * KEY_TILE)
    output[:], peak[:], total[:] = 0.0, _LOWEST, 0.0
    k_at, v_at, k_next, v_next = int_stack(4), int_stack(4), int_stack(4), int_stack(4)
    _find_tile(groups, sequence, head, 0, ends[n - 1], k_pool, v_pool, k_next, v_next)
    for begin in range(0, ends[n - 1], KEY_TILE):
        k_at, v_at, k_next, v_next = k_next, v_next, k_at, v_at
        following = begin + KEY_TILE if begin + KEY_TILE < ends[n - 1] else begin
        _find_tile(groups, sequence, head, following, ends[n - 1], k_pool, v_pool, k_next, v_next)
        at = 0
        while at < n:
            size = group_size(n - at)
            present = min(KEY_TILE, ends[at + size - 1] - begin)
            if present > 0:
                _scores(queries, at * dim, size, k_pool, k_at, v_pool, v_at, weights)
                _soften(weights, size, ends, at, begin, peak, total, shrink)
                _add_values(size, weights, present, v_pool, v_at, k_pool, k_next, shrink, output, at * width)
            at += size
    _hand_out(output, total, runs, sequence, first, n, head, per_head, dim, width, strips, tokens, q.shape[1])


@kernel
def group_size(left):
    """How many of `left` queries share the next loads."""
    for size in GROUP_SIZES:
        if size <= left:
            return size
    return 0


@kernel
def _gather(q, runs, sequence, first, n, head, per_head, dim, queries, ends):
    """queries, [D][n'] for each group of n': a dimension of all is one load; ends [n]: keys that each reads."""
    at = 0
    while at < n:
        size = group_size(n - at)
        for r in range(size):
            token = (first + at + r) // per_head
            column = (head * per_head + (first + at + r) % per_head) * dim
            ends[at + r] = runs[sequence, 2] + token + 1
            begin, to = (runs[sequence, 0] + token) * q.shape[1] + column, at * dim + r
            for d in range(0, dim - LANES + 1, LANES):
                scatter(queries, to + d * size, size, load(q, begin + d))
            for d in range(dim // LANES * LANES, dim):
                queries[to + d * size] = get(q, begin + d)
        at += size


@kernel
def _hand_out(output, total, runs, sequence, first, n, head, per_head, dim, width, strips, tokens, depth):
    """Outputs over their sums of weights, into the strips of their tokens."""
    for r in range(n):
        token = runs[sequence, 0] + (first + r) // per_head
        column = (head * per_head + (first + r) % per_head) * dim
        to, step = strip(token, tokens, depth)
        share, begin = np.float32(1.0) / total[r], r * width
        # Adding zero makes -0.0, which a masked key can leave behind, the 0.0 that it is without that key.
        for d in range(0, dim - LANES + 1, LANES):
            scatter(strips, to + (column + d) * step, step, add(mul(load(output, begin + d), splat(share)), splat(0.0)))
        for d in range(dim // LANES * LANES, dim):
            put(strips, to + (column + d) * step, get(output, begin + d) * share + np.float32(0.0))


@kernel
def _find_tile(groups, sequence, head, begin, end, k_pool, v_pool, k_at, v_at):
    """Where the four groups of 16 keys from `begin` on start in the pool. Up to 8 KV streams are then known."""
    kv_heads, dim, block_size, width = k_pool.shape[1], k_pool.shape[2], k_pool.shape[3], v_pool.shape[3]
    for c in range(4):
        # A group past the last key takes the first one's address: its scores are masked.
        slot = groups[sequence, begin // LANES + (c if begin + c * LANES < end else 0)]
        row, offset = slot // block_size * kv_heads + head, slot % block_size
        k_at[c] = row * dim * block_size + offset
        v_at[c] = (row * block_size + offset) * width


@kernel
def _scores(queries, at, n, k_pool, k_at, v_pool, v_at, weights):
    """weights [n, 64] = queries times the tile's keys, each one chain over the dimensions."""
    if n == 6 and WIDE:
        _scores_of(zeros(24), queries, at, k_pool, k_at, v_pool, v_at, weights)
    elif n == 4 and WIDE:
        _scores_of(zeros(16), queries, at, k_pool, k_at, v_pool, v_at, weights)
    elif n == 3 and WIDE:
        _scores_of(zeros(12), queries, at, k_pool, k_at, v_pool, v_at, weights)
    elif n == 2 and WIDE:
        _scores_of(zeros(8), queries, at, k_pool, k_at, v_pool, v_at, weights)
    elif n == 1:
        _scores_of(zeros(4), queries, at, k_pool, k_at, v_pool, v_at, weights)
    else:
        for c in range(4):
            if n == 6:
                _scores_of_group(zeros(6), queries, at, k_pool, k_at[c], v_pool, v_at[c], weights, c)
            elif n == 4:
                _scores_of_group(zeros(4), queries, at, k_pool, k_at[c], v_pool, v_at[c], weights, c)
            elif n == 3:
                _scores_of_group(zeros(3), queries, at, k_pool, k_at[c], v_pool, v_at[c], weights, c)
            else:
                _scores_of_group(zeros(2), queries, at, k_pool, k_at[c], v_pool, v_at[c], weights, c)


@kernel
def _scores_of(tile, queries, at, k_pool, k_at, v_pool, v_at, weights):
    """All 64 keys at once: the keys of a dimension are four loads."""
    n, block_size = len(tile) // 4, k_pool.shape[3]
    a, b, c, e = k_at[0], k_at[1], k_at[2], k_at[3]
    for d in range(k_pool.shape[2]):
        keys = (load(k_pool, a), load(k_pool, b), load(k_pool, c), load(k_pool, e))
        # The values are wanted next, and lie in other pages than the keys: nothing else would have asked for them.
        prefetch(v_pool, v_at[0] + d * LANES)
        prefetch(v_pool, v_at[1] + d * LANES)
        prefetch(v_pool, v_at[2] + d * LANES)
        prefetch(v_pool, v_at[3] + d * LANES)
        tile = fma_outer(tile, queries, at + d * n, 1, keys)
        a, b, c, e = a + block_size, b + block_size, c + block_size, e + block_size
    store_tile(weights, 0, KEY_TILE, tile, 4)


@kernel
def _scores_of_group(tile, queries, at, k_pool, k_at, v_pool, v_at, weights, c):
    """16 of the 64 keys, for registers of eight lanes."""
    for d in range(k_pool.shape[2]):
        prefetch(v_pool, v_at + d * LANES)
        tile = fma_outer(tile, queries, at + d * len(tile), 1, (load(k_pool, k_at),))
        k_at += k_pool.shape[3]
    store_tile(weights, c * LANES, KEY_TILE, tile, 1)


@kernel
def _soften(weights, n, ends, first, begin, peak, total, shrink):
    """Scores of n queries to weights 2**(score - peak), and their sums so far to the new peaks.

    shrink [16]: what a sum under each query's old peak is worth under its new one; 1 where the peak is the same.
    """
    best = stack(LANES)
    store(best, 0, load(peak, first))
    for r in range(n):
        _mask(weights, r * KEY_TILE, ends[first + r] - begin)
        s0, s1, s2, s3 = _four(weights, r * KEY_TILE)
        best[r] = max(best[r], lane_max(larger(larger(s0, s1), larger(s2, s3))))
    factor = exp2(sub(load(peak, first), load(best, 0)))
    store(shrink, 0, factor)
    store(peak, first, load(best, 0))
    store(total, first, mul(load(total, first), factor))
    for r in range(n):
        at, top = r * KEY_TILE, splat(best[r])
        s0, s1, s2, s3 = _four(weights, at)
        w0, w1, w2, w3 = exp2(sub(s0, top)), exp2(sub(s1, top)), exp2(sub(s2, top)), exp2(sub(s3, top))
        store(weights, at, w0)
        store(weights, at + 16, w1)
        store(weights, at + 32, w2)
        store(weights, at + 48, w3)
        total[first + r] += lane_sum(add(add(w0, w1), add(w2, w3)))


@kernel
def _four(array, at):
    return load(array, at), load(array, at + 16), load(array, at + 32), load(array, at + 48)


@kernel
def _mask(weights, at, readable):
    """Keys past a query's last are no keys to it."""
    if readable < KEY_TILE:
        for c in range(4):
            s = load(weights, at + c * LANES)
            store(weights, at + c * LANES, first_lanes(s, readable - c * LANES, _MINUS_INFINITY))


@kernel
def _add_values(n, weights, present, v_pool, v_at, k_pool, k_next, shrink, output, at):
    """output [n, D'] = shrink times itself + weights times the tile's values, each of these one chain over the keys."""
    column, width = 0, v_pool.shape[3]
    while WIDE and width - column >= KEY_TILE:
        if n == 6:
            _values_of(zeros(24), weights, present, v_pool, v_at, k_pool, k_next, column, shrink, output, at)
        elif n == 4:
            _values_of(zeros(16), weights, present, v_pool, v_at, k_pool, k_next, column, shrink, output, at)
        elif n == 3:
            _values_of(zeros(12), weights, present, v_pool, v_at, k_pool, k_next, column, shrink, output, at)
        elif n == 2:
            _values_of(zeros(8), weights, present, v_pool, v_at, k_pool, k_next, column, shrink, output, at)
        else:
            _values_of(zeros(4), weights, present, v_pool, v_at, k_pool, k_next, column, shrink, output, at)
        column += KEY_TILE
    # A vector at a time: registers of eight lanes, or what a head size that is no multiple of 64 leaves.
    while column < width:
        if n == 6:
            _values_of_group(zeros(6), weights, present, v_pool, v_at, column, shrink, output, at)
        elif n == 4:
            _values_of_group(zeros(4), weights, present, v_pool, v_at, column, shrink, output, at)
        elif n == 3:
            _values_of_group(zeros(3), weights, present, v_pool, v_at, column, shrink, output, at)
        elif n == 2:
            _values_of_group(zeros(2), weights, present, v_pool, v_at, column, shrink, output, at)
        else:
            _values_of_group(zeros(1), weights, present, v_pool, v_at, column, shrink, output, at)
        column += LANES


@kernel
def _values_of(tile, weights, present, v_pool, v_at, k_pool, k_next, column, shrink, output, at):
    width, block_size, s = v_pool.shape[3], k_pool.shape[3], 0
    while s < present:
        v, stop = v_at[s // LANES] + column, min(present, s + LANES)
        # One address that moves on: with more of them the compiler's unrolled loop keeps too much in registers.
        while s < stop:
            values = (load(v_pool, v), load(v_pool, v + 16), load(v_pool, v + 32), load(v_pool, v + 48))
            # And the next tile's keys come after the values.
            prefetch(k_pool, k_next[0] + s * block_size)
            prefetch(k_pool, k_next[1] + s * block_size)
            prefetch(k_pool, k_next[2] + s * block_size)
            prefetch(k_pool, k_next[3] + s * block_size)
            tile = fma_outer(tile, weights, s, KEY_TILE, values)
            v += width
            s += 1
    fold_tile(output, at + column, width, shrink, 0, tile, 4)


@kernel
def _values_of_group(tile, weights, present, v_pool, v_at, column, shrink, output, at):
    width = v_pool.shape[3]
    for s in range(present):
        value = load(v_pool, v_at[s // LANES] + s % LANES * width + column)
        tile = fma_outer(tile, weights, s, KEY_TILE, (value,))
    fold_tile(output, at + column, width, shrink, 0, tile, 1)
