"""Every Triton kernel compiles for cards that are not here, and fits: shared memory, registers, nothing spilled."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_mode import HAS_TRITON, VARIABLE

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed here; run on Linux, where it is")

# Shared memory of one program and registers of one thread: two programs at least fit on a multiprocessor.
LIMITS = {
    "sm_80": {"shared": 164 * 1024 // 2, "registers": 255},
    "sm_90": {"shared": 228 * 1024 // 2, "registers": 255},
    "gfx942": {"shared": 64 * 1024, "registers": 256},
}
DECODE_REGISTERS = 168  # three programs of 128 threads a multiprocessor, for loads to overlap
SPILLED = {"prefill": 64}  # bytes a thread; a decode step spills nothing


@pytest.fixture(scope="module")
def builds() -> list[dict[str, Any]]:
    """What `tests.gpu_compile` prints, in a process that compiles."""
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.gpu_compile", *LIMITS, "--spilling"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


def too_much(facts: dict[str, Any]) -> list[str]:
    """What of a kernel is over its limits, in words."""
    limits = dict(LIMITS[facts["target"]])
    if facts["kernel"].startswith("decode") and facts["target"] != "gfx942":
        limits["registers"] = DECODE_REGISTERS
    limits["spilled"] = SPILLED.get(facts["kernel"].split()[0], 0)
    over = {name: facts[name] for name, limit in limits.items() if facts[name] > limit}
    return [f"{facts['target']} {facts['kernel']} {facts['element']}: {over} over {limits}"] if over else []


# ---- holds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", LIMITS)
def test_every_kernel_fits(target: str, builds: list[dict[str, Any]]):
    facts = [one for one in builds if one["target"] == target and one["kernel"] != "prefill that spills"]
    assert len(facts) == 13, "ten kernels in bfloat16, three in float32"
    assert not [words for one in facts for words in too_much(one)]


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_keys_and_values_travel_sixteen_bytes_at_a_time(target: str, builds: list[dict[str, Any]]):
    """The widest asynchronous copy there is: what alignment the compiler was told of, it used."""
    half = [one for one in builds if one["target"] == target and one["element"] == "bf16"]
    copying = [one for one in half if one["kernel"].startswith(("decode", "prefill", "matmul"))]
    assert {one["kernel"]: one["copies"] for one in copying} == {one["kernel"]: [16] for one in copying}
    assert len(copying) == 6


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_decode_and_an_invariant_prefill_are_made_of_the_same_matrix_instructions(
    target: str, builds: list[dict[str, Any]]
):
    """Or their sums would have different orders, and a token the bits of whichever of the two computed it."""
    made = {one["kernel"]: one["products"] for one in builds if one["target"] == target and one["element"] == "bf16"}
    assert made["decode by slots"] == made["decode by blocks"] == made["prefill of 16"] == ["m16n8k16"]


def test_every_kernel_that_is_launched_is_compiled_here():
    """A function under `triton.jit` that is launched from Python ends in `_kernel`; each is named in gpu_compile."""
    declared = set()
    for path in (ROOT / "fast" / "kernels" / "gpu").glob("*.py"):
        names = {f.name for f in ast.parse(path.read_text()).body if isinstance(f, ast.FunctionDef)}
        declared |= {f"{path.stem}.{name}" for name in names if name.endswith("_kernel")}
    text = (ROOT / "tests" / "gpu_compile.py").read_text()
    assert len(declared) >= 7
    assert not {name for name in declared if name not in text}


# ---- rejects ------------------------------------------------------------------------------------------------------


def test_a_kernel_that_spills_is_seen(builds: list[dict[str, Any]]):
    """Float32 in the tile that is for halves: eight thousand bytes a thread."""
    (facts,) = [one for one in builds if one["kernel"] == "prefill that spills"]
    assert facts["spilled"] > 1000
    assert too_much(facts)
