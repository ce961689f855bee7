"""The forward pass of a Llama-family model, as on a whiteboard: token ids in, logits out, K/V kept in a cache.

Per layer: RMSNorm, attention over everything the cache holds, add; RMSNorm, SwiGLU, add. Qwen2 adds biases to
q, k, v and Qwen3 normalises each query and key head; both are read off the weights. It computes in one dtype and
knows no sampling and no request. Sources: Touvron et al. 2023 (LLaMA), Shazeer 2020 (SwiGLU), Zhang & Sennrich
2019 (RMSNorm), Ainslie et al. 2023 (GQA).

Gates: gates.model, gates.cache. Proof: tests/test_model.py, tests/test_oracle_transformers.py. Story: model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from gates.cache import check_positions_follow
from gates.model import check_logits_finite, check_tokens_in_vocabulary
from reference.attention import dense_attention
from reference.batch import greedy_generate, greedy_generate_batch, greedy_generate_paged
from reference.blocks import BatchedPagedKVCache, PagedKVCache
from reference.cache import KVCache
from reference.config import ModelConfig
from reference.rope import inverse_frequencies, rope_table, rotate
from reference.weights import LayerWeights, ModelWeights

Cache = KVCache | PagedKVCache | BatchedPagedKVCache


class LlamaModel:
    """A model ready to run: its config, its weights in one compute dtype, its RoPE frequencies."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, *, dtype: torch.dtype = torch.float32) -> None:
        self.config = config
        self.dtype = dtype
        self.weights = _cast(weights, dtype)  # once, here; the caller's own tensors stay as they are
        self.frequencies = inverse_frequencies(config)

    @torch.no_grad()
    def forward(
        self,
        token_ids: Tensor,  # [N, T]
        positions: Tensor,  # [N, T] absolute, 0-based
        cache: Cache,
        *,
        attention_mask: Tensor | None = None,  # [N, T], or [N, length + T] over a KVCache: nonzero = a real token
    ) -> Tensor:  # [N, T, V] in the model's dtype
        """Logits after each of T tokens a row, whose K/V are added to `cache`.

        With a mask the T columns are a padded rectangle (either side): pad columns are silenced, and a
        `BatchedPagedKVCache` stores the real ones only. Logits of pad columns mean nothing.

        Raises:
            ValueError: shapes that do not agree, a mask the cache cannot take, or a contiguous cache that is full.
            OutOfBlocks: a paged cache that is full; it is as it was before the call.
        """
        mask = None if attention_mask is None else attention_mask.bool()
        self._check_inputs(token_ids, positions, cache, mask)
        cos, sin = rope_table(positions, self.frequencies, self.dtype)
        x = self.weights.embedding[token_ids]  # [N, T, M]
        for layer, weights in enumerate(self.weights.layers):
            h = rms_norm(x, weights.input_norm, self.config.rms_norm_eps)
            q, k, v = self._heads(h, weights)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            attended = gqa_attention(layer, q, k, v, cache, mask)  # [N, H, T, D]
            x = x + F.linear(attended.transpose(1, 2).flatten(2), weights.output, weights.output_bias)
            x = x + swiglu(rms_norm(x, weights.post_norm, self.config.rms_norm_eps), weights)
        logits = F.linear(rms_norm(x, self.weights.final_norm, self.config.rms_norm_eps), self.weights.lm_head)
        check_logits_finite(logits=logits)
        return logits

    def greedy_generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, eos_token_ids: Sequence[int] | None = None
    ) -> list[int]:
        """`reference.batch.greedy_generate` of this model."""
        return greedy_generate(self, prompt_ids, max_tokens=max_tokens, eos_token_ids=eos_token_ids)

    def greedy_generate_paged(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        block_size: int = 16,
        eos_token_ids: Sequence[int] | None = None,
    ) -> list[int]:
        """`reference.batch.greedy_generate_paged` of this model."""
        return greedy_generate_paged(
            self, prompt_ids, max_tokens=max_tokens, block_size=block_size, eos_token_ids=eos_token_ids
        )

    def greedy_generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        block_size: int = 16,
        eos_token_ids: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """`reference.batch.greedy_generate_batch` of this model."""
        return greedy_generate_batch(
            self, prompts, max_tokens=max_tokens, block_size=block_size, eos_token_ids=eos_token_ids
        )

    def _check_inputs(self, token_ids: Tensor, positions: Tensor, cache: Cache, mask: Tensor | None) -> None:
        if token_ids.ndim != 2 or token_ids.shape != positions.shape or token_ids.numel() == 0:
            shapes = f"{list(token_ids.shape)} and {list(positions.shape)}"
            raise ValueError(f"token_ids, positions: shapes {shapes} are not one [N, T] with N, T >= 1")
        rows, tokens = token_ids.shape
        history = cache.length if isinstance(cache, KVCache) else 0
        if mask is not None and mask.shape != (rows, history + tokens):
            raise ValueError(f"attention_mask: shape {list(mask.shape)} is not {[rows, history + tokens]}")
        check_tokens_in_vocabulary(token_ids=token_ids, vocab_size=self.config.vocab_size)
        held = cache.seq_lens if mask is None or history == 0 else mask[:, :history].sum(dim=1).tolist()
        check_positions_follow(positions=positions, seq_lens=held, valid=None if mask is None else mask[:, history:])

    def _heads(self, h: Tensor, weights: LayerWeights) -> tuple[Tensor, Tensor, Tensor]:
        """Project [N, T, M] to query [N, H, T, D], key and value [N, K, T, D], before RoPE."""

        def split(x: Tensor) -> Tensor:  # [N, T, heads*D] -> [N, heads, T, D]
            return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

        q = split(F.linear(h, weights.q, weights.q_bias))
        k = split(F.linear(h, weights.k, weights.k_bias))
        v = split(F.linear(h, weights.v, weights.v_bias))
        if weights.q_norm is not None and weights.k_norm is not None:
            q = rms_norm(q, weights.q_norm, self.config.rms_norm_eps)
            k = rms_norm(k, weights.k_norm, self.config.rms_norm_eps)
        return q, k, v


def gqa_attention(
    layer: int,
    q: Tensor,  # [N, H, T, D]
    k: Tensor,  # [N, K, T, D]
    v: Tensor,  # [N, K, T, D]
    cache: Cache,
    attention_mask: Tensor | None = None,  # [N, T] bool ([N, length + T] over a KVCache)
) -> Tensor:  # [N, H, T, D]
    """Store this step's K/V and attend, in the way the cache and the mask together ask for.

    Over a cache with a ragged write, a mask means prefill: the history is exactly what was handed in, so attend
    densely over it. No mask means decode: the pool holds no pad, so each row needs only its count.

    Raises:
        ValueError: a mask over one block table, or a batch without a mask that brings several tokens a row.
    """
    if isinstance(cache, KVCache):
        keys, values = cache.update(layer, k, v)
        return dense_attention(q, keys, values, attention_mask)
    if isinstance(cache, BatchedPagedKVCache):
        if attention_mask is not None:
            cache.write(layer, k, v, attention_mask)
            return dense_attention(q, k, v, attention_mask)
        if q.shape[2] != 1:
            raise ValueError(f"attention_mask: missing, and {q.shape[2]} tokens a row are a prefill, not a decode")
        cache.write(layer, k, v)
        return cache.paged_attention(layer, q[:, :, 0])[:, :, None]
    if attention_mask is not None:
        raise ValueError("attention_mask: given, one block table cannot say which row owns which block")
    cache.write(layer, k, v)
    if q.shape[2] == 1:
        return cache.paged_attention(layer, q[:, :, 0])[:, :, None]
    return dense_attention(q, *cache.gather(layer))


def rms_norm(
    x: Tensor,  # [..., M]
    weight: Tensor,  # [M]
    eps: float,
) -> Tensor:  # [..., M]
    """Scale each vector to a root mean square of 1, then each element by its weight."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps))


def swiglu(x: Tensor, weights: LayerWeights) -> Tensor:  # [N, T, M] -> [N, T, M]
    """down(silu(gate(x)) * up(x)): the gate decides, element by element, how much of `up` passes."""
    gate = F.linear(x, weights.gate, weights.gate_bias)
    up = F.linear(x, weights.up, weights.up_bias)
    return F.linear(F.silu(gate) * up, weights.down, weights.down_bias)


def _cast(weights: ModelWeights, dtype: torch.dtype) -> ModelWeights:
    """The same weights in `dtype`; a tied head stays tied, a tensor that has the dtype already is shared."""

    def cast_layer(layer: LayerWeights) -> LayerWeights:
        columns = {column.name: getattr(layer, column.name) for column in fields(layer)}
        return replace(layer, **{name: t.to(dtype) for name, t in columns.items() if t is not None})

    embedding = weights.embedding.to(dtype)
    lm_head = embedding if weights.lm_head is weights.embedding else weights.lm_head.to(dtype)
    layers = [cast_layer(layer) for layer in weights.layers]
    return ModelWeights(embedding, layers, weights.final_norm.to(dtype), lm_head)
