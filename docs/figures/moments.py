"""Draw the five moments of an answer and the latencies between them, from a `Timeline`.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from serve.timeline import Timeline
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LEFT, SCALE = 30, 112
TOKENS = (1.9, 2.3, 2.7, 4.3, 4.7)  # seconds; preempted between the third and the fourth


def timeline() -> Timeline:
    """An answer of five tokens that loses its row on the way."""
    line = Timeline("a", 40, submitted_s=0.0)
    line.start(1.2)
    for index, at_s in enumerate(TOKENS):
        if index == 3:
            line.start(3.6)  # its second row
        line.token(at_s)
    line.end(4.9, "length")
    return line


def draw() -> str:
    """Moments as ticks, spans as bars."""
    line = timeline()
    drawing = Drawing(632, 224, "The moments of one answer and the times between them")
    drawing.text(16, 24, "one answer, preempted once", "title")
    drawing.line([(LEFT, 70), (LEFT + 5 * SCALE, 70)])
    moments = {"submitted": 0.0, "started": line.started_s, "first token": line.first_token_s}
    moments |= {"last token": line.last_token_s, "ended": line.ended_s}
    for index, (name, at_s) in enumerate(moments.items()):
        x = LEFT + (at_s or 0.0) * SCALE
        high = 44 if name != "last token" else 56
        drawing.line([(x, high + 4), (x, 76)], width=2)
        drawing.text(x, high, name, "small" if index == 0 else "small end" if index == 3 else "small mid")
    for at_s in TOKENS:
        drawing.box(LEFT + at_s * SCALE - 3, 67, 6, 6, fill="currentColor")
    spans = (("queue", 0.0, line.queue_s, "A"), ("prefill", line.started_s, line.prefill_s, "C"))
    spans += (("decode", line.first_token_s, line.decode_s, "D"), ("time to first token", 0.0, line.ttft_s, "E"))
    spans += (("end to end", 0.0, line.e2e_s, "F"),)
    for index, (name, from_s, lasts_s, owner) in enumerate(spans):
        y = 92 + (0 if index < 3 else index - 2) * 30
        width = (lasts_s or 0.0) * SCALE
        drawing.box(LEFT + (from_s or 0.0) * SCALE, y, width - 2, 22, fill=hue(owner))
        drawing.text(LEFT + (from_s or 0.0) * SCALE + width / 2, y + 15, f"{name}, {lasts_s:.1f} s", "cell")
    drawing.text(
        16, 196, "It lost its row and got a second one at 3.6 s. No moment moves: the request was queued once.", "note"
    )
    drawing.text(
        16, 212, "The client feels 1.6 s between its third token and its fourth: one inter-token latency.", "note"
    )
    return drawing.svg()
