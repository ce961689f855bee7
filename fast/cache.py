"""The K/V pool of the persistent batch: one K and one V tensor a layer, and a block table a row.

Tokens live in slots; a row's block table names its slots in order. The pool has one slot more than the allocator
hands out: the sink slot, where padded rows write and nothing reads. `max_model_len` is clamped to the pool, so a
request that passes the length check can always run alone. This module knows blocks and tensors, and neither
requests nor the order in which they run. The slot table mirrors the block tables; whatever changes a row's tenant
here tells it.

Gates: gates.blocks. Proof: tests/test_fast_engine.py. Story: blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fast.blocks import BlockAllocator, BlockTable
from fast.pool import KVPoolPlan
from fast.slots import SlotTable
from gates.blocks import check_sink_outside
from reference.config import ModelConfig


class BatchedPagedKVCache:
    """A pool of `num_blocks` blocks shared by `max_batch_size` rows; `gather` is the slot table's second design.

    Raises:
        ValueError: a size is not a positive integer.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_batch_size: int,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        gather: bool = False,
    ) -> None:
        sizes = {"max_batch_size": max_batch_size, "block_size": block_size, "max_model_len": max_model_len}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: {size} is not a positive integer")
        self.allocator = BlockAllocator(num_blocks)
        self.block_size = block_size
        self.max_batch_size = max_batch_size
        self.max_model_len = min(max_model_len, num_blocks * block_size)
        self.tables = [BlockTable(block_size) for _ in range(max_batch_size)]
        self.slot_table = SlotTable(
            max_batch_size=max_batch_size, max_model_len=self.max_model_len, device=device, gather=gather
        )
        self.tenancies = 0  # rows ever adopted
        self.prefilled_tokens = 0  # tokens that entered a row by a prefill
        # One tensor a layer: a write to layer 3 never makes a compiler believe that layer 4 moved.
        shape = (self.num_slots + 1, config.num_kv_heads, config.head_dim)
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        sizes = {"num_blocks": num_blocks, "block_size": block_size}
        check_sink_outside(sink_slot=self.sink_slot, **sizes, pool_slots=self.k[0].shape[0])

    @classmethod
    def of_plan(
        cls, config: ModelConfig, plan: KVPoolPlan, *, dtype: torch.dtype, device: torch.device | str, gather: bool
    ) -> BatchedPagedKVCache:
        """The cache that a pool plan promised."""
        return cls(
            config,
            max_batch_size=plan.max_batch_size,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            max_model_len=plan.max_model_len,
            dtype=dtype,
            device=device,
            gather=gather,
        )

    @property
    def num_slots(self) -> int:
        """Slots that the allocator can hand out."""
        return self.allocator.num_blocks * self.block_size

    @property
    def sink_slot(self) -> int:
        """The slot for writes that nobody will read; one past the last that a block covers."""
        return self.num_slots

    @property
    def num_tokens(self) -> int:
        """Tokens whose K/V is stored, over all rows."""
        return sum(table.length for table in self.tables)

    def adopt_row(self, row: int, blocks: list[int]) -> None:
        """Give an empty row its first blocks. Raises ValueError when the row still holds a tenant."""
        self.tables[row].adopt(blocks)
        self.tenancies += 1

    def grow_row(self, row: int, tokens: int) -> None:
        """Allocate what row needs to hold `tokens` tokens. Raises OutOfBlocks, and then nothing has changed."""
        table = self.tables[row]
        table.extend(self.allocator.allocate(table.blocks_short(tokens)))

    def advance_row(self, row: int, tokens: int) -> list[int]:
        """Count `tokens` more tokens of a row, a prefill's, mirror them, and return the slots of all its tokens."""
        table = self.tables[row]
        table.advance(tokens)
        self.prefilled_tokens += tokens
        self.slot_table.sync(self.tables, (row,))
        return table.slots(0, table.length)

    def reset_row(self, row: int) -> list[int]:
        """Forget a row's tenant and return its blocks, still owned. Nothing is cleared: lengths mask old K/V."""
        self.slot_table.reset(row)
        return self.tables[row].release()

    def free(self, row: int) -> None:
        """Forget a row's tenant and give its blocks back to the pool."""
        self.allocator.free(self.reset_row(row))

    def move_row(self, *, src: int, dst: int) -> None:
        """Relabel row `src` as `dst`: the tables change places, no K/V is touched.

        Raises:
            ValueError: `dst` still holds a tenant, so the move was planned against another occupancy.
        """
        table = self.tables[dst]
        if table.blocks or table.length:
            raise ValueError(f"move_row: row {dst} still holds {len(table.blocks)} blocks and {table.length} tokens")
        self.slot_table.move_row(src, dst)
        self.tables[src], self.tables[dst] = self.tables[dst], self.tables[src]

    def write(
        self,
        layer: int,
        k: Tensor,  # [T, K, D]
        v: Tensor,  # [T, K, D]
        slots: Tensor,  # [T] int64
    ) -> None:
        """Store the K/V of T tokens of one layer, in place. Slots are distinct, but for the sink."""
        self.k[layer].index_copy_(0, slots, k)
        self.v[layer].index_copy_(0, slots, v)
