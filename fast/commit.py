"""What becomes of a token that was chosen: it joins its sequence, is told, and may be its last.

An answer ends with an id that ends it, with its limit, or with the error of its own row. The owner of the engine
closes what ended; this module gives its row and blocks back. It knows no forward and no logits.

Gates: gates.engine, gates.sampling. Proof: tests/test_fast_engine.py. Story: engine.
"""

from __future__ import annotations

from fast.rows import Rows, Sequence
from fast.sampling import Sampled
from fast.scheduler import Scheduler
from gates import GateError
from gates.engine import check_within_limits
from gates.sampling import check_end_allowed
from reference.request import Event, TokenLogprobs


class Commit:
    """Takes the tokens of one engine's rows."""

    def __init__(self, scheduler: Scheduler, rows: Rows, *, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self._scheduler, self._rows = scheduler, rows

    def take(self, rows: tuple[int, ...], sampled: Sampled, *, fail_alone: bool) -> list[Event]:
        """An event a row, in order; rows and blocks of those that ended are free again."""
        events = []
        for row, token, logprobs, error in zip(rows, sampled.token_ids, sampled.logprobs, sampled.errors, strict=True):
            sequence = self._scheduler.running[row]
            if error is not None:
                event = Event(sequence.request.id, None, "error", error=error)
            else:
                event = self._take_one(sequence, row, token, logprobs, fail_alone)
            if event.finish_reason is not None:
                self._scheduler.release(sequence)
            events.append(event)
        return events

    def _take_one(
        self, sequence: Sequence, row: int, token: int, logprobs: TokenLogprobs | None, fail_alone: bool
    ) -> Event:
        """A token joins its sequence. With `fail_alone` a gate that this breaks ends this answer and no other."""
        try:
            sequence.tokens.append(token)
            self._rows.count(row, token)
            reason = self._finish_reason(sequence)
            if sequence.guide is not None and reason is None:
                sequence.guide.accept(token)
            cached = sequence.cached if sequence.num_generated == 1 else 0
            return Event(sequence.request.id, token, reason, logprobs, cached_tokens=cached)
        except GateError as fault:
            if not fail_alone:
                raise
            return Event(sequence.request.id, None, "error", error=str(fault))

    def _finish_reason(self, sequence: Sequence) -> str | None:
        """`stop` for an id that ends the answer (it is emitted all the same), `length` for a limit, else None."""
        full = sequence.num_generated == sequence.max_tokens
        reason = "stop" if sequence.tokens[-1] in sequence.ends else "length" if full else None
        check_within_limits(
            prompt_tokens=len(sequence.request.prompt_ids),
            output_tokens=sequence.num_generated,
            max_tokens=sequence.request.params.max_tokens,
            max_model_len=self.max_model_len,
            finished=reason is not None,
        )
        if reason == "stop":
            over = sequence.guide is not None and sequence.guide.allowed().only_end
            least = 0 if over else sequence.request.params.min_tokens
            check_end_allowed(output_tokens=sequence.num_generated, min_tokens=least)
        return reason
