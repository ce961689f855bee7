"""Exercises of days 8 to 17: the scheduler, the addressing of a step, recordings and compaction."""

from __future__ import annotations

from fast.buckets import BucketSet
from fast.capture import CapturedDecode
from fast.compact import is_compact, plan_compaction
from fast.decode import DecodePath
from fast.inputs import DecodeInputs
from fast.plan import _grow
from fast.scheduler import Scheduler
from fast.slots import SlotTable
from fast.warmup import warm_shapes
from gates.warmup import check_arm_replayed_every_step
from tests.lessons.lesson import Lesson
from tests.museum import scenes


def replays_all() -> None:
    """The rush, and every decode step of it replayed."""
    captured = scenes.captured_rush().decode.captured
    assert captured is not None
    check_arm_replayed_every_step(decode_steps=captured.steps, replayed=captured.replays, reasons=dict(captured.eager))


LESSONS = (
    Lesson(
        8,
        "the scheduler",
        Scheduler._preempt,
        "Take a running sequence's row and blocks away and put it where it belongs in the queue.",
        "everybody who waits came after everybody who runs.",
        scenes.tight_pool,
        "scheduler.queue_order",
        draft="""
            self._vacate(sequence)
            sequence.preemptions += 1
            self.preemptions += 1
            self.waiting.append(sequence)
        """,
    ),
    Lesson(
        9,
        "the plan",
        _grow,
        "Count one more token for each row, in its block table and in the slot table, and return the write slots.",
        "`BlockTable.append` returns the slot; the mirror has to hear of it.",
        scenes.eager_rush,
        "plan.addressing",
        draft="return tuple([tables[row].append() for row in rows])",
    ),
    Lesson(
        10,
        "the slot table",
        SlotTable.append,
        "Write one slot a row, each at its row's own next column, all rows or none.",
        "row r, column t is cell r * max_model_len + t of the flat buffer; `self._put(cells, values)` writes them.",
        scenes.eager_rush,
        "plan.addressing",
        draft="""
            column = max(self._lengths[row] for row in rows)
            self._put([row * self.max_model_len + column for row in rows], slots)
            for row in rows:
                self._lengths[row] += 1
            self.appended_cells += len(rows)
        """,
    ),
    Lesson(
        11,
        "buckets",
        BucketSet.bucket_for,
        "Find the smallest shape of the closed set that takes this many rows and this width.",
        "`self._rows_for` maps a count to its size, `self._width_for` rounds a width.",
        replays_all,
        "warmup.arm_replayed_every_step",
        draft="return rows, width",
    ),
    Lesson(
        12,
        "persistent inputs",
        DecodeInputs.write,
        "Write one step's live rows in place. What stands behind them?",
        "a padded row of this step reads and writes what the last, larger step left there.",
        scenes.eager_rush,
        "inputs.tail",
        cut=("        buffer[rows:] = neutral\n", "        if not rows:\n            buffer[:] = neutral\n"),
    ),
    Lesson(
        13,
        "capture",
        CapturedDecode._recording_for,
        "Find the recording that may be replayed for a plan, or say why there is none.",
        "what was recorded over real rows is only right for those rows. Four answers are possible besides it.",
        scenes.lazy_rush,
        "capture.replay_rows",
        draft="""
            recording = self.recordings.get(GraphKey.of(plan))
            if recording is None and self.record_on_miss:
                recording = self.record(plan)
            return recording, "" if recording else "unseen shape"
        """,
    ),
    Lesson(
        14,
        "warm-up",
        warm_shapes,
        "List the shapes to record, trimmed on both axes, in the order in which they should be recorded.",
        "recordings share one pool, which is as large as the largest of them needs.",
        scenes.captured_rush,
        "warmup.biggest_first",
        draft="""
            rows = [r for r in buckets.row_sizes if max_rows is None or r <= max_rows]
            widths = [w for w in buckets.widths if max_width is None or w <= max_width]
            return [(r, w) for r in rows for w in widths]
        """,
    ),
    Lesson(
        15,
        "the wiring",
        DecodePath.run,
        "Plan, check, replay or run, check, and return one line of logits for each row that was asked for.",
        "the forward saw the bucket's rows; whose are the last lines?",
        scenes.eager_rush,
        "ValueError",
        cut=("return logits[: len(plan.rows)]", "return logits"),
    ),
    Lesson(
        16,
        "coverage",
        is_compact,
        "Say whether rows are exactly 0, 1, .. n-1 in this order: whether a window on the table is these rows.",
        "(1, 2) is sorted and has no holes inside, and still no window begins at row 1.",
        replays_all,
        "slots.window",
        draft="return list(rows) == sorted(rows)",
    ),
    Lesson(
        17,
        "compaction",
        plan_compaction,
        "Plan the fewest moves that make the occupied rows a prefix.",
        "there are as many strays as holes. A row that is in place stays there.",
        scenes.captured_rush,
        "compact.moves_minimal",
        draft="return tuple(RowMove(row, i) for i, row in enumerate(sorted(rows)) if row != i)",
    ),
)
