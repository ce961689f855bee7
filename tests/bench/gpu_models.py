"""What the GPU benches run on: the shapes of three real models, with seeded weights that are made where they are used.

No download and no file: a 16 GB model exists half a second after its generator was seeded.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fast.engine import Engine
from reference.config import ModelConfig, RopeScaling
from reference.weights import LayerWeights, ModelWeights, layer_shapes, model_shapes
from tests.harness import TINY

_LLAMA = ModelConfig(
    architecture="llama",
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    max_positions=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
    tie_embeddings=True,
    bos_token_id=128000,
)
MODELS = {
    "smollm2-135m": replace(
        _LLAMA,
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        max_positions=8192,
        rope_theta=100000.0,
        rope_scaling=None,
        bos_token_id=1,
    ),
    "llama-3.2-1b": _LLAMA,
    "llama-3.1-8b": replace(
        _LLAMA,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        head_dim=128,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
        tie_embeddings=False,
    ),
    "tiny": TINY,  # for a smoke run in the interpreter
}


def seeded_weights(config: ModelConfig, *, dtype: torch.dtype, device: str, seed: int = 0) -> ModelWeights:
    """Normal weights, scaled so that activations keep their size, made on the device."""
    generator = torch.Generator(device).manual_seed(seed)

    def made(shape: tuple[int, ...], scale: float) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device) * scale

    def layer() -> LayerWeights:
        shapes = layer_shapes(config)
        return LayerWeights(
            **{
                name: torch.ones(shape, dtype=dtype, device=device)
                if name.endswith("norm")
                else made(shape, shape[-1] ** -0.5)
                for name, shape in shapes.items()
            }
        )

    size = (config.vocab_size, config.hidden_size)
    embedding = made(size, 1.0)
    head = embedding if config.tie_embeddings else made(size, 2.0 * config.hidden_size**-0.5)
    norm = torch.ones(config.hidden_size, dtype=dtype, device=device)
    return ModelWeights(embedding, [layer() for _ in range(config.num_layers)], norm, head)


def engine(name: str, *, dtype: torch.dtype, device: str, rows: int, tokens: int, **switches: Any) -> Engine:
    """An engine for `rows` requests of up to `tokens` tokens, all at once."""
    config = MODELS[name]
    return Engine.build(
        config,
        seeded_weights(config, dtype=dtype, device=device),
        max_batch_size=rows,
        num_blocks=rows * -(-tokens // 16),
        block_size=16,
        max_model_len=tokens,
        dtype=dtype,
        device=device,
        take_weights=True,
        **switches,
    )


def step_bytes(config: ModelConfig, *, rows: int, context: int, element_bytes: int) -> int:
    """Bytes that a decode step cannot but read: every weight but the embedding's unused rows, and each row's K/V."""
    shapes = model_shapes(config)
    weights = sum(math.prod(shape) for name, shape in shapes.items() if name != "embedding" or config.tie_embeddings)
    return (weights + rows * context * config.kv_elements_per_token) * element_bytes


def fits(name: str, *, rows: int, tokens: int, element_bytes: int, free_bytes: int) -> bool:
    """True when two copies of a layer's worth, the weights and the K/V leave room on the device."""
    config = MODELS[name]
    weights = sum(math.prod(shape) for shape in model_shapes(config).values()) * element_bytes
    return 1.3 * weights + rows * tokens * config.kv_elements_per_token * element_bytes + 2**31 < free_bytes
