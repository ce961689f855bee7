"""Gates on the schedule: rows are accounted for, arrival decides the order, the earliest request always advances.

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


@gate("scheduler.queue_order")
def check_queue_order(*, running: Sequence[int], waiting: Sequence[int]) -> None:
    """Nobody jumped the queue: arrivals wait in order, and every running one came before every waiting one.

    `waiting` may be the two ends of the queue alone, which is what a server can afford to look at in every step.
    """
    for first, second in zip(waiting, list(waiting)[1:], strict=False):
        require(first < second, f"arrival {first} waits ahead of arrival {second}")
    if running and waiting:
        require(max(running) < waiting[0], f"arrival {max(running)} runs while arrival {waiting[0]} waits")


@gate("scheduler.earliest_kept")
def check_earliest_kept(*, earliest: int, preempted: Sequence[int]) -> None:
    """The earliest running arrival is not among the preempted: it always advances, so there is no livelock."""
    require(earliest not in preempted, f"arrival {earliest} is the earliest running and was preempted")


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
