"""The config: fields agree with what transformers makes of the same `config.json`, and what is not ours is refused.

A refused config names its field. The old form of `config.json` (before transformers 5) is read as the new one is.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.config import ConfigError, ModelConfig, RopeScaling
from tests.checkpoints import FAMILIES, LLAMA3_ROPE, SHAPES, TINY_FIELDS
from tests.harness import TINY, tiny_config

LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu"} | TINY_FIELDS
# A Llama 3.2 config.json as it was published, in the form before transformers 5.
OLD_LLAMA3 = LLAMA | {
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"},
    "torch_dtype": "bfloat16",
}


def raw_for(family: str, **changes: Any) -> dict[str, Any]:
    """A config.json of `family`; a value of `...` takes the field out."""
    raw = LLAMA | {"architectures": [FAMILIES[family]], "sliding_window": None} | changes
    return {field: value for field, value in raw.items() if value is not ...}


def transformers_config(family: str, fields: dict[str, Any]) -> Any:
    import transformers

    return getattr(transformers, FAMILIES[family]).config_class(**fields)


def assert_agrees(ours: ModelConfig, theirs: Any) -> None:
    assert ours.architecture == theirs.model_type
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    # Qwen2 has no such field of its own; its attention asks for it in this way.
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope["rope_theta"]
    assert (ours.rope_scaling is None) == (rope["rope_type"] == "default")
    if ours.rope_scaling is not None:
        assert ours.rope_scaling.factor == rope["factor"]
        assert ours.rope_scaling.low_freq_factor == rope["low_freq_factor"]
        assert ours.rope_scaling.high_freq_factor == rope["high_freq_factor"]
        assert ours.rope_scaling.original_max_positions == rope["original_max_position_embeddings"]


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("absent", ["num_key_value_heads", "eos_token_id", "bos_token_id"])
def test_an_absent_field_has_its_familys_default(family: str, absent: str):
    sizes = {"num_attention_heads": 32, "hidden_size": 64, "head_dim": 2}
    fields = {name: value for name, value in (TINY_FIELDS | sizes).items() if name != absent}
    theirs = transformers_config(family, fields)
    ours = ModelConfig.from_dict(fields | {"architectures": [FAMILIES[family]]} | {"sliding_window": None})
    assert ours.num_kv_heads == theirs.num_key_value_heads
    eos = theirs.eos_token_id
    assert ours.eos_token_ids == (() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos))
    assert ours.bos_token_id == theirs.bos_token_id


@pytest.mark.parametrize("shape", SHAPES)
def test_the_fields_agree_with_transformers(tmp_path: Path, shape: str):
    family, overrides = SHAPES[shape]
    theirs = transformers_config(family, TINY_FIELDS | overrides)
    theirs.architectures = [FAMILIES[family]]
    theirs.save_pretrained(tmp_path)
    ours = ModelConfig.from_dir(tmp_path)
    assert_agrees(ours, theirs)
    assert ours.eos_token_ids == (2,)
    assert ours.qk_norm == (family == "qwen3")
    assert ours.qkv_bias == (family == "qwen2" or overrides.get("attention_bias", False))
    assert ours.output_bias == overrides.get("attention_bias", False)
    assert ours.mlp_bias == overrides.get("mlp_bias", False)
    assert ours.group_size * ours.num_kv_heads == ours.num_heads
    assert ours.kv_elements_per_token == 2 * 2 * ours.num_kv_heads * ours.head_dim


# Absent or null fields; where transformers itself refuses a null, the family is not listed.
OLD_FORMS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, [*FAMILIES]),
    ({"rope_theta": 250_000.0}, [*FAMILIES]),
    ({"rope_scaling": None, "rope_theta": 1e6}, [*FAMILIES]),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rope_theta": 88.0}, [*FAMILIES]),
    ({"head_dim": ...}, [*FAMILIES]),
    ({"head_dim": None}, ["llama", "mistral"]),
    ({"num_key_value_heads": None}, ["llama", "qwen2", "qwen3"]),
    ({"tie_word_embeddings": ...}, [*FAMILIES]),
    ({"rms_norm_eps": ...}, [*FAMILIES]),
]


@pytest.mark.parametrize(
    ("family", "changes"), [(family, changes) for changes, families in OLD_FORMS for family in families], ids=str
)
def test_old_forms_and_absent_fields_are_read_as_transformers_reads_them(family: str, changes: dict[str, Any]):
    raw = raw_for(family, **changes)
    assert_agrees(ModelConfig.from_dict(raw), transformers_config(family, raw))


def test_a_published_llama3_config_is_read():
    config = ModelConfig.from_dict(OLD_LLAMA3)
    assert_agrees(config, transformers_config("llama", OLD_LLAMA3))
    assert config.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_switches_that_a_family_does_not_have_are_ignored(family: str):
    config = ModelConfig.from_dict(raw_for(family, attention_bias=True, mlp_bias=True))
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (family == "qwen2", False, False)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, {}, (2,)),
        ([2, 5], {}, (2, 5)),
        (2, {"eos_token_id": [2, 5]}, (2, 5)),
        (None, {"eos_token_id": 7}, (7,)),
        (2, {"eos_token_id": None}, (2,)),
        (None, {}, ()),
        ([], {}, ()),
    ],
)
def test_eos_ids_come_from_generation_config_when_it_has_any(tmp_path, in_config, in_generation, expected):
    (tmp_path / "config.json").write_text(json.dumps(raw_for("llama", eos_token_id=in_config)))
    if in_generation:
        (tmp_path / "generation_config.json").write_text(json.dumps(in_generation))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"sliding_window": 16}),
        ("mistral", {"sliding_window": 256}),
        ("mistral", {"sliding_window": 4096}),
        ("mistral", {"sliding_window": ...}),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}),
        ("qwen2", {"sliding_window": 16}),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}),
    ],
)
def test_a_window_that_hides_nothing_is_accepted(family: str, changes: dict[str, Any]):
    ModelConfig.from_dict(raw_for(family, **changes))


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures: ['GPT2LMHeadModel'] is not one of LlamaForCausalLM"),
        ({"architectures": None}, "architectures: [] is not one of"),
        ({"architectures": ...}, "architectures: [] is not one of"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not 'silu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: ['sliding_attention']"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: quantised"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not 1.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor: 0.25"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type: 'yarn' is not 'default' or 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type: 'linear'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type: 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type 'llama3' needs low_freq_factor"),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": 0.5}}, "rope_scaling: factor 0.5"),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}}, "low 4.0, high 4.0 are out of order"),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": "8"}}, "rope_scaling.factor: '8' is not a positive number"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters: {'full_attention'"),
        ({"rope_parameters": ["yarn"]}, "rope_parameters: ['yarn']"),
        ({"rope_theta": 0}, "rope_theta: 0 is not a positive number"),
        ({"rope_theta": "1e4"}, "rope_theta: '1e4'"),
        ({"rms_norm_eps": None}, "rms_norm_eps: None is not a positive number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps: inf"),
        ({"vocab_size": ...}, "vocab_size: missing from config.json"),
        ({"hidden_size": 0}, "hidden_size: 0 is not a positive integer"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: -1"),
        ({"num_hidden_layers": True}, "num_hidden_layers: True"),
        ({"intermediate_size": 48.0}, "intermediate_size: 48.0"),
        ({"max_position_embeddings": ...}, "max_position_embeddings: missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads 4"),
        ({"head_dim": 7}, "head_dim: 7 is not even"),
        ({"head_dim": ..., "num_attention_heads": 5}, "head_dim: absent, and hidden_size 32 / 5 heads"),
        ({"eos_token_id": 61}, "eos_token_id/bos_token_id: 61 is outside the vocabulary"),
        ({"bos_token_id": 999}, "999 is outside the vocabulary"),
        ({"eos_token_id": -1}, "eos_token_id: -1 is not a token id"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id: [2, 'x'] is not a token id or a list of them"),
        ({"eos_token_id": True}, "eos_token_id: True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_this_engine_does_not_run_is_refused_by_name(changes: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as raised:
        ModelConfig.from_dict(raw_for("llama", **changes))
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 255}),
        ("mistral", {"sliding_window": ..., "max_position_embeddings": 32768}),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}),
    ],
)
def test_a_window_that_hides_positions_is_refused(family: str, changes: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"sliding_window: .* is shorter than max_position_embeddings"):
        ModelConfig.from_dict(raw_for(family, **changes))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("text", "words"), [("{", "not JSON"), ("[]", "holds a list, not an object")])
def test_a_damaged_json_file_is_named(tmp_path, name, text, words):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words) as raised:
        ModelConfig.from_dir(tmp_path)
    assert str(tmp_path / name) in str(raised.value)


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize(
    "field", ["vocab_size", "num_layers", "head_dim", "max_positions", "rms_norm_eps", "rope_theta"]
)
def test_a_config_made_by_hand_is_checked_too(field: str):
    with pytest.raises(ConfigError, match=f"{field}: 0"):
        tiny_config(**{field: 0})


# ---- any order --------------------------------------------------------------------------------------------------


@given(
    kv_heads=st.integers(1, 8),
    group=st.integers(1, 8),
    half_head=st.integers(1, 40),
    layers=st.integers(1, 5),
    tied=st.booleans(),
    family=st.sampled_from(sorted(FAMILIES)),
    order=st.randoms(use_true_random=False),
)
def test_any_shape_reads_the_same_whatever_the_order_of_fields(kv_heads, group, half_head, layers, tied, family, order):
    raw = raw_for(
        family,
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * group,
        head_dim=2 * half_head,
        num_hidden_layers=layers,
        tie_word_embeddings=tied,
        hidden_size=kv_heads * group * 4,
    )
    fields = list(raw)
    order.shuffle(fields)
    config = ModelConfig.from_dict({field: raw[field] for field in fields})
    assert_agrees(config, transformers_config(family, raw))


@given(
    raw=st.dictionaries(
        st.sampled_from([*LLAMA, "rope_theta", "rope_scaling", "sliding_window", "layer_types", "quantization_config"]),
        st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=3) | st.just({}),
        max_size=3,
    )
)
def test_any_damaged_field_is_refused_with_its_name_or_read(raw):
    refused = ""
    try:
        ModelConfig.from_dict(LLAMA | raw)
    except ConfigError as error:
        refused = str(error)
    # The first word is a field of the file, or the name of a check over two of them.
    named = re.split("[:.]", refused)[0]
    assert not refused or named in {*LLAMA, *raw, "eos_token_id/bos_token_id", "rope_type", "rope_parameters"}


def test_the_tiny_config_of_the_tests_is_the_tiny_checkpoint_of_the_oracle():
    assert ModelConfig.from_dict(LLAMA) == TINY
