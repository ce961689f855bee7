"""Draw what one decode step writes into the slot table, before and after, from a real table.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from fast.slots import SlotTable
from tests.addressing import Paged
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LEFT, CELL, ROWS, WIDTH = 62, 30, 3, 12
LENGTHS = (6, 2, 4)


def panel(drawing: Drawing, table: SlotTable, top: int, title: str, new: set[tuple[int, int]]) -> None:
    """The table's cells; live ones coloured, this step's outlined."""
    drawing.text(16, top, title, "title")
    for row in range(ROWS):
        y = top + 10 + row * (CELL - 4)
        drawing.text(LEFT - 8, y + 17, f"row {row}", "label end")
        for column in range(WIDTH):
            live = column < table.length(row)
            x = LEFT + column * CELL
            drawing.track(x, y, CELL - 2, CELL - 6)
            if live:
                edge = 2.5 if (row, column) in new else 0
                drawing.box(x, y, CELL - 2, CELL - 6, fill=hue("ABC"[row]), edge=edge)
            drawing.text(x + CELL / 2 - 1, y + 16, str(int(table.slots[row, column])), "cell" if live else "ink")


def draw() -> str:
    """Three rows of lengths 6, 2 and 4, one step of each."""
    paged = Paged(ROWS, WIDTH, block_size=4)
    for row, length in enumerate(LENGTHS):
        paged.adopt(row, length)
        paged.reserve(row, length + 1)
    paged.slots.sync(paged.tables, range(ROWS))
    drawing = Drawing(480, 254, "The slot table before and after one decode step")
    panel(drawing, paged.slots, 24, "before the step", set())
    new = {(row, paged.slots.length(row)) for row in range(ROWS)}
    paged.slots.append(range(ROWS), [paged.tables[row].append() for row in range(ROWS)])
    panel(drawing, paged.slots, 136, f"after it: {len(new)} cells written, one a row", new)
    drawing.text(16, 244, "A cell holds the slot of one token. Pale cells are past a row's length.", "note")
    return drawing.svg()
