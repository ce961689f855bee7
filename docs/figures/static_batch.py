"""Draw a static batch: which of its decode queries were for somebody, from a real run.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

import torch

from reference.batch import BatchRun, run_batch
from reference.model import LlamaModel
from tests.harness import TINY, tiny_weights
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LEFT, CELL = 108, 30
PROMPTS = [(3, 1, 4), (1, 5, 9, 2, 6), (5, 3), (5, 8, 9, 7)]


def the_run() -> BatchRun:
    """The batch of the page, twelve tokens at most; row 2 ends early by itself."""
    model = LlamaModel(TINY, tiny_weights(), dtype=torch.float64)
    return run_batch(model, PROMPTS, max_tokens=12, block_size=4)


def draw() -> str:
    """A column a decode step, a line a row; pale with a number is a query that nobody reads."""
    run = the_run()
    drawing = Drawing(LEFT + run.decode_steps * CELL + 16, 206, "The decode queries of a static batch")
    drawing.text(16, 24, f"{run.decode_steps} decode steps over {len(PROMPTS)} rows", "title")
    for row, tokens in enumerate(run.token_ids):
        y = 44 + row * CELL
        drawing.text(LEFT - 8, y + 18, f"{len(PROMPTS[row])} + {len(tokens)} tokens", "label end")
        for step in range(run.decode_steps):
            x = LEFT + step * CELL
            drawing.track(x, y, CELL - 3, CELL - 5)
            if step < len(tokens) - 1:
                drawing.box(x, y, CELL - 3, CELL - 5, fill=hue("ABCD"[row]))
            else:
                drawing.line([(x + 7, y + 7), (x + CELL - 10, y + CELL - 12)], width=1.5)
    y = 44 + len(PROMPTS) * CELL
    drawing.text(16, y + 16, f"Crossed out: {run.wasted_queries} queries of a row that had already ended.", "note")
    drawing.text(16, y + 34, "All blocks come back when the last row ends.", "note")
    return drawing.svg()
