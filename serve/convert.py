"""A GGUF file rewritten as a Hugging Face folder: safetensors, config, tokenizer and chat template.

What is written loads here, and in transformers, as the same model; values are rounded once, to the dtype asked for,
and a value that dtype cannot hold is an error rather than an infinity. It knows nothing of where models are kept.

Proof: tests/test_models.py. Story: app.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from reference.checkpoint import SINGLE, checkpoint_name
from reference.config import ARCHITECTURES, ModelConfig
from reference.gguf_file import GGUFFile, read_gguf_config
from reference.tokenizer import Tokenizer
from reference.weights import ModelWeights, load_weights
from serve.models import ModelError

Progress = Callable[[int, int], None]  # tensors done, tensors in all


def convert_to_folder(source: Path, out: Path, *, dtype: torch.dtype, progress: Progress | None = None) -> None:
    """Convert `source` into a folder that must not exist yet (or be empty); it appears whole or not at all.

    Raises:
        ModelError: `out` is in the way, or a value does not fit in `dtype`.
        ValueError, OSError: `source` is not a GGUF model that these engines run, or the disk said no.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists and is not an empty folder; name a new one")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside `out`, so that the last rename stays on one file system.
    partial = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.partial"
    partial.mkdir()
    try:
        write_folder(source, partial, dtype=dtype, progress=progress)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_folder(source: Path, folder: Path, *, dtype: torch.dtype, progress: Progress | None = None) -> None:
    """Write the files of the model in `source` into an existing folder; errors as `convert_to_folder`."""
    config = read_gguf_config(source)
    raw, generation = config_json(config, dtype), generation_json(config)
    tensors = rounded(load_weights(source, config), dtype=dtype, progress=progress)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    for name, value in (("config.json", raw), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", "utf-8")
    Tokenizer.from_gguf(GGUFFile(source).fields).save(folder)


def rounded(weights: ModelWeights, *, dtype: torch.dtype, progress: Progress | None = None) -> dict[str, Tensor]:
    """Every tensor in `dtype`, by its checkpoint name.

    Raises:
        ModelError: a finite value became infinite, or the source held a value that is not finite; both counted.
    """
    pairs = list(weights.by_role())
    result: dict[str, Tensor] = {}
    for done, (role, tensor) in enumerate(pairs, start=1):
        name = checkpoint_name(role)
        result[name] = tensor.to(dtype).contiguous()
        lost = tensor.numel() - int(torch.isfinite(result[name]).sum())
        if lost:
            kind = str(dtype).removeprefix("torch.")
            raise ModelError(f"{name}: {lost} of {tensor.numel()} values are not finite in {kind}; try --dtype float32")
        if progress is not None:
            progress(done, len(pairs))
    return result


def config_json(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The `config.json` of a model, in the form that both `ModelConfig.from_dict` and transformers read.

    Raises:
        ModelError: this form cannot say what the config says (Llama with q/k/v biases and no output bias, say).
    """
    raw: dict[str, Any] = {
        "architectures": [next(name for name, short in ARCHITECTURES.items() if short == config.architecture)],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        **_eos(config),
        "dtype": str(dtype).removeprefix("torch."),
    }
    if config.architecture == "mistral":
        raw["sliding_window"] = None  # left out, transformers would assume a window of 4096
    scaling = config.rope_scaling
    if scaling is not None:
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    if ModelConfig.from_dict(raw, generation_json(config)) != config:
        raise ModelError(f"config.json cannot describe this {config.architecture} model: {config}")
    return raw


def generation_json(config: ModelConfig) -> dict[str, Any]:
    """The `generation_config.json` of a model: its BOS and EOS ids."""
    bos = {} if config.bos_token_id is None else {"bos_token_id": config.bos_token_id}
    return {**bos, **_eos(config)}


def _eos(config: ModelConfig) -> dict[str, Any]:
    """One EOS id as a number, several as a list, none as null: an absent field would mean the family's default."""
    ids = list(config.eos_token_ids)
    return {"eos_token_id": (ids[0] if len(ids) == 1 else ids) if ids else None}
