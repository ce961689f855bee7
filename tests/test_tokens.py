"""`/tokenize` and `/detokenize`: the ids that would run, and their text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.tokenizer import ByteTokenizer
from serve.messages import Message
from serve.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize
from tests.server import BOS, MODEL, VOCAB, ScriptedEngine, Served, serving

CHAT: Any = [{"role": "user", "content": [{"type": "text", "text": "Is it"}, {"type": "text", "text": "raining?"}]}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedEngine()) as running:
        yield running


# ---- holds ------------------------------------------------------------------------------------------------------


def test_tokens_are_those_that_would_run():
    engine = ScriptedEngine()
    with serving(engine) as running:
        running.post(prompt="ďx", max_tokens=1)
        running.post("/v1/chat/completions", messages=CHAT, max_tokens=1)
        replies = [running.http.post("/tokenize", json=body).json() for body in ({"prompt": "ďx"}, {"messages": CHAT})]
    for reply, request in zip(replies, engine.seen, strict=True):
        assert tuple(reply["tokens"]) == request.prompt_ids
        assert (reply["count"], reply["max_model_len"]) == (len(request.prompt_ids), 256)


def test_pieces_and_special_tokens_are_shown_when_asked_for(served: Served):
    body = {"model": MODEL, "prompt": "aď", "add_special_tokens": False, "return_token_strs": True}
    reply = served.http.post("/tokenize", json=body).json()
    assert (reply["tokens"], reply["token_strs"]) == ([97, 0xC4, 0x8F], ["a", "\\xc4", "\\x8f"])
    assert served.http.post("/detokenize", json={"tokens": [BOS, 97, 0xC4, 0x8F]}).json() == {"prompt": "<bos>aď"}
    assert served.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_a_conversation_need_not_be_opened_for_an_answer(served: Served):
    opened, closed = (
        served.http.post("/tokenize", json={"messages": CHAT, "add_generation_prompt": value}).json()["tokens"]
        for value in (True, False)
    )
    assert opened[: len(closed)] == closed
    assert len(opened) > len(closed)


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "x", "chat_template": "y"}, "chat_template"),
        ("/tokenize", {"prompt": "x" * 3000}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(served: Served, path: str, body: dict[str, Any], field: str):
    reply = served.http.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert reply.json()["error"]["message"].startswith(field)


def test_another_model_is_refused(served: Served):
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": []})):
        assert served.http.post(path, json={"model": "other", **body}).status_code == 404


# ---- any order --------------------------------------------------------------------------------------------------


@given(text=st.text())
def test_a_text_comes_back(text: str):
    from serve.prompts import Limits

    limits, tokenizer = Limits(10**6, 1), ByteTokenizer()
    ids = tokenize(TokenizeBody(prompt=text, add_special_tokens=False), tokenizer, limits=limits)["tokens"]
    assert detokenize(DetokenizeBody(tokens=ids), tokenizer) == {"prompt": text}
    spoken = tokenize(TokenizeBody(messages=[Message(role="user", content=text)]), tokenizer, limits=limits)["tokens"]
    assert spoken == tokenizer.apply_chat_template([{"role": "user", "content": text}])
