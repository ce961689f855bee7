"""Draw who runs where in the server, with the functions that cross from one thread to the other named from the source.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from serve.loop import EngineLoop
from serve.stream import EventStream, pieces
from serve.ticket import Ticket
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")


def box(drawing: Drawing, x: float, y: float, width: float, words: list[str], name: str) -> None:
    """A coloured box with centred lines of text."""
    drawing.box(x, y, width, 18 * len(words) + 12, fill=hue(name))
    for index, line in enumerate(words):
        drawing.text(x + width / 2, y + 20 + index * 18, line, "cell")


def draw() -> str:
    """Two threads and the two crossings between them."""
    drawing = Drawing(660, 272, "The event loop's thread and the engine's thread")
    drawing.text(16, 24, "the event loop's thread: thousands of sockets, never waits", "title")
    box(drawing, 16, 40, 150, ["a handler", "reads and checks"], "A")
    box(drawing, 196, 40, 150, [EngineLoop.submit.__qualname__, "waits until taken"], "A")
    box(drawing, 376, 40, 130, [Ticket.take.__qualname__, pieces.__qualname__], "A")
    box(drawing, 536, 40, 108, [EventStream.__qualname__, "to the client"], "A")
    for x in (166, 346, 506):
        drawing.arrow(x, 64, x + 29, 64)
    drawing.text(16, 258, "the engine's thread: nobody else calls the engine", "title")
    box(drawing, 196, 184, 150, [EngineLoop._turn.__qualname__, "engine.step()"], "C")
    box(drawing, 376, 184, 170, [EngineLoop._hand_over.__qualname__, "one call a step"], "C")
    drawing.arrow(346, 208, 375, 208)
    drawing.arrow(271, 89, 271, 182)
    drawing.text(180, 128, "a queue: submits,", "small")
    drawing.text(180, 141, "aborts", "small")
    drawing.arrow(441, 182, 441, 90)
    drawing.text(450, 128, "the step's events", "small")
    return drawing.svg()
