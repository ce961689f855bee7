"""A step trace is whole, true and harmless: it reads back as written, replays equal, and never stops the serving."""

from __future__ import annotations

import errno
import gc
import io
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast.engine import Engine
from fast.record import FULL_EVERY, StepRecord
from gates import GateError
from gates.trace import (
    MIXED,
    check_decode_rows,
    check_dump_agrees,
    check_events_of_open,
    check_lines_follow,
    check_queue_counted,
    check_rows_explained,
    check_step_explained,
)
from reference.request import Event, Request, SamplingParams
from serve.boot import build_engine
from serve.cli import main
from serve.models import TINY_RANDOM, load_model
from serve.options import UsageError
from serve.trace import attach_trace
from serve.trace_read import TraceError, TraceReader, TraceStep, request_of
from serve.trace_replay import replay
from serve.trace_show import Totals, lines, pool_bar, step_lines
from tests.fast_run import FastRun
from tests.harness import SHAPES, TINY, engine_of, tiny_engine, tiny_reference
from tests.strategies import sampling_params, traces
from tests.traces import ARMS, Trace

SIZES = {"max_batch_size": 4, "num_blocks": 20, "block_size": 4, "max_model_len": 48, "width_multiple": 16}
WARM = {"bucket_decode": True, "persist_inputs": True, "capture_decode": True, "compact_rows": True}


def asked(*lengths: int, **params: Any) -> list[Request]:
    """Requests of the given answer lengths, `r0`, `r1` and so on, sampled without a named seed."""
    chosen = {"temperature": 0.7, "ignore_eos": True} | params
    return [Request((7, 11, 13, i), SamplingParams(max_tokens=n, **chosen), f"r{i}") for i, n in enumerate(lengths)]


def warm_engine(**changes: Any) -> Engine:
    engine = tiny_engine(**(SIZES | WARM | changes))
    engine.warm_decode()
    return engine


def traced(path: Path, *lengths: int, engine: Engine | None = None, **params: Any) -> list[StepRecord]:
    """Run requests to their end with a trace in `path`; the records that were written to it."""
    engine = engine or warm_engine()
    records: list[StepRecord] = []
    writer = attach_trace(engine, path, model="tiny", config=TINY)

    def both(record: StepRecord) -> None:
        records.append(record)
        writer.step(record)

    engine.record_steps(both)
    engine.generate(asked(*lengths, **params))
    writer.close()
    return records


def replayed(path: Path, shape: str = "gqa") -> list[str]:
    """The mismatches that a replay of a tiny trace finds."""
    reader = TraceReader(path)
    return replay(reader, tiny_reference(shape, max_model_len=reader.header["engine"]["max_model_len"])).mismatches


def edit(path: Path, number: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the values of one line (1-based) of a trace."""
    text = path.read_text().splitlines()
    values = json.loads(text[number - 1])
    change(values)
    text[number - 1] = json.dumps(values)
    path.write_text("\n".join(text) + "\n")


# ---- holds ------------------------------------------------------------------------------------------------------


def test_a_trace_reads_back_as_the_records_that_were_written(tmp_path: Path):
    records = traced(tmp_path / "t", 4, 8, 16, 32, 4, 8)
    steps = list(TraceReader(tmp_path / "t"))
    assert len(steps) == len(records) > 30
    names = (
        "step",
        "at_us",
        "submitted",
        "admitted",
        "preempted",
        "moves",
        "chunks",
        "decode_rows",
        "bucket",
        "replayed",
    )
    names += ("idle_rows", "reason", "free_blocks", "events", "gate_checks", "gate_failures", "timings_us", "fault")
    rows: dict[int, str] = {}
    for record, step in zip(records, steps, strict=True):
        assert {name: getattr(step, name) for name in names} == {name: getattr(record, name) for name in names}
        rows = dict(record.rows) if record.rows is not None else rows
        assert (step.rows, len(step.queue)) == (rows, record.waiting)
        assert record.dump is None or step.blocks == record.dump
    assert sum(len(step.moves) for step in steps) > 0
    assert all(set(step.timings_us) == {"schedule", "prefill", "decode", "sample", "commit"} for step in steps)


def test_ownership_is_told_by_changes_and_whole_every_so_often(tmp_path: Path):
    records = traced(tmp_path / "t", 70, engine=warm_engine(max_model_len=80, num_blocks=21))
    assert [record.step for record in records if record.dump is not None] == [1, 1 + FULL_EVERY]
    changed = [record for record in records if record.blocks]
    assert len(changed) == -(-(4 + 69) // 4), "one line a block of one growing request"


def test_the_seed_that_the_engine_chose_is_in_the_trace(tmp_path: Path):
    records = traced(tmp_path / "t", 6, 6, temperature=5.0)
    seeds = [request.params.seed for record in records for request in record.submitted]
    assert None not in seeds
    assert seeds[0] != seeds[1]
    assert replayed(tmp_path / "t") == []


@pytest.mark.parametrize(
    ("switches", "reason"),
    [
        ({"capture_decode": False}, "no capture"),
        ({"bucket_decode": False, "persist_inputs": False, "capture_decode": False}, "no capture"),
        ({"compact_rows": False}, "scattered rows"),
    ],
)
def test_each_eager_decode_says_why(tmp_path: Path, switches: dict[str, bool], reason: str):
    engine = tiny_engine(**(SIZES | WARM | switches))
    if engine.decode.captured is not None:
        engine.warm_decode()
    records = traced(tmp_path / "t", 3, 9, 5, engine=engine)
    decodes = [record for record in records if record.decode_rows]
    assert {record.reason for record in decodes if not record.replayed} == {reason}
    assert sum(record.replayed for record in decodes) == engine.stats()["replayed"]
    assert len(decodes) == engine.stats()["decode_steps"]


def test_nobody_listening_no_record_is_made(monkeypatch: pytest.MonkeyPatch):
    def made(*_: Any, **__: Any) -> None:
        raise AssertionError("a record was made")

    monkeypatch.setattr("fast.record.StepRecord", made)
    monkeypatch.setattr("fast.record._gate_counts", made)
    engine = warm_engine()
    engine.generate(asked(4, 4))
    with pytest.raises(AssertionError, match="a record was made"):
        engine.record_steps(lambda record: None)
    engine.record_steps(None)
    engine.generate(asked(4, 4))


def test_a_step_that_breaks_a_gate_is_the_last_line_and_keeps_its_fault(tmp_path: Path, capsys):
    path, engine = tmp_path / "t", warm_engine()
    attach_trace(engine, path, model="tiny", config=TINY)
    for request in asked(8, 8):
        engine.submit(request)
    engine.step()
    engine.submit(Request((5,), SamplingParams(max_tokens=2), "late"))
    engine.cache.tables[1].blocks = list(engine.cache.tables[0].blocks)
    with pytest.raises(GateError, match="gate blocks.owned_once"):
        engine.step()
    last = list(TraceReader(path))[-1]
    assert "gate blocks.owned_once" in (last.fault or "")
    assert [request.id for request in last.submitted] == ["late"], "what came in before the fault is not lost"
    assert last.gate_failures == {"blocks.owned_once": 1}
    assert replayed(path) == []
    assert main(["trace", "show", str(path), "--steps", "2"]) == 0
    assert "FAULT     GateError: gate blocks.owned_once" in capsys.readouterr().out


def test_an_engine_that_goes_takes_its_file_with_it(tmp_path: Path):
    engine = warm_engine()
    file = attach_trace(engine, tmp_path / "t", model="tiny", config=TINY)._file
    del engine
    gc.collect()
    assert file.closed


# ---- a disk that is full ----------------------------------------------------------------------------------------


class FullDisk(io.BytesIO):
    """A file that takes `room` bytes, half a line if need be, and then no more."""

    room = 3000

    def write(self, data: Any) -> int:
        fits = bytes(data)[: max(0, self.room - self.tell())]
        super().write(fits)
        if len(fits) < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(fits)

    def close(self) -> None:
        """Keep what was written, for the test to read."""


def test_a_full_disk_ends_the_trace_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    disk = FullDisk()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda *_, **__: disk)
        engine = warm_engine()
        writer = attach_trace(engine, tmp_path / "t", model="tiny", config=TINY)
    with caplog.at_level(logging.WARNING):
        answers = engine.generate(asked(4, 8, 16, seed=3))
    assert [len(answer.token_ids) for answer in answers] == [4, 8, 16]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert f"tracing stopped after {writer.lines} lines ([Errno 28] No space left on device)" in warnings[0]
    assert writer.failures == 1
    assert engine.listeners.recorder is None, "and recording costs nothing any more"
    (tmp_path / "kept").write_bytes(disk.getvalue())
    reader = TraceReader(tmp_path / "kept")
    assert len(list(reader)) == writer.lines - 1
    assert reader.truncated
    assert replayed(tmp_path / "kept") == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full; Linux has it")
def test_a_disk_that_is_full_from_the_start_is_no_reason_not_to_serve(caplog: pytest.LogCaptureFixture):
    engine = warm_engine()
    writer = attach_trace(engine, Path("/dev/full"), model="tiny", config=TINY)
    assert (writer.lines, writer.failures) == (0, 1)
    assert [len(answer.token_ids) for answer in engine.generate(asked(3))] == [3]
    assert len(caplog.records) == 1


# ---- replay -----------------------------------------------------------------------------------------------------


def first_decode(path: Path) -> int:
    """Line number of the first step with a decode (the header is line 1)."""
    return next(number for number, step in enumerate(TraceReader(path), start=2) if step.decode_rows)


def test_a_changed_token_is_found_with_its_request_position_and_both_tokens(tmp_path: Path):
    path = tmp_path / "t"
    traced(path, 4, 8)
    number = first_decode(path)
    true = json.loads(path.read_text().splitlines()[number - 1])["events"][1][1]
    edit(path, number, lambda line: line["events"][1].__setitem__(1, (true + 1) % 61))
    place = "request 'r1': position 5 (answer token 1, step 2)"
    assert replayed(path) == [f"{place}: trace token {(true + 1) % 61}, reference token {true}"]


def test_a_changed_ending_is_found(tmp_path: Path):
    path = tmp_path / "t"
    traced(path, 3)
    edit(path, 4, lambda line: line["events"][0].__setitem__(2, "stop"))
    (mismatch,) = replayed(path)
    assert "position 6 (answer token 2, step 3): trace ends with 'stop', reference ends with 'length'" in mismatch


def test_a_request_is_replayed_as_far_as_the_trace_goes(tmp_path: Path):
    path, engine = tmp_path / "t", warm_engine(max_batch_size=2)
    writer = attach_trace(engine, path, model="tiny", config=TINY)
    for request in asked(9, 9, 9, 9):
        engine.submit(request)
    for _ in range(3):
        engine.step()
    engine.abort("r1")
    engine.abort("r3")
    engine.step()
    writer.close()
    reader = TraceReader(path)
    report = replay(reader, tiny_reference(max_model_len=48))
    assert (report.mismatches, dict(report.endings)) == ([], {"open": 2, "abort": 2})
    assert report.tokens == 3 + 3 + 1 + 1, "r0 goes on, r1 has three, r2 was admitted in its place"


def tiny_random_trace(path: Path) -> None:
    loaded = load_model(TINY_RANDOM)
    switches = dict.fromkeys(WARM, True)
    engine = build_engine(loaded, max_batch_size=4, max_model_len=64, kv_cache_bytes=2**20, **switches)
    attach_trace(engine, path, model=TINY_RANDOM, config=loaded.config)
    engine.generate(asked(6, 12, 3, seed=11))


def test_the_command_replays_a_trace_with_the_model_it_names(tmp_path: Path, capsys):
    path = tmp_path / "t"
    tiny_random_trace(path)
    assert main(["trace", "replay", str(path)]) == 0
    assert "3 requests (3 length), 21 tokens\nequal:" in capsys.readouterr().out
    edit(path, first_decode(path), lambda line: line["events"][0].__setitem__(1, 0))
    assert main(["trace", "replay", str(path)]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT: 1 requests\nrequest 'r0': position 5 (answer token 1, step 2): trace token 0, reference" in out


def test_a_model_of_another_shape_is_refused_by_its_field(tmp_path: Path, capsys):
    tiny_random_trace(tmp_path / "t")
    edit(tmp_path / "t", 1, lambda line: line["config"].__setitem__("num_layers", 3))
    assert main(["trace", "replay", str(tmp_path / "t")]) == 1
    assert "another model: num_layers is 2, the traced model has 3" in capsys.readouterr().err


# ---- show -------------------------------------------------------------------------------------------------------


def blocks_of(text: list[str]) -> dict[str, dict[str, str]]:
    """`{title: {label: text}}` of what `show` prints."""
    found: dict[str, dict[str, str]] = {}
    for line in text:
        if line.startswith("  "):
            found[list(found)[-1]][line[2:12].strip()] = line[12:]
        elif line:
            found[line.split("  ")[0]] = {}
    return found


def test_show_tells_every_step_and_the_totals(tmp_path: Path):
    path, engine = tmp_path / "t", warm_engine()
    traced(path, 4, 8, 16, 32, 4, 8, engine=engine)
    shown, stats = blocks_of(list(lines(TraceReader(path)))), engine.stats()
    steps = {f"step {step.step}": step for step in TraceReader(path)}
    assert set(steps) < set(shown)
    for title, step in steps.items():
        told = shown[title]
        assert told["rows"] == " | ".join(f"{row} {name}" for row, name in sorted(step.rows.items()))
        assert told.get("queue", "") == " | ".join(step.queue)
        assert told.get("moved", "") == " | ".join(f"row {src} -> {dst}" for src, dst in step.moves)
        assert len(told["events"].split(" | ")) == len(step.events)
        assert ("replayed" in told.get("decode", "")) == step.replayed
    assert shown["step 1"]["admitted"].startswith("row 0 <- r0 (4 tokens) | row 1 <- r1 (4 tokens)")
    assert shown["step 1"]["pool"] == "[0123................] 4 of 20 blocks, 16 free"
    assert shown["step 2"]["decode"] == "4 rows, bucket 4 x 16, replayed"
    totals = shown["totals"]
    assert totals["steps"] == f"{stats['steps']}, {stats['decode_steps']} with a decode, 0 mixed"
    assert totals["decode"] == f"{stats['replayed']} replayed"
    assert totals["requests"] == "6 submitted, 6 length, 0 open"
    assert totals["tokens"] == f"72 emitted, {stats['prefill_tokens']} prefilled"
    assert totals["rows"] == f"{stats['moves']} moves, 0 preemptions"


def test_a_step_of_chunks_and_decoding_rows_in_one_forward_is_shown_as_that_and_is_no_decode_step(tmp_path: Path):
    engine = warm_engine(chunk_tokens=4)
    engine.mixed_steps = True
    writer = attach_trace(engine, tmp_path / "t", model="tiny", config=TINY)
    engine.submit(asked(9)[0])
    engine.step()
    engine.submit(Request((5,) * 8, SamplingParams(max_tokens=2, seed=1, ignore_eos=True), "long"))
    while engine.has_work:
        engine.step()
    writer.close()
    steps = list(TraceReader(tmp_path / "t"))
    mixed = [step.step for step in steps if step.mixed]
    assert mixed == [2, 3, 4], "three, three and two tokens of the long prompt, beside one row"
    shown = blocks_of(list(lines(TraceReader(tmp_path / "t"))))
    assert [shown[f"step {at}"]["decode"] for at in mixed] == ["1 rows, in one forward with the prefill"] * 3
    stats = engine.stats()
    assert shown["totals"]["steps"] == f"{stats['steps']}, {stats['decode_steps']} with a decode, 3 mixed"
    assert shown["totals"]["decode"] == f"{stats['replayed']} replayed"
    assert replayed(tmp_path / "t") == []


def test_the_queue_is_told_in_the_order_of_the_line(tmp_path: Path):
    engine = warm_engine(max_batch_size=1)
    engine.scheduler.due_after = 4
    writer = attach_trace(engine, tmp_path / "t", model="tiny", config=TINY)
    for request, priority in zip(asked(*[3] * 7), (0, 9, 0, -5, 1, -9, 0), strict=True):
        engine.submit(replace(request, priority=priority))
    engine.step()
    writer.close()
    (step,) = TraceReader(tmp_path / "t")
    assert step.queue == ("r1", "r2", "r5", "r3", "r6", "r4")
    assert list(step.queue) == [one.request.id for one in engine.scheduler.waiting]


def test_show_prints_the_steps_asked_for_and_totals_of_all(tmp_path: Path, capsys):
    traced(tmp_path / "t", 9)
    assert main(["trace", "show", str(tmp_path / "t"), "--steps", "3-4"]) == 0
    shown = blocks_of(capsys.readouterr().out.splitlines())
    assert [title for title in shown if title.startswith("step")] == ["step 3", "step 4"]
    assert shown["totals"]["tokens"] == "9 emitted, 4 prefilled"


@pytest.mark.parametrize("text", ["", "4-3", "a", "1-2-3", "-1"])
def test_a_bad_range_is_refused(text: str, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["trace", "show", "t", f"--steps={text}"])
    assert stopped.value.code == 2
    assert f"{text!r} is not a range of steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("blocks", "num_blocks", "bar"),
    [
        ({}, 1, "."),
        ({0: (0, 2), 1: (1,)}, 4, "010."),
        ({10: (3,), 36: (2,), 62: (0,)}, 4, "#.Aa"),
        ({0: (0, 1), 1: (2,), 2: (3,)}, 65, "0+" + "." * 31),
        ({0: (128,)}, 129, "." * 42 + "0"),
    ],
)
def test_the_bar_shows_who_owns_the_pool(blocks: dict[int, tuple[int, ...]], num_blocks: int, bar: str):
    assert pool_bar(blocks, num_blocks=num_blocks) == bar


def test_an_id_cannot_command_the_terminal(tmp_path: Path):
    path, engine = tmp_path / "t", warm_engine()
    writer = attach_trace(engine, path, model="\x1b[2J", config=TINY)
    engine.generate([Request((5,), SamplingParams(max_tokens=2), name) for name in ("\x1b[31m", "\ud800", "a b\n")])
    writer.close()
    text = "\n".join(lines(TraceReader(path)))
    assert text.replace("\n", "").isprintable()
    assert r"'\x1b[31m' (1 tokens) | '\ud800' (1 tokens) | 'a b\n'" in text


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_a_last_line_cut_short_is_noted_and_left_out(tmp_path: Path, capsys):
    path = tmp_path / "t"
    records = traced(path, 6)
    path.write_bytes(path.read_bytes()[:-20])
    reader = TraceReader(path)
    assert len(list(reader)) == len(records) - 1
    assert reader.truncated
    assert replayed(path) == []
    assert main(["trace", "show", str(path)]) == 0
    assert "note: the last line is cut short" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda text: [*text[:3], text[3][:40], *text[4:]], "line 4 is damaged: "),
        (lambda text: [*text[:3], "[1]", *text[4:]], "line 4 is damaged: it holds no object"),
        (lambda text: [*text[:3], "{}", *text[4:]], "line 4 is damaged: field 'step' is missing"),
        (lambda text: [*text[:3], text[3].replace('"events":[[', '"events":[[7,'), *text[4:]], "line 4 is damaged: "),
        (lambda text: text[:3] + text[4:], "line 4: gate trace.lines_follow: step 4 follows step 2"),
        (lambda text: text[1:], "line 1: no trace"),
        (lambda text: [text[0].replace('"format":2', '"format":1'), *text[1:]], "a trace of format 1, this version"),
        (lambda text: [""], "line 1"),
    ],
    ids=["cut", "list", "empty", "event", "lost line", "no header", "format", "empty file"],
)
def test_a_damaged_line_is_refused_by_its_number(tmp_path: Path, change: Callable[[list[str]], list[str]], fact: str):
    path = tmp_path / "t"
    traced(path, 6)
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    with pytest.raises(TraceError) as caught:
        list(TraceReader(path))
    assert fact in str(caught.value)
    assert main(["trace", "show", str(path)]) == 1


def test_a_file_that_cannot_be_opened_is_a_bad_argument(tmp_path: Path):
    with pytest.raises(UsageError, match="--trace: .*No such file"):
        attach_trace(warm_engine(), tmp_path / "none" / "t", model="tiny", config=TINY)


def test_the_reference_engine_has_no_steps_to_tell(tmp_path: Path):
    with pytest.raises(UsageError, match="use --engine fast"):
        attach_trace(tiny_reference(), tmp_path / "t", model="tiny", config=TINY)


def test_records_do_not_begin_in_the_middle_of_a_request():
    engine = warm_engine()
    engine.submit(asked(3)[0])
    with pytest.raises(ValueError, match="on_step: 1 requests are open"):
        engine.record_steps(lambda record: None)


# Each fault is made in the first line of a real trace that has the field named; the gate that refuses it is beside it.
FAULTS: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "replayed without a reason not to": (
        "decode_rows",
        lambda line: line.update(replayed=False),
        "trace.step_explained",
    ),
    "bucket below its rows": ("decode_rows", lambda line: line.update(bucket=[2, 16]), "trace.step_explained"),
    "row renamed": ("rows", lambda line: line["rows"].update({"1": "r0"}), "trace.rows_explained"),
    "move untold": ("moves", lambda line: line.pop("moves"), "trace.rows_explained"),
    "row that computes nothing": ("decode_rows", lambda line: line["decode_rows"].pop(), "trace.decode_rows"),
    "event of a stranger": (
        "decode_rows",
        lambda line: line["events"][0].__setitem__(0, "who"),
        "trace.events_of_open",
    ),
    "event after the end": ("moves", lambda line: line["events"].append(["r0", 3, None]), "trace.events_of_open"),
    "queue miscounted": ("rows", lambda line: line.update(waiting=1), "trace.queue_counted"),
    "dump differs": ("dump", lambda line: line["dump"].update({"1": [9]}), "trace.dump_agrees"),
    "block of two rows": ("decode_rows", lambda line: line["blocks"].update({"1": [0, 5]}), "blocks.owned_once"),
    "block lost": ("decode_rows", lambda line: line.update(free_blocks=line["free_blocks"] - 1), "blocks.conserved"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_reader_refuses_a_line_that_tells_another_story(tmp_path: Path, fault: str):
    field, change, name = FAULTS[fault]
    path = tmp_path / "t"
    traced(path, 4, 8, 16, 32, 4, 8)
    number = next(
        n for n, line in enumerate(path.read_text().splitlines(), start=1) if n > 1 and field in json.loads(line)
    )
    edit(path, number, change)
    with pytest.raises(TraceError, match=f"line {number}: gate {name}"):
        list(TraceReader(path))


@pytest.mark.parametrize(
    ("decode_rows", "bucket", "replayed", "reason"),
    [
        ((0, 1), (2, 16), False, ""),
        ((0, 1), (2, 16), True, "unseen shape"),
        ((0, 1), None, True, ""),
        ((0, 1, 2), (2, 16), True, ""),
        ((0, 1), (2, 16), False, MIXED),
        ((), None, True, ""),
        ((), None, False, "no capture"),
    ],
)
def test_gate_rejects_an_unexplained_step(decode_rows, bucket, replayed, reason):
    with pytest.raises(GateError, match="gate trace.step_explained"):
        check_step_explained(decode_rows=decode_rows, bucket=bucket, replayed=replayed, reason=reason)


def test_gate_rejects_a_lost_line():
    check_lines_follow(previous=None, step=9)
    with pytest.raises(GateError, match="step 11 follows step 9"):
        check_lines_follow(previous=9, step=11)


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"after": {0: "b", 1: "a"}}, "row 0 holds 'b', the trace's moves and admissions leave 'a' there"),
        ({"after": {0: "a"}}, "row 1 holds None, .* leave 'b' there"),
        ({"moves": [(3, 2)]}, "row 3 moved to 2, row 3 is empty"),
        ({"moves": [(1, 0)]}, "row 1 moved to 0, row 0 holds 'a'"),
        ({"admitted": [(1, "c")]}, "'c' admitted to row 1, it holds 'b'"),
        ({"gone": {"a"}}, "row 0 holds 'a', .* leave None there"),
    ],
)
def test_gate_rejects_a_row_that_changed_hands_untold(changes: dict[str, Any], fact: str):
    told: dict[str, Any] = {"before": {0: "a", 1: "b"}, "gone": set(), "moves": [], "admitted": []}
    told["after"] = {0: "a", 1: "b"}
    check_rows_explained(**told)
    with pytest.raises(GateError, match=fact):
        check_rows_explained(**(told | changes))


def test_gate_rejects_a_queue_of_another_length():
    with pytest.raises(GateError, match="2 requests wait by the trace's lines, 1 in the engine"):
        check_queue_counted(queue=("a", "b"), waiting=1)


def test_gate_rejects_a_row_that_computes_twice_or_not_at_all():
    with pytest.raises(GateError, match="prefilled and decodes"):
        check_decode_rows(decode_rows=(0, 1), chunk_rows=(1,), idle_rows=(), rows={0, 1})
    with pytest.raises(GateError, match=r"rows \[0\] compute, rows \[\] are idle, rows \[0, 1\] are in use"):
        check_decode_rows(decode_rows=(0,), chunk_rows=(), idle_rows=(), rows={0, 1})
    with pytest.raises(GateError, match=r"row \[1\] computes and is told to be idle"):
        check_decode_rows(decode_rows=(0,), chunk_rows=(1,), idle_rows=(1,), rows={0, 1})
    check_decode_rows(decode_rows=(0,), chunk_rows=(1,), idle_rows=(2,), rows={0, 1, 2})


@pytest.mark.parametrize(
    ("events", "fact"),
    [
        ([("b", None)], "request 'b' has an event, 1 others are open"),
        ([("a", "stop"), ("a", None)], "request 'a' has an event after its end"),
        ([("a", "stop"), ("a", "length")], "request 'a' has an event after its end"),
    ],
)
def test_gate_rejects_an_event_of_a_request_that_is_not_open(events, fact: str):
    with pytest.raises(GateError, match=fact):
        check_events_of_open(open_ids={"a"}, events=events)


@pytest.mark.parametrize("dumped", [{0: (1, 3)}, {}, {0: (1, 2), 1: (3,)}])
def test_gate_rejects_a_dump_that_differs_from_the_changes(dumped: dict[int, tuple[int, ...]]):
    with pytest.raises(GateError, match="gate trace.dump_agrees"):
        check_dump_agrees(rebuilt={0: (1, 2)}, dumped=dumped)


# ---- any order --------------------------------------------------------------------------------------------------


def run_traced(trace: Trace, path: Path) -> tuple[FastRun, list[tuple[str, ...]]]:
    """A lockstep trace taken through the fast engine with a step trace in `path`, and who waited after each step."""
    queues: list[tuple[str, ...]] = []
    engine = engine_of(trace)
    writer = attach_trace(engine, path, model="tiny", config=SHAPES[trace.shape])
    run = FastRun(trace, engine)
    step_once = engine.step

    def watched() -> list[Event]:
        events = step_once()
        queues.append(tuple(one.request.id for one in engine.scheduler.waiting))
        return events

    engine.step = watched
    while run.steps <= trace.last_step:
        for arrival in trace.arrivals:
            if arrival.step == run.steps:
                run.submit(arrival.request)
        for step, name in trace.aborts:
            if step == run.steps:
                run.abort(name)
        run.step()
    run.drain()
    writer.close()
    return run, queues


@pytest.mark.differential
@given(data=st.data())
def test_any_run_is_told_whole_and_replays_equal(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory):
    trace = data.draw(traces(dtype="float64"))
    path = tmp_path_factory.mktemp("traces") / "t"
    run, queues = run_traced(trace, path)
    steps: list[TraceStep] = list(TraceReader(path))
    assert [step.step for step in steps] == list(range(1, run.steps + 1))
    assert [step.queue for step in steps] == queues
    told: dict[str, list[int]] = {}
    for step in steps:
        told |= {request.id: [] for request in step.submitted}
        for name, token, _ in step.events:
            told[name] += [] if token is None else [token]
    assert told == {name: completion.token_ids for name, completion in run.completions.items()}
    totals = Totals(num_blocks=trace.num_blocks)
    for step in steps:
        totals.add(step)
        step_lines(step, num_blocks=trace.num_blocks)
    stats = run.engine.stats()
    assert (totals.decode_steps, totals.replayed) == (stats["decode_steps"], stats["replayed"])
    assert (totals.moves, totals.preemptions) == (stats["moves"], stats["preemptions"])
    assert totals.prefilled == stats["prefill_tokens"]
    assert set(totals.eager) <= ARMS[trace.arm].eager | {"scattered rows"}
    assert replayed(path, trace.shape) == []


@given(params=sampling_params(), name=st.text(), prompt=st.lists(st.integers(0, 2**40), min_size=1))
def test_any_request_survives_json(params: SamplingParams, name: str, prompt: list[int]):
    request = Request(tuple(prompt), params, name)
    record = StepRecord(1, submitted=(request,))
    (values,) = json.loads(json.dumps(record.as_dict()))["submitted"]
    assert asdict_of(request_of(values)) == asdict_of(request)


def asdict_of(request: Request) -> dict[str, Any]:
    """Every field of a request, the read-only mapping as a dict."""
    params = {name: getattr(request.params, name) for name in SamplingParams.__dataclass_fields__}
    return {"id": request.id, "prompt_ids": request.prompt_ids, **params, "logit_bias": dict(params["logit_bias"])}


def test_the_header_holds_the_whole_config(tmp_path: Path):
    traced(tmp_path / "t", 2)
    assert TraceReader(tmp_path / "t").header["config"] == json.loads(json.dumps(asdict(TINY)))


def test_a_traced_command_replays_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from serve.cli import main

    path = tmp_path / "steps.jsonl"
    ask = ["generate", "--model", "tiny-random", "--prompt", "hi", "--max-tokens", "9", "--seed", "4", "--json"]
    assert main([*ask, "--trace", str(path)]) == 0
    assert main(["trace", "replay", str(path)]) == 0
    assert main(["trace", "show", str(path)]) == 0
    assert main([*ask, "--engine", "reference", "--trace", str(path)]) == 2
    assert "the reference engine keeps no record of its steps" in capsys.readouterr().err


@pytest.mark.model
def test_a_trace_of_the_real_model_replays_in_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from serve.cli import main

    path = tmp_path / "steps.jsonl"
    ask = ["generate", "--model", "smollm2-135m-instruct", "--prompt", "Once", "--max-tokens", "12", "--json"]
    assert main([*ask, "--seed", "7", "--max-model-len", "128", "--trace", str(path)]) == 0
    assert main(["trace", "replay", str(path)]) == 0
    assert "12 tokens" in capsys.readouterr().out
