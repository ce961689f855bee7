"""Decode and prefill of the CPU kernels against the plain torch forward, same weights, taken in turn in one run.

Run: `python -m pytest tests/bench/bench_forward.py --benchmark-enable --benchmark-only`, or as a program for a table:
`python -m tests.bench.bench_forward --batch 1,8,32 --context 96,512 --threads 2`. Times are minima over interleaved
rounds (medians beside them); the parts of a step are timed by themselves and printed with the rest that they leave.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fast.cache import BatchedPagedKVCache
from fast.kernels.attention import attention
from fast.kernels.forward import KernelForward, KernelPool, plan_tasks
from fast.kernels.linear import ADD, PLAIN, SWIGLU, linear
from fast.kernels.norm import norm
from fast.kernels.rope import rotate_and_write
from fast.model import Chunk, Forward
from fast.plan import DecodePlan
from reference.weights import random_weights
from tests.harness import SHAPES

BLOCK = 16


def decode_plan(rows: int, context: int, vocab: int) -> DecodePlan:
    """`rows` sequences of `context` tokens, each in blocks of its own."""
    blocks = -(-context // BLOCK)
    slots = torch.arange(rows)[:, None] * blocks * BLOCK + torch.arange(context)
    ids = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(rows))
    lens = torch.full((rows,), context)
    return DecodePlan(tuple(range(rows)), 0, slots, lens, slots[:, -1].contiguous(), lens - 1, ids, (), ())


def quickest(*calls: Callable[[], object], rounds: int) -> list[tuple[float, float]]:
    """Each call's (minimum, median) seconds over rounds in which all of them run in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, spent in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            spent.append(time.perf_counter() - begin)
    return [(min(spent), float(np.median(spent))) for spent in times]


def parts(model: KernelForward, pool: KernelPool, plan: DecodePlan) -> dict[str, Callable[[], object]]:
    """What a decode step is made of, each part over all layers by itself."""
    w, config, rows, run = model._weights, model.config, plan.num_rows, model._team.run
    layers = range(config.num_layers)
    runs = np.stack([np.arange(rows), np.ones(rows, np.int64), plan.positions.numpy()], axis=1)
    groups = np.ascontiguousarray(plan.slot_mapping.numpy()[:, ::16])
    sizes = {"heads": config.num_heads, "kv_heads": config.num_kv_heads, "threads": model.threads}
    tasks, eps = plan_tasks(runs, **sizes), np.float32(config.rms_norm_eps)

    def linears() -> None:
        for i in layers:
            run(linear, model._strips, w.qkv[i], w.qkv_bias[i], model._qkv, rows, PLAIN)
            run(linear, model._strips, w.output[i], w.output_bias[i], model._hidden, rows, ADD)
            run(linear, model._strips, w.gate_up[i], w.gate_up_bias[i], model._wide, rows, SWIGLU)
            run(linear, model._wide, w.down[i], w.down_bias[i], model._hidden, rows, ADD)

    def rope() -> None:
        for i in layers:
            run(
                rotate_and_write,
                model._qkv, plan.positions.numpy(), plan.write_slots.numpy(), model._cos, model._sin, model._scale,
                w.q_norm[i], w.k_norm[i], eps, pool.k[i], pool.v[i], model._q, rows,
            )  # fmt: skip

    def attend() -> None:
        for i in layers:
            run(attention, model._q, pool.k[i], pool.v[i], groups, runs, tasks, model._strips, rows)

    def norms() -> None:
        for i in layers:
            run(norm, model._hidden, w.input_norm[i], eps, config.hidden_size, model._strips, rows)
            run(norm, model._hidden, w.post_norm[i], eps, config.hidden_size, model._strips, rows)

    return {
        "linears": linears,
        "head": lambda: model._logits(model._hidden[:rows], model._decode_logits),
        "attention": attend,
        "rope and write": rope,
        "norms": norms,
        "task list": lambda: plan_tasks(runs, **sizes),
    }


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("arm", ["kernels", "torch"])
def bench_decode_of_a_tiny_model(benchmark, arm: str, rows: int):
    config, context = SHAPES["gqa"], 100
    weights = random_weights(config, seed=7, dtype=torch.float32)
    blocks = rows * -(-context // BLOCK)
    fast = KernelForward(config, weights, max_positions=context, max_batch_size=rows, threads=1, half=False)
    pool = KernelPool(config, num_blocks=blocks, block_size=BLOCK)
    plain = Forward(config, weights, max_positions=context)
    cache = BatchedPagedKVCache(
        config, max_batch_size=rows, num_blocks=blocks, block_size=BLOCK, max_model_len=blocks * BLOCK
    )
    plan = decode_plan(rows, context, config.vocab_size)
    # Correct first: both arms compute the same prompt and the same next token.
    for row in range(rows):
        ids, slots = tuple(range(context - 1)), tuple(plan.slot_mapping[row, :-1].tolist())
        chunk = Chunk(0, tuple(i % config.vocab_size for i in ids), slots)
        fast.prefill([chunk], pool)
        plain.prefill([chunk], cache)
    assert torch.allclose(fast.decode(plan, pool), plain.decode(plan, cache), atol=1e-4)
    benchmark.group = f"{rows} rows"
    benchmark(lambda: fast.decode(plan, pool) if arm == "kernels" else plain.decode(plan, cache))


def main() -> None:
    """Print one JSON line for each shape: tokens a second, the ratio to torch, and where a step's time goes."""
    from serve.models import load_model

    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--batch", default="1,2,4,8,16,32")
    parser.add_argument("--context", default="96")
    parser.add_argument("--prefill", default="")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--half-kv", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-torch", action="store_true")
    args = parser.parse_args()
    batches, contexts, prefills = (
        [int(n) for n in a.split(",") if n] for a in (args.batch, args.context, args.prefill)
    )
    torch.set_num_threads(args.threads)
    loaded = load_model(args.model)
    config = loaded.config
    length = max([*contexts, *prefills])
    model = KernelForward(
        config, loaded.weights, max_positions=length + 1, max_batch_size=max(batches), threads=args.threads
    )
    plain = None if args.no_torch else Forward(config, loaded.weights, max_positions=length + 1)
    blocks = max([b * -(-c // BLOCK) for b in batches for c in contexts] + [-(-n // BLOCK) for n in prefills])
    pool = KernelPool(config, num_blocks=blocks, block_size=BLOCK, half=args.half_kv)
    pool.k[:], pool.v[:] = (0x2C00, 0x2C00) if args.half_kv else (0.0625, 0.0625)  # touched, so it is memory
    cache = BatchedPagedKVCache(config, max_batch_size=1, num_blocks=blocks, block_size=BLOCK, max_model_len=length + 1)
    for tensor in (*cache.k, *cache.v):
        tensor.fill_(0.0625)
    for context in contexts:
        for rows in batches:
            plan = decode_plan(rows, context, config.vocab_size)
            calls: list[Callable[[], object]] = [lambda plan=plan: model.decode(plan, pool)]
            if plain is not None:
                calls.append(lambda plan=plan: plain.decode(plan, cache))
            times = quickest(*calls, rounds=args.rounds)
            split = {name: quickest(call, rounds=args.rounds)[0][0] for name, call in parts(model, pool, plan).items()}
            split["rest"] = times[0][0] - sum(split.values())
            _report(f"decode {rows} x {context}", rows, times, {k: round(v * 1e3, 2) for k, v in split.items()})
    for tokens in prefills:
        chunk = Chunk(0, tuple(i * 7919 % config.vocab_size for i in range(tokens)), tuple(range(tokens)))
        calls = [lambda chunk=chunk: model.prefill([chunk], pool)]
        if plain is not None:
            calls.append(lambda chunk=chunk: plain.prefill([chunk], cache))
        _report(f"prefill {tokens}", tokens, quickest(*calls, rounds=max(2, args.rounds // 2)), {})


def _report(what: str, tokens: int, times: list[tuple[float, float]], split: dict[str, float]) -> None:
    line = {"what": what, "tokens_per_s": round(tokens / times[0][0], 1), "median": round(tokens / times[0][1], 1)}
    if len(times) > 1:
        line |= {"torch": round(tokens / times[1][0], 1), "ratio": round(times[1][0] / times[0][0], 2)}
    print(json.dumps(line | ({"parts_ms": split} if split else {})), flush=True)


if __name__ == "__main__":
    main()
