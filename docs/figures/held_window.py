"""Draw where an append lands, seen from a window that was taken before it: outside a long row, inside a short one.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from tests.addressing import Paged
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LEFT, CELL, WIDTH = 62, 34, 9
LENGTHS = (5, 2)


def draw() -> str:
    """A window over rows of 5 and 2 tokens, and one more token a row."""
    paged = Paged(2, WIDTH, block_size=4)
    for row, length in enumerate(LENGTHS):
        paged.adopt(row, length)
        paged.reserve(row, length + 1)
    paged.slots.sync(paged.tables, (0, 1))
    width = max(LENGTHS)
    held, lens = paged.slots.read((0, 1), width)
    before = held.clone()
    paged.slots.append((0, 1), [paged.tables[row].append() for row in (0, 1)])
    changed = {(row, column) for row, column in (held != before).nonzero().tolist()}
    drawing = Drawing(530, 172, "A held window and the append that follows it")
    drawing.text(16, 24, f"a window of width {width} is held, then each row gets one token", "title")
    for row, length in enumerate(LENGTHS):
        y = 44 + row * (CELL - 2)
        drawing.text(LEFT - 8, y + 20, f"row {row}", "label end")
        for column in range(WIDTH):
            x = LEFT + column * CELL
            drawing.track(x, y, CELL - 3, CELL - 6)
            if column < length:
                drawing.box(x, y, CELL - 3, CELL - 6, fill=hue("AB"[row]), faint=True)
            if column == length:
                drawing.box(x, y, CELL - 3, CELL - 6, fill=hue("AB"[row]), edge=2.5)
                drawing.text(x + CELL / 2 - 1.5, y + 18, "new", "cell")
    drawing.box(LEFT - 4, 40, width * CELL + 5, 2 * (CELL - 2) + 4, edge=2)
    inside = ", ".join(f"row {row} column {column}" for row, column in sorted(changed))
    drawing.text(16, 132, f"cells of the held window that changed: {inside}", "note")
    drawing.text(16, 152, f"its context_lens, a copy, still say {tuple(lens.tolist())}", "note")
    return drawing.svg()
