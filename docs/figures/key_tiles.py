"""Draw the tiles in which a query reads its keys: they begin at position 0, whatever the step computes.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from fast.kernels.attention import KEY_TILE
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LEFT, SCALE, POSITION = 190, 2.2, 150
STEPS = (("the whole prompt", 0, 161), ("a chunk, 100 to 160", 100, 161), ("a decode step", POSITION, POSITION + 1))


def draw() -> str:
    """One query at position 150, computed by three kinds of step; the same three tiles each time."""
    drawing = Drawing(LEFT + round(161 * SCALE) + 20, 208, "The key tiles of one query in three kinds of step")
    drawing.text(16, 24, f"the query at position {POSITION} reads keys 0 to {POSITION}, {KEY_TILE} at a time", "title")
    for line, (words, start, stop) in enumerate(STEPS):
        y = 40 + 44 * line
        drawing.text(LEFT - 10, y + 14, words, "label end")
        for at, begin in enumerate(range(0, POSITION + 1, KEY_TILE)):
            keys = min(KEY_TILE, POSITION + 1 - begin)
            x = LEFT + begin * SCALE
            drawing.box(x, y, keys * SCALE - 2, 20, fill=hue("ACF"[at]))
            drawing.text(x + keys * SCALE / 2, y + 14, f"tile {at}", "cell")
        drawing.line([(LEFT + start * SCALE, y + 27), (LEFT + stop * SCALE, y + 27)], width=4)
    drawing.text(16, 184, "The dark line is what the step computes. It moves no edge of a tile,", "note")
    drawing.text(16, 200, "so no sum changes its order.", "note")
    return drawing.svg()
