"""Who runs in the next step: grow the running rows, compact them, admit newcomers, in that order.

Growing comes first since it may preempt, which vacates rows halfway through; compacting sweeps those holes too, and
comes before admission so that a newcomer never lands in a hole that a survivor should fill. Requests stand in line by
priority, then in order of arrival; after whom `due_after` others have come is due, and the due go before all others, so
fewer than that many overtake it, whatever they are. The last in line is preempted when the pool is dry, waits at its
place, and is computed again from its prompt and answer. The first is never preempted by a later one, so every step
brings it closer to its end: there is no livelock. A row whose last token alone is to be computed decodes; the others
share what the decoding ones leave of the step's budget (`fast.chunk`). An admitted sequence has blocks for all its
tokens at once, so no prompt begins that the pool cannot hold. The scheduler knows blocks and rows, and neither tensors
nor what tokens say.

Gates: gates.scheduler, gates.chunk. Proof: tests/test_scheduler.py, tests/test_chunk.py. Story: scheduler.
"""

from __future__ import annotations

import heapq
from bisect import bisect, bisect_left
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from fast.blocks import BlockTable
from fast.cache import BatchedPagedKVCache
from fast.chunk import DEFAULT_CHUNK_TOKENS, PlannedChunk, share_behind
from fast.compact import RowCompactor, RowMove
from fast.prefix import PrefixCache
from fast.rows import DUE, Sequence
from gates.blocks import check_blocks_conserved
from gates.chunk import check_budget_kept, check_chunks_shared
from gates.compact import check_compaction_right, check_moves_amortised
from gates.core import FULL, enabled
from gates.overlap import check_blocks_at_rest, check_settled_first
from gates.scheduler import (
    check_earliest_kept,
    check_overtaken_bounded,
    check_preempted_late,
    check_preempted_wait,
    check_queue_order,
    check_rows_accounted,
    check_somebody_runs,
)
from gates.slots import check_vacated_unmirrored

DUE_AFTER = 256  # later requests; eight batches of the default size


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's schedule. No row has a chunk and decodes; a row without either waits for its share of a budget."""

    admitted: tuple[Sequence, ...]  # as they stood in line
    admitted_rows: tuple[int, ...]  # the row of each
    decode_rows: tuple[int, ...]  # ascending
    chunks: tuple[PlannedChunk, ...] = ()  # as they stand in line
    preempted: tuple[Sequence, ...] = ()
    moves: tuple[RowMove, ...] = ()  # in the order they were applied

    @property
    def rows(self) -> tuple[int, ...]:
        """Every row that gets a token in this step: those whose last chunk is computed, then the decoding ones."""
        return tuple([chunk.row for chunk in self.chunks if chunk.ends]) + self.decode_rows


class Scheduler:
    """First come, first served, within a priority, over one block pool and `cache.max_batch_size` rows.

    `on_admit(row, sequence)` and `on_release(row)` let the owner keep per-row state in step with the rows. The
    `compactor` is plugged in by the owner; without one, rows stay where they were handed out. `snapshot` copies all
    that each occupied row owns as plain values, by column name, for the gate around a compaction. One step computes
    `chunk_tokens` tokens at most, which is a token for each row at least.

    Raises:
        ValueError: `chunk_tokens` is less than the number of rows.
    """

    def __init__(
        self,
        cache: BatchedPagedKVCache,
        *,
        compactor: RowCompactor | None = None,
        on_admit: Callable[[int, Sequence], None] | None = None,
        on_release: Callable[[int], None] | None = None,
        snapshot: Callable[[], Mapping[int, Mapping[str, object]]] | None = None,
        chunk_tokens: int | None = None,
        written: Callable[[], Collection[int]] = tuple,
        prefix: PrefixCache | None = None,
        reserve_growth: bool = False,
    ) -> None:
        rows = cache.max_batch_size
        if chunk_tokens is not None and chunk_tokens < rows:
            raise ValueError(f"chunk_tokens: {chunk_tokens} is not at least {rows}, a token a step for each row")
        self.cache = cache
        self.chunk_tokens = max(DEFAULT_CHUNK_TOKENS, rows) if chunk_tokens is None else chunk_tokens
        self.prefix = prefix
        self.reserve_growth = reserve_growth
        self.compactor = compactor
        self.on_admit = on_admit
        self.on_release = on_release
        self.snapshot = snapshot
        self.written = written
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.due_after = DUE_AFTER
        self.schedules = self.preemptions = 0
        self.query_tokens = self.hit_tokens = 0  # of what is looked up in the prefix cache when it is first admitted
        self.releases = 0  # rows vacated, by an end, an abort or a preemption
        self._free_rows = list(range(cache.max_batch_size))  # a heap: the lowest free row goes first
        self._recent: deque[tuple[int, int]] = deque()  # places in line of the last `due_after` that came

    @property
    def has_work(self) -> bool:
        """True while a sequence waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def growth_fits(self) -> bool:
        """True when the pool has a block for every row that needs one now, so that nobody is preempted."""
        tables = self.cache.tables
        needed = sum(1 for row in self.running if tables[row].length >= tables[row].capacity)
        return needed <= self.cache.allocator.num_free

    @property
    def free_rows(self) -> list[int]:
        """Rows without a tenant, ascending."""
        return sorted(self._free_rows)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all that go before it; who came `due_after` before it is due from now on."""
        self._queue(sequence)
        self._recent.append(sequence.order)
        if len(self._recent) > self.due_after:
            self._make_due(self._recent.popleft())

    def schedule(self) -> SchedulerOutput:
        """Plan one step; afterwards every decode row has a block for its next token."""
        self.schedules += 1
        # 1. Grow: each running row gets the block of its next token, and may cost a later arrival its place.
        preempted = self._grow()
        # 2. Compact: the survivors become rows 0..n-1. Never mid-step: a recording reads the row a move copies into.
        moves = self._compact()
        decode_rows = tuple(sorted(row for row in self.running if self._decodes(row)))
        # 3. Admit. Not after a preemption: what it freed is owed to the rows that grow.
        admitted = () if preempted else self._admit()
        # 4. Share what the decoding rows leave of the budget.
        chunks = self._chunk(decode_rows)
        self._check_line(admitted, preempted)
        check_somebody_runs(running=len(self.running), waiting=len(self.waiting), preempted=len(preempted))
        check_rows_accounted(free=self._free_rows, running=list(self.running), total=self.cache.max_batch_size)
        check_preempted_wait(preempted=[s.arrival for s in preempted], admitted=[s.arrival for s in admitted])
        self._check_storage()
        admitted_rows = tuple(sequence.row for sequence in admitted if sequence.row is not None)
        return SchedulerOutput(admitted, admitted_rows, decode_rows, chunks, preempted, moves)

    def release(self, sequence: Sequence) -> None:
        """Take a running, parked or waiting sequence out: its row and blocks are free when this returns."""
        if sequence.parked is not None:
            self._check_at_rest(sequence.parked)
            self.cache.free_parked(sequence.parked)
            sequence.parked = None
            self._forget_prefix(sequence)
        elif sequence.row is None:
            self.waiting.remove(sequence)
        else:
            self._vacate(sequence)

    def _make_due(self, order: tuple[int, int]) -> None:
        """Nobody overtakes the request at this place in line any more, if it is still open."""
        place = bisect_left(self.waiting, order, key=_order)
        waits = place < len(self.waiting) and self.waiting[place].order == order
        found = (one for one in self.running.values() if one.order == order)
        sequence = self.waiting[place] if waits else next(found, None)
        if sequence is None:
            return
        if waits:
            del self.waiting[place]
        sequence.urgency = DUE
        if waits:
            self._queue(sequence)

    def park(self) -> None:
        """Give back the rows of those that compute nothing more, whose tokens or ends are still in flight."""
        for row, sequence in list(self.running.items()):
            if not sequence.goes_on:
                sequence.parked = self.cache.park_row(row)
                self._leave(row, sequence)

    def _grow(self) -> tuple[Sequence, ...]:
        in_order = sorted(self.running.values(), key=_order)
        earliest = in_order[0] if in_order else None
        preempted: list[Sequence] = []
        for sequence in in_order:
            # Whoever is preempted is the last of those still running, so it is never asked to grow after that.
            while sequence.row is not None and not self._grow_one(sequence.row):
                latest = in_order[len(in_order) - 1 - len(preempted)]
                self._preempt(latest)
                preempted.append(latest)
        if earliest is not None:
            check_earliest_kept(earliest=earliest.arrival, preempted=[sequence.arrival for sequence in preempted])
        return tuple(preempted)

    def _grow_one(self, row: int) -> bool:
        table = self.cache.tables[row]
        if table.length < table.capacity:
            return True
        if table.blocks_short(table.length + 1) > self.cache.allocator.num_free:
            return False
        self.cache.grow_row(row, table.length + 1)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        if self.reserve_growth:
            held = self.schedules - sequence.admitted_at
            check_preempted_late(arrival=sequence.arrival, steps=held, block_size=self.cache.block_size)
        check_settled_first(request_id=sequence.request.id, in_flight=sequence.in_flight)
        self._vacate(sequence)
        sequence.found_first = sequence.found_first if sequence.preemptions else sequence.found
        sequence.preemptions += 1
        self.preemptions += 1
        self._queue(sequence)

    def _compact(self) -> tuple[RowMove, ...]:
        if self.compactor is None:
            return ()
        before = self.snapshot() if self.snapshot is not None and enabled(FULL) else None
        moves = self.compactor.compact(sorted(self.running))
        check_moves_amortised(moves=self.compactor.moves, releases=self.releases)
        for move in moves:
            sequence = self.running.pop(move.src)
            sequence.row = move.dst
            self.running[move.dst] = sequence
        if moves:
            self._free_rows = [row for row in range(self.cache.max_batch_size) if row not in self.running]
        if before is not None and self.snapshot is not None:
            pairs = [(move.src, move.dst) for move in moves]
            check_compaction_right(before=before, after=self.snapshot(), moves=pairs)
        return moves

    def _queue(self, sequence: Sequence) -> None:
        self.waiting.insert(bisect(self.waiting, sequence.order, key=_order), sequence)

    def _check_line(self, admitted: tuple[Sequence, ...], preempted: tuple[Sequence, ...]) -> None:
        """The gates on who runs and who waits; a queue can be a day's work long, and below full its ends are shown."""
        if not self.waiting:
            return
        head, running, full = self.waiting[0], self.running.values(), enabled(FULL)
        shown = self.waiting if full or len(self.waiting) < 3 else (head, self.waiting[-1])
        check_queue_order(
            running=[one.arrival for one in running if one.request.priority == head.request.priority],
            waiting=[one.order for one in shown],
            admitted=[one.order for one in admitted],
        )
        if full or admitted or preempted:
            # Whoever is not due is one of the last `due_after` to come, so no more than that are looked at.
            first = head.arrival if head.urgency == DUE and not full else min(one.arrival for one in self.waiting)
            latest = max((one.arrival for one in running), default=first)
            check_overtaken_bounded(running=latest, waiting=first, due_after=self.due_after)

    def _admit(self) -> tuple[Sequence, ...]:
        admitted: list[Sequence] = []
        while self.waiting and self._free_rows:
            head = self.waiting[0]
            if self.prefix is not None and head.prefix is not None:
                self.prefix.match(head.prefix, head.tokens)
            if not self._fits(head):
                break  # nobody jumps the head: a smaller request behind it waits too
            self.waiting.popleft()
            self._seat(head, heapq.heappop(self._free_rows))
            admitted.append(head)
        return tuple(admitted)

    def _fits(self, head: Sequence) -> bool:
        """True when the pool holds all of its tokens, and then a block more for each row that will need one.

        The second half is the watermark (`reserve_growth`): with it no row that grows costs anybody its place before
        some row has filled a block, so whoever is admitted keeps its row for `block_size` steps and more.
        """
        room = self.cache.allocator.num_free - self._blocks_of(len(head.tokens))
        if self.reserve_growth and self.running:
            tables = self.cache.tables
            room -= sum(1 for row, one in self.running.items() if self._at_most(one) > len(tables[row].blocks))
            room -= self._at_most(head) > self._blocks_of(len(head.tokens))
        if self.prefix is None or head.prefix is None:
            return room >= 0
        # What is found needs no room, but for what nobody holds: it is free until now, and no longer.
        room += len(head.prefix.entries)
        return room >= 0 and room >= self.prefix.idle(head.prefix)

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.cache.block_size)

    def _at_most(self, sequence: Sequence) -> int:
        """Blocks that a sequence will hold in the end if nothing ends it before; its last token is never stored."""
        return self._blocks_of(len(sequence.request.prompt_ids) + sequence.max_tokens - 1)

    def _pending(self, row: int) -> int:
        """Tokens of a running row that are to be computed: they are known, or the device knows them."""
        return self.running[row].num_tokens - self.cache.tables[row].length

    def _decodes(self, row: int) -> bool:
        """Its last token alone is to be computed, and a token follows."""
        return self._pending(row) == 1 and self.running[row].max_tokens > 0

    def _chunk(self, decode_rows: tuple[int, ...]) -> tuple[PlannedChunk, ...]:
        waiting = sorted(self.running.keys() - set(decode_rows), key=lambda row: self.running[row].order)
        behind = list(range(len(waiting))) if self.prefix is None else self._follow(self.prefix, waiting)
        pending = [self._pending(row) for row in waiting]
        left = self.chunk_tokens - len(decode_rows)
        counts = share_behind(pending, left, behind)
        check_chunks_shared(pending=pending, counts=counts, budget=left, behind=behind)
        check_budget_kept(decode_rows=len(decode_rows), chunks=counts, budget=self.chunk_tokens)
        chunks = []
        for row, count, total in zip(waiting, counts, pending, strict=True):
            if count:
                start = self.cache.tables[row].length
                answered = self.running[row].max_tokens > 0
                chunks.append(PlannedChunk(row, self.running[row], start, count, ends=count == total and answered))
        return tuple(chunks)

    def _follow(self, prefix: PrefixCache, waiting: list[int]) -> list[int]:
        """Give prompts what was published since they began, and tell who computes the next block of each of them.

        That is the place in `waiting` of an earlier one that is about to, or its own.
        """
        for row in waiting:
            sequence, stored = self.running[row], self.cache.tables[row].length
            taken = [] if sequence.prefix is None else prefix.catch_up(sequence.prefix, sequence.tokens, stored=stored)
            if taken:
                self.cache.share_row(row, taken)
                self._found(sequence, len(taken))
        rows = [(self.running[row], self.cache.tables[row].length) for row in waiting]
        return prefix.leaders([(sequence.prefix, sequence.tokens, stored) for sequence, stored in rows])

    def _seat(self, sequence: Sequence, row: int) -> None:
        found: list[int] = []
        if self.prefix is not None and sequence.prefix is not None:
            found = self.prefix.take(sequence.prefix, sequence.tokens)
            self.query_tokens += 0 if sequence.preemptions or sequence.reads_prompt else len(sequence.tokens)
        self.cache.allocator.share(found)
        sequence.found = sequence.computed = 0
        self._found(sequence, len(found))
        sequence.admitted_at = self.schedules
        self.cache.adopt_row(row, found, sequence.found)
        self.cache.grow_row(row, len(sequence.tokens))
        sequence.row = row
        self.running[row] = sequence
        if self.on_admit is not None:
            self.on_admit(row, sequence)

    def _found(self, sequence: Sequence, blocks: int) -> None:
        """Tokens that another has computed for it. After a preemption they may be its own, and are no hit."""
        tokens = blocks * self.cache.block_size
        sequence.found += tokens
        self.hit_tokens += 0 if sequence.preemptions else tokens

    def _check_storage(self) -> None:
        """What the block tables hold, counted here, against what the allocator and the mirror say."""
        tables, allocator = self.cache.tables, self.cache.allocator
        # What the tables hold and not what the allocator calls owned: a block that both sides dropped is in neither.
        # A shared block stands in several tables and is one of the pool's.
        held = sum(len(table.blocks) for table in self.cache.held_tables) - (
            allocator.num_references - allocator.num_owned
        )
        check_blocks_conserved(free=allocator.num_free, owned=held, total=allocator.num_blocks)
        mirrored = self.cache.slot_table.lengths(range(len(tables)))
        check_vacated_unmirrored(mirrored=mirrored, stored=[table.length for table in tables])

    def _vacate(self, sequence: Sequence) -> None:
        row = sequence.row
        if row is None:
            raise ValueError(f"request {sequence.request.id!r} sits in no row")
        self._check_at_rest(self.cache.tables[row])
        self.cache.free(row)
        self._forget_prefix(sequence)
        self._leave(row, sequence)

    def _check_at_rest(self, table: BlockTable) -> None:
        check_blocks_at_rest(freed=table.blocks, written=self.written())

    def _forget_prefix(self, sequence: Sequence) -> None:
        if sequence.prefix is not None:
            if self.prefix is not None and sequence.prefix.doubtful:
                self.prefix.give_up(sequence.prefix)
            sequence.prefix.forget(apart=sequence.reads_prompt)

    def _leave(self, row: int, sequence: Sequence) -> None:
        del self.running[row]
        self.releases += 1
        sequence.row = None
        heapq.heappush(self._free_rows, row)
        if self.on_release is not None:
            self.on_release(row)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
