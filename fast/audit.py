"""The gates at the edges of an engine step: after the schedule, before the sampling, and when the step is over.

Each holds two counts of one thing against each other that were kept by different parts: what the block tables store
and what the requests hold, the rows of the scheduler and the columns of the sampler. It changes nothing, and
what only a full level reads is made at that level alone.

Gates: gates.engine, gates.scheduler. Proof: tests/test_fast_engine.py. Story: engine.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from fast.cache import BatchedPagedKVCache
from fast.decode import DecodePath
from fast.prefill import PrefillPath
from fast.rows import Rows
from fast.scheduler import Scheduler, SchedulerOutput
from gates.blocks import check_tables_cover
from gates.core import FULL, enabled
from gates.engine import check_ends_once, check_tokens_cached
from gates.plan import check_rebuild_bounded
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

    def schedule(self, output: SchedulerOutput) -> None:
        """After the schedule, before a forward."""
        tables = [self._cache.tables[row] for row in output.decode_rows]
        check_decode_room(lengths=[table.length for table in tables], capacities=[table.capacity for table in tables])
        self._cache.check_blocks()

    def before_sampling(self, rows: Sequence[int]) -> None:
        """After the forwards, before `rows` choose their tokens."""
        # Two counts of the same thing that cannot lean on each other: K/V stored, and tokens the request holds.
        running = self._scheduler.running
        stored = [self._cache.tables[row].length for row in rows]
        check_tokens_cached(cached_tokens=stored, known_tokens=[len(running[row].tokens) for row in rows])
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
            cells_written=slot_table.written_cells, tokens_appended=self._prefill.tokens + self._decode.tokens
        )
        if enabled(FULL):
            check_vacated_rows_neutral(
                dirty={row: self._rows.dirty_columns(row) for row in self._scheduler.free_rows},
                total=self._cache.max_batch_size,
            )

    def snapshot(self) -> dict[int, dict[str, object]]:
        """All that each occupied row owns, as plain values that no later move can change."""
        table = self._cache.slot_table
        owned: dict[int, dict[str, object]] = {}
        for row, sequence in self._scheduler.running.items():
            columns = {c.name: getattr(self._rows, c.name)[row] for c in self._rows.columns()}
            owned[row] = {
                "id": sequence.request.id,
                "tokens": tuple(sequence.tokens),
                "blocks": tuple(self._cache.tables[row].blocks),
                "slots": tuple(table.slots[row, : table.length(row)].tolist()),
                **{name: v.item() if isinstance(v, np.generic) else id(v) for name, v in columns.items()},
            }
        return owned

    def _to_hold(self) -> list[int]:
        """Tokens that each row's blocks are there for: those stored, and of a prompt in chunks those to come."""
        held = [table.length for table in self._cache.tables]
        for row, sequence in self._scheduler.running.items():
            if len(sequence.tokens) > held[row] + 1:
                held[row] = len(sequence.tokens)
        return held
