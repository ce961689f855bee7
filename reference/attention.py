"""Attention, three ways to find the keys: dense tensors, one sequence's slots, a batch's rectangle of slots.

All three score, silence what may not be seen, take a softmax and average the values, in the query's dtype. Query
heads share K/V heads in groups (GQA): K/V are repeated, which a kernel would avoid and a reader should not have to
picture. They know tensors and slot numbers; what a block is, and who owns it, is `reference.blocks`' business.

Gates: gates.blocks. Proof: tests/test_reference_blocks.py, tests/test_model.py. Story: blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gates.blocks import check_mapping_in_pool


def dense_attention(
    q: Tensor,  # [N, H, T, D]
    k: Tensor,  # [N, K, C, D]
    v: Tensor,  # [N, K, C, D]
    key_mask: Tensor | None = None,  # [N, C] bool, True where a key is a real token
) -> Tensor:  # [N, H, T, D]
    """Causal attention of the last T of C tokens over all C, with pad keys silenced.

    Query t is token C - T + t, so it sees keys 0..C-T+t. A pad query (whose output nobody reads) may see no real
    key at all; the finite bias leaves it an average instead of the NaN that -inf would make.
    """
    tokens, context = q.shape[2], k.shape[2]
    visible = torch.ones(tokens, context, dtype=torch.bool, device=q.device).tril(context - tokens)[None, None]
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :]
    k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible, torch.finfo(q.dtype).min)
    return scores.softmax(dim=-1) @ v


def paged_attention_reference(
    q: Tensor,  # [H, D]
    k_pool: Tensor,  # [slots, K, D]
    v_pool: Tensor,  # [slots, K, D]
    slots: Tensor,  # [C] int64, the sequence's tokens in order
) -> Tensor:  # [H, D]
    """One decode query over one sequence's slots: gather, repeat, softmax. Nothing to mask: it may see all of them."""
    check_mapping_in_pool(slot_mapping=slots[None], num_slots=k_pool.shape[0])
    k = repeat_kv(k_pool[slots].transpose(0, 1), q.shape[0])  # [H, C, D]
    v = repeat_kv(v_pool[slots].transpose(0, 1), q.shape[0])
    scores = q[:, None, :] @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # [H, 1, C]
    return (scores.softmax(dim=-1) @ v)[:, 0]


def paged_attention_batched_reference(
    q: Tensor,  # [R, H, D]
    k_pool: Tensor,  # [slots, K, D]
    v_pool: Tensor,  # [slots, K, D]
    slot_mapping: Tensor,  # [R, W] int64
    context_lens: Tensor,  # [R] int64
    attention_mask: Tensor | None = None,
) -> Tensor:  # [R, H, D]
    """One decode query per row, each over its own slots: one gather per row, repeat, softmax.

    No causal mask: a decode query sits at the end of its own history and may see all of it. Columns from
    `context_lens[r]` on are padding. They are dereferenced like any other, so they must name a slot of the pool
    (0 is always legal; torch wraps -1 onto the last slot and reads whoever lives there), and then silenced.

    Raises:
        ValueError: a mask was handed in. Pad keys were never written, so it is redundant or it hides a bug.
    """
    if attention_mask is not None:
        raise ValueError(f"attention_mask: {list(attention_mask.shape)} given, a paged decode reads by context_lens")
    check_mapping_in_pool(slot_mapping=slot_mapping, num_slots=k_pool.shape[0])
    live = torch.arange(slot_mapping.shape[1], device=q.device) < context_lens[:, None]  # [R, W]
    k = repeat_kv(k_pool[slot_mapping].transpose(1, 2), q.shape[1])  # [R, H, W, D]
    v = repeat_kv(v_pool[slot_mapping].transpose(1, 2), q.shape[1])
    scores = (q[:, :, None, :] @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)[:, :, 0]  # [R, H, W]
    # Replaced, not added to, and the values zeroed: NaN + finfo.min and 0 * NaN are both NaN, and the slot that
    # padding reads belongs to somebody. So any content there, NaN included, leaves this row's bits alone.
    scores = scores.masked_fill(~live[:, None, :], torch.finfo(q.dtype).min)
    v = v.masked_fill(~live[:, None, :, None], 0.0)
    return (scores.softmax(dim=-1)[:, :, None, :] @ v)[:, :, 0]


def repeat_kv(
    x: Tensor,  # [..., K, C, D]
    num_heads: int,
) -> Tensor:  # [..., H, C, D]
    """Each K/V head once for every query head that shares it: heads 0..H/K-1 read K/V head 0, and so on."""
    return x.repeat_interleave(num_heads // x.shape[-3], dim=-3)
