"""A finished request run again, alone: the same bits, or one gate says so; and nobody else is held up by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fast.engine import Engine
from fast.recheck import PART, Recheck
from gates import GateError
from gates.recheck import check_rerun_keeps_bits
from reference.request import Request, SamplingParams
from tests.harness import TINY, tiny_weights

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def engine(every: int = 1, **limits: int) -> Engine:
    sizes = {"max_batch_size": 3, "num_blocks": 12, "block_size": 16, "max_model_len": 96} | limits
    made = Engine.build(
        TINY,
        tiny_weights(),
        **sizes,
        kernels=True,
        bucket_decode=True,
        persist_inputs=True,
        compact_rows=True,
        threads=1,
    )
    made.recheck = Recheck(made.forward, made.cache, every=every)
    return made


def requests(count: int, **change: object) -> list[Request]:
    params = replace(GREEDY, **change)
    return [Request(tuple(range(1 + n, 9 + 7 * n)), params, f"r{n}") for n in range(count)]


def turns(made: Engine) -> int:
    count = 0
    while made.idle():
        count += 1
    return count


# ---- holds ----


@pytest.mark.parametrize("change", [{}, {"temperature": 0.9, "seed": 5}, {"logprobs": 3}, {"frequency_penalty": 0.5}])
def test_a_request_among_others_has_its_bits_alone(change: dict) -> None:
    made = engine()
    made.generate(requests(5, **change))
    # The last that ended is kept; one forward for its short prompt and one for each further token.
    assert turns(made) == GREEDY.max_tokens
    assert made.stats()["rechecked"] == 1


def test_a_preempted_request_has_its_bits_alone() -> None:
    made = engine(num_blocks=5, max_model_len=80)
    made.generate(requests(5, max_tokens=40))
    assert made.stats()["preemptions"] > 0
    assert turns(made) == 40
    assert made.stats()["rechecked"] == 1


def test_one_request_in_so_many_is_watched() -> None:
    made = engine(every=3)
    seen = []
    for request in requests(7):
        made.generate([request])
        seen.append(turns(made) > 0)
    assert seen == [True, False, False, True, False, False, True]


def test_a_new_request_ends_the_rerun_and_its_blocks_are_free() -> None:
    made = engine(every=2)
    made.generate(requests(1))
    made.idle()
    assert made.cache.allocator.num_owned > 0
    assert made.stats()["free_blocks"] == 12
    late = replace(requests(1)[0], id="late")
    made.submit(late)
    assert made.cache.allocator.num_owned == 0
    assert not made.idle()
    while made.has_work:
        made.step()
    assert turns(made) == GREEDY.max_tokens  # begun anew, for `late` is not watched
    assert made.cache.allocator.num_owned == 0


@pytest.mark.parametrize("prompt", [PART - 1, PART, PART + 1, 2 * PART, 2 * PART + 1])
def test_a_long_prompt_holds_a_new_request_up_for_a_part_of_it(prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(num_blocks=24, max_model_len=144)
    made.generate([Request(tuple(n % 40 + 1 for n in range(prompt)), GREEDY, "long")])
    computed, prefill = [], made.forward.prefill
    monkeypatch.setattr(
        made.forward, "prefill", lambda chunks, cache: (computed.append(chunks), prefill(chunks, cache))[1]
    )
    parts = -(-prompt // PART)
    assert turns(made) == parts + GREEDY.max_tokens - 1
    assert made.stats()["rechecked"] == 1
    sizes = [len(chunk.token_ids) for chunks in computed for chunk in chunks]
    assert max(sizes) <= PART
    assert sum(sizes) == prompt + GREEDY.max_tokens - 1


def test_an_aborted_request_is_not_run_again() -> None:
    made = engine()
    [request] = requests(1)
    made.submit(request)
    made.step()
    made.abort(request.id)
    made.step()
    assert turns(made) == 0


# ---- rejects ----


@pytest.mark.parametrize("token", [0, 3, 5])
def test_gate_rejects_a_changed_bit(token: int) -> None:
    made = engine()
    made.generate(requests(2))
    assert made.recheck._ended is not None
    digest = made.recheck._ended.digests[token]
    made.recheck._ended.digests[token] = bytes([digest[0] ^ 1]) + digest[1:]
    with pytest.raises(GateError, match=rf"recheck\.rerun: request r1, answer token {token}: logits"):
        turns(made)
    assert made.cache.allocator.num_owned == 0
    assert made.stats()["rechecked"] == 0
    made.generate([replace(requests(1)[0], id="next")])
    assert turns(made) == GREEDY.max_tokens


def test_gate_rejects_a_neighbours_key_read_under_load() -> None:
    """K of one slot changes while a request runs, as a neighbour's write would: tokens may agree, bits do not."""
    made = engine()
    [request] = requests(1)
    made.submit(request)
    made.step()
    assert made.cache.kernel_pool is not None
    made.cache.kernel_pool.fill([made.cache.tables[0].slot(2)], 0.25)
    while made.has_work:
        made.step()
    with pytest.raises(GateError, match=r"recheck\.rerun"):
        turns(made)


def test_gate_rejects_two_digests_and_names_both() -> None:
    with pytest.raises(GateError, match="request a, answer token 4: logits 01 under load, 02 alone"):
        check_rerun_keeps_bits(request_id="a", token=4, under_load=b"\1", alone=b"\2")


def test_a_backend_that_promises_nothing_is_refused() -> None:
    plain = Engine.build(TINY, tiny_weights(), num_blocks=8, max_model_len=64)
    with pytest.raises(ValueError, match="recheck_every: 5 needs a backend that keeps bits, and torch's matrix"):
        Recheck(plain.forward, plain.cache, every=5)


def test_every_has_a_range() -> None:
    made = engine()
    with pytest.raises(ValueError, match="recheck_every: -1 is negative"):
        Recheck(made.forward, made.cache, every=-1)


# ---- any order ----


@pytest.mark.parametrize("every", [0, 1])
def test_nothing_is_watched_unless_it_was_asked_for(every: int) -> None:
    made = engine(every)
    made.generate(requests(2))
    assert (turns(made) > 0) == bool(every)
