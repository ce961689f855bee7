"""Draw one input buffer after a step of five rows and after the step of two that follows it, padded to four.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from fast.inputs import DecodeInputs
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LEFT, CELL, ROWS, SINK = 150, 52, 8, 64
FIVE, TWO = [10, 20, 30, 40, 50], [33, 44]


def line(drawing: Drawing, y: float, values: list[int], *, words: str, live: int, stale: int = 0) -> None:
    """The buffer's cells: this step's rows coloured, what an earlier step left outlined, neutral ones pale."""
    drawing.text(LEFT - 10, y + 19, words, "label end")
    for at, value in enumerate(values):
        x = LEFT + at * CELL
        drawing.track(x, y, CELL - 4, 28)
        if at < live:
            drawing.box(x, y, CELL - 4, 28, fill=hue("A"))
        elif at < stale:
            drawing.box(x, y, CELL - 4, 28, edge=2)
        drawing.text(x + CELL / 2 - 2, y + 19, str(value), "cell" if at < live else "ink")


def draw() -> str:
    """The buffer of write slots, and the same without the line that makes its tail neutral."""
    inputs = DecodeInputs(max_batch_size=ROWS, sink_slot=SINK)
    whole = inputs.window(ROWS).write_slots
    inputs.write(input_ids=[0] * 5, positions=[0] * 5, write_slots=FIVE, context_lens=[1] * 5)
    five = whole.tolist()
    inputs.write(input_ids=[0] * 2, positions=[0] * 2, write_slots=TWO, context_lens=[1] * 2, pad_rows=2)
    two = whole.tolist()
    drawing = Drawing(LEFT + ROWS * CELL + 12, 214, "The buffer of write slots over two steps")
    drawing.text(16, 24, f"write slots, one buffer of {ROWS} rows; the sink is slot {SINK}", "title")
    line(drawing, 40, five, words="a step of 5 rows", live=5)
    line(drawing, 78, two, words="then 2, padded to 4", live=2)
    line(drawing, 136, TWO + five[2:], words="without its tail", live=2, stale=5)
    x = LEFT + 4 * CELL - 2
    drawing.line([(x, 72), (x, 112)], "line", 2)
    drawing.line([(x, 130), (x, 170)], "line", 2)
    drawing.text(16, 190, "Left of the bar is what a replay over four rows reads. In the third line its padded", "note")
    drawing.text(
        16, 206, "rows write to slots 30 and 40: two requests have left them, others may have them now.", "note"
    )
    return drawing.svg()
