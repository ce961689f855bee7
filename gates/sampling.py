"""What must hold around the choice of a token, for one row or for a whole batch of them.

The two failures behind these: sampler state that did not follow its request when rows moved, so one request
drew with another's seed or position; and a mask that lost an id, so an answer ended before it was allowed to.

Proof: tests/test_sampling.py. Story: sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

from gates.core import CHEAP, FULL, gate, require, require_rows


@gate("sampling.draw_position", at=CHEAP)
def check_draw_position(*, positions: Sequence[int], known_tokens: Sequence[int]) -> None:
    """Row by row, the draw's position is the index of the next token: prompt tokens + answer tokens so far.

    `positions` is what the sampler will draw with; `known_tokens` must come from the requests themselves.
    """
    require(len(positions) == len(known_tokens), f"{len(positions)} rows draw, {len(known_tokens)} requests wait")
    bad = [row for row, (drawn, known) in enumerate(zip(positions, known_tokens, strict=True)) if drawn != known]
    if bad:
        fact = f"draws at position {positions[bad[0]]}, its request holds {known_tokens[bad[0]]} tokens"
        require_rows(bad, len(positions), fact)


@gate("sampling.token_allowed", at=CHEAP)
def check_token_allowed(*, token_ids: Sequence[int], vocab_size: int, forbidden_ids: Sequence[Sequence[int]]) -> None:
    """Row by row, the chosen token is in the vocabulary and not among the ids forbidden to that row."""
    require(len(token_ids) == len(forbidden_ids), f"{len(token_ids)} tokens chosen, {len(forbidden_ids)} rows asked")
    outside = [row for row, token in enumerate(token_ids) if not 0 <= token < vocab_size]
    if outside:
        require_rows(
            outside, len(token_ids), f"token {token_ids[outside[0]]} chosen, the vocabulary ends at {vocab_size - 1}"
        )
    early = [row for row, token in enumerate(token_ids) if token in forbidden_ids[row]]
    if early:
        fact = f"token {token_ids[early[0]]} chosen, it would end an answer that is shorter than min_tokens"
        require_rows(early, len(token_ids), fact)


@gate("sampling.token_guided", at=CHEAP)
def check_token_guided(*, token_ids: Sequence[int], allowed: Sequence[bool]) -> None:
    """Row by row, the request's own guide allows the chosen token; a request without one is allowed all.

    `allowed` must be asked of the requests' guides, not of the masks that were applied: those may be a neighbour's.
    """
    bad = [row for row, fine in enumerate(allowed) if not fine]
    if bad:
        require_rows(bad, len(token_ids), f"token {token_ids[bad[0]]} chosen, the request's guide does not allow it")


@gate("sampling.guides_told", at=CHEAP)
def check_guides_told(*, told: Sequence[int], generated: Sequence[int]) -> None:
    """Row by row, a guide was told of as many tokens as its answer holds: it speaks of the next one and no other."""
    bad = [row for row, (heard, said) in enumerate(zip(told, generated, strict=True)) if heard != said]
    if bad:
        require_rows(
            bad, len(told), f"the guide was told of {told[bad[0]]} tokens, the answer holds {generated[bad[0]]}"
        )


@gate("sampling.prompt_scored", at=CHEAP)
def check_prompt_scored(*, positions: Sequence[int], prompt_tokens: int) -> None:
    """Before a request's first token: each token of its prompt but the first got one logprob, in order.

    `positions` are those that were given one, as they came. A block found in a cache has no logits to give one from,
    and a chunk that is computed again after a preemption gives its own a second time.
    """
    bad = [at for at, (got, due) in enumerate(zip(positions, range(1, prompt_tokens), strict=False)) if got != due]
    fact = f"{len(positions)} logprobs for the {prompt_tokens - 1} prompt tokens after the first"
    if bad:
        require(False, f"{fact}; number {bad[0] + 1} is of token {positions[bad[0]]}, due is {bad[0] + 1}")
    require(len(positions) == prompt_tokens - 1, fact)


@gate("sampling.end_allowed", at=CHEAP)
def check_end_allowed(*, output_tokens: int, min_tokens: int) -> None:
    """An answer that a token ended has more than `min_tokens` tokens, that one counted.

    Asked where answers end and not where ids are masked: a mask that lacks an id allows it, and agrees with itself.
    """
    require(
        output_tokens > min_tokens, f"the answer was ended by its token {output_tokens}, min_tokens is {min_tokens}"
    )


@gate("sampling.kept_set", at=FULL)
def check_kept_set(*, num_kept: int, top_k: int) -> None:
    """Of a row's tokens, at least one is left to draw from, and at most `top_k` when that is on (not 0)."""
    require(num_kept >= 1, "0 tokens kept, a draw needs at least 1")
    require(top_k == 0 or num_kept <= top_k, f"{num_kept} tokens kept, top_k is {top_k}")
