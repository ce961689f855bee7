"""A server in a process of its own, for tools that measure it from outside: started, found, and ended in order.

The tool's own work must not share an interpreter with the server's. The child is this very checkout or installation
(`python -m serve`), on a free port.

Proof: tests/test_bench_serve.py. Story: metrics.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
STOP_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Launched:
    """A running child, and where it answers."""

    url: str  # without /v1
    pid: int


@contextmanager
def launched(flags: Sequence[str]) -> Iterator[Launched]:
    """`nanoserve serve *flags` on a free port of 127.0.0.1, until the block ends.

    Raises:
        RuntimeError: it ended before it served; the message is its last words.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "serve", "serve", "--host", "127.0.0.1", "--port", "0", *flags]
    with tempfile.TemporaryFile("w+") as words:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=words, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        try:
            yield Launched(_url(child, words), child.pid)
        finally:
            _end(child)


def _url(child: subprocess.Popen[str], words: IO[str]) -> str:
    assert child.stdout is not None
    for line in child.stdout:
        found = re.match(r"serving on (http://\S+)/v1 ", line)
        if found:
            return found[1]
    child.wait()
    words.seek(0)
    last = words.read().strip().splitlines()[-1:] or [f"it ended with {child.returncode}"]
    raise RuntimeError(f"the server did not start: {last[0]}")


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if child.stdout is not None:
        child.stdout.close()
