"""What `/metrics` says is what happened, and nothing is left over when nobody asks for anything any more."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fast.engine import Engine
from gates import GateError
from gates.metrics import check_answers_add_up, check_usage_in_range
from reference.request import Event
from reference.weights import random_weights
from serve.access import Finished
from serve.metrics import GAPS, Metrics
from serve.timeline import Timeline
from tests.harness import tiny_config
from tests.server import BOS, EOS, MODEL, VOCAB, ScriptedEngine, Served, eventually, make_engine, says, serving

DASHBOARD = Path(__file__).resolve().parent.parent / "docs" / "dashboards" / "nanoserve.json"
P = "nanoserve:"
STEP_S = 0.02
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(served: Served) -> Samples:
    """(name, labels without the model's) -> value."""
    reply = served.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    found: Samples = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[P + name, tuple(sorted(labels.items()))]


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["scripted", "reference", "fast"])
def test_every_token_and_end_is_counted_once(kind: str):
    with serving(make_engine(kind)) as served:
        for n, prompt in ((1, "abc"), (3, "hi")):
            reply = served.post(prompt=prompt, max_tokens=5, n=n, ignore_eos=True).json()
            assert reply["usage"]["completion_tokens"] == 5 * n
        samples = scrape(served)
    assert value(samples, "request_success_total", finished_reason="length") == 4
    assert value(samples, "request_submitted_total") == 4
    assert value(samples, "generation_tokens_total") == 20
    assert value(samples, "prompt_tokens_total") == (1 + 3) + 3 * (1 + 2)  # a BOS each
    assert value(samples, "request_generation_tokens_sum") == 20
    for name, count in {
        "time_to_first_token_seconds": 4,
        "inter_token_latency_seconds": 16,
        "e2e_request_latency_seconds": 4,
        "request_queue_time_seconds": 4,
        "request_prompt_tokens": 4,
    }.items():
        assert value(samples, f"{name}_count") == count, name
    assert samples["http_requests_total", (("handler", "/v1/completions"), ("method", "POST"), ("status", "200"))] == 2


def test_an_answer_that_a_stop_string_ends_is_a_stop():
    with serving(ScriptedEngine(says("one two three"))) as served:
        assert served.post(prompt="x", max_tokens=50, stop="two").json()["choices"][0]["finish_reason"] == "stop"
        assert value(scrape(served), "request_success_total", finished_reason="stop") == 1


class Slow:
    """An engine whose steps take a while, so that the busy state can be seen from outside."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Event]:
        time.sleep(STEP_S)
        return self._engine.step()


def test_the_time_of_a_prompt_in_chunks_is_prefill_and_not_queue():
    seen: list[Finished] = []
    config = tiny_config(vocab_size=VOCAB, bos_token_id=BOS, eos_token_ids=(EOS,))
    engine = Engine.build(config, random_weights(config, seed=3), max_batch_size=4, chunk_tokens=8, max_model_len=64)
    with serving(Slow(engine), sinks=[seen.append]) as served:
        assert served.post(prompt=list(range(40)), max_tokens=2).status_code == 200  # five steps of eight tokens
    line = seen[0].answers[0]
    assert line.queue_s is not None
    assert line.prefill_s is not None
    assert line.prefill_s >= 5 * STEP_S
    assert line.ttft_s == pytest.approx(line.queue_s + line.prefill_s)


def test_gauges_return_to_zero_when_all_requests_are_aborted_at_once():
    engine = Slow(make_engine("fast"))
    with serving(engine) as served, httpx.Client(base_url=served.url, timeout=20, verify=False) as leaving:
        body = {"model": MODEL, "prompt": "abc", "n": 40, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with leaving.stream("POST", "/v1/completions", json=body):
            eventually(lambda: value(scrape(served), "num_requests_running") == 32)
            busy = scrape(served)
        eventually(lambda: value(scrape(served), "num_requests_running") == 0)
        idle = scrape(served)
    assert value(busy, "num_requests_waiting") == 8
    assert 0 < value(busy, "kv_cache_usage_perc") <= 1
    assert value(idle, "num_requests_waiting") == value(idle, "kv_cache_usage_perc") == 0
    assert value(idle, "kv_cache_free_blocks") == value(idle, "kv_cache_blocks")
    assert value(idle, "request_submitted_total") == 40
    assert value(idle, "request_success_total", finished_reason="abort") == 40
    for gate in ("metrics.answers_add_up", "metrics.usage_in_range", "stream.ends_once"):
        checks, failures = (value(idle, f"gate_{what}_total", gate=gate) for what in ("checks", "failures"))
        assert checks > value(busy, "gate_checks_total", gate=gate) - (gate == "stream.ends_once")
        assert failures == value(busy, "gate_failures_total", gate=gate)


def test_a_dead_engine_shows_no_load_and_is_down():
    engine = ScriptedEngine()
    with serving(engine) as served:
        engine.fault = RuntimeError("out of order")
        assert served.post(prompt="x", max_tokens=5).status_code == 500
        samples = scrape(served)
    assert value(samples, "engine_up") == value(samples, "num_requests_running") == 0
    assert value(samples, "request_success_total", finished_reason="error") == 1


def test_each_application_counts_for_itself():
    with serving(ScriptedEngine(says("a"))) as one, serving(ScriptedEngine(says("a"))) as other:
        assert one.post(prompt="x").status_code == 200
        assert value(scrape(one), "request_submitted_total") == 1
        assert value(scrape(other), "request_submitted_total") == 0


def test_every_query_of_the_dashboard_names_a_metric_that_exists():
    with serving(make_engine("fast")) as served:
        assert served.post(prompt="x", max_tokens=3).status_code == 200
        names = {name for name, _ in scrape(served)}
    board = json.loads(DASHBOARD.read_text("utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [variable["definition"] for variable in board["templating"]["list"] if "definition" in variable]
    named = {word for query in queries for word in re.findall(r"nanoserve:\w+|\b(?:http|process)_\w+", query)}
    assert len(queries) > 30
    assert named <= names, sorted(named - names)
    # The engine's own figures are on it, not only the usual ones.
    assert {P + "decode_steps_replayed_total", P + "gate_failures_total", P + "row_moves_total"} <= named


def test_a_timeline_adds_up():
    line = Timeline("a", 3, 10.0)
    assert line.queue_s is line.ttft_s is line.e2e_s is line.prefill_s is line.decode_s is None
    line.start(11.0)
    assert (line.token(13.0), line.token(14.5)) == (None, 1.5)
    line.start(14.0)  # a row again, after a preemption
    line.end(15.0, "length")
    assert (line.queue_s, line.ttft_s, line.prefill_s, line.decode_s, line.e2e_s) == (1.0, 3.0, 2.0, 1.5, 5.0)


@given(gaps=st.lists(st.one_of(st.sampled_from([None, 0.0, 1e-9, 1e9, *GAPS]), st.floats(0, 7)), max_size=30))
def test_tokens_are_counted_as_the_library_counts(gaps: list[float | None]):
    library = CollectorRegistry()
    count = Counter(f"{P}generation_tokens", "Tokens generated.", ["model_name"], registry=library).labels("m")
    name, text = f"{P}inter_token_latency_seconds", "Between two tokens of an answer."
    seconds = Histogram(name, text, ["model_name"], buckets=GAPS, registry=library).labels("m")
    ours = Metrics(model_name="m", stats=ScriptedEngine().stats, num_open=lambda: 0, up=lambda: True)
    for gap_s in gaps:
        ours.token(Timeline("r", 1, 0.0), gap_s)
        count.inc()
        if gap_s is not None:
            seconds.observe(gap_s)

    def shown(registry: CollectorRegistry) -> list[str]:
        lines = generate_latest(registry).decode().splitlines()
        return [
            line for line in lines if ("generation_tokens" in line or "inter_token" in line) and "_created" not in line
        ]

    assert [line for line in shown(ours.registry) if "request_" not in line] == shown(library)


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_gate_rejects_an_answer_that_ended_twice():
    check_answers_add_up(submitted=3, ended=2, open_answers=1)
    with pytest.raises(GateError, match=r"metrics.answers_add_up: 2 answers submitted, 3 ended and 0 open"):
        check_answers_add_up(submitted=2, ended=3, open_answers=0)


def test_gate_rejects_usage_that_an_idle_engine_still_shows():
    check_usage_in_range(used_blocks=0, num_blocks=8, running=0)
    with pytest.raises(GateError, match=r"7 blocks in use, 0 requests run"):
        check_usage_in_range(used_blocks=7, num_blocks=8, running=0)
    with pytest.raises(GateError, match=r"9 blocks in use, the pool has 8"):
        check_usage_in_range(used_blocks=9, num_blocks=8, running=2)


def test_a_broken_count_is_told_and_hides_no_other():
    metrics = Metrics(model_name="m", stats=lambda: {"kv_tokens": 0, "kv_capacity_tokens": 1}, num_open=int, up=bool)
    metrics.submitted(Timeline("lost", 1, 0.0))  # neither ended nor open
    text = metrics.render().decode()
    failures = re.search(r'gate_failures_total\{gate="metrics.answers_add_up".*\} (\d+)', text)
    assert failures is not None
    assert float(failures[1]) >= 1
