"""The OpenAPI document's share of bodies that handlers read themselves, and of the answers that every route may give.

FastAPI documents what it parses; here the handlers parse, since a body is JSON whatever its content-type says and an
error has OpenAI's envelope. It knows the bodies' schemas and no handler.

Proof: tests/test_openapi.py. Story: app.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from reference.request import MAX_LOGPROBS, MAX_N, MAX_PRIORITY, SEED_RANGE

ENVELOPE = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
REASONS = {
    "400": "a field cannot be honoured; the message names it",
    "401": "the server asks for a key",
    "404": "no such model",
    "408": "the body took too long to come",
    "413": "the body is too large",
    "429": "too many answers are open; Retry-After says when to come back",
    "500": "the engine or the server failed",
    "503": "the engine takes no requests now",
    "504": "the request took longer than the server allows",
}

# What a number may be, field by field; `SamplingParams` and the bodies check it, the document says it.
RANGES: dict[str, tuple[float, float | None]] = {
    "max_tokens": (0, None),
    "max_completion_tokens": (0, None),
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (-1, None),
    "n": (1, MAX_N),
    "seed": SEED_RANGE,
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "min_tokens": (0, None),
    "top_logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "priority": (-MAX_PRIORITY, MAX_PRIORITY),
}


def takes(body: type[BaseModel], *, streams: bool = False) -> dict[str, Any]:
    """The words for a route with this body: what it takes, and every status it may answer with."""
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    answers: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "the answer", "content": answers}, **failures(*REASONS)},
    }


def gives(*statuses: str, text: bool = False) -> dict[str, Any]:
    """The words for a route without a body: 200 with an object (or plain text), and these failures."""
    kind = {"text/plain": {"schema": {"type": "string"}}}
    content = kind if text else {"application/json": {"schema": {"type": "object"}}}
    return {"responses": {"200": {"description": "the answer", "content": content}, **failures("401", *statuses)}}


def failures(*statuses: str) -> dict[str, Any]:
    """The failures of a route, each in the envelope."""
    content = {"application/json": {"schema": ENVELOPE}}
    return {status: {"description": REASONS[status], "content": content} for status in statuses}


def document_bodies(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Add the schemas that `takes` refers to, and take out the 422 that FastAPI promises and nobody gives."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        modes: Any = [(body, "validation") for body in bodies]
        _, schemas = models_json_schema(modes, ref_template="#/components/schemas/{model}")
        for schema in schemas["$defs"].values():
            _say_ranges(schema.get("properties", {}))
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _say_ranges(properties: dict[str, Any]) -> None:
    """Add the ranges of numeric fields to their schemas."""
    for name, (low, high) in RANGES.items():
        for kind in properties.get(name, {}).get("anyOf", ()):
            if kind.get("type") in ("integer", "number"):
                kind["minimum"] = low
                if high is not None:
                    kind["maximum"] = high
                if name == "top_p":
                    kind["exclusiveMinimum"] = kind.pop("minimum")
