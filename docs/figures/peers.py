"""Draw tokens a second by batch of each engine, from the table of the measurements page.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

import math
from pathlib import Path

from tests.pages.drawing import HUES, Drawing
from tests.pages.measured import number, table

TARGET = Path(__file__).with_suffix(".svg")
LEFT, TOP, WIDE, HIGH = 56, 44, 380, 300
LEAST, MOST = 20.0, 1280.0
MARKS = (20, 40, 80, 160, 320, 640, 1280)
WORDS = LEFT + WIDE + 14


def draw() -> str:
    """A line an arm, both axes in doublings; its name stands in the order of the last column."""
    heads, *arms = table("Decode, 64 tokens of context:")
    batches = [int(number(head)) for head in heads[1:]]
    span = math.log2(batches[-1])
    drawing = Drawing(720, TOP + HIGH + 54, "Tokens a second by rows, this engine and others")
    drawing.text(16, 22, "decoded tokens a second, by rows in the batch; both axes in doublings", "title")
    for mark in MARKS:
        drawing.line([(LEFT, height(mark)), (LEFT + WIDE, height(mark))], "faint", 1)
        drawing.text(LEFT - 8, height(mark) + 4, f"{mark}", "label end")
    for batch in batches:
        drawing.text(LEFT + WIDE * math.log2(batch) / span, TOP + HIGH + 18, f"{batch}", "ink")
    drawing.text(LEFT + WIDE / 2, TOP + HIGH + 40, "rows", "label mid")
    shown = sorted(range(len(arms)), key=lambda i: -number(arms[i][-1]))
    for place, index in enumerate(shown):
        name, *cells = arms[index]
        points = [
            (LEFT + WIDE * math.log2(batch) / span, height(number(cell)))
            for batch, cell in zip(batches, cells, strict=True)
        ]
        ours = name.startswith("nanoserve")
        colour = HUES[index % len(HUES)]
        drawing.line(points, width=2.5 if ours else 1.5, dash="" if ours else "5 3", stroke=colour)
        for x, y in points:
            drawing.box(x - 2.5, y - 2.5, 5, 5, fill=colour)
        y = TOP + 12 + place * 36
        drawing.box(WORDS, y - 9, 12, 12, fill=colour)
        drawing.text(WORDS + 18, y + 1, name, "label")
        drawing.text(WORDS + 18, y + 16, f"{number(cells[0]):,.0f} at 1 row, {number(cells[-1]):,.0f} at 32", "small")
    return drawing.svg()


def height(tokens_per_s: float) -> float:
    """Where a rate stands. Raises ValueError when the axis does not hold it."""
    if not LEAST <= tokens_per_s <= MOST:
        raise ValueError(f"{tokens_per_s:g} tokens/s is outside of the axis, {LEAST:g} to {MOST:g}")
    return TOP + HIGH * (1 - math.log(tokens_per_s / LEAST) / math.log(MOST / LEAST))
