"""What must hold of a compaction: nobody loses anything, and it moves no row that was in place.

Proof: tests/test_compact.py. Story: compact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gates.core import CHEAP, FULL, gate, require


@gate("compact.moves_minimal", at=CHEAP)
def check_moves_minimal(*, rows: Collection[int], moves: Sequence[tuple[int, int]]) -> None:
    """The (src, dst) `moves` make the occupied `rows` a prefix, and not one of them was needless.

    Too few leaves a batch that cannot replay. Too many also ends in a prefix, so no outcome shows it: only this does.
    """
    count = len(set(rows))
    misplaced = {row for row in rows if row >= count}
    after = set(rows)
    for src, dst in moves:
        require(src in after, f"row {src} is to move to {dst}, but row {src} is empty")
        require(dst not in after, f"row {src} is to move to {dst}, but row {dst} is occupied")
        after.remove(src)
        after.add(dst)
    outside = sorted(row for row in after if row >= count)
    require(
        not outside,
        f"{len(moves)} moves for {len(misplaced)} rows out of place: rows {outside} still stand at or above {count}, "
        f"so the batch cannot replay (the scheduler's side)",
    )
    require(
        len(moves) <= len(misplaced),
        f"{len(moves)} moves for {len(misplaced)} rows out of place: rows that were in place were copied",
    )


@gate("compact.moves_amortised", at=CHEAP)
def check_moves_amortised(*, moves: int, releases: int) -> None:
    """Over any run a row moves at most once for each row released: a release makes a hole, a move fills it."""
    require(
        moves <= releases,
        f"{moves} moves for {releases} releases; rows are being moved that no completion displaced",
    )


@gate("compact.right", at=FULL)
def check_compaction_right(
    *,
    before: Mapping[int, Mapping[str, object]],
    after: Mapping[int, Mapping[str, object]],
    moves: Sequence[tuple[int, int]],
) -> None:
    """Every survivor keeps all that is its own (id, tokens, blocks, slots, sampler state), in its new row.

    `before` and `after` map each occupied row to plain values copied at the two moments, by column name. A column
    that a move forgot shows here by its name.
    """
    went = dict(moves)
    expected = {went.get(row, row): (row, columns) for row, columns in before.items()}
    require(
        len(expected) == len(before), f"{len(before)} rows before, {len(expected)} rows after the moves {list(moves)}"
    )
    require(
        expected.keys() == after.keys(),
        f"rows {sorted(expected)} are to be occupied, rows {sorted(after)} are",
    )
    for row, (source, columns) in sorted(expected.items()):
        require(
            columns.keys() == after[row].keys(),
            f"row {source} -> {row} had columns {sorted(columns)}, has {sorted(after[row])}",
        )
        for name, value in columns.items():
            require(
                after[row][name] == value,
                f"row {source} -> {row}: {name} was {value!r}, is {after[row][name]!r}",
            )
