"""Where the same recordings are paid for: lazily in front of a client, or at start-up over padding.

Run: `python -m pytest tests/bench/bench_warmup.py --benchmark-enable --benchmark-only`. Captures are exact and the
same on every machine; the clock is this machine's, over a host recorder, so it prices bookkeeping and no GPU capture.
The honest part is in the last bench: the closed set is a product, and warming all of it costs nine times what the
stalls of an 8,192-token answer add up to.
"""

from __future__ import annotations

import pytest

from fast.buckets import BucketSet
from fast.capture import CapturedDecode, HostRecorder
from fast.inputs import DecodeInputs
from fast.warmup import lazy_captures, stall_seconds, warm_decode, warm_shapes, warmup_seconds, width_ceiling
from gates.core import at_level
from tests.addressing import Paged
from tests.test_capture import toy_forward

PROMPT, MULTIPLE = 16, 32
RUNS = {8: (1, 4), 32: (2, 4), 64: (3, 6), 128: (5, 10)}  # generated: (lazy captures, recordings in the warm list)
SECONDS_PER_GRAPH = 0.05


class Run:
    """Two rows off a 16-token prompt, decoded to their end through a capture."""

    def __init__(self, generated: int, *, warm: bool) -> None:
        self.generated, self.warm = generated, warm
        # The list covers at least 48 tokens, as a server's would: it is sized before anybody asks for an answer.
        self.paged = Paged(2, PROMPT + max(generated, 32))
        self.inputs = DecodeInputs(max_batch_size=2, sink_slot=self.paged.sink)
        self.buckets = BucketSet(
            max_batch_size=2, max_model_len=self.paged.slots.max_model_len, width_multiple=MULTIPLE
        )
        self.captured = CapturedDecode(
            toy_forward, HostRecorder(), slot_table=self.paged.slots, inputs=self.inputs, record_on_miss=True
        )
        self.outputs: list[list[int]] = []

    def start(self) -> Run:
        if self.warm:
            warm_decode(self.captured, warm_shapes(self.buckets), num_heads=1)
        self.captured.ready()
        for row in (0, 1):
            self.paged.adopt(row, PROMPT)
        return self

    def decode(self) -> Run:
        for _ in range(self.generated):
            plan = self.paged.plan((0, 1), buckets=self.buckets, inputs=self.inputs)
            self.outputs.append(self.captured.run(plan).tolist())
        return self


@pytest.mark.parametrize("generated", RUNS)
@pytest.mark.parametrize("warm", [False, True], ids=["lazy", "warmed"])
def bench_captures_in_front_of_a_client(benchmark, generated: int, warm: bool):
    lazy, listed = RUNS[generated]
    arms = {each: Run(generated, warm=each).start().decode() for each in (False, True)}
    assert arms[False].outputs == arms[True].outputs
    assert arms[False].captured.captures_after_ready == lazy
    assert arms[True].captured.captures_after_ready == 0
    assert arms[True].captured.captures == listed
    assert lazy_captures(generated=generated, prompt_tokens=PROMPT, width_multiple=MULTIPLE) == lazy
    run = arms[warm]
    benchmark.group = f"{generated} generated tokens"
    benchmark.extra_info.update(
        cold_captures=run.captured.captures_after_ready,
        predicted=0 if warm else lazy,
        warm_list=len(warm_shapes(run.buckets)) if warm else 0,
        replay_share=run.captured.replay_share,
    )
    with at_level("cheap"):
        benchmark.pedantic(Run.decode, setup=lambda: ((Run(generated, warm=warm).start(),), {}), rounds=5)


@pytest.mark.parametrize("generated", RUNS)
def bench_recording_the_list(benchmark, generated: int):
    run = Run(generated, warm=False)
    shapes = warm_shapes(run.buckets)
    assert len(shapes) == RUNS[generated][1]
    benchmark.group = "recording the warm list at start-up"
    benchmark.extra_info.update(graphs=len(shapes), widest=shapes[0])

    def record() -> None:
        warm_decode(run.captured, shapes, num_heads=1)

    record()
    assert set(run.captured.shapes) == set(shapes)
    with at_level("cheap"):
        benchmark(record)


@pytest.mark.parametrize(
    ("trim", "shapes", "seconds"),
    [({}, 576, 28.80), ({"max_rows": 8}, 256, 12.80), ({"max_rows": 8, "max_width": 2048}, 64, 3.20)],
    ids=["full", "rows<=8", "rows<=8,width<=2048"],
)
def bench_pricing_a_serving_size_list(benchmark, trim: dict[str, int], shapes: int, seconds: float):
    serving = BucketSet(max_batch_size=256, max_model_len=8192, width_multiple=128)
    listed = benchmark(warm_shapes, serving, **trim)
    assert len(listed) == shapes
    assert round(warmup_seconds(listed, seconds_per_graph=SECONDS_PER_GRAPH), 2) == seconds
    stalls = {
        generated: round(stall_seconds(captures, seconds_per_graph=SECONDS_PER_GRAPH), 2)
        for generated in (128, 512, 2048, 8192)
        for captures in [lazy_captures(generated=generated, prompt_tokens=0, width_multiple=128)]
    }
    assert stalls == {128: 0.05, 512: 0.20, 2048: 0.80, 8192: 3.20}
    budgets = {
        budget: len(warm_shapes(serving, max_width=width_ceiling(budget, rows=256, num_heads=32)))
        for budget in (64_000_000, 268_000_000, 1_000_000_000)
    }
    assert budgets == {64_000_000: 135, 268_000_000: 567, 1_000_000_000: 576}
    benchmark.group = "256 rows x 8,192 tokens at width multiple 128, 50 ms a graph"
    benchmark.extra_info.update(start_up_seconds=seconds, lazy_stall_seconds=str(stalls), shapes_by_budget=str(budgets))
