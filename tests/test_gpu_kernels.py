"""RoPE and the K/V write, norm, gate and the row-invariant product in Triton: equal to their definitions, row by row.

Runs in Triton's interpreter, or compiled where there is a card.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fast.kernels.gpu.matmul import matmul, naive_matmul
from fast.kernels.gpu.rope import naive_rotate, rotate_and_write
from fast.kernels.gpu.rowwise import add_and_norm, gate, naive_add_and_norm, naive_gate
from tests.gpu_mode import BOUND, DEVICE, MARKS, error

pytestmark = MARKS
NAN = float("nan")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def random(*shape: int, dtype: torch.dtype = F32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


# ---- holds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "normed", "dtype"),
    [(3, 1, 80, False, F16), (8, 2, 128, True, BF16), (5, 5, 6, True, F32)],
)
def test_rope_turns_q_and_k_and_writes_the_tokens_slots_alone(heads, kv_heads, dim, normed, dtype):
    tokens, slots, eps = 3, 40, 1e-5
    qkv = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.arange(64)[:, None] * 10000.0 ** -(torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    positions = torch.tensor([63, 0, 17], device=DEVICE)
    to = torch.tensor([39, 7, 8], device=DEVICE)
    norms = {"q_norm": random(dim, dtype=dtype), "k_norm": random(dim, dtype=dtype, seed=2)} if normed else {}
    q = torch.full((tokens, heads, dim), NAN, dtype=dtype, device=DEVICE)
    k_pool, v_pool = (torch.full((slots, kv_heads, dim), NAN, dtype=dtype, device=DEVICE) for _ in range(2))
    rotate_and_write(qkv, positions, to, cos, sin, q, k_pool, v_pool, **norms, eps=eps)
    parts = qkv.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    turned = {"positions": positions, "cos": cos, "sin": sin, "eps": eps}
    assert error(q, naive_rotate(parts[0], norm=norms.get("q_norm"), **turned)) < BOUND[dtype]
    assert error(k_pool[to], naive_rotate(parts[1], norm=norms.get("k_norm"), **turned)) < BOUND[dtype]
    assert torch.equal(v_pool[to], parts[2])
    rest = [slot for slot in range(slots) if slot not in to.tolist()]
    assert k_pool[rest].isnan().all(), "no slot but the tokens' own is written"
    assert v_pool[rest].isnan().all()


@pytest.mark.parametrize(("size", "dtype"), [(576, BF16), (33, F32), (2049, F16)])
@pytest.mark.parametrize("added", [False, True])
def test_the_sum_is_stored_and_its_norm_is_of_what_is_stored(size: int, dtype: torch.dtype, added: bool):
    hidden, weight = random(4, size, dtype=dtype), random(size, dtype=dtype, seed=3)
    delta = random(4, size, dtype=dtype, seed=2) if added else None
    total, wanted = naive_add_and_norm(hidden, delta, weight, eps=1e-5)
    out = torch.full_like(hidden, NAN)
    before = hidden[2:3].clone()
    add_and_norm(hidden, delta, weight, out, eps=1e-5)
    assert torch.equal(hidden, total) or error(hidden, total) < BOUND[dtype]
    assert error(out, wanted) < BOUND[dtype]
    again = add_and_norm(hidden.clone(), None, weight, torch.empty_like(hidden), eps=1e-5)
    assert torch.equal(again, out), "to the bit the norm of what is stored, not of the sum before it was rounded"
    alone = torch.empty_like(before)
    add_and_norm(before, None if delta is None else delta[2:3], weight, alone, eps=1e-5)
    assert torch.equal(alone, out[2:3]), "a row's bits are its own"


@pytest.mark.parametrize(("size", "dtype"), [(48, F32), (1025, BF16)])
def test_the_gate_is_its_definition(size: int, dtype: torch.dtype):
    gate_up = random(3, 2 * size, dtype=dtype)
    out = torch.full((3, size), NAN, dtype=dtype, device=DEVICE)
    assert error(gate(gate_up, out), naive_gate(gate_up)) < BOUND[dtype]


@pytest.mark.parametrize(
    ("tokens", "depth", "columns", "biased", "dtype"),
    [(1, 65, 33, True, F32), (65, 64, 61, False, BF16), (7, 130, 32, True, F16)],
)
def test_a_product_is_its_definition(tokens, depth, columns, biased, dtype):
    x, weight = random(tokens, depth, dtype=dtype), random(columns, depth, dtype=dtype, seed=2)
    bias = random(columns, dtype=dtype, seed=3) if biased else None
    out = torch.full((tokens, columns), NAN, dtype=dtype, device=DEVICE)
    assert error(matmul(x, weight, bias, out), naive_matmul(x, weight, bias)) < BOUND[dtype]


def test_a_products_row_has_the_same_bits_in_any_batch():
    x, weight = random(66, 96), random(40, 96, seed=2)
    whole = matmul(x, weight, None, torch.empty(66, 40, device=DEVICE))
    for rows in ([0], [63, 64], [65, 0, 17]):
        got = matmul(x[rows], weight, None, torch.empty(len(rows), 40, device=DEVICE))
        assert torch.equal(got, whole[rows]), rows


# ---- rejects ------------------------------------------------------------------------------------------------------


def test_a_spoilt_row_stays_alone():
    x, weight = random(3, 32), random(8, 32, seed=2)
    x[1] = NAN
    out = matmul(x, weight, None, torch.empty(3, 8, device=DEVICE))
    add_and_norm(x, None, torch.ones(32, device=DEVICE), normed := torch.empty_like(x), eps=1e-5)
    for got in (out, normed):
        assert got.isnan().any(1).tolist() == [False, True, False]
