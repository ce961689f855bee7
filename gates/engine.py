"""What must hold of any engine at the edges of a step, told by plain values: the reference asks these too.

They are the promises of the `Engine` protocol. A request that ends twice or never, K/V that is one token ahead
of its request, an answer past its limit, a gauge that stays busy after the last abort: each was reported
against a public engine.

Proof: tests/test_engine.py. Story: engine.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from gates.core import CHEAP, gate, require, require_rows


@gate("engine.ends_once", at=CHEAP)
def check_ends_once(
    *,
    events: Sequence[tuple[str, str | None]],  # (request id, finish reason) in the order of the step
    open_before: Set[str],
    open_after: Set[str],
) -> None:
    """Of one step: only open requests speak, none after its end, and exactly those that ended are closed."""
    ended: set[str] = set()
    for request_id, finish_reason in events:
        require(request_id in open_before, f"request {request_id!r} has an event, it was not open before the step")
        require(request_id not in ended, f"request {request_id!r} has an event after the one that ended it")
        if finish_reason is not None:
            ended.add(request_id)
    still_open = sorted(ended & open_after)
    require(not still_open, f"request {''.join(still_open[:1])!r} ended in this step, it is still open after it")
    balanced = len(open_after) == len(open_before) - len(ended) and open_after <= open_before
    fact = f"{len(open_before)} open before the step, {len(ended)} ended in it, {len(open_after)} open after it"
    require(balanced, fact)


@gate("engine.tokens_cached", at=CHEAP)
def check_tokens_cached(*, cached_tokens: Sequence[int], known_tokens: Sequence[int]) -> None:
    """After a forward and before its tokens are chosen: row by row, K/V of every token known so far and no other.

    `known_tokens` is prompt + answer of the row's request; the token about to be chosen is in neither.
    """
    fact = f"{len(cached_tokens)} rows computed, {len(known_tokens)} requests wait for a token"
    require(len(cached_tokens) == len(known_tokens), fact)
    rows = enumerate(zip(cached_tokens, known_tokens, strict=True))
    bad = [row for row, (cached, known) in rows if cached != known]
    if bad:
        fact = f"K/V of {cached_tokens[bad[0]]} tokens computed, its request holds {known_tokens[bad[0]]}"
        require_rows(bad, len(cached_tokens), fact)


@gate("engine.within_limits", at=CHEAP)
def check_within_limits(
    *, prompt_tokens: int, output_tokens: int, max_tokens: int | None, max_model_len: int, finished: bool
) -> None:
    """After a token: neither limit is passed, and a request that has reached one is finished."""
    total = prompt_tokens + output_tokens
    # Asked once a row and step: the sentences are made when something is wrong.
    if total < max_model_len and (max_tokens is None or output_tokens < max_tokens):
        return
    require(
        max_tokens is None or output_tokens <= max_tokens, f"{output_tokens} tokens emitted, max_tokens {max_tokens}"
    )
    require(total <= max_model_len, f"{total} tokens of prompt and answer, the length limit is {max_model_len}")
    fact = f"{output_tokens} of {max_tokens} tokens emitted, {total} of {max_model_len} in all, the request goes on"
    require(finished, fact)


@gate("engine.gauges", at=CHEAP)
def check_gauges(
    *, running: int, waiting: int, ending: int, open_requests: int, kv_tokens: int, kv_capacity_tokens: int
) -> None:
    """Every open request is counted in one place, and K/V is in use only while something runs.

    `ending` counts the aborted requests whose last event is not out yet; they hold no K/V.
    """
    counted = f"{running} running + {waiting} waiting + {ending} ending"
    require(running + waiting + ending == open_requests, f"{counted}, {open_requests} requests are open")
    require(
        0 <= kv_tokens <= kv_capacity_tokens, f"K/V of {kv_tokens} tokens in use, the pool holds {kv_capacity_tokens}"
    )
    require(running > 0 or kv_tokens == 0, f"K/V of {kv_tokens} tokens in use, 0 requests are running")
