"""All rows at once choose what the reference chooses row by row, and no row hears of another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fast.rows import Rows, Sequence
from fast.sampling import NO_TOKEN, Sampled, _cut_nucleus, sample_rows, uniform
from gates import GateError
from reference.request import Request, SamplingParams
from reference.sampling import UnusableLogits, sample
from reference.sampling import uniform as reference_uniform
from tests.strategies import sampling_params

VOCAB = 61
EOS = (2, 5)
INT64 = st.integers(-(2**63), 2**63 - 1)


def tenant(params: SamplingParams, prompt: tuple[int, ...] = (7, 7, 9), answer: tuple[int, ...] = ()) -> Sequence:
    ends = params.stop_token_ids if params.ignore_eos else (*EOS, *params.stop_token_ids)
    return Sequence(
        request=Request(prompt, params, "tenant"),
        arrival=0,
        seed=params.seed or 0,
        ends=frozenset(ends),
        forbidden=tuple(sorted({*EOS, *params.stop_token_ids})),
        max_tokens=32,
        tokens=[*prompt, *answer],
    )


def choose(logits: torch.Tensor, tenants: list[Sequence]) -> Sampled:  # [N, V]
    """Seat the tenants in rows 1.. in reverse order, so that a row's index is never its place in the batch."""
    rows = Rows(len(tenants) + 1)
    index = [len(tenants) - n for n in range(len(tenants))]
    for row, one in zip(index, tenants, strict=True):
        rows.admit(row, one)
    return sample_rows(logits, rows, index=index, positions=[len(one.tokens) for one in tenants])


def reference(logits: torch.Tensor, one: Sequence):  # [V]
    request = one.request
    return sample(
        logits,
        request.params,
        prompt_ids=request.prompt_ids,
        output_ids=one.tokens[len(request.prompt_ids) :],
        position=len(one.tokens),
        seed=one.seed,
        eos_token_ids=EOS,
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[Sequence]]:
    """Rows of logits, a third of them full of ties and with ids at -inf, and a tenant for each."""
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    logits, tenants = [], []
    for _ in range(draw(st.integers(1, 5))):
        row = torch.randn(VOCAB, generator=generator, dtype=torch.float64) * draw(st.sampled_from([0.1, 3.0, 30.0]))
        kind = draw(st.sampled_from(["smooth", "smooth", "ties"]))
        params = draw(sampling_params(VOCAB))
        if kind == "ties":
            row = row.clamp(-2, 2).round()
            row[draw(st.integers(0, VOCAB - 1))] = float("-inf")
            params = replace(params, top_p=1.0)  # a prefix that reaches top_p exactly is decided by rounding
        answer = draw(st.lists(st.integers(0, VOCAB - 1), max_size=6))
        logits.append(row)
        tenants.append(tenant(params, answer=tuple(answer)))
    return torch.stack(logits), tenants


# ---- holds ------------------------------------------------------------------------------------------------------


@given(batch=batches())
def test_each_row_chooses_what_the_reference_chooses(batch: tuple[torch.Tensor, list[Sequence]]):
    logits, tenants = batch
    got = choose(logits, tenants)
    for n, one in enumerate(tenants):
        token, logprobs = reference(logits[n], one)
        assert got.token_ids[n] == token, one.request.params
        assert got.errors[n] is None
        assert (got.logprobs[n] is None) == (logprobs is None)
        if logprobs is not None:
            assert got.logprobs[n].rank == logprobs.rank
            assert got.logprobs[n].logprob == pytest.approx(logprobs.logprob, abs=1e-9)
            assert [i for i, _ in got.logprobs[n].top] == [i for i, _ in logprobs.top]


@given(seed=INT64, position=st.integers(0, 2**40))
def test_a_draw_is_the_references_number_for_any_seed(seed: int, position: int):
    drawn = uniform(np.array([0, seed]), np.array([1, position]))
    assert drawn[1] == reference_uniform(seed, position)
    assert drawn[0] == reference_uniform(0, 1)


@given(batch=batches(), data=st.data())
def test_a_row_alone_or_in_any_company_is_the_same(batch: tuple[torch.Tensor, list[Sequence]], data: st.DataObject):
    logits, tenants = batch
    together = choose(logits, tenants)
    order = data.draw(st.permutations(range(len(tenants))))
    shuffled = choose(logits[list(order)], [tenants[n] for n in order])
    for place, n in enumerate(order):
        alone = choose(logits[n : n + 1], [tenants[n]])
        assert alone.token_ids[0] == together.token_ids[n] == shuffled.token_ids[place]
        assert alone.logprobs[0] == together.logprobs[n] == shuffled.logprobs[place]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("changes", [{}, {"top_p": 0.9}, {"top_k": 1}, {"min_p": 1.0}, {"presence_penalty": 1.0}])
def test_greedy_takes_the_lowest_id_among_ties_alone_and_mixed(dtype: torch.dtype, changes: dict):
    logits = torch.tensor([[1.0, 1.0, 0.0]] * 2, dtype=dtype)
    greedy = tenant(SamplingParams(temperature=0.0, **changes), prompt=(2,))
    noisy = tenant(SamplingParams(temperature=0.9, seed=3), prompt=(2,))
    assert choose(logits[:1], [greedy]).token_ids == [0]
    assert choose(logits, [noisy, greedy]).token_ids[1] == 0


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-12, 5e-324])
def test_a_tiny_temperature_is_greedy_and_overflows_nowhere(temperature: float):
    logits = torch.linspace(-11, 11, VOCAB, dtype=torch.float16)[None]
    assert choose(logits, [tenant(SamplingParams(temperature=temperature, seed=1))]).token_ids == [VOCAB - 1]


def test_penalties_tell_prompt_from_answer():
    logits = torch.full((1, VOCAB), -10.0)
    logits[0, 7], logits[0, 11] = 2.1, 2.0

    def answer(steps: int, **penalty: float) -> list[int]:
        one = tenant(SamplingParams(temperature=0.0, **penalty))
        for _ in range(steps):
            one.tokens += choose(logits, [one]).token_ids
        return one.tokens[3:]

    assert answer(1, repetition_penalty=2.0) == [11]
    assert answer(2, presence_penalty=1.5) == [7, 11]
    assert answer(3, frequency_penalty=1.0) == [7, 11, 7]
    logits = torch.full((1, VOCAB), -0.8)
    logits[0, 7] = -0.5
    assert answer(1, repetition_penalty=2.0) != [7]


@pytest.mark.parametrize("top_p", [1e-4, 0.3, 0.9, 0.999999, 1.0 - 2**-53])
@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_the_nucleus_of_a_large_vocabulary_equals_a_full_sort(top_p: float, spread: float):
    scores = np.random.default_rng(5).normal(size=50_000) * spread
    mass = np.exp(scores - scores.max())
    mass /= mass.sum()
    order = np.argsort(-mass, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(mass[order])[:-1]])
    wanted = np.sort(order[before < top_p * np.cumsum(mass)[-1]])
    _cut_nucleus(mass, top_p)
    assert np.flatnonzero(mass).tolist() == wanted.tolist()


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_without_a_usable_number_fails_alone(poison: float, temperature: float):
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tenants = [tenant(SamplingParams(temperature=temperature, seed=n, logprobs=1)) for n in range(3)]
    calm = choose(logits, tenants)
    logits[1, 17] = poison
    got = choose(logits, tenants)
    with pytest.raises(UnusableLogits):
        reference(logits[1], tenants[1])
    assert "NaN or +inf" in got.errors[1]
    assert (got.token_ids[1], got.logprobs[1]) == (NO_TOKEN, None)
    assert [got.token_ids[n] for n in (0, 2)] == [calm.token_ids[n] for n in (0, 2)]
    assert [got.errors[n] for n in (0, 2)] == [None, None]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_with_every_id_masked_fails_alone(temperature: float):
    logits = torch.full((2, VOCAB), float("-inf"), dtype=torch.float64)
    logits[:, 2] = 1.0  # the only id is an EOS, which min_tokens forbids
    strict = tenant(SamplingParams(temperature=temperature, min_tokens=1, seed=0))
    free = tenant(SamplingParams(temperature=temperature, seed=0))
    got = choose(logits, [strict, free])
    with pytest.raises(UnusableLogits):
        reference(logits[0], strict)
    assert "masked" in got.errors[0]
    assert got.token_ids == [NO_TOKEN, 2]


def test_a_raw_row_of_nothing_but_minus_infinity_fails():
    logits = torch.full((1, VOCAB), float("-inf"))
    assert "masked" in choose(logits, [tenant(SamplingParams(temperature=0.0))]).errors[0]


def test_gate_rejects_an_end_that_comes_before_min_tokens(monkeypatch: pytest.MonkeyPatch):
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 9.0
    one = tenant(SamplingParams(temperature=0.0, min_tokens=3))
    assert choose(logits, [one]).token_ids != [5]
    monkeypatch.setattr("fast.sampling._change", lambda *args: None)  # the fault: a mask that is never applied
    with pytest.raises(GateError, match="token 5 chosen"):
        choose(logits, [one])


def test_gate_rejects_a_cut_that_keeps_more_than_top_k(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fast.sampling._cut", lambda *args, **kwargs: None)  # the fault
    with pytest.raises(GateError, match="61 tokens kept, top_k is 2"):
        choose(torch.zeros(1, VOCAB), [tenant(SamplingParams(top_k=2, seed=0))])


# ---- any order --------------------------------------------------------------------------------------------------


@given(params=sampling_params(VOCAB), seed=st.integers(0, 2**31))
def test_counting_tokens_one_by_one_equals_a_fresh_admission(params: SamplingParams, seed: int):
    generator = torch.Generator().manual_seed(seed)
    params = replace(params, max_tokens=12, min_tokens=min(params.min_tokens, 3))
    one, rows = tenant(params), Rows(1)
    rows.admit(0, one)
    for _ in range(6):
        logits = torch.randn(1, VOCAB, generator=generator, dtype=torch.float64)
        kept = sample_rows(logits, rows, index=[0], positions=[len(one.tokens)])
        fresh = choose(logits, [tenant(params, answer=tuple(one.tokens[3:]))])
        assert kept == fresh
        one.tokens.append(kept.token_ids[0])
        rows.count(0, kept.token_ids[0])


@pytest.mark.parametrize("kept", range(1, 12))
@pytest.mark.parametrize("tied", [2, 3, 6, 7, 10, 12])
def test_a_nucleus_of_tied_logits_is_the_definitions(tied: int, kept: int):
    if kept >= tied:
        return
    logits = torch.full((40,), -50.0, dtype=torch.float64)
    logits[3 : 3 + tied] = 1.0
    params = SamplingParams(temperature=1.0, top_p=kept / tied, seed=0)
    for seed in range(20):
        one = replace(params, seed=seed)
        wanted, _ = sample(logits, one, prompt_ids=(1,), output_ids=(), position=1, seed=seed, eos_token_ids=())
        sequence = Sequence(Request((1,), one), 0, seed, frozenset(), (), 8, [1])
        rows = Rows(1)
        rows.admit(0, sequence)
        assert sample_rows(logits[None], rows, index=(0,), positions=(1,)).token_ids == [wanted]
