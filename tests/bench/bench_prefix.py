"""The prefix cache: tokens computed with and without it, what that is worth, and what a look-up costs a block.

Run: `python -m pytest tests/bench/bench_prefix.py --benchmark-enable --benchmark-only`. Token counts come from the real
scheduler and cache, so they are the same on every machine; both arms give the same tokens. The tight pool is counted
in preemptions and in tokens computed against a roomy one.

`python -m tests.bench.bench_prefix` prints, in processor time on one thread, what a look-up costs a block and what the
real model takes in a tight pool and in a roomy one, in turn.
"""

from __future__ import annotations

import time
from statistics import median

import pytest

from fast.blocks import BlockAllocator
from fast.engine import Engine
from fast.prefix import Prefix, PrefixCache
from gates.core import at_level
from reference.request import Request, SamplingParams
from serve.machine import machine
from tests.harness import model_of, tiny_config, tiny_weights

MODEL = "smollm2-135m-instruct"
SYSTEM, QUESTIONS = 600, 50
TURNS, TURN = 8, 40
SIZES = {"max_batch_size": 16, "block_size": 16, "num_blocks": 900, "max_model_len": 1200}


def ids(count: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((11 * i + 7 * salt) % 58 + 3 for i in range(count))


def tiny(*, prefix_cache: bool, **changes: int | bool) -> Engine:
    """The tiny model with room for long prompts."""
    sizes = SIZES | {"prefix_cache": prefix_cache} | changes
    return Engine.build(tiny_config(max_positions=1200), tiny_weights(), **sizes)


def shared_system_prompt(engine: Engine, answer: int = 4) -> list[list[int]]:
    """Fifty questions at once, behind one system prompt of 600 tokens."""
    params = SamplingParams(answer, temperature=0.0, ignore_eos=True)
    requests = [Request((*ids(SYSTEM), *ids(10 + i % 7, i + 1)), params, f"q{i}") for i in range(QUESTIONS)]
    return [done.token_ids for done in engine.generate(requests)]


def chat(engine: Engine, answer: int = 30) -> list[list[int]]:
    """One conversation of eight turns, each with all before it as its prompt."""
    history: tuple[int, ...] = ids(SYSTEM // 10)
    said = []
    for turn in range(TURNS):
        history = (*history, *ids(TURN, turn + 1))
        params = SamplingParams(answer, temperature=0.0, ignore_eos=True)
        (done,) = engine.generate([Request(history, params, f"t{turn}")])
        said.append(done.token_ids)
        history = (*history, *done.token_ids)
    return said


TRACES = {"shared system prompt": shared_system_prompt, "chat": chat}


@pytest.mark.parametrize("arm", ["cached", "computed"])
@pytest.mark.parametrize("trace", TRACES)
def bench_tokens_computed(benchmark, trace: str, arm: str):
    with at_level("cheap"):
        wanted = TRACES[trace](tiny(prefix_cache=False))
        engine = tiny(prefix_cache=arm == "cached")
        assert benchmark.pedantic(TRACES[trace], (engine,), rounds=1) == wanted, "not the tokens without a cache"
    stats = engine.stats()
    benchmark.group = trace
    counts = {name: stats[name] for name in ("prefill_tokens", "prefix_hit_tokens", "prefix_evictions", "preemptions")}
    benchmark.extra_info.update(arm=arm, **counts, **machine())


@pytest.mark.model
@pytest.mark.parametrize("arm", ["cached", "computed"])
def bench_a_chat_of_the_real_model(benchmark, arm: str):
    build = {"kernels": True, "half_weights": True, "prefix_cache": arm == "cached"}
    engine = Engine.build(*model_of(MODEL), **SIZES, **build)
    with at_level("cheap"):
        wanted = chat(Engine.build(*model_of(MODEL), **SIZES, **(build | {"prefix_cache": False})))
        assert benchmark.pedantic(chat, (engine,), rounds=1) == wanted, "not the tokens without a cache"
    benchmark.group = "chat of eight turns, real model"
    benchmark.extra_info.update(arm=arm, prefill_tokens=engine.stats()["prefill_tokens"], **machine())


@pytest.mark.parametrize("arm", ["roomy", "tight", "tight, room for growth"])
def bench_a_tight_pool(benchmark, arm: str):
    pool = {"num_blocks": 900 if arm == "roomy" else 60, "reserve_growth": arm.endswith("growth")}
    engine = tiny(prefix_cache=False, max_model_len=900, **pool)
    params = SamplingParams(120, temperature=0.0, ignore_eos=True)
    requests = [Request(ids(60 + i, i), params, f"r{i}") for i in range(16)]
    with at_level("cheap"):
        done = benchmark.pedantic(engine.generate, (requests,), rounds=1)
    assert all(len(one.token_ids) == 120 for one in done)
    stats = engine.stats()
    benchmark.group = "16 requests of 60 + 120 tokens"
    counts = {name: stats[name] for name in ("preemptions", "prefill_tokens", "steps")}
    benchmark.extra_info.update(arm=arm, **counts, **machine())


def published(blocks: int) -> tuple[PrefixCache, tuple[int, ...]]:
    """A cache that holds one prompt of so many blocks, and that prompt."""
    cache = PrefixCache(BlockAllocator(blocks), block_size=16)
    tokens = ids(16 * blocks)
    cache.publish(Prefix(""), tokens, cache.allocator.allocate(blocks), computed=len(tokens))
    return cache, tokens


def bench_a_lookup(benchmark):
    blocks = 250
    cache, tokens = published(blocks)
    with at_level("cheap"):
        found = benchmark(lambda: _taken(cache, tokens))
    assert len(found) == blocks - 1
    benchmark.extra_info.update(blocks=blocks, **machine())


def _taken(cache: PrefixCache, tokens: tuple[int, ...]) -> list[int]:
    prefix = Prefix("")
    cache.match(prefix, tokens)
    return cache.take(prefix, tokens)


def lookup_us(blocks: int, rounds: int = 50) -> float:
    """Microseconds a block of finding a prompt whole, and of finding that nothing of it was given up since."""
    cache, tokens = published(blocks)
    start = time.process_time()
    for _ in range(rounds):
        _taken(cache, tokens)
    return 1e6 * (time.process_time() - start) / rounds / blocks


def pools(rounds: int) -> dict[str, float]:
    """Processor seconds for sixteen requests of the real model, in each pool: the median of some rounds in turn."""
    sizes = {"max_batch_size": 16, "block_size": 16, "max_model_len": 900, "kernels": True, "half_weights": True}
    arms = {"roomy": (900, False), "tight": (60, False), "tight, room to grow": (60, True)}
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    params = SamplingParams(120, temperature=0.0, ignore_eos=True)
    requests = [Request(ids(60 + i, i), params, f"r{i}") for i in range(16)]
    engines = {
        arm: Engine.build(*model_of(MODEL), **sizes, num_blocks=blocks, reserve_growth=reserve, threads=1)
        for arm, (blocks, reserve) in arms.items()
    }
    for _ in range(rounds):
        for arm, engine in engines.items():
            start = time.process_time()
            engine.generate(requests)
            times[arm].append(time.process_time() - start)
    return {arm: median(taken) for arm, taken in times.items()}


if __name__ == "__main__":
    with at_level("cheap"):
        for blocks in (16, 250):
            print(f"look-up of {blocks} blocks: {lookup_us(blocks):.2f} us a block", flush=True)
        print(pools(rounds=3))
