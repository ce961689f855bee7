"""Guides: answers that keep to a JSON schema, a regular expression or a grammar, through llguidance.

A `Grammar` is compiled once, where a request is checked, so that what cannot be compiled is a 400. Each answer walks
its own copy; after every token the next mask is worked out in a thread beside the engine, while that computes. What is
allowed is a function of the answer's tokens alone, so neighbours, rows, preemption and the engine change nothing.
EOS is no text: the real ids are set where the text may end, whatever their spelling. It knows no engine.

Source: llguidance (github.com/guidance-ai/llguidance), an Earley parser over lexemes that are derivatives of regexes.

Proof: tests/test_guide.py. Story: guide.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference.request import Allowed
from reference.tokenizer import Tokenizer

FIELDS = ("response_format", "structured_outputs", "tools")  # of a request, that a guide is made of
KINDS = ("json_schema", "regex", "grammar", "lark")
MAX_SOURCE = 128 * 1024  # characters; llguidance bounds the work of a grammar by itself, this bounds its reading
# The whitespace of `json.dumps`. With free whitespace a small model may go on writing spaces for ever.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class GuideSpec:
    """What an answer is to keep to, as text. `field` is the client's name for it."""

    kind: str  # one of KINDS
    source: str
    field: str = "response_format"


class Guides:
    """Compiles guides for one tokenizer; thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: Any = None  # made when first needed: it reads every token
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="guide")

    def compile(self, spec: GuideSpec) -> Grammar:
        """The guide of a spec.

        Raises:
            ValueError: naming the spec's field; it cannot be compiled, or llguidance is not installed.
        """
        if spec.kind not in KINDS:
            raise ValueError(f"{spec.field}: kind {spec.kind!r} is not one of {', '.join(KINDS)}")
        if len(spec.source) > MAX_SOURCE:
            raise ValueError(f"{spec.field}: {len(spec.source)} characters; a grammar has at most {MAX_SOURCE}")
        try:
            from llguidance import LLMatcher, LLParserLimits, grammar_from
        except ImportError:
            raise ValueError(f"{spec.field}: needs llguidance, which this server does not have") from None
        try:
            if spec.kind == "json_schema":
                text = LLMatcher.grammar_from_json_schema(spec.source, overrides=JSON_STYLE)  # type: ignore[arg-type]
            else:
                text = grammar_from(spec.kind, spec.source)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{spec.field}: {_reason(str(error))}") from None
        matcher = LLMatcher(self._words(), text, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if not matcher.is_error():
            matcher.compute_bitmask()  # some limits show only at the first mask
        if matcher.is_error():
            raise ValueError(f"{spec.field}: {_reason(matcher.get_error())}")
        return Grammar(spec, matcher, num_tokens=self._tokenizer.vocab_size, pool=self._pool)

    def _words(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = LLTokenizer(TokenizerWrapper(_Words(self._tokenizer)))
            return self._vocabulary


class Grammar:
    """A `Guide` of `reference.request`."""

    def __init__(self, spec: GuideSpec, matcher: Any, *, num_tokens: int, pool: ThreadPoolExecutor) -> None:
        self.spec = spec
        self._matcher = matcher  # at the beginning, for ever: `start` copies it
        self._num_tokens = num_tokens
        self._pool = pool

    def start(self, *, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarState:
        """The state before the first token."""
        width = min(vocab_size, self._num_tokens)
        ends = tuple(eos_token_ids)
        return GrammarState(self._matcher.deep_copy(), self._pool, width, vocab_size, ends, field=self.spec.field)

    def describe(self) -> dict[str, str]:
        """Its kind and its source."""
        return {"kind": self.spec.kind, "source": self.spec.source}


class GrammarState:
    """A `GuideState` of `reference.request`; called by one thread, works in another."""

    def __init__(
        self,
        matcher: Any,
        pool: ThreadPoolExecutor,
        width: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        *,
        field: str,
    ) -> None:
        """`width` ids of the `vocab_size` have text; the others are never allowed. An error begins with `field`."""
        self._field = field
        self._matcher = matcher
        self._pool = pool
        self._width, self._vocab_size, self._eos = width, vocab_size, eos_token_ids
        self.num_accepted = 0
        self._next: Future[Allowed] = pool.submit(self._work_out, None)

    def accept(self, token_id: int) -> None:
        """Go on with a token; what may follow it is worked out in the pool."""
        self._next.result()  # in order: the matcher is one, and the mask before this token has been used
        self.num_accepted += 1
        self._next = self._pool.submit(self._work_out, token_id)

    def allowed(self) -> Allowed:
        """What may come next."""
        return self._next.result()

    def _work_out(self, token_id: int | None) -> Allowed:
        if token_id is not None:
            self._matcher.consume_token(token_id)
        ids = np.zeros(self._vocab_size, np.bool_)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            return Allowed(ids, error=f"{self._field}: {_reason(self._matcher.get_error())}")
        if not self._matcher.is_stopped():
            ids[: self._width] = np.unpackbits(bits, count=self._width, bitorder="little")
        ids[[*self._eos]] = False
        goes_on = bool(ids.any())
        ids[[*self._eos]] = self._matcher.is_accepting()
        return Allowed(ids, only_end=not goes_on)


class _Words:
    """A tokenizer as llguidance reads one: the bytes of each id, and one more id that stands for the end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        end = tokenizer.vocab_size
        self.eos_token_id = end
        self.bos_token_id = None
        self.special_token_ids = [*sorted(tokenizer.special_ids), end]
        self.tokens = [tokenizer.token_bytes(index, skip_special_tokens=False) for index in range(end)] + [b"<end>"]
        self._tokenizer = tokenizer
        self._special = frozenset(self.special_token_ids)
        self._ids = {data: index for index, data in enumerate(self.tokens) if data and index not in self._special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """Ids that spell the text to the byte, the tokenizer's own where it does not write a space in front of it."""
        wanted = text.encode("utf-8")
        for guard in ("", "\n"):
            ids = self._tokenizer.encode(guard + text, add_special_tokens=False)
            for start in range(min(3, len(ids)) + 1):
                own = ids[start:]
                if b"".join(self.tokens[index] for index in own) == wanted and self._special.isdisjoint(own):
                    return own
        return self._greedy(wanted)

    def _greedy(self, wanted: bytes) -> list[int]:
        """The longest token at each place; ends where no token fits."""
        ids: list[int] = []
        at = 0
        while at < len(wanted):
            for end in range(min(len(wanted), at + self._longest), at, -1):
                if wanted[at:end] in self._ids:
                    ids.append(self._ids[wanted[at:end]])
                    break
            else:
                return ids
            at = end
        return ids


def schema_spec(schema: Any, *, field: str) -> GuideSpec:
    """The spec of a JSON schema that a client sent."""
    return GuideSpec("json_schema", json.dumps(schema), field)


def choice_spec(choices: Sequence[str], *, field: str) -> GuideSpec:
    """The spec of one of several strings."""
    return GuideSpec("lark", "start: " + " | ".join(map(_quoted, choices)), field)


def _quoted(text: str) -> str:
    """A string of a grammar; its lexer takes every character as it is but those that JSON escapes, and DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _reason(text: str) -> str:
    """What llguidance complains of in one line, in words where it gives a bare name."""
    first, *more = text.strip().split("\n")
    if first.startswith("NoExtension"):
        return "no text can keep to it"
    if first.endswith("parse error:"):
        first += next((" " + line.removeprefix("error: ") for line in more if line.startswith("error: ")), "")
    return first[:300]
