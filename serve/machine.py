"""What a clock figure depends on besides the code: versions, threads, processor and commit, for a bench to store.

Proof: tests/test_bench_engine.py. Story: app.
"""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path

import numpy
import torch

ROOT = Path(__file__).resolve().parents[1]


@cache
def machine() -> dict[str, str | int]:
    """Plain values for `benchmark.extra_info`; the commit ends in `+` when tracked files differ from it."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "processor": processor(),
        "commit": commit(),
    }


def processor() -> str:
    """The CPU's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """Short hash of the checkout, `unknown` outside one."""
    try:
        made = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    if made.returncode or changed.returncode:
        return "unknown"
    return made.stdout.strip() + "+" * bool(changed.stdout.strip())
