"""Fast against reference over every legal setting of the switches, on traces that are fixed, random, and walked."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import fast.sampling
from fast.inputs import DecodeInputs
from fast.slots import SlotTable
from gates.core import at_level
from reference.request import Request, SamplingParams
from tests.fast_run import Answer, FastRun
from tests.harness import (
    SHAPES,
    compare,
    engine_of,
    is_half,
    is_half_kv,
    lockstep,
    reference_answer,
    reference_logits,
    tiny_engine,
)
from tests.strategies import limits, plain_params, requests, traces
from tests.traces import (
    ALL_ON,
    ARMS,
    ENDED,
    ENDING,
    KERNEL_ARMS,
    PREEMPTED,
    RUNNING,
    STATES,
    WAITING,
    Arrival,
    LockstepError,
    Trace,
)

pytestmark = pytest.mark.differential

EXAMPLES = settings.default.max_examples if settings.default else 25
SEPARATED = 1e-5  # logits apart: ten times what float32 loses in a model this small
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}


def _request(name: str, prompt_tokens: int, max_tokens: int | None, **params) -> Request:
    chosen = {"temperature": 0.0, "ignore_eos": True} | params
    return Request(range(7, 7 + prompt_tokens), SamplingParams(max_tokens=max_tokens, **chosen), name)


# Everything that traces are drawn for, in one: block 4, five rows (buckets 1, 2, 4, 5), a pool that is too small.
FIXED = Trace(
    arrivals=(
        Arrival(0, _request("below", 3, 16, temperature=0.9, seed=4)),
        Arrival(0, _request("exact", 4, 12, logprobs=3)),
        Arrival(0, _request("above", 5, 12, temperature=0.8, seed=-1, top_p=0.9, **PENALTIES)),
        Arrival(0, _request("one", 6, 1)),
        Arrival(0, _request("eos", 2, 8, ignore_eos=False, logit_bias={2: 100.0})),
        Arrival(0, _request("long", 40, None)),  # refused: no room for an answer
        Arrival(0, _request("pair", 2, 10, temperature=1.0, seed=8, n=2, logprobs=0)),
        Arrival(2, _request("below", 3, 16)),  # refused: open
        Arrival(3, _request("one", 7, 6, temperature=1.0, top_k=4)),  # again, and without a seed
        Arrival(3, _request("late", 1, 9, temperature=2.0, seed=5, min_tokens=3, stop_token_ids=(20, 21, 22))),
        Arrival(3, _request("spare", 2, 5)),
        Arrival(3, replace(_request("alien", 3, 3), prompt_ids=(3, 61))),  # refused: not in the vocabulary
        Arrival(4, _request("rest", 9, None, temperature=0.7, seed=6, **PENALTIES)),
        Arrival(9, _request("eos", 8, 7, logit_bias={9: 2.5}, logprobs=1)),  # again
    ),
    aborts=((1, ENDED), (3, WAITING), (7, PREEMPTED), (8, RUNNING), (11, ENDING)),
    max_batch_size=5,
    num_blocks=11,
    max_model_len=24,
    width_multiple=3,
)

# ---- holds ------------------------------------------------------------------------------------------------------


def test_the_arms_are_the_legal_settings_and_no_other():
    switches = ("bucket_decode", "persist_inputs", "capture_decode", "compact_rows", "gather_rows")
    legal = set()
    for setting in product([False, True], repeat=len(switches)):
        with suppress(ValueError):
            tiny_engine(max_batch_size=2, num_blocks=4, **dict(zip(switches, setting, strict=True)))
            legal.add(setting)
    assert {tuple(name in arm.switches for name in switches) for arm in ARMS.values()} == legal
    # A captured arm comes three times: all of its list is warm, half of it, or none and it records on a miss.
    assert len(ARMS) == len(legal) + 2 * sum(setting[2] for setting in legal)
    assert {
        (arm.warm, "record_on_miss" in arm.switches) for arm in ARMS.values() if "capture_decode" in arm.switches
    } == {
        ("all", False),
        ("half", False),
        ("nothing", True),
    }
    assert set(switches) - set(ARMS[ALL_ON].switches) == {"gather_rows"}


@pytest.mark.parametrize("arm", ARMS)
def test_the_fixed_trace_agrees_on_every_arm(arm: str):
    shapes, turn = list(SHAPES), list(ARMS).index(arm)
    for shape in ("gqa", shapes[turn % len(shapes)]):  # each shape comes round on at least three arms
        lockstep(replace(FIXED, arm=arm, shape=shape))


def test_the_fixed_trace_holds_what_it_says():
    run = lockstep(replace(FIXED, arm=ALL_ON))
    stats = run.engine.stats()
    assert set(run.aborted) == set(STATES), run.aborted
    assert stats["preemptions"] > 2
    assert stats["moves"] > 2
    assert stats["row_padding_share"] > 0
    assert sum(answer.refusal is not None for answer in run.answers) == 3
    first = {answer.request.id: answer.completion for answer in reversed(run.answers) if answer.refusal is None}
    assert (first["eos"].token_ids, first["eos"].finish_reason) == ([2], "stop")
    assert len(first["one"].token_ids) == 1
    reasons = {answer.completion.finish_reason for answer in run.answers}
    assert reasons == {"stop", "length", "abort", None}


@pytest.mark.parametrize("rows", [1, 3, 5, 8, 9])
@pytest.mark.parametrize("arm", ["bucket-free", "warm-compact", "warm-gather", "lazy-compact"])
def test_row_counts_beside_a_bucket_agree(arm: str, rows: int):
    arrivals = tuple(
        Arrival(i // 4, _request(f"r{i}", 1 + i % 5, 3 + 4 * (i % 3), temperature=0.6, seed=i)) for i in range(rows + 2)
    )
    run = lockstep(Trace(arrivals, arm=arm, max_batch_size=rows, num_blocks=40))
    assert run.engine.stats()["preemptions"] == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arm", ["exact-free", "warm-compact", "warm-gather"])
def test_float32_agrees_where_logits_are_well_separated(arm: str, shape: str):
    base = Trace(arm=arm, shape=shape, dtype="float32", num_blocks=12)
    lengths = [length for length in range(3, 20) if smallest_gap(_alone(base, length)) > SEPARATED]
    arrivals = tuple(arrival for length in lengths for arrival in _alone(base, length).arrivals)
    assert len(arrivals) > 12, "nearly all"
    run = lockstep(replace(base, arrivals=arrivals))
    assert run.engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arm", KERNEL_ARMS)
def test_the_cpu_kernels_agree_where_logits_are_well_separated(arm: str, shape: str):
    limits = {"max_batch_size": 5, "block_size": 16, "num_blocks": 5, "max_model_len": 80}
    base = Trace(arm=arm, shape=shape, dtype="float32", **limits)
    lengths = [length for length in (3, 5, 9, 15, 16, 17, 31, 40) if smallest_gap(_alone(base, length)) > SEPARATED]
    arrivals = tuple(arrival for length in lengths for arrival in _alone(base, length).arrivals)
    assert len(arrivals) > 5, "nearly all"
    run = lockstep(replace(base, arrivals=arrivals))
    stats = run.engine.stats()
    assert stats["preemptions"] > 0
    assert (stats["replayed"] > 0) == ("capture_decode" in KERNEL_ARMS[arm].switches)


def _alone(base: Trace, length: int) -> Trace:
    return replace(base, arrivals=(Arrival(length // 2, _request(f"r{length}", length, 14, logprobs=2)),))


# ---- rejects: three faults that no gate is there to see, for tokens alone to find --------------------------------


def draws_with_the_seed_of_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    uniform = fast.sampling.uniform
    monkeypatch.setattr(fast.sampling, "uniform", lambda seeds, positions: uniform(np.roll(seeds, 1), positions))


def reads_one_column_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    rectangle = SlotTable.rectangle

    def narrow(table: SlotTable, rows, width: int, pad_rows: int = 0):
        return rectangle(table, rows, width, pad_rows)[:, : max(1, width - 1)]

    monkeypatch.setattr(SlotTable, "rectangle", narrow)


def keeps_the_context_lens_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    write = DecodeInputs.write

    def stale(inputs: DecodeInputs, **columns):
        lens = inputs.window(inputs.max_batch_size).context_lens
        before = lens.clone()
        step = write(inputs, **columns)
        kept = (before > 0) & (lens > 0)
        lens[kept] = before[kept]
        return step

    monkeypatch.setattr(DecodeInputs, "write", stale)


Fault = Callable[[pytest.MonkeyPatch], None]
PERSISTENT = [name for name, arm in ARMS.items() if "persist_inputs" in arm.switches]
FAULTS: dict[Fault, list[str]] = {
    draws_with_the_seed_of_the_row_before: list(ARMS),
    reads_one_column_too_few: list(ARMS),
    keeps_the_context_lens_of_the_step_before: PERSISTENT,  # the others have no step before
}
EACH_FAULT = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)


@EACH_FAULT
def test_every_arm_shows_a_seeded_fault_without_any_gate(fault: Fault, monkeypatch: pytest.MonkeyPatch):
    fault(monkeypatch)
    with at_level("off"):
        for arm in FAULTS[fault]:
            with pytest.raises(LockstepError, match=r"step \d+, position \d+ \(answer token \d+\): fast \["):
                lockstep(replace(FIXED, arm=arm))


@EACH_FAULT
def test_a_random_fault_shrinks_to_a_program_that_shows_it_again(fault: Fault, monkeypatch: pytest.MonkeyPatch):
    fault(monkeypatch)
    with at_level("off"):
        found = smallest_failure(traces(arms=[ALL_ON], shape="gqa", block_size=4))
        with pytest.raises(LockstepError) as again:
            exec(found.program, {})
    assert again.value.fact == found.fact
    assert found.program in str(found)
    assert found.program.count("Arrival(") <= 2, "one request shows it, or two where rows are confused"


def test_a_printed_program_runs_on_its_own():
    program = replace(FIXED, arm=ALL_ON).program()
    root = Path(__file__).resolve().parent.parent
    ran = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


PHASES = (Phase.generate, Phase.shrink)


def smallest_failure(strategy: st.SearchStrategy[Trace]) -> LockstepError:
    """The failure that Hypothesis shrinks a random one to."""

    @settings(max_examples=200, derandomize=True, database=None, phases=PHASES, report_multiple_bugs=False)
    @given(trace=strategy)
    def find(trace: Trace) -> None:
        lockstep(trace)

    with pytest.raises(LockstepError) as caught:
        find()
    return caught.value


# ---- any order --------------------------------------------------------------------------------------------------


@settings(max_examples=4 * EXAMPLES)
@given(trace=traces())
def test_any_trace_agrees_on_any_arm(trace: Trace):
    lockstep(trace)


@pytest.mark.parametrize("arm", ARMS)
@settings(max_examples=max(5, EXAMPLES // 5))
@given(data=st.data())
def test_any_trace_agrees_on_this_arm(arm: str, data: st.DataObject):
    lockstep(data.draw(traces(arms=[arm])))


@settings(max_examples=EXAMPLES)
@given(trace=traces(params=plain_params(), dtype="float32"))
def test_any_float32_trace_agrees_where_logits_are_well_separated(trace: Trace):
    assume(smallest_gap(trace) > SEPARATED)
    lockstep(trace)


def smallest_gap(trace: Trace) -> float:
    """The smallest difference between neighbours among the reference's five highest logits, at any token of a trace."""
    gaps = [float("inf")]
    room = min(trace.max_model_len, trace.num_blocks * trace.block_size)
    for request in (child for arrival in trace.arrivals for child in arrival.request.expand()):
        answer = reference_answer(trace.shape, trace.dtype, room, request, is_half(trace), is_half_kv(trace))
        if not isinstance(answer, str):
            logits = reference_logits(trace, [*request.prompt_ids, *answer.token_ids[:-1]])
            top = logits[len(request.prompt_ids) - 1 :].topk(5).values
            gaps.append(float((top[:, :-1] - top[:, 1:]).min()))
    return min(gaps)


class EngineWalk(RuleBasedStateMachine):
    """All switches on; the model is the reference's answer to each request alone, asked for when it is needed."""

    run: FastRun

    @initialize(chosen=limits(arms=[ALL_ON]))
    def build(self, chosen: Trace) -> None:
        self.run = FastRun(chosen, engine_of(chosen))
        self.ids: list[str] = []
        self.unsettled: list[Answer] = []

    @rule(data=st.data(), count=st.integers(1, 4))
    def submit(self, data: st.DataObject, count: int) -> None:
        known = len(self.run.answers)
        for _ in range(count):
            again = self.ids and data.draw(st.integers(0, 5)) == 5
            self.ids.append(data.draw(st.sampled_from(self.ids)) if again else f"r{len(self.ids)}")
            self.run.submit(data.draw(requests(self.ids[-1], self.run.trace)))
        self.unsettled += self.run.answers[known:]

    @rule()
    def step(self) -> None:
        self.run.step()

    @rule(state=st.sampled_from(STATES))
    def abort_somebody(self, state: str) -> None:
        self.run.abort(state)

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def abort_an_id(self, data: st.DataObject) -> None:
        self.run.abort(data.draw(st.sampled_from(self.ids)))

    @rule()
    def drain(self) -> None:
        self.run.drain()
        self.run.finish()

    @invariant()
    def every_answer_begins_or_is_the_references(self) -> None:
        for answer in self.unsettled:
            compare(self.run, answer)
        still_open = [id(answer) for answer in self.run.open.values()]
        self.unsettled = [answer for answer in self.unsettled if id(answer) in still_open]

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.drain()
            self.every_answer_begins_or_is_the_references()


TestEngineWalk = EngineWalk.TestCase
TestEngineWalk.settings = settings(max_examples=max(10, EXAMPLES // 2), stateful_step_count=30)
