"""Draw the two ways to pay for recordings in one unit: seconds of start-up, and seconds of one client's latency.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from tests.pages.drawing import Drawing, hue
from tests.pages.made import serving_list

TARGET = Path(__file__).with_suffix(".svg")
LEFT, LINE = 262, 26


def draw() -> str:
    """Bars, longest first, from the counts of the real lists and runs."""
    found = serving_list()
    bars = [(f"warm {name}, {found['shapes'][name]} shapes", s, "A") for name, s in found["warm_seconds"].items()]
    bars += [(f"lazy, {n:,} tokens", run["stall_seconds"], "B") for n, run in reversed(found["lazy"].items())]
    longest = max(seconds for _, seconds, _ in bars)
    drawing = Drawing(720, 40 + len(bars) * LINE + 30, "Seconds of start-up against seconds of a client's latency")
    drawing.text(16, 22, "256 rows, 8,192 tokens, width multiple 128, 50 ms a recording", "title")
    for index, (label, seconds, name) in enumerate(bars):
        y = 38 + index * LINE
        drawing.text(LEFT - 8, y + 14, label, "label end")
        drawing.box(LEFT, y, max(1.5, seconds / longest * 380), LINE - 8, fill=hue(name))
        drawing.text(LEFT + seconds / longest * 380 + 6, y + 14, f"{seconds:.2f} s", "label")
    drawing.text(LEFT, 38 + len(bars) * LINE + 14, "blue: once, at start-up. red: in front of each such client", "note")
    return drawing.svg()
