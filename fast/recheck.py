"""One request in so many is computed again, alone, when nothing else is open: its logits must be the same bits.

While it runs among others each of its rows of logits leaves a digest. Later, on an idle engine, its prompt is
prefilled by itself in small parts and its answer fed token by token, one forward a turn, into blocks that are nobody's;
each row must have the digest that it had. Batch, neighbours, row, padding, chunks, cached prefixes, preemption and
replay are all in the first run and none in the second. A new request ends the re-run, and waits for one such forward
at most. It knows no queue and no row.

Gates: gates.recheck. Proof: tests/test_recheck.py. Story: invariance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fast.backend import AnyForward, facts_of
from fast.blocks import BlockTable
from fast.cache import BatchedPagedKVCache
from fast.model import Chunk
from fast.rows import Sequence
from gates.recheck import check_rerun_keeps_bits

PART = 60  # prompt tokens of one forward: a tenth of a second, which a request that comes meanwhile has to wait


@dataclass(slots=True)
class _Watched:
    """A request whose logits leave digests, one for each token of its answer."""

    sequence: Sequence
    digests: list[bytes] = field(default_factory=list)


class Recheck:
    """Picks every `every`-th request that is submitted, and keeps the last that ended until there is time for it.

    With 0 it picks none.

    Raises:
        ValueError: `every` is negative, or the backend does not promise bits.
    """

    def __init__(self, forward: AnyForward, cache: BatchedPagedKVCache, *, every: int) -> None:
        if every < 0:
            raise ValueError(f"recheck_every: {every} is negative")
        if every and not (facts := facts_of(forward))["schedule_invariant"]:
            raise ValueError(f"recheck_every: {every} needs a backend that keeps bits, and {facts['reason']}")
        self.every = every
        self.checked = 0  # requests whose every token was found again
        self._forward, self._cache = forward, cache
        self._submitted = 0
        self._watched: dict[str, _Watched] = {}
        self._ended: _Watched | None = None
        self._table = BlockTable(cache.block_size)  # the re-run's own blocks; empty between re-runs
        self._done = 0  # answer tokens of the re-run whose digest agreed

    @property
    def blocks_held(self) -> int:
        """Blocks that a re-run holds now; 0 once it ended or was dropped."""
        return len(self._table.blocks)

    def submitted(self, sequence: Sequence) -> None:
        """A request came: it may be one to watch, and a re-run under way makes room for it."""
        self.drop()
        if self.every and self._submitted % self.every == 0:
            self._watched[sequence.request.id] = _Watched(sequence)
        self._submitted += 1

    def watches(self, sequences: Many[Sequence]) -> bool:
        """True when one of these leaves digests, so that its logits are to be read in the step that made them."""
        return bool(self._watched) and any(sequence.request.id in self._watched for sequence in sequences)

    def saw(self, running: Mapping[int, Sequence], rows: Many[int], logits: Tensor) -> None:  # R, [R, V]
        """Digest the lines of logits, one for each of `rows`, whose requests are watched."""
        if not self._watched:
            return
        for line, row in enumerate(rows):
            watched = self._watched.get(running[row].request.id)
            if watched is not None:
                watched.digests.append(_digest(logits[line]))

    def ended(self, request_id: str, reason: str) -> None:
        """A request is over; one that failed or was given up has nothing to compare with."""
        watched = self._watched.pop(request_id, None)
        if watched is not None and watched.digests and reason in ("stop", "length"):
            self.drop()
            self._ended = watched

    def turn(self) -> bool:
        """One forward of a re-run, on an idle engine; False when there is none to make.

        Raises:
            GateError: a row of logits is not what it was. The re-run is over, its blocks are free.
        """
        watched = self._ended
        if watched is None:
            return False
        sequence, prompt = watched.sequence, len(watched.sequence.request.prompt_ids)
        if not self._table.blocks:
            self._table.adopt(self._cache.allocator.allocate(-(-len(sequence.tokens) // self._cache.block_size)))
        start = self._table.length
        stop = min(prompt, start + PART) if start < prompt else start + 1
        self._table.advance(stop - start)
        chunk = Chunk(start, tuple(sequence.tokens[start:stop]), tuple(self._table.slots(0, stop)))
        logits = self._forward.prefill([chunk], self._cache)
        if stop < prompt:
            return True
        digest = _digest(logits[0])
        token, wanted = self._done, watched.digests[self._done]
        self._done += 1
        over = self._done == len(watched.digests)
        if over or digest != wanted:
            self.drop()
            self._ended = None
        check_rerun_keeps_bits(request_id=sequence.request.id, token=token, under_load=wanted, alone=digest)
        self.checked += over
        return True

    def drop(self) -> None:
        """Give the re-run's blocks back; what was to be checked is begun anew at the next turn."""
        self._cache.allocator.free(self._table.release())
        self._done = 0


def _digest(row: Tensor) -> bytes:  # [V]
    stored = row.contiguous().view(torch.uint8).cpu()  # numpy knows neither bfloat16 nor a device
    return hashlib.blake2b(stored.numpy().tobytes(), digest_size=16).digest()
