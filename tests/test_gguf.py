"""GGUF: metadata and tensors come back as written, rows in our order, and a file that is not ours is refused by name.

Files are written by the `gguf` package with its own table of tensor names; block formats are checked against scalar
loops that follow ggml's C code; configs and tensors against the transformers checkpoint a file was made from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from reference.config import ConfigError, ModelConfig, RopeScaling
from reference.gguf_file import GGUFFile, halves_from_pairs, read_gguf_config, read_gguf_weights
from reference.weights import ModelWeights, WeightsError, load_weights, random_weights
from tests.checkpoints import LLAMA3_ROPE, SHAPES, write_checkpoint
from tests.harness import TINY, tiny_config

ARCH = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
Tensors = dict[str, tuple[np.ndarray, Kind]]


def write_gguf(path: Path, arch: str, fields: dict[str, Any], tensors: Tensors) -> Path:
    """Write a GGUF file. Numbers get the types that llama.cpp's converter gives them."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fields_of(config: ModelConfig, arch: str, **changes: Any) -> dict[str, Any]:
    """The metadata a converter writes for `config`; a change of `...` leaves a key out."""
    fields: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.head_dim,
    }
    special = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    named = {f"{arch}.{key}": value for key, value in fields.items()} | special | changes
    return {key: value for key, value in named.items() if value is not ...}


def pairs_from_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order of llama.cpp's converter for architecture llama (its `permute`)."""
    shape = (num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def converted(
    state: dict[str, torch.Tensor], config: ModelConfig, arch: str, kind_for: Callable[[str], Kind]
) -> Tensors:
    """What a converter makes of a checkpoint: renamed by the gguf package's own table, permuted, quantised."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_layers)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if arch == "llama" else {}
    tensors: Tensors = {}
    for name, tensor in state.items():
        data = tensor.detach().float().numpy()
        if name.split(".")[-2] in heads:
            data = np.ascontiguousarray(pairs_from_halves(data, heads[name.split(".")[-2]]))
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        kind = kind_for(target) if data.ndim == 2 else Kind.F32
        tensors[target] = (gguf.quants.quantize(data, kind), kind)
    return tensors


def tiny_file(path: Path, *, tensors: Tensors | None = None, config: ModelConfig = TINY, **changes: Any) -> Path:
    """A llama-architecture GGUF file of `random_weights(config)`, with some metadata or tensors changed."""
    from reference.checkpoint import checkpoint_name

    state = {checkpoint_name(role): tensor for role, tensor in random_weights(config).by_role()}
    made = converted(state, config, "llama", lambda _: Kind.F32) | (tensors or {})
    made = {name: entry for name, entry in made.items() if entry[0].size}
    return write_gguf(path, "llama", fields_of(config, "llama", **changes), made)


def without(*names: str) -> Tensors:
    """Tensors to leave out of `tiny_file`."""
    return {name: (np.zeros(0, np.float32), Kind.F32) for name in names}


def assert_same(held: ModelWeights, expected: ModelWeights) -> None:
    ours, theirs = dict(held.by_role()), dict(expected.by_role())
    assert ours.keys() == theirs.keys()
    for role, tensor in theirs.items():
        assert torch.equal(ours[role], tensor), role


# ---- ggml's block formats, one value at a time -------------------------------------------------------------------


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], np.float16)[0])


def q4_0(block: bytes) -> list[float]:
    quants = block[2:]
    return [half(block, 0) * ((quants[i % 16] >> (4 * (i // 16)) & 15) - 8) for i in range(32)]


def q4_1(block: bytes) -> list[float]:
    quants = block[4:]
    return [half(block, 0) * (quants[i % 16] >> (4 * (i // 16)) & 15) + half(block, 2) for i in range(32)]


def q5_0(block: bytes) -> list[float]:
    high, quants = int.from_bytes(block[2:6], "little"), block[6:]
    return [
        half(block, 0) * (((quants[i % 16] >> (4 * (i // 16)) & 15) | (high >> i & 1) << 4) - 16) for i in range(32)
    ]


def q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * int(q) for q in np.frombuffer(block[2:], np.int8)]


def q4_k(block: bytes) -> list[float]:
    scales, quants = block[4:16], block[16:]

    def scale_and_min(j: int) -> tuple[int, int]:
        if j < 4:
            return scales[j] & 63, scales[j + 4] & 63
        return (scales[j + 4] & 15) | (scales[j - 4] >> 6) << 4, (scales[j + 4] >> 4) | (scales[j] >> 6) << 4

    values = []
    for j in range(8):  # 8 groups of 32 share a scale and a minimum; two groups share 32 bytes
        scale, low = scale_and_min(j)
        for byte in quants[32 * (j // 2) : 32 * (j // 2) + 32]:
            values.append(half(block, 0) * scale * (byte >> (4 * (j % 2)) & 15) - half(block, 2) * low)
    return values


def q6_k(block: bytes) -> list[float]:
    values = [0.0] * 256
    scales = np.frombuffer(block[192:208], np.int8)
    for n in range(2):
        low, high = block[64 * n : 64 * n + 64], block[128 + 32 * n : 160 + 32 * n]
        for i in range(32):
            for part in range(4):
                nibble = low[i + 32 * (part % 2)] >> (4 * (part // 2)) & 15
                quant = (nibble | (high[i] >> (2 * part) & 3) << 4) - 32
                scale = int(scales[8 * n + i // 16 + 2 * part])
                values[128 * n + 32 * part + i] = half(block, 208) * scale * quant
    return values


FORMATS: dict[Kind, tuple[Callable[[bytes], list[float]], tuple[int, ...]]] = {
    # How a block is read, and where its float16 scales lie (random bytes there would make infinities).
    Kind.Q4_0: (q4_0, (0,)),
    Kind.Q4_1: (q4_1, (0, 2)),
    Kind.Q5_0: (q5_0, (0,)),
    Kind.Q8_0: (q8_0, (0,)),
    Kind.Q4_K: (q4_k, (0, 2)),
    Kind.Q6_K: (q6_k, (208,)),
}


def random_blocks(kind: Kind, rows: int, blocks: int, seed: int = 0) -> np.ndarray:  # [rows, blocks * bytes] uint8
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, blocks, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for at in FORMATS[kind][1]:
        data[:, :, at : at + 2] = rng.normal(size=(rows, blocks, 1)).astype(np.float16).view(np.uint8)
    return data.reshape(rows, -1)


def by_hand(kind: Kind, data: np.ndarray) -> torch.Tensor:
    size = gguf.GGML_QUANT_SIZES[kind][1]
    rows = [[v for at in range(0, len(r), size) for v in FORMATS[kind][0](bytes(r[at : at + size]))] for r in data]
    # Each value is exact in float64 and is rounded once, as it is in float32 arithmetic.
    return torch.tensor(rows, dtype=torch.float64).float()


# ---- holds ------------------------------------------------------------------------------------------------------


def test_metadata_comes_back_as_plain_values(tmp_path):
    fields = {
        "a.flag": True,
        "a.count": 7,
        "a.number": 0.5,
        "a.text": "ünïcode\n",
        "a.words": ["", "Ġthe", "né", "日本"],
        "a.ids": [3, -1, 5],
        "a.flags": [True, False],
        "a.scores": [0.0, -1.5],
    }
    read = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", fields, without())).fields
    assert {key: read[key] for key in fields} == fields
    assert {key: type(read[key]) for key in fields} == {key: type(value) for key, value in fields.items()}
    assert read["general.architecture"] == "llama"


@pytest.mark.parametrize("kind", [*FORMATS], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 2), (17, 1)])
def test_each_block_format_is_dequantised_as_ggml_does(tmp_path, kind, rows, blocks):
    data = random_blocks(kind, rows, blocks)
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", {}, {"x": (data, kind)}))
    assert file.tensors["x"].shape == (rows, blocks * gguf.GGML_QUANT_SIZES[kind][0])
    assert torch.equal(file.read("x"), by_hand(kind, data))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_plain_types_keep_their_dtype_and_bits(tmp_path, dtype):
    values = torch.randn(3, 5, dtype=torch.float64).to(dtype)
    kind = {torch.float64: Kind.F64, torch.float32: Kind.F32, torch.float16: Kind.F16, torch.bfloat16: Kind.BF16}[dtype]
    raw = values.view(torch.uint8).numpy() if dtype == torch.bfloat16 else values.numpy()
    read = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", {}, {"x": (raw, kind)})).read("x")
    assert read.dtype == dtype
    assert torch.equal(read, values)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_converted_transformers_checkpoint_gives_its_config_and_tensors(tmp_path, shape):
    family, overrides = SHAPES[shape]
    model = write_checkpoint(tmp_path, family, **overrides)
    config, expected = ModelConfig.from_dir(tmp_path), load_weights(tmp_path, ModelConfig.from_dir(tmp_path))
    state = {n: t for n, t in model.state_dict().items() if not (config.tie_embeddings and n == "lm_head.weight")}
    tensors = converted(state, config, ARCH[family], lambda _: Kind.F32)
    if config.rope_scaling:
        tensors["rope_freqs.weight"] = (llama3_factors(model.config), Kind.F32)
    path = write_gguf(tmp_path / "m.gguf", ARCH[family], fields_of(config, ARCH[family]), tensors)
    assert read_gguf_config(path) == replace(config, architecture=ARCH[family])
    assert_same(load_weights(path, read_gguf_config(path)), expected)


def llama3_factors(theirs: Any) -> np.ndarray:  # [D/2] float32
    """What transformers' llama3 rope divides each frequency by."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    pairs = torch.arange(0, theirs.head_dim, 2, dtype=torch.float64) / theirs.head_dim
    plain = 1.0 / theirs.rope_parameters["rope_theta"] ** pairs
    return (plain / stretched.double()).float().numpy()


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float64])
def test_a_quantised_model_loads_in_its_roles(tmp_path, kind, dtype):
    from reference.checkpoint import checkpoint_name

    config = tiny_config(hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16)
    original = random_weights(config)
    state = {checkpoint_name(role): tensor for role, tensor in original.by_role()}
    path = write_gguf(
        tmp_path / "m.gguf", "llama", fields_of(config, "llama"), converted(state, config, "llama", lambda _: kind)
    )
    loaded = dict(read_gguf_weights(path, config, dtype=dtype).by_role())
    for role, tensor in original.by_role():
        # Quantising is row by row, so it commutes with the order of rows.
        rounded = tensor
        if tensor.dim() == 2:
            rounded = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind))
        if dtype is None:
            wanted = {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}.get(kind, torch.float32)
            assert loaded[role].dtype == (wanted if tensor.dim() == 2 else torch.float32)
        assert torch.equal(loaded[role], rounded.to(loaded[role].dtype)), role


# With four numbers a head all pairs lie on the ramp, and only the published factors can be told.
@pytest.mark.parametrize(
    ("head_dim", "factor"), [(4, 8.0), (4, 32.0), (4, 1.0), *((d, f) for d in (64, 128) for f in (8.0, 32.0, 1.0, 2.5))]
)
def test_the_llama3_rope_is_recovered_from_its_table(tmp_path, factor, head_dim):
    import transformers

    rope = LLAMA3_ROPE | {"factor": factor}
    theirs = transformers.LlamaConfig(
        head_dim=head_dim, num_attention_heads=4, rope_parameters=rope, max_position_embeddings=131072
    )
    config = tiny_config(head_dim=head_dim, rope_theta=500_000.0, rope_scaling=RopeScaling(factor, 1.0, 4.0, 8192))
    path = tiny_file(
        tmp_path / "m.gguf", config=config, tensors={"rope_freqs.weight": (llama3_factors(theirs), Kind.F32)}
    )
    assert read_gguf_config(path) == config
    assert_same(load_weights(path, config), random_weights(config))


def test_absent_keys_have_the_defaults_of_the_format(tmp_path):
    keys = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    config = tiny_config(num_kv_heads=4, tie_embeddings=True, eos_token_ids=(), bos_token_id=None)
    gone: dict[str, Any] = {f"llama.{key}": ... for key in (*keys, "rope.dimension_count")}
    gone |= {f"tokenizer.ggml.{kind}_token_id": ... for kind in ("bos", "eos")}
    assert read_gguf_config(tiny_file(tmp_path / "m.gguf", config=config, **gone)) == config


def test_every_kind_of_end_is_an_eos_id(tmp_path):
    ends = {f"tokenizer.ggml.{kind}_token_id": token for kind, token in (("eos", 2), ("eot", 5), ("eom", 2))}
    assert read_gguf_config(tiny_file(tmp_path / "m.gguf", **ends)).eos_token_ids == (2, 5)


def test_one_open_file_serves_config_and_weights(tmp_path):
    file = GGUFFile(tiny_file(tmp_path / "m.gguf"))
    assert_same(read_gguf_weights(file, read_gguf_config(file)), random_weights(TINY))


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.type: 'linear' is not 'none'"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type: 'yarn'"),
        ({"llama.rope.scale_linear": 4.0}, "llama.rope.scale_linear: 4.0 is not 1.0"),
        ({"llama.expert_count": 8}, "llama.expert_count: 8"),
        ({"llama.attention.sliding_window": 255}, "llama.attention.sliding_window: 255 is shorter"),
        ({"llama.attention.sliding_window": "x"}, "llama.attention.sliding_window: 'x'"),
        ({"llama.attention.value_length": 4}, "llama.attention.value_length: 4 is not the head size 8"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count: 4 is not the head size 8"),
        ({"llama.block_count": ...}, "llama.block_count: missing from m.gguf"),
        ({"llama.attention.head_count_kv": [2, 2]}, "llama.attention.head_count_kv: [2, 2] is not a positive integer"),
        ({"llama.embedding_length": 0}, "llama.embedding_length: 0 is not a positive integer"),
        ({"llama.attention.layer_norm_rms_epsilon": ...}, "llama.attention.layer_norm_rms_epsilon: missing"),
        ({"llama.rope.freq_base": -1.0}, "llama.rope.freq_base: -1.0 is not a positive number"),
        ({"llama.rope.freq_base": float("inf")}, "llama.rope.freq_base: inf"),
        ({"tokenizer.ggml.eos_token_id": 61}, "61 is outside the vocabulary"),
        ({"tokenizer.ggml.bos_token_id": "<s>"}, "tokenizer.ggml.bos_token_id: '<s>' is not a token id"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_metadata_this_engine_does_not_run_is_refused_by_name(tmp_path, changes, words):
    with pytest.raises(ConfigError) as raised:
        read_gguf_config(tiny_file(tmp_path / "m.gguf", **changes))
    assert words in str(raised.value)


@pytest.mark.parametrize("arch", ["gemma", "phi3", "gpt2", "mistral3"])
def test_an_unknown_architecture_is_refused_by_name(tmp_path, arch):
    path = write_gguf(tmp_path / "m.gguf", arch, {}, without())
    with pytest.raises(ConfigError, match=f"general.architecture: '{arch}' is not one of llama, qwen2, qwen3"):
        read_gguf_config(path)


def test_a_file_without_an_embedding_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"token_embd\.weight: missing from m\.gguf"):
        read_gguf_config(tiny_file(tmp_path / "m.gguf", tensors=without("token_embd.weight")))


@pytest.mark.parametrize("factors", [[1.0, 1.0, 3.0, 3.0], [1.0] * 3, [0.0] * 4, [float("nan")] * 4], ids=str)
def test_rope_factors_of_another_kind_are_refused(tmp_path, factors):
    tensors = {"rope_freqs.weight": (np.array(factors, np.float32), Kind.F32)}
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight: .* not those of a rope of type llama3"):
        read_gguf_config(tiny_file(tmp_path / "m.gguf", tensors=tensors))


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path):
    with pytest.raises(WeightsError, match=r"missing from the checkpoint: blk\.1\.ffn_up\.weight$"):
        load_weights(tiny_file(tmp_path / "a.gguf", tensors=without("blk.1.ffn_up.weight")), TINY)
    odd = (np.zeros((3, 5), np.float32), Kind.F32)
    with pytest.raises(WeightsError, match=r"in b\.gguf, but not part of this model: blk\.0\.ffn_gate_inp\.weight"):
        load_weights(tiny_file(tmp_path / "b.gguf", tensors={"blk.0.ffn_gate_inp.weight": odd}), TINY)
    with pytest.raises(WeightsError, match=r"blk\.0\.attn_k\.weight: shape \[3, 5\] in c\.gguf, the config says"):
        load_weights(tiny_file(tmp_path / "c.gguf", tensors={"blk.0.attn_k.weight": odd}), TINY)


def test_a_bias_that_only_some_layers_have_is_named(tmp_path):
    path = tiny_file(tmp_path / "m.gguf", tensors={"blk.0.attn_k.bias": (np.ones(16, np.float32), Kind.F32)})
    config = read_gguf_config(path)
    assert config.qkv_bias
    with pytest.raises(WeightsError, match=r"missing from the checkpoint: blk\.0\.attn_q\.bias, blk\.0\.attn_v\.bias"):
        load_weights(path, config)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (np.zeros((2, 4), np.int8), Kind.I8),
        (np.zeros((2, 4), np.int32), Kind.I32),
        (np.zeros((2, 292), np.uint8), Kind.Q8_K),
    ],
)
def test_a_type_that_cannot_be_dequantised_is_named(tmp_path, data, kind):
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", {}, {"some.weight": (data, kind)}))
    with pytest.raises(WeightsError, match=rf"some\.weight: stored as {kind.name} in m\.gguf"):
        file.read("some.weight")


def header(version: int = 3, tensors: int = 0, fields: int = 0) -> bytes:
    return b"GGUF" + np.uint32(version).tobytes() + np.uint64(tensors).tobytes() + np.uint64(fields).tobytes()


def text(value: bytes) -> bytes:
    return np.uint64(len(value)).tobytes() + value


def number(value: int) -> bytes:
    return np.uint32(value).tobytes()


def entry(name: bytes, dims: list[int], kind: int) -> bytes:
    return text(name) + number(len(dims)) + np.array(dims, np.uint64).tobytes() + number(kind) + np.uint64(0).tobytes()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 a zip", "not a GGUF file"),
        (b"GGUF", "cut short"),
        (header(version=1), "GGUF version 1 is not one of 2, 3"),
        (header(version=3 << 24), "GGUF version 50331648"),
        (header(fields=1), "cut short"),
        (header(fields=2**60) + b"\0" * 64, "unknown type|cut short|twice"),
        (header(fields=1) + text(b"k") + number(8) + np.uint64(2**62).tobytes(), "cut short"),
        (header(fields=1) + text(b"k") + number(9) + number(4) + np.uint64(2**61).tobytes(), "cut short"),
        (header(fields=1) + text(b"k") + number(99), "'k' has the unknown type 99"),
        (header(fields=1) + text(b"k") + number(9) + number(9), "'k' is an array of arrays"),
        (header(fields=1) + text(b"\xff"), "a metadata key is not UTF-8"),
        (header(fields=1) + text(b"k") + number(8) + text(b"\xc3("), "a string of 'k' is not UTF-8"),
        (header(fields=2) + 2 * (text(b"k") + number(4) + number(1)), "'k' appears twice"),
        (
            header(fields=1) + text(b"general.alignment") + number(4) + number(0),
            "general.alignment: 0 is not a positive integer",
        ),
        (header(tensors=1) + entry(b"x", [], 0), "'x' has 0 dimensions"),
        (header(tensors=1) + entry(b"x", [1] * 5, 0), "'x' has 5 dimensions"),
        (header(tensors=1) + entry(b"x", [4], 77), "'x' has the unknown type 77"),
        (header(tensors=1) + entry(b"x", [33], 8), "rows of 33 are not whole Q8_0 blocks of 32"),
        (header(tensors=1) + entry(b"x", [2**62, 2**62], 0), "'x' ends at byte .*: cut short"),
        (header(tensors=2) + 2 * entry(b"x", [1], 0) + b"\0" * 64, "'x' appears twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_file_is_refused_by_name(tmp_path, data, words):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=words) as raised:
        GGUFFile(path)
    assert str(path) in str(raised.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
        GGUFFile(tmp_path / "none.gguf")


# ---- any order --------------------------------------------------------------------------------------------------


@given(
    num_heads=st.integers(1, 9),
    half_dim=st.integers(1, 9),
    columns=st.sampled_from([(), (1,), (3,)]),
)
def test_rows_return_to_their_order_for_any_heads(num_heads, half_dim, columns):
    rows = torch.randn(num_heads * 2 * half_dim, *columns)
    permuted = torch.from_numpy(np.ascontiguousarray(pairs_from_halves(rows.numpy(), num_heads)))
    assert torch.equal(halves_from_pairs(permuted, num_heads=num_heads), rows)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    return tiny_file(tmp_path_factory.mktemp("whole") / "m.gguf").read_bytes()


@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(tmp_path_factory, whole, data):
    path = tmp_path_factory.mktemp("cut") / "m.gguf"
    # Each tensor is padded to 32 bytes, so the last cut that loses a number is 32 before the end.
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 32))])
    with pytest.raises(WeightsError):
        GGUFFile(path)


@given(data=st.data())
def test_a_damaged_header_gives_a_config_or_a_named_refusal(tmp_path_factory, whole, data):
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(4, 2500))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    try:
        outcome: object = read_gguf_config(path)
    except (ConfigError, WeightsError) as error:
        outcome = str(error)
    assert outcome
