"""What must hold while a step is in flight: launched, and its tokens not yet known to the host.

A step that is planned before the tokens of the one before it may compute a row whose answer is over. Its token is
dropped; what must not happen is that it is told, or counted twice, or that its blocks go to somebody else while the
device still writes them.

Proof: tests/test_overlap.py. Story: overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gates.core import CHEAP, FULL, gate, require, require_rows


@gate("overlap.one_in_flight", at=CHEAP)
def check_one_in_flight(*, in_flight: int) -> None:
    """Before a launch: at most one step is launched whose tokens the host has not read."""
    require(in_flight <= 1, f"{in_flight} steps are in flight before a launch, at most 1 may be")


@gate("overlap.tokens_conserved", at=CHEAP)
def check_tokens_conserved(*, launched: int, committed: int, dropped: int, in_flight: int) -> None:
    """Every token that was launched is committed, dropped or in flight, and one of these only."""
    told = f"{committed} committed + {dropped} dropped + {in_flight} in flight"
    require(committed + dropped + in_flight == launched, f"{launched} tokens launched, {told}")


@gate("overlap.nothing_after_end", at=CHEAP)
def check_nothing_after_end(*, ended: Sequence[tuple[str, int, int]]) -> None:
    """Once a step's tokens are taken: a sequence whose answer is over holds what it held then.

    `ended` are (request id, tokens when its answer ended, tokens now).
    """
    for request_id, at_end, now in ended:
        require(now == at_end, f"request {request_id!r} ended with {at_end} tokens, it holds {now}")


@gate("overlap.blocks_at_rest", at=CHEAP)
def check_blocks_at_rest(*, freed: Sequence[int], written: Collection[int]) -> None:
    """Before a row's blocks go back: no step in flight writes one of them."""
    busy = [block for block in freed if block in written]
    fact = f"{len(freed)} blocks go back to the pool, a step in flight writes block {busy[0] if busy else ''}"
    require(not busy, fact)


@gate("overlap.settled_first", at=CHEAP)
def check_settled_first(*, request_id: str, in_flight: int) -> None:
    """When a row is taken from a request that goes on: the host knows all its tokens."""
    fact = f"request {request_id!r} loses its row, {in_flight} of its tokens are in flight"
    require(in_flight == 0, fact)


@gate("overlap.ids_fed", at=FULL)
def check_ids_fed(*, fed: Sequence[int], chosen: Sequence[int]) -> None:
    """Once a step's tokens are known: the step after it, launched before that, has computed those and no others."""
    bad = [row for row, (one, other) in enumerate(zip(fed, chosen, strict=True)) if one != other]
    if bad:
        fact = f"the step in flight was fed token {fed[bad[0]]}, the step before chose {chosen[bad[0]]}"
        require_rows(bad, len(fed), fact)
