"""Faults that public servers had, as requests over a real socket, and what is right instead."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import tokenizers
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from reference.request import Request as EngineRequest
from reference.token_bytes import byte_alphabet
from reference.tokenizer import ByteTokenizer, Tokenizer
from serve.prompts import bytes_per_token, silent_bytes
from tests.server import (
    BOS,
    DEADLINE_S,
    MODEL,
    VOCAB,
    ScriptedEngine,
    Served,
    eventually,
    make_engine,
    piece_tokenizer,
    says,
    serving,
)

CHAT = "/v1/chat/completions"
USER: Any = [{"role": "user", "content": "Is it raining?"}]
ENVELOPE = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One scripted server for all requests that are to be refused; it ends idle and answering."""
    with serving(ScriptedEngine()) as running:
        yield running
        eventually(running.is_idle)
        assert running.post(prompt="x").status_code == 200


def refused(reply: httpx.Response, *, param: str | None = None, status: int = 400) -> str:
    """The message of an error in the envelope."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == ENVELOPE
    assert "Traceback" not in reply.text
    if param is not None:
        assert error["param"] == param
        assert error["message"].startswith(param)
    return str(error["message"])


def texts(events: list[str]) -> list[str]:
    """The non-empty texts of a stream of completions."""
    assert events[-1] == "[DONE]"
    chunks = [json.loads(data) for data in events[:-1]]
    return [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"] and chunk["choices"][0]["text"]]


def finish(events: list[str]) -> str:
    """The one finish reason of a stream of one choice; it is null, and there, on every chunk before."""
    reasons = [json.loads(data)["choices"][0]["finish_reason"] for data in events[:-1]]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return str(reasons[-1])


# ---- text: characters and stop strings over tokens --------------------------------------------------------------

SMILEY = "😀".encode()
# The further tokens of a vocabulary of bytes, and the ids that spell the smiley with them.
CUTS: dict[int, tuple[list[bytes], list[int]]] = {
    1: ([SMILEY], [256]),
    2: ([SMILEY[:2], SMILEY[2:]], [256, 257]),
    3: ([SMILEY[1:3]], [SMILEY[0], 256, SMILEY[3]]),
    4: ([], list(SMILEY)),
}


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", ["{}", "a{}b", "{}{}{}", "x{}y{}"])
def test_characters_split_over_tokens_reach_the_client_whole(tokens: int, shape: str):
    pieces, smiley = CUTS[tokens]
    tokenizer = piece_tokenizer(pieces)
    ids = [i for part in shape.replace("{}", "\0") for i in (smiley if part == "\0" else [ord(part)])]
    eos = tokenizer.eos_token_id
    assert eos is not None
    engine = ScriptedEngine(says(ids, then=[eos]), vocab_size=tokenizer.vocab_size, eos=eos)
    with serving(engine, tokenizer) as running:
        events = running.events(prompt="x", max_tokens=50)
        whole = running.post(prompt="x", max_tokens=50).json()
    assert "".join(texts(events)) == whole["choices"][0]["text"] == shape.replace("{}", "😀")
    assert not any("�" in text for text in texts(events))
    assert whole["usage"]["completion_tokens"] == len(ids) + 1


def test_two_byte_characters_in_a_row_are_one_delta_each():
    with serving(ScriptedEngine(says("ďaďď"))) as running:
        assert texts(running.events(prompt="x")) == ["ď", "a", "ď", "ď"]


@pytest.mark.parametrize(("limit", "reason"), [(17, "stop"), (16, "length")])
def test_text_held_back_for_a_stop_is_not_lost(limit: int, reason: str):
    body: dict[str, Any] = {"prompt": "x", "stop": ["gamma\nZZZZZZ"], "max_tokens": limit}
    with serving(ScriptedEngine(says("alpha beta gamma"))) as running:
        events, whole = running.events(**body), running.post(**body).json()["choices"][0]
    assert "".join(texts(events)) == whole["text"] == "alpha beta gamma"
    assert finish(events) == whole["finish_reason"] == reason


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (["ber la"], "The am"),
        (["b"], "The am"),
        (["amber lamp glow"], "The "),
        (["ber la", "ber lamp"], "The am"),
        (["ber lamp", "ber la"], "The am"),
        ("T", ""),
        (["zzz", "lamp", "s"], "The amber "),
    ],
)
def test_no_part_of_a_stop_string_is_sent(stop: Any, shown: str):
    first = min((s for s in ([stop] if isinstance(stop, str) else stop) if s != "zzz"), key=len)
    with serving(ScriptedEngine(says("The amber lamp glows"))) as running:
        events = running.events(prompt="x", stop=stop, max_tokens=50)
        whole = running.post(prompt="x", stop=stop, max_tokens=50).json()
        eventually(running.is_idle)
    assert "".join(texts(events)) == whole["choices"][0]["text"] == shown
    assert finish(events) == whole["choices"][0]["finish_reason"] == "stop"
    if len(stop) == 1 or shown == "The am":
        assert whole["usage"]["completion_tokens"] == len(shown) + len(first)


def test_a_stop_that_begins_inside_a_token_cuts_the_token():
    tokenizer = piece_tokenizer([b"The am", b"ber", b" lamp"])
    engine = ScriptedEngine(says([256, 257, 258, 259]), vocab_size=tokenizer.vocab_size, eos=260)
    with serving(engine, tokenizer) as running:
        assert texts(running.events(prompt="x", stop=["mber l"])) == ["The a"]


def test_a_stop_string_ends_the_engine_request_too():
    engine = ScriptedEngine()
    with serving(engine) as running:
        reply = running.post(prompt="x", stop="c", max_tokens=200, ignore_eos=True).json()
        eventually(running.is_idle)
    assert reply["choices"][0]["text"] == "ab"
    assert reply["usage"]["completion_tokens"] == 3


# ---- usage on streams -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}])
def test_usage_is_not_sent_unless_asked_for(served: Served, options: dict[str, Any]):
    events = served.events(CHAT, messages=USER, max_tokens=5, **options)
    assert not any("usage" in json.loads(data) for data in events[:-1])


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_usage_is_one_last_chunk_when_asked_for(served: Served, path: str):
    body = {"messages": USER} if path == CHAT else {"prompt": "x"}
    events = served.events(path, max_tokens=5, stream_options={"include_usage": True}, **body)
    *chunks, last = [json.loads(data) for data in events[:-1]]
    assert events[-1] == "[DONE]"
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], served.post(path, max_tokens=5, **body).json()["usage"])
    assert last["usage"]["completion_tokens"] == 5


def test_stream_options_without_a_stream_are_refused(served: Served):
    for stream in ({}, {"stream": False}):
        reply = served.post(CHAT, messages=USER, stream_options={"include_usage": True}, **stream)
        refused(reply, param="stream_options")
    refused(served.post(prompt="x", stream=True, stream_options={"continuous_usage_stats": True}))


# ---- clients that leave -----------------------------------------------------------------------------------------


def with_middleware(app: FastAPI) -> None:
    """The kind of middleware that wraps the request's receive channel."""

    @app.middleware("http")
    async def passes(request: Any, call_next: Callable[..., Any]) -> Any:
        return await call_next(request)


def hang_up_after_sending(served: Served, body: dict[str, Any]) -> socket.socket:
    """A raw client that has sent its request; closing it is a hang-up."""
    data = json.dumps({"model": MODEL, **body}).encode()
    client = socket.create_connection(("127.0.0.1", served.port), timeout=DEADLINE_S)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


LONG = {"prompt": "x", "max_tokens": 1_000_000, "ignore_eos": True}  # endless for all that a test sees


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wrap", [None, with_middleware])
def test_a_client_that_hangs_up_frees_its_place(stream: bool, wrap: Any):
    engine = ScriptedEngine(max_running=1, max_model_len=2_000_000, step_s=0.002)
    with serving(engine, wrap=wrap) as served:
        runs = hang_up_after_sending(served, {**LONG, "stream": stream})
        eventually(lambda: served.health()["engine"]["running"] == 1)
        waits = hang_up_after_sending(served, {**LONG, "stream": stream})
        eventually(lambda: served.health()["engine"]["waiting"] == 1)
        waits.close()
        eventually(lambda: served.health()["engine"]["waiting"] == 0, within_s=5.0)
        assert served.health()["engine"]["running"] == 1
        runs.close()
        eventually(served.is_idle, within_s=5.0)
        assert not engine.has_work
        assert served.post(prompt="x").status_code == 200


@pytest.mark.parametrize("kind", ["reference", "fast"])
def test_a_hang_up_frees_the_blocks_of_a_real_engine(kind: str):
    engine = make_engine(kind)
    plain = engine.step
    # A tiny model would be done before the clients are gone.
    engine.step = lambda: (threading.Event().wait(0.01), plain())[1]
    with serving(engine) as served:
        before = served.health()["engine"]
        clients = [
            hang_up_after_sending(served, {"prompt": "x", "max_tokens": 250, "ignore_eos": True, "stream": stream})
            for stream in (False, True)
        ]
        eventually(lambda: served.health()["open"] == 2)
        for client in clients:
            client.close()
        eventually(served.is_idle)
        after = served.health()["engine"]
        same = ("running", "waiting", "kv_tokens", "kv_capacity_tokens", "free_blocks")
        assert {name: after.get(name) for name in same} == {name: before.get(name) for name in same}
        assert served.post(prompt="x", max_tokens=2).status_code == 200


def test_a_client_that_does_not_read_slows_nobody():
    with serving(ScriptedEngine(max_model_len=10_000, step_s=0.0005)) as served:
        # Some 10 MB of events, more than the sockets between them hold.
        body = {"prompt": "x", "max_tokens": 4000, "stream": True, "logprobs": 20, "ignore_eos": True}
        lazy = hang_up_after_sending(served, body)
        eventually(lambda: served.health()["engine"]["running"] == 1)
        assert served.post(prompt="x", max_tokens=50).json()["usage"]["completion_tokens"] == 50
        # The engine is done with it though not a byte was read.
        eventually(served.is_idle)
        lazy.close()
        assert served.post(prompt="x", max_tokens=50).status_code == 200


def test_a_client_that_sends_its_body_in_drops_slows_nobody():
    with serving(ScriptedEngine()) as served:
        data = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2}).encode()
        slow = socket.create_connection(("127.0.0.1", served.port), timeout=DEADLINE_S)
        slow.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode())
        for byte in data[:-1]:
            slow.sendall(bytes([byte]))
            if byte == ord(","):
                assert served.post(prompt="x", max_tokens=3).status_code == 200
        slow.sendall(data[-1:])
        assert b"200 OK" in slow.recv(100)
        slow.close()
        # And one that leaves in the middle.
        gone = socket.create_connection(("127.0.0.1", served.port), timeout=DEADLINE_S)
        gone.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{"mo')
        gone.close()
        assert served.post(prompt="x", max_tokens=3).status_code == 200


def test_gauges_return_to_zero_when_everybody_leaves_at_once():
    engine = ScriptedEngine(max_running=20, max_model_len=2_000_000, step_s=0.01)
    with serving(engine) as served:
        bodies = [{**LONG, "n": 5, "stream": bool(number % 2)} for number in range(5)]
        clients = [hang_up_after_sending(served, body) for body in bodies]
        eventually(lambda: served.health()["engine"]["running"] == 20 and served.health()["engine"]["waiting"] == 5)
        for client in clients:
            client.close()
        eventually(served.is_idle, within_s=5.0)
        assert not engine.has_work


def test_requests_with_one_client_id_are_two_requests(served: Served):
    headers = {"x-request-id": "same"}
    body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "user": "same"}
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda _: served.http.post("/v1/completions", json=body, headers=headers), range(2)))
    assert [reply.json()["usage"]["completion_tokens"] for reply in replies] == [200, 200]
    assert replies[0].json()["id"] != replies[1].json()["id"]


# ---- prompts ----------------------------------------------------------------------------------------------------

EMPTY = ["", [""], [], [[]], ["ok", ""], [[1], []]]


@pytest.mark.parametrize("prompt", EMPTY)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_an_empty_prompt_is_refused_where_nothing_remains_to_compute(prompt: Any, adds_bos: bool):
    tokenizer = piece_tokenizer([], adds_bos=adds_bos)
    has_text = any(item == "" for item in ([prompt] if isinstance(prompt, str) else prompt))
    with serving(ScriptedEngine(), tokenizer) as served:
        for stream in (False, True):
            reply = served.post(prompt=prompt, max_tokens=2, stream=stream)
            if adds_bos and has_text:
                assert reply.status_code == 200
            else:
                assert "prompt" in refused(reply)
        assert served.post(prompt="ok", max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "n", "field"),
    [([[1]] * 20_000, 128, "n"), ([[1]] * 20_000, 1, "prompt"), (["x"] * 1025, None, "prompt"), (["x"] * 9, 128, "n")],
)
def test_too_many_answers_are_refused_before_any_is_prepared(
    served: Served, monkeypatch: pytest.MonkeyPatch, prompt: Any, n: int | None, field: str
):
    prepared: list[Any] = []
    plain_init, plain_encode = EngineRequest.__post_init__, Tokenizer.encode
    monkeypatch.setattr(EngineRequest, "__post_init__", lambda self: (prepared.append(self), plain_init(self))[1])
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, *a, **o: (prepared.append(self), plain_encode(self, *a, **o))[1]
    )
    assert "1024 answers" in refused(served.post(prompt=prompt, n=n), param=field)
    assert prepared == []
    # An n that no body may have is told its own range, after one prompt at most.
    assert "1..128" in refused(served.post(prompt=prompt, n=129), param="n")
    assert len(prepared) <= 2
    # The count sees the requests of a body that is taken.
    assert served.post(prompt=["x"] * 8, n=2, max_tokens=1).status_code == 200
    assert len(prepared) >= 16


LONGEST = len("<turn>") * 256  # the text of the fewest tokens a byte is special tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_can_never_fit_is_refused_before_it_is_encoded(
    served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
):
    def never(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("encoded")

    monkeypatch.setattr(Tokenizer, "encode", never)
    for text in ("x" * (LONGEST + 1), "é" * (LONGEST // 2 + 1)):
        message = refused(served.post(prompt=text, stream=stream), param="prompt")
        assert f"{len(text.encode())} bytes cannot fit" in message
        assert f"256 tokens, which are at most {LONGEST} bytes" in message
        reply = served.post(CHAT, messages=[{"role": "user", "content": text}], stream=stream)
        assert f"at most {LONGEST} bytes" in refused(reply, param="messages")
        assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_the_longest_text_that_may_fit_is_encoded(served: Served):
    # 255 special tokens and BOS fill the context of 256; 254 leave room for one token.
    reply = served.post(prompt="<turn>" * 254, max_tokens=1)
    assert reply.json()["usage"]["prompt_tokens"] == 255
    assert "256 tokens leave no room" in refused(served.post(prompt="<turn>" * 255), param="prompt")
    assert "leave no room" in refused(served.post(prompt="x" * LONGEST), param="prompt")


def backend_with(**parts: Any) -> tokenizers.Tokenizer:
    """A byte-level backend with some parts replaced."""
    backend = piece_tokenizer([]).backend
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


WHITE = AddedToken("<white>", lstrip=True, special=True)
UNKNOWN = models.WordLevel({character: i for i, character in enumerate([*byte_alphabet(), "?"])}, unk_token="?")


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split("a", "removed"), pre_tokenizers.ByteLevel()])},
        {"pre_tokenizer": None},
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Replace(Regex(" +"), " ")},
        {"model": UNKNOWN},
        {"model": models.BPE(vocab={"a": 0}, merges=[], unk_token="a", fuse_unk=True)},
        {"model": models.BPE(vocab={"a": 0}, merges=[]), "normalizer": normalizers.NFC()},
    ],
)
def test_a_tokenizer_that_loses_text_gives_no_bound(parts: dict[str, Any]):
    assert bytes_per_token(Tokenizer(backend_with(**parts))) is None


def test_a_token_that_swallows_white_space_gives_no_bound():
    backend = backend_with()
    backend.add_special_tokens([WHITE])
    assert len(backend.encode(" " * 99 + "<white>").ids) == 1
    assert bytes_per_token(Tokenizer(backend)) is None


PARTS = ["x", " ", "é", "<turn>", "e\u0301", "\u1fbe\u0308\u0301", "한", "😀", "\x04\x04\x04\x04\x04\x04\x04"]
LACKING = models.BPE(vocab={c: i for i, c in enumerate(byte_alphabet()) if i != 4}, merges=[])


@given(text=st.lists(st.sampled_from(PARTS)).map("".join))
def test_no_token_covers_more_bytes_than_the_bound(text: str):
    for parts, most, silent in (
        ({}, 6, b""),
        ({"normalizer": normalizers.NFC()}, 24, b""),
        ({"model": LACKING}, 6, b"\4"),
    ):
        tokenizer = Tokenizer(backend_with(**parts))
        assert (bytes_per_token(tokenizer), silent_bytes(tokenizer)) == (most, silent)
        assert len(text.encode().translate(None, silent)) <= most * len(tokenizer.encode(text))


def test_bytes_that_the_vocabulary_lacks_do_not_make_a_text_too_long():
    tokenizer = Tokenizer(backend_with(model=LACKING))
    with serving(ScriptedEngine(), tokenizer) as served:
        reply = served.post(prompt="x" + "\x04" * 10_000, max_tokens=1)
        assert reply.json()["usage"]["prompt_tokens"] == 1
        assert "cannot fit" in refused(served.post(prompt="x" * 10_000), param="prompt")


def test_a_chat_without_messages_is_refused(served: Served):
    refused(served.post(CHAT, messages=[]), param="messages")


def prompt_of(tokenizer: Tokenizer, path: str, **body: Any) -> list[int]:
    engine = ScriptedEngine(vocab_size=tokenizer.vocab_size)
    with serving(engine, tokenizer) as served:
        reply = served.post(path, max_tokens=1, **body)
        assert reply.json()["usage"]["prompt_tokens"] == len(engine.seen[0].prompt_ids)
    return list(engine.seen[0].prompt_ids)


TURNS = "{% for message in messages %}{{ message.content }}{% endfor %}"


def test_a_prompt_begins_with_one_bos():
    # The template writes BOS and the tokenizer would add another.
    both = piece_tokenizer([], adds_bos=True, template="{{ bos_token }}" + TURNS)
    ids = prompt_of(both, CHAT, messages=USER)
    assert ids == both.apply_chat_template(USER)
    assert ids.count(BOS) == 1
    # A plain text gets special tokens once, also when it spells BOS itself.
    assert prompt_of(both, "/v1/completions", prompt="hi") == [BOS, *b"hi"]
    assert prompt_of(both, "/v1/completions", prompt="<bos>hi") == [BOS, *b"hi"]
    # A template without BOS: the ids are the template's.
    bare = piece_tokenizer([], adds_bos=True, template=TURNS)
    assert prompt_of(bare, CHAT, messages=USER) == bare.apply_chat_template(USER)


def test_text_parts_are_the_joined_string():
    tokenizer = ByteTokenizer()
    parts = [{"type": "text", "text": text} for text in ("a", "b", "ď")]
    for some, joined in ((parts[:1], "a"), (parts, "a\nb\nď")):
        ids = prompt_of(tokenizer, CHAT, messages=[{"role": "user", "content": some}])
        assert ids == prompt_of(tokenizer, CHAT, messages=[{"role": "user", "content": joined}])


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "http://x"}}],
        [{"type": "text", "text": "a"}, {"type": "input_audio"}],
        [{"type": "text"}],
        ["text"],
        [],
        None,
        5,
    ],
)
def test_content_that_is_not_text_is_refused(served: Served, content: Any):
    assert "content" in refused(served.post(CHAT, messages=[{"role": "user", "content": content}]), param="messages")


STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ("system user", "System role not supported"),
        ("user assistant system user", "must alternate"),
        ("user user", "must alternate"),
        ("user tool", None),
    ],
)
def test_a_conversation_the_template_rejects_is_refused_in_its_words(roles: str, words: str | None):
    messages = [{"role": role, "content": "x"} for role in roles.split()]
    with serving(ScriptedEngine(), piece_tokenizer([], template=STRICT)) as served:
        for stream in (False, True):
            reply = served.post(CHAT, messages=messages, stream=stream)
            if words is None:
                assert reply.status_code == 200
            else:
                assert words in refused(reply)
        assert served.post(CHAT, messages=USER, max_tokens=1).status_code == 200


def test_a_chat_with_a_model_that_has_no_template_is_refused():
    with serving(ScriptedEngine(), piece_tokenizer([])) as served:
        assert "template" in refused(served.post(CHAT, messages=USER))
        assert served.post(prompt="x").status_code == 200


# ---- bodies -----------------------------------------------------------------------------------------------------

GOOD = b'{"model": "tiny", "prompt": "x", "max_tokens": 2}'


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "tiny", "prompt": "x" stray}',
        b"",
        b"[]",
        b"5",
        b"null",
        b'"x"',
        GOOD[:-5],
        b'{"model": "tiny", "prompt": "\xc3\x28"}',
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "x", "logit_bias": {"5": Infinity}}',
        b'{"model": "tiny", "prompt": "\\ud83d"}',
        b'{"model": "\\ud83d", "prompt": "x"}',
        b'{"model": "tiny", "prompt": "x", "user": "\\ud83d"}',
        b'{"model": "tiny", "prompt": "x", "\\ud83d": 1}',
        b'{"model": "tiny", "prompt": "x", "stop": "\\ud83d"}',
        b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "prompt": ' + b"[" * 100_000,
        b'{"prompt": "x"}',
        b'{"model": "tiny"}',
    ],
)
def test_a_body_that_cannot_be_read_is_a_400(served: Served, body: bytes):
    for path in ("/v1/completions", CHAT):
        reply = served.http.post(path, content=body, headers={"content-type": "application/json"})
        refused(reply)


@pytest.mark.parametrize(
    ("doubled", "name"),
    [(b'"seed": 1, "seed": 1', "seed"), (b'"logit_bias": {"7": 1, "7": 2}', "7"), (b'"a": {}, "\\u0061": 1', "a")],
)
def test_a_field_given_twice_is_refused_by_name(served: Served, doubled: bytes, name: str):
    reply = served.http.post("/v1/completions", content=GOOD[:-1] + b", " + doubled + b"}")
    assert "more than once" in refused(reply, param=name)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_body_is_read_as_json_whatever_its_content_type(served: Served, kind: str | None):
    headers = {} if kind is None else {"content-type": kind}
    assert served.http.post("/v1/completions", content=GOOD, headers=headers).status_code == 200


WRONG: list[tuple[str, Any, str]] = [
    ("temperature", "hot", "'hot'"),
    ("temperature", "0.5", "'0.5'"),
    ("temperature", -0.1, "[0.0, "),
    ("temperature", True, "True"),
    ("top_p", 0, "(0.0, 1.0]"),
    ("top_p", 1.5, "(0.0, 1.0]"),
    ("n", 0, "1.."),
    ("n", 10_000, "1.."),
    ("max_tokens", 0, "1.."),
    ("max_tokens", -1, "0.."),
    ("max_tokens", 1.5, "1.5"),
    ("max_tokens", 10**30, "length limit"),
    ("seed", 2**64, str(2**63 - 1)),
    ("seed", 2**63, str(2**63 - 1)),
    ("seed", -(2**63) - 1, str(2**63)),
    ("presence_penalty", 2.1, "[-2.0, 2.0]"),
    ("frequency_penalty", -2.1, "[-2.0, 2.0]"),
    ("repetition_penalty", 0, "100.0]"),
    ("top_k", -2, "0.."),
    ("min_p", 1.1, "[0.0, 1.0]"),
    ("min_tokens", 17, "0..16"),
    ("stop", ["a"] * 5, "4"),
    ("stop", "", "non-empty"),
    ("stop", ["a", ""], "non-empty"),
    ("stop", 5, "non-empty"),
    ("stop_token_ids", [VOCAB], f"0..{VOCAB - 1}"),
    ("stop_token_ids", [-1], "0.."),
    ("stop_token_ids", "5", "'5'"),
    ("logprobs", 21, "0..20"),
    ("logprobs", True, "True"),
    ("prompt_logprobs", -1, "0..20"),
    ("prompt_logprobs", 21, "0..20"),
    ("prompt_logprobs", "all", "'all'"),
    ("best_of", 0, "1..128"),
    ("best_of", 129, "1..128"),
    ("echo", "yes", "'yes'"),
    ("suffix", "x", "not supported"),
    ("prompt", 5, "int"),
    ("prompt", ["a", 5], "list of strings"),
    ("prompt", [1, "a"], "list of strings"),
    ("prompt", [VOCAB], f"0..{VOCAB - 1}"),
    ("prompt", [-1], "0.."),
    ("prompt", [True], "list of token ids"),
    ("prompt", None, "NoneType"),
    ("stream", "yes", "'yes'"),
    ("stream_options", 5, ""),
    ("user", 5, "5"),
    ("metadata", {"a": 1}, "1"),
    ("ignore_eos", "no", "'no'"),
    ("priority", 2**31, str(2**31 - 1)),
    ("priority", "high", "'high'"),
    ("cache_salt", 5, "5"),
    ("prefix_cache", "no", "'no'"),
    ("guided_json", {}, "unknown field"),
    ("cache_salt", "x" * 257, "at most 256"),
    ("messages", [], "unknown field"),
]


@pytest.mark.parametrize(("field", "value", "words"), WRONG, ids=[f"{f}={str(v)[:20]}" for f, v, _ in WRONG])
def test_a_wrong_value_is_refused_by_name_and_range(served: Served, field: str, value: Any, words: str):
    for stream in ({"stream": True}, {}):
        body = {"prompt": "x", **stream, field: value}
        assert words in refused(served.post(**body), param=field)


WRONG_CHAT: list[tuple[str, Any]] = [
    ("tool_choice", "auto"),
    ("parallel_tool_calls", True),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("audio", {"voice": "x", "format": "wav"}),
    ("modalities", ["text", "audio"]),
    ("prediction", {"type": "content", "content": "x"}),
    ("store", True),
    ("store", 0),
    ("service_tier", "flex"),
    ("web_search_options", {}),
    ("reasoning_effort", "low"),
    ("verbosity", "low"),
    ("prompt_cache_key", "k"),
    ("safety_identifier", "s"),
    ("top_logprobs", 2),
    ("max_completion_tokens", 0),
    ("prompt", "x"),
    ("logprobs", 2),
    ("messages", "x"),
    ("messages", ["x"]),
    ("messages", [{"role": "king", "content": "x"}]),
    ("messages", [{"content": "x"}]),
    ("messages", [{"role": "user", "content": "x", "weight": 1}]),
]


@pytest.mark.parametrize(("field", "value"), WRONG_CHAT, ids=[f"{f}={str(v)[:30]}" for f, v in WRONG_CHAT])
def test_a_chat_field_that_cannot_be_honoured_is_refused_by_name(served: Served, field: str, value: Any):
    refused(served.post(CHAT, **{"messages": USER, "max_tokens": 1, field: value} | _unless_given(field)), param=field)


def _unless_given(field: str) -> dict[str, Any]:
    return {"max_tokens": None} if field == "max_completion_tokens" else {}


def test_a_harmless_default_may_be_spelled_out(served: Served):
    defaults = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
        "store": False, "service_tier": "auto", "audio": None, "top_k": -1,
    }  # fmt: skip
    messages = [*USER, {"role": "assistant", "content": "no", "refusal": None, "tool_calls": None}, *USER]
    assert served.post(CHAT, messages=messages, max_tokens=1, **defaults).status_code == 200


def test_two_limits_that_disagree_are_refused(served: Served):
    message = refused(served.post(CHAT, messages=USER, max_tokens=3, max_completion_tokens=4), param="max_tokens")
    assert "max_completion_tokens" in message


def test_top_logprobs_have_a_range(served: Served):
    for value in (-1, 21):
        reply = served.post(CHAT, messages=USER, logprobs=True, top_logprobs=value)
        assert "0..20" in refused(reply, param="top_logprobs")


BIAS: list[tuple[dict[str, Any], bool]] = [
    ({str(VOCAB): -100}, False),
    ({"191222": -100, "99999": 5}, False),
    ({str(VOCAB - 1): 5}, True),
    ({"0": -100, "1": 100}, True),
    ({"-1": 5}, False),
    ({"abc": 5}, False),
    ({"5": 101}, False),
    ({"5": -100.5}, False),
    ({"5": "5"}, False),
    ({"5": None}, False),
    ({"٥": 5}, False),
    ({"9" * 400: 5}, False),
]


@pytest.mark.parametrize("kind", ["scripted", "reference", "fast"])
def test_a_bias_outside_the_vocabulary_is_refused_and_disturbs_nobody(kind: str):
    with serving(make_engine(kind)) as served, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}
        neighbour: Future[httpx.Response] = pool.submit(lambda: served.post(**body))
        for bias, good in BIAS:
            reply = served.post(prompt="x", max_tokens=1, logit_bias=bias)
            if good:
                assert reply.status_code == 200
            else:
                refused(reply, param="logit_bias")
        assert neighbour.result(DEADLINE_S).json()["usage"]["completion_tokens"] == 100
        assert served.post(prompt="x", max_tokens=1).status_code == 200


def test_a_seed_of_minus_one_or_zero_is_a_seed_like_any_other():
    engine = ScriptedEngine()
    with serving(engine) as served:
        for seed in (-1, 0, 2**63 - 1, -(2**63)):
            assert served.post(prompt="x", seed=seed, max_tokens=1).status_code == 200
    assert [request.params.seed for request in engine.seen] == [-1, 0, 2**63 - 1, -(2**63)]


# ---- the engine fails -------------------------------------------------------------------------------------------


def two_open_and_one_waiting(served: Served, engine: ScriptedEngine) -> tuple[ThreadPoolExecutor, list[Future[Any]]]:
    engine.max_running, engine.paused = 2, True
    pool = ThreadPoolExecutor(3)
    asked: list[Future[Any]] = [
        pool.submit(lambda: served.events(prompt="x", max_tokens=9)),
        pool.submit(lambda: served.post(prompt="x", max_tokens=9)),
        pool.submit(lambda: served.post(prompt="x", max_tokens=9)),
    ]
    eventually(lambda: served.health()["open"] == 3)
    return pool, asked


@pytest.mark.parametrize("fault", ["raises", "hangs"])
def test_an_engine_that_fails_ends_its_requests_and_health_says_so(fault: str):
    engine, died = ScriptedEngine(), []
    with serving(engine, stuck_after_s=0.2, drain_s=0.1, on_death=died.append) as served:
        pool, asked = two_open_and_one_waiting(served, engine)
        if fault == "raises":
            engine.fault = RuntimeError("secret detail")
        else:
            engine.hang = threading.Event()
        streamed, *whole = [future.result(DEADLINE_S) for future in asked]
        pool.shutdown()
        assert set(json.loads(streamed[-2])["error"]) == ENVELOPE
        assert streamed[-1] == "[DONE]"
        for reply in whole:
            assert "secret" not in refused(reply, status=500)
        health = served.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "dead" if fault == "raises" else "stuck")
        for path, body in (("/v1/completions", {"prompt": "x"}), (CHAT, {"messages": USER})):
            refused(served.post(path, **body), status=503)
        assert bool(died) == (fault == "raises")
        if engine.hang is not None:
            hang, engine.hang, engine.paused = engine.hang, None, False
            hang.set()
            eventually(served.is_idle)
            assert served.http.get("/health").status_code == 200
        else:
            assert served.is_idle()
