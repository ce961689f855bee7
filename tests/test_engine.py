"""The reference engine keeps the protocol: order, ends, limits, aborts, errors, gauges, and draws of its own."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gates import GateError
from gates.core import at_level
from gates.engine import check_ends_once, check_gauges, check_tokens_cached, check_within_limits
from reference.cache import KVCache
from reference.engine import Engine, random_seed
from reference.request import SEED_RANGE, Completion, Event, Request, SamplingParams
from reference.weights import random_weights
from tests.harness import TINY, tiny_config

LIMIT = 64
WEIGHTS = random_weights(TINY, seed=1)


def make_engine(**options: Any) -> Engine:
    """An engine over the shared tiny weights; two made alike owe each other nothing."""
    return Engine(TINY, WEIGHTS, **{"max_model_len": LIMIT, "dtype": torch.float64} | options)


def free(max_tokens: int | None = 8, **fields: Any) -> SamplingParams:
    """Parameters under which only a limit ends the answer."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


def run_alone(request: Request, **options: Any) -> Completion:
    return make_engine(**options).generate([request])[0]


def drain(engine: Engine) -> list[Event]:
    events = []
    while engine.has_work:
        events += engine.step()
    return events


def tokens_of(events: list[Event], request_id: str) -> list[int]:
    return [e.token_id for e in events if e.request_id == request_id and e.token_id is not None]


# ---- holds ------------------------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_the_whole_forward_every_time():
    engine = make_engine()
    completion = engine.generate([Request([5, 9, 13], free(12, temperature=0))])[0]
    tokens = [5, 9, 13]
    for token in completion.token_ids:
        cache = KVCache(TINY, max_tokens=LIMIT, dtype=torch.float64)
        logits = engine.model.forward(torch.tensor([tokens]), torch.arange(len(tokens))[None], cache)
        assert token == int(logits[0, -1].argmax())
        tokens.append(token)


def test_requests_are_served_whole_and_in_the_order_they_came():
    engine = make_engine()
    for name in ("first", "second", "third"):
        engine.submit(Request([3, 4], free(3), name))
    assert [event.request_id for event in drain(engine)] == ["first"] * 3 + ["second"] * 3 + ["third"] * 3


def test_the_first_step_runs_the_prompt_and_each_step_gives_one_token():
    engine = make_engine()
    engine.submit(Request([1, 2, 3, 4, 5], free(3)))
    cached = []
    for _ in range(3):
        assert len(engine.step()) == 1
        cached.append(engine.stats()["kv_tokens"])
    assert cached == [5, 6, 0]


def test_an_idle_step_does_nothing():
    engine = make_engine()
    assert engine.step() == []
    assert not engine.has_work


@pytest.mark.parametrize("prompt_tokens", [1, 3, 7, 60, 63])
def test_without_max_tokens_an_answer_runs_to_the_length_limit(prompt_tokens: int):
    completion = run_alone(Request([7] * prompt_tokens, free(None)))
    assert (len(completion.token_ids), completion.finish_reason) == (LIMIT - prompt_tokens, "length")


@pytest.mark.parametrize("max_tokens", [1, 3, 4])
def test_max_tokens_ends_an_answer(max_tokens: int):
    completion = run_alone(Request([7] * 60, free(max_tokens)))
    assert (len(completion.token_ids), completion.finish_reason) == (max_tokens, "length")


def test_the_length_limit_is_never_more_than_the_models_positions():
    assert make_engine(max_model_len=None).max_model_len == TINY.max_positions
    assert make_engine(max_model_len=10**6).max_model_len == TINY.max_positions
    assert make_engine(max_model_len=70).max_model_len == 70


def test_eos_is_emitted_and_ends_the_answer():
    params = SamplingParams(max_tokens=8, temperature=0, logit_bias={2: 100}, min_tokens=3)
    completion = run_alone(Request([5], params))
    assert (len(completion.token_ids), completion.token_ids[-1], completion.finish_reason) == (4, 2, "stop")


def test_an_eos_in_the_prefill_gives_an_answer_of_one_token():
    completion = run_alone(Request([5], SamplingParams(temperature=0, logit_bias={2: 100})))
    assert (completion.token_ids, completion.finish_reason) == ([2], "stop")


def test_every_eos_id_of_the_model_ends_an_answer():
    engine = Engine(tiny_config(eos_token_ids=(2, 5)), WEIGHTS, max_model_len=LIMIT)
    for token in (2, 5):
        completion = engine.generate([Request([9], SamplingParams(temperature=0, logit_bias={token: 100}))])[0]
        assert (completion.token_ids, completion.finish_reason) == ([token], "stop")


def test_ignore_eos_ignores_eos_but_no_stop_id():
    eos = run_alone(Request([5], free(6, temperature=0, logit_bias={2: 100})))
    assert (eos.token_ids, eos.finish_reason) == ([2] * 6, "length")
    stop = run_alone(Request([5], free(6, temperature=0, logit_bias={2: 100}, stop_token_ids=(2,))))
    assert (stop.token_ids, stop.finish_reason) == ([2], "stop")


def test_the_end_by_a_stop_id_wins_over_the_end_by_length():
    params = SamplingParams(max_tokens=4, min_tokens=3, temperature=0, logit_bias={9: 100}, stop_token_ids=(9,))
    completion = run_alone(Request([5], params))
    assert (len(completion.token_ids), completion.finish_reason) == (4, "stop")


@pytest.mark.parametrize("prompt", [(1,), (5, 6, 7)])
def test_a_seeded_answer_is_the_same_whatever_shares_the_engine(prompt: tuple[int, ...]):
    wanted = Request(prompt, free(16, seed=42, temperature=0.8), "a")
    alone = run_alone(wanted).token_ids
    for partner_seed in (None, None, 7):
        partner = Request([3, 3], free(16, seed=partner_seed, temperature=0.8), "b")
        for order in ([wanted, partner], [partner, wanted]):
            answers = {c.request_id: c.token_ids for c in make_engine().generate(order)}
            assert answers["a"] == alone


def test_an_answer_goes_on_from_its_own_tokens_as_if_it_had_never_stopped():
    # Preemption by recompute is this: the tokens so far become a prompt, and the positions of the draws stay.
    whole = run_alone(Request([1, 2], free(12, seed=5, temperature=1.5))).token_ids
    for cut in (1, 3, 11):
        rest = run_alone(Request([1, 2, *whole[:cut]], free(12 - cut, seed=5, temperature=1.5))).token_ids
        assert whole[:cut] + rest == whole


def test_no_seed_means_one_from_the_seed_source_at_submit():
    seeds = iter([11, 12])
    engine = make_engine(seed_source=lambda: next(seeds))
    request = Request([1], free(12), "a")
    first, second = (engine.generate([request])[0].token_ids for _ in range(2))
    assert first == run_alone(Request([1], free(12, seed=11))).token_ids
    assert second == run_alone(Request([1], free(12, seed=12))).token_ids


def test_a_seed_nobody_named_is_an_int64():
    assert all(SEED_RANGE[0] <= random_seed() <= SEED_RANGE[1] for _ in range(100))


def test_tiny_temperatures_answer_in_full_beside_a_normal_request():
    neighbour = Request([8], free(8, seed=1), "n")
    expected = run_alone(neighbour).token_ids
    greedy = run_alone(Request([4], free(60, temperature=0))).token_ids
    for temperature in (1e-4, 1e-12, 1e-310):
        tiny = Request([4], free(60, temperature=temperature), "t")
        answers = {c.request_id: c.token_ids for c in make_engine().generate([tiny, neighbour])}
        assert answers == {"t": greedy, "n": expected}


def test_logprobs_come_with_each_token():
    completion = run_alone(Request([5], free(4, temperature=0, logprobs=2)))
    assert len(completion.logprobs) == 4
    assert [entry.top[0][0] for entry in completion.logprobs] == completion.token_ids
    assert all(entry.rank == 1 and entry.logprob == entry.top[0][1] for entry in completion.logprobs)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_ends_a_request_in_the_next_step_and_frees_it_now(steps: int):
    engine = make_engine()
    engine.submit(Request([1, 2], free(10), "a"))
    engine.submit(Request([3], free(2, temperature=0), "b"))
    for _ in range(steps):
        engine.step()
    engine.abort("a")
    assert engine.stats()["running"] == engine.stats()["kv_tokens"] == 0
    events = drain(engine)
    assert events[0] == Event("a", None, "abort")
    assert tokens_of(events, "a") == []
    assert tokens_of(events, "b") == run_alone(Request([3], free(2, temperature=0))).token_ids


def test_an_aborted_requests_memory_is_gone_before_its_event():
    engine = make_engine()
    engine.submit(Request([1, 2], free(), "a"))
    engine.step()
    assert engine._running is not None
    assert engine._running.cache is not None
    cache = weakref.ref(engine._running.cache)
    engine.abort("a")
    assert cache() is None


def test_aborting_twice_or_the_unknown_or_the_ended_does_nothing():
    engine = make_engine()
    engine.submit(Request([1], free(1), "a"))
    engine.abort("nobody")
    assert [event.finish_reason for event in drain(engine)] == ["length"]
    engine.abort("a")
    assert not engine.has_work
    engine.submit(Request([1], free(1), "b"))
    engine.abort("b")
    engine.abort("b")
    assert drain(engine) == [Event("b", None, "abort")]


def test_aborting_everyone_at_once_leaves_idle_gauges_before_any_step():
    engine = make_engine()
    for i in range(25):
        engine.submit(Request([1], free(), str(i)))
    engine.step()
    for i in range(25):
        engine.abort(str(i))
    counts = engine.stats()
    assert (counts["running"], counts["waiting"], counts["kv_tokens"]) == (0, 0, 0)
    assert sorted(event.request_id for event in engine.step()) == sorted(map(str, range(25)))
    assert not engine.has_work


def test_an_id_is_free_again_only_after_its_last_event():
    engine = make_engine()
    engine.submit(Request([1], free(), "a"))
    engine.abort("a")
    with pytest.raises(ValueError, match=r"^id: 'a' is already open"):
        engine.submit(Request([1], free(), "a"))
    engine.step()
    engine.submit(Request([1], free(1), "a"))
    assert [event.finish_reason for event in drain(engine)] == ["length"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("bad_step", [0, 2])
def test_unusable_logits_end_their_own_request_alone(bad: float, bad_step: int, monkeypatch: pytest.MonkeyPatch):
    engine = make_engine()
    forward, steps = engine.model.forward, iter(range(100))

    def overflowing(*args: Any, **kwargs: Any) -> torch.Tensor:
        logits = forward(*args, **kwargs)
        if next(steps) == bad_step:
            logits[0, -1, 33] = bad
        return logits

    monkeypatch.setattr(engine.model, "forward", overflowing)
    first, second = engine.generate([Request([1], free(4), "a"), Request([2], free(4, temperature=0), "b")])
    assert (len(first.token_ids), first.finish_reason) == (bad_step, "error")
    assert first.error is not None
    assert "token id 33" in first.error
    assert second.token_ids == run_alone(Request([2], free(4, temperature=0))).token_ids
    assert engine.stats()["kv_tokens"] == 0


def test_weights_that_overflow_end_requests_and_not_the_engine():
    # At `full` the model's own gate stops the run here; a server runs at `cheap` and must go on serving.
    weights = random_weights(TINY, seed=1)
    weights.final_norm[0] = math.nan
    engine = Engine(TINY, weights, max_model_len=LIMIT)
    with at_level("cheap"):
        completions = engine.generate([Request([i], free(), str(i)) for i in range(3)])
    assert [c.finish_reason for c in completions] == ["error"] * 3


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [-1, 0, 1])
def test_a_length_limit_without_room_is_refused(limit: int):
    with pytest.raises(ValueError, match=r"^max_model_len: "):
        make_engine(max_model_len=limit)


@pytest.mark.parametrize(
    "request_",
    [
        Request([1] * 60, free(32)),
        Request([1] * 64, free(1)),
        Request([1] * 65, free(None)),
        Request([TINY.vocab_size], free()),
        Request([1], free(logit_bias={TINY.vocab_size: 1})),
        Request([1], free(n=2)),
        Request([1], free(stop="x")),
        Request([1], free(), "open"),
    ],
)
def test_a_refused_request_leaves_the_engine_as_it_was(request_: Request):
    engine = make_engine()
    engine.submit(Request([5], free(3, temperature=0), "open"))
    before = engine.stats()
    with pytest.raises(ValueError, match=r"^(max_tokens|prompt_ids|logit_bias|n|stop|id): "):
        engine.submit(request_)
    assert engine.stats() == before
    assert tokens_of(drain(engine), "open") == run_alone(Request([5], free(3, temperature=0))).token_ids


def test_gate_rejects_a_request_that_ends_twice():
    # An abort that forgets to take the request out of the running row: it is reported, then runs into its end.
    events = [("a", "abort"), ("a", "length")]
    with pytest.raises(GateError, match="request 'a' has an event after the one that ended it"):
        check_ends_once(events=events, open_before={"a"}, open_after=set())


def test_gate_rejects_a_request_that_ends_and_stays_open():
    with pytest.raises(GateError, match="request 'a' ended in this step, it is still open after it"):
        check_ends_once(events=[("a", "stop")], open_before={"a", "b"}, open_after={"a", "b"})


def test_gate_rejects_a_request_that_vanishes_without_an_end():
    with pytest.raises(GateError, match="2 open before the step, 0 ended in it, 1 open after it"):
        check_ends_once(events=[("a", None)], open_before={"a", "b"}, open_after={"a"})
    with pytest.raises(GateError, match="1 open before the step, 0 ended in it, 1 open after it"):
        check_ends_once(events=[], open_before={"a"}, open_after={"b"})


def test_gate_rejects_an_event_of_a_request_that_is_not_open():
    with pytest.raises(GateError, match="request 'b' has an event, it was not open before the step"):
        check_ends_once(events=[("b", "abort")], open_before={"a"}, open_after={"a"})


def test_gate_rejects_an_abort_that_leaves_its_request_running():
    engine = make_engine()
    engine.submit(Request([1], free(4), "a"))
    engine.step()
    running = engine._running
    engine.abort("a")
    engine._running = running  # the fault: the queue forgot it, the step does not know
    assert running is not None
    with pytest.raises(GateError, match=r"ends_once: request 'a' has an event after the one that ended it"):
        engine.step()


def test_gate_rejects_a_cache_that_counts_its_tokens_twice(monkeypatch: pytest.MonkeyPatch):
    engine = make_engine()
    forward = engine.model.forward

    def counted_by_two_layers(token_ids: torch.Tensor, positions: torch.Tensor, cache: KVCache) -> torch.Tensor:
        logits = forward(token_ids, positions, cache)
        cache.length += token_ids.shape[1]
        return logits

    monkeypatch.setattr(engine.model, "forward", counted_by_two_layers)
    engine.submit(Request([1, 2], free(4), "a"))
    with pytest.raises(GateError, match=r"K/V of 4 tokens computed, its request holds 2 \[first at row 0; 1 of 1\]"):
        engine.step()


def test_gate_rejects_rows_computed_for_requests_that_are_gone():
    with pytest.raises(GateError, match=r"K/V of 7 tokens computed, its request holds 6 \[first at row 1; 1 of 3\]"):
        check_tokens_cached(cached_tokens=[4, 7, 9], known_tokens=[4, 6, 9])
    with pytest.raises(GateError, match="3 rows computed, 2 requests wait for a token"):
        check_tokens_cached(cached_tokens=[4, 6, 9], known_tokens=[4, 6])


def test_gate_rejects_an_answer_past_a_limit_or_stuck_at_one():
    limits = {"prompt_tokens": 60, "max_tokens": 8, "max_model_len": 64}
    with pytest.raises(GateError, match="65 tokens of prompt and answer, the length limit is 64"):
        check_within_limits(**limits, output_tokens=5, finished=True)
    with pytest.raises(GateError, match="4 of 8 tokens emitted, 64 of 64 in all, the request goes on"):
        check_within_limits(**limits, output_tokens=4, finished=False)
    with pytest.raises(GateError, match="3 tokens emitted, max_tokens 2"):
        check_within_limits(prompt_tokens=1, output_tokens=3, max_tokens=2, max_model_len=64, finished=True)


def test_gate_rejects_gauges_that_stay_busy_after_the_last_abort():
    engine = make_engine()
    engine.submit(Request([1, 2, 3], free(), "a"))
    engine.step()
    busy = engine.stats()
    engine.abort("a")
    with pytest.raises(GateError, match="1 running \\+ 0 waiting \\+ 1 ending, 1 requests are open"):
        check_gauges(**busy, ending=1, open_requests=1)
    with pytest.raises(GateError, match="K/V of 3 tokens in use, 0 requests are running"):
        check_gauges(**busy | {"running": 0}, ending=1, open_requests=1)
    with pytest.raises(GateError, match="K/V of 65 tokens in use, the pool holds 64"):
        check_gauges(**busy | {"kv_tokens": 65}, ending=0, open_requests=1)


# ---- any order --------------------------------------------------------------------------------------------------

PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 6),
    temperature=st.sampled_from([0.0, 0.7, 3.0]),
    seed=st.integers(0, 3),
    top_k=st.integers(0, 5),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    logit_bias=st.sampled_from([{}, {2: 4.0}]),
    ignore_eos=st.booleans(),
)


class AnyOrder(RuleBasedStateMachine):
    """Submits, aborts and steps in any order against a plain list: the answers of each request run alone."""

    @initialize()
    def start(self) -> None:
        self.engine = make_engine()
        self.queue: list[tuple[str, list[int], str | None]] = []  # (id, answer still to come, its finish reason)
        self.aborted: list[str] = []
        self.submitted = 0

    @rule(prompt=st.lists(st.integers(0, TINY.vocab_size - 1), min_size=1, max_size=5), params=PARAMS)
    def submit(self, prompt: list[int], params: SamplingParams) -> None:
        request = Request(prompt, params, str(self.submitted))
        self.submitted += 1
        alone = run_alone(request)
        self.engine.submit(request)
        self.queue.append((request.id, list(alone.token_ids), alone.finish_reason))

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.queue) - 1))
        request_id = self.queue.pop(place)[0]
        self.engine.abort(request_id)
        self.aborted.append(request_id)

    @rule()
    def step(self) -> None:
        expected = [Event(request_id, None, "abort") for request_id in self.aborted]
        self.aborted.clear()
        if self.queue:
            request_id, answer, reason = self.queue[0]
            token = answer.pop(0)
            expected.append(Event(request_id, token, None if answer else reason))
            if not answer:
                self.queue.pop(0)
        assert self.engine.step() == expected

    @invariant()
    def gauges_agree(self) -> None:
        counts = self.engine.stats()
        assert counts["running"] + counts["waiting"] == len(self.queue)
        assert self.engine.has_work == bool(self.queue or self.aborted)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=20)


@given(st.lists(st.tuples(st.integers(1, 8), PARAMS), min_size=1, max_size=4))
def test_a_run_equals_each_request_run_alone(requests: list[tuple[int, SamplingParams]]):
    made = [Request([n] * n, params, str(i)) for i, (n, params) in enumerate(requests)]
    for completion, request in zip(make_engine().generate(made), made, strict=True):
        alone = run_alone(request)
        assert (completion.token_ids, completion.finish_reason) == (alone.token_ids, alone.finish_reason)


@pytest.mark.parametrize("min_tokens", [2**63, 2**31, 1000])
def test_a_minimum_that_the_length_limit_cannot_hold_is_refused_by_both_engines(min_tokens: int):
    from fast.engine import Engine as FastEngine

    request = Request((3, 4), SamplingParams(max_tokens=None, min_tokens=min_tokens), "greedy for tokens")
    for engine in (
        Engine(TINY, random_weights(TINY), max_model_len=64),
        FastEngine.build(TINY, random_weights(TINY), num_blocks=8, block_size=16, max_model_len=64),
    ):
        with pytest.raises(ValueError, match=r"min_tokens: \d+ is not an integer in 0..62"):
            engine.submit(request)
        assert not engine.has_work
