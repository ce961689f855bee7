"""What must hold of the kernels an engine runs on: all of them were compiled before anybody waited for a token.

A compiler that meets a new type, layout or dimension quietly compiles once more, for seconds, in the middle of a step.

Proof: tests/test_backend.py. Story: kernels.
"""

from __future__ import annotations

from gates.core import CHEAP, gate, require


@gate("backend.no_kernel_compiles_after_ready", at=CHEAP)
def check_no_kernel_compiles_after_ready(*, compiles_after_ready: int) -> None:
    """No kernel was compiled, or loaded, for new argument types in front of a waiting client."""
    require(compiles_after_ready == 0, f"{compiles_after_ready} kernels were compiled after ready, 0 may")
