"""A step trace for a person: one block of plain text a step, totals at the end.

Rows are named by their requests, the pool is drawn as a bar in which each cell shows the row that owns its blocks,
and a decode step says its bucket and whether it was replayed or why not. Ids come from clients, so anything that a
terminal could take for a command is escaped.

Gates: gates.trace. Proof: tests/test_trace.py. Story: trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve.trace_read import TraceReader, TraceStep

SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
BAR_CELLS = 64


def show(path: Path, *, steps: tuple[int, int] | None = None) -> int:
    """`nanoserve trace show`: print the steps in the range, and totals of the whole trace.

    Raises:
        OSError, TraceError: the file cannot be read, or a line is damaged; what came before it is printed.
    """
    reader = TraceReader(path)
    for line in lines(reader, steps=steps):
        print(line)
    return 0


def lines(reader: TraceReader, *, steps: tuple[int, int] | None = None) -> Iterator[str]:
    """The text, line by line, while the file is read."""
    yield from _header(reader.header)
    num_blocks = (reader.header["engine"].get("pool") or {}).get("num_blocks") or 0
    totals = Totals(num_blocks=num_blocks)
    for step in reader:
        totals.add(step)
        if steps is None or steps[0] <= step.step <= steps[1]:
            yield ""
            yield from step_lines(step, num_blocks=num_blocks)
    yield ""
    yield from totals.lines()
    if reader.truncated:
        yield "note: the last line is cut short and was left out"


def step_lines(step: TraceStep, *, num_blocks: int) -> list[str]:
    """One step: a title, then a line for each thing that there is to tell."""
    title = f"step {step.step}  at {step.at_us / 1e6:.3f} s  {len(step.rows)} rows, {len(step.queue)} waiting"
    parts = [
        ("submitted", _join(f"{_name(r.id)} ({len(r.prompt_ids)} tokens)" for r in step.submitted)),
        ("preempted", _join(_name(name) for name in step.preempted)),
        ("moved", _join(f"row {src} -> {dst}" for src, dst in step.moves)),
        ("admitted", _join(f"row {row} <- {_name(name)} ({tokens} tokens)" for row, name, tokens in step.admitted)),
        ("queue", _join(_name(name) for name in step.queue)),
        ("rows", _join(f"{row} {_name(name)}" for row, name in sorted(step.rows.items()))),
        ("prefill", _join(f"row {row}: {count} tokens from {start}" for row, start, count in step.chunks)),
        ("decode", _decode(step)),
        ("overlap", _overlap(step)),
        ("pool", _pool(step, num_blocks)),
        ("events", _join(_event(*event) for event in step.events)),
        ("time", _join(f"{phase} {us:,} us" for phase, us in step.timings_us.items() if us)),
        ("gates", f"{step.gate_checks:,} checks, {sum(step.gate_failures.values())} failures"),
        ("FAULT", "" if step.fault is None else _name(step.fault, spaces=True)),
    ]
    return [title, *(f"  {label:<10}{text}" for label, text in parts if text)]


def pool_bar(blocks: Mapping[int, Sequence[int]], *, num_blocks: int) -> str:
    """The pool left to right, at most 64 cells: the owning row's symbol, `+` for several owners, `.` for nobody.

    Rows 0-9 are digits, then come a-z and A-Z; rows beyond share `#`.
    """
    per_cell = max(1, -(-num_blocks // BAR_CELLS))
    owners: list[set[str]] = [set() for _ in range(-(-num_blocks // per_cell))]
    for row, held in blocks.items():
        for block in held:
            owners[block // per_cell].add(SYMBOLS[row] if row < len(SYMBOLS) else "#")
    return "".join("." if not cell else "+" if len(cell) > 1 else next(iter(cell)) for cell in owners)


@dataclass(slots=True)
class Totals:
    """Sums over a trace."""

    num_blocks: int
    steps: int = 0
    decode_steps: int = 0
    mixed_steps: int = 0
    replayed: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    ahead: int = 0
    dropped: int = 0
    waited: Counter[str] = field(default_factory=Counter)
    prefilled: int = 0
    tokens: int = 0
    submitted: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    moves: int = 0
    peak_blocks: int = 0
    gate_checks: int = 0
    gate_failures: Counter[str] = field(default_factory=Counter)
    timings_us: Counter[str] = field(default_factory=Counter)

    def add(self, step: TraceStep) -> None:
        """Count one step."""
        self.steps += 1
        self.mixed_steps += step.mixed
        if step.decode_rows and step.fault is None and not step.mixed:
            self.decode_steps += 1
            self.replayed += step.replayed
            self.eager.update([step.reason] if step.reason else [])
        self.ahead += bool(step.ahead)
        self.dropped += step.dropped
        self.waited.update(step.waited)
        self.prefilled += sum(count for _, _, count in step.chunks)
        self.tokens += sum(token is not None for _, token, _ in step.events)
        self.submitted += len(step.submitted)
        self.endings.update(reason for _, _, reason in step.events if reason is not None)
        self.preemptions += len(step.preempted)
        self.moves += len(step.moves)
        self.peak_blocks = max(self.peak_blocks, sum(len(held) for held in step.blocks.values()))
        self.gate_checks += step.gate_checks
        self.gate_failures.update(step.gate_failures)
        self.timings_us.update(step.timings_us)

    def lines(self) -> list[str]:
        """The sums as text."""
        all_us = self.timings_us.total() or 1
        still_open = self.submitted - self.endings.total()
        endings = [f"{count:,} {reason}" for reason, count in sorted(self.endings.items())]
        eager = [f"{count:,} eager: {reason}" for reason, count in sorted(self.eager.items())]
        waited = [f"{count:,} waited: {reason}" for reason, count in sorted(self.waited.items())]
        overlap = [f"{self.ahead:,} steps ahead of the tokens before them", f"{self.dropped:,} tokens dropped", *waited]
        failures = [f"{count:,} of {name}" for name, count in sorted(self.gate_failures.items())]
        parts = [
            ("steps", f"{self.steps:,}, {self.decode_steps:,} with a decode, {self.mixed_steps:,} mixed"),
            ("decode", ", ".join([f"{self.replayed:,} replayed", *eager])),
            ("overlap", ", ".join(overlap) if self.ahead or waited else ""),
            ("requests", ", ".join([f"{self.submitted:,} submitted", *endings, f"{still_open:,} open"])),
            ("tokens", f"{self.tokens:,} emitted, {self.prefilled:,} prefilled"),
            ("rows", f"{self.moves:,} moves, {self.preemptions:,} preemptions"),
            ("pool", f"{self.peak_blocks:,} of {self.num_blocks:,} blocks at the peak"),
            ("time", _join(f"{phase} {us:,} us ({us / all_us:.0%})" for phase, us in self.timings_us.items())),
            ("gates", ", ".join([f"{self.gate_checks:,} checks", *(failures or ["0 failures"])])),
        ]
        return ["totals", *(f"  {label:<10}{text}" for label, text in parts if text)]


def _header(header: Mapping[str, Any]) -> list[str]:
    engine = header["engine"]
    decode = engine.get("decode") or {}
    on = [name for name, value in decode.items() if value is True]
    warm = decode.get("warm") or {}
    pool = engine.get("pool") or {}
    return [
        f"model     {_name(header['model'])}, {engine['name']} engine in {engine['dtype'].removeprefix('torch.')}",
        f"pool      {pool.get('num_blocks')} blocks of {pool.get('block_size')} tokens, "
        f"{pool.get('max_batch_size')} rows, up to {engine['max_model_len']} tokens a request",
        f"decode    {', '.join(on) or 'no switch'}, rows {engine.get('rows')}, {warm.get('graphs', 0)} warm shapes",
    ]


def _overlap(step: TraceStep) -> str:
    parts = ["ahead of the tokens before it"] if step.ahead else []
    parts += [f"waited: {reason}" for reason in step.waited]
    parts += [f"{len(step.parked)} blocks of no row are still written"] if step.parked else []
    return _join([*parts, *([f"{step.dropped} tokens dropped"] if step.dropped else [])])


def _decode(step: TraceStep) -> str:
    if not step.decode_rows:
        return ""
    if step.mixed:
        return f"{len(step.decode_rows)} rows, in one forward with the prefill"
    bucket = "no bucket" if step.bucket is None else f"bucket {step.bucket[0]} x {step.bucket[1]}"
    how = "replayed" if step.replayed else f"eager: {step.reason}"
    return f"{len(step.decode_rows)} rows, {bucket}, {how}"


def _pool(step: TraceStep, num_blocks: int) -> str:
    if not num_blocks:
        return ""
    owned = sum(len(held) for held in step.blocks.values())
    return f"[{pool_bar(step.blocks, num_blocks=num_blocks)}] {owned} of {num_blocks} blocks, {step.free_blocks} free"


def _event(request_id: str, token: int | None, reason: str | None) -> str:
    words = [_name(request_id), "" if token is None else str(token), reason or ""]
    return " ".join(word for word in words if word)


def _join(words: Iterable[str]) -> str:
    return " | ".join(words)


def _name(text: str, *, spaces: bool = False) -> str:
    """As it is when it is one printable word (or, with `spaces`, a printable line), quoted and escaped otherwise."""
    plain = text.isprintable() and text != "" and (spaces or " " not in text)
    return text if plain else ascii(text)
