"""CPU kernels: equal to their naive versions, and a token's logits have the same bits under every schedule."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llvmlite.binding import get_host_cpu_features
from numba import njit

from fast.cache import BatchedPagedKVCache
from fast.kernels.attention import KEY_TILE, attention, naive_attention
from fast.kernels.forward import TOKENS_AT_ONCE, KernelForward, KernelPool, plan_tasks
from fast.kernels.linear import (
    ADD,
    PANEL,
    PLAIN,
    STRIP,
    SWIGLU,
    from_strips,
    interleave,
    linear,
    naive_linear,
    pack,
    to_strips,
    unpack,
)
from fast.kernels.norm import naive_norm, norm
from fast.kernels.rope import naive_rotate, rotate_and_write
from fast.kernels.team import Team
from fast.kernels.vector import exp2, lane_sum, load, store
from fast.linear import BACKENDS, round_to_half
from fast.model import Chunk, Forward
from fast.plan import DecodePlan
from reference.weights import ModelWeights, random_weights
from tests.harness import SHAPES

NO_BIAS = np.zeros(0, np.float32)
THREADS = (1, 2)
TEAM = Team(1)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def halves(*shape: int, seed: int = 0) -> np.ndarray:
    return normal(*shape, seed=seed, scale=0.05).astype(np.float16).astype(np.float32)


@njit
def exp2_of(x, y):
    for at in range(0, x.size, 16):
        store(y, at, exp2(load(x, at)))


@njit
def sum_of(x):
    return lane_sum(load(x, 0))


@cache
def tiny(shape: str) -> ModelWeights:
    return round_to_half(random_weights(SHAPES[shape], seed=7, dtype=torch.float32))


@cache
def forward(shape: str, *, threads: int = 1, half: bool = True) -> KernelForward:
    return KernelForward(SHAPES[shape], tiny(shape), max_positions=320, max_batch_size=16, threads=threads, half=half)


# ---- holds: each kernel is its naive version ----------------------------------------------------------------------


def test_exp2_is_within_two_units_of_the_last_place():
    x = np.concatenate([np.linspace(-126, 127, 400_000), np.linspace(-2, 2, 400_000)]).astype(np.float32)
    y = np.empty_like(x)
    exp2_of(x, y)
    true = np.exp2(x.astype(np.float64))
    assert np.abs(y / true - 1).max() < 2e-7


def test_exp2_of_whole_numbers_is_exact_and_below_the_smallest_normal_zero():
    x = np.array([-np.inf, -3e38, -127, -126.001, -126, -1, -0.0, 0, 1, 2, 3, 10, 100, 126, 127, 5], np.float32)
    y = np.empty_like(x)
    exp2_of(x, y)
    assert y.tolist() == [0, 0, 0, 0, *(2.0 ** x[4:].astype(np.float64)).tolist()]


def test_lanes_fold_in_halves():
    x = np.array([1e8, 1, -1e8, 1] * 4, np.float32)
    fold = x
    while fold.size > 1:
        fold = fold[: fold.size // 2] + fold[fold.size // 2 :]
    assert sum_of(x) == fold[0]


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (18, 33), (64, 32), (96, 61), (576, 70)])
def test_a_linear_layer_is_one_chain_an_output(inputs: int, outputs: int, half: bool):
    weight = halves(outputs, inputs)
    packed = pack(weight, half=half)
    assert np.array_equal(unpack(packed, outputs), weight)
    for rows in (1, 2, 3, 7, STRIP - 1, STRIP, STRIP + 1, 25, 97):
        x = normal(rows, inputs, seed=rows)
        out = np.full((rows, packed.shape[0] * PANEL), np.nan, np.float32)
        TEAM.run(linear, to_strips(x), packed, NO_BIAS, out, rows, PLAIN)
        assert np.array_equal(out[:, :outputs], naive_linear(x, weight)), rows


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="FBGEMM is for x86")
def test_a_linear_layer_has_the_bits_of_fbgemm():
    weight, x = halves(96, 576), normal(5, 576)
    out = np.empty((5, 96), np.float32)
    TEAM.run(linear, to_strips(x), pack(weight, half=True), NO_BIAS, out, 5, PLAIN)
    other = BACKENDS["fp16"](torch.from_numpy(weight), None)(torch.from_numpy(x))
    assert np.array_equal(out, other.numpy())


def test_bias_and_residual_follow_the_product():
    weight, x, bias = halves(64, 48), normal(13, 48), normal(64, seed=3)
    out = normal(13, 64, seed=4)
    wanted = out + (naive_linear(x, weight) + bias)
    TEAM.run(linear, to_strips(x), pack(weight, half=True), bias, out, 13, ADD)
    assert np.array_equal(out, wanted)


@pytest.mark.parametrize("wide", [16, 48, 40])
def test_swiglu_is_within_its_bound(wide: int):
    gate, up, x = halves(wide, 64, seed=1), halves(wide, 64, seed=2), normal(17, 64, scale=20)
    packed = pack(interleave(gate, up), half=True)
    depth = packed.shape[0] * 16
    strips = np.empty((17, depth), np.float32)
    TEAM.run(linear, to_strips(x), packed, NO_BIAS, strips, 17, SWIGLU)
    g, u = naive_linear(x, gate).astype(np.float64), naive_linear(x, up).astype(np.float64)
    got = from_strips(strips.reshape(-1), 17, depth)
    wanted = g / (1 + np.exp(-g)) * u
    # The exponent g * log2(e) is rounded once, which counts the more the further g lies below zero.
    assert (np.abs(got[:, :wide] - wanted) <= np.abs(wanted) * (4e-7 + 1.2e-7 * np.maximum(-g, 0)) + 1e-30).all()
    assert not got[:, wide:].any()


@pytest.mark.parametrize("rows", [1, 11, 12, 13, 40])
@pytest.mark.parametrize("size", [18, 32, 576])
def test_norm_is_its_naive_version(rows: int, size: int):
    width = -(-size // 16) * 16
    x, weight = np.zeros((rows, width), np.float32), np.zeros(width, np.float32)
    x[:, :size], weight[:size] = normal(rows, size), normal(size, seed=1)
    strips = np.empty((rows, width), np.float32)
    TEAM.run(norm, x, weight, np.float32(1e-5), size, strips, rows)
    got = from_strips(strips.reshape(-1), rows, width)[:, :size]
    assert np.array_equal(got, naive_norm(x[:, :size], weight[:size], 1e-5))


def test_strips_are_a_relabelling():
    for rows in (1, 11, 12, 13, 24, 25):
        x = normal(rows, 7)
        assert np.array_equal(from_strips(to_strips(x), rows, 7), x)


def test_a_rotation_by_zero_is_none():
    x = normal(3, 2, 8)
    cos, sin = np.ones((4, 4), np.float32), np.zeros((4, 4), np.float32)
    assert np.array_equal(naive_rotate(x, np.array([0, 1, 3]), cos, sin), x)


# ---- holds: the forward -------------------------------------------------------------------------------------------


def tokens_of(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 61, count).tolist())


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_plain_forward(shape: str):
    ids = tokens_of(150)
    chunk = Chunk(0, ids, tuple(range(150)))
    got = forward(shape).prefill([chunk], KernelPool(SHAPES[shape], num_blocks=10, block_size=16))
    wide = Forward(SHAPES[shape], tiny(shape), max_positions=320, dtype=torch.float64)
    pool = BatchedPagedKVCache(
        SHAPES[shape], max_batch_size=1, num_blocks=10, block_size=16, max_model_len=160, dtype=torch.float64
    )
    assert torch.allclose(got.double(), wide.prefill([chunk], pool), atol=2e-5)


def test_attention_is_within_a_millionth_of_its_definition():
    config = SHAPES["gqa"]
    model, pool = forward("gqa"), KernelPool(config, num_blocks=10, block_size=16)
    model.prefill([Chunk(0, tokens_of(150), tuple(range(150)))], pool)
    # The last layer's q is what it left in its buffer; its K and V are in the pool.
    last, dim = config.num_layers - 1, config.head_dim
    q = model._q[:150].reshape(150, config.num_heads, dim) * np.float32(np.log(2.0))
    k = pool.k[last].transpose(0, 3, 1, 2).reshape(-1, config.num_kv_heads, dim)[:150]
    v = pool.v[last].transpose(0, 2, 1, 3).reshape(-1, config.num_kv_heads, pool.v.shape[-1])[:150, :, :dim]
    wanted = naive_attention(q, k, v, 1.0)
    runs, groups = np.array([[0, 150, 0]]), np.arange(0, 150, 16)[None]
    outputs = []
    for threads in (1, 3, 64):
        strips = np.zeros((150, config.num_heads * dim), np.float32)
        tasks = plan_tasks(runs, heads=config.num_heads, kv_heads=config.num_kv_heads, threads=threads)
        TEAM.run(attention, model._q, pool.k[last], pool.v[last], groups, runs, tasks, strips, 150)
        outputs.append(from_strips(strips.reshape(-1), 150, config.num_heads * dim).reshape(wanted.shape))
    assert np.abs(outputs[0] - wanted).max() < 1e-6 * np.abs(v).max()
    # Where a task is cut changes no bit.
    assert np.array_equal(outputs[1], outputs[0])
    assert np.array_equal(outputs[2], outputs[0])


@pytest.mark.parametrize("dim", [2, 18, 32, 64, 80, 144])
def test_heads_of_any_size_are_turned_stored_and_read(dim: int):
    tokens, heads, kv_heads, width = 75, 6, 2, -(-dim // 16) * 16
    qkv, scale = normal(tokens, (heads + 2 * kv_heads) * dim, seed=dim), np.float32(0.5)
    angles = normal(100, dim // 2, seed=1)
    cos, sin = np.cos(angles), np.sin(angles)
    positions = np.arange(tokens)
    k_pool, v_pool = np.zeros((5, kv_heads, dim, 16), np.float32), np.zeros((5, kv_heads, 16, width), np.float32)
    q = np.zeros((tokens, heads * dim), np.float32)
    TEAM.run(
        rotate_and_write, qkv, positions, positions, cos, sin, scale, NO_BIAS, NO_BIAS, np.float32(1e-5),
        k_pool, v_pool, q, tokens,
    )  # fmt: skip
    turned = naive_rotate(qkv.reshape(tokens, -1, dim), positions, cos, sin)
    k = k_pool.transpose(0, 3, 1, 2).reshape(-1, kv_heads, dim)[:tokens]
    v = v_pool.transpose(0, 2, 1, 3).reshape(-1, kv_heads, width)[:tokens]
    assert np.array_equal(q.reshape(tokens, heads, dim), turned[:, :heads] * scale)
    assert np.array_equal(k, turned[:, heads : heads + kv_heads])
    assert np.array_equal(v[..., :dim].reshape(tokens, -1), qkv[:, (heads + kv_heads) * dim :])
    assert not v[..., dim:].any()
    runs, groups = np.array([[0, tokens, 0]]), np.arange(0, tokens, 16)[None]
    strips = np.zeros((tokens, heads * dim), np.float32)
    tasks = plan_tasks(runs, heads=heads, kv_heads=kv_heads, threads=1)
    TEAM.run(attention, q, k_pool, v_pool, groups, runs, tasks, strips, tokens)
    got = from_strips(strips.reshape(-1), tokens, heads * dim).reshape(tokens, heads, dim)
    # Scores are base-2 logarithms; with a head's scores far apart, their rounding is what shows.
    wanted = naive_attention(q.reshape(tokens, heads, dim), k, v[..., :dim], float(np.log(2.0)))
    assert np.abs(got - wanted).max() < 4e-6 * np.abs(v).max()


def test_every_query_is_in_one_task():
    runs = np.array([[0, 1, 5], [1, 0, 0], [1, 9, 60], [10, 1, 0]])
    for heads, kv_heads, threads in [(9, 3, 1), (14, 2, 1), (4, 4, 1), (8, 1, 3)]:
        tasks = plan_tasks(runs, heads=heads, kv_heads=kv_heads, threads=threads)
        named = sorted((s, first + i, head) for s, first, n, head in tasks.tolist() for i in range(n))
        group = heads // kv_heads
        wanted = [(s, i, h) for s in range(4) for i in range(int(runs[s, 1]) * group) for h in range(kv_heads)]
        assert named == sorted(wanted)


# ---- rejects ------------------------------------------------------------------------------------------------------


def test_a_block_that_is_no_multiple_of_a_vector_is_refused():
    with pytest.raises(ValueError, match="block_size: 24"):
        KernelPool(SHAPES["gqa"], num_blocks=2, block_size=24)


def test_more_sequences_than_the_batch_is_refused():
    chunk = Chunk(0, (1,), (0,))
    with pytest.raises(ValueError, match="chunks: 17"):
        forward("gqa").prefill([chunk] * 17, KernelPool(SHAPES["gqa"], num_blocks=2, block_size=16))


def test_a_sum_over_rows_would_be_seen():
    # The same comparison over F.linear, whose bits follow the row count: the control of every test below.
    weight, x = torch.from_numpy(halves(960, 576)), torch.from_numpy(normal(64, 576))
    whole = torch.nn.functional.linear(x, weight)
    changed = [n for n in range(1, 64) if not torch.equal(torch.nn.functional.linear(x[:n], weight), whole[:n])]
    if not changed:
        pytest.skip("F.linear gives each row its own bits on this machine; one with MKL shows the difference")
    packed = pack(weight.numpy(), half=True)
    wanted = np.empty((64, 960), np.float32)
    TEAM.run(linear, to_strips(x.numpy()), packed, NO_BIAS, wanted, 64, PLAIN)
    for n in changed:
        out = np.empty((n, 960), np.float32)
        TEAM.run(linear, to_strips(x[:n].numpy()), packed, NO_BIAS, out, n, PLAIN)
        assert np.array_equal(out, wanted[:n])


# ---- any order: the same bits under every schedule ----------------------------------------------------------------


class Schedule:
    """Sequences in a pool of their own, computed in any mix of chunks and decode rows."""

    def __init__(self, model: KernelForward, ids: list[tuple[int, ...]], *, block_size: int, half: bool, seed: int):
        self.model, self.ids, self.done = model, ids, [0] * len(ids)
        blocks = [-(-len(tokens) // block_size) for tokens in ids]
        self.pool = KernelPool(model.config, num_blocks=sum(blocks), block_size=block_size, half=half)
        # Blocks of the pool in no order, and full of somebody else's numbers.
        order = np.random.default_rng(seed).permutation(sum(blocks)).tolist()
        self.pool.k[:], self.pool.v[:] = (0x7BFF, 0x7BFF) if half else (3e38, -3e38)
        self.slots = []
        for tokens, count in zip(ids, blocks, strict=True):
            mine, order = order[:count], order[count:]
            self.slots.append([b * block_size + i for b in mine for i in range(block_size)][: len(tokens)])
        self.sink = sum(blocks) * block_size

    def chunk(self, sequence: int, size: int) -> Chunk:
        start = self.done[sequence]
        self.done[sequence] = min(len(self.ids[sequence]), start + size)
        stop = self.done[sequence]
        return Chunk(start, self.ids[sequence][start:stop], tuple(self.slots[sequence][:stop]))

    def prefill(self, sizes: list[tuple[int, int]]) -> torch.Tensor:
        return self.model.prefill([self.chunk(*each) for each in sizes], self.pool).clone()

    def decode(self, sequences: list[int], pad_rows: int = 0) -> torch.Tensor:
        width = max(self.done[s] + 1 for s in sequences)
        rows = len(sequences) + pad_rows
        mapping = torch.zeros(rows, width, dtype=torch.int64)
        columns = torch.tensor([[0, 0, self.sink, 0]] * rows)  # ids, positions, write slots, lengths
        for row, s in enumerate(sequences):
            at = self.done[s]
            mapping[row, : at + 1] = torch.tensor(self.slots[s][: at + 1])
            columns[row] = torch.tensor([self.ids[s][at], at, self.slots[s][at], at + 1])
            self.done[s] += 1
        ids, positions, writes, lens = columns.T.contiguous()
        plan = DecodePlan(tuple(range(len(sequences))), pad_rows, mapping, lens, writes, positions, ids, (), ())
        return self.model.decode(plan, self.pool)[: len(sequences)].clone()


@cache
def truth(shape: str, count: int, seed: int, half: bool) -> list[torch.Tensor]:
    """Logits after each token of one sequence, alone, by one prefill for each length."""
    ids = tokens_of(count, seed)
    rows = []
    for stop in range(1, count + 1):
        alone = Schedule(forward(shape), [ids], block_size=16, half=half, seed=0)
        rows.append(alone.prefill([(0, stop)])[0])
    return rows


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_and_single_tokens_give_the_bits_of_one_prefill(shape: str, threads: int, half: bool):
    count = 2 * KEY_TILE + 3
    wanted = truth(shape, count, 5, half)
    for size in (1, 7, 33, KEY_TILE - 1, KEY_TILE, KEY_TILE + 1):
        run = Schedule(forward(shape, threads=threads), [tokens_of(count, 5)], block_size=32, half=half, seed=size)
        while run.done[0] < count:
            got = run.prefill([(0, size)])[0]
            assert torch.equal(got, wanted[run.done[0] - 1]), (size, run.done[0])


def test_a_prompt_longer_than_the_buffers_is_cut_and_keeps_its_bits():
    count = TOKENS_AT_ONCE + 5
    ids = [tokens_of(count, 1), tokens_of(40, 2)]
    run = Schedule(forward("gqa"), ids, block_size=16, half=False, seed=0)
    whole = run.prefill([(1, 17), (0, count)])
    run = Schedule(forward("gqa"), ids, block_size=16, half=False, seed=1)
    run.prefill([(0, count - 1)])
    assert torch.equal(run.decode([0])[0], whole[1])
    assert torch.equal(whole[0], Schedule(forward("gqa"), ids, block_size=16, half=False, seed=2).prefill([(1, 17)])[0])


@given(data=st.data())
def test_any_schedule_gives_each_token_the_bits_it_has_alone(data: st.DataObject):
    shape = data.draw(st.sampled_from(["gqa", "three_to_one", "qk_norm"]), label="shape")
    half = data.draw(st.booleans(), label="half")
    threads = data.draw(st.sampled_from(THREADS), label="threads")
    seeds = data.draw(st.lists(st.integers(10, 13), min_size=1, max_size=5), label="sequences")
    count = KEY_TILE + 9
    block_size = data.draw(st.sampled_from([16, 48, 64]), label="block size")
    run = Schedule(
        forward(shape, threads=threads),
        [tokens_of(count, seed) for seed in seeds],
        block_size=block_size,
        half=half,
        seed=data.draw(st.integers(0, 9), label="pool order"),
    )
    while open_now := [s for s in range(len(seeds)) if run.done[s] < count]:
        chosen = data.draw(st.lists(st.sampled_from(open_now), min_size=1, unique=True), label="rows")
        if data.draw(st.booleans(), label="decode"):
            got = run.decode(chosen, data.draw(st.integers(0, 3), label="padded rows"))
        else:
            got = run.prefill([(s, data.draw(st.sampled_from([1, 2, 13, 40, 73]), label="chunk")) for s in chosen])
        for row, s in zip(got, chosen, strict=True):
            assert torch.equal(row, truth(shape, count, seeds[s], half)[run.done[s] - 1])


# ---- other machines -----------------------------------------------------------------------------------------------


def digest() -> str:
    """Of the logits of every tiny shape after 201 tokens."""
    total = hashlib.sha256()
    for shape in SHAPES:
        run = Schedule(forward(shape), [tokens_of(201, 9)], block_size=16, half=True, seed=0)
        total.update(run.prefill([(0, 201)]).contiguous().numpy().tobytes())
    return total.hexdigest()


@pytest.mark.slow
@pytest.mark.skipif(
    "+avx2" not in get_host_cpu_features().flatten(), reason="an x86 CPU with AVX2 compiles for another"
)
def test_code_compiled_for_registers_of_eight_lanes_gives_the_same_bits(tmp_path):
    features = "+avx2,+fma,+f16c,+avx,+sse4.2,+bmi,+bmi2,+popcnt,-avx512f"
    other = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    program = "from tests.test_kernels import digest; print(digest())"
    run = subprocess.run([sys.executable, "-c", program], env=os.environ | other, capture_output=True, text=True)
    assert run.stdout.strip() == digest(), run.stderr


# ---- the real model -----------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_keeps_its_bits_under_every_schedule():
    """One prefill of 480 tokens against chunks of 7, of 33, mixed with decode rows, any batch, any threads."""
    from serve.models import load_model

    loaded = load_model("smollm2-135m-instruct")
    count, vocab = 480, loaded.config.vocab_size
    ids = [tuple(np.random.default_rng(s).integers(0, vocab, count + 8).tolist()) for s in range(9)]
    by_threads = []
    for threads in THREADS:
        model = KernelForward(loaded.config, loaded.weights, max_positions=512, max_batch_size=9, threads=threads)

        def run(model: KernelForward = model, sequences: int = 1) -> Schedule:
            return Schedule(model, ids[:sequences], block_size=16, half=False, seed=sequences)

        one = run().prefill([(0, count)])[0]
        for size in (7, 33):
            chunked = run()
            while chunked.done[0] < count:
                got = chunked.prefill([(0, min(size, count - chunked.done[0]))])[0]
            assert torch.equal(got, one), (threads, size)
        by_token = run()
        by_token.prefill([(0, 400)])
        for _ in range(80):
            got = by_token.decode([0])[0]
        assert torch.equal(got, one)
        batch = run(sequences=9)
        batch.prefill([(s, count - 9 + s) for s in reversed(range(9))])
        batch.decode([8, 3, 0, 5], pad_rows=2)
        while batch.done[0] < count - 1:
            batch.decode([6, 0, 7])
        assert torch.equal(batch.decode([1, 0, 2, 4], pad_rows=1)[1], one)
        by_threads.append(one)
    assert all(torch.equal(one, by_threads[0]) for one in by_threads)
