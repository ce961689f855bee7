"""A prompt's logprobs: each token's once, the same bits under every schedule, and nothing for those who do not ask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fast.score
from fast.engine import Engine
from fast.rows import Sequence
from fast.score import PromptScores, UnusablePrompt
from gates import GateError
from gates.core import at_level
from gates.sampling import check_prompt_scored
from reference.request import Completion, PromptLogprobs, Request, SamplingParams
from tests.harness import compare, lockstep, tiny_engine, tiny_reference
from tests.traces import PREEMPTED, RUNNING, Arrival, LockstepError, Trace

SMALL: dict[str, Any] = {"block_size": 4, "num_blocks": 40, "max_model_len": 60, "max_batch_size": 3}
KERNELS: dict[str, Any] = {"kernels": True, "threads": 1, "dtype": torch.float32}
KERNELS |= {"block_size": 16, "num_blocks": 24, "max_model_len": 160}


def request(name: str, length: int, max_tokens: int = 4, **fields: Any) -> Request:
    """A greedy request over a prompt of its own that asks for its logprobs unless told otherwise."""
    prompt = tuple(3 + (len(name) * 7 + i * i) % 50 for i in range(length))
    fields = {"temperature": 0.0, "ignore_eos": True, "prompt_logprobs": 2} | fields
    return Request(prompt, SamplingParams(max_tokens=max_tokens, **fields), name)


def kernels(**changes: Any) -> Engine:
    """A fast engine on the CPU kernels, whose rows keep their bits."""
    from tests.harness import SHAPES, tiny_weights

    return Engine.build(SHAPES["gqa"], tiny_weights(), **(KERNELS | {"max_batch_size": 4} | changes))


def scored(completion: Completion) -> PromptLogprobs:
    assert completion.prompt_logprobs is not None
    return completion.prompt_logprobs


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("arm", ["exact-free", "warm-compact"])
def test_both_engines_score_prompts_alike_in_chunks_beside_others_and_preempted(arm: str, mixed: bool):
    requests = [
        request("a", 17, 25),
        request("bb", 23, 19, temperature=1.0, seed=3, n=2),
        request("ccc", 1),
        request("dddd", 30, 0),
        request("eeeee", 9, 30, prompt_logprobs=None),
        replace(request("a", 17, 0), id="again"),
        request("ffffff", 12, 0, prompt_logprobs=None, n=2),
    ]
    arrivals = tuple(Arrival(i, one) for i, one in enumerate(requests))
    limits: dict[str, Any] = SMALL | {"num_blocks": 12, "max_model_len": 48, "chunk_tokens": 7, "prefix_cache": True}
    aborts = ((20, RUNNING), (9, PREEMPTED))
    with at_level("full"):
        run = lockstep(Trace(arrivals, aborts, arm=arm, mixed_steps=mixed, **limits))
    assert run.engine.stats()["preemptions"] > 0


def test_an_answer_has_the_logprobs_that_the_same_tokens_have_in_a_prompt():
    engine = kernels()
    [first] = engine.generate([request("a", 40, 30, logprobs=2)])
    whole = Request((*first.prompt_ids, *first.token_ids), replace(request("b", 1).params, max_tokens=0), "whole")
    [again] = engine.generate([whole])
    assert scored(again)[:40] == scored(first)
    assert list(scored(again)[40:]) == first.logprobs


def test_any_schedule_gives_a_prompt_the_same_bits():
    target, others = request("target", 130, 3), [request(f"other{i}", 20 + 9 * i, 20) for i in range(5)]
    [alone] = kernels().generate([target])
    shared = replace(target, params=replace(target.params, prompt_logprobs=None), id="before")
    arms: list[dict[str, Any]] = [
        {"chunk_tokens": 7},
        {"chunk_tokens": 33, "prefix_cache": True},
        {"num_blocks": 11, "chunk_tokens": 50},
        {"max_batch_size": 1},
    ]
    for arm in arms:
        engine = kernels(**arm)
        engine.mixed_steps = arm.get("chunk_tokens") == 33
        engine.generate([shared])
        [*_, got] = engine.generate([*others, target])
        assert got.prompt_logprobs == alone.prompt_logprobs, arm


def test_neither_temperature_nor_penalties_nor_bias_alter_them():
    plain = request("a", 20)
    changed = replace(
        plain.params, temperature=3.0, seed=1, repetition_penalty=2.0, logit_bias={5: 50.0}, top_k=1, min_p=0.5
    )
    for engine in (tiny_engine(**SMALL), tiny_reference()):
        [one] = engine.generate([plain])
        [other] = engine.generate([replace(plain, params=changed)])
        assert one.prompt_logprobs == other.prompt_logprobs


def test_several_answers_share_what_was_computed_once():
    engine = tiny_engine(**SMALL, prefix_cache=True)
    completions = engine.generate([request("a", 20, 3, n=3, temperature=1.0, seed=4)])
    assert [one.prompt_logprobs for one in completions] == [scored(completions[0])] * 3
    assert engine.prefill.scored == 19


def test_a_preempted_prompt_is_not_scored_twice():
    engine = tiny_engine(**SMALL | {"num_blocks": 10}, chunk_tokens=9)
    requests = [request("a" * i, 11, 25) for i in (1, 2, 3)]
    got = engine.generate(requests)
    assert engine.stats()["preemptions"] > 0
    assert engine.prefill.scored == 30
    for one, alone in zip(got, tiny_reference(max_model_len=60).generate(requests), strict=True):
        assert [p and p.rank for p in scored(one)] == [p and p.rank for p in scored(alone)]


def test_a_scored_prompt_finds_nothing_and_leaves_its_blocks_to_others():
    engine = tiny_engine(**SMALL, prefix_cache=True)
    plain = request("a", 22, prompt_logprobs=None)
    found = []
    with at_level("full"):
        for name, asked in (("one", None), ("two", 1), ("three", None)):
            engine.submit(replace(plain, params=replace(plain.params, prompt_logprobs=asked), id=name))
            events = engine.step()
            found.append(events[0].cached_tokens)
            while engine.has_work:
                engine.step()
    assert found == [0, 0, 20]
    fresh = tiny_engine(**SMALL, prefix_cache=True)
    first, second = fresh.generate([request("a", 22), replace(plain, id="b")])  # together: the second one follows
    assert (fresh.stats()["prefix_hit_tokens"], first.token_ids) == (20, second.token_ids)


def test_a_prompt_that_is_preempted_half_scored_finds_nothing_of_what_others_published_past_that():
    engine = tiny_engine(**SMALL, chunk_tokens=4, prefix_cache=True)
    asked = request("a", 22)
    engine.generate([replace(asked, params=replace(asked.params, prompt_logprobs=None))])
    engine.submit(asked)
    engine.step()
    engine.scheduler._preempt(engine._open["a"])
    got = Completion(asked.id, asked.prompt_ids)
    while engine.has_work:
        for event in engine.step():
            got.add(event)
    [alone] = tiny_reference(max_model_len=60).generate([asked])
    assert [p and p.rank for p in scored(got)] == [p and p.rank for p in scored(alone)]
    assert got.token_ids == alone.token_ids


@pytest.mark.parametrize("length", [1, 2, 9, 60])
def test_a_request_of_no_token_ends_with_its_prompt(length: int):
    for engine in (tiny_engine(**SMALL, chunk_tokens=4), tiny_reference(max_model_len=60)):
        engine.submit(request("a", length, 0))
        events = []
        while engine.has_work:
            events += engine.step()
        [only] = events
        assert (only.token_id, only.finish_reason, only.logprobs) == (None, "length", None)
        assert only.prompt_logprobs is not None
        assert len(only.prompt_logprobs) == length
        assert engine.stats()["kv_tokens"] == 0


def test_who_does_not_ask_pays_nothing(monkeypatch: pytest.MonkeyPatch):
    engine = tiny_engine(**SMALL, chunk_tokens=8)
    head, rows = engine.forward.lm_head, []
    monkeypatch.setattr(engine.forward, "lm_head", lambda x: (rows.append(len(x)), head(x))[1])
    engine.generate([request("a", 21, prompt_logprobs=None), request("b", 9, prompt_logprobs=None)])
    plain = sum(rows)
    rows.clear()
    assert engine.prefill.scored == 0
    engine.generate([request("a", 21, prompt_logprobs=0), request("b", 9, prompt_logprobs=None)])
    assert (sum(rows) - plain, engine.prefill.scored) == (20, 20)  # a row for each token but the first, of one prompt


@pytest.mark.parametrize(("make", "most"), [(kernels, 4), (tiny_engine, 64)])
def test_logits_of_a_long_prompt_are_never_there_all_at_once(make: Any, most: int, monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    take = PromptScores.take

    def watching(self: PromptScores, start: int, logits: Tensor) -> None:
        seen.append(len(logits))
        take(self, start, logits)

    monkeypatch.setattr(PromptScores, "take", watching)
    make(num_blocks=12, block_size=16, max_model_len=150, max_batch_size=4).generate([request("a", 150, 0)])
    assert (max(seen), sum(seen)) == (most, 149)


def test_an_abort_in_the_middle_of_a_scored_prompt_leaves_nothing():
    engine = tiny_engine(**SMALL, chunk_tokens=5)
    engine.submit(request("a", 30))
    engine.step()
    engine.abort("a")
    [event] = engine.step()
    assert (event.finish_reason, event.prompt_logprobs) == ("abort", None)
    assert (engine.has_work, engine.stats()["kv_tokens"]) == (False, 0)


def test_a_rechecking_engine_passes_over_a_request_of_no_token():
    engine = kernels()
    engine.recheck.every = 1
    engine.generate([request("a", 20, 0)])
    assert not engine.idle()


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [False, True])
def test_gate_rejects_a_prompt_of_which_a_part_was_found_in_the_cache(alone: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Sequence, "reads_prompt", False)  # the fault: it is looked up like any other
    engine = tiny_engine(**SMALL, prefix_cache=True)
    engine.generate([request("a", 22, prompt_logprobs=None)])
    fact = (
        "sampling.prompt_scored: 1 logprobs for the 21 prompt tokens after the first; number 1 is of token 21, due is 1"
    )
    if not alone:
        with at_level("cheap"), pytest.raises(GateError, match=fact):
            engine.generate([request("a", 22)])
        return
    engine.fail_alone = True
    with at_level("cheap"):
        hurt, fine = engine.generate([request("a", 22), request("bb", 6)])
    assert (hurt.finish_reason, hurt.token_ids, fine.finish_reason) == ("error", [], "length")
    assert fact in (hurt.error or "")


def test_gate_rejects_a_prompt_that_a_preemption_scores_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PromptScores, "rows", 0)  # the fault: nothing is known of what was scored before
    engine = tiny_engine(**SMALL, chunk_tokens=4)
    engine.submit(request("a", 11))
    engine.step()
    engine.scheduler._preempt(engine._open["a"])
    with (
        at_level("cheap"),
        pytest.raises(GateError, match="14 logprobs for the 10 .*; number 5 is of token 1, due is 5"),
    ):
        engine.generate([])


@pytest.mark.parametrize("positions", [[], [1, 2], [1, 2, 3, 4], [1, 3, 2], [0, 1, 2], [1, 1, 2, 3]])
def test_gate_rejects_logprobs_that_are_not_one_a_token(positions: list[int]):
    with at_level("cheap"):
        check_prompt_scored(positions=[1, 2, 3], prompt_tokens=4)
        with pytest.raises(GateError, match=f"{len(positions)} logprobs for the 3 prompt tokens"):
            check_prompt_scored(positions=positions, prompt_tokens=4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_prompt_with_an_unusable_row_fails_alone(bad: float, monkeypatch: pytest.MonkeyPatch):
    plain = fast.score.as_numpy

    def poisons(logits: Tensor) -> Any:  # [S, V]
        rows = plain(logits).copy()
        rows[2:3, 7] = bad
        return rows

    monkeypatch.setattr(fast.score, "as_numpy", poisons)
    hurt, fine = tiny_engine(**SMALL).generate([request("a", 9), request("b", 9, prompt_logprobs=None)])
    assert (hurt.finish_reason, hurt.error) == ("error", "logits: NaN or +inf where prompt token 3 is due")
    assert (hurt.prompt_logprobs, fine.finish_reason) == (None, "length")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda told: None,
        lambda told: told[:-1],
        lambda told: (told[1], *told[1:]),
        lambda told: (*told[:3], replace(told[3], logprob=told[3].logprob + 1e-8), *told[4:]),
        lambda told: (*told[:3], replace(told[3], rank=told[3].rank + 1), *told[4:]),
    ],
)
def test_lockstep_rejects_prompt_logprobs_that_differ_in_anything(spoil: Any):
    run = lockstep(Trace((Arrival(0, request("a", 9)),), **SMALL))
    [answer] = run.answers
    answer.completion.prompt_logprobs = spoil(scored(answer.completion))
    with pytest.raises(LockstepError, match="^a: "):
        compare(run, answer)


# ---- any order --------------------------------------------------------------------------------------------------


@given(length=st.integers(1, 12), chunks=st.lists(st.integers(0, 5), max_size=20), answer=st.integers(0, 3))
def test_chunks_in_any_sizes_and_from_the_start_again_score_each_token_once(
    length: int, chunks: list[int], answer: int
):
    scores = PromptScores(range(length), num_top=0)
    start = 0
    for count in [*chunks, length + answer]:
        if count == 0:  # preempted: all is computed again
            start = 0
            continue
        count = min(count, length + answer - start)
        if count:
            first, stop = scores.wanted(start, count)
            assert 0 <= first <= stop <= count
            scores.take(start + first, torch.zeros(stop - first, length))
        start += count
        assert scores.rows == min(length - 1, max(start, scores.rows))
    if not scores.complete:
        with pytest.raises(GateError):
            scores.told()
    else:
        assert len(scores.told()) == length


def test_an_unusable_row_is_told_of_whatever_follows():
    scores = PromptScores((1, 2, 0), num_top=1)
    scores.take(0, torch.tensor([[0.0, float("nan"), 0.0], [0.0, 1.0, 2.0]]))
    assert scores.complete
    with pytest.raises(UnusablePrompt, match="prompt token 1 is due"):
        scores.told()
