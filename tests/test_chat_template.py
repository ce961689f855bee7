"""Chat prompts: equal to transformers' for many dialects, exactly the BOS the template writes, refusals as one error.

Oracle: transformers' `apply_chat_template` on the same template and the same tokenizer files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from reference.chat_template import MAX_RENDERED, ChatTemplate, ChatTemplateError
from reference.tokenizer import ByteTokenizer, Tokenizer
from tests.tokenizer_samples import byte_level_backend, sentencepiece_backend

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = """{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
{{ '<|turn|>system\nBe brief.</s>\n' }}
    {% endif %}
{{ '<|turn|>' + message['role'] + '\n' + message['content'] + '</s>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"""
STRICT = """{{ bos_token }}{% if messages[0].role == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
{% if message.role == 'user' %}[INST] {{ message.content | trim }} [/INST]
{%- else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""
TOOLS = """{{- bos_token }}{%- if tools %}{{ tools | tojson(indent=2) }}{% for tool in tools %}
{{ tool | tojson }}{% endfor %}{% endif %}{%- set ns = namespace(last=none) %}
{%- for message in messages %}{% if message.tool_calls %}{% generation %}
{% for call in message.tool_calls %}<tool>{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}
{% endgeneration %}{% elif message.content is defined %}{{ message.content }}{% endif %}
{%- set ns.last = message.role %}{% if message.role == 'stop' %}{% break %}{% endif %}{% endfor %}
{{ ns.last }} {{ unknown_name }} {{ strftime_now('%Y') | length }} {{ documents is none }}"""
TEMPLATES = {"chatml": CHATML, "strict": STRICT, "tools": TOOLS, "no-bos": "{{ messages[-1].content }}"}

USER, ANSWER = {"role": "user", "content": "Is it raining?"}, {"role": "assistant", "content": " Yes & <b>no</b> "}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Brno <é>", "n": [1]}}}],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "x": "ď</s>"}}}
CONVERSATIONS = {
    "one": [USER],
    "three": [USER, ANSWER, {"role": "user", "content": "  ďábel 😀 \n</s>"}],
    "call": [USER, CALL],
    "stop": [USER, {"role": "stop", "content": "x"}, USER],
}


# --- holds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("make", [byte_level_backend, sentencepiece_backend])
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_chat_ids_equal_those_of_transformers(tmp_path: Path, name: str, make, adds_bos: bool):
    templates = {"default": TEMPLATES[name]}
    Tokenizer(make(adds_bos=adds_bos), special_tokens=SPECIAL, chat_templates=templates).save(tmp_path)
    ours, theirs = Tokenizer.from_dir(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    compared = 0
    for title, messages in CONVERSATIONS.items():
        if title in ("call", "stop") and name != "tools":
            continue
        for tools in (None, [TOOL]):
            for prompt in (True, False):
                ids = ours.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt)
                assert ids == theirs.apply_chat_template(
                    messages, tools=tools, add_generation_prompt=prompt, tokenize=True, return_dict=False
                )
                compared += 1
    assert compared >= 8


@pytest.mark.parametrize("make", [byte_level_backend, sentencepiece_backend])
def test_a_chat_has_the_bos_its_template_writes_and_no_other(make):
    # The tokenizer's post-processor adds BOS to a plain text; to a rendered chat it would be the second one.
    for template, expected in ((STRICT, 1), ("{{ messages[0].content }}", 0)):
        tokenizer = Tokenizer(make(adds_bos=True), special_tokens=SPECIAL, chat_templates={"default": template})
        ids = tokenizer.apply_chat_template([USER])
        assert ids.count(tokenizer.bos_token_id) == expected
        assert tokenizer.encode(tokenizer.render_chat([USER])).count(tokenizer.bos_token_id) == 1


def test_a_template_with_tools_is_chosen_when_there_are_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[TOOL]) == "tools"
    assert ChatTemplate("plain").render([USER], tools=[TOOL]) == "plain"


def test_templates_listed_by_name_in_the_config_are_read(tmp_path: Path):
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]}', "utf-8"
    )
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.chat_template == "A"
    assert tokenizer.render_chat([USER], tools=[TOOL]) == "B"
    (tmp_path / "chat_template.jinja").write_text("C", "utf-8")
    assert Tokenizer.from_dir(tmp_path).render_chat([USER]) == "C"  # a file of its own wins over the config


def test_null_fields_are_absent_to_a_template():
    template = ChatTemplate("{{ messages[0].content is defined }} {{ messages[0] | tojson }}")
    assert template.render([{"role": "user", "content": None}]) == 'False {"role": "user"}'


def test_names_set_inside_a_generation_block_stay_there():
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert ChatTemplate(source).render([USER]) == render_jinja_template([[USER]], chat_template=source)[0][0] == "21"


def test_byte_tokenizer_chat_is_one_bos_and_closed_turns():
    tokenizer = ByteTokenizer()
    text = tokenizer.render_chat([USER, ANSWER])
    assert text == "<bos><turn>user\nIs it raining?<eos><turn>assistant\n Yes & <b>no</b> <eos><turn>assistant\n"
    ids = tokenizer.apply_chat_template([USER, ANSWER])
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (ids.count(256), ids.count(257), ids.count(258)) == (1, 2, 3)


# --- rejects -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "system", "content": "x"}, USER], "System role not supported"),
        ([USER, USER], "roles must alternate"),
        ([USER, ANSWER, {"role": "system", "content": "x"}, USER], "roles must alternate"),
    ],
)
def test_a_template_that_refuses_a_conversation_is_heard(messages, words: str):
    with pytest.raises(ChatTemplateError, match=f"chat template: .*{words}"):
        ChatTemplate(STRICT).render(messages, special_tokens=SPECIAL)


def test_a_model_without_a_template_says_so():
    tokenizer = Tokenizer(byte_level_backend(), special_tokens=SPECIAL)
    assert tokenizer.chat_template is None
    with pytest.raises(ChatTemplateError, match="this model has none"):
        tokenizer.apply_chat_template([USER])
    with pytest.raises(ChatTemplateError, match=r"none is named 'default' among \['rag'\]"):
        ChatTemplate({"rag": "x"}).render([USER])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages[0].absent.deeper }}", "has no attribute 'absent'"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.__class__.__init__.__globals__ }}", "unsafe"),
        ("{% include 'other' %}", "no loader"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ 'x' * 10 ** 7 }}", "larger than"),
        ("{{ [1] * 10000000 }}", "larger than"),
        ("{{ 10 ** (10 ** 10) }}", "larger than"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", f"longer than {MAX_RENDERED}"),
    ],
)
def test_a_broken_or_greedy_template_is_one_error(source: str, words: str):
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages: the conversation is empty"),
        (["hello"], r"messages\[0\]: str is not an object"),
        ([USER, {"role": "user", "content": [{"text": object()}]}], r"messages\[1\]\.content\[0\]\.text: object"),
        ([{"role": "user", "content": b"x"}], r"messages\[0\]\.content: bytes is not a JSON value"),
    ],
)
def test_messages_that_are_not_json_are_named(messages, words: str):
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate("{{ messages }}").render(messages)


def test_a_template_cannot_change_the_caller_s_messages():
    messages = [{"role": "user", "content": ["a"]}]
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ messages[0].content.append('b') }}").render(messages)
    assert messages == [{"role": "user", "content": ["a"]}]


# --- any order -----------------------------------------------------------------------------------------------------

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "stop"]), "content": words})


@given(messages=st.lists(message, min_size=1, max_size=6), prompt=st.booleans(), tools=st.booleans())
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_any_conversation_renders_or_is_refused_as_by_transformers(name: str, messages, prompt: bool, tools: bool):
    given_tools = [TOOL] if tools else None

    def theirs() -> str:
        return render_jinja_template(
            [messages], tools=given_tools, chat_template=TEMPLATES[name], add_generation_prompt=prompt, **SPECIAL
        )[0][0]

    def ours() -> str:
        return ChatTemplate(TEMPLATES[name]).render(
            messages, tools=given_tools, add_generation_prompt=prompt, special_tokens=SPECIAL
        )

    assert outcome(ours).removeprefix("chat template: ") == outcome(theirs)


def outcome(render: Callable[[], str]) -> str:
    """The rendered text, or the words of the refusal."""
    try:
        return render()
    except (ChatTemplateError, jinja2.TemplateError) as refusal:
        return str(refusal)
