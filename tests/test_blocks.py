"""Blocks of the fast pool: handed out whole or not at all, owned once, never lost; tables name every token's slot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fast.blocks import BlockAllocator, BlockTable, OutOfBlocks
from gates import GateError
from gates.blocks import check_blocks_conserved, check_owned_once, check_sink_outside, check_tables_cover

# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 3, 7, 16])
def test_the_whole_pool_is_handed_out_lowest_first_and_comes_back(num_blocks: int):
    allocator = BlockAllocator(num_blocks)
    assert allocator.allocate(num_blocks) == list(range(num_blocks))
    assert (allocator.num_free, allocator.num_owned) == (0, num_blocks)
    allocator.free(list(range(num_blocks)))
    assert (allocator.num_free, allocator.num_owned) == (num_blocks, 0)


def test_the_most_recently_freed_blocks_go_first():
    allocator = BlockAllocator(8)
    allocator.allocate(6)
    allocator.free([4, 2])
    assert allocator.allocate(3) == [4, 2, 6]


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_a_table_is_short_by_whole_blocks_around_a_boundary(block_size: int, off: int):
    tokens = 2 * block_size + off
    table = BlockTable(block_size)
    needed = table.blocks_short(tokens)
    assert (needed - 1) * block_size < tokens <= needed * block_size
    table.adopt(list(range(needed)))
    assert table.blocks_short(tokens) == 0
    assert table.blocks_short(needed * block_size + 1) == 1


@given(
    block_size=st.integers(1, 9),
    blocks=st.lists(st.integers(0, 99), min_size=1, max_size=6, unique=True),
    data=st.data(),
)
def test_slots_are_block_times_size_plus_offset_and_distinct(block_size: int, blocks: list[int], data: st.DataObject):
    table = BlockTable(block_size)
    table.adopt(blocks)
    tokens = data.draw(st.integers(0, table.capacity))
    slots = table.advance(tokens)
    assert slots == [block * block_size + offset for block in blocks for offset in range(block_size)][:tokens]
    assert slots == table.slots(0, table.length)
    assert len(set(slots)) == tokens


def test_release_forgets_the_tenant_and_returns_its_blocks():
    table = BlockTable(4)
    table.adopt([5, 1])
    table.advance(6)
    assert table.release() == [5, 1]
    assert (table.blocks, table.length, table.capacity) == ([], 0, 0)


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_too_many_blocks_hand_out_none():
    allocator = BlockAllocator(4)
    allocator.allocate(2)
    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 of 4 free"):
        allocator.allocate(3)
    assert allocator.num_free == 2


@pytest.mark.parametrize("block", [-1, 0, 4])
def test_a_block_nobody_owns_is_not_freed(block: int):
    with pytest.raises(ValueError, match=f"block {block} is not owned"):
        BlockAllocator(4).free([block])


def test_a_block_is_not_freed_twice():
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(2)
    allocator.free(blocks)
    with pytest.raises(ValueError, match="freed twice"):
        allocator.free(blocks)


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="num_blocks: 0"):
        BlockAllocator(0)


def test_a_token_past_the_last_block_is_refused():
    table = BlockTable(2)
    table.adopt([3])
    table.advance(2)
    with pytest.raises(OutOfBlocks, match="token 2 has no block"):
        table.append()
    assert table.length == 2


def test_a_table_in_use_takes_no_new_tenant():
    table = BlockTable(2)
    table.adopt([3])
    with pytest.raises(ValueError, match="still holds 1 blocks"):
        table.adopt([4])


def test_a_table_that_counts_tokens_without_blocks_takes_no_new_tenant():
    table = BlockTable(2)
    table.length = 3
    with pytest.raises(ValueError, match="still holds 0 blocks and 3 tokens"):
        table.adopt([4])


def test_gate_rejects_a_block_that_was_dropped_without_being_freed():
    allocator = BlockAllocator(4)
    allocator.allocate(2)
    allocator._holders[0] = 0  # the fault: the ownership map forgets a block that is not on the free list
    with pytest.raises(GateError, match=r"2 free \+ 1 owned = 3 blocks, the pool has 4"):
        check_blocks_conserved(free=allocator.num_free, owned=allocator.recount_owned(), total=4)
    for free, owned in ((-1, 5), (5, -1)):  # the sum is right, and a count is not
        with pytest.raises(GateError, match=f"{free} free, {owned} owned: neither may be negative"):
            check_blocks_conserved(free=free, owned=owned, total=4)


@pytest.mark.parametrize(("sink", "slots"), [(19, 21), (20, 20), (0, 21)])
def test_gate_rejects_a_sink_that_a_block_can_name_or_the_pool_lacks(sink: int, slots: int):
    sizes = {"num_blocks": 5, "block_size": 4}
    check_sink_outside(sink_slot=20, **sizes, pool_slots=21)
    with pytest.raises(GateError, match=rf"the sink is slot {sink}, blocks name 0..19, the pool has {slots} slots"):
        check_sink_outside(sink_slot=sink, **sizes, pool_slots=slots)


def test_gate_rejects_one_block_in_two_tables():
    allocator, first, second = BlockAllocator(4), BlockTable(2), BlockTable(2)
    first.adopt(allocator.allocate(2))
    second.adopt(first.blocks)  # the fault: a move that copies where it should hand over
    with pytest.raises(GateError, match="block 0 is in table 1 and in table 0"):
        check_owned_once(tables={0: first.blocks, 1: second.blocks}, num_blocks=4)


def test_gate_rejects_a_table_that_counts_more_than_it_holds():
    table = BlockTable(2)
    table.adopt([0])
    table.length = 3  # the fault: a prefill that counts before it grows
    with pytest.raises(GateError, match="1 blocks of 2 hold 2 tokens, the table counts 3"):
        check_tables_cover(lengths=[table.length], blocks_held=[len(table.blocks)], block_size=2)


# ---- any order --------------------------------------------------------------------------------------------------


class Pool(RuleBasedStateMachine):
    """Tables grow, append, release and change places; the model is a dict of lists."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 4), tables=st.integers(1, 4))
    def start(self, num_blocks: int, block_size: int, tables: int):
        self.allocator = BlockAllocator(num_blocks)
        self.tables = [BlockTable(block_size) for _ in range(tables)]
        self.model: dict[int, list[int]] = {row: [] for row in range(tables)}  # slots of each table's tokens
        self.block_size = block_size

    @rule(data=st.data(), tokens=st.integers(1, 9))
    def grow_and_write(self, data: st.DataObject, tokens: int):
        row = data.draw(st.sampled_from(sorted(self.model)))
        table, free = self.tables[row], self.allocator.num_free
        short = table.blocks_short(table.length + tokens)
        if short > free:
            with pytest.raises(OutOfBlocks):
                self.allocator.allocate(short)
            assert self.allocator.num_free == free
            return
        table.extend(self.allocator.allocate(short))
        self.model[row] += table.advance(tokens)

    @rule(data=st.data())
    def release(self, data: st.DataObject):
        row = data.draw(st.sampled_from(sorted(self.model)))
        self.allocator.free(self.tables[row].release())
        self.model[row] = []

    @precondition(lambda self: len(self.tables) > 1)
    @rule(data=st.data())
    def swap(self, data: st.DataObject):
        a, b = data.draw(st.permutations(sorted(self.model)))[:2]
        self.tables[a], self.tables[b] = self.tables[b], self.tables[a]
        self.model[a], self.model[b] = self.model[b], self.model[a]

    @invariant()
    def gates_hold(self):
        if not hasattr(self, "model"):
            return
        allocator = self.allocator
        check_blocks_conserved(free=allocator.num_free, owned=allocator.num_owned, total=allocator.num_blocks)
        check_owned_once(
            tables={row: table.blocks for row, table in enumerate(self.tables)}, num_blocks=allocator.num_blocks
        )
        check_tables_cover(
            lengths=[table.length for table in self.tables],
            blocks_held=[len(table.blocks) for table in self.tables],
            block_size=self.block_size,
        )

    @invariant()
    def every_token_keeps_its_slot_and_shares_it_with_none(self):
        if hasattr(self, "model"):
            assert {row: table.slots(0, table.length) for row, table in enumerate(self.tables)} == self.model
            slots = [slot for written in self.model.values() for slot in written]
            assert len(slots) == len(set(slots))


TestPool = Pool.TestCase
