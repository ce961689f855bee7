"""The contiguous K/V cache: one tensor of `max_tokens` places a sequence, filled from the left.

The simplest thing that makes decoding linear: keys and values of earlier tokens never change, so they are kept.
It reserves the worst case for every sequence and knows no blocks; `reference.blocks` is what that costs and why.
Like every cache here, layer 0 owns the bookkeeping: it counts the step's tokens, later layers write beside it.

Gates: gates.cache. Proof: tests/test_cache.py. Story: cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.config import ModelConfig


class KVCache:
    """K and V of one sequence, or of a batch whose rows grow together. `length` counts columns, padding included.

    `dtype` is what is stored. A narrower one than the model computes in rounds each value once, when it is written.
    """

    def __init__(self, config: ModelConfig, *, max_tokens: int, dtype: torch.dtype, batch_size: int = 1) -> None:
        for name, value in (("max_tokens", max_tokens), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name}: {value} is not a positive integer")
        shape = (config.num_layers, batch_size, config.num_kv_heads, max_tokens, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype)  # [L, N, K, max_tokens, D]
        self.v = torch.zeros(shape, dtype=dtype)
        self.max_tokens = max_tokens
        self.batch_size = batch_size
        self.length = 0

    @property
    def seq_lens(self) -> list[int]:
        """Columns held by each row; all equal."""
        return [self.length] * self.batch_size

    def update(
        self,
        layer: int,
        k: Tensor,  # [N, K, T, D]
        v: Tensor,  # [N, K, T, D]
    ) -> tuple[Tensor, Tensor]:  # [N, K, length, D] each, this step's tokens last
        """Store this step's T tokens of one layer and return everything the layer holds, in the dtype of `k` and `v`.

        Where that is the dtype stored, they are views.

        Raises:
            ValueError: the batch size is another one, or the tokens do not fit.
        """
        rows, tokens = k.shape[0], k.shape[2]
        if rows != self.batch_size:
            raise ValueError(f"batch_size: {rows} rows written, the cache has {self.batch_size}")
        if layer == 0:
            if self.length + tokens > self.max_tokens:
                raise ValueError(f"max_tokens: {self.length} held and {tokens} more exceed {self.max_tokens}")
            self.length += tokens
        start = self.length - tokens  # layer 0 has counted this step already
        self.k[layer, :, :, start : self.length] = k
        self.v[layer, :, :, start : self.length] = v
        return self.k[layer, :, :, : self.length].to(k.dtype), self.v[layer, :, :, : self.length].to(v.dtype)
