"""Linear backends: a row's bits are its own at every count of the table, and the control shows that this can fail."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fast.linear import BACKENDS, HalfLoss, PackedLinears, RowTable, half_loss, probe_rows, round_to_half
from gates import GateError
from gates.linear import check_rows_invariant
from reference.weights import random_weights
from tests.harness import SHAPES

# Sizes of a small Llama: what F.linear does with them depends on how many rows there are.
SIZES = [(576, 960), (1536, 576)]
INVARIANT = ("fp16", "fp32")


def matrix(inputs: int, outputs: int, seed: int = 0) -> torch.Tensor:  # [outputs, inputs], exact in half precision
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).mul(0.05).half().float()


def settled(backend: str, max_rows: int = 40) -> tuple[PackedLinears, list]:
    linears = PackedLinears(backend, max_rows=max_rows)
    layers = [linears(matrix(*size), None) for size in SIZES]
    linears.settle()
    return linears, layers


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_is_the_product(backend: str, bias: bool):
    weight, x = matrix(96, 70), torch.randn(5, 96)
    added = torch.randn(70) if bias else None
    wide = x.double() @ weight.double().T + (0 if added is None else added.double())
    assert torch.allclose(BACKENDS[backend](weight, added)(x).double(), wide, atol=1e-5)


@pytest.mark.parametrize("backend", INVARIANT)
def test_each_row_has_its_bits_at_every_count(backend: str):
    linears, layers = settled(backend)
    assert linears.invariant
    for (inputs, _), layer in zip(SIZES, layers, strict=True):
        x = torch.randn(95, inputs)
        together = layer(x)
        for count in (1, 2, 3, 7, 12, 13, 31, 32, 33, 39, 40, 41, 95):
            alone = layer(x[95 - count :])
            assert torch.equal(alone, together[95 - count :]), count


def test_buckets_are_made_of_stable_counts():
    table = RowTable((3, 4, 8, 12, 36), ())
    linears = PackedLinears("plain", max_rows=36)
    linears.table = table
    assert [table.padded(n) for n in (1, 3, 5, 12, 13, 36)] == [3, 3, 8, 12, 36, 36]
    assert linears.stable_row_sizes(8) == (3, 4, 8)
    assert linears.stable_row_sizes(9) == (3, 4, 8, 12)


def test_a_count_that_moves_one_row_of_one_layer_is_no_stable_count():
    weight = matrix(64, 32)

    def drifting(x: torch.Tensor) -> torch.Tensor:
        y = BACKENDS["fp32"](weight, None)(x).clone()
        if len(x) % 6 == 1 and len(x) > 30:
            y[-1] += 1e-6
        return y

    shapes = [(64, BACKENDS["fp32"](weight, None)), (64, drifting)]
    table = probe_rows(shapes, max_rows=60)
    assert table.deviants == (31, 37, 43, 49, 55)
    assert table.padded(31) == 32


def test_halves_that_lose_a_weight_are_counted():
    weights = random_weights(SHAPES["gqa"], seed=3, dtype=torch.float32)
    assert half_loss(weights) == HalfLoss(0, half_loss(weights).lossy, half_loss(weights).total)
    weights.layers[0].q[0, 0] = 70_000.0
    weights.layers[0].q[0, 1] = 3.1e-8  # half of its value away from the nearest half
    before = half_loss(round_to_half(random_weights(SHAPES["gqa"], seed=3, dtype=torch.float32))).lossy
    loss = half_loss(weights)
    assert before == 0
    assert loss.overflows == 1
    assert loss.lossy >= 1
    assert not loss.acceptable


@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_twice_is_rounding_once(shape: str):
    once = round_to_half(random_weights(SHAPES[shape], seed=3, dtype=torch.float32))
    twice = round_to_half(once)
    assert all(torch.equal(a, b) for a, b in zip(once.tensors(), twice.tensors(), strict=True))
    assert (once.lm_head is once.embedding) == SHAPES[shape].tie_embeddings


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_the_control_shows_rows_that_their_company_changes():
    linears, layers = settled("plain")
    if not linears.table.deviants:
        pytest.skip("F.linear gives each row its own bits on this machine; one with MKL shows the difference")
    assert linears.table.padded(linears.table.deviants[0]) != linears.table.deviants[0] or not linears.invariant
    x = torch.randn(40, SIZES[0][0])
    counts = [
        n for n in range(1, 41) if not torch.equal(BACKENDS["plain"](matrix(*SIZES[0]), None)(x[:n]), layers[0](x)[:n])
    ]
    assert counts


def test_gate_rejects_a_row_that_its_company_changed():
    x, weight = torch.randn(8, 64), matrix(64, 32)
    good = BACKENDS["fp32"](weight, None)(x)
    per_tensor = BACKENDS["fp32"](weight, None)((x / x.abs().max()) * x.abs().max())  # a range taken over all rows
    with pytest.raises(GateError, match="linear.rows_invariant"):
        check_rows_invariant(wanted=good, got=per_tensor, rows=8, computed_rows=8)
    with pytest.raises(GateError, match="first at row 0"):
        check_rows_invariant(wanted=torch.zeros(1, 2), got=torch.tensor([[0.0, -0.0]]), rows=1, computed_rows=1)


@pytest.mark.parametrize(("backend", "rows", "word"), [("int3", 4, "backend"), ("fp16", 0, "max_rows")])
def test_settings_out_of_range_are_refused(backend: str, rows: int, word: str):
    with pytest.raises(ValueError, match=word):
        PackedLinears(backend, max_rows=rows)


def test_no_buckets_of_counts_that_were_not_probed():
    with pytest.raises(ValueError, match="max_rows: 41"):
        settled("fp32", 40)[0].stable_row_sizes(41)


# ---- any order --------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 19), min_size=1, max_size=60))
def test_any_rows_in_any_order_keep_their_bits(order: list[int]):
    linears = PackedLinears("fp32", max_rows=24)
    layer = linears(matrix(48, 20), torch.randn(20, generator=torch.Generator().manual_seed(1)))
    linears.settle()
    x = torch.randn(20, 48, generator=torch.Generator().manual_seed(2))
    own = torch.cat([layer(x[i : i + 1]) for i in range(20)])
    assert torch.equal(layer(x[order]), own[order])
