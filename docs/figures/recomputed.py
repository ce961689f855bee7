"""Draw which tokens each step of an answer computes, without a cache and with one, from the forwards that were made.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

from pathlib import Path

import torch

from reference.cache import KVCache
from reference.model import LlamaModel
from tests.harness import TINY, tiny_weights
from tests.pages.drawing import Drawing, hue

TARGET = Path(__file__).with_suffix(".svg")
CELL, LEFT = 26, 60
PROMPT, ANSWER = (3, 1, 4, 1), 6

Spans = list[tuple[int, int]]  # (first token, end) that each step gave to the forward


def answer(*, cached: bool) -> tuple[list[int], Spans]:
    """Greedy tokens, and what was computed for each."""
    model = LlamaModel(TINY, tiny_weights(), dtype=torch.float64)
    tokens, spans = list(PROMPT), Spans()
    cache = KVCache(TINY, max_tokens=len(PROMPT) + ANSWER, dtype=torch.float64)
    for _ in range(ANSWER):
        if not cached:
            cache = KVCache(TINY, max_tokens=len(tokens), dtype=torch.float64)
        start = cache.length
        logits = model.forward(torch.tensor([tokens[start:]]), torch.arange(start, len(tokens))[None], cache)
        spans.append((start, len(tokens)))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens, spans


def panel(drawing: Drawing, left: float, title: str, spans: Spans) -> None:
    """A line a step, a column a token; coloured is computed, pale is found."""
    drawing.text(left, 24, title, "title")
    drawing.text(left, 42, f"{sum(end - start for start, end in spans)} token forwards", "note")
    for step, (start, end) in enumerate(spans):
        y = 54 + step * CELL
        drawing.text(left + LEFT - 10, y + 16, f"step {step + 1}", "label end")
        for token in range(end):
            x = left + LEFT + token * CELL
            drawing.track(x, y, CELL - 3, CELL - 5)
            if token >= start:
                drawing.box(x, y, CELL - 3, CELL - 5, fill=hue("A" if token < len(PROMPT) else "C"))


def draw() -> str:
    """The same answer twice."""
    (plain, all_of_it), (told, once) = answer(cached=False), answer(cached=True)
    assert plain == told
    drawing = Drawing(680, 236, "Token forwards without and with a cache")
    panel(drawing, 16, "no cache: everything again", all_of_it)
    panel(drawing, 350, "keys and values are kept", once)
    drawing.text(16, 228, "Blue: tokens of the prompt. Green: of the answer. Pale: read from the cache.", "note")
    return drawing.svg()
