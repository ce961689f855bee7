"""What must hold of the answers a server has open: each speaks only while it is open, and ends once.

An answer that ends twice is counted twice, and one that speaks after its end writes into a reply that was sent.
That the text sent is the text of the answer is asked by `gates.tokenizer`, whose subject text is.

Proof: tests/test_stream.py. Story: stream.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gates.core import CHEAP, gate, require


@gate("stream.ends_once", at=CHEAP)
def check_answers_end_once(
    *,
    events: Sequence[tuple[str, str | None]],  # (request id, finish reason) in the order of the step
    open_ids: Collection[str],  # answers the server still waits for
) -> None:
    """After a step and before its events are handed on: each belongs to an open answer, none follows its last."""
    ended: set[str] = set()
    for request_id, finish_reason in events:
        require(
            request_id in open_ids, f"event for {request_id!r}, the server has {len(open_ids)} answers open, not it"
        )
        require(request_id not in ended, f"event for {request_id!r} after the one that ended it")
        if finish_reason is not None:
            ended.add(request_id)


@gate("stream.all_ended", at=CHEAP)
def check_all_answers_ended(*, open_ids: Collection[str], finish_reasons: Sequence[str | None]) -> None:
    """Before a whole reply is written, or the last chunk: every choice has a reason, no answer is open any more."""
    missing = [index for index, reason in enumerate(finish_reasons) if reason is None]
    require(not missing, f"choice {missing[:1]} of {len(finish_reasons)} has no finish reason, its reply is complete")
    require(not open_ids, f"{len(open_ids)} answers open ({sorted(open_ids)[:1]}), their reply is complete")
