"""Draw how three rows' keys are cut for a GPU's decode, with one program a row and with three: the cuts do not move.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.pages.drawing import Drawing, hue
from tests.pages.regions import find

TARGET = Path(__file__).with_suffix(".svg")
LEFT, LINE, SCALE = 96, 30, 0.52
LENGTHS = (1000, 180, 600)


def constant(name: str) -> int:
    """A number of the kernels' source, which cannot be imported where there is no Triton."""
    node = find("fast/kernels/gpu/attend.py", name)
    assert isinstance(node, ast.Assign)
    return int(ast.literal_eval(node.value))


def panel(drawing: Drawing, top: int, *, programs: int) -> None:
    """Each row's splits, coloured by the program that takes them: every so manyth, as the kernel's loop has it."""
    split, tile = constant("SPLIT_TOKENS"), constant("KEY_TILE")
    words = "one program a row takes all of its splits" if programs == 1 else f"{programs} programs a row share them"
    drawing.text(16, top, words, "title")
    for row, length in enumerate(LENGTHS):
        y = top + 12 + row * LINE
        drawing.text(LEFT - 8, y + 16, f"row {row}", "label end")
        for index, begin in enumerate(range(0, length, split)):
            end = min(begin + split, length)
            x, wide = LEFT + begin * SCALE, (end - begin) * SCALE
            drawing.box(x, y, wide - 2, LINE - 8, fill=hue("ABC"[index % programs]))
            for at in range(begin + tile, end, tile):
                drawing.line([(LEFT + at * SCALE, y), (LEFT + at * SCALE, y + LINE - 8)], "faint", 1)
            drawing.text(x + wide / 2 - 1, y + 15, str(index), "cell")


def draw() -> str:
    """The same rows twice."""
    drawing = Drawing(660, 300, "Splits of three rows, with one program a row and with three")
    panel(drawing, 24, programs=1)
    panel(drawing, 154, programs=3)
    said = f"a split is {constant('SPLIT_TOKENS')} keys from position 0 on, whoever computes it; a colour is a program"
    drawing.text(16, 272, said, "note")
    drawing.text(16, 290, "a second kernel combines a row's splits in order, from the first", "note")
    return drawing.svg()
