"""What must hold of a request's bits: run again alone, it gets the logits that it had among others.

Proof: tests/test_recheck.py. Story: invariance.
"""

from __future__ import annotations

from gates.core import CHEAP, gate, require


@gate("recheck.rerun", at=CHEAP)
def check_rerun_keeps_bits(*, request_id: str, token: int, under_load: bytes, alone: bytes) -> None:
    """The logits before answer token `token` (0-based) have the same digest under load and alone."""
    require(
        under_load == alone,
        f"request {request_id}, answer token {token}: logits {under_load.hex()} under load, {alone.hex()} alone",
    )
