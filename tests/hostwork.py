"""An engine whose model answers at once, so that what is left of a step is the host's work.

Scheduler, tables, plan, inputs, recordings, gates and bookkeeping are the real ones; the forward returns fixed logits
and the sampler fixed tokens. `decoding` gives an engine whose every row has a given context behind it.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fast.cache import BatchedPagedKVCache
from fast.compact import RowCompactor
from fast.decode import DecodePath
from fast.engine import Engine
from fast.model import Chunk
from fast.plan import DecodePlan
from fast.rows import Rows
from fast.sampling import Sampled
from reference.request import Request, SamplingParams
from tests.harness import tiny_config

# One layer of one head of two numbers: a pool of a million tokens is 16 MB.
CONFIG = tiny_config(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, max_positions=8192)


class FixedForward:
    """In the place of `fast.model.Forward`: the right shapes, and nothing computed."""

    def __init__(self, rows: int) -> None:
        self.config = CONFIG
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.weight_bytes = self.compiles_after_ready = 0
        self.logits = torch.zeros(rows, CONFIG.vocab_size)

    def prefill(self, chunks: list[Chunk], cache: BatchedPagedKVCache, on_logits: Any = None) -> Tensor:
        return self.logits[: len(chunks)]

    def decode(self, plan: DecodePlan, cache: BatchedPagedKVCache) -> Tensor:
        return self.logits[: plan.input_ids.shape[0]]


def fixed_sample(
    logits: Tensor, rows: Rows, *, index: Any, positions: Any, chooser: Any = None, fail_alone: bool = False
) -> Sampled:
    """In the place of `sample_rows`: token 3 for everybody."""
    return Sampled([3] * len(index), [None] * len(index), [None] * len(index))


@contextmanager
def fixed_sampler() -> Iterator[None]:
    """Steps inside it choose by `fixed_sample`."""
    with mock.patch("fast.engine.sample_rows", fixed_sample):
        yield


def decoding(
    *,
    rows: int,
    context: int,
    steps: int,
    switches: bool = True,
    waiting: int = 0,
    served: int = 0,
    overlap: bool = False,
) -> Engine:
    """An engine in which `rows` requests of `context` tokens are prefilled and have `steps` decode steps to go.

    `switches` on is what the server runs: buckets, persistent inputs, warm recordings, compacted rows. `waiting`
    requests stand behind them and find no row; `served` others have come, ended early or late, and gone before. With
    `overlap` it is the fixed logits that choose, as they do on a device.
    """
    longest = context + steps + 2
    forward = FixedForward(rows)
    cache = BatchedPagedKVCache(
        CONFIG,
        max_batch_size=rows,
        num_blocks=rows * -(-longest // 16),
        block_size=16,
        max_model_len=longest,
    )
    names = ("bucket_decode", "persist_inputs", "capture_decode")
    path = DecodePath(forward, cache, **dict.fromkeys(names, switches))  # type: ignore[arg-type]
    engine = Engine(
        forward,  # type: ignore[arg-type]
        cache,
        decode=path,
        compactor=RowCompactor("compact"),
        overlap=overlap,
    )
    engine.scheduler.chunk_tokens = rows * context  # all of them in one step, which costs nothing here
    if switches:
        engine.warm_decode()
    with fixed_sampler():
        early_or_late = [SamplingParams(max_tokens=1 + index % 7, seed=0) for index in range(served)]
        engine.generate([Request((5,) * 9, params, f"s{index}") for index, params in enumerate(early_or_late)])
    params = SamplingParams(max_tokens=steps + 2, ignore_eos=True, seed=0)
    prompt = (5,) * context
    for index in range(rows + waiting):
        engine.submit(Request(prompt, params, f"r{index}"))
    with fixed_sampler():
        engine.step()
    assert len(engine.scheduler.running) == rows
    return engine


def work_of(engine: Engine, steps: int) -> Counter[str]:
    """Bytecodes executed in so many steps, by function, and C functions called: work that no clock disturbs.

    A loop inside one C function is one call here, however long; the clock of `tests/bench/bench_plan.py` sees those.
    The collector is off meanwhile, since it runs other people's callbacks and finalizers wherever it strikes.
    """
    work: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        work[frame.f_code.co_name] += event == "opcode"
        return trace

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            work[f"{arg.__name__}()"] += 1

    before = sys.gettrace(), sys.getprofile()
    gc.collect()
    gc.disable()
    with fixed_sampler():
        sys.setprofile(profile)
        sys.settrace(trace)
        try:
            for _ in range(steps):
                engine.step()
        finally:
            sys.settrace(before[0])
            sys.setprofile(before[1])
            gc.enable()
    return work


def fixed_engine(*, rows: int, num_blocks: int, max_model_len: int, **options: Any) -> Engine:
    """A plain engine over that model that has been asked nothing yet; `options` go to `Engine`."""
    sizes = {"max_batch_size": rows, "block_size": 16, "num_blocks": num_blocks, "max_model_len": max_model_len}
    forward: Any = FixedForward(rows)
    return Engine(forward, BatchedPagedKVCache(CONFIG, **sizes), **options)
