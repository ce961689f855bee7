"""The contiguous cache: what is written is what is read, layer 0 counts, and every token follows its own history."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gates import GateError
from gates.cache import check_positions_follow
from reference.cache import KVCache
from reference.model import LlamaModel
from reference.weights import random_weights
from tests.harness import TINY

MODEL = LlamaModel(TINY, random_weights(TINY, dtype=torch.float64), dtype=torch.float64)


def new_cache(max_tokens: int = 8, batch_size: int = 1) -> KVCache:
    return KVCache(TINY, max_tokens=max_tokens, dtype=torch.float64, batch_size=batch_size)


def kv(tokens: int, *, rows: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn((2, rows, TINY.num_kv_heads, tokens, TINY.head_dim), generator=generator, dtype=torch.float64)
    return k, v


# ---- holds ------------------------------------------------------------------------------------------------------


def test_layer_0_counts_the_step_and_later_layers_write_beside_it():
    cache = new_cache()
    for step, tokens in enumerate((3, 1, 4)):
        written = [kv(tokens, seed=10 * step + layer) for layer in range(TINY.num_layers)]
        before = cache.length
        for layer, (k, v) in enumerate(written):
            keys, values = cache.update(layer, k, v)
            assert cache.length == before + tokens == keys.shape[2] == values.shape[2]
            assert torch.equal(keys[:, :, before:], k)
            assert torch.equal(values[:, :, before:], v)
    assert cache.length == cache.max_tokens


def test_rows_of_an_equal_length_batch_are_rows_alone():
    prompts = torch.tensor([[1, 5, 9, 4], [3, 3, 7, 60], [0, 1, 2, 3]])
    together = new_cache(batch_size=3)
    batch = MODEL.forward(prompts, torch.arange(4).expand(3, 4), together)
    for row in range(3):
        alone = MODEL.forward(prompts[row : row + 1], torch.arange(4)[None], new_cache())
        assert torch.allclose(batch[row], alone[0], rtol=1e-11, atol=1e-12)
    assert together.seq_lens == [4, 4, 4]


def test_a_padded_batch_decodes_under_its_mask_as_each_row_alone():
    cache, mask = new_cache(batch_size=2), torch.tensor([[1, 1, 1], [1, 0, 0]])
    MODEL.forward(torch.tensor([[1, 5, 9], [4, 0, 0]]), torch.arange(3).expand(2, 3), cache, attention_mask=mask)
    mask = torch.cat((mask, torch.ones(2, 1, dtype=mask.dtype)), dim=1)
    step = MODEL.forward(torch.tensor([[6], [7]]), torch.tensor([[3], [1]]), cache, attention_mask=mask)
    for row, ids in enumerate(([1, 5, 9, 6], [4, 7])):
        alone = MODEL.forward(torch.tensor([ids]), torch.arange(len(ids))[None], new_cache())
        assert torch.allclose(step[row, -1], alone[0, -1], rtol=1e-11, atol=1e-12)


def test_a_narrower_store_rounds_once_and_answers_in_the_dtype_it_was_given() -> None:
    k, v = torch.randn(2, 1, TINY.num_kv_heads, 3, TINY.head_dim, dtype=torch.float32).unbind(0)
    cache = KVCache(TINY, max_tokens=4, dtype=torch.float16)
    for layer in range(TINY.num_layers):
        keys, values = cache.update(layer, k, v)
        assert keys.dtype == values.dtype == torch.float32
        assert torch.equal(keys, k.half().float())
        assert torch.equal(values, v.half().float())


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("held", "more"), [(0, 9), (8, 1), (5, 4)])
def test_tokens_beyond_the_end_are_refused_and_nothing_moves(held: int, more: int):
    cache = new_cache()
    if held:
        cache.update(0, *kv(held))
    kept = cache.k.clone()
    with pytest.raises(ValueError, match=f"max_tokens: {held} held and {more} more exceed 8"):
        cache.update(0, *kv(more))
    assert cache.length == held
    assert torch.equal(cache.k, kept)


def test_sizes_that_mean_nothing_are_refused_by_name():
    with pytest.raises(ValueError, match="max_tokens: 0 is not a positive integer"):
        new_cache(max_tokens=0)
    with pytest.raises(ValueError, match="batch_size: 0 is not a positive integer"):
        new_cache(batch_size=0)
    with pytest.raises(ValueError, match="batch_size: 2 rows written, the cache has 1"):
        new_cache().update(0, *kv(1, rows=2))


def test_gate_rejects_a_row_that_counts_the_batchs_columns():
    cache, mask = new_cache(batch_size=2), torch.tensor([[1, 1, 1], [1, 0, 0]])
    ids = torch.tensor([[1, 5, 9], [4, 0, 0]])
    MODEL.forward(ids, torch.arange(3).expand(2, 3), cache, attention_mask=mask)
    wide = torch.cat((mask, torch.ones(2, 1, dtype=mask.dtype)), dim=1)
    with pytest.raises(GateError, match=r"cache.positions_follow: token 0 .* position 3, 1 tokens held put it at 1"):
        MODEL.forward(ids[:, :1], torch.tensor([[3], [3]]), cache, attention_mask=wide)


def test_gate_rejects_positions_that_restart_or_repeat():
    for positions, held in (([[0]], [4]), ([[4, 4]], [4]), ([[5]], [4])):
        with pytest.raises(GateError, match=r"first at row 0; 1 of 1"):
            check_positions_follow(positions=torch.tensor(positions), seq_lens=held)
    with pytest.raises(GateError, match="2 rows of positions, 1 in the cache"):
        check_positions_follow(positions=torch.zeros(2, 1, dtype=torch.int64), seq_lens=[0])


# ---- any order --------------------------------------------------------------------------------------------------


@given(steps=st.lists(st.integers(1, 5), max_size=8), rows=st.integers(1, 3))
def test_any_series_of_writes_reads_back_as_one_concatenation(steps: list[int], rows: int):
    cache = KVCache(TINY, max_tokens=max(1, sum(steps)), dtype=torch.float64, batch_size=rows)
    history: list[list[torch.Tensor]] = [[] for _ in range(TINY.num_layers)]
    for step, tokens in enumerate(steps):
        for layer in range(TINY.num_layers):
            k, v = kv(tokens, rows=rows, seed=10 * step + layer)
            history[layer].append(k)
            keys, _ = cache.update(layer, k, v)
            assert torch.equal(keys, torch.cat(history[layer], dim=2))
        assert cache.seq_lens == [sum(steps[: step + 1])] * rows
