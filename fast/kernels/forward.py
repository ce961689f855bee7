"""The forward pass on compiled CPU kernels: packed weights, fixed buffers, and a handful of calls a layer.

Prefill chunks and decode rows are the same thing here: tokens of several sequences, flat, each with a position and
a slot. Every kernel gives a token the same bits whatever runs beside it, so logits cannot depend on batch size, row,
neighbours, padding, chunk size, thread count, or on whether a token came by prefill or by decode. It knows slots
and positions, and neither rows nor requests.

Gates: gates.linear. Proof: tests/test_kernels.py. Story: kernels.
"""

# numba compiles its functions by the arguments they are called with; their shapes are in the docstrings.
# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fast.kernels.attention import GROUP_SIZES, attention
from fast.kernels.draw import draw
from fast.kernels.kernel import kernel
from fast.kernels.linear import ADD, PANEL, PLAIN, STRIP, SWIGLU, Packed, interleave, linear, pack
from fast.kernels.norm import norm
from fast.kernels.pool import KernelPool
from fast.kernels.rope import rotate_and_write
from fast.kernels.team import Team, claim, close
from fast.kernels.vector import LANES
from fast.model import Chunk, OnLogits, rope_tables, slices
from fast.plan import DecodePlan
from fast.sampling import Work
from reference.config import ModelConfig
from reference.weights import LayerWeights, ModelWeights

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

TOKENS_AT_ONCE = 20 * STRIP  # a longer prefill goes through all layers in parts of so many tokens
MOST_GROUPS = 8  # of queries in a task of attention: they share the trip of the keys from memory
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class _Weights:
    """All layers of one role in one array, packed; a bias is empty where the model has none."""

    input_norm: Floats  # [L, M']
    qkv: Packed  # [L, P, M', 32]
    qkv_bias: Floats  # [L, 32 P or 0]
    output: Packed  # [L, P, H * D, 32]
    output_bias: Floats  # [L, 32 P or 0]
    post_norm: Floats  # [L, M']
    gate_up: Packed  # [L, P, M', 32]
    gate_up_bias: Floats  # [L, 32 P or 0]
    down: Packed  # [L, P, F', 32]
    down_bias: Floats  # [L, 32 P or 0]
    q_norm: Floats  # [L, D' or 0]
    k_norm: Floats  # [L, D' or 0]


class KernelForward:
    """A model ready to run on the CPU kernels. `half` packs linear weights as halves, which rounds them once.

    `threads` is the one knob: every call runs on so many, whichever thread it comes from.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        max_positions: int,
        max_batch_size: int,
        threads: int,
        half: bool = True,
    ) -> None:
        self.config = config
        self.threads = threads
        self._team = Team(threads)
        self.dtype, self.device = torch.float32, torch.device("cpu")
        hidden, dim = config.hidden_size, config.head_dim
        self._width = _round_up(hidden, PANEL)
        self._weights = _pack_layers(config, weights.layers, half)
        self._final_norm = _padded(_floats(weights.final_norm), self._width)
        self._head = _pack_head(weights.lm_head, self._width, half=half)
        # A tied embedding is read from the packed head, so that it is in memory once.
        tied, half_embedding = weights.lm_head is weights.embedding, weights.embedding.dtype == torch.float16
        self._embedding = None if tied else weights.embedding if half_embedding else weights.embedding.float()
        cos, sin = rope_tables(config, max_positions, torch.float32, self.device)
        self._cos, self._sin = cos.numpy(), sin.numpy()
        self._scale = np.float32(dim**-0.5 * _LOG2_E)
        tokens = max(TOKENS_AT_ONCE, _round_up(max_batch_size, STRIP))
        qkv = self._weights.qkv.shape[1] * PANEL
        self._hidden = np.zeros((tokens, self._width), np.float32)
        self._qkv = np.zeros((tokens, qkv), np.float32)
        self._q = np.zeros((tokens, config.num_heads * dim), np.float32)
        # One buffer of strips serves a layer's three kinds of input in turn, another the SwiGLU's output.
        self._strips = np.zeros((tokens, max(self._width, config.num_heads * dim)), np.float32)
        self._wide = np.zeros((tokens, self._weights.down.shape[2]), np.float32)
        # Logits of a prefill outlive the decode of the same step, so each has its own.
        logits = (max_batch_size, self._head.shape[0] * PANEL)
        self._prefill_logits, self._decode_logits = np.zeros(logits, np.float32), np.zeros(logits, np.float32)

    @property
    def num_bytes(self) -> int:
        """Bytes of packed weights, and of the embedding where it is not the head."""
        packed = [getattr(self._weights, name).nbytes for name in _Weights.__slots__]
        return sum(packed) + self._head.nbytes + (0 if self._embedding is None else self._embedding.nbytes)

    def prefill(self, chunks: Sequence[Chunk], pool: KernelPool, on_logits: OnLogits | None = None) -> Tensor:  # [C, V]
        """Compute C chunks of C sequences; returns the logits after each chunk's last token.

        `on_logits` is told of those that `Chunk.told` names, as many at a time as this buffer of logits has rows.
        """
        logits = self._prefill_logits
        if len(chunks) > len(logits):
            raise ValueError(f"chunks: {len(chunks)} is not in 1..{len(logits)}")
        last = np.zeros((len(chunks), self._width), np.float32)
        for part in _parts(chunks, len(self._hidden)):
            runs = np.array([[at, stop - start, chunk.start + start] for at, _, chunk, start, stop in part], np.int64)
            ids = np.concatenate([chunk.token_ids[start:stop] for _, _, chunk, start, stop in part])
            slots = [np.array(chunk.slots[: chunk.start + stop], np.int64) for _, _, chunk, _, stop in part]
            positions = np.concatenate([np.arange(p, p + n) for _, n, p in runs.tolist()])
            writes = np.concatenate([s[p:] for s, p in zip(slots, runs[:, 2], strict=True)])
            groups = np.zeros((len(part), max(-(-len(s) // LANES) for s in slots)), np.int64)
            for row, s in zip(groups, slots, strict=True):
                row[: -(-len(s) // LANES)] = s[::LANES]
            self._run(ids, positions, writes, groups, runs, pool)
            for at, index, chunk, start, stop in part:
                if stop == len(chunk.token_ids):
                    last[index] = self._hidden[at + stop - start - 1]
                if on_logits is not None:
                    first, end = chunk.told
                    for one, past in slices(max(first, start), min(end, stop), most=len(logits)):
                        on_logits(index, one, self._logits(self._hidden[at + one - start : at + past - start], logits))
        return self._logits(last, logits)

    def decode(self, plan: DecodePlan, pool: KernelPool) -> Tensor:  # [N, V]
        """One token for each of the plan's N rows; a padded row's logits are finite and mean nothing."""
        rows = plan.input_ids.shape[0]
        if rows > len(self._decode_logits):
            raise ValueError(f"rows: {rows} is not in 1..{len(self._decode_logits)}")
        lens, positions = plan.context_lens.numpy(), plan.positions.numpy()
        runs = np.stack([np.arange(rows), (lens > 0).astype(np.int64), positions], axis=1)
        # What lies past the longest row is never read, so a wide plan costs what its longest row does.
        groups = np.ascontiguousarray(plan.slot_mapping.numpy()[:, : max(1, int(lens.max())) : LANES])
        self._run(plan.input_ids.numpy(), positions, plan.write_slots.numpy(), groups, runs, pool)
        return self._logits(self._hidden[:rows], self._decode_logits)

    def draw(self, logits: Tensor, work: Work) -> tuple[Ints, Ints]:  # [R, V] -> [n], [n]
        """Tokens of n rows with work of their own, and how many ids each was drawn from."""
        flat, stride = _flat(logits)
        n = work.picked.size
        tokens, kept = np.empty(n, np.int64), np.empty(n, np.int64)
        self._team.run(
            draw, flat, stride, logits.shape[1], work.picked, work.temperature, work.min_p, work.top_k, work.top_p,
            work.u, work.bounds, work.ids, work.scores, work.mask_of, work.masks, tokens, kept,
        )  # fmt: skip
        return tokens, kept

    def _run(self, ids: Ints, positions: Ints, writes: Ints, groups: Ints, runs: Ints, pool: KernelPool) -> None:
        """Every layer over T tokens; leaves their hidden states in the first T rows of `_hidden`."""
        config, w = self.config, self._weights
        self._embed(ids)
        tasks = plan_tasks(runs, heads=config.num_heads, kv_heads=config.num_kv_heads, threads=self.threads)
        self._team.run(
            _layers,
            self._hidden, self._qkv, self._q, self._strips, self._wide, len(ids),
            w.input_norm, w.qkv, w.qkv_bias, w.output, w.output_bias,
            w.post_norm, w.gate_up, w.gate_up_bias, w.down, w.down_bias, w.q_norm, w.k_norm,
            self._cos, self._sin, self._scale, np.float32(config.rms_norm_eps), config.hidden_size,
            positions, writes, groups, runs, tasks, pool.k, pool.v, not bool(runs[:, 1].all()),
        )  # fmt: skip

    def _embed(self, ids: Ints) -> None:
        """The first T rows of `_hidden` = embeddings of T tokens."""
        if self._embedding is None:
            panels = self._head.view(np.float16) if self._head.dtype == np.uint16 else self._head
            self._hidden[: len(ids)] = panels[ids // PANEL, :, ids % PANEL]
        else:
            rows = self._embedding.index_select(0, torch.from_numpy(ids))
            self._hidden[: len(ids), : self.config.hidden_size] = rows.float().numpy()

    def _logits(self, hidden: Floats, logits: Floats) -> Tensor:  # [R, M'] -> [R, V]
        rows = len(hidden)
        epsilon = np.float32(self.config.rms_norm_eps)
        self._team.run(
            _head, hidden, self._final_norm, epsilon, self.config.hidden_size, self._strips, rows, self._head, logits
        )
        return torch.from_numpy(logits[:rows, : self.config.vocab_size])


def _flat(logits: Tensor) -> tuple[Floats, int]:  # [R, V] -> [(R - 1) * stride + V]
    """Rows that may have a gap between them as one line of numbers, and how far apart they begin."""
    rows, stride = len(logits), logits.stride(0)
    return logits.as_strided(((rows - 1) * stride + logits.shape[1],), (1,)).numpy(), stride


def plan_tasks(runs: Ints, *, heads: int, kv_heads: int, threads: int) -> Ints:  # [C, 3] -> [N, 4]
    """Attention's work list (see `attention`), the heaviest first: what is claimed last is then soon done.

    A task is as large as leaves each thread four of them; where it is cut changes no bit.
    """
    group = heads // kv_heads
    share = int(runs[:, 1].sum()) * heads // (4 * threads)
    most = max(1, min(MOST_GROUPS, share // GROUP_SIZES[0])) * GROUP_SIZES[0]
    work = []
    for sequence, (_, tokens, start) in enumerate(runs.tolist()):
        for first in range(0, tokens * group, most):
            size = min(most, tokens * group - first)
            keys = start + (first + size - 1) // group + 1
            work += [(keys * (2 + size), sequence, first, size, head) for head in range(kv_heads)]
    work.sort(reverse=True)
    return np.array([task[1:] for task in work], np.int64).reshape(-1, 4)


@kernel
def _layers(
    words, phase, hidden, qkv_out, q, strips, wide, tokens,
    input_norm, qkv, qkv_bias, output, output_bias,
    post_norm, gate_up, gate_up_bias, down, down_bias, q_norm, k_norm,
    cos, sin, scale, epsilon, size,
    positions, writes, groups, runs, tasks, k_pool, v_pool, padded,
):  # fmt: skip
    """All layers, in place: the residual stream is `hidden`, and no other buffer outlives a layer."""
    for at in range(qkv.shape[0]):
        phase = norm(words, phase, hidden, input_norm[at], epsilon, size, strips, tokens)
        phase = linear(words, phase, strips, qkv[at], qkv_bias[at], qkv_out, tokens, PLAIN)
        phase = rotate_and_write(
            words, phase, qkv_out, positions, writes, cos, sin, scale, q_norm[at], k_norm[at], epsilon,
            k_pool[at], v_pool[at], q, tokens,
        )  # fmt: skip
        if padded:
            phase = _clear(words, phase, strips, tokens * q.shape[1])
        phase = attention(words, phase, q, k_pool[at], v_pool[at], groups, runs, tasks, strips, tokens)
        phase = linear(words, phase, strips, output[at], output_bias[at], hidden, tokens, ADD)
        phase = norm(words, phase, hidden, post_norm[at], epsilon, size, strips, tokens)
        phase = linear(words, phase, strips, gate_up[at], gate_up_bias[at], wide, tokens, SWIGLU)
        phase = linear(words, phase, wide, down[at], down_bias[at], hidden, tokens, ADD)


@kernel
def _clear(words, phase, strips, count):
    """A row that reads nothing gets zeros, not what the strips held: somebody's NaN may be among that."""
    mine = claim(words, phase, 1) + 1
    if mine:
        strips.reshape(-1)[:count] = 0.0
    return close(words, phase, 1, mine)


@kernel
def _head(words, phase, hidden, final_norm, epsilon, size, strips, rows, head, logits):
    """Logits [R, V'] of the hidden states [R, M'] of R tokens."""
    phase = norm(words, phase, hidden, final_norm, epsilon, size, strips, rows)
    linear(words, phase, strips, head, final_norm[:0], logits, rows, PLAIN)


# What Python calls; each is compiled once for the types of its arguments.
ENTRIES = (_layers, _head, draw)


def _parts(chunks: Sequence[Chunk], most: int) -> list[list[tuple[int, int, Chunk, int, int]]]:
    """Chunks cut into runs of at most `most` tokens: (first token, chunk index, chunk, start, stop) for each run."""
    parts: list[list[tuple[int, int, Chunk, int, int]]] = [[]]
    used = 0
    for index, chunk in enumerate(chunks):
        start = 0
        while start < len(chunk.token_ids):
            if used == most:
                parts.append([])
                used = 0
            stop = min(len(chunk.token_ids), start + most - used)
            parts[-1].append((used, index, chunk, start, stop))
            used += stop - start
            start = stop
    return parts


def _pack_layers(config: ModelConfig, layers: Sequence[LayerWeights], half: bool) -> _Weights:
    width, wide = _round_up(config.hidden_size, PANEL), _round_up(config.intermediate_size, LANES)

    def norms(name: str, padded: int) -> Floats:  # [L, padded or 0]
        tensors = [getattr(layer, name) for layer in layers]
        return np.stack([_padded(_floats(t), padded) if t is not None else np.zeros(0, np.float32) for t in tensors])

    def matrices(names: tuple[str, ...], inputs: int) -> Packed:  # [L, P, inputs, 32]
        fused = (np.concatenate([_floats(getattr(layer, name)) for name in names]) for layer in layers)
        return _stack((pack(_padded(weight, inputs), half=half) for weight in fused), len(layers))

    def biases(names: tuple[str, ...]) -> Floats:  # [L, 32 P or 0]
        rows = [[getattr(layer, name) for name in names] for layer in layers]
        fused = [
            np.concatenate([_floats(b) for b in row if b is not None] or [np.zeros(0, np.float32)]) for row in rows
        ]
        return np.stack([_padded(row, _round_up(row.size, PANEL)) for row in fused])

    def gate_up_bias(layer: LayerWeights) -> Floats:  # [32 P or 0]
        if layer.gate_bias is None or layer.up_bias is None:
            return np.zeros(0, np.float32)
        return interleave(_floats(layer.gate_bias)[:, None], _floats(layer.up_bias)[:, None])[:, 0]

    def gate_up(layer: LayerWeights) -> Packed:  # [P, M', 32]
        both = interleave(_floats(layer.gate), _floats(layer.up))
        return pack(_padded(both, width), half=half)

    head = _round_up(config.head_dim, LANES)
    return _Weights(
        input_norm=norms("input_norm", width),
        qkv=matrices(("q", "k", "v"), width),
        qkv_bias=biases(("q_bias", "k_bias", "v_bias")),
        output=matrices(("output",), config.num_heads * config.head_dim),
        output_bias=biases(("output_bias",)),
        post_norm=norms("post_norm", width),
        gate_up=_stack((gate_up(layer) for layer in layers), len(layers)),
        gate_up_bias=np.stack([gate_up_bias(layer) for layer in layers]),
        down=matrices(("down",), wide),
        down_bias=biases(("down_bias",)),
        q_norm=norms("q_norm", head),
        k_norm=norms("k_norm", head),
    )


def _pack_head(weight: Tensor, width: int, *, half: bool) -> Packed:  # [V, M] -> [P, M', 32]
    """The largest matrix, some thousand outputs at a time: a float32 copy of all of it would be the peak of a start."""
    parts = [weight[at : at + 256 * PANEL] for at in range(0, len(weight), 256 * PANEL)]
    return np.concatenate([pack(_padded(_floats(part), width), half=half) for part in parts])


def _stack(packed: Iterator[Packed], layers: int) -> Packed:  # L x [P, M, 32] -> [L, P, M, 32]
    """All layers in one array, one at a time: no second copy of them all."""
    first = next(packed)
    stacked: Packed = np.empty((layers, *first.shape), first.dtype)
    stacked[0] = first
    for at, one in enumerate(packed, 1):
        stacked[at] = one
    return stacked


def _floats(tensor: Tensor) -> Floats:
    return tensor.detach().to(torch.float32).contiguous().numpy()


def _padded(values: Floats, size: int) -> Floats:  # [..., n] -> [..., size]
    """Zeros up to `size` in the last dimension."""
    spare = size - values.shape[-1]
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, spare)]) if spare else values


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
