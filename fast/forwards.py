"""From a schedule to logits: prompt chunks in one forward, decoding rows in another, or both in one.

A decoding row may be taken for the chunk of its last token; then a step is one prefill and no decode. It knows no
sampler: it leaves a line of logits for each row that the schedule gives a token.

Gates: gates.chunk, gates.plan, gates.overlap. Proof: tests/test_fast_engine.py. Story: engine.
"""

from __future__ import annotations

from torch import Tensor

from fast.cache import BatchedPagedKVCache
from fast.chunk import PlannedChunk
from fast.decode import DecodePath
from fast.inputs import LateIds
from fast.overlap import Flight
from fast.prefill import PrefillPath
from fast.record import Mark
from fast.rows import Sequence
from fast.scheduler import Scheduler, SchedulerOutput
from gates.core import FULL, enabled
from gates.trace import MIXED


class Forwards:
    """Computes what a schedule says; `mixed_tokens` counts the decoding rows that went with chunks."""

    def __init__(
        self, cache: BatchedPagedKVCache, scheduler: Scheduler, *, prefill: PrefillPath, decode: DecodePath
    ) -> None:
        self.mixed_tokens = 0
        self.fed: dict[Sequence, int] = {}  # at gates full: ids of the last step that came from the device
        self._cache, self._scheduler = cache, scheduler
        self._prefill, self._decode = prefill, decode

    def run(self, output: SchedulerOutput, mark: Mark, *, mixed: bool, before: Flight | None) -> list[Tensor]:
        """The lines of logits [n, V] of `output.rows`, in one or two parts; `mixed` computes all in one forward.

        `before` is the step in flight, whose tokens are this one's input ids. Chunks bring theirs from the host, so
        behind a step in flight nothing is mixed.
        """
        self.fed = {}
        mixed = mixed and before is None and bool(output.chunks and output.decode_rows)
        parts = [self.mixed(output) if mixed else self.chunks(output.chunks)] if output.chunks else []
        mark("prefill")
        parts += [self.rows(output.decode_rows, before)] if output.decode_rows and not mixed else []
        mark("decode")
        return parts

    def chunks(self, chunks: tuple[PlannedChunk, ...]) -> Tensor:  # [E, V]
        """Prompts' next tokens; a line for each chunk that ends its prompt."""
        for chunk in chunks:
            chunk.sequence.computed += chunk.count
        return self._prefill.run(chunks)

    def rows(self, rows: tuple[int, ...], before: Flight | None = None) -> Tensor:  # [R, V]
        """The last token of each row that decodes, on the device alone for those of the step in flight."""
        decoding = [self._scheduler.running[row] for row in rows]
        for sequence in decoding:
            sequence.computed += 1
        late = None if before is None else _late(before, decoding)
        logits = self._decode.run(rows, [sequence.tokens[-1] for sequence in decoding], late)
        if late is not None and self._decode.last_plan is not None and enabled(FULL):
            ids = self._decode.last_plan.input_ids.tolist()
            self.fed = {decoding[place]: ids[place] for place in late.places}
        return logits

    def mixed(self, output: SchedulerOutput) -> Tensor:  # [E + R, V]
        """Chunks and decoding rows in one forward, a decoding row as the chunk of its last token."""
        running, tables, rows = self._scheduler.running, self._cache.tables, output.decode_rows
        decoding = [PlannedChunk(row, running[row], tables[row].length, 1, ends=True) for row in rows]
        self.mixed_tokens += len(rows)
        self._decode.skipped = MIXED
        return self.chunks((*output.chunks, *decoding))


def _late(before: Flight, decoding: list[Sequence]) -> LateIds | None:
    """Where in the step in flight the last tokens of those lie that are in it. By sequence: rows move between steps."""
    places = [place for place, sequence in enumerate(decoding) if sequence.in_flight]
    if not places or before.choice.tokens is None:
        return None
    lines = before.lines
    return LateIds(before.choice.tokens, places, [lines[decoding[place]] for place in places])
