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
# What transformers takes for a field that a config.json leaves out; a family not named has none, or as many as heads.
DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
DEFAULT_BOS = {"llama": 1, "mistral": 1}
DEFAULT_EOS = {"llama": 2, "mistral": 2}


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
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "max_positions", "rms_norm_eps", "rope_theta"):
            _require(getattr(self, name) > 0, name, f"{getattr(self, name)} is not positive")
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
        return cls.from_dict(_read_json(path), _read_json(generation) if generation.is_file() else {})

    @classmethod
    def from_dict(cls, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
        """Build from the parsed `config.json` and `generation_config.json` (whose EOS ids win when it has any).

        A field that is absent has the default its family has in transformers.

        Raises:
            ConfigError: naming the field, its value and what is supported.
        """
        architecture = _architecture(raw)
        _refuse_what_we_do_not_run(raw, architecture)
        heads = _positive(raw, "num_attention_heads")
        hidden = _positive(raw, "hidden_size")
        head_dim = raw.get("head_dim") or (128 if architecture == "qwen3" else None)
        _require(bool(head_dim) or hidden % heads == 0, "head_dim", f"absent, and hidden_size {hidden} / {heads} heads")
        # Only these families read the switches; in the others transformers ignores them, and a bias is no tensor.
        attention_bias = architecture in ("llama", "qwen3") and bool(raw.get("attention_bias"))
        # Absent is the family's default, null is as many as heads: transformers tells the two apart.
        kv_heads = heads if "num_key_value_heads" in raw else DEFAULT_KV_HEADS.get(architecture, heads)
        eos = (generation or {}).get("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=_positive(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive(raw, "intermediate_size"),
            num_layers=_positive(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_positive(raw, "num_key_value_heads", kv_heads),
            head_dim=_positive(raw, "head_dim", head_dim or hidden // heads),
            max_positions=_positive(raw, "max_position_embeddings"),
            rms_norm_eps=_number(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
            rope_theta=_rope_theta(raw),
            rope_scaling=_rope_scaling(raw),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or architecture == "qwen2",
            output_bias=attention_bias,
            mlp_bias=architecture == "llama" and bool(raw.get("mlp_bias")),
            qk_norm=architecture == "qwen3",
            bos_token_id=_token_ids(raw.get("bos_token_id", DEFAULT_BOS.get(architecture)), "bos_token_id", one=True),
            eos_token_ids=_token_ids(
                raw.get("eos_token_id", DEFAULT_EOS.get(architecture)) if eos is None else eos, "eos_token_id"
            ),
        )


def _require(fact: bool, field: str, message: str) -> None:
    if not fact:
        raise ConfigError(f"{field}: {message}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds a {type(raw).__name__}, not an object")
    return raw


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    _require(isinstance(names, list), "architectures", f"{names!r} is not a list of names")
    known = [ARCHITECTURES[name] for name in names if name in ARCHITECTURES]
    _require(bool(known), "architectures", f"{names} is not one of {', '.join(ARCHITECTURES)}")
    return known[0]


def _refuse_what_we_do_not_run(raw: dict[str, Any], architecture: str) -> None:
    activation = raw.get("hidden_act", "silu")
    _require(activation == "silu", "hidden_act", f"{activation!r} is not 'silu'")
    window = _sliding_window(raw, architecture)
    reaches = window is not None and window < _positive(raw, "max_position_embeddings")
    _require(not reaches, "sliding_window", f"{window} is shorter than max_position_embeddings and not supported")
    types = raw.get("layer_types") or []
    _require(isinstance(types, list), "layer_types", f"{types!r} is not a list of names")
    other = sorted({str(kind) for kind in types} - {"full_attention"})
    _require(not other, "layer_types", f"{other} is not 'full_attention'")
    _require(not raw.get("quantization_config"), "quantization_config", "quantised checkpoints are not supported")
    # A multi-token or partial rotary would load and then be wrong without a word.
    for fields in (raw, _rope_fields(raw)):
        partial = fields.get("partial_rotary_factor")
        _require(partial in (None, 1), "partial_rotary_factor", f"{partial!r} is not 1.0")


def _sliding_window(raw: dict[str, Any], architecture: str) -> int | None:
    """The window in tokens that some layer would have, or None. Mistral has one unless its config says null."""
    if architecture == "llama":
        return None
    if architecture == "mistral":
        return None if raw.get("sliding_window", 4096) is None else _positive(raw, "sliding_window", 4096)
    # From this layer on; where `layer_types` says it layer by layer, that decides (and is checked above).
    first_layer = int(raw.get("max_window_layers", 28) or 0)
    used = raw.get("use_sliding_window") and first_layer < _positive(raw, "num_hidden_layers")
    if raw.get("layer_types"):
        return None
    return _positive(raw, "sliding_window", 4096) if used else None


def _positive(raw: dict[str, Any], field: str, default: int | None = None) -> int:
    value = raw.get(field)
    value = default if value is None else value
    _require(value is not None, field, "missing from config.json")
    ok = isinstance(value, int) and not isinstance(value, bool) and value > 0
    _require(ok, field, f"{value!r} is not a positive integer")
    return int(value)  # type: ignore[arg-type]


def _rope_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """`rope_scaling` (before transformers 5, and first where both are) or `rope_parameters`: the same fields."""
    fields = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    nested = not isinstance(fields, dict) or any(isinstance(value, dict) for value in fields.values())
    _require(not nested, "rope_parameters", f"{fields!r} is not one set of fields for all layers")
    return fields


def _rope_theta(raw: dict[str, Any]) -> float:
    theta = _rope_fields(raw).get("rope_theta", raw.get("rope_theta"))
    return _number(10_000.0 if theta is None else theta, "rope_theta")


def _number(value: Any, field: str) -> float:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
    _require(ok, field, f"{value!r} is not a positive number")
    return float(value)


def _rope_scaling(raw: dict[str, Any]) -> RopeScaling | None:
    fields = _rope_fields(raw)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return None
    _require(kind == "llama3", "rope_type", f"{kind!r} is not 'default' or 'llama3'")
    wanted = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [name for name in wanted if fields.get(name) is None]
    _require(not missing, "rope_scaling", f"rope_type 'llama3' needs {', '.join(missing)}")
    factor, low, high, original = (_number(fields[name], f"rope_scaling.{name}") for name in wanted)
    _require(factor >= 1 and high > low, "rope_scaling", f"factor {factor}, low {low}, high {high} are out of order")
    return RopeScaling(factor, low, high, int(original))


def _token_ids(value: Any, field: str, *, one: bool = False) -> Any:
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    ok = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids)
    _require(ok, field, f"{value!r} is not a token id or a list of them")
    return (ids[0] if ids else None) if one else ids
