"""A folder of `*.safetensors` as Hugging Face writes it: one file, or shards assigned by an index.

Only the tensors that the index assigns to a file count; what else lies in a shard or beside it is nobody's. Files
are mapped, so a tensor's pages are read when it is copied out and can be dropped by the system at once.
Source: the safetensors format, and `model.safetensors.index.json` of transformers' `save_pretrained`.

Proof: tests/test_weights.py. Story: model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reference.config import ModelConfig
from reference.weights import ModelWeights, StoredTensor, WeightsError, assemble

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Where transformers keeps each role. `{layer}` is the index of the block.
LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "post_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "output_bias": "self_attn.o_proj.bias",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
MODEL_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}

# The format's words for the dtypes that can be held.
HELD_KINDS = ("F64", "F32", "F16", "BF16")

# A table that old versions saved and that the config determines; the only tensors ever passed over.
KNOWN_BUFFER = "rotary_emb.inv_freq"


def read_checkpoint_weights(folder: Path, config: ModelConfig, *, dtype: torch.dtype | None = None) -> ModelWeights:
    """Read the model in `folder`; see `reference.weights.load_weights` for the rules and the errors."""
    stored = open_checkpoint(Path(folder))
    return assemble(config, stored, name_of=checkpoint_name, dtype=dtype)


def checkpoint_name(role: str) -> str:
    """The name a role's tensor has in a checkpoint: `layers.3.q` is `model.layers.3.self_attn.q_proj.weight`."""
    if role in MODEL_NAMES:
        return MODEL_NAMES[role]
    _, index, column = role.split(".")
    return f"model.layers.{index}.{LAYER_NAMES[column]}"


def open_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint by name, none of them read. The index decides where there is one.

    An index whose shards are all gone, beside a whole `model.safetensors`, is left over from an older checkpoint; the
    file is then the model, as it is to transformers.

    Raises:
        WeightsError: naming the file that is missing, damaged or ambiguous, or the tensor a shard should hold.
    """
    index = folder / INDEX
    if index.is_file() and not ((folder / SINGLE).is_file() and _is_left_over(index)):
        assigned = _weight_map(index)
    else:
        single = _single_file(folder)
        assigned = dict.fromkeys(_open(single).keys(), single.name)
    shards = {name: _open(folder / name) for name in sorted(set(assigned.values()))}
    held = {name: set(shard.keys()) for name, shard in shards.items()}
    paths = {name: folder / name for name in shards}
    stored = {}
    for tensor, shard in assigned.items():
        if tensor.endswith(KNOWN_BUFFER):
            continue
        if tensor not in held[shard]:
            raise WeightsError(f"{tensor}: the index assigns it to {shard}, which does not hold it")
        stored[tensor] = _stored(shards[shard], paths[shard], tensor)
    return stored


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> shard name. A shard is a plain file name: an index cannot reach outside its folder."""
    try:
        raw = json.loads(index.read_text("utf-8"))
    except ValueError as error:
        raise WeightsError(f"{index}: not JSON: {error}") from None
    assigned = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(assigned, dict) or not assigned:
        raise WeightsError(f"{index}: weight_map is missing or empty")
    for tensor, shard in assigned.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise WeightsError(f"{index}: {tensor} is assigned to {shard!r}, which is not a file name")
        if not (index.parent / shard).is_file():
            raise WeightsError(f"{index.parent / shard}: missing shard; the index assigns {tensor} to it")
    return assigned


def _is_left_over(index: Path) -> bool:
    """True when none of the shards that the index names is there."""
    try:
        shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        return not any((index.parent / shard).is_file() for shard in shards)
    except (ValueError, TypeError, KeyError, AttributeError):
        return False  # damaged; `_weight_map` says how


def _single_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if folder / SINGLE in files or len(files) == 1:
        return folder / SINGLE if folder / SINGLE in files else files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise WeightsError(f"{folder}: {names}, but no {INDEX} that says which tensor lies where")
    raise WeightsError(f"{folder}: no *.safetensors file")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: not a whole safetensors file: {error}") from None


def _stored(shard: Any, path: Path, name: str) -> StoredTensor:
    entry = shard.get_slice(name)
    kind = entry.get_dtype()
    if kind not in HELD_KINDS:
        raise WeightsError(f"{name}: stored as {kind} in {path.name}, not one of {', '.join(HELD_KINDS)}")

    def read() -> Tensor:
        # A copy: the mapped view would change or vanish with the file. Mapped anew for each tensor, so that no page
        # of the file stays in memory beside the copies.
        return _open(path).get_tensor(name).clone()

    return StoredTensor(path.name, tuple(entry.get_shape()), read)
