"""What must hold of the server's counts whenever somebody reads them.

A gauge that keeps its last busy value, or a request counted twice, makes an operator act on a load that is not
there. So each reading compares counts that were kept in different places.

Proof: tests/test_metrics.py. Story: metrics.
"""

from __future__ import annotations

from gates.core import CHEAP, gate, require


@gate("metrics.answers_add_up", at=CHEAP)
def check_answers_add_up(*, submitted: int, ended: int, open_answers: int) -> None:
    """Every answer that was submitted has ended once or is open now."""
    fact = f"{submitted} answers submitted, {ended} ended and {open_answers} open"
    require(submitted == ended + open_answers, fact)


@gate("metrics.usage_in_range", at=CHEAP)
def check_usage_in_range(*, used_blocks: int, num_blocks: int, running: int) -> None:
    """K/V in use is between nothing and all there is, and nothing when nobody runs."""
    require(0 <= used_blocks <= num_blocks, f"{used_blocks} blocks in use, the pool has {num_blocks}")
    require(running > 0 or used_blocks == 0, f"{used_blocks} blocks in use, {running} requests run")
