"""Static batches: a row emits what its prompt emits alone, and pays until the slowest row is done."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gates import GateError
from gates.batch import check_prefill_lands_empty, check_rows_in_step
from reference.batch import (
    greedy_generate,
    greedy_generate_batch,
    greedy_generate_paged,
    pad_prompts,
    run_batch,
)
from reference.blocks import BatchedPagedKVCache, OutOfBlocks
from reference.model import LlamaModel
from reference.weights import random_weights
from tests.harness import TINY, tiny_config

MODEL = LlamaModel(TINY, random_weights(TINY, dtype=torch.float64), dtype=torch.float64)
PROMPTS = [[1, 5, 9], [3], [7] * 10, [4, 4, 8, 9, 20]]
EOS = 20


def counting_model() -> LlamaModel:
    """A model whose next token is the last one plus 1: one-hot embeddings, layers that add nothing, a shifted head."""
    config = tiny_config(vocab_size=32, hidden_size=32, num_layers=1, eos_token_ids=(EOS,))
    weights = random_weights(config, dtype=torch.float64)
    silent = replace(
        weights.layers[0],
        output=torch.zeros_like(weights.layers[0].output),
        down=torch.zeros_like(weights.layers[0].down),
    )
    eye = torch.eye(32, dtype=torch.float64)
    norm = torch.ones_like(weights.final_norm)
    shifted = replace(weights, embedding=eye, layers=[silent], final_norm=norm, lm_head=eye.roll(1, dims=0))
    return LlamaModel(config, shifted, dtype=torch.float64)


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_a_batch_emits_what_each_prompt_emits_alone(block_size: int):
    batch = greedy_generate_batch(MODEL, PROMPTS, max_tokens=24, block_size=block_size, eos_token_ids=())
    for prompt, answer in zip(PROMPTS, batch, strict=True):
        alone = greedy_generate_paged(MODEL, prompt, max_tokens=24, block_size=block_size, eos_token_ids=())
        assert answer == alone
        assert alone == greedy_generate(MODEL, prompt, max_tokens=24, eos_token_ids=())
        assert len(answer) == 24


@pytest.mark.parametrize(
    "changes",
    [{"num_kv_heads": 1}, {"qkv_bias": True, "tie_embeddings": True}, {"qk_norm": True, "head_dim": 16}],
    ids=["one-kv-head", "qwen2", "qwen3"],
)
def test_every_family_batches(changes: dict[str, int]):
    config = tiny_config(**changes)
    model = LlamaModel(config, random_weights(config, seed=3, dtype=torch.float64), dtype=torch.float64)
    batch = greedy_generate_batch(model, PROMPTS, max_tokens=12, eos_token_ids=())
    assert batch == [greedy_generate(model, prompt, max_tokens=12, eos_token_ids=()) for prompt in PROMPTS]


def test_the_model_carries_the_same_three_loops():
    assert MODEL.greedy_generate_batch(PROMPTS, max_tokens=5) == greedy_generate_batch(MODEL, PROMPTS, max_tokens=5)
    for prompt in PROMPTS:
        alone = greedy_generate(MODEL, prompt, max_tokens=5)
        assert MODEL.greedy_generate(prompt, max_tokens=5) == alone
        assert MODEL.greedy_generate_paged(prompt, max_tokens=5) == alone


def test_each_row_ends_at_its_own_eos_or_at_the_cap():
    free = greedy_generate_batch(MODEL, PROMPTS, max_tokens=16, eos_token_ids=())
    stops = (free[0][3], free[2][1])  # tokens that are known to come up in the middle of two rows
    for eos in (stops[:1], stops[1:], stops):
        batch = greedy_generate_batch(MODEL, PROMPTS, max_tokens=16, eos_token_ids=eos)
        for answer, unstopped in zip(batch, free, strict=True):
            ends = [i for i, token in enumerate(unstopped) if token in eos]
            assert answer == unstopped[: ends[0] + 1 if ends else 16]
        assert min(len(answer) for answer in batch) < 16


def test_the_configs_own_eos_ids_are_the_default():
    model = counting_model()
    assert greedy_generate(model, [16], max_tokens=9) == [17, 18, 19, EOS]
    assert greedy_generate_batch(model, [[16], [18]], max_tokens=9) == [[17, 18, 19, EOS], [19, EOS]]


def test_one_token_needs_no_decode_step():
    run = run_batch(MODEL, PROMPTS, max_tokens=1)
    assert run.decode_steps == run.wasted_queries == run.wasted_slots == 0
    assert run.seq_lens == tuple(len(prompt) for prompt in PROMPTS)


def test_a_finished_row_keeps_its_query_slot_and_block_until_the_slowest_is_done(monkeypatch: pytest.MonkeyPatch):
    """Rows of 1 to 4 prompt tokens that answer with 2, 3, 5 and 9: 15 decode queries are wanted, 8 x 4 are made."""
    model, queries = counting_model(), []
    forward = LlamaModel.forward

    def counted(self, token_ids, positions, cache, *, attention_mask=None):
        if attention_mask is None:
            queries.append(token_ids.shape[0])
        return forward(self, token_ids, positions, cache, attention_mask=attention_mask)

    monkeypatch.setattr(LlamaModel, "forward", counted)
    prompts = [[18], [0, 17], [0, 0, 15], [0, 0, 0, 11]]
    run = run_batch(model, prompts, max_tokens=20, block_size=4)
    assert [len(tokens) for tokens in run.token_ids] == [2, 3, 5, 9]
    assert queries == [4] * 8
    assert sum(queries) - sum(len(tokens) - 1 for tokens in run.token_ids) == run.wasted_queries == 17
    # Every row holds its prompt and one slot a step; alone, the rows would hold 2, 4, 7 and 12.
    assert run.seq_lens == (9, 10, 11, 12)
    assert run.wasted_slots == (9 - 2) + (10 - 4) + (11 - 7) + (12 - 12) == 17
    assert run.blocks_held == (3, 3, 3, 3)
    assert run.wasted_blocks == (3 - 1) + (3 - 1) + (3 - 2) + (3 - 3) == 5


def test_the_prefill_rectangle_is_not_what_the_pool_holds():
    token_ids, positions, mask = pad_prompts(PROMPTS)
    assert token_ids.shape == positions.shape == mask.shape == (4, 10)
    cache = BatchedPagedKVCache(TINY, batch_size=4, num_blocks=8, block_size=4, dtype=torch.float64)
    MODEL.forward(token_ids, positions, cache, attention_mask=mask)
    assert (token_ids.numel(), cache.cached_tokens) == (40, 19)
    assert cache.allocator.num_owned == 1 + 1 + 3 + 2


def test_the_batch_needs_exactly_the_blocks_it_says():
    lengths = [len(prompt) + 6 - 1 for prompt in PROMPTS]
    needed = sum(-(-length // 4) for length in lengths)
    run = run_batch(MODEL, PROMPTS, max_tokens=6, block_size=4, num_blocks=needed, eos_token_ids=())
    assert sum(run.blocks_held) == needed
    with pytest.raises(OutOfBlocks):
        run_batch(MODEL, PROMPTS, max_tokens=6, block_size=4, num_blocks=needed - 1, eos_token_ids=())


@pytest.mark.model
def test_the_real_model_batches_as_each_prompt_alone():
    from reference.config import ModelConfig
    from reference.weights import load_weights
    from serve.models import model_path

    folder = model_path("smollm2-135m-instruct")
    config = ModelConfig.from_dir(folder)
    model = LlamaModel(config, load_weights(folder, config))
    generator = torch.Generator().manual_seed(4)  # the closest top two of these answers are 0.03 apart
    prompts = [torch.randint(0, config.vocab_size, (n,), generator=generator).tolist() for n in (1, 5, 17, 33)]
    batch = model.greedy_generate_batch(prompts, max_tokens=16, eos_token_ids=())
    for prompt, answer in zip(prompts, batch, strict=True):
        assert answer == model.greedy_generate_paged(prompt, max_tokens=16, eos_token_ids=())
        assert answer == model.greedy_generate(prompt, max_tokens=16, eos_token_ids=())


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_prompts_and_caps_that_mean_nothing_are_refused_by_name():
    with pytest.raises(ValueError, match="prompts: empty"):
        greedy_generate_batch(MODEL, [], max_tokens=4)
    with pytest.raises(ValueError, match=r"prompts\[1\]: empty"):
        greedy_generate_batch(MODEL, [[1], []], max_tokens=4)
    for generate in (greedy_generate, greedy_generate_paged):
        with pytest.raises(ValueError, match="max_tokens: 0"):
            generate(MODEL, [1], max_tokens=0)


def test_gate_rejects_a_second_masked_prefill():
    token_ids, positions, mask = pad_prompts(PROMPTS)
    cache = BatchedPagedKVCache(TINY, batch_size=4, num_blocks=16, block_size=4, dtype=torch.float64)
    MODEL.forward(token_ids, positions, cache, attention_mask=mask)
    continued = positions + torch.tensor(cache.seq_lens)[:, None]
    with pytest.raises(GateError, match=r"batch.prefill_lands_empty: a masked prefill sees 0 earlier tokens"):
        MODEL.forward(token_ids, continued, cache, attention_mask=mask)
    assert cache.seq_lens == [3, 1, 10, 5]
    with pytest.raises(GateError):
        check_prefill_lands_empty(seq_lens=cache.seq_lens)


def test_gate_rejects_a_row_that_left_a_static_batch_early():
    cache = BatchedPagedKVCache(TINY, batch_size=4, num_blocks=16, block_size=4, dtype=torch.float64)
    token_ids, positions, mask = pad_prompts(PROMPTS)
    MODEL.forward(token_ids, positions, cache, attention_mask=mask)
    cache.free_row(2)
    with pytest.raises(GateError, match=r"batch.rows_in_step: 0 tokens held, 10 of prompt \+ 0 steps = 10"):
        check_rows_in_step(prompt_lens=[3, 1, 10, 5], decode_steps=0, seq_lens=cache.seq_lens)


# ---- any order --------------------------------------------------------------------------------------------------


@given(
    prompts=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=9), min_size=1, max_size=5),
    max_tokens=st.integers(1, 9),
    block_size=st.integers(1, 5),
    eos=st.sets(st.integers(0, 60), max_size=12),
)
def test_any_batch_emits_what_its_prompts_emit_alone(
    prompts: list[list[int]], max_tokens: int, block_size: int, eos: set[int]
):
    run = run_batch(MODEL, prompts, max_tokens=max_tokens, block_size=block_size, eos_token_ids=sorted(eos))
    for prompt, answer in zip(prompts, run.token_ids, strict=True):
        alone = greedy_generate_paged(MODEL, prompt, max_tokens=max_tokens, eos_token_ids=sorted(eos))
        assert list(answer) == alone
    longest = max(len(answer) for answer in run.token_ids)
    assert run.decode_steps == longest - 1
    assert run.wasted_queries == sum(longest - len(answer) for answer in run.token_ids)
