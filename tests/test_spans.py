"""A finished request becomes one span with its phases below it, inside the client's own trace."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from serve.boot import record_sinks
from serve.cli import build_parser
from serve.options import UsageError
from serve.spans import SpanSink
from tests.server import MODEL, ScriptedEngine, eventually, says, serving

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def spans() -> Any:
    """(tracer, exporter) of a provider that keeps its spans in memory."""
    pytest.importorskip("opentelemetry.sdk", reason="runs with the extra: pip install 'nanoserve[otel]'")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test"), exporter


# ---- holds ------------------------------------------------------------------------------------------------------


def test_a_request_is_one_span_with_its_phases_inside_the_clients_trace(spans: Any):
    tracer, exporter = spans
    with serving(ScriptedEngine(says("hello")), sinks=[SpanSink(tracer)]) as served:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"model": MODEL, "prompt": "secret", "max_tokens": 4, "n": 2}
        assert served.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        served.http.get("/health")
        eventually(lambda: len(exporter.get_finished_spans()) == 7)
    *children, root = exporter.get_finished_spans()
    assert root.name == "POST /v1/completions"
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
    assert root.attributes["gen_ai.usage.input_tokens"] == 7  # a BOS and six letters
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    assert root.attributes["gen_ai.request.model"] == MODEL
    assert [span.name for span in children] == ["queue", "prefill", "decode"] * 2
    for span in children:
        assert span.parent.span_id == root.context.span_id
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time
    assert "secret" not in str([span.attributes for span in (*children, root)])


def test_a_request_without_a_trace_starts_one(spans: Any):
    tracer, exporter = spans
    with serving(ScriptedEngine(says("a")), sinks=[SpanSink(tracer)]) as served:
        headers = {"traceparent": "not one"}
        body = {"model": MODEL, "prompt": "x"}
        assert served.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        eventually(lambda: len(exporter.get_finished_spans()) == 4)
    assert exporter.get_finished_spans()[-1].parent is None


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_spans_without_the_extra_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    args = build_parser().parse_args(["serve", "--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces"])
    with pytest.raises(UsageError, match=r"--otlp-traces-endpoint: needs the extra.*nanoserve\[otel\]"):
        record_sinks(args)
