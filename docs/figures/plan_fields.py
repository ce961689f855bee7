"""Draw a plan over two rows: the rectangle a step reads and the vectors beside it, from `plan_decode` itself.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from tests.addressing import Paged
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
CELL, VECTORS = 34, ("input_ids", "positions", "write_slots", "context_lens")


def draw() -> str:
    """The plan of the page: rows of five and two tokens, one more each."""
    paged = Paged(4, 16, block_size=4)
    for row, length in enumerate((5, 2)):
        paged.adopt(row, length)
    plan = paged.plan((0, 1), input_ids=[11, 12])
    drawing = Drawing(668, 186, "The fields of a plan over two rows")
    drawing.text(16, 24, "what the step reads: slots", "title")
    drawing.text(330, 24, "and one number a row", "title")
    for index, name in enumerate(VECTORS):
        drawing.text(330 + 40 + index * 84, 46, name, "small mid")
    for row, slots in enumerate(plan.slot_mapping.tolist()):
        y = 56 + row * CELL
        drawing.text(56, y + 19, f"row {row}", "label end")
        for column, slot in enumerate(slots):
            x = 64 + column * CELL
            real = column < plan.lengths[row]
            drawing.track(x, y, CELL - 3, CELL - 6)
            if real:
                own = slot == int(plan.write_slots[row])
                drawing.box(x, y, CELL - 3, CELL - 6, fill=hue("AB"[row]), edge=2.5 if own else 0)
            drawing.text(x + CELL / 2 - 1, y + 18, str(slot), "cell" if real else "ink")
        for index, name in enumerate(VECTORS):
            x = 330 + index * 84
            drawing.box(x, y, 80, CELL - 6, fill=hue("AB"[row]))
            drawing.text(x + 40, y + 18, str(int(getattr(plan, name)[row])), "cell")
    drawing.text(16, 148, "Outlined: the slot that this step writes. It is the last real entry of its row,", "note")
    drawing.text(16, 164, "and its column is the position. Pale: gathered, and masked by the length.", "note")
    return drawing.svg()
