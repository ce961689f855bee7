"""Draw what a request meets on its way into the server, in order, with the limit and the status of each.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from serve.limits import ServerLimits
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LIMITS = ServerLimits()
STAGES = (
    ("the door", (("api_keys", "401"),)),
    ("the body", (("max_body_bytes", "413"), ("body_timeout_s", "408"))),
    ("a place", (("max_open", "429, 400"),)),
    ("the engine", (("length, pool", "400"),)),
    ("the answer", (("request_timeout_s", "504"), ("stuck_after_s", "500"))),
)


def draw() -> str:
    """Five stages from left to right; what is refused has cost what stands to its left."""
    drawing = Drawing(668, 196, "The limits that a request meets, in order")
    drawing.text(16, 24, "what a request meets, and what a refusal says", "title")
    for index, (stage, limits) in enumerate(STAGES):
        x = 16 + index * 131
        drawing.box(x, 40, 112, 30, fill=hue("A" if index < 3 else "C"))
        drawing.text(x + 56, 59, stage, "cell")
        if index:
            drawing.arrow(x - 18, 55, x - 2, 55)
        for line, (name, status) in enumerate(limits):
            y = 92 + line * 38
            assert hasattr(LIMITS, name) or "," in name
            drawing.text(x + 56, y, name, "small mid")
            drawing.text(x + 56, y + 15, status, "label mid")
    drawing.text(16, 168, "Blue: nothing has been tokenized.", "note")
    drawing.text(16, 184, "A place is held before that work, and the prompt's length is known after it.", "note")
    return drawing.svg()
