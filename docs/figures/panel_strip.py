"""Draw what one task of a linear layer is: a panel of weights, a strip of rows, and the tile where they meet.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fast.kernels.linear import PANEL, STRIP, pack, to_strips
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
INPUTS, CELL = 10, 18


def draw() -> str:
    """Both operands as the kernel reads them, and the sums that stay in registers."""
    packed = pack(np.zeros((PANEL, INPUTS), np.float32), half=True)
    strip = to_strips(np.zeros((STRIP, INPUTS), np.float32)).reshape(INPUTS, STRIP)
    drawing = Drawing(668, 330, "A panel, a strip, and their tile")
    drawing.text(16, 24, f"a panel of weights {list(packed.shape[1:])}", "title")
    for m in range(packed.shape[1]):
        drawing.box(40, 36 + m * CELL, packed.shape[2] * 9, CELL - 3, fill=hue("A"), faint=m != 4)
    drawing.text(388, 24, f"a strip of inputs {list(strip.shape)}", "title")
    for m in range(strip.shape[0]):
        drawing.box(410, 36 + m * CELL, strip.shape[1] * 9, CELL - 3, fill=hue("C"), faint=m != 4)
    drawing.arrow(30, 38, 30, 36 + INPUTS * CELL - 6)
    drawing.arrow(400, 38, 400, 36 + INPUTS * CELL - 6)
    y = 36 + INPUTS * CELL + 22
    drawing.text(16, y, "the tile: a running sum for each row and output, in registers", "title")
    for half in range(2):
        drawing.box(40 + half * PANEL * 4.5, y + 12, PANEL * 4.5 - 3, 40, fill=hue("D"))
        words = f"{STRIP} x {PANEL // 2} sums"
        drawing.text(40 + (half + 0.5) * PANEL * 4.5, y + 36, words, "cell")
    drawing.text(
        16,
        y + 74,
        "Input by input, downwards, each sum gets one fused multiply-add: a weight times a row's input.",
        "note",
    )
    return drawing.svg()
