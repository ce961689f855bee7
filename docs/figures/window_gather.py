"""Draw the same rectangle read as a window and as a copy, with what torch says of both.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from tests.addressing import Paged
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LEFT, CELL, ROWS, WIDTH, READ = 62, 22, 4, 10, 6


def panel(drawing: Drawing, rows: tuple[int, ...], left: int, paged: Paged) -> None:
    """The table with the rows that are read, and the facts of the tensor that comes back."""
    mapping = paged.slots.rectangle(rows, READ)
    window = paged.slots.is_window(mapping)
    drawing.text(left, 24, f"rows {rows}", "title")
    for row in range(ROWS):
        y = 38 + row * CELL
        drawing.text(left + 46, y + 14, f"row {row}", "label end")
        for column in range(WIDTH):
            drawing.track(left + 54 + column * CELL, y, CELL - 2, CELL - 2)
            if row in rows and column < READ:
                fill = hue("ABCD"[row])
                drawing.box(left + 54 + column * CELL, y, CELL - 2, CELL - 2, fill=fill)
    if window:
        drawing.box(left + 51, 35, READ * CELL + 3, len(rows) * CELL + 3, edge=2)
    same = "the table's" if mapping.data_ptr() == paged.slots.address else "its own"
    facts = [
        "a window: no copy" if window else f"a gather: {mapping.numel()} cells copied",
        f"address: {same}",
        f"row stride: {mapping.stride(0)} of {paged.slots.slots.stride(0)}",
    ]
    for index, fact in enumerate(facts):
        drawing.text(left, 146 + index * 18, fact, "note")


def draw() -> str:
    """Rows 0 and 1, then rows 0 and 2."""
    paged = Paged(ROWS, WIDTH, block_size=4)
    for row in range(ROWS):
        paged.adopt(row, READ)
    paged.slots.sync(paged.tables, range(ROWS))
    drawing = Drawing(640, 196, "The same read as a window on the table and as a gathered copy")
    panel(drawing, (0, 1), 16, paged)
    panel(drawing, (0, 2), 336, paged)
    return drawing.svg()
