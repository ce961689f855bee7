"""RoPE of queries and keys, and the write of keys and values into the K/V pool: all of a token's heads at a time.

What a token's numbers become depends on its row and its position. Layout of the pool: see `attention`. It knows no
sequence and no request.

Source: Su et al. 2021, "RoFormer".

Proof: tests/test_kernels.py. Story: kernels.
"""

# numba compiles its functions by the arguments they are called with; their shapes are in the docstrings.
# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fast.kernels.kernel import kernel, stack
from fast.kernels.norm import inverse_rms
from fast.kernels.team import claim, close
from fast.kernels.vector import LANES, add, get, load, mul, put, splat, store, sub

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

TOKENS = LANES  # of a task: the keys of sixteen neighbours lie in the same cache lines


def naive_rotate(x: Floats, positions: Ints, cos: Floats, sin: Floats) -> Floats:  # [T, H, D], [T] -> [T, H, D]
    """Turn each pair (i, i + D/2) by its angle: the same products and differences, in float32."""
    first, second = np.split(x, 2, axis=-1)
    c, s = cos[positions][:, None, :], sin[positions][:, None, :]
    return np.concatenate([first * c - second * s, second * c + first * s], axis=-1)


@kernel
def rotate_and_write(
    words, phase, qkv, positions, slots, cos, sin, scale, q_norm, k_norm, epsilon, k_pool, v_pool, q, tokens
):
    """Rotate q and k of each token; q goes to q [T, H * D] times `scale`, k and v to the token's slot in the pool.

    qkv [T, >= (H + 2K) * D], positions and slots [T], cos and sin [P, D/2], q_norm and k_norm [D'] or empty.
    One phase of a team; returns the next.
    """
    tasks, mine = -(-tokens // TOKENS), 0
    task = claim(words, phase, tasks)
    while task >= 0:
        for token in range(task * TOKENS, min(tokens, (task + 1) * TOKENS)):
            _rotate_token(qkv, positions, slots, cos, sin, scale, q_norm, k_norm, epsilon, k_pool, v_pool, q, token)
        mine += 1
        task = claim(words, phase, tasks)
    return close(words, phase, tasks, mine)


@kernel
def _rotate_token(qkv, positions, slots, cos, sin, scale, q_norm, k_norm, epsilon, k_pool, v_pool, q, token):
    kv_heads, dim, block_size, width = k_pool.shape[1], k_pool.shape[2], k_pool.shape[3], v_pool.shape[3]
    heads, row, angle = q.shape[1] // dim, token * qkv.shape[1], positions[token] * (dim // 2)
    for head in range(heads):
        at = head * dim
        _rotate(qkv, row + at, cos, sin, angle, q_norm, epsilon, dim, scale, q, token * q.shape[1] + at)
    block, offset = slots[token] // block_size, slots[token] % block_size
    turned = stack(dim)
    for head in range(kv_heads):
        k_row, v_row = row + (heads + head) * dim, row + (heads + kv_heads + head) * dim
        _rotate(qkv, k_row, cos, sin, angle, k_norm, epsilon, dim, np.float32(1.0), turned, 0)
        at = (block * kv_heads + head) * dim * block_size + offset
        for d in range(dim):
            put(k_pool, at + d * block_size, turned[d])
        at = ((block * kv_heads + head) * block_size + offset) * width
        for d in range(0, dim - LANES + 1, LANES):
            store(v_pool, at + d, load(qkv, v_row + d))
        for d in range(dim // LANES * LANES, dim):
            put(v_pool, at + d, get(qkv, v_row + d))


@kernel
def _rotate(x, begin, cos, sin, angle, weight, epsilon, dim, scale, out, to):
    """out.flat[to : to + D] = `scale` times RoPE of x.flat[begin : begin + D], normalised first where a weight is."""
    if weight.size == 0:
        _turn(x, begin, cos, sin, angle, dim // 2, scale, out, to)
        return
    head = stack(weight.size)
    for d in range(weight.size):
        head[d] = get(x, begin + d) if d < dim else 0.0
    inverse = splat(inverse_rms(head, 0, weight.size, dim, epsilon))
    for d in range(0, weight.size, LANES):
        store(head, d, mul(mul(load(head, d), inverse), load(weight, d)))
    _turn(head, 0, cos, sin, angle, dim // 2, scale, out, to)


@kernel
def _turn(x, begin, cos, sin, angle, half, scale, out, to):
    """Each pair (i, i + D/2) by its angle, sixteen pairs at a time while there are so many."""
    for d in range(0, half - LANES + 1, LANES):
        first, second = load(x, begin + d), load(x, begin + half + d)
        c, s = load(cos, angle + d), load(sin, angle + d)
        store(out, to + d, mul(sub(mul(first, c), mul(second, s)), splat(scale)))
        store(out, to + half + d, mul(add(mul(second, c), mul(first, s)), splat(scale)))
    for d in range(half // LANES * LANES, half):
        first, second, c, s = get(x, begin + d), get(x, begin + half + d), get(cos, angle + d), get(sin, angle + d)
        put(out, to + d, (first * c - second * s) * scale)
        put(out, to + half + d, (second * c + first * s) * scale)
