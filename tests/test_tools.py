"""Tool calls: asked for through the template, read out of the answer, whole and streamed alike, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gates import GateError
from gates.tools import check_stream_is_whole
from reference.tokenizer import Tokenizer
from serve.tools import CallParser, ToolUse, call_form
from serve.xml_calls import read_xml_call
from tests.server import MODEL, ScriptedEngine, Served, make_engine, piece_tokenizer, says, serving

CHAT = "/v1/chat/completions"
TURNS = "{% for m in messages %}<turn>{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}"
HERMES = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}" + TURNS
    + "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}<turn>assistant:"
)  # fmt: skip
LLAMA = HERMES.replace("<tool_call>", '{"name": "", "parameters": ').replace("</tool_call>", "ipython")
XML = HERMES.replace("<tool_call>{{ c.function | tojson }}", "<tool_call>\n<function=a>\n<parameter=b>\n</function>\n")
MISTRAL = HERMES.replace("<tool_call>", "[TOOL_CALLS] [").replace("</tool_call>", "]")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Brno", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
STRICT: Any = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
NO_SCHEMA: Any = {"name": "f", "parameters": {"type": "no"}, "strict": True}
ASK: Any = [{"role": "user", "content": "Will it rain?"}]
CALL = '{"name": "weather", "arguments": {"city": "Brno", "days": 2}}'
TIME = '{"name": "clock", "arguments": {}}'
CALLED = ("weather", {"city": "Brno", "days": 2})
FORECAST = "<function=weather>\n<parameter=city>\nBrno\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"


def tokenizer_of(template: str | None) -> Tokenizer:
    return piece_tokenizer([b"<tool_call>", b"</tool_call>"], template=template)


def speaking(text: str, template: str = HERMES) -> tuple[ScriptedEngine, Tokenizer]:
    """An engine whose answer is this text, over the vocabulary of a model with that template."""
    tokenizer = tokenizer_of(template)
    assert tokenizer.eos_token_id is not None
    engine = ScriptedEngine(says(text, then=[tokenizer.eos_token_id]), vocab_size=tokenizer.vocab_size)
    engine.eos, engine.max_model_len = tokenizer.eos_token_id, 2000
    return engine, tokenizer


Answer = tuple[str, list[tuple[str, Any]], str]


def whole(running: Served, **body: Any) -> Answer:
    """Text, calls and finish reason of an answer that is not streamed."""
    [choice] = running.openai.chat.completions.create(model=MODEL, messages=ASK, **body).choices
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]
    assert len({call.id for call in choice.message.tool_calls or ()}) == len(calls)
    return choice.message.content or "", calls, choice.finish_reason


def streamed(running: Served, **body: Any) -> Answer:
    """The same of its stream, put together as a client does."""
    text, calls, reason = "", {}, ""
    for chunk in running.openai.chat.completions.create(model=MODEL, messages=ASK, stream=True, **body):
        [choice] = chunk.choices
        text += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
    assert list(calls) == list(range(len(calls)))
    return text, [(name, json.loads(arguments)) for name, arguments in calls.values()], reason


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "template", "expected"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", HERMES, ("", [CALLED], "tool_calls")),
        (
            f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{TIME}\n</tool_call>\n",
            HERMES,
            ("Let me see.", [CALLED, ("clock", {})], "tool_calls"),
        ),
        (f"<tool_call>{CALL}", HERMES, ("", [CALLED], "tool_calls")),
        ("It is <tool or not>\n", HERMES, ("It is <tool or not>\n", [], "stop")),
        ("<tool_call>{oops}</tool_call>", HERMES, ("<tool_call>{oops}</tool_call>", [], "stop")),
        ('<tool_call>{"name": "rm"}</tool_call>', HERMES, ('<tool_call>{"name": "rm"}</tool_call>', [], "stop")),
        (CALL.replace("arguments", "parameters"), LLAMA, ("", [CALLED], "tool_calls")),
        (f" {CALL}; {TIME}\n", LLAMA, ("", [CALLED, ("clock", {})], "tool_calls")),
        ("No {braces} here", LLAMA, ("No {braces} here", [], "stop")),
        ('{"name": "rm"}', LLAMA, ('{"name": "rm"}', [], "stop")),
        (f"[{CALL}, {TIME}]", MISTRAL, ("", [CALLED, ("clock", {})], "tool_calls")),
        (f"[TOOL_CALLS] [{CALL}]", MISTRAL, ("", [CALLED], "tool_calls")),
        (f'[{CALL}, {{"name": "rm"}}]', MISTRAL, (f'[{CALL}, {{"name": "rm"}}]', [], "stop")),
        (f"[{CALL}", MISTRAL, (f"[{CALL}", [], "stop")),
        ("See [1] and [2]", MISTRAL, ("See [1] and [2]", [], "stop")),
        (
            f"Look:\n<tool_call>\n{FORECAST}\n</tool_call>\n<tool_call><function=clock></function></tool_call>",
            XML,
            ("Look:", [CALLED, ("clock", {})], "tool_calls"),
        ),
        (f"<tool_call>{FORECAST}", XML, ("", [CALLED], "tool_calls")),
        (
            "<tool_call><function=clock><parameter=a>1</function></tool_call>",
            XML,
            ("<tool_call><function=clock><parameter=a>1</function></tool_call>", [], "stop"),
        ),
        (f"<tool_call>{CALL}</tool_call>", XML, (f"<tool_call>{CALL}</tool_call>", [], "stop")),
    ],
)
def test_calls_are_read_out_of_the_answer(said: str, template: str, expected: Answer):
    with serving(*speaking(said, template)) as running:
        for body in ({"tools": [WEATHER, CLOCK]}, {"tools": [WEATHER, CLOCK], "tool_choice": "auto", "logprobs": True}):
            assert whole(running, **body) == streamed(running, **body) == expected


@pytest.mark.parametrize(
    "field", ['"name": []', '"name": "clock", "arguments": {"at": NaN}', '"name": "clock", "arguments": {"at": 1e999}']
)
def test_what_no_json_of_a_clients_can_hold_is_no_call(field: str):
    body = "{" + field + "}"
    marked = f"<tool_call>{body}</tool_call>"
    for form, text in (
        ("hermes", marked),
        ("llama", body.replace("arguments", "parameters")),
        ("mistral", f"[{body}]"),
    ):
        parser = CallParser(ToolUse(form, frozenset({"clock"})))  # type: ignore[arg-type]
        assert (parser.push(text) + parser.finish(), parser.calls) == (text, [])


def test_half_a_surrogate_pair_in_a_call_is_spelled_as_the_model_did():
    parser = CallParser(ToolUse("llama", frozenset({"clock"})))
    assert parser.push('{"name": "clock", "parameters": {"at": "\\ud83d é"}}') + parser.finish() == ""
    assert parser.calls[0].arguments.encode("utf-8") == '{"at": "\\ud83d é"}'.encode()


def test_an_enum_that_is_none_makes_an_argument_no_less_readable():
    told = {"clock": {"properties": {"at": {"enum": 5}}}}
    call = read_xml_call("<function=clock>\n<parameter=at>\nx\n</parameter>\n</function>", told)
    assert call["arguments"] == {"at": "x"}


def test_the_closing_mark_inside_a_string_ends_no_call():
    arguments = {"city": "a </tool_call> b", "days": "</tool_call>"}
    said = f"<tool_call>{json.dumps({'name': 'weather', 'arguments': arguments})}</tool_call>"
    with serving(*speaking(said)) as running:
        for read in (whole, streamed):
            assert read(running, tools=[WEATHER]) == ("", [("weather", arguments)], "tool_calls")


def test_an_argument_in_xml_is_read_by_its_schema():
    kinds: dict[str, Any] = {"s": "string", "i": "integer", "o": "object", "a": "array", "b": "boolean"}
    kinds |= {"u": ["string", "null"], "n": ["integer", "string"]}
    tool = {"name": "f", "parameters": {"properties": {name: {"type": kind} for name, kind in kinds.items()}}}
    given = {
        "s": "5",
        "i": "5",
        "o": '{"x": [1]}',
        "a": "[true]",
        "b": "false",
        "u": "null",
        "n": "7",
        "free": "a <b>\nc",
    }
    marks = "\n".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in given.items())
    wanted = {"s": "5", "i": 5, "o": {"x": [1]}, "a": [True], "b": False, "u": None, "n": 7, "free": "a <b>\nc"}
    with serving(*speaking(f"<tool_call>\n<function=f>\n{marks}\n</function>\n</tool_call>", XML)) as running:
        for read in (whole, streamed):
            assert read(running, tools=[{"type": "function", "function": tool}]) == ("", [("f", wanted)], "tool_calls")
    for text, schema, value in (
        ("NaN", {}, "NaN"),
        ("true", {"type": ["string", "integer"]}, "true"),
        ("2", {"enum": ["2"]}, "2"),
    ):
        call = f"<function=f><parameter=x>{text}</parameter></function>"
        assert read_xml_call(call, {"f": {"properties": {"x": schema}}})["arguments"] == {"x": value}


NESTED = {
    "half a pair": '{"x": "\\ud83d"}',
    "NaN": '{"x": NaN}',
    "twice": '{"x": 1, "x": 2}',
    "deep": '{"x":' * 400 + "1" + "}" * 400,
}


@pytest.mark.parametrize("arguments", NESTED.values(), ids=NESTED.keys())
def test_json_in_a_string_is_read_as_strictly_as_the_body(arguments: str):
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    turns = [*ASK, {"role": "assistant", "tool_calls": [call]}, *ASK]
    with serving(*speaking("x")) as running:
        for path, body in (
            (CHAT, {"messages": turns}),
            ("/tokenize", {"messages": turns}),
            (CHAT, {"messages": ASK, "structured_outputs": {"json": arguments}}),
        ):
            reply = running.post(path, **body)
            field = "messages" if body["messages"] == turns else "structured_outputs"
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text


@pytest.mark.parametrize("depth", [90, 110, 900])
def test_a_body_has_a_depth_that_templates_and_grammars_can_follow(depth: int):
    parameters: dict[str, Any] = {}
    for _ in range(depth):
        parameters = {"properties": {}, "x": parameters}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with serving(*speaking("x")) as running:
        for path in (CHAT, "/tokenize"):
            reply = running.post(path, messages=ASK, tools=[tool])
            told = "length limit" if depth < 100 else "nested more than 100 levels deep"
            assert reply.status_code == 200 or told in reply.json()["error"]["message"]
            assert reply.status_code == 400 or depth < 100


def test_a_cut_call_is_no_call_and_its_length_is_told():
    with serving(*speaking(f"<tool_call>{CALL}</tool_call>")) as running:
        for answer in (whole, streamed):
            assert answer(running, tools=[WEATHER], max_tokens=20) == (f"<tool_call>{CALL}"[:20], [], "length")


def test_without_a_choice_to_call_the_answer_is_text():
    engine, tokenizer = speaking(f"<tool_call>{CALL}</tool_call>")
    with serving(engine, tokenizer) as running:
        expected = (f"<tool_call>{CALL}</tool_call>", [], "stop")
        assert whole(running) == whole(running, tools=[WEATHER], tool_choice="none") == expected
    # Tools that may not be called are not in the prompt either.
    assert engine.seen[0].prompt_ids == engine.seen[1].prompt_ids


def test_tools_and_earlier_calls_reach_the_template_as_objects():
    engine, tokenizer = speaking("ok")
    turns = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Brno"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]  # fmt: skip
    with serving(engine, tokenizer) as running:
        assert running.post(CHAT, messages=turns, tools=[STRICT]).status_code == 200
        shown = running.http.post("/tokenize", json={"messages": turns, "tools": [STRICT]}).json()["tokens"]
    prompt = tokenizer.decode(engine.seen[0].prompt_ids, skip_special_tokens=False)
    assert prompt == (
        '{"type": "function", "function": {"name": "weather", "description": "d", "parameters": '
        + json.dumps(PARAMETERS) + "}}<turn>user:Will it rain?<turn>assistant:"
        '<tool_call>{"name": "weather", "arguments": {"city": "Brno"}}</tool_call><turn>tool:rain<turn>assistant:'
    )  # fmt: skip
    assert tuple(shown) == engine.seen[0].prompt_ids


def tiny(kind: str) -> Any:
    """A real engine over bytes and two more tokens, none of which its random weights understand."""
    from dataclasses import replace

    from fast.engine import Engine as FastEngine
    from reference.engine import Engine
    from reference.weights import random_weights

    made = make_engine("reference")
    tokenizer = tokenizer_of(HERMES)
    config = replace(made.config, vocab_size=tokenizer.vocab_size, eos_token_ids=(tokenizer.eos_token_id,))
    config = replace(config, max_positions=1024)
    weights = random_weights(config, seed=4)
    return Engine(config, weights) if kind == "reference" else FastEngine.build(config, weights, max_batch_size=4)


CHOICES: list[dict[str, Any]] = [
    {"tools": [WEATHER, CLOCK], "tool_choice": "required"},
    {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {"tools": [WEATHER, CLOCK], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [STRICT], "logit_bias": {"256": 100}, "parallel_tool_calls": False},
]


def test_an_answer_that_must_call_does_and_both_engines_make_the_same_calls():
    def answers(kind: str, template: str) -> list[Answer]:
        with serving(tiny(kind), tokenizer_of(template)) as running:
            return [whole(running, **choice, seed=n, max_tokens=400) for n, choice in enumerate(CHOICES)]

    fast = answers("fast", HERMES)
    assert fast == answers("reference", HERMES)
    for (text, calls, reason), choice in zip(fast, CHOICES, strict=True):
        assert text == ""
        assert calls
        assert len(calls) == 1 or choice.get("parallel_tool_calls") is None
        for name, arguments in calls:
            if name == "weather":
                assert arguments["city"] in ("Brno", "Oslo")
                assert 1 <= arguments["days"] <= 9
            else:
                assert (name, arguments) == ("clock", {})
        assert reason == ("stop" if isinstance(choice.get("tool_choice"), dict) else "tool_calls")
    for template in (LLAMA, MISTRAL):
        text, calls, _ = answers("fast", template)[1]
        assert (text, [name for name, _ in calls]) == ("", ["weather"])


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("tool_choice", {"tool_choice": "auto"}),
        ("tool_choice", {"tools": [], "tool_choice": "required"}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "no"}}}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": "weather"}),
        ("parallel_tool_calls", {"parallel_tool_calls": True}),
        ("tools", {"tools": [WEATHER, WEATHER]}),
        ("tools", {"tools": [{"type": "web_search"}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "two words"}}]}),
        ("tools", {"tools": [{"type": "function", "function": NO_SCHEMA}]}),
        ("response_format", {"tools": [WEATHER], "response_format": {"type": "json_object"}}),
        ("messages", {"messages": [{"role": "assistant"}]}),
        ("messages", {"messages": [{"role": "user", "content": None}]}),
        ("messages", {"messages": [{"role": "user", "content": "x", "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": "{}"}}]}]}),
        ("messages", {"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": "[]"}}]}]}),
    ],
)  # fmt: skip
def test_tools_that_make_no_sense_are_refused_by_name(field: str, body: dict[str, Any]):
    with serving(*speaking("x")) as running:
        reply = running.post(CHAT, **({"messages": ASK} | body))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text
    assert reply.json()["error"]["message"].startswith(field)


def test_a_template_without_tools_refuses_them():
    called = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
    with serving(ScriptedEngine()) as running:
        for field, body in (("tools", {"tools": [WEATHER]}), ("messages", {"messages": [called]})):
            reply = running.post(CHAT, **({"messages": ASK} | body))
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
            assert "chat template" in reply.json()["error"]["message"]
        assert running.post(CHAT, messages=ASK, tools=[WEATHER], tool_choice="none", max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("template", "special", "form"),
    [
        (HERMES, (), "hermes"),
        (LLAMA, (), "llama"),
        (HERMES, ("<tool_call>",), None),
        (HERMES.replace("tool_call>", "function>"), (), None),
        (HERMES + "<function=example_function_name>", (), None),
        (XML, (), "xml"),
        (XML, ("</tool_call>",), None),
        (MISTRAL, ("[TOOL_CALLS]",), "mistral"),
        (MISTRAL + "[ARGS]", (), None),
        ("{{ messages }}", (), None),
    ],
)
def test_the_form_of_a_call_is_told_by_the_template(template: str, special: tuple[str, ...], form: str | None):
    assert call_form({"default": template}, special) == form
    assert call_form({"default": "x", "tool_use": template}, special) == form


def test_what_xml_calls_cannot_promise_is_refused_by_name():
    named = {"type": "function", "function": {"name": "weather"}}
    with serving(*speaking("x", XML)) as running:
        for field, body in (
            ("tool_choice", {"tools": [WEATHER], "tool_choice": "required"}),
            ("tool_choice", {"tools": [WEATHER], "tool_choice": named}),
            ("tools", {"tools": [STRICT]}),
            ("parallel_tool_calls", {"tools": [WEATHER], "parallel_tool_calls": False}),
        ):
            reply = running.post(CHAT, messages=ASK, **body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text


def test_gate_rejects_a_parser_that_lets_half_a_mark_go_by(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("serve.tools._withheld", lambda text: 0)
    parser = CallParser(ToolUse("hermes", frozenset({"weather"})))
    parser.push("<tool")
    parser.push(f"_call>{CALL}</tool_call>")
    with pytest.raises(
        GateError, match=r"tools\.stream_is_whole: 0 calls and \d+ characters of text in pieces, 1 and 0"
    ):
        parser.finish()


def test_gate_rejects_another_call_or_another_text():
    held = {"text": "a", "calls": [("f", "{}")], "whole_text": "a", "whole_calls": [("f", "{}")]}
    check_stream_is_whole(**held)
    with pytest.raises(GateError, match=r"call 0 is \('f', '{}'\) in pieces, \('f', '{\"x\": 1}'\) read at once"):
        check_stream_is_whole(**held | {"whole_calls": [("f", '{"x": 1}')]})
    with pytest.raises(GateError, match=r"1 calls and 1 characters of text in pieces, 1 and 3 read at once"):
        check_stream_is_whole(**held | {"whole_text": "a\n\n"})


# ---- any order --------------------------------------------------------------------------------------------------

PARTS = [
    "<tool_call>",
    "</tool_call>",
    '"',
    '{"name": "weather", "arguments": {"city": "',
    CALL,
    TIME,
    "<tool",
    "call>",
    " ",
    "\n",
    "text",
    "{",
    "}",
    ";",
    '{"name": 1}',
    "[TOOL_CALLS]",
    "[",
    "]",
    ", ",
    FORECAST,
    "<function=clock>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
]
FORMS: list[Any] = ["hermes", "llama", "mistral", "xml"]


@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=9), cuts=st.lists(st.integers(1, 9)), form=st.sampled_from(FORMS)
)
def test_how_an_answer_is_cut_changes_nothing(parts: list[str], cuts: list[int], form: Any):
    use = ToolUse(form, frozenset(["weather", "clock"]))
    text = "".join(parts)
    once, pieces = CallParser(use), CallParser(use)
    expected = once.push(text) + once.finish()
    got, left = "", text
    for size in (cuts or [1]) * (len(text) + 1):
        got += pieces.push(left[:size])
        left = left[size:]
    got += pieces.finish()
    assert (got, [(c.name, c.arguments) for c in pieces.calls]) == (
        expected,
        [(c.name, c.arguments) for c in once.calls],
    )
    if not once.calls:
        assert "".join(got.split()) == "".join(text.split())
