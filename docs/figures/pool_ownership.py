"""Draw who owns which block over time, from the trace of a run in which three requests do not fit together.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from tests.pages import runs
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LEFT, TOP, CELL = 84, 48, 15


def draw() -> str:
    """One column a step, one line a block; a mark where a request loses its blocks."""
    steps = runs.steps(runs.scheduler())
    blocks = 8
    drawing = Drawing(
        LEFT + len(steps) * CELL + 20, TOP + blocks * CELL + 62, "Who owns each block of the pool, by step"
    )
    drawing.text(16, 22, "one column is one step, one line is one block of the pool", "note")
    for block in range(blocks):
        drawing.text(LEFT - 8, TOP + block * CELL + 11, f"block {block}", "label end")
        drawing.track(LEFT, TOP + block * CELL, len(steps) * CELL, CELL - 2)
    for column, step in enumerate(steps):
        x = LEFT + column * CELL
        for row, held in step.blocks.items():
            for block in held:
                drawing.box(x, TOP + block * CELL, CELL - 1, CELL - 2, fill=hue(step.rows[row]))
        if step.preempted:
            drawing.line([(x, TOP - 8), (x, TOP + blocks * CELL + 2)], dash="3 2")
            drawing.text(x, TOP - 12, f"{', '.join(step.preempted)} out", "small mid")
    for index, name in enumerate("ABCD"):
        drawing.box(LEFT + index * 92, TOP + blocks * CELL + 14, 12, 12, fill=hue(name))
        drawing.text(LEFT + 18 + index * 92, TOP + blocks * CELL + 24, f"request {name}", "label")
    last = steps[-1].step
    drawing.text(LEFT, TOP + blocks * CELL + 48, f"{last} steps; a dashed line is a preemption, pale is free", "note")
    return drawing.svg()
