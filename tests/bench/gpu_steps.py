"""What a step of the whole engine takes on a card, in turn and launched ahead, and what of it the device computes.

The arms give the same tokens, which is asserted, and run one after the other in one process. `make gpu` runs it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from fast.engine import Engine
from reference.request import Request, SamplingParams
from tests.bench.bench_gpu import CAPTURED, CARD, DTYPE, Clock, Line, forget, replay_of
from tests.bench.gpu_models import engine
from tests.gpu_mode import DEVICE


def timed(clock: Clock) -> Iterator[Line]:
    """A step of the whole engine, host work and all, in turn and launched ahead: what of it the device computes."""
    name, tokens, steps = ("smollm2-135m", 640, 200) if CARD else ("tiny", 24, 3)
    for rows in (1, 8, 32) if CARD else (2,):
        if clock.left < 45 and CARD:
            yield {"part": "engine", "model": name, "rows": rows, "left_out": "no time was left"}
            continue
        told = []
        for arm, overlap in (("in turn", False), ("ahead", True)):
            how: dict[str, Any] = {"triton": True, **CAPTURED, "overlap": overlap}
            built = engine(name, dtype=DTYPE, device=DEVICE, rows=rows, tokens=tokens, **how)
            built.warm_decode()
            answers, ms = timed_steps(built, rows, steps)
            told.append(answers)
            plan, captured = built.decode.last_plan, built.decode.captured
            assert plan is not None
            assert captured is not None
            device_ms = clock.ms(replay_of(captured, plan), repeats=5)
            yield {
                "part": "engine", "model": name, "arm": arm, "rows": rows, "ms": ms, "device_ms": device_ms,
                "device_share": device_ms / ms, "steps_ahead": built.stats()["steps_ahead"],
            }  # fmt: skip
            del built
            forget()
        assert told[0] == told[1], "the same tokens, launched ahead or in turn"


def timed_steps(built: Engine, rows: int, steps: int) -> tuple[dict[str, list[int]], float]:
    """Every token of `rows` answers of `steps` tokens each, and milliseconds a step while all of them decode."""
    params = SamplingParams(steps + 4, temperature=0.0, ignore_eos=True)
    for row in range(rows):
        built.submit(Request(range(3 + row, 9 + row), params, f"r{row}"))
    tokens: dict[str, list[int]] = {}

    def step() -> None:
        for event in built.step():
            tokens.setdefault(event.request_id, []).append(event.token_id or 0)

    for _ in range(3):
        step()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    ms = (time.perf_counter() - begin) * 1e3 / steps
    while built.has_work:
        step()
    return tokens, ms
