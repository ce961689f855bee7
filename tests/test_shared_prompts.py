"""What a client says of shared prompts and of its place in the queue changes no token, and usage tells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server import ScriptedEngine, Served, make_engine, serving

PROMPT = "a prompt that two clients begin alike, and that takes more than one block" * 2
PATHS = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
}


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(make_engine("fast", block_size=16, prefix_cache=True)) as served:
        yield served


def answer(served: Served, path: str, **fields: Any) -> tuple[Any, int]:
    """The text of a greedy answer, and how many tokens of its prompt were cached."""
    reply = served.post(path, **PATHS[path], temperature=0, max_tokens=5, ignore_eos=True, logprobs=None, **fields)
    assert reply.status_code == 200, reply.text
    choice, usage = reply.json()["choices"][0], reply.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    return choice.get("text") or choice["message"]["content"], usage["prompt_tokens_details"]["cached_tokens"]


# ---- holds ----


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_is_found_by_those_who_share_its_salt(served: Served, path: str):
    text, first = answer(served, path)
    assert first == 0
    assert answer(served, path) == (text, found := answer(served, path)[1])
    assert found > 0
    assert found % 16 == 0
    assert answer(served, path, cache_salt="mine") == (text, 0)
    assert answer(served, path, cache_salt="mine") == (text, found)
    assert answer(served, path, cache_salt="") == (text, found)


def test_a_prompt_that_opts_out_neither_takes_nor_gives(served: Served):
    path = "/v1/completions"
    text, _ = answer(served, path, prefix_cache=False)
    assert answer(served, path, prefix_cache=False) == (text, 0)
    assert answer(served, path) == (text, 0)
    assert answer(served, path)[1] > 0
    assert answer(served, path, prefix_cache=False) == (text, 0)


@pytest.mark.parametrize("n", [1, 3])
def test_a_place_in_the_queue_reaches_the_engine(n: int):
    engine = ScriptedEngine()
    with serving(engine) as served:
        for fields in ({"priority": -7}, {}, {"priority": None}):
            assert served.post(prompt="x", max_tokens=1, n=n, **fields).status_code == 200
    assert [request.priority for request in engine.seen] == [-7] * n + [0] * 2 * n
