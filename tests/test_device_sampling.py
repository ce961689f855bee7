"""What is chosen on the device is what the host chooses, and only rows that need the host bring their logits there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given

import fast.device_sampling
from fast.device_sampling import sample_on_device
from fast.engine import Engine
from fast.rows import Rows, Sequence
from fast.sampling import NO_TOKEN, Sampled, sample_rows
from gates import GateError
from reference.request import Request, SamplingParams
from tests.gpu_mode import DEVICE
from tests.harness import TINY, tiny_reference, tiny_weights
from tests.test_fast_sampling import VOCAB, batches, tenant

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
PLAIN = SamplingParams(8, temperature=0.0, ignore_eos=True)


def both(logits: torch.Tensor, tenants: list[Sequence]) -> tuple[Sampled, Sampled]:  # [N, V]
    rows = Rows(len(tenants) + 1)
    index = [len(tenants) - n for n in range(len(tenants))]
    for row, one in zip(index, tenants, strict=True):
        rows.admit(row, one)
    how = {"index": index, "positions": [len(one.tokens) for one in tenants]}
    return sample_on_device(logits.to(DEVICE), rows, **how), sample_rows(logits, rows, **how)


# ---- holds --------------------------------------------------------------------------------------------------------


@given(batch=batches())
def test_the_device_chooses_what_the_host_chooses(batch):
    got, wanted = both(*batch)
    assert got == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_cut_alone_and_together_over_many_draws(dtype: torch.dtype):
    cuts = [{}, {"top_k": 1}, {"top_k": 7}, {"top_p": 0.4}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.7, "min_p": 0.05}]
    params = [
        SamplingParams(8, temperature=temperature, seed=seed, **cut)
        for temperature in (0.3, 1.0, 5.0)
        for seed in range(12)
        for cut in cuts
    ]
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(3)).to(dtype)
    got, wanted = both(logits, [tenant(one) for one in params])
    assert got == wanted
    assert len(set(got.token_ids)) > 20


def test_a_row_without_a_usable_number_fails_alone():
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(4))
    logits[1, 7], logits[2], logits[3, 2] = float("nan"), float("-inf"), float("inf")
    for params in (PLAIN, replace(PLAIN, temperature=1.0, top_p=0.9)):
        got, wanted = both(logits, [tenant(params)] * 5)
        assert got == wanted
        assert [token == NO_TOKEN for token in got.token_ids] == [False, True, True, True, False]


def test_only_rows_that_need_the_host_bring_it_their_logits(monkeypatch: pytest.MonkeyPatch):
    brought = []

    def watched(logits: torch.Tensor, rows: Rows, **how):
        brought.append(logits.shape[0])
        return sample_rows(logits, rows, **how)

    monkeypatch.setattr(fast.device_sampling, "sample_rows", watched)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5))
    easy = [tenant(PLAIN), tenant(replace(PLAIN, temperature=0.5, top_k=3))]
    both(logits[:2], easy)
    assert brought == []
    hard = [tenant(replace(PLAIN, logprobs=2)), tenant(replace(PLAIN, presence_penalty=0.5))]
    got, wanted = both(logits, [*easy, *hard])
    assert (got, brought) == (wanted, [2])


def test_an_engine_that_samples_on_the_device_is_in_lockstep(monkeypatch: pytest.MonkeyPatch):
    built = Engine.build(TINY, tiny_weights(), num_blocks=12, max_batch_size=3, max_model_len=40, dtype=torch.float64)
    built.samples_on_device = True
    asked = [
        Request(range(3, 8 + i), SamplingParams(9, temperature=0.4 * i, seed=i, top_p=0.9, ignore_eos=True), f"r{i}")
        for i in range(4)
    ]
    brought = []
    monkeypatch.setattr(fast.device_sampling, "sample_rows", lambda *args, **how: brought.append(args))
    reference = tiny_reference(max_model_len=40)
    for answer, request in zip(sorted(built.generate(asked), key=lambda one: one.request_id), asked, strict=True):
        assert answer == reference.generate([request])[0]
    assert brought == [], "no row went to the host"


# ---- rejects ------------------------------------------------------------------------------------------------------


def test_a_draw_at_the_wrong_place_is_refused():
    rows = Rows(1)
    rows.admit(0, tenant(PLAIN))
    with pytest.raises(GateError, match=r"gate sampling\."):
        sample_on_device(torch.zeros(1, VOCAB), rows, index=[0], positions=[9])
