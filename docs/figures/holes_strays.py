"""Draw the rows of one batch before and after compaction: its holes, its strays, and the moves that the planner names.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from fast.compact import holes, plan_compaction, strays
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LEFT, CELL, PLACES = 84, 58, 8
ROWS = {1: "A", 2: "B", 5: "C", 6: "D"}


def panel(drawing: Drawing, top: int, title: str, rows: dict[int, str]) -> None:
    """One line of rows; behind the last that a prefix of so many rows would have, a mark."""
    drawing.text(16, top, title, "title")
    for row in range(PLACES):
        x = LEFT + row * CELL
        drawing.track(x, top + 12, CELL - 4, 30)
        if row in rows:
            drawing.box(x, top + 12, CELL - 4, 30, fill=hue(rows[row]))
            drawing.text(x + CELL / 2 - 2, top + 31, rows[row], "cell")
    x = LEFT + len(rows) * CELL - 2
    drawing.line([(x, top + 6), (x, top + 48)], width=2, dash="4 3")


def draw() -> str:
    """The batch with its holes and strays named, the moves, and the batch after them."""
    moves = plan_compaction(sorted(ROWS))
    after = dict(ROWS)
    for move in moves:
        after[move.dst] = after.pop(move.src)
    drawing = Drawing(LEFT + PLACES * CELL + 40, 264, "Holes, strays and the moves between them")
    panel(drawing, 24, f"{len(ROWS)} rows are occupied, and not the first {len(ROWS)}", ROWS)
    drawing.text(LEFT - 8, 55, "rows", "label end")
    for name, found in (("hole", holes(sorted(ROWS))), ("stray", strays(sorted(ROWS)))):
        for row in found:
            drawing.text(LEFT + row * CELL + CELL / 2 - 2, 82, f"{name} {row}", "ink")
    for index, move in enumerate(moves):
        y = 108 + index * 22
        start, end = (LEFT + row * CELL + CELL / 2 - 2 for row in (move.src, move.dst))
        drawing.line([(start, 88), (start, y), (end, y)])
        drawing.arrow(end, y, end, 88)
        drawing.text(end + 12, y - 5, move.render(), "small")
    panel(drawing, 164, f"after {len(moves)} moves they are", after)
    drawing.text(16, 238, "left of the dashed line: as many rows as are occupied, all that a window can hold", "note")
    drawing.text(16, 256, "as many holes stand left of it as strays stand right of it; no other row moves", "note")
    return drawing.svg()
