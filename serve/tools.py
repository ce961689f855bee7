"""Tool calls: which form a model's template teaches, a guide that holds an answer to it, and the parser of an answer.

Four forms are read: Hermes and Qwen (`<tool_call>` around a JSON object with `name` and `arguments`), Qwen3-Coder (the
same mark around XML), Llama 3 (the whole answer is JSON with `name` and `parameters`) and Mistral (it is a JSON list of
calls). A template that knows none of them takes no tools, and the request is refused. An answer is parsed as it grows,
and the whole one by the same parser, so both hold the same calls. What is not a well-formed call of a tool that was
given stays text. It knows templates by their text and no engine.

Gates: gates.tools. Proof: tests/test_tools.py. Story: tools.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gates.core import CHEAP, enabled
from gates.tools import check_stream_is_whole
from serve.guide import JSON_STYLE, GuideSpec
from serve.messages import Tool
from serve.xml_calls import read_xml_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

LIST = "[TOOL_CALLS]"  # Mistral's mark; a special token in its vocabularies, so that an answer seldom shows it

Form = Literal["hermes", "llama", "mistral", "xml"]
ARGUMENTS: Mapping[Form, str] = {
    "hermes": "arguments",
    "llama": "parameters",
    "mistral": "arguments",
    "xml": "arguments",
}
FIRST: Mapping[Form, str] = {"llama": "{", "mistral": "["}  # of an answer all of which may be calls


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that an answer makes; `arguments` is JSON as OpenAI spells it, a string."""

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        """The call in a reply."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one request uses its tools: the form of a call, the names there are, and what the answer must do."""

    form: Form
    names: frozenset[str]
    named: bool = False  # the client named the function, so that calling it is no decision (`stop`, says OpenAI)
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of each function's parameters


def call_form(chat_templates: Mapping[str, str], special: Sequence[str]) -> Form | None:
    """The form that the template for tools teaches, None when it takes none or another one.

    `special` are tokens that answers never show, so a form that needs one of them cannot be read.
    """
    template = chat_templates.get("tool_use") or chat_templates.get("default") or ""
    if "tools" not in template:
        return None
    if OPEN in template:
        xml = "<function=" in template
        known = not xml or "<parameter=" in template
        return None if not known or OPEN in special or CLOSE in special else "xml" if xml else "hermes"
    if LIST in template:
        return None if "[ARGS]" in template else "mistral"  # later versions write a name, a mark and the arguments
    return "llama" if '"parameters": ' in template and "ipython" in template else None


def call_guide(tools: Sequence[Tool], form: Form, *, choice: Any, parallel: bool) -> GuideSpec | None:
    """What holds the answer to its calls; None where the model decides and nothing was promised.

    `choice` is `auto`, `required` or a function's name. `strict` promises the schema, and so does having to call.

    Raises:
        ValueError: naming the field that asks for a promise which XML calls cannot be held to.
    """
    if choice == "auto" and parallel and not any(tool.function.strict for tool in tools):
        return None
    if form == "xml":
        asked = "tool_choice" if choice != "auto" else "tools" if parallel else "parallel_tool_calls"
        raise ValueError(
            f"{asked}: this model's calls are XML, which no guide holds an answer to; auto alone is served"
        )
    functions = [tool.function for tool in tools if choice in ("auto", "required", tool.function.name)]
    bodies, rules = [], []
    for index, function in enumerate(functions):
        name = json.dumps(json.dumps(function.name))
        schema = NO_PARAMETERS if function.parameters is None else function.parameters
        free = choice == "auto" and not function.strict
        style = {"x-guidance": JSON_STYLE}
        arguments = json.dumps(({"type": "object"} if free else schema) | style)
        bodies.append(f"body{index}")
        key = json.dumps(f', "{ARGUMENTS[form]}": ')
        rules += [f'body{index}: "{{\\"name\\": " {name} {key} args{index} "}}"', f"args{index}: %json {arguments}"]
    body = "(" + " | ".join(bodies) + ")"
    starts = {"hermes": _hermes, "llama": _llama, "mistral": _mistral}
    start = starts[form](body, choice, parallel)
    return GuideSpec("lark", "\n".join([*start, *rules]), "tools")


class CallParser:
    """One per answer: text in, in pieces or at once; text without calls out, and the calls."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._text = ""  # not decided yet
        self._inside = False
        self._sought = 0  # closing marks before this character are known to stand in a string
        self._only_text = False  # a Llama or Mistral answer that did not begin as a call
        self._pushed: list[str] = []  # for the gate: what came, and what went out
        self._said: list[str] = []
        self.calls: list[ToolCall] = []

    def push(self, text: str) -> str:
        """Take text; return what is certainly none of a call. New calls are appended to `calls`."""
        self._text += text
        said = self._llama() if self._use.form in FIRST else self._hermes()
        self._pushed.append(text)
        self._said.append(said)
        return said

    def finish(self) -> str:
        """The answer has ended: what is left is a call that lacks its end, or text.

        Raises:
            GateError: the pieces so far are not what the whole answer would have been.
        """
        said = self._left()
        if len(self._pushed) > 1 and enabled(CHEAP):
            self._check("".join([*self._said, said]))
        return said

    def _check(self, text: str) -> None:
        once = CallParser(self._use)
        whole = once.push("".join(self._pushed)) + once.finish()
        told, wanted = ([(call.name, call.arguments) for call in parser.calls] for parser in (self, once))
        check_stream_is_whole(text=text, calls=told, whole_text=whole, whole_calls=wanted)

    def _left(self) -> str:
        left, self._text = self._text, ""
        if self._use.form in FIRST:
            calls = None if self._only_text else _all_calls(left, self._use)
            self.calls += calls or []
            return "" if calls else left
        if not self._inside:
            return "" if self.calls and not left.strip() else left
        call = _call_of(left.strip(), self._use)
        self.calls += [call] if call else []
        return "" if call else OPEN + left

    def _hermes(self) -> str:
        said = ""
        while True:
            if self._inside:
                end = self._end_of_call()
                if end is None:
                    return said
                before, after = self._text[:end], self._text[end + len(CLOSE) :]
                call = _call_of(before.strip(), self._use)
                self.calls += [call] if call else []
                said += "" if call else OPEN + before + CLOSE
                self._text, self._inside = after, False
            else:
                before, mark, after = self._text.partition(OPEN)
                if not mark:
                    cut = len(self._text) - _withheld(self._text)
                    said, self._text = said + self._text[:cut], self._text[cut:]
                    return said
                said += before.rstrip()  # white space around a call belongs to it
                self._text, self._inside = after, True

    def _end_of_call(self) -> int | None:
        """Where the closing mark begins; one inside a string or an argument of the call is a word like any other."""
        while (end := self._text.find(CLOSE, self._sought)) >= 0:
            if not _is_inside(self._text[:end], self._use):
                self._sought = 0
                return end
            self._sought = end + 1
        return None

    def _llama(self) -> str:
        head = self._text.lstrip()
        if not self._only_text and (head.startswith(FIRST[self._use.form]) or not head):
            return ""  # all of it may be a call, which only the end tells
        self._only_text = True
        said, self._text = self._text, ""
        return said


def _hermes(body: str, choice: Any, parallel: bool) -> list[str]:
    more = f' ("\\n{OPEN}\\n" {body} "\\n{CLOSE}")*' if parallel and choice in ("auto", "required") else ""
    first = f'"\\n" {body} "\\n{CLOSE}"{more}'
    if choice != "auto":
        return [f'start: "{OPEN}" {first}']
    return [f"start: FREE | before {first}", f'before[suffix="{OPEN}"]: /(?s:.*)/', "FREE: /(?s:.*)/"]


def _llama(body: str, choice: Any, parallel: bool) -> list[str]:
    return [f"start: {body}"] if choice != "auto" else [f"start: FREE | {body}", r"FREE: /[^{\s](?s:.*)/"]


def _mistral(body: str, choice: Any, parallel: bool) -> list[str]:
    more = f' (", " {body})*' if parallel and choice in ("auto", "required") else ""
    calls = f'"[" {body}{more} "]"'
    return [f"start: {calls}"] if choice != "auto" else [f"start: FREE | {calls}", r"FREE: /[^\[\s](?s:.*)/"]


def _is_inside(text: str, use: ToolUse) -> bool:
    """True of a call that is not over: what follows belongs to it."""
    return not text.rstrip().endswith("</function>") if use.form == "xml" else _in_string(text)


def _in_string(text: str) -> bool:
    """True of JSON that breaks off within a string."""
    try:
        json.loads(text.strip())
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def _withheld(text: str) -> int:
    """How many characters at the end may belong to a call that has not begun: white space, and a part of the mark."""
    mark = next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if text.endswith(OPEN[:n])), 0)
    rest = text[: len(text) - mark]
    return len(text) - len(rest.rstrip())


def _call_of(text: str, use: ToolUse) -> ToolCall | None:
    try:
        return _call(read_xml_call(text, use.schemas) if use.form == "xml" else json.loads(text), use)
    except (ValueError, RecursionError):
        return None


def _call(value: Any, use: ToolUse) -> ToolCall | None:
    """A call of one of the tools, or None."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in use.names:
        return None
    arguments = value.get(ARGUMENTS[use.form], value.get("arguments", {}))
    if not isinstance(arguments, dict):
        return None
    try:  # Python reads NaN and 1e999, which no JSON of a client's can hold
        spelled = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    # Mistral's templates take ids of nine letters and digits alone, and a client sends them back.
    id = uuid.uuid4().hex[:9] if use.form == "mistral" else f"call_{uuid.uuid4().hex[:24]}"
    # Half a surrogate pair is no character; as an escape it is what the model wrote.
    return ToolCall(id, name, spelled.encode("utf-8", "backslashreplace").decode("utf-8"))


def _all_calls(text: str, use: ToolUse) -> list[ToolCall] | None:
    """A whole answer as calls; None when any part of it is something else."""
    if use.form == "llama":
        return _llama_calls(text, use)
    try:
        values = json.loads(text.strip().removeprefix(LIST))
    except (ValueError, RecursionError):
        return None
    calls = [_call(value, use) for value in values] if isinstance(values, list) else []
    made = [call for call in calls if call is not None]
    return made if made and len(made) == len(calls) else None


def _llama_calls(text: str, use: ToolUse) -> list[ToolCall] | None:
    """All of a text as calls, one after the other or separated by `;`; None when any part is something else."""
    calls: list[ToolCall] = []
    decoder, left = json.JSONDecoder(), text.strip()
    while left:
        try:
            value, end = decoder.raw_decode(left)
        except (ValueError, RecursionError):
            return None
        call = _call(value, use)
        if call is None:
            return None
        calls.append(call)
        left = left[end:].strip().removeprefix(";").strip()
    return calls or None
