"""From a schedule to logits: prompt chunks in one forward, decoding rows in another, or both in one.

A decoding row may be taken for the chunk of its last token; then a step is one prefill and no decode. It knows no
sampler: it leaves a line of logits for each row that the schedule gives a token.

Gates: gates.chunk, gates.plan. Proof: tests/test_fast_engine.py. Story: engine.
"""

from __future__ import annotations

from torch import Tensor

from fast.cache import BatchedPagedKVCache
from fast.chunk import PlannedChunk
from fast.decode import DecodePath
from fast.prefill import PrefillPath
from fast.record import Mark
from fast.scheduler import Scheduler, SchedulerOutput
from gates.trace import MIXED


class Forwards:
    """Computes what a schedule says; `mixed_tokens` counts the decoding rows that went with chunks."""

    def __init__(
        self, cache: BatchedPagedKVCache, scheduler: Scheduler, *, prefill: PrefillPath, decode: DecodePath
    ) -> None:
        self.mixed_tokens = 0
        self._cache, self._scheduler = cache, scheduler
        self._prefill, self._decode = prefill, decode

    def run(self, output: SchedulerOutput, mark: Mark, *, mixed: bool) -> list[Tensor]:
        """The lines of logits [n, V] of `output.rows`, in one or two parts; `mixed` computes all in one forward."""
        mixed = mixed and bool(output.chunks and output.decode_rows)
        parts = [self.mixed(output) if mixed else self.chunks(output.chunks)] if output.chunks else []
        mark("prefill")
        parts += [self.rows(output.decode_rows)] if output.decode_rows and not mixed else []
        mark("decode")
        return parts

    def chunks(self, chunks: tuple[PlannedChunk, ...]) -> Tensor:  # [E, V]
        """Prompts' next tokens; a line for each chunk that ends its prompt."""
        for chunk in chunks:
            chunk.sequence.computed += chunk.count
        return self._prefill.run(chunks)

    def rows(self, rows: tuple[int, ...]) -> Tensor:  # [R, V]
        """The last token of each row that decodes."""
        for row in rows:
            self._scheduler.running[row].computed += 1
        return self._decode.run(rows, [self._scheduler.running[row].tokens[-1] for row in rows])

    def mixed(self, output: SchedulerOutput) -> Tensor:  # [E + R, V]
        """Chunks and decoding rows in one forward, a decoding row as the chunk of its last token."""
        running, tables, rows = self._scheduler.running, self._cache.tables, output.decode_rows
        decoding = [PlannedChunk(row, running[row], tables[row].length, 1, ends=True) for row in rows]
        self.mixed_tokens += len(rows)
        self._decode.skipped = MIXED
        return self.chunks((*output.chunks, *decoding))
