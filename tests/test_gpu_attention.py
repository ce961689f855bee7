"""Paged attention in Triton: equal to its definition over odd shapes, blind to what no row may read, alone in a crowd.

Runs in Triton's interpreter, or compiled where there is a card.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fast.gpu_tasks import plan_tasks
from fast.kernels.gpu.attend import split_tokens
from fast.kernels.gpu.decode import Partials, naive_paged_decode, paged_decode
from fast.kernels.gpu.prefill import INVARIANT_TILE, LARGE_TILE, naive_paged_prefill, paged_prefill
from tests.gpu_mode import BOUND, DEVICE, MARKS, error

pytestmark = MARKS
NAN = float("nan")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass
class Pool:
    """Sequences of given lengths in scattered blocks of one pool; everything that belongs to nobody is NaN."""

    heads: int
    kv_heads: int
    dim: int
    block: int
    lengths: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        seed = torch.Generator().manual_seed(self.heads * 1000 + self.dim + self.block)
        blocks = [-(-length // self.block) for length in self.lengths]
        order = (torch.randperm(sum(blocks) + 3, generator=seed)).tolist()  # three blocks belong to nobody
        width = max([*blocks, 1]) + 1
        slots = (len(order)) * self.block
        shape = (slots, self.kv_heads, self.dim)
        self.k, self.v = (torch.full(shape, NAN) for _ in range(2))
        self.blocks = torch.full((len(blocks), width), order[-1])  # past a row's blocks: one that nobody owns
        self.slots = torch.full((len(blocks), width * self.block), order[-1] * self.block)
        for row, (count, length) in enumerate(zip(blocks, self.lengths, strict=True)):
            own = torch.tensor([order.pop(0) for _ in range(count)], dtype=torch.int64)
            at = torch.arange(length)
            self.blocks[row, :count] = own
            self.slots[row, :length] = own[at // self.block] * self.block + at % self.block
            for pool in (self.k, self.v):
                pool[self.slots[row, :length]] = torch.randn(length, self.kv_heads, self.dim, generator=seed)
        self.seed = seed
        self.k, self.v = (x.to(DEVICE, self.dtype) for x in (self.k, self.v))
        self.blocks, self.slots = self.blocks.to(DEVICE), self.slots.to(DEVICE)
        self.scale = self.dim**-0.5

    def queries(self, count: int) -> Tensor:  # [count, H, D]
        return torch.randn(count, self.heads, self.dim, generator=self.seed).to(DEVICE, self.dtype)

    def table(self, block_size: int | None) -> Tensor:  # [N, W]
        return self.slots if block_size is None else self.blocks

    def decode(self, q: Tensor, *, rows: list[int] | None = None, block_size: int | None = None, **how: int) -> Tensor:
        """Attention of some rows (all, unless told)."""
        rows = list(range(len(self.lengths))) if rows is None else rows
        lengths = torch.tensor([self.lengths[row] for row in rows], device=DEVICE)
        split = how.get("split", 256)
        splits = max(1, -(-max(self.lengths) // split)) + how.get("spare", 0)
        partials = Partials.empty(rows=len(rows), heads=self.heads, dim=self.dim, splits=splits, device=DEVICE)
        for kept in (partials.acc, partials.peaks, partials.totals):
            kept.fill_(NAN)
        table = self.table(block_size)[rows]
        how = {"split": split, "programs": how.get("programs", splits)}
        out = torch.full_like(q, NAN)
        return paged_decode(
            q, self.k, self.v, table, lengths, out, partials, **how, scale=self.scale, block_size=block_size
        )

    def prefill(self, q: Tensor, chunks: list[tuple[int, int]], *, tile: int, block_size: int | None = None) -> Tensor:
        """Attention of chunk (start, tokens) of each row, flat."""
        table = self.table(block_size)
        plan = [(start, tokens, row * table.shape[1]) for row, (start, tokens) in enumerate(chunks) if tokens]
        tasks = torch.from_numpy(plan_tasks(plan, group=self.heads // self.kv_heads, tile=tile)).to(DEVICE)
        how = {"split": 256, "tile": tile}
        out = torch.full_like(q, NAN)
        return paged_prefill(q, self.k, self.v, table, tasks, out, **how, scale=self.scale, block_size=block_size)


# ---- holds --------------------------------------------------------------------------------------------------------

SHAPES = [
    # heads, kv heads, head size, block, lengths, dtype
    (4, 4, 64, 8, (0, 1, 7, 8, 9), F32),
    (3, 1, 80, 16, (17, 0, 15, 16), BF16),
    (8, 1, 96, 32, (31, 32, 33), F16),
    (6, 2, 128, 16, (300, 1), F32),
    (9, 3, 64, 32, (257, 64, 63), BF16),
    (5, 1, 96, 8, (16, 17), F16),
    (14, 2, 80, 32, (33, 1), F16),
]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block", "lengths", "dtype"), SHAPES)
def test_a_decode_is_its_definition_by_slots_and_by_blocks(heads, kv_heads, dim, block, lengths, dtype):
    pool = Pool(heads, kv_heads, dim, block, lengths, dtype)
    q = pool.queries(len(lengths))
    context = torch.tensor(lengths, device=DEVICE)
    wanted = naive_paged_decode(q, pool.k, pool.v, pool.slots, context, scale=pool.scale)
    named = naive_paged_decode(q, pool.k, pool.v, pool.blocks, context, scale=pool.scale, block_size=block)
    assert torch.equal(wanted, named)
    got = pool.decode(q)
    assert error(got, wanted) < BOUND[dtype]
    assert torch.equal(got, pool.decode(q, block_size=block)), "the same keys, so the same bits, through either table"
    for row, length in enumerate(lengths):
        assert length or not got[row].any(), "a row of length 0 is zeros"


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block", "lengths", "dtype"), [SHAPES[1], SHAPES[2], SHAPES[3]])
def test_a_prefill_is_its_definition_from_any_start(heads, kv_heads, dim, block, lengths, dtype):
    pool = Pool(heads, kv_heads, dim, block, lengths, dtype)
    tokens = [min(length, 5 + 20 * row) for row, length in enumerate(lengths)]
    chunks = [(length - count, count) for length, count in zip(lengths, tokens, strict=True)]
    q = pool.queries(sum(tokens))
    parts = zip(q.split(tokens), pool.slots, lengths, strict=True)
    wanted = torch.cat([naive_paged_prefill(part, pool.k, pool.v, row[:n], scale=pool.scale) for part, row, n in parts])
    got = pool.prefill(q, chunks, tile=LARGE_TILE)
    assert error(got, wanted) < BOUND[dtype]
    assert torch.equal(got, pool.prefill(q, chunks, tile=LARGE_TILE, block_size=block))


def test_a_rows_bits_are_its_own():
    """Whatever the batch, the row, the room for splits and the programs that share them."""
    pool = Pool(6, 2, 16, 8, (150, 3, 0, 64), F32)
    q = pool.queries(4)
    alone = torch.cat([pool.decode(q[[row]], rows=[row], split=64) for row in range(4)])
    assert torch.equal(pool.decode(q, split=64, programs=1), alone)
    assert torch.equal(pool.decode(q, split=64, programs=2, spare=3), alone)
    order = [3, 0, 2, 1]
    assert torch.equal(pool.decode(q[order], rows=order, split=64), alone[order])


def test_a_query_gets_the_same_bits_by_prefill_and_by_decode():
    """At the invariant tile, whatever the chunk is; across the end of a split and of a key tile."""
    length = 270
    pool = Pool(4, 2, 16, 16, (length,), F32)
    q = pool.queries(6)
    whole = pool.prefill(q, [(length - 6, 6)], tile=INVARIANT_TILE)
    parts = [pool.prefill(q[:2], [(length - 6, 2)], tile=INVARIANT_TILE)]
    parts += [pool.prefill(q[2:], [(length - 4, 4)], tile=INVARIANT_TILE)]
    assert torch.equal(torch.cat(parts), whole)
    for token in (0, 3, 5):
        pool.lengths = (length - 5 + token,)
        assert torch.equal(pool.decode(q[[token]])[0], whole[token]), token


def test_keys_past_the_reach_of_32_bit_offsets_are_found():
    """The pool is address space: 2 ** 31 numbers of which a few blocks are ever touched."""
    block, dim = 16, 64
    last = 2**31 // dim // block + 2  # a block whose cells lie past 2 ** 31
    pool = Pool(2, 1, dim, block, (20,), F16)
    wide_k, wide_v = (torch.empty((last + 1) * block, 1, dim, dtype=F16, device=DEVICE) for _ in range(2))
    own = pool.slots[0, :20]
    there = torch.arange(last * block - 16, last * block + 4, device=DEVICE)
    assert int(there[0]) * dim > 2**31
    wide_k[there], wide_v[there] = pool.k[own], pool.v[own]
    q = pool.queries(1)
    wanted = pool.decode(q)
    pool.k, pool.v, pool.slots = wide_k, wide_v, there[None]
    pool.blocks = torch.tensor([[last - 1, last]], device=DEVICE)
    assert torch.equal(pool.decode(q), wanted)
    assert torch.equal(pool.decode(q, block_size=block), wanted)


@pytest.mark.parametrize("longest", [1, 256, 16384, 16385, 131072])
def test_a_row_has_a_bounded_number_of_splits(longest: int):
    split = split_tokens(longest)
    assert split % 256 == 0
    assert -(-longest // split) <= 64


# ---- rejects ------------------------------------------------------------------------------------------------------


def test_a_nan_that_a_row_may_read_is_not_hidden():
    pool = Pool(2, 1, 16, 8, (9, 12), F32)
    pool.k[pool.slots[0, 4]] = NAN
    got = pool.decode(pool.queries(2))
    assert got[0].isnan().all()
    assert not got[1].isnan().any()
