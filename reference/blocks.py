"""Paged K/V: one pool of slots, blocks handed out on demand, one block table per sequence.

A block is `block_size` consecutive slots of a pool that every sequence shares; a table is a sequence's ordered
block ids. So a sequence occupies what it uses, rows interleave physically, and the only per-row state is a list
of integers. Layer 0 owns the bookkeeping: it grows the tables, later layers write to the slots it found.
Knows slots and heads; what a prompt or a finished row is, `reference.batch` knows.
Source: Kwon et al. 2023 (PagedAttention); `slot_mapping` is vLLM's word.

Gates: gates.blocks, gates.batch. Proof: tests/test_reference_blocks.py. Story: blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from gates.batch import check_prefill_lands_empty
from gates.blocks import (
    check_batch_reserved,
    check_blocks_conserved,
    check_mapping_follows_tables,
    check_owned_once,
    check_tables_cover,
)
from reference.attention import paged_attention_batched_reference, paged_attention_reference
from reference.config import ModelConfig

PAD_SLOT = 0  # padding is really read, so it names a slot that always exists; never -1


class OutOfBlocks(RuntimeError):
    """More blocks were needed than are free. Nothing was handed out and no table changed."""


class BlockAllocator:
    """Hands out block ids 0..num_blocks-1, all or nothing, the longest free first."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: {num_blocks} is not a positive integer")
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def num_owned(self) -> int:
        """Blocks handed out and not yet returned."""
        return len(self._owned)

    def allocate(self, count: int) -> list[int]:
        """`count` block ids, or none at all.

        Raises:
            ValueError: `count` is negative.
            OutOfBlocks: fewer than `count` are free.
        """
        if count < 0:
            raise ValueError(f"count: {count} is negative")
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} free")
        blocks = [self._free.popleft() for _ in range(count)]
        self._owned.update(blocks)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Take blocks back, all or nothing.

        Raises:
            ValueError: one of them is not owned (freed twice, or never handed out).
        """
        for block in blocks:
            if block not in self._owned or list(blocks).count(block) > 1:
                raise ValueError(f"blocks: {block} is freed twice or was never handed out")
        self._owned.difference_update(blocks)
        self._free.extend(blocks)


class BlockTable:
    """One sequence's blocks in order, and how many tokens are written in them (`length`)."""

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size: {block_size} is not a positive integer")
        self.allocator = allocator
        self.block_size = block_size
        self.blocks: list[int] = []
        self.length = 0

    def blocks_short(self, tokens: int) -> int:
        """Blocks to be allocated before `tokens` more tokens fit."""
        return max(0, -(-(self.length + tokens) // self.block_size) - len(self.blocks))

    def append(self, tokens: int) -> list[int]:
        """Make room for `tokens` more tokens, all or nothing, and return their slots in order.

        Raises:
            OutOfBlocks: the pool cannot hold them; the table is as it was.
        """
        self.blocks += self.allocator.allocate(self.blocks_short(tokens))
        self.length += tokens
        return self.slots()[self.length - tokens :]

    def slots(self) -> list[int]:
        """The slot of every token written, in order."""
        return [self.blocks[t // self.block_size] * self.block_size + t % self.block_size for t in range(self.length)]

    def free(self) -> None:
        """Give every block back and forget the sequence."""
        self.allocator.free(self.blocks)
        self.blocks, self.length = [], 0


class PagedKVCache:
    """One sequence's K/V, in blocks of its own pool: `KVCache` with an indirection."""

    def __init__(self, config: ModelConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.table = BlockTable(self.allocator, block_size)
        self.k_pool, self.v_pool = _pools(config, num_blocks * block_size, dtype)  # [L, slots, K, D] each
        self._write_slots: list[int] = []

    @property
    def seq_lens(self) -> list[int]:
        """Tokens held, as a list of one."""
        return [self.table.length]

    def write(
        self,
        layer: int,
        k: Tensor,  # [1, K, T, D]
        v: Tensor,  # [1, K, T, D]
    ) -> None:
        """Store this step's T tokens of one layer in the sequence's own slots.

        Raises:
            ValueError: more than one row; there is one block table here.
            OutOfBlocks: the pool cannot hold them; nothing changed.
        """
        if k.shape[0] != 1:
            raise ValueError(f"batch_size: {k.shape[0]} rows written, one block table holds one sequence")
        if layer == 0:
            self._write_slots = self.table.append(k.shape[2])
            _check_tables(self.allocator, [self.table])
        self.k_pool[layer, self._write_slots] = k[0].transpose(0, 1)
        self.v_pool[layer, self._write_slots] = v[0].transpose(0, 1)

    def gather(self, layer: int) -> tuple[Tensor, Tensor]:  # [1, K, length, D] each
        """Copies of everything one layer holds, in token order."""
        slots = self.table.slots()
        return self.k_pool[layer, slots].transpose(0, 1)[None], self.v_pool[layer, slots].transpose(0, 1)[None]

    def paged_attention(self, layer: int, q: Tensor) -> Tensor:  # q: [1, H, D] -> [1, H, D]
        """The decode read of one layer: one query over every token held."""
        slots = torch.tensor(self.table.slots(), dtype=torch.int64)
        return paged_attention_reference(q[0], self.k_pool[layer], self.v_pool[layer], slots)[None]


class BatchedPagedKVCache:
    """N sequences' K/V: N block tables over one allocator and one pool a layer. Padding is never stored."""

    def __init__(
        self, config: ModelConfig, *, batch_size: int, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: {batch_size} is not a positive integer")
        self.allocator = BlockAllocator(num_blocks)
        self.tables = [BlockTable(self.allocator, block_size) for _ in range(batch_size)]
        self.k_pool, self.v_pool = _pools(config, num_blocks * block_size, dtype)  # [L, slots, K, D] each
        self._write_slots: list[list[int]] = []  # this step's slots, by row, as layer 0 found them

    @property
    def seq_lens(self) -> list[int]:
        """Tokens held by each row."""
        return [table.length for table in self.tables]

    @property
    def cached_tokens(self) -> int:
        """Tokens held by the whole batch: the slots in use, no rectangle about it."""
        return sum(self.seq_lens)

    def write(
        self,
        layer: int,
        k: Tensor,  # [N, K, T, D]
        v: Tensor,  # [N, K, T, D]
        valid: Tensor | None = None,  # [N, T] bool, the padded batch's key mask; None when every column is real
    ) -> None:
        """Store the real columns of one layer, each in its own row's blocks: a row of length 2 takes 2 slots.

        Raises:
            ValueError: another number of rows than the cache has.
            OutOfBlocks: the pool cannot hold the whole batch's tokens; no row has moved.
        """
        rows, _, tokens, _ = k.shape
        if rows != len(self.tables):
            raise ValueError(f"batch_size: {rows} rows written, the cache has {len(self.tables)}")
        real = torch.ones(rows, tokens, dtype=torch.bool) if valid is None else valid.bool()
        if layer == 0:
            # Only here: from layer 1 on, the rows already hold this very step's tokens.
            if valid is not None:
                check_prefill_lands_empty(seq_lens=self.seq_lens)
            self._write_slots = self._grow(real.sum(dim=1).tolist())
        for row, slots in enumerate(self._write_slots):
            self.k_pool[layer, slots] = k[row, :, real[row]].transpose(0, 1)
            self.v_pool[layer, slots] = v[row, :, real[row]].transpose(0, 1)

    def slot_mapping(self) -> tuple[Tensor, Tensor]:  # [N, max_ctx] int64, [N] int64
        """What the batched read addresses: each row's slots, padded to the longest, and how many are real."""
        width = max(self.seq_lens)
        rows = [table.slots() + [PAD_SLOT] * (width - table.length) for table in self.tables]
        return torch.tensor(rows, dtype=torch.int64), torch.tensor(self.seq_lens, dtype=torch.int64)

    def paged_attention(
        self,
        layer: int,
        q: Tensor,  # [N, H, D]
        attention_mask: Tensor | None = None,
    ) -> Tensor:  # [N, H, D]
        """The batched decode read of one layer: one query a row. Raises ValueError when handed a mask."""
        slots, context_lens = self.slot_mapping()
        blocks, block_size = [table.blocks for table in self.tables], self.tables[0].block_size
        check_mapping_follows_tables(
            slot_mapping=slots, context_lens=context_lens, tables=blocks, block_size=block_size
        )
        return paged_attention_batched_reference(
            q, self.k_pool[layer], self.v_pool[layer], slots, context_lens, attention_mask
        )

    def free_row(self, row: int) -> None:
        """Give one row's blocks back; the others keep theirs."""
        self.tables[row].free()
        _check_tables(self.allocator, self.tables)

    def _grow(self, counts: Sequence[int]) -> list[list[int]]:
        """Append `counts[r]` tokens to every row, or to none: all-or-nothing per row would strand the rows before."""
        demand = sum(table.blocks_short(count) for table, count in zip(self.tables, counts, strict=True))
        if demand > self.allocator.num_free:
            raise OutOfBlocks(f"the batch needs {demand} more blocks, {self.allocator.num_free} are free")
        # Counted from the lengths alone: a table that asks for too little would strand the rows before it.
        size, rows = self.tables[0].block_size, zip(self.tables, counts, strict=True)
        needed = sum(-(-(table.length + count) // size) - len(table.blocks) for table, count in rows)
        check_batch_reserved(demand=needed, free=self.allocator.num_free)
        slots = [table.append(count) for table, count in zip(self.tables, counts, strict=True)]
        _check_tables(self.allocator, self.tables)
        return slots


def _pools(config: ModelConfig, num_slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # [L, slots, K, D] each
    shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
    return torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)


def _check_tables(allocator: BlockAllocator, tables: Sequence[BlockTable]) -> None:
    """What must hold whenever tables have changed."""
    held = [len(table.blocks) for table in tables]
    check_blocks_conserved(free=allocator.num_free, owned=sum(held), total=allocator.num_blocks)
    check_owned_once(tables={row: t.blocks for row, t in enumerate(tables)}, num_blocks=allocator.num_blocks)
    check_tables_cover(lengths=[table.length for table in tables], blocks_held=held, block_size=tables[0].block_size)
