"""Keeping the running rows a prefix: which row a survivor moves to, and what that costs.

A recording reads the window `slots[:n]`, which begins at row 0, so it can only replay a step whose rows are 0..n-1. A
request that ends leaves a hole below a survivor. Moving the survivor down is a relabel: its block table changes
hands by reference, its addressing is one row copy, its K/V stays where it is. This module plans moves and knows
no tensor; `on_move` belongs to whoever owns the tensors. It runs between steps only, because the row it copies
into is storage that a recording reads.

Gates: gates.compact. Proof: tests/test_compact.py. Story: compact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from gates.compact import check_moves_minimal

MODES = ("compact", "free", "gather")


@dataclass(frozen=True, slots=True)
class RowMove:
    """One relabel: the sequence in row `src` goes to row `dst`, which is empty."""

    src: int
    dst: int

    def render(self) -> str:
        """`row 5 -> 2`."""
        return f"row {self.src} -> {self.dst}"


def is_compact(rows: Sequence[int]) -> bool:
    """True when `rows` is exactly 0, 1, .. n-1, in this order: line i of a window is row i. Nothing is compact."""
    return tuple(rows) == tuple(range(len(rows)))


def holes(rows: Collection[int]) -> list[int]:
    """Empty rows below n, ascending, where n rows are occupied."""
    occupied = set(rows)
    return [row for row in range(len(occupied)) if row not in occupied]


def strays(rows: Collection[int]) -> list[int]:
    """Occupied rows at or above n, ascending. There are always exactly as many as there are holes."""
    occupied = set(rows)
    return sorted(row for row in occupied if row >= len(occupied))


def plan_compaction(rows: Collection[int]) -> tuple[RowMove, ...]:
    """The fewest moves that make the occupied `rows` a prefix: lowest stray into lowest hole, and so on.

    Strays and holes are equally many and disjoint, so no move reads a row that another has written.
    """
    return tuple(RowMove(src, dst) for src, dst in zip(strays(rows), holes(rows), strict=True))


def moves_needed(rows: Collection[int]) -> int:
    """How many moves a compaction of `rows` takes."""
    return len(strays(rows))


def move_cells(moves: Sequence[RowMove], lengths: Mapping[int, int] | Sequence[int]) -> int:
    """Cells of addressing that `moves` copy, where `lengths[row]` is the tokens of a row before them."""
    return sum(lengths[move.src] for move in moves)


class RowCompactor:
    """When to move rows, and three counts of it: looked (`calls`), had work (`compactions`), moved (`moves`).

    Modes: `compact` moves strays into holes, so that rows are always a prefix. `free` leaves rows where they are,
    and a batch with a hole reads a fresh copy that no recording can hold. `gather` leaves them too, over a slot
    table that copies every step's rows into one fixed buffer: no moves, and rows * width cells a step instead.

    Raises:
        ValueError: `mode` is none of these.
    """

    def __init__(self, mode: str = "compact", on_move: Callable[[RowMove], None] | None = None) -> None:
        if mode not in MODES:
            raise ValueError(f"mode: {mode!r} is not one of {', '.join(MODES)}")
        self.mode = mode
        self.on_move = on_move
        self.calls = self.compactions = self.moves = 0

    def compact(self, rows: Sequence[int]) -> tuple[RowMove, ...]:
        """Make the occupied `rows` a prefix by calling `on_move` for each move; returns the moves made.

        A batch that is a prefix already costs one tuple comparison, so the price follows completions, not steps.
        """
        self.calls += 1
        if self.mode != "compact" or is_compact(rows):
            return ()
        moves = plan_compaction(rows)
        check_moves_minimal(rows=rows, moves=[(move.src, move.dst) for move in moves])
        for move in moves:
            if self.on_move is not None:
                self.on_move(move)
        self.compactions += bool(moves)
        self.moves += len(moves)
        return moves

    def can_replay(self, rows: Sequence[int]) -> bool:
        """True when a step over `rows` reads at an address that a recording can hold."""
        return self.mode == "gather" or is_compact(rows)

    def render(self) -> str:
        """`47 calls, 8 compactions, 8 moves`: most steps look and find nothing to do."""
        return f"{self.calls} calls, {self.compactions} compactions, {self.moves} moves"
