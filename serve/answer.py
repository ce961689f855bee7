"""From events to text as it may be shown: one answer, piece by piece.

No half character, nothing that may still become a stop string, no text of the token that ended the answer. The pieces
of an answer join to its whole text: the server's streams and whole replies and the command line's `generate` and `chat`
read the same one. It knows no JSON, no socket and no engine.

Gates: gates.tokenizer. Proof: tests/test_stream.py, tests/test_answer.py. Story: stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gates.core import CHEAP, enabled
from gates.tokenizer import check_text_is_stream
from reference.request import Event, SamplingParams, TokenLogprobs
from reference.stops import StopMatcher
from reference.tokenizer import IncrementalDecoder, Tokenizer
from serve.echo import Position, Prompt


class AnswerFailed(RuntimeError):
    """The engine gave the request up; the message is the engine's."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain with one token. The piece with a `finish_reason` is the answer's last."""

    text: str
    positions: tuple[Position, ...] = ()
    finish_reason: str | None = None


class Answer:
    """The text of one answer as it grows, and why it ended."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, prompt: Prompt | None = None) -> None:
        """`prompt` says what the answer begins with, before its first token."""
        self.prompt = prompt or Prompt(())
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer)
        self._matcher = StopMatcher(params.stop)
        self._min_tokens = params.min_tokens
        self._shown_ids: list[int] = []
        self._decoded = len(self.prompt.text)  # and characters the decoder gave, those withheld included
        self._texts: list[str] = []
        self._waiting: list[Position] = []  # positions whose text is not out yet
        self.positions: list[Position] = []
        self.cached_tokens = 0  # of its prompt, those whose K/V was found and not computed
        self.num_tokens = 0  # all that were computed for it, the one that ended it included
        self.finish_reason: str | None = None

    @property
    def text(self) -> str:
        """All pieces so far, joined."""
        return "".join(self._texts)

    def push(self, event: Event) -> Piece:
        """Take the next event; a piece without text and finish reason is not worth sending.

        Raises:
            AnswerFailed: the engine gave the request up.
        """
        if event.finish_reason not in (None, "stop", "length"):
            raise AnswerFailed(event.error or f"the engine ended the request: {event.finish_reason}")
        begins = not self._texts
        if begins:
            self._waiting += self.prompt.positions()
        text = "" if event.token_id is None else self._take(event.token_id, event)
        self.cached_tokens += event.cached_tokens
        safe, stop = self._match(text)
        if event.finish_reason is not None and stop is None:
            tail, stop = self._match(self._decoder.flush())
            safe += tail + self._matcher.flush()
        if begins:
            safe = self.prompt.text + safe
        self._texts.append(safe)
        self.finish_reason = "stop" if stop is not None else event.finish_reason
        if self.finish_reason is not None:
            self._check(stop)
        return self._piece(safe)

    @property
    def mean_logprob(self) -> float:
        """Of the shown tokens, by the model's own probabilities; minus infinity when there is none."""
        before = 0 if self.prompt.num_shown is None else len(self.prompt.token_ids)
        shown = self.positions[before : before + len(self._shown_ids)]
        values = [position.logprobs.logprob for position in shown if position.logprobs is not None]
        return sum(values) / len(values) if values else float("-inf")

    def _take(self, token_id: int, event: Event) -> str:
        """Count a token; its text, if it is shown. One that ended its request with "stop" is EOS or a stop id.

        Where the prompt's tokens are shown so is that one, without text: who scores by position counts on each token.
        """
        self.num_tokens += 1
        if event.finish_reason != "stop":
            return self._show(token_id, event.logprobs)
        if self.prompt.num_shown is not None:
            self._waiting.append(Position(token_id, self._decoded, event.logprobs))
        return ""

    def _show(self, token_id: int, logprobs: TokenLogprobs | None) -> str:
        self._shown_ids.append(token_id)
        if logprobs is not None:
            self._waiting.append(Position(token_id, self._decoded, logprobs))
        text = self._decoder.push(token_id)
        self._decoded += len(text)
        return text

    def _match(self, text: str) -> tuple[str, str | None]:
        """Stop strings begin to count after `min_tokens` tokens, as EOS does."""
        if self.num_tokens <= self._min_tokens:
            return text, None
        return self._matcher.push(text)

    def _piece(self, text: str) -> Piece:
        """Logprobs travel with the first text at or after their token."""
        if not text and self.finish_reason is None:
            return Piece("")
        positions = tuple(self._waiting)
        self.positions += positions
        self._waiting.clear()
        return Piece(text, positions, self.finish_reason)

    def _check(self, stop: str | None) -> None:
        if enabled(CHEAP):
            decoded = self.prompt.text + self._tokenizer.decode(self._shown_ids)
            check_text_is_stream(streamed=self.text, decoded=decoded, stop=stop)


def best(answers: Sequence[Answer], *, of: int, keep: int) -> list[Answer]:
    """Of every `of` answers in a row (one prompt's) the `keep` with the highest `mean_logprob`, best first."""
    groups = [answers[start : start + of] for start in range(0, len(answers), of)]
    ranked = [sorted(group, key=lambda answer: -answer.mean_logprob) for group in groups]  # stable: ties stay in order
    return [answer for group in ranked for answer in group[:keep]]
