"""What goes into an engine and what comes out: `Request`, `SamplingParams`, `Event`, `Completion`.

Both engines take and give these and nothing else, so a test or a server can swap one for the other. They
hold token ids, never text: stop strings are carried here and matched above the engine, where text exists.
Everything is validated once, when it is made, with a `ValueError` naming the field, the value and the range.

Proof: tests/test_request.py. Story: engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_N = 128
MAX_PRIORITY = 2**31 - 1
LOGPROB_FLOOR = -9999.0  # an impossible token's log probability is -inf, which JSON cannot hold
SEED_RANGE = (-(2**63), 2**63 - 1)

FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to turn a request's logits into its tokens.

    Order of work on a row of logits [V], in float64:

    1. `repetition_penalty` on every id of prompt and answer (a positive logit divided, another multiplied);
       `presence_penalty` once and `frequency_penalty` per occurrence, on ids of the answer alone.
    2. `logit_bias` added; then every id masked that the request's guide does not allow; then EOS and stop ids masked
       while fewer than `min_tokens` tokens exist, unless the guide allows nothing but the end.
    3. `temperature` 0: the highest logit, lowest id among ties. Else softmax((logits - max) / temperature).
    4. `min_p` keeps p >= min_p * max(p); `top_k` keeps the k first in the order (p descending, id ascending);
       `top_p` keeps the shortest prefix of that order whose share of the mass still kept reaches top_p.
    5. The first kept id, in id order, at which the running mass exceeds u times the mass kept.

    u is uniform in [0, 1) and a function of (seed, position) alone: Philox4x32-10 with the seed's 64 bits as key
    and (position low, position high, 0, 0) as counter gives words x0, x1, x2, x3, and u is the upper 53 bits of
    x1 * 2**32 + x0, over 2**53. `position` is the index in the sequence of the token drawn (the first: the
    prompt's length), so neighbours, rows, preemption and recompute change nothing.

    `seed` None lets the engine choose one at submit; any int64 is a seed of its own, negative ones included.
    `max_tokens` None means up to the model's length limit; 0 computes the prompt and chooses nothing, and the
    request ends with `length` and without a token. `stop_token_ids` end a request even with `ignore_eos`.
    `logprobs` None asks for none; k asks for the chosen token's and the k most likely ones', taken from the raw
    logits before any of the work above and never below `LOGPROB_FLOOR`. `prompt_logprobs` asks for the same of
    each prompt token but the first, given those before it. A row whose raw logits hold NaN or +inf, or in which
    every id is masked, ends its own request with finish reason `error`.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 0, None, optional=True)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, None)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("seed", self.seed, *SEED_RANGE, optional=True)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)  # smaller would overflow a logit
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        _integer("n", self.n, 1, MAX_N)
        object.__setattr__(self, "logit_bias", MappingProxyType(_checked_bias(self.logit_bias)))
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """True when the highest logit is taken and no random number is drawn."""
        return self.temperature == 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse ids that the model cannot emit; called once, by `submit`.

        Raises:
            ValueError: naming `logit_bias` or `stop_token_ids` and the range 0..vocab_size - 1.
        """
        for name, tokens in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in tokens:
                _integer(name, token, 0, vocab_size - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Allowed:
    """What a guide lets an answer say next, its EOS ids included where it may end."""

    ids: NDArray[np.bool_]  # [V]
    only_end: bool = False  # nothing but EOS is left
    error: str | None = None  # why the guide gave up; then no id is allowed


class GuideState(Protocol):
    """How far one answer has come in its guide. An engine tells it each token that does not end the answer."""

    @property
    def num_accepted(self) -> int:
        """Tokens it was told of."""

    def accept(self, token_id: int) -> None:
        """The answer goes on with this token. What follows is worked out elsewhere, while the engine computes."""

    def allowed(self) -> Allowed:
        """What may follow; waits for what `accept` began."""


class Guide(Protocol):
    """A grammar that an answer keeps to, as ids: shared by requests, and a function of the answer's tokens alone."""

    def start(self, *, vocab_size: int, eos_token_ids: Sequence[int]) -> GuideState:
        """The state of an answer that has no token yet, for a model with these logits and these ends."""

    def describe(self) -> dict[str, str]:
        """Plain text from which the same guide can be made again."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued: its token ids, how to sample, and an id that is unique while it is open.

    `guide` restricts what may be said; with one there is no going on past EOS. The last three change no token:
    `priority` (lower is sooner) goes before the order of arrival, until so many others have come that it is due
    (`fast.scheduler`); `prefix_cache` False keeps its K/V out of the cache that requests share, and another
    `cache_salt` from requests that do not know it.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    id: str = "request"
    guide: Guide | None = None
    priority: int = 0
    cache_salt: str = ""
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if self.guide is not None and self.params.ignore_eos:
            raise ValueError("ignore_eos: True contradicts a guide, after whose end nothing may follow")
        object.__setattr__(self, "prompt_ids", _checked_ids("prompt_ids", self.prompt_ids))
        if not self.prompt_ids:
            raise ValueError("prompt_ids: empty; at least one token is needed to compute a next one")
        if not isinstance(self.id, str):
            raise ValueError(f"id: {self.id!r} is not a string")
        _integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if not isinstance(self.cache_salt, str):
            raise ValueError(f"cache_salt: {self.cache_salt!r} is not a string")
        if not isinstance(self.prefix_cache, bool):
            raise ValueError(f"prefix_cache: {self.prefix_cache!r} is not true or false")

    def expand(self) -> list[Request]:
        """`n` requests of one answer each; answer i has id `<id>-i` and seed + i (wrapped to int64).

        The first alone asks for the logprobs of the prompt, which all of them share.
        """
        if self.params.n == 1:
            return [self]
        low = SEED_RANGE[0]
        children = []
        for i in range(self.params.n):
            seed = None if self.params.seed is None else (self.params.seed + i - low) % 2**64 + low
            asked = self.params.prompt_logprobs if i == 0 else None
            params = replace(self.params, n=1, seed=seed, prompt_logprobs=asked)
            children.append(replace(self, params=params, id=f"{self.id}-{i}"))
        return children


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position: the chosen token's, its rank (1 = most likely), the top k's."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first, ties by lower id


PromptLogprobs = tuple[TokenLogprobs | None, ...]  # one a prompt token, None for the first, which follows nothing


@dataclass(frozen=True, slots=True)
class Event:
    """One new token of one request, or its end. The event with a `finish_reason` is the request's last.

    `token_id` is None only when a request ends without a token (`abort`, `error`, `length` with `max_tokens` 0).
    """

    request_id: str
    token_id: int | None
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    cached_tokens: int = 0  # of an answer's first event: prompt tokens found, not its own work
    prompt_logprobs: PromptLogprobs | None = None  # of the first event of a request that asked for them


@dataclass(slots=True)
class Completion:
    """A finished request: every token it emitted (its EOS included) and why it ended."""

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None
    error: str | None = None

    def add(self, event: Event) -> None:
        """Append one event of this request."""
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self.finish_reason, self.error = event.finish_reason, event.error


class Engine(Protocol):
    """What a server or a test may ask of an engine; both engines keep it to the letter."""

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and answer together, that one request may have."""

    @property
    def has_work(self) -> bool:
        """True while any request is waiting or running."""

    def submit(self, request: Request) -> None:
        """Queue a request of one answer. Raises ValueError when it can never run; the engine is unchanged."""

    def abort(self, request_id: str) -> None:
        """Forget a request, whatever its state; the next `step` returns its `abort` event. Unknown ids do nothing."""

    def step(self) -> list[Event]:
        """Advance the open requests by one token each, as far as the engine's policy allows."""

    def idle(self) -> bool:
        """Do a little of what can wait until no request is open; False when there is nothing of that kind."""

    def describe(self) -> dict[str, Any]:
        """What was decided at start-up and does not change: engine, limits, switches, memory; plain values."""

    def stats(self) -> dict[str, Any]:
        """Counts for people and metrics: at least `running`, `waiting`, `kv_tokens`, `kv_capacity_tokens`."""


def validate_submit(request: Request, *, vocab_size: int, max_model_len: int, open_ids: Mapping[str, Any]) -> None:
    """The checks both engines make before they take a request.

    Raises:
        ValueError: naming the field, its value and the range allowed.
    """
    params = request.params
    if request.id in open_ids:
        raise ValueError(f"id: {request.id!r} is already open")
    if params.n != 1:
        raise ValueError(f"n: {params.n} must be expanded before submit (Request.expand)")
    if params.stop:
        raise ValueError("stop: strings are matched above the engine, where there is text; submit without them")
    for token in request.prompt_ids:
        _integer("prompt_ids", token, 0, vocab_size - 1)
    params.check_vocabulary(vocab_size)
    length = len(request.prompt_ids)
    if length + (params.max_tokens != 0) > max_model_len:
        raise ValueError(
            f"prompt_ids: {length} tokens leave no room for an answer; the length limit is {max_model_len} tokens"
        )
    if params.max_tokens is not None and length + params.max_tokens > max_model_len:
        raise ValueError(
            f"max_tokens: {params.max_tokens} after a prompt of {length} tokens is {length + params.max_tokens}; "
            f"the length limit is {max_model_len} tokens"
        )
    # With max_tokens given this holds already; without it an answer must still have room for its own minimum.
    _integer("min_tokens", params.min_tokens, 0, max_model_len - length)


def generate(engine: Engine, requests: list[Request]) -> list[Completion]:
    """Run requests to their end on an idle engine; completions come in the order given, n answers each.

    Raises:
        ValueError: one of them can never run; those taken before it are aborted, and the engine is idle again.
    """
    open_completions: dict[str, Completion] = {}
    families = [parent.expand() for parent in requests]
    try:
        for child in (child for children in families for child in children):
            engine.submit(child)
            open_completions[child.id] = Completion(child.id, child.prompt_ids)
    except ValueError:
        for request_id in open_completions:
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
        raise
    while engine.has_work:
        for event in engine.step():
            open_completions[event.request_id].add(event)
    for first, *others in families:
        for child in others:
            open_completions[child.id].prompt_logprobs = open_completions[first.id].prompt_logprobs
    return list(open_completions.values())


def _integer(name: str, value: Any, low: int | None, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(f"{name}: {value!r} is not an integer in {_range(low, high)}")


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    # A comparison with NaN is false, and one with a huge int cannot overflow, as math.isfinite would.
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not low <= value <= high or (open_low and value == low):
        raise ValueError(f"{name}: {value!r} is not a number in {'(' if open_low else '['}{low}, {high}]")


def _range(low: int | None, high: int | None) -> str:
    return f"{'..' if low is None else low}..{'' if high is None else high}"


def _checked_ids(name: str, ids: Any) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise ValueError(f"{name}: {ids!r} is not a sequence of token ids")
    tokens = tuple(ids)
    for token in tokens:
        _integer(name, token, 0, None)
    return tokens


def _checked_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias: {bias!r} is not a mapping of token ids to numbers")
    for token, value in bias.items():
        _integer("logit_bias key", token, 0, None)
        _number(f"logit_bias[{token}]", value, -100.0, 100.0)
    return dict(bias)


def _checked_stop(stop: Any) -> tuple[str, ...]:
    if not isinstance(stop, Iterable):
        raise ValueError(f"stop: {stop!r} is not up to {MAX_STOP_STRINGS} non-empty strings")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > MAX_STOP_STRINGS or not all(isinstance(s, str) and s for s in strings):
        raise ValueError(f"stop: {stop!r} is not up to {MAX_STOP_STRINGS} non-empty strings")
    return strings
