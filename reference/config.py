"""The shape of a model, read once from a Hugging Face `config.json` and refused early when it is not ours.

Families: Llama 2 and 3.x (with `rope_type` llama3), SmolLM2, Mistral without a sliding window, Qwen2/2.5 and
Qwen3. Both engines take a `ModelConfig`; neither reads JSON. It knows no tensor and no tokenizer.

Proof: tests/test_config.py. Story: model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


class ConfigError(ValueError):
    """A model this engine cannot run as its authors meant it. The message begins with the field's name."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The `rope_type: llama3` stretch of RoPE: long wavelengths divided by `factor`, short ones left alone.

    Source: the Llama 3.1 release; `original_max_positions` is in tokens, the rest are ratios.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the forward pass needs to know about a decoder-only transformer (sizes in elements)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            _require(getattr(self, name) > 0, name, f"{getattr(self, name)} is not a positive integer")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "num_key_value_heads",
            f"{self.num_kv_heads} does not divide num_attention_heads {self.num_heads}",
        )
        _require(self.head_dim > 0 and self.head_dim % 2 == 0, "head_dim", f"{self.head_dim} is not even")
        for token in (*self.eos_token_ids, *((self.bos_token_id,) if self.bos_token_id is not None else ())):
            _require(0 <= token < self.vocab_size, "eos_token_id/bos_token_id", f"{token} is outside the vocabulary")

    @property
    def group_size(self) -> int:
        """Query heads that share one K/V head (grouped-query attention, Ainslie et al. 2023)."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one token keeps over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @classmethod
    def from_dir(cls, folder: Path) -> ModelConfig:
        """Read `config.json` and, when it is there, the EOS ids of `generation_config.json`.

        Raises:
            ConfigError: a field is missing, or names something this engine does not implement.
            FileNotFoundError: the folder holds no `config.json`.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; a model folder holds a config.json")
        generation = Path(folder) / "generation_config.json"
        return cls.from_dict(
            json.loads(path.read_text("utf-8")),
            json.loads(generation.read_text("utf-8")) if generation.is_file() else {},
        )

    @classmethod
    def from_dict(cls, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
        """Build from the parsed `config.json` and `generation_config.json` (whose EOS ids win).

        Raises:
            ConfigError: naming the field, its value and what is supported.
        """
        architecture = _architecture(raw)
        _refuse_what_we_do_not_run(raw)
        heads = _positive(raw, "num_attention_heads")
        hidden = _positive(raw, "hidden_size")
        attention_bias = bool(raw.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=_positive(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive(raw, "intermediate_size"),
            num_layers=_positive(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_positive(raw, "num_key_value_heads", heads),
            head_dim=_positive(raw, "head_dim", 128 if architecture == "qwen3" else hidden // heads),
            max_positions=_positive(raw, "max_position_embeddings"),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(raw),
            rope_scaling=_rope_scaling(raw),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or architecture == "qwen2",
            output_bias=attention_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=architecture == "qwen3",
            bos_token_id=_token_ids(raw.get("bos_token_id"), "bos_token_id", one=True),
            eos_token_ids=_token_ids((generation or {}).get("eos_token_id", raw.get("eos_token_id")), "eos_token_id"),
        )


def _require(fact: bool, field: str, message: str) -> None:
    if not fact:
        raise ConfigError(f"{field}: {message}")


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    known = [ARCHITECTURES[name] for name in names if name in ARCHITECTURES]
    _require(bool(known), "architectures", f"{names} is not one of {', '.join(ARCHITECTURES)}")
    return known[0]


def _refuse_what_we_do_not_run(raw: dict[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    _require(activation == "silu", "hidden_act", f"{activation!r} is not 'silu'")
    window = raw.get("sliding_window")
    binds = raw.get("use_sliding_window", window is not None) and window is not None
    reaches = binds and int(window or 0) < int(raw.get("max_position_embeddings", 0))
    _require(not reaches, "sliding_window", f"{window} is shorter than max_position_embeddings and not supported")
    other = sorted(set(raw.get("layer_types") or []) - {"full_attention"})
    _require(not other, "layer_types", f"{other} is not 'full_attention'")
    _require(not raw.get("quantization_config"), "quantization_config", "quantised checkpoints are not supported")
    # A multi-token or partial rotary would load and then be wrong without a word.
    partial = float(raw.get("partial_rotary_factor", _rope_fields(raw).get("partial_rotary_factor", 1.0)) or 1.0)
    _require(partial == 1.0, "partial_rotary_factor", f"{partial} is not 1.0")


def _positive(raw: dict[str, Any], field: str, default: int | None = None) -> int:
    value = raw.get(field)
    value = default if value is None else value
    _require(value is not None, field, "missing from config.json")
    ok = isinstance(value, int) and not isinstance(value, bool) and value > 0
    _require(ok, field, f"{value!r} is not a positive integer")
    return int(value)  # type: ignore[arg-type]


def _rope_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (transformers 5) or `rope_scaling` (before): the same fields under two names."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _rope_theta(raw: dict[str, Any]) -> float:
    theta = raw.get("rope_theta", _rope_fields(raw).get("rope_theta", 10_000.0))
    _require(isinstance(theta, (int, float)) and theta > 0, "rope_theta", f"{theta!r} is not a positive number")
    return float(theta)


def _rope_scaling(raw: dict[str, Any]) -> RopeScaling | None:
    fields = _rope_fields(raw)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return None
    _require(kind == "llama3", "rope_type", f"{kind!r} is not 'default' or 'llama3'")
    wanted = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [name for name in wanted if fields.get(name) is None]
    _require(not missing, "rope_scaling", f"rope_type 'llama3' needs {', '.join(missing)}")
    factor, low, high, original = (fields[name] for name in wanted)
    _require(factor >= 1 and high > low, "rope_scaling", f"factor {factor}, low {low}, high {high} are out of order")
    return RopeScaling(float(factor), float(low), float(high), int(original))


def _token_ids(value: Any, field: str, *, one: bool = False) -> Any:
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    _require(all(isinstance(i, int) and i >= 0 for i in ids), field, f"{value!r} is not a token id or a list of them")
    return (ids[0] if ids else None) if one else ids
