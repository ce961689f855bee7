"""Greedy generation three times: over a contiguous cache, over a paged one, and a whole batch at once.

The batch is static: N ragged prompts are padded into one rectangle and prefilled in one forward, then every row
gets one token a step, each at its own absolute position, until the slowest row is done. A finished row keeps its
query, its slot and its block until then. `BatchRun` states that bill; a scheduler is what removes it.

Gates: gates.batch. Proof: tests/test_batch.py. Story: batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gates.batch import check_rows_in_step
from reference.blocks import BatchedPagedKVCache, PagedKVCache
from reference.cache import KVCache

if TYPE_CHECKING:
    from reference.model import LlamaModel

PAD_TOKEN = 0  # fills the prefill rectangle; any id will do, for its K/V is never stored


@dataclass(frozen=True, slots=True)
class BatchRun:
    """What one static batch emitted and what it held at its end, before its blocks were given back."""

    prompt_lens: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...]  # each row's answer, its EOS included
    decode_steps: int
    seq_lens: tuple[int, ...]  # slots each row held
    blocks_held: tuple[int, ...]
    block_size: int

    @property
    def wasted_queries(self) -> int:
        """Decode queries computed for rows that had already emitted their last token."""
        return sum(self.decode_steps - (len(tokens) - 1) for tokens in self.token_ids)

    @property
    def wasted_slots(self) -> int:
        """Slots holding K/V that a row stored after it was done. Its last token's own K/V is never needed either."""
        return sum(self.seq_lens) - sum(self._slots_needed)

    @property
    def wasted_blocks(self) -> int:
        """Blocks that only those slots needed."""
        return sum(self.blocks_held) - sum(-(-slots // self.block_size) for slots in self._slots_needed)

    @property
    def _slots_needed(self) -> list[int]:
        return [prompt + len(tokens) - 1 for prompt, tokens in zip(self.prompt_lens, self.token_ids, strict=True)]


def greedy_generate(
    model: LlamaModel,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    eos_token_ids: Sequence[int] | None = None,
) -> list[int]:
    """Continue one prompt over a contiguous cache, the most likely token each time, EOS included.

    `eos_token_ids` None means the config's own. Raises ValueError on an empty prompt or max_tokens < 1.
    """
    _check_request([prompt_ids], max_tokens)
    cache = KVCache(model.config, max_tokens=len(prompt_ids) + max_tokens, dtype=model.dtype)
    return _continue_one(model, prompt_ids, cache, max_tokens, _eos(model, eos_token_ids))


def greedy_generate_paged(
    model: LlamaModel,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    block_size: int = 16,
    num_blocks: int | None = None,
    eos_token_ids: Sequence[int] | None = None,
) -> list[int]:
    """The same tokens as `greedy_generate`, over a `PagedKVCache` (by default just large enough).

    Raises:
        OutOfBlocks: `num_blocks` cannot hold the answer.
    """
    _check_request([prompt_ids], max_tokens)
    wanted = _blocks_needed([prompt_ids], max_tokens, block_size) if num_blocks is None else num_blocks
    cache = PagedKVCache(model.config, num_blocks=wanted, block_size=block_size, dtype=model.dtype)
    return _continue_one(model, prompt_ids, cache, max_tokens, _eos(model, eos_token_ids))


def greedy_generate_batch(
    model: LlamaModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    block_size: int = 16,
    num_blocks: int | None = None,
    eos_token_ids: Sequence[int] | None = None,
) -> list[list[int]]:
    """Continue N prompts together; row i is what `greedy_generate_paged` emits for prompt i alone."""
    run = run_batch(
        model,
        prompts,
        max_tokens=max_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        eos_token_ids=eos_token_ids,
    )
    return [list(tokens) for tokens in run.token_ids]


def run_batch(
    model: LlamaModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    block_size: int = 16,
    num_blocks: int | None = None,
    eos_token_ids: Sequence[int] | None = None,
) -> BatchRun:
    """`greedy_generate_batch` with its bill.

    Raises:
        ValueError: no prompt, an empty one, or max_tokens < 1.
        OutOfBlocks: `num_blocks` cannot hold the whole batch.
    """
    _check_request(prompts, max_tokens)
    eos = _eos(model, eos_token_ids)
    wanted = _blocks_needed(prompts, max_tokens, block_size) if num_blocks is None else num_blocks
    cache = BatchedPagedKVCache(
        model.config, batch_size=len(prompts), num_blocks=wanted, block_size=block_size, dtype=model.dtype
    )
    prompt_lens = tuple(len(prompt) for prompt in prompts)
    # 1. One forward over the padded rectangle gives every row its first token.
    answers = [[token] for token in _prefill_padded(model, prompts, cache)]
    # 2. One token per row per step, finished rows too: a static batch has no way to leave them out.
    decode_steps = 0
    while not all(_finished(answer, max_tokens, eos) for answer in answers):
        newest = _decode_rows(model, [answer[-1] for answer in answers], cache)
        decode_steps += 1
        check_rows_in_step(prompt_lens=prompt_lens, decode_steps=decode_steps, seq_lens=cache.seq_lens)
        for answer, token in zip(answers, newest, strict=True):
            if not _finished(answer, max_tokens, eos):
                answer.append(token)
    # 3. Only now, all at once, does any row give its blocks back.
    seq_lens, blocks_held = tuple(cache.seq_lens), tuple(len(table.blocks) for table in cache.tables)
    for row in range(len(prompts)):
        cache.free_row(row)
    token_ids = tuple(tuple(answer) for answer in answers)
    return BatchRun(prompt_lens, token_ids, decode_steps, seq_lens, blocks_held, block_size)


def pad_prompts(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:  # [N, T] each
    """The prefill rectangle: token ids padded on the right, positions 0..T-1, and the key mask (True = real)."""
    width = max(len(prompt) for prompt in prompts)
    token_ids = torch.tensor([[*prompt, *[PAD_TOKEN] * (width - len(prompt))] for prompt in prompts])
    positions = torch.arange(width).expand(len(prompts), width)
    return token_ids, positions, positions < torch.tensor([[len(prompt)] for prompt in prompts])


def _continue_one(
    model: LlamaModel,
    prompt_ids: Sequence[int],
    cache: KVCache | PagedKVCache,
    max_tokens: int,
    eos: frozenset[int],
) -> list[int]:
    """Prefill one prompt, then feed each new token back until EOS or the cap."""
    logits = model.forward(torch.tensor([list(prompt_ids)]), torch.arange(len(prompt_ids))[None], cache)
    answer = [int(logits[0, -1].argmax())]
    while not _finished(answer, max_tokens, eos):
        logits = model.forward(torch.tensor([answer[-1:]]), torch.tensor([cache.seq_lens]), cache)
        answer.append(int(logits[0, -1].argmax()))
    return answer


def _prefill_padded(model: LlamaModel, prompts: Sequence[Sequence[int]], cache: BatchedPagedKVCache) -> list[int]:
    """Each row's first token: the likeliest after its own last real column."""
    token_ids, positions, mask = pad_prompts(prompts)
    logits = model.forward(token_ids, positions, cache, attention_mask=mask)  # [N, T, V]
    last = torch.tensor([len(prompt) - 1 for prompt in prompts])
    return logits[torch.arange(len(prompts)), last].argmax(dim=-1).tolist()


def _decode_rows(model: LlamaModel, tokens: Sequence[int], cache: BatchedPagedKVCache) -> list[int]:
    """Feed one token a row, each at its own absolute position, and return the likeliest next ones."""
    positions = torch.tensor(cache.seq_lens)[:, None]  # [N, 1]
    logits = model.forward(torch.tensor(tokens)[:, None], positions, cache)  # [N, 1, V]
    return logits[:, -1].argmax(dim=-1).tolist()


def _finished(answer: Sequence[int], max_tokens: int, eos: frozenset[int]) -> bool:
    return len(answer) >= max_tokens or answer[-1] in eos


def _eos(model: LlamaModel, eos_token_ids: Sequence[int] | None) -> frozenset[int]:
    return frozenset(model.config.eos_token_ids if eos_token_ids is None else eos_token_ids)


def _blocks_needed(prompts: Sequence[Sequence[int]], max_tokens: int, block_size: int) -> int:
    """Enough for every row to hold its prompt and all but the last of its tokens (whose K/V nobody reads)."""
    return sum(-(-(len(prompt) + max_tokens - 1) // block_size) for prompt in prompts)


def _check_request(prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    if not prompts:
        raise ValueError("prompts: empty; a batch has at least one row")
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompts[{row}]: empty; at least one token is needed to compute a next one")
    if max_tokens < 1:
        raise ValueError(f"max_tokens: {max_tokens} is not a positive integer")
