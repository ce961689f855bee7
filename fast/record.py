"""What one engine step did, as plain values: the record behind a step trace.

The engine calls `mark` at the end of each phase; nobody listening, that is an empty function. A `StepRecorder`
listens: it copies the schedule right after it is made, while the rows that are about to end still hold their
blocks, and hands one `StepRecord` to its hook when the step is over or has failed. It knows neither a file nor a
clock but the one it is given.

Gates: gates.trace. Proof: tests/test_trace.py. Story: trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Protocol

from fast.cache import BatchedPagedKVCache
from fast.decode import DecodePath
from fast.overlap import Overlap
from fast.scheduler import Scheduler, SchedulerOutput
from gates.core import counters
from gates.trace import check_step_explained
from reference.request import Event, Request, SamplingParams

FULL_EVERY = 64  # from one record that tells every row's blocks to the next; each tells the rows that changed


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. The schedule is as the forwards saw it: rows that ended in the step still hold row and blocks.

    `rows` is None when the map is the one of the record before, and `blocks` holds the rows whose blocks changed since
    then (a row left empty holds none), so that a record is as long as its step's news. Every `FULL_EVERY` records
    `rows` is given in any case and `dump` holds every row's blocks, for a reader to compare its sum of changes with.
    """

    step: int  # 1-based, the engine's own count
    at_us: int = 0  # microseconds between the recorder's start and the step's
    submitted: tuple[Request, ...] = ()  # since the record before, each with the seed it draws with
    admitted: tuple[tuple[int, str, int], ...] = ()  # (row, request id, tokens it has to compute)
    preempted: tuple[str, ...] = ()  # in the order they lost their rows
    moves: tuple[tuple[int, int], ...] = ()  # (src, dst)
    chunks: tuple[tuple[int, int, int], ...] = ()  # (row, first token, tokens) of each prompt computed further
    decode_rows: tuple[int, ...] = ()
    idle_rows: tuple[int, ...] = ()  # rows in use that compute nothing: their prompts wait for a share of the budget
    rows: Mapping[int, str] | None = None  # row -> request id
    waiting: int = 0
    bucket: tuple[int, int] | None = None  # (rows, width) the decode was padded to
    replayed: bool = False
    reason: str = ""  # why a decode was not replayed
    blocks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # row -> its block ids in order
    dump: Mapping[int, tuple[int, ...]] | None = None
    free_blocks: int = 0
    ahead: bool | None = None  # launched before the tokens of the step before were known; None without overlap
    waited: tuple[str, ...] = ()  # why tokens were waited for with nothing launched, since the record before
    dropped: int | None = None  # tokens computed after the end of their answers, if any
    vacated: tuple[str, ...] = ()  # with overlap: who lost its row since the schedule of the record before
    parked: tuple[int, ...] = ()  # blocks of no row, which the step in flight still writes
    events: tuple[tuple[str, int | None, str | None], ...] = ()  # (request id, token id, finish reason), told in it
    gate_checks: int = 0  # of the whole process, the server's gates included
    gate_failures: Mapping[str, int] = field(default_factory=dict)
    timings_us: Mapping[str, int] = field(default_factory=dict)  # host time; a GPU's work is waited for in `sample`
    fault: str | None = None  # what ended the step before its time; such a record is an engine's last

    def as_dict(self) -> dict[str, Any]:
        """The record for JSON, under its field names, without what is empty (but an empty row map, which is news)."""
        values = {column.name: getattr(self, column.name) for column in fields(self)}
        values["submitted"] = [request_dict(request) for request in self.submitted]
        return {name: v for name, v in values.items() if v not in (None, "", (), [], {}) or (name, v) == ("rows", {})}


class Mark(Protocol):
    """Told at the end of a phase; after `schedule`, what was scheduled too."""

    def __call__(self, phase: str, output: SchedulerOutput | None = None) -> None:
        """The phase that began at the mark before, or at the step's start, has ended."""


def unheard(phase: str, output: SchedulerOutput | None = None) -> None:
    """The mark of an engine that nobody records."""


class StepRecorder:
    """Listens to one engine, and calls `on_step` with each step's record once the step is over.

    `clock` counts nanoseconds from any start. Attach it while the engine is idle, so that every request of a record
    was submitted in it or in an earlier one; a watcher may come and go at any time.
    """

    def __init__(
        self,
        on_step: Callable[[StepRecord], None] | None,
        *,
        scheduler: Scheduler,
        cache: BatchedPagedKVCache,
        decode: DecodePath,
        overlap: Overlap,
        clock: Callable[[], int],
    ) -> None:
        self.on_step = on_step
        self.watcher: Callable[[StepRecord], None] | None = None
        self._scheduler, self._cache, self._decode, self._overlap = scheduler, cache, decode, overlap
        self._clock = clock
        self._start = self._since = clock()
        self._records = 0
        self._submitted: list[Request] = []
        self._timings: dict[str, int] = {}
        self._draft = StepRecord(0)
        # What the records so far have told, so that the next one tells only what is new.
        self._rows: dict[int, str] = {}
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._gates = _gate_counts()
        self._waits, self._ahead, self._dropped = Counter(overlap.waits), overlap.ahead, overlap.dropped

    def watch(self, watcher: Callable[[StepRecord], None] | None) -> None:
        """Tell `watcher` too, beginning with a record of every row and block; None ends that."""
        self.watcher = watcher
        self._records = 0

    def submitted(self, request: Request, *, seed: int) -> None:
        """A request joined the queue; `seed` is the one it draws with, whoever chose it."""
        self._submitted.append(replace(request, params=replace(request.params, seed=seed)))

    def record(self, step: Callable[[Mark], list[Event]], *, number: int) -> list[Event]:
        """Run one step, tell the hook, and return the step's events; a step that raises is told too."""
        self._since = self._clock()
        at_us = (self._since - self._start) // 1000
        self._draft = StepRecord(number, at_us, tuple(self._submitted))
        self._submitted.clear()
        self._timings = {}
        try:
            events = step(self._mark)
        except Exception as fault:
            self._finish((), fault=f"{type(fault).__name__}: {fault}")
            raise
        self._finish(events, fault=None)
        return events

    def _mark(self, phase: str, output: SchedulerOutput | None = None) -> None:
        self._timings[phase] = self._timings.get(phase, 0) + (self._clock() - self._since) // 1000
        if output is not None:
            self._draft = self._with_schedule(output)
        # Read anew, so that what recording costs is in no phase.
        self._since = self._clock()

    def _with_schedule(self, output: SchedulerOutput) -> StepRecord:
        rows = {row: sequence.request.id for row, sequence in sorted(self._scheduler.running.items())}
        blocks = {row: tuple(table.blocks) for row, table in enumerate(self._cache.tables) if table.blocks}
        in_rows = {block for held in blocks.values() for block in held} if self._cache.parked else set()
        full = self._records % FULL_EVERY == 0
        pairs = zip(output.admitted_rows, output.admitted, strict=True)
        computing = {chunk.row for chunk in output.chunks} | set(output.decode_rows)
        draft = replace(
            self._draft,
            admitted=tuple((row, one.request.id, len(one.tokens) - one.found) for row, one in pairs),
            chunks=tuple((chunk.row, chunk.start, chunk.count) for chunk in output.chunks),
            idle_rows=tuple(row for row in rows if row not in computing),
            preempted=tuple(sequence.request.id for sequence in output.preempted),
            moves=tuple((move.src, move.dst) for move in output.moves),
            decode_rows=output.decode_rows,
            rows=rows if full or rows != self._rows else None,
            waiting=len(self._scheduler.waiting),
            blocks=_changes(self._blocks, blocks),
            dump=blocks if full else None,
            free_blocks=self._cache.allocator.num_free,
            vacated=tuple(self._overlap.vacated),
            parked=tuple(sorted({block for table in self._cache.parked for block in table.blocks} - in_rows)),
        )
        self._rows, self._blocks = rows, blocks
        return draft

    def _with_overlap(self, draft: StepRecord) -> StepRecord:
        overlap = self._overlap
        if not overlap.on:
            return draft
        dropped, ahead = overlap.dropped - self._dropped, overlap.ahead > self._ahead
        waited = tuple(sorted(overlap.waits - self._waits))
        self._waits, self._ahead, self._dropped = Counter(overlap.waits), overlap.ahead, overlap.dropped
        return replace(draft, ahead=ahead, waited=waited, dropped=dropped or None)

    def _finish(self, events: Sequence[Event], *, fault: str | None) -> None:
        draft, gates = self._draft, _gate_counts()
        if draft.decode_rows and "decode" in self._timings:
            outcome = self._decode.last_outcome
            draft = replace(draft, bucket=outcome.bucket, replayed=outcome.replayed, reason=outcome.reason)
            check_step_explained(
                decode_rows=draft.decode_rows, bucket=draft.bucket, replayed=draft.replayed, reason=draft.reason
            )
        draft = self._with_overlap(draft)
        before = self._gates
        failures = {name: bad - before.get(name, (0, 0))[1] for name, (_, bad) in gates.items()}
        draft = replace(
            draft,
            events=tuple((event.request_id, event.token_id, event.finish_reason) for event in events),
            gate_checks=sum(n for n, _ in gates.values()) - sum(n for n, _ in before.values()),
            gate_failures={name: count for name, count in failures.items() if count},
            timings_us=self._timings,
            fault=fault,
        )
        self._gates = gates
        self._records += 1
        for told in (self.on_step, self.watcher):
            if told is not None:
                told(draft)


class Listeners:
    """Who hears of an engine's steps: a trace, from an idle moment on, and a watcher at any time. `recorder` is None,
    and a step costs nothing more, while nobody does."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        cache: BatchedPagedKVCache,
        decode: DecodePath,
        overlap: Overlap,
        clock: Callable[[], int],
    ) -> None:
        self.recorder: StepRecorder | None = None
        self._new = partial(StepRecorder, scheduler=scheduler, cache=cache, decode=decode, overlap=overlap, clock=clock)

    def trace(self, on_step: Callable[[StepRecord], None] | None) -> None:
        """Tell `on_step` from the next step on; None ends that. The watcher stays."""
        watcher = None if self.recorder is None else self.recorder.watcher
        self.recorder = None if on_step is None else self._new(on_step)
        if watcher is not None:
            self.watch(watcher)

    def watch(self, on_step: Callable[[StepRecord], None] | None) -> None:
        """Tell `on_step` too, beginning with every row and block there is; None ends that. The trace goes on."""
        recorder = self.recorder or self._new(None)
        recorder.watch(on_step)
        self.recorder = None if on_step is None and recorder.on_step is None else recorder


def request_dict(request: Request) -> dict[str, Any]:
    """A request for JSON, every sampling parameter included; `logit_bias` as pairs, for JSON's keys are strings."""
    params = {column.name: getattr(request.params, column.name) for column in fields(SamplingParams)}
    params["logit_bias"] = [list(pair) for pair in request.params.logit_bias.items()]
    guide = {} if request.guide is None else {"guide": request.guide.describe()}
    asked = {"priority": request.priority, "cache_salt": request.cache_salt, "prefix_cache": request.prefix_cache}
    neutral = {"priority": 0, "cache_salt": "", "prefix_cache": True}
    told = {name: value for name, value in asked.items() if value != neutral[name]}
    return {"id": request.id, "prompt_ids": list(request.prompt_ids), "params": params, **guide, **told}


def _changes(before: Mapping[int, tuple[int, ...]], after: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Rows whose blocks differ, with what they hold after."""
    rows = sorted(before.keys() | after.keys())
    return {row: after.get(row, ()) for row in rows if before.get(row, ()) != after.get(row, ())}


def _gate_counts() -> dict[str, tuple[int, int]]:
    """(checks, failures) of every gate so far."""
    return {name: (count.checks, count.failures) for name, count in counters().items()}
