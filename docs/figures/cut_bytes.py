"""Draw a text as characters, as bytes, as tokens, and as the pieces that a decoder gives, from a real tokenizer.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

from reference.tokenizer import IncrementalDecoder
from tests.pages.drawing import Drawing, hue
from tests.server import piece_tokenizer

TARGET = Path(__file__).with_suffix(".svg")
LEFT, CELL = 120, 62
TEXT, TOKENS = "dé€!", (b"d\xc3", b"\xa9\xe2", b"\x82", b"\xac!")


def line(drawing: Drawing, y: float, words: str, parts: list[tuple[int, str]], owners: str) -> None:
    """Parts side by side, each as wide as its bytes."""
    drawing.text(LEFT - 12, y + 20, words, "label end")
    at = 0
    for index, (size, text) in enumerate(parts):
        x, width = LEFT + at * CELL, size * CELL - 4
        drawing.track(x, y, width, 30)
        if text:
            drawing.box(x, y, width, 30, fill=hue(owners[index % len(owners)]))
            drawing.text(x + width / 2, y + 20, text, "cell")
        at += size


def draw() -> str:
    """Four characters in seven bytes, cut into four tokens at other places."""
    longer = [token for token in TOKENS if len(token) > 1]
    tokenizer = piece_tokenizer(longer)  # their ids follow those of the 256 bytes
    ids = [256 + longer.index(token) if token in longer else token[0] for token in TOKENS]
    assert tokenizer.decode(ids) == TEXT
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push(token) for token in ids]
    data = TEXT.encode()
    drawing = Drawing(LEFT + len(data) * CELL + 12, 214, "Characters, bytes, tokens and pieces of one text")
    drawing.text(16, 24, "one text, cut in four ways", "title")
    line(drawing, 36, "characters", [(len(c.encode()), repr(c)) for c in TEXT], "A")
    line(drawing, 74, "bytes", [(1, f"{byte:02X}") for byte in data], "D")
    line(drawing, 112, "tokens", [(len(t), f"id {i}") for t, i in zip(TOKENS, ids, strict=True)], "B")
    shown = [(len(t), repr(piece) if piece else "") for t, piece in zip(TOKENS, pieces, strict=True)]
    line(drawing, 150, "the decoder", shown, "C")
    drawing.text(16, 204, "The third token completes no character, so nothing is certain yet.", "note")
    return drawing.svg()
