"""The K/V pool in the layout that the CPU kernels read, and the same numbers as tensors for everybody else.

A layer's K is [B + 1, K, D, S] and its V [B + 1, K, S, D'], D' = D rounded up to 16: the keys of a block lie side by
side, so that one load holds 16 of them. Block B is the sink's: the slot past the last that an allocator can hand out
is its first. It knows no row and no request.

Gates: gates.blocks. Proof: tests/test_backend.py. Story: kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fast.kernels.vector import LANES
from reference.config import ModelConfig


class KernelPool:
    """K/V of all layers in the kernels' layout, one block more than the allocator hands out: the sink's.

    `half` keeps both in half precision, which rounds each value once, when it is written.

    Raises:
        ValueError: a block is no whole number of vectors.
    """

    def __init__(self, config: ModelConfig, *, num_blocks: int, block_size: int, half: bool = False) -> None:
        if block_size < 1 or block_size % LANES:
            raise ValueError(f"block_size: {block_size} is not a multiple of {LANES}, which the CPU kernels need")
        heads, dim = config.num_kv_heads, config.head_dim
        dtype = np.uint16 if half else np.float32
        self.half = half
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.k = np.zeros((config.num_layers, num_blocks + 1, heads, dim, block_size), dtype)
        self.v = np.zeros((config.num_layers, num_blocks + 1, heads, block_size, -(-dim // LANES) * LANES), dtype)
        readable = [torch.from_numpy(pool.view(np.float16) if half else pool) for pool in (self.k, self.v)]
        self._views = [*readable[0].permute(0, 1, 4, 2, 3), *readable[1].permute(0, 1, 3, 2, 4)[..., :dim]]

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V."""
        return self.k.nbytes + self.v.nbytes

    @property
    def num_slots(self) -> int:
        """Slots of the pool, the sink's block included."""
        return (self.num_blocks + 1) * self.block_size

    @property
    def blocks(self) -> list[Tensor]:  # each [B + 1, S, K, D]
        """Every layer's K, then every layer's V, as views: what is written to them is in the pool."""
        return self._views

    def read(self, slots: Sequence[int] | Tensor) -> Tensor:  # [n] -> [2L, n, K, D]
        """A copy of the K and V of n slots."""
        at = torch.as_tensor(slots, dtype=torch.int64)
        return torch.stack([view[at // self.block_size, at % self.block_size] for view in self._views])

    def fill(self, slots: Sequence[int] | Tensor, value: float) -> None:
        """Set the K and V of some slots to one value."""
        at = torch.as_tensor(slots, dtype=torch.int64)
        for view in self._views:
            view[at // self.block_size, at % self.block_size] = value
