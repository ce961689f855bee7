"""The JSON of OpenAI's replies, whole and in chunks, for completions and for chat.

Two classes with the same methods, one an endpoint, since the two shapes share little but their envelope. Text
is escaped to ASCII: some clients take U+2028 or U+0085 for the end of a line. Numbers are finite: a logprob of
minus infinity is -9999.0, as OpenAI and vLLM write it. It knows no engine and no socket.

Proof: tests/test_app.py. Story: app.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from reference.tokenizer import Tokenizer
from serve.answer import Answer, Piece
from serve.echo import Position, finite
from serve.tools import CallParser, ToolCall, ToolUse

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def to_json(value: Any) -> bytes:
    """Compact JSON in ASCII; NaN and infinities are refused."""
    return _ENCODER.encode(value).encode("ascii")


def usage(answers: Sequence[Answer], *, num_prompt_tokens: int, n: int) -> dict[str, Any]:
    """Each prompt once, however many answers (`n`) it gets, and every token computed for an answer up to its end.

    Cached tokens are those of each prompt's first answer: the others find what that one has computed.
    """
    num_tokens = sum(answer.num_tokens for answer in answers)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in answers[::n])},
    }


def token_text(tokenizer: Tokenizer, token_id: int, *, prefix: str) -> str:
    """A token as text; one that is part of a character as OpenAI writes it, byte by byte (`\\xc4`)."""
    data = tokenizer.token_bytes(token_id, skip_special_tokens=False)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass(slots=True)
class CompletionReply:
    """`text_completion` objects of one request."""

    id: str
    created: int  # seconds since 1970
    model: str
    tokenizer: Tokenizer
    logprobs: bool

    def whole(self, answers: Sequence[Answer], counts: dict[str, Any]) -> dict[str, Any]:
        """The reply that is not streamed."""
        choices = [
            self._choice(index, Piece(answer.text, tuple(answer.positions), answer.finish_reason))
            | _told(answer, self.tokenizer)
            for index, answer in enumerate(answers)
        ]
        return {**self._envelope(), "choices": choices, "usage": counts}

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """The chunk of one piece."""
        return [{**self._envelope(), "choices": [self._choice(index, piece)]}]

    def is_plain(self, index: int, piece: Piece) -> bool:
        """True when its chunk is that of any other plain piece of this choice, but for the text."""
        return not piece.positions and piece.finish_reason is None

    def last(self, counts: dict[str, Any]) -> dict[str, Any]:
        """The chunk with the counts."""
        return {**self._envelope(), "choices": [], "usage": counts}

    def _envelope(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(piece.positions) if self.logprobs else None
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _logprobs(self, positions: Sequence[Position]) -> dict[str, Any]:
        tops: list[dict[str, float] | None] = []
        for position in positions:
            if position.logprobs is None:
                tops.append(None)
                continue
            # The chosen token is always there, so there may be one entry more than asked for.
            ranked = [*position.logprobs.top, (position.token_id, position.logprobs.logprob)]
            tops.append({self._token(token): finite(value) for token, value in ranked})
        return {
            "tokens": [self._token(position.token_id) for position in positions],
            "token_logprobs": [None if p.logprobs is None else finite(p.logprobs.logprob) for p in positions],
            "top_logprobs": tops,
            "text_offset": [position.offset for position in positions],
        }

    def _token(self, token_id: int) -> str:
        return token_text(self.tokenizer, token_id, prefix="bytes:")


@dataclass(slots=True)
class ChatReply:
    """`chat.completion` objects of one request; a choice's first chunk says who speaks."""

    id: str
    created: int  # seconds since 1970
    model: str
    tokenizer: Tokenizer
    logprobs: bool
    tools: ToolUse | None = None
    _begun: set[int] = field(default_factory=set)
    _parsers: dict[int, CallParser] = field(default_factory=dict)

    def whole(self, answers: Sequence[Answer], counts: dict[str, Any]) -> dict[str, Any]:
        """The reply that is not streamed."""
        choices = []
        for index, answer in enumerate(answers):
            text, calls = self._parsed(index, answer.text, ended=True)
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message |= {"content": text or None, "tool_calls": [call.as_dict() for call in calls]}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(answer.positions),
                    "finish_reason": self._reason(index, answer.finish_reason),
                }
            )
        told = _told(answers[0], self.tokenizer)
        return {**self._envelope("chat.completion"), "choices": choices, "usage": counts, **told}

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """The chunk of one piece, behind the one that opens its choice."""
        made = []
        if index not in self._begun:
            self._begun.add(index)
            made.append(self._chunk(index, {"role": "assistant", "content": ""}, None, None))
        text, calls = self._parsed(index, piece.text, ended=piece.finish_reason is not None)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            first = len(self._parsers[index].calls) - len(calls)
            delta["tool_calls"] = [{"index": first + n, **call.as_dict()} for n, call in enumerate(calls)]
        if delta or piece.positions or piece.finish_reason is not None:
            reason = self._reason(index, piece.finish_reason)
            made.append(self._chunk(index, delta, self._logprobs(piece.positions), reason))
        return made

    def is_plain(self, index: int, piece: Piece) -> bool:
        """True when its one chunk is that of any other plain piece of this choice, but for the text."""
        alone = bool(piece.text) and not piece.positions and piece.finish_reason is None
        return alone and self.tools is None and index in self._begun

    def last(self, counts: dict[str, Any]) -> dict[str, Any]:
        """The chunk with the counts."""
        return {**self._envelope("chat.completion.chunk"), "choices": [], "usage": counts}

    def _parsed(self, index: int, text: str, *, ended: bool) -> tuple[str, list[ToolCall]]:
        """The text of a piece that belongs to no call, and the calls that it completed."""
        if self.tools is None:
            return text, []
        parser = self._parsers.setdefault(index, CallParser(self.tools))
        before = len(parser.calls)
        said = parser.push(text)
        if ended:
            said += parser.finish()
        return said, parser.calls[before:]

    def _reason(self, index: int, reason: str | None) -> str | None:
        """`tool_calls` where the model chose to call; a call that the client named is a `stop` like any other."""
        parser = self._parsers.get(index)
        chose = parser is not None and bool(parser.calls) and self.tools is not None and not self.tools.named
        return "tool_calls" if reason == "stop" and chose else reason

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._envelope("chat.completion.chunk"), "choices": [choice]}

    def _logprobs(self, positions: Sequence[Position]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = [
            {
                **self._token(position.token_id, position.logprobs.logprob),
                "top_logprobs": [self._token(token, value) for token, value in position.logprobs.top],
            }
            for position in positions
            if position.logprobs is not None
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token_id, skip_special_tokens=False)
        text = token_text(self.tokenizer, token_id, prefix="")
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}


def _told(answer: Answer, tokenizer: Tokenizer) -> dict[str, Any]:
    """vLLM's field, for a request that asked for it."""
    told = answer.prompt.as_vllm(tokenizer)
    return {} if told is None else {"prompt_logprobs": told}
