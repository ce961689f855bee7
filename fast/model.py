"""The forward pass of the fast engine: fused weights, flat tokens, K/V written to the pool before it is read.

A prefill runs over one flat list of tokens, chunk after chunk without padding; a decode runs over a `DecodePlan`.
Both share every line but attention: a chunk reads its own sequence's slots, so a prompt that starts in the middle
(its first part computed earlier) is no special case. Linear layers are made by one callable, so another backend can
take their place. It knows rows only as slots and positions.

Gates: gates.blocks. Proof: tests/test_fast_engine.py. Story: attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fast.attention import decode_attention, prefill_attention
from fast.cache import BatchedPagedKVCache
from fast.plan import DecodePlan
from reference.config import ModelConfig
from reference.weights import LayerWeights, ModelWeights, model_shapes

Linear = Callable[[Tensor], Tensor]  # [T, in] -> [T, out]
Attend = Callable[[int, Tensor], Tensor]  # (layer, q [T, H, D]) -> [T, H, D]
# Told of logits [S, V] in a buffer: (chunk index, the first of S tokens of that chunk, the logits after each of them).
OnLogits = Callable[[int, int, Tensor], None]
SLICE_ROWS = 64  # rows of a chunk's logits that are there at a time


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """The linear layer as torch has it; its tensors stay readable, so a compiler can take them as arguments."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out]
        """x times the weight's transpose, plus the bias."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start..start+len-1 of one sequence, to be computed in one go; `slots` covers every token up to there."""

    start: int
    token_ids: tuple[int, ...]
    slots: tuple[int, ...]
    told: tuple[int, int] = (0, 0)  # first and one past the last of the tokens, from 0, whose logits somebody reads

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.slots) != self.start + len(self.token_ids):
            raise ValueError(f"chunk: {len(self.token_ids)} tokens from {self.start}, {len(self.slots)} slots")


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block, q/k/v and gate/up fused. M hidden, F feed-forward, H and K heads of size D."""

    input_norm: Tensor  # [M]
    qkv: Linear  # M -> (H + 2K) * D
    output: Linear  # H * D -> M
    post_norm: Tensor  # [M]
    gate_up: Linear  # M -> 2F
    down: Linear  # F -> M
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]


@dataclass(frozen=True, slots=True)
class Fused:
    """A model's weights in the form that a step reads, cast once."""

    embedding: Tensor  # [V, M]
    layers: list[Layer]
    norm: Tensor  # [M]
    head: Linear  # M -> V; the embedding itself where the two are tied

    @classmethod
    def of(
        cls,
        weights: ModelWeights,
        *,
        dtype: torch.dtype,
        device: torch.device,
        linear: Callable[[Tensor, Tensor | None], Linear],
    ) -> Fused:
        """Layer by layer, so that weights that are handed over are in memory once."""
        embedding = weights.embedding.to(device, dtype)
        layers = [_fuse(layer, dtype, device, linear) for layer in weights.layers]
        norm = weights.final_norm.to(device, dtype)
        tied = weights.lm_head is weights.embedding
        return cls(embedding, layers, norm, linear(embedding if tied else weights.lm_head.to(device, dtype), None))


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a model's weights in `dtype`."""
    return sum(math.prod(shape) for shape in model_shapes(config).values()) * dtype.itemsize


class Forward:
    """A model ready to run: weights cast once to `dtype`, RoPE tables made once for `max_positions` positions."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        max_positions: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        linear: Callable[[Tensor, Tensor | None], Linear] = PlainLinear,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.scale = config.head_dim**-0.5
        self.weight_bytes = weight_bytes(config, dtype)
        held = Fused.of(weights, dtype=dtype, device=self.device, linear=linear)
        self.embedding, self.layers, self.final_norm, self.lm_head = held.embedding, held.layers, held.norm, held.head
        self.cos, self.sin = rope_tables(config, max_positions, dtype, self.device)  # [max_positions, D/2]

    @torch.inference_mode()
    def prefill(
        self, chunks: list[Chunk], cache: BatchedPagedKVCache, on_logits: OnLogits | None = None
    ) -> Tensor:  # [C, V]
        """Compute C chunks of C sequences; returns the logits after each chunk's last token.

        `on_logits` is told of those after the tokens that a chunk's `told` names, `SLICE_ROWS` of them at a time.
        """
        lengths = [len(chunk.token_ids) for chunk in chunks]
        input_ids = self._ids([token for chunk in chunks for token in chunk.token_ids])
        positions = self._ids([chunk.start + i for chunk, n in zip(chunks, lengths, strict=True) for i in range(n)])
        reads = [self._ids(chunk.slots) for chunk in chunks]
        writes = torch.cat([slots[chunk.start :] for chunk, slots in zip(chunks, reads, strict=True)])

        def attend(layer: int, q: Tensor) -> Tensor:
            parts = zip(q.split(lengths), reads, strict=True)
            pools = cache.k[layer], cache.v[layer]
            return torch.cat([prefill_attention(part, *pools, slots, self.scale) for part, slots in parts])

        hidden = self._layers(input_ids, positions, writes, cache, attend)
        if on_logits is not None:
            for index, (chunk, own) in enumerate(zip(chunks, hidden.split(lengths), strict=True)):
                for first, stop in slices(*chunk.told, most=SLICE_ROWS):
                    on_logits(index, first, self._logits(own[first:stop]))
        last = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        return self._logits(hidden[last])

    @torch.inference_mode()
    def decode(self, plan: DecodePlan, cache: BatchedPagedKVCache) -> Tensor:  # [N, V]
        """One token for each of the plan's N rows; a padded row's logits are finite and mean nothing."""

        def attend(layer: int, q: Tensor) -> Tensor:
            pools = cache.k[layer], cache.v[layer]
            return decode_attention(q, *pools, plan.slot_mapping, plan.context_lens, self.scale)

        return self._logits(self._layers(plan.input_ids, plan.positions, plan.write_slots, cache, attend))

    def _layers(
        self,
        input_ids: Tensor,  # [T]
        positions: Tensor,  # [T]
        writes: Tensor,  # [T]
        cache: BatchedPagedKVCache,
        attend: Attend,
    ) -> Tensor:  # [T, M]
        config = self.config
        cos, sin = self.rope(positions)
        hidden = self.embedding[input_ids]
        for index, layer in enumerate(self.layers):
            q, k, v = attention_inputs(
                hidden,
                cos,
                sin,
                norm=layer.input_norm,
                qkv=layer.qkv,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                config=config,
            )
            # Written before it is read: a token attends to itself, and to earlier chunks, through the pool alone.
            cache.write(index, k, v, writes)
            hidden = layer_output(
                hidden,
                attend(index, q),
                output=layer.output,
                norm=layer.post_norm,
                gate_up=layer.gate_up,
                down=layer.down,
                eps=config.rms_norm_eps,
            )
        return hidden

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:  # [T] -> [T, 1, D/2] each
        """Cosine and sine of T positions, with a dimension for the heads."""
        return self.cos[positions][:, None, :], self.sin[positions][:, None, :]

    def _logits(self, hidden: Tensor) -> Tensor:  # [T, M] -> [T, V]
        return self.lm_head(rms_norm(hidden, self.final_norm, self.config.rms_norm_eps))

    def _ids(self, values: list[int] | tuple[int, ...]) -> Tensor:  # [n]
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def slices(start: int, stop: int, *, most: int) -> Iterator[tuple[int, int]]:
    """start..stop-1 in order, cut into (first, one past the last) of at most `most` each."""
    for first in range(start, stop, most):
        yield first, min(first + most, stop)


def attention_inputs(
    hidden: Tensor,  # [T, M]
    cos: Tensor,  # [T, 1, D/2]
    sin: Tensor,  # [T, 1, D/2]
    *,
    norm: Tensor,  # [M]
    qkv: Linear,  # M -> (H + 2K) * D
    q_norm: Tensor | None,  # [D]
    k_norm: Tensor | None,  # [D]
    config: ModelConfig,
) -> tuple[Tensor, Tensor, Tensor]:  # [T, H, D], [T, K, D], [T, K, D]
    """A layer up to its attention, pure: q and k normed and turned, v as it is."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused = qkv(rms_norm(hidden, norm, config.rms_norm_eps))
    q, k, v = (x.unflatten(-1, (-1, config.head_dim)) for x in fused.split([q_size, kv_size, kv_size], dim=-1))
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, config.rms_norm_eps), rms_norm(k, k_norm, config.rms_norm_eps)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def layer_output(
    hidden: Tensor,  # [T, M]
    attended: Tensor,  # [T, H, D]
    *,
    output: Linear,  # H * D -> M
    norm: Tensor,  # [M]
    gate_up: Linear,  # M -> 2F
    down: Linear,  # F -> M
    eps: float,
) -> Tensor:  # [T, M]
    """A layer from its attention on, pure: output projection, then the gated feed-forward."""
    hidden = hidden + output(attended.flatten(1))
    gate, up = gate_up(rms_norm(hidden, norm, eps)).chunk(2, dim=-1)
    return hidden + down(F.silu(gate) * up)


def rms_norm(
    x: Tensor,  # [..., M]
    weight: Tensor,  # [M]
    eps: float,
) -> Tensor:  # [..., M]
    """RMSNorm (Zhang and Sennrich 2019), the mean taken in at least float32."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def _fuse(
    layer: LayerWeights,
    dtype: torch.dtype,
    device: torch.device,
    linear: Callable[[Tensor, Tensor | None], Linear],
) -> Layer:
    def cast(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device, dtype)

    def fused(weights: list[Tensor], biases: list[Tensor | None]) -> Linear:
        # Families give a fused group all of its biases or none.
        present = [bias for bias in biases if bias is not None]
        bias = torch.cat(present).to(device, dtype) if present else None
        return linear(torch.cat(weights).to(device, dtype), bias)

    return Layer(
        input_norm=layer.input_norm.to(device, dtype),
        qkv=fused([layer.q, layer.k, layer.v], [layer.q_bias, layer.k_bias, layer.v_bias]),
        output=fused([layer.output], [layer.output_bias]),
        post_norm=layer.post_norm.to(device, dtype),
        gate_up=fused([layer.gate, layer.up], [layer.gate_bias, layer.up_bias]),
        down=fused([layer.down], [layer.down_bias]),
        q_norm=cast(layer.q_norm),
        k_norm=cast(layer.k_norm),
    )


def rope_tables(
    config: ModelConfig, max_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:  # [max_positions, D/2] each
    """Cosine and sine of position times frequency (Su et al. 2021), in float32 throughout, then cast.

    Checkpoints are trained on float32 angles, so their rounding is part of the model: at position 4000 a frequency
    that is "better" by 6e-8 has turned 2e-4 radians too far.
    """
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * _frequencies(config)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _frequencies(config: ModelConfig) -> Tensor:  # [D/2] float32
    """Radians a token turns each pair; `rope_type: llama3` divides the slow ones and blends those between."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    turns = scaling.original_max_positions / (2 * math.pi / plain)  # full turns within the original context
    band = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / band).clamp(0.0, 1.0)  # 1: fast enough to be left alone
    return (1.0 - kept) * plain / scaling.factor + kept * plain


def _rotate(
    x: Tensor,  # [T, H, D]
    cos: Tensor,  # [T, 1, D/2]
    sin: Tensor,  # [T, 1, D/2]
) -> Tensor:  # [T, H, D]
    """Turn each pair (i, i + D/2) by its angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
