"""When the things of one answer happened: submitted, started, first token, last token, ended, and for what reason.

A `Ticket` keeps one timeline an answer and tells an `Observer` of it as it grows; metrics, request logs and spans
read the same numbers, so they cannot disagree. All times are `time.monotonic` seconds. It knows no text and no HTTP.

Proof: tests/test_metrics.py. Story: metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Timeline:
    """One answer's times and counts; None is what has not happened."""

    request_id: str
    num_prompt_tokens: int
    submitted_s: float
    started_s: float | None = None  # the start of the step that gave it a row
    first_token_s: float | None = None  # the end of the step that computed it, and so on below
    last_token_s: float | None = None
    ended_s: float | None = None
    num_tokens: int = 0
    finish_reason: str | None = None  # stop, length, abort (the client left), refused, error

    @property
    def queue_s(self) -> float | None:
        """From submission to a row."""
        return None if self.started_s is None else self.started_s - self.submitted_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from submission."""
        return None if self.first_token_s is None else self.first_token_s - self.submitted_s

    @property
    def prefill_s(self) -> float | None:
        """From a row to the first token."""
        if self.first_token_s is None or self.started_s is None:
            return None
        return self.first_token_s - self.started_s

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last."""
        if self.first_token_s is None or self.last_token_s is None:
            return None
        return self.last_token_s - self.first_token_s

    @property
    def e2e_s(self) -> float | None:
        """From submission to the end."""
        return None if self.ended_s is None else self.ended_s - self.submitted_s

    def start(self, at_s: float) -> None:
        """It got a row; a second time, after a preemption, changes nothing."""
        if self.started_s is None:
            self.started_s = at_s

    def token(self, at_s: float) -> float | None:
        """It got a token; returns the seconds since the one before, None for the first."""
        before, self.last_token_s = self.last_token_s, at_s
        self.num_tokens += 1
        if before is None:
            self.first_token_s = at_s
            return None
        return at_s - before

    def end(self, at_s: float, reason: str) -> None:
        """It ended."""
        self.ended_s, self.finish_reason = at_s, reason


class Observer(Protocol):
    """Told of every answer on the event loop's thread, each end exactly once."""

    def submitted(self, timeline: Timeline) -> None:
        """An answer was put in the queue."""

    def token(self, timeline: Timeline, gap_s: float | None) -> None:
        """It got a token, `gap_s` after the one before; None for the first."""

    def ended(self, timeline: Timeline) -> None:
        """It has a `finish_reason` now."""


class Unobserved:
    """The observer where nobody watches."""

    def submitted(self, timeline: Timeline) -> None:
        """Nothing."""

    def token(self, timeline: Timeline, gap_s: float | None) -> None:
        """Nothing."""

    def ended(self, timeline: Timeline) -> None:
        """Nothing."""
