"""What a step takes when it is launched before the tokens of the one before are known, and when it is not.

Run: `python -m tests.bench.bench_overlap`. On a CPU nothing runs beside the host, so there are two questions. Does
launching ahead cost anything there (the whole engine, both ways, in turns of one run)? And how much host work does it
hide? For that the device is a clock: the real scheduler, tables, plan, recordings and gates run over a forward
that computes nothing, and a step's tokens arrive a given time after the device has begun it. What a card does is
measured by `make gpu`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor

from fast.engine import Engine
from gates.core import set_level
from reference.request import Request, SamplingParams
from tests.hostwork import decoding, fixed_sampler

ROWS, ROUNDS = 8, 5


@dataclass
class ClockDevice:
    """A device that takes `ms` for each step, one after the other, and computes nothing."""

    ms: float
    _free_at: float = 0.0

    def to_host(self, values: Tensor) -> tuple[Tensor, ClockArrival]:
        """In the place of `fast.device_sampling._to_host`: the numbers, and when they are there."""
        self._free_at = max(time.perf_counter(), self._free_at) + self.ms / 1e3
        return values, ClockArrival(self._free_at)


@dataclass(frozen=True)
class ClockArrival:
    """In the place of a CUDA event."""

    at: float

    def synchronize(self) -> None:
        """Sleep, and look closely in the last moments."""
        while (left := self.at - time.perf_counter()) > 0:
            if left > 3e-4:
                time.sleep(left - 2e-4)


@contextmanager
def on_a_clock(ms: float) -> Iterator[None]:
    """Steps of a block arrive as from a device that takes `ms` for each."""
    with mock.patch("fast.device_sampling._to_host", ClockDevice(ms).to_host):
        yield


def clock_step_ms(*, overlap: bool, device_ms: float, rows: int, steps: int) -> float:
    """Milliseconds of one step of the engine over a clock for a device."""
    engine = decoding(rows=rows, context=64, steps=steps + 4, overlap=overlap)
    engine.samples_on_device = True
    with on_a_clock(device_ms), fixed_sampler():
        for _ in range(3):
            engine.step()
        begin = time.perf_counter()
        for _ in range(steps):
            engine.step()
        took = time.perf_counter() - begin
    assert engine.stats()["steps_ahead"] >= steps if overlap else engine.stats()["steps_ahead"] == 0
    return took * 1e3 / steps


def cpu_tokens(make: Callable[..., Engine], *, overlap: bool, rows: int, new: int) -> tuple[Any, float]:
    """The answers of `rows` requests on the CPU, and their tokens a second."""
    engine = make(overlap=overlap)
    engine.samples_on_device = True  # in both arms, so that only the order of things differs
    params = SamplingParams(new, temperature=0.0, ignore_eos=True)
    asked = [Request(range(3 + row, 35 + row), params, f"r{row}") for row in range(rows)]
    begin = time.perf_counter()
    answers = engine.generate(asked)
    return answers, rows * new / (time.perf_counter() - begin)


def run(make: Callable[..., Engine] | None, *, steps: int = 150, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Every line: the clock's, then the CPU's, medians over rounds in which the arms take turns."""
    set_level("cheap")
    lines: list[dict[str, Any]] = []
    for device_ms in (0.5, 1.0, 2.0, 5.0):
        taken: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds):
            for overlap, times in taken.items():
                times.append(clock_step_ms(overlap=overlap, device_ms=device_ms, rows=ROWS, steps=steps))
        turn, ahead = (statistics.median(taken[overlap]) for overlap in (False, True))
        lines.append({"device_ms": device_ms, "in_turn_ms": turn, "ahead_ms": ahead, "ratio": turn / ahead})
    if make is not None:
        rates: dict[bool, list[float]] = {False: [], True: []}
        for number in range(rounds):
            order = (False, True) if number % 2 else (True, False)
            told = {overlap: cpu_tokens(make, overlap=overlap, rows=ROWS, new=64) for overlap in order}
            assert told[True][0] == told[False][0], "the same answers"
            for overlap, (_, rate) in told.items():
                rates[overlap].append(rate)
        turn, ahead = (statistics.median(rates[overlap]) for overlap in (False, True))
        lines.append({"cpu": True, "in_turn": turn, "ahead": ahead, "ratio": ahead / turn})
    return lines


def real_engine(**switches: Any) -> Engine:
    """The default model as the server runs it on a CPU."""
    from serve.models import load_model

    loaded = load_model("smollm2-135m-instruct")
    assert loaded.weights is not None
    capture = {"bucket_decode": True, "persist_inputs": True, "capture_decode": True, "compact_rows": True}
    sizes = {"max_batch_size": ROWS, "num_blocks": ROWS * 8, "max_model_len": 128}
    how: dict[str, Any] = {"kernels": True, "half_weights": True, **capture, **sizes}
    built = Engine.build(loaded.config, loaded.weights, **how, **switches)
    built.warm_decode()
    return built


def table(lines: list[dict[str, Any]]) -> str:
    """As Markdown."""
    told = ["| a step on the device | in turn | launched ahead | in turn / ahead |", "| ---: | ---: | ---: | ---: |"]
    for line in lines:
        if "device_ms" in line:
            ms = f"{line['device_ms']} ms | {line['in_turn_ms']:.2f} ms | {line['ahead_ms']:.2f} ms"
            told.append(f"| {ms} | {line['ratio']:.2f} |")
        else:
            rates = f"{line['in_turn']:.0f} tokens/s | {line['ahead']:.0f} tokens/s"
            told.append(f"| none: the real model on this CPU | {rates} | {1 / line['ratio']:.2f} |")
    return "\n".join(told)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="without the real model")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    lines = run(None if args.tiny else real_engine)
    print(json.dumps(lines, indent=1) if args.json else table(lines))


if __name__ == "__main__":
    main()
