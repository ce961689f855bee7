"""A memory budget becomes blocks, a length limit and bytes, and what cannot work is refused by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fast.cache import BatchedPagedKVCache
from fast.pool import plan_pool
from fast.slots import table_bytes
from gates import GateError
from tests.harness import TINY

SLOT_BYTES = TINY.kv_elements_per_token * 4


def plan(**sizes):
    return plan_pool(TINY, **({"max_batch_size": 4, "block_size": 16, "element_bytes": 4} | sizes))


# ---- holds ------------------------------------------------------------------------------------------------------


def test_the_bytes_are_the_bytes_of_the_real_tensors():
    pool = plan(num_blocks=9)
    cache = BatchedPagedKVCache(TINY, max_batch_size=4, num_blocks=9, block_size=16, max_model_len=pool.max_model_len)
    real = sum(tensor.numel() * tensor.element_size() for tensor in [*cache.k, *cache.v])
    assert pool.pool_bytes == real
    assert pool.table_bytes == cache.slot_table.slots.numel() * 8
    assert pool.as_dict()["capacity_tokens"] == cache.num_slots == 144


@given(st.integers(1, 64), st.integers(1, 40), st.integers(0, 60), st.integers(0, 63))
def test_a_budget_buys_whole_blocks_and_no_more_than_the_rows_can_use(rows, block_size, blocks, spare):
    budget = blocks * block_size * SLOT_BYTES + min(spare, block_size * SLOT_BYTES - 1)
    most = rows * -(-TINY.max_positions // block_size)
    if min(blocks, most) * block_size < 2:
        with pytest.raises(ValueError, match="kv_bytes: .* not at least 2; "):
            plan(max_batch_size=rows, block_size=block_size, kv_bytes=budget)
        return
    pool = plan(max_batch_size=rows, block_size=block_size, kv_bytes=budget)
    assert pool.num_blocks == min(blocks, most)
    assert pool.max_model_len == min(TINY.max_positions, pool.capacity_tokens)
    assert pool.budget_bytes == budget


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"kv_bytes": 1 << 20, "num_blocks": 3}, "kv_bytes: .* give one"),
        ({"num_blocks": 0}, "num_blocks: 0 of 16 tokens hold 0 tokens"),
        ({"num_blocks": 4, "max_model_len": 1}, "max_model_len: 1 tokens is not at least 2"),
        ({"max_batch_size": 0, "num_blocks": 1}, "max_batch_size: 0 is not a positive integer"),
        ({"block_size": 0, "num_blocks": 1}, "block_size: 0 is not a positive integer"),
    ],
)
def test_what_cannot_work_is_refused_by_name(sizes, words):
    with pytest.raises(ValueError, match=words):
        plan(**sizes)


def test_addressing_that_costs_more_than_the_pool_is_refused():
    rows = 64 * 1024
    assert table_bytes(max_batch_size=rows, max_model_len=256) > 64 << 20
    with pytest.raises(ValueError, match="max_model_len: 256 tokens x max_batch_size 65536 need 134,217,728 bytes"):
        plan(max_batch_size=rows, num_blocks=1024)


@pytest.mark.parametrize("gather", [False, True])
def test_gate_rejects_a_table_that_outgrew_what_was_allowed(gather: bool, monkeypatch: pytest.MonkeyPatch):
    made = plan(num_blocks=9, max_model_len=64)
    where = {"dtype": torch.float32, "device": "cpu", "gather": gather}
    assert BatchedPagedKVCache.of_plan(TINY, made, **where).slot_table.num_bytes == made.table_bytes * (1 + gather)
    monkeypatch.setattr("fast.pool.SMALLEST_TABLE_BUDGET", made.table_bytes - 1)  # the fault: planned for less
    with pytest.raises(GateError, match="gate slots.fits: the slot table reserves"):
        BatchedPagedKVCache.of_plan(TINY, made, **where)
