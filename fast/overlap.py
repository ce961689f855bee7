"""The step in flight: launched, its tokens on the device alone while the host plans the next one.

Step n+1 needs step n's tokens as input ids, and those are on the device (`LateIds`). What the host needs them for it
does a step late: text, ends, events. An end by length is foreseen, and nothing more is launched for it; an end by
token is found one step late, and what has been computed since is dropped. A row is given back at the next schedule, and
its blocks once no step in flight writes them. Some steps cannot stay in flight: see `Overlap.may_stay`. It knows no
tensor but the tokens that it keeps.

Gates: gates.overlap. Proof: tests/test_overlap.py. Story: overlap.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fast.cache import BatchedPagedKVCache
from fast.rows import Sequence
from fast.sampling import Sampled
from fast.scheduler import SchedulerOutput
from gates.overlap import check_ids_fed, check_one_in_flight, check_tokens_conserved


class Choice(Protocol):
    """Tokens that were chosen, or are being chosen."""

    @property
    def tokens(self) -> Tensor | None:  # [N] int64
        """On the device, where they were chosen there."""

    @property
    def host_reasons(self) -> Collection[str]:
        """Why some lines' tokens are chosen on the host."""

    def read(self, *, fail_alone: bool) -> Sampled:
        """Wait for the device."""


@dataclass(frozen=True, slots=True)
class HostChoice:
    """Tokens that the host chose as soon as it had the logits."""

    sampled: Sampled
    tokens: Tensor | None = None
    host_reasons: Collection[str] = ()

    def read(self, *, fail_alone: bool) -> Sampled:
        """They are there."""
        return self.sampled


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """One launched step: a line for each sequence that gets a token, first those whose prompts it ended."""

    sequences: tuple[Sequence, ...]
    num_decoding: int  # the last lines
    choice: Choice
    reasons: Sequenced[str]  # why it cannot stay in flight: what the host does with its logits, or ends with it
    writes: Collection[int]  # blocks that it writes
    fed: dict[Sequence, int]  # at gates full: the ids that it was fed without the host knowing them

    @property
    def decoding(self) -> list[tuple[Sequence, int]]:
        """Its decoding sequences that have not ended since, and the tokens that each had: all that are computed."""
        decoding = self.sequences[len(self.sequences) - self.num_decoding :]
        return [(sequence, len(sequence.tokens)) for sequence in decoding if sequence.ended_at is None]

    @property
    def lines(self) -> dict[Sequence, int]:
        """Which line of `tokens` is a sequence's."""
        return {sequence: line for line, sequence in enumerate(self.sequences)}


class Overlap:
    """The steps whose tokens the host has not read, and what became of every token that was launched.

    Switched off, each step is read as soon as it is launched, and everything else is the same.
    """

    def __init__(self, *, on: bool) -> None:
        self.on = on
        self.flights: deque[Flight] = deque()  # one between two steps, two while the older is read
        self.launched = self.committed = self.dropped = 0  # tokens
        self.ahead = 0  # steps that were launched before the tokens of the step before were known
        self.waits: Counter[str] = Counter()  # steps whose tokens were waited for with nothing launched, by reason
        self.vacated: list[str] = []  # ids whose rows were given back since the last schedule

    @property
    def flight(self) -> Flight | None:
        """The newest step in flight."""
        return self.flights[-1] if self.flights else None

    @property
    def written(self) -> set[int]:
        """Blocks that steps in flight write."""
        return {block for flight in self.flights for block in flight.writes}

    def launch(self, flight: Flight) -> None:
        """A step was launched, and its tokens are to come."""
        check_one_in_flight(in_flight=len(self.flights))
        self.ahead += len(self.flights)
        self.launched += len(flight.sequences)
        for sequence in flight.sequences:
            sequence.in_flight += 1
        self.flights.append(flight)

    def may_stay(self, running: Iterable[Sequence]) -> bool:
        """True when the newest step can stay in flight: its tokens are on the device, and somebody goes on.

        Penalties, biases, masks, guides and log probabilities are the host's work, and so are digests (`recheck`). A
        prompt that wants no answer (`score`) is over with the step itself.
        """
        flight = self.flight
        if not self.on or flight is None:
            return False
        self.waits.update(flight.reasons)
        return not flight.reasons and any(sequence.goes_on for sequence in running)

    def land(self, *, fail_alone: bool) -> tuple[Flight, Sampled]:
        """Wait for the oldest step in flight, which is no longer; the tokens that its host chose."""
        flight = self.flights[0]
        sampled = flight.choice.read(fail_alone=fail_alone)
        self.flights.popleft()
        fed = self.flights[0].fed if self.flights else {}
        chosen = [one for one in zip(flight.sequences, sampled.token_ids, sampled.errors, strict=True) if one[0] in fed]
        good = [(sequence, token) for sequence, token, error in chosen if error is None and sequence.ended_at is None]
        check_ids_fed(fed=[fed[sequence] for sequence, _ in good], chosen=[token for _, token in good])
        return flight, sampled

    def check(self) -> None:
        """When a step is over: where every token is."""
        in_flight = sum(one.in_flight for one in {one for flight in self.flights for one in flight.sequences})
        check_tokens_conserved(
            launched=self.launched, committed=self.committed, dropped=self.dropped, in_flight=in_flight
        )


def blocks_written(output: SchedulerOutput, cache: BatchedPagedKVCache) -> set[int]:
    """Blocks that a step writes, after its forwards have counted their tokens."""
    size, tables = cache.block_size, cache.tables
    written = {tables[row].blocks[(tables[row].length - 1) // size] for row in output.decode_rows}
    for chunk in output.chunks:
        stop = chunk.start + chunk.count
        written.update(tables[chunk.row].blocks[chunk.start // size : -(-stop // size)])
    return written
