"""Blocks of the K/V pool: who hands them out, and one sequence's ordered list of them.

A block is `block_size` consecutive slots; a slot is one token's K/V cell, `block_id * block_size + offset`.
A block id is a name for a place in the pool, so handing a sequence to another row moves names, never K/V.
This module holds host integers only and knows no tensor.

Gates: gates.blocks. Proof: tests/test_blocks.py. Story: blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free; nothing was handed out."""


class BlockAllocator:
    """Hands out block ids 0..num_blocks-1, all or nothing, the most recently freed first.

    A block may have several holders (`share`). One that is kept (`keep`) is not forgotten with its last holder: it is
    idle, still free to be handed out, after all others and the longest idle first; `on_evict` is told then.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: {num_blocks} is not a positive integer")
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] | None = None
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack whose top is the lowest id at the start
        self._idle: OrderedDict[int, None] = OrderedDict()  # kept blocks that nobody holds, the longest idle first
        self._kept = bytearray(num_blocks)
        self._holders = [0] * num_blocks
        self.idle_turns = 0  # times that a block became idle or ceased to be
        self._num_owned = self._num_references = 0  # counted where a holder changes, not taken from the free list

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Blocks that nobody holds and whose content is kept."""
        return len(self._idle)

    @property
    def num_owned(self) -> int:
        """Blocks that somebody holds, by the count of holders and not by the free list; O(1)."""
        return self._num_owned

    @property
    def num_references(self) -> int:
        """Holders of all blocks together: more than `num_owned` by what is shared; O(1)."""
        return self._num_references

    def holders(self, block: int) -> int:
        """How many hold a block."""
        return self._holders[block]

    def is_kept(self, block: int) -> bool:
        """True for a block whose content outlives its holders, and which nobody may write."""
        return bool(self._kept[block])

    def recount_owned(self) -> int:
        """`num_owned` from the holders themselves, block by block."""
        return sum(1 for count in self._holders if count)

    def allocate(self, count: int) -> list[int]:
        """`count` block ids with one holder each, or none at all.

        Raises:
            OutOfBlocks: fewer than `count` are free.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} free")
        # One by one: what is given up may set others free, which only it led to.
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._hold(block)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of some kept blocks, idle or held."""
        for block in blocks:
            if not self._kept[block]:
                raise ValueError(f"block {block} is not kept, so its holder is its writer; it cannot be shared")
            self.idle_turns += block in self._idle
            self._idle.pop(block, None)
            self._hold(block)

    def keep(self, block: int) -> None:
        """Let a held block's content outlive its holders."""
        self._kept[block] = 1

    def drop(self, block: int) -> None:
        """Forget a kept block's content; one that is idle is free like any other."""
        self._kept[block] = 0
        if block in self._idle:
            del self._idle[block]
            self.idle_turns += 1
            self._free.append(block)

    def free(self, blocks: Sequence[int]) -> None:
        """Take one holder off each of some blocks; the last in line is the first to be handed out again.

        Raises:
            ValueError: nobody holds one of them (freed twice, or never handed out).
        """
        for block in reversed(blocks):
            if not (0 <= block < self.num_blocks and self._holders[block]):
                raise ValueError(f"block {block} is not owned; it was freed twice or never handed out")
            self._holders[block] -= 1
            self._num_references -= 1
            if self._holders[block]:
                continue
            self._num_owned -= 1
            if self._kept[block]:
                self._idle[block] = None
                self.idle_turns += 1
            else:
                self._free.append(block)

    def _hold(self, block: int) -> None:
        self._num_owned += not self._holders[block]
        self._holders[block] += 1
        self._num_references += 1

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self.idle_turns += 1
        self._kept[block] = 0
        if self.on_evict is not None:
            self.on_evict(block)
        return block


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

    def adopt(self, blocks: list[int], tokens: int = 0) -> None:
        """Take a new tenant's first blocks, `tokens` of them written by others.

        The slot table's staleness test relies on the refusal.

        Raises:
            ValueError: the table still holds a tenant.
        """
        if self.blocks or self.length:
            raise ValueError(f"adopt: the table still holds {len(self.blocks)} blocks and {self.length} tokens")
        self.blocks, self.length = list(blocks), tokens

    def replace(self, blocks: list[int]) -> list[int]:
        """Put written blocks in the place of the next ones, count their tokens, and return those they replace.

        Raises:
            ValueError: the tokens so far end inside a block, or there are no blocks to replace.
        """
        first, stop = self.length // self.block_size, self.length // self.block_size + len(blocks)
        if self.length % self.block_size or stop > len(self.blocks):
            raise ValueError(f"replace: blocks {first}..{stop - 1} of {len(self.blocks)} after {self.length} tokens")
        replaced, self.blocks[first:stop] = self.blocks[first:stop], blocks
        self.length += len(blocks) * self.block_size
        return replaced

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
