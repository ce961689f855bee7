"""Every block of a page that is not prose: its name, the command that makes it, and the function that does.

`everything()` makes all of them; `python -m tests.pages` writes them below docs/made, and tests/test_docs.py compares.
 Nothing here depends on the machine: what does is measured, dated, and kept in docs/made/measured.*.
"""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache, partial
from pathlib import Path

from serve.cli import main
from serve.learn import _lessons
from serve.trace_show import step_lines
from tests.bench import figures
from tests.pages import faults, runs

MACHINE = re.compile(r"^(  time      .*|note: .*)\n", re.M)
GATES_RUN = re.compile(r"^  gates     .*\n", re.M)  # how many depends on the level and the process


def command(*lines: str) -> str:
    """What one or more `nanoserve` lines print, each under its own line, run in an empty folder."""
    shown = []
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        try:
            for line in lines:
                out = io.StringIO()
                with redirect_stdout(out):
                    main(line.split()[1:])
                shown += [f"$ {line}", MACHINE.sub("", out.getvalue()).rstrip()]
        finally:
            os.chdir(before)
    return "\n".join(text for text in shown if text)


def table(heads: list[str], rows: list[list[object]]) -> str:
    """A Markdown table, numbers with thousands."""
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    lines = ["| " + " | ".join(heads) + " |", "|" + " ---: |" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in cells])


def addressing() -> str:
    """Cells written for the same run by a rebuild and by the slot table."""
    rows = [[r["steps"], r["rebuilt_cells"], r["persistent_cells"]] for r in figures.addressing()]
    return table(
        ["decode steps", "cells, rebuilt", "cells, slot table", "ratio"],
        [[*row, f"{row[1] / row[2]:.0f}x"] for row in rows],
    )


def captures() -> str:
    """Recordings in front of a client."""
    keys = ["generated", "predicted", "lazy", "warmed", "warm_list"]
    heads = ["tokens generated", "predicted", "cold, lazy", "cold, warmed", "recordings at start"]
    return table(heads, [[row[key] for key in keys] for row in figures.captures()])


serving_list = cache(figures.serving_list)  # the longest of the runs, shown three times


def warm_list() -> str:
    """What three capture lists cost at start-up, and what no list costs a client."""
    found = serving_list()
    lists = [[name, found["shapes"][name], f"{s:.2f} s"] for name, s in found["warm_seconds"].items()]
    lazy = [[g, run["captures"], f"{run['stall_seconds']:.2f} s"] for g, run in found["lazy"].items()]
    return (
        table(["warmed at start", "shapes", "start-up"], lists)
        + "\n\n"
        + table(["tokens generated", "recordings", "in a client's latency"], lazy)
    )


def budgets() -> str:
    """What a memory budget leaves of the list."""
    found = serving_list()
    rows = [[f"{int(b) / 1e6:,.0f} MB", v["width"], f"{v['shapes']} of 576"] for b, v in found["budgets"].items()]
    return table(["budget", "widest capture, tokens", "shapes that fit"], rows)


def coverage() -> str:
    """Decode steps that a recording covers, with rows that stay and rows that move."""
    rows = []
    for r in figures.replay_coverage():
        free, kept = r["free"], r["persistent"]
        share = f"{100 * free['replayed'] / r['decode_steps']:.0f} %"
        start = [r["rows"], r["requests"], r["gens"], r["decode_steps"], free["replayed"], free["scattered"], share]
        rows.append([*start, kept["replayed"], kept["moves"], kept["cells"]])
    heads = ["rows", "requests", "gen lengths", "decode steps", "free: replayed", "scattered", "share"]
    return table([*heads, "compact: replayed", "moves", "cells"], rows)


def prefix() -> str:
    """Prompt tokens that are computed with and without the prefix cache."""
    rows = []
    for r in figures.shared():
        share = f"{100 * (1 - r['with_cache'] / r['computed']):.0f} %"
        rows.append([r["trace"], r["computed"], r["with_cache"], share])
    return table(["requests", "prompt tokens computed", "with the cache", "found"], rows)


def chunk() -> str:
    """When a short prompt behind a long one has its first token, by the budget of a step."""
    rows: list[list[object]] = [[r["budget"], *r["short"], *r["long"]] for r in figures.behind()]
    heads = ["tokens a step", "short: step", "computed before", "long: step", "computed before"]
    return table(heads, rows)


def preemptions() -> str:
    """What a pool that is too small costs, and what a watermark leaves of it."""
    rows: list[list[object]] = [[*r.values()] for r in figures.tight()]
    return table(["pool", "blocks", "preemptions", "tokens prefilled", "steps"], rows)


def shown_steps(reader: runs.TraceReader, *wanted: int) -> str:
    """Some steps of a trace as `nanoserve trace show` prints them."""
    pool = reader.header["engine"]["pool"]["num_blocks"]
    blocks = ["\n".join(step_lines(s, num_blocks=pool)) + "\n" for s in reader if s.step in wanted]
    text = "\n".join(re.sub(r"  at [\d.]+ s", "", block) for block in blocks)
    return GATES_RUN.sub("", MACHINE.sub("", text)).rstrip()


BLOCKS: dict[str, Callable[[], str]] = {
    "addressing.md": addressing,
    "captures.md": captures,
    "warm_list.md": warm_list,
    "budgets.md": budgets,
    "coverage.md": coverage,
    "prefix.md": prefix,
    "chunk.md": chunk,
    "preemptions.md": preemptions,
    "cli.coverage.txt": partial(
        command,
        "nanoserve coverage --rows 8 --requests 16 --gens 4,8,16,32 --prompt-tokens 4 --no-compact-rows",
        "nanoserve coverage --rows 8 --requests 16 --gens 4,8,16,32 --prompt-tokens 4",
    ),
    "steps.compact.txt": lambda: shown_steps(runs.compact(), 4, 5),
    "steps.overlap.txt": lambda: shown_steps(runs.overlap(), *range(3, 8)),
    "steps.scheduler.txt": lambda: shown_steps(runs.scheduler(), 4, 5),
}
BLOCKS |= {
    f"trace.{n}.json": partial(lambda n: json.dumps(runs.stepper(n), separators=(",", ":")), n) for n in runs.STEPPERS
}
BLOCKS |= {f"fault.{n}.md": partial(faults.page, n) for n in faults.faults()}


def exercise(day: int) -> str:
    """How a page tells its exercise: the task, the commands, and what the starter gets."""
    lesson = LESSONS[day]
    wrong = lesson.check(lesson.starter())
    message = wrong.message if "." in wrong.by else f"{wrong.by}: {wrong.message}"
    lines = [f"{lesson.task} It is [[src {lesson.path} {lesson.name}]].", "", f"*Hint:* {lesson.hint}", ""]
    lines += ["```sh", f".venv/bin/nanoserve learn {day}", "```", ""]
    again = f".venv/bin/nanoserve learn {day}"
    lines += [
        f"writes `learn/day{day:02d}.py` with a first attempt in it. `{again} --check` puts your function in the place"
    ]
    lines += [f"of the engine's and runs it; `{again} --solution` shows ours. The first attempt gets:", ""]
    return "\n".join([*lines, "```{ .text .wrap }", faults.ADDRESS.sub("0x...", message), "```"])


LESSONS = _lessons()
BLOCKS |= {f"exercise.{day}.md": partial(exercise, day) for day in LESSONS}


def everything() -> dict[str, str]:
    """Every block by its file name below docs/made."""
    return {name: make().rstrip() + "\n" for name, make in BLOCKS.items()}


def folder() -> Path:
    """Where the blocks are kept."""
    return Path(__file__).resolve().parent.parent.parent / "docs" / "made"
