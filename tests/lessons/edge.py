"""Exercises of days 18 to 34: what a step computes, how it is judged, and the server around it. Some ask for a gate."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fast.attention import decode_attention
from fast.chunk import share_budget
from fast.forwards import _late
from fast.gpu_tasks import checked_tasks, plan_tasks
from fast.kernels.linear import from_strips, to_strips
from fast.linear import RowTable
from fast.prefix import PrefixCache
from fast.rows import TokenCounts
from gates.compiled import check_compiles_bounded
from gates.core import GateError
from gates.linear import check_rows_invariant
from gates.stream import check_answers_end_once
from reference.stops import StopMatcher
from reference.tokenizer import ByteTokenizer
from serve.errors import ApiError
from serve.guide import Guides, choice_spec
from serve.live import Picture
from serve.loop import EngineLoop
from serve.timeline import Timeline
from serve.tools import CallParser, ToolUse, _withheld
from serve.trace_show import pool_bar
from tests.harness import tiny_engine
from tests.lessons.lesson import Lesson
from tests.museum import scenes
from tests.museum.scenes import OtherTokens
from tests.pages import runs


def expect(said: object, wanted: object, what: str) -> None:
    """Raise, with both sides, when a function says something else."""
    if said != wanted:
        raise OtherTokens(f"{what} is {said!r}, it should be {wanted!r}")


def fires(gate: Callable[..., None], should: bool, **facts: Any) -> None:
    """A gate speaks when it should, and keeps silent when it should."""
    try:
        gate(**facts)
    except GateError as broken:
        if not should:
            raise OtherTokens(f"the gate fires on a fact that holds: {broken}") from None
    else:
        if should:
            shown = {name: value for name, value in facts.items() if not isinstance(value, torch.Tensor)}
            raise OtherTokens(f"the gate is silent about {shown}")


def padded_up() -> None:
    """Counts map to the smallest stable count that holds them, or to themselves beyond the last."""
    table = RowTable((3, 4, 8), (1, 2))
    expect([table.padded(n) for n in (1, 3, 5, 8, 9)], [3, 3, 8, 8, 9], "rows 1, 3, 5, 8, 9 padded")


def strips() -> None:
    """Rows to strips and back, on and off the strip's size."""
    for rows in (1, 12, 17):
        x = np.arange(rows * 5, dtype=np.float32).reshape(rows, 5)
        expect(from_strips(to_strips(x), rows, 5).tolist(), x.tolist(), f"what comes back of {rows} rows")


def bounded() -> None:
    """Three pieces over two row counts make six compilations, and not one more."""
    fires(check_compiles_bounded, False, compiles=6, pieces=3, row_sizes=(1, 2))
    fires(check_compiles_bounded, True, compiles=7, pieces=3, row_sizes=(1, 2))


def same_bits() -> None:
    """Equality of bits: a zero's sign counts, and a NaN equals itself."""
    nan, zero = torch.tensor([[float("nan")]]), torch.tensor([[0.0]])
    fires(check_rows_invariant, False, wanted=nan, got=nan.clone(), rows=1, computed_rows=1)
    fires(check_rows_invariant, True, wanted=zero, got=-zero, rows=1, computed_rows=1)
    fires(check_rows_invariant, True, wanted=zero + 1, got=zero + 1 + 2**-23, rows=1, computed_rows=1)


def shared() -> None:
    """The run of the page, and some budgets by hand."""
    runs.chunk()
    expect(share_budget([29, 3], 8), [5, 3], "8 tokens for prompts of 29 and 3")
    expect(share_budget([2, 9, 4], 8), [2, 2, 4], "8 tokens for prompts of 2, 9 and 4")


def ends_once() -> None:
    """An event of nobody, and one after the last."""
    fires(check_answers_end_once, False, events=[("a", None), ("b", "stop")], open_ids={"a", "b"})
    fires(check_answers_end_once, True, events=[("c", None)], open_ids={"a"})
    fires(check_answers_end_once, True, events=[("a", "stop"), ("a", None)], open_ids={"a"})


def withheld() -> None:
    """A stop that began and did not come is text, once."""
    matcher = StopMatcher(("###",))
    expect([matcher.push("a##")[0], matcher.flush(), matcher.flush()], ["a", "##", ""], "pieces and flushes")
    expect(matcher.push("#b")[0], "#b", "a piece after a flush")


def too_many() -> None:
    """What can never fit is a 400, what does not fit now is a 429."""
    loop = EngineLoop(None, max_open=4)  # type: ignore[arg-type]
    loop._thread = threading.current_thread()  # one that lives: the engine is up
    loop._reserved = 3
    said = []
    for answers in (1, 2, 5):
        try:
            loop._check_open(answers)
            said.append(200)
        except ApiError as error:
            said.append(error.status)
    expect(said, [200, 429, 400], "the status of 1, 2 and 5 answers beside 3, where 4 may be open")


def started_once() -> None:
    """A preempted request gets a second row and is not queued a second time."""
    timeline = Timeline("a", 3, submitted_s=10.0)
    timeline.start(12.0)
    timeline.start(15.0)
    expect(timeline.queue_s, 2.0, "the time in the queue")


def bars() -> None:
    """A small pool and one with several blocks a cell."""
    expect(pool_bar({0: (0, 3), 10: (1,)}, num_blocks=5), "0a.0.", "a pool of 5 blocks")
    expect(pool_bar({0: (0,), 1: (1,)}, num_blocks=65), "+" + "." * 32, "a pool of 65 blocks")


def choices() -> None:
    """Three strings that no grammar would take as they are."""
    grammar = Guides(ByteTokenizer()).compile(choice_spec(["a b", 'c"d', "|"], field="choice"))
    allowed = grammar.start(vocab_size=259, eos_token_ids=(257,)).allowed()
    expect("".join(map(chr, allowed.ids.nonzero()[0])), "ac|", "what an answer may begin with")


def pieces_of_calls() -> None:
    """A call cut at every character is the call in one piece, and so is the text around it."""
    answer = 'Well. \n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for cut in range(len(answer)):
        parser = CallParser(ToolUse("hermes", frozenset({"f"})))
        said = parser.push(answer[:cut]) + parser.push(answer[cut:]) + parser.finish()
        expect((said, len(parser.calls)), ("Well.", 1), f"text and calls, cut at {cut}")


def picture_is_true() -> None:
    """Rows of several lengths, and the picture's blocks beside the engine's own tables after each step."""
    engine = tiny_engine(max_batch_size=3, num_blocks=16, max_model_len=32, block_size=4)
    picture = Picture(num_blocks=16)
    engine.watch_steps(picture.add)
    for index, answer in enumerate((9, 4, 7)):
        engine.submit(runs.asked(f"r{index}", 5, answer))
    while engine.has_work:
        engine.step()
        held = {row: tuple(engine.cache.tables[row].blocks) for row in engine.scheduler.running}
        expect(picture.frame(engine.stats())["blocks"], held, "what the picture shows of rows and blocks")


def tiles() -> None:
    """Chunks at several places, with heads that share a tile and heads that fill it."""
    chunks = [(4, 9, 0), (0, 1, 13), (7, 5, 14)]
    for group, tile, wanted in ((3, 16, 4), (1, 64, 3), (16, 16, 15)):
        tasks = checked_tasks(chunks, group=group, tile=tile)
        expect(len(tasks), wanted, f"the number of tasks, {group} heads of a token in a tile of {tile} rows,")


LESSONS = (
    Lesson(
        18,
        "attention",
        decode_attention,
        "Read a rectangle of slots so that nothing past a row's length matters, whatever it holds.",
        "a weight of zero times NaN is NaN; and what is the maximum over no keys?",
        scenes.poisoned_rush,
        "buckets.pad_finite",
        cut=("v_pool[slot_mapping].masked_fill_(~readable[:, :, None, None], 0.0)", "v_pool[slot_mapping]"),
    ),
    Lesson(
        19,
        "linear layers",
        RowTable.padded,
        "Map a row count to the smallest stable count that holds it, or to itself when there is none.",
        "`self.sizes` is ascending.",
        padded_up,
        "lockstep",
        draft="return rows",
    ),
    Lesson(
        20,
        "kernels",
        to_strips,
        "Lay rows out as the kernel reads them: strips of up to STRIP rows, each [M][r], one after the other.",
        "a strip is a transposed slice. The last one may be shorter.",
        strips,
        "lockstep",
        draft="return x.reshape(-1)",
    ),
    Lesson(
        21,
        "compiled pieces",
        inspect.unwrap(check_compiles_bounded),
        "Write the gate: at most one compilation for each piece and row count, whatever else there is.",
        "`require(fact, message)` breaks the gate; the message states both sides.",
        bounded,
        "lockstep",
        draft="require(compiles >= 0, f'{compiles} compilations')",
    ),
    Lesson(
        22,
        "schedule invariance",
        inspect.unwrap(check_rows_invariant),
        "Write the gate: every row has the very bits that it has in another batch.",
        "view the numbers as integers of their size. 0.0 and -0.0 are equal and not the same.",
        same_bits,
        "lockstep",
        draft="require(torch.allclose(wanted, got), f'rows differ at {rows} computed as {computed_rows}')",
    ),
    Lesson(
        23,
        "chunked prefill",
        share_budget,
        "Share a budget of tokens: half in order of arrival, half to whoever has the least left, and nothing wasted.",
        "two passes over the prompts in two orders; the second may use what the first left.",
        shared,
        "chunk.shared",
        draft="""
            counts = []
            for tokens in pending:
                counts.append(min(tokens, budget))
                budget -= counts[-1]
            return counts
        """,
    ),
    Lesson(
        24,
        "the prefix cache",
        PrefixCache.match,
        "Find the blocks that hold the longest published prefix of some tokens, as far as they may be taken.",
        "a prompt that is found whole has no logits to choose its next token from.",
        scenes.equal_prompts,
        "prefix.last",
        cut=("(len(tokens) - 1) // self.block_size", "len(tokens) // self.block_size"),
    ),
    Lesson(
        25,
        "lockstep",
        TokenCounts.add,
        "Count one more token of the answer, for the penalties.",
        "a frequency penalty asks how often, not whether.",
        scenes.captured_rush,
        "lockstep",
        draft="self._counts[self._find(token)] = 1.0",
    ),
    Lesson(
        26,
        "the server",
        inspect.unwrap(check_answers_end_once),
        "Write the gate: each event belongs to an open answer, and none follows its last.",
        "events come in the order of the step; remember who has ended on the way.",
        ends_once,
        "lockstep",
        draft="""
            for request_id, _ in events:
                require(request_id in open_ids, f"event for {request_id!r}, which is not open")
        """,
    ),
    Lesson(
        27,
        "the stream",
        StopMatcher.flush,
        "Give the text still withheld when an answer ends without its stop; and begin anew.",
        "the matcher counts the characters of each stop that the text's end matches. What are they after a flush?",
        withheld,
        "lockstep",
        draft='return ""',
    ),
    Lesson(
        28,
        "limits",
        EngineLoop._check_open,
        "Refuse what can never fit with a 400, and what does not fit now with a 429 that says when to come back.",
        "`self.num_open` are open, `self._reserved` are being prepared; first of all the engine has to be up.",
        too_many,
        "lockstep",
        cut=("if num_answers > self._max_open:", "if num_answers < 0:"),
    ),
    Lesson(
        29,
        "metrics",
        Timeline.start,
        "Note that an answer got a row. It may get a second one later.",
        "a preempted request comes back; has it been queued again?",
        started_once,
        "lockstep",
        draft="self.started_s = at_s",
    ),
    Lesson(
        30,
        "the trace",
        pool_bar,
        "Draw a pool as a bar: each cell shows the row that owns its blocks, + for several, a dot for nobody.",
        "rows 10 and up are letters, from SYMBOLS; a large pool has several blocks a cell.",
        bars,
        "lockstep",
        draft="""
            bar = ["."] * num_blocks
            for row, held in blocks.items():
                for block in held:
                    bar[block] = str(row)
            return "".join(bar)
        """,
    ),
    Lesson(
        31,
        "guided answers",
        choice_spec,
        "Make the guide of one of several strings, as a grammar whose start is any of them.",
        "a choice may hold spaces, quotes and bars. In the grammar each is a string with JSON's escapes.",
        choices,
        "ValueError",
        draft='return GuideSpec("lark", "start: " + " | ".join(choices), field)',
    ),
    Lesson(
        32,
        "tool calls",
        _withheld,
        "Count the characters at the end of a text that may belong to a call which has not begun.",
        "the longest end that is a beginning of OPEN, and white space before it.",
        pieces_of_calls,
        "tools.stream_is_whole",
        draft="return 0",
    ),
    Lesson(
        33,
        "the live picture",
        Picture.add,
        "Fold a step's record into the picture that viewers are shown.",
        "a record holds the rows whose blocks changed. Where are the others?",
        picture_is_true,
        "lockstep",
        cut=("{**self._blocks, **record.blocks}", "dict(record.blocks)"),
    ),
    Lesson(
        34,
        "a GPU",
        plan_tasks,
        "Cut a prefill's chunks into the tasks of a GPU kernel, as few as can be, each within one tile and one chunk.",
        "a tile has `tile` rows, and each token takes `group` of them. Even then a tile holds a token.",
        tiles,
        "gpu.tasks_cover",
        draft="""
            tasks, flat = [], 0
            for start, tokens, base in chunks:
                tasks.append((flat, tokens, start, base))
                flat += tokens
            return np.array(tasks, np.int64).reshape(-1, TASK_FIELDS)
        """,
    ),
    Lesson(
        35,
        "overlap",
        _late,
        "Find the last tokens of decoding sequences in the step in flight: places in the new step, lines in that one.",
        "a row may have moved since, and another may have ended: what stays the same from step to step?",
        scenes.launched_ahead,
        "overlap.ids_fed",
        cut=("[lines[decoding[place]] for place in places]", "places"),
    ),
)
