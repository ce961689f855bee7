"""Start to ready, warm and cold, and the peak of memory at the start and while serving, beside the weights' bytes.

Run: `python -m tests.bench.bench_boot --json` for the default model. Each start is `nanoserve serve` in a process of
its own, timed until it says where it serves. Warm finds its compiled kernels on disk; cold compiles them anew into an
empty folder. Both find the model's file in the system's cache when it was read before: a disk is not what is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from serve.client import fetch, stream
from serve.launch import launched
from serve.machine import machine

NAME = "measured"
GOALS_S = {"warm": 10.0, "cold": 40.0}


def start(flags: list[str], *, requests: int, prompt_tokens: int, max_tokens: int) -> dict[str, Any]:
    """One start: seconds until it serves, and `/health`'s memory then and after `requests` at once."""
    begin = time.perf_counter()
    with launched([*flags, "--served-model-name", NAME]) as server:
        ready_s = time.perf_counter() - begin
        at_start = asyncio.run(_memory(server.url))
        if requests:
            asyncio.run(_load(server.url, requests, prompt_tokens, max_tokens))
        serving = asyncio.run(_memory(server.url))
    weights = at_start["weight_bytes"]
    assert weights, "the backend does not say what its weights take"
    return {
        "ready_s": ready_s,
        "weight_bytes": weights,
        "peak_rss_bytes_at_start": at_start["peak_rss_bytes"],
        "peak_rss_bytes_serving": serving["peak_rss_bytes"],
        "rss_bytes_at_start": at_start["rss_bytes"],
        "rss_bytes_serving": serving["rss_bytes"],
    }


async def _memory(url: str) -> dict[str, Any]:
    status, body = await fetch(url, "/health")
    assert status == 200, body
    return json.loads(body)["memory"]


async def _load(url: str, requests: int, prompt_tokens: int, max_tokens: int) -> None:
    """All at once, each to its end."""
    now = time.perf_counter()
    body = {"model": NAME, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    prompts = [[(row * 7 + at) % 200 + 10 for at in range(prompt_tokens)] for row in range(requests)]
    asked = (stream(url, "/v1/completions", body | {"prompt": prompt}, due_s=now) for prompt in prompts)
    samples = await asyncio.gather(*asked)
    assert all(sample.ok for sample in samples), [sample.error for sample in samples if not sample.ok]


@contextmanager
def empty_kernel_cache() -> Iterator[None]:
    """Children started in this block find no compiled kernel."""
    before = os.environ.get("NUMBA_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NUMBA_CACHE_DIR"] = folder
        try:
            yield
        finally:
            os.environ.pop("NUMBA_CACHE_DIR")
            if before is not None:
                os.environ["NUMBA_CACHE_DIR"] = before


def bench_a_start_and_a_first_batch(benchmark):
    flags = ["--model", "tiny-random", "--max-batch-size", "4"]

    def run() -> dict[str, Any]:
        return start(flags, requests=4, prompt_tokens=8, max_tokens=4)

    told = benchmark.pedantic(run, rounds=3, warmup_rounds=1)
    assert told["peak_rss_bytes_serving"] >= told["peak_rss_bytes_at_start"]
    benchmark.extra_info.update(told, **machine())


def main() -> None:
    """Print one JSON object, or a line a start."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=3, help="warm starts; there is one cold start")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    flags, load = ["--model", args.model], {"requests": args.requests, "prompt_tokens": 256, "max_tokens": 64}
    with empty_kernel_cache():
        cold = [start(flags, **load)]
    start(flags, requests=0, prompt_tokens=1, max_tokens=1)  # so that the warm ones are
    warm = [start(flags, **load) for _ in range(args.rounds)]
    result = {
        name: {key: median(run[key] for run in runs) for key in runs[0]} | {"goal_s": GOALS_S[name]}
        for name, runs in (("warm", warm), ("cold", cold))
    }
    if args.json:
        print(json.dumps(result | {"model": args.model, "machine": machine()}))
        return
    for name, told in result.items():
        megabytes = {key: f"{value / 1e6:.0f} MB" for key, value in told.items() if "bytes" in key}
        print(f"{name}: ready in {told['ready_s']:.1f} s (goal {told['goal_s']:.0f} s), {megabytes}")


if __name__ == "__main__":
    main()
