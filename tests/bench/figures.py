"""Print the exact figures, each counted by the real classes of the engine over a real run: no formula stands in.

Run: `python -m tests.bench.figures` (or `make figures`); `--json` prints one object instead of tables. They are
arithmetic over schedules, so they are the same on every machine; tests/test_exact_figures.py holds them.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from fast.blocks import BlockTable
from fast.buckets import BucketSet
from fast.capture import CapturedDecode, HostRecorder
from fast.coverage import coverage
from fast.inputs import DecodeInputs
from fast.plan import plan_decode
from fast.slots import SlotTable
from fast.warmup import lazy_captures, stall_seconds, warm_shapes, warmup_seconds, width_ceiling
from tests.bench.bench_slots import PROMPT, ROWS, filled, run_rebuild, run_table
from tests.bench.bench_warmup import Run
from tests.bench.sharing import behind, shared, tight
from tests.test_capture import toy_forward

SECONDS_PER_GRAPH = 0.05
WORKLOADS = [
    (4, 8, (16,)),
    (4, 8, (8, 16)),
    (4, 8, (4, 32)),
    (8, 16, (16,)),
    (8, 16, (8, 16)),
    (8, 16, (4, 32)),
    (8, 16, (4, 8, 16, 32)),
    (16, 32, (4, 32)),
]


def addressing() -> list[dict[str, Any]]:
    """Cells written by a rebuild and by the slot table over the same run of 4 rows off a 16-token prompt."""
    rows = tuple(range(ROWS))
    return [
        {
            "steps": steps,
            "rebuilt_cells": run_rebuild(filled(steps), rows, steps)[1],
            "persistent_cells": run_table(filled(steps), rows, steps)[1],
            "prompt_tokens": PROMPT,
        }
        for steps in (8, 64, 128, 512)
    ]


def captures() -> list[dict[str, Any]]:
    """Recordings in front of a client, predicted and measured, lazily and after warming (2 rows, 16-token prompt)."""
    found = []
    for generated in (8, 32, 64, 128):
        lazy, warm = (Run(generated, warm=warm).start().decode() for warm in (False, True))
        found.append(
            {
                "generated": generated,
                "predicted": lazy_captures(generated=generated, prompt_tokens=16, width_multiple=32),
                "lazy": lazy.captured.captures_after_ready,
                "warmed": warm.captured.captures_after_ready,
                "warm_list": warm.captured.captures,
            }
        )
    return found


def serving_list() -> dict[str, Any]:
    """The capture list of 256 rows x 8,192 tokens at width multiple 128: its size, its price, what a budget leaves."""
    serving = BucketSet(max_batch_size=256, max_model_len=8192, width_multiple=128)
    trims: dict[str, dict[str, int]] = {
        "full": {},
        "rows<=8": {"max_rows": 8},
        "rows<=8,width<=2048": {"max_rows": 8, "max_width": 2048},
    }
    lists = {name: warm_shapes(serving, **trim) for name, trim in trims.items()}
    budgets = {}
    for budget in (64_000_000, 268_000_000, 1_000_000_000):
        ceiling = width_ceiling(budget, rows=256, num_heads=32)
        budgets[budget] = {"width": ceiling, "shapes": len(warm_shapes(serving, max_width=ceiling))}
    return {
        "shapes": {name: len(shapes) for name, shapes in lists.items()},
        "warm_seconds": {
            name: round(warmup_seconds(shapes, seconds_per_graph=SECONDS_PER_GRAPH), 2)
            for name, shapes in lists.items()
        },
        "lazy": {generated: lazy_run(generated) for generated in (128, 512, 2048, 8192)},
        "budgets": budgets,
    }


def lazy_run(generated: int) -> dict[str, Any]:
    """One row generating from nothing at width multiple 128: recordings counted by a real capture, and their price."""
    table = SlotTable(max_batch_size=1, max_model_len=generated)
    inputs = DecodeInputs(max_batch_size=1, sink_slot=generated)
    buckets = BucketSet(max_batch_size=1, max_model_len=generated, width_multiple=128)
    captured = CapturedDecode(toy_forward, HostRecorder(), slot_table=table, inputs=inputs, record_on_miss=True)
    captured.ready()
    blocks = BlockTable(16)
    blocks.adopt(list(range(-(-generated // 16))))
    for _ in range(generated):
        plan = plan_decode(
            tables=[blocks],
            slot_table=table,
            rows=(0,),
            input_ids=(0,),
            sink_slot=inputs.sink_slot,
            buckets=buckets,
            inputs=inputs,
        )
        captured.run(plan)
    stall = stall_seconds(captured.captures_after_ready, seconds_per_graph=SECONDS_PER_GRAPH)
    return {"captures": captured.captures_after_ready, "stall_seconds": round(stall, 2)}


def replay_coverage() -> list[dict[str, Any]]:
    """Decode steps that a recording covers, with free rows and with a persistent batch (4-token prompts)."""
    found = []
    for rows, requests, gens in WORKLOADS:
        free = coverage(rows=rows, requests=requests, gens=gens, compact_rows=False)
        kept = coverage(rows=rows, requests=requests, gens=gens, compact_rows=True)
        found.append(
            {
                "rows": rows,
                "requests": requests,
                "gens": "/".join(map(str, gens)),
                "decode_steps": free.decode_steps,
                "free": {"replayed": free.replayed, "scattered": free.scattered},
                "persistent": {"replayed": kept.replayed, "moves": kept.moves, "cells": kept.cells},
            }
        )
    return found


def figures() -> dict[str, Any]:
    """All of them."""
    return {
        "addressing": addressing(),
        "captures": captures(),
        "serving_list": serving_list(),
        "coverage": replay_coverage(),
        "shared": shared(),
        "behind": behind(),
        "tight": tight(),
    }


def render(found: dict[str, Any]) -> str:
    """The same as tables for a person."""
    lines = ["cells written, 4 rows off a 16-token prompt", f"{'steps':>6} {'rebuilt':>10} {'persistent':>11}"]
    lines += [f"{r['steps']:>6} {r['rebuilt_cells']:>10,} {r['persistent_cells']:>11,}" for r in found["addressing"]]
    lines += ["", "recordings in front of a client, 2 rows off a 16-token prompt, width multiple 32"]
    lines += [f"{'generated':>9} {'predicted':>9} {'lazy':>5} {'warmed':>6} {'warm list':>9}"]
    for r in found["captures"]:
        row = (r["generated"], r["predicted"], r["lazy"], r["warmed"], r["warm_list"])
        lines.append(f"{row[0]:>9} {row[1]:>9} {row[2]:>5} {row[3]:>6} {row[4]:>9}")
    serving = found["serving_list"]
    lines += ["", "256 rows x 8,192 tokens, width multiple 128, 50 ms a graph"]
    lines += [
        f"  warm {n:<20} {serving['shapes'][n]:>4} shapes {s:>6.2f} s" for n, s in serving["warm_seconds"].items()
    ]
    for generated, run in serving["lazy"].items():
        price = f"{run['stall_seconds']:>6.2f} s of a client's latency"
        lines.append(f"  lazy, {generated:>5} tokens {run['captures']:>11} graphs {price}")
    for budget, b in serving["budgets"].items():
        fits = f"width {b['width']:>6,}, {b['shapes']} of 576 shapes"
        lines.append(f"  {int(budget) / 1e6:>5,.0f} MB for fp32 scores at 32 heads: {fits}")
    lines += ["", "decode steps covered by a recording, 4-token prompts"]
    heads = f"{'free rows':>12} {'persistent: moves cells':>26}"
    lines += [f"{'rows':>4} {'requests':>8} {'gens':>10} {'steps':>6} {heads}"]
    for r in found["coverage"]:
        free, kept = r["free"], r["persistent"]
        arms = f"{free['replayed']:>5} / {free['scattered']:<4} {kept['replayed']:>12} {kept['moves']:>6}"
        lines.append(
            f"{r['rows']:>4} {r['requests']:>8} {r['gens']:>10} {r['decode_steps']:>6} {arms} {kept['cells']:>6}"
        )
    return "\n".join([*lines, *_render_prompts(found)])


def _render_prompts(found: dict[str, Any]) -> list[str]:
    lines = ["", "prompt tokens computed, without and with the prefix cache"]
    lines += [f"{r['trace']:>42} {r['computed']:>7,} {r['with_cache']:>7,}" for r in found["shared"]]
    lines += ["", "step and tokens computed before the first token, 10 tokens behind 4,000"]
    for r in found["behind"]:
        (short, tokens), (long, all_) = r["short"], r["long"]
        lines.append(f"  budget {r['budget']:>5,}: short at step {short} ({tokens:,}), long at step {long} ({all_:,})")
    lines += ["", "16 requests of 60 to 75 + 120 tokens"]
    for r in found["tight"]:
        counts = f"{r['preemptions']:>3} preemptions {r['prefill_tokens']:>6,} tokens prefilled {r['steps']:>4} steps"
        lines.append(f"  {r['pool']:<24} {r['blocks']:>4} blocks {counts}")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    counted = figures()
    print(json.dumps(counted) if parser.parse_args().json else render(counted))
