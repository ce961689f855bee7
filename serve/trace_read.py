"""Reading a step trace back: lines tell what changed, a `TraceReader` adds it up and gives whole steps.

Each line has to follow from those before it: rows, queue and block ownership are rebuilt and held to the gates as the
engine holds its own state to them, so a file that was cut, mixed or edited is refused with the line's number. A last
line cut short, which is what a killed process leaves, is only noted. This module computes nothing and knows no model.

Gates: gates.trace. Proof: tests/test_trace.py. Story: trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gates.blocks import check_blocks_conserved, check_owned_once
from gates.core import GateError
from gates.trace import (
    MIXED,
    check_decode_rows,
    check_dump_agrees,
    check_events_of_open,
    check_lines_follow,
    check_queue_counted,
    check_rows_explained,
    check_step_explained,
)
from reference.request import GuideState, Request, SamplingParams
from serve.trace import FORMAT


class TraceError(ValueError):
    """A trace that cannot be read; the message names the file and the line (1-based, the header is line 1)."""


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One step, complete. The schedule is as the forwards saw it; `blocks` and `rows` are the whole maps."""

    step: int
    at_us: int  # microseconds since tracing began
    submitted: tuple[Request, ...]
    admitted: tuple[tuple[int, str, int], ...]  # (row, request id, tokens to be computed)
    preempted: tuple[str, ...]
    moves: tuple[tuple[int, int], ...]  # (src, dst)
    queue: tuple[str, ...]  # who still waits after the schedule, in order
    chunks: tuple[tuple[int, int, int], ...]  # (row, first token, tokens)
    decode_rows: tuple[int, ...]
    idle_rows: tuple[int, ...]
    rows: dict[int, str]  # row -> request id
    bucket: tuple[int, int] | None
    replayed: bool
    reason: str
    blocks: dict[int, tuple[int, ...]]  # row -> block ids
    free_blocks: int
    ahead: bool | None  # launched before the tokens of the step before were known; None without overlap
    waited: tuple[str, ...]  # why tokens were waited for with nothing launched
    dropped: int  # tokens computed after the end of their answers
    parked: tuple[int, ...]  # blocks of no row, which the step in flight still writes
    events: tuple[tuple[str, int | None, str | None], ...]  # (request id, token id, finish reason)
    gate_checks: int
    gate_failures: dict[str, int]
    timings_us: dict[str, int]
    fault: str | None

    @property
    def mixed(self) -> bool:
        """True when one forward computed the chunks and the decoding rows; it is no decode step."""
        return self.reason == MIXED


class TraceReader:
    """A trace file: `header` at once, the steps by iterating; `truncated` is True after a last line cut short.

    Raises:
        OSError: the file cannot be read.
        TraceError: the header, or while iterating a line, is damaged or contradicts those before it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.truncated = False
        with path.open("rb") as file:
            first = file.readline()
        self.header = self._parse(first, 1) if first.endswith(b"\n") else {}
        found = self.header.get("format")
        if found != FORMAT:
            what = "no trace" if found is None else f"a trace of format {found}, this version reads {FORMAT}"
            raise TraceError(f"{path}: line 1: {what}")

    def __iter__(self) -> Iterator[TraceStep]:
        """The steps in order."""
        pool = self.header["engine"].get("pool") or {}
        num_blocks = pool.get("num_blocks")
        shared = range(num_blocks or 0 if self.header["engine"].get("prefix_cache") else 0)
        due_after = self.header["engine"].get("due_after")
        state = _Running(num_blocks=num_blocks, shared=shared, due_after=due_after)
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                # Each line is written with its end, so only a last one that was cut short is without.
                self.truncated = not line.endswith(b"\n")
                if number > 1 and not self.truncated:
                    yield self._next(state, line, number)

    def _next(self, state: _Running, line: bytes, number: int) -> TraceStep:
        values = self._parse(line, number)
        try:
            return state.add(values)
        except GateError as broken:
            raise TraceError(f"{self.path}: line {number}: {broken}") from None
        except KeyError as error:
            raise TraceError(f"{self.path}: line {number} is damaged: field {error} is missing") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise TraceError(f"{self.path}: line {number} is damaged: {error}") from None

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            values = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{self.path}: line {number} is damaged: {error}") from None
        if not isinstance(values, dict):
            raise TraceError(f"{self.path}: line {number} is damaged: it holds no object")
        return values


class _Running:
    """What the lines so far add up to, and the gates each next line has to pass."""

    def __init__(self, *, num_blocks: int | None, shared: range, due_after: int | None) -> None:
        self.num_blocks = num_blocks
        self.due_after = due_after
        self.shared = shared  # blocks that several rows may hold
        self.step: int | None = None
        self.open: set[str] = set()
        self.ended: set[str] = set()  # in the step before: their rows are empty by now
        self.queue: list[str] = []
        self.asked: dict[str, tuple[int, int]] = {}  # (priority, arrival) of the requests that are open
        self.arrivals = 0
        self.rows: dict[int, str] = {}
        self.blocks: dict[int, tuple[int, ...]] = {}

    def add(self, line: Mapping[str, Any]) -> TraceStep:
        """One line, made complete. Raises GateError when it does not follow from those before it."""
        step = self._step_of(line)
        check_lines_follow(previous=self.step, step=step.step)
        self.step = step.step
        if step.fault is None:
            check_queue_counted(queue=step.queue, waiting=line["waiting"])
            # With overlap an end is told before or after its row is given back, so that is told too.
            gone = self.ended if step.ahead is None else set(line.get("vacated", ()))
            self._check(step, gone, {int(row): tuple(blocks) for row, blocks in line.get("dump", {}).items()})
        self.rows, self.blocks = step.rows, step.blocks
        self.ended = {name for name, _, reason in step.events if reason is not None}
        self.open = (self.open | {request.id for request in step.submitted}) - self.ended
        self.asked = {name: asked for name, asked in self.asked.items() if name in self.open}
        return step

    def _step_of(self, line: Mapping[str, Any]) -> TraceStep:
        submitted = tuple(request_of(values) for values in line.get("submitted", ()))
        admitted = tuple((row, name, tokens) for row, name, tokens in line.get("admitted", ()))
        preempted = tuple(line.get("preempted", ()))
        events = tuple((name, token, reason) for name, token, reason in line.get("events", ()))
        self._requeue(
            joined=submitted,
            left={name for _, name, _ in admitted} | {name for name, _, reason in events if reason == "abort"},
            preempted=preempted,
        )
        rows = {int(row): name for row, name in line["rows"].items()} if "rows" in line else self.rows
        changed = {int(row): tuple(blocks) for row, blocks in line.get("blocks", {}).items()}
        bucket = line.get("bucket")
        return TraceStep(
            step=line["step"],
            at_us=line["at_us"],
            submitted=submitted,
            admitted=admitted,
            preempted=preempted,
            moves=tuple((src, dst) for src, dst in line.get("moves", ())),
            queue=tuple(self.queue),
            chunks=tuple((row, start, count) for row, start, count in line.get("chunks", ())),
            decode_rows=tuple(line.get("decode_rows", ())),
            idle_rows=tuple(line.get("idle_rows", ())),
            rows=rows,
            bucket=None if bucket is None else (bucket[0], bucket[1]),
            replayed=line["replayed"],
            reason=line.get("reason", ""),
            blocks={row: blocks for row, blocks in sorted((self.blocks | changed).items()) if blocks},
            free_blocks=line["free_blocks"],
            ahead=line.get("ahead"),
            waited=tuple(line.get("waited", ())),
            dropped=line.get("dropped", 0),
            parked=tuple(line.get("parked", ())),
            events=events,
            gate_checks=line["gate_checks"],
            gate_failures=dict(line.get("gate_failures", {})),
            timings_us=dict(line.get("timings_us", {})),
            fault=line.get("fault"),
        )

    def _requeue(self, *, joined: tuple[Request, ...], left: set[str], preempted: tuple[str, ...]) -> None:
        for request in joined:
            self.asked[request.id] = (request.priority, self.arrivals)
            self.arrivals += 1
        waiting = {*self.queue, *preempted, *(request.id for request in joined)} - left
        self.queue = sorted(waiting, key=self._place)

    def _place(self, name: str) -> tuple[bool, int, int]:
        """Its place in line: who so many others came after goes first, then by priority, then by arrival."""
        priority, arrival = self.asked[name]
        due = self.due_after is not None and self.arrivals - arrival > self.due_after
        return not due, 0 if due else priority, arrival

    def _check(self, step: TraceStep, gone: set[str], dump: dict[int, tuple[int, ...]]) -> None:
        aborted = {name for name, _, reason in step.events if reason == "abort"}
        check_rows_explained(
            before=self.rows,
            gone=gone | aborted | set(step.preempted),
            moves=step.moves,
            admitted=[(row, name) for row, name, _ in step.admitted],
            after=step.rows,
        )
        check_decode_rows(
            decode_rows=step.decode_rows,
            chunk_rows=[row for row, _, _ in step.chunks],
            idle_rows=step.idle_rows,
            rows=step.rows.keys(),
        )
        check_step_explained(
            decode_rows=step.decode_rows, bucket=step.bucket, replayed=step.replayed, reason=step.reason
        )
        check_events_of_open(
            open_ids=self.open | {request.id for request in step.submitted},
            events=[(name, reason) for name, _, reason in step.events],
        )
        if dump:
            check_dump_agrees(rebuilt=step.blocks, dumped=dump)
        if self.num_blocks is not None:
            check_owned_once(tables=step.blocks, num_blocks=self.num_blocks, shared=self.shared)
            owned = len({block for blocks in (*step.blocks.values(), step.parked) for block in blocks})
            check_blocks_conserved(free=step.free_blocks, owned=owned, total=self.num_blocks)


@dataclass(frozen=True, slots=True)
class TracedGuide:
    """The description of a guide that a traced request had; whoever runs the request makes the guide anew."""

    kind: str
    source: str

    def start(self, *, vocab_size: int, eos_token_ids: Sequence[int]) -> GuideState:
        """Refused: nothing is compiled here."""
        raise ValueError(f"guide: a traced {self.kind} is to be compiled before its request can run")

    def describe(self) -> dict[str, str]:
        """What the trace says."""
        return {"kind": self.kind, "source": self.source}


def request_of(values: Mapping[str, Any]) -> Request:
    """A request from its JSON form.

    Raises:
        ValueError, TypeError, KeyError: it is none.
    """
    params = dict(values["params"])
    params["logit_bias"] = dict(params["logit_bias"])
    guide = TracedGuide(**values["guide"]) if "guide" in values else None
    told = {name: values[name] for name in ("priority", "cache_salt", "prefix_cache") if name in values}
    return Request(tuple(values["prompt_ids"]), SamplingParams(**params), values["id"], guide, **told)
