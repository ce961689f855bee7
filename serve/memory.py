"""What this process holds in memory: the most it ever held, beside what its weights need; and giving freed pages back.

A model is read tensor by tensor and packed layer by layer, so that a start needs its weights once; `returned_at_once`
keeps the C library from holding on to what was packed already. This module knows no engine.

Proof: tests/test_memory.py. Story: app.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT_BYTES = 32 << 20


def memory(boot: Mapping[str, Any]) -> dict[str, int | None]:
    """Bytes for `/health`: resident now, the peak since the start, and the weights as `describe()` tells them.

    None where the system, or the engine, does not say.
    """
    backend = boot.get("backend") or {}
    return {
        "rss_bytes": _status("VmRSS"),
        "peak_rss_bytes": peak_rss_bytes(),
        "weight_bytes": backend.get("weight_bytes"),
    }


def peak_rss_bytes() -> int | None:
    """The largest resident set of this process so far, pages of mapped files included; None where nobody counts it."""
    # Not getrusage on Linux: a process inherits that maximum from the one that started it.
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak() -> bool:
    """Count the peak anew from what is resident now; False where the system cannot (it can on Linux)."""
    try:
        CLEAR_REFS.write_text("5", "ascii")
    except OSError:
        return False
    return True


@contextmanager
def returned_at_once(block_bytes: int = 1 << 20) -> Iterator[None]:
    """While this is open, a block of that size or more goes back to the system when it is freed (glibc).

    The C library else keeps freed blocks of up to 32 MB for later, and a start would hold what it packed already
    beside what it packed it into. Elsewhere nothing changes, which costs memory and no more.
    """
    _mallopt(MMAP_THRESHOLD, block_bytes)
    try:
        yield
    finally:
        # What the library's own adaption ends at: from here on a step's buffers are worth keeping.
        _mallopt(MMAP_THRESHOLD, KEPT_BYTES)
        _mallopt(TRIM_THRESHOLD, 2 * KEPT_BYTES)
        if sys.platform == "linux":
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)


def _mallopt(option: int, value: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(option, value)


def _status(field: str) -> int | None:
    """A figure of the kernel's status file, in bytes."""
    with suppress(OSError):
        for line in STATUS.read_text("ascii", errors="replace").splitlines():
            name, _, rest = line.partition(":")
            if name == field:
                return int(rest.split()[0]) * 1024
    return None
