"""The fast engine at its edges: preemption, aborts, dry pools, dead rows, and attention that reads what it should."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fast.attention import decode_attention, prefill_attention
from fast.cache import BatchedPagedKVCache
from fast.engine import Engine
from fast.model import Chunk
from fast.rows import Rows
from gates import GateError
from gates.core import at_level
from reference.request import Completion, Event, Request, SamplingParams
from tests.harness import SHAPES, TINY, lockstep, tiny_config, tiny_engine, tiny_weights
from tests.traces import Arrival, Trace

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


def drain(engine: Engine) -> dict[str, Completion]:
    """Step until idle; completions by request id."""
    done: dict[str, Completion] = {}
    while engine.has_work:
        for event in engine.step():
            done.setdefault(event.request_id, Completion(event.request_id, ())).add(event)
    return done


# ---- holds: preemption ------------------------------------------------------------------------------------------


@pytest.mark.differential
@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_a_resumed_sequence_emits_exactly_its_next_token(length: int):
    # Two sequences that outgrow the pool together: the later one is preempted where the earlier meets a boundary.
    arrivals = tuple(Arrival(0, Request((9,) * length, GREEDY, f"r{i}")) for i in range(2))
    run = lockstep(Trace(arrivals, block_size=16, num_blocks=-(-(length + 40) // 16) + 1, max_model_len=80))
    assert run.engine.stats()["preemptions"] >= 1
    assert [len(completion.token_ids) for completion in run.completions.values()] == [40, 40]


@pytest.mark.differential
def test_two_prompts_that_share_five_blocks_both_finish():
    arrivals = tuple(Arrival(0, Request(range(3 + i, 15 + i), GREEDY, f"r{i}")) for i in range(2))
    run = lockstep(Trace(arrivals, block_size=16, num_blocks=5, max_model_len=80))
    assert run.engine.stats()["preemptions"] >= 1
    assert run.engine.stats()["free_blocks"] == 5


def test_two_long_prompts_that_do_not_fit_together_are_not_thrashed():
    config = tiny_config(max_positions=512)
    engine = Engine.build(config, tiny_weights(), block_size=16, num_blocks=24, max_batch_size=8, dtype=torch.float64)
    params = replace(GREEDY, max_tokens=32)
    longs = [Request((5 + i,) * 240, params, f"long{i}") for i in range(2)]
    shorts = [Request((9,) * 10, replace(params, max_tokens=4), f"short{i}") for i in range(6)]
    for request in longs:
        engine.submit(request)
    preemptions = {name: open_.preemptions for name, open_ in engine._open.items()}
    done: dict[str, Completion] = {}
    for step in range(400):
        if step % 5 == 0 and shorts:
            engine.submit(shorts.pop())
        for name, open_ in engine._open.items():
            preemptions[name] = open_.preemptions
        for event in engine.step():
            done.setdefault(event.request_id, Completion(event.request_id, ())).add(event)
        if not engine.has_work and not shorts:
            break
    assert {completion.finish_reason for completion in done.values()} == {"length"}
    assert len(done) == 8
    assert max(preemptions.values()) <= 2
    tokens = 2 * (240 + 32) + 6 * (10 + 4)
    assert engine.stats()["prefill_tokens"] + engine.stats()["decode_tokens"] < 2 * tokens


# ---- holds: what a neighbour may change is nothing --------------------------------------------------------------


def test_a_seeded_request_is_the_same_whatever_its_partner_and_place():
    mine = Request(range(3, 9), SamplingParams(max_tokens=16, temperature=0.8, seed=42, ignore_eos=True), "a")
    other = Request((8, 4), SamplingParams(max_tokens=16, temperature=0.8, ignore_eos=True), "b")
    seeded = Request((8, 4), replace(other.params, seed=7), "b")
    orders = [[mine]] + [[mine, other]] * 4 + [[mine, seeded], [other, mine], [seeded, mine]]
    answers = set()
    for requests in orders:
        for pool in (3, 4, 40):
            engine = tiny_engine(block_size=8, num_blocks=pool, max_model_len=24, max_batch_size=4)
            done = {completion.request_id: completion for completion in engine.generate(requests)}
            answers.add(tuple(done["a"].token_ids))
    assert len(answers) == 1


def test_requests_without_a_seed_draw_seeds_of_their_own():
    seeds = iter([11, 12])
    engine = Engine.build(TINY, tiny_weights(), num_blocks=8, dtype=torch.float64, seed_source=lambda: next(seeds))
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    free = engine.generate([Request((3, 4), params, "x"), Request((3, 4), params, "y")])
    fixed = tiny_engine(num_blocks=8).generate([Request((3, 4), replace(params, seed=s), str(s)) for s in (11, 12)])
    assert [done.token_ids for done in free] == [done.token_ids for done in fixed]
    assert free[0].token_ids != free[1].token_ids


# ---- holds: limits ----------------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_at_once_and_blocks_nobody():
    engine = tiny_engine(block_size=16, num_blocks=8, max_model_len=256)
    assert engine.max_model_len == 128
    with pytest.raises(ValueError, match="200 tokens .* limit is 128 tokens"):
        engine.submit(Request((5,) * 200, GREEDY, "long"))
    with pytest.raises(ValueError, match="max_tokens: 100 .* limit is 128 tokens"):
        engine.submit(Request((5,) * 120, replace(GREEDY, max_tokens=100), "grows"))
    assert not engine.has_work
    done = engine.generate([Request((5,) * 10, replace(GREEDY, max_tokens=6), f"short{i}") for i in range(3)])
    assert [completion.finish_reason for completion in done] == ["length"] * 3
    assert engine.stats()["free_blocks"] == 8


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("room", [1, 2, 5])
def test_a_lone_sequence_that_outgrows_the_pool_ends_with_length(blocks: int, room: int):
    engine = tiny_engine(block_size=8, num_blocks=blocks, max_model_len=200)
    prompt = (6,) * (blocks * 8 - room)
    (done,) = engine.generate([Request(prompt, replace(GREEDY, max_tokens=None), "alone")])
    assert (done.finish_reason, len(done.token_ids)) == ("length", room)
    assert engine.stats()["preemptions"] == 0
    assert engine.stats()["free_blocks"] == blocks


def test_the_pool_is_sized_by_bytes_and_never_beyond_what_the_rows_can_use():
    per_block = TINY.kv_elements_per_token * 4 * 16
    engine = Engine.build(TINY, tiny_weights(), kv_bytes=5 * per_block + 1)
    assert (engine.cache.allocator.num_blocks, engine.max_model_len) == (5, 80)
    assert Engine.build(TINY, tiny_weights(), max_batch_size=2).cache.allocator.num_blocks == 2 * 256 // 16
    with pytest.raises(ValueError, match="give one"):
        Engine.build(TINY, tiny_weights(), kv_bytes=1, num_blocks=1)
    with pytest.raises(ValueError, match="not at least 2"):
        Engine.build(TINY, tiny_weights(), kv_bytes=1)


# ---- holds: aborts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_everything_is_free_the_moment_all_are_aborted(steps: int):
    engine = tiny_engine(block_size=4, num_blocks=30, max_batch_size=4, max_model_len=60)
    names = [f"r{i}" for i in range(9)]
    for name in names:
        engine.submit(Request((5,) * 7, GREEDY, name))
    for _ in range(steps):
        engine.step()
    for name in [*names, *names, "unknown"]:
        engine.abort(name)
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["kv_tokens"], stats["free_blocks"]) == (0, 0, 0, 30)
    assert sorted(engine.step(), key=lambda event: event.request_id) == [Event(name, None, "abort") for name in names]
    assert not engine.has_work


def test_a_request_that_was_just_preempted_can_be_aborted():
    engine = tiny_engine(block_size=4, num_blocks=4, max_batch_size=2, max_model_len=16)
    for name in ("first", "second"):
        engine.submit(Request((5,) * 8, replace(GREEDY, max_tokens=8), name))
    while not engine.stats()["preemptions"]:
        engine.step()
    assert engine.scheduler.waiting[0].request.id == "second"
    engine.abort("second")
    done = drain(engine)
    assert (done["second"].finish_reason, done["first"].finish_reason) == ("abort", "length")
    assert engine.stats()["free_blocks"] == 4


def test_an_id_is_taken_until_its_last_event_is_out():
    engine = tiny_engine(num_blocks=8)
    engine.submit(Request((5,), GREEDY, "same"))
    engine.abort("same")
    with pytest.raises(ValueError, match="'same' is already open"):
        engine.submit(Request((5,), GREEDY, "same"))
    engine.step()
    engine.submit(Request((5,), GREEDY, "same"))


# ---- holds: attention -------------------------------------------------------------------------------------------


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [H, D] against k and v [S, K, D], head by head."""
    group = q.shape[0] // k.shape[1]
    heads = [torch.softmax(k[:, h // group] @ q[h] * scale, 0) @ v[:, h // group] for h in range(q.shape[0])]
    return torch.stack(heads)


def pools(slots: int = 40, kv_heads: int = 2, dim: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(slots, kv_heads, dim, generator=generator, dtype=torch.float64) for _ in range(2))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e4])
def test_decode_attention_reads_its_row_and_nothing_else(poison: float):
    k, v = pools()
    mapping = torch.randperm(40, generator=torch.Generator().manual_seed(4))[:28].view(4, 7)
    lengths = [7, 1, 3, 0]
    q = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    read = {int(slot) for row, length in zip(mapping, lengths, strict=True) for slot in row[:length]}
    clean = decode_attention(q, k, v, mapping, torch.tensor(lengths), 0.3)
    others = [slot for slot in range(40) if slot not in read]
    k[others], v[others] = poison, poison
    got = decode_attention(q, k, v, mapping, torch.tensor(lengths), 0.3)
    assert torch.equal(got, clean)
    assert torch.equal(got[3], torch.zeros(6, 8, dtype=torch.float64))
    for row, length in enumerate(lengths[:3]):
        slots = mapping[row, :length]
        torch.testing.assert_close(got[row], plain_attention(q[row], k[slots], v[slots], 0.3))


@pytest.mark.parametrize("tile", [1, 4, 6, 7])
@pytest.mark.parametrize("start", [0, 1, 5])
def test_prefill_attention_is_causal_from_any_start_in_any_tile(start: int, tile: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fast.attention.QUERY_TILE", tile)
    k, v = pools()
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(4))[: start + 6]
    q = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    got = prefill_attention(q, k, v, slots, 0.3)
    for t in range(6):
        seen = slots[: start + t + 1]
        torch.testing.assert_close(got[t], plain_attention(q[t], k[seen], v[seen], 0.3))


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("cut", [1, 4, 8])
def test_a_prompt_in_chunks_beside_another_equals_the_prompt_whole(shape: str, cut: int):
    engine = tiny_engine(shape, num_blocks=4, block_size=16)
    tokens, forward = tuple(range(3, 12)), engine.forward
    whole = forward.prefill([Chunk(0, tokens, tuple(range(20, 29)))], engine.cache)
    stranger = Chunk(0, (9, 9, 9), (40, 41, 42))
    forward.prefill([Chunk(0, tokens[:cut], tuple(range(cut))), stranger], engine.cache)
    rest = Chunk(cut, tokens[cut:], tuple(range(9)))
    torch.testing.assert_close(forward.prefill([stranger, rest], engine.cache)[1:], whole, atol=1e-12, rtol=1e-12)


def test_a_chunk_whose_slots_do_not_cover_it_is_refused():
    with pytest.raises(ValueError, match="2 tokens from 3, 4 slots"):
        Chunk(3, (1, 2), (0, 1, 2, 3))


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_a_row_with_a_broken_number_ends_alone(monkeypatch: pytest.MonkeyPatch):
    params = replace(GREEDY, max_tokens=6)
    requests = [Request((5 + i, 9), params, f"r{i}") for i in range(3)]
    calm = {done.request_id: done.token_ids for done in tiny_engine(num_blocks=12).generate(requests)}
    engine = tiny_engine(num_blocks=12)
    decode, calls = engine.forward.decode, []

    def poisoned(plan, cache):
        logits = decode(plan, cache).clone()
        calls.append(plan.rows)
        if len(calls) == 2:
            logits[1, 3] = float("nan")
        return logits

    monkeypatch.setattr(engine.forward, "decode", poisoned)
    done = {completion.request_id: completion for completion in engine.generate(requests)}
    assert (done["r1"].finish_reason, done["r1"].token_ids) == ("error", calm["r1"][:2])
    assert "NaN" in done["r1"].error
    assert {name: done[name].token_ids for name in ("r0", "r2")} == {name: calm[name] for name in ("r0", "r2")}
    assert engine.stats()["free_blocks"] == 12


def to_the_end(engine: Engine, events: list[Event]) -> None:
    while engine.has_work:
        events += engine.step()


@pytest.mark.parametrize("broken", ["length", "early end", "mask"])
def test_a_request_that_breaks_a_gate_ends_alone_where_that_is_wanted(broken: str, monkeypatch: pytest.MonkeyPatch):
    params = replace(GREEDY, max_tokens=6, min_tokens=2)
    requests = [Request((5 + i, 9), params, f"r{i}") for i in range(3)]
    calm = {done.request_id: done.token_ids for done in tiny_engine(num_blocks=12).generate(requests)}
    for alone in (True, False):
        engine = tiny_engine(num_blocks=12)
        engine.fail_alone = alone
        for request in requests:
            engine.submit(request)
        victim = engine._open["r1"]
        if broken == "length":
            victim.max_tokens = 9  # the limit that another request asked for
        elif broken == "early end":
            victim.ends = frozenset(range(61))  # every token ends it, though it has a minimum
        else:
            victim.forbidden = (calm["r1"][0],)
            monkeypatch.setattr("fast.sampling._change", lambda *arguments: None)
        events: list[Event] = []
        if not alone:
            with pytest.raises(GateError):
                to_the_end(engine, events)
            continue
        to_the_end(engine, events)
        [failed] = [event for event in events if event.finish_reason == "error"]
        assert failed.request_id == "r1"
        assert failed.error is not None
        assert failed.error.startswith("gate ")
        for name in ("r0", "r2"):
            assert [event.token_id for event in events if event.request_id == name] == calm[name]
        assert engine.stats()["free_blocks"] == 12


def test_gate_rejects_a_prefill_that_counts_one_token_too_few(monkeypatch: pytest.MonkeyPatch):
    advance = BatchedPagedKVCache.advance_row

    def miscounts(cache: BatchedPagedKVCache, row: int, tokens: int) -> list[int]:
        slots = advance(cache, row, tokens)
        cache.tables[row].length -= 1  # the fault: a resumed sequence whose last token was never counted
        return slots

    monkeypatch.setattr(BatchedPagedKVCache, "advance_row", miscounts)
    engine = tiny_engine(num_blocks=8)
    engine.submit(Request((5, 6, 7), GREEDY, "short"))
    with pytest.raises(GateError, match="row 0 computes tokens 0..2, its block table holds 2 with them"):
        engine.step()


def test_gate_rejects_a_move_that_leaves_the_sampler_state_behind(monkeypatch: pytest.MonkeyPatch):
    engine = tiny_engine(num_blocks=12, max_batch_size=2, compact_rows=True)
    monkeypatch.setattr(Rows, "move", lambda rows, **move: None)  # the fault
    engine.submit(Request((5,), replace(GREEDY, max_tokens=1), "brief"))
    engine.submit(Request((6,), replace(GREEDY, max_tokens=9), "long"))
    with at_level("cheap"), pytest.raises(GateError, match="row 0 runs request 'long', its sampler state is ''"):
        drain(engine)  # the cheap gate's fault to find; at full the gate around the compaction fires first


def test_gate_rejects_a_compaction_that_loses_a_column(monkeypatch: pytest.MonkeyPatch):
    engine = tiny_engine(num_blocks=12, max_batch_size=2, compact_rows=True)
    move = Rows.move

    def forgets_the_seed(rows: Rows, *, src: int, dst: int) -> None:
        seed = rows.seed[dst]
        move(rows, src=src, dst=dst)
        rows.seed[dst] = seed

    monkeypatch.setattr(Rows, "move", forgets_the_seed)
    engine.submit(Request((5,), replace(GREEDY, max_tokens=1), "brief"))
    engine.submit(Request((6,), replace(GREEDY, max_tokens=9, seed=77), "long"))
    with pytest.raises(GateError, match="gate compact.right: row 1 -> 0: seed was 77"):
        drain(engine)


def test_a_move_onto_a_tenant_is_refused():
    cache = tiny_engine(num_blocks=8).cache
    for row in (0, 1):
        cache.adopt_row(row, cache.allocator.allocate(1))
    with pytest.raises(ValueError, match="row 0 still holds 1 blocks"):
        cache.move_row(src=1, dst=0)


# ---- any order --------------------------------------------------------------------------------------------------


@given(
    tokens=st.lists(st.integers(0, 60), min_size=1, max_size=20),
    poison=st.sampled_from([float("nan"), 1e4]),
    compact=st.booleans(),
)
def test_what_lies_in_free_blocks_tails_and_the_sink_moves_no_token(tokens: list[int], poison: float, compact: bool):
    def run(spoil: bool) -> list[list[int]]:
        engine = tiny_engine(block_size=4, num_blocks=9, max_batch_size=3, max_model_len=36, compact_rows=compact)
        params = replace(GREEDY, max_tokens=8)
        for i, stop in enumerate((1, 3, 8)):
            engine.submit(Request(tuple(tokens[: 7 * i + 1]), replace(params, max_tokens=stop), f"r{i}"))
        answers: dict[str, list[int]] = {f"r{i}": [] for i in range(3)}
        while engine.has_work:
            if spoil:
                live = {slot for table in engine.cache.tables for slot in table.slots(0, table.length)}
                dead = [slot for slot in range(engine.cache.num_slots + 1) if slot not in live]
                for pool in (*engine.cache.k, *engine.cache.v):
                    pool[dead] = poison
            for event in engine.step():
                answers[event.request_id].append(event.token_id)
        return list(answers.values())

    assert run(spoil=True) == run(spoil=False)
