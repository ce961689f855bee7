"""The contract's own promises: what is refused at the edge, how n answers come about, what a run gives back."""

from __future__ import annotations

import json
import math
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.request import (
    MAX_LOGPROBS,
    MAX_N,
    SEED_RANGE,
    Completion,
    Event,
    Request,
    SamplingParams,
    TokenLogprobs,
    generate,
    validate_submit,
)

VOCABULARY, LIMIT = 61, 64
HUGE = 10**400  # JSON can hold it, a float cannot


class EchoEngine:
    """The smallest engine: answers each request with its own prompt, one token a step for everyone at once."""

    max_model_len = LIMIT

    def __init__(self) -> None:
        self.open: dict[str, deque[int] | None] = {}  # None: aborted, its event is to come

    def idle(self) -> bool:
        return False

    @property
    def has_work(self) -> bool:
        return bool(self.open)

    def submit(self, request: Request) -> None:
        validate_submit(request, vocab_size=VOCABULARY, max_model_len=LIMIT, open_ids=self.open)
        self.open[request.id] = deque(request.prompt_ids)

    def abort(self, request_id: str) -> None:
        if request_id in self.open:
            self.open[request_id] = None

    def step(self) -> list[Event]:
        events = []
        for request_id, left in list(self.open.items()):
            if left is None:
                events.append(Event(request_id, None, "abort"))
            else:
                token = left.popleft()
                events.append(Event(request_id, token, None if left else "stop", TokenLogprobs(-0.5, 1)))
            if events[-1].finish_reason:
                del self.open[request_id]
        return events

    def stats(self) -> dict[str, Any]:
        return {"running": len(self.open), "waiting": 0, "kv_tokens": 0, "kv_capacity_tokens": LIMIT}


def submit(request: Request, **changes: Any) -> None:
    arguments = {"vocab_size": VOCABULARY, "max_model_len": LIMIT, "open_ids": {}} | changes
    validate_submit(request, **arguments)


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": None},
        {"max_tokens": 0, "prompt_logprobs": MAX_LOGPROBS},
        {"max_tokens": 1, "min_tokens": 1},
        {"temperature": 0},
        {"temperature": 1e-310},
        {"temperature": 100},
        {"top_k": 10**9},
        {"top_p": 1e-300},
        {"min_p": 1},
        {"seed": SEED_RANGE[0]},
        {"seed": SEED_RANGE[1]},
        {"seed": -1},
        {"seed": 0},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {0: -100, 5: 100.0}},
        {"stop": "a"},
        {"stop": ["a"] * 16},
        {"stop_token_ids": [0, 7]},
        {"logprobs": 0},
        {"logprobs": MAX_LOGPROBS},
        {"n": MAX_N},
    ],
)
def test_the_ends_of_every_range_are_allowed(values: dict[str, Any]):
    SamplingParams(**values)


def test_values_are_frozen_hashable_and_do_not_share_the_callers_objects():
    bias, ids = {3: 1.0}, [4]
    params = SamplingParams(logit_bias=bias, stop_token_ids=ids, stop=["x"])
    bias[60], ids[0] = 9.0, 60
    assert dict(params.logit_bias) == {3: 1.0}
    assert (params.stop_token_ids, params.stop) == ((4,), ("x",))
    with pytest.raises(TypeError):
        params.logit_bias[4] = 1.0  # type: ignore[index]
    assert hash(Request([1], params)) == hash(
        Request([1], SamplingParams(logit_bias={3: 1.0}, stop_token_ids=[4], stop="x"))
    )


@pytest.mark.parametrize(("length", "max_tokens"), [(63, None), (63, 1), (60, 4), (1, 63), (64, 0)])
def test_a_request_that_just_fits_is_taken(length: int, max_tokens: int | None):
    submit(Request([1] * length, SamplingParams(max_tokens=max_tokens)))


def test_the_last_id_of_the_vocabulary_may_be_biased():
    submit(Request([VOCABULARY - 1], SamplingParams(logit_bias={VOCABULARY - 1: 5.0}, stop_token_ids=[VOCABULARY - 1])))


def test_n_answers_are_n_requests_with_seeds_of_their_own():
    parent = Request([1, 2], SamplingParams(n=3, seed=7, temperature=0.5), "q")
    children = parent.expand()
    assert [child.id for child in children] == ["q-0", "q-1", "q-2"]
    assert [child.params.seed for child in children] == [7, 8, 9]
    assert {child.params.temperature for child in children} == {0.5}
    assert all(child.params.n == 1 and child.prompt_ids == (1, 2) for child in children)


def test_seeds_of_n_answers_wrap_within_int64():
    seeds = [child.params.seed for child in Request([1], SamplingParams(n=2, seed=SEED_RANGE[1])).expand()]
    assert seeds == [SEED_RANGE[1], SEED_RANGE[0]]


def test_one_answer_expands_to_the_request_itself():
    request = Request([1], id="q")
    assert request.expand() == [request]


def test_no_seed_stays_no_seed():
    assert [child.params.seed for child in Request([1], SamplingParams(n=2)).expand()] == [None, None]


def test_completions_come_in_the_order_given_however_they_end():
    engine = EchoEngine()
    requests = [Request([5, 6, 7], id="long"), Request([9], SamplingParams(n=2), id="two"), Request([8, 8], id="short")]
    completions = generate(engine, requests)
    assert [(c.request_id, c.token_ids) for c in completions] == [
        ("long", [5, 6, 7]),
        ("two-0", [9]),
        ("two-1", [9]),
        ("short", [8, 8]),
    ]
    assert all(c.finish_reason == "stop" and len(c.logprobs) == len(c.token_ids) for c in completions)


def test_a_completion_keeps_the_error_of_its_last_event():
    completion = Completion("q", (1,))
    completion.add(Event("q", 4))
    completion.add(Event("q", None, "error", error="why"))
    assert (completion.token_ids, completion.finish_reason, completion.error) == ([4], "error", "why")


# ---- rejects ----------------------------------------------------------------------------------------------------

NOT_NUMBERS = [math.nan, math.inf, -math.inf, HUGE, -HUGE, "1", None, True, [1]]
NOT_INTEGERS = [1.0, "1", True, [1], math.nan]


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("temperature", -1e-9, 100.1),
        ("top_p", 0.0, 1.0001),
        ("min_p", -0.1, 1.1),
        ("repetition_penalty", 0.009, 101.0),
        ("presence_penalty", -2.1, 2.1),
        ("frequency_penalty", -2.1, 2.1),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(field: str, low: float, high: float):
    for value in [low, high, *NOT_NUMBERS]:
        with pytest.raises(ValueError, match=f"^{field}: "):
            SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [-1]),
        ("top_k", [-1, None]),
        ("seed", [2**64, 2**63, -(2**63) - 1]),
        ("min_tokens", [-1, 17, None]),
        ("logprobs", [-1, MAX_LOGPROBS + 1]),
        ("prompt_logprobs", [-1, MAX_LOGPROBS + 1]),
        ("n", [0, MAX_N + 1, None]),
    ],
)
def test_an_integer_out_of_range_is_refused_by_name(field: str, values: list[Any]):
    for value in [*values, *NOT_INTEGERS]:
        with pytest.raises(ValueError, match=f"^{field}: "):
            SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "bias", [{-1: 1}, {"5": 1}, {"abc": 1}, {1.0: 1}, {1: 101}, {1: math.nan}, {1: HUGE}, {1: None}, [1], None, 5]
)
def test_a_bad_logit_bias_is_refused_by_name(bias: Any):
    with pytest.raises(ValueError, match=r"^logit_bias"):
        SamplingParams(logit_bias=bias)


@pytest.mark.parametrize("stop", [[""], "", ["a"] * 17, [1], None, 5])
def test_a_bad_stop_is_refused_by_name(stop: Any):
    with pytest.raises(ValueError, match=r"^stop: "):
        SamplingParams(stop=stop)


@pytest.mark.parametrize("ids", [[-1], ["a"], "ab", b"ab", 5, None, [1.0], [True]])
def test_bad_token_ids_are_refused_by_name(ids: Any):
    with pytest.raises(ValueError, match=r"^stop_token_ids: "):
        SamplingParams(stop_token_ids=ids)
    with pytest.raises(ValueError, match=r"^prompt_ids: "):
        Request(ids)


def test_an_empty_prompt_and_an_id_that_is_no_string_are_refused():
    with pytest.raises(ValueError, match=r"^prompt_ids: empty"):
        Request([])
    with pytest.raises(ValueError, match=r"^id: 5"):
        Request([1], id=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [VOCABULARY, 191222, 99999])
def test_ids_beyond_the_vocabulary_are_refused_at_submit(token: int):
    for field, params in [
        ("logit_bias", SamplingParams(logit_bias={token: -100})),
        ("stop_token_ids", SamplingParams(stop_token_ids=[token])),
    ]:
        with pytest.raises(ValueError, match=rf"^{field}: {token} is not an integer in 0\.\.60"):
            submit(Request([1], params))
    with pytest.raises(ValueError, match=r"^prompt_ids: "):
        submit(Request([1, token]))


@pytest.mark.parametrize(
    ("length", "max_tokens", "field"),
    [
        (64, None, "prompt_ids"),
        (64, 1, "prompt_ids"),
        (65, 1, "prompt_ids"),
        (63, 2, "max_tokens"),
        (60, 32, "max_tokens"),
        (65, 0, "prompt_ids"),
    ],
)
def test_a_request_past_the_length_limit_is_refused(length: int, max_tokens: int | None, field: str):
    with pytest.raises(ValueError, match=f"^{field}: .*64"):
        submit(Request([1] * length, SamplingParams(max_tokens=max_tokens)))


def test_an_id_that_is_open_is_refused():
    with pytest.raises(ValueError, match=r"^id: 'q' is already open"):
        submit(Request([1], id="q"), open_ids={"q": 1})


def test_what_belongs_above_the_engine_is_refused_below():
    with pytest.raises(ValueError, match=r"^n: 2"):
        submit(Request([1], SamplingParams(n=2)))
    with pytest.raises(ValueError, match=r"^stop: "):
        submit(Request([1], SamplingParams(stop="x")))


def test_a_run_with_one_impossible_request_leaves_the_engine_idle():
    engine = EchoEngine()
    with pytest.raises(ValueError, match=r"^prompt_ids: "):
        generate(engine, [Request([1], id="a"), Request([VOCABULARY], id="b")])
    assert not engine.has_work
    assert [c.token_ids for c in generate(engine, [Request([3], id="a")])] == [[3]]


# ---- any order --------------------------------------------------------------------------------------------------

ANYTHING = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
)
FIELDS = list(SamplingParams.__dataclass_fields__)


def refusal(values: dict[str, Any]) -> str | None:
    try:
        SamplingParams(**values)
    except ValueError as error:
        return str(error)
    return None


@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=4))
def test_anything_at_all_is_taken_or_refused_with_a_field_name(values: dict[str, Any]):
    message = refusal(values)
    if message is not None:
        assert any(message.startswith(field) for field in FIELDS)
        return
    params = SamplingParams(**values)
    assert params.max_tokens is None or params.min_tokens <= params.max_tokens
    json.dumps([params.temperature, params.top_p, params.min_p, params.seed], allow_nan=False)


@given(st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9), max_size=6))
def test_every_request_of_a_run_gets_its_own_completion(prompts: list[list[int]]):
    requests = [Request(prompt, id=str(i)) for i, prompt in enumerate(prompts)]
    completions = generate(EchoEngine(), requests)
    assert [c.token_ids for c in completions] == prompts
