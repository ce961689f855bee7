"""The installed model as a GGUF file for llama.cpp: the same values, in halves or in float32, without a tokenizer."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from reference.config import ModelConfig
from reference.gguf_file import gguf_name
from reference.weights import load_weights


def write_gguf(folder: Path, out: Path, *, half: bool) -> None:
    """Matrices in halves or float32; norms in float32, as llama.cpp wants them.

    Raises:
        ValueError: a model that is no plain Llama.
    """
    config = ModelConfig.from_dir(folder)
    if config.architecture != "llama" or config.rope_scaling is not None:
        raise ValueError(f"{folder}: {config.architecture} is not a plain Llama")
    part = out.with_name(f"{out.name}.part")
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if half else gguf.LlamaFileType.ALL_F32)
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    for role, tensor in load_weights(folder, config).by_role():
        values = tensor.float().numpy()
        _, _, column = role.rpartition(".")
        if column in heads:
            values = interleaved(values, heads[column])
        values = values.astype(np.float16 if half and values.ndim == 2 else np.float32)
        writer.add_tensor(gguf_name(role), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(out)


def interleaved(matrix: NDArray[np.float32], heads: int) -> NDArray[np.float32]:  # [H * D, M] -> [H * D, M]
    """Rows i and i + D/2 of a head side by side: llama.cpp turns neighbours."""
    rows, inputs = matrix.shape
    return matrix.reshape(heads, 2, rows // heads // 2, inputs).swapaxes(1, 2).reshape(rows, inputs)
