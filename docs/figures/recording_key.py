"""Draw what a recording freezes, from the key of a real plan: places that the next step writes into, and one value.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from fast.buckets import BucketSet
from fast.capture import LAUNCH_TENSORS, GraphKey
from fast.inputs import DecodeInputs
from tests.addressing import Paged
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LINE = 25
OWNER = {"slot_mapping": "the slot table, [4, 16]"}


def draw() -> str:
    """One line a tensor of the key: its shape and strides, the storage it is a window on, who writes there."""
    paged = Paged(4, 16, block_size=4)
    for row, length in enumerate((5, 2, 7)):
        paged.adopt(row, length)
    inputs = DecodeInputs(max_batch_size=4, sink_slot=paged.sink)
    buckets = BucketSet(max_batch_size=4, max_model_len=16, width_multiple=8)
    key = GraphKey.of(paged.plan((0, 1, 2), buckets=buckets, inputs=inputs))
    rows, width = key.shape
    drawing = Drawing(660, 96 + len(LAUNCH_TENSORS) * LINE + 34, "What a recording of one decode step freezes")
    drawing.text(16, 24, f"a recording of bucket {rows} x {width}: the argument objects of one call", "title")
    drawing.text(16, 52, "frozen as a place", "note")
    drawing.text(330, 52, "storage that the next step writes before it replays", "note")
    for index, (name, (_, shape, stride, dtype)) in enumerate(zip(LAUNCH_TENSORS, key.tensors, strict=True)):
        y = 62 + index * LINE
        drawing.box(16, y, 250, LINE - 5, fill=hue("A" if name != "slot_mapping" else "C"))
        drawing.text(141, y + 14, f"{name} {list(shape)}, stride {list(stride)}", "cell")
        drawing.arrow(272, y + 10, 322, y + 10)
        place = OWNER.get(name, f"the persistent inputs, {dtype.removeprefix('torch.')} [4]")
        drawing.text(330, y + 14, place, "label")
    y = 62 + len(LAUNCH_TENSORS) * LINE + 8
    drawing.text(16, y + 14, "frozen as a value: the tuple of rows; recorded on a warm batch it is ()", "note")
    drawing.text(16, y + 34, f"part of the key: the shape ({rows}, {width}), all addresses, shapes and strides", "note")
    return drawing.svg()
