"""Tiny models, and the lockstep runner that holds the fast engine to the reference.

`TINY` is a two-layer model that runs in milliseconds; `tiny_config` varies it and `SHAPES` names the variations that
lockstep runs over. `FastRun` (`tests/fast_run.py`) takes the fast engine through a `Trace` (`tests/traces.py`);
`lockstep` compares each answer with the reference's, which runs that request alone. A failure prints the
trace as a short program that runs it again. Random traces are in `tests/strategies.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from fast.engine import Engine
from fast.kernels.pool import KernelPool
from fast.linear import round_to_half
from fast.model import Chunk
from reference.cache import KVCache
from reference.config import ModelConfig, RopeScaling
from reference.engine import Engine as ReferenceEngine
from reference.request import Completion, Request, TokenLogprobs
from reference.weights import ModelWeights, random_weights
from tests.fast_run import Answer, FastRun
from tests.traces import Trace, arm_of

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


UNNAMED_SEED = 77  # both engines give it to a request without a seed, so that its answer can be compared too
# Largest difference of a log probability between two orders of summation; ids and ranks have to be equal.
LOGPROB_BOUND = {"float64": 1e-9, "float32": 1e-4}
# Two sums that differ in their last bit may round to neighbouring halves, which are 2**-11 apart.
HALF_KV_LOGPROB_BOUND = 2e-3


@cache
def model_of(shape: str, half: bool = False) -> tuple[ModelConfig, ModelWeights]:
    """A shape's config and weights, rounded once when `half`; any other name is an installed model's."""
    if half:
        config, weights = model_of(shape)
        return config, round_to_half(weights)
    if shape in SHAPES:
        return SHAPES[shape], tiny_weights(shape)
    from serve.models import load_model

    loaded = load_model(shape)
    return loaded.config, loaded.weights


def engine_of(trace: Trace) -> Engine:
    """The fast engine of a trace's limits and arm, warmed as far as the arm says."""
    arm = arm_of(trace.arm)
    config, weights = model_of(trace.shape, is_half(trace))
    engine = Engine.build(
        config,
        weights,
        max_batch_size=trace.max_batch_size,
        block_size=trace.block_size,
        num_blocks=trace.num_blocks,
        max_model_len=trace.max_model_len,
        width_multiple=trace.width_multiple,
        chunk_tokens=trace.chunk_tokens,
        prefix_cache=trace.prefix_cache,
        reserve_growth=trace.reserve_growth,
        overlap=trace.overlap,
        dtype=getattr(torch, trace.dtype),
        seed_source=lambda: UNNAMED_SEED,
        **arm.switches,
    )
    engine.mixed_steps, engine.scheduler.due_after = trace.mixed_steps, trace.due_after
    if arm.warm == "all":
        engine.warm_decode()
    elif arm.warm == "half":
        rows, widths = engine.decode.buckets.row_sizes, engine.decode.buckets.widths
        engine.warm_decode(max_rows=rows[(len(rows) - 1) // 2], max_width=widths[(len(widths) - 1) // 2])
    return engine


def is_half(trace: Trace) -> bool:
    """Both engines get a model whose matrices were rounded to half precision."""
    return arm_of(trace.arm).switches.get("half_weights", False)


def is_half_kv(trace: Trace) -> bool:
    """Both engines round K/V to half precision as they store it."""
    return arm_of(trace.arm).switches.get("half_kv", False)


def run_fast(trace: Trace) -> FastRun:
    """Run a trace to its end; the state holds after each step, and at the end nothing is held.

    Raises:
        LockstepError: the engine fails, stops making progress, or holds something when it is idle.
    """
    run = FastRun(trace, engine_of(trace))
    while run.steps <= trace.last_step:
        for arrival in trace.arrivals:
            if arrival.step == run.steps:
                run.submit(arrival.request)
        for step, name in trace.aborts:
            if step == run.steps:
                run.abort(name)
        run.step()
    run.drain()
    run.finish()
    return run


def lockstep(trace: Trace) -> FastRun:
    """Run a trace on the fast engine and every request of it alone on the reference; token ids must be equal.

    Raises:
        LockstepError: naming request, step, position, both tokens and the gap between each side's top two logits.
    """
    run = run_fast(trace)
    for answer in run.answers:
        compare(run, answer)
    return run


def compare(run: FastRun, answer: Answer) -> None:
    """One answer, finished or not, against the reference's, which runs that request alone.

    An open or aborted answer must begin the reference's. A request that one engine refuses must be refused by both,
    with one exception: only the fast run knows which ids are open.
    """
    request, got = answer.request, answer.completion
    if answer.id_was_open:
        if answer.refusal is None:
            raise run.error(f"{request.id}: taken while a request of that id is open")
        return
    sizes = (run.trace.shape, run.trace.dtype, run.engine.max_model_len)
    wanted = reference_answer(*sizes, request, is_half(run.trace), is_half_kv(run.trace))
    if isinstance(wanted, str) or answer.refusal is not None:
        if wanted != answer.refusal:
            raise run.error(f"{request.id}: fast says {answer.refusal!r}, the reference {wanted!r}")
        return
    whole = got.finish_reason not in (None, "abort")
    if got.token_ids != (wanted.token_ids if whole else wanted.token_ids[: len(got.token_ids)]):
        raise run.error(_mismatch(run, answer, wanted))
    if whole and got.finish_reason != wanted.finish_reason:
        both = f"fast ends with {got.finish_reason!r}, the reference with {wanted.finish_reason!r}"
        raise run.error(f"{request.id}: step {run.steps - 1}: {both}")
    if len(got.logprobs) != (len(got.token_ids) if request.params.logprobs is not None else 0):
        raise run.error(f"{request.id}: {len(got.logprobs)} logprobs for {len(got.token_ids)} tokens")
    bound = HALF_KV_LOGPROB_BOUND if is_half_kv(run.trace) else LOGPROB_BOUND[run.trace.dtype]
    for at, (ours, theirs) in enumerate(zip(got.logprobs, wanted.logprobs, strict=False)):
        if not _logprobs_agree(ours, theirs, bound):
            raise run.error(f"{request.id}: step {answer.steps[at]}: logprobs of answer token {at}: {ours} != {theirs}")
    _compare_prompts(run, answer, wanted, bound)


@lru_cache(maxsize=4096)
def reference_answer(
    shape: str, dtype: str, max_model_len: int, request: Request, half: bool = False, half_kv: bool = False
) -> Completion | str:
    """The reference's completion of one request alone, or the message with which it refuses it."""
    try:
        return _reference(shape, dtype, max_model_len, half, half_kv).generate([request])[0]
    except ValueError as refusal:
        return str(refusal)


@cache
def _reference(shape: str, dtype: str, max_model_len: int, half: bool, half_kv: bool) -> ReferenceEngine:
    return ReferenceEngine(
        *model_of(shape, half),
        max_model_len=max_model_len,
        dtype=getattr(torch, dtype),
        kv_dtype=torch.float16 if half_kv else None,
        seed_source=lambda: UNNAMED_SEED,
    )


def _compare_prompts(run: FastRun, answer: Answer, wanted: Completion, bound: float) -> None:
    """Logprobs of a prompt, told with the first event. Where numbers are short, ranks of the unlikely may differ."""
    got, name = answer.completion, answer.request.id
    told = got.finish_reason not in (None, "abort") or bool(got.token_ids)
    if (got.prompt_logprobs is None) != (wanted.prompt_logprobs is None or not told):
        raise run.error(f"{name}: logprobs of the prompt: {got.prompt_logprobs} != {wanted.prompt_logprobs}")
    if got.prompt_logprobs is None or wanted.prompt_logprobs is None:
        return
    if len(got.prompt_logprobs) != len(wanted.prompt_logprobs) or got.prompt_logprobs[0] is not None:
        raise run.error(f"{name}: {got.prompt_logprobs} are not None and {len(wanted.prompt_logprobs) - 1} logprobs")
    for at, (ours, theirs) in enumerate(zip(got.prompt_logprobs, wanted.prompt_logprobs, strict=True)):
        if ours is None or theirs is None:
            continue
        values = zip(
            [ours.logprob, *(v for _, v in ours.top)], [theirs.logprob, *(v for _, v in theirs.top)], strict=True
        )
        alike = all(abs(a - b) <= bound for a, b in values)
        if not alike or (run.trace.dtype == "float64" and not _logprobs_agree(ours, theirs, bound)):
            raise run.error(f"{name}: logprobs of prompt token {at}: {ours} != {theirs}")


def _logprobs_agree(ours: TokenLogprobs, theirs: TokenLogprobs, bound: float) -> bool:
    ids = [[token for token, _ in side.top] for side in (ours, theirs)]
    values = [[side.logprob, *(value for _, value in side.top)] for side in (ours, theirs)]
    close = all(abs(a - b) <= bound for a, b in zip(*values, strict=False))
    return ours.rank == theirs.rank and ids[0] == ids[1] and close


def _mismatch(run: FastRun, answer: Answer, wanted: Completion) -> str:
    got, request = answer.completion.token_ids, answer.request
    both = enumerate(zip(got, wanted.token_ids, strict=False))
    at = next((i for i, (a, b) in both if a != b), min(len(got), len(wanted.token_ids)))
    tokens = [*request.prompt_ids, *wanted.token_ids[:at]]
    ours = fast_logits(run.engine, tokens)
    theirs = reference_logits(run.trace, tokens)[-1]
    (fast_top, fast_gap), (reference_top, reference_gap) = _top_two(ours), _top_two(theirs)
    step = answer.steps[at] if at < len(answer.steps) else "none"
    return (
        f"{request.id}: step {step}, position {len(tokens)} (answer token {at}): "
        f"fast {got[at : at + 1]}, reference {wanted.token_ids[at : at + 1]}; "
        f"top two fast {fast_top} gap {fast_gap:.3g}, reference {reference_top} gap {reference_gap:.3g}, "
        f"largest logit difference {float((ours - theirs).abs().max()):.3g}"
    )


def fast_logits(engine: Engine, tokens: list[int]) -> Tensor:  # [V]
    """The fast forward's logits after `tokens`, computed alone in a pool of their own."""
    kernels, length = engine.cache.kernel_pool, len(tokens)
    block_size = length if kernels is None else -(-length // 16) * 16
    own = None if kernels is None else KernelPool(engine.config, num_blocks=1, block_size=block_size, half=kernels.half)
    pool = type(engine.cache)(
        engine.config,
        max_batch_size=1,
        num_blocks=1,
        block_size=block_size,
        max_model_len=length,
        dtype=engine.forward.dtype,
        device=engine.forward.device,
        kernel_pool=own,
    )
    return engine.forward.prefill([Chunk(0, tuple(tokens), tuple(range(length)))], pool)[0].double()


def reference_logits(limits: Trace, tokens: list[int]) -> Tensor:  # [T, V]
    """The reference forward's logits after each of `tokens`."""
    engine = _reference(limits.shape, limits.dtype, len(tokens) + 1, is_half(limits), is_half_kv(limits))
    kv = KVCache(engine.config, max_tokens=len(tokens), dtype=engine.kv_dtype)
    with torch.inference_mode():
        positions = torch.arange(len(tokens)).unsqueeze(0)
        return engine.model.forward(torch.tensor([tokens]), positions, kv)[0].double()


def _top_two(logits: Tensor) -> tuple[list[int], float]:  # [V]
    top = logits.topk(2)
    return top.indices.tolist(), float(top.values[0] - top.values[1])
