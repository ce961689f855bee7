"""Tiny models, random traces, and the lockstep runner that holds the fast engine to the reference.

`TINY` is a two-layer model that runs in milliseconds; `tiny_config` varies it and `SHAPES` names the variations that
lockstep runs over. A `Trace` is who arrives and who leaves at which step, over which limits; `traces` draws them;
`lockstep` runs one through the fast engine and each of its requests through the reference alone, and compares token
ids. A mismatch prints the trace as a short program that runs it again.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st

from fast.engine import Engine
from fast.model import Chunk, Forward
from reference.config import ModelConfig, RopeScaling
from reference.engine import Engine as ReferenceEngine
from reference.request import Completion, Request, SamplingParams
from reference.weights import ModelWeights, random_weights

TINY = ModelConfig(
    architecture="llama",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=256,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_embeddings=False,
    bos_token_id=1,
    eos_token_ids=(2,),
)


def tiny_config(**changes: Any) -> ModelConfig:
    """`TINY` with some fields changed."""
    return replace(TINY, **changes)


SHAPES = {
    "gqa": TINY,
    "mha_tied": tiny_config(num_kv_heads=4, tie_embeddings=True),
    "three_to_one": tiny_config(num_heads=3, num_kv_heads=1, head_dim=6, hidden_size=18, eos_token_ids=(2, 5)),
    "biases": tiny_config(architecture="qwen2", qkv_bias=True, output_bias=True, mlp_bias=True),
    "qk_norm": tiny_config(architecture="qwen3", qk_norm=True, head_dim=10),
    "llama3_rope": tiny_config(rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16), num_layers=1),
}


@cache
def tiny_weights(shape: str = "gqa") -> ModelWeights:
    """Seeded float64 weights of a shape: ties between logits cannot hide in rounding."""
    return random_weights(SHAPES[shape], seed=7, dtype=torch.float64)


def tiny_engine(shape: str = "gqa", **limits: Any) -> Engine:
    """A fast engine over a tiny float64 model; `limits` go to `Engine.build`."""
    return Engine.build(SHAPES[shape], tiny_weights(shape), dtype=torch.float64, **limits)


def tiny_reference(shape: str = "gqa", *, max_model_len: int | None = None) -> ReferenceEngine:
    """The reference engine over the same weights."""
    return ReferenceEngine(SHAPES[shape], tiny_weights(shape), max_model_len=max_model_len, dtype=torch.float64)


@dataclass(frozen=True)
class Arrival:
    """A request that is submitted right before step `step` (0-based)."""

    step: int
    request: Request


@dataclass(frozen=True)
class Trace:
    """One run of the fast engine: its limits, who arrives and who is aborted right before which step."""

    arrivals: tuple[Arrival, ...]
    aborts: tuple[tuple[int, str], ...] = ()  # (step, request id)
    shape: str = "gqa"
    max_batch_size: int = 4
    block_size: int = 4
    num_blocks: int = 16
    max_model_len: int = 40
    options: tuple[tuple[str, Any], ...] = ()  # further arguments of Engine.build

    def program(self) -> str:
        """Python that runs this trace again."""
        lines = ["from tests.harness import *", "lockstep(Trace(", "    arrivals=("]
        for arrival in self.arrivals:
            request = arrival.request
            made = f"Request({request.prompt_ids}, {_render(request.params)}, {request.id!r})"
            lines.append(f"        Arrival({arrival.step}, {made}),")
        lines.append("    ),")
        for column in fields(self):
            value = getattr(self, column.name)
            if column.name != "arrivals" and value != column.default:
                lines.append(f"    {column.name}={value!r},")
        return "\n".join([*lines, "))"])


class LockstepError(AssertionError):
    """The two engines disagree; the message says where, and ends with the program that shows it again."""


@dataclass
class FastRun:
    """What the fast engine did with a trace."""

    completions: dict[str, Completion]
    steps: dict[tuple[str, int], int]  # (request id, index in its answer) -> step that emitted it
    refused: dict[str, str]  # request id -> the message of its ValueError
    engine: Engine


def run_fast(trace: Trace, engine: Engine | None = None) -> FastRun:
    """Run a trace to its end; gates hold after each step, and at the end nothing is held.

    Raises:
        LockstepError: the engine stopped making progress, or an idle engine holds something.
    """
    engine = engine or _engine_of(trace)
    run = FastRun({}, {}, {}, engine)
    last = max([arrival.step for arrival in trace.arrivals] + [step for step, _ in trace.aborts], default=0)
    budget = last + 2 + sum(_most_tokens(arrival.request, engine.max_model_len) for arrival in trace.arrivals)
    step = 0
    while step <= last or engine.has_work:
        if step > budget:
            raise LockstepError(f"no end after {step} steps: {engine.stats()}\n{trace.program()}")
        _before_step(trace, step, run)
        for event in engine.step():
            completion = run.completions[event.request_id]
            completion.add(event)
            run.steps[event.request_id, len(completion.token_ids) - 1] = step
        engine.stats()
        step += 1
    stats = engine.stats()
    if (stats["free_blocks"], stats["running"], stats["waiting"]) != (stats["num_blocks"], 0, 0):
        raise LockstepError(f"an idle engine holds something: {stats}\n{trace.program()}")
    return run


def lockstep(trace: Trace) -> FastRun:
    """Run a trace on the fast engine and every request of it alone on the reference; token ids must be equal.

    An aborted request's tokens must begin its answer. A request refused by one engine must be refused by both.

    Raises:
        LockstepError: naming request, step, position, both tokens and the gap between each side's top two logits.
    """
    run = run_fast(trace)
    reference = tiny_reference(trace.shape, max_model_len=run.engine.max_model_len)
    for arrival in trace.arrivals:
        compare(run, reference, arrival.request, program=trace.program())
    return run


def compare(run: FastRun, reference: ReferenceEngine, request: Request, *, program: str) -> None:
    """One request of a finished run against the reference, which runs it alone."""
    try:
        (wanted,) = reference.generate([request])
    except ValueError as refusal:
        if request.id not in run.refused:
            raise LockstepError(f"{request.id}: the reference refuses ({refusal}), fast does not\n{program}") from None
        return
    if request.id in run.refused:
        raise LockstepError(f"{request.id}: fast refuses ({run.refused[request.id]})\n{program}")
    got = run.completions[request.id]
    aborted = got.finish_reason == "abort"
    expected = wanted.token_ids[: len(got.token_ids)] if aborted else wanted.token_ids
    if got.token_ids != expected:
        raise LockstepError(_mismatch(run, reference, request, got.token_ids, expected) + "\n" + program)
    if not aborted and got.finish_reason != wanted.finish_reason:
        both = f"fast ends with {got.finish_reason!r}, the reference with {wanted.finish_reason!r}"
        raise LockstepError(f"{request.id}: {both}\n{program}")
    for ours, theirs in zip(got.logprobs, wanted.logprobs, strict=not aborted):
        if ours.rank != theirs.rank or abs(ours.logprob - theirs.logprob) > 1e-3:
            raise LockstepError(f"{request.id}: logprobs {ours} against {theirs}\n{program}")


def _engine_of(trace: Trace) -> Engine:
    return tiny_engine(
        trace.shape,
        max_batch_size=trace.max_batch_size,
        block_size=trace.block_size,
        num_blocks=trace.num_blocks,
        max_model_len=trace.max_model_len,
        **dict(trace.options),
    )


def _before_step(trace: Trace, step: int, run: FastRun) -> None:
    for arrival in trace.arrivals:
        if arrival.step == step:
            request = arrival.request
            try:
                run.engine.submit(request)
                run.completions[request.id] = Completion(request.id, request.prompt_ids)
            except ValueError as refusal:
                run.refused[request.id] = str(refusal)
    for at, request_id in trace.aborts:
        if at == step:
            run.engine.abort(request_id)


def _most_tokens(request: Request, max_model_len: int) -> int:
    # Every step with work gives the earliest request its next token, so the sum of these bounds the steps.
    return request.params.max_tokens or max(1, max_model_len - len(request.prompt_ids))


def _mismatch(run: FastRun, reference: ReferenceEngine, request: Request, got: list[int], expected: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
    tokens = [*request.prompt_ids, *expected[:at]]
    ours, theirs = fast_logits(run.engine, tokens), reference_logits(reference, tokens)
    (fast_top, fast_gap), (reference_top, reference_gap) = _top_two(ours), _top_two(theirs)
    return (
        f"{request.id}: step {run.steps.get((request.id, at), '?')}, position {len(tokens)} (answer token {at}): "
        f"fast {got[at : at + 1]}, reference {expected[at : at + 1]}; "
        f"top two fast {fast_top} gap {fast_gap:.3g}, reference {reference_top} gap {reference_gap:.3g}, "
        f"largest logit difference {float((ours - theirs).abs().max()):.3g}"
    )


def fast_logits(engine: Engine, tokens: list[int]) -> torch.Tensor:  # [V]
    """The fast forward's logits after `tokens`, computed alone in a pool of their own."""
    forward: Forward = engine.forward
    pool = type(engine.cache)(
        engine.config,
        max_batch_size=1,
        num_blocks=1,
        block_size=len(tokens),
        max_model_len=len(tokens),
        dtype=forward.dtype,
    )
    return forward.prefill([Chunk(0, tuple(tokens), tuple(range(len(tokens))))], pool)[0].double()


def reference_logits(engine: ReferenceEngine, tokens: list[int]) -> torch.Tensor:  # [V]
    """The reference forward's logits after `tokens`."""
    from reference.cache import KVCache

    cache = KVCache(engine.config, max_tokens=len(tokens), dtype=engine.dtype)
    with torch.inference_mode():
        positions = torch.arange(len(tokens)).unsqueeze(0)
        return engine.model.forward(torch.tensor([tokens]), positions, cache)[0, -1].double()


def _top_two(logits: torch.Tensor) -> tuple[list[int], float]:  # [V]
    top = logits.topk(2)
    return top.indices.tolist(), float(top.values[0] - top.values[1])


def _render(params: SamplingParams) -> str:
    shown = []
    for column in fields(params):
        value = getattr(params, column.name)
        value = dict(value) if column.name == "logit_bias" else value
        default = column.default if column.default_factory is MISSING else column.default_factory()
        if value != default:
            shown.append(f"{column.name}={value!r}")
    return f"SamplingParams({', '.join(shown)})"


# ---- random traces ----------------------------------------------------------------------------------------------


def prompt_lengths(block_size: int, longest: int) -> st.SearchStrategy[int]:
    """Lengths of prompts, block boundaries and their neighbours as likely as all others together."""
    edges = [k * block_size + off for k in range(longest // block_size + 1) for off in (-1, 0, 1)]
    inside = sorted({edge for edge in edges if 1 <= edge <= longest})
    return st.sampled_from(inside) | st.integers(1, longest)


@st.composite
def sampling_params(draw: st.DrawFn, vocab_size: int = 61) -> SamplingParams:
    """Seeded parameters, about half of them greedy; each of the rest is mostly off, so shrinking drops it."""

    def sometimes(neutral: Any, *others: Any) -> Any:
        return draw(st.sampled_from([neutral, neutral, *others]))

    max_tokens = draw(st.sampled_from([1, 2, 3, 5, 8, 12]) | st.none())
    tokens = st.integers(0, vocab_size - 1)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.0, 1e-12, 5.0])),
        top_k=sometimes(0, 1, 4, vocab_size, vocab_size + 1),
        top_p=sometimes(1.0, 0.9, 0.3, 1e-4),
        min_p=sometimes(0.0, 0.05, 1.0),
        seed=draw(st.sampled_from([0, 1, -1, 42, 2**63 - 1, -(2**63)])),
        repetition_penalty=sometimes(1.0, 1.3, 0.7),
        presence_penalty=sometimes(0.0, 1.5, -1.0),
        frequency_penalty=sometimes(0.0, 0.8, -0.5),
        logit_bias=draw(st.just({}) | st.dictionaries(tokens, st.sampled_from([-100.0, 2.5, 100.0]), max_size=3)),
        stop_token_ids=tuple(draw(st.just([]) | st.lists(tokens, max_size=3))),
        min_tokens=min(sometimes(0, 1, 3), max_tokens or 3),
        ignore_eos=draw(st.booleans()),
        logprobs=sometimes(None, 0, 3),
    )


@st.composite
def traces(draw: st.DrawFn, **fixed: Any) -> Trace:
    """Traces over small limits: pools of a few blocks, one to five rows, up to seven requests and three aborts."""
    block_size = draw(st.sampled_from([1, 3, 4, 8]))
    num_blocks = draw(st.integers(2, 14)) if block_size > 1 else draw(st.integers(6, 30))
    max_model_len = draw(st.sampled_from([num_blocks * block_size - 1, num_blocks * block_size, 24, 40]))
    # Beyond the limit by one at most: refusals are part of a trace, and must not be most of it.
    longest = max(1, min(max_model_len, num_blocks * block_size, 30) - 1)
    ids = [f"r{i}" for i in range(draw(st.integers(1, 7)))]
    arrivals = []
    for name in ids:
        length = draw(prompt_lengths(block_size, longest))
        prompt = draw(st.lists(st.integers(0, 60), min_size=length, max_size=length))
        params = draw(sampling_params())
        room = min(max_model_len, num_blocks * block_size) - length
        if params.max_tokens is not None and params.max_tokens > room and draw(st.integers(0, 9)) > 0:
            params = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
        arrivals.append(Arrival(draw(st.integers(0, 8)), Request(tuple(prompt), params, name)))
    aborts = draw(st.lists(st.tuples(st.integers(0, 15), st.sampled_from(ids)), max_size=3))
    chosen = {
        "shape": draw(st.sampled_from(sorted(SHAPES))),
        "max_batch_size": draw(st.integers(1, 5)),
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_model_len": max(2, max_model_len),
    }
    return Trace(tuple(arrivals), tuple(aborts), **(chosen | fixed))
