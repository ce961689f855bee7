"""`response_format` and `structured_outputs`: what shape an answer is to have, checked and turned into a guide's spec.

The first is OpenAI's (`text`, `json_object`, `json_schema`), the second vLLM's (`json`, `regex`, `choice`, `grammar`,
`json_object`). A schema holds whether or not it says `strict`: there is no weaker way to honour one. Whether it can be
compiled is the affair of `serve.guide`.

Proof: tests/test_guide.py. Story: guide.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator

from serve.guide import GuideSpec, choice_spec, schema_spec
from serve.nested import parse

MAX_CHOICES = 1000
ANY_OBJECT = {"type": "object"}


def checked_format(value: Any) -> GuideSpec | None:
    """OpenAI's `response_format`; None for plain text."""
    field = "response_format"
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("text", "json_object") and set(value) == {"type"}:
        return None if kind == "text" else schema_spec(ANY_OBJECT, field=field)
    if kind != "json_schema" or set(value) != {"type", "json_schema"}:
        raise ValueError('not {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": ...}')
    return _named_schema(value["json_schema"], field)


def checked_structure(value: Any) -> GuideSpec | None:
    """vLLM's `structured_outputs`: exactly one of its fields, null ones left out."""
    field = "structured_outputs"
    if value is None:
        return None
    given = {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else {}
    if len(given) != 1:
        raise ValueError("not an object with exactly one of json, regex, choice, grammar and json_object")
    [(kind, item)] = given.items()
    if kind in ("regex", "grammar") and isinstance(item, str):
        return GuideSpec(kind, item, field)
    if kind == "json" and isinstance(item, dict | str):
        return schema_spec(_parsed(item), field=field)
    if kind == "json_object" and item is True:
        return schema_spec(ANY_OBJECT, field=field)
    if kind == "choice" and isinstance(item, list) and item and all(isinstance(text, str) and text for text in item):
        if len(item) > MAX_CHOICES:
            raise ValueError(f"choice has {len(item)} strings, at most {MAX_CHOICES} are allowed")
        return choice_spec(item, field=field)
    raise ValueError(f"{kind[:40]!r} is none of json, regex, choice, grammar and json_object, or has the wrong type")


Format = Annotated[GuideSpec | None, PlainValidator(checked_format, json_schema_input_type=dict[str, Any] | None)]
Structure = Annotated[GuideSpec | None, PlainValidator(checked_structure, json_schema_input_type=dict[str, Any] | None)]


def _named_schema(value: Any, field: str) -> GuideSpec:
    """OpenAI wraps a schema with a name, and a description for the model that this server's models never see."""
    known = {"name": str, "schema": dict, "strict": bool, "description": str}
    if not isinstance(value, dict) or set(value) - set(known) or not isinstance(value.get("name"), str):
        raise ValueError("json_schema is not an object with name and schema (and strict, description)")
    for name, kind in known.items():
        if value.get(name) is not None and not isinstance(value[name], kind):
            raise ValueError(f"json_schema.{name} is not of type {kind.__name__}")
    schema = value.get("schema")
    return schema_spec(ANY_OBJECT if schema is None else schema, field=field)


def _parsed(schema: dict[str, Any] | str) -> Any:
    if isinstance(schema, dict):
        return schema
    try:
        return parse(schema)
    except ValueError as error:
        raise ValueError(f"json is refused: {error}") from None
