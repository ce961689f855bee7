"""What must hold of a step trace, line by line, told by plain values read back from a file.

A trace is evidence only if it is whole: a lost line, a row that changed hands untold, or a decode step without an
explanation would make it tell a story that no engine lived. That blocks have one owner each and add up is asked by
the engine's own gates (`gates.blocks`), of the ownership that a reader rebuilt.

Proof: tests/test_trace.py. Story: trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from gates.core import CHEAP, gate, require

MIXED = "mixed step"  # the reason of rows that one forward computed with prompts' chunks; that is no decode step


@gate("trace.lines_follow", at=CHEAP)
def check_lines_follow(*, previous: int | None, step: int) -> None:
    """Each line is the step after the one before it; the first (`previous` None) may be any."""
    require(previous is None or step == previous + 1, f"step {step} follows step {previous}, lines between are lost")


@gate("trace.step_explained", at=CHEAP)
def check_step_explained(
    *, decode_rows: Sequence[int], bucket: tuple[int, int] | None, replayed: bool, reason: str
) -> None:
    """A decode step was replayed, from a bucket that holds its rows, or says why not; without rows it says nothing."""
    if not decode_rows:
        require(not replayed and not reason, f"0 rows decoded, replayed {replayed}, reason {reason!r}")
        return
    fact = f"{len(decode_rows)} rows decoded, replayed {replayed}, reason {reason!r}"
    require(replayed == (reason == ""), fact)
    require(bucket is not None or not replayed, f"{len(decode_rows)} rows replayed, no bucket")
    require(bucket is None or reason != MIXED, f"{len(decode_rows)} rows decoded in a mixed step, bucket {bucket}")
    require(bucket is None or len(decode_rows) <= bucket[0], f"{len(decode_rows)} rows decoded, bucket {bucket}")


@gate("trace.rows_explained", at=CHEAP)
def check_rows_explained(
    *,
    before: Mapping[int, str],  # row -> request id in the step before
    gone: Set[str],  # requests that ended since, aborted ones and preempted ones
    moves: Sequence[tuple[int, int]],
    admitted: Sequence[tuple[int, str]],
    after: Mapping[int, str],
) -> None:
    """The row map is the one before, less who left, with the moves applied and the newcomers seated: nothing else."""
    expected = {row: request_id for row, request_id in before.items() if request_id not in gone}
    for src, dst in moves:
        require(src in expected, f"row {src} moved to {dst}, row {src} is empty")
        require(dst not in expected, f"row {src} moved to {dst}, row {dst} holds {expected.get(dst)!r}")
        expected[dst] = expected.pop(src)
    for row, request_id in admitted:
        require(row not in expected, f"{request_id!r} admitted to row {row}, it holds {expected.get(row)!r}")
        expected[row] = request_id
    wrong = sorted(row for row in expected.keys() | after.keys() if expected.get(row) != after.get(row))
    if wrong:
        told, held = expected.get(wrong[0]), after.get(wrong[0])
        require(False, f"row {wrong[0]} holds {held!r}, the trace's moves and admissions leave {told!r} there")


@gate("trace.queue_counted", at=CHEAP)
def check_queue_counted(*, queue: Sequence[str], waiting: int) -> None:
    """The queue that submissions, admissions and preemptions leave is as long as the engine's own."""
    require(len(queue) == waiting, f"{len(queue)} requests wait by the trace's lines, {waiting} in the engine")


@gate("trace.decode_rows", at=CHEAP)
def check_decode_rows(
    *, decode_rows: Sequence[int], chunk_rows: Sequence[int], idle_rows: Sequence[int], rows: Set[int]
) -> None:
    """Every row in use has a chunk, decodes, or is told to be idle in a step, and none is two of these."""
    both = sorted(set(decode_rows) & set(chunk_rows))
    require(not both, f"row {both[:1]} is prefilled and decodes in one step")
    computed = set(decode_rows) | set(chunk_rows)
    wrong = sorted(computed & set(idle_rows))
    require(not wrong, f"row {wrong[:1]} computes and is told to be idle")
    fact = f"rows {sorted(computed)} compute, rows {sorted(idle_rows)} are idle, rows {sorted(rows)} are in use"
    require(computed | set(idle_rows) == rows, fact)


@gate("trace.events_of_open", at=CHEAP)
def check_events_of_open(*, open_ids: Set[str], events: Sequence[tuple[str, str | None]]) -> None:
    """`events` are (request id, finish reason): each of an open request, none after the one that ended it."""
    ended: set[str] = set()
    for request_id, finish_reason in events:
        require(request_id not in ended, f"request {request_id!r} has an event after its end")
        require(request_id in open_ids, f"request {request_id!r} has an event, {len(open_ids)} others are open")
        if finish_reason is not None:
            ended.add(request_id)


@gate("trace.dump_agrees", at=CHEAP)
def check_dump_agrees(*, rebuilt: Mapping[int, tuple[int, ...]], dumped: Mapping[int, tuple[int, ...]]) -> None:
    """Where a line tells every row's blocks, they are what the changes up to and with that line add up to."""
    for row, blocks in rebuilt.items():
        held = dumped.get(row, ())
        require(held == blocks, f"row {row} holds blocks {list(held)}, the changes so far add up to {list(blocks)}")
    extra = sorted(dumped.keys() - rebuilt.keys())
    require(not extra, f"row {extra[:1]} holds blocks, the changes so far leave it empty")
