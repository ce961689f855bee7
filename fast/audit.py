"""The gates at the edges of an engine step: after the schedule, before the sampling, and when the step is over.

Each holds two counts of one thing against each other that were kept by different parts: what the block tables store
and what the requests hold, the rows of the scheduler and the columns of the sampler. It changes nothing, and
what only a full level reads is made at that level alone.

Gates: gates.engine, gates.scheduler, gates.prefix. Proof: tests/test_fast_engine.py. Story: engine.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from fast.backend import facts_of
from fast.cache import BatchedPagedKVCache
from fast.decode import DecodePath
from fast.prefill import PrefillPath
from fast.rows import Rows
from fast.scheduler import Scheduler, SchedulerOutput
from gates.blocks import check_tables_cover
from gates.core import CHEAP, FULL, enabled
from gates.engine import check_ends_once, check_tokens_cached
from gates.plan import check_rebuild_bounded
from gates.prefix import check_computed_once, check_hit_equals_recompute, check_writes_private
from gates.scheduler import check_decode_room, check_rows_follow_requests, check_vacated_rows_neutral
from gates.slots import check_resyncs_bounded
from reference.request import Event


class Audit:
    """Looks at the parts of one engine between two stages of its step."""

    def __init__(
        self,
        cache: BatchedPagedKVCache,
        scheduler: Scheduler,
        rows: Rows,
        prefill: PrefillPath,
        decode: DecodePath,
    ) -> None:
        self._cache, self._scheduler, self._rows = cache, scheduler, rows
        self._prefill, self._decode = prefill, decode
        self._keeps_bits = facts_of(prefill.forward)["schedule_invariant"]

    def schedule(self, output: SchedulerOutput) -> None:
        """After the schedule, before a forward."""
        tables = [self._cache.tables[row] for row in output.decode_rows]
        check_decode_room(lengths=[table.length for table in tables], capacities=[table.capacity for table in tables])
        self._cache.check_blocks()
        self._check_writes(output)

    def before_sampling(self, rows: Sequence[int]) -> None:
        """After the forwards, before `rows` choose their tokens."""
        # Two counts of the same thing that cannot lean on each other: K/V stored, and tokens the request holds.
        running = self._scheduler.running
        stored = [self._cache.tables[row].length for row in rows]
        check_tokens_cached(cached_tokens=stored, known_tokens=[running[row].num_tokens for row in rows])
        check_computed_once(
            rows=rows,
            computed=[running[row].computed for row in rows],
            cached=[running[row].found for row in rows],
            stored=stored,
        )
        check_rows_follow_requests(
            rows={row: sequence.request.id for row, sequence in running.items()},
            state={row: self._rows.request_id(row) for row in running},
        )

    def step(self, events: Sequence[Event], *, open_before: Set[str], open_after: Set[str]) -> None:
        """When the step is over."""
        check_ends_once(
            events=[(event.request_id, event.finish_reason) for event in events],
            open_before=open_before,
            open_after=open_after,
        )
        tables = self._cache.tables
        check_tables_cover(
            lengths=[table.length for table in tables],
            blocks_held=[len(table.blocks) for table in tables],
            block_size=self._cache.block_size,
            known=self._to_hold(),
        )
        self._cache.check_blocks()
        slot_table = self._cache.slot_table
        check_resyncs_bounded(resyncs=slot_table.resyncs, tenancies=self._cache.tenancies)
        check_rebuild_bounded(
            cells_written=slot_table.written_cells,
            tokens_appended=self._prefill.tokens + self._decode.tokens + self._cache.found_tokens,
        )
        if enabled(FULL):
            check_vacated_rows_neutral(
                dirty={row: self._rows.dirty_columns(row) for row in self._scheduler.free_rows},
                total=self._cache.max_batch_size,
            )

    def computed_twice(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Of each (published block, own block) of the same tokens: on a backend that keeps bits, they are the same."""
        if not (pairs and enabled(FULL) and self._keeps_bits):
            return
        size = self._cache.block_size
        for published, own in pairs:
            kv = [self._cache.kv(range(block * size, (block + 1) * size)) for block in (published, own)]
            check_hit_equals_recompute(published=kv[0], computed=kv[1], block=published)

    def snapshot(self) -> dict[int, dict[str, object]]:
        """All that each occupied row owns, as plain values that no later move can change."""
        table = self._cache.slot_table
        owned: dict[int, dict[str, object]] = {}
        for row, sequence in self._scheduler.running.items():
            columns = {c.name: getattr(self._rows, c.name)[row] for c in self._rows.columns()}
            owned[row] = {
                "id": sequence.request.id,
                "tokens": tuple(sequence.tokens),
                "in_flight": sequence.in_flight,
                "blocks": tuple(self._cache.tables[row].blocks),
                "slots": tuple(table.slots[row, : table.length(row)].tolist()),
                **{name: v.item() if isinstance(v, np.generic) else id(v) for name, v in columns.items()},
            }
        return owned

    def _check_writes(self, output: SchedulerOutput) -> None:
        """Each block that this step writes is one row's alone."""
        if not enabled(CHEAP):
            return
        size, tables, allocator = self._cache.block_size, self._cache.tables, self._cache.allocator
        writes = [(row, tables[row].blocks[tables[row].length // size]) for row in output.decode_rows]
        for chunk in output.chunks:
            stop = chunk.start + chunk.count
            writes += [(chunk.row, block) for block in tables[chunk.row].blocks[chunk.start // size : -(-stop // size)]]
        check_writes_private(
            rows=[row for row, _ in writes],
            blocks=[block for _, block in writes],
            holders=[allocator.holders(block) for _, block in writes],
            published=[allocator.is_kept(block) for _, block in writes],
        )

    def _to_hold(self) -> list[int]:
        """Tokens that each row's blocks are there for: those stored, and of a prompt in chunks those to come."""
        held = [table.length for table in self._cache.tables]
        for row, sequence in self._scheduler.running.items():
            if len(sequence.tokens) > held[row] + 1:
                held[row] = len(sequence.tokens)
        return held
