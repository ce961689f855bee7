"""The first thing to run: everything imports, and both engines give one prompt the same answer (under five seconds)."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from fast.engine import Engine as FastEngine
from reference.engine import Engine as ReferenceEngine
from reference.request import Request, SamplingParams
from reference.weights import random_weights
from tests.harness import TINY

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(
    f"{package}.{path.stem}"
    for package in ("gates", "reference", "fast")
    for path in (ROOT / package).glob("*.py")
    if path.stem != "__init__"
)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_on_its_own(module: str):
    assert importlib.import_module(module).__doc__


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_prompt_has_one_answer(temperature: float):
    weights = random_weights(TINY, dtype=torch.float64)
    request = Request((3, 14, 15, 9, 26), SamplingParams(max_tokens=12, temperature=temperature, seed=1))
    (fast,) = FastEngine.build(TINY, weights, num_blocks=4, dtype=torch.float64).generate([request])
    (reference,) = ReferenceEngine(TINY, weights, dtype=torch.float64).generate([request])
    assert fast == reference
    assert fast.token_ids
