"""Draw the rows of one workload twice: left where they are, and compacted; from the traces of both runs.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from serve.trace_read import TraceStep
from tests.pages import runs
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LEFT, CELL, ROWS = 84, 20, 4


def panel(drawing: Drawing, steps: list[TraceStep], top: int, title: str) -> None:
    """One run: a line a row, a column a step; under it, whether the decode step was replayed."""
    decodes = [step for step in steps if step.decode_rows]
    replayed = sum(step.replayed for step in decodes)
    moves = sum(len(step.moves) for step in steps)
    drawing.text(16, top, title, "title")
    drawing.text(16, top + 17, f"{len(decodes)} decode steps, {replayed} replayed, {moves} moves", "note")
    grid = top + 28
    for row in range(ROWS):
        drawing.text(LEFT - 8, grid + row * CELL + 13, f"row {row}", "label end")
        drawing.track(LEFT, grid + row * CELL, len(steps) * CELL, CELL - 2)
    for column, step in enumerate(steps):
        x = LEFT + column * CELL
        for row, name in step.rows.items():
            drawing.box(x, grid + row * CELL, CELL - 1, CELL - 2, fill=hue(name))
            drawing.text(x + CELL / 2 - 0.5, grid + row * CELL + 13, name, "cell")
        for src, dst in step.moves:
            drawing.arrow(x, grid + src * CELL + 8, x, grid + dst * CELL + 12)
        if step.decode_rows:
            mark = "●" if step.replayed else "○"
            drawing.text(x + CELL / 2 - 0.5, grid + ROWS * CELL + 13, mark, "ink")


def draw() -> str:
    """Both runs, one below the other."""
    free, kept = runs.steps(runs.free()), runs.steps(runs.compact())
    width = LEFT + max(len(free), len(kept)) * CELL + 20
    drawing = Drawing(width, 330, "The same eight requests with rows that stay and with rows that are compacted")
    panel(drawing, free, 28, "rows stay where they are")
    panel(drawing, kept, 176, "rows are compacted")
    drawing.text(LEFT, 318, "● replayed from a recording   ○ ran eagerly   ↑ a move", "note")
    return drawing.svg()
