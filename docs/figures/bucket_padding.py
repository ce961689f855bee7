"""Draw each decode step of a run as the rectangle it was padded to, and the part of it that is real.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from serve.trace_html import frames
from tests.pages import runs
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
PX, LINE, SHOWN = 1.5, 7, (2, 4, 6, 13, 18, 25)


def draw() -> str:
    """Six steps of the run that the page plays."""
    data = frames(runs.buckets())
    drawing = Drawing(660, 150, "Six decode steps as padded rectangles")
    for place, number in enumerate(SHOWN):
        step = next(s for s in data["steps"] if s["step"] == number)
        rows, width = step["bucket"]
        x, y = 16 + place * 106, 54
        drawing.text(x, 22, f"step {number}", "title")
        drawing.text(x, 39, f"bucket {rows} x {width}", "note")
        drawing.track(x, y, width * PX, rows * LINE * 2)
        real = 0
        for line, row in enumerate(step["decode_rows"]):
            real += step["stored"][row]
            length = step["stored"][row] * PX
            drawing.box(x, y + line * LINE * 2, length, LINE * 2 - 2, fill=hue(step["rows"][row]))
        drawing.box(x, y, width * PX, rows * LINE * 2, edge=1.5)
        drawing.text(x, 130, f"{100 * real / (rows * width):.0f} % real", "note")
    return drawing.svg()
