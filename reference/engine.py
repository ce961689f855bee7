"""The engine to read first: one request at a time, first come first served, one token a step.

It is what the fast engine must equal, token for token, and it owes its answers to nothing but the definitions:
`LlamaModel` for the logits, `KVCache` for what was computed, `sample` for the choice. It knows no batch, no
block, no text and no clock.

Gates: gates.engine. Proof: tests/test_engine.py. Story: engine.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gates.engine import check_ends_once, check_gauges, check_tokens_cached, check_within_limits
from gates.sampling import check_guides_told, check_prompt_scored
from reference import request as contract
from reference.cache import KVCache
from reference.config import ModelConfig
from reference.model import LlamaModel
from reference.request import Completion, Event, GuideState, PromptLogprobs, Request, validate_submit
from reference.sampling import UnusableLogits, prompt_logprobs, sample
from reference.weights import ModelWeights


def random_seed() -> int:
    """An int64 nobody can guess, for a request that names no seed."""
    return secrets.randbits(64) - 2**63


@dataclass(slots=True)
class Sequence:
    """One open request: what was asked, the seed it draws with, and the answer so far."""

    request: Request
    seed: int
    output_ids: list[int] = field(default_factory=list)
    cache: KVCache | None = None  # made by the first step, and gone with the sequence
    guide: GuideState | None = None  # what restricts the answer, and how far the answer has come in it

    @property
    def token_ids(self) -> list[int]:
        """Prompt and answer, in order: all the tokens whose K/V the next token looks back on."""
        return [*self.request.prompt_ids, *self.output_ids]


class Engine:
    """The `Engine` protocol of `reference.request`, with at most one request running."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        max_model_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        seed_source: Callable[[], int] = random_seed,
    ) -> None:
        """`max_model_len` is clamped to what the model's positions allow; `dtype` is what the forward computes in.

        `kv_dtype` is what K/V are stored in (`dtype` when None): float16 is the `half_kv` of the fast engine.

        Raises:
            ValueError: `max_model_len` leaves no room for a prompt token and an answer token.
        """
        limit = config.max_positions if max_model_len is None else max_model_len
        if limit < 2:
            raise ValueError(f"max_model_len: {limit} is not at least 2, one prompt token and one answer token")
        self.config = config
        self.model = LlamaModel(config, weights, dtype=dtype)
        self.dtype = dtype
        self.kv_dtype = dtype if kv_dtype is None else kv_dtype
        self._max_model_len = min(limit, config.max_positions)
        self._seed_source = seed_source
        self._open: dict[str, Sequence] = {}  # every request whose last event is still to come
        self._waiting: deque[Sequence] = deque()
        self._running: Sequence | None = None
        self._aborted: list[str] = []  # ended, but the next step is yet to say so

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and answer together, that one request may have."""
        return self._max_model_len

    @property
    def has_work(self) -> bool:
        """True while any request is open, an aborted one whose event is not out yet included."""
        return bool(self._open)

    def submit(self, request: Request) -> None:
        """Queue a request. Its seed is settled here, so nothing that happens later can change its draws.

        Raises:
            ValueError: it can never run as asked; the engine is unchanged.
        """
        validate_submit(
            request, vocab_size=self.config.vocab_size, max_model_len=self.max_model_len, open_ids=self._open
        )
        seed = self._seed_source() if request.params.seed is None else request.params.seed
        self._open[request.id] = sequence = Sequence(request, seed)
        if request.guide is not None:
            ends = self.config.eos_token_ids
            sequence.guide = request.guide.start(vocab_size=self.config.vocab_size, eos_token_ids=ends)
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """Drop a request at once, waiting or running; its `abort` event comes with the next step."""
        if request_id not in self._open or request_id in self._aborted:
            return
        sequence = self._open[request_id]
        if sequence is self._running:
            self._running = None
        else:
            self._waiting.remove(sequence)
        sequence.cache = None
        self._aborted.append(request_id)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One token of the request at the head of the queue; the whole prompt is computed for its first."""
        open_before = set(self._open)

        # 1. Say what was aborted since the last step.
        events = [Event(request_id, None, "abort") for request_id in self._aborted]
        self._aborted.clear()

        # 2. The next in line begins when nobody runs.
        if self._running is None and self._waiting:
            self._running = self._waiting.popleft()

        # 3. Compute one token, and let go of a request that this token, or its absence, ended.
        if self._running is not None:
            events.append(self._advance(self._running))
            if events[-1].finish_reason is not None:
                self._running = None

        # 4. Close what ended.
        for event in events:
            if event.finish_reason is not None:
                del self._open[event.request_id]
        check_ends_once(
            events=[(event.request_id, event.finish_reason) for event in events],
            open_before=open_before,
            open_after=self._open.keys(),
        )
        return events

    def idle(self) -> bool:
        """Nothing here can wait."""
        return False

    def describe(self) -> dict[str, Any]:
        """The facts of start-up."""
        return {"name": "reference", "dtype": str(self.model.dtype), "max_model_len": self.max_model_len}

    def stats(self) -> dict[str, Any]:
        """Requests and K/V in use, in tokens. There is room for one request, so the capacity is its limit."""
        cache = self._running.cache if self._running is not None else None
        counts = {
            "running": int(self._running is not None),
            "waiting": len(self._waiting),
            "kv_tokens": cache.length if cache is not None else 0,
            "kv_capacity_tokens": self.max_model_len,
        }
        check_gauges(**counts, ending=len(self._aborted), open_requests=len(self._open))
        return counts

    def generate(self, requests: list[Request]) -> list[Completion]:
        """Run requests to their end on an idle engine; see `reference.request.generate`."""
        return contract.generate(self, requests)

    def _advance(self, sequence: Sequence) -> Event:
        """Compute what is not cached yet, choose a token from the last row of logits, and see if it is the end."""
        request, known = sequence.request, len(sequence.token_ids)
        logits = self._forward(sequence)
        try:
            told = None if sequence.output_ids else self._prompt_logprobs(request, logits)
        except UnusableLogits as error:
            return Event(request.id, None, "error", error=str(error))
        if request.params.max_tokens == 0:
            return Event(request.id, None, "length", prompt_logprobs=told)
        guide = sequence.guide
        if guide is not None:
            check_guides_told(told=[guide.num_accepted], generated=[len(sequence.output_ids)])
        try:
            token, logprobs = sample(
                logits[-1],
                request.params,
                prompt_ids=request.prompt_ids,
                output_ids=sequence.output_ids,
                position=known,
                seed=sequence.seed,
                eos_token_ids=self.config.eos_token_ids,
                allowed=None if guide is None else guide.allowed(),
            )
        except UnusableLogits as error:
            return Event(request.id, None, "error", error=str(error))
        sequence.output_ids.append(token)
        reason = self._finish_reason(sequence)
        if guide is not None and reason is None:
            guide.accept(token)
        return Event(request.id, token, reason, logprobs, prompt_logprobs=told)

    def _prompt_logprobs(self, request: Request, logits: Tensor) -> PromptLogprobs | None:  # [T, V]
        """Those of the prompt that was just computed, all T tokens of it, if the request asks for them."""
        if request.params.prompt_logprobs is None:
            return None
        told = prompt_logprobs(logits, request.prompt_ids, num_top=request.params.prompt_logprobs)
        scored = [position for position, one in enumerate(told) if one is not None]
        check_prompt_scored(positions=scored, prompt_tokens=len(request.prompt_ids))
        return told

    def _forward(self, sequence: Sequence) -> Tensor:  # -> [T, V]
        """Logits after each token computed here. The first time that is the prompt, later the token chosen before."""
        tokens = sequence.token_ids
        if sequence.cache is None:
            room, wanted = self.max_model_len - len(tokens), sequence.request.params.max_tokens
            max_tokens = len(tokens) + (room if wanted is None else min(room, wanted))
            sequence.cache = KVCache(self.config, max_tokens=max_tokens, dtype=self.kv_dtype)
        start = sequence.cache.length
        token_ids = torch.tensor([tokens[start:]])
        positions = torch.arange(start, len(tokens)).unsqueeze(0)
        logits = self.model.forward(token_ids, positions, sequence.cache)
        check_tokens_cached(cached_tokens=[sequence.cache.length], known_tokens=[len(tokens)])
        return logits[0]

    def _finish_reason(self, sequence: Sequence) -> str | None:
        """`stop` for EOS or a stop id (which is emitted all the same), `length` for a limit, None to go on."""
        params, token = sequence.request.params, sequence.output_ids[-1]
        ends = token in params.stop_token_ids or (token in self.config.eos_token_ids and not params.ignore_eos)
        num_tokens, total = len(sequence.output_ids), len(sequence.token_ids)
        full = num_tokens == params.max_tokens or total == self.max_model_len
        reason = "stop" if ends else "length" if full else None
        check_within_limits(
            prompt_tokens=len(sequence.request.prompt_ids),
            output_tokens=num_tokens,
            max_tokens=params.max_tokens,
            max_model_len=self.max_model_len,
            finished=reason is not None,
        )
        return reason
