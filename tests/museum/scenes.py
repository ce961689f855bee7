"""The workloads of the museum: short runs, each built to pass where one kind of fault would show.

A run is checked as a served one is: by the gates that the engine itself calls, and then, token for token, by the
reference, which runs each request alone. Every scene is green on the sound engine at full gates.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from fast.engine import Engine
from fast.scheduler import DUE_AFTER
from reference.engine import Engine as ReferenceEngine
from reference.request import Completion, Request, SamplingParams
from reference.weights import ModelWeights
from tests.harness import TINY, tiny_weights

EAGER: dict[str, Any] = {"bucket_decode": True, "persist_inputs": True, "width_multiple": 16}
CAPTURED = EAGER | {"capture_decode": True, "compact_rows": True}
GATHERED = EAGER | {"capture_decode": True, "gather_rows": True}
LAZY = CAPTURED | {"record_on_miss": True}
SIZES = {"max_batch_size": 4, "block_size": 4, "num_blocks": 16, "max_model_len": 40}
MOST_STEPS = 120  # no scene needs half of them

Arrivals = tuple[tuple[int, Request], ...]  # (step before which it is submitted, request)


class OtherTokens(AssertionError):
    """An answer that is not the reference's: what a client would get."""


def request(name: str, prompt: int, answer: int | None, **params: Any) -> Request:
    """A seeded request of `prompt` ids and `answer` tokens, EOS ignored; hot, so a wrong K/V changes the draw."""
    wanted = {"temperature": 3.0, "seed": len(name) + prompt, "ignore_eos": True} | params
    ids = tuple((3 + 7 * i + 5 * prompt) % 61 for i in range(prompt))
    return Request(ids, SamplingParams(max_tokens=answer, **wanted), name)


# Four rows at once, the first and the third leave early, two more come: holes, moves, padding, new tenants.
RUSH: Arrivals = (
    (0, request("a", 5, 3)),
    (0, request("bb", 6, 18, logit_bias={9: 6.0}, presence_penalty=1.5)),
    (0, request("ccc", 3, 6)),
    (0, request("dddd", 8, 17, temperature=0.0, logit_bias={11: 4.0}, frequency_penalty=0.9)),
    (9, request("eeeee", 5, 9, repetition_penalty=9.0)),
    (14, request("ffffff", 2, 7, temperature=0.0)),
)
# A row's second tenant is as long as its first was, so that a length alone cannot tell them apart.
TENANTS: Arrivals = (
    (0, request("first", 6, 4)),
    (0, request("stays", 3, 14)),
    (8, request("second", 9, 6)),  # `stays` has taken a block of the first one's by then
)
# Three requests that cannot all grow: preemptions, answers computed again, blocks that change hands.
TIGHT: Arrivals = tuple((0, request(name, 5 + i, 14)) for i, name in enumerate(("one", "two", "three")))


def play(
    arrivals: Arrivals,
    *,
    aborts: tuple[tuple[int, str], ...] = (),
    tied: bool = False,
    poison: float | None = None,
    warm_rows: int | None = None,
    due_after: int = DUE_AFTER,
    **changes: Any,
) -> Engine:
    """Run requests to their end on a new engine, warmed if it captures, and hold each answer to the reference's.

    `poison` fills every slot that no live token is in, the sink too, before each step; `tied` gives logits a twin,
    `due_after` tells after how many others a request is overtaken by nobody.

    Raises:
        OtherTokens: an answer differs, does not end, or an idle engine holds something.
    """
    engine = Engine.build(TINY, _weights(tied), dtype=torch.float64, **(SIZES | changes))
    engine.scheduler.due_after = due_after
    if engine.decode.captured is not None and not engine.decode.captured.record_on_miss:
        engine.warm_decode(max_rows=warm_rows)
    last = max(step for step, _ in arrivals) + 1
    answers = {r.id: Completion(r.id, r.prompt_ids) for _, r in arrivals}
    for step in range(MOST_STEPS):
        for _, arrived in (pair for pair in arrivals if pair[0] == step):
            engine.submit(arrived)
        for _, name in (pair for pair in aborts if pair[0] == step):
            engine.abort(name)
        if poison is not None:
            _poison(engine, poison)
        for event in engine.step():
            answers[event.request_id].add(event)
        engine.stats()
        if step > last and not engine.has_work:
            break  # one step later than the work, for what a schedule asks of an idle pool
    for _, asked in arrivals:
        compare(answers[asked.id], _reference_answer(asked, tied, engine.max_model_len))
    if engine.has_work or engine.cache.allocator.num_free != engine.cache.allocator.num_blocks:
        raise OtherTokens(f"{engine.cache.allocator.num_owned} blocks are held by an idle engine")
    return engine


def captured_rush() -> Engine:
    """Warmed, compacted, replayed: the default of the command line."""
    return play(RUSH, **CAPTURED)


def eager_rush() -> Engine:
    """Bucketed and compacted, without recordings."""
    return play(RUSH, **EAGER, compact_rows=True)


def unpersisted_rush() -> Engine:
    """Bucketed, with new tensors for each step's inputs."""
    return play(RUSH, bucket_decode=True, width_multiple=16, compact_rows=True)


def scattered_rush() -> Engine:
    """Rows stay where they are, holes and all."""
    return play(RUSH, **EAGER)


def gathered_rush() -> Engine:
    """Rows stay where they are and are read through the gather's buffer, replayed."""
    return play(RUSH, **GATHERED)


def lazy_rush() -> Engine:
    """Nothing is warmed; a recording is made at the first step of each shape."""
    return play(RUSH, **LAZY)


def half_warm_rush() -> Engine:
    """Only batches of up to two rows are warmed; larger ones run eagerly and are counted."""
    return play(RUSH, warm_rows=2, **CAPTURED)


def poisoned_rush() -> Engine:
    """Every slot, the sink's too, holds NaN until it is written."""
    return play(RUSH, poison=float("nan"), **EAGER)


def chunked_rush() -> Engine:
    """Prompts longer than a step's budget of four tokens, beside rows that decode."""
    return play(RUSH, chunk_tokens=4, **EAGER, compact_rows=True)


def equal_prompts_in_chunks() -> Engine:
    """The same, a block of tokens a step."""
    return equal_prompts(chunk_tokens=4)


def equal_prompts(**changes: Any) -> Engine:
    """One prompt of exactly two blocks three times, at once and later, and one that begins with it."""
    ids = request("p", 8, 1).prompt_ids
    asked = [replace(request(name, 8, 6, seed=i), prompt_ids=ids) for i, name in enumerate(("a", "bb", "ccc"))]
    longer = replace(request("dddd", 13, 5), prompt_ids=(*ids, 5, 9, 5, 9, 5))
    return play(((0, asked[0]), (0, asked[1]), (3, asked[2]), (4, longer)), prefix_cache=True, **(CAPTURED | changes))


def scored_prompt() -> Engine:
    """A prompt twice, one after the other; the second request asks for its logprobs."""
    first, second = request("a", 9, 3), request("bb", 9, 3)
    asked = replace(second, prompt_ids=first.prompt_ids, params=replace(second.params, prompt_logprobs=1))
    return play(((0, first), (4, asked)), prefix_cache=True, **CAPTURED)


def parting_prompts() -> Engine:
    """Two prompts at once that share their first block and no more, a few tokens of each a step."""
    asked = [replace(request(n, 13 - 5 * i, 5), prompt_ids=request("p", 4, 1).prompt_ids) for i, n in enumerate("ab")]
    asked = [replace(one, prompt_ids=(*one.prompt_ids, *(9 + i,) * (9 - 5 * i))) for i, one in enumerate(asked)]
    return play(tuple((0, one) for one in asked), prefix_cache=True, chunk_tokens=4, **CAPTURED)


def unequal_prompts() -> Engine:
    """Prompts of one length that begin otherwise, one after the other."""
    asked = [(4 * i, request(name, 8 + i, 5)) for i, name in enumerate(("a", "bb", "ccc"))]
    return play(tuple(asked), prefix_cache=True, **CAPTURED)


def preempted_and_found() -> Engine:
    """Preemptions in a pool that is too small, with the cache on: what was computed is found again."""
    return play(TIGHT, num_blocks=8, prefix_cache=True, **CAPTURED)


def tight_pool() -> Engine:
    """Preemptions under compaction and replay."""
    return play(TIGHT, num_blocks=8, **CAPTURED)


def crowded() -> Engine:
    """A request arrives at every step, into a pool that those before it need to grow."""
    each_step = tuple((step, request("abcdefgh"[: step + 1], 3, 7)) for step in range(8))
    return play(each_step, num_blocks=7, **CAPTURED)


def reused_row() -> Engine:
    """A row's second tenant is as long as its first was."""
    return play(TENANTS, **EAGER)


def aborted_rush() -> Engine:
    """Two are dropped while they run, one while it waits."""
    return play(RUSH, aborts=((3, "bb"), (4, "dddd")), max_batch_size=3, **CAPTURED)


def off_stride() -> Engine:
    """Five rows where the powers of two end at four."""
    five = tuple((0, request(name, 4, 5)) for name in ("a", "bb", "ccc", "dddd", "eeeee"))
    return play(five, max_batch_size=5, num_blocks=20, **CAPTURED)


def full_context() -> Engine:
    """Answers that end at the length limit, which is off the block and off the bucket."""
    return play(
        ((0, request("a", 30, None)), (0, request("bb", 37, None))), max_model_len=38, num_blocks=24, **CAPTURED
    )


def queue() -> Engine:
    """More requests than rows, and a long one at the head that a short one could overtake."""
    sizes = (("a", 6, 9), ("bb", 20, 4), ("ccc", 2, 3), ("dddd", 6, 6))
    return play(tuple((0, request(name, n, m)) for name, n, m in sizes), num_blocks=8, **CAPTURED)


def urgent_stream() -> Engine:
    """One request that can wait, in a batch of one row, and a more urgent one in every step."""
    urgent = tuple((step, replace(request(f"u{step}", 3, 1), priority=-1)) for step in range(9))
    return play(((0, request("patient", 4, 2)), *urgent), due_after=4, max_batch_size=1, **CAPTURED)


def full_pool() -> Engine:
    """Eight blocks for four requests: all are owned, the last one too, while some rows are padding."""
    return play(RUSH, num_blocks=8, **EAGER, compact_rows=True)


def launched_ahead() -> Engine:
    """Each step is launched before the tokens of the one before are known; two answers end where nobody foresees it."""
    likely = {"stop_token_ids": tuple(range(20, 40))}
    return play(
        (
            (0, request("a", 5, 2)),
            (0, request("bb", 6, 18, **likely)),
            (0, request("ccc", 3, 12)),
            (1, request("dddd", 8, 15, temperature=0.0)),
            (2, request("eeeee", 4, 14, **likely)),
            (4, request("ffffff", 2, 9)),
        ),
        overlap=True,
        **CAPTURED,
    )


def tight_pool_ahead() -> Engine:
    """Preemptions where steps are launched ahead."""
    return play(TIGHT, num_blocks=8, overlap=True, **CAPTURED)


def ties() -> Engine:
    """Greedy rows whose best token always has an equal, beside a random one."""
    greedy = tuple((0, request(name, 4 + i, 8, temperature=0.0)) for i, name in enumerate(("a", "bb")))
    return play((*greedy, (0, request("ccc", 5, 8, temperature=0.9))), tied=True, **CAPTURED)


def early_ends() -> Engine:
    """Two ids end an answer, both are likely, and neither may come before min_tokens."""
    wanted = {"logit_bias": {2: 50.0, 5: 60.0}, "stop_token_ids": (5,), "min_tokens": 4, "ignore_eos": False}
    return play(tuple((0, request(name, 4, 9, **wanted)) for name in ("a", "bb")), **CAPTURED)


def _poison(engine: Engine, value: float) -> None:
    live = [slot for table in engine.cache.tables for slot in table.slots(0, table.length)]
    nobody = torch.ones(engine.cache.num_slots + 1, dtype=torch.bool)
    nobody[live] = False
    for pool in (*engine.cache.k, *engine.cache.v):
        pool[nobody] = value


def compare(got: Completion, wanted: Completion) -> None:
    expected = wanted.token_ids[: len(got.token_ids)] if got.finish_reason == "abort" else wanted.token_ids
    name = f"request {got.request_id!r}"
    if got.token_ids != expected:
        pairs = enumerate(zip(got.token_ids, expected, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(got.token_ids), len(expected)))
        raise OtherTokens(f"{name}: token {at} is {got.token_ids[at : at + 1]}, alone it is {expected[at : at + 1]}")
    if got.finish_reason not in ("abort", wanted.finish_reason):
        raise OtherTokens(f"{name} ends with {got.finish_reason!r} ({got.error}), alone with {wanted.finish_reason!r}")


@cache
def _weights(tied: bool) -> ModelWeights:
    weights = tiny_weights()
    if not tied:
        return weights
    half = weights.lm_head[: TINY.vocab_size // 2]
    twins = torch.cat([half, half, weights.lm_head[-1:]])  # id i and id i + 30 have one logit
    return replace(weights, lm_head=twins)


_answers: dict[tuple[str, bool, int], Completion] = {}


def _reference_answer(asked: Request, tied: bool, max_model_len: int) -> Completion:
    """What the reference says to a request alone; computed once, since no fault of this museum can reach it."""
    key = (repr(asked), tied, max_model_len)
    if key not in _answers:
        reference = ReferenceEngine(TINY, _weights(tied), max_model_len=max_model_len, dtype=torch.float64)
        (_answers[key],) = reference.generate([asked])
    return _answers[key]
