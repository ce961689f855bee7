"""The parts of a conversation as a client sends them: turns, tools, and the base class that refuses what it drops.

A `Body` has JSON's own types, no unknown field, and a table of known fields that are not honoured. A turn becomes what
a chat template reads: text parts joined, a call's arguments an object, and nothing that was not given. This module
knows no template and no tokenizer.

Proof: tests/test_http_cases.py, tests/test_tools.py. Story: app.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from serve.nested import parse


def checked_content(value: Any) -> str | None:
    """A message's text. Text parts are joined with a newline, as vLLM and llama.cpp do for templates that take text."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("not a string or a non-empty list of text parts")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str) or set(part) != {"type", "text"}:
            what = f"part {index} of type {str(kind)[:40]!r}" if kind != "text" else f"part {index}"
            raise ValueError(f'{what} is not {{"type": "text", "text": "..."}}, the only kind of part supported')
        texts.append(part["text"])
    return "\n".join(texts)


def checked_arguments(value: Any) -> dict[str, Any]:
    """A call's arguments, an object that OpenAI spells as a string."""
    arguments = parse(value) if isinstance(value, str) else None
    if not isinstance(arguments, dict):
        raise ValueError("not a string that holds a JSON object")
    return arguments


class Body(BaseModel):
    """What all bodies share: JSON types as they are, no unknown field, and the table of known fields not honoured."""

    model_config = ConfigDict(strict=True, extra="forbid")
    # Field to the values that change nothing, so that a client may spell out a default.
    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def refuse_what_is_not_supported(cls, data: Any) -> Any:
        """Take harmless values out and refuse the others by name."""
        if not isinstance(data, dict):
            return data
        for name, harmless in cls.not_supported.items():
            # JSON's 0 is not its false, though Python takes them for equal.
            if name in data and not any(type(data[name]) is type(value) and data[name] == value for value in harmless):
                raise ValueError(f"{name}: not supported by this server; leave it out")
        return {name: value for name, value in data.items() if name not in cls.not_supported}


class Function(Body):
    """What may be called. `parameters` is a JSON schema; none means no parameter."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as a chat template reads it; `strict` is a word between client and server."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The one function that is to be called."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Body):
    """A function that was called."""

    name: str
    arguments: Annotated[dict[str, Any], PlainValidator(checked_arguments, json_schema_input_type=str)]


class Call(Body):
    """A call of an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One turn of a conversation."""

    not_supported = {
        "function_call": (None,),
        "audio": (None,),
        "refusal": (None,),
        "annotations": (None, []),
    }
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None, PlainValidator(checked_content, json_schema_input_type=str | list[dict[str, str]] | None)
    ] = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def check_something_is_said(self) -> Message:
        """Only an assistant calls, and whoever does not call has a text."""
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls: only an assistant calls tools, not role {self.role!r}")
        if self.content is None and not self.tool_calls:
            raise ValueError("content: missing; only a message with tool_calls may go without")
        return self

    def for_template(self) -> dict[str, Any]:
        """The turn as a chat template reads it: fields not given are not there."""
        return self.model_dump(exclude_none=True)
