"""The logprobs of a prompt: how likely the model found each of its tokens, given those before it.

A request that asks for them has its prompt's logits read as its chunks are computed, some rows at a time and each row
once: what a preemption computes again is not read again, and what was found in a cache would have no logits to read,
so until its prompt is scored such a request looks nothing up. It knows no schedule and no model.

Gates: gates.sampling. Proof: tests/test_score.py. Story: sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fast.sampling import as_numpy, token_logprobs
from gates.sampling import check_prompt_scored
from reference.request import PromptLogprobs, Request, TokenLogprobs


class UnusablePrompt(ArithmeticError):
    """A row of logits that speaks of a prompt token and holds NaN or +inf. It ends one request."""


class PromptScores:
    """What the prompt of one request has got so far; None of those that did not ask."""

    def __init__(self, prompt_ids: Sequence[int], *, num_top: int) -> None:
        self._prompt_ids = prompt_ids
        self._num_top = num_top
        self._positions: list[int] = []  # of prompt tokens, as they got their logprobs
        self._logprobs: list[TokenLogprobs] = []
        self._fault: str | None = None

    @property
    def rows(self) -> int:
        """Leading prompt tokens whose logits have been read."""
        return len(self._positions)

    @property
    def complete(self) -> bool:
        """True when no logits of the prompt are needed any more."""
        return self.rows >= len(self._prompt_ids) - 1

    def wanted(self, start: int, count: int) -> tuple[int, int]:
        """Which of the `count` tokens from `start` on have logits to be read: first and one past the last, from 0."""
        first = min(max(0, self.rows - start), count)
        return first, max(first, min(count, len(self._prompt_ids) - 1 - start))

    def take(self, start: int, logits: Tensor) -> None:  # [S, V]
        """Read the logits after the prompt tokens from `start` on."""
        for position, row in enumerate(as_numpy(logits), start + 1):
            self._positions.append(position)
            if np.isfinite(row.max()):  # a maximum is NaN where there is one
                self._logprobs.append(token_logprobs(row, self._prompt_ids[position], num_top=self._num_top))
            elif self._fault is None:
                self._fault = f"logits: NaN or +inf where prompt token {position} is due"

    def told(self) -> PromptLogprobs:
        """The whole prompt's, at the first event of its request.

        Raises:
            UnusablePrompt: a row held NaN or +inf.
            GateError: a token has none, or two.
        """
        if self._fault is not None:
            raise UnusablePrompt(self._fault)
        check_prompt_scored(positions=self._positions, prompt_tokens=len(self._prompt_ids))
        return (None, *self._logprobs)


def scores_of(request: Request) -> PromptScores | None:
    """Empty scores for a request that asks for its prompt's logprobs."""
    wanted = request.params.prompt_logprobs
    return None if wanted is None else PromptScores(request.prompt_ids, num_top=wanted)
