"""Chunked prefill: the budget is kept and shared, a short prompt is not starved, and chunks change no token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fast.prefill
from fast.chunk import DEFAULT_CHUNK_TOKENS, share_budget
from fast.engine import Engine
from fast.model import Chunk
from fast.slots import SlotTable
from gates import GateError
from gates.chunk import check_budget_kept, check_chunk_slots, check_chunks_continue, check_chunks_shared
from gates.core import at_level
from gates.plan import check_rebuild_bounded
from reference.request import Request, SamplingParams
from tests.harness import lockstep, tiny_engine
from tests.traces import ALL_ON, Arrival, Trace

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
ROOMY = {"num_blocks": 60, "block_size": 4, "max_model_len": 120, "max_batch_size": 4}


def request(name: str, prompt: int, answer: int = 6, **params) -> Request:
    return Request([3 + i % 58 for i in range(prompt)], replace(GREEDY, max_tokens=answer, **params), name)


def first_tokens(engine: Engine, arrivals: dict[int, list[Request]]) -> dict[str, int]:
    """The step (1-based) that gave each request its first token."""
    first: dict[str, int] = {}
    step = 0
    while engine.has_work or step <= max(arrivals):
        for arrived in arrivals.get(step, []):
            engine.submit(arrived)
        step += 1
        for event in engine.step():
            first.setdefault(event.request_id, step)
    return first


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pending", "budget", "counts"),
    [
        ([], 8, []),
        ([5], 8, [5]),
        ([50], 8, [8]),
        ([50, 3], 8, [5, 3]),  # the short one takes what it needs of the second half, the first the rest
        ([50, 9], 8, [4, 4]),
        ([3, 50], 8, [3, 5]),
        ([50, 40, 9, 9], 9, [5, 0, 4, 0]),  # the shortest, and of equals the earlier
        ([2, 2, 2], 9, [2, 2, 2]),
        ([7, 7], 1, [1, 0]),
    ],
)
def test_half_goes_in_order_and_half_to_the_shortest(pending: list[int], budget: int, counts: list[int]):
    assert share_budget(pending, budget) == counts


def test_a_step_computes_no_more_than_its_budget_and_decodes_first():
    engine = tiny_engine(**ROOMY, chunk_tokens=8)
    engine.submit(request("talks", 3, 40))
    engine.step()
    engine.submit(request("long", 60))
    computed = []
    while engine.prefill.tokens < 63:
        before = engine.prefill.tokens
        events = engine.step()
        computed.append(engine.prefill.tokens - before)
        assert "talks" in {event.request_id for event in events}, "a token in every step of the long prompt"
    assert computed == [7] * 8 + [4], "one token of eight is the decoding row's"


def test_a_short_prompt_behind_a_long_one_has_the_other_half():
    # The bound: with half the budget of 8 a step, a prompt of 10 tokens that is the shortest is there in 3 steps.
    arrivals = {0: [request("long", 100)], 1: [request("short", 10)]}
    first = first_tokens(tiny_engine(**ROOMY, chunk_tokens=8), arrivals)
    assert first["short"] == 1 + -(-10 // 4)
    assert first["long"] == -(-(100 + 10 + 5) // 8), "and the long one lost no more than the short one's tokens"
    whole = first_tokens(tiny_engine(**ROOMY, chunk_tokens=200), arrivals)
    assert whole == {"long": 1, "short": 2}


def test_a_stream_of_short_prompts_does_not_starve_a_long_one():
    arrivals = {step: [request(f"s{step}", 8, 1)] for step in range(1, 30)} | {0: [request("long", 100)]}
    assert first_tokens(tiny_engine(**ROOMY, chunk_tokens=8), arrivals)["long"] == 1 + (100 - 8) // 4


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_short_prompt_is_not_starved_with_the_longer_one_that_computes_its_first_block(prefix_cache: bool):
    # Two blocks of the short prompt are the second long one's too, which is neither the first in line nor the shortest.
    shared = tuple(range(50, 58))
    second = replace(request("second", 110), prompt_ids=(*shared, *range(3, 50), *range(3, 50), *range(3, 11)))
    short = replace(request("short", 10), prompt_ids=(*shared, 7, 9))
    engine = tiny_engine(**ROOMY | {"num_blocks": 90}, chunk_tokens=8, prefix_cache=prefix_cache)
    first = first_tokens(engine, {0: [request("first", 100), second, short]})
    assert first["short"] == -(-10 // 4), "with half the budget of 8 a step, found or computed"
    assert first["first"] <= -(-100 // 4)
    assert engine.stats()["prefix_hit_tokens"] == 8 * prefix_cache


def test_nobody_waits_for_the_block_of_its_own_last_token():
    engine = tiny_engine(**ROOMY, chunk_tokens=4, prefix_cache=True)
    first = first_tokens(engine, {0: [request("long", 40), request("short", 8)]})
    assert first["short"] == 3, "one step for the block that it shares, two with half the budget for its last block"


def test_the_budget_has_a_token_for_each_row():
    assert tiny_engine(num_blocks=8).scheduler.chunk_tokens == DEFAULT_CHUNK_TOKENS
    with pytest.raises(ValueError, match="chunk_tokens: 3 is not at least 4, a token a step for each row"):
        tiny_engine(**ROOMY, chunk_tokens=3)
    assert tiny_engine(**ROOMY, chunk_tokens=4).describe()["chunk_tokens"] == 4


@pytest.mark.differential
@pytest.mark.parametrize("arm", ["exact-free", ALL_ON, "warm-gather"])
@pytest.mark.parametrize("chunk_tokens", [4, 5, 7, 16, 17])
def test_prompts_in_chunks_have_the_references_tokens(chunk_tokens: int, arm: str):
    lengths = (1, 3, 4, 5, 8, 15, 16, 17, 33)
    arrivals = [
        Arrival(i, request(f"r{n}", n, 7, temperature=0.9 * (i % 2), seed=n, logprobs=1)) for i, n in enumerate(lengths)
    ]
    run = lockstep(
        Trace(tuple(arrivals), arm=arm, num_blocks=16, chunk_tokens=chunk_tokens, aborts=((6, "r8"), (9, "@running")))
    )
    assert run.engine.prefill.chunks > len(lengths) or chunk_tokens > 16


@pytest.mark.differential
def test_two_long_prompts_in_chunks_that_do_not_fit_together_are_not_thrashed():
    # Block 16, 24 blocks, chunks of 64, two prompts of 240 and 32 tokens each, and short ones that keep coming.
    engine = tiny_engine(block_size=16, num_blocks=24, max_batch_size=8, max_model_len=256, chunk_tokens=64)
    longs = [Request([5 + i] * 220, replace(GREEDY, max_tokens=32), f"long{i}") for i in range(2)]
    arrivals = {5 * i: [request(f"short{i}", 10, 4)] for i in range(1, 7)} | {0: longs}
    first = first_tokens(engine, arrivals)
    stats = engine.stats()
    tokens = 2 * (220 + 32) + 6 * (10 + 4)
    assert stats["prefill_tokens"] + stats["decode_tokens"] < 2 * tokens
    assert stats["preemptions"] <= 2
    assert len(first) == 8


@pytest.mark.differential
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("reserve_growth", [False, True])
@pytest.mark.parametrize("company", [0, 6])
def test_prompts_that_do_not_fit_together_are_computed_less_than_twice(
    prefix_cache: bool, reserve_growth: bool, company: int
):
    # 384 tokens of pool; two prompts of 240 and 32 more, which need 17 of 24 blocks each, and short ones beside them.
    policy = {"prefix_cache": prefix_cache, "reserve_growth": reserve_growth, "chunk_tokens": 64}
    longs = [Arrival(0, Request([5 + i] * 240, replace(GREEDY, max_tokens=32), f"long{i}")) for i in range(2)]
    shorts = [
        Arrival(2 + 3 * i, Request([40 + i] * 10, replace(GREEDY, max_tokens=4), f"s{i}")) for i in range(company)
    ]
    sizes = {"block_size": 16, "num_blocks": 24, "max_batch_size": 8, "max_model_len": 384}
    run = lockstep(Trace((*longs, *shorts), **sizes, **policy))
    stats = run.engine.stats()
    assert stats["prefill_tokens"] + stats["decode_tokens"] < 2 * (2 * (240 + 32) + company * 14)
    assert stats["preemptions"] <= 2
    assert {len(one.token_ids) for one in run.completions.values()} <= {4, 32}


@pytest.mark.differential
def test_one_forward_for_chunks_and_decoding_rows_has_the_tokens_of_two():
    answers = []
    for mixed in (False, True):
        engine = tiny_engine(**ROOMY, chunk_tokens=8, bucket_decode=True, persist_inputs=True, capture_decode=True)
        engine.warm_decode()
        engine.mixed_steps = mixed
        done = engine.generate(
            [request("talks", 3, 40)] + [request(f"r{n}", n, 5, temperature=0.8, seed=n) for n in (20, 9, 31)]
        )
        answers.append([completion.token_ids for completion in done])
        stats = engine.stats()
        assert (engine.forwards.mixed_tokens > 0) == mixed
        assert stats["decode_tokens"] + stats["prefill_tokens"] == engine.prefill.tokens + engine.decode.tokens
        assert stats["eager"].keys() <= {"scattered rows"} or not any(stats["eager"].values())
    assert answers[0] == answers[1]


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_gate_rejects_a_step_that_computes_more_than_its_budget(monkeypatch: pytest.MonkeyPatch):
    check_budget_kept(decode_rows=2, chunks=[4, 2], budget=8)
    # The fault: the decoding rows' tokens are forgotten. The share is right for the budget it was given.
    monkeypatch.setattr("fast.chunk.share_budget", lambda pending, budget, urgency: [min(pending[0], budget + 1)])
    monkeypatch.setattr("fast.scheduler.check_chunks_shared", lambda **_: None)
    engine = tiny_engine(**ROOMY, chunk_tokens=8)
    engine.submit(request("talks", 3))
    engine.step()
    engine.submit(request("long", 60))
    with pytest.raises(
        GateError, match="gate chunk.budget: 1 rows decode and 1 chunks compute 8 tokens, the budget is"
    ):
        engine.step()
    with pytest.raises(GateError, match="2 chunks compute 7 tokens, the budget is 8"):
        check_budget_kept(decode_rows=2, chunks=[4, 3], budget=8)


@pytest.mark.parametrize(
    ("share", "fact"),
    [
        (
            lambda pending, budget, urgency: [min(pending[0], budget), *[0] * (len(pending) - 1)],
            "the shortest prompt is given 0",
        ),
        (
            lambda pending, budget, urgency: [0] * (len(pending) - 1) + [min(pending[-1], budget)],
            "3 tokens of a budget of 8",
        ),
        (
            lambda pending, budget, urgency: [budget - 3, 3] if len(pending) > 1 else [budget + 60],
            r"given \[68\] of \[60\]",
        ),
    ],
    ids=["first takes all", "last takes all", "more than there is"],
)
def test_gate_rejects_a_budget_that_is_not_shared(share, fact: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fast.chunk.share_budget", share)
    engine = tiny_engine(**ROOMY, chunk_tokens=8)
    engine.submit(request("long", 60))
    engine.submit(request("short", 3))
    if "68" in fact:
        engine.abort("short")
    with pytest.raises(GateError, match=f"gate chunk.shared: {fact}"):
        engine.step()


def test_gate_rejects_a_first_prompt_that_is_held_back():
    check_chunks_shared(pending=[9, 3], counts=[5, 3], budget=8)
    with pytest.raises(GateError, match="the first prompt is given 3 of 9 tokens, at least 4 are its"):
        check_chunks_shared(pending=[9, 9], counts=[3, 5], budget=8)


def test_gate_rejects_a_prompt_that_waits_for_one_without_its_share(monkeypatch: pytest.MonkeyPatch):
    def by_its_own(pending: list[int], budget: int, urgency: list[int]) -> list[int]:
        return share_budget(pending, budget)  # the fault: nobody minds who waits for whom

    monkeypatch.setattr("fast.chunk.share_budget", by_its_own)
    engine = tiny_engine(**ROOMY | {"num_blocks": 90}, chunk_tokens=8, prefix_cache=True)
    for name, prompt in (("first", (3,) * 100), ("second", (4,) * 110), ("short", (4,) * 6)):
        engine.submit(Request(prompt, GREEDY, name))
    with pytest.raises(
        GateError, match="the prompt that one of 6 tokens waits for is given 0 of 110 tokens, at least 4"
    ):
        engine.step()
    check_chunks_shared(pending=[9, 12, 3], counts=[4, 4, 0], budget=8, behind=[0, 1, 1])
    for counts, behind in (([4, 2, 2], [0, 1, 1]), ([4, 4, 0], [0, 2, 2]), ([0, 8, 0], [1, 1, 2])):
        with pytest.raises(GateError, match="while they wait for"):
            check_chunks_shared(pending=[9, 12, 3], counts=counts, budget=8, behind=behind)


@pytest.mark.parametrize("by", [-1, 1])
def test_gate_rejects_a_chunk_that_does_not_go_on_where_the_last_one_ended(by: int, monkeypatch: pytest.MonkeyPatch):
    planned = fast.prefill.Chunk
    slots = [*range(200)]

    def shifted(start: int, token_ids: tuple[int, ...], _: tuple[int, ...], told: tuple[int, int]) -> Chunk:
        return planned(start + by, token_ids, tuple(slots[: start + by + len(token_ids)]))  # the fault: a position off

    engine = tiny_engine(**ROOMY, chunk_tokens=8)
    engine.submit(request("long", 30))
    engine.step()
    monkeypatch.setattr("fast.prefill.Chunk", shifted)
    fact = rf"row 0 computes tokens {8 + by}..{15 + by}, its block table holds 16 with them"
    with at_level("cheap"), pytest.raises(GateError, match=fact):
        engine.step()


def test_gate_rejects_a_mirror_that_a_chunk_was_not_written_to(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SlotTable, "extend", lambda table, row, slots: None)  # the fault
    engine = tiny_engine(**ROOMY, chunk_tokens=8)
    engine.submit(request("long", 30))
    with pytest.raises(GateError, match=r"gate chunk.continues: .*0..7, the slot table mirrors 0 with them"):
        engine.step()
    with pytest.raises(GateError, match="row 3 has a chunk of 0 tokens"):
        check_chunks_continue(rows=[3], starts=[4], counts=[0], stored=[4], mirrored=[4])


def test_gate_rejects_chunk_slots_in_another_order_than_the_table(monkeypatch: pytest.MonkeyPatch):
    made = fast.prefill.Chunk
    monkeypatch.setattr("fast.prefill.Chunk", lambda start, ids, slots, _: made(start, ids, slots[::-1]))  # the fault
    engine = tiny_engine(**ROOMY)
    engine.submit(request("r", 10))
    with pytest.raises(GateError, match=r"gate chunk.slots: token 0 is addressed in slot 9, its block table says 0"):
        engine.step()
    with pytest.raises(GateError, match="row 2 addresses 5 tokens, its 1 blocks hold 4"):
        check_chunk_slots(rows=[2], slots=[range(5)], tables=[[0]], block_size=4)


def test_gate_rejects_a_prompt_that_is_copied_in_again_for_each_chunk(monkeypatch: pytest.MonkeyPatch):
    extend = SlotTable.extend

    def from_the_start(table: SlotTable, row: int, slots: list[int]) -> None:
        known = table.slots[row, : table.length(row)].tolist()
        table.reset(row)
        extend(table, row, [*known, *slots])  # the fault: right cells, quadratic work

    monkeypatch.setattr(SlotTable, "extend", from_the_start)
    engine = tiny_engine(**ROOMY, chunk_tokens=8)
    engine.submit(request("long", 100))
    with pytest.raises(GateError, match=r"gate plan.rebuild: .* \(the rectangle is being rebuilt\)"):
        drain(engine)
    with pytest.raises(GateError, match="gate plan.rebuild"):
        check_rebuild_bounded(cells_written=81, tokens_appended=40)


# ---- any order --------------------------------------------------------------------------------------------------


@given(pending=st.lists(st.integers(1, 30), max_size=6), budget=st.integers(1, 40))
def test_any_budget_is_shared_by_the_rule(pending: list[int], budget: int):
    counts = share_budget(pending, budget)
    check_chunks_shared(pending=pending, counts=counts, budget=budget)
    check_budget_kept(decode_rows=0, chunks=counts, budget=budget)
