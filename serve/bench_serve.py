"""`nanoserve bench serve`: the server under an open load, several arms of it measured in turn at each rate.

Requests are sent when a seeded Poisson process says, whether or not earlier ones were answered, and a latency counts
from that moment: a server that stalls cannot slow its own clients down and look good (no coordinated omission). Every
arm gets the same requests at the same moments. An arm that promises to replay is held to it by its gate, and arms
that promise equal bits are held to equal answers, before any number is printed.

Gates: gates.warmup. Proof: tests/test_bench_serve.py. Story: metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gates.warmup import check_arm_replayed_every_step, check_no_cold_captures
from serve.client import Sample, fetch, stream
from serve.launch import launched
from serve.options import UsageError

ID_RANGE = (10, 250)  # token ids that every vocabulary has


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to start the server. `replays` says that every decode step of it is a replay."""

    flags: tuple[str, ...]
    replays: bool = False


ARMS = {
    "eager": Arm(("--no-cuda-graphs",)),
    "graph": Arm((), replays=True),
    "no-compact": Arm(("--no-persistent-batch",)),
    "gather": Arm(("--gather-rows",), replays=True),
    "no-kernels": Arm(("--no-kernels",)),
    "reference": Arm(("--engine", "reference")),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the workload."""

    prompt: str | tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Slo:
    """What a client was promised: both must hold for a request to count as good."""

    ttft_s: float
    itl_s: float  # of the request's mean time per token


def bench_serve(args: argparse.Namespace) -> int:
    """Measure every arm at every rate and print a table, or one JSON object.

    Raises:
        UsageError: an arm or the dataset cannot be used.
        GateError: an arm that promises to replay did not, or recorded a shape in front of a client.
        RuntimeError: a server did not start, or equal arms gave unequal answers.
    """
    for name in args.arms:
        if name not in ARMS:
            raise UsageError(f"--arms: {name!r} is not one of {', '.join(ARMS)}")
    asks = load_dataset(args.dataset, seed=args.seed, count=args.requests, gens=args.gens, prompt=args.prompt_tokens)
    slo = Slo(args.slo_ttft_ms / 1000, args.slo_itl_ms / 1000)
    results: list[dict[str, Any]] = []
    with ExitStack() as servers:
        urls = {name: servers.enter_context(launched(_flags(args, ARMS[name]))).url for name in args.arms}
        for url in urls.values():  # what a first request alone pays for
            asyncio.run(measure(url, asks[:1], rate=1000.0, seed=args.seed, slo=slo))
        for rate in args.rates:
            for name, url in urls.items():  # in turn, so that a change of the machine meets every arm
                results.append({"arm": name, **asyncio.run(measure(url, asks, rate=rate, seed=args.seed, slo=slo))})
                if ARMS[name].replays:
                    hold_to_replay(results[-1])
        boots = {name: json.loads(asyncio.run(fetch(url, "/health"))[1])["boot"] for name, url in urls.items()}
    check_equal_answers(results, boots)
    report = {"model": args.model, "seed": args.seed, "requests": len(asks), "results": results, "boot": boots}
    print(json.dumps(report) if args.json else table(results))
    return 0


def load_dataset(name: str, *, seed: int, count: int, gens: Sequence[int], prompt: int) -> list[Ask]:
    """`count` requests: `synthetic` (seeded ids and lengths), or the lines of a JSONL file, again from the start.

    A line is `{"prompt": text or ids, "max_tokens": N}`; without `max_tokens` it is the next of `gens`.

    Raises:
        UsageError: the file cannot be read, or a line is no request; it is named.
    """
    draw = random.Random(seed)
    if name == "synthetic":
        return [Ask(tuple(draw.randint(*ID_RANGE) for _ in range(prompt)), draw.choice(gens)) for _ in range(count)]
    try:
        lines = [line for line in Path(name).read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--dataset: {name}: {error}") from None
    if not lines:
        raise UsageError(f"--dataset: {name} holds no line")
    asks = [_ask(name, number, line, gens[number % len(gens)]) for number, line in enumerate(lines)]
    return [asks[index % len(asks)] for index in range(count)]


async def measure(url: str, asks: Sequence[Ask], *, rate: float, seed: int, slo: Slo) -> dict[str, Any]:
    """Send `asks` to a running server at `rate` requests a second, and say what came of it."""
    model = json.loads((await fetch(url, "/v1/models"))[1])["data"][0]["id"]
    before = json.loads((await fetch(url, "/health"))[1])["engine"]
    draw, began = random.Random(seed), time.perf_counter()
    due, sending = began, []
    for index, ask in enumerate(asks):
        due += draw.expovariate(rate)
        sending.append(asyncio.create_task(_send(url, model, ask, due_s=due, seed=index)))
    samples = await asyncio.gather(*sending)
    after = json.loads((await fetch(url, "/health"))[1])["engine"]
    seconds = max(sample.ended_s for sample in samples) - began
    return {"rate": rate, **summary(samples, seconds=seconds, slo=slo), **_decode_counts(before, after)}


def summary(samples: Sequence[Sample], *, seconds: float, slo: Slo) -> dict[str, Any]:
    """Latencies in milliseconds, rates a second; a request that failed is in no latency and is never good."""
    good = [sample for sample in samples if sample.ok]
    met = [sample for sample in good if sample.ttft_s <= slo.ttft_s and sample.tpot_s <= slo.itl_s]
    gaps = [gap for sample in good for gap in sample.gaps_s]
    return {
        "seconds": round(seconds, 3),
        "completed": len(good),
        "failed": [sample.error or f"status {sample.status}" for sample in samples if not sample.ok][:3],
        "output_tokens": sum(sample.num_tokens for sample in good),
        "tokens_per_s": round(sum(sample.num_tokens for sample in good) / seconds, 2),
        "requests_per_s": round(len(good) / seconds, 3),
        "goodput_per_s": round(len(met) / seconds, 3),
        "good_share": round(len(met) / len(samples), 4),
        "ttft_ms": _spread([sample.ttft_s for sample in good]),
        "itl_ms": _spread(gaps),
        "tpot_ms": _spread([sample.tpot_s for sample in good if sample.num_tokens > 1]),
        "e2e_ms": _spread([sample.ended_s - sample.due_s for sample in good]),
        "client_late_ms": _spread([sample.sent_s - sample.due_s for sample in samples]),
        "answers": [sample.text for sample in samples],
    }


def hold_to_replay(result: dict[str, Any]) -> None:
    """The acceptance test of an arm that promises to replay: every decode step did, and nothing was recorded late.

    Raises:
        GateError: saying how many steps did not, and why.
    """
    check_arm_replayed_every_step(
        decode_steps=result["decode_steps"], replayed=result["replayed"], reasons=result["eager_reasons"]
    )
    check_no_cold_captures(captures_after_ready=result["captures_after_ready"])


def check_equal_answers(results: list[dict[str, Any]], boots: dict[str, Any]) -> None:
    """Arms whose bits do not depend on the schedule gave one answer to one request; the texts are taken out here.

    Raises:
        RuntimeError: two of them differ.
    """
    texts: dict[str, list[str]] = {}
    for result in results:
        answers = result.pop("answers")
        backend = boots[result["arm"]].get("backend") or {}
        if backend.get("schedule_invariant"):
            key = str(sorted(backend.items()))
            if not result["failed"] and texts.setdefault(key, answers) != answers:
                where = f"arm {result['arm']} at rate {result['rate']:g}"
                raise RuntimeError(f"{where} answered a request otherwise than the arms before it")


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results for people."""
    head = ("rate", "arm", "tok/s", "good/s", "TTFT p50", "p99", "ITL p50", "p99", "replayed", "failed")
    lines = [head]
    for one in results:
        share = one["replay_share"]
        lines.append(
            (
                f"{one['rate']:g}",
                one["arm"],
                f"{one['tokens_per_s']:.1f}",
                f"{one['goodput_per_s']:.2f}",
                *(f"{one[name][at]:.1f}" for name in ("ttft_ms", "itl_ms") for at in ("p50", "p99")),
                "-" if share is None else f"{share:.1%}",
                str(len(one["failed"])),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(word.rjust(width) for word, width in zip(line, widths, strict=True)) for line in lines)


async def _send(url: str, model: str, ask: Ask, *, due_s: float, seed: int) -> Sample:
    await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
    body = {"model": model, "prompt": ask.prompt, "max_tokens": ask.max_tokens, "temperature": 0.0, "seed": seed}
    return await stream(url, "/v1/completions", {**body, "ignore_eos": True}, due_s=due_s)


def _flags(args: argparse.Namespace, arm: Arm) -> list[str]:
    flags = ["--model", args.model, "--max-batch-size", str(args.max_batch_size), *arm.flags]
    for name in ("max_model_len", "threads"):
        value = getattr(args, name)
        flags += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return flags


def _ask(name: str, index: int, line: str, max_tokens: int) -> Ask:
    try:
        values = json.loads(line)
        prompt = values["prompt"]
        ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (isinstance(prompt, str) or ids):
            raise ValueError(f"prompt: {prompt!r} is neither text nor a list of ids")
        return Ask(tuple(prompt) if ids else prompt, int(values.get("max_tokens", max_tokens)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"--dataset: {name}: line {index + 1} is no request: {error}") from None


def _decode_counts(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What the engine's own counts say of the time between; an engine without them says nothing."""
    if "decode_steps" not in after:
        return {"replay_share": None}
    names = ("decode_steps", "replayed", "moves", "preemptions", "captures_after_ready")
    counts = {name: after[name] - before[name] for name in names}
    reasons = {name: count - before["eager"].get(name, 0) for name, count in after["eager"].items()}
    steps = counts["decode_steps"]
    share = round(counts["replayed"] / steps, 4) if steps else None
    return counts | {"eager_reasons": {name: n for name, n in reasons.items() if n}, "replay_share": share}


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds (the smallest value that so many do not exceed); zeros for none."""
    ordered = sorted(seconds) or [0.0]
    ranks = {name: ordered[max(0, -(-len(ordered) * share // 100) - 1)] for name, share in PERCENTILES.items()}
    return {"mean": round(fmean(ordered) * 1000, 3), **{name: round(at * 1000, 3) for name, at in ranks.items()}}


PERCENTILES = {"p50": 50, "p90": 90, "p99": 99}
