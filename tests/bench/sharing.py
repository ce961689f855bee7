"""What is computed and what is not: prompts that begin alike, a short prompt behind a long one, and a pool too small.

Counts of the real scheduler, pool and prefix cache over whole runs; only the model is left out, since no count depends
on what it says. `tests.bench.figures` prints them, and the site shows them.
"""

from __future__ import annotations

from typing import Any

from fast.engine import Engine
from reference.request import Request, SamplingParams
from tests.hostwork import fixed_engine, fixed_sampler

SYSTEM, QUESTIONS, TURNS, TURN, ANSWER = 600, 50, 8, 40, 30
LONG, SHORT = 4000, 10
BUDGETS = (512, 8192)


def ids(count: int, salt: int = 0) -> tuple[int, ...]:
    """`count` token ids that differ from those of another salt in the first block."""
    return tuple((11 * i + 7 * salt) % 58 + 3 for i in range(count))


def questions(engine: Engine) -> None:
    """Fifty questions at once, behind one system prompt of 600 tokens."""
    params = SamplingParams(4, ignore_eos=True, seed=0)
    with fixed_sampler():
        engine.generate([Request((*ids(SYSTEM), *ids(10 + i % 7, i + 1)), params, f"q{i}") for i in range(QUESTIONS)])


def chat(engine: Engine) -> None:
    """One conversation of eight turns, each with all before it as its prompt."""
    history, params = ids(SYSTEM // 10), SamplingParams(ANSWER, ignore_eos=True, seed=0)
    with fixed_sampler():
        for turn in range(TURNS):
            history = (*history, *ids(TURN, turn + 1))
            (done,) = engine.generate([Request(history, params, f"t{turn}")])
            history = (*history, *done.token_ids)


def shared() -> list[dict[str, Any]]:
    """Prompt tokens that are computed with and without the prefix cache."""
    found = []
    for name, trace in (("50 questions behind a prompt of 600 tokens", questions), ("a chat of 8 turns", chat)):
        counts = {}
        for cached in (False, True):
            engine = fixed_engine(rows=16, num_blocks=900, max_model_len=1200, prefix_cache=cached)
            trace(engine)
            counts[cached] = engine.stats()
        assert counts[True]["prefill_tokens"] + counts[True]["prefix_hit_tokens"] == counts[False]["prefill_tokens"]
        computed = {"computed": counts[False]["prefill_tokens"], "with_cache": counts[True]["prefill_tokens"]}
        found.append({"trace": name, **computed, "hits": counts[True]["prefix_hit_tokens"]})
    return found


def behind() -> list[dict[str, Any]]:
    """What is computed before the first token of a short prompt that comes right behind a long one, by budget."""
    found = []
    for budget in BUDGETS:
        engine = fixed_engine(rows=16, num_blocks=700, max_model_len=4100, chunk_tokens=budget)
        for name, prompt in (("long", LONG), ("short", SHORT)):
            engine.submit(Request(ids(prompt), SamplingParams(4, ignore_eos=True, seed=0), name))
        first: dict[str, tuple[int, int]] = {}
        while engine.has_work:
            with fixed_sampler():
                for event in engine.step():
                    first.setdefault(event.request_id, (engine.steps, engine.prefill.tokens))
        found.append({"budget": budget, "short": first["short"], "long": first["long"]})
    return found


def tight() -> list[dict[str, Any]]:
    """Sixteen prompts of 60 to 75 tokens, answers of 120, in a pool that holds them all and in one of a third of it."""
    found = []
    for name, blocks, reserve in (("roomy", 900, False), ("tight", 60, False), ("tight, room kept to grow", 60, True)):
        engine = fixed_engine(rows=16, num_blocks=blocks, max_model_len=900, reserve_growth=reserve)
        params = SamplingParams(120, ignore_eos=True, seed=0)
        with fixed_sampler():
            engine.generate([Request(ids(60 + i, i), params, f"r{i}") for i in range(16)])
        stats = engine.stats()
        counts = {key: stats[key] for key in ("preemptions", "prefill_tokens", "steps")}
        found.append({"pool": name, "blocks": blocks, **counts})
    return found
