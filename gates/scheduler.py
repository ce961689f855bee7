"""Gates on the schedule: rows are accounted for, the line is kept, nobody is overtaken without end, the first advances.

All but the last take host integers. The last two guard the one declaration of per-row state: what a row holds
belongs to the sequence in it, and an empty row holds nothing.

Gates: this file. Proof: tests/test_scheduler.py. Story: scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gates.core import FULL, gate, require, require_rows


@gate("scheduler.rows_accounted")
def check_rows_accounted(*, free: Sequence[int], running: Sequence[int], total: int) -> None:
    """Free rows and running rows together are rows 0..total-1, each once: no row is lost or held twice."""
    idle, busy = set(free), set(running)
    both = sorted(idle & busy)
    require_rows(both, total, f"row {both[0] if both else ''} is free and running")
    require(len(idle) == len(free), f"{len(free)} free rows name only {len(idle)} rows")
    missing = sorted(set(range(total)) - idle - busy)
    require_rows(missing, total, "a row is neither free nor running")
    require(len(free) + len(running) == total, f"{len(free)} free + {len(running)} running rows, the batch has {total}")


Order = tuple[int, int]  # (priority, or less once a request is due; arrival): the lowest goes first


@gate("scheduler.queue_order")
def check_queue_order(*, running: Sequence[int], waiting: Sequence[Order], admitted: Sequence[Order] = ()) -> None:
    """Nobody jumped the queue: all wait in order, and the admitted went before them.

    `waiting` may be the two ends of the queue alone, which is what a server can afford to look at in every step.
    `running` are arrivals of the head's own priority, of which none came after it. Another priority was there first,
    and is not put out.
    """
    for first, second in zip(waiting, list(waiting)[1:], strict=False):
        require(first < second, f"arrival {first[1]} waits ahead of arrival {second[1]}")
    if not waiting:
        return
    head = waiting[0][1]
    late = [arrival for arrival in running if arrival >= head]
    late += [order[1] for order in admitted if order > waiting[0]]
    require(not late, f"arrival {max(late, default=0)} runs while arrival {head} waits")


@gate("scheduler.overtaken")
def check_overtaken_bounded(*, running: int, waiting: int, due_after: int) -> None:
    """The latest arrival that runs came fewer than `due_after` requests after the earliest that waits.

    So fewer than that many ever overtake one request, whatever their priorities: an endless stream of more urgent ones
    starves nobody.
    """
    fact = f"arrival {running} runs while arrival {waiting} waits, {running - waiting} requests ahead of it"
    require(running - waiting < due_after, f"{fact}; whoever came {due_after} ahead goes first")


@gate("scheduler.earliest_kept")
def check_earliest_kept(*, earliest: int, preempted: Sequence[int]) -> None:
    """The first in line of those that run is not among the preempted: it always advances, so there is no livelock."""
    require(earliest not in preempted, f"arrival {earliest} is the first in line that runs and was preempted")


@gate("scheduler.preempted_late")
def check_preempted_late(*, arrival: int, steps: int, block_size: int) -> None:
    """With room kept for growth, nobody is preempted before `block_size` steps: each admission is worth its prefill.

    It bounds how often one request can be preempted: the earlier ones end, and until then it is once in so many steps.
    """
    fact = f"arrival {arrival} is preempted {steps} steps after it was admitted, a block lasts {block_size} steps"
    require(steps >= block_size, fact)


@gate("scheduler.somebody_runs")
def check_somebody_runs(*, running: int, waiting: int, preempted: int) -> None:
    """Whoever is first in line with an empty batch is admitted: nothing that runs could ever make room for it."""
    fact = f"{waiting} requests wait, 0 run and none was preempted; the head of the queue will never fit"
    require(running > 0 or waiting == 0 or preempted > 0, fact)


@gate("scheduler.preempted_wait")
def check_preempted_wait(*, preempted: Sequence[int], admitted: Sequence[int]) -> None:
    """Nobody is preempted and admitted in one step (arrivals): that pays for a prefill and gains nothing.

    Every token stays right, so no comparison of answers shows it: only this does.
    """
    both = sorted(set(preempted) & set(admitted))
    require(not both, f"arrival {both[:1]} is preempted and admitted in one step [{len(both)} of {len(preempted)}]")


@gate("scheduler.decode_room")
def check_decode_room(*, lengths: Sequence[int], capacities: Sequence[int]) -> None:
    """Every decode row, in order, has a block for the token this step writes; the grow stage is the side to fix."""
    short = [index for index, (length, room) in enumerate(zip(lengths, capacities, strict=True)) if length + 1 > room]
    if short:
        index = short[0]
        fact = f"{lengths[index]} tokens stored, blocks hold {capacities[index]}, one more is to be written"
        require_rows(short, len(lengths), fact)


@gate("scheduler.rows_follow")
def check_rows_follow_requests(*, rows: Mapping[int, str], state: Mapping[int, str]) -> None:
    """The per-row state of every occupied row was filled by the request that sits in it (ids by row)."""
    for row, request_id in rows.items():
        held = state.get(row)
        require(held == request_id, f"row {row} runs request {request_id!r}, its sampler state is {held!r}'s")


@gate("scheduler.vacated_neutral", at=FULL)
def check_vacated_rows_neutral(*, dirty: Mapping[int, Sequence[str]], total: int) -> None:
    """No empty row keeps a former tenant's state; `dirty` names the columns that are not neutral, by row."""
    rows = sorted(row for row, columns in dirty.items() if columns)
    if rows:
        require_rows(rows, total, f"empty row {rows[0]} still holds {', '.join(dirty[rows[0]])}")
