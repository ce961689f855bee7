"""Attention through the block pool: a decode step over a rectangle of slots, a prefill over one sequence's slots.

Both read K and V where they lie, by slot. What padding addresses is masked twice, in the scores and in V, since a
weight of zero does not silence a NaN. A row of length 0 attends to nothing and gives zeros. This is the plain torch
version of the two operations; it knows no layer and no request.

Proof: tests/test_fast_engine.py. Story: attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUERY_TILE = 256  # queries whose scores exist at one time in a prefill


def decode_attention(
    q: Tensor,  # [N, H, D]
    k_pool: Tensor,  # [slots, K, D]
    v_pool: Tensor,  # [slots, K, D]
    slot_mapping: Tensor,  # [N, W] int64
    context_lens: Tensor,  # [N] int64
    scale: float,
) -> Tensor:  # [N, H, D]
    """One query a row against the first `context_lens` entries of its row of slots."""
    rows, heads, dim = q.shape
    kv_heads = k_pool.shape[1]
    width = slot_mapping.shape[1]
    readable = torch.arange(width, device=q.device) < context_lens[:, None]  # [N, W]
    k = k_pool[slot_mapping]  # [N, W, K, D]
    v = v_pool[slot_mapping].masked_fill_(~readable[:, :, None, None], 0.0)
    grouped = q.view(rows, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("nkgd,nwkd->nkgw", grouped, k) * scale
    scores = scores.masked_fill(~readable[:, None, None, :], float("-inf"))
    # A row without a readable key has no maximum; 0 in its place makes every weight exp(-inf) = 0.
    peak = scores.amax(-1, keepdim=True).masked_fill_((context_lens == 0)[:, None, None, None], 0.0)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True).clamp_min_(torch.finfo(q.dtype).tiny)
    return torch.einsum("nkgw,nwkd->nkgd", weights / total, v).reshape(rows, heads, dim)


def prefill_attention(
    q: Tensor,  # [T, H, D]: the tokens start..start+T-1 of one sequence
    k_pool: Tensor,  # [slots, K, D]
    v_pool: Tensor,  # [slots, K, D]
    slots: Tensor,  # [start + T] int64: every token of the sequence up to the last query
    scale: float,
) -> Tensor:  # [T, H, D]
    """T queries of one sequence, each against every token up to and including its own."""
    start = slots.shape[0] - q.shape[0]
    k, v = k_pool[slots], v_pool[slots]  # [S, K, D]
    tiles = []
    # A tile of queries at a time: the scores of a whole prompt against itself would be T * T per head.
    for tile in q.split(QUERY_TILE):
        stop = start + tile.shape[0]
        tiles.append(_causal_tile(tile, k[:stop], v[:stop], scale))
        start = stop
    return torch.cat(tiles)


def _causal_tile(
    q: Tensor,  # [T, H, D]: the last T of the S tokens
    k: Tensor,  # [S, K, D]
    v: Tensor,  # [S, K, D]
    scale: float,
) -> Tensor:  # [T, H, D]
    tokens, heads, dim = q.shape
    context, kv_heads = k.shape[:2]
    grouped = q.view(tokens, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("tkgd,skd->kgts", grouped, k) * scale
    own = torch.arange(context - tokens, context, device=q.device)  # position of each query
    future = torch.arange(context, device=q.device)[None, :] > own[:, None]  # [T, S]
    weights = torch.softmax(scores.masked_fill_(future, float("-inf")), dim=-1)
    return torch.einsum("kgts,skd->tkgd", weights, v).reshape(tokens, heads, dim)
