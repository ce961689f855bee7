"""What becomes of a token that was chosen: it joins its sequence, is told, and may be its last.

An answer ends with an id that ends it, with its limit, or with the error of its own row. The owner of the engine
closes what ended; this module gives its row and blocks back, and drops what was computed after an end that nobody
could foresee. It knows no forward and no logits.

Gates: gates.engine, gates.sampling, gates.overlap. Proof: tests/test_fast_engine.py. Story: engine.
"""

from __future__ import annotations

from collections.abc import Iterable

from fast.chunk import PlannedChunk
from fast.overlap import Overlap
from fast.rows import Rows, Sequence
from fast.sampling import Sampled
from fast.scheduler import Scheduler
from fast.score import UnusablePrompt
from gates import GateError
from gates.engine import check_within_limits
from gates.overlap import check_nothing_after_end
from gates.sampling import check_end_allowed
from reference.request import Event, TokenLogprobs


class Commit:
    """Takes the tokens of one engine's rows."""

    def __init__(self, scheduler: Scheduler, rows: Rows, overlap: Overlap, *, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self._scheduler, self._rows, self._overlap = scheduler, rows, overlap

    def take(self, sequences: tuple[Sequence, ...], sampled: Sampled, *, fail_alone: bool) -> list[Event]:
        """An event a sequence, in order; a token that was launched after its answer's end is dropped.

        Rows and blocks of those that ended are free again, unless the step in flight computes them.
        """
        events = []
        found = zip(sequences, sampled.token_ids, sampled.logprobs, sampled.errors, strict=True)
        for sequence, token, logprobs, error in found:
            sequence.in_flight -= 1
            if sequence.ended_at is not None:
                self._overlap.dropped += 1
                self._give_back(sequence)
                continue
            if error is not None:
                event = Event(sequence.request.id, None, "error", error=error)
            else:
                event = self._take_one(sequence, token, logprobs, fail_alone)
            self._overlap.committed += 1
            if event.finish_reason is not None:
                sequence.ended_at = len(sequence.tokens)
                if sequence.prefix is not None:
                    sequence.prefix.doubtful = event.finish_reason == "error"
                self._give_back(sequence)
            events.append(event)
        if self._overlap.on:
            ended = [(one.request.id, one.ended_at, len(one.tokens)) for one in sequences if one.ended_at is not None]
            check_nothing_after_end(ended=ended)
        return events

    def end(self, chunks: Iterable[PlannedChunk], *, fail_alone: bool) -> list[Event]:
        """The only events of sequences that want no token, once these chunks have computed the last of each."""
        events = []
        for chunk in chunks:
            events.append(self._take_one(chunk.sequence, None, None, fail_alone))
            self._scheduler.release(chunk.sequence)
        return events

    def publish(self, computed: Iterable[tuple[Sequence, int]]) -> list[tuple[int, int]]:
        """Whatever block became full is there for others; see `PrefixCache.publish`.

        `computed` are running sequences and how many of their tokens, all known, are computed.
        """
        twice: list[tuple[int, int]] = []
        prefix_cache, cache = self._scheduler.prefix, self._scheduler.cache
        if prefix_cache is None:
            return twice
        size = cache.block_size
        for sequence, tokens in computed:
            table = cache.tables[sequence.row] if sequence.row is not None else sequence.parked
            prefix = sequence.prefix
            if prefix is not None and table is not None and tokens // size > len(prefix.entries):
                twice += prefix_cache.publish(prefix, sequence.tokens, table.blocks, computed=tokens)
        return twice

    def _give_back(self, sequence: Sequence) -> None:
        """The row and blocks of an answer that is over, once no step in flight computes it."""
        if sequence.in_flight == 0:
            self._scheduler.release(sequence)

    def _take_one(
        self, sequence: Sequence, token: int | None, logprobs: TokenLogprobs | None, fail_alone: bool
    ) -> Event:
        """A token, if one was chosen, joins its sequence. With `fail_alone` a gate it breaks ends this answer alone."""
        try:
            prompt = sequence.prompt_logprobs()
            reason: str | None = "length"
            if token is not None:
                sequence.tokens.append(token)
                if sequence.row is not None:  # a row that is parked has nothing to count
                    self._rows.count(sequence.row, token)
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
