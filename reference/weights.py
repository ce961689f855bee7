"""The tensors of a model, by role, held once and in the dtype they were rounded to.

`ModelWeights` is what both engines compute from, so a lockstep test compares the same rounded numbers. This
module knows files and shapes and no arithmetic: an engine casts to its own compute dtype.

Proof: tests/test_weights.py. Story: model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from reference.config import ModelConfig


class WeightsError(ValueError):
    """Weights that are not what the config says, or cannot be read. The message names the file or the tensor."""


@dataclass(slots=True)
class LayerWeights:
    """One transformer block. M hidden size, F feed-forward size, H query heads, K K/V heads, D head size."""

    input_norm: Tensor  # [M]
    q: Tensor  # [H*D, M]
    k: Tensor  # [K*D, M]
    v: Tensor  # [K*D, M]
    output: Tensor  # [M, H*D]
    post_norm: Tensor  # [M]
    gate: Tensor  # [F, M]
    up: Tensor  # [F, M]
    down: Tensor  # [M, F]
    q_bias: Tensor | None = None  # [H*D]
    k_bias: Tensor | None = None  # [K*D]
    v_bias: Tensor | None = None  # [K*D]
    output_bias: Tensor | None = None  # [M]
    gate_bias: Tensor | None = None  # [F]
    up_bias: Tensor | None = None  # [F]
    down_bias: Tensor | None = None  # [M]
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]


@dataclass(slots=True)
class ModelWeights:
    """A whole model. With tied embeddings `lm_head` is the very tensor `embedding` is."""

    embedding: Tensor  # [V, M]
    layers: list[LayerWeights]
    final_norm: Tensor  # [M]
    lm_head: Tensor  # [V, M]

    def tensors(self) -> Iterator[Tensor]:
        """Every distinct tensor once, in reading order."""
        yield self.embedding
        for layer in self.layers:
            for column in fields(layer):
                tensor = getattr(layer, column.name)
                if tensor is not None:
                    yield tensor
        yield self.final_norm
        if self.lm_head is not self.embedding:
            yield self.lm_head

    @property
    def num_bytes(self) -> int:
        """Bytes of all distinct tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a layer of this model has, by `LayerWeights` field name."""
    m, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * d, config.num_kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (m,),
        "q": (q_rows, m),
        "k": (kv_rows, m),
        "v": (kv_rows, m),
        "output": (m, q_rows),
        "post_norm": (m,),
        "gate": (f, m),
        "up": (f, m),
        "down": (m, f),
    }
    if config.qkv_bias:
        shapes |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
    if config.output_bias:
        shapes |= {"output_bias": (m,)}
    if config.mlp_bias:
        shapes |= {"gate_bias": (f,), "up_bias": (f,), "down_bias": (m,)}
    if config.qk_norm:
        shapes |= {"q_norm": (d,), "k_norm": (d,)}
    return shapes


def random_weights(config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> ModelWeights:
    """Seeded weights for tests and first steps: normal, scaled so that logits have a spread worth sampling."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    def layer_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm"):
            return (1.0 + normal(*shape, scale=0.1)).to(dtype)
        return normal(*shape, scale=0.1 if len(shape) == 1 else shape[-1] ** -0.5)

    embedding = normal(config.vocab_size, config.hidden_size, scale=1.0)
    shapes = layer_shapes(config)
    layers = [
        LayerWeights(**{name: layer_tensor(name, shape) for name, shape in shapes.items()})
        for _ in range(config.num_layers)
    ]
    head_scale = 2.0 * config.hidden_size**-0.5
    lm_head = embedding if config.tie_embeddings else normal(config.vocab_size, config.hidden_size, scale=head_scale)
    return ModelWeights(embedding, layers, layer_tensor("final_norm", (config.hidden_size,)), lm_head)
