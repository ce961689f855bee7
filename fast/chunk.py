"""Chunked prefill: which tokens of which prompts a step computes.

A step has a budget of tokens. Rows that decode take theirs first; what is left is shared between the prompts that are
not computed yet, so a long one is computed over several steps and holds back nobody's next token for longer than one
budget. The policy is `share_budget`: half goes in order of arrival, half to whoever has the least left. So the earliest
always advances, and a short prompt behind a long one is not starved. A chunk that does not end its sequence gives no
token and draws nothing. This module knows counts; `fast.prefill` computes what is planned here.

Gates: gates.chunk. Proof: tests/test_chunk.py. Story: chunk.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from dataclasses import dataclass

from fast.rows import Sequence

DEFAULT_CHUNK_TOKENS = 512  # of one step: about a second of a CPU


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """The next `count` tokens of the sequence in `row`, from token `start` (0-based) on."""

    row: int
    sequence: Sequence
    start: int
    count: int
    ends: bool  # it computes the last token there is, and the sequence's next one is to be chosen


def share_budget(pending: Sequenced[int], budget: int, urgency: Sequenced[int] = ()) -> list[int]:
    """How many of `budget` tokens each of several prompts gets, of the `pending` ones it has, in order of arrival.

    One half, rounded up, is offered in order of arrival; the other, and what the first left, to the prompts with the
    least pending first. So of the budget b the first in line gets at least min(pending, b - b // 2), the shortest at
    least min(pending, b // 2), and nothing is left over while somebody could use it. `urgency` is what the second half
    goes by where it is not `pending`: a prompt that a shorter one waits for is as urgent as that one.
    """
    counts = [0] * len(pending)
    shortest_first = sorted(range(len(pending)), key=lambda i: (urgency or pending)[i])
    left = budget
    for order, offered in ((range(len(pending)), budget - budget // 2), (shortest_first, budget)):
        kept_back = budget - offered
        for index in order:
            given = min(pending[index] - counts[index], max(0, left - kept_back))
            counts[index] += given
            left -= given
    return counts


def unanswered(chunks: Sequenced[PlannedChunk]) -> list[PlannedChunk]:
    """Those that compute the last token of a sequence that wants no answer: it is over, and nothing is chosen."""
    return [one for one in chunks if not one.sequence.max_tokens and one.start + one.count == len(one.sequence.tokens)]


def share_behind(pending: Sequenced[int], budget: int, behind: Sequenced[int]) -> list[int]:
    """`share_budget` among those who wait for nobody, each as urgent as the shortest that waits for it.

    `behind[i]` is the prompt that prompt i waits for, or i.
    """
    going = [place for place, leader in enumerate(behind) if leader == place]
    urgency = {place: pending[place] for place in going}
    for place, leader in enumerate(behind):
        urgency[leader] = min(urgency[leader], pending[place])
    counts = [0] * len(pending)
    shares = share_budget([pending[place] for place in going], budget, list(urgency.values()))
    for place, count in zip(going, shares, strict=True):
        counts[place] = count
    return counts
