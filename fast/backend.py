"""What an engine computes on: torch's operators, the CPU kernels, or the GPU's; and what each of them promises.

`build_backend` makes a forward and the cache whose pool it reads, a pair that belongs together. Every kind of forward
has `prefill(chunks, cache)` and `decode(plan, cache)`; `facts_of` says for either what it is, and whether a request's
logits keep their bits under every schedule. It knows no row, no bucket and no request.

Gates: gates.backend. Proof: tests/test_backend.py. Story: kernels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fast.cache import BatchedPagedKVCache
from fast.gpu import GPUForward, why_not
from fast.inputs import DecodeInputs
from fast.linear import MATRICES
from fast.model import Chunk, Forward, OnLogits
from fast.plan import DecodePlan
from fast.pool import KERNEL_LANES, KVPoolPlan
from fast.sampling import Work
from fast.warmup import warmup_plan
from gates.backend import check_no_kernel_compiles_after_ready
from reference.config import ModelConfig
from reference.weights import LayerWeights, ModelWeights

TOPOLOGY = Path("/sys/devices/system/cpu")
ONE_CHAIN = "each number is one chain of operations, whose order depends on its own token alone"
BY_ROW_COUNT = "torch's matrix products choose their order of sums by the number of rows"


class KernelBackend:
    """The CPU kernels as an engine's forward. `warm` compiles them; after it, nothing may be compiled any more.

    Raises:
        ValueError: `threads` is out of range, or `half_weights` would make a weight infinite.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        max_positions: int,
        max_batch_size: int,
        half_weights: bool,
        threads: int | None,
    ) -> None:
        from fast.kernels.forward import ENTRIES, KernelForward

        self.config, self.half_weights = config, half_weights
        self.dtype, self.device = torch.float32, torch.device("cpu")
        sizes = {"max_positions": max_positions, "max_batch_size": max_batch_size}
        chosen = default_threads() if threads is None else threads
        try:
            with np.errstate(over="raise"):
                self._forward = KernelForward(config, weights, **sizes, threads=chosen, half=half_weights)
        except FloatingPointError:
            raise ValueError("half_weights: True makes a weight infinite; this model needs float32 weights") from None
        self.half_kv = False
        self.compiles_after_ready = 0
        self._entries = ENTRIES
        self._ready = False

    @property
    def threads(self) -> int:
        """Threads that every call runs on."""
        return self._forward.threads

    def warm(self, cache: BatchedPagedKVCache) -> None:
        """Compile, or load from disk, every kernel for this cache's pool, on a decode step of one padded row."""
        self._ready = False
        self.half_kv = cache.kernel_pool is not None and cache.kernel_pool.half
        inputs = DecodeInputs(max_batch_size=1, sink_slot=cache.sink_slot)
        logits = self.decode(warmup_plan((1, 1), slot_table=cache.slot_table, inputs=inputs), cache)
        self.draw(logits, Work.none(logits.shape[1]))
        self._ready = True

    def prefill(
        self, chunks: Sequence[Chunk], cache: BatchedPagedKVCache, on_logits: OnLogits | None = None
    ) -> Tensor:  # [C, V]
        """As `Forward.prefill`; the logits are a buffer's, good until the next prefill."""
        assert cache.kernel_pool is not None
        before = self._compiled()
        logits = self._forward.prefill(chunks, cache.kernel_pool, on_logits)
        self._check_compiled(before)
        return logits

    def decode(self, plan: DecodePlan, cache: BatchedPagedKVCache) -> Tensor:  # [N, V]
        """As `Forward.decode`; the logits are a buffer's, good until the next decode."""
        assert cache.kernel_pool is not None
        before = self._compiled()
        logits = self._forward.decode(plan, cache.kernel_pool)
        self._check_compiled(before)
        return logits

    def draw(self, logits: Tensor, work: Work) -> tuple[NDArray[np.int64], NDArray[np.int64]]:  # [N, V] -> [n], [n]
        """The tokens of rows with work of their own; see `fast.sampling.Chooser`."""
        before = self._compiled()
        drawn = self._forward.draw(logits, work)
        self._check_compiled(before)
        return drawn

    def facts(self) -> dict[str, Any]:
        """What runs and what it promises, as plain values."""
        return {
            "name": "kernels",
            "weights": "float16" if self.half_weights else "float32",
            "weight_bytes": self._forward.num_bytes,
            "kv": "float16" if self.half_kv else "float32",
            "threads": self.threads,
            "schedule_invariant": True,
            "reason": ONE_CHAIN,
        }

    def _compiled(self) -> int:
        # Only what Python calls is counted: what those call is compiled into them.
        return sum(len(entry.overloads) for entry in self._entries)

    def _check_compiled(self, before: int) -> None:
        if self._ready:
            self.compiles_after_ready += self._compiled() - before
            check_no_kernel_compiles_after_ready(compiles_after_ready=self.compiles_after_ready)


AnyForward = Forward | KernelBackend | GPUForward


def build_backend(
    config: ModelConfig,
    weights: ModelWeights,
    plan: KVPoolPlan,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    gather: bool,
    kernels: bool,
    half_weights: bool = False,
    half_kv: bool = False,
    threads: int | None = None,
    take_weights: bool = False,
    triton: bool = False,
    invariant: bool = False,
) -> tuple[AnyForward, BatchedPagedKVCache]:
    """A forward, its kernels compiled, and the cache that a pool plan promised.

    `take_weights` empties `weights` layer by layer as the forward makes its own copies, so that the model is in memory
    once; nobody can compute from it any more.

    Raises:
        ValueError: the kernels cannot run as asked, or something is asked of them while they are off.
    """
    if take_weights:
        weights = handing_over(weights)
    if invariant and not triton:
        raise ValueError("invariant: True needs triton; the CPU kernels are invariant as they are")
    if triton and (reason := "computes on a GPU, kernels on a CPU; choose one" if kernels else why_not(device, dtype)):
        raise ValueError(f"triton: True {reason}")
    if not kernels:
        asked = {"half_weights": half_weights, "half_kv": half_kv, "threads": threads}
        for name, value in asked.items():
            if value not in (None, False):
                raise ValueError(f"{name}: {value} needs kernels, which are off")
        cache = BatchedPagedKVCache.of_plan(config, plan, dtype=dtype, device=device, gather=gather)
        if triton:
            sizes = {"max_batch_size": plan.max_batch_size, "max_model_len": plan.max_model_len}
            on_gpu = GPUForward(config, weights, **sizes, dtype=dtype, device=device, invariant=invariant)
            on_gpu.warm(cache)
            return on_gpu, cache
        return Forward(config, weights, max_positions=cache.max_model_len, dtype=dtype, device=device), cache
    reason = why_no_kernels(dtype=dtype, device=device, block_size=plan.block_size)
    if reason:
        raise ValueError(f"kernels: True {reason}")
    from fast.kernels.pool import KernelPool

    pool = KernelPool(config, num_blocks=plan.num_blocks, block_size=plan.block_size, half=half_kv)
    cache = BatchedPagedKVCache.of_plan(config, plan, dtype=dtype, device=device, gather=gather, kernel_pool=pool)
    limits = {"max_positions": plan.max_model_len, "max_batch_size": plan.max_batch_size}
    forward = KernelBackend(config, weights, **limits, half_weights=half_weights, threads=threads)
    forward.warm(cache)
    return forward, cache


def handing_over(weights: ModelWeights) -> ModelWeights:
    """The same model, but a layer's matrix leaves `weights` when it is read: whoever reads it holds it alone."""
    return replace(weights, layers=[cast(LayerWeights, _HandedOver(layer)) for layer in weights.layers])


class _HandedOver:
    """A layer that can be read once."""

    def __init__(self, layer: LayerWeights) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Tensor | None:
        tensor: Tensor | None = getattr(self._layer, name)
        if name in MATRICES:
            if tensor is None:
                raise RuntimeError(f"{name}: this layer's matrix was handed over already")
            setattr(self._layer, name, None)
        return tensor


def why_no_kernels(*, dtype: torch.dtype, device: torch.device | str, block_size: int) -> str:
    """What stands in the kernels' way, as the end of a sentence; empty when nothing does."""
    if dtype != torch.float32:
        return f"needs dtype float32, not {str(dtype).removeprefix('torch.')}"
    if torch.device(device).type != "cpu":
        return f"needs a CPU, not {device}"
    if block_size % KERNEL_LANES:
        return f"needs a block_size that is a multiple of {KERNEL_LANES}, not {block_size}"
    return ""


def compiled_before() -> bool:
    """Whether compiled kernels of these very sources lie on disk; a start without them takes half a minute more."""
    import numba

    import fast.kernels  # noqa: F401  it names the folder

    return any(Path(numba.config.CACHE_DIR).glob("**/*.nbi"))  # type: ignore[attr-defined]


def facts_of(forward: AnyForward) -> dict[str, Any]:
    """What a forward is and what it promises, as plain values for `/health`."""
    if isinstance(forward, (KernelBackend, GPUForward)):
        return forward.facts()
    name = str(forward.dtype).removeprefix("torch.")
    facts: dict[str, Any] = {"name": "torch", "weights": name, "weight_bytes": forward.weight_bytes, "kv": name}
    facts["threads"] = torch.get_num_threads()
    return facts | {"schedule_invariant": False, "reason": BY_ROW_COUNT}


def default_threads() -> int:
    """Torch's own number of threads (`OMP_NUM_THREADS` sets it), and no more than there are physical cores."""
    return max(1, min(torch.get_num_threads(), physical_cores()))


def physical_cores() -> int:
    """Cores that this process may run on, a core's hardware threads counted once."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = set()
    for cpu in cpus:
        siblings = TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    return len(cores)
