"""The K/V pool of the persistent batch: one K and one V tensor a layer, and a block table a row.

Tokens live in slots; a row's block table names its slots in order. The pool has one slot more than the allocator
hands out: the sink slot, where padded rows write and nothing reads. `max_model_len` is clamped to the pool, so a
request that passes the length check can always run alone. This module knows blocks and tensors, and neither
requests nor the order in which they run. The slot table mirrors the block tables; whatever changes a row's tenant
here tells it.

The numbers live in tensors of its own, or, for the CPU kernels, in a `KernelPool`; `covered`, `sink`, `kv` and `fill`
show either.

Gates: gates.blocks. Proof: tests/test_fast_engine.py. Story: blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fast.blocks import BlockAllocator, BlockTable
from fast.pool import KVPoolPlan
from fast.slots import SlotTable
from gates import FULL, enabled
from gates.blocks import check_blocks_conserved, check_holders_counted, check_owned_once, check_sink_outside
from gates.slots import check_table_fits
from reference.config import ModelConfig

if TYPE_CHECKING:
    from fast.kernels.pool import KernelPool


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
        kernel_pool: KernelPool | None = None,
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
        self.parked: list[BlockTable] = []  # of no row any more; within a step alone
        self.tenancies = 0  # rows ever adopted
        self.found_tokens = 0  # tokens that entered a row already computed
        self.kernel_pool = kernel_pool
        # One tensor a layer: a write to layer 3 never makes a compiler believe that layer 4 moved.
        shape = (self.num_slots + 1, config.num_kv_heads, config.head_dim)
        layers = range(config.num_layers if kernel_pool is None else 0)
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        sizes = {"num_blocks": num_blocks, "block_size": block_size}
        pool_slots = self.k[0].shape[0] if kernel_pool is None else kernel_pool.num_slots
        check_sink_outside(sink_slot=self.sink_slot, **sizes, pool_slots=pool_slots)

    @classmethod
    def of_plan(
        cls,
        config: ModelConfig,
        plan: KVPoolPlan,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        gather: bool,
        kernel_pool: KernelPool | None = None,
    ) -> BatchedPagedKVCache:
        """The cache that a pool plan promised; `kernel_pool`, of the same plan, takes the place of its tensors."""
        cache = cls(
            config,
            max_batch_size=plan.max_batch_size,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            max_model_len=plan.max_model_len,
            dtype=dtype,
            device=device,
            gather=gather,
            kernel_pool=kernel_pool,
        )
        # What was allocated and not what was planned; the plan refuses what it can see to be too much.
        check_table_fits(
            table_bytes=cache.slot_table.num_bytes,
            block_table_bytes=plan.block_table_bytes,
            budget_bytes=plan.addressing_budget_bytes * (2 if gather else 1),
        )
        return cache

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
        """Tokens whose K/V is stored for a row; what rows share, in whole blocks, is stored once."""
        shared = self.allocator.num_references - self.allocator.num_owned
        return sum(table.length for table in self.held_tables) - shared * self.block_size

    @property
    def held_tables(self) -> list[BlockTable]:
        """The table of every row, then those that are parked."""
        return [*self.tables, *self.parked]

    @property
    def covered(self) -> list[Tensor]:  # each [num_slots, K, D], or [num_blocks, S, K, D] of a kernel pool
        """Every layer's K, then every layer's V, as views of all slots that a block covers."""
        if self.kernel_pool is not None:
            return [view[: self.allocator.num_blocks] for view in self.kernel_pool.blocks]
        return [pool[: self.sink_slot] for pool in (*self.k, *self.v)]

    @property
    def sink(self) -> list[Tensor]:  # each [K, D]
        """The sink slot of every layer's K, then of every layer's V, as views."""
        if self.kernel_pool is not None:
            return [view[self.allocator.num_blocks, 0] for view in self.kernel_pool.blocks]
        return [pool[self.sink_slot] for pool in (*self.k, *self.v)]

    def kv(self, slots: Sequence[int] | Tensor) -> Tensor:  # [n] -> [2L, n, K, D]
        """A copy of what n slots hold: every layer's K, then every layer's V."""
        if self.kernel_pool is not None:
            return self.kernel_pool.read(slots)
        at = torch.as_tensor(slots, dtype=torch.int64, device=self.slot_table.slots.device)
        return torch.stack([pool[at] for pool in (*self.k, *self.v)])

    def fill(self, slots: Sequence[int] | Tensor, value: float) -> None:
        """Set the K and V of some slots to one value, in every layer: for a test of what nobody reads."""
        if self.kernel_pool is not None:
            self.kernel_pool.fill(slots, value)
            return
        at = torch.as_tensor(slots, dtype=torch.int64, device=self.slot_table.slots.device)
        for pool in (*self.k, *self.v):
            pool[at] = value

    def adopt_row(self, row: int, blocks: list[int], tokens: int = 0) -> None:
        """Give an empty row its first blocks, `tokens` of which are written (by others, who hold them too).

        Raises:
            ValueError: the row still holds a tenant.
        """
        self.tables[row].adopt(blocks, tokens)
        self.tenancies += 1
        self._mirror_found(row, tokens)

    def share_row(self, row: int, blocks: list[int]) -> None:
        """Let a row hold blocks that another has written, in the place of its own next ones, which are free again."""
        self.allocator.share(blocks)
        self.allocator.free(self.tables[row].replace(blocks))
        self._mirror_found(row, len(blocks) * self.block_size)

    def grow_row(self, row: int, tokens: int) -> None:
        """Allocate what row needs to hold `tokens` tokens. Raises OutOfBlocks, and then nothing has changed."""
        table = self.tables[row]
        table.extend(self.allocator.allocate(table.blocks_short(tokens)))

    def advance_row(self, row: int, tokens: int) -> list[int]:
        """Count `tokens` more tokens of a row, a prefill's, mirror them, and return the slots of all its tokens."""
        table = self.tables[row]
        table.advance(tokens)
        slots = table.slots(0, table.length)
        # Only what is new: a prompt in many chunks would else be copied in once for each of them.
        self.slot_table.extend(row, slots[self.slot_table.length(row) :])
        return slots

    def _mirror_found(self, row: int, tokens: int) -> None:
        table = self.tables[row]
        self.found_tokens += tokens
        self.slot_table.extend(row, table.slots(table.length - tokens, table.length))

    def reset_row(self, row: int) -> list[int]:
        """Forget a row's tenant and return its blocks, still owned. Nothing is cleared: lengths mask old K/V."""
        self.slot_table.reset(row)
        return self.tables[row].release()

    def free(self, row: int) -> None:
        """Forget a row's tenant and give its blocks back to the pool."""
        self.allocator.free(self.reset_row(row))

    def park_row(self, row: int) -> BlockTable:
        """Forget a row's tenant; its blocks stay its own until `free_parked`, for a step in flight writes them."""
        self.slot_table.reset(row)
        table, self.tables[row] = self.tables[row], BlockTable(self.block_size)
        self.parked.append(table)
        return table

    def free_parked(self, table: BlockTable) -> None:
        """Give the blocks of a parked table back to the pool."""
        self.parked.remove(table)
        self.allocator.free(table.release())

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

    def check_blocks(self) -> None:
        """The gates of who owns what: nothing lost, and, at full, nothing held by two that is not published."""
        allocator = self.allocator
        owned = allocator.recount_owned() if enabled(FULL) else allocator.num_owned
        check_blocks_conserved(free=allocator.num_free, owned=owned, total=allocator.num_blocks)
        if enabled(FULL):  # every block id held, so not flat in the histories: tests and traces only
            tables = {row: table.blocks for row, table in enumerate(self.held_tables)}
            published = {block for table in self.held_tables for block in table.blocks if allocator.is_kept(block)}
            check_owned_once(tables=tables, num_blocks=allocator.num_blocks, shared=published)
            check_holders_counted(
                tables=tables, holders=[allocator.holders(block) for block in range(allocator.num_blocks)]
            )
