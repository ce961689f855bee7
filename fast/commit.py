"""What becomes of a token that was chosen: it joins its sequence, is told, and may be its last.

An answer ends with an id that ends it, with its limit, or with the error of its own row. The owner of the engine
closes what ended; this module gives its row and blocks back. It knows no forward and no logits.

Gates: gates.engine, gates.sampling. Proof: tests/test_fast_engine.py. Story: engine.
"""

from __future__ import annotations

from collections.abc import Iterable

from fast.chunk import PlannedChunk
from fast.rows import Rows, Sequence
from fast.sampling import Sampled
from fast.scheduler import Scheduler
from fast.score import UnusablePrompt
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

    def end(self, chunks: Iterable[PlannedChunk], *, fail_alone: bool) -> list[Event]:
        """The only events of sequences that want no token, once these chunks have computed the last of each."""
        events = []
        for chunk in chunks:
            events.append(self._take_one(chunk.sequence, chunk.row, None, None, fail_alone))
            self._scheduler.release(chunk.sequence)
        return events

    def _take_one(
        self, sequence: Sequence, row: int, token: int | None, logprobs: TokenLogprobs | None, fail_alone: bool
    ) -> Event:
        """A token, if one was chosen, joins its sequence. With `fail_alone` a gate it breaks ends this answer alone."""
        try:
            prompt = sequence.prompt_logprobs()
            reason: str | None = "length"
            if token is not None:
                sequence.tokens.append(token)
                self._rows.count(row, token)
                reason = self._finish_reason(sequence)
                if sequence.guide is not None and reason is None:
                    sequence.guide.accept(token)
            cached = sequence.cached if sequence.num_generated <= 1 else 0
            return Event(sequence.request.id, token, reason, logprobs, cached_tokens=cached, prompt_logprobs=prompt)
        except (GateError, UnusablePrompt) as fault:
            if isinstance(fault, GateError) and not fail_alone:
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
