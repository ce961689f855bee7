"""The workload that the benches of the decode path time: a few unequal answers, decoded to their end on one engine."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from fast.engine import Engine
from gates.core import at_level
from reference.config import ModelConfig
from reference.request import Request, SamplingParams
from reference.weights import ModelWeights
from serve.machine import machine
from tests.harness import TINY, tiny_weights

# model: (rows, answer lengths dealt round robin, pool blocks, most tokens, width multiple)
SIZES: dict[str, tuple[int, tuple[int, ...], int, int, int]] = {
    "tiny": (5, (8, 12, 16, 24, 32), 40, 64, 16),
    "smollm2-135m-instruct": (5, (6, 8, 10, 12, 16), 40, 64, 32),
}


@cache
def model(name: str) -> tuple[ModelConfig, ModelWeights]:
    """The tiny seeded model in float32, or a real one by its name."""
    if name == "tiny":
        return TINY, tiny_weights()
    from serve.models import load_model

    loaded = load_model(name)
    return loaded.config, loaded.weights


class Workload:
    """One engine, warmed where its switches ask for it; `admit` prefills a batch, `decode` runs it to its end."""

    def __init__(self, name: str, **switches: Any) -> None:
        config, weights = model(name)
        self.rows, self.gens, num_blocks, longest, multiple = SIZES[name]
        self.prompts = [tuple((7 * row + at) % 50 + 3 for at in range(16)) for row in range(self.rows)]
        self.engine = Engine.build(
            config,
            weights,
            max_batch_size=self.rows,
            num_blocks=num_blocks,
            max_model_len=longest,
            width_multiple=multiple,
            dtype=torch.float32,
            **switches,
        )
        if switches.get("capture_decode") or switches.get("compile_decode"):
            with at_level("cheap"):
                self.engine.warm_decode()
        self.answers: dict[str, list[int]] = {}

    def admit(self) -> Workload:
        """Submit and prefill every request; what is left is decode steps."""
        self.answers = {}
        for row, prompt in enumerate(self.prompts):
            params = SamplingParams(max_tokens=self.gens[row % len(self.gens)], ignore_eos=True, temperature=0.0)
            self.engine.submit(Request(prompt, params, f"r{row}"))
        self._step()
        return self

    def decode(self) -> dict[str, list[int]]:
        """Decode to the end; the token ids of every request."""
        while self.engine.has_work:
            self._step()
        return self.answers

    def facts(self) -> dict[str, Any]:
        """What explains this arm's time."""
        stats, buckets = self.engine.stats(), self.engine.decode.buckets
        return {
            "rows": self.rows,
            "replay_share": stats["replayed"] / stats["decode_steps"],
            "eager": str(stats["eager"]),
            "recordings": stats["captures"],
            "compiles": stats["compiles"],
            "row_padding_share": round(stats["row_padding_share"], 4),
            "cell_padding_share": round(stats["cell_padding_share"], 4),
            "row_sizes": str(buckets.row_sizes if buckets else ()),
            "widths": str(buckets.widths if buckets else ()),
            "gates": "cheap",
            **machine(),
        }

    def _step(self) -> None:
        for event in self.engine.step():
            if event.token_id is not None:
                self.answers.setdefault(event.request_id, []).append(event.token_id)


def time_arm(benchmark: Any, name: str, arm: str, switches: dict[str, bool | str], *, rounds: int) -> Workload:
    """Equal tokens first, against the plain eager engine; then decode steps alone, gates at cheap."""
    plain, workload = plain_answers(name), Workload(name, **switches)
    assert workload.admit().decode() == plain, f"{arm}: not the tokens of the eager arm"
    with at_level("cheap"):

        def admitted() -> tuple[tuple[()], dict[str, Any]]:
            workload.admit()
            return (), {}

        benchmark.pedantic(workload.decode, setup=admitted, rounds=rounds)
    assert workload.answers == plain
    benchmark.group = f"decode to the end, {name}, {workload.rows} rows"
    benchmark.extra_info.update(arm=arm, tokens=sum(len(ids) - 1 for ids in plain.values()), **workload.facts())
    return workload


@cache
def plain_answers(name: str) -> dict[str, list[int]]:
    """What every arm must answer: the eager engine, no switch on."""
    return Workload(name).admit().decode()
