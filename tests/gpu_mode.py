"""Where the Triton kernels run in a test process: on the card where there is one, else in Triton's interpreter.

Whether a kernel is interpreted is settled when its module is imported, and whether Triton's own library is, when that
is. So `conftest` imports this module before anything else brings Triton in; the setting is taken back at once, and the
fixture `interpreter` gives it to the tests that need it. Nothing that this process starts inherits it.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VARIABLE = "TRITON_INTERPRET"
KERNELS = ("decode", "matmul", "prefill", "rope", "rowwise")
HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv(VARIABLE, "1")
        for kernel in KERNELS:
            importlib.import_module(f"fast.kernels.gpu.{kernel}")

# On a card the same tests are what `pytest -m gpu` selects.
MARKS = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed here; run on Linux, where it is"),
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
]
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference from the float64 truth, over the truth's largest number (at least 1)."""
    assert got.shape == wanted.shape
    assert not got.isnan().any()
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1.0))
