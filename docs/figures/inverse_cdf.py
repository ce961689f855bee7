"""Draw how a number between 0 and 1 becomes a token: mass in id order, what top_k cuts, where the draws fall.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

import torch

from reference.request import SamplingParams
from reference.sampling import draw_token, keep, probabilities, uniform
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LEFT, WIDTH, HEIGHT = 16, 600, 30
SCORES = (1.0, 2.2, 0.1, 1.7, 0.4, 2.0)
SEED, POSITIONS = 7, (0, 1, 2)


def bar(drawing: Drawing, y: float, mass: list[float], whole: float) -> None:
    """One cell a token that has any mass, as wide as it."""
    x = float(LEFT)
    for token, share in enumerate(mass):
        width = WIDTH * share / whole
        if share:
            drawing.box(x, y, width - 2, HEIGHT, fill=hue("ABCDEF"[token]))
            drawing.text(x + width / 2, y + 20, f"id {token}", "cell")
        x += width


def draw() -> str:
    """Six tokens, the three best of them, and the draws of one seed at three positions."""
    mass = probabilities(torch.tensor(SCORES, dtype=torch.float64), 1.0)
    kept = keep(mass, SamplingParams(top_k=4))
    drawing = Drawing(LEFT + WIDTH + 16, 226, "From scores to a token, by the inverse of a running sum")
    drawing.text(LEFT, 24, "probabilities of six tokens, in the order of their ids", "title")
    bar(drawing, 36, mass.tolist(), float(mass.sum()))
    drawing.text(LEFT, 96, "what top_k = 4 keeps; the draw is scaled to it", "title")
    bar(drawing, 108, kept.tolist(), float(kept.sum()))
    for position in POSITIONS:
        u = uniform(SEED, position)
        x = LEFT + WIDTH * u
        low = 162 + 17 * position
        drawing.arrow(x, low - 8, x, 142)
        told = f"position {position}: {u:.3f} is id {draw_token(kept, u)}"
        right = u > 0.5
        drawing.text(x - 6 if right else x + 6, low + 2, told, "small end" if right else "small")
    return drawing.svg()
