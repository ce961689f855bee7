"""The reference's paged K/V: one pool, one block table per sequence, and a batched read held to each row alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.nn import functional as F

from gates import GateError
from gates.batch import check_prefill_lands_empty
from gates.blocks import (
    check_batch_reserved,
    check_blocks_conserved,
    check_mapping_follows_tables,
    check_mapping_in_pool,
    check_owned_once,
    check_tables_cover,
)
from reference.attention import paged_attention_batched_reference, paged_attention_reference
from reference.blocks import (
    PAD_SLOT,
    BatchedPagedKVCache,
    BlockAllocator,
    BlockTable,
    OutOfBlocks,
    PagedKVCache,
)
from tests.harness import TINY

H, K, D, L = TINY.num_heads, TINY.num_kv_heads, TINY.head_dim, TINY.num_layers
LENGTHS = [(1,), (2, 5, 3), (4, 4), (3, 8, 1, 7), (5, 9)]  # block_size 4: at the boundary and one to either side


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def padded_mask(lengths: tuple[int, ...]) -> torch.Tensor:  # [N, T] bool
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def batched(rows: int, *, num_blocks: int = 32, block_size: int = 4) -> BatchedPagedKVCache:
    return BatchedPagedKVCache(TINY, batch_size=rows, num_blocks=num_blocks, block_size=block_size, dtype=torch.float64)


def filled(lengths: tuple[int, ...], *, decode_steps: int = 0) -> tuple[BatchedPagedKVCache, list[PagedKVCache]]:
    """A ragged batch and, as its oracle, each row in a cache of its own; both given the same K/V."""
    together, mask = batched(len(lengths)), padded_mask(lengths)
    alone = [PagedKVCache(TINY, num_blocks=8, block_size=4, dtype=torch.float64) for _ in lengths]
    for step in range(1 + decode_steps):
        tokens = mask.shape[1] if step == 0 else 1
        for layer in range(L):
            k, v = noise(2, len(lengths), K, tokens, D, seed=100 * step + layer)
            together.write(layer, k, v, mask if step == 0 else None)
            for row, cache in enumerate(alone):
                real = lengths[row] if step == 0 else 1
                cache.write(layer, k[row : row + 1, :, :real], v[row : row + 1, :, :real])
    return together, alone


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_row_occupies_its_own_tokens_and_the_rectangle_never_reaches_the_pool(lengths: tuple[int, ...]):
    cache, _ = filled(lengths)
    assert cache.seq_lens == list(lengths)
    assert cache.cached_tokens == sum(lengths)
    for layer in range(L):
        assert int(cache.k_pool[layer].any(dim=2).any(dim=1).sum()) == sum(lengths)
    assert [len(table.blocks) for table in cache.tables] == [-(-length // 4) for length in lengths]


@pytest.mark.parametrize("decode_steps", [0, 1, 5])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_batched_cache_holds_what_each_row_alone_holds(lengths: tuple[int, ...], decode_steps: int):
    together, alone = filled(lengths, decode_steps=decode_steps)
    slots, context_lens = together.slot_mapping()
    for row, cache in enumerate(alone):
        own = slots[row, : context_lens[row]]
        for layer in range(L):
            k, v = cache.gather(layer)
            assert torch.equal(together.k_pool[layer, own].transpose(0, 1)[None], k)
            assert torch.equal(together.v_pool[layer, own].transpose(0, 1)[None], v)


@pytest.mark.parametrize("decode_steps", [0, 1, 5])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_batched_read_equals_each_rows_own_slots_alone(lengths: tuple[int, ...], decode_steps: int):
    together, alone = filled(lengths, decode_steps=decode_steps)
    q = noise(len(lengths), H, D, seed=7)
    for layer in range(L):
        read = together.paged_attention(layer, q)
        for row, table in enumerate(together.tables):
            own = torch.tensor(table.slots())
            one = paged_attention_reference(q[row], together.k_pool[layer], together.v_pool[layer], own)
            assert torch.allclose(read[row], one, rtol=1e-12, atol=1e-13)
            assert torch.allclose(read[row], alone[row].paged_attention(layer, q[row : row + 1])[0], atol=1e-13)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 12])
def test_the_single_read_equals_torch_on_the_gathered_history(tokens: int):
    cache = PagedKVCache(TINY, num_blocks=3, block_size=4, dtype=torch.float64)
    cache.write(0, *noise(2, 1, K, tokens, D))
    q, (k, v) = noise(1, H, D, seed=3), cache.gather(0)
    wanted = F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]
    assert torch.allclose(cache.paged_attention(0, q), wanted, rtol=1e-12, atol=1e-13)


def test_rows_interleave_physically_in_the_order_they_grow():
    cache = batched(3, block_size=2)
    lengths = (6, 4, 2)
    k, v = noise(2, 3, K, 6, D)
    cache.write(0, k, v, padded_mask(lengths))
    assert [table.blocks for table in cache.tables] == [[0, 1, 2], [3, 4], [5]]
    cache.write(0, k[:, :, :1], v[:, :, :1])
    assert [table.blocks for table in cache.tables] == [[0, 1, 2, 6], [3, 4, 7], [5, 8]]
    slots, context_lens = cache.slot_mapping()
    assert context_lens.tolist() == [7, 5, 3]
    assert slots.tolist() == [[0, 1, 2, 3, 4, 5, 12], [6, 7, 8, 9, 14, 0, 0], [10, 11, 16, 0, 0, 0, 0]]


@pytest.mark.parametrize("poison", [1e4, -1e4, float("inf"), float("nan")])
def test_the_slot_that_padding_reads_is_inert_whatever_it_holds(poison: float):
    """Padding is really dereferenced. 1e4 alone would survive an added bias; NaN and inf need replacement too."""
    cache, _ = filled((5, 2, 3))
    # Row 0 gives its blocks back, so slot 0 is nobody's and only padding reads it.
    cache.free_row(0)
    cache.write(0, *noise(2, 3, K, 1, D, seed=9))
    assert PAD_SLOT not in [slot for table in cache.tables for slot in table.slots()]
    slots, context_lens = cache.slot_mapping()
    assert PAD_SLOT in slots[0].tolist()
    q = noise(3, H, D, seed=4)
    before = cache.paged_attention(0, q)
    cache.k_pool[:, PAD_SLOT], cache.v_pool[:, PAD_SLOT] = poison, poison
    assert torch.equal(cache.paged_attention(0, q), before)
    assert context_lens.tolist() == [1, 3, 4]


def test_a_neighbours_nan_in_the_pad_slot_stays_the_neighbours():
    cache, _ = filled((5, 2))
    q = noise(2, H, D, seed=4)
    before = cache.paged_attention(0, q)
    assert cache.tables[0].slots()[0] == PAD_SLOT
    cache.k_pool[0, PAD_SLOT] = float("nan")
    after = cache.paged_attention(0, q)
    assert after[0].isnan().all()
    assert torch.equal(after[1], before[1])


def test_what_torch_does_with_minus_one_is_why_the_pad_is_zero():
    pool = noise(8, K, D)
    assert torch.equal(pool[torch.tensor([-1])], pool[7:])


def test_a_freed_row_returns_its_blocks_and_the_others_read_on():
    cache, _ = filled((5, 9, 2))
    q = noise(3, H, D, seed=4)
    before, free = cache.paged_attention(0, q), cache.allocator.num_free
    cache.free_row(1)
    assert cache.allocator.num_free == free + 3
    assert cache.seq_lens == [5, 0, 2]
    for row in (0, 2):
        own = torch.tensor(cache.tables[row].slots())
        one = paged_attention_reference(q[row], cache.k_pool[0], cache.v_pool[0], own)
        assert torch.allclose(one, before[row], rtol=1e-12, atol=1e-13)


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_the_batched_read_refuses_a_mask():
    cache, _ = filled((2, 3))
    with pytest.raises(ValueError, match=r"attention_mask: \[2, 3\] given, a paged decode reads by context_lens"):
        cache.paged_attention(0, noise(2, H, D), padded_mask((2, 3)))


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_a_batch_that_does_not_fit_moves_no_row(spare: int):
    # Three full blocks, so each row's next token needs one more; the pool has 0, 1 or 2 left for all three.
    cache = batched(3, num_blocks=3 + spare)
    k, v = noise(2, 3, K, 4, D)
    cache.write(0, k, v, padded_mask((4, 4, 4)))
    kept, pool = [list(table.blocks) for table in cache.tables], cache.k_pool.clone()
    with pytest.raises(OutOfBlocks, match=f"the batch needs 3 more blocks, {spare} are free"):
        cache.write(0, k[:, :, :1], v[:, :, :1])
    assert [table.blocks for table in cache.tables] == kept
    assert cache.seq_lens == [4, 4, 4]
    assert cache.allocator.num_free == spare
    assert torch.equal(cache.k_pool, pool)


def test_a_batch_that_fits_to_the_last_block_grows():
    cache = batched(3, num_blocks=6)
    k, v = noise(2, 3, K, 4, D)
    cache.write(0, k, v, padded_mask((4, 4, 4)))
    cache.write(0, k[:, :, :1], v[:, :, :1])
    assert (cache.allocator.num_free, cache.seq_lens) == (0, [5, 5, 5])


def test_gate_rejects_a_batch_that_reserves_row_by_row():
    """The fault: each row asks for itself. Rows 0 and 1 have grown when row 2 finds the pool dry."""
    allocator = BlockAllocator(5)
    tables = [BlockTable(allocator, 4) for _ in range(3)]
    for table in tables:
        table.append(4)
    with pytest.raises(GateError, match=r"blocks.batch_reserved: the batch needs 3 more blocks, 2 are free"):
        check_batch_reserved(demand=sum(t.blocks_short(1) for t in tables), free=allocator.num_free)
    tables[0].append(1)
    tables[1].append(1)
    with pytest.raises(OutOfBlocks):
        tables[2].append(1)
    assert [table.length for table in tables] == [5, 5, 4]


def test_gate_rejects_a_batch_whose_tables_ask_for_too_little(monkeypatch: pytest.MonkeyPatch):
    cache = batched(3, num_blocks=4)
    cache.write(0, *noise(2, 3, K, 4, D))
    monkeypatch.setattr(BlockTable, "blocks_short", lambda table, tokens: 0)  # the fault: the refusal sees no demand
    with pytest.raises(GateError, match=r"blocks.batch_reserved: the batch needs 3 more blocks, 1 are free"):
        cache.write(0, *noise(2, 3, K, 1, D))
    assert cache.seq_lens == [4, 4, 4]
    assert check_batch_reserved.gate_name == "blocks.batch_reserved"


def test_gate_rejects_a_masked_prefill_on_a_history():
    cache, _ = filled((2, 3))
    with pytest.raises(GateError, match=r"batch.prefill_lands_empty: .* the cache holds 2 .*first at row 0; 2 of 2"):
        cache.write(0, *noise(2, 2, K, 3, D), padded_mask((2, 3)))
    assert cache.seq_lens == [2, 3]


def test_gate_rejects_asking_for_the_first_write_past_layer_0():
    cache, lengths = batched(2), (2, 3)
    k, v = noise(2, 2, K, 3, D)
    check_prefill_lands_empty(seq_lens=cache.seq_lens)
    cache.write(0, k, v, padded_mask(lengths))
    with pytest.raises(GateError, match="asked past layer 0"):  # what the guard would say on layer 1
        check_prefill_lands_empty(seq_lens=cache.seq_lens)
    cache.write(1, k, v, padded_mask(lengths))  # and the cache does not ask it there
    assert cache.seq_lens == list(lengths)


@pytest.mark.parametrize(("pad", "said"), [(-1, "slot -1"), (128, "slot 128")])
def test_gate_rejects_a_pad_index_outside_the_pool(pad: int, said: str):
    cache, _ = filled((2, 5))
    slots, context_lens = cache.slot_mapping()
    slots[0, 2:] = pad
    with pytest.raises(GateError, match=rf"blocks.mapping_in_pool: column 2 addresses {said}, the pool has 0..127"):
        paged_attention_batched_reference(noise(2, H, D), cache.k_pool[0], cache.v_pool[0], slots, context_lens)
    with pytest.raises(GateError):
        check_mapping_in_pool(slot_mapping=slots, num_slots=128)


def test_gate_rejects_a_mapping_that_is_not_its_tables():
    cache, _ = filled((2, 5))
    slots, context_lens = cache.slot_mapping()
    tables = [table.blocks for table in cache.tables]

    def check(mapping: torch.Tensor, lengths: torch.Tensor) -> None:
        check_mapping_follows_tables(slot_mapping=mapping, context_lens=lengths, tables=tables, block_size=4)

    check(slots, context_lens)
    with pytest.raises(GateError, match="token 0 is read from slot 4, written to 0"):
        check(slots.flip(0), context_lens)  # each row reads its neighbour's blocks
    with pytest.raises(GateError, match="row 0 reads 5 tokens, its 1 blocks hold 4"):
        check(slots, torch.tensor([5, 5]))
    with pytest.raises(GateError, match="row 1 reads 0 tokens"):
        check(slots, torch.tensor([2, 0]))
    with pytest.raises(GateError, match="token 4 is read from slot nothing, written to 8"):
        check(slots[:, :4], context_lens)  # a rectangle that ends before its longest row


def test_gate_rejects_a_leaked_block():
    allocator = BlockAllocator(4)
    table = BlockTable(allocator, 4)
    table.append(5)
    table.blocks = table.blocks[:1]  # a row that forgets a block without returning it
    with pytest.raises(GateError, match=r"2 free \+ 1 owned = 3 blocks, the pool has 4"):
        check_blocks_conserved(free=allocator.num_free, owned=len(table.blocks), total=4)


def test_gate_rejects_a_block_owned_twice_or_unknown():
    for tables in ({0: [1, 2], 1: [2]}, {0: [1, 1]}, {0: [4]}, {0: [-1]}):
        with pytest.raises(GateError, match=r"blocks\.owned_once"):
            check_owned_once(tables=tables, num_blocks=4)


def test_gate_rejects_tables_that_are_short_or_hoard():
    check_tables_cover(lengths=[0, 4, 5], blocks_held=[1, 2, 3], block_size=4)
    with pytest.raises(GateError, match=r"1 blocks of 4 hold 4 tokens, the table counts 5 \[first at row 1; 1 of 2\]"):
        check_tables_cover(lengths=[4, 5], blocks_held=[1, 1], block_size=4)
    with pytest.raises(GateError, match="3 blocks held, 4 tokens need 1 and one may be reserved"):
        check_tables_cover(lengths=[4], blocks_held=[3], block_size=4)


def test_misuse_is_refused_by_name():
    with pytest.raises(ValueError, match="num_blocks: 0"):
        BlockAllocator(0)
    with pytest.raises(ValueError, match="block_size: 0"):
        BlockTable(BlockAllocator(1), 0)
    with pytest.raises(ValueError, match="count: -1"):
        BlockAllocator(1).allocate(-1)
    with pytest.raises(ValueError, match="batch_size: 0"):
        batched(0)
    with pytest.raises(ValueError, match="batch_size: 2 rows written, the cache has 3"):
        batched(3).write(0, *noise(2, 2, K, 1, D))
    with pytest.raises(ValueError, match="batch_size: 2 rows written, one block table"):
        PagedKVCache(TINY, num_blocks=1, block_size=1, dtype=torch.float64).write(0, *noise(2, 2, K, 1, D))


@pytest.mark.parametrize("bad", [[0, 0], [3], [-1], [1]])
def test_freeing_what_is_not_owned_is_refused_and_changes_nothing(bad: list[int]):
    allocator = BlockAllocator(3)
    assert allocator.allocate(1) == [0]
    with pytest.raises(ValueError, match="freed twice or was never handed out"):
        allocator.free(bad)
    assert (allocator.num_free, allocator.num_owned) == (2, 1)


# ---- any order --------------------------------------------------------------------------------------------------


class Blocks(RuleBasedStateMachine):
    """Sequences that start, grow and leave over one small pool; the model is a dict of lengths and of slots seen."""

    @initialize(num_blocks=st.integers(1, 9), block_size=st.integers(1, 4))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.block_size = block_size
        self.tables: dict[int, BlockTable] = {}
        self.slots: dict[int, list[int]] = {}  # what each sequence has been told, by sequence
        self.names = 0

    @rule()
    def arrive(self) -> None:
        self.tables[self.names], self.slots[self.names] = BlockTable(self.allocator, self.block_size), []
        self.names += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.integers(0, 9))
    def grow(self, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.tables)))
        table, written = self.tables[name], self.slots[name]
        held = {other: -(-len(slots) // self.block_size) for other, slots in self.slots.items()}
        room = self.allocator.num_blocks - sum(held.values())
        needed = -(-(len(written) + tokens) // self.block_size) - held[name]
        if needed > room:
            before = list(table.blocks), table.length, self.allocator.num_free
            with pytest.raises(OutOfBlocks):
                table.append(tokens)
            assert (table.blocks, table.length, self.allocator.num_free) == before
        else:
            written += table.append(tokens)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tables)))
        self.tables.pop(name).free()
        self.slots.pop(name)

    @invariant()
    def blocks_are_conserved_and_owned_once(self) -> None:
        held = [len(table.blocks) for table in self.tables.values()]
        total = self.allocator.num_blocks
        check_blocks_conserved(free=self.allocator.num_free, owned=sum(held), total=total)
        check_blocks_conserved(free=self.allocator.num_free, owned=self.allocator.num_owned, total=total)
        check_owned_once(tables={n: t.blocks for n, t in self.tables.items()}, num_blocks=total)
        lengths = [len(slots) for slots in self.slots.values()]
        check_tables_cover(lengths=lengths, blocks_held=held, block_size=self.block_size)

    @invariant()
    def every_token_stays_where_it_was_written(self) -> None:
        for name, table in self.tables.items():
            assert table.slots() == self.slots[name]
        seen = [slot for slots in self.slots.values() for slot in slots]
        assert len(seen) == len(set(seen))


TestBlocks = Blocks.TestCase


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), steps=st.integers(0, 6))
def test_any_ragged_batch_equals_its_rows_alone(lengths: list[int], steps: int):
    together, alone = filled(tuple(lengths), decode_steps=steps)
    q = noise(len(lengths), H, D, seed=5)
    read = together.paged_attention(L - 1, q)
    for row, cache in enumerate(alone):
        assert torch.allclose(read[row], cache.paged_attention(L - 1, q[row : row + 1])[0], rtol=1e-12, atol=1e-13)
    assert together.cached_tokens == sum(lengths) + steps * len(lengths)
