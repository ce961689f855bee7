"""Draw the tokens of each step of a run, by request: rows that decode first, then what prompts share of the budget.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from tests.pages import runs
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LEFT, COLUMN, TOKEN, BUDGET = 70, 38, 15, 10


def draw() -> str:
    """A column a step, a cell a token."""
    steps = runs.steps(runs.chunk())
    base = 46 + BUDGET * TOKEN
    drawing = Drawing(LEFT + len(steps) * COLUMN + 20, base + 62, "Tokens computed in each step, by request")
    drawing.text(16, 22, "tokens computed in each step, a cell each; the line is the budget of ten", "title")
    for column, step in enumerate(steps):
        x = LEFT + column * COLUMN
        tokens = [step.rows[row] for row in step.decode_rows]
        tokens += [step.rows[row] for row, _, count in step.chunks for _ in range(count)]
        for place, name in enumerate(tokens):
            y = base - (place + 1) * TOKEN
            drawing.box(x, y, COLUMN - 6, TOKEN - 2, fill=hue(name))
            drawing.text(x + (COLUMN - 6) / 2, y + 10.5, name, "cell")
        drawing.text(x + (COLUMN - 6) / 2, base + 15, str(step.step), "ink")
        for name in (name for name, token, _ in step.events if token is not None and name in "LS"):
            first = not any(name == n for s in steps[:column] for n, _, _ in s.events)
            if first:
                drawing.text(x + (COLUMN - 6) / 2, base + 32, f"{name}'s first", "small mid")
    drawing.text(16, base + 15, "step", "label")
    drawing.line([(LEFT - 6, base - BUDGET * TOKEN), (LEFT + len(steps) * COLUMN, base - BUDGET * TOKEN)], dash="4 3")
    drawing.text(16, base + 54, "A and B decode. L is a prompt of 29 tokens, S one of 3, a step later.", "note")
    return drawing.svg()
