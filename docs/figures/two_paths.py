"""Draw `two_paths.svg`: the same five requests on both engines, one column a step, from what the engines really did.

Run: `python docs/figures/two_paths.py`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from fast.engine import Engine as FastEngine  # noqa: E402
from reference.config import ModelConfig  # noqa: E402
from reference.engine import Engine as ReferenceEngine  # noqa: E402
from reference.request import Request, SamplingParams  # noqa: E402
from reference.weights import random_weights  # noqa: E402
from tests.pages.drawing import Drawing, hue  # noqa: E402

TARGET = Path(__file__).with_suffix(".svg")
CONFIG = ModelConfig("llama", 64, 32, 48, 2, 4, 2, 8, 64, 1e-5, 10_000.0)
ANSWERS = {"A": 7, "B": 3, "C": 5, "D": 8, "E": 4}
ROWS, CELL, LEFT = 3, 22, 150

Frame = list[tuple[int, str, bool]]  # (row, request, is its prefill) of one step


def requests() -> list[Request]:
    """Five prompts of four tokens and answers of the lengths in `ANSWERS`."""
    return [
        Request((3, 1, 4, i), SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True), name)
        for i, (name, n) in enumerate(ANSWERS.items())
    ]


def reference_frames() -> tuple[list[Frame], dict[str, list[int]]]:
    """One request at a time, each on its own line."""
    engine = ReferenceEngine(CONFIG, random_weights(CONFIG))
    line = {name: i for i, name in enumerate(ANSWERS)}
    return run(engine, lambda name, _: line[name])


def fast_frames() -> tuple[list[Frame], dict[str, list[int]]]:
    """Every running row, every step; a line is a row of the persistent batch."""
    engine = FastEngine.build(CONFIG, random_weights(CONFIG), max_batch_size=ROWS, num_blocks=16, block_size=4)
    row_of: dict[str, int] = {}
    schedule = engine.scheduler.schedule

    def watched():  # rows are known between the schedule and the end of the step
        output = schedule()
        row_of.update({sequence.request.id: row for row, sequence in engine.scheduler.running.items()})
        return output

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    return run(engine, lambda name, _: row_of[name])


def run(engine, line_of: Callable[[str, int], int]) -> tuple[list[Frame], dict[str, list[int]]]:
    """Step an engine to its end; frames for the drawing, token ids for the comparison."""
    frames: list[Frame] = []
    tokens: dict[str, list[int]] = {name: [] for name in ANSWERS}
    for request in requests():
        engine.submit(request)
    while engine.has_work:
        frame: Frame = []
        for event in engine.step():
            frame.append((line_of(event.request_id, len(frames)), event.request_id, not tokens[event.request_id]))
            tokens[event.request_id].append(event.token_id)
        frames.append(frame)
    return frames, tokens


def panel(drawing: Drawing, frames: list[Frame], *, top: int, title: str, note: str, lines: list[str]) -> None:
    """One engine's steps as a grid of labelled cells."""
    drawing.text(16, top, title, "title")
    drawing.text(16, top + 18, note, "note")
    grid = top + 30
    for index, label in enumerate(lines):
        drawing.text(LEFT - 10, grid + index * CELL + 15, label, "label end")
        drawing.track(LEFT, grid + index * CELL, len(frames) * CELL, CELL - 3)
    for step, frame in enumerate(frames):
        for line, name, prefill in frame:
            x, y = LEFT + step * CELL, grid + line * CELL
            drawing.box(x + 1, y + 1, CELL - 3, CELL - 5, fill=hue(name), edge=2 if prefill else 0)
            drawing.text(x + CELL / 2 - 0.5, y + 14, name, "cell")


def draw() -> str:
    """The whole picture; fails when the two engines disagree on a token."""
    reference, reference_tokens = reference_frames()
    fast, fast_tokens = fast_frames()
    if reference_tokens != fast_tokens:
        raise AssertionError(f"the engines disagree: {reference_tokens} != {fast_tokens}")
    label = "The same five requests on the reference engine and on the fast engine, step by step"
    drawing = Drawing(LEFT + len(reference) * CELL + 20, 340, label)
    total = sum(ANSWERS.values())
    panel(
        drawing,
        reference,
        top=28,
        title="reference/  one request at a time",
        note=f"{len(reference)} steps for {total} tokens; one contiguous cache",
        lines=[f"request {name}" for name in ANSWERS],
    )
    panel(
        drawing,
        fast,
        top=206,
        title="fast/  every running row, every step",
        note=f"{len(fast)} steps for the same {total} tokens, token for token; blocks of one pool",
        lines=[f"row {row}" for row in range(ROWS)],
    )
    drawing.text(16, 326, "One column is one step; outlined: the step that computed the prompt.", "note")
    return drawing.svg()


if __name__ == "__main__":
    TARGET.write_text(draw(), "utf-8")
