"""Tiny random checkpoints written by transformers, the oracle that nobody here wrote.

`write_checkpoint` saves a model the way its users get one (`config.json`, `generation_config.json`, `*.safetensors`)
and returns the very model, in eval mode, so a test compares tensors, logits or greedy tokens with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# Family -> the name of its class; its config class is the one that class names.
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

TINY_FIELDS: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

# The rope of Llama 3.1 and 3.2 in the form transformers 5 writes.
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Changes to TINY_FIELDS that between them cover every shape a family has: name -> (family, overrides).
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-gqa-3": ("llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "llama-gqa-8": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 4}),
    "llama-wide-heads": ("llama", {"head_dim": 16}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope3": (
        "llama",
        {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 16384, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-wide-heads": ("mistral", {"sliding_window": None, "head_dim": 12, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-one-head": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-wide-heads": ("qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
}


def write_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int | None = None,
    **overrides: Any,
) -> Any:
    """Write a tiny random model of `family` (a key of `FAMILIES`) to `folder` and return the transformers model.

    `overrides` change `TINY_FIELDS` by the names of `config.json`; `SHAPES` holds the ones worth running. The weights
    depend on `seed` alone. They are spread like those of a trained model: matrices scaled so that logits have a
    spread worth an argmax, norms near 1, biases not zero (transformers would leave norms at 1 and biases at 0, where
    a loader that drops them goes unseen). `max_shard_bytes` splits the file and writes an index.

    For logits in float64, save with `dtype=torch.float64`: the file and the model then hold the same numbers.
    """
    import transformers

    fields = TINY_FIELDS | overrides
    model_class = getattr(transformers, FAMILIES[family])
    model = model_class(model_class.config_class(**fields)).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(_spread(name, noise))
    size = "50GB" if max_shard_bytes is None else max_shard_bytes
    model.save_pretrained(folder, max_shard_size=size)
    return model


def _spread(name: str, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * noise
    if noise.dim() == 1:
        return 0.1 * noise
    return noise if "embed_tokens" in name else noise * 2.0 * noise.shape[-1] ** -0.5
