"""OpenTelemetry spans of finished requests, for whoever installed the extra `otel`.

A request becomes one span with a child an answer and phase (queue, prefill, decode), all made when it is over from
the times that its timelines hold: a running request pays nothing. A client's `traceparent` makes it part of the
client's trace. Attribute names are OpenTelemetry's for generative AI. Prompts and answers are never recorded.

Proof: tests/test_spans.py. Story: metrics.
"""

from __future__ import annotations

import time
from typing import Any

from serve.access import Finished, Sink
from serve.options import UsageError
from serve.timeline import Timeline

MISSING = "--otlp-traces-endpoint: needs the extra: pip install 'nanoserve[otel]'"


def otlp_sink(endpoint: str) -> Sink:
    """A sink that sends spans to an OTLP collector (`http://host:4318/v1/traces`) from a thread of its own.

    Raises:
        UsageError: the extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise UsageError(MISSING) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "nanoserve"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return SpanSink(provider.get_tracer("nanoserve"))


class SpanSink:
    """Turns finished requests that had answers into spans of one tracer."""

    def __init__(self, tracer: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()
        self._epoch_s = time.time() - time.monotonic()  # what turns a timeline's seconds into seconds since 1970

    def __call__(self, finished: Finished) -> None:
        """Make the spans of one request."""
        from opentelemetry.trace import set_span_in_context

        if not finished.answers:
            return
        headers = {} if finished.traceparent is None else {"traceparent": finished.traceparent}
        span = self._tracer.start_span(
            f"{finished.method} {finished.path}",
            context=self._propagator.extract(headers),
            start_time=self._nanoseconds(finished.began_s),
            attributes=self._attributes(finished),
        )
        inside = set_span_in_context(span)
        for answer in finished.answers:
            self._phases(answer, inside)
        span.end(self._nanoseconds(finished.ended_s))

    def _phases(self, answer: Timeline, context: Any) -> None:
        phases = (
            ("queue", answer.submitted_s, answer.started_s or answer.ended_s),
            ("prefill", answer.started_s, answer.first_token_s),
            ("decode", answer.first_token_s, answer.last_token_s),
        )
        for name, began, ended in phases:
            if began is not None and ended is not None:
                attributes = {"gen_ai.response.id": answer.request_id}
                start = self._nanoseconds(began)
                self._tracer.start_span(name, context=context, start_time=start, attributes=attributes).end(
                    self._nanoseconds(ended)
                )

    def _attributes(self, finished: Finished) -> dict[str, Any]:
        first = finished.answers[0]
        attributes: dict[str, Any] = {
            "http.request.method": finished.method,
            "url.path": finished.path,
            "http.response.status_code": finished.status,
            "gen_ai.request.model": finished.model,
            "gen_ai.response.id": first.request_id,
            "gen_ai.response.finish_reasons": [answer.finish_reason or "open" for answer in finished.answers],
            "gen_ai.usage.input_tokens": first.num_prompt_tokens,
            "gen_ai.usage.output_tokens": sum(answer.num_tokens for answer in finished.answers),
            "nanoserve.request_id": finished.request_id,
        }
        times = {"time_in_queue": first.queue_s, "time_to_first_token": first.ttft_s, "e2e": first.e2e_s}
        return attributes | {f"gen_ai.latency.{name}": value for name, value in times.items() if value is not None}

    def _nanoseconds(self, monotonic_s: float) -> int:
        return int((self._epoch_s + monotonic_s) * 1e9)
