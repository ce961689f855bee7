"""Blocks of the K/V pool: who hands them out, and one sequence's ordered list of them.

A block is `block_size` consecutive slots; a slot is one token's K/V cell, `block_id * block_size + offset`.
A block id is a name for a place in the pool, so handing a sequence to another row moves names, never K/V.
This module holds host integers only and knows no tensor.

Gates: gates.blocks. Proof: tests/test_blocks.py. Story: blocks.
"""

from __future__ import annotations


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free; nothing was handed out."""


class BlockAllocator:
    """Hands out block ids 0..num_blocks-1, all or nothing, the most recently freed first."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: {num_blocks} is not a positive integer")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack whose top is the lowest id at the start
        self._owned = bytearray(num_blocks)
        self._num_owned = 0  # marks set in the map: counted where one changes, not taken from the free list

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def num_owned(self) -> int:
        """Blocks handed out and not yet returned, by the ownership map and not by the free list; O(1)."""
        return self._num_owned

    def recount_owned(self) -> int:
        """The same from the map itself, block by block."""
        return sum(self._owned)

    def allocate(self, count: int) -> list[int]:
        """`count` block ids, or none at all.

        Raises:
            OutOfBlocks: fewer than `count` are free.
        """
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._free)} of {self.num_blocks} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._num_owned += not self._owned[block]
            self._owned[block] = 1
        return taken

    def free(self, blocks: list[int]) -> None:
        """Take blocks back.

        Raises:
            ValueError: one of them is not owned (freed twice, or never handed out).
        """
        for block in blocks:
            if not (0 <= block < self.num_blocks and self._owned[block]):
                raise ValueError(f"block {block} is not owned; it was freed twice or never handed out")
            self._owned[block] = 0
            self._num_owned -= 1
        self._free.extend(reversed(blocks))


class BlockTable:
    """One sequence's blocks in order, and how many tokens of them are written (`length`)."""

    __slots__ = ("block_size", "blocks", "length")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[int] = []
        self.length = 0

    @property
    def capacity(self) -> int:
        """Tokens that the blocks held now can take."""
        return len(self.blocks) * self.block_size

    def blocks_short(self, tokens: int) -> int:
        """Blocks still to be allocated before `tokens` tokens fit."""
        return max(0, -(-tokens // self.block_size) - len(self.blocks))

    def adopt(self, blocks: list[int]) -> None:
        """Take a new tenant's first blocks. The slot table's staleness test relies on the refusal.

        Raises:
            ValueError: the table still holds a tenant.
        """
        if self.blocks or self.length:
            raise ValueError(f"adopt: the table still holds {len(self.blocks)} blocks and {self.length} tokens")
        self.blocks = list(blocks)

    def extend(self, blocks: list[int]) -> None:
        """Append blocks for growth."""
        self.blocks.extend(blocks)

    def append(self) -> int:
        """Count one more token and return the slot it is to be written to.

        Raises:
            OutOfBlocks: the next token has no block; growth comes before appending.
        """
        if self.length >= self.capacity:
            raise OutOfBlocks(f"token {self.length} has no block; {len(self.blocks)} blocks hold {self.capacity}")
        self.length += 1
        return self.slot(self.length - 1)

    def advance(self, tokens: int) -> list[int]:
        """Count `tokens` more tokens, all or none, and return their slots (a prefill).

        Raises:
            OutOfBlocks: some of them have no block.
        """
        start, stop = self.length, self.length + tokens
        if stop > self.capacity:
            raise OutOfBlocks(f"token {stop - 1} has no block; {len(self.blocks)} blocks hold {self.capacity}")
        self.length = stop
        return self.slots(start, stop)

    def slot(self, token: int) -> int:
        """The slot of token index `token` (0-based)."""
        return self.blocks[token // self.block_size] * self.block_size + token % self.block_size

    def slots(self, start: int, stop: int) -> list[int]:
        """The slots of tokens start..stop-1, block by block.

        Raises:
            IndexError: some of them have no block.
        """
        if stop > self.capacity:
            raise IndexError(f"slots: token {stop - 1} has no block; {len(self.blocks)} blocks hold {self.capacity}")
        size, first = self.block_size, start // self.block_size
        blocks = self.blocks[first : -(-stop // size)]
        cells = [cell for block in blocks for cell in range(block * size, block * size + size)]
        return cells[start - first * size : stop - first * size]

    def release(self) -> list[int]:
        """Forget the tenant and return its blocks, for the allocator to take back."""
        blocks, self.blocks, self.length = self.blocks, [], 0
        return blocks
