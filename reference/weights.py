"""The tensors of a model, by role, held once and in the dtype they were rounded to.

`ModelWeights` is what both engines compute from, so a lockstep test compares the same rounded numbers. This
module knows roles and shapes; `checkpoint` and `gguf_file` know the two kinds of file, and neither does arithmetic
that an engine would: an engine casts to its own compute dtype.

Gates: gates.weights. Proof: tests/test_weights.py. Story: model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from gates.weights import check_weights_finite, check_weights_shaped
from reference.config import ModelConfig

HELD_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class WeightsError(ValueError):
    """Weights that are not what the config says, or cannot be read. The message names the file or the tensor."""


@dataclass(slots=True)
class LayerWeights:
    """One transformer block. M hidden size, F feed-forward size, H query heads, K K/V heads, D head size."""

    input_norm: Tensor  # [M]
    q: Tensor  # [H*D, M]
    k: Tensor  # [K*D, M]
    v: Tensor  # [K*D, M]
    output: Tensor  # [M, H*D]
    post_norm: Tensor  # [M]
    gate: Tensor  # [F, M]
    up: Tensor  # [F, M]
    down: Tensor  # [M, F]
    q_bias: Tensor | None = None  # [H*D]
    k_bias: Tensor | None = None  # [K*D]
    v_bias: Tensor | None = None  # [K*D]
    output_bias: Tensor | None = None  # [M]
    gate_bias: Tensor | None = None  # [F]
    up_bias: Tensor | None = None  # [F]
    down_bias: Tensor | None = None  # [M]
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]


@dataclass(slots=True)
class ModelWeights:
    """A whole model. With tied embeddings `lm_head` is the very tensor `embedding` is."""

    embedding: Tensor  # [V, M]
    layers: list[LayerWeights]
    final_norm: Tensor  # [M]
    lm_head: Tensor  # [V, M]

    def by_role(self) -> Iterator[tuple[str, Tensor]]:
        """Every distinct tensor once with its role (`embedding`, `layers.3.q`, `final_norm`), in reading order."""
        yield "embedding", self.embedding
        for index, layer in enumerate(self.layers):
            for column in fields(layer):
                tensor = getattr(layer, column.name)
                if tensor is not None:
                    yield f"layers.{index}.{column.name}", tensor
        yield "final_norm", self.final_norm
        if self.lm_head is not self.embedding:
            yield "lm_head", self.lm_head

    def tensors(self) -> Iterator[Tensor]:
        """Every distinct tensor once, in reading order."""
        return (tensor for _, tensor in self.by_role())

    @property
    def num_bytes(self) -> int:
        """Bytes of all distinct tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that lies in a file and has not been read. `read` gives memory of its own, in a held dtype."""

    source: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def load_weights(path: Path, config: ModelConfig, *, dtype: torch.dtype | None = None) -> ModelWeights:
    """Read a model's weights from a folder of `*.safetensors` or from a `.gguf` file.

    `dtype` None keeps what is stored, tensor by tensor (quantised GGUF blocks become float32); given, each tensor is
    cast once as it is read, so no second copy of the model ever exists.

    Raises:
        WeightsError: a shard or tensor is missing, unexpected, damaged, of another shape than `config` says, or of a
            dtype that cannot be held. The message names it.
        FileNotFoundError: nothing lies at `path`.
    """
    # The readers take WeightsError and StoredTensor from this module, so it imports them late.
    from reference.checkpoint import read_checkpoint_weights
    from reference.gguf_file import read_gguf_weights

    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if path.is_dir():
        return read_checkpoint_weights(path, config, dtype=dtype)
    if path.suffix != ".gguf":
        raise WeightsError(f"{path}: neither a folder of *.safetensors nor a .gguf file")
    return read_gguf_weights(path, config, dtype=dtype)


def assemble(
    config: ModelConfig,
    stored: Mapping[str, StoredTensor],
    *,
    name_of: Callable[[str], str],
    dtype: torch.dtype | None = None,
) -> ModelWeights:
    """Turn the tensors of a file into a model's, after checking all names and shapes before the first is read.

    `stored` holds every tensor of the checkpoint by its own name; `name_of` gives that name for a role. With tied
    embeddings a stored head is accepted when it equals the embedding, dtype and values, and is not kept.

    Raises:
        WeightsError: naming the tensors that are missing, unexpected, or of the wrong shape or dtype.
    """
    if dtype is not None and dtype not in HELD_DTYPES:
        raise WeightsError(f"dtype: {dtype} is not one of {', '.join(map(str, HELD_DTYPES))}")
    shapes = model_shapes(config)
    head_name = name_of("lm_head")
    _check_names(stored, {name_of(role): shape for role, shape in shapes.items()}, may_have=head_name)

    def read(role: str) -> Tensor:
        tensor = stored[name_of(role)].read()
        return tensor if dtype is None else tensor.to(dtype)

    embedding = read("embedding")
    layers = [
        LayerWeights(**{column: read(f"layers.{index}.{column}") for column in layer_shapes(config)})
        for index in range(config.num_layers)
    ]
    final_norm = read("final_norm")
    if config.tie_embeddings and head_name in stored:
        head = read("lm_head")
        if head.dtype != embedding.dtype or not torch.equal(head, embedding):
            raise WeightsError(f"{head_name}: differs from the embedding, but tie_word_embeddings is true")
    weights = ModelWeights(embedding, layers, final_norm, embedding if config.tie_embeddings else read("lm_head"))
    check_weights_shaped(held={role: tuple(t.shape) for role, t in weights.by_role()}, configured=shapes)
    check_weights_finite(tensors=dict(weights.by_role()))
    return weights


def model_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that this model has, by role (`embedding`, `layers.3.q`, `final_norm`, `lm_head`)."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{column}": shape for column, shape in layer_shapes(config).items()}
    shapes["final_norm"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["lm_head"] = (config.vocab_size, config.hidden_size)
    return shapes


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a layer of this model has, by `LayerWeights` field name."""
    m, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * d, config.num_kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (m,),
        "q": (q_rows, m),
        "k": (kv_rows, m),
        "v": (kv_rows, m),
        "output": (m, q_rows),
        "post_norm": (m,),
        "gate": (f, m),
        "up": (f, m),
        "down": (m, f),
    }
    if config.qkv_bias:
        shapes |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
    if config.output_bias:
        shapes |= {"output_bias": (m,)}
    if config.mlp_bias:
        shapes |= {"gate_bias": (f,), "up_bias": (f,), "down_bias": (m,)}
    if config.qk_norm:
        shapes |= {"q_norm": (d,), "k_norm": (d,)}
    return shapes


def random_weights(config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> ModelWeights:
    """Seeded weights for tests and first steps: normal, scaled so that logits have a spread worth sampling."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    def layer_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm"):
            return (1.0 + normal(*shape, scale=0.1)).to(dtype)
        return normal(*shape, scale=0.1 if len(shape) == 1 else shape[-1] ** -0.5)

    embedding = normal(config.vocab_size, config.hidden_size, scale=1.0)
    shapes = layer_shapes(config)
    layers = [
        LayerWeights(**{name: layer_tensor(name, shape) for name, shape in shapes.items()})
        for _ in range(config.num_layers)
    ]
    head_scale = 2.0 * config.hidden_size**-0.5
    lm_head = embedding if config.tie_embeddings else normal(config.vocab_size, config.hidden_size, scale=head_scale)
    return ModelWeights(embedding, layers, layer_tensor("final_norm", (config.hidden_size,)), lm_head)


def _check_names(stored: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], *, may_have: str) -> None:
    missing = sorted(set(expected) - set(stored))
    if missing:
        raise WeightsError(f"missing from the checkpoint: {_listed(missing)}")
    unexpected = sorted(set(stored) - set(expected) - {may_have})
    if unexpected:
        raise WeightsError(f"in {stored[unexpected[0]].source}, but not part of this model: {_listed(unexpected)}")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            found = list(stored[name].shape)
            raise WeightsError(f"{name}: shape {found} in {stored[name].source}, the config says {list(shape)}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
