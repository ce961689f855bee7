"""Guided answers keep to their shape, alike on both engines, and whatever else was asked for still holds."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fast.rows import Rows
from fast.sampling import sample_rows
from gates import GateError
from reference.request import Allowed, Request, SamplingParams, generate
from reference.tokenizer import ByteTokenizer, Tokenizer
from serve.guide import Guides, GuideSpec, schema_spec
from serve.trace import attach_trace
from serve.trace_read import TraceReader
from serve.trace_replay import replay
from tests.fast_run import FastRun
from tests.harness import TINY, lockstep, tiny_reference
from tests.server import EOS, VOCAB, ScriptedEngine, Served, make_engine, says, serving
from tests.test_fast_sampling import tenant
from tests.tokenizer_samples import byte_level_backend, sentencepiece_backend
from tests.traces import ALL_ON, Arrival, Trace

CHAT = "/v1/chat/completions"
USER: Any = [{"role": "user", "content": "Is it raining?"}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "up": {"type": "boolean"}},
    "required": ["x", "up"],
    "additionalProperties": False,
}
POINTS = re.compile(r'\{"x": \d\d?, "up": (true|false)\}')
FORMAT = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
NESTED = 'root ::= "(" ("a" | root) ")"'
GUIDED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": FORMAT, "temperature": 0}, POINTS.pattern),
    ({"response_format": FORMAT, "seed": 5, "n": 3, "logprobs": 2}, POINTS.pattern),
    ({"structured_outputs": {"regex": "[ab]{3,5}c"}, "seed": -1, "top_p": 0.9, "presence_penalty": 1.5}, "[ab]{3,5}c"),
    ({"structured_outputs": {"choice": ["yes", 'no "way"', "dě"]}, "seed": 2, "n": 4}, 'yes|no "way"|dě'),
    ({"structured_outputs": {"grammar": NESTED}, "seed": 3, "logit_bias": {"97": 9}}, r"\(+a\)+"),
    ({"structured_outputs": {"json": POINT}, "seed": 3, "top_k": 4, "min_tokens": 60}, POINTS.pattern),
    ({"structured_outputs": {"regex": "a+"}, "seed": 4, "min_tokens": 20, "max_tokens": 25}, "a{20,25}"),
]  # fmt: skip


# ---- holds ------------------------------------------------------------------------------------------------------


def answers(kind: str) -> list[tuple[Any, Any]]:
    """Usage and choices of every guided body, whole; each is checked against its own stream."""
    replies = []
    with serving(make_engine(kind)) as running:
        for body, _ in GUIDED:
            asked = {"prompt": "Once", "max_tokens": 100, **body}
            whole = running.post(**asked).json()
            texts = dict.fromkeys(range(len(whole["choices"])), "")
            for data in running.events(**asked)[:-1]:
                [choice] = json.loads(data)["choices"]
                texts[choice["index"]] += choice["text"]
            assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
            replies.append((whole["usage"], whole["choices"]))
    return replies


def test_guided_answers_have_their_shape_and_both_engines_give_the_same():
    fast, reference = answers("fast"), answers("reference")
    for (_, pattern), (_, choices) in zip(GUIDED, fast, strict=True):
        for choice in choices:
            assert re.fullmatch(pattern, choice["text"]), choice["text"]
    for ours, theirs in zip(fast, reference, strict=True):
        assert ours[0] == theirs[0]
        for mine, other in zip(ours[1], theirs[1], strict=True):
            assert (mine["text"], mine["finish_reason"]) == (other["text"], other["finish_reason"])
            if mine["logprobs"] is not None:
                assert mine["logprobs"]["tokens"] == other["logprobs"]["tokens"]
                values = [side["logprobs"]["token_logprobs"] for side in (mine, other)]
                assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_an_answer_with_nothing_more_to_say_ends_before_min_tokens():
    """`min_tokens` 60 of the list above: the object is complete long before."""
    with serving(make_engine("fast")) as running:
        reply = running.post(prompt="x", structured_outputs={"regex": "ab"}, min_tokens=9, max_tokens=12).json()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("ab", "stop")
    assert reply["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_answers_in_json_and_a_stop_string_still_ends_it(stream: bool):
    body: dict[str, Any] = {"messages": USER, "max_tokens": 100, "seed": 1, "response_format": FORMAT}
    with serving(make_engine("fast")) as running:
        shapes = [spoken(running, stream, **body), spoken(running, stream, **body, stop=[', "up"'])]
        assert isinstance(json.loads(spoken(running, stream, **body | {"response_format": ANY_JSON, "max_tokens": 60,
            "logit_bias": {"125": 60}})), dict)  # fmt: skip
    assert POINTS.fullmatch(shapes[0])
    assert shapes[1] == shapes[0].partition(', "up"')[0]


ANY_JSON = {"type": "json_object"}


def spoken(running: Served, stream: bool, **body: Any) -> str:
    """The text of a chat answer."""
    if not stream:
        return str(running.post(CHAT, **body).json()["choices"][0]["message"]["content"])
    deltas = [json.loads(data)["choices"][0]["delta"] for data in running.events(CHAT, **body)[:-1]]
    return "".join(delta.get("content", "") for delta in deltas)


def test_text_is_a_format_like_any_other():
    engine = ScriptedEngine(says("hi"))
    with serving(engine) as running:
        running.post(CHAT, messages=USER, response_format={"type": "text"})
        running.post(prompt="x", response_format=None, structured_outputs=None)
    assert [request.guide for request in engine.seen] == [None, None]


def test_only_the_ends_of_the_model_end_a_guided_answer():
    guide = Guides(ByteTokenizer()).compile(GuideSpec("regex", "ab?"))
    state = guide.start(vocab_size=300, eos_token_ids=(7, 299))
    assert np.flatnonzero(state.allowed().ids).tolist() == [97]
    state.accept(97)
    assert np.flatnonzero(state.allowed().ids).tolist() == [7, 98, 299]
    assert not state.allowed().only_end
    state.accept(98)
    assert np.flatnonzero(state.allowed().ids).tolist() == [7, 299]
    assert (state.allowed().only_end, state.num_accepted) == (True, 2)


@pytest.mark.parametrize("kind", ["sentencepiece", "byte level", "bytes"])
@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (schema_spec(POINT, field="x"), POINTS.pattern),
        (GuideSpec("regex", "hello world|no"), "hello world|no"),
        (GuideSpec("regex", "a </s> b+"), "a </s> b+"),
    ],
)
def test_any_vocabulary_spells_what_a_guide_forces(kind: str, spec: GuideSpec, pattern: str):
    """A SentencePiece tokenizer writes a space in front of a text; no such space may be forced into an answer."""
    backends = {"sentencepiece": sentencepiece_backend, "byte level": byte_level_backend}
    tokenizer = ByteTokenizer()
    if kind in backends:
        tokenizer = Tokenizer(backends[kind](), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    end = tokenizer.eos_token_id
    assert end is not None
    for last in (0, -1):  # always the first of the ids allowed, or always the last
        state = Guides(tokenizer).compile(spec).start(vocab_size=tokenizer.vocab_size, eos_token_ids=(end,))
        ids: list[int] = []
        while len(ids) < 60 and not state.allowed().ids[end]:
            assert state.allowed().error is None
            ids.append(int(np.flatnonzero(state.allowed().ids)[last]))
            state.accept(ids[-1])
        assert re.fullmatch(pattern, tokenizer.decode(ids)), tokenizer.decode(ids)


def test_a_mask_is_worked_out_beside_the_engine():
    guides = Guides(ByteTokenizer())
    state = guides.compile(GuideSpec("regex", "a+")).start(vocab_size=VOCAB, eos_token_ids=(EOS,))
    assert state.allowed().ids[97]
    free = threading.Event()
    for _ in range(2):
        guides._pool.submit(free.wait)
    state.accept(97)  # returns, though nothing can be worked out now
    assert not state._next.done()
    free.set()
    assert state.allowed().ids[EOS]


@dataclass(frozen=True)
class Ladder:
    """A guide without text: after a token only its neighbours may come, and the end after every third one."""

    fails_after: int = 10**9

    def start(self, *, vocab_size: int, eos_token_ids: Sequence[int]) -> LadderState:
        return LadderState(self, vocab_size, tuple(eos_token_ids))

    def describe(self) -> dict[str, str]:
        return {"kind": "ladder", "source": ""}


class LadderState:
    def __init__(self, ladder: Ladder, vocab_size: int, ends: tuple[int, ...]) -> None:
        self.ladder, self.vocab_size, self.ends = ladder, vocab_size, ends
        self.last, self.num_accepted = 30, 0

    def accept(self, token_id: int) -> None:
        self.last, self.num_accepted = token_id, self.num_accepted + 1

    def allowed(self) -> Allowed:
        ids = np.zeros(self.vocab_size, np.bool_)
        if self.num_accepted >= self.ladder.fails_after:
            return Allowed(ids, error="guide: the ladder broke")
        ids[[max(self.last - 1, 3), min(self.last + 1, self.vocab_size - 1)]] = True
        ids[[*self.ends]] = self.num_accepted % 3 == 2
        return Allowed(ids)


def guided_trace(arm: str) -> Trace:
    """Six guided requests and two plain ones over a pool that holds too few of them, some aborted."""
    requests = [
        Request(
            tuple(range(3, 10 + n)),
            SamplingParams(max_tokens=20, temperature=n % 2, seed=n, logprobs=2 if n % 3 else None, min_tokens=n),
            f"r{n}",
            None if n in (2, 5) else Ladder(),
        )
        for n in range(8)
    ]
    return Trace(
        arrivals=tuple(Arrival(n // 3, request) for n, request in enumerate(requests)),
        arm=arm,
        max_batch_size=4,
        block_size=4,
        num_blocks=14,
        max_model_len=56,
        aborts=((9, "r1"),),
    )


@pytest.mark.differential
@pytest.mark.parametrize("arm", ["exact-free", ALL_ON])
def test_guided_requests_are_in_lockstep_through_preemptions_and_moves(arm: str):
    run: FastRun = lockstep(guided_trace(arm))
    assert run.engine.scheduler.preemptions > 0
    walked = [answer for answer in run.answers if answer.request.guide is not None]
    for answer in walked:
        ids = [30, *(token for token in answer.completion.token_ids if token not in TINY.eos_token_ids)]
        assert all(abs(after - before) <= 1 or after in (3, 60) for before, after in pairwise(ids))


def test_a_traced_guided_request_replays(tmp_path: Path):
    engine, path = make_engine("fast"), tmp_path / "steps.jsonl"
    guides = Guides(ByteTokenizer())
    writer = attach_trace(engine, path, model="none", config=engine.config)
    guide = guides.compile(schema_spec(POINT, field="response_format"))
    [answer] = generate(engine, [Request((1, 2), SamplingParams(max_tokens=90, seed=1), "r", guide)])
    writer.close()
    report = replay(TraceReader(path), make_engine("reference"), guides)
    assert report.tokens == len(answer.token_ids)
    assert not report.mismatches
    assert "compiled before" in replay(TraceReader(path), make_engine("reference")).render()


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedEngine()) as running:
        yield running


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("response_format", "json", "not {"),
        ("response_format", {"type": "xml"}, "not {"),
        ("response_format", {"type": "json_schema"}, "not {"),
        ("response_format", {"type": "json_object", "schema": {}}, "not {"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}, "name"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}, "schema"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}, "no"),
        ("structured_outputs", {}, "exactly one"),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}, "exactly one"),
        ("structured_outputs", {"regex": "(("}, "regex"),
        ("structured_outputs", {"regex": 5}, "regex"),
        ("structured_outputs", {"choice": []}, "choice"),
        ("structured_outputs", {"choice": ["a"] * 2000}, "2000"),
        ("structured_outputs", {"regex": "a(?=b)"}, "look-around"),
        ("structured_outputs", {"regex": "[^\\s\\S]"}, "no text can keep to it"),
        ("structured_outputs", {"grammar": "start: nowhere"}, "nowhere"),
        ("structured_outputs", {"grammar": "x" * 200_000}, "200000"),
        ("structured_outputs", {"json": "{"}, "not JSON"),
        ("structured_outputs", {"json": {"type": "object", "unevaluatedProperties": False}}, "unevaluatedProperties"),
        ("structured_outputs", {"structural_tag": "x"}, "structural_tag"),
    ],
)
def test_a_shape_that_cannot_be_kept_is_refused_by_name(served: Served, field: str, value: Any, words: str):
    for stream in ({"stream": True}, {}):
        reply = served.post(prompt="x", **stream, **{field: value})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, field)
        assert error["message"].startswith(field)
        assert words in error["message"]


@pytest.mark.parametrize("kind", ["reference", "fast"])
def test_a_shape_that_turns_out_too_much_is_the_requests_fault(kind: str):
    wide = {"grammar": "start: " + " | ".join(f'"w{i}"' for i in range(5000))}  # a limit that the second mask meets
    with serving(make_engine(kind)) as served:
        error = served.post(prompt="x", structured_outputs=wide).json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs")
        assert json.loads(served.events(prompt="x", structured_outputs=wide)[-2]) == {"error": error}
        assert served.post(prompt="x", max_tokens=2).status_code == 200


def test_a_choice_may_hold_any_character():
    with serving(make_engine("fast")) as served:
        for text in ("\x00\x01\x1f\x7f\x80", '\\ "\n\t/', "\u2028\ufeff😀"):
            reply = served.post(prompt="x", structured_outputs={"choice": [text]}, max_tokens=30)
            assert reply.json()["choices"][0]["text"] == text


def test_two_shapes_or_no_end_are_refused(served: Served):
    both = served.post(prompt="x", response_format=ANY_JSON, structured_outputs={"regex": "a"})
    assert both.json()["error"]["param"] == "structured_outputs"
    on = served.post(prompt="x", response_format=ANY_JSON, ignore_eos=True)
    assert on.json()["error"]["param"] == "ignore_eos"


def test_a_server_without_llguidance_says_so(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    message = served.post(prompt="x", response_format=ANY_JSON).json()["error"]["message"]
    assert message.startswith("response_format: needs llguidance")


@pytest.mark.parametrize("kind", ["reference", "fast"])
def test_a_guide_that_gives_up_fails_its_own_request(kind: str):
    params = SamplingParams(max_tokens=6, temperature=0)
    broken = Request((1, 2), params, "broken", Ladder(fails_after=2))
    alone = generate(make_engine(kind), [Request((3, 4), params, "plain")])
    got = generate(make_engine(kind), [broken, Request((3, 4), params, "plain")])
    assert (got[0].finish_reason, got[0].error, len(got[0].token_ids)) == ("error", "guide: the ladder broke", 2)
    assert got[1].token_ids == alone[0].token_ids


def guided_tenants() -> tuple[Rows, torch.Tensor]:
    rows = Rows(2)
    for row, last in enumerate((20, 40)):
        one = tenant(SamplingParams(temperature=0))
        one.guide = Ladder().start(vocab_size=61, eos_token_ids=())
        one.guide.last = last
        rows.admit(row, one)
    return rows, torch.zeros(2, 61)


def test_gate_rejects_a_neighbours_guide():
    from gates.sampling import check_token_guided

    rows, logits = guided_tenants()
    assert sample_rows(logits, rows, index=[0, 1], positions=[3, 3]).token_ids == [19, 39]
    rows.guide[0], rows.guide[1] = rows.guide[1], rows.guide[0]  # a move that forgot the column
    with pytest.raises(GateError, match=r"gate sampling\.token_guided: token 39 chosen"):
        sample_rows(logits, rows, index=[0, 1], positions=[3, 3])
    check_token_guided(token_ids=[5], allowed=[True])


def test_gate_rejects_a_guide_that_was_not_told():
    from gates.sampling import check_guides_told

    engine = tiny_reference()
    engine.submit(Request((3, 4), SamplingParams(max_tokens=9, temperature=0), "r", Ladder()))
    engine.step()
    assert engine._running is not None
    assert isinstance(engine._running.guide, LadderState)
    engine._running.guide.num_accepted -= 1
    with pytest.raises(GateError, match=r"told of 0 tokens, the answer holds 1"):
        engine.step()
    check_guides_told(told=[1, 0], generated=[1, 0])
