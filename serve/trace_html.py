"""A step trace as one web page that plays it: `nanoserve trace html FILE`.

The page is whole: data, script and style stand in it, so it can be opened from a disk or sent to somebody. The player
is `serve/stepper.js`, which the site embeds too; what it is given are the frames made here, one a step, in which every
row says how many tokens it stores. This module reads traces and knows no engine.

Gates: gates.trace. Proof: tests/test_trace_html.py. Story: trace.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from serve.trace_read import TraceReader, TraceStep

ASSETS = Path(__file__).resolve().parent
MOST_STEPS = 2000  # of one page; a browser holds no more with comfort


def write_page(path: Path, out: Path, *, steps: tuple[int, int] | None = None) -> int:
    """`nanoserve trace html`: write the page beside the trace, and say where it is.

    Raises:
        OSError, TraceError: the trace cannot be read, or the page cannot be written.
    """
    data = frames(TraceReader(path), steps=steps)
    out.write_text(page(data, title=path.name), "utf-8")
    print(f"{out}: {len(data['steps'])} steps")
    return 0


def frames(reader: TraceReader, *, steps: tuple[int, int] | None = None) -> dict[str, Any]:
    """What the player draws: the pool's sizes, and a frame a step, the last `MOST_STEPS` of the range at most."""
    stored: dict[str, int] = {}  # tokens whose K/V is in the pool, by request
    found, names = [], set[str]()
    for step in reader:
        frame = _frame(step, stored)
        if steps is None or steps[0] <= step.step <= steps[1]:
            found.append(frame)
            names |= {*step.rows.values(), *step.queue}
    found = found[-MOST_STEPS:]
    if found:
        found[0]["submitted"] = sorted(names | set(found[0]["submitted"]))  # every name has a colour from the start
    pool = reader.header["engine"].get("pool") or {}
    widths = [len(held) for frame in found for held in frame["blocks"].values()]
    size = pool.get("block_size") or 1
    return {
        "num_blocks": pool.get("num_blocks") or 0,
        "block_size": size,
        "max_batch_size": pool.get("max_batch_size") or 0,
        "widest": max(widths, default=1) * size,
        "steps": found,
    }


def page(data: dict[str, Any], *, title: str) -> str:
    """The whole page. Ids come from clients: they stand in JSON, whose `</` is broken up, and in text nodes only."""
    script, style = (ASSETS.joinpath(name).read_text("utf-8") for name in ("stepper.js", "stepper.css"))
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    name = html.escape(title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>:root{{color-scheme:light dark}}"
        f"body{{font-family:system-ui,sans-serif;max-width:60rem;margin:1rem auto;padding:0 1rem}}\n{style}</style>"
        f'</head><body><h1>{name}</h1><div class="stepper"><script type="application/json">{text}</script></div>'
        f"<script>{script}</script></body></html>\n"
    )


def _frame(step: TraceStep, stored: dict[str, int]) -> dict[str, Any]:
    """One step; `stored` is carried from step to step."""
    written = {step.rows[row]: 1 for row in step.decode_rows if row in step.rows}
    stored.update(dict.fromkeys((name for _, name, _ in step.admitted), 0))
    for row in step.decode_rows:
        stored[step.rows[row]] += 1
    for row, start, tokens in step.chunks:  # what was found in the prefix cache is stored before a chunk begins
        stored[step.rows[row]] = start + tokens
        written[step.rows[row]] = tokens
    return {
        "step": step.step,
        "submitted": [request.id for request in step.submitted],
        "preempted": list(step.preempted),
        "moves": _pairs(step.moves),
        "admitted": _pairs(step.admitted),
        "chunks": _pairs(step.chunks),
        "queue": list(step.queue),
        "decode_rows": list(step.decode_rows),
        "rows": dict(step.rows),
        "bucket": step.bucket,
        "replayed": step.replayed,
        "reason": step.reason,
        "blocks": {row: list(held) for row, held in step.blocks.items()},
        "stored": {row: stored.get(name, 0) for row, name in step.rows.items()},
        "written": {row: written[name] for row, name in step.rows.items() if name in written},
        "free_blocks": step.free_blocks,
        "events": _pairs(step.events),
    }


def _pairs(values: Iterable[tuple[Any, ...]]) -> list[list[Any]]:
    return [list(value) for value in values]
