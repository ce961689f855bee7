"""Draw what share of a decode loop a recording covers, by workload, with rows that stay and rows that move.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from tests.bench import figures
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LEFT, LINE, SCALE = 212, 30, 3.0


def draw() -> str:
    """Two bars a workload."""
    found = figures.replay_coverage()
    drawing = Drawing(700, 46 + len(found) * LINE + 28, "Share of decode steps replayed, by workload")
    drawing.text(16, 22, "decode steps that a recording covers", "title")
    for index, workload in enumerate(found):
        y = 38 + index * LINE
        steps, free, kept = workload["decode_steps"], workload["free"]["replayed"], workload["persistent"]["replayed"]
        label = f"{workload['rows']} rows, {workload['requests']} requests, {workload['gens']}"
        drawing.text(LEFT - 8, y + 16, label, "label end")
        drawing.track(LEFT, y, 100 * SCALE, LINE - 8)
        drawing.box(LEFT, y, 100 * SCALE * free / steps, 10, fill=hue("B"))
        drawing.box(LEFT, y + 11, 100 * SCALE * kept / steps, 10, fill=hue("A"))
        said = f"{100 * free / steps:.0f} % → {100 * kept / steps:.0f} %, {workload['persistent']['moves']} moves"
        drawing.text(LEFT + 100 * SCALE + 8, y + 16, said, "label")
    drawing.text(LEFT, 38 + len(found) * LINE + 14, "red: rows stay where they are. blue: rows are compacted", "note")
    return drawing.svg()
