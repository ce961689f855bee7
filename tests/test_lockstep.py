"""The fast engine emits the reference's tokens, whatever else is in the batch, and says where when it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast.engine import Engine
from fast.rows import Rows
from gates.core import at_level
from reference.engine import Engine as ReferenceEngine
from reference.request import Request, SamplingParams
from tests.harness import (
    SHAPES,
    Arrival,
    LockstepError,
    Trace,
    compare,
    lockstep,
    run_fast,
    tiny_reference,
    traces,
)

pytestmark = pytest.mark.differential

OPTIONS = {"free rows": (), "compact rows": (("compact_rows", True),)}

# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_shape_agrees_over_long_greedy_answers(shape: str):
    requests = [
        Request(range(3, 3 + length), SamplingParams(40, temperature=0.0), f"p{length}") for length in (1, 4, 9)
    ]
    trace = Trace(
        tuple(Arrival(step, request) for step, request in enumerate(requests)),
        shape=shape,
        num_blocks=40,
        max_model_len=60,
    )
    lockstep(trace)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_prompts_around_block_boundaries_agree_in_a_tight_pool(length: int):
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=length, ignore_eos=True)
    arrivals = tuple(Arrival(0, Request(range(5, 5 + length), params, f"r{i}")) for i in range(3))
    run = lockstep(Trace(arrivals, num_blocks=10))
    answers = {tuple(completion.token_ids) for completion in run.completions.values()}
    assert len(answers) == 1, "the same request three times has one answer"


def test_a_whole_pool_of_one_token_blocks_agrees():
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    arrivals = tuple(Arrival(0, Request((9, i), params, f"r{i}")) for i in range(4))
    run = lockstep(Trace(arrivals, block_size=1, num_blocks=8, max_model_len=8))
    assert run.engine.stats()["preemptions"] > 0


# ---- rejects ----------------------------------------------------------------------------------------------------


def _one(params: SamplingParams) -> Trace:
    return Trace((Arrival(0, Request((7, 8, 9), params, "one")),))


def test_a_changed_token_is_reported_with_its_place_and_a_program_that_replays_it():
    trace = _one(SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    run = run_fast(trace)
    true_token = run.completions["one"].token_ids[3]
    run.completions["one"].token_ids[3] = (true_token + 1) % 61
    with pytest.raises(LockstepError) as caught:
        compare(run, tiny_reference(max_model_len=40), trace.arrivals[0].request, program=trace.program())
    message = str(caught.value)
    assert f"position 6 (answer token 3): fast [{(true_token + 1) % 61}], reference [{true_token}]" in message
    assert "step 3" in message
    assert "gap" in message


def test_the_printed_program_is_the_trace():
    params = SamplingParams(max_tokens=2, temperature=0.5, seed=-3, logit_bias={4: 2.0}, stop_token_ids=(9,))
    trace = replace(_one(params), aborts=((1, "one"),), options=OPTIONS["compact rows"], shape="biases")
    seen: list[Trace] = []
    exec(trace.program().replace("lockstep(", "seen.append("), {"seen": seen})
    assert seen == [trace]


def test_a_move_that_forgets_a_column_is_caught(monkeypatch: pytest.MonkeyPatch):
    move = Rows.move

    def forgets_the_seed(rows: Rows, *, src: int, dst: int) -> None:
        seed = rows.seed[dst]
        move(rows, src=src, dst=dst)
        rows.seed[dst] = seed

    arrivals = tuple(
        Arrival(0, Request((7, 8), SamplingParams(max_tokens=tokens, temperature=5.0, seed=9, ignore_eos=True), name))
        for name, tokens in (("short", 2), ("long", 12))
    )
    trace = Trace(arrivals, options=OPTIONS["compact rows"])
    lockstep(trace)
    monkeypatch.setattr(Rows, "move", forgets_the_seed)
    with at_level("off"), pytest.raises(LockstepError, match="long: step"):
        lockstep(trace)  # no gate at all: the tokens alone give it away


# ---- any order --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@given(data=st.data())
def test_any_trace_agrees(options: tuple[tuple[str, object], ...], data: st.DataObject):
    lockstep(data.draw(traces(options=options)))


# ---- the real model ---------------------------------------------------------------------------------------------

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Привет, как дела? 今日は",
    "1",
)


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_real_model_agrees_in_a_tight_pool(temperature: float):
    from serve.models import load_model

    loaded = load_model("smollm2-135m-instruct")
    engine = Engine.build(loaded.config, loaded.weights, max_batch_size=3, block_size=4, num_blocks=14)
    reference = ReferenceEngine(loaded.config, loaded.weights, max_model_len=engine.max_model_len)
    arrivals = []
    for index, text in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=12, temperature=temperature, seed=index, top_p=0.95, repetition_penalty=1.1)
        arrivals.append(Arrival(index // 2, Request(tuple(loaded.tokenizer.encode(text)), params, f"p{index}")))
    trace = Trace(tuple(arrivals))
    run = run_fast(trace, engine)
    for arrival in arrivals:
        compare(run, reference, arrival.request, program=f"prompt {arrival.request.prompt_ids}")
