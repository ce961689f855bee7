"""Timing an engine's steps from outside: real requests, each decode step by itself, and the forward's part of it.

A decode step is one in which no request speaks for the first time and no prompt is computed, not even a part. Steps
are run with the gates off and at `cheap` in turn, which prices them in one run. It knows the `Engine` protocol, and of
an engine's inside only where its forward is.

Proof: tests/test_bench_engine.py. Story: engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from gates.core import at_level
from reference.request import Engine, Event, Request, SamplingParams

Clock = Callable[[], float]
Prompt = tuple[int, ...]
LEVELS = ("cheap", "off")
FORWARDS = (("forward", ("prefill", "decode")), ("model", ("forward",)))  # of the fast engine, and of the reference


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step."""

    seconds: float
    forward_s: float
    tokens: int
    level: str  # of the gates


@dataclass(slots=True)
class Steps:
    """Decode steps of one batch, all rounds together; `summary` is made of medians."""

    steps: list[Step] = field(default_factory=list)

    def at(self, level: str) -> list[Step]:
        """The steps whose gates ran at one level."""
        return [step for step in self.steps if step.level == level]

    def summary(self) -> dict[str, float | int]:
        """A step's time at `cheap`, its parts in percent that add up to 100, and what the gates cost as a ratio."""
        steps = self.at("cheap")
        step_s = median(step.seconds for step in steps)
        overhead = median(1.0 - step.forward_s / step.seconds for step in steps)
        tokens = median(step.tokens for step in steps)
        return {
            "steps": len(steps),
            "step_ms": step_s * 1e3,
            "tokens_per_s": tokens / step_s,
            "forward_percent": 100.0 * (1.0 - overhead),
            "overhead_percent": 100.0 * overhead,
            "gates_ratio": step_s / median(step.seconds for step in self.at("off")),
        }


class Stopwatch:
    """Seconds spent inside an engine's forward."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.seconds = 0.0

    def attach(self, engine: Engine) -> None:
        """Time every forward of this engine from now on.

        Raises:
            ValueError: it has no forward that this module knows of.
        """
        for name, calls in FORWARDS:
            forward = getattr(engine, name, None)
            if forward is not None:
                for call in calls:
                    setattr(forward, call, self.around(getattr(forward, call)))
                return
        raise ValueError(f"engine: {type(engine).__name__} has neither of {', '.join(name for name, _ in FORWARDS)}")

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed."""

        def timed(*args: Any, **options: Any) -> Any:
            begin = self.clock()
            try:
                return call(*args, **options)
            finally:
                self.seconds += self.clock() - begin

        return timed


def prompts_of(rows: int, tokens: int, *, vocab_size: int) -> list[Prompt]:
    """Prompts that differ from their first token on, the same on every machine."""
    return [tuple((7919 * (row * 8191 + at) + 17) % vocab_size for at in range(tokens)) for row in range(rows)]


def greedy_requests(prompts: Sequence[Prompt], *, new_tokens: int) -> list[Request]:
    """Requests that run to their length, whatever they say."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return [Request(prompt, params, f"row-{row}") for row, prompt in enumerate(prompts)]


def decode_steps(engine: Engine, prompts: Sequence[Prompt], *, new_tokens: int, watch: Stopwatch) -> list[Step]:
    """Run the prompts to their end as one batch and time each decode step, the gates' levels in turn.

    Raises:
        RuntimeError: a request was computed twice, or waited: the pool does not hold the batch.
    """
    for request in greedy_requests(prompts, new_tokens=new_tokens):
        engine.submit(request)
    spoken: set[str] = set()
    steps: list[Step] = []
    preemptions = engine.stats().get("preemptions", 0)
    computed = engine.stats().get("prefill_tokens")
    while engine.has_work:
        level = LEVELS[len(steps) % 2]
        before, begin = watch.seconds, watch.clock()
        with at_level(level):
            events = engine.step()
        seconds = watch.clock() - begin
        spoke = {event.request_id for event in events}
        before_step, computed = computed, engine.stats().get("prefill_tokens")
        if spoke <= spoken and computed == before_step:
            steps.append(Step(seconds, watch.seconds - before, len(events), level))
        spoken |= spoke
    if engine.stats().get("preemptions", 0) != preemptions:
        raise RuntimeError(f"{len(prompts)} rows of {len(prompts[0]) + new_tokens} tokens: the pool preempted some")
    return steps


def prefill_seconds(engine: Engine, prompt: Prompt, *, clock: Clock = time.perf_counter) -> float:
    """From submit to the first token of one prompt alone, gates at `cheap`; the engine is idle afterwards.

    Raises:
        RuntimeError: a part of the prompt was not computed but found in a cache, so that its time says nothing.
    """
    computed = engine.stats().get("prefill_tokens")
    (request,) = greedy_requests([prompt], new_tokens=1)
    events: list[Event] = []
    begin = clock()
    with at_level("cheap"):
        engine.submit(request)
        while not events:
            events = engine.step()
    seconds = clock() - begin
    while engine.has_work:
        engine.step()
    if computed is not None and (new := engine.stats()["prefill_tokens"] - computed) != len(prompt):
        raise RuntimeError(f"{len(prompt)} prompt tokens: {new} were computed, the others were found")
    return seconds


def phases_of(engine: Any, prompts: Sequence[Prompt], *, new_tokens: int, watch: Stopwatch) -> dict[str, float]:
    """Where a decode step's time goes, in milliseconds (medians), from the engine's own step records; may be empty.

    `plan` is what the decode phase does around its forward: addressing, checks, padding.
    """
    if not hasattr(engine, "record_steps"):
        return {}
    found: dict[str, list[float]] = {}
    before = [watch.seconds]

    def heard(record: Any) -> None:
        forward = (watch.seconds - before[0]) * 1e3
        before[0] = watch.seconds
        if record.admitted or not record.decode_rows:
            return
        parts = {name: us / 1e3 for name, us in record.timings_us.items() if name != "prefill"}
        parts |= {"plan": parts.pop("decode") - forward, "forward": forward}
        for name, ms in parts.items():
            found.setdefault(name, []).append(ms)

    engine.record_steps(heard)
    try:
        with at_level("cheap"):
            engine.generate(greedy_requests(prompts, new_tokens=new_tokens))
    finally:
        engine.record_steps(None)
    return {name: median(values) for name, values in found.items()}
