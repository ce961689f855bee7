"""How much K/V a memory budget buys, decided once, before anything is allocated.

A `KVPoolPlan` is what a server was promised: blocks, the length limit they allow, and the bytes of the pool and of
the addressing beside it. `/health` shows it as it is. It knows sizes and no tensor.

Gates: gates.slots. Proof: tests/test_pool.py. Story: blocks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fast.slots import block_table_bytes, table_bytes
from reference.config import ModelConfig

DEFAULT_KV_BYTES = 1 << 30
SMALLEST_TABLE_BUDGET = 64 << 20
KERNEL_LANES = 16  # numbers in a vector of the CPU kernels


@dataclass(frozen=True, slots=True)
class KVPoolPlan:
    """The pool and its addressing. Bytes are of the process's memory, for its whole life."""

    max_batch_size: int
    block_size: int  # tokens
    num_blocks: int
    max_model_len: int  # tokens of one request; never more than the pool holds
    pool_bytes: int  # K and V of every slot, the sink included
    table_bytes: int  # the slot table
    block_table_bytes: int  # what the same addressing costs as block ids
    budget_bytes: int | None  # None: the number of blocks was given

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the allocator can place."""
        return self.num_blocks * self.block_size

    @property
    def addressing_budget_bytes(self) -> int:
        """What the slot table may cost: the pool's own budget, and 64 MiB in any case."""
        return max(SMALLEST_TABLE_BUDGET, self.budget_bytes or 0)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `/health`."""
        return asdict(self) | {"capacity_tokens": self.capacity_tokens}


def plan_pool(
    config: ModelConfig,
    *,
    max_batch_size: int,
    block_size: int,
    element_bytes: int,
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    max_model_len: int | None = None,
    kernels: bool = False,
) -> KVPoolPlan:
    """A pool of `num_blocks`, or of what `kv_bytes` buys (1 GiB unless told), never more than `max_batch_size`
    full-length requests can use. The slot table comes on top and may not outgrow the pool's budget. The CPU `kernels`
    round a value's size up to whole vectors and give the sink a block, which comes on top of the budget.

    Raises:
        ValueError: a size is out of range, the pool cannot hold one prompt token and one answer token, or the
            addressing would cost more than the budget (64 MiB are always allowed).
    """
    for name, size in (("max_batch_size", max_batch_size), ("block_size", block_size)):
        if size < 1:
            raise ValueError(f"{name}: {size} is not a positive integer")
    if num_blocks is not None and kv_bytes is not None:
        raise ValueError(f"kv_bytes: {kv_bytes} and num_blocks {num_blocks} both size the pool; give one")
    limit = config.max_positions if max_model_len is None else min(max_model_len, config.max_positions)
    elements = config.kv_elements_per_token
    if kernels:
        elements += config.num_layers * config.num_kv_heads * (-config.head_dim % KERNEL_LANES)
    slot_bytes = elements * element_bytes
    budget = None
    if num_blocks is None:
        budget = DEFAULT_KV_BYTES if kv_bytes is None else kv_bytes
        most = max_batch_size * -(-limit // block_size)
        num_blocks = min(most, budget // (slot_bytes * block_size))
    limit = min(limit, num_blocks * block_size)
    if limit < 2:
        raise ValueError(_too_small(limit, num_blocks, block_size, budget, slot_bytes))
    table = table_bytes(max_batch_size=max_batch_size, max_model_len=limit)
    blocks = block_table_bytes(max_batch_size=max_batch_size, max_model_len=limit, block_size=block_size)
    allowed = max(SMALLEST_TABLE_BUDGET, budget or 0)
    if table > allowed:
        raise ValueError(
            f"max_model_len: {limit} tokens x max_batch_size {max_batch_size} need {table:,} bytes of addressing, "
            f"more than {allowed:,}; lower one of them"
        )
    return KVPoolPlan(
        max_batch_size=max_batch_size,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=limit,
        pool_bytes=(num_blocks * block_size + (block_size if kernels else 1)) * slot_bytes,
        table_bytes=table,
        block_table_bytes=blocks,
        budget_bytes=budget,
    )


def _too_small(limit: int, num_blocks: int, block_size: int, budget: int | None, slot_bytes: int) -> str:
    """Which size leaves no room for a prompt token and an answer token."""
    tokens = num_blocks * block_size
    if tokens >= 2:
        return f"max_model_len: {limit} tokens is not at least 2, one prompt token and one answer token"
    if budget is None:
        return f"num_blocks: {num_blocks} of {block_size} tokens hold {tokens} tokens, which is not at least 2"
    needed = -(-2 // block_size) * block_size * slot_bytes
    return f"kv_bytes: {budget:,} bytes hold {tokens} tokens, which is not at least 2; {needed:,} bytes are needed"
