"""A step that is launched before the tokens of the one before are known: the same tokens, told a step late at most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fast.forwards
from fast.commit import Commit
from fast.device_sampling import DeviceChoice
from fast.engine import Engine
from fast.overlap import Overlap
from fast.recheck import Recheck
from fast.scheduler import Scheduler
from gates import GateError
from gates.core import at_level
from gates.overlap import (
    check_blocks_at_rest,
    check_ids_fed,
    check_nothing_after_end,
    check_one_in_flight,
    check_settled_first,
    check_tokens_conserved,
)
from reference.request import Event, Request, SamplingParams
from serve.trace import attach_trace
from serve.trace_read import TraceReader
from tests.fast_run import FastRun
from tests.gpu_mode import MARKS
from tests.harness import TINY, engine_of, lockstep, run_fast, tiny_engine, tiny_weights
from tests.museum.exhibit import Edit, applied
from tests.strategies import traces
from tests.traces import ALL_ON, Arrival, Trace

LIKELY = tuple(range(20, 40))  # a third of the vocabulary: an answer that stops at these ends soon, and unforeseen


def asked(name: str, prompt: int, answer: int | None, **params: Any) -> Request:
    wanted = {"temperature": 0.0, "ignore_eos": True, "seed": prompt} | params
    return Request(range(7, 7 + prompt), SamplingParams(max_tokens=answer, **wanted), name)


# Ends by length and by token, prompts on both sides of a block, more requests than rows.
EASY = Trace(
    arrivals=(
        Arrival(0, asked("a", 3, 12)),
        Arrival(0, asked("b", 5, 9, temperature=0.9)),
        Arrival(1, asked("c", 4, 14, stop_token_ids=LIKELY)),
        Arrival(2, asked("d", 2, 20, temperature=1.0, top_p=0.9, ignore_eos=False)),
        Arrival(2, asked("e", 9, 11, stop_token_ids=tuple(range(15)))),
        Arrival(3, asked("f", 4, 1)),
        Arrival(9, asked("g", 13, 6, temperature=1.0, top_k=9, stop_token_ids=LIKELY)),
    ),
    num_blocks=16,
    overlap=True,
)


def served(trace: Trace) -> tuple[FastRun, list[list[Event]]]:
    """A run, and the events of each of its steps."""
    told: list[list[Event]] = []
    engine = engine_of(trace)
    step = engine.step

    def keeps() -> list[Event]:
        told.append(step())
        return told[-1]

    engine.step = keeps  # type: ignore[method-assign]
    run = FastRun(trace, engine)
    for arrival in trace.arrivals:
        while run.steps < arrival.step:
            run.step()
        run.submit(arrival.request)
    run.drain()
    run.finish()
    return run, told


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.differential
@pytest.mark.parametrize("shared", [{}, {"prefix_cache": True, "chunk_tokens": 5, "mixed_steps": True}], ids=str)
@pytest.mark.parametrize(
    "arm", ["exact-free", "persist-gather", "bucket-compact", ALL_ON, "warm-gather", "lazy-compact"]
)
def test_every_way_to_run_a_step_gives_the_references_tokens(arm: str, shared: dict[str, Any]):
    stats = lockstep(replace(EASY, arm=arm, **shared)).engine.stats()
    assert stats["steps_ahead"] > 10, stats
    assert stats["dropped_tokens"] > 0, stats


@pytest.mark.differential
@pytest.mark.parametrize("arm", ["kernels-warm-compact"])
def test_the_cpu_kernels_give_the_references_tokens(arm: str):
    sizes = {"block_size": 16, "num_blocks": 8, "max_model_len": 80, "dtype": "float32"}
    assert lockstep(replace(EASY, arm=arm, **sizes)).engine.stats()["steps_ahead"] > 10


@pytest.mark.differential
@pytest.mark.parametrize("arm", ["triton-warm-compact"])
def test_the_gpus_kernels_give_the_references_tokens(arm: str):
    few = tuple(
        replace(one, request=replace(one.request, prompt_ids=one.request.prompt_ids[:4])) for one in EASY.arrivals
    )
    trace = Trace(few[:3], arm=arm, dtype="float32", max_batch_size=2, num_blocks=6, max_model_len=20, overlap=True)
    stats = lockstep(trace).engine.stats()
    assert stats["steps_ahead"] > 10
    assert (stats["captures_after_ready"], stats["kernel_compiles_after_ready"]) == (0, 0)


test_the_gpus_kernels_give_the_references_tokens.pytestmark += [m for m in MARKS if m.name != "gpu"]  # type: ignore[attr-defined]


@pytest.mark.model
@pytest.mark.differential
def test_the_real_model_gives_its_tokens():
    from serve.models import load_model

    encode = load_model("smollm2-135m-instruct").tokenizer.encode
    texts = ("The capital of France is", "def fibonacci(n):\n    ", "1")
    arrivals = tuple(
        Arrival(at, Request(tuple(encode(text)), SamplingParams(9 + at, temperature=0.8 * (at % 2), seed=at), f"r{at}"))
        for at, text in enumerate(texts)
    )
    sizes = {"block_size": 16, "num_blocks": 12, "max_model_len": 96, "dtype": "float32", "overlap": True}
    trace = Trace(arrivals, arm="half-warm-compact", shape="smollm2-135m-instruct", max_batch_size=3, **sizes)
    assert lockstep(trace).engine.stats()["steps_ahead"] > 8


def test_events_are_those_of_the_plain_engine_a_step_later_at_most():
    room = {"max_batch_size": 8, "num_blocks": 60}
    (plain, in_turn), (run, ahead) = served(replace(EASY, overlap=False, **room)), served(replace(EASY, **room))
    flat = [[event for step in told for event in step] for told in (in_turn, ahead)]
    assert flat[1] == flat[0], "the same events in the same order"
    for ours, theirs in zip(run.answers, plain.answers, strict=True):
        late = {mine - its for mine, its in zip(ours.steps, theirs.steps, strict=True)}
        assert late <= {0, 1}
    assert run.engine.stats()["steps_ahead"] > 10
    assert len(ahead) <= len(in_turn) + 1


def test_a_step_is_launched_before_the_one_before_is_read(monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    launch, read = Overlap.launch, DeviceChoice.read

    def launches(overlap: Overlap, flight: Any) -> None:
        told.append(f"launch {overlap.launched}")
        launch(overlap, flight)

    def reads(choice: DeviceChoice, **how: Any) -> Any:
        told.append("read")
        return read(choice, **how)

    monkeypatch.setattr(Overlap, "launch", launches)
    monkeypatch.setattr(DeviceChoice, "read", reads)
    tiny_engine(num_blocks=8, overlap=True).generate([asked("one", 3, 4)])
    assert told == ["launch 0", "launch 1", "read", "launch 2", "read", "launch 3", "read", "read"]


def test_a_step_in_flight_names_every_block_that_it_writes():
    engine = tiny_engine(num_blocks=8, block_size=4, overlap=True)
    engine.submit(asked("one", 6, 9))
    written = []
    for _ in range(4):
        engine.step()
        written.append(sorted(engine.cache.tables[0].blocks.index(block) for block in engine.overlap.written))
    assert written == [[0, 1], [1], [1], [2]], "of a prompt of six tokens in blocks of four, then a token a step"


def test_an_end_by_length_is_foreseen_and_its_row_is_given_on_at_once():
    lengths = (4, 9, 2, 7, 5, 3)
    engines = [tiny_engine(max_batch_size=2, num_blocks=12, overlap=on) for on in (False, True)]
    for engine in engines:
        engine.generate([asked(f"r{length}", 3, length) for length in lengths])
    plain, ahead = (engine.stats() for engine in engines)
    assert engines[1].overlap.launched == sum(lengths)
    assert ahead["dropped_tokens"] == 0
    assert ahead["decode_steps"] == plain["decode_steps"]
    assert ahead["steps"] <= plain["steps"] + 1


REASONS = {
    "penalty": {"presence_penalty": 0.5},
    "bias": {"logit_bias": {9: 1.0}},
    "logprobs": {"logprobs": 1},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": (3,)},
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_the_host_has_to_choose_is_waited_for_and_counted(reason: str):
    engine = tiny_engine(num_blocks=8, overlap=True)
    engine.generate([asked("one", 3, 5, **REASONS[reason])])
    stats = engine.stats()
    assert (stats["step_waits"], stats["steps_ahead"]) == ({reason: 5}, 0)


def test_a_watched_answer_is_waited_for_and_found_again():
    how = {"kernels": True, "block_size": 16, "num_blocks": 8, "max_model_len": 64}
    engine = Engine.build(TINY, tiny_weights(), **how, overlap=True)
    engine.recheck = Recheck(engine.forward, engine.cache, every=2)
    engine.generate([asked("watched", 3, 6), asked("not", 4, 9)])
    assert engine.stats()["step_waits"] == {"recheck": 6}
    while engine.idle():
        pass
    assert (engine.recheck.checked, engine.stats()["steps_ahead"] > 1) == (1, True)


@pytest.mark.differential
@pytest.mark.parametrize("mixed", [False, True])
def test_a_prompt_that_wants_no_answer_ends_with_its_own_step(mixed: bool):
    scored = [Arrival(2 + i, asked(f"s{i}", 6 + i, 0, prompt_logprobs=2 - 2 * i)) for i in range(2)]
    trace = replace(EASY, arrivals=(*EASY.arrivals[:2], *scored), arm=ALL_ON, mixed_steps=mixed, chunk_tokens=6)
    stats = lockstep(trace).engine.stats()
    assert stats["steps_ahead"] > 5
    assert stats["step_waits"] == {"score": 2}


@pytest.mark.differential
def test_a_row_that_is_to_lose_its_place_is_waited_for():
    arrivals = tuple(Arrival(0, asked(f"r{i}", 5 + i, 14)) for i in range(3))
    stats = lockstep(Trace(arrivals, arm=ALL_ON, num_blocks=8, overlap=True)).engine.stats()
    assert stats["preemptions"] > 0
    assert stats["step_waits"]["preemption"] >= stats["preemptions"]


def test_an_abort_waits_for_the_step_in_flight_and_frees_at_once():
    engine = tiny_engine(num_blocks=12, overlap=True)
    for name in ("gone", "stays"):
        engine.submit(asked(name, 4, 9))
    for _ in range(3):
        engine.step()
    held = engine.cache.allocator.num_owned
    engine.abort("gone")
    assert engine.cache.allocator.num_owned == held // 2
    assert engine.stats()["step_waits"] == {"abort": 1}
    first = engine.step()
    assert [(event.request_id, event.finish_reason) for event in first[:3]] == [
        ("gone", None), ("stays", None), ("gone", "abort"),
    ]  # fmt: skip
    while engine.has_work:
        engine.step()


def test_an_answer_that_was_over_when_it_was_aborted_ends_as_it_ended():
    engine = tiny_engine(num_blocks=12, overlap=True)
    engine.submit(asked("over", 4, 2))
    engine.submit(asked("stays", 4, 9))
    engine.step()
    engine.step()
    engine.abort("over")
    engine.abort("over")
    ends = [(event.request_id, event.finish_reason) for event in engine.step() if event.finish_reason is not None]
    assert ends == [("over", "length")]


def test_a_published_block_holds_what_the_host_knows():
    trace = replace(EASY, arrivals=EASY.arrivals[:2], prefix_cache=True, arm=ALL_ON, num_blocks=30)
    ahead, plain = (run_fast(replace(trace, overlap=on)).engine for on in (True, False))
    assert ahead.prefix is not None
    assert plain.prefix is not None
    assert len(ahead.prefix) == len(plain.prefix) > 0, "what a plain engine publishes, and nothing that was dropped"


def test_a_block_that_fills_as_its_row_is_given_back_is_published():
    published = []
    for on in (True, False):
        engine = tiny_engine(num_blocks=20, block_size=4, overlap=on, prefix_cache=True)
        engine.generate([asked("ends", 4, 5), asked("goes on", 3, 12)])  # the first stores eight tokens
        published.append(len(engine.prefix or ()))
    assert published[0] == published[1]


@pytest.mark.parametrize("blocks", [16, 9], ids=["room", "preempted"])
def test_a_trace_of_steps_ahead_is_whole(blocks: int, tmp_path: Path):
    """The reader's gates follow every row and block, those that are given back in flight too."""
    engine = engine_of(replace(EASY, arm=ALL_ON, num_blocks=blocks, prefix_cache=True))
    attach_trace(engine, tmp_path / "trace.jsonl", model="tiny", config=TINY)
    for step, arrival in enumerate(EASY.arrivals):
        engine.submit(arrival.request)
        engine.step()
        if step == 4:
            engine.abort("a")
    while engine.has_work:
        engine.step()
    with at_level("cheap"):
        read = list(TraceReader(tmp_path / "trace.jsonl"))
    stats = engine.stats()
    assert sum(bool(step.ahead) for step in read) == stats["steps_ahead"] > 8
    assert sum(step.dropped for step in read) == stats["dropped_tokens"]
    assert {reason for step in read for reason in step.waited} == stats["step_waits"].keys()
    assert any(step.parked for step in read)
    assert (stats["preemptions"] > 0) == (blocks == 9)


# ---- rejects ----------------------------------------------------------------------------------------------------


@contextmanager
def rejected(gate: str, *, level: str = "cheap") -> Iterator[None]:
    with at_level(level), pytest.raises(GateError, match=f"^gate {gate}: "):
        yield


def stopping() -> list[Request]:
    """Two answers that end where nobody could foresee it, and one that goes on."""
    return [asked("c", 4, 14, stop_token_ids=LIKELY), asked("e", 9, 11, stop_token_ids=LIKELY), asked("a", 3, 20)]


def test_gate_rejects_a_step_that_nobody_reads(monkeypatch: pytest.MonkeyPatch):
    check_one_in_flight(in_flight=1)
    monkeypatch.setattr(Engine, "_land", lambda engine, mark: [])
    with rejected("overlap.one_in_flight"):
        tiny_engine(num_blocks=8, overlap=True).generate([asked("one", 3, 9)])


def test_gate_rejects_a_step_that_is_forgotten():
    check_tokens_conserved(launched=5, committed=3, dropped=1, in_flight=1)
    engine = tiny_engine(num_blocks=8, overlap=True)
    engine.submit(asked("one", 3, 9))
    engine.step()
    engine.overlap.flights.clear()  # the fault: its token is in no answer, and in no count
    engine.scheduler.running[0].in_flight = 0
    with rejected("overlap.tokens_conserved"):
        engine.overlap.check()


def test_gate_rejects_a_token_after_the_end():
    check_nothing_after_end(ended=[("one", 7, 7)])
    edit = Edit(Commit.take, "if sequence.ended_at is not None:", "if sequence.ended_at == 0:")
    with applied((edit,)), rejected("overlap.nothing_after_end"):
        tiny_engine(num_blocks=16, overlap=True).generate(stopping())


def test_gate_rejects_blocks_that_go_back_while_they_are_written():
    check_blocks_at_rest(freed=[3, 4], written={5})
    edit = Edit(Commit._give_back, "if sequence.in_flight == 0:", "if True:")
    with applied((edit,)), rejected("overlap.blocks_at_rest"):
        tiny_engine(num_blocks=16, overlap=True).generate(stopping())


def test_gate_rejects_a_preemption_of_a_row_in_flight(monkeypatch: pytest.MonkeyPatch):
    check_settled_first(request_id="one", in_flight=0)
    monkeypatch.setattr(Scheduler, "growth_fits", True)
    with rejected("overlap.settled_first"):
        tiny_engine(num_blocks=8, max_model_len=32, overlap=True, block_size=4).generate(
            [asked(f"r{i}", 5 + i, 14) for i in range(3)]
        )


def test_gate_rejects_ids_of_the_rows_place_instead_of_its_line():
    check_ids_fed(fed=[4, 5], chosen=[4, 5])
    edit = Edit(fast.forwards._late, "[lines[decoding[place]] for place in places]", "places")
    with applied((edit,)), rejected("overlap.ids_fed", level="full"):
        tiny_engine(num_blocks=16, overlap=True, compact_rows=True).generate(
            [asked("short", 3, 2, temperature=1.0), *stopping()]
        )


# ---- any order --------------------------------------------------------------------------------------------------


@st.composite
def easy_params(draw: st.DrawFn) -> SamplingParams:
    """What a device chooses by itself, mostly; ends that are foreseen, and ends that are not."""
    return SamplingParams(
        draw(st.sampled_from([1, 2, 5, 12])),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 3)),
        top_k=draw(st.sampled_from([0, 4])),
        stop_token_ids=draw(st.sampled_from([(), LIKELY])),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, None, None, None, 1])),
    )


@pytest.mark.differential
@settings(max_examples=20)
@given(trace=traces(params=easy_params(), overlap=True))
def test_any_trace_agrees(trace: Trace):
    lockstep(trace)
