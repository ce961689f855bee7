"""What the GPU path takes, as shares of what the card can do and as ratios of arms measured in one run.

Run: `python -m tests.bench.bench_gpu --seconds 240 --out gpu.json` on a machine with a card; `make gpu` does, after the
GPU tests. Each part asserts that its arms agree before it times them, and what no time is left for is listed, not left
out silently. Without a card the parts run in Triton's interpreter on a tiny model, which proves the script and times
nothing of interest: such a run says so in its JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fast.capture import CapturedDecode
from fast.compiled import CompiledDecode
from fast.engine import Engine
from fast.kernels.gpu.decode import Partials, paged_decode
from fast.model import Forward
from fast.plan import DecodePlan
from gates.core import set_level
from reference.request import Request, SamplingParams
from serve.machine import machine
from tests.bench.gpu_models import MODELS, engine, fits, step_bytes
from tests.gpu_mode import DEVICE

CARD = DEVICE == "cuda"
DTYPE = torch.bfloat16 if CARD else torch.float32
CAPTURED: dict[str, Any] = {"bucket_decode": True, "persist_inputs": True, "capture_decode": True, "compact_rows": True}
Line = dict[str, Any]
# model: (batches, contexts)
STEPS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "smollm2-135m": ((1, 8, 32), (512, 2048)),
    "llama-3.1-8b": ((1, 16, 64), (2048,)),
    "llama-3.2-1b": ((1, 16, 64), (2048,)),
}


class Clock:
    """Time that is left, and milliseconds of calls: device events on a card, the host's clock elsewhere."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self._end - time.monotonic()

    def ms(self, call: Callable[[], object], *, rounds: int = 20, repeats: int = 1) -> float:
        """Of one call: the median of `rounds` times `repeats` calls in a row, after three that warm up."""
        for _ in range(3 if CARD else 1):
            call()

        def several() -> None:
            for _ in range(repeats if CARD else 1):
                call()

        times = [self._once(several) for _ in range(rounds if CARD else 1)]
        return statistics.median(times) / (repeats if CARD else 1)

    def recorded_ms(self, call: Callable[[], object], *, repeats: int = 20) -> float:
        """Of one call of kernels shorter than their launch: `repeats` calls in one graph, so that no gap is timed."""
        if not CARD:
            return self.ms(call)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                call()
        return self.ms(graph.replay) / repeats

    def _once(self, call: Callable[[], object]) -> float:
        if not CARD:
            begin = time.perf_counter()
            call()
            return (time.perf_counter() - begin) * 1e3
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        call()
        end_event.record()
        end_event.synchronize()
        return float(begin_event.elapsed_time(end_event))


def bandwidth(clock: Clock) -> Iterator[Line]:
    """Bytes a second of a large copy, read and written both counted: what the shares below are shares of."""
    source = torch.randn((1 << 30 if CARD else 1 << 16), device=DEVICE, dtype=torch.float32)
    target = torch.empty_like(source)
    ms = clock.ms(lambda: target.copy_(source))
    yield {"part": "bandwidth", "bytes_per_s": 2 * source.numel() * 4 / (ms / 1e3)}


def attention(clock: Clock, bytes_per_s: float) -> Iterator[Line]:
    """The decode kernel alone, through a table of slots and one of blocks: K/V bytes over measured bandwidth.

    Every shape moves more than a card's cache holds.
    """
    config, block = MODELS["llama-3.1-8b" if CARD else "tiny"], 16
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    for rows, context in ((16, 2048), (64, 2048), (16, 8192), (4, 8192)) if CARD else ((2, 40),):
        slots = rows * context
        k, v = (torch.randn(slots, kv_heads, dim, device=DEVICE, dtype=DTYPE) for _ in range(2))
        order = torch.randperm(slots // block, device=DEVICE)[: rows * (context // block)].view(rows, -1)
        by_slot = (order[:, :, None] * block + torch.arange(block, device=DEVICE)).view(rows, -1)
        lengths = torch.full((rows,), by_slot.shape[1], device=DEVICE)
        q = torch.randn(rows, heads, dim, device=DEVICE, dtype=DTYPE)
        splits = -(-context // 256)
        partials = Partials.empty(rows=rows, heads=heads, dim=dim, splits=splits, device=DEVICE)
        outs = [torch.empty_like(q) for _ in range(2)]
        how: dict[str, Any] = {"split": 256, "programs": splits, "scale": dim**-0.5}

        def run(
            index: int, q: Any = q, k: Any = k, v: Any = v, tables: Any = (by_slot, order), lengths: Any = lengths,
            outs: Any = outs, partials: Any = partials, how: Any = how,
        ) -> None:  # fmt: skip
            arm = {"block_size": None if index == 0 else block}
            paged_decode(q, k, v, tables[index], lengths, outs[index], partials, **how, **arm)

        times = [clock.recorded_ms(lambda index=index: run(index)) for index in (0, 1)]
        assert torch.equal(*outs), "both tables name the same keys"
        moved = 2 * rows * by_slot.shape[1] * kv_heads * dim * DTYPE.itemsize
        tables = {"slot table": by_slot.numel() * 8, "block table": order.numel() * 8}
        for (arm, table_bytes), ms in zip(tables.items(), times, strict=True):
            share = moved / bytes_per_s / (ms / 1e3)
            yield {
                "part": "attention", "arm": arm, "rows": rows, "context": context, "ms": ms, "share": share,
                "table_bytes": table_bytes,
            }  # fmt: skip


def decode_steps(clock: Clock, bytes_per_s: float) -> Iterator[Line]:
    """One decode step by batch and context: as it is written, and replayed; shares of the roofline."""
    for name, (batches, contexts) in STEPS.items() if CARD else {"tiny": ((2,), (20,))}.items():
        rows, tokens = max(batches), max(contexts) + 16
        free = torch.cuda.mem_get_info()[0] if CARD else 2**62
        if not fits(name, rows=rows, tokens=tokens, element_bytes=DTYPE.itemsize, free_bytes=free):
            yield {"part": "decode", "model": name, "left_out": f"{rows} rows x {tokens} tokens do not fit the device"}
            continue
        if clock.left < 40 and CARD:
            yield {"part": "decode", "model": name, "left_out": "no time was left"}
            continue
        built = engine(name, dtype=DTYPE, device=DEVICE, rows=rows, tokens=tokens, triton=True, **CAPTURED)
        built.warm_decode()
        for pool in (*built.cache.k, *built.cache.v):
            pool.normal_()
        for batch in batches:
            for context in contexts:
                yield from _one_step(clock, built, name, batch, context, bytes_per_s)
        del built
        forget()


def _one_step(clock: Clock, built: Engine, name: str, batch: int, context: int, bytes_per_s: float) -> Iterator[Line]:
    with_rows(built, batch, context - 1)
    replayed = built.decode.run(range(batch), [5 + row for row in range(batch)]).clone()
    plan, captured = built.decode.last_plan, built.decode.captured
    assert plan is not None
    assert captured is not None
    eager = built.forward.decode(plan, built.cache)[:batch]
    assert torch.equal(replayed, eager), "a recording computes what the step computes"
    least = step_bytes(MODELS[name], rows=batch, context=context, element_bytes=DTYPE.itemsize) / bytes_per_s * 1e3
    arms = {"graph": replay_of(captured, plan), "eager": lambda: built.forward.decode(plan, built.cache)}
    for arm, call in arms.items():
        ms = clock.ms(call, repeats=5)
        yield {
            "part": "decode", "model": name, "arm": arm, "rows": batch, "context": context, "ms": ms,
            "roofline_ms": least, "times_roofline": ms / least,
        }  # fmt: skip
    for row in range(batch):
        built.cache.free(row)


def with_rows(built: Engine, rows: int, context: int) -> None:
    """Rows 0..rows-1, each with room for one token more than the `context` tokens that it holds."""
    for row in range(rows):
        built.cache.adopt_row(row, [])
        built.cache.grow_row(row, context + 1)
        built.cache.advance_row(row, context)


def replay_of(captured: CapturedDecode, plan: DecodePlan) -> Callable[[], object]:
    """The recording that this plan replays."""
    recording, reason = captured._recording_for(plan)
    assert recording is not None, reason
    return recording.replay


def compiled_step(clock: Clock, bytes_per_s: float) -> Iterator[Line]:
    """torch.compile's step beside the torch forward's own, one row: the arm that removes launches another way."""
    if clock.left < 70 and CARD:
        yield {"part": "compile", "left_out": "no time was left"}
        return
    yield from _compiled(clock, bytes_per_s, *(("smollm2-135m", 512) if CARD else ("tiny", 20)))
    forget()


def _compiled(clock: Clock, bytes_per_s: float, name: str, context: int) -> Iterator[Line]:
    built = engine(name, dtype=DTYPE, device=DEVICE, rows=1, tokens=context + 16, bucket_decode=True)
    assert isinstance(built.forward, Forward)
    with_rows(built, 1, context - 1)
    wanted = built.decode.run((0,), (5,)).clone()
    plan = built.decode.last_plan
    assert plan is not None
    compiled = CompiledDecode(built.forward, row_sizes=(1,), backend="inductor" if CARD else "eager")
    got = compiled.decode(plan, built.cache)[:1]
    torch.testing.assert_close(got, wanted, rtol=0.1, atol=0.1)
    least = step_bytes(MODELS[name], rows=1, context=context, element_bytes=DTYPE.itemsize) / bytes_per_s * 1e3
    arms = {
        "compile": lambda: compiled.decode(plan, built.cache),
        "torch eager": lambda: built.forward.decode(plan, built.cache),
    }
    for arm, call in arms.items():
        ms = clock.ms(call)
        yield {
            "part": "compile", "model": name, "arm": arm, "rows": 1, "context": context, "ms": ms,
            "roofline_ms": least, "times_roofline": ms / least,
        }  # fmt: skip


def token_gaps(clock: Clock) -> Iterator[Line]:
    """Milliseconds between two tokens of a request, p50 and p99, while requests come and go, by arm."""
    name = "smollm2-135m" if CARD else "tiny"
    arms: dict[str, Line] = {
        "graphs, warmed": {"triton": True, **CAPTURED},
        "graphs, overlap": {"triton": True, **CAPTURED, "overlap": True},
        "graphs, lazy": {"triton": True, **CAPTURED, "record_on_miss": True},
        "eager": {"triton": True, "compact_rows": True},
        "torch eager": {"compact_rows": True},
        "torch compiled": {"compact_rows": True, "bucket_decode": True, "compile_decode": True},
    }
    answers: dict[str, Any] = {}
    for arm, switches in arms.items():
        compiles = "compile_decode" in switches
        if clock.left < (100 if compiles else 25) and CARD:
            yield {"part": "itl", "model": name, "arm": arm, "left_out": "no time was left"}
            continue
        if compiles:
            switches = switches | {"compile_backend": "inductor" if CARD else "eager"}
        built = engine(name, dtype=DTYPE, device=DEVICE, rows=8 if CARD else 2, tokens=512 if CARD else 24, **switches)
        if compiles or arm in ("graphs, warmed", "graphs, overlap"):
            built.warm_decode()
        tokens, gaps = served(built)
        answers[arm] = tokens
        if "triton" in switches:
            assert tokens == answers.get("graphs, warmed", tokens), f"{arm}: not the tokens of the warmed arm"
        quantiles = statistics.quantiles(gaps, n=100)
        stats = built.stats()
        yield {
            "part": "itl", "model": name, "arm": arm, "p50_ms": quantiles[49], "p99_ms": quantiles[98],
            "replayed": stats["replayed"], "decode_steps": stats["decode_steps"],
            "captures_after_ready": stats["captures_after_ready"], "steps_ahead": stats["steps_ahead"],
        }  # fmt: skip
        del built
        forget()


def served(built: Engine) -> tuple[dict[str, list[int]], list[float]]:
    """Requests of unequal lengths, a new one every third step; every token, and every gap in milliseconds."""
    count, longest = (24, 96) if CARD else (2, 4)
    waiting = [
        Request(
            range(3, 3 + 5 + 7 * (i % 9)),
            SamplingParams(longest // (1 + i % 4), temperature=0.0, ignore_eos=True),
            f"r{i}",
        )
        for i in range(count)
    ]
    if not CARD:
        waiting = [Request(request.prompt_ids[:8], request.params, request.id) for request in waiting]
    last: dict[str, float] = {}
    tokens: dict[str, list[int]] = {}
    gaps = []
    step = 0
    while waiting or built.has_work:
        if waiting and step % 3 == 0:
            built.submit(waiting.pop(0))
        step += 1
        events, now = built.step(), time.perf_counter()
        for event in events:
            tokens.setdefault(event.request_id, []).append(event.token_id or 0)
            if event.request_id in last:
                gaps.append((now - last[event.request_id]) * 1e3)
            last[event.request_id] = now
    return tokens, gaps


def whole_steps(clock: Clock) -> Iterator[Line]:
    """A step of the whole engine, host work and all, in turn and launched ahead."""
    from tests.bench.gpu_steps import timed

    yield from timed(clock)


def against_transformers(clock: Clock) -> Iterator[Line]:
    """Decode tokens a second of `generate` in transformers, eager and compiled with a static cache, and of ours."""
    if not CARD:
        yield {"part": "transformers", "left_out": "runs on a card alone"}
        return
    from tests.bench.gpu_transformers import compared

    yield from compared(clock)


def forget() -> None:
    """Give what a part held on the device back, so that the next one has it."""
    if CARD:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def run(seconds: float, out: Path) -> list[Line]:
    """Every part in order of importance; the file is written anew after each line, so a cut run leaves what it had."""
    set_level("cheap")
    clock, lines = Clock(seconds), [{"part": "machine", "interpreted": not CARD, **machine()}]

    def keep(found: Iterator[Line]) -> None:
        for line in found:
            lines.append(line)
            out.write_text(json.dumps(lines, indent=1))

    keep(bandwidth(clock))
    bytes_per_s = float(lines[-1]["bytes_per_s"])
    parts: list[Callable[[], Iterator[Line]]] = [
        lambda: attention(clock, bytes_per_s),
        lambda: decode_steps(clock, bytes_per_s),
        lambda: token_gaps(clock),
        lambda: against_transformers(clock),
        lambda: whole_steps(clock),
        lambda: compiled_step(clock, bytes_per_s),
    ]
    for part in parts:
        try:
            keep(part())
        except Exception as fault:  # one part's fault is its own line, and the others still run
            lines.append({"part": "fault", "told": f"{type(fault).__name__}: {fault}"[:600]})
            out.write_text(json.dumps(lines, indent=1))
            forget()
    return lines


def table(lines: list[Line]) -> str:
    """The numbers, one line each, and the goals that they meet or miss."""
    told = []
    for line in lines:
        words = [str(line[name]) for name in ("part", "model", "arm") if name in line]
        words += [f"{line[name]} {name}" for name in ("rows", "context") if name in line]
        if "left_out" in line or "told" in line:
            words.append(str(line.get("left_out") or line["told"]))
        for name, form in FORMS.items():
            if name in line:
                words.append(form.format(line[name]))
        told.append("  ".join(words))
    return "\n".join(told)


FORMS = {
    "bytes_per_s": "{:.3e} B/s",
    "ms": "{:.3f} ms",
    "share": "{:.0%} of bandwidth",
    "device_share": "{:.0%} of it on the device",
    "times_roofline": "{:.2f} x roofline",
    "p50_ms": "p50 {:.2f} ms",
    "p99_ms": "p99 {:.2f} ms",
    "tokens_per_s": "{:.0f} tokens/s",
}


def main() -> int:
    """Run, with every line in the file as it comes; 1 when a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    args = parser.parse_args()
    lines = run(args.seconds, args.out)
    return int(any(line["part"] == "fault" for line in lines))


if __name__ == "__main__":
    raise SystemExit(main())
