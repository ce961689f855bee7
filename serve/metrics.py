"""`/metrics` in Prometheus's text format: the engine's own counts, and what each answer's timeline says.

Names are the field's (vLLM's, with this engine's prefix), so that a dashboard moves over by its prefix. What the
engine counts is read from its `stats()` when somebody asks, so a gauge cannot keep a value that is no longer true;
what answers do is counted as they do it. Each application has a registry of its own. It knows no engine by name.

Gates: gates.metrics. Proof: tests/test_metrics.py. Story: metrics.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from gates.core import GateError, counters
from gates.metrics import check_answers_add_up, check_usage_in_range
from serve.timeline import Timeline

log = logging.getLogger("nanoserve")

PREFIX = "nanoserve:"
CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


@dataclass(frozen=True, slots=True)
class Series:
    """One number of the engine's `stats()` and what it is called outside; an engine without it does not show it."""

    stat: str
    name: str
    help: str


GAUGES = (
    Series("running", "num_requests_running", "Requests that have a row."),
    Series("waiting", "num_requests_waiting", "Requests that wait for a row."),
    Series("kv_tokens", "kv_cache_tokens", "Tokens whose K/V is stored."),
    Series("kv_capacity_tokens", "kv_cache_capacity_tokens", "Tokens the K/V pool can hold."),
    Series("free_blocks", "kv_cache_free_blocks", "Blocks of the K/V pool that nobody owns."),
    Series("num_blocks", "kv_cache_blocks", "Blocks of the K/V pool."),
    Series("row_padding_share", "row_padding_share", "Share of decoded rows that were padding, since the start."),
    Series("cell_padding_share", "cell_padding_share", "Share of addressing cells that were padding, since the start."),
)
COUNTERS = (
    Series("preemptions", "num_preemptions", "Requests that lost their row and were computed again."),
    Series("prefix_query_tokens", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    Series("prefix_hit_tokens", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    Series("steps", "engine_steps", "Engine steps."),
    Series("prefill_tokens", "prefill_tokens", "Tokens computed by prefills, preempted requests' again."),
    Series("decode_steps", "decode_steps", "Decode steps."),
    Series("decode_tokens", "decode_tokens", "Tokens computed by decode steps."),
    Series("replayed", "decode_steps_replayed", "Decode steps that replayed a recording."),
    Series("steps_ahead", "engine_steps_ahead", "Steps launched before the tokens of the step before were known."),
    Series("dropped_tokens", "dropped_tokens", "Tokens computed after the end of their answers, and told to nobody."),
    Series("captures", "captures", "Decode shapes recorded."),
    Series("captures_after_ready", "captures_after_ready", "Decode shapes recorded after start-up; to stay 0."),
    Series("kernel_compiles_after_ready", "kernel_compiles_after_ready", "Kernels compiled after start-up; 0."),
    Series("moves", "row_moves", "Rows relabelled so that the running ones stay a prefix."),
    Series("rechecked", "invariance_samples", "Answers computed again, alone, and found to have the same bits."),
)


class Metrics:
    """One application's registry. As an `Observer` it lives on the event loop's thread."""

    def __init__(
        self,
        *,
        model_name: str,
        stats: Callable[[], Mapping[str, Any]],
        num_open: Callable[[], int],
        up: Callable[[], bool],
    ) -> None:
        """`stats` are the engine's, `num_open` the server's open answers, `up` whether requests are taken."""
        self.registry = CollectorRegistry()
        self._num_open = num_open
        self._labels = {"model_name": model_name}
        self.registry.register(_EngineCounts(self._labels, stats=stats, up=up))
        ProcessCollector(registry=self.registry)
        self._submitted = self._ended = 0
        self._answers = self._counter("request_submitted", "Answers put in the queue.")
        self._success = Counter(
            f"{PREFIX}request_success",
            "Answers that ended, by reason: stop, length, abort (the client left), refused, error.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of the answers that got a token.")
        self._ttft = self._histogram("time_to_first_token_seconds", "From submission to the first token.", SECONDS)
        self._tokens = _TokenCounts(self._labels)
        self.registry.register(self._tokens)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From submission to the end.", SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "From submission to a row.", SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "From a row to the first token.", SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.", SECONDS)
        self._prompts = self._histogram("request_prompt_tokens", "Prompt tokens of an answer.", TOKENS)
        self._lengths = self._histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self._http = Counter("http_requests", "HTTP answers.", ["method", "handler", "status"], registry=self.registry)

    def submitted(self, timeline: Timeline) -> None:
        """An answer was put in the queue."""
        self._submitted += 1
        self._answers.inc()

    def token(self, timeline: Timeline, gap_s: float | None) -> None:
        """It got a token."""
        self._tokens.add(gap_s)
        if gap_s is not None:
            return
        self._prompt.inc(timeline.num_prompt_tokens)
        for histogram, seconds in ((self._ttft, timeline.ttft_s), (self._queue, timeline.queue_s)):
            histogram.observe(seconds or 0.0)

    def ended(self, timeline: Timeline) -> None:
        """It ended; what never had a row has no length and no latency worth a place in the histograms."""
        if timeline.num_tokens == 0 and timeline.finish_reason == "length":  # its prompt alone was asked for
            self._prompt.inc(timeline.num_prompt_tokens)
        self._ended += 1
        self._success.labels(self._labels["model_name"], timeline.finish_reason).inc()
        if timeline.num_tokens == 0:
            return
        self._e2e.observe(timeline.e2e_s or 0.0)
        self._prefill.observe(timeline.prefill_s or 0.0)
        self._decode.observe(timeline.decode_s or 0.0)
        self._prompts.observe(timeline.num_prompt_tokens)
        self._lengths.observe(timeline.num_tokens)

    def http(self, *, method: str, handler: str, status: int) -> None:
        """One HTTP answer; `handler` is the route's template, so that there are as many as routes."""
        self._http.labels(method, handler, str(status)).inc()

    def render(self) -> bytes:
        """All series as text. A broken count is told as `gate_failures_total` and does not hide the others."""
        try:
            check_answers_add_up(submitted=self._submitted, ended=self._ended, open_answers=self._num_open())
        except GateError as broken:
            log.error("%s", broken)
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name"], registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return made.labels(**self._labels)


class _TokenCounts(Collector):
    """Tokens, and the seconds between them. A token is the one thing counted so often that how it is counted shows."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._num_tokens = 0
        self._counts = [0] * (len(GAPS) + 1)  # gaps up to each bound, and beyond the last
        self._seconds = 0.0

    def add(self, gap_s: float | None) -> None:
        """One token, and how long after the one before; None for an answer's first."""
        self._num_tokens += 1
        if gap_s is not None:
            self._counts[bisect_left(GAPS, gap_s)] += 1
            self._seconds += gap_s

    def describe(self) -> list[Metric]:
        """Both series, whose names do not depend on what was counted."""
        return list(self.collect())

    def collect(self) -> Iterator[Metric]:
        """Both series."""
        names, values = list(self._labels), list(self._labels.values())
        tokens = CounterMetricFamily(f"{PREFIX}generation_tokens", "Tokens generated.", labels=names)
        tokens.add_metric(values, self._num_tokens)
        yield tokens
        name, text = f"{PREFIX}inter_token_latency_seconds", "Between two tokens of an answer."
        gaps = HistogramMetricFamily(name, text, labels=names)
        bounds = [*map(str, GAPS), "+Inf"]
        gaps.add_metric(values, list(zip(bounds, accumulate(self._counts), strict=True)), self._seconds)
        yield gaps


class _EngineCounts(Collector):
    """The engine's counts and the process's gates, read when somebody asks."""

    def __init__(
        self, labels: Mapping[str, str], *, stats: Callable[[], Mapping[str, Any]], up: Callable[[], bool]
    ) -> None:
        self._labels = dict(labels)
        self._stats = stats
        self._up = up

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not ask for counts to know the names, and the engine has none before it runs."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every series the engine's `stats()` has, and those made from them."""
        stats = self._stats()
        for series in GAUGES:
            if series.stat in stats:
                yield self._gauge(series.name, series.help, stats[series.stat])
        for series in COUNTERS:
            if series.stat in stats:
                yield self._count(series.name, series.help, {"": stats[series.stat]})
        yield self._gauge("kv_cache_usage_perc", "Share of the K/V pool in use, 0 to 1.", _usage(stats))
        yield self._gauge("engine_up", "1 while requests are taken.", int(self._up()))
        if "decode_steps" in stats:
            share = stats["replayed"] / stats["decode_steps"] if stats["decode_steps"] else 1.0
            yield self._gauge("replay_share", "Share of decode steps that replayed a recording.", share)
            text = "Decode steps without a recording, by reason."
            yield self._count("decode_steps_eager", text, stats["eager"], label="reason")
        if "step_waits" in stats:
            text = "Steps whose tokens were waited for with nothing launched, by reason; with overlap alone."
            yield self._count("engine_step_waits", text, stats["step_waits"], label="reason")
        checks = {name: count.checks for name, count in counters().items()}
        yield self._count("gate_checks", "Gate checks in this process.", checks, label="gate")
        failures = {name: count.failures for name, count in counters().items()}
        yield self._count("gate_failures", "Gates that found a broken fact, in this process.", failures, label="gate")

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _count(self, name: str, text: str, values: Mapping[str, float], *, label: str | None = None) -> Metric:
        """One counter, or one for each value of `label`."""
        family = CounterMetricFamily(PREFIX + name, text, labels=[*self._labels, *([label] if label else [])])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *([key] if label else [])], value)
        return family


def _usage(stats: Mapping[str, Any]) -> float:
    """Blocks in use of all blocks; for an engine without blocks, tokens of all tokens."""
    if "num_blocks" not in stats:
        return stats["kv_tokens"] / max(1, stats["kv_capacity_tokens"])
    used = stats["num_blocks"] - stats["free_blocks"]
    try:
        check_usage_in_range(used_blocks=used, num_blocks=stats["num_blocks"], running=stats["running"])
    except GateError as broken:
        log.error("%s", broken)
    return used / stats["num_blocks"]
