"""`nanoserve bench decode | prefill`: fields, shares that add up on any clock, and no timing of wrong tokens."""

from __future__ import annotations

import argparse
import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from gates.core import level
from reference.request import Event
from serve import bench_engine
from serve.bench_engine import Arm, measure, show
from serve.bench_steps import Step, Steps, Stopwatch, decode_steps, prefill_seconds, prompts_of
from serve.boot import build_engine
from serve.cli import build_parser, main
from serve.models import load_model
from serve.roofline import Rates, decode_work, matrix_elements, measure_rates
from tests.harness import SHAPES, TINY

RATES = Rates(bytes_per_s=1e9, flops_per_s=1e10)
TINY_RUN = ["--model", "tiny-random", "--rounds", "1"]


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed:
    """An engine whose forward takes 7 s and whose step takes 3 s beside it, and 1 s more with the gates on."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.forward = SimpleNamespace(prefill=lambda: None, decode=self._spend)
        self.open: dict[str, int] = {}
        self.max_model_len = 99

    @property
    def has_work(self) -> bool:
        return bool(self.open)

    def submit(self, request) -> None:
        self.open[request.id] = request.params.max_tokens

    def abort(self, request_id: str) -> None: ...

    def describe(self) -> dict:
        return {}

    def stats(self) -> dict:
        return {}

    def step(self) -> list[Event]:
        self.forward.decode()
        self.clock.now += 3 + (level() > 0)
        events = []
        for name in list(self.open):
            self.open[name] -= 1
            events.append(Event(name, 5, None if self.open[name] else "length"))
            if not self.open[name]:
                del self.open[name]
        return events

    def _spend(self) -> None:
        self.clock.now += 7


def parsed(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", *argv])


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The line on stderr that a bad argument ends with, and status 2."""
    try:
        status = main(["bench", *argv])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    return capsys.readouterr().err.splitlines()[-1]


# holds


def test_a_step_is_its_forward_and_the_rest_on_any_clock():
    clock = Clock()
    engine, watch = Timed(clock), Stopwatch(clock)
    watch.attach(engine)
    steps = decode_steps(engine, [(1,), (2,), (3,)], new_tokens=9, watch=watch)
    # The first step gave first tokens: it is no decode step, whatever it took.
    assert steps == [Step(11.0, 7.0, 3, "cheap"), Step(10.0, 7.0, 3, "off")] * 4
    told = Steps(steps).summary()
    assert told["step_ms"] == 11e3
    assert told["tokens_per_s"] == pytest.approx(3 / 11)
    assert told["forward_percent"] == pytest.approx(100 * 7 / 11)
    assert told["forward_percent"] + told["overhead_percent"] == pytest.approx(100)
    assert told["gates_ratio"] == pytest.approx(1.1)


def test_prefill_ends_at_the_first_token():
    clock = Clock()
    engine = Timed(clock)
    assert prefill_seconds(engine, (1, 2), clock=clock) == 11.0
    assert not engine.has_work


@pytest.mark.parametrize("shape", ["gqa", "mha_tied"])
def test_a_decode_step_reads_each_matrix_once_and_each_rows_cache(shape: str):
    config = SHAPES[shape]
    work = decode_work(config, rows=3, context=5, weight_element_bytes=2, kv_element_bytes=4)
    layer = sum(
        rows * columns
        for rows, columns in [
            (config.num_heads * config.head_dim, config.hidden_size),  # q
            (config.num_kv_heads * config.head_dim, config.hidden_size),  # k
            (config.num_kv_heads * config.head_dim, config.hidden_size),  # v
            (config.hidden_size, config.num_heads * config.head_dim),  # output
            *[(config.intermediate_size, config.hidden_size)] * 3,  # gate, up, down
        ]
    )
    elements = config.num_layers * layer + config.vocab_size * config.hidden_size
    assert matrix_elements(config) == elements
    assert work.weight_bytes == 2 * elements
    assert work.kv_bytes == 3 * 5 * 4 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert work.flops == 3 * (2 * elements + 4 * 5 * config.num_layers * config.num_heads * config.head_dim)


def test_the_floor_is_the_slower_of_reading_and_computing():
    work = decode_work(TINY, rows=1, context=1, weight_element_bytes=2, kv_element_bytes=2)
    assert Rates(work.num_bytes / 2, work.flops).floor_s(work) == 2.0
    assert Rates(work.num_bytes, work.flops / 3).floor_s(work) == 3.0


def test_rates_are_the_best_of_their_rounds():
    spent = iter([8.0, 2.0, 4.0, 1.0, 3.0, 5.0])  # two reads; then two products of the one library, of the other
    now = [0.0]
    began = [False]

    def clock() -> float:
        now[0] += next(spent) if began[0] else 0.0
        began[0] = not began[0]
        return now[0]

    assert measure_rates(rounds=2, clock=clock) == Rates((256 << 20) / 2, 2 * 1024**3 / 1)


def test_decode_tells_every_field_and_arms_take_turns(monkeypatch: pytest.MonkeyPatch):
    turns: list[tuple[str, int]] = []
    honest = bench_engine.decode_steps

    def noted(engine, prompts, **options):
        turns.append((engine.describe()["name"], len(prompts)))
        return honest(engine, prompts, **options)

    monkeypatch.setattr(bench_engine, "decode_steps", noted)
    options = ["--batch", "1,3", "--context", "5", "--new-tokens", "6", "--engine", "fast,reference", "--rounds", "2"]
    args = parsed("decode", *TINY_RUN, *options, "--threads", "1")
    result = json.loads(json.dumps(measure(args, rates=lambda: RATES)))
    assert turns == [(name, rows) for _ in range(2) for name in ("fast", "reference") for rows in (1, 3)]
    assert (result["kind"], result["prompt_tokens"], result["new_tokens"]) == ("decode", 5, 6)
    assert result["memory"]["weight_bytes"] > 0
    assert {"torch", "numpy", "processor", "threads", "commit"} <= set(result["machine"])
    fast, reference = result["arms"]
    assert (fast["backend"]["name"], fast["threads"], reference["backend"]["name"]) == ("kernels", 1, "torch")
    for arm, tokens in ((fast, 3), (reference, 1)):  # the reference advances one request a step
        row = arm["decode"][1]
        assert row["batch"] == 3
        assert row["tokens_per_s"] == pytest.approx(1e3 * tokens / row["step_ms"])
        assert row["roofline_percent"] == pytest.approx(100 * row["floor_ms"] / row["step_ms"])
        assert row["floor_ms"] == pytest.approx(
            1e3 * max((row["weight_bytes"] + row["kv_bytes"]) / 1e9, row["flops"] / 1e10)
        )
    assert set(fast["decode"][0]["phases_ms"]) == {"schedule", "plan", "forward", "sample", "commit"}
    out = io.StringIO()
    show(result, Console(file=out, width=100))
    assert all(word in out.getvalue() for word in ("forward%", "roof%", "GFLOP/s", "memory at most", "commit"))


def test_prefill_prints_one_json_object(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_engine.measure, "__kwdefaults__", {"rates": lambda: RATES})
    assert main(["bench", "prefill", *TINY_RUN, "--tokens", "3,17,40", "--no-kernels", "--json"]) == 0
    (arm,) = json.loads(capsys.readouterr().out)["arms"]
    assert [row["tokens"] for row in arm["prefill"]] == [3, 17, 40]
    assert all(row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"]) for row in arm["prefill"])
    assert arm["backend"]["name"] == "torch"


# rejects


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["decode", "--batch", "1,0"], "--batch: '1,0' is not a list of integers of at least 1"),
        (["decode", "--engine", "fast,slow"], "--engine: 'slow' is not one of fast, reference"),
        (["decode", "--new-tokens", "5"], "--new-tokens: '5' is not an integer in 6.."),
        (["prefill", "--tokens", "x"], "--tokens: 'x' is not a list"),
        (["prefill", "--rounds", "0"], "--rounds: '0' is not an integer in 1.."),
        (["decode", *TINY_RUN, "--context", "2048"], "--context: 2112 tokens a request are not in 1..2048"),
        (["decode", *TINY_RUN, "--threads", "1000"], "--threads: 1000 is not in 1.."),
    ],
)
def test_a_bad_option_is_named(capsys: pytest.CaptureFixture[str], argv: list[str], told: str):
    assert told in refused(capsys, *argv)


def test_an_engine_that_says_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    honest = bench_engine._answers

    def off_by_one(engine, config):
        shift = engine.describe()["name"] == "fast"
        return [[token + shift for token in ids] for ids in honest(engine, config)]

    monkeypatch.setattr(bench_engine, "_answers", off_by_one)
    with pytest.raises(RuntimeError, match=r"fast on \d+ threads says .*, the reference .*; nothing was timed"):
        measure(parsed("decode", *TINY_RUN, "--batch", "1", "--new-tokens", "6"))


def test_a_pool_that_does_not_hold_the_batch_is_no_measurement():
    engine = build_engine(load_model("tiny-random"), max_batch_size=4, max_model_len=64, kv_cache_bytes=40_000)
    watch = Stopwatch()
    watch.attach(engine)
    with pytest.raises(RuntimeError, match="4 rows of 48 tokens: the pool preempted some"):
        decode_steps(engine, prompts_of(4, 15, vocab_size=200), new_tokens=33, watch=watch)


def test_a_step_that_computes_a_part_of_a_prompt_is_no_decode_step():
    engine = build_engine(load_model("tiny-random"), max_batch_size=2, max_model_len=64, chunk_tokens=8)
    watch = Stopwatch()
    watch.attach(engine)
    # Row 1's 20 tokens come in three parts and more while row 0 decodes; from then on every step has both rows.
    steps = decode_steps(engine, prompts_of(2, 20, vocab_size=200), new_tokens=20, watch=watch)
    assert [step.tokens for step in steps[:10]] == [2] * 10


def test_a_prompt_that_was_found_is_not_timed():
    sizes = {"max_batch_size": 1, "max_model_len": 96}
    engine = build_engine(load_model("tiny-random"), **sizes, prefix_cache=True)
    (short,), (long,) = (prompts_of(1, tokens, vocab_size=200) for tokens in (17, 40))
    prefill_seconds(engine, short)
    with pytest.raises(RuntimeError, match="40 prompt tokens: 24 were computed, the others were found"):
        prefill_seconds(engine, long)


def test_an_engine_without_a_forward_cannot_be_watched():
    with pytest.raises(ValueError, match="SimpleNamespace has neither of forward, model"):
        Stopwatch().attach(SimpleNamespace())  # type: ignore[arg-type]


# any order


def test_a_run_leaves_the_arm_as_it_was():
    engine = build_engine(load_model("tiny-random"), max_batch_size=2, max_model_len=64)
    arm = Arm("fast", 1, engine, Stopwatch())
    prompts = prompts_of(2, 5, vocab_size=200)
    before = engine.stats()["free_blocks"]
    for new_tokens in (7, 4, 6):
        assert len(decode_steps(engine, prompts, new_tokens=new_tokens, watch=arm.watch)) == new_tokens - 1
        prefill_seconds(engine, prompts[0])
    assert not engine.has_work
    assert engine.stats()["free_blocks"] == before
