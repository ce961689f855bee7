"""Is a trace true? Run each of its requests again, alone, and compare token by token.

The engine that replays has one request at a time and shares no algorithm with the one that was traced, so equal
answers say that nobody's tokens depended on the batch, the rows, the buckets or the recordings. Each request is
followed as far as the trace goes: an aborted one to its last token, one that is still open likewise. Text is not
part of it, only ids. The engine comes from `serve.boot`, by name.

Gates: gates.trace. Proof: tests/test_trace.py. Story: trace.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from reference.request import Engine, Request
from serve.guide import Guides, GuideSpec
from serve.trace_read import TraceError, TraceReader

MOST_SHOWN = 20  # mismatches printed; the others are counted


@dataclass(slots=True)
class History:
    """One request of a trace: what was asked, and each of its events with the step that emitted it."""

    request: Request
    events: list[tuple[int, int | None, str | None]] = field(default_factory=list)  # (step, token id, finish reason)

    @property
    def finish_reason(self) -> str:
        """Why it ended, or `open`."""
        return (self.events[-1][2] or "open") if self.events else "open"

    @property
    def num_tokens(self) -> int:
        """Tokens of its answer, as far as the trace goes."""
        return sum(token is not None for _, token, _ in self.events)


@dataclass(slots=True)
class ReplayReport:
    """What a replay compared, and every request whose answer differs."""

    endings: Counter[str] = field(default_factory=Counter)  # requests by finish reason, `open` included
    tokens: int = 0
    mismatches: list[str] = field(default_factory=list)

    def render(self) -> str:
        """Two lines or more for a person: the counts, then the verdict."""
        shown = self.mismatches[:MOST_SHOWN]
        kinds = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.endings.items())) or "none"
        counts = f"{self.endings.total():,} requests ({kinds}), {self.tokens:,} tokens"
        if not self.mismatches:
            return f"{counts}\nequal: the reference gives the same tokens and the same endings"
        more = len(self.mismatches) - len(shown)
        rest = [f"... and {more:,} more"] if more else []
        return "\n".join([counts, f"DIFFERENT: {len(self.mismatches):,} requests", *shown, *rest])


def replay_file(path: Path, *, model: str | None) -> int:
    """`nanoserve trace replay`: load the model, replay, print; 1 when an answer differs.

    Raises:
        OSError, TraceError: the file cannot be read, or the model is not the one that was traced.
        ModelError, ValueError: the model cannot be loaded.
    """
    import torch

    from serve.boot import build_engine, round_weights
    from serve.models import load_model

    reader = TraceReader(path)
    told = reader.header["engine"]
    loaded = load_model(model or reader.header["model"])
    if told.get("backend", {}).get("weights") == "float16":
        loaded = round_weights(loaded)  # the traced engine had packed them so
    check_same_config(reader, json.loads(json.dumps(asdict(loaded.config))))
    dtype = getattr(torch, told["dtype"].removeprefix("torch."))
    engine = build_engine(loaded, engine="reference", max_model_len=told["max_model_len"], dtype=dtype)
    report = replay(reader, engine, Guides(loaded.tokenizer))
    print(f"{path}: traced on the {told['name']} engine, replayed on the reference, {loaded.name} in {told['dtype']}")
    if reader.truncated:
        print("note: the last line is cut short and was left out")
    print(report.render())
    return 1 if report.mismatches else 0


def check_same_config(reader: TraceReader, config: dict[str, object]) -> None:
    """Refuse a model of another shape than the traced one, naming the first field that differs.

    Raises:
        TraceError: the two configs differ.
    """
    traced = reader.header["config"]
    for name in sorted(config.keys() | traced.keys()):
        if config.get(name) != traced.get(name):
            fact = f"{name} is {config.get(name)!r}, the traced model has {traced.get(name)!r}"
            raise TraceError(f"{reader.path}: another model: {fact}")


def histories(reader: TraceReader) -> list[History]:
    """Every request of a trace in order of submission. An id that was used again is a request of its own."""
    found: list[History] = []
    open_by_id: dict[str, History] = {}
    for step in reader:
        for request in step.submitted:
            open_by_id[request.id] = history = History(request)
            found.append(history)
        for name, token, reason in step.events:
            open_by_id[name].events.append((step.step, token, reason))
    return found


def replay(reader: TraceReader, engine: Engine, guides: Guides | None = None) -> ReplayReport:
    """Run every request of a trace alone on an idle engine of the same `max_model_len`, and compare.

    Raises:
        TraceError: the file is damaged.
    """
    report = ReplayReport()
    for history in histories(reader):
        report.endings[history.finish_reason] += 1
        report.tokens += history.num_tokens
        mismatch = compare(history, engine, guides)
        if mismatch is not None:
            report.mismatches.append(mismatch)
    return report


def compare(history: History, engine: Engine, guides: Guides | None = None) -> str | None:
    """The first place where one request's answer differs, or None."""
    name = f"request {history.request.id!r}"
    wanted = [event for event in history.events if event[2] != "abort"]
    if not wanted:
        return None
    try:
        engine.submit(guided_again(history.request, guides))
    except ValueError as refusal:
        return f"{name}: the reference refuses it ({refusal})"
    try:
        for index, (step, token, reason) in enumerate(wanted):
            # Alone on the engine, so every event is this request's; and it is open, or the last one had differed.
            (event,) = engine.step()
            place = f"{name}: position {len(history.request.prompt_ids) + index} (answer token {index}, step {step})"
            if token != event.token_id:
                return f"{place}: trace {_said(token)}, reference {_said(event.token_id)}"
            if reason != event.finish_reason:
                return f"{place}: trace {_ended(reason)}, reference {_ended(event.finish_reason)}, both after {token}"
    finally:
        engine.abort(history.request.id)
        while engine.has_work:
            engine.step()
    return None


def guided_again(request: Request, guides: Guides | None) -> Request:
    """The request with its guide made anew.

    Raises:
        ValueError: it has one and it cannot be made.
    """
    if request.guide is None or guides is None:
        return request
    return replace(request, guide=guides.compile(GuideSpec(**request.guide.describe(), field="guide")))


def _said(token: int | None) -> str:
    return "ends without a token" if token is None else f"token {token}"


def _ended(reason: str | None) -> str:
    return "goes on" if reason is None else f"ends with {reason!r}"
