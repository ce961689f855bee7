"""What a decode step must at least do, and how long this machine needs for that: bytes to read, products to add up.

Both rates are measured in the run whose steps they judge: a rate from a data sheet, or from yesterday, says nothing
about a machine that others use too. Source: Williams, Waterman and Patterson, "Roofline" (CACM 2009).

Proof: tests/test_bench_engine.py. Story: kernels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from reference.config import ModelConfig
from reference.weights import model_shapes

READ_BYTES = 256 << 20  # more than any cache holds
MATRIX = 1024  # rows and columns of the product that is timed


@dataclass(frozen=True, slots=True)
class Work:
    """What one step reads and computes."""

    weight_bytes: int
    kv_bytes: int
    flops: int

    @property
    def num_bytes(self) -> int:
        """All that is read."""
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine does in a second."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, work: Work) -> float:
        """No step is faster: its bytes at full bandwidth, or its products at full rate, whichever takes longer."""
        return max(work.num_bytes / self.bytes_per_s, work.flops / self.flops_per_s)


def decode_work(
    config: ModelConfig, *, rows: int, context: int, weight_element_bytes: int, kv_element_bytes: int
) -> Work:
    """One token for each of `rows` sequences of `context` tokens: every matrix once, every row's K/V once."""
    elements = matrix_elements(config)
    attention = 4 * context * config.num_layers * config.num_heads * config.head_dim  # scores, and their sum of values
    return Work(
        weight_bytes=elements * weight_element_bytes,
        kv_bytes=rows * context * config.kv_elements_per_token * kv_element_bytes,
        flops=rows * (2 * elements + attention),
    )


def matrix_elements(config: ModelConfig) -> int:
    """Weights that every token is multiplied by; an embedding that is not the head too is only looked up."""
    shapes = model_shapes(config)
    if not config.tie_embeddings:
        del shapes["embedding"]
    return sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)


def measure_rates(*, rounds: int = 5, clock: Callable[[], float] = time.perf_counter) -> Rates:
    """Bandwidth of a sum over memory, and the float32 rate of torch's faster matrix product, each at its best.

    A roof is the most that was seen: torch has two products (MKL's and oneDNN's), and on some processors one of them
    leaves half of the vector unit idle.
    """
    import torch

    memory = torch.ones(READ_BYTES // 4)
    read = min(_seconds(lambda: memory.sum(), clock) for _ in range(rounds))
    product = min(_seconds(call, clock) for call in _products() for _ in range(rounds))
    return Rates(READ_BYTES / read, 2 * MATRIX**3 / product)


def _products() -> list[Callable[[], object]]:
    """The same product by each library that torch has here."""
    import torch

    left, right = torch.ones(2, MATRIX, MATRIX)
    calls: list[Callable[[], object]] = [lambda: left @ right]
    if torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(right, None)
        calls.append(lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], ""))
    return calls


def _seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    begin = clock()
    call()
    return clock() - begin
