"""Tiny models and the lockstep runner that every test file shares.

`TINY` is a two-layer model with grouped-query attention that runs in milliseconds; `tiny_config` varies it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reference.config import ModelConfig

TINY = ModelConfig(
    architecture="llama",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=256,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_embeddings=False,
    bos_token_id=1,
    eos_token_ids=(2,),
)


def tiny_config(**changes: Any) -> ModelConfig:
    """`TINY` with some fields changed."""
    return replace(TINY, **changes)
