"""Step traces: each engine step as one JSON line, written while it serves; and the `trace` command.

A file begins with a header (`format`, the model's name and config, and what the engine says of itself) and goes on
with one line a step, under the field names of the engine's own record (`fast.record`). A disk that is full ends the
trace with one warning, and never the serving. Reading is `serve.trace_read`; this module knows lines and no engine.

Gates: gates.trace. Proof: tests/test_trace.py. Story: trace.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, runtime_checkable

from serve.options import UsageError

if TYPE_CHECKING:
    from reference.config import ModelConfig

FORMAT = 2
log = logging.getLogger(__name__)


class Record(Protocol):
    """One step's record, as far as a writer cares."""

    def as_dict(self) -> dict[str, Any]:
        """The record as plain values for JSON."""


@runtime_checkable
class Recorded(Protocol):
    """An engine that can tell of its steps."""

    def record_steps(self, on_step: Callable[[Record], None] | None) -> None:
        """Call `on_step` after each step from now on; None ends that."""

    def describe(self) -> dict[str, Any]:
        """Limits, switches and memory plan."""


def trace_option(parser: argparse._ArgumentGroup) -> None:
    """Add `--trace FILE`, for every command that runs an engine."""
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write every engine step to FILE as a JSON line")


def add_trace_arguments(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command `trace replay FILE | trace show FILE | trace html FILE`."""
    trace = commands.add_parser("trace", help="replay, show or draw a step trace (--trace FILE)", allow_abbrev=False)
    actions = trace.add_subparsers(dest="action", required=True, metavar="ACTION")
    replay = actions.add_parser("replay", help="run a trace's requests alone in the reference", allow_abbrev=False)
    replay.add_argument("file", type=Path, metavar="FILE")
    replay.add_argument("--model", metavar="MODEL", help="default: the model that the trace names")
    show = actions.add_parser("show", help="print a trace step by step, and its totals", allow_abbrev=False)
    show.add_argument("file", type=Path, metavar="FILE")
    show.add_argument("--steps", type=_step_range, metavar="A-B", help="print these steps; totals are of all")
    page = actions.add_parser("html", help="write a page that plays a trace step by step", allow_abbrev=False)
    page.add_argument("file", type=Path, metavar="FILE")
    page.add_argument("--out", type=Path, metavar="PAGE", help="default: FILE with .html after it")
    page.add_argument("--steps", type=_step_range, metavar="A-B", help="play these steps; default: all")


def trace(args: argparse.Namespace) -> int:
    """Run `trace replay` (1 when an answer differs), `trace show` or `trace html`.

    Raises:
        OSError, TraceError: the file cannot be read.
    """
    if args.action == "show":
        from serve.trace_show import show

        return show(args.file, steps=args.steps)
    if args.action == "html":
        from serve.trace_html import write_page

        return write_page(args.file, args.out or args.file.with_name(f"{args.file.name}.html"), steps=args.steps)
    from serve.trace_replay import replay_file

    return replay_file(args.file, model=args.model)


def attach_trace(engine: object, path: Path, *, model: str, config: ModelConfig) -> TraceWriter:
    """Trace an idle engine into `path` until it is gone; what stood in the file is lost.

    `model` is the word that loads the model again. The file is closed with the writer, or with the engine.

    Raises:
        UsageError: the engine tells nothing of its steps, or the file cannot be opened for writing.
        ValueError: a request is open.
    """
    if not isinstance(engine, Recorded):
        raise UsageError("--trace: the reference engine keeps no record of its steps; use --engine fast")
    watched = weakref.ref(engine)

    def detach() -> None:
        recorded = watched()
        if recorded is not None:
            recorded.record_steps(None)

    try:
        file = path.open("wb")
    except OSError as error:
        raise UsageError(f"--trace: {path}: {error.strerror or error}") from None
    writer = TraceWriter(file, name=str(path), on_stop=detach)
    weakref.finalize(engine, writer.close)
    writer.write({"format": FORMAT, "model": model, "config": asdict(config), "engine": engine.describe()})
    if not writer.failures:
        engine.record_steps(writer.step)
    return writer


class TraceWriter:
    """Writes lines to a file, each flushed whole; the first that fails is the last that is tried.

    `lines` counts those written, `failures` is 1 once the trace has ended before its engine. `on_stop` is called then.
    """

    def __init__(self, file: BinaryIO, *, name: str, on_stop: Callable[[], None]) -> None:
        self.name = name
        self.lines = self.failures = 0
        self._file = file
        self._on_stop = on_stop

    def step(self, record: Record) -> None:
        """Write one step's line."""
        self.write(record.as_dict())

    def write(self, line: Mapping[str, Any]) -> None:
        """Write one line; a failure is logged once and raises nothing."""
        if self.failures:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
        except (OSError, ValueError, TypeError) as error:  # a full disk, a closed file, a value JSON cannot hold
            self.failures += 1
            log.warning("%s: tracing stopped after %d lines (%s); serving goes on", self.name, self.lines, error)
            self.close()
            self._on_stop()
        else:
            self.lines += 1

    def close(self) -> None:
        """Close the file; again is nothing."""
        with suppress(OSError):  # what a full disk did not take is not worth an engine
            self._file.close()


def _step_range(text: str) -> tuple[int, int]:
    """`A-B`, or `A` alone, both ends included."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if last < first:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps such as 12 or 3-7")
    return first, last
