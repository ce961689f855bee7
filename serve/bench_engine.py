"""`nanoserve bench decode | prefill`: one engine's steps, timed in this process, beside what the machine could do.

Correct first: before anything is timed, each arm (an engine on a number of threads) says the reference's tokens. Then
the arms take turns, round by round, so that a change of the machine meets all of them. A decode step is timed by
itself, and told as its forward and the rest, as a share of the roofline measured in the same run, and as a ratio of
gates at `cheap` to gates off. `--json` prints one object with every figure; the table shows the ones people ask for.

Proof: tests/test_bench_engine.py. Story: kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gates.core import at_level
from reference.config import ModelConfig
from reference.request import Engine
from reference.request import generate as run_to_end
from serve.bench_steps import (
    Steps,
    Stopwatch,
    decode_steps,
    greedy_requests,
    phases_of,
    prefill_seconds,
    prompts_of,
)
from serve.boot import boot
from serve.machine import machine
from serve.memory import memory, reset_peak, returned_at_once
from serve.models import LoadedModel
from serve.options import UsageError
from serve.roofline import Rates, decode_work, measure_rates

CHECKED_ROWS, CHECKED_PROMPT, CHECKED_TOKENS = 2, 12, 8  # of the run that must say the reference's tokens
PHASE_TOKENS = 16  # of the run whose steps are recorded phase by phase
ROOM = "1TiB"  # the pool is never larger than the rows can use, and the system gives what is touched
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(slots=True)
class Arm:
    """One engine on one number of threads, and what was measured of it so far."""

    name: str
    threads: int
    engine: Engine
    watch: Stopwatch
    decode: dict[int, Steps] = field(default_factory=dict)  # by rows
    prefill: dict[int, list[float]] = field(default_factory=dict)  # by tokens
    phases: dict[int, dict[str, float]] = field(default_factory=dict)  # by rows

    @contextmanager
    def turn(self) -> Iterator[Arm]:
        """The time in which torch has this arm's number of threads."""
        torch.set_num_threads(self.threads)
        yield self


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    kind: str  # decode or prefill
    batches: tuple[int, ...]
    prompt_tokens: int  # in the cache of each row before its first decode step
    new_tokens: int
    prefills: tuple[int, ...]
    rounds: int

    @property
    def max_rows(self) -> int:
        """Rows of the largest batch."""
        return max(self.batches) if self.kind == "decode" else 1

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        asked = self.prompt_tokens + self.new_tokens if self.kind == "decode" else max(self.prefills) + 1
        return max(asked, CHECKED_PROMPT + CHECKED_TOKENS)


def bench_engine(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        UsageError: the model is too short for what was asked.
        RuntimeError: an arm does not say the reference's tokens.
    """
    result = measure(args)
    if args.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0


def measure(args: argparse.Namespace, *, rates: Callable[[], Rates] = measure_rates) -> dict[str, Any]:
    """Every figure of one run, as plain values."""
    plan = plan_of(args)
    arms, loaded = build_arms(args, plan)
    for number in range(plan.rounds):
        _progress(f"round {number + 1} of {plan.rounds}")
        for arm in arms:
            with arm.turn():
                _take_turn(arm, plan, loaded.config)
    held = memory({})  # before the rates are measured, which takes memory of its own
    measured: dict[int, Rates] = {}
    for arm in arms:
        with arm.turn():
            if plan.kind == "decode":
                for rows in plan.batches:
                    prompts = prompts_of(rows, plan.prompt_tokens, vocab_size=loaded.config.vocab_size)
                    new_tokens = min(plan.new_tokens, PHASE_TOKENS)
                    arm.phases[rows] = phases_of(arm.engine, prompts, new_tokens=new_tokens, watch=arm.watch)
            if arm.threads not in measured:
                measured[arm.threads] = rates()
    return {
        "kind": plan.kind,
        "model": loaded.name,
        **({"prompt_tokens": plan.prompt_tokens, "new_tokens": plan.new_tokens} if plan.kind == "decode" else {}),
        "rounds": plan.rounds,
        "arms": [_told(arm, plan, loaded.config, measured[arm.threads]) for arm in arms],
        "memory": held | {"weight_bytes": sum(_backend(arm)["weight_bytes"] or 0 for arm in arms)},
        "machine": machine(),
    }


def plan_of(args: argparse.Namespace) -> Plan:
    """The arguments as a plan; `--context` is the number of prompt tokens under another name."""
    if args.action == "prefill":
        return Plan("prefill", (1,), 0, 0, args.tokens, args.rounds)
    return Plan("decode", args.batch, args.context or args.prompt_tokens, args.new_tokens, (), args.rounds)


def build_arms(args: argparse.Namespace, plan: Plan) -> tuple[list[Arm], LoadedModel]:
    """Every engine on every number of threads, each built as `serve` would build it, and each right.

    Raises:
        UsageError: an argument that this model or machine cannot serve.
        RuntimeError: an arm does not say the reference's tokens.
    """
    threads = args.threads or (None,)
    wanted, loaded = _reference_answer(args, plan, threads[-1])
    reset_peak()  # the reference is gone: what counts from here on is what was asked for
    arms = []
    for engine_name in args.engine:
        for count in threads:
            _, engine = boot(_as_served(args, plan, engine_name, count))
            arm = Arm(engine_name, torch.get_num_threads(), engine, Stopwatch())
            _check_answer(arm, wanted, loaded.config, exact=not args.half_kv)
            arm.watch.attach(engine)
            arms.append(arm)
    return arms, loaded


def _reference_answer(args: argparse.Namespace, plan: Plan, threads: int | None) -> tuple[list[list[int]], LoadedModel]:
    """What the reference says to the check's prompts, and the model without its weights."""
    with returned_at_once():
        loaded, engine = boot(_as_served(args, plan, "reference", threads))
        if engine.max_model_len < plan.longest:
            raise UsageError(f"--context: {plan.longest} tokens a request are not in 1..{engine.max_model_len}")
        return _answers(engine, loaded.config), loaded


def _as_served(args: argparse.Namespace, plan: Plan, engine: str, threads: int | None) -> argparse.Namespace:
    """The arguments with which `serve` would build this arm; the pool holds the largest batch and no more.

    But nothing is found again: what was computed in another round, or for a shorter prompt, would not be timed.
    """
    from serve.cli import build_parser

    options = ["--model", args.model, "--engine", engine, "--kv-cache-memory", ROOM, "--no-prefix-cache"]
    options += ["--max-batch-size", str(max(plan.max_rows, CHECKED_ROWS)), "--max-model-len", str(plan.longest)]
    if plan.kind == "decode":  # all prompts in one step, so that the rows start, and end, together
        options += ["--chunk-tokens", str(max(plan.max_rows * plan.prompt_tokens, CHECKED_ROWS * CHECKED_PROMPT))]
    options += [] if threads is None else ["--threads", str(threads)]
    options += ["--half-kv"] * args.half_kv + ["--no-kernels"] * args.no_kernels
    return build_parser().parse_args(["serve", *options])


def _answers(engine: Engine, config: ModelConfig) -> list[list[int]]:
    prompts = prompts_of(CHECKED_ROWS, CHECKED_PROMPT, vocab_size=config.vocab_size)
    with at_level("cheap"):
        return [done.token_ids for done in run_to_end(engine, greedy_requests(prompts, new_tokens=CHECKED_TOKENS))]


def _check_answer(arm: Arm, wanted: list[list[int]], config: ModelConfig, *, exact: bool) -> None:
    """Halves of K/V are another model than the reference's: they are held to its first tokens alone."""
    got = _answers(arm.engine, config)
    if not exact:
        got, wanted = [ids[:1] for ids in got], [ids[:1] for ids in wanted]
    if got != wanted:
        raise RuntimeError(
            f"{arm.name} on {arm.threads} threads says {got}, the reference says {wanted}; nothing was timed"
        )


def _take_turn(arm: Arm, plan: Plan, config: ModelConfig) -> None:
    """One round of one arm."""
    for tokens in plan.prefills:
        *_, prompt = prompts_of(len(arm.prefill.get(tokens, ())) + 1, tokens, vocab_size=config.vocab_size)
        arm.prefill.setdefault(tokens, []).append(prefill_seconds(arm.engine, prompt))
    for rows in plan.batches if plan.kind == "decode" else ():
        prompts = prompts_of(rows, plan.prompt_tokens, vocab_size=config.vocab_size)
        taken = decode_steps(arm.engine, prompts, new_tokens=plan.new_tokens, watch=arm.watch)
        arm.decode.setdefault(rows, Steps()).steps += taken


def _told(arm: Arm, plan: Plan, config: ModelConfig, rates: Rates) -> dict[str, Any]:
    """One arm's figures."""
    backend = _backend(arm)
    told: dict[str, Any] = {"engine": arm.name, "threads": arm.threads, "backend": backend}
    told |= {"bytes_per_s": rates.bytes_per_s, "flops_per_s": rates.flops_per_s}
    if plan.kind == "prefill":
        told["prefill"] = [
            {"tokens": tokens, "seconds": median(times), "tokens_per_s": tokens / median(times)}
            for tokens, times in arm.prefill.items()
        ]
        return told
    element = {name: ELEMENT_BYTES[backend[name]] for name in ("weights", "kv")}
    told["decode"] = []
    for rows, steps in arm.decode.items():
        summary = steps.summary()
        at_once = 1 if arm.name == "reference" else rows  # the reference computes one request after the other
        context = plan.prompt_tokens + plan.new_tokens // 2  # of the median step
        work = decode_work(
            config,
            rows=at_once,
            context=context,
            weight_element_bytes=element["weights"],
            kv_element_bytes=element["kv"],
        )
        floor = rates.floor_s(work)
        told["decode"].append(
            {"batch": rows, **summary, "context": context, "weight_bytes": work.weight_bytes, "kv_bytes": work.kv_bytes}
            | {"flops": work.flops, "floor_ms": floor * 1e3, "roofline_percent": 1e5 * floor / summary["step_ms"]}
            | {"phases_ms": arm.phases.get(rows, {})}
        )
    return told


def _backend(arm: Arm) -> dict[str, Any]:
    """What the arm computes on; the reference, which does not say, is torch in its own dtype."""
    facts = arm.engine.describe()
    dtype = facts["dtype"].removeprefix("torch.")
    return facts.get("backend") or {"name": "torch", "weights": dtype, "kv": dtype, "weight_bytes": None}


def show(result: dict[str, Any], console: Console | None = None) -> None:
    """The figures that people ask for, as a table."""
    console = console or Console()
    facts = result["machine"]
    asked = f", {result['prompt_tokens']} + {result['new_tokens']} tokens" if result["kind"] == "decode" else ""
    table = Table(title=f"{result['kind']} of {result['model']}{asked}, medians of {result['rounds']} rounds")
    decode = ("batch", "ms/step", "tok/s", "forward%", "rest%", "gates", "roof%")
    for name in ("engine", "thr", *(decode if result["kind"] == "decode" else ("tokens", "seconds", "tok/s"))):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for arm in result["arms"]:
        who = (arm["engine"], str(arm["threads"]))
        for row in arm.get("decode", ()):
            shown = (row["batch"], row["step_ms"], row["tokens_per_s"], row["forward_percent"], row["overhead_percent"])
            table.add_row(*who, *(_short(v) for v in (*shown, row["gates_ratio"], row["roofline_percent"])))
        for row in arm.get("prefill", ()):
            table.add_row(*who, *(_short(row[name]) for name in ("tokens", "seconds", "tokens_per_s")))
    console.print(table)
    for arm in result["arms"]:
        console.print(
            f"{arm['engine']}, {arm['threads']} threads: {arm['bytes_per_s'] / 1e9:.1f} GB/s, "
            f"{arm['flops_per_s'] / 1e9:.0f} GFLOP/s measured; weights {arm['backend']['weights']}, "
            f"K/V {arm['backend']['kv']}",
            highlight=False,
        )
    console.print("roof%: of what the measured rates allow; gates: step at cheap over step with gates off")
    peak, weights = result["memory"]["peak_rss_bytes"], result["memory"]["weight_bytes"]
    console.print(f"memory at most {_megabytes(peak)}, weights {_megabytes(weights)}", highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), highlight=False)


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def _megabytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 1e6:.0f} MB"


def _progress(text: str) -> None:
    print(text, file=sys.stderr)
