"""What a reply tells of its prompt: its text, and how likely the model found each of its tokens.

The answers of one prompt share one `Prompt`. Its logprobs come with the first answer's first event, and what the other
answers have before that waits for it. `echo` shows the prompt as if it had been answered, with its tokens where
`logprobs` asks for tokens; `prompt_logprobs` tells of it in vLLM's shape. It knows no engine and no socket.

Proof: tests/test_echo.py. Story: app.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reference.request import LOGPROB_FLOOR, Event, PromptLogprobs, TokenLogprobs
from reference.tokenizer import IncrementalDecoder, Tokenizer


@dataclass(frozen=True, slots=True)
class Position:
    """One shown token with its logprobs; `offset` is the character of the shown text at which its text begins."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None  # None for the first token of a prompt, which follows nothing


@dataclass(slots=True)
class Prompt:
    """One prompt, as its answers share it."""

    token_ids: tuple[int, ...]
    text: str = ""  # what each answer begins with
    offsets: tuple[int, ...] = ()  # of each token in the text, where tokens are shown
    num_shown: int | None = None  # with `echo` and `logprobs`: so many alternatives to each of its tokens
    num_asked: int | None = None  # vLLM's `prompt_logprobs`: as many, beside the answers
    logprobs: PromptLogprobs | None = None  # once they are known

    @property
    def num_wanted(self) -> int | None:
        """What an engine is asked for; None when nothing of the prompt is told."""
        return max((n for n in (self.num_shown, self.num_asked) if n is not None), default=None)

    def holds_back(self, event: Event) -> bool:
        """True of an event that is to wait for the prompt's logprobs; a failure waits for nothing."""
        return self.num_wanted is not None and self.logprobs is None and event.finish_reason in (None, "stop", "length")

    def positions(self) -> list[Position]:
        """Its tokens as the first of an answer, when they are shown."""
        if self.num_shown is None or self.logprobs is None:
            return []
        rows = zip(self.token_ids, self.offsets, self.logprobs, strict=True)
        return [
            Position(token, at, None if told is None else replace(told, top=told.top[: self.num_shown]))
            for token, at, told in rows
        ]

    def as_vllm(self, tokenizer: Tokenizer) -> list[dict[str, Any] | None] | None:
        """vLLM's `prompt_logprobs`: for each token its own and the likeliest, by token id; null for the first."""
        if self.num_asked is None or self.logprobs is None:
            return None
        rows = zip(self.token_ids, self.logprobs, strict=True)
        return [None if told is None else self._ranked(token, told, tokenizer) for token, told in rows]

    def _ranked(self, token: int, told: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
        ranked = {token: (told.logprob, told.rank)}
        for rank, (other, logprob) in enumerate(told.top[: self.num_asked], 1):
            ranked.setdefault(other, (logprob, rank))
        return {
            str(one): {"logprob": finite(logprob), "rank": rank, "decoded_token": _decoded(tokenizer, one)}
            for one, (logprob, rank) in ranked.items()
        }


def prompt_first(
    batch: Iterable[tuple[int, Event]], prompts: Sequence[Prompt], held: list[tuple[int, Event]]
) -> list[tuple[int, Event]]:
    """The (answer, event) pairs that can be shown now, in order; the others stay in `held` for the next call."""
    pairs = [*held, *batch]
    for index, event in pairs:
        if event.prompt_logprobs is not None:
            prompts[index].logprobs = event.prompt_logprobs
    held[:] = [(index, event) for index, event in pairs if prompts[index].holds_back(event)]
    return [(index, event) for index, event in pairs if not prompts[index].holds_back(event)] if held else pairs


def text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> tuple[int, ...]:
    """The character of a prompt's text at which each of its tokens begins.

    A special token that is not spelled in the text has no width, and nothing begins past the end.
    """
    decoder, special = IncrementalDecoder(tokenizer), frozenset(tokenizer.special_ids)
    offsets, at = [], 0
    for token in token_ids:
        offsets.append(min(at, len(text)))
        if token in special:
            spelled = _decoded(tokenizer, token)
            at += len(spelled) if text.startswith(spelled, at) else 0
        else:
            at += len(decoder.push(token))
    return tuple(offsets)


def finite(logprob: float) -> float:
    """As JSON can hold it; minus infinity is -9999.0, as OpenAI and vLLM write it."""
    return logprob if math.isfinite(logprob) else LOGPROB_FLOOR


def _decoded(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token, skip_special_tokens=False).decode("utf-8", "replace")
