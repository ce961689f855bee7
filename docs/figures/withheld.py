"""Draw what of an answer has gone out after each token, and what is held back, from a real `Answer`.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from reference.request import Event, SamplingParams
from reference.tokenizer import ByteTokenizer
from serve.answer import Answer
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
LEFT, CELL, STOP = 120, 50, "###"
TEXT = "né ##x#"


def shown(byte: int) -> str:
    """A byte as a letter where it is one."""
    return repr(chr(byte)) if byte < 128 else f"{byte:02X}"


def draw() -> str:
    """A column a token of one byte: the byte, the piece that went out with it, and what is still held."""
    data = TEXT.encode()
    answer = Answer(ByteTokenizer(), SamplingParams(max_tokens=len(data), stop=(STOP,)))
    drawing = Drawing(LEFT + len(data) * CELL + 16, 192, "What goes out with each token of an answer")
    drawing.text(16, 24, f"one byte a token; stop string {STOP}; ends by its length", "title")
    for y, words in ((60, "token"), (94, "goes out"), (128, "held back")):
        drawing.text(LEFT - 12, y, words, "label end")
    sent = b""
    for index, byte in enumerate(data):
        last = index == len(data) - 1
        piece = answer.push(Event("a", byte, "length" if last else None)).text
        sent += piece.encode()
        held = data[len(sent) : index + 1]
        x = LEFT + index * CELL
        for top in (42, 76, 110):
            drawing.track(x, top, CELL - 4, 28)
        drawing.text(x + CELL / 2 - 2, 61, shown(byte), "ink")
        if piece:
            drawing.box(x, 76, CELL - 4, 28, fill=hue("C"))
            drawing.text(x + CELL / 2 - 2, 95, repr(piece), "cell")
        if held:
            drawing.box(x, 110, CELL - 4, 28, fill=hue("B"))
            drawing.text(x + CELL / 2 - 2, 129, " ".join(shown(b) for b in held), "cell")
    drawing.text(16, 164, "C3 is half of é. A # may begin the stop string, until x says that it did not.", "note")
    drawing.text(16, 180, "The last one is text after all: the answer ends, and no stop string came.", "note")
    return drawing.svg()
