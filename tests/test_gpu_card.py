"""What only a card can show: recordings that are CUDA graphs, a compiler that stays silent, memory that stays flat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fast.engine import Engine
from gates.core import at_level
from reference.engine import Engine as ReferenceEngine
from reference.request import Completion, Request, SamplingParams
from tests.bench.gpu_models import seeded_weights
from tests.harness import tiny_config

pytestmark = pytest.mark.gpu
SMALL = tiny_config(hidden_size=256, intermediate_size=512, num_heads=8, num_kv_heads=2, head_dim=64, vocab_size=1024)
CAPTURED: dict[str, Any] = {"bucket_decode": True, "persist_inputs": True, "capture_decode": True, "compact_rows": True}


def engine(dtype: torch.dtype = torch.bfloat16, *, rows: int = 6, blocks: int = 40, **switches: Any) -> Engine:
    weights = seeded_weights(SMALL, dtype=torch.float32, device="cuda")
    sizes = {"max_batch_size": rows, "num_blocks": blocks, "block_size": 16, "max_model_len": 256}
    built = Engine.build(SMALL, weights, dtype=dtype, device="cuda", triton=True, **sizes, **switches)
    if built.decode.captured is not None:
        built.warm_decode()
    return built


def requests(count: int, *, told: bool = True) -> Iterator[Request]:
    """Unequal prompts and answers; every other one is drawn, and a third have their log probabilities `told`."""
    for i in range(count):
        params = SamplingParams(
            5 + 11 * i % 40,
            temperature=0.7 * (i % 2),
            seed=i,
            top_p=0.95,
            ignore_eos=True,
            logprobs=1 if told and i % 3 == 0 else None,  # the others never leave the device
        )
        yield Request([(17 * i + 5 * at) % 1000 + 3 for at in range(1 + 13 * i % 90)], params, f"r{i}")


def logits_of(built: Engine, asked: list[Request]) -> tuple[list[Completion], list[Tensor]]:
    """Answers, and every step's logits."""
    seen: list[Tensor] = []
    sample = built._sample

    def keeps(logits: Tensor, *rest: Any) -> Any:
        seen.append(logits.clone())
        return sample(logits, *rest)

    built._sample = keeps
    return built.generate(asked), seen


# ---- holds --------------------------------------------------------------------------------------------------------


def test_graphs_give_the_bits_of_the_eager_step():
    asked = list(requests(12))
    replayed = engine(**CAPTURED)
    (got, bits), (wanted, eager) = (
        logits_of(replayed, asked),
        logits_of(engine(**CAPTURED | {"capture_decode": False}), asked),
    )
    stats = replayed.stats()
    assert stats["replayed"] == stats["decode_steps"] > 20
    assert got == wanted
    assert len(bits) == len(eager)
    assert all(map(torch.equal, bits, eager))


@pytest.mark.differential
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "ahead"])
def test_float32_answers_are_the_references(overlap: bool):
    asked = list(requests(8, told=not overlap))
    built = engine(torch.float32, **CAPTURED, overlap=overlap)
    got = built.generate(asked)
    assert (built.stats()["steps_ahead"] > 20) == overlap
    weights = seeded_weights(SMALL, dtype=torch.float32, device="cuda")
    weights = type(weights)(
        weights.embedding.cpu(),
        [type(layer)(*(None if x is None else x.cpu() for x in _columns(layer))) for layer in weights.layers],
        weights.final_norm.cpu(),
        weights.lm_head.cpu(),
    )
    reference = ReferenceEngine(SMALL, weights, max_model_len=256, dtype=torch.float32)
    for answer, request in zip(sorted(got, key=_number), asked, strict=True):
        assert answer.token_ids == reference.generate([request])[0].token_ids, request.id


@pytest.mark.parametrize("blocks", [80, 17], ids=["room", "preempted"])
def test_an_invariant_engine_gives_a_request_the_same_bits_in_any_company(blocks: int):
    asked = list(requests(10))
    together = engine(invariant=True, blocks=blocks, **CAPTURED)
    alone = engine(invariant=True, rows=1, **CAPTURED)
    answers = {one.request_id: one for one in together.generate(asked)}
    assert (together.stats()["preemptions"] > 0) == (blocks == 17)
    for request in asked:
        assert alone.generate([request])[0] == answers[request.id], "tokens, and log probabilities to the bit"


@pytest.mark.parametrize("arm", ["eager", "graphs"])
def test_steps_launched_ahead_give_the_tokens_of_steps_in_turn(arm: str):
    """Ends that are foreseen, ends that are not, and a pool that is too small: the same tokens, some dropped."""
    switches = CAPTURED | {"capture_decode": arm == "graphs"}
    likely = tuple(range(0, 1024, 8))
    asked = [replace(one, params=replace(one.params, stop_token_ids=likely)) for one in requests(20, told=False)]
    asked += [replace(one, id=f"{one.id}-long") for one in requests(8, told=False)]
    ahead, in_turn = (engine(blocks=30, **switches, overlap=overlap, invariant=True) for overlap in (True, False))
    answers = {one.request_id: one for one in in_turn.generate(asked)}
    assert {one.request_id: one for one in ahead.generate(asked)} == answers
    stats = ahead.stats()
    assert stats["steps_ahead"] > 40
    assert stats["dropped_tokens"] > 0
    assert stats["step_waits"].keys() <= {"preemption"}
    assert (stats["kernel_compiles_after_ready"], stats["captures_after_ready"]) == (0, 0)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "ahead"])
def test_nothing_is_compiled_captured_or_allocated_after_ready(overlap: bool):
    """A stress trace: unequal prompts, rows that come and go, a pool that is too small, every count of rows."""
    built = engine(blocks=30, **CAPTURED, overlap=overlap)
    reserved = torch.cuda.memory_reserved()
    waiting = list(requests(60, told=not overlap))
    step = 0
    while waiting or built.has_work:
        for _ in range(step % 3):
            if waiting:
                built.submit(waiting.pop())
        built.step()
        step += 1
    stats = built.stats()
    assert stats["preemptions"] > 0
    assert (stats["kernel_compiles_after_ready"], stats["captures_after_ready"]) == (0, 0)
    assert stats["replayed"] == stats["decode_steps"] > 100
    assert torch.cuda.memory_reserved() == reserved


def test_memory_is_flat_over_ten_thousand_steps():
    built, held = engine(rows=2, **CAPTURED), []
    with at_level("cheap"):
        for run in range(45):
            params = SamplingParams(225 + run % 3, temperature=0.0, ignore_eos=True)
            built.generate([Request((5, 6 + run, 7), params, f"{run}-{i}") for i in range(2)])
            held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert built.steps >= 10_000
    assert len(set(held[1:])) == 1


def _columns(layer: Any) -> list[Tensor | None]:
    return [getattr(layer, name) for name in type(layer).__slots__]


def _number(answer: Completion) -> int:
    return int(answer.request_id[1:])
