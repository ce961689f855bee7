"""The prefix cache: what is found is what would be computed, nobody writes what is shared, and no token changes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fast.blocks import BlockAllocator, OutOfBlocks
from fast.cache import BatchedPagedKVCache
from fast.engine import Engine
from fast.prefix import Prefix, PrefixCache
from fast.scheduler import Scheduler
from gates import GateError
from gates.blocks import check_holders_counted, check_owned_once
from gates.core import at_level
from gates.prefix import (
    check_computed_once,
    check_hit_equals_recompute,
    check_hit_verified,
    check_last_recomputed,
    check_published_computed,
    check_writes_private,
)
from reference.request import Request, SamplingParams
from reference.weights import random_weights
from tests.harness import TINY, lockstep, tiny_config, tiny_engine, tiny_weights
from tests.server import BOS, EOS, VOCAB, serving
from tests.traces import ALL_ON, Arrival, Trace

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SIZES = {"block_size": 16, "num_blocks": 24, "max_batch_size": 4, "max_model_len": 120, "prefix_cache": True}
EACH_ROW_POLICY = pytest.mark.parametrize("arm", ["exact-free", ALL_ON, "warm-gather"])


def ids(count: int, *, start: int = 10) -> tuple[int, ...]:
    return tuple(3 + (start + i) % 58 for i in range(count))


def ask(engine: Engine, name: str, prompt: tuple[int, ...], **fields) -> tuple[list[int], int]:
    """One request to its end: its tokens, and how many of its prompt were found."""
    engine.submit(Request(prompt, GREEDY, name, **fields))
    tokens, cached = [], 0
    while engine.has_work:
        for event in engine.step():
            tokens.append(event.token_id)
            cached += event.cached_tokens
    return tokens, cached


def blank(blocks: int = 6, block_size: int = 2, **options) -> PrefixCache:
    return PrefixCache(BlockAllocator(blocks), block_size=block_size, **options)


def published(cache: PrefixCache, tokens: list[int], salt: str = "") -> tuple[Prefix, list[int]]:
    """A sequence of these tokens, computed and published."""
    prefix, blocks = Prefix(salt), cache.allocator.allocate(-(-len(tokens) // cache.block_size))
    assert cache.publish(prefix, tokens, blocks, computed=len(tokens)) == []
    return prefix, blocks


def find(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    """The blocks that a new request of these tokens takes."""
    prefix = Prefix(salt)
    cache.match(prefix, tokens)
    return cache.take(prefix, tokens)


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "found"), [(16, 0), (32, 16), (48, 32), (33, 32), (31, 16), (15, 0)], ids=lambda value: str(value)
)
def test_a_prompt_again_has_the_same_answer_and_computes_at_least_its_last_token(count: int, found: int):
    engine = tiny_engine(**SIZES)
    plain, _ = ask(tiny_engine(**(SIZES | {"prefix_cache": False})), "plain", ids(count))
    assert ask(engine, "first", ids(count)) == (plain, 0)
    assert ask(engine, "again", ids(count)) == (plain, found)
    assert engine.prefill.tokens == 2 * count - found
    longer = (*ids(count), 7)
    assert ask(engine, "longer", longer)[1] == count // 16 * 16


@pytest.mark.parametrize(("count", "found"), [(16, 0), (32, 16), (33, 32), (48, 32)])
@pytest.mark.parametrize("chunk_tokens", [None, 16])
def test_a_prompt_twice_in_one_step_has_one_answer_twice(count: int, found: int, chunk_tokens: int | None):
    plain, _ = ask(tiny_engine(**(SIZES | {"prefix_cache": False})), "plain", ids(count))
    engine = tiny_engine(**SIZES, chunk_tokens=chunk_tokens)
    done = engine.generate([Request(ids(count), GREEDY, name) for name in ("one", "two")])
    assert [one.token_ids for one in done] == [plain, plain]
    stats = engine.stats()
    assert stats["prefix_hit_tokens"] == found
    assert stats["prefill_tokens"] + stats["decode_tokens"] == 2 * count - found + 2 * 7


def test_an_answer_is_found_by_the_next_turn_of_a_chat():
    engine = tiny_engine(**SIZES)
    first, _ = ask(engine, "one", ids(20))
    turn = (*ids(20), *first, *ids(6, start=40))
    assert ask(engine, "two", turn)[1] == 16, "one block of prompt"
    longer = (*turn, *ids(30))
    assert ask(engine, "three", longer)[1] == len(turn) // 16 * 16


def test_a_request_that_opts_out_or_has_another_salt_finds_and_leaves_nothing():
    engine = tiny_engine(**SIZES)
    assert ask(engine, "out", ids(40), prefix_cache=False)[1] == 0
    assert len(engine.prefix) == 0
    assert ask(engine, "ours", ids(40), cache_salt="ours")[1] == 0
    assert ask(engine, "theirs", ids(40), cache_salt="theirs")[1] == 0
    assert ask(engine, "plain", ids(40))[1] == 0
    assert ask(engine, "ours again", ids(40), cache_salt="ours")[1] == 32
    assert ask(engine, "out again", ids(40), prefix_cache=False)[1] == 0
    with pytest.raises(ValueError, match="cache_salt: 3 is not a string"):
        Request((1,), cache_salt=3)
    with pytest.raises(ValueError, match="prefix_cache: 'no' is not true or false"):
        Request((1,), prefix_cache="no")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_with_a_salt_of_its_own_learns_of_no_other_prompt(path: str):
    words = "a word of company " * 4
    asks = {"prompt": words} if "chat" not in path else {"messages": [{"role": "user", "content": words}]}
    config = tiny_config(vocab_size=VOCAB, bos_token_id=BOS, eos_token_ids=(EOS,))
    sizes = SIZES | {"num_blocks": 64, "max_model_len": 256}
    with serving(Engine.build(config, random_weights(config, seed=3), **sizes)) as served:

        def found(**fields) -> tuple[list, int]:
            reply = served.post(path, max_tokens=3, temperature=0, **asks, **fields).json()
            cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            streamed = json.loads(
                served.events(path, max_tokens=3, prefix_cache=False, stream_options={"include_usage": True}, **asks)[
                    -2
                ]
            )
            assert streamed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            return reply["choices"], cached

        plain, none = found(prefix_cache=False)
        assert none == 0
        assert [found(cache_salt=salt) for salt in ("ours", "theirs", None)] == [(plain, 0)] * 3
        whole = found(cache_salt="ours")[1]
        assert whole >= 64
        assert [found(), found(cache_salt="theirs"), found(prefix_cache=False)] == [(plain, whole)] * 2 + [(plain, 0)]


def test_the_cache_is_off_unless_it_is_asked_for():
    engine = tiny_engine(**(SIZES | {"prefix_cache": False}))
    assert [ask(engine, name, ids(40))[1] for name in "ab"] == [0, 0]
    assert engine.stats()["prefix_query_tokens"] == 0
    assert not engine.describe()["prefix_cache"]


@pytest.mark.parametrize("n", [2, 4])
def test_the_answers_of_one_prompt_compute_its_full_blocks_once(n: int):
    engine = tiny_engine(**SIZES)
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=3, n=n, ignore_eos=True)
    done = engine.generate([Request(ids(39), params, "r")])
    assert len({tuple(one.token_ids) for one in done}) > 1
    assert engine.prefill.tokens == 39 + (n - 1) * (39 - 32)
    wanted = tiny_engine(**(SIZES | {"prefix_cache": False})).generate([Request(ids(39), params, "r")])
    assert [one.token_ids for one in done] == [one.token_ids for one in wanted]


@pytest.mark.parametrize("gone", ["abort", "preempt"])
def test_whoever_waits_for_a_block_computes_it_when_its_leader_is_gone(gone: str):
    engine = tiny_engine(**SIZES, chunk_tokens=8)
    for name in ("leads", "follows"):
        engine.submit(Request(ids(60), GREEDY, name))
    for _ in range(3):
        engine.step()
    assert engine.cache.tables[1].length == 16, "of 24 tokens the first full block"
    leader = engine.scheduler.running[0]
    if gone == "abort":
        engine.abort("leads")
    else:
        engine.scheduler._preempt(leader)
    while engine.has_work:
        engine.step()
    assert engine.stats()["free_blocks"] == 24


def test_the_longest_unused_goes_first_and_a_prefix_outlives_what_stands_behind_it():
    cache = blank(blocks=5)
    prefix, blocks = published(cache, [1, 2, 3, 4, 5, 6])
    other, theirs = published(cache, [9, 9])
    cache.allocator.free(blocks)
    cache.allocator.free(theirs)
    assert (cache.allocator.num_free, cache.allocator.num_idle, len(cache)) == (5, 4, 4)
    cache.allocator.allocate(2)  # the free one, and of the idle the tail of the first prefix
    assert find(cache, [1, 2, 3, 4, 5, 6, 7]) == blocks[:2]
    cache.allocator.allocate(2)
    assert find(cache, [1, 2, 3, 4]) == []
    assert find(cache, [9, 9, 9]) == theirs
    assert cache.evictions == 3
    assert prefix.names[0] != other.names[0]


def test_a_name_that_two_prefixes_share_is_the_first_ones_and_misleads_nobody():
    cache = blank(name_of=lambda parent, token_ids, salt: 7)  # every name collides
    _, blocks = published(cache, [1, 2])
    _, others = published(cache, [5, 6])
    assert find(cache, [1, 2, 3]) == blocks
    assert find(cache, [5, 6, 3]) == []
    assert find(cache, [1, 2, 3], "salt") == []
    assert [cache.allocator.is_kept(block) for block in (*blocks, *others)] == [True, False]


def test_a_block_is_found_only_behind_the_block_that_it_followed():
    cache = blank(name_of=lambda parent, token_ids, salt: hash(token_ids))  # names do not tell what came before
    published(cache, [1, 2, 5, 6])
    _, others = published(cache, [3, 4])
    assert find(cache, [3, 4, 5, 6, 7]) == others


@pytest.mark.parametrize("reserve_growth", [False, True])
def test_a_found_block_that_nobody_held_is_not_counted_as_room_too(reserve_growth: bool):
    sizes = {"block_size": 4, "num_blocks": 4, "max_batch_size": 2, "max_model_len": 16}
    engine = tiny_engine(**sizes, prefix_cache=True, reserve_growth=reserve_growth)
    engine.generate([Request(ids(9), replace(GREEDY, max_tokens=1), "leaves")])
    engine.submit(Request(ids(5, start=40), replace(GREEDY, max_tokens=3), "holds", prefix_cache=False))
    engine.step()
    assert engine.stats()["free_blocks"] == 2, "the two that were left behind"
    engine.submit(Request(ids(9), replace(GREEDY, max_tokens=1), "finds"))
    engine.step()
    assert "finds" not in engine.last_admitted, "two blocks found and one to compute into are three"
    while engine.has_work:
        engine.step()
    assert engine.stats()["preemptions"] == 0


def test_a_prompt_waits_for_whoever_computes_its_next_block_and_for_nobody_who_computes_another():
    cache = blank(blocks=9)
    first = [1, 2, 3, 4, 5, 6, 7]
    inside, behind = Prefix(""), cache.allocator.allocate(3)
    cache.publish(inside, first, behind, computed=3)  # in its second block
    parts, equal = Prefix(""), Prefix("")
    for prefix in (parts, equal):
        cache.match(prefix, [1, 2, 9])
        cache.take(prefix, [1, 2, 9])
    rows = [(inside, first, 3), (parts, [1, 2, 9, 9, 5, 6, 7], 2), (equal, first, 2), (None, first, 2)]
    assert cache.leaders(rows) == [0, 1, 0, 3]
    last = [*first[:5]]  # its third block is not full, so the second is the last that another can compute for it
    assert cache.leaders([rows[0], (equal, last[:4], 2), (equal, last, 2)]) == [0, 1, 0]
    past = (inside, first, 4)  # whose second block cannot be found, though it is computed: nobody computes it again
    assert cache.leaders([past, (equal, first, 2)]) == [0, 1]


@pytest.mark.parametrize("how", [{}, {"overlap": True}, {"kernels": True, "block_size": 16}], ids=str)
def test_a_prompt_whose_logits_are_no_numbers_leaves_nothing_to_those_that_begin_as_it_does(how: dict[str, Any]):
    weights = tiny_weights()
    embedding = weights.embedding.clone()
    embedding[60] = float("nan")
    sizes = {"block_size": 4, "num_blocks": 12, "max_model_len": 64, "prefix_cache": True} | how
    engine = Engine.build(TINY, replace(weights, embedding=embedding), **sizes)
    begin = tuple(range(7, 7 + sizes["block_size"]))
    ends = []
    for name, prompt in (("bad", (*begin, 60, 9)), ("other", (*begin, 4)), ("found", (*begin, 5))):
        [answer] = engine.generate([Request(prompt, SamplingParams(3, temperature=0.0, ignore_eos=True), name)])
        ends.append(answer.finish_reason)
    assert ends == ["error", "length", "length"]
    assert engine.stats()["prefix_hit_tokens"] == sizes["block_size"]


def test_nothing_is_published_behind_a_block_whose_name_another_prefix_has():
    cache = blank(name_of=lambda parent, token_ids, salt: token_ids[1])
    _, blocks = published(cache, [1, 2])
    published(cache, [5, 2, 7, 8])
    assert find(cache, [1, 2, 7, 8, 9]) == blocks, "7 and 8 were computed behind 5 and 2"


def test_one_block_behind_two_beginnings_is_found_behind_each():
    cache = blank()
    for first in (1, 3):
        _, blocks = published(cache, [first, 2, 5, 6])
        assert find(cache, [first, 2, 5, 6, 7]) == blocks


def test_each_salt_has_blocks_of_its_own():
    cache = blank()
    blocks = {salt: published(cache, [1, 2, 3, 4], salt)[1] for salt in ("", "s")}
    for salt, own in blocks.items():
        assert find(cache, [1, 2, 3, 4, 5], salt) == own


def test_whoever_computed_a_block_for_itself_takes_none_that_stands_behind_anothers():
    # Two prompts are in their first block when a more urgent one computes it too, and the next, and ends.
    sizes = {"block_size": 16, "num_blocks": 15, "max_batch_size": 5, "max_model_len": 120, "chunk_tokens": 8}
    engine = tiny_engine(**sizes, prefix_cache=True)
    prompt, fields = ids(90), {"late": (90, 24, 1), "soon": (90, 24, 0), "now": (40, 1, -1)}
    wanted = ["late", "soon", "now"]
    while wanted or engine.has_work:
        if wanted:
            count, answer, priority = fields[wanted[0]]
            params = replace(GREEDY, max_tokens=answer)
            engine.submit(Request(prompt[:count], params, wanted.pop(0), priority=priority))
        engine.step()
        held = {one.request.id: engine.cache.tables[row] for row, one in engine.scheduler.running.items()}
        rows = [held[name].blocks for name in ("late", "soon") if name in held and held[name].length > 32]
        for first in (blocks[0] for blocks in rows if engine.cache.allocator.holders(blocks[1]) > 1):
            assert engine.cache.allocator.holders(first) > 1, "they share the second block and not the first"


def test_what_stands_behind_a_lost_block_is_published_anew():
    cache = blank(blocks=6)
    _, blocks = published(cache, [1, 2, 3, 4])
    copy = cache.allocator.allocate(2)
    prefix = Prefix("")
    assert cache.publish(prefix, [1, 2], copy, computed=2) == [(blocks[0], copy[0])]
    cache.allocator.free(blocks[:1])
    cache.allocator.allocate(3)  # the first block of the published prefix is given up, its second is still held
    assert find(cache, [1, 2, 3, 4, 5]) == []
    assert cache.publish(prefix, [1, 2, 3, 4], copy, computed=4) == []
    assert find(cache, [1, 2, 3, 4, 5]) == copy


def test_only_what_is_kept_can_be_shared():
    allocator = BlockAllocator(3)
    (block,) = allocator.allocate(1)
    with pytest.raises(ValueError, match="block 0 is not kept"):
        allocator.share([block])
    allocator.keep(block)
    allocator.share([block])
    assert (allocator.num_owned, allocator.num_references, allocator.holders(block)) == (1, 2, 2)
    allocator.free([block])
    allocator.free([block])
    assert (allocator.num_owned, allocator.num_free, allocator.num_idle) == (0, 3, 1)
    with pytest.raises(ValueError, match="freed twice"):
        allocator.free([block])
    with pytest.raises(OutOfBlocks, match="4 blocks wanted, 3 of 3 free"):
        allocator.allocate(4)
    allocator.drop(block)
    assert (allocator.num_free, allocator.num_idle, sorted(allocator.allocate(3))) == (3, 0, [0, 1, 2])


# ---- holds, against the reference without a cache ---------------------------------------------------------------


@pytest.mark.differential
@EACH_ROW_POLICY
@pytest.mark.parametrize("chunk_tokens", [None, 4, 6])
def test_shared_prompts_have_the_references_tokens_in_a_tight_pool(chunk_tokens: int | None, arm: str):
    base = ids(17)
    arrivals = []
    for i in range(9):
        params = SamplingParams(12, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, n=1 + (i == 4))
        prompt = (*base[: (8, 12, 17)[i % 3]], *ids(i % 4, start=7 * i)) if i % 5 else base[:16]
        salt = "s" if i == 7 else ""
        arrivals.append(Arrival(i // 2, Request(prompt, params, f"r{i}", cache_salt=salt, prefix_cache=i != 6)))
    aborts = ((3, "@running"), (5, "@preempted"), (6, "@waiting"))
    limits = {"num_blocks": 14, "chunk_tokens": chunk_tokens, "prefix_cache": True, "max_batch_size": 4}
    run = lockstep(Trace(tuple(arrivals), aborts=aborts, arm=arm, **limits))
    stats = run.engine.stats()
    assert stats["preemptions"] > 0
    assert stats["prefix_hit_tokens"] > 40
    assert stats["prefix_evictions"] > 0


@pytest.mark.differential
@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_preempted_readmitted_and_found_again_loses_and_repeats_no_token(length: int):
    params = replace(GREEDY, max_tokens=40)
    arrivals = tuple(Arrival(0, Request((9,) * length, params, f"r{i}")) for i in range(2))
    limits = {"block_size": 16, "num_blocks": -(-(length + 40) // 16) + 1, "max_model_len": 80, "prefix_cache": True}
    run = lockstep(Trace(arrivals, **limits))
    stats = run.engine.stats()
    assert stats["preemptions"] >= 1 or length >= 32  # two blocks of the longer prompts are shared
    assert [len(completion.token_ids) for completion in run.completions.values()] == [40, 40]
    assert run.engine.cache.found_tokens > 0


def test_what_a_request_computed_itself_before_a_preemption_is_no_hit_and_is_not_told_as_cached():
    engine = tiny_engine(
        block_size=4, num_blocks=18, max_batch_size=2, max_model_len=72, chunk_tokens=4, prefix_cache=True
    )
    engine.submit(Request(ids(4), replace(GREEDY, max_tokens=40), "grows"))
    engine.step()
    engine.submit(Request(ids(60, start=30), replace(GREEDY, max_tokens=1), "given up"))
    told = []
    while engine.has_work:
        told += [event.cached_tokens for event in engine.step() if event.request_id == "given up"]
    stats = engine.stats()
    assert stats["preemptions"] == 1
    assert engine.cache.found_tokens > 0, "it found its own blocks"
    assert (told, stats["prefix_hit_tokens"], stats["prefix_query_tokens"]) == ([0], 0, 64), "looked up once each"


def test_what_was_found_before_the_first_preemption_is_told_after_the_second():
    engine = tiny_engine(
        block_size=4, num_blocks=20, max_batch_size=2, max_model_len=80, chunk_tokens=4, prefix_cache=True
    )
    ask(engine, "first", ids(17))
    engine.submit(Request(ids(60), replace(GREEDY, max_tokens=3), "twice"))
    told: list[int] = []
    for _ in range(2):
        for _ in range(3):
            engine.step()
        engine.scheduler._preempt(engine.scheduler.running[0])
    while engine.has_work:
        told += [event.cached_tokens for event in engine.step()]
    assert engine.cache.found_tokens > 2 * 24, "what it had computed was found again, twice"
    assert (told, engine.stats()["prefix_hit_tokens"]) == ([16, 0, 0], 16)


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_gate_rejects_a_hit_by_its_name_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PrefixCache, "_same", lambda *_: True)  # the fault
    cache = blank(name_of=lambda parent, token_ids, salt: len(token_ids))
    published(cache, [1, 2], salt="a")
    with pytest.raises(GateError, match=r"block 0 of a hit holds tokens \[1, 2\], the request has \[5, 6\]"):
        find(cache, [5, 6, 7], "a")
    with pytest.raises(GateError, match="block 0 of a hit has salt 'a', the request 'b'"):
        find(cache, [1, 2, 7], "b")
    with pytest.raises(GateError, match="block 1 of a hit stands behind another prefix"):
        check_hit_verified(
            tokens=[1, 2, 3],
            salt="",
            held=[(1,), (2,)],
            salts=["", ""],
            linked=[True, False],
            published=[True, True],
        )


def test_gate_rejects_a_block_that_was_given_up_between_the_look_and_the_admission(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        PrefixCache, "_live", lambda cache, prefix: prefix.entries
    )  # the fault: found once, found for ever
    cache = blank(blocks=3)
    _, blocks = published(cache, [1, 2, 3, 4])
    waits = Prefix("")
    assert len(cache.match(waits, [1, 2, 3, 4, 5])) == 2
    cache.allocator.free(blocks)
    cache.allocator.allocate(2)
    cache.match(waits, [1, 2, 3, 4, 5])
    with pytest.raises(GateError, match="block 1 of a hit was given up since it was found"):
        cache.take(waits, [1, 2, 3, 4, 5])


def test_gate_rejects_a_prompt_that_is_found_whole():
    check_last_recomputed(cached=15, tokens=16)
    with pytest.raises(GateError, match="16 of 16 tokens are taken from the cache, 0 are left"):
        check_last_recomputed(cached=16, tokens=16)


def test_gate_rejects_a_block_published_before_it_is_computed():
    check_published_computed(stop=8, computed=8)
    with pytest.raises(GateError, match="a block of tokens up to 8 is published, 7 are computed"):
        check_published_computed(stop=8, computed=7)


def test_gate_rejects_a_block_published_behind_a_prefix_that_is_not_its_own(monkeypatch: pytest.MonkeyPatch):
    cache = blank(name_of=lambda parent, token_ids, salt: token_ids[1])
    published(cache, [1, 2])
    # The fault, for the writer alone: whoever has the name is taken for the same.
    monkeypatch.setattr(PrefixCache, "_same", lambda *_: True)
    with pytest.raises(GateError, match=r"up to 4 is published behind \[1, 2\], it was computed behind \[5, 2\]"):
        published(cache, [5, 2, 7, 8])


def test_gate_rejects_a_write_into_a_block_that_others_read(monkeypatch: pytest.MonkeyPatch):
    adopt = BatchedPagedKVCache.adopt_row
    monkeypatch.setattr(BatchedPagedKVCache, "adopt_row", lambda c, row, blocks, tokens=0: adopt(c, row, blocks))
    monkeypatch.setattr(Scheduler, "_follow", lambda scheduler, prefix, waiting: list(range(len(waiting))))
    engine = tiny_engine(**SIZES)
    ask(engine, "first", ids(40))
    with (
        at_level("cheap"),
        pytest.raises(GateError, match="gate prefix.private: row 0 writes into block 0, which"),
    ):
        ask(engine, "again", ids(40))  # the fault: what was found is computed over again, in place
    with pytest.raises(GateError, match="row 1 writes into block 3, which 2 rows hold"):
        check_writes_private(rows=[1], blocks=[3], holders=[2], published=[False])


def test_gate_rejects_a_token_that_is_computed_twice(monkeypatch: pytest.MonkeyPatch):
    seat = Scheduler._seat

    def forgets(scheduler: Scheduler, sequence, row: int) -> None:
        seat(scheduler, sequence, row)
        sequence.found = 0  # the fault

    monkeypatch.setattr(Scheduler, "_seat", forgets)
    engine = tiny_engine(**SIZES)
    ask(engine, "first", ids(40))
    with pytest.raises(GateError, match="row 0 computed 8 tokens and found 0, it stores 40"):
        ask(engine, "again", ids(40))
    with pytest.raises(GateError, match="gate prefix.computed_once"):
        check_computed_once(rows=[0], computed=[9], cached=[0], stored=[8])


def test_gate_rejects_a_hit_that_is_not_a_recompute():
    # A prompt of exactly two blocks computes the second again; on the kernels both copies are the same bits.
    engine = Engine.build(*model(), **(SIZES | {"kernels": True, "threads": 1}))
    ask(engine, "first", ids(32))
    ask(engine, "again", ids(32))
    engine.cache.fill([17], 1.5)  # the fault: a published block is written
    with pytest.raises(GateError, match="gate prefix.recompute: block 1 differs in"):
        ask(engine, "once more", ids(32))
    both = torch.full((2, 1, 1, 1), float("nan"))
    with pytest.raises(GateError, match="gate prefix.recompute"):
        check_hit_equals_recompute(published=both, computed=both, block=0)


def model():
    from tests.harness import model_of

    return model_of("gqa")


def test_gate_rejects_holders_that_no_table_accounts_for():
    tables = {0: [2, 0], 1: [2]}
    check_holders_counted(tables=tables, holders=[1, 0, 2])
    with pytest.raises(GateError, match=r"block 2 counts 1 holders, 2 tables hold it \[1\]"):
        check_holders_counted(tables=tables, holders=[1, 0, 1])
    check_owned_once(tables=tables, num_blocks=3, shared={2})
    with pytest.raises(GateError, match="block 2 is in table 1 and in table 0"):
        check_owned_once(tables=tables, num_blocks=3)
    with pytest.raises(GateError, match="at places 1 and 0: not the same prefix"):
        check_owned_once(tables={0: [2, 0], 1: [1, 2]}, num_blocks=3, shared={2})


# ---- any order --------------------------------------------------------------------------------------------------


@settings(max_examples=max(10, (settings.default.max_examples if settings.default else 25) // 2))
@given(data=st.data())
def test_any_prompts_over_few_ids_find_what_is_theirs(data: st.DataObject):
    cache = blank(blocks=data.draw(st.integers(4, 12)))
    allocator = cache.allocator
    held: list[list[int]] = []
    waiting: list[tuple[list[int], Prefix]] = []  # prompts that look again and again
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=7))
        prefix = Prefix(data.draw(st.sampled_from(["", "x"])))
        waiting.append((tokens, Prefix(prefix.salt)))
        cache.match(prefix, tokens)
        found = cache.take(prefix, tokens)
        for at, block in enumerate(found):
            entry = cache._by_block[block]
            assert (entry.token_ids, entry.salt) == (tuple(tokens[2 * at : 2 * at + 2]), prefix.salt)
        cache.allocator.share(found)
        short = -(-len(tokens) // 2) - len(found)
        if short > allocator.num_free:
            allocator.free(found)
            while held:
                allocator.free(held.pop())
            continue
        blocks = [*found, *allocator.allocate(short)]
        cache.publish(prefix, tokens, blocks, computed=len(tokens))
        held.append(blocks)
        if data.draw(st.booleans()):
            allocator.free(held.pop(0))
        holders = [allocator.holders(block) for block in range(allocator.num_blocks)]
        check_holders_counted(tables=dict(enumerate(held)), holders=holders)
        assert allocator.num_free + allocator.num_owned == allocator.num_blocks
        assert len(cache) == sum(allocator.is_kept(block) for block in range(allocator.num_blocks))
        for entry in cache._by_block.values():
            assert entry.parent is None or cache._by_block[entry.parent.block] is entry.parent, (
                "published behind nothing"
            )
        for asked, earlier in waiting:
            anew = Prefix(earlier.salt)
            assert cache.match(earlier, asked) == cache.match(anew, asked), (
                "what was found earlier is what is found now"
            )
            assert cache.idle(earlier) == sum(holders[entry.block] == 0 for entry in earlier.entries)


# ---- the real model ---------------------------------------------------------------------------------------------


@pytest.mark.model
def test_a_long_prompt_of_the_real_model_is_found_again_with_the_same_tokens():
    from tests.harness import model_of

    config, weights = model_of("smollm2-135m-instruct")
    prompt = tuple((7 * i) % 4000 + 100 for i in range(2000))
    kernels = {"kernels": True, "half_weights": True, "num_blocks": 140, "max_model_len": 2100, "max_batch_size": 2}
    answers = []
    for policy in ({"chunk_tokens": 2048}, {"chunk_tokens": 300, "prefix_cache": True}):
        engine = Engine.build(config, weights, **kernels, **policy)
        with at_level("cheap"):
            answers.append(ask(engine, "first", prompt))
    again = ask(engine, "again", prompt)
    assert [tokens for tokens, _ in answers] == [again[0]] * 2
    assert (answers[1][1], again[1], engine.prefill.tokens) == (0, 1984, 2000 + 16)


@pytest.mark.model
def test_a_chat_of_eight_turns_with_the_real_model_has_the_tokens_it_has_without_the_cache():
    from tests.harness import model_of

    config, weights = model_of("smollm2-135m-instruct")
    kernels = {
        "kernels": True,
        "half_weights": True,
        "max_model_len": 160,
        "num_blocks": 20,
        "max_batch_size": 1,
        "threads": 1,
    }
    params, said = SamplingParams(max_tokens=4, temperature=0.8, seed=3, ignore_eos=True), []
    for cached in (False, True):
        engine = Engine.build(config, weights, **kernels, chunk_tokens=64, prefix_cache=cached)
        history, answers = tuple((11 * i) % 4000 + 100 for i in range(30)), []
        with at_level("cheap"):
            for turn in range(8):
                history = (*history, *((13 * i + turn) % 4000 + 100 for i in range(10)))
                (done,) = engine.generate([Request(history, params, f"t{turn}")])
                answers.append(done.token_ids)
                history = (*history, *done.token_ids)
        said.append((answers, engine.prefill.tokens))
    assert said[0][0] == said[1][0]
    whole = sum(40 + 14 * turn for turn in range(8))
    # Of each later turn, the blocks of the one before it and its answer, whose last token is not stored, are found.
    assert [computed for _, computed in said] == [whole, whole - sum((40 + 14 * t + 3) // 16 * 16 for t in range(7))]


@pytest.mark.model
def test_fifty_requests_of_the_real_model_on_one_system_prompt_get_the_tokens_they_have_without_the_cache():
    from tests.harness import model_of

    config, weights = model_of("smollm2-135m-instruct")
    system = tuple((11 * i) % 4000 + 100 for i in range(600))
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    requests = [Request((*system, *range(200 + n, 208 + n)), params, f"r{n}") for n in range(50)]
    kernels = {"kernels": True, "half_weights": True, "max_model_len": 640, "max_batch_size": 8, "num_blocks": 120}
    with at_level("cheap"):
        shared = Engine.build(config, weights, **kernels, prefix_cache=True)
        answers = shared.generate(requests)
        without = Engine.build(config, weights, **kernels).generate(requests)
    assert [one.token_ids for one in answers] == [one.token_ids for one in without]
    # 37 whole blocks of the prompt are computed once; each request computes what follows them.
    assert shared.prefill.tokens == 37 * 16 + 50 * (608 - 37 * 16)
