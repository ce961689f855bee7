"""Everything that a card has to settle, in one command that ends in minutes: `make gpu`, or `python -m tests.gpu_run`.

First the tests that need a card, in the files that need nothing but torch, triton, numba and pytest; then the benches,
which assert before they time. It needs no network and no model. JSON goes to `--out`, a short table is printed last.
Without a card it says so and exits with 3: nothing was run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

try:
    import torch
except ModuleNotFoundError:
    sys.exit(f"make gpu: {sys.executable} has no torch, so nothing was run; PYTHON=/path/to/python make gpu")

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("test_gpu_card", "test_gpu", "test_gpu_attention", "test_gpu_kernels", "test_device_sampling")
NO_CARD = 3
SECONDS = 460.0  # for all of it
SECONDS_OF_TESTS = 230.0


def main(argv: list[str] | None = None) -> int:
    """Tests, then benches: 0 when all hold, 1 when something failed, 3 without a card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="where the numbers go; default: gpu.json")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all of it; default: {SECONDS:.0f}")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(f"make gpu: torch {torch.__version__} sees no CUDA device here, so nothing was run and nothing is shown.")
        return NO_CARD
    begin = time.monotonic()
    args.out.unlink(missing_ok=True)
    print(f"make gpu: {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    tests = tested(min(SECONDS_OF_TESTS, args.seconds / 2))
    left = args.seconds - (time.monotonic() - begin)
    bench = [sys.executable, "-m", "tests.bench.bench_gpu", "--seconds", f"{left - 20:.0f}", "--out", str(args.out)]
    timed = _run(bench, seconds=left)
    words = {0: "passed", 124: "ran out of time"}
    print(f"make gpu: tests {words.get(tests, 'FAILED')}, benches {words.get(timed, 'FAILED')}, numbers in {args.out}")
    if args.out.exists():  # a run that was cut left what it had
        from tests.bench.bench_gpu import table

        print(table(json.loads(args.out.read_text())))
    return int(bool(tests or timed))


def tested(seconds: float) -> int:
    """pytest's exit status over the files for a card, a process a file where that can be: most of it compiles."""
    files = [str(Path("tests") / f"{name}.py") for name in TESTS]
    spread = ["-n", str(len(files)), "--dist", "loadfile"] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-ra", "--durations=5", *spread, *files]
    return _run(command, seconds=seconds)


def _run(command: list[str], *, seconds: float) -> int:
    try:
        return subprocess.run(command, cwd=ROOT, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return 124


if __name__ == "__main__":
    raise SystemExit(main())
