"""The OpenAPI document tells of every route, every field and every status."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from serve.protocol import ChatBody, CompletionBody
from tests.server import ScriptedEngine, Served, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedEngine()) as running:
        yield running


# ---- holds ------------------------------------------------------------------------------------------------------


def test_the_document_holds_every_field_that_is_read(served: Served):
    document = served.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for body in (CompletionBody, ChatBody):
        assert set(schemas[body.__name__]["properties"]) == set(body.model_fields)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        words = document["paths"][path]["post"]
        reference = words["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert reference.rsplit("/", 1)[1] in schemas
        assert {"200", "400", "401", "413", "429", "503"} <= set(words["responses"])


def test_nothing_promises_a_422(served: Served):
    document = served.http.get("/openapi.json").json()
    statuses: list[Any] = [
        code for path in document["paths"].values() for op in path.values() for code in op["responses"]
    ]
    assert "422" not in statuses
