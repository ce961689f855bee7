"""Draw what steps attain under the two roofs of the machine they ran on: counts from the config, times from the page.

Run: `make figures`. tests/test_figures.py compares the file with a fresh drawing.
"""

from __future__ import annotations

import math
from pathlib import Path

from reference.config import ModelConfig
from serve.roofline import Rates, Work, decode_work, matrix_elements
from tests.bench.gpu_models import MODELS
from tests.pages.drawing import Drawing, hue
from tests.pages.measured import number, table

TARGET = Path(__file__).with_suffix(".svg")
CONFIG = MODELS["smollm2-135m"]
WEIGHT_BYTES, KV_BYTES = 2, 4  # half-precision weights and float32 K/V, the default
LEFT, TOP, WIDE, HIGH = 62, 44, 560, 300
X_AXIS, Y_AXIS = (0.5, 2048.0), (10.0, 400.0)  # operations a byte, 10**9 operations a second
HEAD = "The roofs and the steps were measured in the same two runs, on one core:"


def prefill_work(config: ModelConfig, *, tokens: int) -> Work:
    """One prompt at once: every matrix once, every K/V once; the head for the last token alone."""
    head = config.vocab_size * config.hidden_size
    products = tokens * (matrix_elements(config) - head) + head
    pairs = tokens * (tokens + 1) // 2  # query t sees t + 1 keys
    return Work(
        weight_bytes=matrix_elements(config) * WEIGHT_BYTES,
        kv_bytes=tokens * config.kv_elements_per_token * KV_BYTES,
        flops=2 * products + 4 * pairs * config.num_layers * config.num_heads * config.head_dim,
    )


def work_of(step: str, size: int, context: int) -> Work:
    """What a line of the table computes."""
    if step == "prefill":
        return prefill_work(CONFIG, tokens=size)
    return decode_work(CONFIG, rows=size, context=context, weight_element_bytes=WEIGHT_BYTES, kv_element_bytes=KV_BYTES)


def draw() -> str:
    """The roofs as lines, each step as a mark below them."""
    (_, *roofs), (_, *steps) = table("The roofs:"), table(HEAD)
    rates = {name: number(rate) for name, rate in roofs}
    read, product = rates["bytes read a second"], rates["float32 operations a second"]  # 10**9
    drawing = Drawing(LEFT + WIDE + 40, TOP + HIGH + 74, "Decode and prefill steps below the machine's two roofs")
    drawing.text(16, 22, "operations a second that steps attain, by operations a byte that they read", "title")
    for mark in (10, 20, 50, 100, 200, 400):
        drawing.line([place(X_AXIS[0], mark), place(X_AXIS[1], mark)], "faint", 1)
        drawing.text(LEFT - 8, place(1, mark)[1] + 4, f"{mark} G", "label end")
    for mark in (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        drawing.text(place(mark, 10)[0], TOP + HIGH + 18, f"{mark:g}", "ink")
    drawing.text(LEFT + WIDE / 2, TOP + HIGH + 40, "operations for each byte read", "label mid")
    ridge = product / read
    drawing.line([place(X_AXIS[0], read * X_AXIS[0]), place(ridge, product), place(X_AXIS[1], product)], width=2.5)
    drawing.text(place(ridge, 0.93 * product)[0] + 14, place(1, product)[1] - 8, f"{product:g} G operations/s", "label")
    drawing.text(place(110 / read, 110)[0] - 8, place(1, 110)[1], f"{read:g} GB/s", "label end")
    for step, size, context, ms in steps:
        work = work_of(step, int(number(size)), int(number(context)))
        floor = Rates(read * 1e9, product * 1e9).floor_s(work) * 1e3
        if number(ms) < floor:
            raise AssertionError(f"{step} of {size}: {ms} is less than the {floor:.2f} ms that the roofs allow")
        x, y = place(work.flops / work.num_bytes, work.flops / number(ms) / 1e6)
        drawing.box(x - 5, y - 5, 10, 10, fill=hue("A" if step == "decode" else "B"))
        drawing.text(x + 9, y + 5, f"{int(number(size)):,}", "label")
    for name, x, words in (("A", LEFT, "decode, by rows"), ("B", LEFT + 150, "prefill, by tokens of the prompt")):
        drawing.box(x, TOP + HIGH + 54, 12, 12, fill=hue(name))
        drawing.text(x + 18, TOP + HIGH + 64, words, "label")
    return drawing.svg()


def place(intensity: float, rate: float) -> tuple[float, float]:
    """Where operations a byte and 10**9 operations a second stand; both axes are logarithmic."""
    x = math.log(intensity / X_AXIS[0]) / math.log(X_AXIS[1] / X_AXIS[0])
    y = math.log(rate / Y_AXIS[0]) / math.log(Y_AXIS[1] / Y_AXIS[0])
    return LEFT + WIDE * x, TOP + HIGH * (1 - y)
