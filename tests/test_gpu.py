"""The engine on the Triton kernels: the torch forward's logits, the reference's tokens, bits that are a request's own.

Runs in Triton's interpreter, or on a card where there is one.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fast.gpu
from fast.cache import BatchedPagedKVCache
from fast.capture import LAUNCH_TENSORS
from fast.engine import Engine
from fast.gpu import GPUForward, compiled_kernels, parts_of, why_not
from fast.model import Chunk, Forward
from gates import GateError
from gates.capture import check_pool_budget
from gates.core import at_level
from gates.gpu import check_allocator_at_rest, check_nothing_compiled
from reference.request import Request, SamplingParams
from serve.cli import main
from tests import test_poison
from tests.bench.bench_forward import decode_plan
from tests.gpu_mode import DEVICE, MARKS
from tests.harness import SHAPES, TINY, lockstep, tiny_weights
from tests.traces import GPU_ARMS, Arrival, Trace

ROOT = Path(__file__).resolve().parent.parent
pytestmark = MARKS
BLOCK = 16


def model(shape: str = "gqa", *, invariant: bool = False, rows: int = 4) -> tuple[GPUForward, BatchedPagedKVCache]:
    config = SHAPES[shape]
    sizes = {"max_batch_size": rows, "num_blocks": 12, "block_size": BLOCK, "max_model_len": 64}
    cache = BatchedPagedKVCache(config, **sizes, device=DEVICE)
    how = {"dtype": torch.float32, "device": DEVICE, "invariant": invariant}
    return GPUForward(config, tiny_weights(shape), max_batch_size=rows, max_model_len=64, **how), cache


def chunk(tokens: int, *, start: int = 0, row: int = 0) -> Chunk:
    """Tokens of a sequence whose slots are those of block 3 * row on, in falling order."""
    slots = [47 - i + 48 * row for i in range(start + tokens)]
    return Chunk(start, tuple((7 * row + 5 * at) % 50 + 3 for at in range(start, start + tokens)), tuple(slots))


# ---- holds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["three_to_one", "biases", "qk_norm"])
def test_logits_are_the_torch_forwards(shape: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fast.gpu, "PREFILL_TOKENS", 5)  # three parts, one of which ends no chunk
    ours, cache = model(shape)
    config, weights = SHAPES[shape], tiny_weights(shape)
    theirs = Forward(config, weights, max_positions=64, dtype=torch.float32, device=DEVICE)
    sizes = {"max_batch_size": 4, "num_blocks": 12, "block_size": BLOCK, "max_model_len": 64}
    other = BatchedPagedKVCache(config, **sizes, device=DEVICE)
    chunks = [chunk(3), chunk(9, row=1)]
    torch.testing.assert_close(ours.prefill(chunks, cache), theirs.prefill(chunks, other), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(cache.kv(range(192)), other.kv(range(192)), rtol=1e-4, atol=2e-5)
    plan = decode_plan(2, 7, config.vocab_size)
    plan = replace(plan, **{name: getattr(plan, name).to(DEVICE) for name in LAUNCH_TENSORS})
    torch.testing.assert_close(ours.decode(plan, cache), theirs.decode(plan, other), rtol=1e-4, atol=2e-5)


def test_a_requests_logits_keep_their_bits_under_every_schedule():
    """One prefill, chunks, company, and a decode of the last token: invariant products, one order of sums."""
    forward, cache = model(invariant=True)

    def last(*chunks: Chunk) -> Tensor:
        return forward.prefill(chunks, cache)[-1].clone()

    whole = last(chunk(19))
    last(chunk(7))
    assert torch.equal(last(chunk(12, start=7)), whole), "in two chunks"
    assert torch.equal(last(chunk(5, row=1), chunk(19)), whole), "behind another"
    slots = torch.tensor([[*chunk(19).slots], [*chunk(19, row=1).slots]], device=DEVICE)
    forward.prefill([chunk(5, row=1)], cache)
    lens = torch.tensor([19, 5], device=DEVICE)
    writes = torch.tensor([slots[0, 18], slots[1, 4]], device=DEVICE)
    ids = torch.tensor([chunk(19).token_ids[-1], chunk(5, row=1).token_ids[-1]], device=DEVICE)
    plan = decode_plan(2, 19, TINY.vocab_size)
    plan = replace(plan, slot_mapping=slots, context_lens=lens, write_slots=writes, positions=lens - 1, input_ids=ids)
    assert torch.equal(forward.decode(plan, cache)[0], whole), "decoded"


SHORT = Trace(
    arrivals=(
        Arrival(0, Request(range(7, 11), SamplingParams(6, temperature=0.9, seed=4, ignore_eos=True), "drawn")),
        Arrival(
            0,
            Request(
                range(9, 14),
                SamplingParams(5, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=2),
                "greedy",
            ),
        ),
        Arrival(1, Request(range(5, 8), SamplingParams(7, temperature=0.8, seed=2, top_p=0.9), "late")),
        Arrival(2, Request((8,), SamplingParams(4, temperature=0.0, ignore_eos=True), "short")),
    ),
    dtype="float32",
    max_batch_size=3,
    num_blocks=5,
    max_model_len=20,
)


@pytest.mark.differential
@pytest.mark.parametrize(("arm", "shape"), [("triton-warm-compact", "gqa"), ("invariant-warm-gather", "biases")])
def test_the_engine_gives_the_references_tokens(arm: str, shape: str):
    run = lockstep(replace(SHORT, arm=arm, shape=shape))
    stats = run.engine.stats()
    assert stats["replayed"] == stats["decode_steps"] > 5
    assert stats["preemptions"] > 0
    assert (stats["captures_after_ready"], stats["kernel_compiles_after_ready"]) == (0, 0)


def test_what_nobody_owns_may_hold_anything():
    """The rush of `test_poison` on one arm, with NaN in every slot without a token, and cells past a row's length that
    name them."""
    sizes = test_poison.scenes.SIZES | {"num_blocks": test_poison.TIGHT}
    weights = test_poison.scenes.tiny_weights()
    how = {"dtype": torch.float32, **GPU_ARMS["triton-warm-compact"].switches}
    runs = [
        test_poison.drive(Engine.build(test_poison.scenes.TINY, weights, **sizes, **how), poured, steps=7)
        for poured in (None, "tails")
    ]
    assert len(runs[0].logits) == 7
    assert test_poison.differences(runs[1], runs[0]) == []


@pytest.mark.parametrize("most", [1, 4, 5, 100])
def test_parts_hold_every_token_once_and_in_order(most: int):
    chunks = [chunk(3), chunk(9, row=1), chunk(1, start=4, row=2)]
    parts = list(parts_of(chunks, most))
    tokens = [(index, at) for part in parts for index, _, start, stop in part for at in range(start, stop)]
    assert tokens == [(index, at) for index, one in enumerate(chunks) for at in range(len(one.token_ids))]
    assert all(sum(stop - start for *_, start, stop in part) <= most for part in parts)
    assert all(len({index for index, *_ in part}) == len(part) for part in parts)


def test_facts_say_what_multiplies_and_what_it_promises():
    forward, _ = model()
    assert (forward.facts()["products"], forward.facts()["schedule_invariant"]) == ("library", False)
    forward, _ = model(invariant=True)
    assert (forward.facts()["products"], forward.facts()["schedule_invariant"]) == ("row-invariant kernel", True)
    work = forward._work
    held = [getattr(work.buffers, name) for name in work.buffers.__slots__]
    held += [work.partials.acc, work.partials.peaks, work.partials.totals]
    held += [work.prefill_logits, work.decode_logits, work.integers]
    assert forward.facts()["workspace_bytes"] == sum(one.untyped_storage().nbytes() for one in held)
    assert forward._workspace(64, torch.device("meta")).num_bytes == work.num_bytes


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is for machines without a card")
def test_the_command_line_runs_the_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "serve", "generate", "--model", "tiny-random", "--prompt", "hi", "--json"]
    command += ["--max-tokens", "3", "--max-model-len", "16", "--dtype", "bfloat16", "--invariant"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)  # the setting is in this environment
    assert ran.returncode == 0, ran.stderr
    assert "on triton (weights bfloat16" in ran.stderr
    assert "products by the row-invariant kernel" in ran.stderr


# ---- rejects ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"triton": True, "dtype": torch.float64}, "triton: True needs dtype float32, float16 or bfloat16"),
        ({"triton": True, "kernels": True}, "triton: True computes on a GPU, kernels on a CPU"),
        ({"triton": True, "half_weights": True}, "half_weights: True needs kernels"),
        ({"triton": True, "bucket_decode": True, "compile_decode": True}, "compile_decode: True compiles torch's"),
        ({"invariant": True}, "invariant: True needs triton"),
    ],
)
def test_what_contradicts_the_kernels_is_refused(change: dict, told: str):
    with pytest.raises(ValueError, match=told):
        Engine.build(TINY, tiny_weights(), num_blocks=4, max_batch_size=2, max_model_len=16, device=DEVICE, **change)


def test_too_many_chunks_are_refused():
    forward, cache = model(rows=1)
    with pytest.raises(ValueError, match=r"chunks: 2 is not in 1\.\.1"):
        forward.prefill([chunk(1), chunk(1, row=1)], cache)


@pytest.mark.skipif(DEVICE == "cuda", reason="a machine with a card has nothing to refuse")
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("--device", "cuda"), "--device: cuda, but torch"),
        (("--dtype", "float16"), "--dtype: float16 needs --device cuda"),
        (("--invariant", "--no-kernels"), "--invariant: the kernels alone promise it"),
    ],
)
def test_a_device_that_is_not_there_is_named(asked, told, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert main(["generate", "--model", "tiny-random", "--prompt", "hi", *asked]) == 2
    assert told in capsys.readouterr().err
    assert why_not("cpu", torch.float32) == "", "this process interprets"


def test_gate_rejects_a_kernel_compiled_after_ready(monkeypatch: pytest.MonkeyPatch):
    """A variant that no warm-up saw: an integer that is specialised, an address of another alignment."""
    forward, cache = model()
    forward.warm(cache)
    now = compiled_kernels()
    monkeypatch.setattr(fast.gpu, "compiled_kernels", lambda: now + 2)
    with pytest.raises(GateError, match=r"gate gpu\.nothing_compiled: 2 kernel variants compiled after ready, 0 may"):
        forward.prefill([chunk(2)], cache)
    with pytest.raises(GateError, match="1 kernel variants"):
        check_nothing_compiled(compiles_after_ready=1)


def test_gate_rejects_a_workspace_that_weights_and_pool_leave_no_room_for(monkeypatch: pytest.MonkeyPatch):
    needed = model()[0].workspace_bytes + (64 << 20)  # and what drawing takes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (needed - 1, 2**40))
    config = {"dtype": torch.float32, "device": "cuda", "max_batch_size": 4, "max_model_len": 64}
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)  # weights "on the card", wherever this runs
    monkeypatch.setattr(fast.gpu, "rope_tables", lambda *_: (torch.zeros(1), torch.zeros(1)))
    with pytest.raises(GateError, match=rf"gate capture\.pool_budget: the shared pool needs {needed:,} bytes"):
        GPUForward(TINY, tiny_weights(), **config)
    check_pool_budget(needed=needed, budget=needed, shape=(4, 64))


def test_gate_rejects_an_allocator_that_grows_after_ready(monkeypatch: pytest.MonkeyPatch):
    forward, cache = model()
    forward.settle()
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 2**20)
    forward._reserved = 2**20
    forward.prefill([chunk(2)], cache)
    forward._reserved = 2**20 - 1
    with pytest.raises(GateError, match=r"gate gpu\.allocator_at_rest: 1,048,576 bytes reserved .* 1,048,575 when"):
        forward.prefill([chunk(2)], cache)
    with at_level("cheap"):
        forward.prefill([chunk(2)], cache)
    with pytest.raises(GateError, match="5 bytes reserved"):
        check_allocator_at_rest(reserved=5, at_ready=4)
