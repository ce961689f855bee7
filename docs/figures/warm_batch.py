"""Draw a padded step and a warm one side by side, from the plans themselves: the second is all padding.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from fast.buckets import BucketSet
from fast.inputs import DecodeInputs
from fast.plan import DecodePlan, plan_decode
from fast.warmup import warmup_batch
from tests.addressing import Paged
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
ROWS, CELL = 4, 24
COLUMNS = ("input_ids", "positions", "write_slots", "context_lens")


def panel(drawing: Drawing, plan: DecodePlan, left: int, title: str) -> None:
    """The four vectors of a plan, a line a row; padded rows pale."""
    drawing.text(left, 24, title, "title")
    drawing.text(left, 42, f"rows {plan.rows}, {plan.pad_rows} padded", "note")
    for index, name in enumerate(COLUMNS):
        drawing.text(left + 85 + index * 64, 64, name.replace("_", " "), "small mid")
    for line in range(ROWS):
        y = 72 + line * CELL
        real = line < len(plan.rows)
        drawing.text(left, y + 15, f"row {line}" if real else "padding", "label")
        for index, name in enumerate(COLUMNS):
            x = left + 56 + index * 64
            drawing.track(x, y, 58, CELL - 4)
            if real:
                drawing.box(x, y, 58, CELL - 4, fill=hue("ABCD"[line]))
            value = int(getattr(plan, name)[line])
            drawing.text(x + 29, y + 15, str(value), "cell" if real else "ink")


def draw() -> str:
    """Three rows padded to four; then none padded to four, through the same buffers."""
    paged = Paged(ROWS, 16, block_size=4)
    for row, length in enumerate((5, 2, 7)):
        paged.adopt(row, length)
        paged.reserve(row, length + 1)
    inputs = DecodeInputs(max_batch_size=ROWS, sink_slot=paged.sink)
    buckets = BucketSet(max_batch_size=ROWS, max_model_len=16, width_multiple=8)
    plan = plan_decode(
        tables=paged.tables,
        slot_table=paged.slots,
        rows=(0, 1, 2),
        input_ids=(11, 12, 13),
        sink_slot=paged.sink,
        buckets=buckets,
        inputs=inputs,
    )
    drawing = Drawing(668, 208, "A padded decode step and a warm one")
    panel(drawing, plan, 16, "a real step, padded to 4 rows")
    panel(drawing, warmup_batch((ROWS, 8), slot_table=paged.slots, inputs=inputs), 350, "a warm step of the same shape")
    drawing.text(16, 194, f"slot {paged.sink} is the sink; a context length of 0 reads nothing", "note")
    return drawing.svg()
