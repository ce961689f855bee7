"""Draw a compiled layer: what the compiler sees, and the two lines that touch the pool between its pieces.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from fast.attention import decode_attention
from fast.cache import BatchedPagedKVCache
from fast.model import attention_inputs, layer_output
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")


def box(drawing: Drawing, x: float, y: float, width: float, words: list[str], *, compiled: bool) -> None:
    """A filled box for a compiled piece, an outlined one for a line that is run as it is written."""
    drawing.box(x, y, width, 52, fill=hue("A") if compiled else "none", edge=0 if compiled else 1.5)
    for index, line in enumerate(words):
        drawing.text(x + width / 2, y + 22 + index * 18, line, "cell" if compiled else "ink")


def draw() -> str:
    """One layer from left to right, the pool below it."""
    drawing = Drawing(668, 236, "A layer of compiled pieces around the pool")
    drawing.text(16, 24, "one layer of a decode step; blue is compiled", "title")
    box(drawing, 16, 44, 150, [attention_inputs.__name__, "norm, q k v, rotation"], compiled=True)
    box(drawing, 196, 44, 110, [f"cache.{BatchedPagedKVCache.write.__name__}", "in place"], compiled=False)
    box(drawing, 336, 44, 140, [decode_attention.__name__, "by slot"], compiled=False)
    box(drawing, 506, 44, 146, [layer_output.__name__, "output, feed-forward"], compiled=True)
    for x in (166, 306, 476):
        drawing.arrow(x, 70, x + 29, 70)
    drawing.track(196, 144, 280, 44)
    drawing.text(336, 171, "the pool, mutated outside every compiled piece", "ink")
    drawing.arrow(251, 97, 251, 142)
    drawing.arrow(406, 143, 406, 98)
    drawing.text(
        16,
        222,
        "A compiler that saw the write and the read in one function would copy the pool to be sure of their order.",
        "note",
    )
    return drawing.svg()
