"""What replies tell of their prompts: the legacy shape of an echo with logprobs, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.request import Event, SamplingParams, TokenLogprobs
from reference.tokenizer import ByteTokenizer
from serve.answer import Answer
from serve.echo import Prompt, prompt_first, text_offsets
from tests.server import (
    MODEL,
    ScriptedEngine,
    Served,
    eventually,
    make_engine,
    piece_tokenizer,
    says,
    serving,
)
from tests.test_http_cases import refused

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SCORE: dict[str, Any] = {"echo": True, "logprobs": 1, "temperature": 0}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedEngine(says("ab"))) as running:
        yield running
        eventually(running.is_idle)


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[Served, Served]]:
    """Both engines, the fast one with everything that schedules: few blocks, chunks, mixed steps, prefix cache."""
    fast = make_engine("fast", num_blocks=20, max_batch_size=4, chunk_tokens=8, prefix_cache=True)
    fast.mixed_steps = True
    with serving(fast) as one, serving(make_engine("reference")) as other:
        yield one, other
        eventually(one.is_idle)


def chunks(running: Served, **body: Any) -> list[dict[str, Any]]:
    return [json.loads(data)["choices"][0] for data in running.events(**body)[:-1]]


def joined(choices: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """The chunks of one choice as the choice of a whole reply."""
    own = [choice for choice in choices if choice["index"] == index]
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    lists = {name: [value for choice in own for value in choice["logprobs"][name]] for name in columns}
    text = "".join(choice["text"] for choice in own)
    return {"index": index, "text": text, "logprobs": lists, "finish_reason": own[-1]["finish_reason"]}


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_an_echo_with_logprobs_tells_of_prompt_and_answer_whole_and_streamed(served: Served, n: int):
    body = {"prompt": [list("xď".encode()), [121]], "max_tokens": 2, "n": n, **SCORE}
    reply = served.post(**body).json()
    first = reply["choices"][0]
    assert first["text"] == "xďab"
    assert first["logprobs"]["tokens"] == ["x", "bytes:\\xc4", "bytes:\\x8f", "a", "b"]
    assert first["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.25]
    assert first["logprobs"]["top_logprobs"] == [None, *({token: -0.25} for token in first["logprobs"]["tokens"][1:])]
    assert first["logprobs"]["text_offset"] == [0, 1, 1, 2, 3]
    assert reply["usage"]["prompt_tokens"] == 4
    assert reply["usage"]["completion_tokens"] == 4 * n
    parts = chunks(served, **body)
    assert [joined(parts, choice["index"]) for choice in reply["choices"]] == reply["choices"]


def test_a_prompt_is_scored_without_an_answer(served: Served):
    for prompt, before in (("xyz", [None]), (list(b"xyz"), [])):  # a text begins with the token that opens a text
        reply = served.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=2)
        [choice] = reply.choices
        assert (choice.text, choice.finish_reason) == ("xyz", "length")
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [None, *([-0.25] * (2 + len(before)))]
        assert reply.usage is not None
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3 + len(before), 0)
    assert chunks(served, prompt="xyz", max_tokens=0, echo=True)[-1]["text"] == "xyz"  # without logprobs, too
    counted = served.http.get("/metrics").text
    [line] = [line for line in counted.splitlines() if line.startswith("nanoserve:prompt_tokens_total")]
    assert float(line.split()[-1]) >= 3 + 4
    assert served.post(prompt=[97] * 256, max_tokens=0, **SCORE).status_code == 200  # as long as the limit
    refused(served.post(prompt=[97] * 256, max_tokens=1, **SCORE), param="prompt")


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_lm_eval_scores_continuations_alike_on_both_engines(real: tuple[Served, Served], max_tokens: int):
    contexts, continuations = [[72, 101], [84, 104, 101, 32]], [list(b"llo there you"), list(b"rest of it, at length")]
    prompts = [[*context, *rest] for context, rest in zip(contexts, continuations, strict=True)]

    def scores(running: Served) -> list[tuple[float, list[bool]]]:
        reply = running.openai.completions.create(
            model=MODEL, prompt=prompts, max_tokens=max_tokens, temperature=0, logprobs=1, echo=True, seed=1234
        )
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == sum(map(len, prompts))
        assert reply.usage.completion_tokens == max_tokens * len(prompts)
        found = []
        for choice, context, prompt in zip(reply.choices, contexts, prompts, strict=True):
            told = choice.logprobs
            assert told is not None
            assert told.token_logprobs is not None
            assert told.top_logprobs is not None
            assert len(told.token_logprobs) == len(prompt) + max_tokens  # an answer that is EOS counts as well
            end = len(told.token_logprobs) - max_tokens
            own, tops = told.token_logprobs[len(context) : end], told.top_logprobs[len(context) : end]
            assert len(own) == len(prompt) - len(context)
            found.append((sum(own), [value == max(top.values()) for value, top in zip(own, tops, strict=True)]))
        return found

    (mine, greedy), (theirs, also) = (list(zip(*scores(running), strict=True)) for running in real)
    assert list(greedy) == list(also)
    assert list(mine) == pytest.approx(list(theirs), rel=1e-4)


def test_both_engines_tell_of_their_prompts_alike(real: tuple[Served, Served]):
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": ["Once upon a time", "x"], "n": 2, "seed": 5, "max_tokens": 5, **SCORE}),
        ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 3, "temperature": 0, "prompt_logprobs": 2}),
        ("/v1/completions", {"prompt": "abc", "best_of": 3, "seed": 2, "echo": True, "logprobs": 0, "max_tokens": 3}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0, "prompt_logprobs": 1}),
    ]
    for path, body in bodies:
        mine, other = (running.post(path, **body).json() for running in real)
        assert flat(mine["choices"], numbers=False) == flat(other["choices"], numbers=False)
        assert flat(mine.get("prompt_logprobs"), numbers=False) == flat(other.get("prompt_logprobs"), numbers=False)
        values = [
            [flat(one["choices"], numbers=True), flat(one.get("prompt_logprobs"), numbers=True)]
            for one in (mine, other)
        ]
        assert values[0][0] == pytest.approx(values[1][0], rel=1e-4)
        assert values[0][1] == pytest.approx(values[1][1], rel=1e-4)


def flat(value: Any, *, numbers: bool) -> list[Any]:
    """A reply's leaves in order: its real numbers, or all else."""
    if isinstance(value, dict):
        return [leaf for key in value for leaf in ([] if numbers else [key]) + flat(value[key], numbers=numbers)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in flat(item, numbers=numbers)]
    return [value] if isinstance(value, float) == numbers else []


@pytest.mark.parametrize(("path", "prompt"), [("/v1/completions", {"prompt": "xz"}), (CHAT, {"messages": MESSAGES})])
def test_prompt_logprobs_have_the_shape_of_vllm(served: Served, path: str, prompt: dict[str, Any]):
    reply = served.post(path, prompt_logprobs=1, max_tokens=1, n=2, **prompt).json()
    plain = served.post(path, max_tokens=1, **prompt).json()
    holders = [reply] if path == CHAT else reply["choices"]
    for holder in holders:
        told = holder["prompt_logprobs"]
        assert told[0] is None
        assert len(told) == reply["usage"]["prompt_tokens"]
        [(token, entry)] = told[-1].items()
        assert entry == {"logprob": -0.25, "rank": 1, "decoded_token": ByteTokenizer().decode([int(token)])} | (
            {"decoded_token": entry["decoded_token"]} if path == CHAT else {}
        )
        assert entry["decoded_token"]
    assert "prompt_logprobs" not in json.dumps(plain)


def test_one_request_may_ask_for_both_and_gets_as_many_alternatives_of_each(served: Served):
    body = {"prompt": [120, 122], "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 4}
    [choice] = served.post(**body).json()["choices"]
    assert [top and len(top) for top in choice["logprobs"]["top_logprobs"]] == [None, 1, 1]
    assert [told and len(told) for told in choice["prompt_logprobs"]] == [None, 4]
    assert choice["prompt_logprobs"][1]["97"] == {"logprob": -9999.0, "rank": 2, "decoded_token": "a"}


def test_a_token_that_ends_a_scored_answer_has_its_place_and_no_text():
    with serving(ScriptedEngine(says(""))) as running:
        [choice] = running.post(prompt=[120, 121], max_tokens=1, **SCORE).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("xy", "stop")
        assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2]
        [plain] = running.post(prompt=[120, 121], max_tokens=1, logprobs=1).json()["choices"]
        assert plain["logprobs"]["tokens"] == []


def test_offsets_pass_over_special_tokens_that_the_text_does_not_spell():
    tokenizer = piece_tokenizer([], adds_bos=True)
    bos, turn = (tokenizer.backend.token_to_id(name) for name in ("<bos>", "<turn>"))
    text = "aď<turn>b"
    ids = tokenizer.encode(text)
    assert ids == [bos, 97, 0xC4, 0x8F, turn, 98]
    assert text_offsets(tokenizer, ids, text) == (0, 0, 1, 1, 2, 8)
    assert text_offsets(tokenizer, ids, "") == (0,) * 6


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_what_cannot_be_told_is_refused_by_name(served: Served):
    assert "stream" in refused(served.post(prompt="x", prompt_logprobs=1, stream=True), param="prompt_logprobs")
    assert "with echo or prompt_logprobs" in refused(served.post(prompt="x", max_tokens=0), param="max_tokens")
    for name in ("max_tokens", "max_completion_tokens"):
        assert "with prompt_logprobs" in refused(served.post(CHAT, messages=MESSAGES, **{name: 0}), param=name)
    assert "0..20" in refused(served.post(prompt="x", echo=True, logprobs=21), param="logprobs")
    assert "suffix" in refused(served.post(prompt="x", suffix="y"), param="suffix")


# ---- any order --------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), max_size=12), st.permutations(range(3)))
def test_no_answer_is_shown_before_its_prompt_whoever_comes_first(sizes: list[int], order: list[int]):
    prompt, told = Prompt(tuple(b"pq"), "pq", (0, 1), num_shown=0), (None, TokenLogprobs(-1.0, 1))
    answers = [Answer(ByteTokenizer(), SamplingParams(logprobs=0, prompt_logprobs=0), prompt=prompt) for _ in range(3)]
    ends, own = {99: "length"}, TokenLogprobs(-0.5, 1)
    queues = [[Event(str(i), token, ends.get(token), own) for token in (97, 98, 99)] for i in range(3)]
    queues[0][0] = replace(queues[0][0], prompt_logprobs=told)
    held: list[tuple[int, Event]] = []
    while any(queues):
        size = sizes.pop() if sizes else 2
        batch = [(i, queues[i].pop(0)) for i in order[: size + 1] if queues[i]]
        for index, event in prompt_first(batch, [prompt] * 3, held):
            assert prompt.logprobs == told
            answers[index].push(event)
    assert not held
    assert [(answer.text, len(answer.positions)) for answer in answers] == [("pqabc", 5)] * 3
