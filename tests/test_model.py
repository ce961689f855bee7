"""The reference forward pass against arithmetic written out another way: anchors, torch's kernels, loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from gates import GateError
from gates.model import check_logits_finite, check_tokens_in_vocabulary
from reference.attention import dense_attention
from reference.blocks import BatchedPagedKVCache, PagedKVCache
from reference.cache import KVCache
from reference.config import ModelConfig, RopeScaling
from reference.model import LlamaModel, gqa_attention, rms_norm, swiglu
from reference.rope import inverse_frequencies, rope_table, rotate
from reference.weights import layer_shapes, random_weights
from tests.harness import TINY, tiny_config

LLAMA3 = tiny_config(head_dim=64, rope_theta=500_000.0, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192))
FAMILIES = {
    "llama": TINY,
    "one-to-one": tiny_config(num_kv_heads=4),
    "one-kv-head": tiny_config(num_kv_heads=1),
    "tied": tiny_config(tie_embeddings=True),
    "qwen2": tiny_config(qkv_bias=True),
    "biases": tiny_config(qkv_bias=True, output_bias=True, mlp_bias=True),
    "qwen3": tiny_config(qk_norm=True, head_dim=16),
    "llama3": tiny_config(rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64)),
}


def tiny_model(config: ModelConfig = TINY, *, seed: int = 0) -> LlamaModel:
    return LlamaModel(config, random_weights(config, seed=seed, dtype=torch.float64), dtype=torch.float64)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(model: LlamaModel, ids: Sequence[int], chunks: Sequence[int] = ()) -> torch.Tensor:
    """Logits [T, V] of one prompt over a contiguous cache, fed in pieces that end at `chunks`."""
    cache = KVCache(model.config, max_tokens=len(ids), dtype=model.dtype)
    pieces = []
    for start, stop in zip([0, *chunks], [*chunks, len(ids)], strict=True):
        positions = torch.arange(start, stop)[None]
        pieces.append(model.forward(torch.tensor([list(ids[start:stop])]), positions, cache)[0])
    return torch.cat(pieces)


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 5e-8), (torch.float32, 4e-7)])
def test_llama3_frequencies_meet_the_published_anchors(dtype: torch.dtype, tolerance: float):
    plain = inverse_frequencies(replace(LLAMA3, rope_scaling=None), dtype=dtype)
    stretched = inverse_frequencies(LLAMA3, dtype=dtype)
    for pair, before, after in (
        (14, 3.2114460e-3, 3.2114460e-3),
        (15, 2.1311195e-3, 1.2905479e-3),
        (16, 1.4142136e-3, 4.2955680e-4),
        (17, 9.3847387e-4, 9.7082878e-5),
        (18, 6.2277242e-4, 1.9461638e-5),
        (31, 3.0138582e-6, 9.4183067e-8),
    ):
        assert plain[pair].item() == pytest.approx(before, rel=tolerance)
        assert stretched[pair].item() == pytest.approx(after, rel=tolerance)
    assert torch.equal(stretched[:15], plain[:15])
    assert torch.equal(stretched[18:], plain[18:] / 32)


def test_the_float32_table_is_the_float64_one_to_float32_rounding():
    exact = inverse_frequencies(LLAMA3, dtype=torch.float64)
    assert ((inverse_frequencies(LLAMA3).double() / exact - 1).abs() < 4e-7).all()


def test_rope_turns_half_split_pairs_by_position_times_frequency():
    frequencies = inverse_frequencies(TINY)
    head = noise(1, 1, 3, 8)
    turned = rotate(head, *rope_table(torch.tensor([[0, 1, 100]]), frequencies, torch.float64))
    for column, position in enumerate((0, 1, 100)):
        for pair in range(4):
            angle = position * frequencies[pair].item()
            a, b = head[0, 0, column, pair].item(), head[0, 0, column, pair + 4].item()
            got = turned[0, 0, column, pair].item(), turned[0, 0, column, pair + 4].item()
            wanted = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
            # A float32 angle near 100 is good to 100 * 6e-8 radians.
            assert got == pytest.approx(wanted, abs=2e-5)


def test_rope_scores_depend_on_the_distance_alone():
    q, k = noise(1, 1, 1, 8, seed=1), noise(1, 1, 1, 8, seed=2)

    def score(query_at: int, key_at: int) -> float:
        at = [rope_table(torch.tensor([[p]]), inverse_frequencies(TINY), torch.float64) for p in (query_at, key_at)]
        return float((rotate(q, *at[0]) * rotate(k, *at[1])).sum())

    assert score(9 + 77, 5 + 77) == pytest.approx(score(9, 5), abs=1e-4)
    assert score(10, 5) != pytest.approx(score(9, 5), abs=1e-3)


def test_rms_norm_and_swiglu_equal_torch():
    x, weight = noise(2, 3, 32), noise(32, seed=1)
    assert torch.allclose(rms_norm(x, weight, 1e-5), F.rms_norm(x, (32,), weight, 1e-5), rtol=1e-13, atol=1e-14)
    layer = random_weights(tiny_config(mlp_bias=True), dtype=torch.float64).layers[0]
    assert layer.gate_bias is not None
    gate = x @ layer.gate.T + layer.gate_bias
    wanted = (gate / (1 + (-gate).exp()) * (x @ layer.up.T + layer.up_bias)) @ layer.down.T + layer.down_bias
    assert torch.allclose(swiglu(x, layer), wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (4, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_dense_attention_equals_torch(heads: int, kv_heads: int, tokens: int):
    q, k, v = noise(2, heads, tokens, 8), noise(2, kv_heads, 7, 8, seed=1), noise(2, kv_heads, 7, 8, seed=2)
    visible = torch.tensor([[j <= 7 - tokens + i for j in range(7)] for i in range(tokens)])
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    assert torch.allclose(dense_attention(q, k, v), wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_a_token_never_sees_a_later_one(config: ModelConfig):
    model, ids = tiny_model(config), [1, 5, 9, 3, 7]
    before, after = run(model, ids), run(model, [*ids[:3], 40, 41])
    assert torch.equal(before[:3], after[:3])
    assert not torch.allclose(before[3], after[3])


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_feeding_a_prompt_in_pieces_changes_nothing(config: ModelConfig):
    model, ids = tiny_model(config), [1, 5, 9, 3, 7, 7, 2]
    whole = run(model, ids)
    for chunks in ([1], [3, 4], [1, 2, 3, 4, 5, 6]):
        assert torch.allclose(run(model, ids, chunks), whole, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_every_tensor_of_a_layer_is_used(config: ModelConfig):
    weights = random_weights(config, dtype=torch.float64)
    base = run(LlamaModel(config, weights, dtype=torch.float64), [1, 5, 9])
    for field in layer_shapes(config):
        tensor = getattr(weights.layers[0], field)
        changed = replace(weights.layers[0], **{field: tensor + noise(*tensor.shape)})
        other = replace(weights, layers=[changed, *weights.layers[1:]])
        assert not torch.allclose(run(LlamaModel(config, other, dtype=torch.float64), [1, 5, 9]), base), field


def test_a_tied_head_is_the_embedding_and_stays_tied():
    config = FAMILIES["tied"]
    model = LlamaModel(config, random_weights(config, dtype=torch.float32), dtype=torch.float64)
    assert model.weights.lm_head is model.weights.embedding
    untied = LlamaModel(config, replace(model.weights, lm_head=model.weights.embedding.clone()), dtype=torch.float64)
    assert torch.equal(run(model, [1, 5, 9]), run(untied, [1, 5, 9]))


def test_weights_are_cast_once_and_the_callers_are_left_alone():
    weights = random_weights(TINY, dtype=torch.float16)
    kept = [tensor.clone() for tensor in weights.tensors()]
    model = LlamaModel(TINY, weights)
    assert {tensor.dtype for tensor in model.weights.tensors()} == {torch.float32}
    assert run(model, [1, 5, 9]).dtype == torch.float32
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(weights.tensors(), kept, strict=True))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_no_real_logit(side: str):
    model, ids, pad = tiny_model(), [1, 5, 9], 4
    mask = [0] * pad + [1] * 3 if side == "left" else [1] * 3 + [0] * pad
    real = [column for column, keep in enumerate(mask) if keep]
    token_ids = torch.tensor([[9, *[3] * 6], [11] * 7])
    positions = torch.tensor([list(range(7)), [0] * 7])
    token_ids[1, real], positions[1, real] = torch.tensor(ids), torch.arange(3)
    wanted = run(model, ids)
    for cache in (
        KVCache(TINY, max_tokens=7, dtype=torch.float64, batch_size=2),
        BatchedPagedKVCache(TINY, batch_size=2, num_blocks=6, block_size=2, dtype=torch.float64),
    ):
        logits = model.forward(token_ids, positions, cache, attention_mask=torch.tensor([[1] * 7, mask]))
        assert torch.allclose(logits[1, real], wanted, rtol=1e-11, atol=1e-12)


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, TINY.vocab_size])
def test_gate_rejects_a_token_outside_the_vocabulary(token: int):
    with pytest.raises(GateError, match=rf"model.tokens_in_vocabulary: token ids .*{token}.* the vocabulary is 0..60"):
        run(tiny_model(), [1, token] if token > 0 else [token, 1])
    with pytest.raises(GateError):
        check_tokens_in_vocabulary(token_ids=torch.tensor([[token]]), vocab_size=TINY.vocab_size)


def test_gate_rejects_logits_that_are_not_numbers():
    weights = random_weights(TINY, dtype=torch.float64)
    weights.layers[1].down[0, 0] = math.inf  # what a float16 overflow at conversion leaves behind
    with pytest.raises(GateError, match=r"model.logits_finite: \d+ of 183 logits are not finite"):
        run(LlamaModel(TINY, weights, dtype=torch.float64), [1, 5, 9])
    with pytest.raises(GateError):
        check_logits_finite(logits=torch.tensor([[[0.0, math.nan]]]))


def test_shapes_that_do_not_agree_are_refused_by_name():
    model, cache = tiny_model(), KVCache(TINY, max_tokens=8, dtype=torch.float64)
    ids = torch.tensor([[1, 5]])
    with pytest.raises(ValueError, match=r"token_ids, positions: shapes \[1, 2\] and \[1, 3\]"):
        model.forward(ids, torch.arange(3)[None], cache)
    with pytest.raises(ValueError, match="token_ids"):
        model.forward(ids[:, :0], torch.arange(0)[None], cache)
    with pytest.raises(ValueError, match=r"attention_mask: shape \[1, 3\] is not \[1, 2\]"):
        model.forward(ids, torch.arange(2)[None], cache, attention_mask=torch.ones(1, 3))
    assert cache.length == 0


def test_a_mask_over_one_block_table_is_refused():
    cache = PagedKVCache(TINY, num_blocks=2, block_size=4, dtype=torch.float64)
    with pytest.raises(ValueError, match="attention_mask: given, one block table"):
        tiny_model().forward(torch.tensor([[1, 5]]), torch.arange(2)[None], cache, attention_mask=torch.ones(1, 2))
    assert cache.seq_lens == [0]


def test_several_tokens_a_row_without_a_mask_are_no_decode():
    cache = BatchedPagedKVCache(TINY, batch_size=2, num_blocks=4, block_size=4, dtype=torch.float64)
    q, kv = noise(2, 4, 3, 8), noise(2, 2, 3, 8)
    with pytest.raises(ValueError, match="attention_mask: missing, and 3 tokens a row are a prefill"):
        gqa_attention(0, q, kv, kv, cache)
    assert cache.seq_lens == [0, 0]


# ---- any order --------------------------------------------------------------------------------------------------

prompts = st.lists(st.integers(0, TINY.vocab_size - 1), min_size=2, max_size=12)


@given(ids=prompts, cuts=st.sets(st.integers(1, 11)), block_size=st.integers(1, 5))
def test_any_split_of_a_prompt_over_either_cache_gives_the_same_logits(ids: list[int], cuts: set[int], block_size: int):
    model = tiny_model()
    whole, chunks = run(model, ids), sorted(cut for cut in cuts if cut < len(ids))
    paged = PagedKVCache(TINY, num_blocks=12, block_size=block_size, dtype=torch.float64)
    pieces = [
        model.forward(torch.tensor([ids[a:b]]), torch.arange(a, b)[None], paged)[0]
        for a, b in zip([0, *chunks], [*chunks, len(ids)], strict=True)
    ]
    assert torch.allclose(run(model, ids, chunks), whole, rtol=1e-11, atol=1e-12)
    assert torch.allclose(torch.cat(pieces), whole, rtol=1e-11, atol=1e-12)
