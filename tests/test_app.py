"""The `openai` client against every engine over a real socket: the same requests, whole and streamed, one and many."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from gates import GateError
from gates.app import check_engine_runs
from reference.tokenizer import ByteTokenizer
from serve.loop import EngineLoop
from tests.museum.exhibit import Edit, applied
from tests.server import ENGINES, MODEL, ScriptedEngine, Served, eventually, make_engine, says, serving

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it raining?"}]


@pytest.fixture(scope="module", params=ENGINES)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """One server an engine for the whole file; every test leaves it idle."""
    with serving(make_engine(request.param)) as running:
        yield running
        eventually(running.is_idle)


@pytest.fixture(scope="module")
def scripted() -> Iterator[Served]:
    with serving(ScriptedEngine()) as running:
        yield running


# ---- holds ------------------------------------------------------------------------------------------------------


def test_a_completion_counts_its_tokens_and_ends_by_length(served: Served):
    reply = served.openai.completions.create(model=MODEL, prompt="Once", max_tokens=7, temperature=0)
    [choice] = reply.choices
    assert (reply.object, reply.model, choice.index) == ("text_completion", MODEL, 0)
    assert choice.finish_reason in ("length", "stop")
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(ByteTokenizer().encode("Once"))
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    if choice.finish_reason == "length":
        assert reply.usage.completion_tokens == 7


def test_completions_have_sixteen_tokens_by_default(served: Served):
    reply = served.post(prompt="Once", ignore_eos=True).json()
    assert reply["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("seed", [None, 0, -1, 11])
def test_a_stream_joins_to_the_whole_answer(served: Served, seed: int | None):
    options: Any = {"max_tokens": 24, "temperature": 0 if seed is None else 1.0, "seed": seed}
    whole = served.openai.completions.create(model=MODEL, prompt="Once", **options)
    parts = list(served.openai.completions.create(model=MODEL, prompt="Once", stream=True, **options))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({part.id for part in parts}) == 1


def test_a_chat_stream_opens_with_its_role_and_joins_to_the_whole(served: Served):
    options: Any = {"max_tokens": 24, "temperature": 0}
    whole = served.openai.chat.completions.create(model=MODEL, messages=MESSAGES, **options)
    parts = list(served.openai.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **options))
    assert whole.choices[0].message.role == "assistant"
    assert (parts[0].choices[0].delta.role, parts[0].choices[0].delta.content) == ("assistant", "")
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert {part.object for part in parts} == {"chat.completion.chunk"}


def test_chat_ids_are_those_of_the_template(served: Served):
    reply = served.openai.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(ByteTokenizer().apply_chat_template(MESSAGES))


def test_eight_clients_at_once_each_get_what_they_get_alone(served: Served):
    def ask(number: int) -> tuple[str, str]:
        prompt = f"{number} bottles " * (1 + number % 3)
        options: Any = {"max_tokens": 8 + 5 * number, "temperature": 0.9, "seed": number}
        if number % 2:
            reply = served.openai.completions.create(model=MODEL, prompt=prompt, **options)
            return reply.choices[0].text, reply.choices[0].finish_reason
        parts = list(served.openai.completions.create(model=MODEL, prompt=prompt, stream=True, **options))
        return "".join(part.choices[0].text for part in parts), parts[-1].choices[0].finish_reason

    alone = [ask(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    assert together == alone


def test_both_engines_answer_alike_to_the_logprob():
    bodies: list[dict[str, Any]] = [
        {"prompt": "Once", "temperature": 0, "max_tokens": 20, "logprobs": 3},
        {"prompt": ["one", "two"], "n": 2, "seed": 5, "max_tokens": 9, "frequency_penalty": 0.5},
        {"prompt": [1, 2, 3], "top_k": 5, "seed": -7, "stop": ["a", "b"], "max_tokens": 30},
        {"prompt": "x", "min_p": 0.1, "top_p": 0.9, "seed": 1, "repetition_penalty": 1.3, "min_tokens": 3},
    ]

    def answers(kind: str) -> list[Any]:
        with serving(make_engine(kind)) as running:
            replies = [running.post(**body).json() for body in bodies]
        return [(reply["usage"], reply["choices"]) for reply in replies]

    for ours, theirs in zip(answers("fast"), answers("reference"), strict=True):
        assert ours[0] == theirs[0]
        for mine, other in zip(ours[1], theirs[1], strict=True):
            assert (mine["text"], mine["finish_reason"]) == (other["text"], other["finish_reason"])
            if mine["logprobs"]:
                assert mine["logprobs"]["tokens"] == other["logprobs"]["tokens"]
                assert mine["logprobs"]["token_logprobs"] == pytest.approx(
                    other["logprobs"]["token_logprobs"], rel=1e-4
                )


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("ab", 1), (["ab", "c", "dé"], 3), ([97, 98], 1), ([[97, 98], [99]], 2)],
)
@pytest.mark.parametrize("n", [1, 2])
def test_choices_are_prompt_major_in_replies_and_on_chunks(scripted: Served, prompt: Any, count: int, n: int):
    body: dict[str, Any] = {"prompt": prompt, "n": n, "max_tokens": 3}
    reply = scripted.post(**body).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(count * n))
    assert reply["usage"]["completion_tokens"] == 3 * count * n
    chunks = [json.loads(data) for data in scripted.events(**body)[:-1]]
    texts = dict.fromkeys(range(count * n), "")
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {choice["index"]: choice["text"] for choice in reply["choices"]}


def test_a_prompt_of_many_answers_is_counted_once():
    with serving(ScriptedEngine(lambda request: iter([*bytes(request.prompt_ids[1:]), 257]))) as running:
        reply = running.post(prompt=["ab", "cde"], n=2).json()
    assert [choice["text"] for choice in reply["choices"]] == ["ab", "ab", "cde", "cde"]
    assert reply["usage"] == {
        "prompt_tokens": 7, "completion_tokens": 14, "total_tokens": 21, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_seeds_of_n_answers_differ(scripted: Served):
    engine = ScriptedEngine()
    with serving(engine) as running:
        running.post(prompt="a", n=3, seed=5, max_tokens=1)
    assert [request.params.seed for request in engine.seen] == [5, 6, 7]


def test_all_sampling_fields_reach_the_engine():
    engine = ScriptedEngine()
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "repetition_penalty": 1.1,
        "presence_penalty": -1, "frequency_penalty": 2, "min_tokens": 2, "max_tokens": 5, "ignore_eos": True,
    }  # fmt: skip
    with serving(engine) as running:
        lists = {"logit_bias": {"258": -100, "0": 1.5}, "stop_token_ids": [1, 2], "stop": ["never"], "logprobs": 2}
        assert running.post(prompt="a", user="u", metadata={"k": "v"}, **fields, **lists).status_code == 200
        messages = [{"role": "user", "content": "a"}]
        chat = {"logit_bias": {"258": -100, "0": 1.5}, "stop_token_ids": [1, 2], "logprobs": True, "top_logprobs": 2}
        assert running.post(CHAT, messages=messages, **fields, **chat).status_code == 200
    for request in engine.seen:
        assert {name: getattr(request.params, name) for name in fields} == fields
        assert dict(request.params.logit_bias) == {258: -100, 0: 1.5}
        assert (request.params.stop_token_ids, request.params.logprobs, request.params.stop) == ((1, 2), 2, ())


def test_null_means_not_given():
    engine = ScriptedEngine()
    names = "max_tokens temperature top_p n stop seed presence_penalty frequency_penalty logit_bias user stream "
    names += "stream_options top_k min_p repetition_penalty stop_token_ids min_tokens ignore_eos logprobs best_of "
    names += "echo suffix metadata"
    with serving(engine) as running:
        plain = running.post(prompt="a").json()
        nulls = running.post(prompt="a", **dict.fromkeys(names.split())).json()
    assert plain["choices"] == nulls["choices"]
    assert engine.seen[0].params == engine.seen[1].params


def test_chat_goes_up_to_the_length_limit_unless_told(scripted: Served):
    prompt = len(ByteTokenizer().apply_chat_template(MESSAGES))
    assert scripted.post(CHAT, messages=MESSAGES).json()["usage"]["completion_tokens"] == 256 - prompt
    for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        assert scripted.post(CHAT, messages=MESSAGES, **limit).json()["usage"]["completion_tokens"] == 3


def test_completion_logprobs_have_the_legacy_shape():
    with serving(ScriptedEngine(says("aď!"))) as running:
        [choice] = running.openai.completions.create(model=MODEL, prompt="x", logprobs=2).choices
        alone = running.post(prompt="x", logprobs=0).json()["choices"][0]["logprobs"]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "bytes:\\xc4", "bytes:\\x8f", "!"]
    assert choice.logprobs.text_offset == [0, 1, 1, 2]
    assert choice.logprobs.token_logprobs == [-0.25] * 4
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[1] == {"bytes:\\xc4": -0.25, "a": -9999.0}
    assert alone["top_logprobs"] == [{token: -0.25} for token in alone["tokens"]]


def test_chat_logprobs_carry_the_bytes_of_each_token():
    with serving(ScriptedEngine(says("ď"))) as running:
        options: Any = {"model": MODEL, "messages": MESSAGES, "logprobs": True}
        [choice] = running.openai.chat.completions.create(**options, top_logprobs=2).choices
        [plain] = running.openai.chat.completions.create(**options).choices
        parts = list(running.openai.chat.completions.create(**options, stream=True))
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [(entry.token, entry.bytes) for entry in choice.logprobs.content] == [("\\xc4", [0xC4]), ("\\x8f", [0x8F])]
    assert [top.logprob for top in choice.logprobs.content[0].top_logprobs] == [-0.25, -9999.0]
    assert plain.logprobs is not None
    assert plain.logprobs.content is not None
    assert [entry.top_logprobs for entry in plain.logprobs.content] == [[], []]
    streamed = [e.bytes for p in parts if p.choices[0].logprobs for e in p.choices[0].logprobs.content or []]
    assert streamed == [[0xC4], [0x8F]]


def test_models_and_health_tell_what_is_served(served: Served):
    [model] = served.openai.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert served.openai.models.retrieve(MODEL) == model
    state = served.health()
    assert (state["status"], state["model"]) == ("ok", MODEL)
    assert {"running", "waiting", "kv_tokens", "kv_capacity_tokens"} <= set(state["engine"])


def test_text_with_line_separators_arrives_whole():
    text = "a\u2028b\u0085c\r\nd"
    with serving(ScriptedEngine(says(text))) as running:
        parts = running.openai.completions.create(model=MODEL, prompt="x", stream=True)
        assert "".join(part.choices[0].text for part in parts) == text


def test_the_document_describes_the_bodies(scripted: Served):
    document = scripted.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert {"CompletionBody", "ChatBody", "Message", "StreamOptions"} <= set(schemas)
    assert schemas["CompletionBody"]["additionalProperties"] is False


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_another_model_is_not_found(served: Served):
    with pytest.raises(openai.NotFoundError, match="'tiny'") as refused:
        served.openai.completions.create(model="gpt-4", prompt="x")
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        served.openai.models.retrieve("org/other")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_limit_is_a_400_with_the_numbers(served: Served, stream: bool):
    for length, words in ((256, "256 tokens leave no room"), (300, "300 tokens leave no room")):
        reply = served.post(prompt=[1] * length, stream=stream)
        assert reply.status_code == 400
        assert words in reply.json()["error"]["message"]
        assert "256 tokens" in reply.json()["error"]["message"]
    reply = served.post(prompt=[1] * 250, max_tokens=7, stream=stream)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_tokens")
    assert "257" in reply.json()["error"]["message"]
    assert served.post(prompt=[1] * 250, max_tokens=6, ignore_eos=True).json()["usage"]["completion_tokens"] == 6
    assert served.post(prompt=[1] * 250, ignore_eos=True).json()["usage"]["completion_tokens"] == 6


def test_unknown_paths_and_methods_have_the_envelope(scripted: Served):
    for reply, status in (
        (scripted.http.get("/v1/nope"), 404),
        (scripted.http.get("/v1/completions"), 405),
        (scripted.http.request("DELETE", "/health"), 405),
    ):
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert scripted.http.get("/v1/completions").headers["allow"] == "POST"


def test_a_fault_of_the_server_shows_no_trace(monkeypatch: pytest.MonkeyPatch):
    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("secret detail")

    with serving(ScriptedEngine()) as running:
        monkeypatch.setattr("serve.app.plan_completion", broken)
        reply = running.post(prompt="x")
        monkeypatch.undo()
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "internal_error"
        assert "secret" not in reply.text
        assert "Traceback" not in reply.text
        # On the same connection: a fault does not cut off what comes next.
        assert running.post(prompt="x").status_code == 200


def test_a_body_beyond_the_limit_is_refused():
    with serving(ScriptedEngine(), max_body_bytes=1000) as running:
        reply = running.post(prompt="x" * 1000)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")


def test_too_many_open_answers_are_told_to_come_back():
    with serving(ScriptedEngine(paused=True), max_open=2) as running:
        with running.http.stream(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": "x", "n": 2, "stream": True}
        ):
            reply = running.post(prompt="x")
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")


def test_a_server_is_not_healthy_whose_engine_ended_in_silence():
    engine, silent = ScriptedEngine(), Edit(EngineLoop._run, "self._failure = failure", "return")
    with applied((silent,)), serving(engine) as running:
        assert running.http.get("/health").status_code == running.http.get("/ready").status_code == 200
        engine.fault = RuntimeError("a bug")
        asked = {"model": MODEL, "prompt": "x", "stream": True}
        with running.http.stream("POST", "/v1/completions", json=asked):
            eventually(lambda: running.http.get("/health").status_code == 500)
            assert running.http.get("/ready").status_code == running.post(prompt="x").status_code == 500


def test_gate_rejects_an_engine_that_ended_in_silence():
    check_engine_runs(status="ok", thread_alive=True)
    check_engine_runs(status="dead", thread_alive=False)
    check_engine_runs(status="stopping", thread_alive=False)
    with pytest.raises(
        GateError, match=r"app\.engine_runs: the status is 'ok', the thread that runs the engine is over"
    ):
        check_engine_runs(status="ok", thread_alive=False)
