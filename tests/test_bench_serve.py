"""The load tool measures what it says: an open loop, the same for every arm, each arm held to what it promises."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gates import GateError
from serve.bench_serve import (
    ARMS,
    Ask,
    Slo,
    check_equal_answers,
    hold_to_replay,
    load_dataset,
    measure,
    summary,
    table,
)
from serve.cli import main
from serve.client import Sample, fetch, stream
from serve.launch import launched
from serve.options import UsageError
from tests.server import MODEL, ScriptedEngine, make_engine, says, serving

SLO = Slo(ttft_s=0.5, itl_s=0.1)


def sample(*times: float, due: float = 0.0, tokens: int | None = None) -> Sample:
    """A request due at `due` whose events came at `times`."""
    count = len(times) if tokens is None else tokens
    return Sample(due, due, list(times), times[-1], 200, "x" * count, count)


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """`bench serve --json` over the tiny model."""
    small = ["--model", "tiny-random", "--max-batch-size", "8", "--max-model-len", "128", "--threads", "1"]
    assert main(["bench", "serve", "--json", *small, *arguments]) == 0
    return json.loads(capsys.readouterr().out)


# ---- holds ------------------------------------------------------------------------------------------------------


def test_the_graph_arm_replays_every_decode_step_and_its_control_does_not(capsys: pytest.CaptureFixture[str]):
    load = ("--rates", "500", "--requests", "16", "--gens", "4,8,16,32", "--prompt-tokens", "4")
    graph, control = run(*load, "--arms", "graph,no-compact", capsys=capsys)["results"]
    hold_to_replay(graph)
    assert (graph["replay_share"], graph["eager_reasons"]) == (1.0, {})
    assert graph["completed"] == control["completed"] == 16
    assert graph["output_tokens"] == control["output_tokens"] > 16
    assert graph["moves"] > 0 == control["moves"]
    with pytest.raises(GateError, match=r"gate warmup.arm_replayed_every_step: .* scattered rows"):
        hold_to_replay(control)


def test_a_running_server_is_measured_from_outside():
    asks = [Ask((65, 66), 3), Ask("ab", 5)]
    with serving(make_engine("fast")) as served:
        result = asyncio.run(measure(served.url, asks, rate=1000.0, seed=1, slo=Slo(60.0, 60.0)))
        assert served.is_idle()
    assert (result["completed"], result["output_tokens"], result["failed"]) == (2, 8, [])
    assert result["good_share"] == 1.0
    assert result["ttft_ms"]["p50"] > 0
    assert "graph" not in table([{"arm": "scripted", **result}])


def test_a_latency_counts_from_when_the_request_was_due():
    late = sample(1.0, 1.5, due=0.25)
    late.sent_s = 0.9  # the client itself was late; the user still waited
    assert (late.ttft_s, late.gaps_s, late.tpot_s) == (0.75, [0.5], 0.5)


def test_goodput_counts_only_what_met_both_promises():
    fast, slow_start, slow_tokens = sample(0.1, 0.15), sample(0.6, 0.61), sample(0.1, 0.3)
    failed = Sample(0.0, status=429, error="queue full")
    result = summary([fast, slow_start, slow_tokens, failed], seconds=2.0, slo=SLO)
    assert (result["completed"], result["requests_per_s"], result["goodput_per_s"]) == (3, 1.5, 0.5)
    assert (result["good_share"], result["failed"], result["output_tokens"]) == (0.25, ["queue full"], 6)
    assert result["ttft_ms"] == {"mean": 266.667, "p50": 100.0, "p90": 600.0, "p99": 600.0}
    assert summary([failed], seconds=1.0, slo=SLO)["itl_ms"]["p99"] == 0.0


@pytest.mark.parametrize("seed", [0, 7])
def test_the_same_seed_gives_the_same_load(seed: int):
    one, again = (load_dataset("synthetic", seed=seed, count=9, gens=(4, 8), prompt=3) for _ in range(2))
    assert one == again != load_dataset("synthetic", seed=seed + 1, count=9, gens=(4, 8), prompt=3)
    assert {len(ask.prompt) for ask in one} == {3}
    assert {ask.max_tokens for ask in one} == {4, 8}


def test_a_file_is_read_line_by_line_and_begun_again(tmp_path: Path):
    file = tmp_path / "asks.jsonl"
    file.write_text('{"prompt": "hi", "max_tokens": 5}\n\n{"prompt": [1, 2]}\n', "utf-8")
    asks = load_dataset(str(file), seed=0, count=3, gens=(7, 9), prompt=1)
    assert asks == [Ask("hi", 5), Ask((1, 2), 9), Ask("hi", 5)]


def test_every_arm_is_a_way_to_start_the_server():
    from serve.cli import build_parser

    for arm in ARMS.values():
        build_parser().parse_args(["serve", *arm.flags])


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no line"),
        ("{", "line 1 is no request"),
        ('{"prompt": "a"}\n{"text": "a"}', "line 2 is no request"),
        ('{"prompt": ""}', "neither text nor a list"),
        ('{"prompt": [1, "a"]}', "neither text nor a list"),
        ("[1]", "line 1 is no request"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, text: str, said: str):
    file = tmp_path / "asks.jsonl"
    file.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=said):
        load_dataset(str(file), seed=0, count=3, gens=(7,), prompt=1)


def test_bad_arguments_exit_with_two(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "serve", "--arms", "grpah"]) == 2
    assert "--arms: 'grpah' is not one of eager, graph" in capsys.readouterr().err
    assert main(["bench", "serve", "--dataset", "/nowhere.jsonl"]) == 2
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--rates", "1,0"])
    assert "'1,0' is not a list of rates above 0" in capsys.readouterr().err


def test_a_server_that_does_not_start_says_why():
    with pytest.raises(RuntimeError, match=r"did not start: .*--no-such-flag"), launched(["--no-such-flag"]):
        pass


def test_unequal_answers_of_equal_arms_are_an_error():
    boot = {"backend": {"schedule_invariant": True, "name": "kernels"}}
    boots = {"a": boot, "b": boot, "plain": {"backend": {"schedule_invariant": False}}}
    results = [{"arm": arm, "rate": 1.0, "failed": [], "answers": [text]} for arm, text in (("a", "x"), ("plain", "y"))]
    check_equal_answers(results, boots)
    results = [{"arm": arm, "rate": 1.0, "failed": [], "answers": [text]} for arm, text in (("a", "x"), ("b", "y"))]
    with pytest.raises(RuntimeError, match="arm b at rate 1 answered a request otherwise"):
        check_equal_answers(results, boots)


def test_refusals_and_broken_streams_are_samples_with_an_error():
    engine = ScriptedEngine(says("ab"))
    with serving(engine) as served:

        def ask(**body: Any) -> Sample:
            return asyncio.run(stream(served.url, "/v1/completions", {"model": MODEL, **body}, due_s=0.0))

        assert "temperature" in ask(prompt="x", temperature=-9).error
        assert ask(prompt="x", max_tokens=2).ok
        engine.fault = RuntimeError("out of order")
        assert not ask(prompt="x", max_tokens=2).ok
        assert asyncio.run(fetch(served.url, "/health"))[0] == 503
        url = served.url
    assert "Connect" in asyncio.run(stream(url, "/v1/completions", {}, due_s=0.0)).error
