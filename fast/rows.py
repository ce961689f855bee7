"""What the engine knows of each row of the persistent batch, declared once, one column a fact.

A `Sequence` is an open request with every token it has so far; a row is the place it sits in while it runs.
`Rows` is a table of columns [max_batch_size], each with the value that an empty row holds and the rule that fills
it from a sequence. `admit`, `release` and `move` loop over that declaration, so a new column cannot be forgotten
in one of them. It knows no block and no model.

Gates: gates.scheduler. Proof: tests/test_scheduler.py. Story: scheduler.
"""

# ruff: noqa: RUF009 - `_column` is `dataclasses.field` with three arguments named
from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reference.request import MAX_PRIORITY, GuideState, PromptLogprobs, Request

if TYPE_CHECKING:
    from fast.blocks import BlockTable
    from fast.prefix import Prefix
    from fast.score import PromptScores

DUE = -MAX_PRIORITY - 1  # of a request that so many came after that nobody overtakes it; less than every priority


@dataclass(slots=True, eq=False)
class Sequence:
    """One open request: its tokens so far, its place in line, and the row it sits in, if any."""

    request: Request
    arrival: int  # grows with each submit
    seed: int  # int64: the request's own, or one chosen at submit
    ends: frozenset[int]  # token ids that end the answer, once it has min_tokens
    forbidden: tuple[int, ...]  # token ids masked until then: every EOS and stop id, even under ignore_eos
    max_tokens: int  # most tokens the answer may have, the length limit applied
    tokens: list[int]  # prompt, then answer
    row: int | None = None
    urgency: int = field(init=False)  # its priority, or `DUE`; what goes before arrival in line
    preemptions: int = 0
    prefix: Prefix | None = None  # names of its full blocks; None: it takes no part in the prefix cache
    admitted_at: int = 0  # the schedule that gave it its row
    found: int = 0  # tokens found in the prefix cache since it was admitted
    computed: int = 0  # tokens computed since it was admitted
    found_first: int = 0  # `found` when it was first preempted; what it finds afterwards may be its own
    in_flight: int = 0  # tokens launched for it that the host has not read
    ended_at: int | None = None  # tokens it had when its answer ended
    parked: BlockTable | None = None  # its blocks, while its row is another's and a step in flight writes them
    guide: GuideState | None = None  # what restricts the answer; it goes on after a preemption, as the tokens do
    scores: PromptScores | None = None  # logprobs of its prompt, if it asked; kept after a preemption as well

    def __post_init__(self) -> None:
        self.urgency = self.request.priority

    @property
    def order(self) -> tuple[int, int]:
        """Its place in line: the due, then by priority, then by arrival; the lowest goes first, is preempted last."""
        return (self.urgency, self.arrival)

    @property
    def cached(self) -> int:
        """Tokens found in the prefix cache that it cannot have computed itself."""
        return self.found_first if self.preemptions else self.found

    @property
    def reads_prompt(self) -> bool:
        """Logits of its prompt are still to be read, so its tokens are computed and not found."""
        return self.scores is not None and not self.scores.complete

    @property
    def num_tokens(self) -> int:
        """Tokens it has, those in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def goes_on(self) -> bool:
        """True while another token is to be launched for it."""
        unlimited = not self.max_tokens  # it wants no answer: its prompt's end is its own
        return self.ended_at is None and (unlimited or self.num_generated + self.in_flight < self.max_tokens)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt_ids)

    def prompt_logprobs(self) -> PromptLogprobs | None:
        """What its first event tells of its prompt; see `PromptScores.told`."""
        return None if self.scores is None or self.num_generated else self.scores.told()


def random_seed() -> int:
    """An int64 nobody can guess, for a request that names no seed."""
    return secrets.randbits(64) - 2**63


class TokenCounts:
    """The distinct tokens a penalised sequence has seen and how often its answer holds each (0: prompt only)."""

    def __init__(self, sequence: Sequence) -> None:
        num_prompt = len(sequence.request.prompt_ids)
        room = num_prompt + sequence.max_tokens
        self._ids = np.zeros(room, np.int64)
        self._counts = np.zeros(room, np.float64)
        self._place: dict[int, int] = {}
        for token in sequence.tokens[:num_prompt]:
            self._find(token)
        for token in sequence.tokens[num_prompt:]:
            self.add(token)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct token ids of prompt and answer [n], in order of first sight."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> NDArray[np.float64]:
        """How often the answer holds each of `ids` [n]."""
        return self._counts[: len(self._place)]

    def add(self, token: int) -> None:
        """Count one more token of the answer."""
        self._counts[self._find(token)] += 1.0

    def _find(self, token: int) -> int:
        place = self._place.setdefault(token, len(self._place))
        self._ids[place] = token
        return place


def _column(dtype: type, neutral: Any, of: Callable[[Sequence], Any]) -> Any:
    """Declare a column: the dtype it is stored in, what an empty row holds, and what a sequence puts there."""
    return field(init=False, metadata={"dtype": dtype, "neutral": neutral, "of": of})


@dataclass(slots=True)
class Rows:
    """Per-row state of R = `max_batch_size` rows; every field but the size is a column [R]."""

    max_batch_size: int
    sequence: NDArray[Any] = _column(object, None, lambda s: s)
    seed: NDArray[np.int64] = _column(np.int64, 0, lambda s: s.seed)
    temperature: NDArray[np.float64] = _column(np.float64, 0.0, lambda s: s.request.params.temperature)
    top_k: NDArray[np.int64] = _column(np.int64, 0, lambda s: min(s.request.params.top_k, 2**62))
    top_p: NDArray[np.float64] = _column(np.float64, 1.0, lambda s: s.request.params.top_p)
    min_p: NDArray[np.float64] = _column(np.float64, 0.0, lambda s: s.request.params.min_p)
    repetition: NDArray[np.float64] = _column(np.float64, 1.0, lambda s: s.request.params.repetition_penalty)
    presence: NDArray[np.float64] = _column(np.float64, 0.0, lambda s: s.request.params.presence_penalty)
    frequency: NDArray[np.float64] = _column(np.float64, 0.0, lambda s: s.request.params.frequency_penalty)
    min_tokens: NDArray[np.int64] = _column(np.int64, 0, lambda s: s.request.params.min_tokens)
    logprobs: NDArray[np.int64] = _column(np.int64, -1, lambda s: _logprobs_wanted(s))
    bias: NDArray[Any] = _column(object, None, lambda s: _bias(s))  # ([n] ids, [n] values) or None
    guide: NDArray[Any] = _column(object, None, lambda s: s.guide)
    forbidden: NDArray[Any] = _column(object, (), lambda s: s.forbidden)
    counts: NDArray[Any] = _column(object, None, lambda s: _counts(s))  # TokenCounts, or None without penalties

    def __post_init__(self) -> None:
        for column in self.columns():
            values = np.empty(self.max_batch_size, column.metadata["dtype"])
            values.fill(column.metadata["neutral"])
            setattr(self, column.name, values)

    @classmethod
    def columns(cls) -> tuple[Field[Any], ...]:
        """The declaration itself, in order."""
        return tuple(column for column in fields(cls) if column.name != "max_batch_size")

    def admit(self, row: int, sequence: Sequence) -> None:
        """Fill every column of an empty row from its new tenant."""
        for column in self.columns():
            getattr(self, column.name)[row] = column.metadata["of"](sequence)

    def release(self, row: int) -> None:
        """Give every column of a vacated row its neutral value."""
        for column in self.columns():
            getattr(self, column.name)[row] = column.metadata["neutral"]

    def move(self, *, src: int, dst: int) -> None:
        """Carry every column of `src` to the empty row `dst` and leave `src` neutral."""
        for column in self.columns():
            values = getattr(self, column.name)
            values[dst] = values[src]
        self.release(src)

    def count(self, row: int, token: int) -> None:
        """Tell a row's penalties of one more token of its answer."""
        if self.counts[row] is not None:
            self.counts[row].add(token)

    def request_id(self, row: int) -> str:
        """Id of the request that filled a row's columns, `` when the row is empty."""
        return "" if self.sequence[row] is None else str(self.sequence[row].request.id)

    def dirty_columns(self, row: int) -> list[str]:
        """Names of the columns in which a row is not neutral (none, for an empty row)."""
        names = []
        for column in self.columns():
            held, neutral = getattr(self, column.name)[row], column.metadata["neutral"]
            if held is not neutral and (neutral is None or held != neutral):
                names.append(column.name)
        return names


def _logprobs_wanted(sequence: Sequence) -> int:
    wanted = sequence.request.params.logprobs
    return -1 if wanted is None else wanted


def _counts(sequence: Sequence) -> TokenCounts | None:
    params = sequence.request.params
    neutral = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    return None if neutral else TokenCounts(sequence)


def _bias(sequence: Sequence) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    bias = sequence.request.params.logit_bias
    if not bias:
        return None
    return np.array(list(bias), np.int64), np.array(list(bias.values()), np.float64)
