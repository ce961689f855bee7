"""Draw which letters a guide allows before each token of an answer, from a real grammar.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from reference.tokenizer import ByteTokenizer
from serve.guide import Guides, GuideSpec
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LEFT, CELL, EOS = 130, 46, 257
PATTERN, ANSWER, SHOWN = "(yes|no|never)", "never", "enorsvy"


def draw() -> str:
    """A column a step, a line a letter: allowed letters coloured, the chosen one outlined."""
    grammar = Guides(ByteTokenizer()).compile(GuideSpec("regex", PATTERN))
    state = grammar.start(vocab_size=259, eos_token_ids=(EOS,))
    names = [*SHOWN, "the end"]
    drawing = Drawing(LEFT + (len(ANSWER) + 1) * CELL + 60, 70 + len(names) * 24, "The masks of a guided answer")
    drawing.text(16, 24, f"an answer held to {PATTERN}", "title")
    for line, name in enumerate(names):
        drawing.text(LEFT - 10, 62 + line * 24, name, "label end")
    for step, chosen in enumerate([*ANSWER, "the end"]):
        allowed = state.allowed().ids
        x = LEFT + step * CELL
        drawing.text(x + CELL / 2 - 2, 42, f"step {step + 1}", "small mid")
        for line, name in enumerate(names):
            y = 48 + line * 24
            drawing.track(x, y, CELL - 4, 20)
            if allowed[EOS if name == "the end" else ord(name)]:
                edge = 2.5 if name == chosen else 0
                drawing.box(x, y, CELL - 4, 20, fill=hue("C"), edge=edge)
        if chosen != "the end":
            state.accept(ord(chosen))
    drawing.text(16, 64 + len(names) * 24, "Green may come next; the outlined one came.", "note")
    return drawing.svg()
