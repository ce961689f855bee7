"""The overhead bench compares like with like: the same tokens and texts from both arms, in turn, in one run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from reference.tokenizer import ByteTokenizer
from serve.bench_http import Round, check_same, compare, over_http, step_by_hand
from serve.cli import main
from tests.server import ScriptedEngine, make_engine, serving

PROMPTS = [[65, 66, 67], [68], [69, 70]]


# ---- holds ------------------------------------------------------------------------------------------------------


def test_both_arms_give_the_same_tokens_and_texts():
    with serving(make_engine("fast")) as served:
        http = over_http(served.url, PROMPTS, tokens=9)
    alone = step_by_hand(make_engine("fast"), ByteTokenizer(), PROMPTS, tokens=9)
    check_same(alone, http)
    assert alone.num_tokens == http.num_tokens == 27
    assert min(alone.seconds, alone.cpu_seconds, http.seconds, http.client_cpu_seconds) > 0


def test_a_ratio_is_of_neighbours_in_time():
    engine = [Round(1.0, 0.5, 100, ()), Round(10.0, 0.5, 100, ()), Round(2.0, 0.5, 100, ())]
    http = [Round(1.25, 1.0, 100, ()), Round(12.5, 1.0, 100, ()), Round(2.5, 1.0, 100, ())]
    figures = compare(engine, http)
    assert (figures["throughput_ratio"], figures["best_ratio"], figures["cpu_ratio"]) == (0.8, 0.8, 0.5)
    assert (figures["engine_tokens_per_s"], figures["http_tokens_per_s"]) == (50.0, 40.0)
    assert figures["http_cpu_ms_per_token"] == 10.0


def test_the_command_prints_one_object(capsys: pytest.CaptureFixture[str]):
    small = ["--model", "tiny-random", "--threads", "1", "--tokens", "8", "--rounds", "1"]
    assert main(["bench", "http", "--streams", "3", *small, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["streams"] for one in report["results"]] == [3]
    assert all(one["throughput_ratio"] > 0 < one["http_cpu_ms_per_token"] for one in report["results"])
    assert report["machine"]["threads"] == 1


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_arms_that_differ_are_refused():
    one = Round(1.0, 1.0, 4, ("ab", "cd"))
    with pytest.raises(RuntimeError, match="the engine gave 4 tokens, the server 5"):
        check_same(one, replace(one, num_tokens=5))
    with pytest.raises(RuntimeError, match=r"answer 1 of 2 is another over HTTP \(1 differ\)"):
        check_same(one, replace(one, texts=("ab", "cx")))


def test_a_refused_request_ends_the_measurement():
    with serving(ScriptedEngine(), max_open=2) as served, pytest.raises(RuntimeError, match="status 429: "):
        over_http(served.url, PROMPTS, tokens=9)


def test_a_stream_that_breaks_off_ends_the_measurement():
    engine = ScriptedEngine(step_s=0.01)
    engine.fault = RuntimeError("boom")
    with serving(engine) as served, pytest.raises(RuntimeError, match="the engine stopped after an error"):
        over_http(served.url, PROMPTS, tokens=9)
