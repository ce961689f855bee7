"""What must hold of compiled pieces: their number follows the closed set of row counts, and none is made too late.

A compiler that meets a new shape, stride or constant quietly compiles once more, in front of whoever waits.

Proof: tests/test_compiled.py. Story: compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

from gates.core import CHEAP, gate, require


@gate("compiled.bounded", at=CHEAP)
def check_compiles_bounded(*, compiles: int, pieces: int, row_sizes: Sequence[int]) -> None:
    """At most one compilation for each piece and row count, whatever number of layers, widths and steps there are."""
    most = pieces * len(row_sizes)
    require(
        compiles <= most,
        f"{compiles} compilations, {pieces} pieces x {len(row_sizes)} row counts {tuple(row_sizes)} are {most}; "
        f"something besides the row count is baked in (a weight, a constant of one layer)",
    )


@gate("compiled.none_after_ready", at=CHEAP)
def check_no_compiles_after_ready(*, compiles_after_ready: int) -> None:
    """Nothing was compiled in front of a waiting client."""
    require(compiles_after_ready == 0, f"{compiles_after_ready} compilations after ready, 0 may")
