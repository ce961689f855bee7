"""One tool call as Qwen3-Coder writes it: `<function=NAME>`, and in it a `<parameter=NAME>` for each argument.

The marks say nothing of types, so an argument is read by the schema of its parameter: text where a string is asked for,
else JSON, and text again where that is none. It knows no answer and no stream.

Proof: tests/test_tools.py. Story: tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

FUNCTION = re.compile(r"<function=([^>\s]+)>(.*)</function>", re.DOTALL)
PARAMETER = re.compile(
    r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL
)  # a line break belongs to each mark
PYTHON: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def read_xml_call(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`name` and `arguments` of a call; `schemas` holds each function's parameters as JSON schema.

    Raises:
        ValueError: the text is not one call and nothing else, or gives an argument twice.
    """
    call = FUNCTION.fullmatch(text)
    if call is None:
        raise ValueError("not a function between its marks")
    name, rest = call.groups()
    properties = schemas.get(name, {}).get("properties", {})
    arguments: dict[str, Any] = {}
    while rest.strip():
        one = PARAMETER.match(rest)
        if one is None or one[1] in arguments:
            raise ValueError("not a parameter between its marks, or one given twice")
        schema = properties.get(one[1], {}) if isinstance(properties, Mapping) else {}
        arguments[one[1]] = _value(one[2], schema if isinstance(schema, Mapping) else {})
        rest = rest[one.end() :]
    return {"name": name, "arguments": arguments}


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    named = schema.get("type", [])
    kinds = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    words = schema.get("enum")
    if kinds == ["string"] or (isinstance(words, list) and text in words):
        return text
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return text if "string" in kinds and not any(_is_a(value, kind) for kind in kinds) else value


def _is_a(value: Any, kind: Any) -> bool:
    """True of a value of another JSON type than string."""
    return isinstance(value, PYTHON.get(str(kind), ())) and (not isinstance(value, bool) or kind == "boolean")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
