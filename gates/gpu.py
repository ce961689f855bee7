"""What must hold once a GPU engine is ready: nothing is compiled any more, and the device's allocator is at rest.

A just-in-time compiler that meets an integer of another kind quietly compiles once more, for a second, in the middle
of a step; an allocator that grows waits for the device, and grows again until there is no more.

Proof: tests/test_gpu.py. Story: kernels.
"""

from __future__ import annotations

from gates.core import CHEAP, FULL, gate, require


@gate("gpu.nothing_compiled", at=CHEAP)
def check_nothing_compiled(*, compiles_after_ready: int) -> None:
    """No kernel variant was compiled, or loaded, in front of a waiting client."""
    require(compiles_after_ready == 0, f"{compiles_after_ready} kernel variants compiled after ready, 0 may")


@gate("gpu.allocator_at_rest", at=FULL)
def check_allocator_at_rest(*, reserved: int, at_ready: int) -> None:
    """The device's allocator holds no more bytes than it did when the engine was ready."""
    require(reserved <= at_ready, f"{reserved:,} bytes reserved on the device, {at_ready:,} when it was ready")
