"""Test settings: gates at full, Hypothesis profiles, and one torch thread a process."""

from __future__ import annotations

import os
import warnings

os.environ.setdefault("NANOSERVE_GATES", "full")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# One thread a process: `make test` runs a process a core, and two pools of spinning threads starve each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from gates import set_level
from tests.gpu_mode import DEVICE, VARIABLE

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("dev", max_examples=25, **COMMON)
settings.register_profile("ci", max_examples=60, derandomize=True, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture(autouse=True)
def full_gates():
    """Every test runs with gates at full, and a test that changed the level does not leak it."""
    set_level("full")
    yield
    set_level("full")


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter for one test, where there is no card."""
    if DEVICE == "cpu":
        monkeypatch.setenv(VARIABLE, "1")


@pytest.fixture(scope="session")
def inductor() -> None:
    """Skip where torch.compile cannot build C++: no compiler, or a path that its build commands do not quote."""
    from fast.compiled import probe

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            probe("inductor", torch.device("cpu"))
        except ValueError as error:
            pytest.skip(f"runs where torch.compile works (g++, and no space in the environment's path): {error}"[:300])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A GPU test without a GPU is skipped, and says what would run it."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device here; on a machine with one: pytest -m gpu")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
