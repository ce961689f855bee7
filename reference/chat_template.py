"""A conversation as one prompt text: the model's own jinja2 template, in a sandbox.

Templates come with models, so they are programs of strangers: they run in jinja2's immutable sandbox, see plain
JSON values only, and may neither multiply text without end nor write more than `MAX_RENDERED` characters. Every
way a template can fail is a `ChatTemplateError` with the template's own words. It knows no tokenizer; the
dialect (globals, filters, `{% generation %}`) is the one of Hugging Face transformers.

Proof: tests/test_chat_template.py. Story: tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

MAX_RENDERED = 16_000_000  # characters: beyond any context length, within any memory
MAX_PRODUCT = 1_000_000  # elements of `text * n` and `list * n`, bits of `a ** b`


class ChatTemplateError(ValueError):
    """The conversation cannot be rendered; the message carries the template's own message where there is one."""


class ChatTemplate:
    """One template, or several by name (`default`, `tool_use`), compiled when first used."""

    def __init__(self, sources: str | Mapping[str, str]) -> None:
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        special_tokens: Mapping[str, str] | None = None,
    ) -> str:
        """The prompt text of a conversation; `special_tokens` are `bos_token`, `eos_token` and their like.

        Raises:
            ChatTemplateError: no messages, a value that is not JSON, a broken template, or the template's refusal.
        """
        if not messages:
            raise ChatTemplateError("messages: the conversation is empty; at least one message is needed")
        values = {
            **(special_tokens or {}),
            "messages": [_message(message, index) for index, message in enumerate(messages)],
            "tools": None if tools is None else _plain(list(tools), "tools"),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return _run(self._source(tools is not None), values)

    def _source(self, has_tools: bool) -> str:
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in self.sources:
                return self.sources[name]
        raise ChatTemplateError(f"chat template: none is named 'default' among {sorted(self.sources)}")


def _message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message as plain JSON. Absent and null mean the same to the API, but `null` would render as "None"."""
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"messages[{index}]: {type(message).__name__} is not an object with role and content")
    return {key: _plain(value, f"messages[{index}].{key}") for key, value in message.items() if value is not None}


def _plain(value: Any, where: str) -> Any:
    """Rebuild a value from exact JSON types, so a template never holds an object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, str):
        return str.__str__(value)
    raise ChatTemplateError(f"{where}: {type(value).__name__} is not a JSON value")


def _run(source: str, values: Mapping[str, Any]) -> str:
    pieces: list[str] = []
    size = 0
    try:
        for piece in _compiled(source).generate(values):
            size += len(piece)
            if size > MAX_RENDERED:
                raise SecurityError(f"the rendered text is longer than {MAX_RENDERED} characters")
            pieces.append(piece)
    except Exception as error:  # a template can raise anything Python can; all of it is the template's refusal
        raise ChatTemplateError(f"chat template: {error}") from error
    return "".join(pieces)


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox that also bounds `*` and `**`, the two operators with unbounded results."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        integers = isinstance(left, int) and isinstance(right, int)
        if operator == "*":
            size = max(_repeated(left, right), _repeated(right, left))
        else:
            size = right * left.bit_length() if integers else 0
        if size > MAX_PRODUCT:
            raise SecurityError(f"the result of {operator!r} is larger than {MAX_PRODUCT} elements")
        return super().call_binop(context, operator, left, right)


def _repeated(value: Any, count: Any) -> int:
    """Elements of `value * count` when that repeats a sequence; a product of numbers is never large."""
    return len(value) * count if isinstance(value, (str, list, tuple)) and isinstance(count, int) else 0


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks training text; to a prompt it is its own body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: jinja2's own filter escapes `<`, `>` and `&` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
