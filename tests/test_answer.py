"""What an answer begins with, and which of several are returned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server import BOS, ScriptedEngine, Served, eventually, make_engine, says, serving
from tests.test_http_cases import refused


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedEngine()) as running:
        yield running
        eventually(running.is_idle)


# ---- the best of several ----------------------------------------------------------------------------------------


def test_the_best_answers_of_each_prompt_are_those_that_the_model_finds_likeliest():
    body: dict[str, Any] = {"prompt": ["Once", "two"], "seed": 5, "max_tokens": 6, "ignore_eos": True}
    with serving(make_engine("fast")) as running:
        every = running.post(**body, n=5, logprobs=0).json()
        best = running.post(**body, n=2, best_of=5).json()
        shown = running.post(**body, n=2, best_of=5, logprobs=1).json()
        alone = running.post(**body, best_of=1).json()
        assert running.post(**body, best_of=None).json()["choices"] == alone["choices"]

    def mean(choice: dict[str, Any]) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    groups = [sorted(every["choices"][start : start + 5], key=mean, reverse=True)[:2] for start in (0, 5)]
    wanted = [choice["text"] for group in groups for choice in group]
    assert [choice["text"] for choice in best["choices"]] == wanted
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in best["choices"]] == [None] * 4
    assert [len(choice["logprobs"]["top_logprobs"]) for choice in shown["choices"]] == [6] * 4
    assert best["usage"] == every["usage"]  # what was computed


def test_the_best_of_fewer_or_of_a_stream_is_refused(served: Served):
    assert "2..128" in refused(served.post(prompt="x", n=2, best_of=1), param="best_of")
    assert "stream" in refused(served.post(prompt="x", best_of=2, stream=True), param="best_of")
    assert "20 answers (prompts: 100)" in refused(served.post(prompt=["x"] * 100, best_of=20), param="n")


# ---- echo -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "shown"), [("xď", ["xď"]), ([BOS, 120], ["x"]), (["x", "yz"], ["x", "yz"])])
def test_an_echoed_prompt_begins_each_of_its_answers(prompt: Any, shown: list[str]):
    body: dict[str, Any] = {"prompt": prompt, "echo": True, "n": 2, "stop": ["x", "b"]}
    with serving(ScriptedEngine(says("ab"))) as running:
        whole = running.post(**body).json()
        chunks = [json.loads(data)["choices"][0] for data in running.events(**body)[:-1]]
    # A stop string in the prompt ends nothing.
    assert [choice["text"] for choice in whole["choices"]] == [f"{text}a" for text in shown for _ in range(2)]
    for choice in whole["choices"]:
        assert "".join(c["text"] for c in chunks if c["index"] == choice["index"]) == choice["text"]
