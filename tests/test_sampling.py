"""Sampling: every step of the order in `SamplingParams`, the draws, and the faults public engines had here."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gates import GateError
from gates.sampling import check_draw_position, check_end_allowed, check_kept_set, check_token_allowed
from reference.request import LOGPROB_FLOOR, SEED_RANGE, SamplingParams, TokenLogprobs
from reference.sampling import (
    UnusableLogits,
    draw_token,
    forbidden_ids,
    greedy_token,
    keep,
    penalize,
    philox4x32,
    probabilities,
    sample,
    uniform,
)

INF = math.inf
LAST_U = 1 - 2**-53  # the largest number `uniform` can return


def choose(
    logits: list[float] | torch.Tensor,
    params: SamplingParams,
    *,
    prompt: tuple[int, ...] = (0,),
    output: tuple[int, ...] = (),
    seed: int = 0,
    eos: tuple[int, ...] = (),
) -> tuple[int, TokenLogprobs | None]:
    """`sample` with the position that the sequence's length gives."""
    row = logits if isinstance(logits, torch.Tensor) else torch.tensor(logits, dtype=torch.float64)
    position = len(prompt) + len(output)
    return sample(row, params, prompt_ids=prompt, output_ids=output, position=position, seed=seed, eos_token_ids=eos)


def answer(
    logits: list[float], params: SamplingParams, *, prompt: tuple[int, ...], steps: int, **rest: Any
) -> list[int]:
    """`steps` tokens when the model says the same row of logits every time."""
    output: list[int] = []
    for _ in range(steps):
        output.append(choose(logits, params, prompt=prompt, output=tuple(output), **rest)[0])
    return output


def row(size: int, default: float, **at: float) -> list[float]:
    """`size` logits of `default`, but `_7=2.1` puts 2.1 at id 7."""
    logits = [default] * size
    for name, value in at.items():
        logits[int(name[1:])] = value
    return logits


def masses(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def kept_ids(probs: torch.Tensor, **fields: Any) -> list[int]:
    return (keep(probs, SamplingParams(**fields)) > 0).nonzero().flatten().tolist()


# ---- holds: the draws -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers that Random123 publishes for philox4x32-10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter: Any, key: Any, words: Any):
    assert philox4x32(counter, key) == words


def test_a_draw_is_the_upper_53_bits_of_the_first_two_words():
    assert uniform(0, 0) == ((0xE169C58D << 32 | 0x6627E8D5) >> 11) * 2.0**-53


@pytest.mark.parametrize("seed", [SEED_RANGE[0], -1, 0, 1, 2**32 - 1, 2**32, SEED_RANGE[1]])
def test_every_int64_is_a_seed_of_its_own(seed: int):
    others = {SEED_RANGE[0], -1, 0, 1, 2**32 - 1, 2**32, SEED_RANGE[1]} - {seed}
    assert uniform(seed, 5) not in {uniform(other, 5) for other in others}


def test_positions_past_32_bits_are_not_folded_back():
    assert len({uniform(1, 7), uniform(1, 7 + 2**32), uniform(1, 7 + 2**33)}) == 3


def test_draws_fill_the_unit_interval_evenly():
    # 4096 draws into 16 parts: 256 each, standard deviation 15.5; six of them is out of reach for a fair source.
    parts = [0] * 16
    for position in range(4096):
        parts[int(uniform(42, position) * 16)] += 1
    assert all(abs(count - 256) < 93 for count in parts)


# ---- holds: one row ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 1}, {"min_p": 0.5}, {"seed": 3}])
def test_greedy_takes_the_lowest_id_among_ties_whatever_else_is_set(dtype: torch.dtype, fields: dict[str, Any]):
    greedy = SamplingParams(temperature=0, **fields)
    for seed in range(50):
        assert choose(torch.tensor([1.0, 1.0, 0.0], dtype=dtype), greedy, seed=seed)[0] == 0
        choose(torch.tensor([1.0, 1.0, 0.0], dtype=dtype), SamplingParams(temperature=0.9), seed=3)


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-12, 1e-310, 5e-324])
def test_a_tiny_temperature_is_greedy_and_never_nan(temperature: float):
    logits = torch.tensor([3.0, 11.0, 10.9, -11.0, 0.0], dtype=torch.float16)
    for seed in range(20):
        assert choose(logits, SamplingParams(temperature=temperature), seed=seed)[0] == 1
    assert probabilities(logits.double(), temperature).tolist() == [0, 1, 0, 0, 0]


def test_a_tiny_top_p_keeps_the_most_likely_token():
    for seed in range(20):
        assert choose([1.0, 3.0, 2.0], SamplingParams(top_p=0.0001), seed=seed)[0] == 1


def test_a_tiny_temperature_shares_a_tie_between_the_tied_alone():
    drawn = {choose([2.0, 5.0, 5.0, 4.9], SamplingParams(temperature=1e-12), seed=seed)[0] for seed in range(60)}
    assert drawn == {1, 2}


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_holds_back_every_end_id(ignore_eos: bool):
    params = SamplingParams(min_tokens=4, logit_bias={5: 100}, temperature=0, ignore_eos=ignore_eos)
    tokens = answer(row(12, 0.0, _2=9.0), params, prompt=(1,), steps=5, eos=(2, 5))
    assert not {2, 5} & set(tokens[:4])
    assert tokens[4] == 5


def test_min_tokens_holds_back_stop_ids_too():
    params = SamplingParams(min_tokens=4, logit_bias={9: 100}, temperature=0, stop_token_ids=(9,))
    tokens = answer(row(12, 0.0, _2=9.0), params, prompt=(1,), steps=5, eos=(2,))
    assert not {2, 9} & set(tokens[:4])
    assert tokens[4] == 9


def test_repetition_penalty_reaches_prompt_tokens_at_the_first_step():
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert answer(row(12, -10.0, _7=2.1, _11=2.0), params, prompt=(7, 7, 9), steps=1) == [11]


def test_repetition_penalty_lowers_a_negative_logit():
    logits = row(12, -0.8, _7=-0.5)
    scores = penalize(torch.tensor(logits), SamplingParams(repetition_penalty=2.0), prompt_ids=[7, 7, 9], output_ids=[])
    assert scores[7] == -1.0
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert answer(logits, params, prompt=(7, 7, 9), steps=1) != [7]


def test_repetition_penalty_counts_an_id_once_however_often_it_came():
    once = penalize(masses(4.0), SamplingParams(repetition_penalty=2.0), prompt_ids=[0], output_ids=[])
    often = penalize(masses(4.0), SamplingParams(repetition_penalty=2.0), prompt_ids=[0, 0], output_ids=[0, 0])
    assert once.tolist() == often.tolist() == [2.0]


def test_presence_penalty_spares_the_prompt():
    params = SamplingParams(temperature=0, presence_penalty=1.5)
    assert answer(row(12, -10.0, _7=2.1, _11=2.0), params, prompt=(7, 7, 9), steps=2) == [7, 11]


def test_frequency_penalty_spares_the_prompt_and_grows_with_each_use():
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    assert answer(row(12, -10.0, _7=2.1, _11=2.0), params, prompt=(7, 7, 9), steps=3) == [7, 11, 7]


def test_penalties_and_masks_leave_the_models_row_alone():
    logits = masses(1.0, 2.0, 3.0)
    params = SamplingParams(
        repetition_penalty=2, presence_penalty=1, logit_bias={1: 5}, min_tokens=3, stop_token_ids=[2]
    )
    choose(logits, params, prompt=(0, 1), output=(2,))
    assert logits.tolist() == [1.0, 2.0, 3.0]


def test_a_bias_of_minus_100_is_no_mask_and_one_of_100_decides():
    assert choose([0.0, 150.0, 0.0], SamplingParams(temperature=0, logit_bias={1: -100}))[0] == 1
    assert choose([0.0, 0.0, 0.0], SamplingParams(temperature=0, logit_bias={2: 100}))[0] == 2


@pytest.mark.parametrize(("k", "ids"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])])
def test_top_k_keeps_exactly_k_with_lower_ids_first(k: int, ids: list[int]):
    assert kept_ids(masses(0.125, 0.375, 0.25, 0.25), top_k=k) == ids


@pytest.mark.parametrize(
    ("p", "ids"),
    [(1e-9, [3]), (0.5, [3]), (0.5 + 1e-9, [1, 3]), (0.75, [1, 3]), (0.76, [0, 1, 3]), (0.99, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_shortest_prefix_that_reaches_p(p: float, ids: list[int]):
    assert kept_ids(masses(0.125, 0.25, 0.125, 0.5), top_p=p) == ids


def test_top_p_1_drops_nothing_however_small():
    assert kept_ids(masses(1.0, 1e-300, 1e-17), top_p=1.0) == [0, 1, 2]


def test_top_p_is_a_share_of_what_top_k_kept():
    # 0.5 of the mass 0.75 that two tokens hold is 0.375: the first token alone reaches it.
    assert kept_ids(masses(0.375, 0.375, 0.25), top_k=2, top_p=0.5) == [0]


@pytest.mark.parametrize(("p", "ids"), [(0.0, [0, 1, 2]), (0.25, [0, 1, 2]), (0.26, [0, 1]), (0.5, [0, 1]), (1.0, [1])])
def test_min_p_is_relative_to_the_most_likely_token(p: float, ids: list[int]):
    assert kept_ids(masses(0.25, 0.5, 0.125), min_p=p) == ids


def test_a_draw_goes_in_id_order_and_skips_what_was_dropped():
    kept = masses(0.0, 0.25, 0.0, 0.5, 0.0)
    for u, token in [(0.0, 1), (0.33, 1), (0.34, 3), (LAST_U, 3)]:
        assert draw_token(kept, u) == token


def test_the_end_of_the_running_mass_never_falls_off_the_row():
    for size in (1, 3, 7, 1000):
        kept = torch.full((size + 2,), 1 / 3, dtype=torch.float64)
        kept[-2:] = 0.0
        assert draw_token(kept, LAST_U) == size - 1
    smallest = masses(0.0, 5e-324, 0.0)  # u * mass rounds up to the mass itself
    assert draw_token(smallest, LAST_U) == 1


def test_logprobs_are_the_models_own():
    params = SamplingParams(temperature=0.2, logit_bias={0: 100}, repetition_penalty=3, top_k=1, logprobs=2)
    token, logprobs = choose([math.log(1.0), math.log(5.0), math.log(2.0)], params, prompt=(1,))
    assert token == 0
    assert logprobs is not None
    assert logprobs.rank == 3
    assert logprobs.logprob == pytest.approx(math.log(1 / 8), rel=1e-12)
    assert [i for i, _ in logprobs.top] == [1, 2]
    assert [value for _, value in logprobs.top] == pytest.approx([math.log(5 / 8), math.log(2 / 8)], rel=1e-12)


def test_logprobs_survive_json_when_a_token_is_impossible():
    params = SamplingParams(temperature=1, top_k=1, logprobs=3, logit_bias={0: 1})
    _, logprobs = choose([0.0, -INF, -1e6], params)
    assert logprobs is not None
    assert logprobs.top[-1] == (1, LOGPROB_FLOOR)
    json.dumps([logprobs.logprob, *(value for _, value in logprobs.top)], allow_nan=False)


def test_ranks_and_top_tokens_break_ties_by_lower_id():
    params = SamplingParams(temperature=0, logprobs=3, logit_bias={2: 1})
    token, logprobs = choose([1.0, 1.0, 1.0], params)
    assert logprobs is not None
    assert (token, logprobs.rank, [i for i, _ in logprobs.top]) == (2, 3, [0, 1, 2])


@pytest.mark.parametrize(("asked", "given"), [(None, None), (0, 0), (2, 2), (20, 3)])
def test_as_many_logprobs_as_asked_and_the_vocabulary_has(asked: int | None, given: int | None):
    _, logprobs = choose([1.0, 2.0, 3.0], SamplingParams(temperature=0, logprobs=asked))
    assert (None if logprobs is None else len(logprobs.top)) == given


def test_no_global_random_state_is_read_or_moved():
    before = torch.get_rng_state()
    first = choose([1.0, 1.1, 0.9], SamplingParams(), seed=9)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    assert choose([1.0, 1.1, 0.9], SamplingParams(), seed=9) == first


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_and_infinity_are_named_and_located(bad: float, temperature: float):
    with pytest.raises(UnusableLogits, match="NaN or \\+inf at token id 2"):
        choose([1.0, -INF, bad, 0.0], SamplingParams(temperature=temperature))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_left_is_refused(temperature: float):
    params = SamplingParams(temperature=temperature, min_tokens=1, stop_token_ids=(0, 1))
    with pytest.raises(UnusableLogits, match="every token id is masked"):
        choose([1.0, 2.0, 3.0], params, eos=(2,))
    with pytest.raises(UnusableLogits, match="every token id is masked"):
        choose([-INF, -INF], SamplingParams(temperature=temperature))


def test_gate_rejects_a_row_that_draws_at_its_neighbours_position():
    held = {"a": 5, "b": 9, "c": 12}
    rows_before, rows_after = ["a", "b", "c"], ["a", "c", "b"]  # b and c were swapped, the sampler's columns were not
    positions = [held[request] for request in rows_before]
    with pytest.raises(GateError, match=r"draws at position 9, its request holds 12 tokens \[first at row 1; 2 of 3\]"):
        check_draw_position(positions=positions, known_tokens=[held[request] for request in rows_after])
    with pytest.raises(GateError, match="2 rows draw, 3 requests wait"):
        check_draw_position(positions=positions[:2], known_tokens=list(held.values()))


def test_gate_rejects_a_draw_at_a_position_counted_without_the_prompt():
    params = SamplingParams(temperature=0)
    with pytest.raises(GateError, match=r"draw_position: draws at position 1, its request holds 4 tokens"):
        sample(masses(1.0), params, prompt_ids=[0, 0, 0], output_ids=[0], position=1, seed=0, eos_token_ids=[])


def test_gate_rejects_an_end_id_that_a_mask_forgot():
    params = SamplingParams(min_tokens=4)
    first_id_only = [2]  # what an engine masked that knew one EOS id
    scores = masses(0.0, 0.0, 9.0, 0.0, 0.0, 8.0)
    scores[first_id_only] = -INF
    forbidden = forbidden_ids(params, num_output_tokens=0, eos_token_ids=[2, 5])
    with pytest.raises(GateError, match="token 5 chosen, it would end an answer that is shorter than min_tokens"):
        check_token_allowed(token_ids=[greedy_token(scores)], vocab_size=6, forbidden_ids=[forbidden])


def test_gate_rejects_an_answer_that_an_unmasked_id_ended_early():
    check_end_allowed(output_tokens=5, min_tokens=4)
    with pytest.raises(GateError, match="the answer was ended by its token 4, min_tokens is 4"):
        check_end_allowed(output_tokens=4, min_tokens=4)


def test_gate_rejects_a_token_past_the_vocabulary():
    beyond = int((masses(0.5, 0.5).cumsum(0) > 1.0).sum()) + 2  # an index one past the end, as a bare search gives
    with pytest.raises(GateError, match=r"token 2 chosen, the vocabulary ends at 1 \[first at row 1; 1 of 2\]"):
        check_token_allowed(token_ids=[1, beyond], vocab_size=2, forbidden_ids=[[], []])
    with pytest.raises(GateError, match="1 tokens chosen, 2 rows asked"):
        check_token_allowed(token_ids=[1], vocab_size=2, forbidden_ids=[[], []])


def test_gate_rejects_top_k_by_threshold():
    # Keeping everything at or above the k-th value keeps more than k when values tie there.
    probs = masses(0.4, 0.2, 0.2, 0.2)
    by_threshold = probs >= probs.sort(descending=True).values[1]
    with pytest.raises(GateError, match="4 tokens kept, top_k is 2"):
        check_kept_set(num_kept=int(by_threshold.sum()), top_k=2)


def test_gate_rejects_an_empty_kept_set():
    # A prefix whose mass stays within top_p is empty when the first token alone is past it.
    probs = masses(0.9, 0.1)
    within = probs.cumsum(0) <= 0.5
    with pytest.raises(GateError, match="0 tokens kept, a draw needs at least 1"):
        check_kept_set(num_kept=int(within.sum()), top_k=0)


# ---- any order --------------------------------------------------------------------------------------------------

SEEDS = st.integers(*SEED_RANGE)
LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=24)
WEIGHTS = st.lists(st.integers(0, 2**20), min_size=1, max_size=24).filter(any)  # exact in float64, sums included
SIXTEENTHS = st.integers(1, 16).map(lambda n: n / 16)


def expected_kept(weights: list[int], *, min_p: float, top_k: int, top_p: float) -> set[int]:
    """The definition again, in exact fractions and plain Python."""
    kept = {i: Fraction(w) for i, w in enumerate(weights) if w and w >= Fraction(min_p) * max(weights)}
    order = sorted(kept, key=lambda i: (-kept[i], i))[: top_k or None]
    total, running, prefix = sum(kept[i] for i in order), Fraction(0), set()
    for i in order:
        if running >= Fraction(top_p) * total:
            break
        prefix.add(i)
        running += kept[i]
    return prefix


@given(WEIGHTS, SIXTEENTHS, st.integers(0, 26), SIXTEENTHS)
def test_what_is_kept_equals_the_definition_in_exact_fractions(
    weights: list[int], min_p: float, top_k: int, top_p: float
):
    kept = keep(masses(*weights), SamplingParams(min_p=min_p, top_k=top_k, top_p=top_p))
    ids = set(kept.nonzero().flatten().tolist())
    assert ids == expected_kept(weights, min_p=min_p, top_k=top_k, top_p=top_p)
    assert all(kept[i] == weights[i] for i in ids)


@given(WEIGHTS, st.integers(0, 2**12 - 1))
def test_a_token_is_drawn_exactly_on_its_own_stretch_of_u(weights: list[int], step: int):
    u = step / 2**12
    token = draw_token(masses(*weights), u)
    reached = Fraction(step, 2**12) * sum(weights)
    assert sum(weights[:token]) <= reached < sum(weights[: token + 1])


@given(LOGITS, st.integers(0, 24), st.floats(0.01, 1), st.floats(0, 1), SEEDS)
def test_greedy_does_not_see_top_k_top_p_min_p_or_the_seed(
    logits: list[float], k: int, top_p: float, min_p: float, seed: int
):
    bare = choose(logits, SamplingParams(temperature=0))[0]
    params = SamplingParams(temperature=0, top_k=k, top_p=top_p, min_p=min_p)
    assert choose(logits, params, seed=seed)[0] == bare == logits.index(max(logits))


@given(LOGITS, st.floats(0.05, 5), SEEDS)
def test_top_k_1_is_greedy(logits: list[float], temperature: float, seed: int):
    # Judged after the softmax, where nearly equal logits may have become equal: the lower id then wins.
    probs = probabilities(masses(*logits), temperature)
    drawn = choose(logits, SamplingParams(temperature=temperature, top_k=1), seed=seed)[0]
    assert drawn == greedy_token(probs)


@given(LOGITS, SIXTEENTHS, SIXTEENTHS, st.integers(1, 24), st.integers(1, 24))
def test_a_looser_filter_keeps_all_that_a_tighter_one_keeps(logits: list[float], p: float, q: float, j: int, k: int):
    probs = probabilities(masses(*logits), 1.0)
    tight, loose = sorted((p, q))
    assert set(kept_ids(probs, top_p=tight)) <= set(kept_ids(probs, top_p=loose))
    assert set(kept_ids(probs, min_p=loose)) <= set(kept_ids(probs, min_p=tight))
    few, many = sorted((j, k))
    assert set(kept_ids(probs, top_k=few)) <= set(kept_ids(probs, top_k=many))
    assert len(kept_ids(probs, top_k=few)) == min(few, int((probs > 0).sum()))


@given(LOGITS, st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
def test_a_higher_u_never_draws_a_lower_id(logits: list[float], u: float, v: float):
    probs = probabilities(masses(*logits), 1.0)
    assert draw_token(probs, min(u, v)) <= draw_token(probs, max(u, v))


@given(LOGITS, st.floats(0, 1, exclude_max=True), SIXTEENTHS, st.integers(0, 24))
def test_a_dropped_token_is_never_drawn(logits: list[float], u: float, top_p: float, k: int):
    kept = keep(probabilities(masses(*logits), 1.0), SamplingParams(top_p=top_p, top_k=k))
    assert kept[draw_token(kept, u)] > 0


@given(LOGITS, st.floats(0.05, 5), st.floats(0.05, 5))
def test_a_lower_temperature_never_takes_mass_from_the_best_token(logits: list[float], s: float, t: float):
    cold, warm = probabilities(masses(*logits), min(s, t)), probabilities(masses(*logits), max(s, t))
    assert cold.max() >= warm.max() * (1 - 1e-12)


@given(SEEDS, st.integers(0, 2**64 - 1))
def test_a_draw_is_a_53_bit_number_below_1(seed: int, position: int):
    u = uniform(seed, position)
    assert 0 <= u < 1
    assert (u * 2**53).is_integer()


@given(
    LOGITS,
    st.floats(1e-310, 100),
    st.floats(0.01, 100),
    st.floats(-2, 2),
    st.floats(-2, 2),
    SEEDS,
    st.lists(st.integers(0, 23), max_size=5),
)
def test_any_parameters_give_a_token_of_the_vocabulary_and_the_same_one_again(
    logits: list[float],
    temperature: float,
    repetition: float,
    presence: float,
    frequency: float,
    seed: int,
    said: list[int],
):
    params = SamplingParams(
        temperature=temperature,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logprobs=5,
    )
    output = tuple(token % len(logits) for token in said)
    first = choose(logits, params, output=output, seed=seed)
    assert 0 <= first[0] < len(logits)
    assert choose(logits, params, output=output, seed=seed) == first
    assert first[1] is not None
    assert all(LOGPROB_FLOOR <= value <= 1e-12 for _, value in first[1].top)


@given(LOGITS, st.integers(1, 6), st.integers(0, 6), st.sets(st.integers(0, 23), max_size=4), SEEDS)
def test_no_end_id_comes_before_min_tokens(logits: list[float], min_tokens: int, said: int, ends: set[int], seed: int):
    logits = [*logits, 0.0, 0.0]
    eos = tuple(token for token in ends if token < len(logits) - 2)
    params = SamplingParams(min_tokens=min_tokens, stop_token_ids=(len(logits) - 1,), temperature=2.0)
    token, _ = choose(logits, params, output=(0,) * said, seed=seed, eos=eos)
    assert said >= min_tokens or token not in {*eos, len(logits) - 1}
