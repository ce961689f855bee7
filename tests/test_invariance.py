"""A request's logits and tokens through the engine are the same bits under every schedule, with the CPU kernels on.

The measure is each request alone, in an engine of one row, without buckets or recordings, on one thread. Every test
changes one thing, or draws all of them, and compares every row of logits that the sampler saw.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fast.engine import Engine
from reference.config import ModelConfig
from reference.request import Request, SamplingParams
from reference.weights import ModelWeights, random_weights
from tests.harness import SHAPES, model_of, tiny_config
from tests.traces import KERNEL_ARMS

pytestmark = pytest.mark.differential

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m-instruct"
THREADS = (1, 2)
HALVES = ("half_weights", "half_kv")
KINDS = {
    "float32": {},
    "half weights": {"half_weights": True},
    "half K/V": {"half_kv": True},
    "half both": {"half_weights": True, "half_kv": True},
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
LIMITS = {"max_batch_size": 4, "block_size": 16, "num_blocks": 40, "max_model_len": 120}

# (tokens, logits) of each request: what the sampler was given for each of them, [N, V].
Shown = dict[str, tuple[list[int], torch.Tensor]]


def _request(name: str, prompt_tokens: int, max_tokens: int, **params: Any) -> Request:
    chosen = {"temperature": 0.0, "ignore_eos": True} | params
    prompt = [(7 * i + 3 * prompt_tokens) % 59 + 2 for i in range(prompt_tokens)]
    return Request(prompt, SamplingParams(max_tokens, **chosen), name)


# Prompts below, at and above a block, a vector and a tile of keys; greedy and seeded, plain and with work of their own.
REQUESTS = (
    _request("greedy", 5, 12),
    _request("seeded", 15, 10, temperature=0.8, seed=4),
    _request("block", 16, 9, temperature=1.0, seed=-1, top_p=0.9, repetition_penalty=1.3),
    _request("above", 17, 14, logprobs=3),
    _request("tile", 64, 8, temperature=0.7, seed=9, top_k=9, frequency_penalty=0.4),
    _request("long", 70, 6, logit_bias={9: 2.0}),
    _request("one", 1, 20, temperature=2.0, seed=11, min_p=0.05),
)


def play(engine: Engine, arrivals: Sequence[tuple[int, Request]]) -> Shown:
    """Run requests that arrive right before their steps to the end; what each of them saw."""
    logits: dict[str, list[torch.Tensor]] = defaultdict(list)
    sample = engine._sample

    def keeps(scores: torch.Tensor, rows: tuple[int, ...]) -> Any:
        for row, line in zip(rows, scores, strict=True):
            logits[engine.scheduler.running[row].request.id].append(line.clone())
        return sample(scores, rows)

    engine._sample = keeps
    tokens: dict[str, list[int]] = defaultdict(list)
    step, last = 0, max(step for step, _ in arrivals)
    while step <= last or engine.has_work:
        for _, request in (pair for pair in arrivals if pair[0] == step):
            engine.submit(request)
        for event in engine.step():
            assert event.error is None
            tokens[event.request_id].append(event.token_id)
        step += 1
    return {name: (tokens[name], torch.stack(seen)) for name, seen in logits.items()}


def build(shape: str, kind: str = "float32", **changes: Any) -> Engine:
    """An engine on the kernels, warmed when it captures."""
    engine = Engine.build(*model_of(shape), **(LIMITS | {"kernels": True, "threads": 1} | KINDS[kind] | changes))
    if changes.get("capture_decode"):
        engine.warm_decode()
    return engine


@cache
def alone(shape: str, kind: str, request: Request) -> tuple[list[int], torch.Tensor]:
    """The measure: one request, one row, nothing else."""
    return play(build(shape, kind, max_batch_size=1), [(0, request)])[request.id]


def same_bits(shown: Shown, shape: str, kind: str, requests: Sequence[Request]) -> None:
    """Every request saw the bits, and got the tokens, that it has alone."""
    assert shown.keys() == {request.id for request in requests}
    for request in requests:
        (tokens, logits), (wanted_tokens, wanted) = shown[request.id], alone(shape, kind, request)
        assert tokens == wanted_tokens, request.id
        changed = (logits.view(torch.int32) != wanted.view(torch.int32)).any(dim=1).nonzero().flatten().tolist()
        assert not changed, f"{request.id}: logits of answer tokens {changed} of {len(wanted)} are other bits"


def at_once(requests: Sequence[Request]) -> list[tuple[int, Request]]:
    return [(0, request) for request in requests]


# ---- holds, an axis at a time -------------------------------------------------------------------------------------


@EACH_KIND
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [2, 3, 7])
def test_batch_size_is_not_seen(shape: str, kind: str, rows: int):
    same_bits(play(build(shape, kind, max_batch_size=rows), at_once(REQUESTS)), shape, kind, REQUESTS)


@EACH_KIND
def test_neighbours_and_what_they_ask_for_are_not_seen(kind: str):
    ours = REQUESTS[3]
    for params in ({}, {"temperature": 5.0, "seed": 1}, {"logit_bias": {4: 100.0}}, {"repetition_penalty": 9.0}):
        others = [_request(f"n{i}", 3 + 13 * i, 3 + 4 * i, **params) for i in range(3)]
        shown = play(build("gqa", kind), at_once([*others, ours]))
        same_bits({ours.id: shown[ours.id]}, "gqa", kind, [ours])


@EACH_KIND
@pytest.mark.parametrize("row", [0, 1, 3])
def test_the_row_is_not_seen(kind: str, row: int):
    ours = REQUESTS[1]
    others = [_request(f"n{i}", 4, 16) for i in range(3)]
    engine = build("qk_norm", kind)
    rows = set()
    schedule = engine.scheduler.schedule

    def watched() -> Any:
        output = schedule()
        rows.update(r for r, sequence in engine.scheduler.running.items() if sequence.request.id == ours.id)
        return output

    engine.scheduler.schedule = watched
    shown = play(engine, at_once([*others[:row], ours, *others[row:]]))
    assert rows == {row}
    same_bits({ours.id: shown[ours.id]}, "qk_norm", kind, [ours])


@EACH_KIND
@pytest.mark.parametrize("order", [1, -1, 3])
def test_the_order_of_arrival_is_not_seen(kind: str, order: int):
    arrivals = [(2 * at, request) for at, request in enumerate(REQUESTS[::order])]
    same_bits(play(build("three_to_one", kind), arrivals), "three_to_one", kind, REQUESTS[::order])


@EACH_KIND
@pytest.mark.parametrize("arm", KERNEL_ARMS)
def test_padding_replay_and_where_rows_lie_are_not_seen(kind: str, arm: str):
    switches = {name: on for name, on in KERNEL_ARMS[arm].switches.items() if name not in ("kernels", *HALVES)}
    engine = build("biases", kind, **switches)
    same_bits(play(engine, at_once(REQUESTS)), "biases", kind, REQUESTS)
    stats = engine.stats()
    assert (stats["replayed"] > 0) == ("capture_decode" in switches)
    assert (stats["row_padding_share"] > 0) == ("bucket_decode" in switches)
    assert (stats["moves"] > 0) == ("compact_rows" in switches)


@EACH_KIND
@pytest.mark.parametrize("block_size", [16, 32])
def test_preemption_and_computing_again_are_not_seen(kind: str, block_size: int):
    # What a decode step wrote is computed again by a prefill, so the two have to write the same bits.
    engine = build("gqa", kind, block_size=block_size, num_blocks=128 // block_size, compact_rows=True)
    requests = [_request(f"r{n}", n, 40, temperature=0.5 * (n % 2), seed=n) for n in (20, 31, 33)]
    same_bits(play(engine, at_once(requests)), "gqa", kind, requests)
    assert engine.stats()["preemptions"] > 0


@EACH_KIND
@pytest.mark.parametrize("mixed", [False, True], ids=["two forwards", "mixed"])
@pytest.mark.parametrize("chunk_tokens", [5, 17, 64])
def test_chunks_and_what_computes_beside_them_are_not_seen(chunk_tokens: int, mixed: bool, kind: str):
    engine = build("gqa", kind, chunk_tokens=chunk_tokens)
    engine.mixed_steps = mixed
    same_bits(play(engine, [(2 * at, request) for at, request in enumerate(REQUESTS)]), "gqa", kind, REQUESTS)
    assert engine.prefill.chunks > len(REQUESTS)
    assert (engine.forwards.mixed_tokens > 0) == mixed


@EACH_KIND
@pytest.mark.parametrize("chunk_tokens", [None, 20])
def test_a_prefix_that_is_found_is_not_seen(chunk_tokens: int | None, kind: str):
    # Prompts that begin alike, twice each, in a pool that preempts: found, computed twice, evicted, found again.
    base = _request("base", 70, 1).prompt_ids
    cuts = (16, 17, 32, 33, 48, 64, 70)
    requests = [
        replace(_request(f"r{n}-{again}", 1, 9, temperature=0.7 * (n % 2), seed=n), prompt_ids=base[:n])
        for again in range(2)
        for n in cuts
    ]
    engine = build("gqa", kind, chunk_tokens=chunk_tokens, prefix_cache=True, num_blocks=12)
    same_bits(play(engine, [(at, request) for at, request in enumerate(requests)]), "gqa", kind, requests)
    stats = engine.stats()
    assert stats["prefix_hit_tokens"] > 200


@EACH_KIND
@pytest.mark.parametrize("threads", THREADS)
def test_the_number_of_threads_is_not_seen(kind: str, threads: int):
    same_bits(play(build("gqa", kind, threads=threads), at_once(REQUESTS)), "gqa", kind, REQUESTS)


def digest(kind: str) -> str:
    """Of everything that the requests see together."""
    total = hashlib.sha256()
    for name, (tokens, logits) in sorted(play(build("llama3_rope", kind), at_once(REQUESTS)).items()):
        total.update(f"{name} {tokens}".encode() + logits.contiguous().numpy().tobytes())
    return total.hexdigest()


def test_a_restart_is_not_seen():
    code = "from tests.test_invariance import *; print(digest('half weights'))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.strip() == digest("half weights"), ran.stderr
    same_bits(play(build("llama3_rope"), at_once(REQUESTS)), "llama3_rope", "float32", REQUESTS)


# ---- rejects ------------------------------------------------------------------------------------------------------

CONTROL = tiny_config(hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64)


@cache
def control_weights() -> ModelWeights:
    return random_weights(CONTROL, seed=3, dtype=torch.float32)


def differs(config: ModelConfig, weights: ModelWeights, **switches: Any) -> int:
    """How many rows of logits change by a bit between requests alone and the same requests together."""
    build_one = lambda rows: Engine.build(config, weights, **(LIMITS | {"max_batch_size": rows}), **switches)  # noqa: E731
    requests = [replace(request, params=replace(request.params, temperature=0.0)) for request in REQUESTS]
    together = play(build_one(7), at_once(requests))
    count = 0
    for request in requests:
        lone, mine = play(build_one(1), [(0, request)])[request.id][1], together[request.id][1]
        shared = min(len(lone), len(mine))
        count += int((lone[:shared] != mine[:shared]).any(dim=1).sum())
    return count


def test_torchs_own_matrix_product_would_be_seen():
    changed = differs(CONTROL, control_weights())
    if not changed:
        pytest.skip("F.linear gives each row its own bits on this machine; one with MKL shows the difference")
    assert differs(CONTROL, control_weights(), kernels=True) == 0


def test_one_bit_of_one_logit_would_be_seen():
    shown = play(build("gqa"), at_once(REQUESTS))
    logits = shown["tile"][1]
    logits[2, 5] = torch.nextafter(logits[2, 5], torch.tensor(9.0))
    with pytest.raises(AssertionError, match=r"tile: logits of answer tokens \[2\] of 8 are other bits"):
        same_bits(shown, "gqa", "float32", REQUESTS)


# ---- any order ----------------------------------------------------------------------------------------------------


@settings(max_examples=2 * (settings.default.max_examples if settings.default else 25))
@given(data=st.data())
def test_any_schedule_gives_each_request_the_bits_it_has_alone(data: st.DataObject):
    shape = data.draw(st.sampled_from(["gqa", "three_to_one", "qk_norm"]), label="shape")
    kind = data.draw(st.sampled_from(list(KINDS)), label="kind")
    arm = data.draw(st.sampled_from(list(KERNEL_ARMS)), label="arm")
    switches = {name: on for name, on in KERNEL_ARMS[arm].switches.items() if name not in ("kernels", *HALVES)}
    chosen = data.draw(st.permutations(REQUESTS), label="order")[: data.draw(st.integers(1, 7), label="requests")]
    steps = [data.draw(st.integers(0, 9), label="step") for _ in chosen]
    block_size = data.draw(st.sampled_from([16, 32]), label="block size")
    engine = build(
        shape,
        kind,
        **switches,
        max_batch_size=data.draw(st.integers(1, 7), label="rows"),
        block_size=block_size,
        num_blocks=data.draw(st.integers(96, 300), label="pool") // block_size,
        max_model_len=96,
        chunk_tokens=data.draw(st.sampled_from([None, 7, 20]), label="budget"),
        prefix_cache=data.draw(st.booleans(), label="prefix cache"),
        reserve_growth=data.draw(st.booleans(), label="watermark"),
        threads=data.draw(st.sampled_from(list(THREADS)), label="threads"),
    )
    engine.mixed_steps = data.draw(st.booleans(), label="mixed")
    same_bits(play(engine, list(zip(steps, chosen, strict=True))), shape, kind, chosen)


# ---- the real model -----------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("kind", ["half weights", "half both"])
def test_the_real_model_keeps_its_bits_under_other_schedules(kind: str):
    from serve.models import load_model

    encode = load_model(MODEL).tokenizer.encode
    texts = ("The capital of France is", "def fibonacci(n):\n    ", "Once upon a time, in a land far away, " * 4, "1")
    requests = []
    for at, text in enumerate(texts):
        params = SamplingParams(16, temperature=0.8 * (at % 2), seed=at, ignore_eos=True)
        requests.append(Request(tuple(encode(text)), params, f"r{at}"))
    capture = {"bucket_decode": True, "persist_inputs": True, "capture_decode": True}
    tight = build(MODEL, kind, **capture, compact_rows=True, num_blocks=5, max_model_len=80, threads=THREADS[-1])
    same_bits(play(tight, [(at, request) for at, request in enumerate(requests)]), MODEL, kind, requests)
    assert tight.stats()["preemptions"] > 0
    free = build(MODEL, kind, max_batch_size=3)
    same_bits(play(free, at_once(requests[::-1])), MODEL, kind, requests)
