"""Chunked prefill: what a short request waits behind a long prompt, and one forward a step against two.

Run: `python -m pytest tests/bench/bench_chunk.py --benchmark-enable --benchmark-only`. The arms of a pair answer with
the same tokens before one of them is timed. The wait of the short request is told in tokens that the engine computed
before its first one, which no machine changes, and in milliseconds, which are this one's.
"""

from __future__ import annotations

import time

import pytest

from fast.engine import Engine
from gates.core import at_level
from reference.request import Request, SamplingParams
from serve.machine import machine
from tests.harness import model_of

MODEL = "smollm2-135m-instruct"
LONG, SHORT = 4000, 10
BUDGETS = {"chunked": 512, "whole": 8192}


def engine_of(*, chunk_tokens: int, mixed: bool = False) -> Engine:
    """The real model on the CPU kernels, halves of weights, sixteen rows."""
    sizes = {"max_batch_size": 16, "num_blocks": 700, "max_model_len": 4100}
    engine = Engine.build(*model_of(MODEL), **sizes, kernels=True, half_weights=True, chunk_tokens=chunk_tokens)
    engine.mixed_steps = mixed
    return engine


def request(name: str, prompt: int, answer: int) -> Request:
    ids = [(7 * i + prompt) % 4000 + 100 for i in range(prompt)]
    return Request(ids, SamplingParams(answer, temperature=0.0, ignore_eos=True), name)


def behind_a_long_one(engine: Engine) -> tuple[dict[str, list[int]], int, float]:
    """A short request that comes right after a long prompt: all tokens, and what went before its first one."""
    engine.submit(request("long", LONG, 2))
    engine.submit(request("short", SHORT, 4))
    tokens: dict[str, list[int]] = {}
    before, start, computed, first = engine.prefill.tokens, time.perf_counter(), 0, 0.0
    while engine.has_work:
        for event in engine.step():
            tokens.setdefault(event.request_id, []).append(event.token_id)
        if "short" in tokens and not first:
            computed, first = engine.prefill.tokens - before, time.perf_counter() - start
    return tokens, computed, 1e3 * first


def arriving(engine: Engine, *, rows: int = 8, prompts: int = 6) -> dict[str, list[int]]:
    """Rows that decode all the time, beside prompts of 300 tokens that keep coming."""
    tokens: dict[str, list[int]] = {}
    waiting = [request(f"p{i}", 300, 2) for i in range(prompts)]
    for i in range(rows):
        engine.submit(request(f"r{i}", 20 + i, 60))
    step = 0
    while engine.has_work:
        if step % 5 == 4 and waiting:
            engine.submit(waiting.pop())
        for event in engine.step():
            tokens.setdefault(event.request_id, []).append(event.token_id)
        step += 1
    return tokens


@pytest.mark.model
@pytest.mark.parametrize("arm", BUDGETS)
def bench_first_token_of_a_short_request_behind_a_long_prompt(benchmark, arm: str):
    engine = engine_of(chunk_tokens=BUDGETS[arm])
    with at_level("cheap"):
        tokens, computed, first_ms = benchmark.pedantic(behind_a_long_one, (engine,), rounds=1)
    assert [len(answer) for answer in (tokens["long"], tokens["short"])] == [2, 4]
    assert computed == (512 if arm == "chunked" else LONG + SHORT)
    benchmark.group = f"{SHORT} tokens behind {LONG:,}"
    benchmark.extra_info.update(arm=arm, tokens_before_first=computed, first_token_ms=round(first_ms, 1), **machine())


@pytest.mark.model
@pytest.mark.parametrize("arm", ["two forwards", "mixed"])
@pytest.mark.parametrize("chunk_tokens", [64, 512])
def bench_decoding_beside_prompts(benchmark, arm: str, chunk_tokens: int):
    engine = engine_of(chunk_tokens=chunk_tokens, mixed=arm == "mixed")
    with at_level("cheap"):
        wanted = arriving(engine_of(chunk_tokens=chunk_tokens))
        assert benchmark.pedantic(arriving, (engine,), rounds=3) == wanted, "not the tokens of two forwards"
    assert (engine.forwards.mixed_tokens > 0) == (arm == "mixed")
    benchmark.group = f"8 rows beside prompts, {chunk_tokens} tokens a step"
    benchmark.extra_info.update(arm=arm, **machine())
