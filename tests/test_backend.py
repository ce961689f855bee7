"""What an engine computes on: the kernels where they can run, compiled before anybody waits, their pool seen whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fast.backend import KernelBackend, compiled_before, default_threads, physical_cores, why_no_kernels
from fast.engine import Engine
from fast.kernels.pool import KernelPool
from fast.pool import plan_pool
from gates import GateError
from gates.backend import check_no_kernel_compiles_after_ready
from gates.blocks import check_sink_outside
from reference.request import Request, SamplingParams
from tests.harness import SHAPES, TINY, tiny_weights

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"max_batch_size": 4, "block_size": 16, "num_blocks": 12, "max_model_len": 100}
ALL_ON = {"bucket_decode": True, "persist_inputs": True, "capture_decode": True, "compact_rows": True}


def engine(**switches) -> Engine:
    return Engine.build(TINY, tiny_weights(), **(SIZES | {"kernels": True} | switches))


def requests(count: int = 6) -> list[Request]:
    sizes = [(3 + 7 * i, 5 + 3 * i) for i in range(count)]
    params = [SamplingParams(new, temperature=0.6 * (new % 2), seed=new, ignore_eos=True) for _, new in sizes]
    return [Request(range(3, 3 + n), p, f"r{n}") for (n, _), p in zip(sizes, params, strict=True)]


# ---- holds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_pools_views_are_its_storage(shape: str, half: bool):
    config, blocks = SHAPES[shape], 3
    pool = KernelPool(config, num_blocks=blocks, block_size=16, half=half)
    assert pool.num_slots == 64
    check_sink_outside(sink_slot=48, num_blocks=blocks, block_size=16, pool_slots=pool.num_slots)
    for slot in range(pool.num_slots):
        pool.fill([slot], float(slot))
    for layer in range(config.num_layers):
        for head in range(config.num_kv_heads):
            k, v = pool.k[layer, :, head], pool.v[layer, :, head]
            k, v = (x.view(np.float16) if half else x for x in (k, v))
            # K [B + 1, D, S], V [B + 1, S, D']: a slot's number stands in every dimension of the head, and no further.
            assert (k.transpose(0, 2, 1).reshape(64, -1) == np.arange(64)[:, None]).all()
            assert (v.reshape(64, -1)[:, : config.head_dim] == np.arange(64)[:, None]).all()
            assert not v[..., config.head_dim :].any()
    got = pool.read(torch.tensor([63, 0, 17]))
    assert got.shape == (2 * config.num_layers, 3, config.num_kv_heads, config.head_dim)
    assert (got == torch.tensor([63, 0, 17])[None, :, None, None]).all()


@pytest.mark.parametrize("kernels", [False, True])
def test_covered_and_sink_are_the_slots_of_blocks_and_the_one_past_them(kernels: bool):
    cache = engine(kernels=kernels).cache
    for view in cache.covered:
        view.fill_(1.0)
    for view in cache.sink:
        view.fill_(2.0)
    slots = range(cache.num_slots + 1)
    assert (cache.kv(slots)[:, :-1] == 1.0).all()
    assert (cache.kv(slots)[:, -1] == 2.0).all()
    cache.fill([5, cache.sink_slot], 7.0)
    assert (cache.kv([5, cache.sink_slot]) == 7.0).all()
    assert (cache.kv([4, 6]) == 1.0).all()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_plans_bytes_are_those_of_the_kernel_pool(shape: str, half: bool):
    built = Engine.build(SHAPES[shape], tiny_weights(shape), **SIZES, kernels=True, half_kv=half)
    assert built.pool_plan.pool_bytes == built.cache.kernel_pool.num_bytes
    budget = built.pool_plan.pool_bytes
    sizes = {"max_batch_size": 4, "block_size": 16, "element_bytes": 2 if half else 4}
    assert plan_pool(SHAPES[shape], **sizes, kv_bytes=budget, kernels=True).num_blocks == 13, "the sink's is on top"


def test_nothing_is_compiled_after_the_engine_was_built():
    built = engine(**ALL_ON)
    built.warm_decode()
    built.generate(requests())
    stats = built.stats()
    assert stats["kernel_compiles_after_ready"] == 0
    assert stats["replayed"] == stats["decode_steps"] > 0
    assert built.describe()["backend"]["schedule_invariant"] is True


def test_the_kernels_have_one_width_and_a_recording_a_row_count():
    built = engine(**ALL_ON, width_multiple=16)
    assert built.decode.buckets.shapes == ((1, 100), (2, 100), (4, 100))
    assert built.warm_decode().graphs == 3
    assert engine(kernels=False, **ALL_ON, width_multiple=16).decode.buckets.num_shapes == 3 * 7


def test_torchs_operators_promise_nothing_and_say_why():
    facts = engine(kernels=False).describe()["backend"]
    assert (facts["name"], facts["schedule_invariant"]) == ("torch", False)
    assert "number of rows" in facts["reason"]


def test_a_tied_embedding_is_in_memory_once():
    config, weights = SHAPES["mha_tied"], tiny_weights("mha_tied")
    built = Engine.build(config, weights, **SIZES, kernels=True)
    packed = built.describe()["backend"]["weight_bytes"]
    assert built.forward._forward._embedding is None
    untied = Engine.build(SHAPES["gqa"], tiny_weights(), **SIZES, kernels=True)
    embedding = TINY.vocab_size * TINY.hidden_size * 4
    assert untied.forward._forward._embedding.nbytes == embedding
    assert packed < untied.describe()["backend"]["weight_bytes"] + embedding


def test_a_row_of_nan_fails_alone_and_padding_stays_finite():
    weights = tiny_weights()
    embedding = weights.embedding.clone()
    embedding[7] = float("nan")
    spoilt = type(weights)(embedding, weights.layers, weights.final_norm, weights.lm_head)
    built = Engine.build(TINY, spoilt, **SIZES, kernels=True, **ALL_ON)
    built.warm_decode()
    params = SamplingParams(12, temperature=0.0, ignore_eos=True, logit_bias={7: -100.0})
    fine = [Request((3 + i, 5), params, f"fine{i}") for i in range(2)]
    forced = Request((4, 5), SamplingParams(12, temperature=0.0, logit_bias={7: 100.0}, ignore_eos=True), "bad")
    reasons = {done.request_id: done.finish_reason for done in built.generate([fine[0], forced, fine[1]])}
    assert reasons == {"fine0": "length", "bad": "error", "fine1": "length"}


def test_threads_default_to_torchs_choice_within_the_cores():
    assert 1 <= default_threads() <= physical_cores() <= (os.cpu_count() or 1)
    assert engine().forward.threads == default_threads()


RUN = """
import numba, torch
from fast.engine import Engine
from reference.config import ModelConfig
from reference.request import Request, SamplingParams
from reference.weights import random_weights
config = {config}
engine = Engine.build(config, random_weights(config, seed=7, dtype=torch.float32), num_blocks=4, kernels=True)
print(len(engine.generate([Request((3, 4), SamplingParams(5, temperature=0.0, ignore_eos=True))])[0].token_ids))
print(numba.config.CACHE_DIR)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    os.name != "posix", reason="folders lose their write permission as POSIX has it: run on Linux or macOS"
)
def test_a_checkout_that_nobody_can_write_to_still_works(tmp_path):
    """Neither beside the sources nor in the user's cache folder: compiled code goes when the process does."""
    alone = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    if alone and shutil.which(alone[0]) is None:
        pytest.skip("root writes anywhere; run as another user, or install setpriv (util-linux)")
    for package in ("fast", "reference", "gates"):
        shutil.copytree(ROOT / package, tmp_path / "ro" / package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [tmp_path / "ro", *(tmp_path / "ro").rglob("*")]:
        folder.chmod(folder.stat().st_mode & ~0o222)
    env = os.environ | dict.fromkeys(["HOME", "XDG_CACHE_HOME", "PYTHONPATH"], str(tmp_path / "ro"))
    env |= {"TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("NUMBA_CACHE_DIR", None)
    code = RUN.format(config=repr(TINY))
    ran = subprocess.run([*alone, sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    tokens, folder = ran.stdout.split()
    assert tokens == "5"
    assert Path(folder).parent == tmp_path
    assert not Path(folder).exists(), "a temporary folder that outlives its process"


def test_a_configured_cache_folder_is_used(tmp_path):
    code = "import fast.kernels, numba; print(numba.config.CACHE_DIR)"
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert Path(ran.stdout.strip()).parent == tmp_path, ran.stderr


def test_kernels_count_as_compiled_when_their_code_lies_on_disk(tmp_path, monkeypatch):
    import numba

    import fast.kernels  # noqa: F401

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert not compiled_before()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a_kernel.nbi").touch()
    assert compiled_before()


# ---- rejects ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dtype": torch.float64}, "kernels: True needs dtype float32, not float64"),
        ({"block_size": 24}, "kernels: True needs a block_size that is a multiple of 16, not 24"),
        ({"bucket_decode": True, "compile_decode": True}, "compile_decode: True compiles torch's operators"),
        ({"threads": 0}, "threads: 0 is not in 1.."),
        ({"kernels": False, "half_weights": True}, "half_weights: True needs kernels"),
        ({"kernels": False, "half_kv": True}, "half_kv: True needs kernels"),
        ({"kernels": False, "threads": 1}, "threads: 1 needs kernels"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(change: dict, told: str):
    with pytest.raises(ValueError, match=told):
        engine(**change)


def test_another_device_is_named():
    assert why_no_kernels(dtype=torch.float32, device="cuda", block_size=16) == "needs a CPU, not cuda"
    assert why_no_kernels(dtype=torch.float32, device="cpu", block_size=32) == ""


def test_a_weight_that_halves_make_infinite_is_refused():
    weights = tiny_weights()
    head = weights.lm_head.clone()
    head[3, 3] = 1e6
    large = type(weights)(weights.embedding, weights.layers, weights.final_norm, head)
    with pytest.raises(ValueError, match="half_weights: True makes a weight infinite"):
        Engine.build(TINY, large, **SIZES, kernels=True, half_weights=True)


def test_gate_rejects_a_kernel_compiled_after_ready():
    built = engine()
    forward = built.forward
    assert isinstance(forward, KernelBackend)
    before = forward._compiled
    # Types that no warm-up saw: what a pool of another precision would bring into the middle of a step.
    calls = iter([3, 5])
    forward._compiled = lambda: next(calls, before())
    built.submit(requests(1)[0])
    with pytest.raises(GateError, match="gate backend.no_kernel_compiles_after_ready: 2 kernels were compiled after"):
        built.step()
    with pytest.raises(GateError, match="1 kernels"):
        check_no_kernel_compiles_after_ready(compiles_after_ready=1)
