"""Draw what becomes of the frames that three viewers are offered: one reads at once, one slowly, one sleeps and wakes.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from serve.live import VIEWER_FRAMES, Viewer
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LEFT, TOP, CELL, LINE = 152, 48, 22, 58
FRAMES, WAKES = 24, 15
READS = {
    "reads at once": lambda tick: VIEWER_FRAMES,
    "reads one in three": lambda tick: int(tick % 3 == 2),
    f"sleeps until {WAKES}": lambda tick: VIEWER_FRAMES + 1 if tick >= WAKES else 0,
}  # what each takes after a frame was offered


async def offered() -> dict[str, list[tuple[bool, int, str]]]:
    """For each viewer and frame: whether it was kept, how many wait after the viewer has read, and what it was told."""
    told: dict[str, list[tuple[bool, int, str]]] = {name: [] for name in READS}
    for name, reads in READS.items():
        viewer = Viewer()
        stream = viewer.frames()
        for tick in range(FRAMES):
            skipped = viewer.skipped
            viewer.offer(b"%d" % tick)
            kept, notice = viewer.skipped == skipped, ""
            for _ in range(reads(tick)):
                if not viewer.waiting and not viewer.skipped:
                    break
                data = await anext(stream)
                notice = data.decode() if data.startswith(b"data:") else notice
            told[name].append((kept, viewer.waiting, notice.partition("data: ")[2].strip()))
    return told


def draw() -> str:
    """A line a viewer, a column a frame."""
    drawing = Drawing(LEFT + FRAMES * CELL + 20, TOP + len(READS) * LINE + 40, "Frames offered to three viewers")
    drawing.text(16, 22, f"{FRAMES} frames, offered to three viewers; a number is how many wait", "title")
    for line, (name, ticks) in enumerate(asyncio.run(offered()).items()):
        y = TOP + line * LINE
        drawing.text(LEFT - 10, y + 17, name, "label end")
        for tick, (kept, waiting, notice) in enumerate(ticks):
            x = LEFT + tick * CELL
            drawing.box(x, y, CELL - 2, 24, fill=hue("A" if kept else "B"))
            drawing.text(x + CELL / 2 - 1, y + 16, str(waiting), "cell")
            if notice:
                drawing.text(x, y + 40, f"is told {notice}", "small")
    foot = TOP + len(READS) * LINE + 16
    drawing.text(
        16, foot, f"blue: kept. red: skipped, for {VIEWER_FRAMES} wait already. Nobody waits for a viewer.", "note"
    )
    return drawing.svg()
