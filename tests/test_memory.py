"""Memory: a model is held once however it starts, freed blocks leave, and the peak is what the system counted."""

from __future__ import annotations

import subprocess
import sys
import weakref

import pytest
import torch
from safetensors.torch import save_file

from fast.backend import handing_over
from fast.engine import Engine
from fast.linear import MATRICES, round_to_half
from reference.checkpoint import checkpoint_name
from reference.request import Request, SamplingParams
from reference.weights import load_weights, random_weights
from serve.boot import build_engine
from serve.memory import memory, peak_rss_bytes
from serve.models import load_model
from tests.harness import TINY

linux = pytest.mark.skipif(sys.platform != "linux", reason="counts come from /proc; run it on Linux")
KERNELS = {"kernels": True, "half_weights": True}


def alone(program: str) -> None:
    """A program in a process of its own, where nothing else grows."""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# holds


@pytest.mark.parametrize("switches", [KERNELS, {}], ids=["kernels", "torch"])
def test_an_engine_that_takes_the_weights_answers_the_same_and_leaves_no_second_copy(switches: dict):
    answers = []
    for take in (False, True):
        weights = random_weights(TINY, seed=3, dtype=torch.float16)
        held = [weakref.ref(getattr(layer, name)) for layer in weights.layers for name in MATRICES]
        engine = Engine.build(TINY, weights, max_batch_size=2, num_blocks=8, take_weights=take, **switches)
        assert [tensor() is None for tensor in held] == [take] * len(held)
        request = Request((5, 6, 7), SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
        answers.append(engine.generate([request])[0].token_ids)
    assert answers[0] == answers[1]


def test_a_matrix_leaves_the_model_when_it_is_read():
    weights = random_weights(TINY, seed=3)
    handed = handing_over(weights)
    first = weakref.ref(weights.layers[0].q)
    shape = tuple(handed.layers[0].q.shape)  # nobody keeps it
    assert first() is None
    assert shape == tuple(handed.layers[1].q.shape)
    assert handed.layers[0].input_norm is handed.layers[0].input_norm  # small things stay
    assert handed.embedding is weights.embedding


def test_rounding_in_place_keeps_no_second_copy():
    weights = random_weights(TINY, seed=3)
    apart = round_to_half(weights)
    first = weakref.ref(weights.layers[0].q)
    assert first() is not None  # the caller's own stay as they are
    held = round_to_half(weights, in_place=True)
    assert held.layers is weights.layers
    assert first() is None
    assert all(torch.equal(a, b) for a, b in zip(apart.tensors(), held.tensors(), strict=True))


@linux
def test_a_checkpoint_stays_mapped_no_longer_than_a_tensor_is_copied(tmp_path):
    weights = random_weights(TINY, seed=3)
    save_file({checkpoint_name(role): t for role, t in weights.by_role()}, tmp_path / "model.safetensors")
    kept = load_weights(tmp_path, TINY)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert not [line for line in maps if str(tmp_path) in line]
    assert torch.equal(kept.layers[1].down, weights.layers[1].down)


@linux
def test_a_freed_block_goes_back_to_the_system():
    alone("""
from serve.memory import _status, returned_at_once
with returned_at_once():
    held = [bytearray(b"x" * (2 << 20)) for _ in range(40)]
    full, last = _status("VmRSS"), held[-1]
    del held
    assert full - _status("VmRSS") > 70 << 20, (full, _status("VmRSS"))
""")


def test_the_peak_outlives_what_made_it():
    alone("""
from serve.memory import peak_rss_bytes
before = peak_rss_bytes()
if before is not None:
    held = bytearray(b"x" * (64 << 20))
    full = peak_rss_bytes()
    del held
    assert peak_rss_bytes() >= full > before + (60 << 20), (before, full)
""")


def test_health_tells_the_peak_beside_the_weights():
    engine = build_engine(load_model("tiny-random"), max_batch_size=2, **KERNELS)
    told = memory(engine.describe())
    assert told["weight_bytes"] == engine.describe()["backend"]["weight_bytes"] > 0
    peak = peak_rss_bytes()
    assert (told["peak_rss_bytes"] is None) == (peak is None)
    if peak is not None:
        assert peak >= told["peak_rss_bytes"] >= told["rss_bytes"] > told["weight_bytes"]
    assert memory({"name": "reference"})["weight_bytes"] is None


def test_both_backends_count_the_bytes_of_their_weights():
    weights = random_weights(TINY, seed=3)
    elements = sum(tensor.numel() for tensor in weights.tensors())
    plain = Engine.build(TINY, weights, max_batch_size=1, num_blocks=8, dtype=torch.float64)
    assert plain.describe()["backend"]["weight_bytes"] == 8 * elements
    packed = Engine.build(TINY, weights, max_batch_size=1, num_blocks=8, **KERNELS)
    assert packed.describe()["backend"]["weight_bytes"] >= 2 * elements  # padded up to whole panels


# rejects


def test_a_matrix_cannot_be_handed_over_twice():
    handed = handing_over(random_weights(TINY, seed=3))
    assert handed.layers[0].gate is not None
    with pytest.raises(RuntimeError, match="gate: this layer's matrix was handed over already"):
        _ = handed.layers[0].gate
