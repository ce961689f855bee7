"""Chunked prefill: what a short request waits behind a long prompt, and one forward a step against two.

Run: `python -m pytest tests/bench/bench_chunk.py --benchmark-enable --benchmark-only`. The arms of a pair answer with
the same tokens before one of them is timed. The wait of the short request is told in tokens that the engine computed
before its first one, which no machine changes, and in milliseconds, which are this one's.

`python -m tests.bench.bench_chunk` prints that wait by budget, and two forwards against one at several budgets, arms in
turn, on one thread and in processor time, so that a machine with other work on it can say something too.
"""

from __future__ import annotations

import time
from statistics import median

import pytest

from fast.engine import Engine
from gates.core import at_level
from reference.request import Request, SamplingParams
from serve.machine import machine
from tests.harness import model_of

MODEL = "smollm2-135m-instruct"
LONG, SHORT = 4000, 10
BUDGETS = {"chunked": 512, "whole": 8192}


def engine_of(*, chunk_tokens: int, mixed: bool = False, threads: int | None = None) -> Engine:
    """The real model on the CPU kernels, halves of weights, sixteen rows."""
    sizes = {"max_batch_size": 16, "num_blocks": 700, "max_model_len": 4100, "threads": threads}
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


def burst(engine: Engine, *, rows: int = 8, prompts: int = 4, prompt: int = 600) -> dict[str, list[int]]:
    """Rows that decode all the time, and some prompts that come at once."""
    tokens: dict[str, list[int]] = {}
    for i in range(rows):
        engine.submit(request(f"r{i}", 20 + i, 50))
    for _ in range(3):
        engine.step()
    for i in range(prompts):
        engine.submit(request(f"p{i}", prompt + i, 2))
    while engine.has_work:
        for event in engine.step():
            tokens.setdefault(event.request_id, []).append(event.token_id)
    return tokens


def in_turn(budget: int, rounds: int) -> dict[str, float]:
    """Processor seconds of a burst in two forwards and in one, the median of each and of their ratio in a round."""
    engines = [engine_of(chunk_tokens=budget, mixed=mixed, threads=1) for mixed in (False, True)]
    assert burst(engines[0]) == burst(engines[1]), "not the tokens of two forwards"
    times: list[list[float]] = [[], []]
    for at in range(rounds):
        for arm in (0, 1) if at % 2 else (1, 0):
            start = time.process_time()
            burst(engines[arm])
            times[arm].append(time.process_time() - start)
    ratios = sorted(two / one for two, one in zip(*times, strict=True))
    return {
        "two_s": median(times[0]),
        "mixed_s": median(times[1]),
        "ratio": median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
    }


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


def first_token(rounds: int) -> dict[str, float]:
    """Processor seconds until the short request has its first token, prompts in chunks and whole, in turn."""
    engines = {arm: engine_of(chunk_tokens=budget, threads=1) for arm, budget in BUDGETS.items()}
    times: dict[str, list[float]] = {arm: [] for arm in engines}
    for at in range(rounds):
        for arm in BUDGETS:
            for name, prompt in (("long", LONG), ("short", SHORT)):
                engines[arm].submit(request(f"{name}{at}", prompt, 1))
            start = time.process_time()
            while not any(event.request_id == f"short{at}" for event in engines[arm].step()):
                pass
            times[arm].append(time.process_time() - start)
            engines[arm].abort(f"long{at}")
            while engines[arm].has_work:
                engines[arm].step()
    return {arm: median(taken) for arm, taken in times.items()}


if __name__ == "__main__":
    with at_level("cheap"):
        print("first token", first_token(rounds=3), flush=True)
        for tokens_a_step in (64, 128, 512, 2048):
            found = in_turn(tokens_a_step, rounds=5)
            print(tokens_a_step, " ".join(f"{name} {value:.3f}" for name, value in found.items()), flush=True)
