"""The OpenAPI document tells of every route, field, range and status, and the server keeps to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import schemathesis
import schemathesis.specs.openapi.checks as promised
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from reference.request import Request, SamplingParams
from serve.openapi import RANGES
from serve.protocol import ChatBody, CompletionBody
from tests.server import MODEL, ScriptedEngine, Served, eventually, serving

KEPT = [
    not_a_server_error,
    promised.status_code_conformance,
    promised.content_type_conformance,
    promised.response_schema_conformance,
    promised.negative_data_rejection,
]
POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
GETS = ["/v1/models", "/v1/models/{model_id}", "/health", "/ready", "/version", "/metrics"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedEngine()) as running:
        yield running
        eventually(running.is_idle)


# ---- holds ------------------------------------------------------------------------------------------------------


def test_the_document_holds_every_field_that_is_read(served: Served):
    document = served.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for body in (CompletionBody, ChatBody):
        assert set(schemas[body.__name__]["properties"]) == set(body.model_fields)
    for path in POSTS:
        words = document["paths"][path]["post"]
        reference = words["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert reference.rsplit("/", 1)[1] in schemas
        assert {"200", "400", "401", "413", "429", "503"} <= set(words["responses"])
    assert set(document["paths"]) >= {*POSTS, *GETS}


def test_nothing_promises_a_422(served: Served):
    document = served.http.get("/openapi.json").json()
    statuses = {code for path in document["paths"].values() for words in path.values() for code in words["responses"]}
    assert "422" not in statuses


@pytest.mark.parametrize("field", sorted(set(RANGES) - {"max_completion_tokens", "top_logprobs", "top_k"}))
def test_a_documented_range_is_the_range(field: str):
    low, high = RANGES[field]
    limit = {"max_tokens": 10**6} if field == "min_tokens" else {}
    make = partial(Request, (1,)) if field == "priority" else partial(SamplingParams, **limit)
    for value in (low if field != "top_p" else 1e-9, high if high is not None else 10**6):
        make(**{field: value})
    for value in (low - 1, *([] if high is None else [high + 1])):
        with pytest.raises(ValueError, match=field):
            make(**{field: value})


# ---- any order --------------------------------------------------------------------------------------------------


def made_up(served: Served, path: str, mode: GenerationMode, examples: int) -> Counter[int]:
    """Send requests made up from the document; every reply keeps to it. How often each status came."""
    schema = schemathesis.openapi.from_dict(served.http.get("/openapi.json").json())
    [operation] = [found.ok() for found in schema.get_all_operations() if found.ok().path == path]
    statuses: Counter[int] = Counter()

    @seed(7)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            # Nobody makes up the name of the model, a tool choice that fits, or a schema that can be compiled.
            case.body |= {"model": MODEL}
            for name in ("tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs"):
                case.body.pop(name, None)
        reply = case.call(base_url=served.url)
        statuses[reply.status_code] += 1
        case.validate_response(reply, checks=KEPT)

    send()
    return statuses


@pytest.mark.parametrize("path", POSTS)
def test_made_up_bodies_are_answered_as_documented(served: Served, path: str):
    assert set(made_up(served, path, GenerationMode.POSITIVE, 20)) <= {200, 400}
    assert set(made_up(served, path, GenerationMode.NEGATIVE, 20)) <= {400, 404}


@pytest.mark.parametrize("path", GETS)
def test_routes_without_a_body_answer_as_documented(served: Served, path: str):
    assert set(made_up(served, path, GenerationMode.POSITIVE, 5)) == {404 if "{" in path else 200}
