"""The prefill half of a step, from planned chunks to logits: count, address, check, compute.

It owns no row and no request: the schedule says which tokens of which rows are next, and each chunk that ends its
sequence gets one line of logits. What a chunk addresses is its own row's block table, from the first token on, for it
looks back on all of them.

Gates: gates.chunk. Proof: tests/test_chunk.py. Story: chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fast.backend import AnyForward
from fast.cache import BatchedPagedKVCache
from fast.chunk import PlannedChunk
from fast.model import Chunk, OnLogits
from fast.slots import stage
from gates.chunk import check_chunk_slots, check_chunks_continue
from gates.core import FULL, enabled


class PrefillPath:
    """Computes chunks over one cache and one forward; `tokens`, `chunks` and `scored` count what it has done."""

    def __init__(self, forward: AnyForward, cache: BatchedPagedKVCache) -> None:
        self.forward = forward
        self.cache = cache
        self.tokens = self.chunks = 0
        self.scored = 0  # prompt tokens whose logits were read

    def run(self, planned: Sequence[PlannedChunk]) -> Tensor:  # [E, V]
        """Compute every chunk; one line of logits for each of the E that end their sequence, in order."""
        chunks = [self._address(one) for one in planned]
        self._check([one.row for one in planned], chunks)
        logits = self.forward.prefill(chunks, self.cache, self._reader(planned, chunks))
        self.tokens += sum(one.count for one in planned)
        self.chunks += len(planned)
        ends = [index for index, one in enumerate(planned) if one.ends]
        # By an index that is on its way to the device: nothing is waited for.
        return logits if len(ends) == len(chunks) else logits.index_select(0, stage(ends, logits.device))

    def _address(self, planned: PlannedChunk) -> Chunk:
        slots = self.cache.advance_row(planned.row, planned.count)
        token_ids = planned.sequence.tokens[planned.start : planned.start + planned.count]
        scores = planned.sequence.scores
        told = (0, 0) if scores is None else scores.wanted(planned.start, planned.count)
        return Chunk(planned.start, tuple(token_ids), tuple(slots), told)

    def _reader(self, planned: Sequence[PlannedChunk], chunks: list[Chunk]) -> OnLogits | None:
        """Who reads logits of prompts, where any are wanted: then more than a chunk's last go through the LM head."""
        wanted = sum(chunk.told[1] - chunk.told[0] for chunk in chunks)
        if not wanted:
            return None
        self.scored += wanted

        def read(index: int, first: int, logits: Tensor) -> None:  # [S, V]
            scores = planned[index].sequence.scores
            assert scores is not None
            scores.take(planned[index].start + first, logits)

        return read

    def _check(self, rows: list[int], chunks: list[Chunk]) -> None:
        """Between the writer of the chunks and their reader."""
        tables = [self.cache.tables[row] for row in rows]
        check_chunks_continue(
            rows=rows,
            starts=[chunk.start for chunk in chunks],
            counts=[len(chunk.token_ids) for chunk in chunks],
            stored=[table.length for table in tables],
            mirrored=self.cache.slot_table.lengths(rows),
        )
        if enabled(FULL):
            blocks, block_size = [table.blocks for table in tables], self.cache.block_size
            check_chunk_slots(rows=rows, slots=[chunk.slots for chunk in chunks], tables=blocks, block_size=block_size)
