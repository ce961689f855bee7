"""Weights: every tensor of a checkpoint arrives in its role, and a checkpoint that is not the model is refused by name.

The oracle is transformers: tiny models that it wrote, compared by module attribute rather than by tensor name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from gates import GateError
from gates.weights import check_weights_finite, check_weights_shaped
from reference.checkpoint import INDEX, SINGLE, checkpoint_name
from reference.config import ModelConfig
from reference.weights import ModelWeights, WeightsError, layer_shapes, load_weights, model_shapes, random_weights
from tests.checkpoints import SHAPES, write_checkpoint
from tests.harness import TINY, tiny_config


def modules_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a transformers model by our roles, found by attribute, with every bias it has."""
    inner = model.model
    yield "embedding", inner.embed_tokens.weight
    for index, layer in enumerate(inner.layers):
        at, mlp = layer.self_attn, layer.mlp
        yield f"layers.{index}.input_norm", layer.input_layernorm.weight
        yield f"layers.{index}.post_norm", layer.post_attention_layernorm.weight
        linears = {"q": at.q_proj, "k": at.k_proj, "v": at.v_proj, "output": at.o_proj}
        linears |= {"gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj}
        for role, linear in linears.items():
            yield f"layers.{index}.{role}", linear.weight
            if linear.bias is not None:
                yield f"layers.{index}.{role}_bias", linear.bias
        for role in ("q_norm", "k_norm"):
            if hasattr(at, role):
                yield f"layers.{index}.{role}", getattr(at, role).weight
    yield "final_norm", inner.norm.weight
    if not model.config.tie_word_embeddings:
        yield "lm_head", model.lm_head.weight


def assert_same(weights: ModelWeights, expected: dict[str, Tensor]) -> None:
    held = dict(weights.by_role())
    assert held.keys() == expected.keys()
    for role, tensor in expected.items():
        assert held[role].dtype == tensor.dtype, role
        assert torch.equal(held[role], tensor), role


def as_checkpoint(weights: ModelWeights) -> dict[str, Tensor]:
    """The tensors of `weights` by the names of a checkpoint."""
    return {checkpoint_name(role): tensor for role, tensor in weights.by_role()}


def write_single(folder: Path, tensors: dict[str, Tensor], name: str = SINGLE) -> Path:
    save_file(tensors, folder / name)
    return folder


def write_shards(folder: Path, shards: dict[str, dict[str, Tensor]], **assigned: str) -> Path:
    """Write each shard, and an index that assigns a tensor to the first shard that holds it, or as `assigned` says."""
    weight_map: dict[str, str] = {}
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
        for tensor in tensors:
            weight_map.setdefault(tensor, name)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map | assigned}))
    return folder


def halved(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    names = sorted(tensors)
    first, second = names[: len(names) // 2], names[len(names) // 2 :]
    return {"a.safetensors": {n: tensors[n] for n in first}, "b.safetensors": {n: tensors[n] for n in second}}


@pytest.fixture
def weights() -> ModelWeights:
    return random_weights(TINY, seed=3)


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_shard_bytes", [None, 10_000], ids=["single", "sharded"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tensor_of_a_transformers_checkpoint_arrives_in_its_role(tmp_path, shape, max_shard_bytes):
    family, overrides = SHAPES[shape]
    model = write_checkpoint(tmp_path, family, max_shard_bytes=max_shard_bytes, **overrides)
    assert (tmp_path / INDEX).is_file() == (max_shard_bytes is not None)
    loaded = load_weights(tmp_path, ModelConfig.from_dir(tmp_path))
    assert_same(loaded, dict(modules_of(model)))


@pytest.mark.parametrize("shape", ["llama-biases", "qwen3-biases", "qwen2"])
def test_no_bias_is_dropped(tmp_path, shape):
    family, overrides = SHAPES[shape]
    model = write_checkpoint(tmp_path, family, **overrides)
    loaded = dict(load_weights(tmp_path, ModelConfig.from_dir(tmp_path)).by_role())
    wanted = {"llama-biases": 7, "qwen3-biases": 4, "qwen2": 3}[shape]
    for index in range(model.config.num_hidden_layers):
        assert sum(r.startswith(f"layers.{index}.") and r.endswith("_bias") for r in loaded) == wanted


def test_tied_embeddings_need_no_head_and_share_the_tensor(tmp_path):
    write_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    assert checkpoint_name("lm_head") not in load_file(tmp_path / SINGLE)
    loaded = load_weights(tmp_path, ModelConfig.from_dir(tmp_path))
    assert loaded.lm_head is loaded.embedding
    assert sum(1 for _ in loaded.tensors()) == len(model_shapes(ModelConfig.from_dir(tmp_path)))


def test_a_stored_head_equal_to_a_tied_embedding_is_accepted(tmp_path):
    config = tiny_config(tie_embeddings=True)
    tied = random_weights(config)
    tensors = as_checkpoint(tied) | {checkpoint_name("lm_head"): tied.embedding.clone()}
    loaded = load_weights(write_single(tmp_path, tensors), config)
    assert loaded.lm_head is loaded.embedding


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_stored_dtype_is_kept_and_a_wanted_one_is_cast_to_once(tmp_path, weights, dtype):
    stored = {name: tensor.to(dtype) for name, tensor in as_checkpoint(weights).items()}
    write_single(tmp_path, stored)
    assert all(tensor.dtype == dtype for tensor in load_weights(tmp_path, TINY).tensors())
    wanted = load_weights(tmp_path, TINY, dtype=torch.float32)
    assert_same(wanted, {role: tensor.to(dtype).float() for role, tensor in weights.by_role()})


def test_mixed_dtypes_stay_as_they_are_stored(tmp_path, weights):
    mixed = {role: t.half() if t.dim() == 2 else t.double() for role, t in weights.by_role()}
    write_single(tmp_path, {checkpoint_name(role): t for role, t in mixed.items()})
    assert_same(load_weights(tmp_path, TINY), mixed)


def test_a_single_file_may_have_any_name(tmp_path, weights):
    write_single(tmp_path, as_checkpoint(weights), name="weights-of-mine.safetensors")
    assert_same(load_weights(tmp_path, TINY), dict(weights.by_role()))


def test_a_stray_file_beside_the_model_is_ignored(tmp_path, weights):
    write_single(tmp_path, as_checkpoint(weights))
    save_file({"consolidated": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    assert_same(load_weights(tmp_path, TINY), dict(weights.by_role()))


def test_only_the_index_decides_which_shard_a_tensor_comes_from(tmp_path, weights):
    tensors = as_checkpoint(weights)
    shards = halved(tensors)
    name = min(shards["b.safetensors"])
    # The first shard also holds another value of a tensor assigned to the second, and one assigned to nobody.
    shards["a.safetensors"] |= {name: torch.full_like(tensors[name], 9.0), "nobody.weight": torch.zeros(2)}
    write_shards(tmp_path, shards)
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    index.pop("nobody.weight")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index | {name: "b.safetensors"}}))
    save_file({"stray": torch.zeros(1)}, tmp_path / "stray.safetensors")
    write_single(tmp_path, {"stray": torch.zeros(1)})
    assert_same(load_weights(tmp_path, TINY), dict(weights.by_role()))


def test_a_saved_rope_table_is_passed_over(tmp_path, weights):
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.rotary_emb.inv_freq": torch.ones(4),
    }
    write_single(tmp_path, as_checkpoint(weights) | buffers)
    assert_same(load_weights(tmp_path, TINY), dict(weights.by_role()))


def test_loaded_tensors_outlive_their_file(tmp_path, weights):
    path = write_single(tmp_path, as_checkpoint(weights)) / SINGLE
    loaded = load_weights(tmp_path, TINY)
    with open(path, "r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert_same(loaded, dict(weights.by_role()))


def test_random_weights_follow_their_seed_and_config():
    config = tiny_config(qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, tie_embeddings=True)
    first, again, other = (random_weights(config, seed=seed) for seed in (1, 1, 2))
    assert_same(first, dict(again.by_role()))
    assert not torch.equal(first.embedding, other.embedding)
    assert {role: tuple(t.shape) for role, t in first.by_role()} == model_shapes(config)
    assert first.lm_head is first.embedding
    assert first.num_bytes == 4 * sum(torch.Size(shape).numel() for shape in model_shapes(config).values())


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_a_missing_folder_and_a_stray_kind_of_file_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_weights(tmp_path / "nowhere", TINY)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(WeightsError, match=r"model\.bin: neither"):
        load_weights(tmp_path / "model.bin", TINY)
    with pytest.raises(WeightsError, match=r"no \*\.safetensors"):
        load_weights(tmp_path, TINY)


def test_several_files_without_an_index_are_refused(tmp_path, weights):
    for name, tensors in halved(as_checkpoint(weights)).items():
        save_file(tensors, tmp_path / name)
    with pytest.raises(WeightsError, match=r"a\.safetensors, b\.safetensors, but no model\.safetensors\.index"):
        load_weights(tmp_path, TINY)


def test_an_index_whose_shards_are_gone_does_not_hide_a_whole_file(tmp_path, weights):
    write_shards(tmp_path, halved(as_checkpoint(weights)))
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).unlink()
    save_file(as_checkpoint(weights), tmp_path / "model.safetensors")
    loaded = load_weights(tmp_path, TINY)
    assert all(map(torch.equal, loaded.tensors(), weights.tensors()))


def test_a_missing_shard_is_named(tmp_path, weights):
    write_shards(tmp_path, halved(as_checkpoint(weights)))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"b\.safetensors: missing shard"):
        load_weights(tmp_path, TINY)


def test_a_tensor_its_shard_lacks_is_named(tmp_path, weights):
    shards = halved(as_checkpoint(weights))
    name = min(shards["b.safetensors"])
    write_shards(tmp_path, shards, **{name: "a.safetensors"})
    with pytest.raises(WeightsError, match=f"{name}: the index assigns it to a.safetensors"):
        load_weights(tmp_path, TINY)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "weight_map is missing"),
        ("{}", "weight_map is missing"),
        ('{"weight_map": {}}', "weight_map is missing or empty"),
        ('{"weight_map": {"a": "../other.safetensors"}}', "not a file name"),
        ('{"weight_map": {"a": 3}}', "not a file name"),
    ],
)
def test_a_damaged_index_is_named(tmp_path, text, words):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(WeightsError, match=words) as raised:
        load_weights(tmp_path, TINY)
    assert INDEX in str(raised.value)


@pytest.mark.parametrize("role", [*model_shapes(TINY)])
def test_each_missing_tensor_is_named(tmp_path, weights, role):
    tensors = as_checkpoint(weights)
    tensors.pop(checkpoint_name(role))
    with pytest.raises(WeightsError, match=f"missing from the checkpoint: {checkpoint_name(role)}$"):
        load_weights(write_single(tmp_path, tensors), TINY)


def test_an_untied_config_without_a_head_names_the_head(tmp_path):
    write_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    untied = replace(ModelConfig.from_dir(tmp_path), tie_embeddings=False)
    with pytest.raises(WeightsError, match=r"missing from the checkpoint: lm_head\.weight"):
        load_weights(tmp_path, untied)


@pytest.mark.parametrize("fault", ["another value", "another dtype", "another shape"])
def test_a_head_that_differs_from_a_tied_embedding_is_refused(tmp_path, weights, fault):
    head = weights.embedding.clone()
    head = {"another value": head + 1, "another dtype": head.double(), "another shape": head[:-1].clone()}[fault]
    write_single(tmp_path, as_checkpoint(weights) | {checkpoint_name("lm_head"): head})
    with pytest.raises(WeightsError, match=r"lm_head\.weight: differs from the embedding"):
        load_weights(tmp_path, tiny_config(tie_embeddings=True))


@pytest.mark.parametrize(
    "extra", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "score.weight"]
)
def test_an_unexpected_tensor_is_named(tmp_path, weights, extra):
    write_single(tmp_path, as_checkpoint(weights) | {extra: torch.zeros(3)})
    with pytest.raises(WeightsError, match=f"model.safetensors, but not part of this model: {extra}"):
        load_weights(tmp_path, TINY)


def test_many_missing_tensors_are_counted(tmp_path):
    write_single(tmp_path, {"model.norm.weight": torch.zeros(32)})
    with pytest.raises(WeightsError, match=f"and {len(model_shapes(TINY)) - 1 - 8} more"):
        load_weights(tmp_path, TINY)


@pytest.mark.parametrize("role", ["embedding", "layers.1.k", "layers.0.down", "final_norm"])
def test_a_wrong_shape_is_named(tmp_path, weights, role):
    tensors = as_checkpoint(weights)
    name = checkpoint_name(role)
    tensors[name] = tensors[name][:-1].clone()
    found, wanted = list(tensors[name].shape), list(model_shapes(TINY)[role])
    with pytest.raises(WeightsError) as raised:
        load_weights(write_single(tmp_path, tensors), TINY)
    assert f"{name}: shape {found} in {SINGLE}, the config says {wanted}" in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_a_dtype_that_cannot_be_held_is_named(tmp_path, weights, dtype):
    tensors = as_checkpoint(weights)
    name = checkpoint_name("layers.1.up")
    tensors[name] = tensors[name].to(dtype)
    with pytest.raises(WeightsError, match=f"{name}: stored as .* in model.safetensors"):
        load_weights(write_single(tmp_path, tensors), TINY)


def test_a_wanted_dtype_that_cannot_be_held_is_refused(tmp_path, weights):
    write_single(tmp_path, as_checkpoint(weights))
    with pytest.raises(WeightsError, match=r"dtype: torch\.int8 is not one of"):
        load_weights(tmp_path, TINY, dtype=torch.int8)


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1], ids=["empty", "half a length", "no header", "half a header", "-1"])
def test_a_file_cut_short_is_named(tmp_path, weights, kept):
    path = write_single(tmp_path, as_checkpoint(weights)) / SINGLE
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(WeightsError, match=r"model\.safetensors: not a whole safetensors file"):
        load_weights(tmp_path, TINY)


def test_gate_rejects_a_role_left_out_and_a_shape_that_is_not_configured(weights):
    configured = model_shapes(TINY)
    held = {role: tuple(tensor.shape) for role, tensor in weights.by_role()}
    check_weights_shaped(held=held, configured=configured)
    weights.layers[1].up = None  # a loader that forgot one
    with pytest.raises(GateError, match=r"gate weights\.shaped: .*absent \['layers\.1\.up'\]"):
        check_weights_shaped(held={r: tuple(t.shape) for r, t in weights.by_role()}, configured=configured)
    held["layers.0.q"], held["layers.0.k"] = held["layers.0.k"], held["layers.0.q"]  # a loader that crossed two
    with pytest.raises(GateError, match=r"layers\.0\.q held as \(16, 32\), configured as \(32, 32\)"):
        check_weights_shaped(held=held, configured=configured)
    with pytest.raises(GateError, match=r"extra \['lm_head'\]"):
        check_weights_shaped(held=configured, configured={r: s for r, s in configured.items() if r != "lm_head"})


def test_gate_rejects_weights_that_a_cast_made_infinite(tmp_path, weights):
    weights.layers[1].down[0, 3] = 1e5  # fits bfloat16, not float16
    check_weights_finite(tensors=dict(weights.by_role()))
    write_single(tmp_path, {name: tensor.bfloat16() for name, tensor in as_checkpoint(weights).items()})
    with pytest.raises(GateError, match=r"gate weights\.finite: layers\.1\.down: 1535 finite of 1536"):
        load_weights(tmp_path, TINY, dtype=torch.float16)


# ---- any order --------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_any_split_into_shards_loads_the_same_tensors(tmp_path_factory, data):
    weights = random_weights(TINY)
    shards: dict[str, dict[str, Tensor]] = {}
    for name, tensor in as_checkpoint(weights).items():
        shard = data.draw(st.sampled_from(["c", "a", "b", "z"]))
        shards.setdefault(f"{shard}.safetensors", {})[name] = tensor
    folder = write_shards(tmp_path_factory.mktemp("shards"), shards)
    assert_same(load_weights(folder, TINY), dict(weights.by_role()))


@given(
    flags=st.fixed_dictionaries(
        {name: st.booleans() for name in ("qkv_bias", "output_bias", "mlp_bias", "qk_norm", "tie_embeddings")}
    ),
    heads=st.sampled_from([(1, 1), (3, 1), (3, 3), (8, 1), (8, 4)]),
    head_dim=st.sampled_from([2, 6, 10]),
    file_flags=st.none() | st.sampled_from(["qkv_bias", "output_bias", "mlp_bias", "qk_norm"]),
)
def test_a_checkpoint_loads_exactly_when_it_is_the_configured_model(
    tmp_path_factory, flags, heads, head_dim, file_flags
):
    config = tiny_config(num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, **flags)
    # The file's model differs from the config in at most one switch.
    stored = config if file_flags is None else replace(config, **{file_flags: not flags[file_flags]})
    weights = random_weights(stored)
    folder = write_single(tmp_path_factory.mktemp("switch"), as_checkpoint(weights))
    if stored == config:
        assert_same(load_weights(folder, config), dict(weights.by_role()))
        return
    differing = set(layer_shapes(config)) ^ set(layer_shapes(stored))
    with pytest.raises(WeightsError) as raised:
        load_weights(folder, config)
    assert any(checkpoint_name(f"layers.0.{column}") in str(raised.value) for column in differing)
