"""`nanoserve bench http`: what a token costs over HTTP, against the same engine stepped by hand.

Two arms take turns at each number of streams: the engine in this process, all requests submitted at once and stepped
to their end, and a server in a process of its own with the same flags, streaming the same requests to this process.
Both must give the same number of tokens, and the same texts. The ratio of their tokens a second is what serving
leaves of the engine; the processor time a token, told beside it, does not depend on what else the machine does.

Proof: tests/test_bench_http.py. Story: metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from reference.request import Engine, Request, SamplingParams
from reference.tokenizer import Tokenizer
from serve.bench_serve import ID_RANGE
from serve.bench_soak import scrape
from serve.boot import boot
from serve.client import fetch, stream
from serve.launch import launched
from serve.machine import machine

CPU = "process_cpu_seconds_total"


@dataclass(frozen=True, slots=True)
class Round:
    """One run of one arm: wall seconds, processor seconds of the process with the engine, and the answers."""

    seconds: float
    cpu_seconds: float
    num_tokens: int
    texts: tuple[str, ...]


def bench_http(args: argparse.Namespace) -> int:
    """Measure both arms in turn and print a table, or one JSON object.

    Raises:
        RuntimeError: the arms did not say the same, or the server did not start or answer.
    """
    from serve.cli import build_parser

    flags = ["--model", args.model, "--max-batch-size", str(max(args.streams)), "--recheck-every", "0"]
    flags += [] if args.threads is None else ["--threads", str(args.threads)]
    loaded, engine = boot(build_parser().parse_args(["serve", *flags]))
    results = []
    with launched(flags) as server:
        for streams in args.streams:
            prompts = _prompts(streams, tokens=args.prompt_tokens)
            rounds: dict[str, list[Round]] = {"engine": [], "http": []}
            for at in range(args.rounds + 1):  # the first is not counted: it warms both
                alone = step_by_hand(engine, loaded.tokenizer, prompts, tokens=args.tokens)
                served = asyncio.run(over_http(server.url, prompts, tokens=args.tokens))
                check_same(alone, served)
                if at:
                    rounds["engine"].append(alone)
                    rounds["http"].append(served)
            results.append({"streams": streams, **compare(rounds["engine"], rounds["http"])})
            print(_line(results[-1]), file=sys.stderr)
    report = {"model": args.model, "tokens": args.tokens, "rounds": args.rounds, "machine": machine()}
    print(json.dumps(report | {"results": results}) if args.json else "\n".join(map(_line, results)))
    return 0


def step_by_hand(engine: Engine, tokenizer: Tokenizer, prompts: list[list[int]], *, tokens: int) -> Round:
    """All requests at once on an idle engine, stepped to their end in this thread."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    ids: dict[str, list[int]] = {str(at): [] for at in range(len(prompts))}
    began, cpu_began = time.perf_counter(), time.process_time()
    for at, prompt in enumerate(prompts):
        engine.submit(Request(tuple(prompt), params, str(at)))
    while engine.has_work:
        for event in engine.step():
            if event.token_id is not None:
                ids[event.request_id].append(event.token_id)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    texts = tuple(tokenizer.decode(answer) for answer in ids.values())
    return Round(seconds, cpu_seconds, sum(map(len, ids.values())), texts)


async def over_http(url: str, prompts: list[list[int]], *, tokens: int) -> Round:
    """The same requests, a stream each, from the first byte sent to the last one read.

    Raises:
        RuntimeError: one of them was not answered in full.
    """
    model = json.loads((await fetch(url, "/v1/models"))[1])["data"][0]["id"]
    common = {"model": model, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    cpu_began, began = (await scrape(url)).get(CPU, 0.0), time.perf_counter()
    asking = [stream(url, "/v1/completions", {**common, "prompt": prompt}, due_s=began) for prompt in prompts]
    samples = await asyncio.gather(*asking)
    seconds = max(sample.ended_s for sample in samples) - began
    failed = [sample.error or f"status {sample.status}" for sample in samples if not sample.ok]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(samples)} requests failed: {failed[0]}")
    cpu_seconds = (await scrape(url)).get(CPU, 0.0) - cpu_began
    count = sum(sample.num_tokens for sample in samples)
    return Round(seconds, cpu_seconds, count, tuple(sample.text for sample in samples))


def check_same(alone: Round, served: Round) -> None:
    """Before a number counts: both arms computed the same.

    Raises:
        RuntimeError: they did not.
    """
    if alone.num_tokens != served.num_tokens:
        raise RuntimeError(f"the engine gave {alone.num_tokens} tokens, the server {served.num_tokens}")
    wrong = [at for at, (one, other) in enumerate(zip(alone.texts, served.texts, strict=True)) if one != other]
    if wrong:
        raise RuntimeError(f"answer {wrong[0]} of {len(alone.texts)} is another over HTTP ({len(wrong)} differ)")


def compare(engine: list[Round], http: list[Round]) -> dict[str, Any]:
    """Medians of each arm, and the median of the rounds' ratios: neighbours in time, so the machine is the same."""
    pairs = list(zip(engine, http, strict=True))
    figures: dict[str, Any] = {}
    for name, rounds in (("engine", engine), ("http", http)):
        figures[f"{name}_tokens_per_s"] = round(median(one.num_tokens / one.seconds for one in rounds), 2)
        figures[f"{name}_cpu_ms_per_token"] = round(median(one.cpu_seconds * 1e3 / one.num_tokens for one in rounds), 3)
    figures["throughput_ratio"] = round(median(alone.seconds / served.seconds for alone, served in pairs), 4)
    figures["best_ratio"] = round(min(one.seconds for one in engine) / min(one.seconds for one in http), 4)
    cpu = [alone.cpu_seconds / served.cpu_seconds for alone, served in pairs if served.cpu_seconds]
    figures["cpu_ratio"] = round(median(cpu), 4) if cpu else None
    return figures


def _prompts(count: int, *, tokens: int) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randint(*ID_RANGE) for _ in range(tokens)] for _ in range(count)]


def _line(one: dict[str, Any]) -> str:
    return (
        f"{one['streams']:>3} streams: engine {one['engine_tokens_per_s']:.1f} tokens/s, "
        f"http {one['http_tokens_per_s']:.1f}, ratio {one['throughput_ratio']:.3f} (best of each "
        f"{one['best_ratio']:.3f}); cpu ms/token {one['engine_cpu_ms_per_token']:.2f} and "
        f"{one['http_cpu_ms_per_token']:.2f}"
    )
