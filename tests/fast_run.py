"""The fast engine taken through a trace, one thing told at a time, its state checked after each.

What must hold between any two calls, whoever made them: the gates of `check_state`, no event of a request that is
not open, no live K/V that moved by a bit, and in the end an idle engine that holds nothing and books that balance.
The answers are only collected; `tests/harness.py` compares them with the reference's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fast.engine import Engine
from gates import FULL, enabled
from gates.blocks import check_blocks_conserved, check_holders_counted, check_owned_once
from gates.scheduler import check_rows_accounted, check_rows_follow_requests, check_vacated_rows_neutral
from gates.slots import check_slots_agree
from reference.request import Completion, Request
from tests.traces import ENDED, ENDING, PREEMPTED, RUNNING, WAITING, Arrival, LockstepError, Trace, arm_of


@dataclass
class Answer:
    """One request that was submitted, what came of it, and the step that emitted each of its tokens."""

    request: Request
    completion: Completion
    id_was_open: bool
    refusal: str | None = None
    steps: list[int] = field(default_factory=list)


class FastRun:
    """The fast engine at work: told what a trace tells it, its state checked after each thing it is told.

    Raises:
        LockstepError: from any method; a fault of the engine, a gate that fires, or a book that does not balance.
    """

    def __init__(self, limits: Trace, engine: Engine) -> None:
        self.trace = replace(limits, arrivals=(), aborts=())  # as far as it has been told
        self.engine = engine
        self.answers: list[Answer] = []
        self.open: dict[str, Answer] = {}
        self.aborted: Counter[str] = Counter()  # states of `STATES` in which somebody was aborted
        self.steps = self.told_cached = 0
        self._due: list[str] = []  # states in which nobody was yet when their abort was told
        self._ended: list[str] = []  # ids that the last step ended

    @property
    def completions(self) -> dict[str, Completion]:
        """What each id's last taken request has got so far."""
        return {answer.request.id: answer.completion for answer in self.answers if answer.refusal is None}

    def error(self, fact: str) -> LockstepError:
        """A fact with the trace so far."""
        return LockstepError(fact, self.trace)

    def submit(self, parent: Request) -> None:
        """Submit a request's answers; a refusal is noted, and must have changed nothing."""
        self.trace = replace(self.trace, arrivals=(*self.trace.arrivals, Arrival(self.steps, parent)))
        for request in parent.expand():
            answer = Answer(request, Completion(request.id, request.prompt_ids), request.id in self.open)
            self.answers.append(answer)
            before = self.engine.stats()
            try:
                self.engine.submit(request)
                self.open[request.id] = answer
            except ValueError as refusal:
                answer.refusal = str(refusal)
                if self.engine.stats() != before:
                    raise self.error(f"{request.id}: refused, and {before} became {self.engine.stats()}") from None
        self._check(check_state, self.engine)

    def abort(self, name: str) -> None:
        """Abort an id, or one request in one of the `STATES`, as soon as there is one."""
        self.trace = replace(self.trace, aborts=(*self.trace.aborts, (self.steps, name)))
        self._due.append(name)
        self._abort_due()

    def step(self) -> None:
        """One step; every event belongs to an open request, and no live K/V moved by a bit."""
        self._abort_due()
        before = live_kv(self.engine) if enabled(FULL) else {}
        events = self._check(self.engine.step)
        self._ended.clear()
        for event in events:
            if event.request_id not in self.open:
                raise self.error(f"step {self.steps}: an event of {event.request_id!r}, which is not open: {event}")
            answer = self.open[event.request_id]
            answer.completion.add(event)
            self.told_cached += event.cached_tokens
            if event.token_id is not None:
                answer.steps.append(self.steps)
            if event.finish_reason is not None:
                self._ended.append(event.request_id)
                del self.open[event.request_id]
        self._check(check_state, self.engine)
        after = live_kv(self.engine) if before else {}
        for request_id in before.keys() & after.keys():
            kept = after[request_id][:, : before[request_id].shape[1]]
            if not torch.equal(before[request_id], kept):
                raise self.error(f"step {self.steps}: the K/V of {request_id!r} was written over")
        self.steps += 1

    def drain(self) -> None:
        """Step until nobody is left, within as many steps as that may take."""
        # Every step with work computes at least one token of the earliest request, which nobody preempts, so the sum of
        # all that each of them could have to compute bounds the steps.
        last = self.steps + 1 + sum(_most_tokens(answer, self.engine) for answer in self.open.values())
        while self.engine.has_work:
            if self.steps > last:
                raise self.error(f"no end after {self.steps} steps: {self.engine.stats()}")
            self.step()

    def finish(self) -> None:
        """An idle engine holds nothing, and every decode step of its life is accounted for."""
        stats, engine = self.engine.stats(), self.engine
        held = (stats["num_blocks"] - stats["free_blocks"], stats["running"], stats["waiting"], stats["kv_tokens"])
        mirrored = engine.cache.slot_table.lengths(range(engine.cache.max_batch_size))
        if engine.has_work or self.open or any(held) or any(mirrored):
            raise self.error(f"an idle engine holds something: {stats}, rows mirror {mirrored}")
        if stats["prefix_hit_tokens"] != self.told_cached and not self.aborted:
            raise self.error(f"{self.told_cached} tokens are told as cached, the metric counts {stats}")
        reasons = {reason for reason, steps in stats["eager"].items() if steps}
        if stats["decode_steps"] != stats["replayed"] + sum(stats["eager"].values()):
            raise self.error(f"decode steps are missing from the books: {stats}")
        # While a prompt is computed in chunks its row may stand between those that decode.
        allowed = arm_of(self.trace.arm).eager | (
            {"scattered rows"} if self.trace.chunk_tokens or self.trace.prefix_cache else set()
        )
        if not reasons <= allowed:
            raise self.error(f"arm {self.trace.arm} may run eagerly for {set(allowed)}: {stats}")

    def _abort_due(self) -> None:
        due, self._due = self._due, []
        for name in due:
            found = self._named(name)
            if not found:
                self._due.append(name)
                continue
            self.aborted[name] += 1
            self.engine.abort(found[0])
            self._check(check_state, self.engine)

    def _named(self, name: str) -> list[str]:
        running, waiting = self.engine.scheduler.running, self.engine.scheduler.waiting
        in_state = {
            WAITING: [sequence for sequence in reversed(waiting) if not sequence.preemptions],
            PREEMPTED: [sequence for sequence in waiting if sequence.preemptions],
            RUNNING: [running[row] for row in sorted(running)],
            ENDING: [s for s in running.values() if s.num_generated + 1 == s.max_tokens],
        }
        if name in in_state:
            return [sequence.request.id for sequence in in_state[name]]
        return list(self._ended) if name == ENDED else [name]

    def _check(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:
            raise self.error(f"step {self.steps}: {type(error).__name__}: {error}") from error


def check_state(engine: Engine) -> None:
    """The gates that hold between any two calls, whichever they were; `engine.step` runs more of its own."""
    engine.stats()
    cache, scheduler = engine.cache, engine.scheduler
    allocator, running = cache.allocator, scheduler.running
    check_blocks_conserved(free=allocator.num_free, owned=allocator.num_owned, total=allocator.num_blocks)
    tables = {row: table.blocks for row, table in enumerate(cache.tables)}
    published = {block for block in range(allocator.num_blocks) if allocator.is_kept(block)}
    check_owned_once(tables=tables, num_blocks=allocator.num_blocks, shared=published)
    check_holders_counted(tables=tables, holders=[allocator.holders(block) for block in range(allocator.num_blocks)])
    check_rows_accounted(free=scheduler.free_rows, running=list(running), total=cache.max_batch_size)
    check_vacated_rows_neutral(
        dirty={row: engine.rows.dirty_columns(row) for row in scheduler.free_rows}, total=cache.max_batch_size
    )
    check_rows_follow_requests(
        rows={row: sequence.request.id for row, sequence in running.items()},
        state={row: engine.rows.request_id(row) for row in running},
    )
    check_slots_agree(
        slots=cache.slot_table.slots,
        lengths=cache.slot_table.lengths(list(running)),
        truth=[cache.tables[row].slots(0, cache.tables[row].length) for row in running],
        rows=list(running),
    )


def live_kv(engine: Engine) -> dict[str, Tensor]:  # [2L, length, K, D] each
    """A copy of the K/V of each running request, by id."""
    cache, running = engine.cache, engine.scheduler.running
    tables = {sequence.request.id: cache.tables[row] for row, sequence in running.items()}
    slots = torch.tensor([slot for t in tables.values() for slot in t.slots(0, t.length)], dtype=torch.int64)
    everything = cache.kv(slots)
    return dict(zip(tables, everything.split([table.length for table in tables.values()], dim=1), strict=True))


def _most_tokens(answer: Answer, engine: Engine) -> int:
    asked, limit = answer.request.params.max_tokens, engine.max_model_len
    return limit if asked is None else len(answer.request.prompt_ids) + asked
