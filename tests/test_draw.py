"""The kernel that draws: token for token what the numpy version chooses, and its exponential within its bound."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from fast.kernels.draw import weigh
from fast.kernels.forward import KernelForward
from fast.rows import Rows, Sequence
from fast.sampling import Sampled, sample_rows
from reference.request import Request, SamplingParams
from reference.weights import random_weights
from tests.harness import SHAPES
from tests.strategies import sampling_params
from tests.test_fast_sampling import VOCAB, tenant


@cache
def kernels() -> KernelForward:
    weights = random_weights(SHAPES["gqa"], seed=7, dtype=torch.float32)
    return KernelForward(SHAPES["gqa"], weights, max_positions=8, max_batch_size=1, threads=2)


@njit
def weights_of(x, peak, temperature):
    y = x.copy()
    weigh(y, peak, temperature)
    return y


def both(logits: torch.Tensor, tenants: list[Sequence]) -> tuple[Sampled, Sampled]:  # [N, V]
    """What the kernel and what numpy choose for the same rows, in the same order."""
    rows = Rows(len(tenants))
    for row, one in enumerate(tenants):
        rows.admit(row, one)
    index, positions = range(len(tenants)), [len(one.tokens) for one in tenants]
    plain = sample_rows(logits, rows, index=index, positions=positions)
    return sample_rows(logits, rows, index=index, positions=positions, chooser=kernels()), plain


# ---- holds ----


def test_the_exponential_is_within_two_units_of_the_last_place() -> None:
    x = np.concatenate([np.linspace(-707.9, 0, 200_001), np.linspace(-1, 0, 50_000)])
    true = np.exp(x)
    assert np.abs(weights_of(x, 0.0, 1.0) / true - 1).max() < 2 * 2.0**-52


def test_the_peak_weighs_one_and_what_is_masked_or_far_nothing() -> None:
    x = np.array([3.0, -np.inf, 2.0, -800.0, 3.0])
    got = weights_of(x, 3.0, 1.0)
    assert got[[0, 1, 3, 4]].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert weights_of(x, 3.0, 1e-300).tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("gap", [0, 3])
def test_rows_of_a_buffer_with_gaps_are_drawn_from_their_own_logits(gap: int) -> None:
    buffer = torch.randn(4, VOCAB + gap, generator=torch.Generator().manual_seed(1))
    buffer[:, VOCAB:] = 99.0
    tenants = [tenant(SamplingParams(temperature=1.0, seed=seed)) for seed in range(4)]
    kernel, plain = both(buffer[:, :VOCAB], tenants)
    assert kernel == plain


@pytest.mark.parametrize("size", [511, 513, 5000])
def test_a_large_vocabulary_is_cut_and_drawn_from_as_numpy_does(size: int) -> None:
    logits = torch.randn(64, size, generator=torch.Generator().manual_seed(size)) * 3
    params = [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.02}, {"top_k": 700, "top_p": 0.5, "min_p": 1e-4}]
    tenants = [tenant(SamplingParams(temperature=0.9, seed=n, **params[n % len(params)])) for n in range(64)]
    kernel, plain = both(logits, tenants)
    assert kernel == plain


# ---- rejects ----


def test_a_row_with_every_id_masked_fails_alone() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0] = -torch.inf
    logits[0, 2] = 1.0  # the one id left ends the answer, which is too short for that
    tenants = [
        tenant(SamplingParams(temperature=1.0, seed=1, min_tokens=3, max_tokens=9)),
        tenant(SamplingParams(seed=2)),
    ]
    kernel, plain = both(logits, tenants)
    assert kernel == plain
    assert [error is None for error in kernel.errors] == [False, True]


# ---- any order ----


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[Sequence]]:
    """Rows of few distinct logits, so that ties are common, and requests that ask for anything."""
    tenants = []
    for _ in range(draw(st.integers(1, 5))):
        answer = tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=6)))
        tenants.append(tenant(draw(sampling_params()), answer=answer))
    levels = draw(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=6))
    seed = draw(st.integers(0, 2**31))
    logits = np.random.default_rng(seed).choice(np.array(levels, np.float32), (len(tenants), VOCAB))
    return torch.from_numpy(logits), tenants


@given(batch=batches())
def test_any_rows_get_the_tokens_that_numpy_gives_them(batch: tuple[torch.Tensor, list[Sequence]]) -> None:
    kernel, plain = both(*batch)
    assert kernel == plain


@given(seed=st.integers(0, 2**40), top_p=st.sampled_from([1.0, 0.5, 0.9]), temperature=st.sampled_from([0.3, 1.0, 5.0]))
def test_a_draw_is_numpys_for_any_seed(seed: int, top_p: float, temperature: float) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    request = Request((1,), SamplingParams(temperature=temperature, top_p=top_p, seed=seed))
    kernel, plain = both(logits, [Sequence(request, 0, seed, frozenset(), (), 8, [1])])
    assert kernel == plain
