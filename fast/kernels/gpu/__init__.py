"""Triton kernels for a GPU: each file holds a kernel, the naive torch version that judges it, and nothing of an engine.

Under `TRITON_INTERPRET=1`, read when this package is imported, the same source runs on a CPU, line by line in numpy.
Integers that change from step to step are never specialised, and addresses of integer vectors never by alignment: a
specialised argument compiles a second time, in front of whoever waits.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
# The interpreter's own product adds halves in half precision, knows no bfloat16, and a row's bits depend on its place.
ONE_BY_ONE = tl.constexpr(INTERPRETED)
# Sums and products stay apart, so that one formula has the same bits in every kernel that it is inlined into.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`: a tile's extent, the rest of it masked."""
    return 1 << max(0, least - 1).bit_length()
