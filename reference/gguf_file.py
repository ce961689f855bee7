"""A GGUF file: its metadata, its config, and its tensors dequantised one at a time.

`GGUFFile` is the container: opening it reads the header and no tensor. It knows no tokenizer; whoever makes one from
a GGUF file reads `fields`. Quantised blocks become float32 by the `gguf` package; plain types stay what they are.
Source: the GGUF specification, and the names and row order that llama.cpp's convert_hf_to_gguf.py writes.

Proof: tests/test_gguf.py. Story: model.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from reference.config import ConfigError, ModelConfig, RopeScaling
from reference.gguf_header import GGUFTensor, read_header
from reference.weights import ModelWeights, StoredTensor, WeightsError, assemble

# `general.architecture` -> ours. Mistral's files say llama too. Only llama's q and k rows are interleaved for rope.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
INTERLEAVED = "llama"

PLAIN_KINDS = {
    GGMLQuantizationType.F64: torch.float64,
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
WHOLE_NUMBERS = ("I8", "I16", "I32", "I64")

LAYER_NAMES = {
    "input_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "output": "attn_output.weight",
    "post_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "output_bias": "attn_output.bias",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
}
MODEL_NAMES = {"embedding": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"}

# The divisors of rope's frequencies, [D/2]: how GGUF stores a llama3 rope. A fact of the config, not a weight.
ROPE_FACTORS = "rope_freqs.weight"
# What every published llama3 rope has in common; only the factor differs (8 in 3.1, 32 in 3.2).
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192


class GGUFFile:
    """An open GGUF file.

    `fields` is the metadata by key, as plain Python values: int, float, bool, str, or a list of one of these
    (`fields["tokenizer.ggml.tokens"]` is a `list[str]`). `tensors` says by name what lies in the file.

    Raises:
        WeightsError: the file is not GGUF, or damaged.
        FileNotFoundError: no such file.
    """

    def __init__(self, path: Path) -> None:
        header = read_header(Path(path))
        self.path = Path(path)
        self.fields: dict[str, Any] = header.fields
        self.tensors: dict[str, GGUFTensor] = header.tensors

    def read(self, name: str) -> Tensor:
        """One tensor, rows first, in memory of its own: as stored, or float32 where it was quantised.

        Raises:
            WeightsError: its type is not a number's, or the `gguf` package cannot dequantise it.
        """
        entry = self.tensors[name]
        raw = np.fromfile(self.path, np.uint8, entry.num_bytes, offset=entry.offset)
        if entry.kind in PLAIN_KINDS:
            return torch.from_numpy(raw).view(PLAIN_KINDS[entry.kind]).reshape(entry.shape)
        if entry.kind.name not in WHOLE_NUMBERS:
            rows = raw.reshape(math.prod(entry.shape[:-1]), -1)
            try:
                return torch.from_numpy(quants.dequantize(rows, entry.kind)).reshape(entry.shape)
            except NotImplementedError:
                pass
        raise WeightsError(f"{name}: stored as {entry.kind.name} in {self.path.name}, which cannot be dequantised")


def read_gguf_config(source: Path | GGUFFile) -> ModelConfig:
    """The `ModelConfig` that a GGUF file's metadata and tensor list describe; `source` is its path, or it opened.

    Raises:
        ConfigError: a metadata key is missing, or names something this engine does not implement.
        WeightsError: the file is damaged.
    """
    return _config(source if isinstance(source, GGUFFile) else GGUFFile(source))


def read_gguf_weights(
    source: Path | GGUFFile, config: ModelConfig, *, dtype: torch.dtype | None = None
) -> ModelWeights:
    """Read the model in a GGUF file; see `reference.weights.load_weights` for the rules and the errors."""
    file = source if isinstance(source, GGUFFile) else GGUFFile(source)
    interleaved = file.fields.get("general.architecture") == INTERLEAVED
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if interleaved else {}

    def stored(entry: GGUFTensor) -> StoredTensor:
        num_heads = heads.get(entry.name.split(".")[-2], 0)

        def read() -> Tensor:
            tensor = file.read(entry.name)
            return halves_from_pairs(tensor, num_heads=num_heads) if num_heads else tensor

        return StoredTensor(file.path.name, entry.shape, read)

    tensors = {name: stored(entry) for name, entry in file.tensors.items() if name != ROPE_FACTORS}
    return assemble(config, tensors, name_of=gguf_name, dtype=dtype)


def gguf_name(role: str) -> str:
    """The name a role's tensor has in a GGUF file: `layers.3.q` is `blk.3.attn_q.weight`."""
    if role in MODEL_NAMES:
        return MODEL_NAMES[role]
    _, index, column = role.split(".")
    return f"blk.{index}.{LAYER_NAMES[column]}"


def halves_from_pairs(
    rows: Tensor,  # [H*D, M] or [H*D]
    *,
    num_heads: int,
) -> Tensor:
    """Undo llama.cpp's row order: it rotates neighbours (0, 1), (2, 3) ...; we rotate (0, D/2), (1, D/2 + 1) ..."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [H, D/2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape)


def _config(file: GGUFFile) -> ModelConfig:
    name = file.fields.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(f"general.architecture: {name!r} is not one of {', '.join(ARCHITECTURES)}")
    _refuse_what_we_do_not_run(file, name)
    heads = _count(file, f"{name}.attention.head_count")
    hidden = _count(file, f"{name}.embedding_length")
    head_dim = _head_dim(file, name, hidden // heads)
    vocab_size = file.tensors[gguf_name("embedding")].shape[0] if gguf_name("embedding") in file.tensors else 0
    if not vocab_size:
        raise ConfigError(f"{gguf_name('embedding')}: missing from {file.path.name}; it gives the vocabulary's size")
    theta = _number(file, f"{name}.rope.freq_base", 10_000.0)
    return ModelConfig(
        architecture=ARCHITECTURES[name],
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=_count(file, f"{name}.feed_forward_length"),
        num_layers=_count(file, f"{name}.block_count"),
        num_heads=heads,
        num_kv_heads=_count(file, f"{name}.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=_count(file, f"{name}.context_length"),
        rms_norm_eps=_number(file, f"{name}.attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, theta, head_dim),
        tie_embeddings=gguf_name("lm_head") not in file.tensors,
        qkv_bias=name == "qwen2" or _has_any(file, "q_bias", "k_bias", "v_bias"),
        output_bias=_has_any(file, "output_bias"),
        mlp_bias=_has_any(file, "gate_bias", "up_bias", "down_bias"),
        qk_norm=name == "qwen3",
        bos_token_id=next(iter(_token_ids(file, "bos")), None),
        eos_token_ids=_token_ids(file, "eos", "eot", "eom"),
    )


def _refuse_what_we_do_not_run(file: GGUFFile, name: str) -> None:
    """Keys that change the arithmetic: a file that has one would load, and then be wrong without a word."""
    fields = file.fields
    scaling = fields.get(f"{name}.rope.scaling.type", "none")
    if scaling != "none":
        raise ConfigError(f"{name}.rope.scaling.type: {scaling!r} is not 'none'")
    if fields.get(f"{name}.rope.scale_linear", 1.0) != 1.0:
        raise ConfigError(f"{name}.rope.scale_linear: {fields[f'{name}.rope.scale_linear']} is not 1.0")
    if fields.get(f"{name}.expert_count", 0):
        raise ConfigError(f"{name}.expert_count: {fields[f'{name}.expert_count']}; mixtures of experts are not run")
    window, context = f"{name}.attention.sliding_window", f"{name}.context_length"
    if fields.get(window) and _count(file, window) < _count(file, context):
        raise ConfigError(f"{window}: {fields[window]} is shorter than {context} and not supported")


def _head_dim(file: GGUFFile, name: str, default: int) -> int:
    key_length = _count(file, f"{name}.attention.key_length", default)
    for field in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        length = _count(file, field, key_length)
        if length != key_length:
            raise ConfigError(f"{field}: {length} is not the head size {key_length}")
    return key_length


def _rope_scaling(file: GGUFFile, theta: float, head_dim: int) -> RopeScaling | None:
    """The llama3 parameters that give the file's table of divisors, or a refusal: the table alone is stored."""
    if ROPE_FACTORS not in file.tensors:
        return None
    stored = file.read(ROPE_FACTORS).double().flatten().tolist()
    # The last pair turns slowest: its divisor is the factor, unless the head is so small that it lies on the ramp.
    # Five digits: whoever made the table in float32 may be off by the last bit.
    slowest = [float(f"{divisor:.5g}") for divisor in stored[-1:]]
    for factor in (f for f in (*slowest, 8.0, 32.0) if f >= 1.0):
        scaling = RopeScaling(factor, LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL)
        made = _divisors(scaling, theta, head_dim)
        same = len(made) == len(stored) and np.allclose(made, stored, rtol=1e-5, atol=0.0)
        if same:
            return scaling
    raise ConfigError(f"{ROPE_FACTORS}: its {len(stored)} factors are not those of a rope of type llama3")


def _divisors(scaling: RopeScaling, theta: float, head_dim: int) -> list[float]:
    """What llama3 divides each of the D/2 frequencies by: 1 for short waves, `factor` for long, a ramp between."""
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)  # in tokens
        turns = scaling.original_max_positions / wavelength
        ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = min(max(ramp, 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - smooth) / scaling.factor + smooth))
    return divisors


def _has_any(file: GGUFFile, *columns: str) -> bool:
    """True when block 0 has one of these; then the loader asks for all of them in every block."""
    return any(gguf_name(f"layers.0.{column}") in file.tensors for column in columns)


def _count(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.fields.get(key, default)
    if value is None:
        raise ConfigError(f"{key}: missing from {file.path.name}")
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        # A list is a number per layer, which this engine does not run.
        raise ConfigError(f"{key}: {value!r} is not a positive integer")
    return value


def _number(file: GGUFFile, key: str, default: float | None = None) -> float:
    value = file.fields.get(key, default)
    if value is None:
        raise ConfigError(f"{key}: missing from {file.path.name}")
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"{key}: {value!r} is not a positive number")
    # Stored as float32: its shortest spelling is the number somebody wrote, 1e-05 and not 9.99999974e-06.
    return float(str(np.float32(value)))


def _token_ids(file: GGUFFile, *kinds: str) -> tuple[int, ...]:
    """The ids that the metadata gives these special tokens, each once. An answer ends at its text's, turn's or
    message's end, so those are three kinds."""
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in kinds]
    for key in keys:
        value = file.fields.get(key, 0)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{key}: {value!r} is not a token id")
    return tuple(dict.fromkeys(file.fields[key] for key in keys if key in file.fields))
