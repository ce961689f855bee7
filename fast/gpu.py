"""The forward pass on the Triton kernels: fused weights, fixed buffers, seven launches and four products a layer.

Prefill chunks and decode rows are flat lists of tokens, each with a position and a slot; only attention differs. Every
number is written into a buffer that is allocated once, so a recording finds what it was made over, and a step takes
nothing from the device's allocator. Products are the library's, or, when `invariant`, a kernel whose rows do not know
each other; then a request's logits keep their bits under every schedule. The same source runs on a CPU under
`TRITON_INTERPRET=1`. It knows slots and positions, and neither rows nor requests.

Gates: gates.gpu. Proof: tests/test_gpu.py. Story: gpu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from fast.cache import BatchedPagedKVCache
from fast.device_sampling import DRAWN_BYTES, DRAWN_ROWS
from fast.gpu_tasks import TASK_FIELDS, checked_tasks
from fast.inputs import DecodeInputs
from fast.model import Chunk, Fused, OnLogits, PlainLinear, rope_tables, slices, weight_bytes
from fast.plan import DecodePlan
from fast.slots import stage
from fast.warmup import warmup_plan
from gates.capture import check_pool_budget
from gates.gpu import check_allocator_at_rest, check_nothing_compiled
from reference.config import ModelConfig
from reference.weights import ModelWeights

if TYPE_CHECKING:
    from fast.kernels.gpu.decode import Partials

PREFILL_TOKENS = 2048  # a longer prefill goes through all layers in parts of so many tokens
PROGRAMS_PER_PROCESSOR = 4  # of a decode's attention, over all rows and heads: enough to keep loads in flight
SMALL_BYTES = 512 << 10  # what the device's allocator serves from its small blocks
ROWS_ALONE = "each row of each sum has an order of its own"
BY_ROW_COUNT = "the library's matrix products choose their order of sums by the number of rows"
Piece = tuple[int, Chunk, int, int]  # (chunk index, chunk, first token of it, one past its last)


@dataclass(frozen=True, slots=True)
class Buffers:
    """Where T tokens' numbers lie between two kernels; M hidden, F feed-forward."""

    hidden: Tensor  # [T, M]
    normed: Tensor  # [T, M]
    delta: Tensor  # [T, M]: what the residual sum still lacks
    qkv: Tensor  # [T, (H + 2K) * D]
    q: Tensor  # [T, H, D]
    attended: Tensor  # [T, H, D]
    gate_up: Tensor  # [T, 2F]
    gated: Tensor  # [T, F]

    @classmethod
    def empty(cls, config: ModelConfig, tokens: int, *, dtype: torch.dtype, device: torch.device) -> Buffers:
        """Room for `tokens` tokens."""
        heads, dim, hidden, wide = config.num_heads, config.head_dim, config.hidden_size, config.intermediate_size
        both = heads + 2 * config.num_kv_heads
        shapes = [(hidden,)] * 3 + [(both * dim,)] + [(heads, dim)] * 2 + [(2 * wide,), (wide,)]
        return cls(*(torch.zeros(tokens, *shape, dtype=dtype, device=device) for shape in shapes))

    def first(self, tokens: int) -> Buffers:
        """Views of the first `tokens` tokens."""
        return Buffers(*(getattr(self, name)[:tokens] for name in self.__slots__))


Attend = Callable[[int, Buffers], None]  # (layer, buffers): attended from q


@dataclass(frozen=True, slots=True)
class Workspace:
    """Everything on the device that is neither weights nor K/V, for the life of the process."""

    buffers: Buffers
    partials: Partials
    # Logits of a prefill outlive the decode of the same step, so each has its own.
    prefill_logits: Tensor  # [R, V]
    decode_logits: Tensor  # [R, V]
    integers: Tensor  # a part's token ids, positions, write slots and tasks, and the slots of all that it reads

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it; a workspace on the device `meta` has them without taking any."""
        tensors = [getattr(self.buffers, name) for name in Buffers.__slots__]
        tensors += [self.prefill_logits, self.decode_logits, self.integers]
        return self.partials.num_bytes + sum(x.numel() * x.element_size() for x in tensors)


class GPUForward:
    """A model on the Triton kernels. `warm` compiles them all; after `settle`, nothing is compiled or allocated.

    Raises:
        GateError: the workspace does not fit what weights and pool leave of the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        max_batch_size: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device | str,
        invariant: bool = False,
    ) -> None:
        from fast.kernels.gpu.attend import split_tokens

        self.config, self.dtype, self.device, self.invariant = config, dtype, torch.device(device), invariant
        self.scale = config.head_dim**-0.5
        self.weight_bytes = weight_bytes(config, dtype)
        held = Fused.of(weights, dtype=dtype, device=self.device, linear=PlainLinear)
        self.embedding, self.layers, self.final_norm, self.lm_head = held.embedding, held.layers, held.norm, held.head
        self.cos, self.sin = rope_tables(config, max_model_len, torch.float32, self.device)  # [P, D/2]
        self.max_batch_size, self.tokens = max_batch_size, max(max_batch_size, PREFILL_TOKENS)
        self._split = split_tokens(max_model_len)
        self._work = self._workspace(max_model_len, torch.device("meta"))
        if self.device.type == "cuda":  # weights and pool are there: what is left has to do
            budget, shape = torch.cuda.mem_get_info(self.device)[0], (max_batch_size, max_model_len)
            check_pool_budget(needed=self._work.num_bytes + self._drawing_bytes, budget=budget, shape=shape)
        self._work = self._workspace(max_model_len, self.device)
        self.compiles_after_ready = 0
        self._compiled: int | None = None  # kernels there were when `warm` ended
        self._reserved: int | None = None  # bytes the allocator held at `settle`

    def warm(self, cache: BatchedPagedKVCache) -> None:
        """Compile, or load from disk, every kernel: a decode and a prefill of nothing but padding."""
        self._compiled = None
        inputs = DecodeInputs(max_batch_size=1, sink_slot=cache.sink_slot, device=self.device)
        self.decode(warmup_plan((1, 1), slot_table=cache.slot_table, inputs=inputs), cache)
        self.prefill([Chunk(0, (0,), (cache.sink_slot,))], cache)
        self._compiled = compiled_kernels()

    def settle(self) -> None:
        """All that will ever be allocated is: from here on a client waits for every step."""
        if self.device.type == "cuda":
            # Room for what a step copies and draws, in both of the allocator's sizes, taken and given back.
            sizes = [SMALL_BYTES] * 64 + [self._drawing_bytes]
            room = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
            torch.cuda.synchronize(self.device)
            del room
            self._reserved = torch.cuda.memory_reserved(self.device)

    @torch.inference_mode()
    def prefill(
        self, chunks: Sequence[Chunk], cache: BatchedPagedKVCache, on_logits: OnLogits | None = None
    ) -> Tensor:  # [C, V]
        """As `Forward.prefill`; the logits are a buffer's, good until the next prefill."""
        if not 1 <= len(chunks) <= self.max_batch_size:
            raise ValueError(f"chunks: {len(chunks)} is not in 1..{self.max_batch_size}")
        logits = self._work.prefill_logits[: len(chunks)]
        for part in parts_of(chunks, self.tokens):
            b = self._prefill_part(part, cache, logits)
            if on_logits is not None:
                self._tell(part, b, on_logits)
        self._check()
        return logits

    @torch.inference_mode()
    def decode(self, plan: DecodePlan, cache: BatchedPagedKVCache) -> Tensor:  # [N, V]
        """As `Forward.decode`; the logits are a buffer's, good until the next decode."""
        from fast.kernels.gpu.decode import Partials, paged_decode

        rows, config = plan.input_ids.shape[0], self.config
        kept = self._work.partials
        partials = Partials(kept.acc[:rows], kept.peaks[:rows], kept.totals[:rows])
        how = {"split": self._split, "programs": self._programs(rows), "scale": self.scale}

        def attend(layer: int, b: Buffers) -> None:
            pools = cache.k[layer], cache.v[layer]
            paged_decode(b.q, *pools, plan.slot_mapping, plan.context_lens, b.attended, partials, **how)

        b = self._layers(plan.input_ids, plan.positions, plan.write_slots, cache, attend)
        logits = self._logits(b.hidden, b.delta, b.normed, self._work.decode_logits[:rows], config.rms_norm_eps)
        self._check()
        return logits

    def facts(self) -> dict[str, Any]:
        """What runs and what it promises, as plain values."""
        name = str(self.dtype).removeprefix("torch.")
        products = "row-invariant kernel" if self.invariant else "library"
        return {
            "name": "triton",
            "device": str(self.device),
            "weights": name,
            "weight_bytes": self.weight_bytes,
            "kv": name,
            "products": products,
            "threads": torch.get_num_threads(),
            "workspace_bytes": self.workspace_bytes,
            "schedule_invariant": self.invariant,
            "reason": ROWS_ALONE if self.invariant else BY_ROW_COUNT,
        }

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace."""
        return self._work.num_bytes

    @property
    def _drawing_bytes(self) -> int:
        return max(64 << 20, DRAWN_BYTES * min(DRAWN_ROWS, self.max_batch_size) * self.config.vocab_size)

    def _workspace(self, max_model_len: int, device: torch.device) -> Workspace:
        from fast.kernels.gpu.decode import Partials

        config, rows = self.config, self.max_batch_size
        sizes = {"heads": config.num_heads, "dim": config.head_dim, "splits": -(-max_model_len // self._split)}
        logits = (rows, config.vocab_size)
        return Workspace(
            Buffers.empty(config, self.tokens, dtype=self.dtype, device=device),
            Partials.empty(rows=rows, **sizes, device=device),
            torch.zeros(logits, dtype=self.dtype, device=device),
            torch.zeros(logits, dtype=self.dtype, device=device),
            torch.zeros(7 * self.tokens + rows * max_model_len, dtype=torch.int64, device=device),
        )

    def _prefill_part(self, part: Sequence[Piece], cache: BatchedPagedKVCache, logits: Tensor) -> Buffers:
        """A part's tokens through all layers, which it returns; logits [C, V] of those chunks that end in it."""
        from fast.kernels.gpu.prefill import paged_prefill, query_tile

        config, dims = self.config, [stop - start for _, _, start, stop in part]
        tile = query_tile(self.dtype, invariant=self.invariant)
        ids = np.concatenate([chunk.token_ids[start:stop] for _, chunk, start, stop in part])
        positions = np.concatenate([np.arange(c.start + start, c.start + stop) for _, c, start, stop in part])
        tables = [np.array(chunk.slots[: chunk.start + stop], np.int64) for _, chunk, _, stop in part]
        writes = np.concatenate([table[-count:] for table, count in zip(tables, dims, strict=True)])
        bases = np.cumsum([0, *(len(table) for table in tables)])[:-1]
        runs = [(c.start + start, n, int(at)) for (_, c, start, _), n, at in zip(part, dims, bases, strict=True)]
        tasks = checked_tasks(runs, group=config.num_heads // config.num_kv_heads, tile=tile)
        after = np.cumsum(dims)
        ends = [(i, n - 1) for (i, c, _, stop), n in zip(part, after, strict=True) if stop == len(c.token_ids)]
        last = np.array(ends, np.int64).reshape(-1, 2).T
        sent = self._send([ids, positions, writes, tasks.reshape(-1), *last, np.concatenate(tables)])
        how = {"split": self._split, "tile": tile, "scale": self.scale}

        def attend(layer: int, b: Buffers) -> None:
            pools = cache.k[layer], cache.v[layer]
            paged_prefill(b.q, *pools, sent[6], sent[3].view(-1, TASK_FIELDS), b.attended, **how)

        b = self._layers(sent[0], sent[1], sent[2], cache, attend)
        if ends:
            hidden, delta = b.hidden[sent[5]], b.delta[sent[5]]
            ended = torch.empty(len(ends), logits.shape[1], dtype=self.dtype, device=self.device)
            logits[sent[4]] = self._logits(hidden, delta, torch.empty_like(hidden), ended, config.rms_norm_eps)
        return b

    def _tell(self, part: Sequence[Piece], b: Buffers, on_logits: OnLogits) -> None:
        """The logits that somebody reads, some rows at a time through the decode's buffer, which is free until then."""
        at, eps = 0, self.config.rms_norm_eps
        for index, chunk, start, stop in part:
            first, end = chunk.told
            for one, past in slices(max(first, start), min(end, stop), most=self.max_batch_size):
                rows = slice(at + one - start, at + past - start)
                out = self._work.decode_logits[: past - one]
                on_logits(index, one, self._logits(b.hidden[rows], b.delta[rows], b.normed[rows], out, eps))
            at += stop - start

    def _send(self, columns: Sequence[np.ndarray]) -> list[Tensor]:  # each [n] int64
        """Host integers to the device in one copy, each column as a view of the buffer they share."""
        whole = self._work.integers[: sum(len(column) for column in columns)]
        whole.copy_(stage(np.concatenate(columns), self.device))
        return list(whole.split([len(column) for column in columns]))

    def _layers(
        self,
        input_ids: Tensor,  # [T]
        positions: Tensor,  # [T]
        slots: Tensor,  # [T]
        cache: BatchedPagedKVCache,
        attend: Attend,
    ) -> Buffers:
        """Every layer over T tokens; what is left is `hidden`, and the last `delta` to be added to it."""
        from fast.kernels.gpu.rope import rotate_and_write
        from fast.kernels.gpu.rowwise import add_and_norm, gate

        b, eps = self._work.buffers.first(input_ids.shape[0]), self.config.rms_norm_eps
        torch.index_select(self.embedding, 0, input_ids, out=b.hidden)
        delta = None
        for index, layer in enumerate(self.layers):
            add_and_norm(b.hidden, delta, layer.input_norm, b.normed, eps=eps)
            self._product(b.normed, layer.qkv, b.qkv)
            norms: dict[str, Any] = {"q_norm": layer.q_norm, "k_norm": layer.k_norm, "eps": eps}
            pools = cache.k[index], cache.v[index]
            # Written before it is read: a token attends to itself, and to earlier chunks, through the pool alone.
            rotate_and_write(b.qkv, positions, slots, self.cos, self.sin, b.q, *pools, **norms)
            attend(index, b)
            self._product(b.attended.flatten(1), layer.output, b.delta)
            delta = b.delta
            add_and_norm(b.hidden, delta, layer.post_norm, b.normed, eps=eps)
            self._product(b.normed, layer.gate_up, b.gate_up)
            gate(b.gate_up, b.gated)
            self._product(b.gated, layer.down, b.delta)
        return b

    def _logits(self, hidden: Tensor, delta: Tensor, normed: Tensor, out: Tensor, eps: float) -> Tensor:
        """[N, V] in `out` from hidden and delta [N, M], which are added."""
        from fast.kernels.gpu.rowwise import add_and_norm

        return self._product(add_and_norm(hidden, delta, self.final_norm, normed, eps=eps), self.lm_head, out)

    def _product(self, x: Tensor, linear: Any, out: Tensor) -> Tensor:  # [T, in] -> [T, out]
        from fast.kernels.gpu.matmul import matmul

        weight, bias = cast(PlainLinear, linear).weight, cast(PlainLinear, linear).bias
        if self.invariant:
            return matmul(x, weight, bias, out)
        if bias is None:
            return torch.mm(x, weight.T, out=out)
        return torch.addmm(bias, x, weight.T, out=out)

    def _programs(self, rows: int) -> int:
        """Programs a row and K/V head: as many as fill the device, whatever their number does to no bit."""
        processors = 1
        if self.device.type == "cuda":
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        return -(-PROGRAMS_PER_PROCESSOR * processors // (rows * self.config.num_kv_heads))

    def _check(self) -> None:
        if self._compiled is not None:
            self.compiles_after_ready = compiled_kernels() - self._compiled
            check_nothing_compiled(compiles_after_ready=self.compiles_after_ready)
        if self._reserved is not None:
            check_allocator_at_rest(reserved=torch.cuda.memory_reserved(self.device), at_ready=self._reserved)


def parts_of(chunks: Sequence[Chunk], most: int) -> Iterator[list[Piece]]:
    """Chunks in order, cut into parts of at most `most` tokens; a chunk has at most one piece in a part."""
    part: list[Piece] = []
    room = most
    for index, chunk in enumerate(chunks):
        start, count = 0, len(chunk.token_ids)
        while start < count:
            stop = min(count, start + room)
            part.append((index, chunk, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield part
                part, room = [], most
    if part:
        yield part


def compiled_kernels() -> int:
    """Variants of the kernels that this process has compiled or loaded; 0 for ever in the interpreter."""
    from fast.kernels.gpu import decode, matmul, prefill, rope, rowwise

    launched = [decode._split_kernel, decode._combine_kernel, prefill._prefill_kernel, rope._rope_kernel]
    launched += [rowwise._norm_kernel, rowwise._gate_kernel, matmul._matmul_kernel]
    return sum(len(of_device[0]) for kernel in launched for of_device in getattr(kernel, "device_caches", {}).values())


def why_not(device: torch.device | str, dtype: torch.dtype) -> str:
    """What stands in the way of the Triton kernels, as the end of a sentence; empty when nothing does."""
    try:
        from fast.kernels.gpu import INTERPRETED
    except ImportError:
        return "needs triton, which is not installed (it exists for Linux)"
    if torch.device(device).type != "cuda" and not INTERPRETED:
        return f"needs a CUDA device, not {device} (TRITON_INTERPRET=1 runs the kernels on a CPU, slowly)"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"needs dtype float32, float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    return ""
